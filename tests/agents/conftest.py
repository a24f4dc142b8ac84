"""A real object store in a folder for each test, and an agent's file to begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncIterator[ObjectStore]:
    store = await open_objects(f"file://{tmp_path / 'objects'}")
    yield store
    await store.close()

"""A registry of its own for every test."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.artifacts.desk import Desk, desk_in


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncGenerator[Desk]:
    async with desk_in(tmp_path) as made:
        yield made

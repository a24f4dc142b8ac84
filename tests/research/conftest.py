"""The job queue over one instance for each test."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.gateway import conftest as gateways
from tests.research.rig import Rig, rigged

planted = gateways.planted


@pytest.fixture
async def rig(planted: Path, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rigged(planted, tmp_path / "instance") as made:
        yield made

"""Fixtures of the tests of what only the layer on Temporal has."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.layers.temporal import TemporalRig, on_temporal
from tests.servers.temporal import TemporalServer


@pytest.fixture
async def rig(temporal_server: TemporalServer, tmp_path: Path) -> AsyncGenerator[TemporalRig]:
    """The layer on the server that the tests share, with nothing in it."""
    async with on_temporal(tmp_path, temporal_server) as made:
        yield made

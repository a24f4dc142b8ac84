"""The layers that the tests of this folder are run on. A new one adds its rig here, and nothing else."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.layers.builtin import BuiltinRig, on_postgres, on_sqlite
from tests.layers.rig import Rig
from tests.layers.temporal import KilledServerRig, on_temporal
from tests.servers.temporal import TemporalServer, running_temporal


@pytest.fixture(scope="session")
def killed_server() -> Iterator[TemporalServer]:
    """A Temporal server that tests kill and start again. It keeps its data."""
    with running_temporal(keeps_data=True) as server:
        yield server


def builtin(request: pytest.FixtureRequest, folder: Path) -> AbstractAsyncContextManager[Rig]:
    return on_sqlite(folder, BuiltinRig)


def builtin_on_postgres(request: pytest.FixtureRequest, folder: Path) -> AbstractAsyncContextManager[Rig]:
    return on_postgres(folder, request.getfixturevalue("postgres_url"))


def temporal(request: pytest.FixtureRequest, folder: Path) -> AbstractAsyncContextManager[Rig]:
    return on_temporal(folder, request.getfixturevalue("temporal_server"))


def temporal_killed(request: pytest.FixtureRequest, folder: Path) -> AbstractAsyncContextManager[Rig]:
    return on_temporal(folder, request.getfixturevalue("killed_server"), KilledServerRig)


LAYERS: dict[str, Callable[[pytest.FixtureRequest, Path], AbstractAsyncContextManager[Rig]]] = {
    "builtin": builtin,
    "builtin-postgres": builtin_on_postgres,
    "temporal": temporal,
    "temporal-killed": temporal_killed,
}


@pytest.fixture(params=[name if name == "builtin" else pytest.param(name, marks=pytest.mark.prove) for name in LAYERS])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[Rig]:
    """One layer, not opened yet. Its servers are started outside of the test's event loop."""
    return LAYERS[request.param](request, tmp_path)


@pytest.fixture
async def rig(layer: AbstractAsyncContextManager[Rig]) -> AsyncGenerator[Rig]:
    """One layer, with nothing in it."""
    async with layer as made:
        yield made

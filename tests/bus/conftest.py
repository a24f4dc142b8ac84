"""The `rig` of every test of the bus: on SQLite, and with `@pytest.mark.on_both` on PostgreSQL too."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.bus.rig import Rig, rigged
from tests.servers.postgres import PostgresServer
from trellis.bus.scheduling.dispatch_policy import SchedulerOptions
from trellis.bus.topics import Topics

Opens = Callable[..., AbstractAsyncContextManager[Rig]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_both: runs on both kinds of ledger")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bus_server" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("on_both")
        metafunc.parametrize("bus_server", ["sqlite", "postgres"] if both else ["sqlite"], indirect=True)


@pytest.fixture
def bus_server(request: pytest.FixtureRequest) -> PostgresServer | None:
    """The server that the ledger needs. Not async: starting one runs an event loop of its own."""
    return request.getfixturevalue("clocked_postgres") if request.param == "postgres" else None


@pytest.fixture
async def rig(bus_server: PostgresServer | None, tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig whose topics are all as by default."""
    async with rigged(Topics(), tmp_path, bus_server) as made:
        yield made


@pytest.fixture
def rig_of(bus_server: PostgresServer | None, tmp_path: Path) -> Opens:
    """Opens a rig whose topics the test says, as `bus.toml` would."""

    def opens(options: SchedulerOptions | None = None, **said: Any) -> AbstractAsyncContextManager[Rig]:
        return rigged(Topics.model_validate(said), tmp_path, bus_server, options)

    return opens

"""The `rig` of every test of the bus: on SQLite, and with `@pytest.mark.on_both` on PostgreSQL too."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a rig share one event loop, because connections to a server are kept from one to the next."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and "bus_server" in call.params and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture
def bus_server(request: pytest.FixtureRequest) -> PostgresServer | None:
    """The server that the ledger needs. Not async: starting one runs an event loop of its own."""
    if request.param == "sqlite":
        return None
    server = request.getfixturevalue("clocked_postgres")
    request.getfixturevalue("warm_connections")
    return server


@pytest_asyncio.fixture(loop_scope="session")
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

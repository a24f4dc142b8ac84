"""The `rig`: every test that asks for it runs on every kind of ledger, and its ledger must verify afterwards.

PostgreSQL runs as in production: the schema belongs to the superuser and the ledger connects as a login role that is
only a member of the application role. Its clock is settable because the test template reads it from a table.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.ledgers.conformance.opening import postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import Rig
from tests.servers.postgres import PostgresBinaries, PostgresServer, available_servers, running_postgres
from tests.servers.templates import IN_A_HURRY, TEMPLATES
from tests.servers.warm_connections import WarmConnections

KINDS = ("sqlite", "postgres")
OLDEST = 15


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "oldest_server: the long proofs also run it on the oldest supported PostgreSQL, where the system has one",
    )
    config.addinivalue_line("markers", "only(kind): runs on this kind of ledger alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig_server" not in metafunc.fixturenames:
        return
    only = metafunc.definition.get_closest_marker("only")
    kinds: list[Any] = list(only.args if only else KINDS)
    if metafunc.definition.get_closest_marker("oldest_server") and _oldest() is not None:
        kinds.append(pytest.param(f"postgres{OLDEST}", marks=pytest.mark.prove))
    metafunc.parametrize("rig_server", kinds, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a rig share one event loop, because connections to a server are kept from one to the next."""
    for item in items:
        if "rig_server" in getattr(item, "fixturenames", ()) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture
def rig_server(request: pytest.FixtureRequest) -> tuple[str, PostgresServer | None]:
    """The kind of ledger, and the server it needs. Not async: starting one runs an event loop of its own."""
    fixtures = {"sqlite": None, "postgres": "clocked_postgres", f"postgres{OLDEST}": "clocked_oldest_postgres"}
    fixture = fixtures[request.param]
    return request.param, request.getfixturevalue(fixture) if fixture else None


@pytest_asyncio.fixture(loop_scope="session")
async def rig(
    rig_server: tuple[str, PostgresServer | None], warm_connections: WarmConnections, tmp_path: Path
) -> AsyncIterator[Rig]:
    """One fresh ledger; after the test every history in it must replay."""
    kind, server = rig_server
    async with postgres_rig(server, kind) if server else sqlite_rig(tmp_path / "ledger.db") as opened:
        yield opened
        report = await opened.verify()
        assert report.ok, "\n".join(map(str, report.violations[:20]))


@pytest.fixture(scope="session")
def clocked_oldest_postgres() -> Iterator[PostgresServer]:
    """The oldest supported version, from the system's own binaries."""
    binaries = _oldest()
    assert binaries is not None
    with running_postgres(binaries.bin_dir, TEMPLATES, **IN_A_HURRY) as server:
        yield server


def _oldest() -> PostgresBinaries | None:
    return next((one for one in available_servers() if one.version == OLDEST and not one.from_wheel), None)

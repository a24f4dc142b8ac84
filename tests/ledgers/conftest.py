"""The `rig`: every test that asks for it runs on every kind of ledger, and its ledger must verify afterwards.

PostgreSQL runs as in production: the schema belongs to the superuser and the ledger connects as a login role that is
only a member of the application role. Its clock is settable because the test template reads it from a table.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.ledgers.conformance.opening import CLOCKED_TEMPLATE, LOGIN, postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import Rig
from tests.servers.postgres import PostgresBinaries, PostgresServer, available_servers, running_postgres
from tests.servers.warm_connections import WarmConnections, keeping_connections

KINDS = ("sqlite", "postgres")
OLDEST = 15
FRESH = Path(__file__).parent / "conformance" / "fresh.sql"
# Hundreds of databases are made and dropped here, and none outlives its server: what a crash leaves is tested elsewhere.
IN_A_HURRY = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": 500}


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


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def warm_connections() -> AsyncIterator[WarmConnections]:
    async with keeping_connections() as warm:
        yield warm


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
def clocked_postgres() -> Iterator[PostgresServer]:
    """The wheel's server with a migrated template whose clock the tests set."""
    with running_postgres(**IN_A_HURRY) as server:
        yield _prepare(server)


@pytest.fixture(scope="session")
def clocked_oldest_postgres() -> Iterator[PostgresServer]:
    """The oldest supported version, from the system's own binaries."""
    binaries = _oldest()
    assert binaries is not None
    with running_postgres(binaries.bin_dir, **IN_A_HURRY) as server:
        yield _prepare(server)


def _prepare(server: PostgresServer) -> PostgresServer:
    from trellis.ledgers.postgres.migrate import migrate

    url = server.create_database(CLOCKED_TEMPLATE)
    asyncio.run(migrate(url, clock="test"))
    server.sql(FRESH.read_text(), CLOCKED_TEMPLATE)
    server.sql(f"CREATE ROLE {LOGIN} LOGIN IN ROLE trellis_app")
    server.seal_template(CLOCKED_TEMPLATE)
    return server


def _oldest() -> PostgresBinaries | None:
    return next((one for one in available_servers() if one.version == OLDEST and not one.from_wheel), None)

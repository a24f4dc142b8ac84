"""Making and renewing the schema, and what an operator sees when something is wrong with the database."""

from collections.abc import Callable

import asyncpg
import pytest

from tests.servers.postgres import PostgresServer
from trellis.engine.errors import LedgerNotMigrated, LedgerTooOld, LedgerUnavailable, LedgerUrlInvalid
from trellis.engine.records import RetentionOptions
from trellis.ledgers.postgres.connection import ServerVersion, check_server
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.migrate import _script, migrate, schema_version, sql_files
from trellis.lifecycles import LIFECYCLES


async def test_migrating_twice_changes_nothing(new_postgres_database: Callable[..., str]):
    url = new_postgres_database()
    first, second = await migrate(url), await migrate(url)
    assert (first.version_before, first.version) == (0, schema_version())
    assert (second.version_before, second.applied) == (schema_version(), ())


async def test_lifecycle_tables_in_the_database_equal_the_lifecycles(postgres_url: str):
    connection = await asyncpg.connect(postgres_url)
    try:
        rows = await connection.fetch(
            "SELECT l.name, s.name AS source, t.name AS target, x.trigger FROM trellis.transition x"
            " JOIN trellis.lifecycle l USING (lifecycle)"
            " LEFT JOIN trellis.state s ON s.lifecycle = x.lifecycle AND s.state = x.source"
            " JOIN trellis.state t ON t.lifecycle = x.lifecycle AND t.state = x.target"
        )
    finally:
        await connection.close()
    declared = {(lc.name, t.source, t.target, t.trigger) for lc in LIFECYCLES.values() for t in lc.transitions}
    assert {tuple(row) for row in rows} == declared


async def test_a_database_without_the_schema_says_what_to_run(new_postgres_database: Callable[..., str]):
    with pytest.raises(LedgerNotMigrated, match="trellis migrate"):
        await PostgresLedger.open(new_postgres_database())


async def test_a_newer_schema_is_refused(new_postgres_database: Callable[..., str], postgres_template: str):
    url = new_postgres_database(template=postgres_template)
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE trellis.meta SET value = '99' WHERE name = 'schema_version'")
    await connection.close()
    with pytest.raises(LedgerNotMigrated):
        await PostgresLedger.open(url)
    with pytest.raises(LedgerNotMigrated):
        await migrate(url)


async def test_a_database_that_is_not_there_is_named(postgres_server: PostgresServer):
    with pytest.raises(LedgerUrlInvalid, match="nowhere"):
        await PostgresLedger.open(postgres_server.url("nowhere"))


@pytest.mark.parametrize("url", ["mysql://x/y", "postgresql://host:notaport/db"])
async def test_an_address_that_is_none_is_refused_before_anything_is_tried(url: str):
    with pytest.raises(LedgerUrlInvalid):
        await PostgresLedger.open(url)


async def test_a_server_that_is_not_there_is_unavailable(unused_tcp_port: int):
    with pytest.raises(LedgerUnavailable):
        await PostgresLedger.open(f"postgresql://postgres@127.0.0.1:{unused_tcp_port}/x")


def test_a_server_that_is_too_old_is_refused():
    with pytest.raises(LedgerTooOld, match="15 or newer"):
        check_server(ServerVersion(14, 9, 0, "final", 0))


async def test_limits_that_an_operator_set_before_the_ledger_wrote_that_down_are_kept(
    new_postgres_database: Callable[..., str],
):
    url = new_postgres_database()
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(_script("roles"))
            await connection.execute("SET LOCAL search_path = trellis, pg_temp")
            await connection.execute(next(text for _, text in sql_files("migrations")))
            await connection.execute("INSERT INTO meta (name, value) VALUES ('schema_version', '1')")
            await connection.execute(
                "INSERT INTO concurrency_key (id, name, cap) VALUES (hashtextextended('k', 42), 'k', 7)"
            )
        assert (await migrate(url)).version_before == 1
        ledger = await PostgresLedger.open(url)
        while (await ledger.retain(RetentionOptions())).more:
            pass
        await ledger.close()
        assert await connection.fetchval("SELECT cap FROM trellis.concurrency_key WHERE name = 'k'") == 7
    finally:
        await connection.close()

"""Making and renewing the schema, and what an operator sees when something is wrong with the database."""

import json
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from tests.ledgers.postgres.used_by_older import USED_BY_OLDER, surface
from tests.servers.postgres import PostgresServer
from trellis.engine.errors import LedgerNewer, LedgerNotMigrated, LedgerTooOld, LedgerUnavailable, LedgerUrlInvalid
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId, Submitted
from trellis.engine.records import JobFilter, JobPlace, RetentionOptions, SweepOptions
from trellis.ledgers.postgres.connection import ServerVersion, check_server
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.migrate import (
    OLDEST_PROGRAM,
    TABLES,
    Migrated,
    MigrationPlan,
    _script,
    migrate,
    plan_migration,
    schema_version,
    sql_files,
)
from trellis.lifecycles import LIFECYCLES, Role

SUBMITTER = Actor(role=Role.SUBMITTER, name="submitter")
SWEEPER = Actor(role=Role.SWEEPER, name="sweeper")


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


NEWER = "ledger to schema version {}, and this program knows schema version {}.* knows schema version {} or later"


async def _set_meta(url: str, **values: int) -> None:
    connection = await asyncpg.connect(url)
    for name, value in values.items():
        await connection.execute("UPDATE trellis.meta SET value = $2 WHERE name = $1", name, str(value))
    await connection.close()


async def _meta(url: str) -> dict[str, str]:
    connection = await asyncpg.connect(url)
    names = ["schema_version", "oldest_program"]
    rows = await connection.fetch("SELECT name, value FROM trellis.meta WHERE name = ANY($1)", names)
    await connection.close()
    return dict(map(tuple, rows))


async def test_a_newer_schema_that_this_program_cannot_use_is_refused(postgres_url: str):
    await _set_meta(postgres_url, schema_version=99, oldest_program=98)
    for refused in (PostgresLedger.open, migrate, plan_migration):
        with pytest.raises(LedgerNewer, match=NEWER.format(99, schema_version(), 98)):
            await refused(postgres_url)


async def test_a_newer_schema_that_allows_this_program_is_used_and_not_migrated_back(postgres_url: str):
    await _set_meta(postgres_url, schema_version=schema_version() + 1, oldest_program=schema_version())
    ledger = await PostgresLedger.open(postgres_url)
    try:
        (submitted,) = await ledger.submit(SUBMITTER, [NewJob(job_id=JobId("j"), type="t")])
    finally:
        await ledger.close()
    assert submitted == Submitted(job_id=JobId("j"), created=True)
    newer = schema_version() + 1
    assert await migrate(postgres_url) == Migrated(version_before=newer, version=newer, applied=())
    plan = await plan_migration(postgres_url)
    assert plan == MigrationPlan(version_before=newer, version=newer, pending=(), locks=())
    assert await _meta(postgres_url) == {"schema_version": str(newer), "oldest_program": str(schema_version())}
    with pytest.raises(LedgerNewer, match="Use the program that migrated the ledger"):
        await migrate(postgres_url, grants=[("postgres", Role.WORKER)])


async def test_plan_of_a_migration_names_what_is_read_and_locked(postgres_url: str):
    nothing = await plan_migration(postgres_url)
    assert (nothing.pending, nothing.locks) == ((), ())
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("UPDATE trellis.meta SET value = '6' WHERE name = 'schema_version'")
    await connection.execute("UPDATE pg_class SET reltuples = 3e6 WHERE oid = 'trellis.feed'::regclass")
    await connection.execute("UPDATE pg_class SET reltuples = 5e6 WHERE oid = 'trellis.event'::regclass")
    await connection.close()
    plan = await plan_migration(postgres_url)
    assert (plan.version_before, plan.version, len(plan.pending)) == (6, schema_version(), schema_version() - 6)
    by_name = {one.name: one for one in plan.pending}
    assert by_name["0008_read_before_removed.sql"].scans == {"feed": 3_000_000}
    assert round(by_name["0008_read_before_removed.sql"].estimated_s, 3) == 3.0
    assert by_name["0039_events_by_type.sql"].scans == {"event": 5_000_000}
    assert plan.locks[: len(TABLES)] == TABLES
    assert "feed" in plan.locks, "also what only these migrations change"
    await _set_meta(postgres_url, schema_version=27)
    assert "act" in (await plan_migration(postgres_url)).locks


def test_migrations_are_numbered_without_a_gap():
    """The wrong line it catches: a file with a number that was left out before, which no existing database would get."""
    assert list(sql_files("migrations"))[-1][0].startswith(f"{schema_version():04}_")


@pytest.mark.parametrize("table", ["job", "act"])
async def test_migration_behind_a_long_transaction_gives_up_and_names_it(
    table: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    """It waits in short tries: other sessions would otherwise wait behind it for as long as the transaction takes."""
    monkeypatch.setattr("trellis.ledgers.postgres.migrate.TABLE_LOCK_S", 0.05)
    monkeypatch.setattr("trellis.ledgers.postgres.migrate.TABLE_LOCK_PAUSE_S", 0.01)
    monkeypatch.setattr("trellis.ledgers.postgres.migrate.TABLE_LOCK_TRIES", 2)
    await _set_meta(postgres_url, schema_version=27)
    reader = await asyncpg.connect(postgres_url, server_settings={"application_name": "a-long-report"})
    try:
        async with reader.transaction():
            await reader.execute(f"SELECT 1 FROM trellis.{table}")
            with pytest.raises(LedgerUnavailable, match=f"{reader.get_server_pid()} .*a-long-report"):
                await migrate(postgres_url)
    finally:
        await reader.close()


async def test_what_older_programs_use_is_unchanged(postgres_url: str):
    """A change here breaks processes of the older version that run while the ledger is migrated.

    Keep what they use (a function of the old arguments beside the new one), or raise OLDEST_PROGRAM to this version and
    write the file again with `python -m tests.ledgers.postgres.used_by_older`.
    """
    recorded = json.loads(USED_BY_OLDER.read_text())
    assert recorded["version"] == OLDEST_PROGRAM
    found = await surface(postgres_url)
    lost = {kind: sorted({*recorded[kind]} - {*found[kind]}) for kind in ("functions", "columns")}
    assert lost == {"functions": [], "columns": []}


@pytest.mark.requirement("OBS-4")
@pytest.mark.parametrize("more", ["", "'{}', '{}', '{}', 180, "])
async def test_a_round_of_an_older_program_counts_until_its_next_one(more: str, postgres_url: str):
    """Before version 31 a program stored a round in which nothing holds once an hour."""
    connection = await asyncpg.connect(postgres_url, server_settings={"search_path": "trellis"})
    try:
        actor = await connection.fetchval("SELECT register_actor('o', $1, 'n')", Role.CONTROL_PLANE.code)
        lists = ", ".join(["'{}'"] * 7)
        await connection.execute(f"SELECT * FROM observe_alerts({actor}, 0, {lists}, {more}3600, 3600)")
        after_s = await connection.fetchval(
            "SELECT (SELECT value::float8 FROM meta WHERE name = 'alert_stale_at')"
            " - (SELECT value::float8 FROM meta WHERE name = 'alert_evaluated_at')"
        )
    finally:
        await connection.close()
    assert after_s > 3600


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


async def test_types_of_jobs_that_ended_before_are_filled_in_by_sweeps_and_listed_meanwhile(postgres_url: str):
    operator = Actor(role=Role.CONTROL_PLANE, name="operator")
    ledger = await PostgresLedger.open(postgres_url)
    jobs = [NewJob(job_id=JobId(f"{type_}-{n}"), type=type_) for type_ in ("one", "other") for n in range(3)]
    await ledger.submit(SUBMITTER, jobs)
    for job in jobs:
        await ledger.cancel(
            operator, job.job_id, CancelMode.HARD, RequestId(f"cancel {job.job_id}"), grace_s=0, cause="test"
        )
    connection = await asyncpg.connect(postgres_url, server_settings={"search_path": "trellis"})
    try:
        await connection.execute("ALTER TABLE ended DROP COLUMN type; DROP INDEX dead_letter_reason")
        await _set_meta(postgres_url, schema_version=37)
        assert "0038_types_of_ended_jobs.sql" in (await migrate(postgres_url)).applied
        untyped = "SELECT count(*) FROM ended WHERE type = 0"
        assert await connection.fetchval(untyped) == 6, "the migration itself writes no row again"

        async def ended_of(type_: str, **more: Any) -> list[str]:
            page = await ledger.jobs(JobFilter(type=type_, **more), limit=10)
            return [job.job_id for job in page.jobs]

        assert await ended_of("one") == ["one-2", "one-1", "one-0"]
        async with connection.transaction():
            await connection.execute("SELECT FROM ended WHERE id = 2 FOR UPDATE")
            await ledger.sweep(SWEEPER, SweepOptions(elect=False))
            assert await connection.fetchval(untyped) == 1, "a row that somebody holds is left for later"
        assert await ended_of("one", state="cancelled") == ["one-2", "one-1", "one-0"]
        for _ in range(3):
            await ledger.sweep(SWEEPER, SweepOptions(elect=False))
        assert await connection.fetchval(untyped) == 0
        assert await connection.fetchval("SELECT count(*) FROM meta WHERE name = 'ended_untyped'") == 0
        assert await ended_of("other", place=JobPlace.ENDED) == ["other-2", "other-1", "other-0"]
        # A call of the version before that was under way during the migration writes its rows without a type afterwards.
        await connection.execute("UPDATE ended SET type = 0 WHERE id = 5")
        assert await ended_of("other", state="cancelled") == ["other-2", "other-1", "other-0"]
        assert await ended_of("one") == ["one-2", "one-1", "one-0"]
        await ledger.sweep(SWEEPER, SweepOptions(elect=False))
        assert await connection.fetchval(untyped) == 0
    finally:
        await connection.close()
        await ledger.close()

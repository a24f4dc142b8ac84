"""A ledger with jobs from before migration 3 is upgraded, verifies, and what it records of them does not change afterwards."""

import re
from collections.abc import Callable
from pathlib import Path

import apsw
import asyncpg

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER
from trellis.engine.jobs import Advance, Claim, ClaimId, JobId, Moved, NewJob, RequestId, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import RecordedEvent
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.migrate import migrate, sql_files
from trellis.ledgers.sqlite.schema import migrations

ADDED_TO_SQLITE = ("deadline", "key_limit", "compensates")
ADDED_TO_POSTGRES = (
    ("job", "deadline_us"),
    ("job", "compensates_id"),
    ("event", "due_at"),
    ("concurrency_key", "due_at"),
    ("ended", "type"),
    ("transition", "finalizes"),
)
MADE_SINCE = {
    name
    for _, sql in list(sql_files("migrations"))[2:]
    for name in re.findall(r"^create index (\w+)", sql, re.MULTILINE)
}
DEAD = JobId("dead")


async def fill(ledger: Ledger) -> None:
    """A job that died, one that compensates it, one that waits; with keys and deadlines."""
    keyed = {"concurrency_key": "k", "concurrency_limit": 3, "deadline_s": 3_600.0}
    await ledger.submit(SUBMITTER, [NewJob(job_id=DEAD, type="work", **keyed)])  # type: ignore[arg-type]
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),))
    (held,) = (await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    await ledger.turn(Turn(actor=WORKER, advances=(Advance(held.lease, "running", "reject", death=DEATH),)))
    more = [
        NewJob(job_id=JobId("undo"), type="work", compensates=DEAD),
        NewJob(job_id=JobId("waits"), type="work", delay_s=600.0, **keyed),  # type: ignore[arg-type]
    ]
    await ledger.submit(SUBMITTER, more)


async def all_records(ledger: Ledger) -> list[RecordedEvent]:
    return [one async for history in ledger.histories() for one in await ledger.recorded(history.events)]


async def check_upgraded(ledger: Ledger, key_limit: int) -> None:
    assert (await verify(ledger)).ok
    before = await all_records(ledger)
    asked = {one.event.job_id: one.submission for one in before if one.submission is not None}
    assert {job_id: (one.deadline_us, one.concurrency_limit, one.compensates) for job_id, one in asked.items()} == {
        DEAD: (None, key_limit, None),
        "undo": (None, 1, None),
        "waits": (None, key_limit, None),
    }
    await ledger.limit_key(ADMIN, "k", 7)
    (moved,) = await ledger.requeue(ADMIN, [DEAD], RequestId("again"), limit=1, cause=None)
    assert isinstance(moved, Moved)
    now = {one.event.id: one for one in await all_records(ledger)}
    assert [now[one.event.id] for one in before] == before, "what was recorded once is recorded the same again"
    job = await ledger.job(DEAD)
    assert job is not None
    assert job.deadline_at is not None, "its deadline is as far away as before"
    assert (await verify(ledger)).ok


def made(connection: apsw.Connection) -> set[tuple[str, str]]:
    """Everything that a schema has; triggers of a table go before it, when sorted backwards."""
    found = connection.execute("SELECT type, name FROM sqlite_master WHERE name LIKE 'trellis_%'")
    return {(kind, name) for kind, name in found}


def columns(connection: apsw.Connection) -> set[str]:
    return {row[1] for row in connection.execute("PRAGMA table_info(trellis_submission)")}


async def test_an_sqlite_file_of_schema_2_is_upgraded(tmp_path: Path):
    url, path = f"sqlite:///{tmp_path / 'ledger.db'}", str(tmp_path / "ledger.db")
    ledger = await open_ledger(url)
    await fill(ledger)
    await ledger.close()
    connection, fresh = apsw.Connection(path), apsw.Connection(":memory:")
    for number in (1, 2):
        fresh.execute(migrations()[number])
    for name in ADDED_TO_SQLITE:
        connection.execute(f"ALTER TABLE trellis_submission DROP COLUMN {name}")
    connection.execute("ALTER TABLE trellis_concurrency_key DROP COLUMN stopped")
    connection.execute("ALTER TABLE trellis_wish DROP COLUMN at")
    connection.execute("DROP INDEX trellis_concurrency_key_due")
    connection.execute("ALTER TABLE trellis_concurrency_key DROP COLUMN due_at")
    for kind, name in sorted(made(connection) - made(fresh), reverse=True):
        connection.execute(f"DROP {kind} IF EXISTS {name}")  # an index goes with its table
    for _, name in made(fresh) - made(connection):  # what a later migration removed
        connection.execute(str(fresh.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).get))
    connection.execute("UPDATE trellis_meta SET value = 2 WHERE key = 'schema_version'")
    assert (made(connection), columns(connection)) == (made(fresh), columns(fresh)), "as migration 2 left it"
    connection.close()
    ledger = await open_ledger(url)
    await check_upgraded(ledger, key_limit=1)
    await ledger.close()
    upgraded = apsw.Connection(path)
    assert upgraded.execute("SELECT count(*) FROM trellis_finalizer").fetchall() == [(2,)], (
        "lifecycles were loaded again"
    )
    upgraded.close()


async def test_a_postgres_database_of_schema_2_is_upgraded(
    new_postgres_database: Callable[..., str], postgres_template: str
):
    url = new_postgres_database(template=postgres_template)
    ledger = await open_ledger(url)
    await fill(ledger)
    await ledger.close()
    connection = await asyncpg.connect(url)
    for table, name in ADDED_TO_POSTGRES:
        await connection.execute(f"ALTER TABLE trellis.{table} DROP COLUMN {name}")
    for name in MADE_SINCE:
        await connection.execute(f"DROP INDEX IF EXISTS trellis.{name}")  # one goes with its column
    for row in await connection.fetch("SELECT tablename, policyname FROM pg_policies WHERE schemaname = 'trellis'"):
        await connection.execute(f"DROP POLICY {row['policyname']} ON trellis.{row['tablename']}")
    await connection.execute(
        "DROP TABLE trellis.rule_grant, trellis.act, trellis.type_options, trellis.work_lock, trellis.decision,"
        " trellis.request_key, trellis.alert, trellis.audit_head, trellis.schedule, trellis.spawned, trellis.suspension,"
        " trellis.wake, trellis.job_signal, trellis.unique_job, trellis.key_rate CASCADE"
    )
    await connection.execute("ALTER TABLE trellis.actor DROP COLUMN node, ADD UNIQUE (name, role, db_role)")
    await connection.execute("UPDATE trellis.meta SET value = '2' WHERE name = 'schema_version'")
    await connection.close()
    assert (await migrate(url)).version_before == 2
    ledger = await open_ledger(url)
    await check_upgraded(ledger, key_limit=3)
    await ledger.close()

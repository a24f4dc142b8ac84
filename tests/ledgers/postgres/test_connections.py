"""How many connections a process opens: the number that operators plan with."""

import asyncio
from typing import Any

import asyncpg
import pytest

from trellis import App, Context
from trellis.app.wiring import make_worker, new_id
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.records import FindingSeverity
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.connection import ARRAY_TYPES
from trellis.ledgers.postgres.findings import findings
from trellis.ledgers.postgres.lanes import CONNECTIONS_MAX
from trellis.lifecycles import Role
from trellis.worker.options import WorkerOptions

NAME = "trellis-counted"
JOBS = 60
QUIET: dict[str, Any] = {
    "is_read_only": False,
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "autovacuum": "on",
    "version": "17",
    "is_superuser": False,
    "is_owner": False,
    "db_role": "app",
    "sweep_age_s": 0.1,
    "held": 0,
    "oldest_transaction_s": 0.0,
    "unsequenced": 0,
    "connections_max": 97,
    "connections": 24,
    "own_connections": 24,
}


async def test_a_ledger_at_full_use_has_no_more_connections_than_stated(postgres_url: str):
    """A worker that claims, renews, checkpoints and settles, beside reads, submits, hints and health checks."""
    app, ended = App(), asyncio.Event()

    @app.job("count")
    async def count(ctx: Context, n: int) -> None:
        await ctx.checkpoint({"n": n})
        if n == JOBS - 1:
            ended.set()

    ledger = await open_ledger(postgres_url, part="counted")
    observer = await asyncpg.connect(postgres_url)
    submitter = Actor(role=Role.SUBMITTER, name="s")
    try:
        async with make_worker(app, ledger, WorkerOptions(name="w", concurrency=20)):
            for n in range(JOBS):
                job = NewJob(job_id=JobId(new_id()), type="count", payload=str(n).encode())
                await asyncio.gather(ledger.submit(submitter, [job]), ledger.ping(), ledger.queues(), ledger.workers())
            async with asyncio.timeout(30):
                await ended.wait()
            counted = "select count(*) from pg_stat_activity where application_name = $1"
            used = await observer.fetchval(counted, NAME)
    finally:
        await observer.close()
        await ledger.close()
    assert 8 <= used <= CONNECTIONS_MAX


async def test_the_array_types_are_those_of_the_server(postgres_url: str):
    connection = await asyncpg.connect(postgres_url)
    try:
        rows = await connection.fetch(
            "select a.oid, e.typname, e.oid as element, e.typdelim from pg_type a join pg_type e on e.typarray = a.oid where a.oid = any($1::oid[])",
            list(ARRAY_TYPES),
        )
    finally:
        await connection.close()
    assert {row["oid"]: (row["typname"], row["element"]) for row in rows} == ARRAY_TYPES
    assert {row["typdelim"] for row in rows} == {b","}


async def test_submits_and_turns_do_not_make_the_driver_ask_about_types(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Its query costs the server more than a turn does, on every new connection."""
    asked_about: list[list[int]] = []
    ask = asyncpg.Connection._introspect_types

    async def note(self: Any, typeoids: Any, *args: Any) -> Any:
        asked_about.append(list(typeoids))
        return await ask(self, typeoids, *args)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", note)
    app, ended = App(), asyncio.Event()

    @app.job("plain")
    async def plain(ctx: Context, n: int) -> int:
        if n == JOBS - 1:
            ended.set()
        return n

    ledger = await open_ledger(postgres_url)
    jobs = [NewJob(job_id=JobId(new_id()), type="plain", payload=str(n).encode()) for n in range(JOBS)]
    try:
        async with make_worker(app, ledger, WorkerOptions(name="w", concurrency=20)):
            await ledger.submit(Actor(role=Role.SUBMITTER, name="s"), jobs)
            async with asyncio.timeout(30):
                await ended.wait()
    finally:
        await ledger.close()
    assert asked_about == []


def test_the_doctor_states_the_number_and_warns_before_a_server_is_full():
    def connections(used: int) -> tuple[FindingSeverity, str, str]:
        row = {**QUIET, "connections": used}
        (one,) = [one for one in findings(row, is_pooled=False) if one.check == "postgresql connections"]
        return one.severity, one.detail, one.remedy

    severity, detail, remedy = connections(24)
    assert (severity, remedy) == (FindingSeverity.OK, "")
    assert "24 of 97 are in use, 24 of them by Trellis" in detail
    assert f"at most {CONNECTIONS_MAX} for each ledger" in detail
    severity, _, remedy = connections(78)
    assert severity is FindingSeverity.WARNING
    assert "max_connections" in remedy

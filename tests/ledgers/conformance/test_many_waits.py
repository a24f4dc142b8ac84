"""A hundred thousand suspended jobs: they hold nothing, and waking one costs what it costs without the others."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest

from tests.ledgers.conformance.opening import postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import SUBMITTER, WORKER, Rig
from tests.servers.postgres import PostgresServer
from trellis.engine.jobs import Advance, JobId, NewJob, Turn, Wait
from trellis.engine.records import JobFilter

MANY, FEW, WAKES, PART = 100_000, 200, 200, 1_000
DEARER_MAX = 1.3
"""How much more it may cost to wake one among many. Both are measured in turns, by their medians."""


async def suspend(rig: Rig, count: int) -> list[JobId]:
    """Suspend so many jobs. Each waits for a signal."""
    ids = [JobId(f"waits-{n}") for n in range(count)]
    for start in range(0, count, PART):
        part = ids[start : start + PART]
        await rig.ledger.submit(SUBMITTER, [NewJob(job_id=job_id, type="work") for job_id in part])
        held = await rig.claim(len(part))
        steps = [Advance(one.lease, "running", "suspend", spare_attempt=True, wait=Wait(signal="go")) for one in held]
        await rig.ledger.turn(Turn(actor=WORKER, advances=tuple(steps)))
    return ids


async def wake_times(rigs: Sequence[Rig], ids: Sequence[list[JobId]]) -> list[float]:
    """The median seconds of a signal that resumes a job, for each ledger, measured in turns."""
    times: list[list[float]] = [[] for _ in rigs]
    for n in range(WAKES):
        for rig, jobs, own in zip(rigs, ids, times, strict=True):
            began = time.perf_counter()
            await rig.ledger.send_signal(SUBMITTER, jobs[-1 - n], "go", b"1")
            own.append(time.perf_counter() - began)
    return [statistics.median(own) for own in times]


async def _vacuum(rig: Rig) -> None:
    """What the server does by itself when it has time: a hundred thousand leases ended a moment ago."""
    if rig.admin_url is not None:
        connection = await asyncpg.connect(rig.admin_url)
        await connection.execute("VACUUM (ANALYZE)")
        await connection.close()


async def check_many(many: Rig, few: Rig) -> None:
    ids = [await suspend(many, MANY), await suspend(few, FEW)]
    assert not (await many.ledger.jobs(JobFilter(state="running"), limit=1)).jobs
    assert await many.ledger.holds(ids[0][:PART]) == [], "no lease"
    assert await many.claim(10) == [], "nothing to claim"
    report = await many.sweep()
    assert (report.expired, report.due) == (0, 0)
    for rig in (many, few):
        await _vacuum(rig)
    dear, cheap = await wake_times((many, few), ids)
    assert len(await many.claim(WAKES)) == WAKES
    print(f"{many.kind}: waking one of {MANY:,} {dear * 1e3:.2f} ms, of {FEW} {cheap * 1e3:.2f} ms")  # noqa: T201 - the figure
    assert dear <= DEARER_MAX * cheap, (dear, cheap)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.quiet(alone=True)
async def test_a_hundred_thousand_suspended_jobs_cost_nothing_on_sqlite(tmp_path: Path):
    async with sqlite_rig(tmp_path / "many.db") as many, sqlite_rig(tmp_path / "few.db") as few:
        await check_many(many, few)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.quiet(alone=True)
async def test_a_hundred_thousand_suspended_jobs_cost_nothing_on_postgresql(clocked_postgres: PostgresServer):
    async with postgres_rig(clocked_postgres, "postgres") as many, postgres_rig(clocked_postgres, "postgres") as few:
        await check_many(many, few)

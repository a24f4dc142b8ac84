"""PostgreSQL gone: crashed under load, and unreachable for three leases while its workers live on.

What holds: nothing acknowledged is lost, everybody carries on without help, and after an outage the leases of live
workers are extended before any is ended (amnesty), so that running jobs go on instead of running twice.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import LOGIN, SEED, Bench, database
from tests.faults.fleet import Fleet, Nursery, submit_work, until, wait_ended
from tests.faults.history import Told, problems
from tests.faults.proxy import Kind, proxied
from tests.faults.worker_process import EFFECT, Work
from tests.ledgers.conformance.rig import SUBMITTER, SWEEPER, WORKER
from tests.servers.postgres import PostgresServer, running_postgres
from tests.servers.templates import TEMPLATES
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import JobId, NewJob, Renewed
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.worker.options import HEARTBEAT_S_MIN, LEASE_S_MIN

LEASE_S, HEARTBEAT_S = 2.0, 0.5
OUTAGE_LEASES = 3
HASTY = LaneOptions(call_timeout_s=1.0, outcome_window_s=1.0, connect_timeout_s=1.0)


@pytest.fixture
def mortal_server() -> Iterator[PostgresServer]:
    """A server of this test's own, to crash."""
    with running_postgres(contents=TEMPLATES) as server:
        yield server


class Submitter:
    """Submits one small batch after another and asks again, under the same ids, until each is acknowledged."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self.rng = rng
        self.told = Told()
        self.failures = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            jobs = [
                NewJob(job_id=JobId(f"job-{number}-{n}"), type=EFFECT, payload=b'{"hold_s": 0.02}', max_attempts=100)
                for n in range(5)
            ]
            number += 1
            await self._until_acknowledged(jobs)

    async def _until_acknowledged(self, jobs: list[NewJob]) -> None:
        while True:
            try:
                self.told.note_submit(await self.ledger.submit(SUBMITTER, jobs))
            except LedgerError:
                self.failures += 1
                await asyncio.sleep(0.05 * self.rng.random())
            else:
                return


async def crash_under_load(
    server: PostgresServer, fleet: Fleet, hasty: Ledger, ledger: Ledger, *, crashes: int
) -> dict[str, float]:
    """Submit through the hasty ledger while the server crashes, then read everything through the patient one."""
    submitter, loop = Submitter(hasty, random.Random(SEED)), asyncio.get_running_loop()
    working = asyncio.create_task(submitter.run())
    resumed = []
    fleet.start(2)
    for crash in range(crashes):
        acknowledged, ran = len(submitter.told.submitted), len(fleet.lines())
        await until(lambda a=acknowledged: len(submitter.told.submitted) >= a + 20, "submits are acknowledged")
        await until(lambda r=ran: len(fleet.lines()) >= r + 20, "workers run jobs")
        await loop.run_in_executor(None, partial(server.restart, "immediate"))
        back, ran = time.monotonic(), len(fleet.lines())
        await until(lambda r=ran: len(fleet.lines()) > r, f"workers resume after crash {crash}")
        resumed.append(time.monotonic() - back)
    submitter.stop.set()
    await working
    await wait_ended(ledger, sorted(submitter.told.submitted), fleet)
    for line in fleet.lines():
        if line.op == "began":
            submitter.told.claims[line.job, line.epoch].add(f"{line.pid} {line.at}")
    assert not await problems(submitter.told, ledger)
    report = await verify(ledger)
    assert report.ok, report.violations[:10]
    expired = sum([event.type == "job_lease_expired" async for h in ledger.histories() for event in h.events])
    return {
        "leases_lost_by_living_workers": expired,
        "crashes": crashes,
        "acknowledged": len(submitter.told.submitted),
        "calls_asked_again": submitter.failures,
        "resumed_max_s": round(max(resumed), 2),
    }


@asynccontextmanager
async def crashing(
    server: PostgresServer, folder: Path, nursery: Nursery
) -> AsyncIterator[tuple[Fleet, Ledger, Ledger]]:
    """Workers, a ledger whose calls give up after a second, and one with the usual limits."""
    with database(server) as name:
        url = server.url(name, LOGIN)
        hasty, patient = await open_ledger(url, options=HASTY), await open_ledger(url)
        try:
            with Fleet(nursery, url, folder, {"lease_s": 8.0, "heartbeat_s": 2.0}) as fleet:
                yield fleet, hasty, patient
        finally:
            await hasty.close()
            await patient.close()


@pytest.mark.requirement("DJ-2", "DJ-3", "D31")
async def test_two_crashes_of_the_server_lose_nothing_acknowledged(
    mortal_server: PostgresServer, tmp_path: Path, nursery: Nursery, figures
):
    async with crashing(mortal_server, tmp_path, nursery) as (fleet, hasty, patient):
        measured = await crash_under_load(mortal_server, fleet, hasty, patient, crashes=2)
    figures(**measured)
    assert measured["resumed_max_s"] <= 10


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("DJ-2", "DJ-3", "D31")
async def test_twenty_crashes_of_the_server_lose_nothing_acknowledged(
    mortal_server: PostgresServer, tmp_path: Path, nursery: Nursery, figures
):
    async with crashing(mortal_server, tmp_path, nursery) as (fleet, hasty, patient):
        measured = await crash_under_load(mortal_server, fleet, hasty, patient, crashes=20)
    figures(**measured)
    assert measured["resumed_max_s"] <= 10


@pytest.mark.quiet(alone=True)
@pytest.mark.requirement("D31")
async def test_an_outage_of_three_leases_runs_no_living_workers_job_again(
    fault_server: PostgresServer, timed_database: str, tmp_path: Path, nursery: Nursery, figures
):
    direct, go, n = fault_server.url(timed_database, LOGIN), tmp_path / "go", 50
    ledger = await open_ledger(direct, hints=False)
    async with proxied(direct, seed=SEED, aimed=False) as (proxy, url):
        terms = {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, "concurrency": n // 2, "prefetch": 0}
        with Fleet(nursery, url, tmp_path, terms) as fleet:
            fleet.start(2)
            jobs = await submit_work(ledger, [Work(until=str(go))] * n, "held")
            await until(lambda: len(fleet.lines()) == n, "every job is running")
            proxy.black_hole()
            away = time.monotonic()
            await until(lambda: time.monotonic() > away + OUTAGE_LEASES * LEASE_S, "the outage is long enough")
            forgiven = await forgiven_while_nobody_renews(ledger, jobs)
            proxy.heal()
            await until_renewed(ledger, jobs)
            go.touch()
            await wait_ended(ledger, jobs, fleet)
            again = len([line for line in fleet.lines() if line.op == "began"]) - n
            attempts = sum([job.attempt for job in [await ledger.job(job) for job in jobs] if job is not None])
            states = {job.state for job in [await ledger.job(job) for job in jobs] if job is not None}
        report = await verify(ledger)
        await ledger.close()
    figures(jobs=n, outage_s=OUTAGE_LEASES * LEASE_S, forgiven=forgiven, run_again=again, attempts_burnt=attempts)
    assert forgiven == n
    assert report.ok, report.violations[:10]
    assert states == {"succeeded"}
    assert again <= 1
    assert attempts <= again


async def forgiven_while_nobody_renews(ledger: Ledger, jobs: list[JobId]) -> int:
    """The first sweep after the outage, made past the proxy while the workers are still cut off: every lease is over and no
    renewal can come, so that what keeps the jobs with their holders is the amnesty and nothing else. It is given once.
    """
    now = await ledger.now()
    found = [await ledger.job(job) for job in jobs]
    assert all(job is not None and job.lease_expires_at is not None and job.lease_expires_at < now for job in found)
    first, second = [await ledger.sweep(SWEEPER, SweepOptions(elect=False)) for _ in range(2)]
    assert (first.expired, first.exhausted, second.amnesty, second.expired) == (0, 0, 0, 0)
    return first.amnesty


async def until_renewed(ledger: Ledger, jobs: list[JobId]) -> None:
    """Until the workers are back: some lease runs on for nearly its whole length."""
    end = time.monotonic() + 30
    while True:
        job = await ledger.job(jobs[0])
        assert job is not None
        left = job.lease_expires_at and (job.lease_expires_at - await ledger.now()).total_seconds()
        if left is None or left > LEASE_S * 0.7:
            return
        assert time.monotonic() < end, "nobody came back after the outage"
        await asyncio.sleep(0.02)


@pytest.mark.quiet
@pytest.mark.requirement("D4")
async def test_a_connection_that_falls_silent_costs_no_lease(bench: Bench):
    """Two renewals fit into what is left of the shortest lease when the first goes out, even if its answer never comes."""
    waits_s = PostgresLedger("postgresql://nowhere", LaneOptions(), hints=False)._holder_lane._options.call_timeout_s
    length_s = min(LEASE_S_MIN, 2 * HEARTBEAT_S_MIN + 1)
    assert 2 * waits_s <= length_s - HEARTBEAT_S_MIN
    held = await bench.rig.running(type=str(bench.rig.new_id("type")))
    aim = bench.proxy.aim(Kind.ANSWER_SILENT, "from renew(")
    assert await bench.shaky.renew(WORKER, [held.lease]) == [Renewed(cancel=False)]
    assert aim.hits == 1

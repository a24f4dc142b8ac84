"""kill -9 of real worker processes in the middle of workflows: steps, children, timers and signals, on both ledgers."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.conftest import SEED
from tests.faults.fleet import Fleet, Nursery, until, wait_ended
from tests.faults.test_worker_deaths import busy, sweeping
from tests.faults.worker_process import PART, WORKFLOW
from tests.ledgers.conformance.rig import SUBMITTER
from trellis.engine.jobs import JobId, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify

pytestmark = [pytest.mark.quiet]
CHILDREN = 3


async def workflows_under_kills(ledger: Ledger, fleet: Fleet, *, workflows: int, kills: int) -> list[JobId]:
    """Workflows run while their workers are killed and started again; their signals come at any time."""
    rng = random.Random(SEED)
    ids = [JobId(f"flow-{n}") for n in range(workflows)]
    jobs = [
        NewJob(job_id=job_id, type=WORKFLOW, payload=json.dumps(n).encode(), max_attempts=100, max_deaths=0)
        for n, job_id in enumerate(ids)
    ]
    await ledger.submit(SUBMITTER, jobs)
    unsignalled = ids[:]
    rng.shuffle(unsignalled)
    fleet.start(3)
    for n in range(kills):
        victim = await until(lambda: busy(fleet, rng), "a worker is in the middle of a job", patience_s=60.0)
        await fleet.kill(victim)
        fleet.start(1)
        if unsignalled and n * len(ids) >= kills * (len(ids) - len(unsignalled)):
            await ledger.send_signal(SUBMITTER, unsignalled.pop(), "bonus", b"7", signal_key="once")
        if not unsignalled and all(one.has_ended for one in await ledger.outcomes(ids)):
            break
    for job_id in unsignalled:
        await ledger.send_signal(SUBMITTER, job_id, "bonus", b"7", signal_key="once")
    await wait_ended(ledger, ids, fleet, patience_s=120.0)
    return ids


async def check_workflows(ledger: Ledger, fleet: Fleet, ids: list[JobId]) -> None:
    for start in range(0, len(ids), 500):
        outcomes = {one.job_id: one for one in await ledger.outcomes(ids[start : start + 500])}
        for n, job_id in enumerate(ids[start : start + 500], start=start):
            outcome = outcomes[job_id]
            assert outcome.success, (job_id, outcome.state, outcome.error)
            assert json.loads(outcome.result or b"null") == [n**2, (n + 1) ** 2, (n + 2) ** 2, 7], job_id
    kinds = Counter[str]()
    async for history in ledger.histories():
        kinds[history.job.type] += 1
        succeeded = [event for event in history.events if event.type == "job_succeeded"]
        assert len(succeeded) == 1, history.job.job_id
    assert kinds == {WORKFLOW: len(ids), PART: CHILDREN * len(ids)}, "no child is lost or doubled"
    # What a step returned is what its journal has: later attempts saw no other value.
    seen: dict[JobId, set[str]] = {}
    for line in fleet.lines():
        if line.op == "done":
            seen.setdefault(line.job, set()).add(line.what)
    assert all(len({json.loads(values)[0] for values in each}) == 1 for each in seen.values())
    report = await verify(ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))


async def test_workflows_survive_the_deaths_of_their_workers(
    ledger: Ledger,
    nursery: Nursery,
    ledger_url: str,
    tmp_path: Path,
):
    with Fleet(nursery, ledger_url, tmp_path) as fleet:
        async with sweeping(ledger):
            ids = await workflows_under_kills(ledger, fleet, workflows=6, kills=4)
            await fleet.drain()
    await check_workflows(ledger, fleet, ids)


@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_workflows_survive_two_hundred_deaths(
    ledger: Ledger,
    nursery: Nursery,
    ledger_url: str,
    tmp_path: Path,
):
    with Fleet(nursery, ledger_url, tmp_path) as fleet:
        async with sweeping(ledger):
            ids = await workflows_under_kills(ledger, fleet, workflows=120, kills=200)
            deaths = len(fleet.killed)
            await fleet.drain()
    await check_workflows(ledger, fleet, ids)
    assert deaths >= 150, "most of the deaths came while workflows ran"
    await asyncio.sleep(0)

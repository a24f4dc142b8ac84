"""A fault at every point of a job's life, one after the other.

A golden run of one job by a real worker process counts the exchanges with PostgreSQL. Then the same run is made once
for each exchange and each way to fail there: the request or the answer is lost, or the worker dies just before the
server sees the request or just after it commits. Another worker then takes what is left, and the job must end well.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.faults.conftest import Bench
from tests.faults.fleet import POLL_S, Fleet, Nursery, Running, submit_work
from tests.faults.proxy import Kind
from tests.faults.worker_process import Work
from trellis.engine.jobs import JobId

ORDERS = {
    "lease_s": 60.0,
    "heartbeat_s": 15.0,
    "concurrency": 1,
    "prefetch": 0,
    "sweep_s": None,
    "hints": False,
    "call_timeout_s": 5.0,
}
LOSSES = (Kind.REQUEST_LOST, Kind.ANSWER_LOST)
GHOST_S = 5.0
"""So long a job stays with a worker that is dead before time is helped on."""
PATIENCE_S = 60.0
WORK = Work(journal=True, checkpoint=True)

_runs = count(1)


class Story:
    """One job from submit to its end, by worker processes behind the proxy."""

    def __init__(self, bench: Bench, nursery: Nursery, folder: Path) -> None:
        self.bench = bench
        self.folder = folder / f"run-{next(_runs)}"
        self.folder.mkdir()
        self.fleet = Fleet(nursery, bench.url, self.folder, ORDERS)
        self.ghosts = 0
        """How often a worker that was dead already held the job."""
        self._names: list[str] = []

    def start(self) -> Running:
        """One more worker; its name is its own over all runs, so that the owner of a job tells who has it."""
        self._names.append(f"{self.folder.name}-worker-{len(self._names)}")
        return self.fleet.start(1, name=self._names[-1])[0]

    async def begin(self) -> tuple[JobId, Running]:
        (job_id,) = await submit_work(self.bench.rig.ledger, [WORK], self.folder.name)
        return job_id, self.start()

    async def finish(self, job_id: JobId, worker: Running) -> None:
        """The job ends with this worker, or after its death with another one. Time is helped on only after a death.

        The last request of a worker that was killed may still be on its way and claim this job: nobody then holds it in
        truth, and only time frees it. A job that nobody has, or that the living worker has, is not helped: a claim that
        was lost must show.
        """
        began = last_help = time.monotonic()
        while (job := await self.bench.rig.job(job_id)).place != "ended":
            now = time.monotonic()
            assert now < began + PATIENCE_S, f"{self._names[-1]} lives and the job is not done: {job}"
            if not worker.is_alive:
                await self.bench.rig.lose_lease()
                self.fleet.alive.remove(worker)
                worker, last_help = self.start(), now
            elif job.owner not in {None, self._names[-1]} and now > last_help + GHOST_S:
                await self.bench.rig.lose_lease()
                self.ghosts, last_help = self.ghosts + 1, now
            await asyncio.sleep(POLL_S)
        assert await self.bench.rig.state(job_id) == "succeeded"

    async def check(self, job_id: JobId) -> None:
        lines = self.fleet.lines()
        assert max(Counter(line.epoch for line in lines if line.op == "began").values()) == 1, "an epoch ran twice"
        events = await self.bench.rig.event_types(job_id)
        assert events.count("job_succeeded") == 1
        journal = await self.bench.rig.ledger.read_journal(job_id)
        charged = [line.epoch for line in lines if line.op == "charged"]
        assert int(journal["charge"]) in charged, "the kept result was never made"


async def golden_run(bench: Bench, nursery: Nursery, folder: Path) -> int:
    """How many exchanges one job needs, from the worker's start to the job's end."""
    story, before = Story(bench, nursery, folder), bench.proxy.counts.runs
    with story.fleet:
        job_id, worker = await story.begin()
        await story.finish(job_id, worker)
        await story.check(job_id)
        assert story.ghosts == 0, "nobody had died yet"
        points = bench.proxy.counts.runs - before
        await story.fleet.drain()
    return points


@dataclass(frozen=True)
class Run:
    """`reached`: the fault happened; the last exchanges of the golden run need not come before the job's end."""

    reached: bool
    ghosts: int


async def run_with_fault(bench: Bench, nursery: Nursery, folder: Path, point: int, kind: Kind, *, dies: bool) -> Run:
    story = Story(bench, nursery, folder)
    workers: list[Running] = []
    bench.proxy.reset_all()  # what a killed worker of the run before still had to say must not take this run's fault
    kill = (lambda: os.kill(workers[0].pid, signal.SIGKILL)) if dies else None
    aim = bench.proxy.aim(kind, skip=point, then=kill)
    with story.fleet:
        job_id, worker = await story.begin()
        workers.append(worker)
        await story.finish(job_id, worker)
        bench.proxy.heal()
        await story.check(job_id)
        # Gently, so that no claim of this run is still on its way when the next one submits its job.
        await story.fleet.drain()
    return Run(aim.hits == 1, story.ghosts)


@pytest.mark.requirement("DJ-2", "DJ-3", "D2")
@pytest.mark.parametrize("dies", [False, True], ids=["exchange-lost", "worker-dies"])
async def test_job_succeeds_after_a_fault_at_any_exchange(
    bench: Bench, nursery: Nursery, tmp_path: Path, dies: bool, figures
):
    points = await golden_run(bench, nursery, tmp_path)
    assert points >= 8
    reached, ghosts = Counter(), 0
    for point in range(points):
        kind = LOSSES[point % 2] if dies else Kind.ANSWER_LOST
        run = await run_with_fault(bench, nursery, tmp_path, point, kind, dies=dies)
        reached[kind] += run.reached
        ghosts += run.ghosts
    figures(points=points, ghosts=ghosts, **{kind.name.lower(): n for kind, n in reached.items()})
    assert reached.total() >= points - 2
    assert ghosts <= (reached.total() if dies else 0), "a job was with a dead worker and no fault had killed one"
    await bench.check()


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("DJ-2", "DJ-3", "D2")
@pytest.mark.parametrize("dies", [False, True], ids=["exchange-lost", "worker-dies"])
@pytest.mark.parametrize("kind", LOSSES, ids=[kind.name for kind in LOSSES])
async def test_every_kind_of_fault_at_every_exchange(
    bench: Bench, nursery: Nursery, tmp_path: Path, kind: Kind, dies: bool, figures
):
    points = await golden_run(bench, nursery, tmp_path)
    runs = [
        await run_with_fault(bench, nursery, tmp_path, point, kind, dies=dies)
        for _ in range(5)
        for point in range(points)
    ]
    reached, ghosts = sum(run.reached for run in runs), sum(run.ghosts for run in runs)
    figures(points=points, reached=reached, ghosts=ghosts)
    assert reached >= 5 * (points - 2)
    assert ghosts <= (reached if dies else 0), "a job was with a dead worker and no fault had killed one"

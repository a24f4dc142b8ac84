"""Jobs whose workers died twice while running them: they run alone, so that a poison pill takes no neighbour with it."""

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.worker.conftest import Stand
from trellis.client import JobHandle
from trellis.engine.records import JobFilter
from trellis.worker.app import App
from trellis.worker.context import Context

RUNNING = JobFilter(state="running")


class Record:
    """Which handlers ran beside which."""

    def __init__(self, stand: Stand) -> None:
        self.beside: dict[str, set[str]] = {}
        self.held_running: dict[str, int] = {}
        self.begins: Callable[[str], object] = lambda job_id: None
        self._now: set[str] = set()
        self.app = App()

        @self.app.job("t")
        async def handler(ctx: Context) -> None:
            self.begins(ctx.job_id)
            self._now.add(ctx.job_id)
            for one in self._now:
                self.beside.setdefault(one, set()).update(self._now - {one})
            states = [(await stand.trellis.job(ctx.job_id)).state for _ in range(3)]
            assert set(states) == {"running"}
            depth = await stand.ledger.jobs(RUNNING, limit=100)
            self.held_running[ctx.job_id] = len(depth.jobs)
            self._now.discard(ctx.job_id)


async def suspects(stand: Stand, count: int) -> list[JobHandle]:
    """Jobs that were running when their worker died, twice."""
    jobs = await stand.trellis.submit_many("t", [None] * count)
    for deaths in (1, 2):
        assert len(await stand.claim("t", start=count)) == count
        for _ in range(35):
            stand.clock.advance(1.0)
            await stand.sweep()
        assert {(await job.status()).deaths for job in jobs} == {deaths}
    return jobs


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_suspect_runs_alone_and_everything_is_done_in_the_end(stand: Stand, concurrency: int):
    record = Record(stand)
    doubtful = await suspects(stand, 5)
    ordinary = await stand.trellis.submit_many("t", [None] * 20)
    await stand.run_until_idle(record.app, concurrency=concurrency)
    for job in [*doubtful, *ordinary]:
        assert (await job.status()).state == "succeeded"
    assert all(record.beside[job.id] == set() for job in doubtful)
    # Not even started beside it: a job that the ledger counts as running would be blamed for the worker's death.
    assert all(record.held_running[job.id] == 1 for job in doubtful)
    if concurrency > 1:
        assert any(record.beside[job.id] for job in ordinary)


async def test_quarantined_jobs_run_one_at_a_time_and_none_is_released(stand: Stand):
    record = Record(stand)
    doubtful = await suspects(stand, 30)
    await stand.run_until_idle(record.app, concurrency=10)
    assert {(await job.status()).state for job in doubtful} == {"succeeded"}
    assert {(await stand.events(job)).count("job_released") for job in doubtful} == {0}


async def test_a_suspect_waits_until_its_neighbours_are_settled(stand: Stand):
    record = Record(stand)
    (pill,) = await suspects(stand, 1)
    neighbours = await stand.trellis.submit_many("t", [None] * 3)
    worker = stand.worker(record.app, concurrency=4)
    order = worker.turns._compose()
    assert order is not None
    worker.turns._apply(order, await worker.ledger.turn(order.turn))
    # Everything is claimed and started. The worker first runs the neighbours, settles them, and only then the pill.
    assert [held.lease.job_id for held in worker.held_jobs.quarantined] == [pill.id]
    held: dict[str, list[str]] = {}
    record.begins = lambda job_id: held.setdefault(job_id, [h.lease.job_id for h in worker.held_jobs.jobs.values()])
    await worker.start(listening=False)
    await worker.until_idle()
    await worker.drain()
    assert held[pill.id] == [pill.id]
    assert set(held) == {pill.id, *(job.id for job in neighbours)}


async def test_a_drain_gives_back_a_suspect_that_waits_for_its_neighbours(stand: Stand):
    """A suspect that the worker forgot would stay with it until its lease runs out, and would have cost it an attempt."""
    app, ends = App(), asyncio.Event()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        await ends.wait()

    (pill,) = await suspects(stand, 1)
    neighbour = await stand.trellis.submit("t", None)
    worker = stand.worker(app, concurrency=2)
    await worker.start()
    await stand.in_state(neighbour, "running")
    await stand.until(lambda: [held.lease.job_id for held in worker.held_jobs.quarantined] == [pill.id])
    draining = asyncio.ensure_future(worker.drain())
    status = await stand.in_state(pill, "queued")
    assert status.attempts_spent == 2
    ends.set()
    drained = await draining
    assert (drained.not_begun, drained.cut_short, drained.unsettled) == (1, 0, 0)
    assert (await neighbour.status()).state == "succeeded"
    assert (await stand.events(pill))[-1] == "job_released"


@pytest.mark.requirement("D33", "DJ-8")
async def test_after_one_death_all_jobs_run_again_at_once_beside_each_other(stand: Stand):
    begun, ends, app = set[str](), asyncio.Event(), App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        begun.add(ctx.job_id)
        await ends.wait()

    jobs = await stand.trellis.submit_many("t", [None] * 40)
    assert len(await stand.claim("t", start=40)) == 40
    for _ in range(35):
        stand.clock.advance(1.0)
        await stand.sweep()
    async with stand.running(app, concurrency=40):
        await stand.until(lambda: len(begun) == 40)
        ends.set()
    assert {(await job.status()).state for job in jobs} == {"succeeded"}


async def test_other_workers_continue_while_one_runs_a_quarantined_job(stand: Stand):
    running, ends, app = dict[str, int](), asyncio.Event(), App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        running[ctx.job_id] = 1
        await ends.wait()

    doubtful = await suspects(stand, 3)
    async with stand.running(app, concurrency=4, name="isolating") as isolating:
        await stand.until(lambda: len(running) == 1)
        assert len(isolating.held_jobs.jobs) == 1, "it holds nothing but the suspect"
        others = await stand.trellis.submit_many("t", [None] * 6)
        async with stand.running(app, concurrency=8, name="other") as other:
            await stand.until(lambda: {job.id for job in others} <= set(running))
            assert not other.held_jobs.quarantined, "one job at a time runs alone in the whole fleet"
            assert len(running) == 7
            ends.set()
            for job in [*doubtful, *others]:
                await stand.in_state(job, "succeeded", step_s=0.1)


async def test_people_see_which_job_a_worker_runs_alone(stand: Stand):
    record, told = Record(stand), list[str | None]()
    (pill,) = await suspects(stand, 1)
    worker = stand.worker(record.app)

    def look(job_id: str) -> None:
        told.append(json.loads(worker._about()).get("alone"))

    record.begins = look
    await worker.start(listening=False)
    await worker.until_idle()
    await worker.drain()
    assert told == [pill.id]
    assert "alone" not in json.loads(worker._about())

"""Jobs whose worker died while running them: they run alone, so that a poison pill takes no neighbour with it."""

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
    """Jobs that were running when their worker died."""
    jobs = await stand.trellis.submit_many("t", [None] * count)
    assert len(await stand.claim("t", start=count)) == count
    for _ in range(35):
        stand.clock.advance(1.0)
        await stand.sweep()
    assert {(await job.status()).deaths for job in jobs} == {1}
    return jobs


@pytest.mark.requirement("DJ-18")
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


async def test_many_suspects_are_given_back_once_and_then_taken_one_by_one(stand: Stand):
    record = Record(stand)
    doubtful = await suspects(stand, 30)
    await stand.run_until_idle(record.app, concurrency=10)
    released = [(await stand.events(job)).count("job_released") for job in doubtful]
    assert {(await job.status()).state for job in doubtful} == {"succeeded"}
    assert max(released) <= 1
    assert sum(released) == 9


async def test_a_suspect_waits_until_its_neighbours_are_settled(stand: Stand):
    record = Record(stand)
    (pill,) = await suspects(stand, 1)
    neighbours = await stand.trellis.submit_many("t", [None] * 3)
    worker = stand.worker(record.app, concurrency=4)
    order = worker.turns._compose()
    assert order is not None
    worker.turns._apply(order, await worker.ledger.turn(order.turn))
    # Everything is claimed and started. The worker first runs the neighbours, settles them, and only then the pill.
    assert [held.lease.job_id for held in worker.holdings.suspects] == [pill.id]
    held: dict[str, list[str]] = {}
    record.begins = lambda job_id: held.setdefault(job_id, [h.lease.job_id for h in worker.holdings.jobs.values()])
    await worker.start(listening=False)
    await worker.until_idle()
    await worker.drain()
    assert held[pill.id] == [pill.id]
    assert set(held) == {pill.id, *(job.id for job in neighbours)}


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

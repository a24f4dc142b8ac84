"""A handler hears that it should stop when its lease is over by its worker's own clock, counted from when it was asked for."""

import asyncio
import threading
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.engine.jobs import lease_length_s
from trellis.testing import FakeClock
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.worker import Worker

LEASE_S, HEARTBEAT_S = 60.0, 15.0
LENGTH_S = lease_length_s(LEASE_S, HEARTBEAT_S)


class SlowAnswers:
    """The stand's ledger, whose answers to some verbs are on their way for a while."""

    def __init__(self, stand: Stand, verb: str, takes_s: float) -> None:
        self._ledger, self._clock, self._verb, self._takes_s = stand.ledger, stand.clock, verb, takes_s
        self.turns_at_once, self.under_way = 1, 0
        self.sent_at: list[float] = []
        self.down = False
        stand.faults = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._ledger, name)
        return self._slow(real) if name == self._verb else real

    def _slow(self, real: Any) -> Any:
        async def call(*args: Any) -> Any:
            self.sent_at.append(self._clock.monotonic())
            answer = await real(*args)
            self._clock.advance(self._takes_s)
            return answer

        return call


class Held:
    """A handler that runs until the test says so, and its context."""

    def __init__(self, **options: Any) -> None:
        self.contexts: list[Context] = []
        self.go = asyncio.Event()
        self.app = App()

        @self.app.job("t", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, **options)
        async def handler(ctx: Context) -> str:
            self.contexts.append(ctx)
            await self.go.wait()
            return "done"


async def cut_off(stand: Stand, seconds: float) -> None:
    """The ledger does not answer for a while, and nothing but the clock moves."""
    stand.faults.down = True
    stand.clock.advance(seconds)


async def connect(stand: Stand, worker: Worker) -> None:
    """The ledger answers again, and what was under way has come through: nobody waits for the clock any more."""
    stand.faults.down = False
    await stand.until(lambda: not worker.turns._flying, step_s=0.5)


@pytest.mark.requirement("D4")
async def test_a_handler_sees_cancelled_at_the_moment_its_lease_ends_by_its_own_clock(stand: Stand):
    held = Held()
    await stand.submit("t")
    claimed_at = stand.clock.monotonic()
    async with stand.running(held.app) as worker:
        await stand.until(lambda: bool(held.contexts))
        (ctx,) = held.contexts
        await cut_off(stand, claimed_at + LENGTH_S - 0.001 - stand.clock.monotonic())
        assert (ctx.cancelled, ctx.lease_valid) == (False, True)
        stand.clock.advance(0.001)
        assert (ctx.cancelled, ctx.lease_valid) == (True, False)
        await connect(stand, worker)
        held.go.set()


@pytest.mark.requirement("D4")
async def test_a_handler_that_waits_to_be_stopped_comes_back_when_its_lease_is_over(stand: Stand):
    app, begun, back = App(), asyncio.Event(), list[float]()
    clock: FakeClock = stand.clock

    @app.job("t", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    async def handler(ctx: Context) -> None:
        begun.set()
        if not back:
            await ctx.cancel_requested()
            back.append(clock.monotonic())

    job = await stand.submit("t")
    claimed_at = clock.monotonic()
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        # A renewal puts the end off, so that nothing comes back at the end that was.
        await stand.until(lambda: clock.monotonic() >= claimed_at + LENGTH_S + 5, step_s=0.5)
        assert not back
        stand.faults.down = True
        await stand.until(lambda: bool(back), step_s=0.5)
        assert back[0] <= claimed_at + LENGTH_S + 5 + LENGTH_S + 0.5
        await connect(stand, worker)
        await stand.in_state(job, "succeeded", step_s=0.1)


@pytest.mark.requirement("D2", "DJ-7")
async def test_value_returned_after_the_lease_was_lost_is_not_the_result_of_the_job(stand: Stand):
    """The ledger forgives an outage, so the lease may still be good: the job is given back, and runs again from the start."""
    app, begun, go = App(), asyncio.Event(), asyncio.Event()

    @app.job("t", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    async def handler(ctx: Context) -> str:
        begun.set()
        if "again" in seen:
            return "whole"
        await go.wait()
        seen.append("again")
        assert ctx.cancelled
        return "half"

    seen: list[str] = []
    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        await cut_off(stand, LENGTH_S + 1)
        go.set()
        await stand.until(lambda: bool(seen))
        await connect(stand, worker)
        await stand.in_state(job, "succeeded", step_s=0.1)
    assert await job.result(timeout_s=0) == "whole"
    assert "job_released" in await stand.events(job)
    assert (await job.status()).attempts_spent == 0


@pytest.mark.requirement("D31", "D2")
async def test_a_handler_that_never_looked_keeps_its_result_where_the_ledger_forgave(stand: Stand):
    held = Held()
    job = await stand.submit("t")
    async with stand.running(held.app) as worker:
        await stand.until(lambda: bool(held.contexts))
        await cut_off(stand, LENGTH_S + 1)
        await connect(stand, worker)
        held.go.set()
        await stand.in_state(job, "succeeded", step_s=0.1)
    assert await job.result(timeout_s=0) == "done"


@pytest.mark.requirement("D4")
async def test_a_handler_on_a_thread_reads_that_its_lease_is_over(stand: Stand):
    app, begun, go, seen = App(), threading.Event(), threading.Event(), list[bool]()

    @app.job("t", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    def handler(ctx: SyncContext) -> None:
        if seen:
            return
        seen.append(ctx.cancelled)
        begun.set()
        go.wait(20)
        seen.append(ctx.cancelled)

    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        await cut_off(stand, LENGTH_S + 1)
        go.set()
        await stand.until(lambda: len(seen) == 2)
        await connect(stand, worker)
        await stand.in_state(job, "succeeded", step_s=0.1)
    assert seen == [False, True]
    assert "job_released" in await stand.events(job)


@pytest.mark.requirement("D2")
async def test_results_of_a_batch_handler_before_it_checked_its_lease_count(stand: Stand):
    app, begun, go = App(), asyncio.Event(), asyncio.Event()

    @app.job("t", batch=2, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    async def handler(items: list[Item[str]]) -> None:
        first = not begun.is_set()
        begun.set()
        await go.wait()
        for item in items:
            if first and item.payload == "looks first":
                assert item.ctx.cancelled
            item.done("early" if first else "late")

    jobs = await stand.trellis.submit_many("t", ["looks first", "never looks"])
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        await cut_off(stand, LENGTH_S + 1)
        await connect(stand, worker)
        go.set()
        for job in jobs:
            await stand.in_state(job, "succeeded", step_s=0.1)
    assert [await job.result(timeout_s=0) for job in jobs] == ["late", "early"]


@pytest.mark.requirement("D2", "D4")
async def test_a_lease_counts_from_when_its_renewal_was_sent_and_not_from_its_answer(stand: Stand):
    slow, held = SlowAnswers(stand, "renew", takes_s=4.0), Held()
    await stand.submit("t")
    async with stand.running(held.app) as worker:
        await stand.until(lambda: bool(held.contexts))
        await stand.until(lambda: bool(slow.sent_at), step_s=0.5)
        (job,) = worker.held_jobs.jobs.values()
        await stand.until(lambda: job.renewed_at != job.taken_at)
        assert job.renewed_at in slow.sent_at
        assert job.fence == job.renewed_at + LENGTH_S
        held.go.set()


@pytest.mark.requirement("D2", "D4")
async def test_a_lease_counts_from_when_its_claim_was_sent_and_not_from_its_answer(stand: Stand):
    slow, held = SlowAnswers(stand, "turn", takes_s=4.0), Held()
    await stand.submit("t")
    async with stand.running(held.app) as worker:
        await stand.until(lambda: bool(held.contexts))
        (job,) = worker.held_jobs.jobs.values()
        assert job.fence - LENGTH_S in slow.sent_at
        held.go.set()

"""Heartbeats, lost leases, cancels, outages: what a worker does when its right to a job is in question."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.client import JobHandle
from trellis.engine.errors import InvalidTransition, JobCancelled, LeaseConflictError, PermanentError
from trellis.engine.jobs import ReasonCode, Stage
from trellis.engine.records import JobFilter, JobPlace
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.worker import Worker


class Gate:
    """A handler that begins, and ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cut: list[str] = []
        self.open = asyncio.Event()

    async def pass_through(self, ctx: Context) -> None:
        self.begun.append(ctx.job_id)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cut.append(ctx.job_id)
            raise


def gated(gate: Gate, **options: Any) -> App:
    app = App()

    @app.job("t", **options)
    async def handler(ctx: Context) -> str:
        await gate.pass_through(ctx)
        return "done"

    return app


async def lease_end(job: JobHandle) -> float:
    status = await job.status()
    assert status.lease_expires_at is not None
    return status.lease_expires_at.timestamp()


@pytest.mark.requirement("DJ-6", "D4")
async def test_a_long_job_is_renewed_every_heartbeat_and_outlives_ten_leases(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate, lease_s=60, heartbeat_s=15)):
        await stand.until(lambda: bool(gate.begun))
        for _ in range(60):
            target = stand.clock() + 10
            await stand.until(lambda: stand.clock() >= target, step_s=2.0)  # noqa: B023 - used at once
            await stand.sweep()
        assert (await job.status()).state == "running"
        gate.open.set()
        await stand.in_state(job, "succeeded")
    assert gate.begun == [job.id]


@pytest.mark.requirement("D4")
async def test_a_job_shorter_than_one_heartbeat_is_never_renewed(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate, lease_s=60, heartbeat_s=15)):
        await stand.until(lambda: bool(gate.begun))
        claimed_until = await lease_end(job)
        target = claimed_until - 31 + 14
        await stand.until(lambda: stand.clock() >= target, step_s=0.5)
        assert await lease_end(job) == claimed_until

        async def renewed() -> bool:
            return await lease_end(job) >= claimed_until + 14

        await stand.until(renewed, step_s=0.1)
        gate.open.set()


@pytest.mark.requirement("DJ-7", "DJ-21", "DJ-16")
async def test_a_worker_whose_lease_is_lost_stops_its_handler_and_its_outcome_is_dropped(stand: Stand):
    gate = Gate()
    seen: list[Any] = []
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> str:
        try:
            await gate.pass_through(ctx)
        except asyncio.CancelledError:
            seen.append((ctx.lease_valid, ctx.cancelled))
            with pytest.raises(LeaseConflictError):
                await ctx.checkpoint("from a worker that lost its lease")
            seen.append("refused")
        return f"attempt {ctx.attempt}"

    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(lambda: bool(gate.begun))
        await lose_all(stand, worker)
        await stand.until(lambda: not worker.held_jobs.jobs)
        assert gate.cut == [job.id]
        assert seen == [(False, True), "refused"]
        gate.open.set()
        worker.turns.claiming = True
        worker.held_jobs.changed.set()
        await stand.in_state(job, "succeeded", step_s=0.1)
    assert await job.result() != "attempt 1"
    assert (await stand.events(job)).count("job_lease_expired") == 1


async def lose_all(stand: Stand, worker: Worker) -> None:
    """The worker is cut off until the sweep has taken its leases away, then hears of it."""
    worker.turns.claiming = False
    stand.faults.down = True
    for _ in range(80):
        stand.clock.advance(1.0)
        await stand.sweep()
    stand.faults.down = False
    await stand.until(lambda: all(held.fate is not None for held in worker.held_jobs.jobs.values()), step_s=0.5)


@pytest.mark.requirement("DJ-11")
async def test_a_soft_cancel_reaches_the_handler_which_may_checkpoint_and_end(stand: Stand):
    app = App()
    begun = asyncio.Event()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        assert not ctx.cancelled
        begun.set()
        await ctx.cancel_requested()
        assert ctx.cancelled
        await ctx.checkpoint({"stopped_at": 3})

    job = await stand.submit("t")
    async with stand.running(app):
        await stand.until(begun.is_set)
        await job.cancel(mode="soft", cause="no longer wanted")
        assert (await job.status()).cancel_requested
        status = await stand.in_state(job, "cancelled", step_s=0.5)
        assert status.place is JobPlace.ENDED
    assert (await job.events())[-1].role == "worker"
    with pytest.raises(JobCancelled, match="soft cancel"):
        await job.result(timeout_s=0)
    with pytest.raises(InvalidTransition, match="cancelled"):
        await job.cancel()


@pytest.mark.requirement("DJ-11")
async def test_a_sync_handler_sees_a_soft_cancel_too(stand: Stand):
    app = App()
    begun: list[str] = []

    @app.job("t")
    def handler(ctx: SyncContext) -> None:
        begun.append(ctx.job_id)
        while not ctx.cancelled:
            pass

    job = await stand.submit("t")
    async with stand.running(app):
        await stand.until(lambda: bool(begun))
        await job.cancel()
        await stand.in_state(job, "cancelled", step_s=0.5)


@pytest.mark.requirement("DJ-11")
async def test_a_sync_handler_can_wait_for_a_soft_cancel(stand: Stand):
    app = App()
    begun: list[str] = []

    @app.job("t")
    def handler(ctx: SyncContext) -> None:
        begun.append(ctx.job_id)
        ctx.cancel_requested()
        assert ctx.cancelled

    job = await stand.submit("t")
    async with stand.running(app):
        await stand.until(lambda: bool(begun))
        await job.cancel()
        await stand.in_state(job, "cancelled", step_s=0.5)


@pytest.mark.requirement("DJ-11")
async def test_a_hard_cancel_ends_the_job_at_once_and_the_handler_with_the_next_heartbeat(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate)) as worker:
        await stand.until(lambda: bool(gate.begun))
        await job.cancel(mode="hard")
        assert (await job.status()).state == "cancelled"
        await stand.until(lambda: not worker.held_jobs.jobs, step_s=0.5)
    assert gate.cut == [job.id]
    assert (await stand.events(job))[-1] == "job_cancelled"


@pytest.mark.requirement("D19")
async def test_a_job_that_ends_before_its_handler_sees_the_cancel_succeeds_and_the_cancel_is_refused(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate)):
        await stand.until(lambda: bool(gate.begun))
        await job.cancel(mode="soft")
        gate.open.set()
        await stand.in_state(job, "succeeded")
        with pytest.raises(InvalidTransition, match="succeeded"):
            await job.cancel(mode="hard")


def hears(worker: Worker) -> Callable[[], bool]:
    """Whether the wish to cancel has reached every job the worker holds; the handlers need not have looked."""
    return lambda: all(held.cancel_requested for held in worker.held_jobs.jobs.values())


@pytest.mark.requirement("D19")
async def test_a_handler_that_never_noticed_a_soft_cancel_completes_with_its_result(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate)) as worker:
        await stand.until(lambda: bool(gate.begun))
        await job.cancel(mode="soft")
        await stand.until(hears(worker), step_s=0.5)
        gate.open.set()
        await stand.in_state(job, "succeeded")
    assert await job.result(timeout_s=0) == "done"


@pytest.mark.requirement("DJ-11")
@pytest.mark.parametrize("looks,end", [(False, "succeeded"), (True, "cancelled")])
async def test_a_sync_handler_that_returns_has_stopped_only_if_it_had_noticed(stand: Stand, looks: bool, end: str):
    app = App()
    begun, go_on = threading.Event(), threading.Event()

    @app.job("t")
    def handler(ctx: SyncContext) -> str:
        begun.set()
        go_on.wait(20)
        return f"noticed: {ctx.cancelled}" if looks else "finished"

    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        await job.cancel(mode="soft")
        await stand.until(hears(worker), step_s=0.5)
        go_on.set()
        await stand.in_state(job, end)
    if not looks:
        assert await job.result(timeout_s=0) == "finished"


@pytest.mark.requirement("DJ-11")
async def test_a_batch_handler_stops_the_jobs_whose_cancel_it_noticed_before_they_were_done(stand: Stand):
    app = App()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.job("t", batch=4)
    async def handler(items: list[Item[str]]) -> None:
        begun.set()
        await go_on.wait()
        for item in items:
            if item.payload == "looks first":
                assert item.ctx.cancelled
            if item.payload != "leaves it":
                item.done(item.payload)
            if item.payload == "looks after":
                assert item.ctx.cancelled

    wanted = {
        "looks first": "cancelled",
        "looks after": "succeeded",
        "never looks": "succeeded",
        "leaves it": "succeeded",
    }
    jobs = {name: await stand.submit("t", name) for name in wanted}
    async with stand.running(app) as worker:
        await stand.until(begun.is_set)
        for job in jobs.values():
            await job.cancel(mode="soft")
        await stand.until(hears(worker), step_s=0.5)
        go_on.set()
        for name, end in wanted.items():
            await stand.in_state(jobs[name], end)
    assert await jobs["looks after"].result(timeout_s=0) == "looks after"
    assert await jobs["never looks"].result(timeout_s=0) == "never looks"


@pytest.mark.requirement("DJ-11")
@pytest.mark.parametrize("error", [asyncio.CancelledError(), PermanentError("enough")])
async def test_a_handler_that_raises_after_a_soft_cancel_has_stopped(stand: Stand, error: BaseException):
    app, gate = App(), Gate()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        await gate.pass_through(ctx)
        raise error

    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(lambda: bool(gate.begun))
        await job.cancel(mode="soft")
        await stand.until(hears(worker), step_s=0.5)
        gate.open.set()
        await stand.in_state(job, "cancelled")


@pytest.mark.requirement("DJ-11")
async def test_a_handler_that_was_cut_at_its_timeout_and_returns_has_noticed_the_soft_cancel_too(stand: Stand):
    app, gate = App(), Gate()

    @app.job("t", timeout_s=25)
    async def handler(ctx: Context) -> str:
        try:
            await gate.pass_through(ctx)
        except asyncio.CancelledError:
            return "half of it"
        return "all of it"

    job = await stand.submit("t")
    async with stand.running(app) as worker:
        await stand.until(lambda: bool(gate.begun))
        await job.cancel(mode="soft", grace_s=3600)
        await stand.until(hears(worker), step_s=0.5)
        stand.clock.advance(10.5)  # past the timeout, and before the lease that was just renewed is over
        await stand.in_state(job, "cancelled")
    assert gate.cut == [job.id]


@pytest.mark.requirement("D31")
async def test_after_an_outage_of_three_leases_no_running_job_is_run_again(stand: Stand):
    gate = Gate()
    app = gated(gate, lease_s=60, heartbeat_s=15)
    jobs = await stand.trellis.submit_many("t", [None] * 50)
    async with stand.running(app, concurrency=50):
        await stand.until(lambda: len(gate.begun) == 50)
        await stand.sweep()
        stand.faults.down = True
        outage_over = stand.clock() + 180
        await stand.until(lambda: stand.clock() >= outage_over, step_s=1.0)
        gate.open.set()
        await stand.until(lambda: stand.faults.failed.count("turn") > 2, step_s=0.5)
        stand.faults.down = False
        await stand.sweep()
        for job in jobs:
            await stand.in_state(job, "succeeded", step_s=0.5)
    assert len(gate.begun) == 50
    assert gate.cut == []
    assert "renew" in stand.faults.failed


@pytest.mark.requirement("DJ-21")
async def test_a_turn_whose_answer_was_lost_has_one_effect(stand: Stand):
    app = App()
    ran: list[int] = []

    @app.job("t")
    async def handler(ctx: Context, n: int) -> None:
        ran.append(n)

    jobs = await stand.trellis.submit_many("t", list(range(30)))
    stand.faults.lose_answers = 4
    async with stand.running(app, concurrency=8):
        for job in jobs:
            await stand.in_state(job, "succeeded", step_s=0.05)
    assert stand.faults.failed == ["turn"] * 4
    assert sorted(ran) == list(range(30))
    for job in jobs:
        assert await stand.events(job) == ["job_queued", "job_claimed", "job_started", "job_succeeded"]


async def test_the_clock_of_these_tests_does_not_advance_during_a_ledger_call(stand: Stand):
    """A rule of the tests themselves: else a busy machine would decide whether a lease is over."""
    answered, before = asyncio.Event(), stand.clock()
    call = asyncio.ensure_future(stand.faults._asked(answered.wait()))
    await asyncio.sleep(0)
    looks = iter([False] * 5 + [True])
    await stand.until(lambda: next(looks), step_s=1.0)
    assert stand.clock() == before
    answered.set()
    await call
    looks = iter([False] * 5 + [True])
    await stand.until(lambda: next(looks), step_s=1.0)
    assert stand.clock() == before + 5


async def test_a_step_the_ledger_never_accepts_takes_no_other_with_it(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context, n: int) -> None:
        if n == 3:
            raise PermanentError("this one cannot be recorded")

    jobs = await stand.trellis.submit_many("t", list(range(8)))
    stand.faults.refuses = "fail"
    async with stand.running(app, concurrency=8):
        for job in (*jobs[:3], *jobs[4:]):
            await stand.in_state(job, "succeeded", step_s=0.05)
    assert "turn" in stand.faults.failed
    assert (await stand.job(jobs[3])).state == "running", "its lease will run out"


@pytest.mark.requirement("DJ-12", "DJ-18")
async def test_a_completion_that_the_ledger_will_never_have_is_dead_lettered_at_commit(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> str:
        return "made"

    job = await stand.submit("t")
    stand.faults.refuses = "complete"
    async with stand.running(app):
        await stand.in_state(job, "dead_lettered", step_s=0.05)
    (letter,) = await stand.ledger.dead_letters(JobFilter(type="t"), limit=2)
    assert (letter.reason_code, letter.stage) == (ReasonCode.INFRASTRUCTURE_FAILURE, Stage.COMMIT)
    assert await stand.ledger.result(job.id) is None


def sweep_elsewhere(stand: Stand) -> None:
    """A sweep by somebody else, while this whole process stands still."""
    thread = threading.Thread(target=lambda: asyncio.run(stand.sweep()))  # type: ignore[arg-type]
    thread.start()
    thread.join()


@pytest.mark.requirement("DJ-7", "D2")
@pytest.mark.parametrize("taken_away", [False, True])
async def test_past_its_own_fence_a_worker_begins_nothing(stand: Stand, taken_away: bool):
    """The worker stands still (SIGSTOP, a long pause) while it holds a started job that no handler has seen."""
    app = App()
    ran: list[str] = []

    @app.job("t")
    async def handler(ctx: Context) -> None:
        ran.append(ctx.job_id)
        if len(ran) == 1:
            for _ in range(32):
                stand.clock.advance(1)
                if taken_away:
                    sweep_elsewhere(stand)

    await stand.sweep()
    first, second = await stand.trellis.submit_many("t", [None, None])
    worker = stand.worker(app, concurrency=1)
    worker.turns._pace.per_s = 1_000.0
    await worker.start(listening=False)
    await stand.until(lambda: not worker.held_jobs.jobs and ran != [])
    worker.turns.claiming = False
    events = await stand.events(second)
    assert events[:3] == ["job_queued", "job_claimed", "job_started"]
    assert events[3] == ("job_lease_expired" if taken_away else "job_released")
    await worker.drain()
    assert (await stand.events(first))[3] == ("job_lease_expired" if taken_away else "job_succeeded")


async def test_a_handler_that_must_not_overlap_is_stopped_when_its_lease_is_in_doubt(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate, on_lease_doubt="stop")) as worker:
        await stand.until(lambda: bool(gate.begun))
        worker.turns.claiming = False
        stand.faults.down = True
        await stand.until(lambda: gate.cut == [job.id], step_s=0.5)
        stand.faults.down = False
        status = await stand.in_state(job, "queued", step_s=0.5)
        assert (status.attempt, status.max_attempts) == (1, 6)
    assert (await stand.events(job))[-1] == "job_released"


async def test_a_handler_past_its_timeout_is_cut_and_retried(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate, timeout_s=5)) as worker:
        await stand.until(lambda: bool(gate.begun))
        began = stand.clock()
        worker.turns.claiming = False
        await stand.until(lambda: gate.cut == [job.id], step_s=0.1)
        assert 5 <= stand.clock() - began <= 6
        await stand.in_state(job, "queued")
    event = (await job.events())[-1]
    assert event.type == "job_retry_scheduled"
    assert "no end after 5 s" in (event.cause or "")


@pytest.mark.requirement("D4")
async def test_a_failed_renewal_is_tried_again_at_half_of_what_is_left(stand: Stand):
    gate = Gate()
    job = await stand.submit("t")
    async with stand.running(gated(gate, lease_s=60, heartbeat_s=15)) as worker:
        await stand.until(lambda: bool(gate.begun))
        claimed_at = await lease_end(job) - 31
        stand.faults.down = True
        tries: list[float] = []

        def tried() -> bool:
            if stand.faults.failed.count("renew") > len(tries):
                tries.append(stand.clock() - claimed_at)
            return len(tries) == 4

        await stand.until(tried, step_s=0.05)
        stand.faults.down = False
        gate.open.set()
        await stand.in_state(job, "succeeded", step_s=0.5)
        await stand.until(lambda: not worker.turns._flying, step_s=0.5)
    # The lease holds for 31 s: after 15, then half of 16, of 8, of 4.
    assert tries == pytest.approx([15, 23, 27, 29], abs=1.0)

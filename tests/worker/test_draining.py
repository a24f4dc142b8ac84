"""A worker that stops: what has not begun goes back, what runs may end, what does not end in time is given back."""

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.worker.app import App
from trellis.worker.context import Context, SyncContext
from trellis.worker.outcomes import Snooze
from trellis.worker.worker import Drained, ExitCode, exit_code, run_until_signalled


class Slow:
    """A handler that waits for the test."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.release = asyncio.Event()
        self.app = App()

        @self.app.job("t")
        async def handler(ctx: Context, n: int = 0) -> None:
            self.begun.append(n)
            await self.release.wait()


async def test_a_draining_worker_lets_running_handlers_end_and_claims_nothing_more(stand: Stand):
    slow = Slow()
    jobs = await stand.trellis.submit_many("t", [0, 1, 2, 3])
    worker = stand.worker(slow.app, concurrency=2)
    await worker.start()
    await stand.until(lambda: len(slow.begun) == 2)
    draining = asyncio.ensure_future(worker.drain())
    await stand.until(lambda: worker.stopping)
    slow.release.set()
    assert await draining == Drained(not_begun=0, cut_short=0, unsettled=0)
    assert sorted([(await job.status()).state for job in jobs]) == ["queued", "queued", "succeeded", "succeeded"]
    assert len(slow.begun) == 2


async def test_jobs_held_but_not_begun_are_given_back_with_their_attempt_spared(stand: Stand):
    slow = Slow()
    jobs = await stand.trellis.submit_many("t", [0, 1, 2])
    worker = stand.worker(slow.app, concurrency=1)
    worker.turns._pace.per_s = 30.0  # as if jobs had been short: one started ahead, more claimed
    await worker.start()
    await stand.until(lambda: len(worker.held_jobs.jobs) == 3)
    draining = asyncio.ensure_future(worker.drain())
    for job in jobs[1:]:
        status = await stand.in_state(job, "queued")
        assert (status.attempt, status.max_attempts) == (1, 6)
        assert (await stand.events(job))[-1] == "job_released"
    slow.release.set()
    assert await draining == Drained(not_begun=2)


async def test_handlers_that_do_not_end_in_time_are_cut_and_given_back(stand: Stand):
    slow = Slow()
    job = await stand.submit("t", 0)
    worker = stand.worker(slow.app, drain_s=10.0, settle_s=10_000.0)
    await worker.start()
    await stand.until(lambda: bool(slow.begun))
    draining = asyncio.ensure_future(worker.drain())
    await stand.until(draining.done, step_s=0.5)
    assert draining.result() == Drained(cut_short=1)
    status = await job.status()
    assert (status.state, status.attempt, status.max_attempts) == ("queued", 1, 6)
    assert (await stand.events(job))[-1] == "job_released"


async def test_a_sync_handler_that_never_ends_is_given_back_too_and_does_not_keep_the_worker(stand: Stand):
    app = App()
    begun, forever = threading.Event(), threading.Event()

    @app.job("t")
    def handler(ctx: SyncContext) -> str:
        begun.set()
        forever.wait()
        return "too late"

    job = await stand.submit("t")
    worker = stand.worker(app, drain_s=0.0)
    await worker.start()
    await stand.until(begun.is_set)
    assert await worker.drain() == Drained(cut_short=1)
    assert (await job.status()).state == "queued"
    forever.set()


async def test_a_long_handler_can_see_that_its_worker_stops_and_put_itself_off(stand: Stand):
    app = App()
    begun = asyncio.Event()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        begun.set()
        await stand.until(lambda: ctx.stopping)
        await ctx.checkpoint("half way")
        raise Snooze(0)

    job = await stand.submit("t")
    worker = stand.worker(app)
    await worker.start()
    await stand.until(begun.is_set)
    assert await worker.drain() == Drained()
    assert (await stand.events(job))[-1] == "job_snoozed"


async def test_outcomes_that_cannot_be_written_to_the_ledger_are_logged(stand: Stand):
    slow = Slow()
    await stand.submit("t", 0)
    worker = stand.worker(slow.app, drain_s=5.0, settle_s=5.0)
    await worker.start()
    await stand.until(lambda: bool(slow.begun))
    stand.faults.down = True
    slow.release.set()
    draining = asyncio.ensure_future(worker.drain())
    await stand.until(draining.done, step_s=0.5)
    assert draining.result().unsettled == 1
    assert exit_code(draining.result()) is ExitCode.UNSETTLED


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
async def test_the_first_signal_drains_and_the_second_hurries(stand: Stand, signals: list[signal.Signals]):
    slow = Slow()
    job = await stand.submit("t", 0)
    worker = stand.worker(slow.app)
    running = asyncio.ensure_future(run_until_signalled(worker))
    await stand.until(lambda: bool(slow.begun))
    for number in signals:
        os.kill(os.getpid(), number)
        await stand.until(lambda: worker.stopping)
    if len(signals) == 1:
        slow.release.set()
    code = await asyncio.wait_for(running, 60)
    hurried = len(signals) == 2
    assert code is (ExitCode.GAVE_BACK if hurried else ExitCode.DRAINED)
    assert (await job.status()).state == ("queued" if hurried else "succeeded")


async def test_error_in_the_turn_loop_ends_the_worker(stand: Stand):
    slow = Slow()
    worker = stand.worker(slow.app)

    async def broken(turn: Any) -> Any:
        raise AssertionError("the ledger broke its contract")

    stand.faults.turn = broken  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="broke its contract"):
        await asyncio.wait_for(run_until_signalled(worker), 60)


async def test_jobs_whose_claim_is_answered_after_the_drain_began_are_given_back_unseen(stand: Stand):
    slow = Slow()
    job = await stand.submit("t", 0)
    stand.faults.answers.clear()
    worker = stand.worker(slow.app)
    await worker.start()
    await stand.in_state(job, "running")
    draining = asyncio.ensure_future(worker.drain())
    await stand.until(lambda: worker.stopping)
    stand.faults.answers.set()
    await asyncio.wait_for(draining, 60)
    assert slow.begun == []
    assert (await job.status()).state == "queued"
    assert (await stand.events(job))[-1] == "job_released"

"""A worker on the bus whose jobs are cancelled, revoked, hang or run too long, and one that drains itself."""

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from tests.worker.on_bus_rig import TOPIC, WORKER, Rig
from trellis.bus.messages import NOT_BEGUN, Dispatch, ErrorCode, JobProgress, JobResult, Status
from trellis.worker.app import App
from trellis.worker.context import Context, SyncContext
from trellis.worker.on_bus.context import BusContext
from trellis.worker.worker import Drained, ExitCode, exit_code, run_until_signalled


@pytest.fixture
def rig() -> Rig:
    return Rig()


class Slow:
    """A handler that waits for the test."""

    def __init__(self, **settings: Any) -> None:
        self.begun: list[BusContext] = []
        self.cut: list[str] = []
        self.go = asyncio.Event()
        self.app = App()

        @self.app.job(TOPIC, **settings)
        async def handler(ctx: BusContext) -> str:
            self.begun.append(ctx)
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cut.append(ctx.job_id)
                raise
            return "done"


class Blocking:
    """The same on a thread."""

    def __init__(self, *, looks: bool = False) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.app = App()

        @self.app.job(TOPIC)
        def handler(ctx: SyncContext) -> str:
            self.begun.set()
            self.go.wait(30)
            return "stopped" if looks and ctx.cancelled else "done"


async def test_a_cancelled_handler_is_cut_after_its_grace(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app, cancel_grace_s=2):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        await rig.control.cancel(order.request.job_id)
        await rig.quiet()
        assert (slow.begun[0].cancelled, slow.cut) == (True, [])
        result = await rig.result(order, step_s=0.5)
    assert (result.status, result.error_message, slow.cut) == (Status.CANCELLED, "not wanted", ["job-1"])


async def test_handler_may_stop_on_a_cancel_request(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def handler(ctx: Context) -> str:
        await ctx.cancel_requested()
        return "tidied up"

    async with rig.serving(app, cancel_grace_s=60) as worker:
        order = await rig.control.dispatch()
        await rig.until(lambda: worker.running == 1)
        await rig.control.cancel(order.request.job_id)
        result = await rig.result(order)
    assert (result.status, result.result_ptr) == (Status.CANCELLED, "")


@pytest.mark.parametrize("looks, status", [(True, Status.CANCELLED), (False, Status.SUCCEEDED)])
async def test_a_thread_cannot_be_cut_and_what_it_finished_unasked_counts(rig: Rig, looks: bool, status: Status):
    blocking = Blocking(looks=looks)
    async with rig.serving(blocking.app, cancel_grace_s=0):
        order = await rig.control.dispatch()
        await rig.until(blocking.begun.is_set)
        await rig.control.cancel(order.request.job_id)
        await rig.pass_time(3)
        assert rig.control.results == []
        blocking.go.set()
        assert (await rig.result(order)).status is status


async def test_cancel_request_in_the_answer_to_a_progress_report_is_obeyed(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        rig.control.answer = lambda said: "cancel" if isinstance(said, JobProgress) else "accepted"
        assert (await rig.result(order, step_s=0.5)).status is Status.CANCELLED


async def test_a_job_that_waits_for_a_slot_is_cancelled_at_once(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app, max_parallel_jobs=1):
        await rig.control.dispatch()
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        await rig.control.cancel(order.request.job_id)
        assert (await rig.result(order)).status is Status.CANCELLED
        slow.go.set()
        await rig.until(lambda: len(rig.control.results) == 2)
    assert len(slow.begun) == 1


async def test_a_cancellation_of_another_job_or_another_dispatch_changes_nothing(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app, cancel_grace_s=0):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        await rig.control.cancel("job-1")
        await rig.control.cancel("job-1@2")
        await rig.control.cancel(order.request.job_id, Dispatch(dispatch_id="another"))
        await rig.pass_time(2)
        slow.go.set()
        assert (await rig.result(order)).status is Status.SUCCEEDED


@pytest.mark.requirement("BUS-6")
async def test_a_revoked_attempt_is_cut_and_reports_nothing(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        rig.control.answer = lambda said: "refused: stale"
        await rig.until(lambda: not worker.attempts, step_s=1.0)
        assert not slow.begun[0].lease_valid
    assert (slow.cut, rig.control.results) == (["job-1"], [])


async def test_a_thread_whose_attempt_was_revoked_ends_in_silence(rig: Rig):
    blocking = Blocking()
    async with rig.serving(blocking.app) as worker:
        await rig.control.dispatch()
        await rig.until(blocking.begun.is_set)
        rig.control.answer = lambda said: "refused: stale"
        await rig.until(lambda: bool(rig.control.beats), step_s=1.0)
        await rig.pass_time(60, step_s=5.0)
        assert (len(rig.control.beats), worker.running) == (1, 1)
        blocking.go.set()
        await rig.until(lambda: not worker.attempts)
    assert rig.control.results == []


async def test_a_hung_handler_keeps_saying_that_it_is_alive(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app):
        order = await rig.control.dispatch(env={"trellis.lease_s": "6"})
        await rig.until(lambda: bool(slow.begun))
        await rig.pass_time(20)
        assert len(rig.control.beats) == 10
        said = rig.control.beats[0]
        assert (said.job_id, said.status, said.dispatch) == (order.request.job_id, Status.RUNNING, order.dispatch)
        assert slow.begun[0].lease_valid
        slow.go.set()
        await rig.result(order)
        told = len(rig.control.beats)
        await rig.pass_time(10)
    assert len(rig.control.beats) == told


async def test_signs_of_life_outlive_a_bus_that_is_away(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app):
        order = await rig.control.dispatch(env={"trellis.lease_s": "6"})
        await rig.until(lambda: bool(slow.begun))
        rig.line.down = True
        await rig.pass_time(10)
        assert (rig.control.beats, slow.begun[0].lease_valid, slow.cut) == ([], False, [])
        rig.line.down = False
        await rig.until(lambda: bool(rig.control.beats), step_s=0.5)
        assert slow.begun[0].lease_valid
        slow.go.set()
        assert (await rig.result(order)).status is Status.SUCCEEDED


@pytest.mark.requirement("D4")
async def test_a_bus_handler_sees_cancelled_when_its_lease_ends_by_its_own_clock(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app):
        order = await rig.control.dispatch(env={"trellis.lease_s": "6"})
        await rig.until(lambda: bool(slow.begun))
        (ctx,) = slow.begun
        rig.line.down = True
        assert not ctx.cancelled
        await rig.pass_time(10)
        assert (ctx.cancelled, ctx.lease_valid, slow.cut) == (True, False, [])
        rig.line.down = False
        slow.go.set()
        result = await rig.result(order, step_s=0.5)
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, "WORKER_UNAVAILABLE")


@pytest.mark.requirement("D4")
async def test_a_handler_that_waits_to_be_stopped_comes_back_when_its_lease_is_over(rig: Rig):
    app, begun, back = App(), asyncio.Event(), asyncio.Event()

    @app.job(TOPIC)
    async def handler(ctx: BusContext) -> str:
        begun.set()
        await ctx.cancel_requested()
        back.set()
        return "half"

    async with rig.serving(app):
        order = await rig.control.dispatch(env={"trellis.lease_s": "6"})
        await rig.until(begun.is_set)
        await rig.pass_time(20)
        assert not back.is_set(), "signs of life are answered, so its lease goes on"
        rig.line.down = True
        await rig.until(back.is_set, step_s=0.5)
        rig.line.down = False
        assert (await rig.result(order, step_s=0.5)).status is Status.FAILED_RETRYABLE


@pytest.mark.parametrize("lease_s", ["", "0", "-1", "nan", "soon", "1e999"])
async def test_an_invalid_lease_in_a_bus_request_counts_as_none(rig: Rig, lease_s: str):
    slow = Slow()
    async with rig.serving(slow.app):
        await rig.control.dispatch(env={"trellis.lease_s": lease_s})
        await rig.until(lambda: bool(slow.begun))
        await rig.pass_time(21, step_s=1.0)
        assert len(rig.control.beats) == 2
        slow.go.set()
        await rig.until(lambda: bool(rig.control.results))


@pytest.mark.parametrize(
    "value, percent, step, message",
    [
        (40, 40, "", "40"),
        (140.5, 100, "", "140.5"),
        ({"percent": 12, "step": "parse", "message": "page 1"}, 12, "parse", "page 1"),
        ({"page": 1, "of": 3}, 0, "", '{"page":1,"of":3}'),
        ({"step": "start"}, 0, "", '{"step":"start"}'),
        ("halfway", 0, "", '"halfway"'),
        (True, 0, "", "true"),
    ],
)
async def test_progress_is_published_within_a_second(rig: Rig, value: Any, percent: int, step: str, message: str):
    slow = Slow()
    async with rig.serving(slow.app):
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        slow.begun[0].progress("first")
        slow.begun[0].progress(value)
        await rig.pass_time(1)
        (said,) = rig.control.beats
        assert (said.percent, said.step_id, said.message) == (percent, step, message)
        slow.go.set()
        await rig.until(lambda: bool(rig.control.results))


@pytest.mark.parametrize("by", ["the type", "the deadline"])
async def test_a_handler_that_runs_longer_than_it_may_is_cut(rig: Rig, by: str):
    slow = Slow(**({"timeout_s": 3.0} if by == "the type" else {}))
    budget = {"deadline_ms": 3_000} if by == "the deadline" else {"deadline_ms": 60_000}
    async with rig.serving(slow.app):
        order = await rig.control.dispatch(budget=budget)
        await rig.until(lambda: bool(slow.begun))
        result = await rig.result(order, step_s=0.5)
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, ErrorCode.TIMEOUT.name)
    assert (result.error_message, result.execution_ms) == ("no end after 3 s", 3_000)


async def test_the_handshake_names_the_topics_and_heartbeats_say_how_the_worker_is(rig: Rig):
    slow = Slow()
    chosen = {
        "pool": "code",
        "region": "north",
        "capabilities": ("gpu",),
        "labels": {"zone": "a"},
        "max_parallel_jobs": 3,
        "heartbeat_s": 5.0,
    }
    async with rig.serving(slow.app, **chosen):
        await rig.until(lambda: bool(rig.control.heartbeats))
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        await rig.pass_time(10)
        first, *_, last = rig.control.heartbeats
        assert (first.active_jobs, last.active_jobs, len(rig.control.heartbeats)) == (0, 1, 3)
        assert (last.worker_id, last.pool, last.region, last.type) == (WORKER, "code", "north", "trellis")
        assert (last.capabilities, last.labels, last.max_parallel_jobs) == (("gpu",), {"zone": "a"}, 3)
        slow.go.set()
        await rig.until(lambda: bool(rig.control.results))
    (met,) = rig.control.handshakes
    assert (met.component_id, met.role, met.ready_topics, met.supported_versions) == (WORKER, "worker", (TOPIC,), (1,))
    assert met.capabilities["cancel"]


async def test_a_handler_that_lets_nothing_else_run_is_named_in_the_log(rig: Rig, caplog: pytest.LogCaptureFixture):
    app = App()

    @app.job(TOPIC)
    async def blocks(ctx: BusContext) -> None:
        await asyncio.sleep(0)
        rig.clock.advance(40)  # as long as it blocks

    async with rig.serving(app):
        await rig.pass_time(20)
        assert "event_loop_stood_still" not in caplog.text
        order = await rig.control.dispatch()
        await rig.result(order)
    (told,) = [line for line in caplog.text.splitlines() if "event_loop_stood_still" in line]
    assert order.request.job_id in told


async def test_the_handshake_is_repeated_after_the_bus_was_away_and_every_now_and_then(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app):
        await rig.until(lambda: len(rig.control.handshakes) == 1)
        rig.line.down = True
        await rig.pass_time(6)
        rig.line.down = False
        await rig.pass_time(5)
        assert len(rig.control.handshakes) == 2
        await rig.pass_time(31)
        assert len(rig.control.handshakes) == 3


async def test_a_draining_worker_lets_running_handlers_end_and_gives_back_what_waits(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app, max_parallel_jobs=1) as worker:
        running = await rig.control.dispatch()
        waiting = await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        draining = asyncio.ensure_future(worker.drain())
        given_back = await rig.result(waiting)
        assert (given_back.status, given_back.error_code) == (Status.FAILED_RETRYABLE, NOT_BEGUN)
        assert rig.control.heartbeats[-1].active_jobs == 1
        assert slow.begun[0].stopping
        slow.go.set()
        await rig.until(draining.done)
        assert await draining == Drained(not_begun=1)
        assert rig.control.result_of(running).status is Status.SUCCEEDED
    assert len(slow.begun) == 1


async def test_a_draining_worker_says_that_it_is_full_and_then_nothing(rig: Rig):
    slow = Slow()
    async with rig.serving(slow.app, max_parallel_jobs=4, drain_s=30) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        draining = asyncio.ensure_future(worker.drain())
        await rig.quiet()
        assert rig.control.heartbeats[-1].active_jobs == 4
        slow.go.set()
        await rig.until(draining.done)
        told = len(rig.control.heartbeats)
        await rig.pass_time(20)
    assert len(rig.control.heartbeats) == told


@pytest.mark.parametrize("kind", [Slow, Blocking])
async def test_bus_job_that_does_not_end_in_time_is_returned(rig: Rig, kind: type[Slow | Blocking]):
    slow = kind()
    async with rig.serving(slow.app, drain_s=10) as worker:
        order = await rig.control.dispatch()
        await rig.until(lambda: worker.running == 1)
        draining = asyncio.ensure_future(worker.drain())
        await rig.until(draining.done, step_s=1.0)
        drained, result = await draining, rig.control.result_of(order)
        assert (drained, exit_code(drained)) == (Drained(cut_short=1), ExitCode.GAVE_BACK)
        assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, "WORKER_UNAVAILABLE")
        slow.go.set()


async def test_hurry_does_not_wait_for_handlers(rig: Rig):
    slow, hurry = Slow(), asyncio.Event()
    async with rig.serving(slow.app, drain_s=1_000) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        draining = asyncio.ensure_future(worker.drain(hurry))
        await rig.quiet()
        assert not draining.done()
        hurry.set()
        await rig.until(draining.done)
        assert (await draining).cut_short == 1


async def test_results_that_nobody_has_when_the_worker_ends_are_counted(rig: Rig):
    slow = Slow()
    rig.control.answer = lambda said: None if isinstance(said, JobResult) else "accepted"
    async with rig.serving(slow.app, settle_s=3) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(slow.begun))
        slow.go.set()
        await rig.until(lambda: bool(rig.control.results))
        draining = asyncio.ensure_future(worker.drain())
        await rig.until(draining.done, step_s=1.0)
        drained = await draining
        assert (drained, exit_code(drained)) == (Drained(unsettled=1), ExitCode.UNSETTLED)


async def test_job_does_not_start_while_the_worker_drains(rig: Rig):
    slow = Slow()
    rig.control.answer = lambda said: None
    async with rig.serving(slow.app) as worker:
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(rig.control.starts))
        draining = asyncio.ensure_future(worker.drain())
        await rig.quiet()
        rig.control.answer = lambda said: "accepted"
        await rig.until(draining.done, step_s=0.5)
        assert rig.control.result_of(order).error_code == NOT_BEGUN
    assert slow.begun == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_worker(rig: Rig, number: signal.Signals):
    slow = Slow()
    await rig.control.open()
    worker = rig.worker(slow.app)
    running = asyncio.ensure_future(run_until_signalled(worker))
    await rig.until(lambda: bool(rig.control.heartbeats))
    order = await rig.control.dispatch()
    await rig.until(lambda: bool(slow.begun))
    os.kill(os.getpid(), number)
    await rig.until(lambda: worker.stopping)
    slow.go.set()
    await rig.until(running.done)
    assert (await running, rig.control.result_of(order).status) == (ExitCode.DRAINED, Status.SUCCEEDED)
    await rig.bus.close()

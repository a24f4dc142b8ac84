"""A worker on the bus: each order runs at most once, only when it may, and its result is repeated until somebody has it."""

import asyncio
import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker.on_bus_rig import TOPIC, WORKER, Rig
from trellis.bus.errors import PointerUnavailable
from trellis.bus.messages import (
    LEASE_IN_ENV,
    NOT_BEGUN,
    Dispatch,
    ErrorCode,
    JobOrder,
    JobProgress,
    JobResult,
    Packet,
    Status,
)
from trellis.bus.pointers import PointerPart, make_pointers
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import RETRY_ATTEMPT
from trellis.bus.wire.cap import decode, encode
from trellis.bus.wire.signatures import PacketKeys
from trellis.engine.errors import OptionInvalid, PermanentError, TransientError, ValidationError
from trellis.storage.objects.open import open_objects
from trellis.worker.app import App
from trellis.worker.context import Context, Item, SyncContext
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.reports import BusPresence
from trellis.worker.outcomes import Snooze

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Document:
    title: str
    pages: int = 1


@dataclass
class Indexed:
    title: str
    words: int


@pytest.fixture
def rig() -> Rig:
    return Rig()


class Echo:
    """A handler that notes what it was called with, and waits while it is held."""

    def __init__(self, *, held: bool = False, **settings: Any) -> None:
        self.called: list[Any] = []
        self.contexts: list[BusContext] = []
        self.cut: list[str] = []
        self.go = asyncio.Event()
        if not held:
            self.go.set()
        self.app = App()

        @self.app.job(TOPIC, **settings)
        async def handler(ctx: BusContext, payload: Any) -> Any:
            self.called.append(payload)
            self.contexts.append(ctx)
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cut.append(ctx.job_id)
                raise
            return payload


@pytest.mark.requirement("BUS-2")
async def test_bus_handler_gets_a_typed_payload_and_returns_a_result_pointer(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def index(ctx: Context, doc: Document) -> Indexed:
        return Indexed(title=doc.title, words=100 * doc.pages)

    async with rig.serving(app):
        order = await rig.control.dispatch(context_ptr=rig.kept.put({"title": "Violin", "pages": 3}))
        result = await rig.result(order)
    assert (result.status, result.worker_id, result.error_code) == (Status.SUCCEEDED, WORKER, "")
    assert (result.job_id, result.dispatch) == (order.request.job_id, order.dispatch)
    assert rig.kept.value(result.result_ptr) == {"title": "Violin", "words": 300}


async def test_an_order_without_a_context_has_no_payload_and_nothing_returned_has_no_pointer(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        result = await rig.result(await rig.control.dispatch())
    assert (echo.called, result.status, result.result_ptr) == ([None], Status.SUCCEEDED, "")


async def test_the_time_that_a_handler_took_is_reported(rig: Rig):
    echo = Echo(held=True)
    async with rig.serving(echo.app):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(echo.called))
        await rig.pass_time(1.5)
        echo.go.set()
        assert (await rig.result(order)).execution_ms == 1500


async def test_the_same_order_twice_runs_once(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        order = await rig.control.dispatch()
        await rig.control.send(order)
        await rig.result(order)
        await rig.control.send(order, subject=f"worker.{WORKER}.jobs")
        await rig.quiet()
    assert (len(echo.called), len(rig.control.starts), len(rig.control.results)) == (1, 1, 1)


async def test_an_order_for_another_worker_is_left_alone(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        order = rig.control.order()
        await rig.control.send(replace(order, dispatch=Dispatch(dispatch_id="d", worker_id="w-2")))
        await rig.quiet()
    assert (echo.called, rig.control.starts, rig.control.results) == ([], [], [])


async def test_worker_accepts_orders_of_configured_senders_only(rig: Rig):
    echo = Echo()
    stranger = rig.bus.sibling("stranger")
    async with rig.serving(echo.app, orders_from=("trellis",)):
        await stranger.publish(TOPIC, rig.control.order(asks=False), trace_id="t")
        await rig.quiet()
        assert echo.called == []
        await rig.result(await rig.control.dispatch())
    assert len(echo.called) == 1


async def test_start_is_granted_only_by_the_sender_of_the_order(rig: Rig):
    echo, stranger = Echo(), rig.bus.sibling("stranger")

    async def allow(received: ReceivedPacket) -> None:
        if isinstance(received.packet.body, JobProgress):
            await received.answer(JobProgress(job_id=received.packet.body.job_id, message="accepted"))

    await stranger.listen("sys.job.progress", allow)
    rig.control.answer = lambda said: None
    async with rig.serving(echo.app):
        await rig.control.dispatch()
        await rig.quiet()
        assert echo.called == []


async def test_a_start_that_is_refused_is_no_start_and_has_no_result(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "refused: started already"
    async with rig.serving(echo.app):
        await rig.control.dispatch()
        await rig.until(lambda: bool(rig.control.starts))
        await rig.quiet()
    assert (echo.called, rig.control.results) == ([], [])


async def test_a_start_is_asked_for_again_with_the_same_token_when_the_answer_is_lost(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        rig.line.lost_answers = 2
        order = await rig.control.dispatch()
        await rig.result(order, step_s=0.1)
    assert len(echo.called) == 1
    assert len({said.message for said in rig.control.starts}) == 1
    assert [said.dispatch for said in rig.control.starts] == [order.dispatch] * 3


async def test_a_start_that_nobody_answers_is_given_up(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: None
    async with rig.serving(echo.app) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(rig.control.starts))
        began = rig.clock.monotonic()
        await rig.until(lambda: not worker.attempts, step_s=0.5)
        took_s = rig.clock.monotonic() - began
    assert (echo.called, rig.control.results) == ([], [])
    assert 30 <= took_s <= 35, "not before its lease is over, and not much later"


@pytest.mark.requirement("BUS-5", "BUS-10")
async def test_a_control_plane_that_begins_anew_finds_the_worker_still_asking(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: None
    async with rig.serving(echo.app):
        order = await rig.control.dispatch()
        await rig.pass_time(20)
        assert echo.called == []
        rig.control.answer = lambda said: "accepted"
        result = await rig.result(order, step_s=0.5)
    assert (result.status, len(echo.called)) == (Status.SUCCEEDED, 1)
    assert len({start.message for start in rig.control.starts}) == 1


@pytest.mark.parametrize("why", ["drains", "cancelled"])
async def test_worker_stops_asking_for_the_start_of_an_unwanted_job(rig: Rig, why: str):
    echo = Echo()
    rig.control.answer = lambda said: None
    async with rig.serving(echo.app, drain_s=60) as worker:
        order = await rig.control.dispatch(env={LEASE_IN_ENV: "50"})
        await rig.until(lambda: bool(rig.control.starts))
        began, draining = rig.clock.monotonic(), None
        if why == "drains":
            draining = asyncio.ensure_future(worker.drain())
        else:
            await rig.control.cancel(order.request.job_id)
        await rig.until(lambda: not worker.attempts, step_s=0.5)
        assert rig.clock.monotonic() - began <= 10
        if draining is not None:
            await draining
    assert echo.called == []


@pytest.mark.parametrize("then, runs", [("accepted", 1), ("refused: stale", 0)])
async def test_a_yes_that_is_older_than_the_lease_is_asked_for_again(rig: Rig, then: str, runs: int):
    echo = Echo()

    def answer(said: JobProgress | JobResult) -> str:
        if len(rig.control.starts) == 1 and isinstance(said, JobProgress):
            rig.clock.advance(0.6)  # on its way back, or the process stood still
            return "accepted"
        return then

    rig.control.answer = answer
    async with rig.serving(echo.app) as worker:
        await rig.control.dispatch(env={LEASE_IN_ENV: "0.5"})
        await rig.until(lambda: len(rig.control.starts) == 2 and not worker.attempts)
    assert len(echo.called) == runs
    assert len({said.message for said in rig.control.starts}) == 1


async def test_each_order_requests_its_start_with_its_own_token(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        for _ in range(2):
            await rig.result(await rig.control.dispatch())
    assert len({said.message for said in rig.control.starts}) == 2


async def test_a_job_that_was_cancelled_before_its_start_is_reported_and_does_not_run(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "cancel" if isinstance(said, JobProgress) else "accepted"
    async with rig.serving(echo.app):
        assert (await rig.result(await rig.control.dispatch())).status is Status.CANCELLED
    assert echo.called == []


@pytest.mark.requirement("BUS-10")
async def test_a_result_is_repeated_until_it_is_answered(rig: Rig):
    echo = Echo(held=True)
    async with rig.serving(echo.app) as worker:
        order = await rig.control.dispatch(context_ptr=rig.kept.put("x"))
        await rig.until(lambda: bool(echo.called))
        rig.line.lost_questions, rig.line.lost_answers = 3, 2
        echo.go.set()
        await rig.result(order, step_s=0.5)
        await rig.until(lambda: not worker.attempts, step_s=0.5)
    assert len(set(rig.control.results)) == 1
    assert len(rig.control.results) == 3
    assert len(echo.called) == 1


async def test_a_result_waits_until_the_bus_is_back(rig: Rig):
    echo = Echo(held=True)
    async with rig.serving(echo.app):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(echo.called))
        rig.line.down = True
        echo.go.set()
        await rig.pass_time(60)
        assert rig.control.results == []
        rig.line.down = False
        assert (await rig.result(order, step_s=0.5)).status is Status.SUCCEEDED


async def test_a_refused_result_is_not_repeated(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "accepted" if isinstance(said, JobProgress) else "refused: late"
    async with rig.serving(echo.app) as worker:
        await rig.result(await rig.control.dispatch())
        await rig.until(lambda: not worker.attempts)
        await rig.pass_time(30)
    assert len(rig.control.results) == 1


async def test_a_result_that_nobody_answers_is_given_up_in_the_end(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "accepted" if isinstance(said, JobProgress) else None
    async with rig.serving(echo.app, result_s=20) as worker:
        await rig.result(await rig.control.dispatch())
        await rig.until(lambda: not worker.attempts, step_s=0.5)
        told = len(rig.control.results)
        await rig.pass_time(60)
    assert 1 < told == len(rig.control.results)


async def test_an_unanswered_result_does_not_keep_its_slot(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "accepted" if isinstance(said, JobProgress) else None
    async with rig.serving(echo.app, max_parallel_jobs=1, settle_s=1):
        for _ in range(3):
            await rig.control.dispatch()
        await rig.until(lambda: len(echo.called) == 3)


async def test_with_too_many_results_unanswered_nothing_new_begins(rig: Rig):
    echo = Echo()
    rig.control.answer = lambda said: "accepted" if isinstance(said, JobProgress) else None
    async with rig.serving(echo.app, max_parallel_jobs=1, unanswered_max=1, settle_s=1):
        for _ in range(3):
            await rig.control.dispatch()
        await rig.quiet()
        assert len(echo.called) == 2
        rig.control.answer = lambda said: "accepted"
        await rig.until(lambda: len(echo.called) == 3, step_s=0.5)


async def test_no_more_handlers_run_than_allowed(rig: Rig):
    echo = Echo(held=True)
    async with rig.serving(echo.app, max_parallel_jobs=2) as worker:
        for _ in range(5):
            await rig.control.dispatch()
        await rig.quiet()
        assert (len(echo.called), worker.running, worker.waiting) == (2, 2, 3)
        echo.go.set()
        await rig.until(lambda: len(echo.called) == 5)


async def test_job_beyond_the_backlog_of_a_bus_worker_is_returned_at_once(rig: Rig):
    echo = Echo(held=True)
    async with rig.serving(echo.app, max_parallel_jobs=1, backlog_max=1):
        for _ in range(2):
            await rig.control.dispatch()
        result = await rig.result(await rig.control.dispatch())
        assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, NOT_BEGUN)
        assert result.error_code_enum == ErrorCode.RESOURCE_EXHAUSTED
        echo.go.set()
        await rig.until(lambda: len(echo.called) == 2)


async def test_an_order_of_a_topic_that_is_not_served_goes_back(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        result = await rig.result(await rig.control.dispatch_to(WORKER, topic="job.other"))
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, NOT_BEGUN)
    assert "job.echo" in result.error_message


@pytest.mark.requirement("BUS-2", "D68")
@pytest.mark.parametrize(
    "error, status, code",
    [
        (TransientError("busy"), Status.FAILED_RETRYABLE, "TransientError"),
        (TransientError("busy", error_code="RATE_LIMITED"), Status.FAILED_RETRYABLE, "RATE_LIMITED"),
        (PermanentError("busy"), Status.FAILED_FATAL, "PermanentError"),
        (PermanentError("busy", reason_code="policy_violation"), Status.FAILED_FATAL, "policy_violation"),
        (PermanentError("busy", error_code="NOT_FOUND"), Status.FAILED_FATAL, "NOT_FOUND"),
        (ValidationError("busy"), Status.FAILED_FATAL, "INVALID_INPUT"),
        (KeyError("busy"), Status.FAILED, "KeyError"),
        (SystemExit("busy"), Status.FAILED, "RuntimeError"),
        (asyncio.CancelledError("busy"), Status.FAILED, "CancelledError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_the_class_of_an_error_decides_the_status(rig: Rig, error: BaseException, status: Status, code: str):
    app = App()

    @app.job(TOPIC)
    async def broken(ctx: Context) -> None:
        raise error

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
    assert (result.status, result.error_code) == (status, code)
    assert result.error_code_enum == ErrorCode.__members__.get(code, ErrorCode.HANDLER_FAILED)
    assert "busy" in result.error_message or isinstance(error, asyncio.CancelledError)


async def test_a_snooze_is_a_retry(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def sleepy(ctx: Context) -> None:
        raise Snooze(5)

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, "SNOOZED")


async def test_a_very_long_error_is_cut(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def broken(ctx: Context) -> None:
        raise PermanentError("x" * 100_000 + "\0")

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
    assert len(result.error_message) <= 2_000


class Speechless(Exception):
    """An error whose own code fails."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    "error, code",
    [
        (Speechless(), "Speechless"),
        (PermanentError("no", error_code="half \ud800 and \0"), "half \\ud800 and \\0"),
        (KeyboardInterrupt("no"), "RuntimeError"),
    ],
    ids=["speechless", "half a character", "interrupt"],
)
async def test_any_error_of_a_bus_handler_is_reported_and_can_be_sent(rig: Rig, error: BaseException, code: str):
    app = App()

    @app.job(TOPIC)
    async def broken(ctx: Context) -> None:
        raise error

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
        assert encode(Packet(trace_id="t", sender_id=WORKER, created_at=rig.now(), body=result), PacketKeys())
    assert result.error_code == code
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("beats")]


@pytest.mark.requirement("BUS-9")
@pytest.mark.parametrize(
    "pointer, status, code",
    [
        ("mem://nothing", Status.FAILED_FATAL, "NOT_FOUND"),
        ("ftp://somewhere", Status.FAILED_FATAL, "INVALID_INPUT"),
    ],
)
async def test_a_pointer_that_leads_nowhere_fails_the_job_for_good(rig: Rig, pointer: str, status: Status, code: str):
    echo = Echo()
    async with rig.serving(echo.app):
        result = await rig.result(await rig.control.dispatch(context_ptr=pointer))
    assert (result.status, result.error_code, echo.called) == (status, code, [])


@pytest.mark.requirement("BUS-9", "D45")
async def test_a_payload_that_only_a_reference_names_is_read_and_held_against_it(rig: Rig):
    echo, pointer = Echo(), rig.kept.put("hello")
    body = rig.kept.bodies[pointer]
    right = {"uri": pointer, "sha256": hashlib.sha256(body).hexdigest(), "size_bytes": len(body)}
    async with rig.serving(echo.app):
        assert (await rig.result(await rig.control.dispatch(context_ref=right))).status is Status.SUCCEEDED
        for wrong in ({"sha256": "0" * 64}, {"size_bytes": 1}):
            result = await rig.result(await rig.control.dispatch(context_ref={**right, **wrong}))
            assert (result.status, result.error_code) == (Status.FAILED_FATAL, "POINTER_CHANGED")
    assert echo.called == ["hello"]


@pytest.mark.requirement("BUS-9")
async def test_a_payload_that_was_changed_under_its_pointer_never_reaches_the_handler(rig: Rig, tmp_path: Path):
    """An approval names the pointer: whoever can write to the object store must not have other bytes worked on after it."""
    echo, objects = Echo(), await open_objects(f"file://{tmp_path}")
    rig.resolver = pointers = make_pointers(objects, None)
    approved, swapped = [await pointers.put(text, part=PointerPart.CONTEXT) for text in (b'"keep"', b'"approved"')]
    await objects.put(f"bus/{swapped.removeprefix('objects://')}", b'"delete all"')
    async with rig.serving(echo.app):
        assert (await rig.result(await rig.control.dispatch(context_ptr=approved))).status is Status.SUCCEEDED
        result = await rig.result(await rig.control.dispatch(context_ptr=swapped))
    await objects.close()
    assert (result.status, result.error_code) == (Status.FAILED_FATAL, "POINTER_CHANGED")
    assert echo.called == ["keep"]


async def test_a_store_that_is_away_for_seconds_costs_no_attempt(rig: Rig):
    echo = Echo()
    rig.kept.failing = [PointerUnavailable(pointer="mem://0", reason="away") for _ in range(5)]
    async with rig.serving(echo.app):
        result = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put("x")), step_s=0.5)
    assert (result.status, echo.called) == (Status.SUCCEEDED, ["x"])


async def test_a_store_that_does_not_answer_for_long_is_worth_a_retry(rig: Rig):
    echo = Echo()
    rig.kept.failing = [PointerUnavailable(pointer="mem://0", reason="away") for _ in range(50)]
    async with rig.serving(echo.app):
        result = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put("x")), step_s=0.5)
    assert (result.status, result.error_code) == (Status.FAILED_RETRYABLE, "POINTER_UNAVAILABLE")
    assert (echo.called, result.execution_ms <= 90_000) == ([], True)


async def test_a_payload_that_does_not_fit_never_reaches_the_handler(rig: Rig):
    app, called = App(), []

    @app.job(TOPIC)
    async def index(ctx: Context, doc: Document) -> None:
        called.append(doc)

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put({"pages": "many"})))
    assert (result.status, result.error_code, called) == (Status.FAILED_FATAL, "INVALID_INPUT", [])
    assert "title" in result.error_message


async def test_work_is_not_lost_to_a_store_that_fails_once(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def number(ctx: Context) -> int:
        rig.kept.failing = [OSError("away") for _ in range(20)]
        return 7

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch(), step_s=0.5)
    assert (result.status, rig.kept.value(result.result_ptr)) == (Status.SUCCEEDED, 7)


@pytest.mark.requirement("BUS-2")
async def test_work_whose_result_no_store_takes_is_not_called_worth_a_retry(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def pay(ctx: Context) -> int:
        rig.kept.failing = [OSError("away") for _ in range(1_000)]
        return 7

    async with rig.serving(app, result_s=60):
        result = await rig.result(await rig.control.dispatch(), step_s=0.5)
    assert (result.status, result.error_code) == (Status.FAILED, "RESULT_NOT_KEPT")
    assert "the handler has returned" in result.error_message
    assert rig.control.beats, "it is alive meanwhile, and says so"


async def test_a_draining_worker_has_time_to_store_what_a_handler_returned(rig: Rig):
    app, returned = App(), asyncio.Event()

    @app.job(TOPIC)
    async def pay(ctx: Context) -> int:
        rig.kept.failing = [OSError("away") for _ in range(5)]
        returned.set()
        return 7

    async with rig.serving(app, settle_s=1):
        order = await rig.control.dispatch()
        await rig.until(returned.is_set)
    assert rig.control.result_of(order).status is Status.SUCCEEDED


def paying(rig: Rig) -> App:
    """A handler that returns just when the store goes away."""
    app = App()

    @app.job(TOPIC, timeout_s=5)
    async def pay(ctx: Context) -> int:
        rig.kept.failing = [OSError("away") for _ in range(1_000)]
        return 7

    return app


@pytest.mark.requirement("BUS-2")
async def test_worker_stopped_during_a_store_outage_still_reports_the_result(rig: Rig):
    async with rig.serving(paying(rig), drain_s=5):
        order = await rig.control.dispatch()
        await rig.until(lambda: bool(rig.kept.failing))
    result = next(iter(rig.control.results), None)
    assert result is not None, "its lease would end, and the work would be done again"
    assert (result.job_id, result.status) == (order.request.job_id, Status.FAILED)
    assert (result.error_code, "the worker stopped" in result.error_message) == ("RESULT_NOT_KEPT", True)


async def test_a_worker_that_stores_a_result_is_not_idle(rig: Rig, caplog: pytest.LogCaptureFixture):
    async with rig.serving(paying(rig), max_parallel_jobs=1, backlog_max=0) as worker:
        first = await rig.control.dispatch()
        await rig.until(lambda: bool(rig.kept.failing))
        await rig.pass_time(20)
        assert (worker.running, worker.presence.heartbeat().active_jobs) == (1, 1)
        refused = await rig.result(await rig.control.dispatch_to(WORKER))
        assert refused.error_code == NOT_BEGUN
        rig.kept.failing = []
        assert (await rig.result(first, step_s=0.5)).status is Status.SUCCEEDED
    assert "handler_timed_out" not in caplog.text, "it has returned"


async def test_a_result_of_a_job_that_was_taken_back_is_not_stored_on_and_on(rig: Rig):
    async with rig.serving(paying(rig)) as worker:
        await rig.control.dispatch()
        await rig.until(lambda: bool(rig.kept.failing))
        rig.control.answer = lambda said: "refused: stale"
        began = rig.clock.monotonic()
        await rig.until(lambda: not worker.attempts, step_s=0.5)
        assert rig.clock.monotonic() - began <= 30
    assert rig.control.results == []


async def test_a_result_that_has_no_json_form_fails_for_good(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def odd(ctx: Context) -> Any:
        return object()

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
    assert (result.status, result.error_code) == (Status.FAILED_FATAL, "RESULT_INVALID")


async def test_a_sync_handler_runs_on_a_thread(rig: Rig):
    app, threads = App(), []

    @app.job(TOPIC)
    def double(ctx: SyncContext, number: int) -> int:
        threads.append(threading.current_thread())
        ctx.logger.info("doubling", number=number)
        return 2 * number

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put(21)))
    assert rig.kept.value(result.result_ptr) == 42
    assert threads[0] is not threading.main_thread()


async def test_a_batch_handler_gets_a_batch_of_one(rig: Rig):
    app = App()

    @app.job(TOPIC, batch=10)
    async def count(items: list[Item[str]]) -> None:
        (item,) = items
        if not item.payload:
            item.fail(PermanentError("empty"))
        else:
            item.done(len(item.payload.split()))

    async with rig.serving(app):
        good = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put("two words")))
        bad = await rig.result(await rig.control.dispatch(context_ptr=rig.kept.put("")))
    assert rig.kept.value(good.result_ptr) == 2
    assert (bad.status, bad.error_message) == (Status.FAILED_FATAL, "empty")


async def test_worker_requests_no_start_for_an_order_that_does_not_ask_for_one(rig: Rig):
    echo = Echo(held=True)
    rig.control.answer = lambda said: None
    async with rig.serving(echo.app) as worker:
        order = await rig.control.dispatch(asks=False)
        await rig.until(lambda: bool(echo.called))
        await rig.until(lambda: bool(rig.control.beats), step_s=1.0)
        echo.go.set()
        result = await rig.result(order)
        await rig.until(lambda: not worker.attempts)
    assert (result.status, result.job_id, rig.control.starts) == (Status.SUCCEEDED, order.request.job_id, [])
    assert len(rig.control.results) == 1


async def test_a_scheduler_that_sends_an_order_again_gets_the_result_again(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        order = await rig.control.dispatch(asks=False)
        first = await rig.result(order)
        await rig.control.send(order)
        await rig.until(lambda: len(rig.control.results) == 2)
    assert (rig.control.results, len(echo.called)) == ([first, first], 1)


async def test_the_next_attempt_of_another_scheduler_is_another_order(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app) as worker:
        bare = rig.control.order(asks=False)
        for number in (1, 2):
            await rig.control.send(
                JobOrder(request=bare.request, dispatch=Dispatch(dispatch_id=f"d{number}", attempt=number))
            )
            await rig.until(lambda number=number: len(echo.called) == number and not worker.attempts)


async def test_bus_context_has_the_fields_of_the_order(rig: Rig):
    echo = Echo()
    async with rig.serving(echo.app):
        env = {"TRACEPARENT": TRACE, "TOOL": "hammer"}
        labels = {"colour": "red", RETRY_ATTEMPT: "2"}
        await rig.result(await rig.control.dispatch(epoch=4, env=env, labels=labels, parent_job_id="parent"))
        ctx = echo.contexts[0]
        assert (ctx.last_checkpoint, ctx.cancelled, ctx.stopping, ctx.lease_valid) == (None, False, False, True)
    assert (ctx.job_id, ctx.epoch, ctx.idempotency_key) == ("job-1", 4, "job-1")
    assert (ctx.type, ctx.worker_id, ctx.parent_id, ctx.correlation_id) == (TOPIC, WORKER, "parent", "trace-1")
    assert (ctx.trace, ctx.env["TOOL"], ctx.labels["colour"]) == (TRACE, "hammer", "red")
    assert (ctx.request.job_id, ctx.attempt) == ("job-1@4", 4 + 2)


def test_the_context_on_the_bus_has_everything_that_handlers_know():
    known, ours = ({name for name in dir(kind) if not name.startswith("_")} for kind in (Context, BusContext))
    for_the_runner = {"calls", "durable", "durable_calls", "finish"}
    assert known - for_the_runner <= ours


@pytest.mark.parametrize("what", ["checkpoint", "journal", "submit", "sleep", "spawn"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_bus_handler_that_needs_a_ledger_fails_permanently_with_the_reason(rig: Rig, what: str, sync: bool):
    app = App()
    arguments: tuple[Any, ...] = ("a", lambda: None) if what == "journal" else ("a",)

    if sync:

        @app.job(TOPIC)
        def blocking(ctx: SyncContext) -> None:
            getattr(ctx, what)(*arguments)
    else:

        @app.job(TOPIC)
        async def waiting(ctx: Context) -> None:
            await getattr(ctx, what)(*arguments)

    async with rig.serving(app):
        result = await rig.result(await rig.control.dispatch())
    assert (result.status, result.error_code) == (Status.FAILED_FATAL, "NEEDS_LEDGER")
    assert f"ctx.{what} needs a ledger" in result.error_message


def test_a_job_type_that_is_no_topic_is_refused(rig: Rig):
    app = App()

    @app.job("job:echo")
    async def handler(ctx: Context) -> None: ...

    async def open_worker() -> None:
        rig.worker(app)

    with pytest.raises(OptionInvalid, match="on the bus it is a topic"):
        asyncio.run(open_worker())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_parallel_jobs": 0},
        {"heartbeat_s": 0},
        {"heartbeat_s": float("nan")},
        {"ask_s": 0},
        {"backlog_max": -1},
        {"threads": 0},
        {"pool": "x" * 300},
        {"labels": {"a": "x" * 300}},
        {"capabilities": ("x" * 300,)},
        {"capabilities": tuple(f"{number:0200}" for number in range(200))},
        {"labels": {"zone": "\udcff"}},
        {"region": "a\0b"},
    ],
)
def test_options_out_of_bounds_are_refused(rig: Rig, changes: dict[str, Any]):
    async def open_worker() -> None:
        rig.worker(Echo().app, **changes)

    with pytest.raises(OptionInvalid):
        asyncio.run(open_worker())


def test_the_most_that_a_worker_may_say_of_itself_is_taken_and_more_is_refused(rig: Rig):
    async def introduced(topics: int) -> BusPresence:
        app = App()
        for number in range(topics):

            @app.job(f"job.{number:0190}")
            async def handler(ctx: Context) -> None: ...

        most = tuple(f"{number:0190}" for number in range(119))
        return rig.worker(app, capabilities=most).presence

    presence = asyncio.run(introduced(118))
    for body in (presence.heartbeat(), presence.handshake()):
        packet = Packet(trace_id="t" * 200, sender_id=WORKER, created_at=rig.now(), body=body)
        assert decode(encode(packet, PacketKeys()), PacketKeys()).body == body
    with pytest.raises(OptionInvalid, match="share it between several workers"):
        asyncio.run(introduced(122))

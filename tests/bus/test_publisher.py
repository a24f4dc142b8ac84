"""Clients hear of every end once, under their own id; workers of every attempt that was taken back."""

import asyncio
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import SENDER, TOPIC, Rig, quiet
from trellis.bus.errors import BusError, BusUnavailable, NotKept, TooLargeToKeep
from trellis.bus.messages import (
    ALERT,
    CANCEL,
    POINTER_CHANGED,
    RESULT,
    AlertSeverity,
    BusAlert,
    ErrorCode,
    JobResult,
    PacketBody,
    PacketWrong,
    Status,
)
from trellis.bus.outcomes import publisher as publishing
from trellis.bus.outcomes.publisher import result_of
from trellis.engine.jobs import CancelMode
from trellis.engine.ledger import Ledger
from trellis.engine.records import RetentionOptions
from trellis.lifecycles import Role


def _heard(parts: Parts) -> dict[str, list[Status]]:
    found: dict[str, list[Status]] = {}
    for result in parts.told:
        found.setdefault(result.job_id, []).append(result.status)
    return found


# --- every end -------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-2", "BUS-11", "BUS-12")
async def test_a_client_receives_one_result_for_each_job_under_its_own_id(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 3, "max_attempts": 1}}) as rig:
        parts = parts_of(rig)
        await parts.result(await parts.dispatched(job_id="good"), "w1", result_ptr="redis://res", execution_ms=5)
        await parts.result(await parts.dispatched(job_id="bad"), "w1", Status.FAILED, error_code="INVALID_INPUT")
        await rig.submit(job_id="refused")
        await parts.schedule("refused")
        await parts.move("refused", "DENIED", Role.SCHEDULER, cause="not here")
        await parts.dispatched(job_id="stale")
        await parts.pass_time(4)
        await rig.submit(job_id="unwanted")
        await parts.cancel("unwanted")
        for _ in range(2):
            await parts.settle()
        told = {result.job_id: result for result in parts.told}
        assert len(parts.told) == len(told) == 5
        assert all(result.worker_id == SENDER for result in parts.told)
        good, bad = told["good"], told["bad"]
        assert (good.status, good.result_ptr, good.execution_ms) == (Status.SUCCEEDED, "redis://res", 5)
        assert (bad.status, bad.error_code, bad.error_code_enum) == (
            Status.FAILED,
            "INVALID_INPUT",
            ErrorCode.INVALID_INPUT,
        )
        refused, stale, unwanted = told["refused"], told["stale"], told["unwanted"]
        assert (refused.status, refused.error_code_enum, refused.error_message) == (Status.DENIED, 300, "not here")
        assert (stale.status, stale.error_code_enum) == (Status.TIMEOUT, ErrorCode.TIMEOUT)
        assert (unwanted.status, unwanted.error_code, unwanted.error_message) == (
            Status.CANCELLED,
            "CANCELLED",
            "not wanted",
        )


@pytest.mark.requirement("BUS-9", "D45")
async def test_people_are_alerted_once_of_a_payload_that_was_changed(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(job_id="swapped")
    await parts.result(held, "w1", Status.FAILED_FATAL, error_code=POINTER_CHANGED, error_message="somebody wrote")
    for _ in range(2):
        await parts.settle()
    alerts = [body for subject, body in rig.bus.published if subject == ALERT and isinstance(body, BusAlert)]
    assert [(one.severity, one.details["job_id"]) for one in alerts] == [(AlertSeverity.CRITICAL, "swapped")]
    assert (await rig.job("swapped")).state == "FAILED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-12", "BUS-1")
@pytest.mark.parametrize("state", ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"])
@pytest.mark.parametrize("mode", [CancelMode.SOFT, CancelMode.HARD])
async def test_a_job_cancelled_in_any_state_ends_once_and_its_worker_gets_the_cancel(
    rig: Rig, state: str, mode: CancelMode
):
    parts = parts_of(rig)
    job_id, named = await rig.submit(), ""
    if state != "PENDING":
        await parts.schedule(job_id)
    if state in {"DISPATCHED", "RUNNING"}:
        held = await parts.dispatch(job_id, "w1")
        named = held.wire_id
        if state == "RUNNING":
            await parts.start(held, "w1")
    await parts.cancel(job_id, mode, grace_s=3)
    await parts.pass_time(4)
    await parts.settle()
    assert await rig.state(job_id) == "CANCELLED"
    assert _heard(parts) == {job_id: [Status.CANCELLED]}
    assert [stop.job_id for stop in parts.stops] == ([named] if named else [])
    if named:
        answer = await parts.result(named, "w1")
        assert answer.message == "refused: late"
        await parts.settle()
        assert _heard(parts) == {job_id: [Status.CANCELLED]}


async def test_stop_order_after_a_refused_start_names_the_dispatched_attempt(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(worker_id="w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    await parts.start(held, "w1")
    await parts.settle()
    # Told when the wish was seen, and again with the end: both name the attempt that was handed out.
    assert {stop.job_id for stop in parts.stops} == {held.wire_id}


@pytest.mark.requirement("BUS-5", "D30")
async def test_a_worker_whose_attempt_expired_gets_a_cancel_and_the_client_only_the_result(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "lease_s": 3, "max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        first = await parts.dispatched(worker_id="w1")
        await parts.pass_time(4)
        await parts.settle()
        assert [(stop.job_id, stop.reason) for stop in parts.stops] == [(first.wire_id, "lease expired")]
        assert parts.told == []
        second = await parts.dispatch(first.job_id, "w2")
        await parts.result(second, "w2")
        await parts.settle()
        assert _heard(parts) == {first.job_id: [Status.SUCCEEDED]}
        assert len(parts.stops) == 1


# --- when the bus or the process goes --------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-10", "BUS-12")
async def test_publisher_loses_nothing_during_a_bus_outage(rig: Rig):
    parts = parts_of(rig)
    jobs = [await parts.dispatched() for _ in range(5)]
    rig.bus.down = True
    for held in jobs:
        await parts.result(held, "w1")
    report = await parts.publisher.run_once()
    assert report.held_up
    assert parts.publisher.pause_s(report) > 0
    await parts.tell()
    assert parts.told == []
    rig.bus.down = False
    await parts.tell()
    assert _heard(parts) == {held.job_id: [Status.SUCCEEDED] for held in jobs}
    assert await parts.tell() == 0


@pytest.mark.on_both
@pytest.mark.requirement("BUS-10", "BUS-12")
async def test_unpublished_result_is_kept_until_the_bus_is_back(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    rig.bus.down = True
    await parts.result(held, "w1")
    assert (await parts.publisher.run_once()).held_up, "since it began"
    await rig.advance(40 * 24 * 3600.0)
    assert (await rig.ledger.retain(RetentionOptions())).jobs == 0
    rig.bus.down = False
    await parts.tell()
    assert _heard(parts) == {held.job_id: [Status.SUCCEEDED]}
    await rig.advance(10.0)
    await parts.settle()
    assert (await rig.ledger.retain(RetentionOptions())).jobs == 1


@pytest.mark.requirement("BUS-10")
async def test_a_bus_that_fails_in_the_middle_of_a_page_gets_the_rest_later(rig: Rig):
    parts = parts_of(rig)
    jobs = [await parts.dispatched() for _ in range(6)]
    for held in jobs:
        await parts.result(held, "w1")
    failing = {jobs[1].job_id, jobs[4].job_id}

    def before(_: str, body: PacketBody) -> None:
        if isinstance(body, JobResult) and body.job_id in failing:
            failing.discard(body.job_id)
            raise BusUnavailable(url="local", detail="for a moment")

    rig.bus.before = before
    for _ in range(4):
        await parts.tell()
    assert _heard(parts) == {held.job_id: [Status.SUCCEEDED] for held in jobs}


@pytest.mark.requirement("BUS-10")
async def test_a_bus_that_fails_again_and_again_leaves_nothing_behind(rig: Rig):
    parts = parts_of(rig)
    parts.results.publisher = None  # everything comes from the feed
    for number in range(8):
        held = await parts.dispatched()
        await parts.dispatched(job_id=f"x{number}")
        await parts.cancel(f"x{number}")
        await parts.result(held, "w1")
        failing = {held.job_id}

        def before(_: str, body: PacketBody, failing: set[str] = failing) -> None:
            if isinstance(body, JobResult) and body.job_id in failing:
                failing.clear()
                raise BusUnavailable(url="local", detail="for a moment")

        rig.bus.before = before
        assert (await parts.publisher.run_once()).held_up
        assert len(parts.publisher._sent) <= 4  # pyright: ignore[reportPrivateUsage]
    await parts.tell()
    assert all(len(heard) == 1 for heard in _heard(parts).values())
    assert len(_heard(parts)) == 16


@pytest.mark.parametrize(
    "error, told",
    [
        (PacketWrong(detail="it is odd"), "cannot_be_told"),
        (TooLargeToKeep(subject=RESULT, detail="it is large"), "never_kept"),
    ],
    ids=["odd", "large"],
)
async def test_a_packet_that_no_bus_can_take_does_not_hold_up_the_others(
    rig: Rig, caplog: pytest.LogCaptureFixture, error: BusError, told: str
):
    parts = parts_of(rig)
    for name in ("a", "b", "c"):
        await parts.result(await parts.dispatched(job_id=name), "w1")

    def before(_: str, body: PacketBody) -> None:
        if isinstance(body, JobResult) and body.job_id == "b":
            raise error

    rig.bus.before = before
    assert not (await parts.publisher.run_once()).held_up
    assert set(_heard(parts)) == {"a", "c"}
    assert told in caplog.text


@pytest.mark.requirement("BUS-10", "BUS-12")
async def test_results_wait_for_a_stream_that_refuses_them_and_not_for_ever(rig: Rig, caplog: pytest.LogCaptureFixture):
    parts, refusing = parts_of(rig), [True]

    def before(subject: str, _: PacketBody) -> None:
        if subject == RESULT and refusing[0]:
            raise NotKept(subject=subject, detail="it is full")

    rig.bus.before = before
    for name in ("a", "b"):
        await parts.result(await parts.dispatched(job_id=name), "w1")
    for _ in range(2):
        assert (await parts.publisher.run_once()).held_up
        await parts.pass_time(10)
    refusing[0] = False
    await parts.tell()
    assert set(_heard(parts)) == {"a", "b"}, "for a moment it was full"
    refusing[0] = True
    await parts.result(await parts.dispatched(job_id="c"), "w1")
    assert (await parts.publisher.run_once()).held_up, "it is waited for as long as the first time"
    await parts.pass_time(31)
    await parts.tell()
    assert not (await parts.publisher.run_once()).events, "those who listen have heard it; nobody else can"
    await parts.result(await parts.dispatched(job_id="d"), "w1")
    assert not (await parts.publisher.run_once()).held_up, "it still refuses"
    assert caplog.text.count("not_kept") == 2


@pytest.mark.requirement("BUS-12")
async def test_results_are_published_durably_and_cancels_are_not(rig: Rig):
    parts, kept = parts_of(rig), dict[str, bool]()
    publish = rig.bus.publish

    async def noting(subject: str, body: PacketBody, **how: Any) -> None:
        kept[subject] = how["kept"]
        await publish(subject, body, **how)

    rig.bus.publish = noting  # type: ignore[method-assign]
    await parts.dispatched(job_id="a")
    await parts.cancel("a")
    await parts.tell()
    assert kept == {RESULT: True, CANCEL: False}


@pytest.mark.on_both
@pytest.mark.requirement("BUS-12")
async def test_publisher_successor_continues_at_the_stored_position(rig: Rig):
    parts = parts_of(rig)
    other = parts_of(rig, name="process-2", ledger=await rig.bench.open_another())
    await parts.result(await parts.dispatched(job_id="a"), "w1")
    await parts.tell()
    assert not (await other.publisher.run_once()).following
    assert other.publisher.pause_s(await other.publisher.run_once()) > 0
    await parts.publisher.release()
    await parts.result(await parts.dispatched(job_id="b"), "w1")
    await other.tell()
    assert _heard(parts) == {"a": [Status.SUCCEEDED], "b": [Status.SUCCEEDED]}


@pytest.mark.requirement("BUS-12")
async def test_publisher_that_lost_its_subscription_stops_and_its_successor_publishes_the_same(rig: Rig):
    parts, other = parts_of(rig), parts_of(rig, name="process-2")
    await parts.publisher.run_once()
    await parts.result(await parts.dispatched(job_id="a"), "w1")
    await rig.advance(6)
    await other.publisher.run_once()
    report = await parts.publisher.run_once()
    assert not report.following
    await other.tell()
    assert _heard(parts)["a"][0] == Status.SUCCEEDED


@pytest.mark.requirement("BUS-12")
async def test_crash_before_the_position_is_stored_publishes_the_event_again(rig: Rig):
    parts = parts_of(rig)
    await parts.result(await parts.dispatched(job_id="a"), "w1")
    ids: list[str | None] = []
    publish = rig.bus.publish

    async def noting(subject: str, body: PacketBody, **how: Any) -> None:
        if subject == RESULT:
            ids.append(how["message_id"])
        await publish(subject, body, **how)

    rig.bus.publish = noting  # type: ignore[method-assign]
    broken = parts_of(rig, name="process-2", ledger=Forgetful(rig.ledger))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        await broken.publisher.run_once()
    await rig.advance(6)
    await parts.tell()
    assert len(ids) == 2
    assert len(set(ids)) == 1  # a bus that knows message ids gives it to its listeners once


class Forgetful:
    """A ledger that goes away just before a place is remembered."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ack(self, *_: object, **__: object) -> bool:
        raise ConnectionError("gone")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


async def test_end_of_a_job_is_published_at_once_by_the_elected_publisher_only(rig: Rig):
    parts, other = parts_of(rig), parts_of(rig, name="other")
    await parts.publisher.run_once()  # the first one follows
    await parts.result(await parts.dispatched(job_id="good"), "w1")
    other.publisher.wake()
    assert other.publisher._trigger._woken is None
    parts.publisher.wake()
    assert parts.publisher._trigger._woken is not None
    await parts.publisher._trigger._woken
    assert _heard(parts) == {"good": [Status.SUCCEEDED]}


# --- successes that this process records ------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-12")
async def test_a_success_recorded_by_the_publishing_process_is_published_before_the_feed_is_read(rig: Rig):
    parts = parts_of(rig)
    publisher = parts.publisher
    await publisher.run_once()
    held = await parts.dispatched(job_id="good")
    await parts.result(held, "w1", result_ptr="redis://res", execution_ms=5)
    await quiet()
    (told,) = parts.told
    assert rig.bus.message_ids[-1] == (await parts.last("good")).id
    report = await publisher.run_once()
    assert (report.events, report.sent, publisher.pause_s(report)) == (1, 0, publisher.options.rest_s)
    assert (len(parts.told), publisher._sent, publisher._ending) == (1, set(), {})
    assert told == result_of(await parts.last("good"), SENDER)


@pytest.mark.requirement("BUS-10", "BUS-12")
async def test_a_success_that_the_bus_did_not_take_is_published_from_the_feed(rig: Rig):
    parts = parts_of(rig)
    await parts.publisher.run_once()
    held, failures = await parts.dispatched(job_id="good"), ["once"]

    def before(_: str, body: PacketBody) -> None:
        if isinstance(body, JobResult) and failures.pop():
            rig.bus.before = None
            raise BusUnavailable(url="local", detail="for a moment")

    rig.bus.before = before
    await parts.result(held, "w1")
    await parts.publisher.release()
    await parts.tell()
    assert (_heard(parts), failures) == ({"good": [Status.SUCCEEDED]}, [])


@pytest.mark.requirement("BUS-12")
@pytest.mark.parametrize("is_patient", [True, False], ids=["waits", "gives up"])
async def test_the_feed_waits_for_a_success_under_way_and_not_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_patient: bool
):
    monkeypatch.setattr(publishing, "ENDING_S_MAX", 30.0 if is_patient else 0.01)
    parts, publish, gate = parts_of(rig), rig.bus.publish, asyncio.Event()
    await parts.publisher.run_once()
    held = await parts.dispatched(job_id="good")

    async def slow_once(subject: str, body: PacketBody, **how: Any) -> None:
        rig.bus.publish = publish  # type: ignore[method-assign]
        await gate.wait()
        await publish(subject, body, **how)

    rig.bus.publish = slow_once  # type: ignore[method-assign]
    await parts.result(held, "w1")
    reading = asyncio.create_task(parts.publisher.run_once())
    if is_patient:
        await quiet()
        assert not reading.done()
    else:
        assert (await reading).sent == 1
    gate.set()
    await reading
    await parts.publisher.release()
    assert _heard(parts) == {"good": [Status.SUCCEEDED] * (1 if is_patient else 2)}
    assert len(set(rig.bus.message_ids)) == 1  # a repeated packet has the same id
    assert (parts.publisher._sent, parts.publisher._ending) == (set(), {})


async def test_a_report_that_ends_nothing_publishes_nothing(rig: Rig):
    parts = parts_of(rig)
    await parts.publisher.run_once()
    held = await parts.dispatched(job_id="good")
    await parts.cancel("good", CancelMode.HARD)
    await parts.result(held, "w1")
    await quiet()
    assert (parts.told, parts.publisher._ending) == ([], {})


async def test_successes_too_far_ahead_of_the_feed_wait_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "AHEAD_MAX", 1)
    parts = parts_of(rig)
    await parts.publisher.run_once()
    for name in ("a", "b"):
        await parts.result(await parts.dispatched(job_id=name), "w1")
    assert not parts.publisher._ending.keys() & {"b"}
    await quiet()
    await parts.tell()
    assert _heard(parts) == {"a": [Status.SUCCEEDED], "b": [Status.SUCCEEDED]}

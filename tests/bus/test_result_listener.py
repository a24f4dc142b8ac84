"""Reports of workers: what counts is written once, in the worker's name; everything else is remarked and changes nothing."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Held, Parts, parts_of
from tests.bus.rig import SENDER, TOPIC, Rig
from trellis.bus.messages import NOT_BEGUN, RESULT, Dispatch, JobProgress, JobResult, Status
from trellis.bus.outcomes.attempts import GIVE_BACKS_MAX
from trellis.bus.outcomes.job_tree import requeue_as_new_job
from trellis.bus.requests import JobRequest
from trellis.engine.jobs import Actor, Advance, CancelMode, HeldLease, JobId, RequestId, Turn, TurnResult
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace, RetentionOptions
from trellis.lifecycles import Role, Trigger

BEFORE = ["job_accepted", "job_scheduled", "job_dispatched"]


# --- what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-2", "D28", "D29")
async def test_a_result_before_any_start_makes_both_events_in_the_workers_name(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.result(
        held, "w1", execution_ms=42, result_ptr="redis://res:1", artifact_ptrs=("redis://a", "redis://b")
    )
    assert (answer.status, answer.message) == (Status.SUCCEEDED, "accepted")
    assert await rig.path(held.job_id) == [*BEFORE, "job_started", "job_succeeded"]
    started, succeeded = (await rig.events(held.job_id))[-2:]
    assert [(event.role, event.actor) for event in (started, succeeded)] == [(Role.WORKER, "w1")] * 2
    assert started.ts == succeeded.ts
    told = json.loads(succeeded.data or b"{}")
    dispatched = await rig.said(held.job_id, "job_dispatched")
    assert told == {
        "dispatch": {"dispatch_id": dispatched["dispatch_id"], "attempt": 0, "worker_id": "w1"},
        "status": "SUCCEEDED",
        "worker_id": "w1",
        "execution_ms": 42,
        "error_code": "",
        "error_message": "",
        "result_ptr": "redis://res:1",
        "artifact_ptrs": ["redis://a", "redis://b"],
    }
    assert json.loads(await rig.ledger.result(JobId(held.job_id)) or b"{}") == told


@pytest.mark.on_both
@pytest.mark.requirement("D29")
async def test_start_and_result_are_one_transaction(rig: Rig):
    """A reader of the feed never finds a job started by a result and not ended by it."""
    parts = parts_of(rig)
    held = await parts.dispatched()
    seen: set[str] = set()
    done = asyncio.Event()

    async def look() -> None:
        while not done.is_set():
            seen.add(await rig.state(held.job_id))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await parts.result(held, "w1")
    done.set()
    await looking
    assert "RUNNING" not in seen


@pytest.mark.requirement("BUS-1", "BUS-13")
@pytest.mark.parametrize(
    "status", [Status.FAILED, Status.FAILED_FATAL, Status.DENIED, Status.TIMEOUT, Status.CANCELLED]
)
async def test_a_bad_result_ends_the_job_as_failed(rig: Rig, status: Status):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.result(held, "w1", status, error_message="it broke")
    assert (answer.status, answer.message) == (Status.FAILED, "accepted")
    assert await rig.path(held.job_id) == [*BEFORE, "job_started", "job_failed"]
    told = await rig.said(held.job_id, "job_failed")
    assert told["status"] == status.name
    assert told["error_message"] == "it broke"
    assert (await parts.last(held.job_id)).cause is not None


@pytest.mark.requirement("BUS-2")
async def test_a_result_without_a_status_is_a_failure(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.result(held, "w1", Status.UNSPECIFIED)
    assert (await rig.said(held.job_id, "job_failed"))["error_code"] == "STATUS_MISSING"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-13")
async def test_an_idempotent_topic_retries_under_the_same_id_until_its_attempts_are_spent(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "max_attempts": 2, "backoff_s": 5}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched()
        answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE, error_code="BUSY")
        assert (answer.status, answer.message) == (Status.SCHEDULED, "accepted")
        last = await parts.last(held.job_id)
        assert (last.type, last.role, last.attempt) == ("job_retry_scheduled", Role.SCHEDULER, 1)
        assert (await rig.said(held.job_id, "job_retry_scheduled"))["error_code"] == "BUSY"
        assert not await rig.ledger.peek_ready("bus-job", each=10)
        await rig.advance(6)
        again = await parts.dispatch(held.job_id)
        assert again.wire_id != held.wire_id
        answer = await parts.result(again, "w1", Status.FAILED_RETRYABLE)
        assert answer.status == Status.FAILED
        assert await rig.state(held.job_id) == "FAILED"


@pytest.mark.requirement("BUS-13")
@pytest.mark.parametrize(
    "status, code, state",
    [
        (Status.FAILED, "RATE_LIMITED", "SCHEDULED"),
        (Status.FAILED, "OTHER", "FAILED"),
        (Status.FAILED, "", "FAILED"),
        (Status.FAILED_FATAL, "RATE_LIMITED", "FAILED"),
        (Status.FAILED_RETRYABLE, "", "SCHEDULED"),
        (Status.TIMEOUT, "RATE_LIMITED", "SCHEDULED"),
    ],
)
async def test_only_declared_error_codes_are_retried(rig_of: Opens, status: Status, code: str, state: str):
    async with rig_of(topics={TOPIC: {"idempotent": True, "retry": ["RATE_LIMITED"]}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched()
        await parts.result(held, "w1", status, error_code=code)
        assert await rig.state(held.job_id) == state


@pytest.mark.requirement("BUS-13", "BUS-7")
async def test_a_topic_that_is_not_idempotent_never_runs_a_job_twice_under_its_id(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.result(held, "w1", Status.FAILED_RETRYABLE)
    assert await rig.state(held.job_id) == "FAILED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1")
async def test_a_worker_that_stops_as_asked_cancels_the_job(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.start(held, "w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    answer = await parts.result(held, "w1", Status.CANCELLED)
    assert (answer.status, answer.message) == (Status.CANCELLED, "accepted")
    last = await parts.last(held.job_id)
    assert (last.target, last.role) == ("CANCELLED", Role.RECONCILER)
    answer = await parts.result(held, "w1", Status.CANCELLED)
    assert answer.message == "accepted"
    assert [one["kind"] for one in await parts.remarks(held.job_id)] == ["duplicate"]


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-6")
@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.FAILED])
@pytest.mark.parametrize("started", [True, False])
async def test_a_result_within_the_grace_of_a_cancel_counts_with_and_without_a_start_packet(
    rig: Rig, started: bool, status: Status
):
    parts = parts_of(rig)
    held = await parts.dispatched()
    if started:
        await parts.start(held, "w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    answer = await parts.result(held, "w1", status)
    assert (answer.status, answer.message) == (status, "accepted")
    assert await rig.path(held.job_id) == [*BEFORE, "job_started", f"job_{status.name.lower()}"]


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "D19")
@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_job_that_was_to_stop_is_not_done_again_when_it_fails(rig_of: Opens, idempotent: bool):
    async with rig_of(topics={TOPIC: {"idempotent": idempotent, "max_attempts": 3}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a")
        await parts.start(held, "w1")
        await parts.cancel(held.job_id, CancelMode.SOFT)
        answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE, error_code="WORKER_UNAVAILABLE")
        assert (answer.status, answer.message) == (Status.CANCELLED, "accepted")
        await parts.follow_up()
        assert await parts.jobs() == {"a": "CANCELLED"}


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "D19")
async def test_cancel_request_during_the_write_of_a_failure_is_obeyed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts, turn = parts_of(rig), rig.ledger.turn
    held = await parts.dispatched(job_id="a")
    await parts.start(held, "w1")

    async def after_a_wish(asked: Turn) -> TurnResult:
        await parts.cancel("a", CancelMode.SOFT)
        return await turn(asked)

    monkeypatch.setattr(rig.ledger, "turn", after_a_wish)
    answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE)
    monkeypatch.undo()
    assert (answer.status, answer.message) == (Status.CANCELLED, "accepted")
    await parts.follow_up()
    assert await parts.jobs() == {"a": "CANCELLED"}


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "D30")
async def test_job_that_a_worker_did_not_begin_costs_no_attempt_and_keeps_its_id(rig: Rig):
    """Its topic is not idempotent: a deployment must not fail jobs, nor make others of them."""
    parts = parts_of(rig)
    held = await parts.dispatched(job_id="a", worker_id="w1")
    for starts in (False, True, False):
        if starts:
            await parts.start(held, "w1")
        answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE, error_code=NOT_BEGUN)
        assert (answer.status, answer.message) == (Status.SCHEDULED, "accepted")
        job = await rig.job("a")
        assert (job.state, job.place, job.max_attempts - job.attempt) == ("SCHEDULED", JobPlace.SCHEDULED, 1)
        await parts.pass_time(3)
        held = await parts.dispatch("a", "w1")
    await parts.result(held, "w1")
    await parts.follow_up()
    assert await parts.jobs() == {"a": "SUCCEEDED"}


@pytest.mark.requirement("BUS-5", "BUS-7")
async def test_bus_job_given_back_unstarted_too_often_fails(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"backoff_s": 0, "max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a", worker_id="w1")
        for _ in range(GIVE_BACKS_MAX + 1):
            answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE, error_code=NOT_BEGUN)
            if answer.status is Status.FAILED:
                break
            held = await parts.dispatch("a", "w1")
        await parts.follow_up()
        assert await parts.jobs() == {"a": "FAILED", "a.r1": "PENDING"}


@pytest.mark.requirement("BUS-5", "BUS-7")
async def test_a_job_that_found_nobody_for_long_is_still_given_back_by_a_worker_that_did_not_begin_it(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"backoff_s": 0, "max_attempts": 1}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a")
        for _ in range(GIVE_BACKS_MAX + 1):
            (hold,) = await rig.ledger.holds([JobId("a")])
            back = Advance(hold.lease, "DISPATCHED", Trigger.RETRY, spare_attempt=True, cause="nobody listens")
            await rig.ledger.turn(Turn(actor=Actor(role=Role.SCHEDULER, name="scheduler"), advances=(back,)))
            held = await parts.dispatch("a", "w1")
        answer = await parts.result(held, "w1", Status.FAILED_RETRYABLE, error_code=NOT_BEGUN)
        assert (answer.status, answer.message) == (Status.SCHEDULED, "accepted")
        assert await parts.jobs() == {"a": "SCHEDULED"}


class Racing:
    """A ledger in which something happens just after it has been asked what is held."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.then: list[Callable[[], Awaitable[object]]] = []

    async def holds(self, job_ids: Sequence[JobId]) -> list[HeldLease]:
        found = await self._ledger.holds(job_ids)
        while self.then:
            await self.then.pop()()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6", "BUS-7")
@pytest.mark.parametrize(
    "status, state",
    [(Status.FAILED_RETRYABLE, "SCHEDULED"), (Status.FAILED, "FAILED"), (Status.SUCCEEDED, "SUCCEEDED")],
)
async def test_a_result_that_arrives_with_the_start_of_its_own_job_counts(rig_of: Opens, status: Status, state: str):
    async with rig_of(topics={TOPIC: {"idempotent": True, "max_attempts": 3}}) as rig:
        other, racing = parts_of(rig, name="process-2"), Racing(rig.ledger)
        parts = parts_of(rig, ledger=racing)  # type: ignore[arg-type]
        held = await parts.dispatched(worker_id="w1")
        racing.then.append(lambda: other.progress(held, "w1"))
        answer = await parts.result(held, "w1", status)
        assert (answer.status.name, answer.message) == (state, "accepted")
        assert await rig.state(held.job_id) == state
        assert await parts.remarks(held.job_id) == []


@pytest.mark.requirement("BUS-6")
async def test_a_result_that_arrives_with_the_start_of_its_job_by_another_worker_is_foreign(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "max_attempts": 3}}) as rig:
        other, racing = parts_of(rig, name="process-2"), Racing(rig.ledger)
        parts = parts_of(rig, ledger=racing)  # type: ignore[arg-type]
        held = await parts.dispatched()
        racing.then.append(lambda: other.progress(held, "w2"))
        assert (await parts.result(held, "w1", Status.FAILED_RETRYABLE)).message == "refused: foreign"
        assert await rig.state(held.job_id) == "RUNNING"


async def test_a_job_that_succeeds_although_it_was_to_stop_has_succeeded(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.start(held, "w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    await parts.result(held, "w1")
    assert await rig.state(held.job_id) == "SUCCEEDED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-2")
async def test_a_result_with_texts_that_no_database_takes_is_kept_as_far_as_it_can_be(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    long = "x" * 100_000
    odd = f"nul \0 half \ud800 \N{VIOLIN}{long}"
    await parts.result(held, "w1", Status.FAILED, error_message=odd, error_code=long)
    told = await rig.said(held.job_id, "job_failed")
    assert len(told["error_message"]) == 8_000
    assert len(told["error_code"]) == 2_000
    held = await parts.dispatched()
    pointers = tuple("\N{VIOLIN}" * 10_000 for _ in range(2_000))
    await parts.result(held, "w1", result_ptr=odd, artifact_ptrs=pointers)
    told = await rig.said(held.job_id, "job_succeeded")
    assert 1 < len(told["artifact_ptrs"]) < 1_000
    await parts.settle()
    assert {result.status for result in parts.told} == {Status.FAILED, Status.SUCCEEDED}


@pytest.mark.on_both
@pytest.mark.requirement("D36")
async def test_a_compensation_that_fails_is_kept_among_the_dead_letters(rig: Rig):
    parts = parts_of(rig)
    done = await parts.dispatched(job_id="step")
    await parts.result(done, "w1")
    request = JobRequest.read((await rig.job("step")).payload or b"")
    labels = {"trellis.compensates": "step"}
    await rig.put(request.model_copy(update={"job_id": "step.c", "labels": labels}), compensates=JobId("step"))
    await parts.schedule("step.c")
    await parts.result(await parts.dispatch("step.c"), "w1", Status.FAILED, error_message="cannot undo")
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.reason_code.value) == ("step.c", "compensation_failed")
    await rig.put(JobRequest.checked({"job_id": "other.c", "topic": TOPIC}))
    await parts.schedule("other.c")
    await parts.result(await parts.dispatch("other.c"), "w1", Status.FAILED)
    assert len(await rig.ledger.dead_letters(JobFilter(), limit=10)) == 1
    by = Actor(role=Role.GATEWAY, name="olha")
    again = await requeue_as_new_job(rig.ledger, by, await rig.job("step.c"), rig.topics, RequestId("once more"))
    await parts.schedule(again.job_id)
    await parts.result(await parts.dispatch(again.job_id), "w1", Status.FAILED)
    assert {one.job_id for one in await rig.ledger.dead_letters(JobFilter(), limit=10)} == {"step.c", again.job_id}


# --- what does not ---------------------------------------------------------------------------------------------------


async def _ended(parts: Parts) -> Held:
    held = await parts.dispatched()
    await parts.result(held, "w1", Status.FAILED, error_code="FIRST")
    return held


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6", "BUS-11")
async def test_remembered_attempt_of_a_removed_job_does_not_apply_to_a_new_job_with_its_id(rig: Rig):
    parts = parts_of(rig)
    first = await parts.dispatched(job_id="a", worker_id="w1")
    await parts.start(first, "w1")
    await parts.cancel("a", CancelMode.SOFT)
    await parts.progress(first, "w1")
    await parts.result(first, "w1")
    await rig.advance(2 * 86_400)
    while (await rig.ledger.retain(RetentionOptions(ended_s=86_400))).more:
        pass
    second = await parts.dispatched(job_id="a", worker_id="w2", context_ptr="redis://other")
    assert second.wire_id == first.wire_id
    await parts.start(second, "w2", "other token")
    await parts.cancel("a", CancelMode.SOFT)
    await parts.progress(second, "w2")
    assert len(parts.stops) == 2
    assert (await parts.result(second, "w2")).message == "accepted"
    assert await rig.state("a") == "SUCCEEDED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6")
async def test_the_same_result_again_is_accepted_remarked_once_and_changes_nothing(rig: Rig):
    parts = parts_of(rig)
    held = await _ended(parts)
    before = await rig.path(held.job_id)
    for _ in range(3):
        answer = await parts.result(held, "w1", Status.FAILED, error_code="FIRST")
        assert (answer.status, answer.message) == (Status.FAILED, "accepted")
    assert await rig.path(held.job_id) == before
    (remark,) = await parts.remarks(held.job_id)
    assert (remark["kind"], remark["status"], remark["state"]) == ("duplicate", "FAILED", "FAILED")


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6")
async def test_contradicting_result_of_an_ended_job_is_annotated_and_changes_nothing(rig: Rig):
    parts = parts_of(rig)
    held = await _ended(parts)
    before = await rig.events(held.job_id)
    answer = await parts.result(held, "w1", Status.SUCCEEDED)
    assert (answer.status, answer.message) == (Status.FAILED, "refused: contradictory")
    assert await rig.events(held.job_id) == before
    (remark,) = await parts.remarks(held.job_id)
    assert (remark["kind"], remark["status"], remark["state"]) == ("contradictory", "SUCCEEDED", "FAILED")


@pytest.mark.requirement("BUS-6")
async def test_no_policy_of_a_topic_opens_an_ended_job_for_another_result(rig_of: Opens):
    policy = {"idempotent": True, "retry": ["BUSY"], "max_attempts": 5}
    async with rig_of(topics={TOPIC: policy}) as rig:
        parts = parts_of(rig)
        done, stopped = await parts.dispatched(job_id="done"), await parts.dispatched(job_id="stopped")
        await parts.result(done, "w1")
        await parts.cancel("stopped")
        before = [await rig.events(job_id) for job_id in ("done", "stopped")]
        for held, state in ((done, "SUCCEEDED"), (stopped, "CANCELLED")):
            for status in (Status.FAILED, Status.FAILED_RETRYABLE):
                answer = await parts.result(held, "w1", status, error_code="BUSY")
                assert (answer.status.name, answer.message.partition(":")[0]) == (state, "refused")
        await parts.follow_up()
        assert [await rig.events(job_id) for job_id in ("done", "stopped")] == before
        assert await parts.jobs() == {"done": "SUCCEEDED", "stopped": "CANCELLED"}


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6", "BUS-12")
async def test_a_result_after_the_job_was_cancelled_is_late(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.cancel(held.job_id)
    answer = await parts.result(held, "w1")
    assert (answer.status, answer.message) == (Status.CANCELLED, "refused: late")
    assert await rig.path(held.job_id) == [*BEFORE, "job_cancelled"]
    (remark,) = await parts.remarks(held.job_id)
    assert (remark["kind"], remark["status"], remark["state"]) == ("late", "SUCCEEDED", "CANCELLED")


@pytest.mark.on_both
@pytest.mark.requirement("D29", "BUS-6")
async def test_a_result_of_an_attempt_that_was_taken_back_does_not_touch_the_next_one(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "lease_s": 3}}) as rig:
        parts = parts_of(rig)
        first = await parts.dispatched(worker_id="w1")
        await parts.pass_time(4)
        assert await rig.state(first.job_id) == "SCHEDULED"
        answer = await parts.result(first, "w1")
        assert (answer.status, answer.message) == (Status.SCHEDULED, "refused: stale")
        second = await parts.dispatch(first.job_id, "w2")
        answer = await parts.result(first, "w1", Status.FAILED)
        assert answer.message == "refused: stale"
        assert await rig.state(first.job_id) == "DISPATCHED"
        answer = await parts.result(second, "w2")
        assert answer.message == "accepted"
        kinds = [(one["kind"], one["status"], one["state"]) for one in await parts.remarks(first.job_id)]
        assert kinds == [("stale", "SUCCEEDED", "SCHEDULED"), ("stale", "FAILED", "DISPATCHED")]
        answer = await parts.result(first, "w1", Status.FAILED)
        assert answer.message == "refused: late"


@pytest.mark.on_both
@pytest.mark.requirement("D29", "BUS-6")
@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.FAILED, Status.FAILED_RETRYABLE])
async def test_a_result_whose_attempt_is_taken_back_while_it_is_written_is_refused_by_the_ledger(
    rig_of: Opens, status: Status, monkeypatch: pytest.MonkeyPatch
):
    """The lease was read and is valid; before the ledger writes the result, the job goes to another worker."""
    async with rig_of(topics={TOPIC: {"idempotent": True, "lease_s": 3}}) as rig:
        parts, turn = parts_of(rig), rig.ledger.turn
        first, second = await parts.dispatched(worker_id="w1"), list[Held]()

        async def after_the_next_dispatch(asked: Turn) -> TurnResult:
            monkeypatch.undo()
            await parts.pass_time(4)
            second.append(await parts.dispatch(first.job_id, "w2"))
            return await turn(asked)

        monkeypatch.setattr(rig.ledger, "turn", after_the_next_dispatch)
        answer = await parts.result(first, "w1", status)
        assert (answer.message, len(second)) == ("refused: stale", 1)
        assert await rig.state(first.job_id) == "DISPATCHED"
        assert (await parts.result(second[0], "w2")).message == "accepted"
        assert await rig.state(first.job_id) == "SUCCEEDED"


@pytest.mark.on_both
@pytest.mark.requirement("D29")
async def test_only_the_worker_that_has_the_job_can_end_it(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(worker_id="w1")
    answer = await parts.result(held, "w2")
    assert (answer.status, answer.message) == (Status.DISPATCHED, "refused: foreign")
    anyone = await parts.dispatched()
    await parts.progress(anyone, "w1")
    answer = await parts.result(anyone, "w2")
    assert (answer.status, answer.message) == (Status.RUNNING, "refused: foreign")
    for one in (held, anyone):
        assert [remark["kind"] for remark in await parts.remarks(one.job_id)] == ["foreign"]
        await parts.result(one, "w1")
        assert await rig.state(one.job_id) == "SUCCEEDED"


@pytest.mark.requirement("D29")
async def test_a_result_in_the_name_of_another_sender_is_foreign(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(worker_id="w1")
    answer = await parts.hear("w2", JobResult(job_id=held.wire_id, status=Status.SUCCEEDED, worker_id="w1"))
    assert answer.message == "refused: foreign"
    assert await rig.state(held.job_id) == "DISPATCHED"


@pytest.mark.requirement("D29")
async def test_an_echo_of_another_dispatch_is_stale(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.result(held, "w1", dispatch=Dispatch(dispatch_id="another", attempt=9))
    assert answer.message == "refused: stale"
    answer = await parts.result(held, "w1", dispatch=Dispatch(dispatch_id=held.dispatch_id))
    assert answer.message == "accepted"
    assert (await rig.said(held.job_id, "job_succeeded"))["dispatch_id"] == held.dispatch_id


@pytest.mark.requirement("BUS-11")
@pytest.mark.on_both
@pytest.mark.parametrize("named", ["unknown@1", "no-wire-id", "leased@1", "", "\0@1", "\ud800@1", "x" * 300 + "@1"])
async def test_a_result_for_no_job_of_the_bus_is_dropped(rig: Rig, named: str, caplog: pytest.LogCaptureFixture):
    parts = parts_of(rig)
    await rig.bench.submit_one(job_id=JobId("leased"))
    answer = await parts.result(named, "w1")
    assert answer.status == Status.UNSPECIFIED
    assert answer.message.startswith("refused")
    assert "unknown_job" in caplog.text
    assert await rig.bench.state(JobId("leased")) == "queued"


@pytest.mark.requirement("D29")
async def test_a_plain_id_ends_nothing(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.result(held.job_id, "w1")
    assert await rig.state(held.job_id) == "DISPATCHED"


async def test_an_epoch_that_never_was_is_stale(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.result(f"{held.job_id}@77", "w1")
    assert answer.message == "refused: stale"


async def test_the_result_listener_ignores_our_own_packets(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    result = JobResult(job_id=held.wire_id, status=Status.SUCCEEDED, worker_id=SENDER)
    assert await parts.answers(SENDER, result) == []
    assert await parts.answers(SENDER, JobProgress(job_id=held.wire_id)) == []
    assert await rig.state(held.job_id) == "DISPATCHED"


@pytest.mark.parametrize("worker_id", ["w" * 201, "w\0", ""])
async def test_a_worker_whose_name_cannot_be_kept_is_not_believed(rig: Rig, worker_id: str):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.result(held, worker_id)
    assert answer.message.startswith("refused")
    assert await rig.state(held.job_id) == "DISPATCHED"


async def test_remarks_of_one_job_have_a_bound(rig: Rig):
    parts = parts_of(rig)
    held = await _ended(parts)
    for number in range(120):
        await parts.result(held, f"w{number}", Status.SUCCEEDED)
    assert len(await parts.remarks(held.job_id)) == 100


# --- several at once -------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-6", "D29")
async def test_concurrent_contradicting_results_record_exactly_one(rig: Rig):
    processes = [parts_of(rig, name=f"p{n}", ledger=await rig.bench.open_another()) for n in range(3)]
    held = await processes[0].dispatched()
    words = [
        (f"w{number % 4}", status)
        for number, status in enumerate([Status.SUCCEEDED, Status.FAILED, Status.SUCCEEDED, Status.FAILED_FATAL] * 3)
    ]
    answers = await asyncio.gather(
        *(processes[number % 3].result(held, worker, status) for number, (worker, status) in enumerate(words))
    )
    path = await rig.path(held.job_id)
    assert path[:4] == [*BEFORE, "job_started"]
    assert path[4:] in (["job_succeeded"], ["job_failed"])
    last = await processes[0].last(held.job_id)
    said = json.loads(last.data or b"{}")
    for (worker, status), answer in zip(words, answers, strict=True):
        same = worker == last.actor and status.name == said["status"]
        assert answer.message == "accepted" if same else answer.message.startswith("refused"), (worker, status)


async def test_results_that_arrive_together_share_one_ledger_read(rig: Rig):
    parts = parts_of(rig)
    held = [await parts.dispatched() for _ in range(40)]
    looks = 0
    real = rig.ledger.holds

    async def holds(job_ids: Sequence[JobId]) -> list[HeldLease]:
        nonlocal looks
        looks += 1
        return await real(job_ids)

    rig.ledger.holds = holds  # type: ignore[method-assign]
    await asyncio.gather(*(parts.result(one, "w1") for one in held))
    assert looks <= 5
    assert set((await parts.jobs()).values()) == {"SUCCEEDED"}


@pytest.mark.requirement("BUS-2")
async def test_over_the_bus_a_worker_that_asks_is_answered_when_the_ledger_has_it(rig: Rig):
    parts = parts_of(rig)
    await parts.results.start()
    worker = rig.sender("w1")
    held = await parts.dispatched()
    result = JobResult(job_id=held.wire_id, status=Status.SUCCEEDED, worker_id="w1")
    answer = (await worker.ask(RESULT, result, trace_id="t", timeout_s=10)).body
    assert isinstance(answer, JobProgress)
    assert (answer.job_id, answer.status, answer.message) == (held.wire_id, Status.SUCCEEDED, "accepted")
    assert await rig.state(held.job_id) == "SUCCEEDED"
    await parts.results.stop()


# --- what is read ----------------------------------------------------------------------------------------------------


async def _reads_of_events(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[list[JobId]]:
    """Whose events are read from now on, by call."""
    read, calls = rig.ledger.events_of, list[list[JobId]]()

    async def counted(job_ids: Sequence[JobId], **how: Any) -> Any:
        calls.append(list(job_ids))
        return await read(job_ids, **how)

    monkeypatch.setattr(rig.ledger, "events_of", counted)
    return calls


@pytest.mark.requirement("BUS-2", "D28")
async def test_the_result_of_an_own_dispatch_is_judged_without_reading_its_events(
    rig_of: Opens, monkeypatch: pytest.MonkeyPatch
):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        parts = parts_of(rig)
        rig.scheduler.attempts = parts.results.attempts
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 2})
        await rig.submit()
        await rig.run()
        (order,) = worker.orders
        calls = await _reads_of_events(rig, monkeypatch)
        wire = order.request.job_id
        assert (await parts.result(wire, "w2")).message == "refused: foreign"
        other = Dispatch(dispatch_id="another", attempt=order.dispatch.attempt, worker_id="w1")
        assert (await parts.result(wire, "w1", dispatch=other)).message == "refused: stale"
        assert (await parts.result(wire, "w1", dispatch=order.dispatch)).message == "accepted"
        assert calls == []


@pytest.mark.on_both
@pytest.mark.requirement("BUS-2", "D29")
async def test_the_start_and_the_result_of_an_own_dispatch_are_judged_without_reading_its_events(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    parts = parts_of(rig)
    rig.scheduler.attempts = parts.results.attempts
    held = await _dispatched_here(rig)
    calls = await _reads_of_events(rig, monkeypatch)
    assert (await parts.start(held, "w1", "a")).message == "accepted"
    assert (await parts.start(held, "w1", "b")).message == "refused: started already"
    assert (await parts.start(held, "w2", "a")).message == "refused: foreign"
    assert (await parts.result(held, "w2")).message == "refused: foreign"
    assert (await parts.result(held, "w1")).message == "accepted"
    assert calls == []
    assert await rig.path(held.job_id) == [*BEFORE, "job_started", "job_succeeded"]


@pytest.mark.requirement("BUS-2")
async def test_a_cancel_request_is_told_at_the_start_of_an_own_dispatch(rig: Rig):
    parts = parts_of(rig)
    rig.scheduler.attempts = parts.results.attempts
    held = await _dispatched_here(rig)
    await parts.cancel(held.job_id, CancelMode.SOFT)
    assert (await parts.start(held, "w1")).message == "refused: late"
    assert [(stop.job_id, stop.dispatch and stop.dispatch.dispatch_id) for stop in parts.stops] == [
        (held.wire_id, held.dispatch_id)
    ]


async def _dispatched_here(rig: Rig) -> Held:
    """A job that the scheduler of the rig has dispatched to `w1`."""
    worker = await rig.worker("w1", TOPIC)
    job_id = await rig.submit()
    await rig.run()
    (order,) = worker.orders
    return Held(job_id=job_id, wire_id=order.request.job_id, dispatch_id=order.dispatch.dispatch_id)


@pytest.mark.requirement("BUS-2")
async def test_an_own_dispatch_that_another_worker_started_is_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts = parts_of(rig)
    rig.scheduler.attempts = parts.results.attempts
    held = await _dispatched_here(rig)
    another = parts_of(rig, name="process-2")
    assert (await another.start(held, "w1")).message == "accepted"
    calls = await _reads_of_events(rig, monkeypatch)
    assert (await parts.result(held, "w2")).message == "refused: foreign"
    assert len(calls) == 1


async def test_attempts_of_results_that_arrive_together_are_read_together(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts = parts_of(rig)
    held = [await parts.dispatched() for _ in range(12)]
    calls = await _reads_of_events(rig, monkeypatch)
    answers = await asyncio.gather(*(parts.result(one, "w1") for one in held))
    assert {answer.message for answer in answers} == {"accepted"}
    assert len(calls) <= 3
    assert sum(map(len, calls)) == 12

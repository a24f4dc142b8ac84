"""The scheduler hands out what may go, once, and waits for everything else without a word too many."""

import asyncio
import json
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import POLICY, TOPIC, Rig, decision, quiet
from trellis.bus.errors import BusUncertain
from trellis.bus.messages import JobOrder, PacketBody
from trellis.bus.requests import JobRequest
from trellis.bus.safety.policy import DecisionKind, KernelRefuses, SafetyDecision
from trellis.bus.scheduling import scheduler
from trellis.bus.scheduling import scheduler as kernel_checks
from trellis.bus.scheduling.dispatch_policy import (
    HOLD_S,
    WRITES_PER_PASS,
    DispatchOutcome,
    SchedulerOptions,
    approval_bindings,
)
from trellis.bus.topics import Topics
from trellis.engine.errors import LedgerUnavailable, NotAllowed
from trellis.engine.jobs import Actor, Advance, CancelMode, JobId, Move, Moved, NewJob, RequestId, Turn
from trellis.engine.records import ChildPage, Job, JobPlace
from trellis.engine.restoration import GIVEN_BACK_PREFIX
from trellis.ledgers.postgres import reads as postgres_reads
from trellis.ledgers.sqlite import reads as sqlite_reads
from trellis.lifecycles import Role, Trigger

ACCEPTED = ["job_accepted", "job_scheduled"]


class Crash(Exception):
    """The process ends here."""


# --- one job ---------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-3", "D29", "D53")
async def test_job_is_dispatched_to_a_subscriber_of_its_topic(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    job_id = await rig.submit(env={"a": "b"}, labels={"team": "x"})
    await rig.run()
    (order,) = worker.orders
    job = await rig.job(job_id)
    assert order.request.job_id == f"{job_id}@{job.epoch}"
    ours = {"trellis.job_id": job_id, "trellis.start": "ask", "trellis.lease_s": "30"}
    assert order.request.env == {"a": "b", "job_id": job_id, **ours}
    assert order.request.labels == {"team": "x"}
    assert await rig.path(job_id) == [*ACCEPTED, "job_dispatched"]
    told = await rig.said(job_id, "job_dispatched")
    assert told["dispatch_id"] == order.dispatch.dispatch_id
    assert (told["worker_id"], told["subject"]) == ("", TOPIC)
    assert told["decision"]["decision"] == "allow"
    assert [event.role for event in await rig.events(job_id)] == [Role.GATEWAY, Role.SCHEDULER, Role.SCHEDULER]
    assert job.lease_expires_at is not None


@pytest.mark.on_both
@pytest.mark.requirement("BUS-2")
async def test_a_large_request_is_dispatched_unchanged(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    env = {f"name{number}": "x" * 1_000 for number in range(20)}
    job_id = await rig.submit(env=env)
    await rig.run()
    (order,) = worker.orders
    assert env.items() <= order.request.env.items()
    assert await rig.state(job_id) == "DISPATCHED"


async def test_a_scheduler_pass_that_a_ledger_error_ends_reserves_no_capacity(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 2})
        await rig.submit()
        step = await rig.submit(parent_job_id="parent", workflow_id="w", step_index=1)
        children = rig.ledger.children

        async def away(parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
            raise LedgerUnavailable(reason=f"no {limit} children of {parent_id} since {since}")

        rig.ledger.children = away
        with pytest.raises(LedgerUnavailable):
            await rig.run()
        assert [seen.load for seen in rig.workers.live()] == [0]
        rig.ledger.children = children
        await rig.run()
        assert step in worker.jobs
        assert len(worker.jobs) == 2


@pytest.mark.requirement("BUS-1")
async def test_a_stored_request_that_nobody_can_read_is_cancelled_with_the_reason(rig: Rig):
    broken = NewJob(job_id=JobId("broken"), type=TOPIC, lifecycle="bus-job", payload=b'{"no": "request"}')
    await rig.ledger.submit(Actor(role=Role.GATEWAY, name="gateway"), [broken])
    await rig.run()
    last = (await rig.events("broken"))[-1]
    assert (last.target, last.role) == ("CANCELLED", Role.RECONCILER)
    assert "not accepted" in (last.cause or "")


async def test_a_woken_scheduler_does_not_wait_for_its_next_pass(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    await rig.submit_many(20)
    for _ in range(5):
        rig.scheduler.wake()
    await worker.has(20)
    await rig.scheduler.drain()
    assert len(set(worker.jobs)) == len(worker.orders) == 20


@pytest.mark.on_both
async def test_a_job_taken_in_here_is_validated_and_dispatched_without_a_pass(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    worker, job_id, ledger = await rig.worker("w1", TOPIC), JobId(await rig.submit()), rig.scheduler.ledger
    monkeypatch.setattr(ledger, "payloads", None)  # nothing is read back
    await rig.scheduler.validate_new(job_id)
    await worker.has(1)
    await rig.scheduler.validate_new(job_id)
    assert await rig.path(job_id) == ["job_accepted", "job_scheduled", "job_dispatched"]


async def test_a_job_cancelled_before_its_validation_stays_cancelled(rig: Rig):
    job_id = JobId(await rig.submit())
    await rig.ledger.cancel(
        Actor(role=Role.RECONCILER, name="r"), job_id, CancelMode.HARD, RequestId("c"), grace_s=0.0, cause="x"
    )
    await rig.scheduler.validate_new(job_id)
    assert await rig.state(job_id) == "CANCELLED"


async def test_a_job_whose_validation_the_ledger_did_not_answer_is_validated_by_the_next_pass(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    job_id, moves = JobId(await rig.submit()), rig.ledger.move

    async def fail_once(*told: Any) -> Any:
        monkeypatch.setattr(rig.ledger, "move", moves)
        raise LedgerUnavailable(reason="away")

    monkeypatch.setattr(rig.ledger, "move", fail_once)
    await rig.scheduler.validate_new(job_id)
    woken = rig.scheduler._validation._woken
    assert woken is not None
    await woken
    assert await rig.state(job_id) == "SCHEDULED"


async def test_new_jobs_are_validated_while_others_are_being_dispatched(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    asks, is_asked, may_answer = rig.kernel.check, asyncio.Event(), asyncio.Event()

    async def think(request: JobRequest) -> SafetyDecision:
        is_asked.set()
        await may_answer.wait()
        return await asks(request)

    rig.kernel.check = think
    (first,) = await rig.submit_many(1)
    rig.scheduler.wake()
    await is_asked.wait()
    (second,) = await rig.submit_many(1)
    rig.scheduler.wake()
    async with asyncio.timeout(10):
        while await rig.state(second) == "PENDING":
            await quiet()
    assert (await rig.state(first), worker.jobs) == ("SCHEDULED", [])
    may_answer.set()
    await worker.has(2)


async def test_a_pass_is_repeated_at_once_only_if_it_left_jobs_unread(rig_of: Opens):
    async with rig_of(SchedulerOptions(each=3)) as rig:
        await rig.worker("w1", TOPIC)
        await rig.submit_many(2)
        report = await rig.scheduler.run_once()
        assert (report.dispatched, report.again) == (2, False)
        assert rig.scheduler.pause_s(report) == rig.scheduler.options.poll_s
        await rig.submit_many(4)
        report = await rig.scheduler.run_once()
        assert (report.dispatched, report.again) == (3, True)
        assert rig.scheduler.pause_s(report) == 0.0


# --- who publishes ---------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "D29")
async def test_the_dispatch_is_in_the_ledger_before_the_packet_is_on_the_bus(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    job_id = await rig.submit()

    def crash(_subject: str, _body: PacketBody) -> None:
        raise Crash

    rig.bus.before = crash
    with pytest.raises(Crash):
        await rig.scheduler.run_once()
    assert await rig.state(job_id) == "DISPATCHED"
    assert worker.orders == []


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "D30")
async def test_a_crash_before_publishing_costs_a_lease_and_the_next_order_has_another_epoch(rig_of: Opens):
    async with rig_of(topics={"job.>": {"idempotent": True}}) as rig:
        worker = await rig.worker("w1", TOPIC)
        job_id = await rig.submit()

        def crash(_subject: str, _body: PacketBody) -> None:
            raise Crash

        rig.bus.before = crash
        with pytest.raises(Crash):
            await rig.scheduler.run_once()
        first = (await rig.job(job_id)).epoch
        rig.bus.before = None
        await rig.run()
        assert worker.orders == []
        for _ in range(4):
            await rig.advance(10)
        await rig.run()
        (order,) = worker.orders
        assert order.request.job_id == f"{job_id}@{(await rig.job(job_id)).epoch}" != f"{job_id}@{first}"


@pytest.mark.requirement("BUS-5")
async def test_only_the_scheduler_whose_dispatch_is_recorded_publishes(rig: Rig):
    await rig.worker("w1", TOPIC)
    await rig.submit()
    other = await rig.another("scheduler-2")
    await rig.scheduler._validate()
    first, second = await asyncio.gather(rig.scheduler.run_once(), other.run_once())
    assert first.dispatched + second.dispatched == 1
    assert len(rig.bus.orders) == first.dispatched


# --- nobody listens --------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("D29", "D53", "BUS-3")
async def test_a_silent_subject_gives_the_job_back_at_once_with_its_attempt_spared(rig: Rig):
    job_id = await rig.submit()
    fresh = await rig.job(job_id)
    report = await rig.run()
    assert report.did[DispatchOutcome.GIVEN_BACK] == 1
    job = await rig.job(job_id)
    assert (job.state, job.place) == ("SCHEDULED", JobPlace.READY)
    assert job.max_attempts - job.attempt == fresh.max_attempts - fresh.attempt
    cause = (await rig.events(job_id))[-1].cause
    assert cause == f"{GIVEN_BACK_PREFIX}nobody listens at {TOPIC}", "so that a restored job keeps the attempt too"
    worker = await rig.worker("w1", TOPIC)
    await rig.advance(2)
    await rig.run()
    assert worker.jobs == [job_id], "its only attempt was spared"


@pytest.mark.requirement("D53")
async def test_a_silent_subject_is_tried_with_one_job_and_ever_more_seldom(rig: Rig):
    jobs = await rig.submit_many(30)
    for _ in range(50):
        await rig.scheduler.run_once()
    events = [event for job_id in jobs for event in await rig.path(job_id)]
    assert events.count("job_dispatched") == events.count("job_retry_scheduled") == 1
    for _ in range(60):
        await rig.advance(1)
        await rig.scheduler.run_once()
    events = [event for job_id in jobs for event in await rig.path(job_id)]
    assert events.count("job_dispatched") <= 6


@pytest.mark.requirement("D53", "BUS-3")
async def test_a_heartbeat_ends_the_silence_at_once(rig: Rig):
    jobs = await rig.submit_many(3)
    await rig.run()
    worker = await rig.worker("w1", TOPIC, beats={})
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


@pytest.mark.requirement("BUS-3")
async def test_a_worker_that_is_gone_is_forgotten_and_the_topic_is_tried(rig: Rig):
    gone = await rig.worker("gone", TOPIC)
    await gone.shake(TOPIC)
    await gone.beat(max_parallel_jobs=5)
    await gone.leave()
    there = await rig.worker("there", TOPIC, direct=False)
    job_id = await rig.submit()
    await rig.run()
    await rig.run()
    assert there.jobs == [job_id]
    assert rig.workers.alive("gone") is None


# --- the bus and the kernel away --------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-10")
async def test_bus_outage_delays_dispatch_until_it_is_over(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.bus.down = True
    jobs = await rig.submit_many(20)
    report = await rig.run()
    assert report.bus_away
    assert {await rig.state(job_id) for job_id in jobs} == {"SCHEDULED"}
    assert {tuple(await rig.path(job_id)) for job_id in jobs} == {tuple(ACCEPTED)}
    rig.bus.down = False
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


@pytest.mark.requirement("BUS-10")
async def test_a_bus_that_goes_down_under_a_pass_gives_the_job_back_with_its_attempt_spared(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    jobs = await rig.submit_many(3)

    def go_down(_subject: str, _body: PacketBody) -> None:
        rig.bus.down = True

    rig.bus.before = go_down
    report = await rig.run()
    assert report.bus_away
    assert report.did[DispatchOutcome.GIVEN_BACK] == 1, "the others were not even tried"
    rig.bus.before, rig.bus.down = None, False
    await rig.advance(1.5)
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


def break_off(_subject: str, _body: PacketBody) -> None:
    raise BusUncertain(url="local", detail="the connection broke")


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-10", "D30")
async def test_a_job_that_may_have_arrived_and_must_not_be_done_twice_waits_for_its_lease(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    job_id = await rig.submit()
    rig.bus.after = break_off
    report = await rig.run()
    assert (report.did[DispatchOutcome.UNCERTAIN], report.did[DispatchOutcome.GIVEN_BACK]) == (1, 0)
    rig.bus.after = None
    for _ in range(5):
        await rig.advance(5)
        await rig.run()
    assert (await rig.state(job_id), worker.jobs) == ("DISPATCHED", [job_id])
    await rig.advance(10)
    await rig.run()
    assert (await rig.state(job_id), worker.jobs) == ("TIMEOUT", [job_id]), "a retry is another job"


@pytest.mark.requirement("BUS-7", "BUS-10")
async def test_idempotent_job_with_unknown_delivery_is_dispatched_again_at_once(rig_of: Opens):
    async with rig_of(topics={"job.>": {"idempotent": True, "max_attempts": 1}}) as rig:
        worker = await rig.worker("w1", TOPIC)
        job_id = await rig.submit()
        rig.bus.after = break_off
        report = await rig.run()
        assert report.did[DispatchOutcome.GIVEN_BACK] == 1
        rig.bus.after = None
        await rig.advance(1.5)
        await rig.run()
        assert worker.jobs == [job_id, job_id]
        assert len({order.request.job_id for order in worker.orders}) == 2


@pytest.mark.requirement("BUS-6", "BUS-10")
async def test_a_job_that_has_begun_is_not_given_back(rig: Rig):
    await rig.worker("w1", TOPIC)
    job_id = await rig.submit()
    await rig.run()
    (hold,) = await rig.ledger.holds([JobId(job_id)])
    start = Advance(hold.lease, "DISPATCHED", Trigger.START)
    await rig.ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="w1"), advances=(start,)))
    assert await rig.scheduler._give_back(hold.lease, 0.0, "the connection broke") is DispatchOutcome.DISPATCHED
    assert await rig.state(job_id) == "RUNNING"


@pytest.mark.requirement("BUS-4")
async def test_jobs_wait_unchanged_during_a_kernel_outage(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.away = True
    jobs = await rig.submit_many(40)
    report = await rig.run()
    assert report.kernel_away
    assert len(rig.kernel.asked) < len(jobs), "it is not asked about every single one"
    assert {tuple(await rig.path(job_id)) for job_id in jobs} == {tuple(ACCEPTED)}
    assert worker.orders == []
    rig.kernel.away = False
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


@pytest.mark.requirement("BUS-4")
async def test_a_kernel_that_thinks_for_ever_is_away(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_checks, "CHECK_S_MAX", 0.01)
    worker = await rig.worker("w1", TOPIC)
    jobs = await rig.submit_many(40)
    asks = rig.kernel.check

    async def think(request: JobRequest) -> SafetyDecision:
        await asyncio.Event().wait()
        return decision(request)

    rig.kernel.check = think
    report = await rig.run()
    assert report.kernel_away
    assert {tuple(await rig.path(job_id)) for job_id in jobs} == {tuple(ACCEPTED)}
    rig.kernel.check = asks
    monkeypatch.undo()
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


@pytest.mark.requirement("BUS-4")
async def test_jobs_that_the_kernel_cannot_decide_about_keep_nobody_else_waiting(rig_of: Opens):
    async with rig_of(SchedulerOptions(at_once=2)) as rig:
        worker = await rig.worker("w1", TOPIC)

        def answer(request: JobRequest) -> SafetyDecision:
            if "odd" in request.labels:
                raise KernelRefuses(detail="it answers about another job")
            return decision(request)

        rig.kernel.answer = answer
        odd = await rig.submit_many(6, labels={"odd": "yes"}, priority="critical")
        even = await rig.submit_many(6)
        for _ in range(3):
            await rig.run()
        assert sorted(worker.jobs) == sorted(even)
        paths = {tuple(await rig.path(job_id)) for job_id in odd}
        assert paths == {(*ACCEPTED, "job_deferred")}
        assert (await rig.said(odd[0], "job_deferred"))["hold"] == "kernel"


async def test_an_answer_of_the_kernel_that_no_event_can_record_keeps_nobody_else_waiting(rig: Rig):
    worker = await rig.worker("w1", TOPIC)

    def answer(request: JobRequest) -> SafetyDecision:
        said = {"constraints": {"hosts": {"a", "b"}}} if "odd" in request.labels else {}
        return decision(request, DecisionKind.ALLOW_WITH_CONSTRAINTS, **said)

    rig.kernel.answer = answer
    odd, even = await rig.submit(labels={"odd": "yes"}), await rig.submit()
    await rig.run()
    assert worker.jobs == [even]
    assert (await rig.said(odd, "job_deferred"))["hold"] == "kernel"


# --- what the kernel says ---------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-4", "BUS-1")
async def test_a_denied_job_ends_and_is_never_sent(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.DENY, rule="no-tests", reason="tests are not allowed")
    job_id = await rig.submit()
    await rig.run()
    assert await rig.path(job_id) == [*ACCEPTED, "job_denied"]
    assert await rig.state(job_id) == "DENIED"
    told = await rig.said(job_id, "job_denied")
    assert told["decision"]["rule"] == "no-tests"
    assert worker.orders == []


async def approve(rig: Rig, job_id: str, **changed: str) -> None:
    told = {"job_hash": "", "policy_hash": POLICY, "rule": "test", "note": "fine"}
    held = await rig.said(job_id, "job_held")
    told |= approval_bindings(JobRequest.read((await rig.job(job_id)).payload or b""), held["decision"]) | changed
    move = Move(
        job_id=JobId(job_id),
        target="SCHEDULED",
        request_id=RequestId(f"approve:{job_id}:{changed}"),
        data=json.dumps(told).encode(),
    )
    assert isinstance(await rig.ledger.move(Actor(role=Role.OWNER, name="iryna"), move), Moved)


@pytest.mark.on_both
@pytest.mark.requirement("BUS-4", "D45")
async def test_a_job_that_needs_a_person_rests_until_one_approves_it_under_the_same_policy(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    job_id = await rig.submit()
    await rig.run()
    job = await rig.job(job_id)
    assert (job.state, job.place) == ("SCHEDULED", JobPlace.SCHEDULED)
    assert (await rig.events(job_id))[-1].role is Role.SAFETY_KERNEL
    assert (await rig.said(job_id, "job_held"))["hold"] == "human"
    await approve(rig, job_id, policy_hash="another policy")
    await rig.run()
    assert (await rig.path(job_id))[-2:] == ["job_approved", "job_held"], "an approval under another policy is none"
    await approve(rig, job_id)
    approval = (await rig.events(job_id))[-1].id
    await rig.run()
    assert worker.jobs == [job_id]
    assert (await rig.said(job_id, "job_dispatched"))["approved_by"] == approval


@pytest.mark.requirement("D45")
async def test_expired_hold_is_evaluated_again(rig: Rig):
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    job_id = await rig.submit(budget={"deadline_ms": int(2 * HOLD_S * 1000)})
    await rig.run()
    await rig.advance(HOLD_S + 1)
    await rig.run()
    assert (await rig.path(job_id)).count("job_held") == 2


@pytest.mark.requirement("BUS-4", "D45")
async def test_a_throttled_job_is_asked_about_again_after_its_delay(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.THROTTLE, delay_s=10.0, reason="too fast")
    job_id = await rig.submit()
    await rig.run()
    told = await rig.said(job_id, "job_deferred")
    assert (told["hold"], told["reason"], told["decision"]["delay_s"]) == ("throttle", "too fast", 10.0)
    rig.kernel.answer = decision
    await rig.advance(9)
    await rig.run()
    assert worker.orders == []
    await rig.advance(1.5)
    await rig.run()
    assert worker.jobs == [job_id]


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("constraints", [{"max_runtime_ms": 5_000}, {"budgets": {"max_runtime_ms": 5_000}}])
async def test_constraints_travel_with_the_order_and_the_stored_request_stays(rig: Rig, constraints: dict[str, object]):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.ALLOW_WITH_CONSTRAINTS, constraints=constraints)
    job_id = await rig.submit(budget={"deadline_ms": 60_000, "max_input_tokens": 7})
    before = (await rig.job(job_id)).payload
    await rig.run()
    (order,) = worker.orders
    assert json.loads(order.request.env["TRELLIS_POLICY_CONSTRAINTS"]) == constraints
    assert order.request.budget is not None
    assert (order.request.budget.deadline_ms, order.request.budget.max_input_tokens) == (5_000, 7)
    assert (await rig.job(job_id)).payload == before
    assert (await rig.said(job_id, "job_dispatched"))["decision"]["constraints"] == constraints


@pytest.mark.requirement("BUS-4")
async def test_constraints_that_no_order_can_carry_end_the_job_with_the_reason(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.ALLOW_WITH_CONSTRAINTS, constraints={"paths": ["x" * 3_000]})
    job_id = await rig.submit()
    await rig.run()
    last = (await rig.events(job_id))[-1]
    assert last.target == "CANCELLED"
    assert "TRELLIS_POLICY_CONSTRAINTS" in (last.cause or "")
    assert worker.orders == []


@pytest.mark.requirement("BUS-3", "BUS-4")
async def test_a_job_that_is_not_allowed_reserves_no_capacity(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 1})
        rig.kernel.says(DecisionKind.DENY)
        await rig.submit()
        await rig.run()
        rig.kernel.answer = decision
        job_id = await rig.submit()
        await rig.run()
        assert worker.jobs == [job_id]


@pytest.mark.requirement("OBS-6")
async def test_the_trace_of_the_submitter_travels_with_the_order(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await rig.put(JobRequest.checked({"job_id": "traced", "topic": TOPIC}), trace=trace)
    await rig.run()
    (order,) = worker.orders
    assert order.request.env["TRACEPARENT"].split("-")[1] == trace.split("-")[1]


# --- whose turn ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3")
async def test_urgent_jobs_go_first(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 1})
        batch = await rig.submit(priority="batch")
        interactive = await rig.submit(priority="interactive")
        critical = await rig.submit(priority="critical")
        for done in range(3):
            await rig.run()
            await worker.finish(worker.orders[done])
        assert worker.jobs == [critical, interactive, batch]


@pytest.mark.requirement("BUS-3")
async def test_a_batch_job_is_not_starved_by_a_stream_of_critical_ones(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 1})
        batch = await rig.submit(priority="batch")
        for _ in range(32):
            await rig.submit_many(2, priority="critical")
            await rig.run()
            await worker.finish(worker.orders[-1])
            await rig.advance(10)
            await worker.beat(pool="p", max_parallel_jobs=1)
        assert batch in worker.jobs
        assert worker.jobs.index(batch) >= 12, "two minutes of waiting make up for two classes"


@pytest.mark.requirement("BUS-3")
async def test_critical_job_overtakes_a_long_queue_of_older_jobs(rig_of: Opens):
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1")
        await rig.submit_many(30, priority="batch")
        await rig.advance(3600)
        await worker.beat(pool="p", max_parallel_jobs=1)
        critical = await rig.submit(priority="critical")
        for done in range(3):
            await rig.run()
            await worker.finish(worker.orders[done])
        assert critical in worker.jobs


@pytest.mark.on_both
@pytest.mark.requirement("BUS-3")
async def test_critical_job_is_validated_before_older_jobs(rig_of: Opens):
    async with rig_of(SchedulerOptions(validate_max=10, newest_max=20)) as rig:
        worker = await rig.worker("w1", TOPIC)
        await rig.submit_many(100, priority="batch")
        critical = [await rig.submit(priority="interactive"), *await rig.submit_many(3, priority="critical")]
        await rig.scheduler.run_once()
        await quiet()
        assert set(worker.jobs) >= set(critical)
        assert worker.jobs.index(critical[0]) > worker.jobs.index(critical[1])
        await rig.run()
        assert len(worker.jobs) == 104


@pytest.mark.on_both
@pytest.mark.requirement("BUS-3")
async def test_a_tenant_has_no_more_under_way_than_it_may(rig_of: Opens):
    async with rig_of(tenants={"acme": {"held_max": 2}}) as rig:
        worker = await rig.worker("w1", TOPIC)
        mine = await rig.submit_many(5, tenant_id="acme")
        others = await rig.submit_many(5, tenant_id="other")
        await rig.run()
        assert sorted(set(worker.jobs) & set(others)) == sorted(others)
        assert len(set(worker.jobs) & set(mine)) == 2


@pytest.mark.on_both
@pytest.mark.requirement("BUS-3")
@pytest.mark.parametrize("now, out", [({"held_max": 3}, 3), ({}, 5)])
async def test_a_tenant_may_have_what_the_configuration_says_now(rig_of: Opens, now: dict[str, int], out: int):
    async with rig_of(tenants={"acme": {"held_max": 1}}) as rig:
        worker = await rig.worker("w1", TOPIC)
        await rig.submit_many(5, tenant_id="acme")
        await rig.run()
        assert len(worker.orders) == 1
        many = {f"tenant-{number}": {"held_max": 1} for number in range(2 * WRITES_PER_PASS)}
        rig.topics = Topics.model_validate({"tenants": {"acme": now, **many}})
        restarted = await rig.another("scheduler-2")
        for _ in range(5):
            await restarted.run_once()
        await quiet()
        assert len(worker.orders) == out


async def test_scheduler_without_the_right_to_limit_tenants_logs_once_and_continues(
    rig_of: Opens, caplog: pytest.LogCaptureFixture
):
    async with rig_of(tenants={"acme": {"held_max": 1}}) as rig:

        async def may_not(actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
            raise NotAllowed(
                role=actor.role.value, action=f"limit {key} to {limit}", reason=cause or "its token does not say so"
            )

        rig.ledger.limit_key = may_not
        worker = await rig.worker("w1", TOPIC)
        job_id = await rig.submit(tenant_id="acme")
        await rig.run()
        assert worker.jobs == [job_id]
        assert caplog.text.count("tenant_limit_not_set") == 1


@pytest.mark.requirement("BUS-3")
async def test_jobs_for_busy_workers_do_not_hide_those_behind_them(rig_of: Opens):
    topics = {"topics": {"job.>": {"pools": ["p"]}}, "pools": {"p": {}}}
    async with rig_of(SchedulerOptions(each=4), **topics) as rig:
        gpu = await rig.worker("gpu", beats={"pool": "p", "max_parallel_jobs": 1, "labels": {"kind": "gpu"}})
        cpu = await rig.worker("cpu", beats={"pool": "p", "max_parallel_jobs": 9, "labels": {"kind": "cpu"}})
        picky = await rig.submit_many(6, labels={"worker.kind": "gpu"})
        plain = await rig.submit_many(3)
        for _ in range(4):
            await rig.run()
        assert len(gpu.orders) == 1
        assert sorted(cpu.jobs) == sorted(plain)
        held_up = [job_id for job_id in picky if "job_deferred" in await rig.path(job_id)]
        assert held_up, "some of those that wait for the gpu were put aside"


@pytest.mark.requirement("BUS-3")
async def test_jobs_that_nobody_may_have_are_put_aside_together(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    under_way: list[int] = [0, 0]
    defer = rig.scheduler._defer

    async def counted(*said: Any) -> DispatchOutcome:
        under_way[0] += 1
        under_way[1] = max(under_way)
        try:
            return await defer(*said)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(rig.scheduler, "_defer", counted)
    await rig.submit_many(40, meta={"requires": ["gpu"]})
    report = await rig.run()
    assert report.did[DispatchOutcome.DEFERRED] == 40
    assert under_way[1] == rig.scheduler.options.at_once, "one by one they would keep everything else waiting"


async def test_jobs_behind_the_first_of_their_topic_are_not_read_again_and_again(rig: Rig):
    await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.DENY)
    jobs = await rig.submit_many(40, env={str(number): "x" * 2_000 for number in range(5)})
    read, reads = rig.ledger.job, list[str]()

    async def counted(job_id: JobId) -> Job | None:
        reads.append(job_id)
        return await read(job_id)

    rig.ledger.job = counted
    report = await rig.run()
    assert report.did[DispatchOutcome.DENIED] == len(jobs)
    assert len(reads) <= 4 * len(jobs)


@pytest.mark.requirement("BUS-3", "BUS-4")
async def test_an_urgent_job_does_not_wait_until_a_slow_kernel_has_judged_all_that_waited(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    await rig.submit_many(90)
    late: list[str] = []

    def slow(request: JobRequest) -> SafetyDecision:
        rig.clock.advance(0.1)
        return decision(request)

    async def check(request: JobRequest) -> SafetyDecision:
        if not late:
            late.append("late")
            await rig.submit(job_id="late", priority="critical")
        return slow(request)

    rig.kernel.check = check
    await rig.run()
    assert len(worker.jobs) == 91
    assert worker.jobs.index("late") < 60


@pytest.mark.requirement("BUS-3", "BUS-4")
async def test_topic_skipped_by_a_scheduler_pass_is_first_in_the_next_pass(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    for number in range(60):
        await rig.submit_many(5, f"job.nobody{number}")
    job_id = await rig.submit()
    while await rig.scheduler._validate():
        pass

    async def slow(request: JobRequest) -> SafetyDecision:
        rig.clock.advance(0.2)
        return decision(request)

    rig.kernel.check = slow
    passes = 0
    while not worker.jobs:
        await rig.scheduler.run_once()
        await quiet()
        await rig.advance(0.5)
        passes += 1
        assert passes <= 5, "16 topics are looked at in each"
    assert worker.jobs == [job_id]


@pytest.mark.on_both
@pytest.mark.requirement("BUS-3")
async def test_more_topics_without_workers_than_a_look_shows_do_not_hide_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    for module in (scheduler, sqlite_reads, postgres_reads):
        monkeypatch.setattr(module, "HEADS_MAX", 10)
    for number in range(25):
        await rig.submit(f"job.nobody{number}")
    for pause_s in (3, 5, 9, 17, 0, 0, 0, 0):  # until all of those topics are left alone for long
        await rig.run()
        await rig.advance(pause_s)
    worker = await rig.worker("w1", TOPIC)
    job_id = await rig.submit()
    for _ in range(3):
        await rig.run()
        await rig.advance(1)
    assert worker.jobs == [job_id]
    said = await rig.said("j1", "job_deferred")
    assert (said["hold"], said["reason"]) == ("placement", "nobody listens on its topic")


@pytest.mark.requirement("BUS-3")
async def test_jobs_of_more_topics_than_a_look_shows_wait_for_busy_workers_without_being_written_about(
    rig_of: Opens, monkeypatch: pytest.MonkeyPatch
):
    for module in (scheduler, sqlite_reads, postgres_reads):
        monkeypatch.setattr(module, "HEADS_MAX", 10)
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 1})
        jobs = [await rig.submit(f"job.t{number}") for number in range(25)]
        deferred = 0
        for number in range(1, len(jobs) + 1):
            deferred += (await rig.run()).did[DispatchOutcome.DEFERRED]
            assert len(worker.jobs) == number
            await worker.finish(worker.orders[-1])
        assert (deferred, set(worker.jobs)) == (0, set(jobs))


# --- several at once --------------------------------------------------------------------------------------------------


async def everything_once(rig: Rig, number: int) -> None:
    """Three schedulers hand out so many jobs: each job once, each wire id once."""
    worker = await rig.worker("w1", TOPIC)
    jobs = await rig.submit_many(number)
    schedulers = [rig.scheduler, await rig.another("scheduler-2"), await rig.another("scheduler-3")]

    async def work(number: int) -> int:
        done = 0
        for _ in range(10_000):
            report = await schedulers[number].run_once()
            done += report.dispatched
            if len(worker.orders) >= len(jobs):
                return done
        raise AssertionError(f"{len(worker.orders)} of {len(jobs)} came out")

    shares = await asyncio.gather(*(work(number) for number in range(len(schedulers))))
    await quiet()
    wire_ids = [order.request.job_id for order in worker.orders]
    assert len(set(wire_ids)) == len(wire_ids) == number
    assert sorted(worker.jobs) == sorted(jobs)
    assert sum(shares) == number
    assert all(isinstance(order, JobOrder) for order in worker.orders)


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-3", "BUS-5")
async def test_three_schedulers_hand_out_every_job_once(rig_of: Opens):
    async with rig_of(SchedulerOptions(subject_max=100_000)) as rig:
        await everything_once(rig, 300)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-3", "BUS-5")
async def test_three_schedulers_hand_out_ten_thousand_jobs_once(rig_of: Opens):
    async with rig_of(SchedulerOptions(subject_max=100_000)) as rig:
        await everything_once(rig, 10_000)

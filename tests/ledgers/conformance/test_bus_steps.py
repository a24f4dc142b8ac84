"""What the roles of the bus do to a job: they hold no lease of their own, put jobs off, dispatch them, and report in a worker's name."""

import asyncio
import json
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import LENGTH_S, Rig, actor
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    CancelRequested,
    Epoch,
    JobId,
    Lease,
    LeaseLost,
    Moved,
    NotMoved,
    Renewed,
    StepApplied,
    Turn,
    TurnResult,
)
from trellis.engine.records import JobFilter, JobPlace
from trellis.ledgers.postgres.turn import sort_steps, steps_call
from trellis.lifecycles import Role, Trigger

SCHEDULER = actor(Role.SCHEDULER)
KERNEL = actor(Role.SAFETY_KERNEL)
OWNER = actor(Role.OWNER)
CONTROL_PLANE = actor(Role.CONTROL_PLANE)
RECONCILER = actor(Role.RECONCILER)
GATEWAY = actor(Role.GATEWAY)
W = actor(Role.WORKER, "w")
KEY = "bus-tenant:t"
TOPIC_LEASE_S = 30.0


async def scheduled(rig: Rig, **options) -> JobId:
    job_id = await rig.submit_one(lifecycle="bus-job", **options)
    assert isinstance(await rig.move(job_id, "SCHEDULED", by=SCHEDULER), Moved)
    return job_id


async def dispatched(rig: Rig, **options) -> Lease:
    return await dispatch(rig, await scheduled(rig, **options))


async def dispatch(rig: Rig, job_id: JobId) -> Lease:
    moved = await rig.move(job_id, "DISPATCHED", by=SCHEDULER, lease_s=TOPIC_LEASE_S, heartbeat_s=TOPIC_LEASE_S)
    assert isinstance(moved, Moved), moved
    assert moved.lease is not None
    return moved.lease


def start(lease: Lease, data: bytes | None = b'{"status": "RUNNING"}') -> Advance:
    return Advance(lease=lease, source="DISPATCHED", trigger=Trigger.START, data=data)


def complete(lease: Lease, data: bytes | None = b'{"status": "SUCCEEDED"}', result: bytes | None = None) -> Advance:
    return Advance(lease=lease, source="RUNNING", trigger=Trigger.COMPLETE, data=data, result=result)


def retry(lease: Lease, source: str, **options) -> Advance:
    return Advance(lease=lease, source=source, trigger=Trigger.RETRY, **options)


async def report(rig: Rig, *advances: Advance) -> TurnResult:
    return await rig.ledger.turn(Turn(actor=W, advances=advances))


# --- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1")
async def test_a_validated_job_is_ready_at_once_or_when_its_time_has_come(rig: Rig):
    assert (await rig.job(await scheduled(rig))).place is JobPlace.READY
    later = await rig.submit_one(lifecycle="bus-job")
    await rig.move(later, "SCHEDULED", by=SCHEDULER, delay_s=20.0)
    job = await rig.job(later)
    assert (job.place, job.due_at) == (JobPlace.SCHEDULED, await rig.ledger.now() + timedelta(seconds=20))
    await rig.pass_time(21)
    assert (await rig.job(later)).place is JobPlace.READY


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1", "BUS-4", "D37")
@pytest.mark.parametrize(
    "role, event",
    [
        (Role.SAFETY_KERNEL, "job_held"),
        (Role.SCHEDULER, "job_deferred"),
        (Role.OWNER, "job_approved"),
        (Role.CONTROL_PLANE, "job_approved"),
    ],
)
async def test_each_role_records_its_own_event_for_a_scheduled_job(rig: Rig, role: Role, event: str):
    job_id = await scheduled(rig)
    moved = await rig.move(job_id, "SCHEDULED", by=actor(role), version=2, delay_s=60.0, data=b'{"why": 1}')
    assert moved == Moved(job_id=job_id, source="SCHEDULED", target="SCHEDULED", version=3)
    last = await rig.last_event(job_id)
    assert (last.type, last.role, last.data, last.attempt) == (event, role, b'{"why": 1}', 0)
    assert (await rig.job(job_id)).place is JobPlace.SCHEDULED


@pytest.mark.requirement("BUS-1", "D37")
async def test_role_without_the_transition_cannot_make_it(rig: Rig):
    job_id = await scheduled(rig)
    for by in (GATEWAY, W, RECONCILER):
        assert isinstance(await rig.move(job_id, "SCHEDULED", by=by), NotMoved)
    assert await rig.event_types(job_id) == ["job_accepted", "job_scheduled"]


@pytest.mark.requirement("BUS-4")
async def test_a_held_job_waits_for_a_person_and_is_ready_as_soon_as_one_approves(rig: Rig):
    job_id = await scheduled(rig)
    await rig.move(job_id, "SCHEDULED", by=KERNEL, delay_s=72 * 3600.0)
    await rig.pass_time(60)
    assert (await rig.job(job_id)).place is JobPlace.SCHEDULED
    await rig.move(job_id, "SCHEDULED", by=OWNER)
    assert (await rig.job(job_id)).place is JobPlace.READY
    assert (await dispatch(rig, job_id)).job_id == job_id


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("delay_s", [0.0, None])
async def test_deferred_job_is_ready_when_due_or_released(rig: Rig, delay_s: float | None):
    in_time, let_go = await scheduled(rig), await scheduled(rig)
    for job_id in (in_time, let_go):
        await rig.move(job_id, "SCHEDULED", by=SCHEDULER, delay_s=30.0)
    await rig.move(let_go, "SCHEDULED", by=SCHEDULER, delay_s=delay_s)
    assert (await rig.job(let_go)).place is JobPlace.READY
    await rig.pass_time(31)
    job = await rig.job(in_time)
    assert (job.place, job.due_at, job.version) == (JobPlace.READY, None, 3)


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-3", "BUS-4")
async def test_a_job_that_is_put_off_gives_its_slot_to_the_next_of_its_key(rig: Rig):
    rig.key_limits[KEY] = 1
    first = await scheduled(rig, concurrency_key=KEY)
    second = await scheduled(rig, concurrency_key=KEY)
    assert [(await rig.job(job)).place for job in (first, second)] == [JobPlace.READY, JobPlace.BLOCKED]
    await rig.move(first, "SCHEDULED", by=KERNEL, delay_s=60.0)
    assert [(await rig.job(job)).place for job in (first, second)] == [JobPlace.SCHEDULED, JobPlace.READY]
    await rig.move(first, "SCHEDULED", by=OWNER)
    assert [(await rig.job(job)).place for job in (first, second)] == [JobPlace.BLOCKED, JobPlace.READY]
    lease = await dispatch(rig, second)
    assert isinstance(await rig.move(first, "DISPATCHED", by=SCHEDULER), NotMoved)
    await report(rig, start(lease), complete(lease))
    assert (await rig.job(first)).place is JobPlace.READY


@pytest.mark.requirement("BUS-4")
async def test_a_person_may_deny_what_waits_for_one(rig: Rig):
    job_id = await scheduled(rig)
    await rig.move(job_id, "SCHEDULED", by=KERNEL, delay_s=60.0)
    moved = await rig.move(job_id, "DENIED", by=OWNER, data=b'{"note": "no"}')
    assert isinstance(moved, Moved)
    assert await rig.state(job_id) == "DENIED"


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-5")
@pytest.mark.parametrize("state", ["PENDING", "SCHEDULED", "resting", "parked", "DISPATCHED", "RUNNING"])
async def test_a_deadline_ends_a_job_wherever_it_is_and_leaves_no_dead_letter(rig: Rig, state: str):
    if state == "parked":
        await scheduled(rig, concurrency_key=KEY)
    key = KEY if state == "parked" else None
    job_id = await rig.submit_one(lifecycle="bus-job", deadline_s=20.0, concurrency_key=key)
    await rig.drive(job_id, state if state.isupper() else "SCHEDULED")
    if state == "resting":
        await rig.move(job_id, "SCHEDULED", by=KERNEL, delay_s=600.0)
    await rig.pass_time(21)
    last = await rig.last_event(job_id)
    assert (last.target, last.type, last.role, last.cause) == (
        "TIMEOUT",
        "job_timed_out",
        Role.RECONCILER,
        "deadline passed",
    )
    assert await rig.ledger.dead_letters(JobFilter(), limit=10) == []


# --- dispatch and report ---------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1", "BUS-5")
async def test_a_dispatch_grants_a_lease_of_the_length_that_was_asked_for(rig: Rig):
    job_id = await scheduled(rig)
    request = rig.request()
    options = {"by": SCHEDULER, "lease_s": TOPIC_LEASE_S, "heartbeat_s": TOPIC_LEASE_S, "request_id": request}
    moved = await rig.move(job_id, "DISPATCHED", version=2, **options)
    again = await rig.move(job_id, "DISPATCHED", version=2, **options)
    assert isinstance(moved, Moved)
    assert isinstance(again, Moved)
    assert (again.lease, again.repeated) == (moved.lease, True)
    job = await rig.job(job_id)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=TOPIC_LEASE_S)
    assert isinstance(await rig.move(job_id, "DISPATCHED", by=SCHEDULER, version=2), NotMoved)


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-21", "BUS-1", "D29")
async def test_a_start_and_its_result_are_two_events_of_one_turn_that_may_be_repeated(rig: Rig):
    lease = await dispatched(rig)
    steps = (start(lease, b'{"n": 1}'), complete(lease, b'{"n": 2}', result=b'{"n": 2}'))
    assert (await report(rig, *steps)).outcomes == [StepApplied(4), StepApplied(5)]
    events = (await rig.ledger.events(lease.job_id))[-2:]
    assert [(event.type, event.actor, event.role, event.data) for event in events] == [
        ("job_started", "w", Role.WORKER, b'{"n": 1}'),
        ("job_succeeded", "w", Role.WORKER, b'{"n": 2}'),
    ]
    assert await rig.ledger.result(lease.job_id) == b'{"n": 2}'
    before = await rig.snapshot(lease.job_id)
    assert (await report(rig, *steps)).outcomes == [StepApplied(4, repeated=True), StepApplied(5, repeated=True)]
    assert await rig.snapshot(lease.job_id) == before


@pytest.mark.requirement("D29")
async def test_steps_of_one_turn_are_applied_in_order(rig: Rig):
    for first, second in ((None, b"{}"), (b"{}", None), (None, None)):
        lease = await dispatched(rig)
        outcomes = (await report(rig, start(lease, first), complete(lease, second))).outcomes
        assert outcomes == [StepApplied(4), StepApplied(5)]


@pytest.mark.requirement("D29")
async def test_jobs_of_one_turn_are_answered_each_for_itself(rig: Rig):
    good, lost, other = [await dispatched(rig) for _ in range(3)]
    await rig.cancel(lost.job_id)
    steps = (start(other), start(lost), complete(lost), start(good), complete(good), complete(other))
    outcomes = (await report(rig, *steps)).outcomes
    assert outcomes == [
        StepApplied(4),
        LeaseLost(lost),
        LeaseLost(lost),
        StepApplied(4),
        StepApplied(5),
        StepApplied(5),
    ]


@pytest.mark.requirement("BUS-6", "DJ-21")
async def test_a_second_result_of_another_kind_is_refused(rig: Rig):
    lease = await dispatched(rig)
    await report(rig, start(lease), complete(lease))
    fail = Advance(lease=lease, source="RUNNING", trigger=Trigger.FAIL, data=b'{"status": "FAILED"}')
    assert (await report(rig, start(lease), fail)).outcomes[1] == LeaseLost(lease)
    assert await rig.state(lease.job_id) == "SUCCEEDED"


@pytest.mark.requirement("BUS-2")
async def test_a_failure_keeps_what_was_reported(rig: Rig):
    lease = await dispatched(rig)
    fail = Advance(lease=lease, source="RUNNING", trigger=Trigger.FAIL, cause="E: broke", data=b'{"error_code": "E"}')
    assert (await report(rig, start(lease), fail)).outcomes == [StepApplied(4), StepApplied(5)]
    last = await rig.last_event(lease.job_id)
    assert (last.target, last.cause, last.data) == ("FAILED", "E: broke", b'{"error_code": "E"}')
    assert await rig.ledger.dead_letters(JobFilter(), limit=10) == []


@pytest.mark.requirement("BUS-5")
async def test_a_start_begins_the_lease_anew(rig: Rig):
    lease = await dispatched(rig)
    await rig.advance(20)
    assert (await report(rig, start(lease))).outcomes == [StepApplied(4)]
    job = await rig.job(lease.job_id)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=TOPIC_LEASE_S)


@pytest.mark.requirement("D2")
async def test_report_after_lease_expiry_is_accepted_until_the_lease_is_revoked(rig: Rig):
    lease = await dispatched(rig)
    await rig.advance(TOPIC_LEASE_S + 10)
    assert (await report(rig, start(lease), complete(lease))).outcomes == [StepApplied(4), StepApplied(5)]


@pytest.mark.requirement("BUS-7", "BUS-13")
@pytest.mark.parametrize("source", ["DISPATCHED", "RUNNING"])
@pytest.mark.parametrize("spare", [True, False])
async def test_a_retry_by_the_scheduler_opens_the_next_attempt_after_its_delay(rig: Rig, source: str, *, spare: bool):
    lease = await dispatched(rig, max_attempts=2)
    if source == "RUNNING":
        await report(rig, start(lease))
    step = retry(lease, source, delay_s=7.0, spare_attempt=spare, cause="again", data=b"{}")
    assert isinstance((await rig.turn(step, by=SCHEDULER)).outcomes[0], StepApplied)
    job = await rig.job(lease.job_id)
    assert (job.state, job.place, job.attempt, job.max_attempts) == ("SCHEDULED", JobPlace.SCHEDULED, 1, 2 + spare)
    assert (await rig.last_event(lease.job_id)).type == "job_retry_scheduled"
    await rig.pass_time(8)
    assert (await dispatch(rig, lease.job_id)).epoch > lease.epoch
    assert (await report(rig, start(lease), complete(lease))).outcomes == [LeaseLost(lease), LeaseLost(lease)]


@pytest.mark.requirement("BUS-5")
async def test_a_lease_is_renewed_in_anybodys_name(rig: Rig):
    lease = await dispatched(rig)
    await rig.advance(20)
    assert await rig.ledger.renew(actor(Role.RECONCILER, "another"), [lease]) == [Renewed(cancel=False)]
    assert (await rig.ledger.holds([lease.job_id]))[0].left_s == pytest.approx(TOPIC_LEASE_S)


@pytest.mark.requirement("BUS-5")
@pytest.mark.parametrize("state", ["DISPATCHED", "RUNNING"])
async def test_a_silent_job_gets_its_next_attempt_and_then_times_out_without_a_dead_letter(rig: Rig, state: str):
    job_id = await scheduled(rig, max_attempts=2, max_deaths=2)
    for _ in range(2):
        lease = await dispatch(rig, job_id)
        if state == "RUNNING":
            await report(rig, start(lease))
        await rig.pass_time(LENGTH_S + 1)
    assert (await rig.event_types(job_id)).count("job_lease_expired") == 1
    last = await rig.last_event(job_id)
    assert (last.target, last.role) == ("TIMEOUT", Role.RECONCILER)
    assert await rig.ledger.dead_letters(JobFilter(), limit=10) == []


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1")
@pytest.mark.parametrize("data", [b"{}", None])
async def test_a_job_that_was_asked_to_stop_is_not_started_any_more(rig: Rig, data: bytes | None):
    lease = await dispatched(rig)
    assert isinstance(await rig.cancel(lease.job_id, CancelMode.SOFT), CancelRequested)
    assert (await report(rig, start(lease, data))).outcomes == [LeaseLost(lease)]
    last = await rig.last_event(lease.job_id)
    assert (last.target, last.role) == ("CANCELLED", Role.RECONCILER)
    assert (await report(rig, start(lease, data), complete(lease, data))).outcomes == [LeaseLost(lease)] * 2
    assert await rig.ledger.result(lease.job_id) is None


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1")
@pytest.mark.parametrize("data", [b"{}", None])
async def test_start_reported_with_its_end_is_recorded_despite_a_cancel_request(rig: Rig, data: bytes | None):
    lease = await dispatched(rig)
    await rig.cancel(lease.job_id, CancelMode.SOFT)
    made = (await report(rig, start(lease, data), complete(lease, data))).outcomes
    assert not any(isinstance(outcome, LeaseLost) for outcome in made)
    assert (await rig.last_event(lease.job_id)).target == "SUCCEEDED"


@pytest.mark.requirement("D36")
async def test_a_compensation_is_written_down_at_the_step_it_undid(rig: Rig):
    original = await dispatched(rig)
    await report(rig, start(original), complete(original))
    undone = await dispatched(rig, compensates=original.job_id)
    await report(rig, start(undone), complete(undone))
    last = await rig.last_event(original.job_id)
    assert (last.type, last.source, last.target) == ("job_compensated", "SUCCEEDED", "SUCCEEDED")
    assert isinstance(await rig.move(original.job_id, "SUCCEEDED", by=W), NotMoved)


# --- many jobs together ----------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1", "BUS-10")
async def test_moves_of_many_jobs_together_leave_each_as_if_it_came_alone(rig: Rig):
    rig.key_limits[KEY] = 1
    plain, late, newer, again, foreign, other = await rig.submit(6, lifecycle="bus-job")
    keyed = await rig.submit(2, lifecycle="bus-job", concurrency_key=KEY)
    await rig.move(again, "SCHEDULED", by=SCHEDULER, request_id="before")
    await rig.move(again, "SCHEDULED", by=SCHEDULER, delay_s=60.0)
    answers = await asyncio.gather(
        rig.move(other, "SCHEDULED", by=SCHEDULER),
        rig.move(plain, "SCHEDULED", by=SCHEDULER, version=1, delay_s=0.0, cause="valid", data=b'{"n": 1}'),
        rig.move(late, "SCHEDULED", by=SCHEDULER, delay_s=20.0),
        rig.move(newer, "SCHEDULED", by=SCHEDULER, version=7),
        rig.move(again, "SCHEDULED", by=SCHEDULER, request_id="before"),
        rig.move(foreign, "SCHEDULED", by=W),
        *(rig.move(job_id, "SCHEDULED", by=SCHEDULER) for job_id in keyed),
    )
    assert [isinstance(answer, Moved) and answer.version for answer in answers] == [2, 2, 2, False, 2, False, 2, 2]
    assert [isinstance(answer, Moved) and answer.repeated for answer in answers].index(True) == 4
    event = await rig.last_event(plain)
    assert (event.type, event.role, event.cause, event.data) == ("job_scheduled", Role.SCHEDULER, "valid", b'{"n": 1}')
    places = [(await rig.job(job_id)).place for job_id in (other, plain, late, newer, again, foreign, *keyed)]
    waiting, ready = JobPlace.SCHEDULED, JobPlace.READY
    assert places[:6] == [ready, ready, waiting, waiting, waiting, waiting]
    assert places[6:] == [ready, JobPlace.BLOCKED]
    dispatched = await asyncio.gather(
        *(
            rig.move(job_id, "DISPATCHED", by=SCHEDULER, lease_s=TOPIC_LEASE_S, heartbeat_s=TOPIC_LEASE_S, version=2)
            for job_id in (other, plain, late, newer, again, *keyed)
        )
    )
    leases = [answer.lease for answer in dispatched if isinstance(answer, Moved)]
    assert [(lease.job_id, lease.epoch) for lease in leases if lease] == [
        (job_id, 1) for job_id in (other, plain, late, keyed[0])
    ]
    until = await rig.ledger.now() + timedelta(seconds=TOPIC_LEASE_S)
    assert {(await rig.job(lease.job_id)).lease_expires_at for lease in leases if lease} == {until}
    assert (await rig.verify()).ok


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-1", "D29", "D36", "DJ-15")
async def test_results_of_many_jobs_together_leave_each_as_if_it_came_alone(rig: Rig):
    rig.key_limits[KEY] = 1
    other, plain, running, asked, stale = [await dispatched(rig) for _ in range(5)]
    keyed, next_of_key = await dispatched(rig, concurrency_key=KEY), await scheduled(rig, concurrency_key=KEY)
    original = await dispatched(rig)
    await report(rig, start(original), complete(original))
    undone = await dispatched(rig, compensates=original.job_id)
    await report(rig, start(running))
    assert isinstance(await rig.cancel(asked.job_id, CancelMode.SOFT), CancelRequested)
    lost = stale._replace(epoch=Epoch(stale.epoch + 1))
    turns = [
        (start(one)._replace(cause="begins"), complete(one, result=b"[1]")._replace(cause="ends"))
        for one in (other, plain, asked, keyed, undone, lost)
    ]
    answers = await asyncio.gather(report(rig, complete(running)), *(report(rig, *turn) for turn in turns))
    applied = [StepApplied(4), StepApplied(5)]
    assert [answer.outcomes for answer in answers] == [[StepApplied(5)], *[applied] * 5, [LeaseLost(lost)] * 2]
    for lease in (other, plain, running, asked, keyed, undone):
        assert (await rig.event_types(lease.job_id))[2:] == ["job_dispatched", "job_started", "job_succeeded"]
    for lease in (other, plain, asked, keyed, undone):
        assert [event.cause for event in (await rig.ledger.events(lease.job_id))[-2:]] == ["begins", "ends"]
    assert [await rig.ledger.result(one.job_id) for one in (plain, running, stale)] == [b"[1]", None, None]
    assert "cancel_requested" in json.loads((await rig.last_event(asked.job_id)).data or b"{}")
    assert json.loads((await rig.last_event(plain.job_id)).data or b"{}") == {"status": "SUCCEEDED"}
    assert (await rig.job(next_of_key)).place is JobPlace.READY
    assert (await rig.last_event(original.job_id)).type == "job_compensated"
    assert await rig.state(stale.job_id) == "DISPATCHED"
    again = await asyncio.gather(*(report(rig, *turn) for turn in turns[:3]))
    assert [outcome for answer in again for outcome in answer.outcomes] == [
        StepApplied(4, repeated=True),
        StepApplied(5, repeated=True),
    ] * 3
    assert (await rig.verify()).ok


@pytest.mark.requirement("D29", "BUS-6")
async def test_two_results_of_one_job_together_end_it_once(rig: Rig):
    first, lease = [await dispatched(rig) for _ in range(2)]
    answers = await asyncio.gather(
        report(rig, start(first), complete(first)),
        report(rig, start(lease), complete(lease, b'{"n": 1}')),
        report(rig, start(lease), complete(lease, b'{"n": 2}')),
    )
    assert [answer.outcomes[1] for answer in answers[1:]] == [StepApplied(5), StepApplied(5, repeated=True)]
    assert (await rig.last_event(lease.job_id)).data == b'{"n": 1}'


@pytest.mark.only("postgres")
async def test_a_plain_result_needs_no_step_by_step_call(rig: Rig):
    """The wrong line it catches: one that sends every result the slow way, which gives the same answers."""
    lease, running = [await dispatched(rig) for _ in range(2)]
    await report(rig, start(running))
    assert rig.admin_sql is not None
    for steps, count in (((start(lease), complete(lease)), 2), ((complete(running),), 1), ((start(lease),), 1)):
        told = steps_call(0, sort_steps(steps, None, Role.WORKER)).told
        worker = f"trellis.register_actor('w', {Role.WORKER.code}::smallint)"
        made = f"trellis._advance_together(array[{worker}], array[$step${told}$step$::jsonb], trellis._open_batch())"
        await rig.admin_sql("BEGIN")
        await rig.admin_sql(f"DO $$ BEGIN ASSERT (SELECT count(*) FROM {made}) = {count}; END $$")
        await rig.admin_sql("ROLLBACK")

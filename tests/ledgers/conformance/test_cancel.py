"""Cancelling: soft and hard, from every state, against everything that happens at the same time."""

import asyncio
import json

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, LENGTH_S, SUBMITTER, WORKER, Rig, actor, answer_of
from trellis.engine.errors import InvalidTransition, JobNotFound, NotAllowed
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    CancelRequested,
    JobId,
    LeaseLost,
    Moved,
    NotMoved,
    StepApplied,
    Turn,
)
from trellis.engine.records import JobPlace
from trellis.lifecycles import LIFECYCLES, Phase, Role, Trigger

CANCELLED = {
    "leased-job": "cancelled",
    "bus-job": "CANCELLED",
    "queue-job": "FAILED",
    "run": "failed",
    "nlm-job": "ERROR",
}
"""What cancelled work of each lifecycle is called (D19)."""


@pytest.mark.requirement("D19", "DJ-11", "JQ-2", "RUN-1", "BUS-1")
@pytest.mark.parametrize("mode", list(CancelMode))
@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
async def test_a_cancel_does_what_the_lifecycle_declares_in_every_state(rig: Rig, lifecycle: str, mode: CancelMode):
    for state in LIFECYCLES[lifecycle].states:
        job_id = await rig.submit_one(lifecycle=lifecycle)
        lease = await rig.drive(job_id, state.name)
        before = await rig.snapshot(job_id)
        transition = LIFECYCLES[lifecycle].pull(state.name, Trigger.CANCEL)
        by = actor(min(transition.actors)) if transition else ADMIN
        answer = await rig.cancel(job_id, mode, by=by, cause="CANCELLED: enough")
        if transition is None:
            assert isinstance(answer, NotMoved), state
            assert (answer.job_id, answer.state) == (job_id, state.name)
            assert answer.target == CANCELLED.get(lifecycle, Trigger.CANCEL)
            assert await rig.snapshot(job_id) == before
        elif state.phase is Phase.HELD and mode is CancelMode.SOFT:
            assert answer == CancelRequested(job_id=job_id, state=state.name, version=before.events[-1].version)
            assert (await rig.job(job_id)).cancel_requested
            assert await rig.ledger.events(job_id) == list(before.events), "a wish is no transition"
        else:
            assert isinstance(answer, Moved), state
            event = await rig.last_event(job_id)
            assert (event.target, event.type, event.cause) == (
                transition.target,
                transition.event,
                "CANCELLED: enough",
            )
            if lease is not None and state.phase is Phase.HELD:
                assert await rig.ledger.renew(by, [lease]) == [LeaseLost(lease)]


@pytest.mark.requirement("D43")
async def test_only_the_declared_roles_may_cancel(rig: Rig):
    allowed = LIFECYCLES["leased-job"].by_trigger["queued", Trigger.CANCEL].actors
    job_id = await rig.submit_one()
    before = await rig.snapshot(job_id)
    for role in set(Role) - allowed:
        for mode in CancelMode:
            answer = await answer_of(rig.cancel(job_id, mode, by=actor(role)))
            assert isinstance(answer, NotMoved | NotAllowed | InvalidTransition)
    assert await rig.snapshot(job_id) == before
    assert isinstance(await rig.cancel(job_id, by=SUBMITTER), Moved)


@pytest.mark.requirement("D43")
async def test_only_the_declared_roles_may_ask_a_holder_to_stop(rig: Rig):
    held = await rig.running()
    before = await rig.snapshot(held.lease.job_id)
    answer = await answer_of(rig.cancel(held.lease.job_id, CancelMode.SOFT, by=actor(Role.FRONTEND)))
    assert isinstance(answer, NotMoved | NotAllowed | InvalidTransition)
    assert await rig.snapshot(held.lease.job_id) == before


async def test_an_unknown_job_is_not_found(rig: Rig):
    with pytest.raises(JobNotFound):
        await rig.cancel(JobId("nobody"))


@pytest.mark.requirement("DJ-21")
async def test_a_soft_cancel_asked_again_gives_the_same_answer(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    request = rig.request()
    first = await rig.cancel(job_id, CancelMode.SOFT, request_id=request)
    assert await rig.cancel(job_id, CancelMode.SOFT, request_id=request) == first
    assert await rig.cancel(job_id, CancelMode.SOFT) == first
    assert len(await rig.ledger.events(job_id)) == 3


@pytest.mark.requirement("D19")
async def test_asking_again_does_not_prolong_the_grace(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=20.0)
    await rig.pass_time(15)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=20.0)
    await rig.pass_time(5)
    assert await rig.state(held.lease.job_id) == "cancelled"


@pytest.mark.requirement("DJ-11", "D19")
async def test_a_hard_cancel_overtakes_a_soft_one(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    assert isinstance(await rig.cancel(held.lease.job_id, CancelMode.HARD), Moved)
    job = await rig.job(held.lease.job_id)
    assert (job.state, job.place, job.epoch) == ("cancelled", JobPlace.ENDED, held.lease.epoch + 1)
    assert await rig.pull(held, "stop") == LeaseLost(held.lease)


@pytest.mark.requirement("DJ-21")
async def test_the_same_hard_cancel_again_returns_the_first_answer(rig: Rig):
    job_id = await rig.submit_one()
    request = rig.request()
    first = await rig.cancel(job_id, request_id=request)
    again = await rig.cancel(job_id, request_id=request)
    assert isinstance(first, Moved)
    assert isinstance(again, Moved)
    assert (again.version, again.repeated) == (first.version, True)
    assert len(await rig.ledger.events(job_id)) == 2


@pytest.mark.requirement("D19")
@pytest.mark.oldest_server
async def test_complete_then_cancel_stays_complete(rig: Rig):
    held = await rig.running()
    await rig.pull(held, Trigger.COMPLETE)
    for mode in CancelMode:
        answer = await rig.cancel(held.lease.job_id, mode)
        assert isinstance(answer, NotMoved)
        assert answer.state == "succeeded"


@pytest.mark.requirement("D19", "DJ-7")
async def test_cancel_then_complete_stays_cancelled(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id)
    assert await rig.pull(held, Trigger.COMPLETE, result=b"1") == LeaseLost(held.lease)
    assert await rig.state(held.lease.job_id) == "cancelled"
    assert await rig.ledger.result(held.lease.job_id) is None


@pytest.mark.requirement("D19")
async def test_a_soft_cancelled_job_may_still_complete_first(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    assert isinstance(await rig.pull(held, Trigger.COMPLETE), StepApplied)
    await rig.pass_time(60)
    assert await rig.state(held.lease.job_id) == "succeeded"


@pytest.mark.requirement("D19")
async def test_conditional_end_of_a_soft_cancelled_job_is_refused(rig: Rig):
    asked, other = await rig.running(), await rig.running()
    await rig.cancel(asked.lease.job_id, CancelMode.SOFT)
    for trigger in (Trigger.FAIL, Trigger.COMPLETE):
        assert await rig.pull(asked, trigger, unless_cancelled=True) == LeaseLost(asked.lease)
    assert await rig.state(asked.lease.job_id) == "running"
    assert isinstance(await rig.pull(other, Trigger.COMPLETE, unless_cancelled=True), StepApplied)
    again = await rig.pull(other, Trigger.COMPLETE, unless_cancelled=True)
    assert isinstance(again, StepApplied)
    assert again.repeated
    assert isinstance(await rig.pull(asked, Trigger.COMPLETE), StepApplied)


@pytest.mark.requirement("D19")
async def test_cancel_and_complete_at_the_same_time_have_one_winner(rig: Rig):
    another = await rig.open_another()
    await rig.submit(40)
    held = await rig.claim(40)

    async def complete(one):
        step = Advance(lease=one.lease, source="running", trigger=Trigger.COMPLETE)
        return (await another.turn(Turn(actor=WORKER, advances=(step,)))).outcomes[0]

    outcomes = await asyncio.gather(*(pair for one in held for pair in (complete(one), rig.cancel(one.lease.job_id))))
    for one, completed, cancelled in zip(held, outcomes[::2], outcomes[1::2], strict=True):
        won = isinstance(completed, StepApplied)
        assert won != isinstance(cancelled, Moved)
        assert await rig.state(one.lease.job_id) == ("succeeded" if won else "cancelled")
        assert len(await rig.ledger.events(one.lease.job_id)) == 4


@pytest.mark.requirement("DJ-11", "D19")
@pytest.mark.parametrize("trigger", [Trigger.RETRY, Trigger.SNOOZE, Trigger.RELEASE])
async def test_a_cancel_request_outlives_the_attempt_that_it_was_made_in(rig: Rig, trigger: str):
    """The holder gives the job back instead of stopping: it must not start once more."""
    held = await rig.running(max_attempts=9)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=10.0)
    await rig.pull(held, trigger, delay_s=5.0)
    await rig.pass_time(11, step_s=4)
    assert await rig.claim() == []
    assert await rig.state(held.lease.job_id) == "cancelled"


async def test_requeued_job_has_no_cancel_request_of_its_former_generation(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=60.0)
    await rig.pull(held, Trigger.FAIL)
    await rig.ledger.requeue(ADMIN, [held.lease.job_id], rig.request(), limit=1, cause=None)
    again = await rig.claim_one()
    await rig.sweep()
    await rig.advance(14.0)
    (answer,) = await rig.ledger.renew(WORKER, [again.lease])
    assert not isinstance(answer, LeaseLost)
    assert not answer.cancel
    await rig.advance(LENGTH_S + 60)
    await rig.sweep()
    assert await rig.state(held.lease.job_id) != "cancelled"


@pytest.mark.requirement("D19")
async def test_a_resting_job_is_cancelled_at_once(rig: Rig):
    job_id = await rig.submit_one(delay_s=1000.0)
    for mode in (CancelMode.SOFT, CancelMode.HARD):
        answer = await rig.cancel(job_id, mode)
        assert isinstance(answer, Moved if mode is CancelMode.SOFT else NotMoved)
    job = await rig.job(job_id)
    assert (job.state, job.place, job.due_at) == ("cancelled", JobPlace.ENDED, None)


@pytest.mark.requirement("DJ-11", "DJ-19", "D47")
async def test_a_job_that_shall_stop_is_not_started(rig: Rig):
    """No user code has run: the wish is carried out at the start, and the holder learns that the job is gone."""
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    assert await rig.cancel(job_id, CancelMode.SOFT) == CancelRequested(job_id=job_id, state="assigned", version=2)
    assert await rig.pull(claimed, Trigger.START, source="assigned") == LeaseLost(claimed.lease)
    job, event = await rig.job(job_id), await rig.last_event(job_id)
    assert (job.state, job.place) == ("cancelled", JobPlace.ENDED)
    assert (event.type, event.role) == ("job_cancelled", LIFECYCLES["leased-job"].swept_by)
    assert "job_started" not in await rig.event_types(job_id)


@pytest.mark.requirement("DJ-11", "DJ-21", "D19")
@pytest.mark.parametrize("trigger", [Trigger.RETRY, Trigger.SNOOZE, Trigger.RELEASE])
async def test_giving_back_a_job_that_shall_stop_ends_it_once(rig: Rig, trigger: str):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    first = await rig.pull(held, trigger)
    assert first == StepApplied(version=4)
    assert await rig.event_types(held.lease.job_id) == ["job_queued", "job_claimed", "job_started", "job_cancelled"]
    again = await rig.pull(held, trigger)
    assert again == StepApplied(version=4, repeated=True)
    assert len(await rig.ledger.events(held.lease.job_id)) == 4


@pytest.mark.requirement("D19")
async def test_a_lost_lease_of_a_job_that_shall_stop_ends_it(rig: Rig):
    held = await rig.running(max_attempts=5)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=1000.0)
    await rig.lose_lease()
    assert (await rig.event_types(held.lease.job_id))[-1] == "job_cancelled"
    assert await rig.state(held.lease.job_id) == "cancelled"


@pytest.mark.requirement("D19")
async def test_failing_or_completing_is_still_the_holders_choice(rig: Rig):
    for trigger, end in ((Trigger.FAIL, "failed"), (Trigger.COMPLETE, "succeeded")):
        held = await rig.running()
        await rig.cancel(held.lease.job_id, CancelMode.SOFT)
        assert isinstance(await rig.pull(held, trigger), StepApplied)
        assert await rig.state(held.lease.job_id) == end


# --- who asked, and why ------------------------------------------------------------------------------------------


async def _asked(rig: Rig, job_id: JobId) -> object:
    """What the event of the cancel says about the wish behind it."""
    event = await rig.last_event(job_id)
    assert event.type == "job_cancelled"
    return json.loads(event.data or b"null")


WISH = {"asked_by": "ada", "asked_as": "control-plane", "reason": "wrong customer"}
ADA = actor(Role.CONTROL_PLANE, "ada")


@pytest.mark.oldest_server
@pytest.mark.requirement("D19", "DJ-15")
@pytest.mark.parametrize("ending", ["grace", "lost"])
async def test_cancel_event_names_who_requested_the_soft_cancel(rig: Rig, ending: str):
    held = await rig.running(max_attempts=9)
    job_id = held.lease.job_id
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=5.0 if ending == "grace" else 1e6)
    await rig.pass_time(6) if ending == "grace" else await rig.lose_lease()
    assert await _asked(rig, job_id) == WISH


@pytest.mark.requirement("DJ-15")
@pytest.mark.parametrize("trigger", ["stop", Trigger.RETRY, Trigger.SNOOZE, Trigger.RELEASE, Trigger.START])
async def test_cancel_event_names_the_requester_also_when_the_holder_stops_or_releases(rig: Rig, trigger: str):
    job_id, starts = await rig.submit_one(), trigger == Trigger.START
    claimed = await rig.claim_one(start=not starts)
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer")
    await rig.pull(claimed, trigger, source="assigned" if starts else "running")
    assert await _asked(rig, job_id) == WISH


@pytest.mark.requirement("DJ-15")
async def test_the_first_who_asks_is_the_one_who_is_named(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=5.0)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, by=SUBMITTER, cause="me too", grace_s=5.0)
    await rig.pass_time(6)
    assert await _asked(rig, held.lease.job_id) == WISH


@pytest.mark.requirement("DJ-15")
async def test_hard_cancel_records_its_own_actor_after_a_soft_cancel_by_another(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, by=ADA, cause="wrong customer")
    await rig.cancel(held.lease.job_id, CancelMode.HARD, by=SUBMITTER, cause="at once")
    event = await rig.last_event(held.lease.job_id)
    assert (event.actor, event.cause, event.data) == (SUBMITTER.name, "at once", None)


@pytest.mark.requirement("DJ-15")
async def test_an_old_cancel_request_is_not_the_cause_of_a_later_cancel(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=1e6)
    await rig.pull(held, Trigger.FAIL)
    await rig.ledger.requeue(ADMIN, [job_id], rig.request(), limit=1, cause=None)
    await rig.claim_one()
    await rig.cancel(job_id, CancelMode.SOFT, by=SUBMITTER, cause=None, grace_s=5.0)
    await rig.pass_time(6)
    assert await _asked(rig, job_id) == {"asked_by": SUBMITTER.name, "asked_as": "submitter", "reason": None}


@pytest.mark.requirement("DJ-15")
@pytest.mark.parametrize(
    "trigger, data, beside",
    [
        (Trigger.COMPLETE, None, {}),
        (Trigger.COMPLETE, b" { } ", {}),
        (Trigger.FAIL, b'{"error": {"message": "\xc3\xa4"}}', {"error": {"message": "\u00e4"}}),
        ("deadline", None, {}),
    ],
)
async def test_a_job_that_ends_otherwise_keeps_who_had_asked_it_to_stop(
    rig: Rig, trigger: str, data: bytes | None, beside: dict[str, object]
):
    held = await rig.running(deadline_s=20.0)
    job_id, asked_at = held.lease.job_id, await rig.ledger.now()
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=1e6)
    assert (await rig.job(job_id)).cancel_asked_at == asked_at
    before = len(await rig.ledger.events(job_id))
    await rig.pass_time(21) if trigger == "deadline" else await rig.pull(held, trigger, data=data)
    event, job = await rig.last_event(job_id), await rig.job(job_id)
    asked = {
        "actor": "ada",
        "role": "control-plane",
        "at": asked_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "cause": "wrong customer",
    }
    assert json.loads(event.data or b"null") == beside | {"cancel_requested": asked}
    assert len(await rig.ledger.events(job_id)) == before + 1
    told = (job.cancel_requested, job.cancel_asked_by, job.cancel_asked_at, job.cancel_cause)
    assert told == (False, "ada", asked_at, "wrong customer")


@pytest.mark.requirement("DJ-15")
async def test_cancel_request_of_one_holder_does_not_reach_a_later_generation(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=1e6)
    await rig.pull(held, Trigger.FAIL)
    assert (await rig.job(job_id)).cancel_asked_by == "ada"
    await rig.ledger.requeue(ADMIN, [job_id], rig.request(), limit=1, cause=None)
    assert (await rig.job(job_id)).cancel_asked_by is None
    await rig.pull(await rig.claim_one(), Trigger.COMPLETE)
    assert (await rig.job(job_id)).cancel_asked_by is None
    assert (await rig.last_event(job_id)).data is None


@pytest.mark.parametrize("data", [b"\xff", b'{"cancel_requested": {"at": "x"}}', b'["cancel_requested"'])
async def test_data_that_is_no_record_of_ours_neither_stops_an_end_nor_makes_the_job_unreadable(rig: Rig, data: bytes):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.cancel(job_id, CancelMode.SOFT, by=ADA, cause="wrong customer", grace_s=1e6)
    await rig.move(job_id, "dead_lettered", by=ADMIN, data=data, death=DEATH)
    event, job = await rig.last_event(job_id), await rig.job(job_id)
    assert (job.state, event.data is not None and event.data.startswith(data[:1])) == ("dead_lettered", True)

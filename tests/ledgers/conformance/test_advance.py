"""What a holder can do with its job: every trigger, once, with its epoch."""

import pytest

from tests.ledgers.conformance.rig import DEATH, OTHER_WORKER, SUBMITTER, WORKER, Rig, actor, wait_of
from trellis.engine.errors import InvalidTransition, OptionInvalid, Refused, TrellisError
from trellis.engine.jobs import Advance, DeadLetterReason, Lease, LeaseLost, ReasonCode, Stage, StepApplied, Turn
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import LIFECYCLES, Phase, Progress, Role, Transition, Trigger


def _fenced(lifecycle: str) -> list[Transition]:
    return [transition for transition in LIFECYCLES[lifecycle].transitions if transition.fenced]


def _step(lifecycle: str, transition: Transition, lease: Lease, **options) -> Advance:
    death = DEATH if LIFECYCLES[lifecycle].by_name[transition.target].dead_letter else None
    return Advance(lease=lease, source=str(transition.source), trigger=transition.trigger, death=death, **options)


@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
@pytest.mark.requirement("DJ-1", "DJ-3", "DJ-4", "DJ-15", "D1", "D38", "JQ-2", "NLM-2", "RUN-1", "BUS-1")
async def test_each_advance_is_one_transition_with_one_event(rig: Rig, lifecycle: str):
    for transition in _fenced(lifecycle):
        job_id = await rig.submit_one(lifecycle=lifecycle)
        lease = await rig.drive(job_id, str(transition.source))
        assert lease is not None
        before = await rig.job(job_id)
        step = _step(lifecycle, transition, lease, cause="because", data=b'{"why": "test"}')
        step = step._replace(finalizes=await rig.artifact_of(job_id) if transition.finalizes else None)
        step = step._replace(wait=wait_of(transition))
        outcome = (await rig.turn(step, by=actor(min(transition.actors)))).outcomes[0]
        assert outcome == StepApplied(version=before.version + 1)
        job, event = await rig.job(job_id), await rig.last_event(job_id)
        target = LIFECYCLES[lifecycle].by_name[transition.target]
        attempt = before.attempt + (transition.opens is Progress.ATTEMPT)
        assert (job.state, job.version, job.attempt) == (target.name, before.version + 1, attempt)
        assert (event.type, event.source, event.target) == (transition.event, transition.source, transition.target)
        assert (event.cause, event.data) == ("because", b'{"why": "test"}')
        assert (event.attempt, event.epoch) == (job.attempt, lease.epoch)
        assert (job.place is JobPlace.LEASED) == (target.phase is Phase.HELD)
        assert (job.place is JobPlace.ENDED) == (target.phase is Phase.ENDED)


@pytest.mark.requirement("DJ-3", "DJ-4")
async def test_plain_and_other_steps_of_one_turn_are_answered_in_their_order(rig: Rig):
    """Both ledgers write many plain completions as one. A lost lease or a retry among them must not move an answer."""
    for _ in range(4):
        await rig.submit_one()
    first, second, third, fourth = [one.lease for one in await rig.claim(4)]
    steps = (
        Advance(lease=first, source="running", trigger="complete"),
        Advance(lease=second._replace(epoch=second.epoch + 1), source="running", trigger="complete"),
        Advance(lease=third, source="running", trigger="retry", delay_s=5.0),
        Advance(lease=fourth, source="running", trigger="complete", result=b"4"),
    )
    outcomes = (await rig.turn(*steps)).outcomes
    lost = LeaseLost(second._replace(epoch=second.epoch + 1))
    assert outcomes == [StepApplied(4), lost, StepApplied(4), StepApplied(4)]
    states = [(await rig.job(lease.job_id)).state for lease in (first, second, third, fourth)]
    assert states == ["succeeded", "running", "queued", "succeeded"]
    assert await rig.ledger.result(fourth.job_id) == b"4"


@pytest.mark.requirement("DJ-21", "DJ-4")
@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
async def test_a_step_asked_again_after_a_lost_answer_has_one_effect(rig: Rig, lifecycle: str):
    for transition in _fenced(lifecycle):
        if transition.source == transition.target:
            continue  # a declared self-transition is a new step each time
        job_id = await rig.submit_one(lifecycle=lifecycle)
        lease = await rig.drive(job_id, str(transition.source))
        assert lease is not None
        waits = LIFECYCLES[lifecycle].by_name[transition.target].phase is Phase.WAITING
        step = _step(lifecycle, transition, lease, delay_s=5.0 if waits else 0.0)
        step = step._replace(finalizes=await rig.artifact_of(job_id) if transition.finalizes else None)
        step = step._replace(wait=wait_of(transition))
        holder = actor(min(transition.actors))
        first = (await rig.turn(step, by=holder)).outcomes[0]
        before = await rig.snapshot(job_id)
        again = (await rig.turn(step, by=holder)).outcomes[0]
        assert isinstance(first, StepApplied)
        assert again == StepApplied(version=first.version, repeated=True)
        assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("RUN-1", "D37")
async def test_a_declared_self_transition_is_a_step_each_time(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run")
    lease = await rig.drive(job_id, "running")
    assert lease is not None
    orchestrator = actor(Role.ORCHESTRATOR)
    for version in (4, 5):
        assert await rig.pull(lease, "step", by=orchestrator) == StepApplied(version=version)
    assert await rig.event_types(job_id) == [
        "run.requested",
        "run.queued",
        "run.started",
        "run.step.completed",
        "run.step.completed",
    ]


@pytest.mark.requirement("RUN-1", "D37", "DJ-21")
async def test_a_self_transition_that_names_its_version_is_made_once(rig: Rig):
    """The answer to a stored step was lost: with the version it follows, asking again is no second step."""
    job_id = await rig.submit_one(lifecycle="run")
    lease = await rig.drive(job_id, "running")
    assert lease is not None
    orchestrator = actor(Role.ORCHESTRATOR)
    assert await rig.pull(lease, "step", by=orchestrator, version=3) == StepApplied(version=4)
    assert await rig.pull(lease, "step", by=orchestrator, version=3) == StepApplied(version=4, repeated=True)
    assert await rig.pull(lease, "step", by=orchestrator, version=4) == StepApplied(version=5)
    assert await rig.pull(lease, "step", by=orchestrator, version=9) == LeaseLost(lease)
    assert (await rig.event_types(job_id)).count("run.step.completed") == 2


@pytest.mark.requirement("DJ-20")
@pytest.mark.oldest_server
async def test_completing_stores_the_result_with_the_event(rig: Rig):
    claimed = await rig.running()
    await rig.pull(claimed, Trigger.COMPLETE, result=b'{"pages": 3}')
    assert await rig.ledger.result(claimed.lease.job_id) == b'{"pages": 3}'
    job = await rig.job(claimed.lease.job_id)
    assert (job.state, job.place, job.owner, job.lease_expires_at) == ("succeeded", JobPlace.ENDED, None, None)


async def test_no_result_was_stored_when_none_was_given(rig: Rig):
    claimed = await rig.running()
    await rig.pull(claimed, Trigger.COMPLETE)
    assert await rig.ledger.result(claimed.lease.job_id) is None


@pytest.mark.requirement("DJ-9", "D1")
async def test_a_retry_waits_for_its_backoff_and_opens_the_next_attempt(rig: Rig):
    claimed = await rig.running()
    job_id = claimed.lease.job_id
    await rig.pull(claimed, Trigger.RETRY, delay_s=20.0, cause="TransientError: busy")
    job = await rig.job(job_id)
    assert (job.state, job.place, job.attempt, job.owner) == ("queued", JobPlace.SCHEDULED, 1, None)
    assert await rig.claim() == []
    await rig.pass_time(20)
    again = await rig.claim_one()
    assert (again.lease.job_id, again.attempt, again.lease.epoch) == (job_id, 1, 2)
    assert (await rig.ledger.events(job_id))[3].cause == "TransientError: busy"


async def test_a_retry_without_delay_is_ready_at_once(rig: Rig):
    claimed = await rig.running()
    await rig.pull(claimed, Trigger.RETRY)
    assert (await rig.claim_one()).attempt == 1


@pytest.mark.requirement("D38")
@pytest.mark.parametrize("trigger", [Trigger.SNOOZE, Trigger.RELEASE])
async def test_a_spared_attempt_does_not_count_against_the_limit(rig: Rig, trigger: str):
    claimed = await rig.running(max_attempts=2)
    for attempt in range(3):
        assert claimed.attempt == attempt
        await rig.pull(claimed, trigger, spare_attempt=True)
        claimed = await rig.claim_one()
    assert (claimed.attempt, claimed.max_attempts) == (3, 5)
    for told in (await rig.job(claimed.lease.job_id), *(await rig.ledger.jobs(JobFilter(), limit=1)).jobs):
        assert (told.spared, told.attempts_spent, told.attempts_allowed) == (3, 0, 2)
    await rig.lose_lease()
    assert await rig.state(claimed.lease.job_id) == "queued", "one of the two attempts is still left"
    await rig.claim_one()
    await rig.lose_lease()
    assert await rig.state(claimed.lease.job_id) == "dead_lettered"


@pytest.mark.requirement("DJ-18", "DJ-12")
@pytest.mark.parametrize("source", ["assigned", "running"])
async def test_a_rejected_job_leaves_a_complete_dead_letter(rig: Rig, source: str):
    for reason, stage in zip(ReasonCode, [*Stage, *Stage], strict=False):
        job_id = await rig.submit_one(correlation_id="c-9", type="strict")
        claimed = await rig.claim_one(types=("strict",), start=source == "running")
        until = (await rig.job(job_id)).lease_expires_at
        death = DeadLetterReason(reason_code=reason, stage=stage, last_error="no such field")
        assert isinstance(await rig.pull(claimed, "reject", source=source, death=death), StepApplied)
        (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=1)
        assert (letter.job_id, letter.type, letter.state) == (job_id, "strict", "dead_lettered")
        assert (letter.reason_code, letter.stage, letter.last_error) == (reason, stage, "no such field")
        assert (letter.attempts, letter.last_owner, letter.last_lease_expires_at) == (1, WORKER.name, until)
        assert (letter.correlation_id, letter.at) == ("c-9", await rig.ledger.now())
        assert letter.version == (await rig.job(job_id)).version
        await rig.advance(1.0)


@pytest.mark.requirement("DJ-12")
async def test_a_dead_letter_needs_its_reason(rig: Rig):
    claimed = await rig.running()
    before = await rig.snapshot(claimed.lease.job_id)
    with pytest.raises(TrellisError):
        await rig.pull(claimed, "reject")
    assert await rig.snapshot(claimed.lease.job_id) == before
    empty = DeadLetterReason(reason_code=ReasonCode.PARSE_ERROR, stage=Stage.INPUT, last_error="")
    with pytest.raises(TrellisError):
        await rig.pull(claimed, "reject", death=empty)
    assert await rig.snapshot(claimed.lease.job_id) == before


@pytest.mark.requirement("DJ-10")
async def test_a_failed_job_may_leave_a_dead_letter_too(rig: Rig):
    with_entry, without = await rig.running(), await rig.running()
    death = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.EXEC, last_error="never again")
    await rig.pull(with_entry, Trigger.FAIL, death=death)
    await rig.pull(without, Trigger.FAIL)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.state, letter.attempts) == (with_entry.lease.job_id, "failed", 1)


@pytest.mark.requirement("D1")
async def test_a_turn_with_several_wrong_steps_is_refused_for_the_first_of_them(rig: Rig):
    """In the order of the turn, whichever job is older, and whatever is wrong with each step."""
    older, newer = await rig.running(), await rig.running()
    no_wait = Advance(older.lease, "running", Trigger.SUSPEND)
    no_letter = Advance(newer.lease, "running", "reject")
    undeclared = Advance(newer.lease, "running", "approve")
    refusals: list[str] = []
    for steps in ((no_letter, no_wait), (no_wait, no_letter), (undeclared, no_wait), (no_wait, undeclared)):
        with pytest.raises((InvalidTransition, OptionInvalid)) as refused:
            await rig.turn(*steps)
        refusals.append(f"{getattr(refused.value, 'data', {}).get('job_id')}: {refused.value}")
    assert ["needs a dead letter" in refusals[0], "names its wait" in refusals[1]] == [True, True], refusals
    assert [newer.lease.job_id in refusals[2], older.lease.job_id in refusals[3]] == [True, True], refusals
    assert [(await rig.job(one.lease.job_id)).state for one in (older, newer)] == ["running", "running"]


@pytest.mark.requirement("JQ-2", "DJ-3", "BUS-6")
async def test_a_trigger_that_is_not_declared_there_is_refused_by_name(rig: Rig):
    claimed = await rig.claim_one() if await rig.submit(1) else None
    assert claimed is not None
    before = await rig.snapshot(claimed.lease.job_id)
    with pytest.raises(InvalidTransition) as refused:
        await rig.pull(claimed, Trigger.START)
    assert refused.value.data["job_id"] == claimed.lease.job_id
    assert refused.value.data["source"] == "running"
    assert WORKER.role.value in str(refused.value)
    assert await rig.snapshot(claimed.lease.job_id) == before


@pytest.mark.requirement("JQ-6", "BUS-1")
@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
async def test_a_step_in_the_name_of_another_role_is_refused(rig: Rig, lifecycle: str):
    for transition in _fenced(lifecycle):
        job_id = await rig.submit_one(lifecycle=lifecycle)
        lease = await rig.drive(job_id, str(transition.source))
        assert lease is not None
        before = await rig.snapshot(job_id)
        for role in set(Role) - transition.actors:
            with pytest.raises(Refused) as refused:
                await rig.turn(_step(lifecycle, transition, lease), by=actor(role))
            said = str(refused.value)
            assert role.value in said
            assert job_id in said
            assert str(transition.source) in said
        assert await rig.snapshot(job_id) == before


async def test_a_step_from_a_state_the_job_is_not_in_is_lost(rig: Rig):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    before = await rig.snapshot(job_id)
    assert await rig.pull(claimed, Trigger.COMPLETE, source="running") == LeaseLost(claimed.lease)
    assert await rig.snapshot(job_id) == before


async def test_a_lost_step_takes_nothing_of_its_turn_with_it(rig: Rig):
    first, second = await rig.running(), await rig.running()
    await rig.cancel(first.lease.job_id)
    result = await rig.turn(
        Advance(lease=first.lease, source="running", trigger=Trigger.COMPLETE),
        Advance(lease=second.lease, source="running", trigger=Trigger.COMPLETE),
    )
    assert result.outcomes == [LeaseLost(first.lease), StepApplied(version=4)]
    assert await rig.state(second.lease.job_id) == "succeeded"


async def test_one_turn_starts_and_completes_the_same_job(rig: Rig):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    result = await rig.turn(
        Advance(lease=claimed.lease, source="assigned", trigger=Trigger.START),
        Advance(lease=claimed.lease, source="running", trigger=Trigger.COMPLETE, result=b"1"),
    )
    assert result.outcomes == [StepApplied(version=3), StepApplied(version=4)]
    assert await rig.event_types(job_id) == ["job_queued", "job_claimed", "job_started", "job_succeeded"]


async def test_a_turn_settles_many_jobs_of_different_fate(rig: Rig):
    await rig.submit(40)
    claimed = await rig.claim(40)
    triggers = [Trigger.COMPLETE, Trigger.FAIL, Trigger.RETRY, "stop"]
    steps = [
        Advance(lease=one.lease, source="running", trigger=triggers[i % 4], delay_s=9.0 if i % 4 == 2 else 0.0)
        for i, one in enumerate(claimed)
    ]
    result = await rig.turn(*steps)
    assert result.outcomes == [StepApplied(version=4)] * 40
    states = [await rig.state(one.lease.job_id) for one in claimed]
    assert states == ["succeeded", "failed", "queued", "cancelled"] * 10


async def test_a_lease_of_another_job_moves_nothing(rig: Rig):
    """The epoch alone is no right: it must be this job's."""
    first, second = await rig.running(), await rig.running()
    forged = type(first.lease)(
        key=second.lease.key, epoch=second.lease.epoch, job_id=first.lease.job_id, lifecycle="leased-job"
    )
    await rig.pull(forged, Trigger.COMPLETE)
    assert await rig.state(first.lease.job_id) == "running"


@pytest.mark.requirement("DJ-15")
async def test_the_event_names_who_acted(rig: Rig):
    await rig.submit_one(by=actor(Role.SUBMITTER, "front-door"))
    claimed = await rig.claim_one(by=OTHER_WORKER)
    await rig.pull(claimed, Trigger.COMPLETE, by=OTHER_WORKER)
    events = await rig.ledger.events(claimed.lease.job_id)
    assert [(event.role, event.actor) for event in events] == [
        (SUBMITTER.role, "front-door"),
        (Role.WORKER, "worker-2"),
        (Role.WORKER, "worker-2"),
        (Role.WORKER, "worker-2"),
    ]


@pytest.mark.requirement("DJ-21")
async def test_a_turn_with_a_step_in_it_twice_can_be_asked_again(rig: Rig):
    """What is made once counts once, however often and in whichever company it is asked for."""
    await rig.submit_one()
    held = await rig.claim_one(start=False)
    start = Advance(lease=held.lease, source="assigned", trigger="start")
    done = Advance(lease=held.lease, source="running", trigger="complete")
    turn = Turn(actor=WORKER, advances=(start, done, done._replace(cause="again"), done._replace()))
    first = (await rig.ledger.turn(turn)).outcomes
    assert first == [StepApplied(3), StepApplied(4), StepApplied(4, repeated=True), StepApplied(4, repeated=True)]
    assert (await rig.ledger.turn(turn)).outcomes == [
        StepApplied(3, repeated=True),
        *[StepApplied(4, repeated=True)] * 3,
    ]
    assert len(await rig.ledger.events(held.lease.job_id)) == 4

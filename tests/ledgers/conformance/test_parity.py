"""What both ledgers must record and refuse in the same words: causes, stages, epochs, limits across priorities."""

import pytest

from tests.ledgers.conformance.rig import ADMIN, LENGTH_S, OTHER_WORKER, WORKER, Rig, actor
from trellis.engine.jobs import (
    LEAST_URGENT_FIRST_EVERY,
    Actor,
    Advance,
    CancelMode,
    Claimed,
    LeaseLost,
    Priority,
    Stage,
    StepApplied,
)
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.events import Cause

SCHEDULER = actor(Role.SCHEDULER)
ORCHESTRATOR = actor(Role.ORCHESTRATOR)


async def dispatched(rig: Rig, to: str) -> Claimed:
    """A bus job that was handed out, and has started where `to` is RUNNING."""
    job_id = await rig.submit_one(lifecycle="bus-job", by=actor(Role.GATEWAY))
    await rig.move(job_id, "SCHEDULED", by=SCHEDULER)
    held = await rig.claim_one(lifecycle="bus-job", start=False)
    if to == "RUNNING":
        assert isinstance(await rig.pull(held, Trigger.START, source="DISPATCHED", data=b"{}"), StepApplied)
    return held


# --- steps that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.requirement("D2", "D19", "DJ-7")
@pytest.mark.parametrize(
    "trigger, options",
    [
        (Trigger.RELEASE, {"source": "assigned"}),
        (Trigger.RETRY, {"version": 2}),
        (Trigger.SNOOZE, {"version": 9}),
    ],
)
async def test_a_stale_step_does_not_carry_out_a_soft_cancel(rig: Rig, trigger: str, options: dict):
    """The holder goes on running: only a step from where the job is may end it."""
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    before = await rig.snapshot(held.lease.job_id)
    assert await rig.pull(held, trigger, **options) == LeaseLost(held.lease)
    assert await rig.snapshot(held.lease.job_id) == before
    assert isinstance(await rig.pull(held, Trigger.COMPLETE), StepApplied)


@pytest.mark.requirement("D2", "D19", "D29")
async def test_giving_back_a_bus_job_that_runs_by_now_does_not_cancel_it(rig: Rig):
    """The scheduler believes that nobody has it; a worker has begun meanwhile and was asked to stop."""
    held = await dispatched(rig, "RUNNING")
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    step = {"source": "DISPATCHED", "by": SCHEDULER, "spare_attempt": True, "cause": "given back: nobody answered"}
    assert await rig.pull(held, Trigger.RETRY, **step) == LeaseLost(held.lease)
    assert await rig.state(held.lease.job_id) == "RUNNING"


@pytest.mark.requirement("DJ-19")
@pytest.mark.parametrize("options", [{}, {"cause": "at last"}, {"version": 2}, {"data": b"{}"}])
async def test_a_start_after_the_lease_ran_out_is_refused(rig: Rig, options: dict):
    """Nobody has revoked the lease yet; still no user code may begin under one that is not alive."""
    await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    await rig.advance(LENGTH_S)
    before = await rig.snapshot(claimed.lease.job_id)
    assert await rig.pull(claimed, Trigger.START, source="assigned", **options) == LeaseLost(claimed.lease)
    assert await rig.snapshot(claimed.lease.job_id) == before


@pytest.mark.parametrize("options", [{}, {"cause": "at last"}])
async def test_a_start_within_the_lease_is_made(rig: Rig, options: dict):
    await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    await rig.advance(LENGTH_S - 0.1)
    assert isinstance(await rig.pull(claimed, Trigger.START, source="assigned", **options), StepApplied)


@pytest.mark.requirement("D2", "D29")
@pytest.mark.parametrize("options", [{}, {"data": b"{}"}])
async def test_a_start_that_another_role_reports_is_taken_while_nobody_revoked_the_lease(rig: Rig, options: dict):
    """A bus worker's word says what runs already: after an outage it must not be thrown away."""
    held = await dispatched(rig, "DISPATCHED")
    await rig.advance(LENGTH_S + 60)
    assert isinstance(await rig.pull(held, Trigger.START, source="DISPATCHED", **options), StepApplied)


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-2", "DJ-14")
@pytest.mark.parametrize("taker", [WORKER, OTHER_WORKER])
async def test_claim_id_does_not_reveal_the_lease_of_another_claim(rig: Rig, taker: Actor):
    job_id = await rig.submit_one()
    first = await rig.claim_one(claim_id="mine")
    await rig.lose_lease()
    taken = await rig.claim_one(by=taker)
    assert (taken.lease.job_id, taken.lease.epoch > first.lease.epoch) == (job_id, True)
    assert await rig.claim(claim_id="mine") == []


@pytest.mark.requirement("DJ-2", "DJ-14")
async def test_a_claim_id_is_one_claimers_own(rig: Rig):
    await rig.submit(2)
    await rig.claim_one(claim_id="mine")
    assert await rig.claim(claim_id="mine", by=OTHER_WORKER) == []


@pytest.mark.requirement("DJ-14")
async def test_a_claim_id_claims_once(rig: Rig):
    """What it was given is settled: asked again, it is given nothing else."""
    await rig.submit(2)
    await rig.pull(await rig.claim_one(claim_id="mine"), Trigger.COMPLETE)
    assert await rig.claim(claim_id="mine") == []
    assert len(await rig.claim()) == 1


@pytest.mark.requirement("D49")
async def test_a_limit_of_held_jobs_holds_over_all_priorities(rig: Rig):
    await rig.ledger.limit_held(ADMIN, "work", 2)
    for priority in Priority:
        await rig.submit(20, priority=priority)
    for _ in range(2 * LEAST_URGENT_FIRST_EVERY):
        claimed = await rig.claim(5)
        assert len(claimed) == 2
        await rig.turn(*(Advance(one.lease, "running", Trigger.COMPLETE) for one in claimed))


@pytest.mark.requirement("D49")
async def test_a_rate_holds_over_all_priorities(rig: Rig):
    await rig.ledger.limit_rate(ADMIN, "work", 1.0, burst=2)
    for priority in Priority:
        await rig.submit(20, priority=priority)
    for expected in (2, *[1] * 2 * LEAST_URGENT_FIRST_EVERY):
        assert len(await rig.claim(5)) == expected
        await rig.advance(1.0)


@pytest.mark.requirement("BUS-3")
async def test_every_eighth_claim_begins_with_the_least_urgent(rig: Rig):
    for priority in Priority:
        await rig.submit(30, priority=priority)
    claimed = [await rig.claim(2) for _ in range(2 * LEAST_URGENT_FIRST_EVERY)]
    seen = [{(await rig.job(one.lease.job_id)).priority for one in some} for some in claimed]
    usual = [{Priority.CRITICAL}] * (LEAST_URGENT_FIRST_EVERY - 1)
    assert seen == [*usual, {Priority.BATCH}] * 2


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-12", "DJ-15")
@pytest.mark.parametrize("where, stage", [("queued", Stage.FETCH), ("assigned", Stage.FETCH), ("running", Stage.EXEC)])
async def test_a_deadline_names_the_stage_it_found(rig: Rig, where: str, stage: Stage):
    job_id = await rig.submit_one(deadline_s=5.0)
    if where != "queued":
        await rig.claim_one(start=where == "running")
    await rig.pass_time(6)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=2)
    event = await rig.last_event(job_id)
    assert (letter.stage, letter.last_error, event.cause) == (stage, Cause.DEADLINE_PASSED, Cause.DEADLINE_PASSED)


@pytest.mark.requirement("DJ-12")
async def test_a_deadline_in_the_queue_names_who_held_the_job_last(rig: Rig):
    held = await rig.running(deadline_s=5.0)
    until = (await rig.job(held.lease.job_id)).lease_expires_at
    await rig.pull(held, Trigger.RELEASE, spare_attempt=True)
    await rig.pass_time(6)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=2)
    assert (letter.last_owner, letter.last_lease_expires_at) == (WORKER.name, until)


@pytest.mark.requirement("D2")
@pytest.mark.parametrize("start", [False, True])
async def test_the_deadline_of_a_held_job_raises_its_epoch(rig: Rig, start: bool):
    job_id = await rig.submit_one(deadline_s=5.0)
    held = await rig.claim_one(start=start)
    await rig.pass_time(6)
    job, event = await rig.job(job_id), await rig.last_event(job_id)
    assert (job.state, job.epoch, event.epoch) == ("dead_lettered", held.lease.epoch + 1, held.lease.epoch + 1)
    assert await rig.pull(held, Trigger.COMPLETE) == LeaseLost(held.lease)


@pytest.mark.requirement("D8", "DJ-15")
@pytest.mark.parametrize(
    "options, cause", [({"max_attempts": 1}, Cause.ATTEMPTS_SPENT), ({"deadline_s": 5.0}, Cause.DEADLINE_PASSED)]
)
async def test_a_timer_that_ends_a_job_says_why_and_counts_as_exhausted(rig: Rig, options: dict, cause: Cause):
    lease = await rig.drive(await rig.submit_one(lifecycle="queue-job", **options), "CONTEXT_ASSEMBLY")
    assert lease is not None
    await rig.pull(lease, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, delay_s=8.0)
    await rig.advance(8.0)
    report = await rig.sweep()
    assert (report.due, report.exhausted) == (0, 1)
    event = await rig.last_event(lease.job_id)
    assert (event.target, event.cause) == ("FAILED", cause)


@pytest.mark.requirement("DJ-20")
@pytest.mark.parametrize("options", [{}, {"cause": "no use"}])
async def test_only_a_success_has_a_result(rig: Rig, options: dict):
    held = await rig.running()
    await rig.pull(held, Trigger.FAIL, result=b'"half"', **options)
    assert await rig.ledger.result(held.lease.job_id) is None


@pytest.mark.requirement("DJ-15", "D2", "D19")
@pytest.mark.parametrize("how", ["let go", "start", "grace", "gone"])
async def test_a_soft_cancel_that_is_carried_out_says_why_and_raises_the_epoch(rig: Rig, how: str):
    job_id = await rig.submit_one()
    held = await rig.claim_one(start=how != "start")
    await rig.cancel(job_id, CancelMode.SOFT, grace_s=12.0 if how == "grace" else 600.0)
    if how == "let go":
        await rig.pull(held, Trigger.RELEASE)
    elif how == "start":
        await rig.pull(held, Trigger.START, source="assigned")
    else:
        await rig.pass_time(12.0 if how == "grace" else LENGTH_S)
    causes = {"grace": Cause.CANCEL_GRACE_OVER, "gone": Cause.CANCEL_HOLDER_GONE}
    job, event = await rig.job(job_id), await rig.last_event(job_id)
    assert (job.state, job.place, job.epoch) == ("cancelled", JobPlace.ENDED, held.lease.epoch + 1)
    assert (event.cause, event.epoch) == (causes.get(how, Cause.CANCEL_LET_GO), held.lease.epoch + 1)

"""A holder that lost its job can change nothing, whatever it tries and however it lost it."""

from collections.abc import Awaitable, Callable

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, OTHER_WORKER, WORKER, Rig, actor
from trellis.engine.jobs import CancelMode, Claimed, Epoch, Lease, LeaseLost, Renewed, StepApplied, Wait
from trellis.lifecycles import LIFECYCLES, Role, Trigger

STEPS = [
    (transition.source, transition.trigger) for transition in LIFECYCLES["leased-job"].transitions if transition.fenced
]


async def _expired_and_reclaimed(rig: Rig, held: Claimed) -> None:
    await rig.lose_lease()
    again = await rig.claim_one(by=OTHER_WORKER)
    assert again.lease.job_id == held.lease.job_id


async def _expired(rig: Rig, held: Claimed) -> None:
    await rig.lose_lease()


async def _cancelled(rig: Rig, held: Claimed) -> None:
    await rig.cancel(held.lease.job_id, CancelMode.HARD)


async def _ended_and_requeued(rig: Rig, held: Claimed) -> None:
    await rig.move(held.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)
    await rig.ledger.requeue(ADMIN, [held.lease.job_id], rig.request(), limit=1, cause=None)


async def _settled_by_its_successor(rig: Rig, held: Claimed) -> None:
    await _expired_and_reclaimed(rig, held)
    job = await rig.job(held.lease.job_id)
    lease = Lease(key=held.lease.key, epoch=job.epoch, job_id=job.job_id, lifecycle=job.lifecycle)
    assert isinstance(await rig.pull(lease, Trigger.COMPLETE, by=OTHER_WORKER, result=b'"theirs"'), StepApplied)


LOSSES = [_expired_and_reclaimed, _expired, _cancelled, _ended_and_requeued, _settled_by_its_successor]


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-7", "D2", "DJ-21")
@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__.strip("_"))
async def test_every_write_of_a_holder_that_lost_its_lease_is_refused(
    rig: Rig, lose: Callable[[Rig, Claimed], Awaitable[None]]
):
    held = await rig.running()
    job_id, lost = held.lease.job_id, LeaseLost(held.lease)
    await rig.ledger.journal(held.lease, "first", b'"kept"')
    await lose(rig, held)
    before = await rig.snapshot(job_id)
    for source, trigger in STEPS:
        death, wait = DEATH if trigger == "reject" else None, Wait() if trigger == "suspend" else None
        assert await rig.pull(held, trigger, source=str(source), result=b'"stolen"', death=death, wait=wait) == lost
    assert await rig.ledger.renew(WORKER, [held.lease]) == [lost]
    assert await rig.ledger.save_checkpoint(held.lease, b'"stolen"') == lost
    assert await rig.ledger.journal(held.lease, "second", b'"stolen"') == lost
    assert await rig.ledger.journal(held.lease, "first", b'"stolen"') == lost
    assert await rig.ledger.signal(held.lease, [("job_heartbeat", b"1")]) == lost
    assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("DJ-21", "DJ-7")
async def test_the_losers_checkpoint_does_not_reach_the_next_holder(rig: Rig):
    held = await rig.running()
    await rig.ledger.save_checkpoint(held.lease, b'"mine"')
    await rig.lose_lease()
    assert await rig.ledger.save_checkpoint(held.lease, b'"late"') == LeaseLost(held.lease)
    assert (await rig.claim_one(by=OTHER_WORKER)).checkpoint == b'"mine"'


@pytest.mark.requirement("D2")
async def test_expired_lease_is_valid_until_it_is_revoked(rig: Rig):
    """Time decides liveness, the epoch decides safety."""
    held, other = await rig.running(), await rig.running()
    await rig.advance(3600.0)
    assert await rig.ledger.renew(WORKER, [other.lease]) == [Renewed(cancel=False)]
    assert isinstance(await rig.pull(held, Trigger.COMPLETE), StepApplied)


@pytest.mark.requirement("DJ-7", "D2")
async def test_an_epoch_from_the_future_is_refused(rig: Rig):
    held = await rig.running()
    before = await rig.snapshot(held.lease.job_id)
    epoch = Epoch(held.lease.epoch + 1)
    forged = Lease(key=held.lease.key, epoch=epoch, job_id=held.lease.job_id, lifecycle="leased-job")
    assert await rig.pull(forged, Trigger.COMPLETE) == LeaseLost(forged)
    assert await rig.ledger.renew(WORKER, [forged]) == [LeaseLost(forged)]
    assert await rig.snapshot(held.lease.job_id) == before


@pytest.mark.requirement("D2")
async def test_every_revocation_raises_the_epoch(rig: Rig):
    for revoke in ("expire", "cancel", "move"):
        held = await rig.running(max_attempts=5)
        job_id = held.lease.job_id
        if revoke == "expire":
            await rig.lose_lease()
            await rig.cancel(job_id)
        elif revoke == "cancel":
            await rig.cancel(job_id)
        else:
            await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH)
        assert (await rig.job(job_id)).epoch == held.lease.epoch + 1


@pytest.mark.requirement("DJ-7", "D16")
async def test_a_run_taken_over_refuses_its_first_orchestrator(rig: Rig):
    orchestrator, other = actor(Role.ORCHESTRATOR), actor(Role.ORCHESTRATOR, "orchestrator-2")
    job_id = await rig.submit_one(lifecycle="run")
    await rig.drive(job_id, "queued")
    first = await rig.claim_one(lifecycle="run", by=orchestrator)
    await rig.lose_lease()
    second = await rig.claim_one(lifecycle="run", by=other)
    assert (second.lease.job_id, second.state) == (job_id, "running")
    assert await rig.pull(first, "step", by=orchestrator) == LeaseLost(first.lease)
    assert await rig.pull(first, Trigger.COMPLETE, by=orchestrator) == LeaseLost(first.lease)
    assert isinstance(await rig.pull(second, "step", by=other), StepApplied)


@pytest.mark.requirement("DJ-7")
async def test_the_repeat_of_an_old_step_is_not_taken_for_the_new_holders(rig: Rig):
    """The successor made the same step with its own epoch: the loser's own step never happened."""
    held = await rig.running()
    await _settled_by_its_successor(rig, held)
    assert await rig.pull(held, Trigger.COMPLETE) == LeaseLost(held.lease)


@pytest.mark.requirement("DJ-7", "DJ-21")
async def test_a_repeat_after_the_next_claim_is_still_answered_as_done(rig: Rig):
    """The retry was made, its answer was lost, and the job is already someone else's."""
    held = await rig.running()
    first = await rig.pull(held, Trigger.RETRY)
    assert isinstance(first, StepApplied)
    await rig.claim_one(by=OTHER_WORKER)
    before = await rig.snapshot(held.lease.job_id)
    assert await rig.pull(held, Trigger.RETRY) == StepApplied(version=first.version, repeated=True)
    assert await rig.pull(held, Trigger.COMPLETE) == LeaseLost(held.lease)
    assert await rig.snapshot(held.lease.job_id) == before


@pytest.mark.requirement("DJ-7")
async def test_lease_epoch_settles_a_job_once(rig: Rig):
    """After complete, the same epoch cannot fail the job; after retry, it cannot complete it."""
    first, second = await rig.running(), await rig.running()
    await rig.pull(first, Trigger.COMPLETE)
    await rig.pull(second, Trigger.RETRY)
    assert await rig.pull(first, Trigger.FAIL) == LeaseLost(first.lease)
    assert await rig.pull(second, Trigger.COMPLETE) == LeaseLost(second.lease)
    assert await rig.state(first.lease.job_id) == "succeeded"
    assert await rig.state(second.lease.job_id) == "queued"


@pytest.mark.requirement("DJ-7", "DJ-21")
async def test_a_start_of_a_running_job_is_a_repeat_and_of_a_settled_one_is_lost(rig: Rig):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    await rig.pull(claimed, Trigger.START, source="assigned")
    assert await rig.pull(claimed, Trigger.START, source="assigned") == StepApplied(version=3, repeated=True)
    await rig.pull(claimed, Trigger.COMPLETE)
    outcome = await rig.pull(claimed, Trigger.START, source="assigned")
    assert outcome == LeaseLost(claimed.lease), "its start is no longer the latest effect of this epoch"
    assert await rig.state(job_id) == "succeeded"

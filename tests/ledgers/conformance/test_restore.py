"""A ledger that was lost comes back from what was recorded of its events: the same histories, and nothing that its holders had."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER, Rig, actor, claimed_ids
from trellis.engine.errors import HistoryBroken, NotAllowed, OptionInvalid
from trellis.engine.jobs import (
    RESTORE_MAX,
    CancelMode,
    JobId,
    LeaseLost,
    Mismatch,
    Moved,
    Renewed,
    StepApplied,
    Submitted,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace, JobToRestore, RecordedEvent
from trellis.engine.restoration import GIVEN_BACK_PREFIX, RELEASED_CAUSE
from trellis.engine.uniqueness import UniqueRule
from trellis.lifecycles import LIFECYCLES, Role, Trigger

OWNER = actor(Role.OWNER)


async def everything(ledger: Ledger) -> list[JobToRestore]:
    """All that a ledger knows, as it would be put back."""
    found: list[JobToRestore] = []
    async for history in ledger.histories():
        records = await ledger.recorded(history.events)
        found.append(JobToRestore(records=tuple(records), journal=await ledger.read_journal(history.job.job_id)))
    return found


def records(jobs: list[JobToRestore]) -> dict[JobId, tuple[RecordedEvent, ...]]:
    return {job.job_id: job.records for job in jobs}


async def lost_and_restored(rig: Rig) -> list[JobToRestore]:
    """The same jobs in a new ledger; what was known of them before."""
    before = await everything(rig.ledger)
    owner = await rig.lose()
    assert await owner.restore(OWNER, before) == [True] * len(before)
    return before


@pytest.mark.oldest_server
@pytest.mark.requirement("D14")
@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
async def test_every_state_of_every_lifecycle_comes_back_with_the_same_history(rig: Rig, lifecycle: str):
    for state in LIFECYCLES[lifecycle].states:
        job_id = await rig.submit_one(
            lifecycle=lifecycle, type=lifecycle, payload=b'{"n": 1}', trace="t", parent_id=f"of-{state.name}"
        )
        await rig.drive(job_id, state.name)
        await rig.advance(0.000_001)
    before = await lost_and_restored(rig)
    assert records(await everything(rig.ledger)) == records(before)
    for job in before:
        now, last = await rig.job(job.job_id), job.records[-1].event
        assert (now.state, now.version, now.generation, now.attempt) == (
            last.target,
            last.version,
            last.generation,
            last.attempt,
        )
        assert now.epoch >= last.epoch + 1_000
    assert (await rig.verify()).ok


@pytest.mark.requirement("D14")
async def test_restore_keeps_every_submit_option(rig: Rig):
    original = await rig.submit_one(idempotency_key="k", idempotency_scope="s", fingerprint=b"\x00\xff")
    asked = rig.new_job(
        job_id=JobId("chosen"),
        id_is_given=True,
        fingerprint=b"same",
        payload=b"\x80 no JSON",
        deadline_s=100.5,
        max_attempts=7,
        max_deaths=3,
        concurrency_key="c",
        concurrency_limit=3,
        correlation_id="all of it",
        compensates=original,
    )
    assert await rig.offer(asked) == Submitted(job_id=asked.job_id, created=True)
    before = await rig.job(asked.job_id)
    await lost_and_restored(rig)
    after = await rig.job(asked.job_id)
    await rig.sweep()
    ready = await rig.job(asked.job_id)
    assert replace(ready, epoch=before.epoch) == before
    assert after.payload == asked.payload
    assert await rig.offer(asked) == Submitted(job_id=asked.job_id, created=False)
    assert isinstance(await rig.offer(replace(asked, fingerprint=b"other")), Mismatch)
    again = rig.new_job(idempotency_key="k", idempotency_scope="s", fingerprint=b"\x00\xff")
    assert await rig.offer(again) == Submitted(job_id=original, created=False)
    assert len(await rig.claim(5)) == 2


@pytest.mark.requirement("D14")
async def test_a_restored_job_holds_its_unique_key_unless_it_has_ended_or_another_does(rig: Rig):
    keys = ("running", "ended", "window", "taken")
    rules = {key: UniqueRule(key=key, window_s=900.0 if key == "window" else None) for key in keys}
    jobs = {key: rig.new_job(unique=rule) for key, rule in rules.items()}
    await rig.ledger.submit(SUBMITTER, list(jobs.values()))
    for _ in range(3):
        claimed = await rig.claim_one()
        if claimed.lease.job_id != jobs["running"].job_id:
            await rig.pull(claimed, Trigger.COMPLETE)
    before = await everything(rig.ledger)
    owner = await rig.lose()
    (new,) = await rig.ledger.submit(SUBMITTER, [rig.new_job(unique=rules["taken"])])
    await owner.restore(OWNER, before)
    assert records(await everything(rig.ledger)).items() >= records(before).items()
    answers = {key: (await rig.offer(rig.new_job(unique=rule))) for key, rule in rules.items()}
    assert {key: one.job_id for key, one in answers.items() if not isinstance(one, Mismatch) and not one.created} == {
        "running": jobs["running"].job_id,
        "window": jobs["window"].job_id,
        "taken": new.job_id,
    }


@pytest.mark.oldest_server
@pytest.mark.requirement("D14")
async def test_a_held_job_opens_its_next_attempt_and_its_old_holder_can_write_nothing(rig: Rig):
    zombie = await rig.running()
    unrecorded = await rig.submit_one()
    before = await everything(rig.ledger)
    late = await rig.claim_one()
    assert late.lease.job_id == unrecorded
    owner = await rig.lose()
    await owner.restore(OWNER, before)
    job = await rig.job(zombie.lease.job_id)
    assert (job.place, job.state, job.owner) == (JobPlace.LEASED, "running", WORKER.name)
    for old in (zombie.lease, late.lease):
        assert await rig.pull(old, Trigger.COMPLETE) == LeaseLost(old)
        assert await rig.ledger.renew(WORKER, [old]) == [LeaseLost(old)]
        assert await rig.ledger.journal(old, "x", b"1") == LeaseLost(old)
    await rig.sweep()
    claimed = await rig.claim(5)
    assert sorted(claimed_ids(claimed)) == sorted([unrecorded, zombie.lease.job_id])
    attempts = {one.lease.job_id: one.attempt for one in claimed}
    assert attempts == {unrecorded: 0, zombie.lease.job_id: 1}
    for one in claimed:
        assert one.lease.epoch > 1_000
        assert isinstance(await rig.pull(one, Trigger.COMPLETE), StepApplied)
    for old in (zombie.lease, late.lease):
        assert await rig.pull(old, Trigger.COMPLETE) == LeaseLost(old)


@pytest.mark.requirement("D14")
async def test_a_new_job_is_never_given_the_number_of_a_lost_one(rig: Rig):
    """A holder of the lost ledger knows its job by number and epoch: both must be strange to the new one."""
    before = await everything(rig.ledger)
    held = [await rig.running() for _ in range(3)]
    owner = await rig.lose()
    await owner.restore(OWNER, before)
    first = JobId("first")
    await owner.restore(OWNER, [JobToRestore(records=(await _record_of(rig, owner, first),))])
    new = [await rig.running() for _ in range(3)]
    assert not {one.lease.key for one in held} & {one.lease.key for one in new}
    for one in held:
        assert await rig.pull(one, Trigger.COMPLETE) == LeaseLost(one.lease)


async def _record_of(rig: Rig, ledger: Ledger, job_id: JobId) -> RecordedEvent:
    """The first record of a job as it would be, without the job."""
    await rig.submit_one(job_id=JobId("like"), type="other")
    (like,) = await ledger.recorded(await ledger.events(JobId("like")))
    event = replace(like.event, job_id=job_id, id=f"{job_id}-1", correlation_id=job_id)
    return replace(like, event=event)


@pytest.mark.requirement("D14")
async def test_slots_of_a_key_are_as_they_were_and_none_is_given_out_twice(rig: Rig):
    await rig.submit(3, concurrency_key="k")
    first = await rig.claim_one()
    await rig.pull(first, Trigger.COMPLETE)
    await rig.claim_one()
    rig.key_limits["k"] = 1
    await lost_and_restored(rig)
    assert (await rig.verify()).ok
    assert await rig.claim(5) == []
    await rig.sweep()
    (next_one,) = await rig.claim(5)
    await rig.pull(next_one, Trigger.COMPLETE)
    (last,) = await rig.claim(5)
    await rig.pull(last, Trigger.COMPLETE)
    assert await rig.claim(5) == []


@pytest.mark.requirement("D14")
async def test_more_held_jobs_than_a_key_allows_go_on_as_after_a_lowered_limit(rig: Rig):
    await rig.ledger.limit_key(ADMIN, "k", 3)
    await rig.submit(4, concurrency_key="k")
    assert len(await rig.claim(5)) == 3
    await lost_and_restored(rig)
    assert (await rig.verify()).ok
    await rig.sweep()
    assert len(await rig.claim(5)) == 1


@pytest.mark.requirement("D14")
async def test_restored_job_keeps_its_timer_and_its_deadline(rig: Rig):
    soon, far = await rig.submit_one(delay_s=50.0), await rig.submit_one(delay_s=5_000.0)
    retried = await rig.running()
    await rig.pull(retried, Trigger.RETRY, delay_s=500.0)
    late = await rig.submit_one(type="other", deadline_s=120.0)
    due = {job_id: (await rig.job(job_id)).due_at for job_id in (far, retried.lease.job_id)}
    before = await everything(rig.ledger)
    await rig.advance(60.0)
    owner = await rig.lose()
    await owner.restore(OWNER, before)
    assert (await rig.job(soon)).place is JobPlace.READY
    assert {job_id: (await rig.job(job_id)).due_at for job_id in due} == due
    held = await rig.claim_one()
    assert held.lease.job_id == soon
    await rig.pull(held, Trigger.COMPLETE)
    await rig.pass_time(61.0)
    assert await rig.state(late) == "dead_lettered"
    await rig.pass_time(400.0)
    assert claimed_ids(await rig.claim(5)) == [retried.lease.job_id]
    assert records(await everything(rig.ledger))[far] == records(before)[far]


@pytest.mark.requirement("D14")
async def test_dead_letters_spared_attempts_and_deaths_come_back(rig: Rig):
    buried = await rig.running(max_attempts=2)
    await rig.pull(buried, Trigger.SNOOZE, spare_attempt=True)
    await rig.pull(await rig.claim_one(), "reject", death=DEATH)
    requeued = await rig.running()
    await rig.pull(requeued, "reject", death=DEATH)
    await rig.ledger.requeue(ADMIN, [requeued.lease.job_id], rig.request(), limit=1, cause=None)
    again = await rig.claim_one()
    await rig.pull(again, Trigger.RELEASE, spare_attempt=True)
    let_go = await rig.running(type="let go")
    await rig.pull(let_go, Trigger.RETRY, spare_attempt=True, cause=RELEASED_CAUSE)
    mortal = await rig.running(type="mortal", max_deaths=5)
    await rig.lose_lease()
    jobs = [buried.lease.job_id, requeued.lease.job_id, let_go.lease.job_id, mortal.lease.job_id]
    before = [await rig.job(job_id) for job_id in jobs]
    letters = await rig.ledger.dead_letters(JobFilter(), limit=10)
    known = await lost_and_restored(rig)
    for old in before:
        now = await rig.job(old.job_id)
        assert (now.max_attempts, now.deaths, now.attempt) == (old.max_attempts, old.deaths, old.attempt)
    assert await rig.ledger.dead_letters(JobFilter(), limit=10) == letters
    assert records(await everything(rig.ledger)) == records(known)
    await rig.lose_lease()
    third = await rig.claim_one()
    await rig.pull(third, "reject", death=DEATH)
    assert (await rig.verify()).ok


@pytest.mark.requirement("D14")
async def test_a_request_answered_before_is_answered_the_same_after(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job")
    orchestrator = actor(Role.ORCHESTRATOR)
    first = await rig.move(job_id, "QUEUED", by=orchestrator, request_id="once")
    await lost_and_restored(rig)
    second = await rig.move(job_id, "QUEUED", by=orchestrator, request_id="once")
    assert isinstance(first, Moved)
    assert second == replace(first, repeated=True)


@pytest.mark.requirement("D14")
async def test_the_deadline_of_a_requeued_job_is_as_long_as_it_was_at_first(rig: Rig):
    job_id = await rig.submit_one(deadline_s=100.0)
    for _ in range(2):
        await rig.advance(1_000.0)
        await rig.sweep()
        assert await rig.state(job_id) == "dead_lettered"
        await rig.ledger.requeue(ADMIN, [job_id], rig.request(), limit=1, cause=None)
    requeued_at = (await rig.last_event(job_id)).ts
    assert (await rig.job(job_id)).deadline_at == requeued_at + timedelta(seconds=100)
    await lost_and_restored(rig)
    assert (await rig.job(job_id)).deadline_at == requeued_at + timedelta(seconds=100)


@pytest.mark.requirement("D14")
async def test_journal_is_restored_and_an_interrupted_restore_continues(rig: Rig):
    held = await rig.running()
    await rig.ledger.journal(held.lease, "step/01", b"kept")
    await rig.submit(2)
    before = await everything(rig.ledger)
    owner = await rig.lose()
    assert await owner.restore(OWNER, before[:1]) == [True]
    await rig.sweep()
    claimed = await rig.claim_one()
    await rig.pull(claimed, Trigger.COMPLETE)
    assert await owner.restore(ADMIN, before) == [False, True, True]
    assert await rig.state(held.lease.job_id) == "succeeded"
    assert await rig.ledger.read_journal(held.lease.job_id) == {"step/01": b"kept"}
    assert await owner.restore(ADMIN, before) == [False, False, False]


@pytest.mark.requirement("D14", "D55")
async def test_a_history_that_cannot_have_been_is_refused_and_nothing_is_written(rig: Rig):
    good, gone, broken = [await rig.running() for _ in range(3)]
    await rig.pull(good, Trigger.COMPLETE)
    before = {job.job_id: job for job in await everything(rig.ledger)}
    owner = await rig.lose()
    gap = before[gone.lease.job_id]
    last = before[broken.lease.job_id].records[-1]
    forged = replace(last, event=replace(last.event, target="succeeded", type="job_succeeded"))
    stranger = replace(last, event=replace(last.event, epoch=0))
    whole = before[broken.lease.job_id].records
    of_another = replace(last, submitted_at=last.submitted_at + timedelta(seconds=1))
    for wrong in (
        JobToRestore(records=(gap.records[0], gap.records[2])),
        JobToRestore(records=gap.records[1:]),
        JobToRestore(records=(replace(whole[0], submission=None), *whole[1:])),
        JobToRestore(records=(*whole[:-1], forged)),
        JobToRestore(records=(*whole[:-1], stranger)),
        JobToRestore(records=(*whole[:-1], of_another)),
        JobToRestore(records=(*whole, gap.records[-1])),
        JobToRestore(records=()),
    ):
        with pytest.raises(HistoryBroken):
            await owner.restore(OWNER, [before[good.lease.job_id], wrong])
    assert await rig.ledger.job(good.lease.job_id) is None
    assert await owner.restore(OWNER, []) == []


@pytest.mark.requirement("D55")
async def test_restore_requires_its_role(rig: Rig):
    await rig.submit_one()
    before = await everything(rig.ledger)
    owner = await rig.lose()
    for role in sorted(set(Role) - {Role.OWNER, Role.CONTROL_PLANE}):
        with pytest.raises(NotAllowed):
            await owner.restore(actor(role), before)
    if rig.kind != "sqlite":
        with pytest.raises(NotAllowed, match="trellis_owner"):
            await rig.ledger.restore(OWNER, before)
    assert await rig.ledger.job(before[0].job_id) is None
    with pytest.raises(OptionInvalid, match=str(RESTORE_MAX)):
        await owner.restore(OWNER, before * (RESTORE_MAX + 1))


@pytest.mark.requirement("D14")
async def test_pending_soft_cancel_is_not_restored(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    await lost_and_restored(rig)
    await rig.sweep()
    again = await rig.claim_one()
    assert await rig.ledger.renew(WORKER, [again.lease]) == [Renewed(cancel=False)]


@pytest.mark.requirement("D36", "D14")
async def test_a_compensation_finds_its_original_again(rig: Rig):
    original = await rig.running()
    await rig.pull(original, Trigger.COMPLETE)
    undo = await rig.submit_one(type="undo", compensates=original.lease.job_id, by=SUBMITTER)
    await lost_and_restored(rig)
    held = await rig.claim_one(types=("undo",))
    assert (held.lease.job_id, held.compensates) == (undo, original.lease.job_id)
    await rig.pull(held, Trigger.COMPLETE)
    assert (await rig.last_event(original.lease.job_id)).type == "job_compensated"


@pytest.mark.requirement("D14")
async def test_bus_jobs_that_were_held_put_off_approved_or_given_back_come_back_where_they_stood(rig: Rig):
    scheduler, kernel = actor(Role.SCHEDULER), actor(Role.SAFETY_KERNEL)
    held, put_off, approved, given_back = await rig.submit(4, lifecycle="bus-job", max_attempts=1, concurrency_key="k")
    for job_id in (held, put_off, approved, given_back):
        await rig.move(job_id, "SCHEDULED", by=scheduler)
    for job_id in (held, approved):
        await rig.move(job_id, "SCHEDULED", by=kernel, delay_s=3_600.0, data=b'{"hold": "human"}')
    await rig.move(put_off, "SCHEDULED", by=scheduler, delay_s=60.0, data=b'{"hold": "order"}')
    sent = await rig.move(given_back, "DISPATCHED", by=scheduler)
    assert isinstance(sent, Moved)
    assert sent.lease is not None
    cause = f"{GIVEN_BACK_PREFIX}nobody listens"
    back = {"source": "DISPATCHED", "by": scheduler, "spare_attempt": True, "delay_s": 60.0, "cause": cause}
    assert isinstance(await rig.pull(sent.lease, Trigger.RETRY, **back), StepApplied)
    await rig.move(approved, "SCHEDULED", by=OWNER, data=b'{"note": "go on"}')
    jobs = {job_id: await rig.job(job_id) for job_id in (held, put_off, approved, given_back)}
    known = await lost_and_restored(rig)
    assert records(await everything(rig.ledger)) == records(known)
    await rig.sweep()
    for job_id, before in jobs.items():
        now = await rig.job(job_id)
        assert (now.place, now.due_at, now.version, now.attempt, now.max_attempts) == (
            before.place,
            before.due_at,
            before.version,
            before.attempt,
            before.max_attempts,
        )
    assert (jobs[given_back].attempt, jobs[given_back].max_attempts) == (1, 2)
    assert (await rig.verify()).ok

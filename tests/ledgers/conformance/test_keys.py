"""Concurrency keys: never more than the limit at once, and never an idle slot while work waits."""

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, LENGTH_S, WORKER, Rig, claimed_ids
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import CancelMode, Claimed, JobId, NotMoved, Priority
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import Trigger


async def _places(rig: Rig) -> dict[JobId, JobPlace]:
    return {job.job_id: job.place for job in (await rig.ledger.jobs(JobFilter(), limit=100)).jobs}


@pytest.mark.oldest_server
@pytest.mark.requirement("JQ-7", "D49")
async def test_one_job_of_a_concurrency_key_is_claimed_at_a_time(rig: Rig):
    rig.key_limits["user:1"] = 1
    jobs = await rig.submit(4, concurrency_key="user:1")
    for expected in jobs:
        (held,) = await rig.claim(10)
        assert held.lease.job_id == expected
        assert await rig.claim(10) == []
        await rig.pull(held, Trigger.COMPLETE)


@pytest.mark.requirement("D49")
async def test_a_key_with_a_limit_of_n_runs_n_at_once(rig: Rig):
    jobs = await rig.submit(5, concurrency_key="k", concurrency_limit=3)
    held = await rig.claim(10)
    assert claimed_ids(held) == jobs[:3]
    await rig.pull(held[1], Trigger.COMPLETE)
    assert claimed_ids(await rig.claim(10)) == [jobs[3]]


async def test_keys_do_not_wait_for_each_other(rig: Rig):
    await rig.submit(3, concurrency_key="a")
    await rig.submit(3, concurrency_key="b")
    await rig.submit(2)
    assert len(await rig.claim(10)) == 4


async def test_a_key_reaches_over_types(rig: Rig):
    first = await rig.submit_one(type="a", concurrency_key="k")
    await rig.submit_one(type="b", concurrency_key="k")
    assert claimed_ids(await rig.claim(5, types=("a", "b"))) == [first]


async def test_unclaimed_slot_owner_does_not_starve_another_type(rig: Rig):
    """The job that owns the slot may belong to a type without workers; a parked job of a served type must not wait
    for ever behind it when its key has a second slot.
    """
    await rig.submit_one(type="unserved", concurrency_key="k", concurrency_limit=2)
    served = await rig.submit_one(type="served", concurrency_key="k", concurrency_limit=2)
    assert claimed_ids(await rig.claim(5, types=("served",))) == [served]


async def test_a_job_behind_a_full_key_is_parked(rig: Rig):
    first, second = await rig.submit(2, concurrency_key="k")
    assert await _places(rig) == {first: JobPlace.READY, second: JobPlace.BLOCKED}
    (queue,) = await rig.ledger.queues()
    assert (queue.ready, queue.blocked) == (1, 1)


async def test_the_most_urgent_parked_job_gets_the_slot(rig: Rig):
    held = await rig.running(concurrency_key="k")
    (batch,) = await rig.submit(1, concurrency_key="k", priority=Priority.BATCH)
    (critical,) = await rig.submit(1, concurrency_key="k", priority=Priority.CRITICAL)
    await rig.pull(held, Trigger.COMPLETE)
    assert await _places(rig) == {
        held.lease.job_id: JobPlace.ENDED,
        batch: JobPlace.BLOCKED,
        critical: JobPlace.READY,
    }


@pytest.mark.parametrize("urgent", [False, True], ids=["older", "more urgent"])
async def test_jobs_that_get_a_slot_go_before_younger_ones_also_right_after_a_full_claim(rig: Rig, urgent: bool):
    """A claimer starts behind the jobs it took last. The next two of the key kept a position before that."""
    keyed = await rig.submit(4, concurrency_key="k", concurrency_limit=2)
    if urgent:
        await rig.submit(3, priority=Priority.CRITICAL)
        more = await rig.submit(2, priority=Priority.BATCH)
        held = await rig.claim(6)
        assert claimed_ids(held)[3:] == [*keyed[:2], more[0]]
    else:
        more = await rig.submit(2)
        held = await rig.claim(3)
        assert claimed_ids(held) == [*keyed[:2], more[0]]
    for one in held:
        await rig.pull(one, Trigger.COMPLETE)
    assert claimed_ids(await rig.claim(2)) == keyed[2:]
    assert claimed_ids(await rig.claim(2)) == more[1:]


async def _complete(rig: Rig, held: Claimed) -> None:
    await rig.pull(held, Trigger.COMPLETE)


async def _fail(rig: Rig, held: Claimed) -> None:
    await rig.pull(held, Trigger.FAIL)


async def _back_off(rig: Rig, held: Claimed) -> None:
    await rig.pull(held, Trigger.RETRY, delay_s=1000.0)


async def _snooze(rig: Rig, held: Claimed) -> None:
    await rig.pull(held, Trigger.SNOOZE, delay_s=1000.0, spare_attempt=True)


async def _reject(rig: Rig, held: Claimed) -> None:
    await rig.pull(held, "reject", death=DEATH)


async def _stop(rig: Rig, held: Claimed) -> None:
    await rig.cancel(held.lease.job_id, CancelMode.SOFT)
    await rig.pull(held, "stop")


async def _cancel_hard(rig: Rig, held: Claimed) -> None:
    await rig.cancel(held.lease.job_id, CancelMode.HARD)


async def _dead_letter(rig: Rig, held: Claimed) -> None:
    await rig.move(held.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)


async def _expire_exhausted(rig: Rig, held: Claimed) -> None:
    await rig.lose_lease()


async def _deadline(rig: Rig, held: Claimed) -> None:
    await rig.pass_time(LENGTH_S - 1)


async def _harden(rig: Rig, held: Claimed) -> None:
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=5.0)
    await rig.pass_time(6)


EXITS = [
    (_complete, {}),
    (_fail, {}),
    (_back_off, {}),
    (_snooze, {}),
    (_reject, {}),
    (_stop, {}),
    (_cancel_hard, {}),
    (_dead_letter, {}),
    (_expire_exhausted, {"max_attempts": 1}),
    (_deadline, {"deadline_s": LENGTH_S - 1}),
    (_harden, {}),
]


@pytest.mark.requirement("D49", "JQ-7")
@pytest.mark.parametrize("leave, options", EXITS, ids=[leave.__name__.strip("_") for leave, _ in EXITS])
async def test_every_exit_frees_the_slot_for_the_next(rig: Rig, leave, options):
    held = await rig.running(concurrency_key="k", **options)
    await rig.submit(2, concurrency_key="k")
    assert await rig.claim(5) == []
    await leave(rig, held)
    (after,) = await rig.claim(5)
    assert after.lease.job_id != held.lease.job_id
    assert await rig.claim(5) == []


@pytest.mark.requirement("D49", "D16")
async def test_urgent_job_takes_the_slot_of_a_job_whose_lease_was_lost_in_place(rig: Rig):
    lost = await rig.submit_one(lifecycle="run", concurrency_key="k", priority=Priority.BATCH)
    await rig.drive(lost, "running")
    urgent = await rig.submit_one(concurrency_key="k", priority=Priority.CRITICAL)
    assert (await rig.job(urgent)).place is JobPlace.BLOCKED
    await rig.lose_lease()
    assert [(await rig.job(one)).place for one in (lost, urgent)] == [JobPlace.BLOCKED, JobPlace.READY]


@pytest.mark.requirement("D49")
async def test_a_job_that_lost_its_lease_competes_fairly_for_its_slot(rig: Rig):
    held = await rig.running(concurrency_key="k", max_attempts=9, max_deaths=0)
    other = await rig.submit_one(concurrency_key="k")
    await rig.lose_lease()
    seen = set()
    for _ in range(2):
        (next_,) = await rig.claim(5)
        seen.add(next_.lease.job_id)
        await rig.pull(next_, Trigger.COMPLETE)
    assert seen == {held.lease.job_id, other}


async def test_a_retry_without_delay_goes_behind_no_one_for_ever(rig: Rig):
    """A job that fails at once, again and again, must not keep its key's other jobs waiting for ever."""
    await rig.submit_one(concurrency_key="k", max_attempts=1000)
    other = await rig.submit_one(concurrency_key="k")
    for _ in range(5):
        (held,) = await rig.claim(5)
        if held.lease.job_id == other:
            return
        await rig.pull(held, Trigger.RETRY)
    pytest.fail("the other job of the key was never handed out")


async def test_a_job_whose_backoff_is_over_waits_for_a_free_slot(rig: Rig):
    first = await rig.running(concurrency_key="k")
    await rig.pull(first, Trigger.RETRY, delay_s=10.0)
    second = await rig.running(concurrency_key="k")
    await rig.pass_time(10)
    assert (await rig.job(first.lease.job_id)).place is JobPlace.BLOCKED
    assert await rig.claim(5) == []
    await rig.pull(second, Trigger.COMPLETE)
    assert claimed_ids(await rig.claim(5)) == [first.lease.job_id]


async def test_cancelling_a_parked_job_leaves_the_queue_moving(rig: Rig):
    held = await rig.running(concurrency_key="k")
    parked, last = await rig.submit(2, concurrency_key="k")
    await rig.cancel(parked)
    await rig.pull(held, Trigger.COMPLETE)
    assert claimed_ids(await rig.claim(5)) == [last]


async def test_cancelling_the_owner_of_a_slot_before_its_claim_frees_it(rig: Rig):
    first, second = await rig.submit(2, concurrency_key="k")
    await rig.cancel(first)
    assert claimed_ids(await rig.claim(5)) == [second]


async def test_a_dead_letter_or_deadline_of_a_waiting_owner_frees_its_slot(rig: Rig):
    first = await rig.submit_one(concurrency_key="k")
    second = await rig.submit_one(concurrency_key="k", deadline_s=10.0)
    third = await rig.submit_one(concurrency_key="k")
    await rig.move(first, "dead_lettered", by=ADMIN, death=DEATH)
    assert (await rig.job(second)).place is JobPlace.READY
    await rig.pass_time(10)
    assert await rig.state(second) == "dead_lettered"
    assert claimed_ids(await rig.claim(5)) == [third]


async def test_a_deadline_of_a_parked_job_is_met(rig: Rig):
    await rig.running(concurrency_key="k", max_deaths=0)
    parked = await rig.submit_one(concurrency_key="k", deadline_s=10.0)
    await rig.pass_time(10)
    assert await rig.state(parked) == "dead_lettered"


async def test_a_raised_limit_lets_waiting_work_in(rig: Rig):
    jobs = await rig.submit(4, concurrency_key="k")
    assert len(await rig.claim(5)) == 1
    await rig.ledger.limit_key(ADMIN, "k", 3)
    await rig.sweep()
    assert claimed_ids(await rig.claim(5)) == jobs[1:3]


async def test_a_lowered_limit_holds_as_soon_as_jobs_leave(rig: Rig):
    await rig.submit(6, concurrency_key="k", concurrency_limit=3)
    held = await rig.claim(5)
    assert len(held) == 3
    await rig.ledger.limit_key(ADMIN, "k", 1)
    for one in held[:2]:
        await rig.pull(one, Trigger.COMPLETE)
        await rig.sweep()
        assert await rig.claim(5) == []
    await rig.pull(held[2], Trigger.COMPLETE)
    assert len(await rig.claim(5)) == 1


async def test_a_lowered_limit_binds_ready_jobs_that_nobody_claimed_yet(rig: Rig):
    await rig.submit(4, concurrency_key="k", concurrency_limit=3)
    await rig.ledger.limit_key(ADMIN, "k", 1)
    await rig.sweep()
    assert len(await rig.claim(5)) == 1


@pytest.mark.requirement("D49", "D24")
async def test_a_key_without_a_limit_hands_out_nothing_until_it_has_one_again(rig: Rig):
    jobs = await rig.submit(3, concurrency_key="k")
    (held,) = await rig.claim(5)
    await rig.ledger.limit_key(ADMIN, "k", 0)
    await rig.pull(held, Trigger.COMPLETE)
    jobs += await rig.submit(1, concurrency_key="k")
    await rig.sweep()
    assert await rig.claim(5) == []
    await rig.ledger.limit_key(ADMIN, "k", 2)
    assert claimed_ids(await rig.claim(5)) == jobs[1:3]


@pytest.mark.requirement("D49", "D24")
async def test_a_key_without_a_limit_takes_ready_jobs_back(rig: Rig):
    (job,) = await rig.submit(1, concurrency_key="k")
    await rig.ledger.limit_key(ADMIN, "k", 0)
    await rig.sweep()
    assert await rig.claim(5) == []
    await rig.ledger.limit_key(ADMIN, "k", 1)
    assert claimed_ids(await rig.claim(5)) == [job]


@pytest.mark.requirement("D16", "D24")
async def test_a_job_that_keeps_its_state_is_not_handed_out_again_while_its_key_has_no_limit(rig: Rig):
    run = await rig.submit_one(lifecycle="run", concurrency_key="run:anna")
    await rig.drive(run, "running")
    await rig.ledger.limit_key(ADMIN, "run:anna", 0)
    await rig.lose_lease()
    assert await rig.claim(5, lifecycle="run") == []
    await rig.ledger.limit_key(ADMIN, "run:anna", 1)
    assert claimed_ids(await rig.claim(5, lifecycle="run")) == [run]


async def test_a_limit_below_nothing_is_refused(rig: Rig):
    with pytest.raises(OptionInvalid, match="0 or more"):
        await rig.ledger.limit_key(ADMIN, "k", -1)


async def test_a_limit_can_be_set_before_the_first_job_and_stays(rig: Rig):
    await rig.ledger.limit_key(ADMIN, "k", 2)
    await rig.submit(5, concurrency_key="k", concurrency_limit=2)
    assert len(await rig.claim(5)) == 2


@pytest.mark.requirement("JQ-7", "D49")
async def test_a_key_of_another_lifecycle_holds_from_claim_to_end(rig: Rig):
    for _ in range(2):
        await rig.drive(await rig.submit_one(lifecycle="queue-job", concurrency_key="queue-job:anna"), "QUEUED")
    (held,) = await rig.claim(5, lifecycle="queue-job")
    assert await rig.claim(5, lifecycle="queue-job") == []
    for state in ("NOTEBOOKLM_CALL", "ARTIFACT_WRITE", "COMPLETE"):
        await rig.drive(held.lease.job_id, state, held.lease)
        claimed = await rig.claim(5, lifecycle="queue-job")
        assert len(claimed) == (state == "COMPLETE")


@pytest.mark.requirement("D16", "D49")
async def test_a_run_that_lost_its_orchestrator_keeps_others_of_its_agent_waiting_or_shares_fairly(rig: Rig):
    first = await rig.submit_one(lifecycle="run", concurrency_key="run:anna")
    second = await rig.submit_one(lifecycle="run", concurrency_key="run:anna")
    for job_id in (first, second):
        await rig.drive(job_id, "queued")
    await rig.claim_one(lifecycle="run")
    await rig.lose_lease()
    taken = await rig.claim(5, lifecycle="run")
    assert len(taken) == 1, "one run of an agent at a time, also after a lost lease"


async def test_a_claim_by_id_respects_the_key(rig: Rig):
    await rig.running(concurrency_key="k")
    parked = await rig.submit_one(concurrency_key="k")
    assert isinstance(await rig.move(parked, "assigned", by=WORKER), NotMoved)
    assert (await rig.job(parked)).place is JobPlace.BLOCKED


async def test_a_delayed_keyed_job_owns_no_slot_while_it_rests(rig: Rig):
    later = await rig.submit_one(concurrency_key="k", delay_s=100.0)
    now = await rig.submit_one(concurrency_key="k")
    assert claimed_ids(await rig.claim(5)) == [now]
    assert (await rig.job(later)).place is JobPlace.SCHEDULED

"""The order in which jobs of one priority become claimable, where one call or one sweep makes several of them so."""

import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER, Rig, claimed_ids
from trellis.engine.job_changes import ChangeOrder, JobChange, JobToChange
from trellis.engine.jobs import Advance, Priority, Wait
from trellis.engine.records import JobFilter
from trellis.lifecycles import Trigger


@pytest.mark.requirement("D49")
async def test_jobs_of_one_submit_are_claimed_in_its_order_with_a_key_or_without(rig: Rig):
    jobs = [rig.new_job(concurrency_key=key) for key in ("a", None, None, "b", None)]
    jobs.append(rig.new_job(idempotency_key="once", fingerprint=b"f"))
    assert [answer.job_id for answer in await rig.ledger.submit(SUBMITTER, jobs)] == [job.job_id for job in jobs]
    assert claimed_ids(await rig.claim(6)) == [job.job_id for job in jobs]


async def test_children_of_one_spawn_are_claimed_in_its_order_with_a_key_or_without(rig: Rig):
    parent = (await rig.running()).lease
    jobs = [rig.new_job(parent_id=parent.job_id, concurrency_key=key) for key in ("a", None, "b", None)]
    await rig.ledger.spawn(WORKER, parent, jobs, "children", b"[]", abandoned=frozenset())
    assert claimed_ids(await rig.claim(4)) == [job.job_id for job in jobs]


async def test_jobs_of_one_submit_are_listed_in_its_order_whatever_their_lifecycles(rig: Rig):
    jobs = [rig.new_job(lifecycle=lifecycle) for lifecycle in ("leased-job", "bus-job", "leased-job")]
    await rig.ledger.submit(SUBMITTER, jobs)
    page = await rig.ledger.jobs(JobFilter(), limit=10)
    assert [job.job_id for job in page.jobs] == [job.job_id for job in reversed(jobs)], "newest first"


async def test_jobs_that_one_turn_lets_go_are_claimed_in_the_order_of_its_steps(rig: Rig):
    await rig.submit(3)
    held = await rig.claim(3)
    causes = ("one", "other", "one")
    await rig.turn(
        *(
            Advance(lease=one.lease, source="running", trigger=Trigger.RETRY, cause=cause)
            for one, cause in zip(held, causes, strict=True)
        )
    )
    assert claimed_ids(await rig.claim(3)) == claimed_ids(held)


async def test_jobs_whose_timer_makes_a_step_are_claimed_before_delayed_ones_and_each_oldest_first(rig: Rig):
    delayed = [await rig.submit_one(delay_s=delay_s) for delay_s in (7.0, 5.0)]
    suspended = [await rig.running() for _ in range(2)]
    for held, timeout_s in zip(suspended, (6.0, 4.0), strict=True):
        await rig.pull(held, Trigger.SUSPEND, wait=Wait(timeout_s=timeout_s))
    await rig.advance(8.0)
    await rig.sweep()
    assert claimed_ids(await rig.claim(4)) == [*claimed_ids(suspended), *delayed]


async def test_jobs_of_one_change_are_claimed_oldest_first(rig: Rig):
    first, second = await rig.submit(2)
    order = ChangeOrder(change=JobChange.PRIORITIZE, request_id=rig.request(), priority=Priority.CRITICAL)
    changed = await rig.ledger.change_jobs(ADMIN, order, [JobToChange(second), JobToChange(first)])
    assert [answer.job_id for answer in changed.answers] == [second, first]
    assert claimed_ids(await rig.claim(2)) == [first, second]


@pytest.mark.requirement("JQ-7")
async def test_a_claim_that_names_a_job_takes_the_slot_of_a_job_of_its_type_first(rig: Rig):
    options = {"concurrency_key": "k", "concurrency_limit": 2}
    same = await rig.submit_one(**options)
    other = await rig.submit_one(type="other", **options)
    named = await rig.submit_one(**options)
    assert claimed_ids(await rig.claim(1, only=named)) == [named]
    assert claimed_ids(await rig.claim(2, types=("work", "other"))) == [other], f"{same} has given its slot away"


async def test_a_claim_of_another_lifecycle_lets_no_older_job_of_the_type_be_passed_over(rig: Rig):
    first = await rig.submit_one()
    await rig.submit_one(lifecycle="nlm-job")
    second = await rig.submit_one()
    assert len(await rig.claim(1, lifecycle="nlm-job")) == 1
    assert claimed_ids([*await rig.claim(1), *await rig.claim(1)]) == [first, second]


async def test_a_claim_of_no_jobs_that_names_a_job_gives_it_no_slot(rig: Rig):
    first, second = await rig.submit(2, concurrency_key="k")
    assert await rig.claim(0, only=second) == []
    assert claimed_ids(await rig.claim(2)) == [first]

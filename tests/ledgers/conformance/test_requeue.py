"""Requeueing: an operator opens the next generation of what failed."""

import asyncio

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, Rig, actor, answer_of, claimed_ids
from trellis.engine.errors import Refused
from trellis.engine.jobs import DeadLetterReason, JobId, Moved, NotMoved, ReasonCode, Stage
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import LIFECYCLES, Role, Trigger


async def _dead(rig: Rig, n: int = 1, reason: ReasonCode = ReasonCode.POLICY_VIOLATION, **options) -> list[JobId]:
    jobs = await rig.submit(n, **options)
    death = DeadLetterReason(reason_code=reason, stage=Stage.EXEC, last_error="broken")
    for job_id in jobs:
        await rig.move(job_id, "dead_lettered", by=ADMIN, death=death)
        await rig.advance(1.0)
    return jobs


async def _requeue(rig: Rig, jobs, *, limit: int = 100, request_id=None):
    return await rig.ledger.requeue(ADMIN, jobs, request_id or rig.request(), limit=limit, cause="fixed")


@pytest.mark.oldest_server
@pytest.mark.requirement("D39", "D1", "DJ-12", "D2")
async def test_a_requeue_opens_the_next_generation(rig: Rig):
    held = await rig.running(max_attempts=2, max_deaths=5)
    job_id = held.lease.job_id
    await rig.lose_lease()
    second = await rig.claim_one()
    await rig.pull(second, "reject", death=DEATH)
    dead = await rig.job(job_id)
    assert (dead.attempt, dead.deaths) == (1, 1)
    (answer,) = await _requeue(rig, [job_id])
    assert answer == Moved(job_id=job_id, source="dead_lettered", target="queued", version=dead.version + 1)
    job = await rig.job(job_id)
    assert (job.state, job.place, job.generation, job.attempt, job.deaths) == ("queued", JobPlace.READY, 1, 0, 0)
    assert (job.max_attempts, job.epoch) == (2, dead.epoch)
    event = await rig.last_event(job_id)
    assert (event.type, event.role, event.cause, event.generation) == (
        "job_requeued",
        Role.CONTROL_PLANE,
        "fixed",
        1,
    )
    assert (await rig.claim_one()).lease.epoch > dead.epoch


@pytest.mark.requirement("D38", "D39")
async def test_attempts_spared_before_do_not_carry_into_the_next_generation(rig: Rig):
    held = await rig.running(max_attempts=3)
    await rig.pull(held, Trigger.SNOOZE, spare_attempt=True)
    again = await rig.claim_one()
    assert again.max_attempts == 4
    await rig.pull(again, Trigger.FAIL)
    await _requeue(rig, [held.lease.job_id])
    assert (await rig.job(held.lease.job_id)).max_attempts == 3


REQUEUEABLE = {
    ("leased-job", "failed"),
    ("leased-job", "dead_lettered"),
    ("leased-job", "discarded"),
    ("queue-job", "FAILED"),
    ("queue-job", "DEAD"),
    ("queue-job", "DISCARDED"),
}


@pytest.mark.requirement("D39", "JQ-4", "JQ-3")
@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
async def test_requeue_requires_a_failed_or_dead_lettered_job(rig: Rig, lifecycle: str):
    for state in LIFECYCLES[lifecycle].states:
        job_id = await rig.submit_one(lifecycle=lifecycle)
        await rig.drive(job_id, state.name)
        before = await rig.snapshot(job_id)
        (answer,) = await _requeue(rig, [job_id])
        if (lifecycle, state.name) in REQUEUEABLE:
            assert isinstance(answer, Moved), state
            assert (await rig.job(job_id)).generation == 1
        else:
            assert isinstance(answer, NotMoved), state
            assert (answer.job_id, answer.state) == (job_id, state.name)
            assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("D9")
async def test_only_the_control_plane_may_requeue(rig: Rig):
    (job_id,) = await _dead(rig)
    before = await rig.snapshot(job_id)
    for role in set(Role) - {Role.CONTROL_PLANE}:
        call = rig.ledger.requeue(actor(role), [job_id], rig.request(), limit=1, cause=None)
        answer = await answer_of(call)
        assert isinstance(answer, Refused) or (isinstance(answer, list) and isinstance(answer[0], NotMoved))
    assert await rig.snapshot(job_id) == before


@pytest.mark.requirement("DJ-21")
async def test_the_same_request_requeues_once(rig: Rig):
    (job_id,) = await _dead(rig)
    request = rig.request()
    (first,) = await _requeue(rig, [job_id], request_id=request)
    (again,) = await _requeue(rig, [job_id], request_id=request)
    assert isinstance(first, Moved)
    assert isinstance(again, Moved)
    assert (again.version, again.repeated) == (first.version, True)
    assert (await rig.job(job_id)).generation == 1


@pytest.mark.requirement("DJ-21", "D39")
async def test_requeues_at_the_same_time_open_one_generation(rig: Rig):
    another = await rig.open_another()
    (job_id,) = await _dead(rig)
    answers = await asyncio.gather(
        *(
            ledger.requeue(ADMIN, [job_id], rig.request(), limit=1, cause=None)
            for ledger in (rig.ledger, another)
            for _ in range(4)
        )
    )
    assert sum(isinstance(answer, Moved) and not answer.repeated for (answer,) in answers) == 1
    assert (await rig.job(job_id)).generation == 1


@pytest.mark.requirement("DJ-12")
async def test_answers_come_in_the_order_of_the_jobs(rig: Rig):
    dead = await _dead(rig, 2)
    alive = await rig.submit_one()
    answers = await _requeue(rig, [dead[1], alive, dead[0]])
    assert [answer.job_id for answer in answers] == [dead[1], alive, dead[0]]
    assert [type(answer) for answer in answers] == [Moved, NotMoved, Moved]


@pytest.mark.requirement("DJ-12")
async def test_a_filter_takes_at_most_its_limit_oldest_first(rig: Rig):
    jobs = await _dead(rig, 6)
    answers = await _requeue(rig, JobFilter(state="dead_lettered"), limit=4)
    assert [answer.job_id for answer in answers] == jobs[:4]
    assert all(isinstance(answer, Moved) for answer in answers)
    rest = await _requeue(rig, JobFilter(state="dead_lettered"), limit=4)
    assert [answer.job_id for answer in rest] == jobs[4:]
    assert await _requeue(rig, JobFilter(state="dead_lettered"), limit=4) == []


@pytest.mark.requirement("DJ-12")
async def test_each_field_of_a_filter_narrows_it(rig: Rig):
    a = await _dead(rig, type="a", correlation_id="one")
    b = await _dead(rig, type="b", correlation_id="two", concurrency_key="k")
    c = await _dead(rig, type="c", reason=ReasonCode.TIMEOUT)
    for where, expected in (
        (JobFilter(type="a"), a),
        (JobFilter(concurrency_key="k"), b),
        (JobFilter(reason_code=ReasonCode.TIMEOUT), c),
        (JobFilter(type="a", reason_code=ReasonCode.TIMEOUT), []),
        (JobFilter(lifecycle="queue-job"), []),
    ):
        answers = await _requeue(rig, where)
        assert [answer.job_id for answer in answers if isinstance(answer, Moved)] == expected
    assert {(await rig.job(job)).generation for job in (*a, *b, *c)} == {1}


@pytest.mark.requirement("DJ-12")
async def test_a_filter_leaves_alone_what_cannot_be_requeued(rig: Rig):
    dead = await _dead(rig)
    cancelled = await rig.submit_one()
    await rig.cancel(cancelled)
    waiting = await rig.submit_one()
    answers = await _requeue(rig, JobFilter(type="work"))
    assert [answer.job_id for answer in answers if isinstance(answer, Moved)] == dead
    assert [await rig.state(job) for job in (cancelled, waiting)] == ["cancelled", "queued"]


@pytest.mark.requirement("DJ-12", "DJ-21")
async def test_the_same_filter_request_again_requeues_nothing_more(rig: Rig):
    jobs = await _dead(rig, 6)
    request = rig.request()
    first = await _requeue(rig, JobFilter(), limit=3, request_id=request)
    again = await _requeue(rig, JobFilter(), limit=3, request_id=request)
    assert [answer.job_id for answer in first] == [answer.job_id for answer in again] == jobs[:3]
    assert [(await rig.job(job)).generation for job in jobs] == [1, 1, 1, 0, 0, 0]


@pytest.mark.requirement("DJ-12")
async def test_a_requeued_dead_letter_leaves_the_list(rig: Rig):
    jobs = await _dead(rig, 3)
    await _requeue(rig, [jobs[1]])
    assert [letter.job_id for letter in await rig.ledger.dead_letters(JobFilter(), limit=10)] == [jobs[2], jobs[0]]


@pytest.mark.requirement("DJ-12")
async def test_a_second_death_is_a_second_dead_letter_of_its_generation(rig: Rig):
    held = await rig.running()
    await rig.pull(held, "reject", death=DEATH)
    await _requeue(rig, [held.lease.job_id])
    await rig.move(held.lease.job_id, "dead_lettered", by=ADMIN, death=DEATH)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.last_owner, letter.last_lease_expires_at) == (None, None), "nobody held it in this generation"
    assert letter.version == (await rig.job(held.lease.job_id)).version


async def test_a_requeued_keyed_job_waits_for_its_slot(rig: Rig):
    (dead,) = await _dead(rig, concurrency_key="k")
    holder = await rig.running(concurrency_key="k")
    await _requeue(rig, [dead])
    assert (await rig.job(dead)).place is JobPlace.BLOCKED
    assert await rig.claim() == []
    await rig.pull(holder, Trigger.COMPLETE)
    assert claimed_ids(await rig.claim()) == [dead]


async def test_a_requeued_job_starts_without_the_old_deadline(rig: Rig):
    """A job whose deadline killed it would die again in the next sweep."""
    job_id = await rig.submit_one(deadline_s=10.0)
    await rig.pass_time(11)
    assert await rig.state(job_id) == "dead_lettered"
    await _requeue(rig, [job_id])
    await rig.sweep()
    assert await rig.state(job_id) == "queued"


@pytest.mark.requirement("DJ-12", "JQ-4")
async def test_a_filter_takes_a_failed_queue_job_that_waits_for_its_operator(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job")
    await rig.drive(job_id, "FAILED")
    assert (await rig.job(job_id)).place is JobPlace.SCHEDULED
    assert await _requeue(rig, JobFilter(lifecycle="queue-job", place=JobPlace.ENDED)) == []
    (answer,) = await _requeue(rig, JobFilter(lifecycle="queue-job"))
    assert isinstance(answer, Moved)
    assert (answer.job_id, answer.source, answer.target) == (job_id, "FAILED", "QUEUED")

"""Submitting: one job or many, now or later, once for each key."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.ledgers.conformance.rig import SUBMITTER, Rig, actor, answer_of, claimed_ids
from trellis.engine.errors import IdReserved, NotAllowed, OptionInvalid, QueueFull, UnknownLifecycle
from trellis.engine.job_batches import NewBatch
from trellis.engine.jobs import AlikeJobs, JobId, Mismatch, NewJob, Priority, Submitted
from trellis.engine.records import JobFilter, JobPlace
from trellis.engine.uniqueness import UniqueRule
from trellis.lifecycles import LIFECYCLES, Role, Trigger

BOUND = 100
"""How many may wait where many come at once (D25); twice as many come."""


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-1", "DJ-13", "DJ-15", "D5", "D48")
async def test_a_submitted_job_is_in_its_first_state_with_one_event(rig: Rig):
    before = await rig.ledger.now()
    job_id = await rig.submit_one(payload=b'{"n": 7}', correlation_id="order-7", trace="00-ab-cd-01", parent_id=None)
    job = await rig.job(job_id)
    assert (job.state, job.place, job.version, job.epoch) == ("queued", JobPlace.READY, 1, 0)
    assert (job.generation, job.attempt, job.deaths, job.payload) == (0, 0, 0, b'{"n": 7}')
    assert (job.correlation_id, job.trace, job.created_at) == ("order-7", "00-ab-cd-01", before)
    assert (job.owner, job.lease_expires_at, job.cancel_requested) == (None, None, False)
    (event,) = await rig.ledger.events(job_id)
    assert (event.id, event.type, event.version, event.source, event.target) == (
        f"{job_id}-1",
        "job_queued",
        1,
        None,
        "queued",
    )
    assert (event.role, event.actor, event.correlation_id, event.ts) == (
        Role.SUBMITTER,
        SUBMITTER.name,
        "order-7",
        before,
    )


@pytest.mark.requirement("DJ-13")
async def test_correlation_defaults_to_the_job_itself(rig: Rig):
    job_id = await rig.submit_one()
    assert (await rig.job(job_id)).correlation_id == job_id
    assert (await rig.last_event(job_id)).correlation_id == job_id


async def test_parent_and_trace_reach_the_holder(rig: Rig):
    parent = await rig.submit_one(type="parent")
    child = await rig.submit_one(parent_id=parent, trace="trace-1", correlation_id="c-1", payload=b'["x"]')
    claimed = await rig.claim_one()
    assert (claimed.lease.job_id, claimed.parent_id, claimed.trace) == (child, parent, "trace-1")
    assert (claimed.correlation_id, claimed.payload, claimed.type) == ("c-1", b'["x"]', "work")


async def test_a_thousand_jobs_go_in_with_one_call(rig: Rig):
    jobs = await rig.submit(1_000)
    assert len(set(jobs)) == 1_000
    (queue,) = await rig.ledger.queues()
    assert (queue.type, queue.ready, queue.scheduled, queue.held) == ("work", 1_000, 0, 0)


async def test_many_jobs_of_one_call_keep_their_order(rig: Rig):
    jobs = await rig.submit(50)
    assert claimed_ids(await rig.claim(50)) == jobs


async def test_submit_of_no_jobs_is_accepted(rig: Rig):
    assert await rig.ledger.submit(SUBMITTER, []) == []


@pytest.mark.parametrize("how", ["delay_s", "run_at"])
async def test_a_delayed_job_rests_until_it_is_due(rig: Rig, how: str):
    at = await rig.ledger.now() + timedelta(seconds=20)
    job_id = await rig.submit_one(**({"delay_s": 20.0} if how == "delay_s" else {"run_at": at}))
    job = await rig.job(job_id)
    assert (job.place, job.due_at) == (JobPlace.SCHEDULED, at)
    await rig.pass_time(19)
    assert await rig.claim() == []
    await rig.pass_time(1)
    assert claimed_ids(await rig.claim()) == [job_id]
    assert await rig.event_types(job_id) == ["job_queued", "job_claimed", "job_started"]


async def test_run_at_in_the_past_means_now(rig: Rig):
    job_id = await rig.submit_one(run_at=await rig.ledger.now() - timedelta(days=1))
    assert claimed_ids(await rig.claim()) == [job_id]


async def test_a_delayed_claimable_job_becomes_ready_without_an_event(rig: Rig):
    job_id = await rig.submit_one(delay_s=5.0)
    reports = await rig.pass_time(5)
    assert sum(report.due for report in reports) == 1
    job = await rig.job(job_id)
    assert (job.place, job.version, job.due_at) == (JobPlace.READY, 1, None)


@pytest.mark.parametrize("lifecycle", sorted(LIFECYCLES))
@pytest.mark.requirement("JQ-6", "RUN-1", "BUS-1", "JQ-2")
async def test_only_the_declared_roles_may_submit(rig: Rig, lifecycle: str):
    declared = LIFECYCLES[lifecycle].pull(None, Trigger.SUBMIT)
    assert declared is not None
    for role in Role:
        job = rig.new_job(lifecycle=lifecycle)
        if role in declared.actors:
            assert await rig.offer(job, actor(role)) == Submitted(job_id=job.job_id, created=True)
            assert await rig.state(job.job_id) == declared.target
        else:
            with pytest.raises(NotAllowed) as refused:
                await rig.offer(job, actor(role))
            assert refused.value.data["role"] == role
            assert await rig.ledger.job(job.job_id) is None


async def test_an_unknown_lifecycle_rolls_back_the_whole_submit(rig: Rig):
    good, bad = rig.new_job(), rig.new_job(lifecycle="no-such")
    with pytest.raises(UnknownLifecycle) as refused:
        await rig.ledger.submit(SUBMITTER, [good, bad])
    assert refused.value.data["name"] == "no-such"
    assert await rig.ledger.job(good.job_id) is None


@pytest.mark.requirement("DJ-5", "DJ-21")
@pytest.mark.oldest_server
async def test_the_same_key_and_request_answers_with_the_first_job(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"same")
    again = rig.new_job(idempotency_key="k", fingerprint=b"same")
    assert await rig.offer(first) == Submitted(job_id=first.job_id, created=True)
    assert await rig.offer(again) == Submitted(job_id=first.job_id, created=False)
    assert await rig.ledger.job(again.job_id) is None
    assert len(await rig.ledger.events(first.job_id)) == 1


@pytest.mark.requirement("DJ-5")
async def test_the_same_key_with_another_request_is_refused(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"one")
    other = rig.new_job(idempotency_key="k", fingerprint=b"two")
    await rig.offer(first)
    before = await rig.snapshot(first.job_id)
    assert await rig.offer(other) == Mismatch(key="k", job_id=first.job_id)
    assert await rig.ledger.job(other.job_id) is None
    assert await rig.snapshot(first.job_id) == before


@pytest.mark.requirement("DJ-5")
async def test_job_of_an_idempotency_key_is_found_without_a_submit(rig: Rig):
    first = rig.new_job(idempotency_key="k", idempotency_scope="s", fingerprint=b"one")
    assert await rig.ledger.find_by_idempotency_key("s", "k", b"one") is None
    await rig.offer(first)
    assert await rig.ledger.find_by_idempotency_key("s", "k", b"one") == Submitted(job_id=first.job_id, created=False)
    assert await rig.ledger.find_by_idempotency_key("s", "k", b"two") == Mismatch(key="k", job_id=first.job_id)
    assert await rig.ledger.find_by_idempotency_key("", "k", b"one") is None
    assert len(await rig.ledger.events(first.job_id)) == 1


@pytest.mark.requirement("DJ-5")
async def test_a_mismatch_leaves_its_neighbours_alone(rig: Rig):
    await rig.offer(rig.new_job(idempotency_key="k", fingerprint=b"one"))
    jobs = [rig.new_job(), rig.new_job(idempotency_key="k", fingerprint=b"two"), rig.new_job()]
    answers = await rig.ledger.submit(SUBMITTER, jobs)
    assert [type(answer) for answer in answers] == [Submitted, Mismatch, Submitted]
    assert [await rig.ledger.job(job.job_id) is not None for job in jobs] == [True, False, True]


@pytest.mark.requirement("DJ-5")
async def test_a_key_counts_in_its_scope_only(rig: Rig):
    jobs = [rig.new_job(idempotency_key="k", idempotency_scope=scope, fingerprint=b"x") for scope in ("a", "b", "")]
    assert [answer.created for answer in await rig.ledger.submit(SUBMITTER, jobs) if isinstance(answer, Submitted)] == [
        True,
        True,
        True,
    ]
    again = rig.new_job(idempotency_key="k", idempotency_scope="a", fingerprint=b"x")
    assert await rig.offer(again) == Submitted(job_id=jobs[0].job_id, created=False)


@pytest.mark.requirement("DJ-5")
@pytest.mark.parametrize("scope", ["job_id", "key:", "key:job_id"])
async def test_no_idempotency_scope_of_a_caller_collides_with_chosen_job_ids(rig: Rig, scope: str):
    given = rig.new_job(id_is_given=True, fingerprint=b"one")
    keyed = rig.new_job(idempotency_key=given.job_id, idempotency_scope=scope, fingerprint=b"two")
    assert await rig.offer(given) == Submitted(job_id=given.job_id, created=True)
    assert await rig.offer(keyed) == Submitted(job_id=keyed.job_id, created=True)
    later = rig.new_job(id_is_given=True, fingerprint=b"three")
    taken = rig.new_job(idempotency_key=later.job_id, idempotency_scope=scope, fingerprint=b"four")
    answers = await rig.ledger.submit(SUBMITTER, [taken, later, given, keyed])
    assert [answer.created for answer in answers if isinstance(answer, Submitted)] == [True, True, False, False]


@pytest.mark.requirement("DJ-5")
async def test_the_same_key_twice_in_one_call_makes_one_job(rig: Rig):
    jobs = [rig.new_job(idempotency_key="k", fingerprint=b"x") for _ in range(3)]
    answers = await rig.ledger.submit(SUBMITTER, jobs)
    assert answers == [
        Submitted(job_id=jobs[0].job_id, created=True),
        Submitted(job_id=jobs[0].job_id, created=False),
        Submitted(job_id=jobs[0].job_id, created=False),
    ]


@pytest.mark.requirement("DJ-5")
@pytest.mark.parametrize("changes", [{}, {"payload": b"2"}, {"delay_s": 60.0}, {"unique": UniqueRule(key="u")}])
async def test_a_generated_id_twice_in_one_call_is_refused_and_nothing_is_submitted(rig: Rig, changes: dict[str, Any]):
    first, other = rig.new_job(payload=b"1"), rig.new_job()
    with pytest.raises(OptionInvalid, match=f"{first.job_id}.* another id for each job"):
        await rig.ledger.submit(SUBMITTER, [first, other, replace(first, **changes)])
    with pytest.raises(OptionInvalid, match="another id for each job"):
        await rig.ledger.submit_batch(SUBMITTER, NewBatch(completion=other, members=(first, replace(first, **changes))))
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == ()


@pytest.mark.requirement("DJ-5")
@pytest.mark.oldest_server
async def test_a_hundred_concurrent_submits_of_one_key_make_one_job(rig: Rig):
    ledgers = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    jobs = [rig.new_job(idempotency_key="k", fingerprint=b"x") for _ in range(100)]
    answers = await asyncio.gather(*(ledgers[i % 4].submit(SUBMITTER, [job]) for i, job in enumerate(jobs)))
    made = Counter(answer.created for (answer,) in answers if isinstance(answer, Submitted))
    assert made == {True: 1, False: 99}
    assert len({answer.job_id for (answer,) in answers}) == 1
    assert len((await rig.ledger.jobs(JobFilter(), limit=200)).jobs) == 1


@pytest.mark.requirement("DJ-5")
async def test_concurrent_submits_of_crossed_keys_all_answer(rig: Rig):
    """Two calls that hold each other's keys in opposite order must not end each other."""
    ledgers = [rig.ledger, await rig.open_another()]

    async def both(ledger, keys):
        jobs = [rig.new_job(idempotency_key=key, fingerprint=b"x") for key in keys]
        return await ledger.submit(SUBMITTER, jobs)

    rounds = [(f"a{i}", f"b{i}") for i in range(20)]
    answers = await asyncio.gather(
        *(both(ledgers[0], keys) for keys in rounds), *(both(ledgers[1], keys[::-1]) for keys in rounds)
    )
    created = [answer.job_id for call in answers for answer in call if isinstance(answer, Submitted) and answer.created]
    assert len(created) == len(set(created)) == 40


@pytest.mark.requirement("BUS-11", "DJ-21", "D48")
async def test_a_given_id_submitted_again_is_the_existing_job(rig: Rig):
    def same(fingerprint: bytes):
        return rig.new_job(job_id=JobId("mine"), id_is_given=True, fingerprint=fingerprint)

    assert await rig.offer(same(b"x")) == Submitted(job_id=JobId("mine"), created=True)
    assert await rig.offer(same(b"x")) == Submitted(job_id=JobId("mine"), created=False)
    assert await rig.offer(same(b"y")) == Mismatch(key="mine", job_id=JobId("mine"))
    assert len(await rig.ledger.events(JobId("mine"))) == 1


@pytest.mark.requirement("DJ-2")
async def test_given_ids_of_calls_that_meet_are_each_submitted_once(rig: Rig):
    def given(n: int, fingerprint: bytes = b"x") -> NewJob:
        job_id = JobId(f"mine-{n}")
        return rig.new_job(
            job_id=job_id, id_is_given=True, fingerprint=fingerprint, payload=b"%d" % n, lifecycle="bus-job"
        )

    gateway, new = actor(Role.GATEWAY), [given(n) for n in range(1, 9)]
    assert await rig.offer(given(0), by=gateway) == Submitted(job_id=JobId("mine-0"), created=True)
    jobs = [given(0), *new, given(1), given(2, b"other")]
    answers = await asyncio.gather(*(rig.ledger.submit(gateway, [job]) for job in jobs))
    created = {job.job_id: Submitted(job_id=job.job_id, created=True) for job in new}
    assert answers == [
        [Submitted(job_id=JobId("mine-0"), created=False)],
        *([created[job.job_id]] for job in new),
        [Submitted(job_id=JobId("mine-1"), created=False)],
        [Mismatch(key="mine-2", job_id=JobId("mine-2"))],
    ]
    for n in range(9):
        job, events = await rig.job(JobId(f"mine-{n}")), await rig.ledger.events(JobId(f"mine-{n}"))
        assert (job.payload, job.state, job.place, job.due_at) == (b"%d" % n, "PENDING", JobPlace.SCHEDULED, None)
        assert [event.type for event in events] == ["job_accepted"]
    again = await asyncio.gather(*(rig.ledger.submit(gateway, [job]) for job in new))
    assert again == [[Submitted(job_id=job.job_id, created=False)] for job in new]


@pytest.mark.requirement("BUS-11")
async def test_ids_are_unique_over_all_lifecycles(rig: Rig):
    await rig.offer(rig.new_job(job_id=JobId("mine"), id_is_given=True, fingerprint=b"x"))
    other = rig.new_job(job_id=JobId("mine"), id_is_given=True, lifecycle="bus-job", fingerprint=b"y")
    assert await rig.offer(other) == Mismatch(key="mine", job_id=JobId("mine"))
    assert (await rig.job(JobId("mine"))).lifecycle == "leased-job"


@pytest.mark.requirement("DJ-21", "BUS-11")
async def test_a_submit_asked_again_after_a_lost_answer_makes_no_second_job(rig: Rig):
    job = rig.new_job(payload=b"1")
    await rig.offer(job)
    before = await rig.snapshot(job.job_id)
    again = await rig.offer(job)
    assert isinstance(again, Submitted)
    assert again.job_id == job.job_id
    assert await rig.snapshot(job.job_id) == before


async def test_a_made_id_cannot_take_over_a_job(rig: Rig):
    """A made id never repeats; when it does all the same, nothing of the first job may change."""
    first = await rig.submit_one(payload=b"1", fingerprint=b"1")
    before = await rig.snapshot(first)
    await answer_of(rig.offer(rig.new_job(job_id=first, payload=b"2", fingerprint=b"2")))
    assert await rig.snapshot(first) == before
    assert claimed_ids(await rig.claim(5)) == [first]


async def test_a_key_and_a_given_id_hold_together(rig: Rig):
    def asked(job_id: str, key: str):
        return rig.new_job(job_id=JobId(job_id), id_is_given=True, idempotency_key=key, fingerprint=b"x")

    assert await rig.offer(asked("one", "k")) == Submitted(job_id=JobId("one"), created=True)
    assert await rig.offer(asked("one", "k")) == Submitted(job_id=JobId("one"), created=False)


def _both(rig: Rig, job_id: str, key: str | None, fingerprint: bytes = b"x") -> NewJob:
    return rig.new_job(job_id=JobId(job_id), id_is_given=True, idempotency_key=key, fingerprint=fingerprint)


@pytest.mark.requirement("DJ-5")
async def test_idempotency_key_is_checked_before_a_given_id_and_both_return_the_job(rig: Rig):
    there = Submitted(job_id=JobId("one"), created=False)
    assert await rig.offer(_both(rig, "one", "k")) == Submitted(job_id=JobId("one"), created=True)
    assert await rig.offer(_both(rig, "two", "k")) == there, "the key was used for the job one"
    assert await rig.offer(_both(rig, "one", None)) == there, "the id is a key, too"
    assert await rig.offer(_both(rig, "one", "k", b"y")) == Mismatch(key="k", job_id=JobId("one"))
    assert await rig.offer(_both(rig, "one", "free", b"y")) == Mismatch(key="one", job_id=JobId("one"))
    assert await rig.ledger.find_by_idempotency_key("", "free", b"y") is None, "nothing was written for a refusal"
    assert await rig.ledger.job(JobId("two")) is None


@pytest.mark.requirement("DJ-5")
@pytest.mark.parametrize("chosen", [False, True], ids=["a made id", "a chosen id"])
@pytest.mark.parametrize("given", [False, True], ids=["asked as made", "asked as chosen"])
async def test_free_idempotency_key_with_a_known_id_returns_the_job_of_the_same_request(
    rig: Rig, chosen: bool, given: bool
):
    """What a made id was asked for is in the job itself; a chosen one has a fingerprint."""

    def asked(key: str, payload: bytes, id_is_given: bool):
        options = {"idempotency_key": key, "payload": payload, "fingerprint": payload}
        return rig.new_job(job_id=JobId("one"), id_is_given=id_is_given, **options)

    there = Submitted(job_id=JobId("one"), created=False)
    assert await rig.offer(asked("k1", b"1", chosen)) == Submitted(job_id=JobId("one"), created=True)
    await rig.advance(1)
    assert await rig.offer(asked("k2", b"1", given)) == there
    assert await rig.ledger.find_by_idempotency_key("", "k2", b"1") == there, "the key means the job from then on"
    assert await rig.offer(asked("k3", b"2", given)) == Mismatch(key="one", job_id=JobId("one"))
    assert await rig.ledger.find_by_idempotency_key("", "k3", b"2") is None, "nothing was written for a refusal"
    assert len(await rig.ledger.events(JobId("one"))) == 1


@pytest.mark.requirement("DJ-5")
async def test_free_idempotency_key_is_bound_to_an_existing_job_without_changing_it(rig: Rig):
    await rig.offer(_both(rig, "one", "k"))
    events = await rig.ledger.events(JobId("one"))
    before = await rig.ledger.recorded(events)
    await rig.advance(1)
    assert await rig.offer(_both(rig, "one", "late")) == Submitted(job_id=JobId("one"), created=False)
    assert await rig.offer(_both(rig, "two", "late", b"y")) == Mismatch(key="late", job_id=JobId("one"))
    assert await rig.ledger.recorded(events) == before
    first, second = await rig.ledger.submit(SUBMITTER, [_both(rig, "three", "k3"), _both(rig, "three", "k4")])
    assert [first, second] == [Submitted(job_id=JobId("three"), created=made) for made in (True, False)]
    assert await rig.offer(_both(rig, "four", "k4", b"y")) == Mismatch(key="k4", job_id=JobId("three"))


# --- how many may wait -----------------------------------------------------------------------------------------------


def _bounded(rig: Rig, most: int, **options) -> NewJob:
    return rig.new_job(concurrency_key="k", waiting_max=most, **options)


@pytest.mark.requirement("D25")
async def test_a_full_queue_refuses_and_nothing_is_written(rig: Rig):
    for _ in range(2):
        await rig.offer(_bounded(rig, 2))
    refused = _bounded(rig, 2, idempotency_key="again", fingerprint=b"x")
    with pytest.raises(QueueFull) as full:
        await rig.offer(refused)
    assert full.value.data == {"key": "k", "waiting": 2, "limit": 2}
    assert await rig.ledger.job(refused.job_id) is None
    assert await rig.ledger.find_by_idempotency_key("", "again", b"x") is None
    other = rig.new_job(concurrency_key="other", waiting_max=2)
    assert await rig.offer(other) == Submitted(job_id=other.job_id, created=True)


@pytest.mark.requirement("D25")
async def test_leased_and_ended_jobs_free_room_in_a_backlog_limit_and_delayed_jobs_do_not(rig: Rig):
    first, delayed = _bounded(rig, 2), _bounded(rig, 2, delay_s=1_000.0)
    for job in (first, delayed):
        await rig.offer(job)
    with pytest.raises(QueueFull):
        await rig.offer(_bounded(rig, 2))
    await rig.claim_one()
    await rig.offer(_bounded(rig, 2))
    with pytest.raises(QueueFull):
        await rig.offer(_bounded(rig, 2))
    await rig.cancel(delayed.job_id)
    await rig.offer(_bounded(rig, 2))


@pytest.mark.requirement("D25", "DJ-21")
async def test_a_submit_that_was_taken_is_answered_also_when_the_queue_is_full_since(rig: Rig):
    keyed, given = _bounded(rig, 2, idempotency_key="k"), _bounded(rig, 2, id_is_given=True)
    for job in (keyed, given):
        assert await rig.offer(job) == Submitted(job_id=job.job_id, created=True)
    for job in (keyed, given):
        again = await rig.offer(job)
        assert isinstance(again, Submitted)
        assert again.job_id == job.job_id


@pytest.mark.requirement("D25")
async def test_concurrent_submits_respect_the_waiting_limit(rig: Rig):
    views = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    actors = [actor(Role.SUBMITTER, f"submitter-{number}") for number in range(3)]
    answers = await asyncio.gather(
        *(
            answer_of(views[number % 4].submit(actors[number % 3], [_bounded(rig, BOUND)]))
            for number in range(2 * BOUND)
        )
    )
    assert sum(isinstance(answer, QueueFull) for answer in answers) == BOUND
    found = await rig.ledger.jobs(JobFilter(concurrency_key="k"), limit=500)
    assert len(found.jobs) == BOUND


@pytest.mark.requirement("DJ-5")
async def test_a_key_outlives_its_finished_job(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"x")
    await rig.offer(first)
    claimed = await rig.claim_one()
    await rig.pull(claimed, Trigger.COMPLETE)
    again = await rig.offer(rig.new_job(idempotency_key="k", fingerprint=b"x"))
    assert again == Submitted(job_id=first.job_id, created=False)


async def test_every_submitted_field_can_be_read_back(rig: Rig):
    parent = await rig.submit_one(type="other")
    job_id = await rig.submit_one(
        priority=Priority.INTERACTIVE,
        max_attempts=3,
        max_deaths=1,
        deadline_s=90.0,
        concurrency_key="user:1",
        parent_id=parent,
        compensates=None,
    )
    job = await rig.job(job_id)
    assert (job.priority, job.max_attempts, job.concurrency_key, job.parent_id) == (
        Priority.INTERACTIVE,
        3,
        "user:1",
        parent,
    )
    assert job.deadline_at == job.created_at + timedelta(seconds=90)


@pytest.mark.parametrize("payload", [b"null", b'"\\u0000 \xc3\xa9 \xf0\x9f\x8c\xb1"', b'{"a": [1, 2.5, {}]}', b" [1 ]"])
async def test_payload_bytes_come_back_as_they_went_in(rig: Rig, payload: bytes):
    job_id = await rig.submit_one(payload=payload)
    assert (await rig.job(job_id)).payload == payload
    assert (await rig.claim_one()).payload == payload


@pytest.mark.oldest_server
async def test_each_job_of_a_call_gets_its_own_payload_whatever_its_length_and_bytes(rig: Rig):
    payloads = [b"1", b"", b'"\xc3\xa9"', b"[1,\n2]", b"\x00\xff", b"null", b" "]
    jobs = AlikeJobs(rig.new_job(), [rig.new_id() for _ in payloads], payloads)
    assert [one.job_id for one in await rig.ledger.submit(SUBMITTER, jobs)] == jobs.ids
    assert [(await rig.job(job_id)).payload for job_id in jobs.ids] == payloads
    assert [claimed.payload for claimed in await rig.claim(10)] == payloads


async def test_ids_with_a_space_in_them_stay_whole(rig: Rig):
    ids = [JobId("a b"), JobId("c")]
    await rig.ledger.submit(SUBMITTER, AlikeJobs(rig.new_job(), ids, [b"1", b"2"]))
    await rig.ledger.submit(SUBMITTER, [rig.new_job(job_id="d e", payload=b"3")])
    assert [(await rig.job(JobId(one))).payload for one in ("a b", "c", "d e")] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("reserved", ["x.c", "x@1"])
async def test_jobs_of_a_call_are_refused_together_if_one_id_is_reserved(rig: Rig, reserved: str):
    ids = [JobId("a"), JobId(reserved), JobId("b")]
    with pytest.raises(IdReserved, match=reserved):
        await rig.ledger.submit(SUBMITTER, AlikeJobs(rig.new_job(), ids, [b"1", b"2", b"3"]))
    assert await rig.ledger.job(JobId("a")) is None


async def test_calls_that_meet_are_submitted_together_each_with_its_own_jobs(rig: Rig):
    common = rig.new_job()
    calls = [AlikeJobs(common, [JobId(f"{n}-1"), JobId(f"{n}-2")], [b"%d1" % n, b"%d2" % n]) for n in range(1, 9)]
    answers = await asyncio.gather(*(rig.ledger.submit(SUBMITTER, jobs) for jobs in calls))
    assert [[one.job_id for one in call] for call in answers] == [jobs.ids for jobs in calls]
    for jobs in calls:
        assert [(await rig.job(job_id)).payload for job_id in jobs.ids] == jobs.payloads


async def test_a_payload_of_one_mebibyte_fits(rig: Rig):
    payload = b'"' + b"x" * (1024 * 1024 - 2) + b'"'
    await rig.submit_one(payload=payload)
    assert (await rig.claim_one()).payload == payload


async def test_submitted_job_is_visible_to_another_connection_at_once(rig: Rig):
    another = await rig.open_another()
    job_id = await rig.submit_one()
    assert await another.job(job_id) == await rig.ledger.job(job_id)
    assert claimed_ids(await rig.claim(ledger=another)) == [job_id]


async def test_roles_of_other_lifecycles_submit_through_the_same_verb(rig: Rig):
    run = await rig.submit_one(lifecycle="run", by=actor(Role.GATEWAY), type="agent.run")
    job = await rig.job(run)
    assert (job.state, job.place, job.due_at) == ("requested", JobPlace.SCHEDULED, None)


async def test_a_deadline_of_no_seconds_is_a_deadline_for_every_job_of_a_call(rig: Rig):
    for job_id in await rig.submit(2, deadline_s=0.0):
        job = await rig.job(job_id)
        assert job.deadline_at == job.created_at


@pytest.mark.parametrize("many", [1, 3])
async def test_a_generated_id_that_exists_is_compared_with_the_job_that_has_it(rig: Rig, many: int):
    """The jobs between them are new: one id that exists does not change the answer of the others."""
    first = [NewJob(job_id=JobId(f"generated-{n}"), type="t", payload=b'{"n": %d}' % n) for n in range(many)]
    assert await rig.ledger.submit(SUBMITTER, first) == [Submitted(job_id=one.job_id, created=True) for one in first]
    new = [replace(one, job_id=JobId(f"new-{one.job_id}"), correlation_id="c") for one in first] if many > 1 else []
    again = await rig.ledger.submit(SUBMITTER, [*first, *new])
    assert again[:many] == [Submitted(job_id=one.job_id, created=False) for one in first]
    assert again[many:] == [Submitted(job_id=one.job_id, created=True) for one in new]
    other = await rig.ledger.submit(SUBMITTER, [replace(one, payload=b'{"n": "other"}') for one in first])
    assert other == [Mismatch(key=one.job_id, job_id=one.job_id) for one in first]
    assert [(await rig.job(one.job_id)).payload for one in first] == [one.payload for one in first]

"""Retention: ended work leaves in small batches, whole, and nothing else does."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, Rig, actor
from trellis.engine.jobs import Advance, JobId, Submitted, Subscription
from trellis.engine.records import Event, JobFilter, RetentionOptions, RetentionReport
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.leased_job import LEASED_JOB

DAY_S = 24 * 3600.0


async def _finished(rig: Rig, n: int = 1, **options) -> list[JobId]:
    jobs = await rig.submit(n, **options)
    for held in await rig.claim(n):
        await rig.ledger.journal(held.lease, "entry", b"1")
        await rig.ledger.save_checkpoint(held.lease, b"1")
        await rig.ledger.signal(held.lease, [("job_log", b"1")])
        await rig.pull(held, Trigger.COMPLETE, result=b'"done"')
    return jobs


async def _retain_all(rig: Rig, options: RetentionOptions) -> list[int]:
    """Pass after pass until one says that there is no more; how many jobs each removed."""
    removed = []
    for _ in range(100):
        report = await rig.ledger.retain(options)
        removed.append(report.jobs)
        if not report.more:
            return removed
    pytest.fail("retention never ends")


@pytest.mark.oldest_server
@pytest.mark.requirement("D61")
async def test_an_ended_job_is_removed_with_all_its_rows_after_its_retention_time(rig: Rig):
    (job_id,) = await _finished(rig)
    await rig.advance(10 * DAY_S)
    assert (await rig.ledger.retain(RetentionOptions(ended_s=11 * DAY_S))).jobs == 0
    assert await rig.ledger.job(job_id) is not None
    await rig.advance(2 * DAY_S)
    report = await rig.ledger.retain(RetentionOptions(ended_s=11 * DAY_S))
    assert report.jobs == 1
    assert await rig.ledger.job(job_id) is None
    assert await rig.ledger.events(job_id) == []
    assert await rig.ledger.result(job_id) is None
    assert await rig.ledger.read_journal(job_id) == {}
    assert await rig.ledger.signals(job_id, limit=10) == []
    assert (await rig.ledger.jobs(JobFilter(), limit=10)).jobs == ()


async def test_job_that_has_not_ended_is_retained(rig: Rig):
    waiting = await rig.submit_one(type="later")
    held = await rig.running()
    resting = await rig.submit_one(delay_s=1000 * DAY_S / 3)
    await rig.advance(365 * DAY_S)
    assert (await rig.ledger.retain(RetentionOptions(ended_s=1.0, testing=True))).jobs == 0
    for job_id in (waiting, held.lease.job_id, resting):
        assert await rig.ledger.job(job_id) is not None
        assert await rig.ledger.events(job_id)


async def test_retention_removes_ended_jobs_in_batches_and_reports_more(rig: Rig):
    await _finished(rig, 25)
    await rig.advance(2 * DAY_S)
    removed = await _retain_all(rig, RetentionOptions(ended_s=DAY_S, batch=10))
    assert sum(removed) == 25
    assert max(removed) <= 10
    assert (await rig.ledger.jobs(JobFilter(), limit=100)).jobs == ()


KEPT = ("leased-job", "dead_lettered")


@pytest.mark.requirement("D61")
async def test_a_dead_letter_stays_until_a_setting_names_its_state_and_a_failure_does_not(rig: Rig):
    rejected, failed = await rig.running(), await rig.running()
    await rig.pull(rejected, "reject", death=DEATH)
    await rig.pull(failed, Trigger.FAIL)
    await rig.advance(2 * DAY_S)
    await _retain_all(rig, RetentionOptions(ended_s=DAY_S))
    assert len(await rig.ledger.dead_letters(JobFilter(), limit=10)) == 1, "a person decides about it"
    assert await rig.ledger.job(failed.lease.job_id) is None
    await rig.advance(400 * DAY_S)
    await _retain_all(rig, RetentionOptions(ended_s=DAY_S, states_s={KEPT: 500 * DAY_S}))
    assert len(await rig.ledger.dead_letters(JobFilter(), limit=10)) == 1, "a setting with another time"
    await rig.advance(2 * DAY_S)
    await _retain_all(rig, RetentionOptions(ended_s=None, states_s={KEPT: DAY_S}))
    assert await rig.ledger.dead_letters(JobFilter(), limit=10) == []


@pytest.mark.requirement("DJ-5", "D27")
async def test_a_key_is_kept_at_least_a_day_and_leaves_with_its_job(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"x")
    await rig.offer(first)
    held = await rig.claim_one()
    await rig.pull(held, Trigger.COMPLETE)
    await rig.advance(DAY_S - 60)
    await rig.ledger.retain(RetentionOptions(ended_s=1.0, testing=True))
    again = await rig.offer(rig.new_job(idempotency_key="k", fingerprint=b"x"))
    assert again == Submitted(job_id=first.job_id, created=False), "the promise of 24 hours"
    await rig.advance(40 * DAY_S)
    await _retain_all(rig, RetentionOptions())
    fresh = rig.new_job(idempotency_key="k", fingerprint=b"y")
    assert await rig.offer(fresh) == Submitted(job_id=fresh.job_id, created=True)


@pytest.mark.requirement("DJ-5", "D27", "D61")
async def test_a_key_that_came_late_keeps_its_job_a_day_more_and_no_other(rig: Rig):
    def asked(key: str | None):
        return rig.new_job(job_id=JobId("first"), id_is_given=True, idempotency_key=key, fingerprint=b"x")

    assert await rig.offer(asked(None)) == Submitted(job_id=JobId("first"), created=True)
    await rig.pull(await rig.claim_one(), Trigger.COMPLETE)
    await _finished(rig, 2)
    await rig.advance(200 * DAY_S)
    assert await rig.offer(asked("k-1")) == Submitted(job_id=JobId("first"), created=False)
    assert sum(await _retain_all(rig, RetentionOptions())) == 2, "whoever asks for one job again keeps no other"
    await rig.advance(0.9 * DAY_S)
    assert await rig.offer(asked("k-2")) == Submitted(job_id=JobId("first"), created=False)
    await rig.advance(0.9 * DAY_S)
    assert sum(await _retain_all(rig, RetentionOptions())) == 0, "the promise of 24 hours"
    await rig.advance(0.2 * DAY_S)
    assert sum(await _retain_all(rig, RetentionOptions())) == 1
    assert await rig.offer(asked("k-2")) == Submitted(job_id=JobId("first"), created=True)


@pytest.mark.requirement("D61")
async def test_a_job_kept_for_its_key_that_lives_again_has_its_time_anew(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"x")
    await rig.offer(first)
    await rig.pull(await rig.claim_one(), Trigger.FAIL)
    await rig.advance(60)
    assert (await rig.ledger.retain(RetentionOptions(ended_s=1.0, testing=True))).jobs == 0
    await rig.ledger.requeue(ADMIN, [first.job_id], rig.request(), limit=1, cause=None)
    await rig.advance(2 * DAY_S)
    assert (await rig.ledger.retain(RetentionOptions(ended_s=1.0, testing=True))).jobs == 0
    await rig.pull(await rig.claim_one(), Trigger.COMPLETE)
    assert sum(await _retain_all(rig, RetentionOptions(ended_s=5.0, testing=True))) == 0
    await rig.advance(6)
    assert sum(await _retain_all(rig, RetentionOptions(ended_s=5.0, testing=True))) == 1


async def test_the_feed_goes_on_after_retention(rig: Rig):
    await _finished(rig, 3)
    page = await rig.ledger.feed(None, limit=2)
    await rig.advance(2 * DAY_S)
    await _retain_all(rig, RetentionOptions(ended_s=DAY_S))
    (job_id,) = await rig.submit(1)
    position, seen = page.position, []
    while True:
        page = await rig.ledger.feed(position, limit=5)
        if not page.events:
            break
        seen += page.events
        position = page.position
    assert seen[-1].job_id == job_id
    assert len({event.id for event in seen}) == len(seen)


async def test_retention_of_an_empty_ledger_removes_nothing(rig: Rig):
    report = await rig.ledger.retain(RetentionOptions())
    assert (report.jobs, report.events, report.results, report.signals, report.more) == (0, 0, 0, 0, False)


async def test_a_requeued_job_is_not_taken_for_ended(rig: Rig):
    held = await rig.running()
    await rig.pull(held, Trigger.FAIL)
    await rig.advance(2 * DAY_S)
    await rig.ledger.requeue(ADMIN, [held.lease.job_id], rig.request(), limit=1, cause=None)
    await rig.ledger.retain(RetentionOptions(ended_s=DAY_S))
    assert await rig.state(held.lease.job_id) == "queued"


# --- concurrency keys --------------------------------------------------------------------------------------------


async def _places(rig: Rig, jobs: list[JobId]) -> list[str]:
    return [(await rig.job(job_id)).place for job_id in jobs]


@pytest.mark.oldest_server
@pytest.mark.requirement("D49", "D61")
async def test_a_key_that_no_job_uses_leaves_and_takes_its_limit_with_it(rig: Rig):
    await _finished(rig, concurrency_key="user:k", concurrency_limit=2)
    await rig.advance(2 * DAY_S)
    await _retain_all(rig, RetentionOptions(ended_s=DAY_S))
    jobs = await rig.submit(2, concurrency_key="user:k", concurrency_limit=1)
    assert await _places(rig, jobs) == ["ready", "blocked"], "a new key has the limit of its first job"


@pytest.mark.requirement("D49", "D61")
@pytest.mark.parametrize("phase", ["waiting", "resting", "held", "ended"])
async def test_a_key_that_a_job_refers_to_stays(rig: Rig, phase: str):
    options = {"concurrency_key": "user:k", "concurrency_limit": 2}
    if phase == "resting":
        await rig.submit_one(delay_s=30 * DAY_S, type="other", **options)
        # The row of the key is there once something was ready under it.
        await rig.cancel(await rig.submit_one(**options))
    elif phase == "waiting":
        await rig.submit_one(type="other", **options)
    else:
        held = await rig.running(**options)
        if phase == "ended":
            await rig.pull(held, Trigger.COMPLETE)
    for _ in range(3):
        await rig.ledger.retain(RetentionOptions(ended_s=1000 * DAY_S))
    jobs = await rig.submit(3, concurrency_key="user:k", concurrency_limit=3)
    taken = phase in {"waiting", "held"}
    assert (await _places(rig, jobs)).count("ready") == 2 - taken, "the limit of the first job holds"


@pytest.mark.requirement("D49")
async def test_a_limit_that_an_operator_set_outlives_every_job(rig: Rig):
    await rig.ledger.limit_key(ADMIN, "user:k", 3)
    for _ in range(2):
        await rig.ledger.retain(RetentionOptions(ended_s=1.0, testing=True))
    jobs = await rig.submit(4, concurrency_key="user:k", concurrency_limit=1)
    assert (await _places(rig, jobs)).count("ready") == 3


@pytest.mark.requirement("D49", "D61")
async def test_retention_removes_unused_keys_in_batches(rig: Rig):
    for number in range(30):
        key = {"concurrency_key": f"user:{number}", "concurrency_limit": 2}
        if number % 3 == 0:
            await rig.submit_one(type="stays", **key)
        else:
            await _finished(rig, **key)
    await rig.advance(2 * DAY_S)
    for _ in range(40):
        await rig.ledger.retain(RetentionOptions(ended_s=DAY_S, batch=5))
    for number in range(30):
        places = await _places(rig, await rig.submit(2, concurrency_key=f"user:{number}", concurrency_limit=1))
        assert places.count("ready") == 1, "of a limit of two one is taken; of a new limit of one none was"


@pytest.mark.only("postgres")
async def test_one_retention_pass_runs_at_a_time(rig: Rig):
    """A second one would only wait for the first: it comes back at once, with nothing done."""
    await _finished(rig)
    await rig.advance(2 * DAY_S)
    connection = await asyncpg.connect(rig.app_url, server_settings={"search_path": "trellis"})
    try:
        async with connection.transaction():
            number = await connection.fetchval("select register_actor('other', $1::smallint)", Role.SWEEPER.code)
            ages = json.dumps(
                [{"code": 16 * LEASED_JOB.code + LEASED_JOB.code_of("succeeded"), "keep_s": DAY_S, "is_set": False}]
            )
            asked = (number, ages, DAY_S, DAY_S, DAY_S, 10)
            first = await connection.fetchrow("select * from retain($1, $2, $3, $4, $5, $6)", *asked)
            async with asyncio.timeout(5):
                second = await rig.ledger.retain(RetentionOptions(ended_s=DAY_S))
        assert first is not None
        assert (first["jobs"], second) == (1, RetentionReport())
    finally:
        await connection.close()
    assert (await rig.ledger.jobs(JobFilter(), limit=10)).jobs == ()


# --- followers -----------------------------------------------------------------------------------------------------

PROJECTOR = actor(Role.PROJECTOR)
WEEK = RetentionOptions(ended_s=7 * DAY_S, unread_s=20 * DAY_S)


async def _following(
    rig: Rig, name: str = "publisher", position: str | None = None, *, reads: bool = True
) -> Subscription:
    following = await rig.ledger.subscribe(PROJECTOR, name, lease_s=60.0, reads=reads)
    assert following is not None
    assert await rig.ledger.ack(following, position, lease_s=60.0)
    return following


@pytest.mark.oldest_server
@pytest.mark.requirement("OBS-1", "D61")
async def test_events_that_a_follower_has_not_read_are_retained(rig: Rig):
    following = await _following(rig)
    first = await _finished(rig, 2)
    place = await rig.ledger.feed_end()
    last = await _finished(rig, 3)
    await rig.advance(10 * DAY_S)
    assert sum(await _retain_all(rig, WEEK)) == 0, "nothing of it was read"
    assert await rig.ledger.ack(following, f"{place} one,two", lease_s=60.0), "as the projector writes it"
    assert sum(await _retain_all(rig, WEEK)) == 2
    assert await _there(rig, [*first, *last]) == last
    read = [event async for event in _rest(rig, place)]
    assert {event.job_id for event in read} == set(last)
    assert len(await rig.ledger.recorded(read)) == len(read), "and all of it can be recorded"
    await rig.ledger.ack(following, await rig.ledger.feed_end(), lease_s=60.0)
    assert sum(await _retain_all(rig, WEEK)) == 3


@pytest.mark.requirement("OBS-1", "D61")
async def test_a_job_of_which_a_page_ended_in_the_middle_stays(rig: Rig):
    jobs = await rig.submit(3)
    steps = [Advance(held.lease, "running", Trigger.COMPLETE) for held in await rig.claim(3)]
    await rig.turn(*steps)
    following, position = await _following(rig), None
    await rig.advance(10 * DAY_S)
    kept = len(jobs)
    while page := await rig.ledger.feed(position, limit=1):
        if not page.events:
            break
        position = page.position
        assert await rig.ledger.ack(following, position, lease_s=60.0)
        unread = {event.job_id async for event in _rest(rig, position)}
        kept -= sum(await _retain_all(rig, WEEK))
        assert set(await _there(rig, jobs)) == unread
        assert kept == len(unread)
    assert kept == 0


@pytest.mark.requirement("D61")
async def test_retention_keeps_events_for_the_slowest_subscriber_with_a_position(rig: Rig):
    await _finished(rig, 2)
    end = await rig.ledger.feed_end()
    await _following(rig, "fast", end)
    slow = await _following(rig, "slow")
    await _following(rig, "elected-only", reads=False)
    await rig.advance(10 * DAY_S)
    assert sum(await _retain_all(rig, WEEK)) == 0
    await rig.ledger.ack(slow, "rebuilding", lease_s=60.0)
    assert sum(await _retain_all(rig, WEEK)) == 0, "a place that is no position is before everything"
    await rig.ledger.ack(slow, end, lease_s=60.0)
    assert sum(await _retain_all(rig, WEEK)) == 2


@pytest.mark.requirement("D61")
async def test_a_follower_that_never_comes_back_holds_nothing_for_ever(rig: Rig):
    await _following(rig)
    await _finished(rig, 2)
    await rig.advance(26 * DAY_S)
    assert (await rig.ledger.retain(WEEK)).jobs == 0
    await rig.advance(2 * DAY_S)
    report = await rig.ledger.retain(WEEK)
    assert (report.jobs, report.unread) == (2, 2), "and it is told that they were removed unread"


@pytest.mark.requirement("D61")
async def test_events_that_were_read_do_not_count_as_removed_unread(rig: Rig):
    await _finished(rig, 2)
    await _following(rig, position=await rig.ledger.feed_end())
    await rig.advance(100 * DAY_S)
    report = await rig.ledger.retain(WEEK)
    assert (report.jobs, report.unread) == (2, 0)


@pytest.mark.requirement("D61")
async def test_a_job_kept_for_its_key_and_ended_anew_is_kept_for_its_follower_too(rig: Rig):
    first = rig.new_job(idempotency_key="k", fingerprint=b"x")
    await rig.offer(first)
    await rig.pull(await rig.claim_one(), Trigger.FAIL)
    options = RetentionOptions(ended_s=1.0, unread_s=20 * DAY_S, testing=True)
    await rig.advance(60)
    assert (await rig.ledger.retain(options)).jobs == 0, "its key answers"
    following = await _following(rig, position=await rig.ledger.feed_end())
    await rig.ledger.requeue(ADMIN, [first.job_id], rig.request(), limit=1, cause=None)
    await rig.pull(await rig.claim_one(), Trigger.COMPLETE)
    await rig.advance(2 * DAY_S)
    assert sum(await _retain_all(rig, options)) == 0
    await rig.ledger.ack(following, await rig.ledger.feed_end(), lease_s=60.0)
    await rig.advance(2 * 3600.0)
    assert sum(await _retain_all(rig, options)) == 1


@pytest.mark.requirement("D61")
async def test_an_operator_lets_retention_go_on_without_a_follower_until_it_reads_on(rig: Rig):
    following, place = await _following(rig, "gone"), await rig.ledger.feed_end()
    await rig.ledger.ack(following, place, lease_s=60.0)
    await _finished(rig, 2)
    await rig.advance(10 * DAY_S)
    assert sum(await _retain_all(rig, WEEK)) == 0
    assert await rig.ledger.release_retention(ADMIN, "gone")
    assert await rig.ledger.release_retention(ADMIN, "gone"), "twice is once"
    assert not await rig.ledger.release_retention(ADMIN, "nobody")
    assert sum(await _retain_all(rig, WEEK)) == 2
    assert await rig.ledger.ack(following, None, lease_s=0.0), "a sign of life is no reading"
    (seen,) = await rig.ledger.followers()
    assert not seen.waits
    again = await rig.ledger.subscribe(PROJECTOR, "gone", lease_s=60.0)
    assert again is not None
    assert again.position == place, "it goes on where it stopped"
    await _finished(rig)
    await rig.advance(10 * DAY_S)
    assert sum(await _retain_all(rig, WEEK)) == 0, "and is waited for again"


async def test_followers_say_since_when_something_waits_for_them(rig: Rig):
    assert await rig.ledger.followers() == []
    following = await _following(rig, "slow")
    await _following(rig, "elected", reads=False)
    began = await rig.ledger.now()
    await rig.submit(1)
    place = await rig.ledger.feed_end()
    await rig.advance(3600.0)
    await rig.submit(1)
    await rig.ledger.feed_end()
    elected, slow = await rig.ledger.followers()
    assert (elected.name, elected.waits, elected.unread_since) == ("elected", False, None)
    assert (slow.name, slow.waits, slow.actor) == ("slow", True, PROJECTOR.name)
    assert slow.until < await rig.ledger.now()
    assert slow.unread_since is not None
    assert abs((slow.unread_since - began).total_seconds()) < 60.0
    await rig.ledger.ack(following, place, lease_s=60.0)
    slow = (await rig.ledger.followers())[1]
    assert slow.unread_since is not None
    assert (slow.unread_since - began).total_seconds() > 3000.0
    await rig.ledger.ack(following, await rig.ledger.feed_end(), lease_s=60.0)
    assert [seen.unread_since for seen in await rig.ledger.followers()] == [None, None]


async def test_a_follower_that_has_read_all_of_a_full_page_is_not_behind(rig: Rig):
    await rig.submit(3)
    await rig.ledger.feed_end()
    following = await _following(rig)
    for limit in (2, 1):
        (seen,) = await rig.ledger.followers()
        assert seen.unread_since is not None
        page = await rig.ledger.feed(following.position, limit=limit)
        following = replace(following, position=page.position)
        assert await rig.ledger.ack(following, page.position, lease_s=60.0)
    (seen,) = await rig.ledger.followers()
    assert seen.unread_since is None
    await rig.submit(1)
    await rig.ledger.feed_end()
    (seen,) = await rig.ledger.followers()
    assert seen.unread_since is not None


async def _there(rig: Rig, jobs: list[JobId]) -> list[JobId]:
    return [job_id for job_id in jobs if await rig.ledger.job(job_id) is not None]


async def _rest(rig: Rig, position: str) -> AsyncIterator[Event]:
    while (page := await rig.ledger.feed(position, limit=100)).events:
        for event in page.events:
            yield event
        position = page.position

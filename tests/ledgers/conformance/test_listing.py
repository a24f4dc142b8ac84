"""Looking: listings, pages, queues, workers, the clock."""

from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, OTHER_WORKER, WORKER, Rig
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import DeadLetterReason, JobId, ReasonCode, Stage
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import Trigger


async def _pages(rig: Rig, where: JobFilter, limit: int) -> list[list[JobId]]:
    pages, cursor = [], None
    while True:
        page = await rig.ledger.jobs(where, limit=limit, cursor=cursor)
        pages.append([job.job_id for job in page.jobs])
        cursor = page.cursor
        if cursor is None:
            return pages


async def test_a_listing_is_newest_first_and_ends(rig: Rig):
    jobs = await rig.submit(7)
    pages = await _pages(rig, JobFilter(), 3)
    assert [job for page in pages for job in page] == jobs[::-1]
    assert all(len(page) <= 3 for page in pages)


async def test_a_page_that_is_just_full_ends_too(rig: Rig):
    jobs = await rig.submit(6)
    assert [job for page in await _pages(rig, JobFilter(), 3) for job in page] == jobs[::-1]


async def test_pages_stay_stable_while_jobs_come_and_move(rig: Rig):
    jobs = await rig.submit(6)
    first = await rig.ledger.jobs(JobFilter(), limit=3)
    await rig.submit(3)
    for held in await rig.claim(6):
        await rig.pull(held, Trigger.COMPLETE)
    second = await rig.ledger.jobs(JobFilter(), limit=10, cursor=first.cursor)
    assert [job.job_id for job in (*first.jobs, *second.jobs)] == jobs[::-1]


async def test_each_field_of_a_filter_narrows_a_listing(rig: Rig):
    a = await rig.submit_one(type="a", correlation_id="one")
    b = await rig.submit_one(type="b", concurrency_key="k")
    run = await rig.submit_one(lifecycle="run", type="a")
    dead = await rig.submit_one(type="c")
    await rig.move(dead, "dead_lettered", by=ADMIN, death=DEATH)
    for where, expected in (
        (JobFilter(), [dead, run, b, a]),
        (JobFilter(lifecycle="run"), [run]),
        (JobFilter(type="a"), [run, a]),
        (JobFilter(type="a", lifecycle="leased-job"), [a]),
        (JobFilter(state="dead_lettered"), [dead]),
        (JobFilter(state="queued"), [b, a]),
        (JobFilter(state="requested"), [run]),
        (JobFilter(state="requested", lifecycle="run"), [run]),
        (JobFilter(correlation_id="one"), [a]),
        (JobFilter(concurrency_key="k"), [b]),
        (JobFilter(reason_code=ReasonCode.POLICY_VIOLATION), [dead]),
        (JobFilter(reason_code=ReasonCode.TIMEOUT), []),
        (JobFilter(type="nobody"), []),
    ):
        assert [job for page in await _pages(rig, where, 2) for job in page] == expected, where


async def test_waiting_jobs_of_a_state_are_listed_oldest_first_and_a_head_that_left_is_not_repeated(rig: Rig):
    jobs = await rig.submit(6, correlation_id="one")
    (ready,) = await rig.submit(1, type="b", concurrency_key="k")
    resting = await rig.submit_one(lifecycle="run", type="r")
    where = JobFilter(lifecycle="leased-job", state="queued")
    assert await _from_oldest(rig, where, 3) == [*jobs, ready]
    assert await _from_oldest(rig, where, 7) == [*jobs, ready], "a page that is just full ends too"
    assert await _from_oldest(rig, JobFilter(state="queued", type="b"), 3) == [ready]
    assert await _from_oldest(rig, JobFilter(state="queued", concurrency_key="k"), 3) == [ready]
    assert await _from_oldest(rig, JobFilter(state="queued", correlation_id="one"), 2) == jobs
    assert await _from_oldest(rig, JobFilter(state="requested"), 3) == [resting]
    assert await _from_oldest(rig, JobFilter(state="queued", type="nobody"), 3) == []
    first = await rig.ledger.jobs(where, limit=3, oldest_first=True)
    await rig.claim(2)
    second = await rig.ledger.jobs(where, limit=9, cursor=first.cursor, oldest_first=True)
    assert [job.job_id for job in second.jobs] == [*jobs[3:], ready]
    assert await _from_oldest(rig, where, 3) == [*jobs[2:], ready]


@pytest.mark.parametrize(
    "where", [JobFilter(), JobFilter(lifecycle="run"), JobFilter(state="succeeded"), JobFilter(parent_id=JobId("p"))]
)
async def test_oldest_first_listing_requires_an_open_state(rig: Rig, where: JobFilter):
    with pytest.raises(OptionInvalid, match="oldest_first"):
        await rig.ledger.jobs(where, limit=3, oldest_first=True)


async def _from_oldest(rig: Rig, where: JobFilter, limit: int) -> list[JobId]:
    found, cursor = list[JobId](), None
    while True:
        page = await rig.ledger.jobs(where, limit=limit, cursor=cursor, oldest_first=True)
        found += [job.job_id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return found


async def test_a_listing_has_no_payloads(rig: Rig):
    await rig.submit_one(payload=b'"big"')
    assert [job.payload for job in (await rig.ledger.jobs(JobFilter(), limit=5)).jobs] == [None]


async def test_a_listing_shows_the_same_job_as_a_look_at_it(rig: Rig):
    held = await rig.running(correlation_id="c", concurrency_key="k")
    await rig.submit_one(delay_s=5.0)
    for listed in (await rig.ledger.jobs(JobFilter(), limit=5)).jobs:
        job = await rig.job(listed.job_id)
        for name in ("state", "place", "version", "epoch", "owner", "due_at", "lease_expires_at", "correlation_id"):
            assert getattr(listed, name) == getattr(job, name)
    assert (await rig.job(held.lease.job_id)).place is JobPlace.LEASED


async def test_missing_job_is_read_as_none(rig: Rig):
    assert await rig.ledger.job(JobId("nobody")) is None


async def test_a_job_that_moved_was_updated(rig: Rig):
    job_id = await rig.submit_one()
    created = (await rig.job(job_id)).created_at
    await rig.advance(5.0)
    await rig.claim_one()
    job = await rig.job(job_id)
    assert (job.created_at, job.updated_at) == (created, created + timedelta(seconds=5))


@pytest.mark.requirement("DJ-12")
async def test_dead_letters_come_newest_first_in_pages(rig: Rig):
    jobs = await rig.submit(5)
    for job_id in jobs:
        await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH)
        await rig.advance(1.0)
    first = await rig.ledger.dead_letters(JobFilter(), limit=2)
    second = await rig.ledger.dead_letters(JobFilter(), limit=2, cursor=first[-1].job_id)
    third = await rig.ledger.dead_letters(JobFilter(), limit=2, cursor=second[-1].job_id)
    assert [letter.job_id for letter in (*first, *second, *third)] == jobs[::-1]


@pytest.mark.requirement("DJ-12")
async def test_dead_letters_of_the_same_moment_are_all_paged(rig: Rig):
    jobs = await rig.submit(7)
    for job_id in jobs:
        await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH)
    seen, cursor = [], None
    while page := await rig.ledger.dead_letters(JobFilter(), limit=3, cursor=cursor):
        seen += [letter.job_id for letter in page]
        cursor = page[-1].job_id
    assert sorted(seen) == sorted(jobs)


@pytest.mark.requirement("DJ-12")
async def test_dead_letters_are_filtered(rig: Rig):
    a, b = await rig.submit_one(type="a", correlation_id="one"), await rig.submit_one(type="b")
    timeout = DeadLetterReason(reason_code=ReasonCode.TIMEOUT, stage=Stage.FETCH, last_error="slow")
    await rig.move(a, "dead_lettered", by=ADMIN, death=DEATH)
    await rig.move(b, "dead_lettered", by=ADMIN, death=timeout)
    for where, expected in (
        (JobFilter(type="a"), [a]),
        (JobFilter(reason_code=ReasonCode.TIMEOUT), [b]),
        (JobFilter(correlation_id="one"), [a]),
        (JobFilter(lifecycle="leased-job", state="dead_lettered"), [b, a]),
        (JobFilter(lifecycle="queue-job"), []),
    ):
        assert [letter.job_id for letter in await rig.ledger.dead_letters(where, limit=5)] == expected


async def test_queues_count_each_place(rig: Rig):
    await rig.submit(3)
    await rig.submit(2, delay_s=50.0)
    await rig.submit(3, concurrency_key="k")
    await rig.claim(2)
    await rig.submit(1, type="other")
    await rig.advance(4.0)
    queues = {queue.type: queue for queue in await rig.ledger.queues()}
    work = queues["work"]
    assert (work.lifecycle, work.ready, work.scheduled, work.blocked, work.held) == ("leased-job", 2, 2, 2, 2)
    assert (work.paused, work.rate_limit, work.oldest_ready_s) == (False, None, pytest.approx(4.0))
    assert (queues["other"].ready, queues["other"].held) == (1, 0)


async def test_a_queue_without_ready_work_has_no_oldest(rig: Rig):
    await rig.running()
    (queue,) = await rig.ledger.queues()
    assert (queue.ready, queue.oldest_ready_s, queue.held) == (0, None, 1)


async def test_workers_are_seen_with_what_they_hold(rig: Rig):
    await rig.ledger.heartbeat_worker(WORKER, b'{"host": "a"}')
    await rig.submit(3)
    await rig.claim(2)
    await rig.advance(3.0)
    await rig.ledger.heartbeat_worker(OTHER_WORKER, None)
    workers = {worker.name: worker for worker in await rig.ledger.workers()}
    now = await rig.ledger.now()
    assert (workers["worker-1"].held, workers["worker-1"].info) == (2, b'{"host": "a"}')
    assert workers["worker-1"].seen_at == now - timedelta(seconds=3)
    assert (workers["worker-2"].held, workers["worker-2"].info, workers["worker-2"].seen_at) == (0, None, now)
    await rig.ledger.heartbeat_worker(WORKER, b'{"host": "b"}')
    again = {worker.name: worker for worker in await rig.ledger.workers()}
    assert (len(again), again["worker-1"].info) == (2, b'{"host": "b"}')


async def test_the_clock_is_the_ledgers_and_knows_its_zone(rig: Rig):
    before = await rig.ledger.now()
    await rig.advance(90.0)
    after = await rig.ledger.now()
    assert after - before == timedelta(seconds=90)
    assert after.utcoffset() == timedelta(0)
    job = await rig.job(await rig.submit_one())
    assert job.created_at.utcoffset() == timedelta(0)


async def test_histories_yield_every_job_with_all_its_events(rig: Rig):
    jobs = await rig.submit(7)
    held = await rig.claim(3)
    await rig.pull(held[0], "reject", death=DEATH)
    histories = {history.job.job_id: history async for history in rig.ledger.histories(batch=2)}
    assert sorted(histories) == sorted(jobs)
    for job_id, history in histories.items():
        assert list(history.events) == await rig.ledger.events(job_id)
        assert history.job.state == await rig.state(job_id)
    assert [letter.job_id for history in histories.values() for letter in history.dead_letters] == [
        held[0].lease.job_id
    ]


async def test_inspect_finds_nothing_wrong_with_a_fresh_ledger(rig: Rig):
    findings = await rig.ledger.inspect()
    assert findings
    wrong = [finding for finding in findings if finding.severity == "error"]
    # The test server trades durability for speed, and the ledger must say so; nothing else is wrong.
    durability = {"fsync", "synchronous_commit", "full_page_writes"}
    assert [finding for finding in wrong if not any(name in finding.check for name in durability)] == []
    assert bool(wrong) == (rig.kind != "sqlite")


@pytest.mark.parametrize("where", [JobFilter(state="queud"), JobFilter(lifecycle="run", state="dead_lettered")])
async def test_a_state_that_no_lifecycle_of_the_filter_has_is_refused(rig: Rig, where: JobFilter):
    await rig.submit()
    with pytest.raises(OptionInvalid, match="one of "):
        await rig.ledger.jobs(where, limit=10)


async def test_a_job_with_a_correlation_id_of_its_own_is_not_found_by_its_job_id(rig: Rig):
    (own,) = await rig.submit(1)
    (other,) = await rig.submit(1, correlation_id="order-7")
    found = {
        wanted: (
            [job.job_id for job in (await rig.ledger.jobs(JobFilter(correlation_id=wanted), limit=10)).jobs],
            await rig.ledger.find_events(type_=None, correlation_id=wanted, since=None, limit=10) != [],
        )
        for wanted in (own, other, "order-7")
    }
    assert found == {own: ([own], True), other: ([], False), "order-7": ([other], True)}

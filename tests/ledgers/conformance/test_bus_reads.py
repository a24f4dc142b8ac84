"""What a role without leases must find: the heads of what is ready, who holds what and for how long, and what was said about a job."""

from dataclasses import replace

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, WORKER, Rig, actor
from tests.ledgers.conformance.test_bus_steps import SCHEDULER, TOPIC_LEASE_S, dispatch, dispatched, scheduled
from trellis.engine.errors import OptionInvalid, UnknownLifecycle
from trellis.engine.jobs import (
    CLAIM_MAX,
    HEAD_PAYLOAD_BYTES_MAX,
    REMARKS_MAX,
    CancelMode,
    HeldLease,
    JobId,
    LeaseLost,
    Moved,
    NotMoved,
    Priority,
    Renewed,
)
from trellis.engine.records import JobFilter, JobPlace, RetentionOptions
from trellis.lifecycles import SIGNAL_TYPES, Role

REFUSED = "job_result_refused"
RECONCILER = actor(Role.RECONCILER)


async def heads(rig: Rig, each: int = 10) -> list[JobId]:
    return [job.job_id for job in await rig.ledger.peek_ready("bus-job", each=each)]


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-3")
async def test_the_first_of_each_type_and_priority_are_the_heads(rig: Rig):
    a = [await scheduled(rig, type="job.a") for _ in range(3)]
    b = [await scheduled(rig, type="job.b") for _ in range(3)]
    urgent = [await scheduled(rig, type="job.a", priority=Priority.CRITICAL) for _ in range(3)]
    assert await heads(rig, each=2) == [*a[:2], *b[:2], *urgent[:2]]


@pytest.mark.requirement("BUS-3")
async def test_a_head_has_its_payload_and_all_that_a_decision_needs(rig: Rig):
    job_id = await scheduled(
        rig,
        type="job.a",
        payload=b'{"topic": "job.a"}',
        priority=Priority.INTERACTIVE,
        trace="t",
        parent_id=JobId("p"),
        deadline_s=60.0,
        concurrency_key="k",
        correlation_id="c",
    )
    assert await rig.ledger.peek_ready("bus-job", each=1) == [replace(await rig.job(job_id), progress=None)]


async def test_a_head_comes_without_a_payload_that_is_large(rig: Rig):
    small = await scheduled(rig, payload=b"x" * HEAD_PAYLOAD_BYTES_MAX)
    large = await scheduled(rig, payload=b"x" * (HEAD_PAYLOAD_BYTES_MAX + 1))
    found = {job.job_id: job.payload for job in await rig.ledger.peek_ready("bus-job", each=10)}
    assert found == {small: b"x" * HEAD_PAYLOAD_BYTES_MAX, large: None}


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-3", "BUS-4")
async def test_peek_ready_returns_only_ready_scheduled_jobs(rig: Rig):
    first = await scheduled(rig, concurrency_key="k")
    await scheduled(rig, concurrency_key="k")
    await rig.submit_one(lifecycle="bus-job")
    await rig.submit_one()
    await rig.move(await scheduled(rig), "SCHEDULED", by=SCHEDULER, delay_s=60.0)
    await dispatched(rig)
    await rig.cancel(await scheduled(rig))
    assert await heads(rig) == [first]


@pytest.mark.requirement("BUS-3")
async def test_types_that_are_paused_have_no_heads(rig: Rig):
    await scheduled(rig, type="job.a")
    other = await scheduled(rig, type="job.b")
    await rig.ledger.pause(ADMIN, "job.a", paused=True)
    assert await heads(rig) == [other]
    await rig.ledger.pause(ADMIN, "job.a", paused=False)
    assert len(await heads(rig)) == 2


@pytest.mark.requirement("BUS-3")
async def test_job_type_in_two_lifecycles_has_the_heads_of_each(rig: Rig):
    leased = await rig.submit(3, type="shared")
    bus = await scheduled(rig, type="shared")
    assert await heads(rig, each=1) == [bus]
    assert [job.job_id for job in await rig.ledger.peek_ready("leased-job", each=1)] == leased[:1]


@pytest.mark.requirement("BUS-3")
async def test_a_job_that_was_put_off_comes_behind_those_that_were_not(rig: Rig):
    first, second = await scheduled(rig), await scheduled(rig)
    await rig.move(first, "SCHEDULED", by=SCHEDULER)
    assert await heads(rig) == [second, first]


async def test_heads_are_asked_for_within_bounds(rig: Rig):
    for each in (0, CLAIM_MAX + 1):
        with pytest.raises(OptionInvalid):
            await rig.ledger.peek_ready("bus-job", each=each)
    with pytest.raises(UnknownLifecycle):
        await rig.ledger.peek_ready("nothing", each=1)


async def test_concurrent_claims_of_one_ready_job_have_one_winner(rig: Rig):
    job_id = await scheduled(rig)
    seen = (await rig.ledger.peek_ready("bus-job", each=1))[0]
    first = await rig.move(job_id, "DISPATCHED", by=SCHEDULER, version=seen.version)
    second = await rig.move(job_id, "DISPATCHED", by=actor(Role.SCHEDULER, "two"), version=seen.version)
    assert isinstance(first, Moved)
    assert isinstance(second, NotMoved)


# --- holds -----------------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-5")
async def test_held_lease_record_has_every_field_of_the_lease(rig: Rig):
    lease = await dispatched(rig, type="job.a", max_attempts=3, correlation_id="c")
    waiting = await scheduled(rig)
    await rig.advance(10)
    (hold,) = await rig.ledger.holds([lease.job_id, waiting, JobId("nobody")])
    assert hold.left_s == pytest.approx(TOPIC_LEASE_S - 10)
    assert hold._replace(left_s=0.0) == HeldLease(
        lease=lease,
        type="job.a",
        state="DISPATCHED",
        attempt=0,
        max_attempts=3,
        version=3,
        owner=SCHEDULER.name,
        left_s=0.0,
        cancel=False,
        correlation_id="c",
    )
    await rig.cancel(lease.job_id, CancelMode.SOFT, grace_s=600.0)
    await rig.advance(30)
    (hold,) = await rig.ledger.holds([lease.job_id])
    assert (hold.cancel, hold.left_s) == (True, pytest.approx(-10))


@pytest.mark.requirement("BUS-5", "BUS-6")
async def test_with_a_hold_a_job_is_renewed_and_moved_in_its_holders_place(rig: Rig):
    lease = await dispatched(rig)
    (hold,) = await rig.ledger.holds([lease.job_id])
    assert await rig.ledger.renew(RECONCILER, [hold.lease]) == [Renewed(cancel=False)]
    await rig.cancel(lease.job_id)
    assert await rig.ledger.holds([lease.job_id]) == []
    assert await rig.ledger.renew(RECONCILER, [hold.lease]) == [LeaseLost(hold.lease)]


async def test_so_many_holds_are_asked_for_at_once_and_no_more(rig: Rig):
    assert await rig.ledger.holds([]) == []
    with pytest.raises(OptionInvalid):
        await rig.ledger.holds([JobId(f"j{n}") for n in range(CLAIM_MAX + 1)])


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-5")
async def test_leases_that_end_soon_are_found_soonest_first(rig: Rig):
    first = await dispatched(rig)
    await rig.advance(10)
    second = await dispatched(rig)
    await rig.running()
    await rig.advance(25)
    found = [hold.lease for hold in await rig.ledger.expiring("bus-job", within_s=10.0, limit=10)]
    assert found == [first, second], "the first is over, the second ends in 5 s, and the third is of another lifecycle"
    assert [hold.lease for hold in await rig.ledger.expiring("bus-job", within_s=10.0, limit=1)] == [first]
    assert [hold.lease for hold in await rig.ledger.expiring("bus-job", within_s=0.0, limit=10)] == [first]


async def test_a_look_at_what_expires_has_its_bounds(rig: Rig):
    for options in ({"within_s": -1.0, "limit": 1}, {"within_s": 1.0, "limit": 0}, {"within_s": 1.0, "limit": 10_000}):
        with pytest.raises(OptionInvalid):
            await rig.ledger.expiring("bus-job", **options)


# --- remarks ---------------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-6")
@pytest.mark.parametrize("state", ["SCHEDULED", "RUNNING", "SUCCEEDED"])
async def test_a_remark_is_kept_beside_the_signals_and_changes_nothing(rig: Rig, state: str):
    job_id = await rig.submit_one(lifecycle="bus-job")
    await rig.drive(job_id, state)
    before = await rig.snapshot(job_id)
    assert await rig.ledger.annotate(actor(Role.WORKER, "late"), job_id, REFUSED, b'{"kind": "late"}') is True
    assert replace(await rig.snapshot(job_id), signals=0) == replace(before, signals=0)
    (signal,) = await rig.ledger.signals(job_id, limit=10)
    assert (signal.job_id, signal.type, signal.data, signal.ts) == (
        job_id,
        REFUSED,
        b'{"kind": "late"}',
        await rig.ledger.now(),
    )


@pytest.mark.requirement("BUS-6")
async def test_equal_remarks_are_each_kept_up_to_a_bound_that_heartbeats_do_not_fill(rig: Rig):
    lease = await dispatched(rig)
    for _ in range(10):
        await rig.ledger.signal(lease, [("job_heartbeat", b"{}"), ("job_log", b"{}")])
    kept = [await rig.ledger.annotate(RECONCILER, lease.job_id, REFUSED, b"{}") for _ in range(REMARKS_MAX + 2)]
    assert kept == [True] * REMARKS_MAX + [False] * 2
    signals = await rig.ledger.signals(lease.job_id, limit=1_000)
    assert sum(signal.type == REFUSED for signal in signals) == REMARKS_MAX
    other = await dispatched(rig)
    assert await rig.ledger.annotate(RECONCILER, other.job_id, REFUSED, b"{}") is True


@pytest.mark.requirement("BUS-11")
async def test_missing_job_cannot_be_annotated(rig: Rig):
    assert await rig.ledger.annotate(RECONCILER, JobId("nobody"), REFUSED, b"{}") is False


async def test_a_remark_is_no_progress_of_the_job(rig: Rig):
    lease = await dispatched(rig)
    await rig.ledger.signal(lease, [("job_heartbeat", b'{"percent": 5}')])
    await rig.ledger.annotate(RECONCILER, lease.job_id, REFUSED, b'{"percent": 99}')
    assert (await rig.job(lease.job_id)).progress == b'{"percent": 5}'


async def test_words_that_are_another_kinds_are_refused(rig: Rig):
    lease = await dispatched(rig)
    for word in ("job_heartbeat", "job_log", "anything"):
        with pytest.raises(OptionInvalid):
            await rig.ledger.annotate(RECONCILER, lease.job_id, word, b"{}")
    for word in (REFUSED, "anything"):
        with pytest.raises(OptionInvalid):
            await rig.ledger.signal(lease, [(word, b"{}")])
    with pytest.raises(OptionInvalid):
        await rig.ledger.annotate(RECONCILER, lease.job_id, REFUSED, b"x" * (1024 * 1024 + 1))
    assert await rig.ledger.signals(lease.job_id, limit=10) == []


async def test_remarks_leave_with_the_other_signals(rig: Rig):
    lease = await dispatched(rig)
    await rig.ledger.annotate(RECONCILER, lease.job_id, REFUSED, b"{}")
    await rig.advance(100)
    await rig.ledger.retain(RetentionOptions(signals_s=60.0))
    assert await rig.ledger.signals(lease.job_id, limit=10) == []


def test_the_index_of_remarks_counts_by_the_number_of_their_word():
    assert SIGNAL_TYPES.index(REFUSED) + 1 == 4


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
async def test_a_listing_can_be_narrowed_to_a_place(rig: Rig):
    ready = await scheduled(rig, concurrency_key="k", parent_id=JobId("p"))
    parked = await scheduled(rig, concurrency_key="k", parent_id=JobId("p"))
    resting = await scheduled(rig, parent_id=JobId("p"), correlation_id="c")
    await rig.move(resting, "SCHEDULED", by=SCHEDULER, delay_s=60.0)
    pending = await rig.submit_one(lifecycle="bus-job")
    held = (await dispatched(rig)).job_id
    done = await scheduled(rig, parent_id=JobId("p"))
    await rig.drive(done, "SUCCEEDED", await dispatch(rig, done))
    denied = await scheduled(rig)
    await rig.move(denied, "DENIED", by=SCHEDULER)
    for where, expected in (
        (JobFilter(place=JobPlace.READY), [ready]),
        (JobFilter(place=JobPlace.BLOCKED), [parked]),
        (JobFilter(place=JobPlace.SCHEDULED), [pending, resting]),
        (JobFilter(place=JobPlace.LEASED), [held]),
        (JobFilter(place=JobPlace.ENDED), [denied, done]),
        (JobFilter(lifecycle="bus-job", place=JobPlace.SCHEDULED), [pending, resting]),
        (JobFilter(lifecycle="run", place=JobPlace.SCHEDULED), []),
        (JobFilter(lifecycle="bus-job", state="SCHEDULED", place=JobPlace.SCHEDULED), [resting]),
        (JobFilter(state="SCHEDULED", place=JobPlace.READY), [ready]),
        (JobFilter(state="SCHEDULED", place=JobPlace.LEASED), []),
        (JobFilter(state="DISPATCHED", place=JobPlace.LEASED), [held]),
        (JobFilter(state="SUCCEEDED", place=JobPlace.ENDED), [done]),
        (JobFilter(state="SUCCEEDED", place=JobPlace.READY), []),
        (JobFilter(state="DENIED", place=JobPlace.ENDED), [denied]),
        (JobFilter(parent_id=JobId("p"), place=JobPlace.READY), [ready]),
        (JobFilter(parent_id=JobId("p"), place=JobPlace.ENDED), [done]),
        (JobFilter(correlation_id="c", place=JobPlace.SCHEDULED), [resting]),
        (JobFilter(correlation_id="c", place=JobPlace.READY), []),
        (JobFilter(concurrency_key="k", place=JobPlace.BLOCKED), [parked]),
    ):
        found = await rig.ledger.jobs(where, limit=10)
        assert [job.job_id for job in found.jobs] == expected, where


async def test_waiting_jobs_of_a_place_are_read_oldest_first(rig: Rig):
    first, second, third = [await scheduled(rig) for _ in range(3)]
    await rig.move(second, "SCHEDULED", by=SCHEDULER, delay_s=60.0)
    for place, expected in ((JobPlace.READY, [first, third]), (JobPlace.SCHEDULED, [second]), (JobPlace.LEASED, [])):
        where = JobFilter(lifecycle="bus-job", state="SCHEDULED", place=place)
        page = await rig.ledger.jobs(where, limit=10, oldest_first=True)
        assert [job.job_id for job in page.jobs] == expected


async def test_requeue_and_dead_letter_listing_filter_by_place(rig: Rig):
    await rig.move(await rig.submit_one(), "dead_lettered", by=ADMIN, death=DEATH)
    for place, count in ((JobPlace.READY, 0), (JobPlace.ENDED, 1)):
        where = JobFilter(place=place)
        assert len(await rig.ledger.dead_letters(where, limit=10)) == count
        answers = await rig.ledger.requeue(ADMIN, where, rig.request(), limit=10, cause=None)
        assert len(answers) == count
    assert (await rig.claim_one(by=WORKER)).generation == 1

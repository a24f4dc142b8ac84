"""The feed: every event once, in an order that no late commit can break, and look-ups of events."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER, Rig, claimed_ids
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Advance, CancelMode, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event
from trellis.lifecycles import Trigger


async def _read(ledger: Ledger, position: str | None = None, *, limit: int = 100, **options) -> list[Event]:
    events: list[Event] = []
    while True:
        page = await ledger.feed(position, limit=limit, **options)
        if not page.events:
            return events
        assert len(page.events) <= limit
        events += page.events
        assert position is None or page.position > position
        position = page.position


async def _some_work(rig: Rig, n: int = 5) -> None:
    await rig.submit(n)
    for held in await rig.claim(n):
        await rig.pull(held, Trigger.COMPLETE)


@pytest.mark.requirement("D6", "DJ-4")
@pytest.mark.oldest_server
async def test_the_feed_yields_every_event_once_in_order(rig: Rig):
    await _some_work(rig)
    events = await _read(rig.ledger, limit=3)
    assert len(events) == len({event.id for event in events}) == 20
    for job_id in {event.job_id for event in events}:
        own = [event for event in events if event.job_id == job_id]
        assert [event.version for event in own] == [1, 2, 3, 4]
        assert own == await rig.ledger.events(job_id)


@pytest.mark.requirement("D6")
async def test_the_feed_goes_on_where_it_stopped(rig: Rig):
    await _some_work(rig, 2)
    first = await rig.ledger.feed(None, limit=3)
    await _some_work(rig, 2)
    rest = await _read(rig.ledger, first.position)
    everything = await _read(rig.ledger)
    assert [*first.events, *rest] == everything
    assert len(everything) == 16


@pytest.mark.requirement("D6")
async def test_the_end_of_the_feed_is_a_position_like_any_other(rig: Rig):
    await _some_work(rig, 2)
    end = await rig.ledger.feed_end()
    assert (await rig.ledger.feed(end, limit=10)).events == ()
    (job_id,) = await rig.submit(1)
    events = await _read(rig.ledger, end)
    assert [event.job_id for event in events] == [job_id]


@pytest.mark.requirement("D6")
async def test_an_empty_page_keeps_the_position(rig: Rig):
    start = await rig.ledger.feed(None, limit=10)
    assert start.events == ()
    await rig.submit(1)
    page = await rig.ledger.feed(start.position, limit=10)
    assert len(page.events) == 1
    again = await rig.ledger.feed(page.position, limit=10)
    assert (again.events, again.position) == ((), page.position)


async def test_a_filter_narrows_the_feed_to_a_lifecycle(rig: Rig):
    await rig.submit(3)
    run = await rig.submit_one(lifecycle="run")
    await rig.submit(3)
    events = await _read(rig.ledger, limit=2, lifecycle="run")
    assert [event.job_id for event in events] == [run]


async def test_a_filter_narrows_the_feed_to_event_types(rig: Rig):
    await _some_work(rig, 3)
    run = await rig.submit_one(lifecycle="run")
    whole = await _read(rig.ledger, limit=2)
    ends = frozenset({"job_succeeded", "job_accepted"})
    assert await _read(rig.ledger, limit=2, types=ends) == [event for event in whole if event.type in ends]
    runs = await _read(rig.ledger, limit=2, types=frozenset({"run.requested", "job_accepted"}), lifecycle="run")
    assert [event.job_id for event in runs] == [run]
    assert await _read(rig.ledger, limit=2, types=frozenset()) == []
    nothing = await rig.ledger.feed(None, limit=2, types=frozenset({"job_denied"}))
    assert (nothing.events, nothing.position) == ((), await rig.ledger.feed_end()), "the skipped ones are behind it"


async def test_a_filter_by_an_unknown_event_type_is_refused(rig: Rig):
    with pytest.raises(OptionInvalid, match="job_ended"):
        await rig.ledger.feed(None, limit=2, types=frozenset({"job_ended"}))


async def test_a_filter_narrows_the_feed_to_several_lifecycles(rig: Rig):
    await rig.submit(3)
    run = await rig.submit_one(lifecycle="run")
    await rig.submit(3, lifecycle="bus-job", type="job.x")
    artifact = await rig.submit_one(lifecycle="artifact")
    both = await _read(rig.ledger, limit=2, lifecycle=frozenset({"run", "artifact"}))
    assert [event.job_id for event in both] == [run, artifact]
    mixed = await _read(rig.ledger, limit=2, lifecycle=frozenset({"run", "leased-job"}))
    assert len(mixed) == 4
    assert await _read(rig.ledger, limit=2, lifecycle=frozenset()) == []


@pytest.mark.requirement("D6")
async def test_a_filtered_page_moves_past_what_it_left_out(rig: Rig):
    await rig.submit(10)
    position, run = None, await rig.submit_one(lifecycle="run")
    for _ in range(20):
        page = await rig.ledger.feed(position, limit=2, lifecycle="run")
        if page.events:
            assert [event.job_id for event in page.events] == [run]
            return
        assert page.position != position, "an empty page that does not move would stop its reader for ever"
        position = page.position
    pytest.fail("twenty pages and the one event of the run was not among them")


@pytest.mark.requirement("D6", "DJ-4")
async def test_a_reader_loses_nothing_while_many_write(rig: Rig):
    """Writers on several connections commit in any order; the reader polls all the time."""
    ledgers = [await rig.open_another() for _ in range(6)]
    done = asyncio.Event()
    seen: list[Event] = []

    async def write(number: int, ledger: Ledger) -> None:
        for turn in range(15):
            await ledger.submit(SUBMITTER, [rig.new_job(type=f"t{number}") for _ in range(4)])
            claim = Claim(claim_id=ClaimId(f"{number}-{turn}"), types=(TypeClaim(type=f"t{number}"),), start=4)
            claimed = (await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
            steps = tuple(Advance(lease=one.lease, source="running", trigger=Trigger.COMPLETE) for one in claimed)
            await ledger.turn(Turn(actor=WORKER, advances=steps))

    async def read() -> None:
        position = None
        while True:
            finished = done.is_set()
            page = await rig.ledger.feed(position, limit=50)
            seen.extend(page.events)
            position = page.position
            if finished and not page.events:
                return

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(number, ledger) for number, ledger in enumerate(ledgers)))
    done.set()
    await reader
    assert len(seen) == len({event.id for event in seen}) == 6 * 15 * 4 * 4
    versions: dict[str, int] = {}
    for event in seen:
        assert event.version == versions.get(event.job_id, 0) + 1
        versions[event.job_id] = event.version


@pytest.mark.requirement("DJ-13", "DJ-15")
async def test_an_event_carries_every_field_of_the_document(rig: Rig):
    await rig.submit_one(correlation_id="c-1")
    held = await rig.claim_one()
    await rig.pull(held, Trigger.FAIL, cause="PermanentError: no", data=b'{"error": "no"}')
    event = await rig.last_event(held.lease.job_id)
    assert event.id == f"{held.lease.job_id}-{event.version}"
    assert (event.job_id, event.lifecycle, event.type) == (held.lease.job_id, "leased-job", "job_failed")
    assert (event.role, event.actor, event.correlation_id) == (WORKER.role, WORKER.name, "c-1")
    assert (event.cause, event.data, event.version) == ("PermanentError: no", b'{"error": "no"}', 4)
    assert event.ts == await rig.ledger.now()


@pytest.mark.requirement("DJ-13", "D5")
async def test_every_step_has_its_own_event_type_and_signals_are_no_events(rig: Rig):
    """The seven transitions and two signals of document 003, and the four transitions that D5 adds."""
    done = await rig.running()
    await rig.ledger.signal(done.lease, [("job_heartbeat", b"1")])
    await rig.ledger.renew(WORKER, [done.lease])
    await rig.pull(done, Trigger.COMPLETE)
    undo = await rig.running(type="undo", compensates=done.lease.job_id)
    await rig.pull(undo, Trigger.COMPLETE)
    unlucky = await rig.running(max_attempts=9)
    await rig.pull(unlucky, Trigger.RETRY)
    await rig.claim_one()
    await rig.lose_lease()
    await rig.pull(await rig.claim_one(), Trigger.FAIL)
    await rig.ledger.requeue(ADMIN, [unlucky.lease.job_id], rig.request(), limit=1, cause=None)
    await rig.pull(await rig.claim_one(), "reject", death=DEATH)
    await rig.cancel((await rig.running()).lease.job_id)
    assert {(event.type, event.target) for event in await _read(rig.ledger)} == {
        ("job_queued", "queued"),
        ("job_claimed", "assigned"),
        ("job_started", "running"),
        ("job_succeeded", "succeeded"),
        ("job_compensated", "succeeded"),
        ("job_retry_scheduled", "queued"),
        ("job_lease_expired", "queued"),
        ("job_failed", "failed"),
        ("job_requeued", "queued"),
        ("job_dead_lettered", "dead_lettered"),
        ("job_cancelled", "cancelled"),
    }
    signals = await rig.ledger.signals(done.lease.job_id, limit=10)
    assert {signal.type for signal in signals} == {"job_heartbeat", "job_lease_renewed"}


@pytest.mark.requirement("D6")
async def test_order_is_by_version_and_never_by_time(rig: Rig):
    """The ledger's clock is set back in the middle of a life."""
    job_id = await rig.submit_one()
    held = await rig.claim_one()
    await rig.advance(-3600.0)
    await rig.pull(held, Trigger.COMPLETE)
    events = await rig.ledger.events(job_id)
    assert [event.version for event in events] == [1, 2, 3, 4]
    assert events[3].ts < events[2].ts
    assert [event.version for event in await _read(rig.ledger, limit=2)] == [1, 2, 3, 4]


@pytest.mark.requirement("DJ-13")
async def test_events_are_found_by_type_correlation_and_time(rig: Rig):
    a = await rig.submit_one(correlation_id="a")
    await rig.advance(10.0)
    middle = await rig.ledger.now()
    b = await rig.submit_one(correlation_id="b")
    await rig.advance(10.0)
    assert claimed_ids(await rig.claim(5)) == [a, b]

    async def find(**asked) -> list[str]:
        options = {"type_": None, "correlation_id": None, "since": None, "limit": 100, **asked}
        return [event.id for event in await rig.ledger.find_events(**options)]

    assert await find(type_="job_queued") == [f"{a}-1", f"{b}-1"]
    assert await find(type_="job_queued", since=middle) == [f"{b}-1"]
    assert await find(correlation_id="a") == [f"{a}-1", f"{a}-2", f"{a}-3"]
    assert await find(correlation_id="b", type_="job_started") == [f"{b}-3"]
    assert await find(correlation_id="a", since=middle) == [f"{a}-2", f"{a}-3"]
    assert await find(type_="job_queued", limit=1) == [f"{a}-1"]
    assert await find(type_="job_queued", since=middle + timedelta(days=1)) == []
    assert await find(type_="job_queued", since=datetime.max.replace(tzinfo=UTC)) == []
    assert await find(type_="job_failed") == []
    assert await find(correlation_id="nobody") == []
    await rig.cancel(a, CancelMode.HARD)
    await rig.advance(10.0)
    last = await rig.ledger.now()
    await rig.cancel(b, CancelMode.HARD)
    assert await find(type_="job_cancelled") == [f"{a}-4", f"{b}-4"]
    assert await find(type_="job_cancelled", since=last) == [f"{b}-4"]


async def test_events_are_counted_by_type_since_a_moment(rig: Rig):
    for _ in range(3):
        await rig.submit_one()
    await rig.advance(10.0)
    middle = await rig.ledger.now()
    await rig.submit_one()
    await rig.claim(2)
    types = ("job_queued", "job_started", "job_failed")
    assert await rig.ledger.count_events(types, since=middle - timedelta(days=1)) == {
        "job_queued": 4,
        "job_started": 2,
        "job_failed": 0,
    }
    assert await rig.ledger.count_events(types, since=middle) == {"job_queued": 1, "job_started": 2, "job_failed": 0}
    assert await rig.ledger.count_events((), since=middle) == {}


async def test_a_job_nobody_made_has_no_events(rig: Rig):
    assert await rig.ledger.events(rig.new_id()) == []


@pytest.mark.requirement("RUN-5", "D6")
async def test_the_feed_goes_on_after_any_event_it_gave(rig: Rig):
    await rig.submit(3)
    await rig.claim(2)
    page = await rig.ledger.feed(None, limit=100)
    assert len(page.positions) == len(page.events) == 7
    assert list(page.positions) == sorted(set(page.positions))
    for number, position in enumerate(page.positions, start=1):
        rest = await rig.ledger.feed(position, limit=100)
        assert [event.id for event in rest.events] == [event.id for event in page.events[number:]]
        assert rest.positions == page.positions[number:]

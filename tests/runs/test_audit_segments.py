"""Records of many events in segments: each event in exactly one record, whoever dies when."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand, is_of_rebuild
from tests.runs.test_projector import Press, press
from trellis.documents import audit, audit_log, ids
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import this_node
from trellis.engine.jobs import (
    Actor,
    Advance,
    CancelMode,
    Claim,
    ClaimId,
    JobId,
    NewJob,
    RequestId,
    Turn,
    TypeClaim,
)
from trellis.engine.records import Event
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.projector import Projector, ProjectorOptions, ProjectorPosition
from trellis.runs.rebuild import rebuild_objects
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, StoreUnavailable, put_one_by_one
from trellis.testing import FakeClock

__all__ = ["press"]

SUBMITTER = Actor(role=Role.SUBMITTER, name="someone")
WORKER = Actor(role=Role.WORKER, name="worker@host")
WAIT_S = ProjectorOptions().segment_s


async def work(stand: Stand, n: int, type_: str = "work", **options: Any) -> list[JobId]:
    """So many jobs, done: four events each."""
    jobs = [NewJob(job_id=JobId(f"{type_}-{next(stand._numbers)}"), type=type_, **options) for _ in range(n)]
    await stand.ledger.submit(SUBMITTER, jobs)
    claim = Claim(claim_id=ClaimId(f"claim-{next(stand._numbers)}"), types=(TypeClaim(type=type_),), start=n)
    held = (await stand.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    done = tuple(Advance(one.lease, "running", "complete") for one in held)
    await stand.ledger.turn(Turn(actor=WORKER, advances=done))
    return [job.job_id for job in jobs]


async def all_events(stand: Stand) -> list[Event]:
    return [event async for history in stand.ledger.histories() for event in history.events]


async def record(objects: ObjectStore) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Records with an object of their own, and segments with whose records are in them."""
    alone: dict[str, bytes] = {}
    shared: dict[str, list[str]] = {}
    after = None
    while True:
        page = await objects.list("audit/", after=after)
        for info in [info for info in page.items if not is_of_rebuild(info.key)]:
            found = await objects.get(info.key)
            assert found is not None
            if info.key.endswith(audit_log.SUFFIX):
                shared[info.key] = audit_log.event_ids(info.key, found.body)
            else:
                alone[info.key.rpartition("/")[2].removesuffix(".json")] = found.body
        if not page.more:
            return alone, shared
        after = page.items[-1].key


async def recorded_once(stand: Stand, objects: ObjectStore) -> None:
    alone, shared = await record(objects)
    counted = Counter([*alone, *itertools.chain.from_iterable(shared.values())])
    assert counted == Counter(event.id for event in await all_events(stand))


@pytest.mark.requirement("D35", "OBS-1")
async def test_records_of_jobs_wait_for_each_other_and_documents_do_not_wait_for_them(press: Press):
    projector = press.projector()
    await work(press.stand, 3)
    await press.stand.run_of()
    await press.all(projector)
    alone, shared = await record(press.store)
    assert (len(alone), shared) == (2, {})
    press.stand.clock.advance(WAIT_S - 0.1)
    await work(press.stand, 1)
    await press.all(projector)
    assert (await record(press.store))[1] == {}
    press.stand.clock.advance(0.1)
    await projector.run_once()
    _, shared = await record(press.store)
    assert [len(found) for found in shared.values()] == [16]
    await recorded_once(press.stand, press.store)
    assert (await projector.run_once()).written == 0


@pytest.mark.requirement("D35")
async def test_a_segment_is_written_when_it_is_full(press: Press, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "EVENTS_MAX", 10)
    await work(press.stand, 7)
    await press.all(press.projector())
    _, shared = await record(press.store)
    assert sorted(map(len, shared.values())) == [8, 10, 10]


@pytest.mark.requirement("D35")
async def test_a_segment_holds_no_more_bytes_than_it_may(press: Press, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "BYTES_MAX", 5_000)
    await work(press.stand, 2, payload=json.dumps("x" * 6_000).encode())
    projector = press.projector()
    await press.all(projector)
    await projector.release()
    sizes = [info.size for info in (await press.store.list("audit/")).items]
    assert len(sizes) > 2
    assert sum(size > 5_000 for size in sizes) == 2, "only a line that is longer by itself"
    await recorded_once(press.stand, press.store)


async def find_audit(objects: ObjectStore, event_id: str, at: datetime) -> dict[str, Any] | None:
    """The record of an event of that time: its own object, or its line in one of the day's segments.

    None if there is none.
    """
    own = await objects.get(ids.audit_key(at, event_id))
    if own is not None:
        return json.loads(own.body)
    async for key in _nearest(objects, at):
        segment = await objects.get(key)
        for made in audit_log.lines(key, segment.body) if segment is not None else ():
            if made.get("event_id") == event_id:
                return made
    return None


async def _nearest(objects: ObjectStore, at: datetime) -> AsyncGenerator[str]:
    """The day's segments, likeliest first: from the last that began by then back to the first, then the later ones."""
    folder, after = ids.segment_folder(at) + "/", None
    keys: list[str] = []
    while True:
        page = await objects.list(folder, after=after)
        keys += [info.key for info in page.items]
        if not page.more:
            break
        after = keys[-1]
    begun = ids.segment_key(at, "\N{LATIN SMALL LETTER Z WITH CARON}")
    for key in [*reversed([key for key in keys if key <= begun]), *(key for key in keys if key > begun)]:
        yield key


@pytest.mark.requirement("D35")
async def test_a_record_is_found_by_its_event(press: Press, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_log, "EVENTS_MAX", 4)
    for _ in range(3):
        await work(press.stand, 2)
        press.stand.clock.advance(1.0)
    await press.stand.run_of()
    projector = press.projector()
    await press.all(projector)
    await projector.release()
    events = await all_events(press.stand)
    for event in events:
        found = await find_audit(press.store, event.id, event.ts)
        assert found is not None
        assert (found["event_id"], found["to"]) == (event.id, event.target)
    assert await find_audit(press.store, "nobody-1", events[0].ts) is None


@pytest.mark.requirement("D35")
async def test_a_segment_holds_events_of_one_day(press: Press):
    late = datetime(2026, 1, 1, 23, 59, 59, tzinfo=UTC)
    press.stand.clock.advance(late.timestamp() - press.stand.clock())
    await work(press.stand, 2)
    press.stand.clock.advance(2.0)
    await work(press.stand, 1)
    projector = press.projector()
    await press.all(projector)
    await projector.release()
    _, shared = await record(press.store)
    assert {key.split("/")[1]: len(found) for key, found in shared.items()} == {"20260101": 8, "20260102": 4}


@pytest.mark.requirement("D35")
async def test_a_type_can_have_records_of_its_own_and_a_changed_choice_records_nothing_twice(press: Press):
    def projector(name: str, *alone: str) -> Projector:
        made = press.projector(name)
        made.options = ProjectorOptions(alone=frozenset(alone))
        return made

    first = projector("one", "special")
    await work(press.stand, 1)
    await work(press.stand, 1, "special")
    await press.all(first)
    assert len((await record(press.store))[0]) == 4
    await first._recorder.segments.write()  # and dies before it remembers
    press.stand.clock.advance(first.options.lease_s + 1)
    second = projector("two", "work")
    await work(press.stand, 1)
    await press.all(second)
    await second.release()
    await recorded_once(press.stand, press.store)
    await work(press.stand, 1)
    await work(press.stand, 1, "special")
    await press.all(second)
    await second.release()
    await recorded_once(press.stand, press.store)
    alone, _ = await record(press.store)
    assert {event_id.partition("-")[0] for event_id in list(alone)[-4:]} == {"work"}
    assert len(alone) == 8


def test_projector_position_round_trips_through_its_text():
    chosen = frozenset({"a.b", "c"})
    for ahead in (None, "0002"):
        for position, alone in ((None, chosen), (None, frozenset[str]()), ("0001", chosen), ("0001", frozenset[str]())):
            place = ProjectorPosition(position, alone, ahead)
            assert ProjectorPosition.read(place.to_text(), frozenset({"x"})) == place
    assert ProjectorPosition.read(None, frozenset({"x"})) == ProjectorPosition(None, frozenset({"x"}))


class Deadly:
    """An object store in which the projector dies at its nth put, before it happens or after."""

    def __init__(self, objects: ObjectStore, at: int, *, after: bool) -> None:
        self._objects = objects
        self._left = at
        self._after = after

    async def put(self, key: str, body: bytes, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise asyncio.CancelledError
        answer = await self._objects.put(key, body, **options)
        if self._left == 0:
            raise asyncio.CancelledError
        return answer

    async def put_many(self, sequences: Any) -> Any:
        return await put_one_by_one(self.put, sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


async def _publish_until_dead(stand: Stand, objects: Any, name: str) -> bool:
    """Whether it outlived everything there was to do."""
    made = Projector(
        ledger=stand.ledger,
        actor=Actor(role=Role.PROJECTOR, name=name),
        publisher=DocumentPublisher(objects),
        clock=stand.clock,
        options=ProjectorOptions(batch=7),
    )
    try:
        while (await made.run_once()).events:
            pass
        await made.release()
    except asyncio.CancelledError:
        stand.clock.advance(made.options.lease_s + 1)
        return False
    return True


@pytest.mark.requirement("D35", "OBS-1", "D14")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_projector_that_dies_at_any_put_records_every_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
):
    """Two die one after the other, each at any of its puts, while work goes on; the third ends it."""
    monkeypatch.setattr(audit_log, "EVENTS_MAX", 5)
    deaths, ended, first = 0, False, 0
    while not ended:
        first += 1
        clock, folder, second = FakeClock(), tmp_path / str(first), 1 + first % 3
        stand = Stand(await open_ledger(":memory:", clock=clock), clock)
        objects = await open_objects(f"file://{folder}")
        await work(stand, 3)
        await stand.run_of()
        await work(stand, 2)
        ended = await _publish_until_dead(stand, Deadly(objects, first, after=after), "one")
        await work(stand, 2)
        deaths += not await _publish_until_dead(stand, Deadly(objects, second, after=after), "two")
        await work(stand, 1)
        assert await _publish_until_dead(stand, objects, "three")
        await recorded_once(stand, objects)
        await stand.ledger.close()
        await objects.close()
    assert first > 8, "it was let die at each of its puts"
    assert deaths > 4


@pytest.mark.requirement("D35", "D14")
@pytest.mark.parametrize("later", [0, 2])
async def test_a_projector_that_slept_through_its_own_end_records_nothing_twice(press: Press, later: int):
    """It wakes with lines in its hands that another has written since, in fewer or in more lines."""
    sleeper, other = press.projector("sleeper"), press.projector("other")
    await work(press.stand, 2)
    await press.all(sleeper)
    press.stand.clock.advance(sleeper.options.lease_s + 1)
    await work(press.stand, later)
    await press.all(other)
    await other._write_segments()
    await sleeper._write_segments()
    assert not (await sleeper.run_once()).following
    press.stand.clock.advance(sleeper.options.lease_s + 1)
    await work(press.stand, 1)
    await press.all(sleeper)
    await sleeper.release()
    await recorded_once(press.stand, press.store)


@pytest.mark.requirement("D35", "D14")
async def test_lines_that_only_the_sleeper_had_are_taken_over_by_the_other(press: Press):
    sleeper, other = press.projector("sleeper"), press.projector("other")
    await work(press.stand, 2)
    await press.all(sleeper)
    press.stand.clock.advance(sleeper.options.lease_s + 1)
    other.options = ProjectorOptions(batch=3)
    await other.run_once()
    await sleeper._write_segments()
    await other._write_segments()
    assert not other._recorder.segments.settled, "the segment reaches beyond what it has read"
    press.stand.clock.advance(other.options.lease_s + 1)
    third = press.projector("third")
    await work(press.stand, 1)
    await press.all(third)
    await third.release()
    await recorded_once(press.stand, press.store)


async def test_segment_writer_reads_a_bounded_amount_during_a_store_outage(
    press: Press, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audit_log, "EVENTS_MAX", 8)
    projector = press.projector()
    projector.options = ProjectorOptions(batch=4)
    await work(press.stand, 6)
    press.objects.down = 10
    for _ in range(10):
        try:
            await projector.run_once()
        except StoreUnavailable:
            assert projector._recorder.segments.waiting <= 8
    press.objects.down = 0
    await press.all(projector)
    await projector.release()
    await recorded_once(press.stand, press.store)


@pytest.mark.requirement("D35", "OBS-1")
@pytest.mark.parametrize("body", [b'{"event_id": "somebody-1"}\n', b"[1]\n", b"no JSON", b""])
async def test_an_event_whose_segments_name_is_taken_gets_an_object_of_its_own(press: Press, body: bytes):
    await work(press.stand, 2)
    (first, *_) = events = await all_events(press.stand)
    key = ids.segment_key(first.ts, first.id)
    await press.store.put(key, body)
    projector = press.projector()
    await press.all(projector)
    await projector.release()
    assert projector._recorder.segments.settled
    found = await press.folder()
    assert found.pop(key) == body
    assert json.loads(found.pop(ids.alert_key(first.job_id)))["key"] == key
    (known,) = await press.stand.ledger.recorded([first])
    assert found.pop(ids.audit_key(first.ts, first.id)) == audit.to_bytes(known)
    (rest,) = found
    assert len(audit_log.event_ids(rest, found[rest])) == len(events) - 1
    await press.store.delete(key)
    await rebuild_objects(press.stand.ledger, press.store, Actor(role=Role.CONTROL_PLANE, name="admin"))
    assert len(await press.folder()) == 2, "its record is not made twice, and no alert is left"
    await recorded_once(press.stand, press.store)


@pytest.fixture
async def either_press(either_url: str, tmp_path: Path) -> AsyncGenerator[Press]:
    """On a ledger of each kind."""
    clock = FakeClock()
    ledger = await open_ledger(either_url)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Press(Stand(ledger, clock), objects)
    await objects.close()
    await ledger.close()


async def _write_before_the_ledger_was_set_back(press: Press, *lost: JobId) -> str:
    """A segment with everything that the ledger has, and then the first events of these jobs. Returns its key."""
    known = await press.stand.ledger.recorded(await all_events(press.stand))
    of_lost = [
        replace(known[0], event=replace(known[0].event, id=f"{job_id}-1", job_id=job_id, cause="lost"))
        for job_id in lost
    ]
    key = ids.segment_key(known[0].event.ts, known[0].event.id)
    await press.store.put(key, b"".join(audit.to_line(one) + b"\n" for one in (*known, *of_lost)))
    return key


@pytest.mark.requirement("D35", "OBS-1")
async def test_a_projector_goes_on_and_tells_where_a_segment_has_events_that_its_ledger_lost(
    either_press: Press, caplog: pytest.LogCaptureFixture
):
    """The ledger was set back: a dump was restored, or a standby took over that lacked the last commits."""
    press = either_press
    await work(press.stand, 2)
    key = await _write_before_the_ledger_was_set_back(press, JobId("lost-a"), JobId("lost-b"))
    projector = press.projector()
    projector.options = ProjectorOptions(segment_s=0.0)
    for _ in range(3):
        await projector.run_once()
    assert projector._recorder.segments.settled
    assert projector._stored_up_to == projector._events_up_to, "it does not stay behind"
    alert = json.loads((await press.folder())[ids.alert_key(JobId("lost-a"))])
    assert (alert["key"], alert["version"]) == (key, 1)
    assert [one.getMessage() for one in caplog.records if "segment_of_lost_events" in one.getMessage()]
    await work(press.stand, 1)
    await press.all(projector)
    await projector.release()
    _, shared = await record(press.store)
    assert sorted(map(len, shared.values())) == [4, 10]
    await press.store.delete(key)
    await rebuild_objects(press.stand.ledger, press.store, Actor(role=Role.CONTROL_PLANE, name="admin"))
    await recorded_once(press.stand, press.store)
    assert not [one for one in await press.folder() if one.startswith(ids.ALERT_FOLDER)]


@pytest.mark.requirement("D35")
async def test_a_store_that_does_not_take_the_alert_about_lost_events_makes_no_record_twice(press: Press):
    await work(press.stand, 2)
    await _write_before_the_ledger_was_set_back(press, JobId("lost"))
    projector = press.projector()
    projector.options = ProjectorOptions(segment_s=0.0)
    await projector.run_once()
    await work(press.stand, 1)
    press.objects.down = 1
    with pytest.raises(StoreUnavailable):
        await projector.run_once()
    for _ in range(2):
        await projector.run_once()
    _, shared = await record(press.store)
    assert sorted(map(len, shared.values())) == [4, 9]
    assert ids.alert_key(JobId("lost")) in await press.folder()


@pytest.mark.requirement("D35", "OBS-1")
async def test_an_event_with_the_id_of_a_lost_one_is_recorded(either_press: Press):
    """Its id is given out again after the ledger was set back."""
    press = either_press
    await work(press.stand, 1)
    again = JobId("again")
    key = await _write_before_the_ledger_was_set_back(press, again)
    await press.stand.ledger.submit(SUBMITTER, [NewJob(job_id=again, type="work")])
    projector = press.projector()
    projector.options = ProjectorOptions(segment_s=0.0)
    for _ in range(3):
        await projector.run_once()
    assert projector._recorder.segments.settled
    (event,) = [one for one in await all_events(press.stand) if one.job_id == again]
    (known,) = await press.stand.ledger.recorded([event])
    found = await press.folder()
    own = [body for name, body in found.items() if name != key and name.endswith(audit_log.SUFFIX)]
    assert own == [audit.to_line(known) + b"\n"]
    assert json.loads(found[ids.alert_key(again)])["key"] == key


@pytest.mark.requirement("OBS-1")
async def test_a_requeue_has_one_record_with_who_from_where_and_to_where(press: Press):
    ledger, admin = press.stand.ledger, Actor(role=Role.CONTROL_PLANE, name="olga@desk")
    await ledger.submit(ORCHESTRATOR, [NewJob(job_id=JobId("q"), type="inbox", lifecycle="queue-job")])
    await ledger.cancel(ORCHESTRATOR, JobId("q"), CancelMode.HARD, RequestId("c"), grace_s=0.0, cause="enough")
    for _ in range(2):
        await ledger.requeue(admin, [JobId("q")], RequestId("again"), limit=1, cause="after all")
    await press.all(press.projector())
    alone, _ = await record(press.store)
    assert sorted(alone) == ["q-1", "q-2", "q-3"]
    told = json.loads(alone["q-3"])
    assert {name: told[name] for name in ("event", "actor", "job_id", "from", "to", "node")} == {
        "event": "job_requeued",
        "actor": "control-plane",
        "job_id": "q",
        "from": "FAILED",
        "to": "QUEUED",
        "node": this_node(),
    }
    assert (told["actor_name"], told["cause"]) == ("olga@desk", "after all")


@pytest.mark.requirement("D35", "OBS-1")
async def test_jobs_of_other_lifecycles_have_records_of_their_own(press: Press):
    await press.stand.ledger.submit(ORCHESTRATOR, [NewJob(job_id=JobId("q"), type="inbox", lifecycle="queue-job")])
    await press.all(press.projector())
    alone, shared = await record(press.store)
    assert (list(alone), shared) == (["q-1"], {})

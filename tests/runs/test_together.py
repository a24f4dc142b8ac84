"""Many runs at once: their steps share transactions, they are published beside each other, and one that is lost takes no other with it."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import ORCHESTRATOR, PATIENCE_S, Stand
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import STEP_ENTRY
from trellis.engine.jobs import Actor, Claim, Claimed, ClaimId, Turn, TurnResult, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import RecordedEvent
from trellis.lifecycles import Role
from trellis.runs.job_pasts import JobPast
from trellis.runs.orchestrator import TYPE, Orchestrator, OrchestratorOptions, StepContext, StepResult
from trellis.runs.projector import EventRecorder, Projector
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import (
    OVERWRITE,
    ObjectStore,
    PutCondition,
    PutRefused,
    PutStored,
    StoreUnavailable,
    put_one_by_one,
)

RUNS = 8


class Counted:
    """The ledger, which counts what it is asked."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.turns: list[int] = []
        self.nows = 0
        self.reads: list[str] = []

    async def turn(self, turn: Turn) -> TurnResult:
        self.turns.append(len(turn.advances))
        return await self._ledger.turn(turn)

    async def now(self) -> object:
        self.nows += 1
        return await self._ledger.now()

    async def journal_entries(self, wanted: Any) -> object:
        self.reads.append(f"journal of {len(wanted)}")
        return await self._ledger.journal_entries(wanted)

    async def events_of(self, job_ids: Any, **options: Any) -> object:
        self.reads.append(f"events of {len(job_ids)}")
        return await self._ledger.events_of(job_ids, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ledger, name)


async def claim_all(stand: Stand) -> list[Claimed]:
    for number in range(RUNS):
        await stand.run_of(f"agent-{number}")
    claim = Claim(claim_id=ClaimId("all"), types=(TypeClaim(type=TYPE),), start=RUNS, lifecycle="run")
    return list((await stand.ledger.turn(Turn(actor=ORCHESTRATOR, claim=claim))).claimed)


class Meeting:
    """The first step waits until every run has come to it."""

    def __init__(self, stand: Stand) -> None:
        self._usual = stand.steps.acts["load-context"]
        self._came = 0
        self._all_there = asyncio.Event()
        stand.steps.acts["load-context"] = self

    async def __call__(self, context: StepContext, /) -> StepResult:
        self._came += 1
        if self._came == RUNS:
            self._all_there.set()
        await self._all_there.wait()
        return await self._usual(context)


async def test_steps_of_many_runs_share_transactions(stand: Stand):
    claimed, driver = await claim_all(stand), stand.driver()
    Meeting(stand)
    counted = driver.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    outcomes = await asyncio.wait_for(asyncio.gather(*map(driver.drive, claimed)), PATIENCE_S)
    assert [outcome.state for outcome in outcomes] == ["completed"] * RUNS
    assert sum(counted.turns) == RUNS * 5
    assert len(counted.turns) < RUNS * 5
    for lease in (one.lease for one in claimed):
        assert [event.version for event in await stand.events(lease.job_id)] == list(range(1, 9))


@pytest.mark.requirement("D16")
async def test_a_lost_lease_among_many_stops_only_its_own_run(stand: Stand):
    claimed, driver = await claim_all(stand), stand.driver()
    Meeting(stand)
    lost = claimed[3]
    claimed[3] = lost._replace(lease=lost.lease._replace(epoch=lost.lease.epoch + 1))
    outcomes = await asyncio.wait_for(asyncio.gather(*map(driver.drive, claimed)), PATIENCE_S)
    assert [outcome.state for outcome in outcomes] == ["completed"] * 3 + [None] + ["completed"] * 4
    assert await stand.state(lost.lease.job_id) == "running"


async def test_steps_carry_the_ledgers_time_asked_once_for_a_step_and_again_after_a_long_one(stand: Stand):
    run_id = await stand.run_of()
    claimed, driver = await stand.claim(), stand.driver()
    counted = driver.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    usual = stand.steps.acts["execute-agent"]

    async def slow(context: StepContext, /) -> StepResult:
        stand.clock.advance(7.5)
        return await usual(context)

    stand.steps.acts["execute-agent"] = slow
    assert claimed is not None
    await asyncio.wait_for(driver.drive(claimed), PATIENCE_S)
    assert counted.nows == 5
    kept = {name: json.loads(body) for name, body in (await stand.ledger.read_journal(run_id)).items()}
    first, second = kept[STEP_ENTRY.format(number=1)], kept[STEP_ENTRY.format(number=2)]
    assert first["finished_at"] == second["started_at"] == "2026-01-01T00:00:00.000Z"
    assert second["finished_at"] == "2026-01-01T00:00:07.500Z"


async def test_drives_that_ask_for_the_time_at_the_same_moment_ask_once(stand: Stand):
    driver = stand.driver()
    counted = driver.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    seen = await asyncio.gather(*(driver.ledger_time() for _ in range(RUNS)))
    assert {one.now for one in seen} == {await stand.ledger.now()}
    assert counted.nows == 1


async def test_runs_that_begin_at_the_same_moment_read_their_events_in_one_query(stand: Stand):
    runs, driver = [await stand.run_of(f"agent-{number}") for number in range(RUNS)], stand.driver()
    counted = driver.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    histories = await asyncio.gather(*(driver.history(run_id) for run_id in runs))
    assert counted.reads == [f"events of {RUNS}"]
    assert [{event.job_id for event in events} for events in histories] == [{run_id} for run_id in runs]


@pytest.mark.requirement("PIPE-3")
async def test_the_slot_of_an_ended_run_is_used_without_waiting_for_the_next_pass(stand: Stand):
    runs = [await stand.run_of(slug) for slug in ("one", "two", "three", "one")]
    numbers = itertools.count(1)
    orchestrator = Orchestrator(
        ledger=stand.ledger,
        actor=ORCHESTRATOR,
        clock=stand.clock,
        driver=stand.driver(),
        new_id=lambda: f"claim-of-one-{next(numbers)}",
        options=OrchestratorOptions(concurrency=1),
    )
    assert (await orchestrator.run_once()).claimed == 1

    async def all_over() -> bool:
        return {await stand.state(run) for run in runs} == {"completed"}

    await stand.until(all_over)
    await orchestrator.drain()


async def test_an_orchestrator_that_drains_takes_nothing_more(stand: Stand):
    runs = [await stand.run_of(slug) for slug in ("one", "two")]
    numbers = itertools.count(1)
    orchestrator = Orchestrator(
        ledger=stand.ledger,
        actor=ORCHESTRATOR,
        clock=stand.clock,
        driver=stand.driver(),
        new_id=lambda: f"claim-{next(numbers)}",
        options=OrchestratorOptions(concurrency=1),
    )
    begun = asyncio.Event()

    async def forever(context: StepContext, /) -> StepResult:
        begun.set()
        return await asyncio.get_running_loop().create_future()

    stand.steps.acts["load-context"] = forever
    await orchestrator.run_once()
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.wait_for(orchestrator.drain(), PATIENCE_S)
    assert [await stand.state(run) for run in runs] == ["running", "queued"]


class Store:
    """The object store; what is below `held` waits until something else was put, what is below `down` is refused."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.held = self.down = "nothing"
        self._other = asyncio.Event()

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        if key.startswith(self.down):
            raise StoreUnavailable(verb="put", key=key, reason="503")
        if key.startswith(self.held):
            await self._other.wait()
        elif not key.startswith("audit/"):
            self._other.set()
        return await self._objects.put(key, body, when=when)

    async def put_many(self, sequences: Any) -> Any:
        return await put_one_by_one(self.put, sequences)

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)


def projector(stand: Stand, store: Store | ObjectStore) -> Projector:
    actor = Actor(role=Role.PROJECTOR, name="projector@test")
    return Projector(ledger=stand.ledger, actor=actor, publisher=DocumentPublisher(store), clock=stand.clock)  # type: ignore[arg-type]


@pytest.mark.requirement("D14")
async def test_a_slow_run_does_not_hold_up_what_others_publish(stand: Stand, tmp_path: Path):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    store = Store(objects)
    slow, _ = await stand.run_of("slow"), await stand.run_of("quick")
    store.held = ids.run_folder("slow", slow)
    report = await asyncio.wait_for(projector(stand, store).run_once(), PATIENCE_S)
    assert report.events == 4
    await objects.close()


@pytest.mark.requirement("D14")
async def test_a_run_that_cannot_be_published_is_tried_again_and_the_others_are_there(stand: Stand, tmp_path: Path):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    store = Store(objects)
    one, other = await stand.run_of("one"), await stand.run_of("other")
    store.down = ids.run_folder("one", one)
    projecting = projector(stand, store)
    with pytest.raises(StoreUnavailable):
        await projecting.run_once()
    assert await objects.get(ids.status_key("one", one)) is None
    found = await objects.get(ids.status_key("other", other))
    assert found is not None
    assert json.loads(found.body)["status"] == "queued"
    store.down = "nothing"
    assert (await projecting.run_once()).events == 4
    assert await objects.get(ids.status_key("one", one)) is not None
    await objects.close()


@pytest.mark.requirement("D14")
async def test_a_run_whose_documents_cannot_be_made_holds_up_no_other(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    one, other = await stand.run_of("one"), await stand.run_of("other")
    documents = EventRecorder._documents

    async def unreadable(self: EventRecorder, record: RecordedEvent, past: JobPast, merged: int | None = 0) -> Any:
        if record.event.job_id == one:
            raise ValueError("an unreadable payload")
        return await documents(self, record, past, merged)

    monkeypatch.setattr(EventRecorder, "_documents", unreadable)
    with pytest.raises(ValueError, match="an unreadable payload"):
        await projector(stand, Store(objects)).run_once()
    assert await objects.get(ids.status_key("one", one)) is None
    assert await objects.get(ids.status_key("other", other)) is not None
    await objects.close()


async def publish_all(projecting: Projector) -> None:
    while (await projecting.run_once()).events:
        pass


async def published(objects: ObjectStore) -> dict[str, bytes]:
    stored = [await objects.get(info.key) for info in (await objects.list("")).items]
    return {one.key: one.body for one in stored if one is not None}


async def test_runs_are_published_from_events_that_were_met_and_one_read_of_their_step_files(
    stand: Stand, tmp_path: Path
):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    projecting = projector(stand, objects)
    counted = projecting.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    claimed, driver = await claim_all(stand), stand.driver()
    await publish_all(projecting)
    await asyncio.wait_for(asyncio.gather(*map(driver.drive, claimed)), PATIENCE_S)
    await publish_all(projecting)
    assert counted.reads == [f"journal of {RUNS * 5}"]
    statuses = [await objects.get(ids.status_key(f"agent-{n}", one.lease.job_id)) for n, one in enumerate(claimed)]
    assert [one and json.loads(one.body)["status"] for one in statuses] == ["completed"] * RUNS
    await objects.close()


@pytest.mark.requirement("D14", "RUN-3")
async def test_a_projector_that_begins_amid_runs_publishes_the_same_as_one_that_met_every_event(
    stand: Stand, tmp_path: Path
):
    one = await open_objects(f"file://{tmp_path / 'one'}")
    first = projector(stand, one)
    claimed, driver = await claim_all(stand), stand.driver()
    await publish_all(first)
    await first.release()
    await asyncio.wait_for(asyncio.gather(*map(driver.drive, claimed)), PATIENCE_S)
    second = projector(stand, one)
    counted = second.ledger = Counted(stand.ledger)  # type: ignore[assignment]
    await publish_all(second)
    assert counted.reads == [f"events of {RUNS}", f"journal of {RUNS * 5}"]
    other = await open_objects(f"file://{tmp_path / 'other'}")
    recorder = EventRecorder(stand.ledger, DocumentPublisher(other), frozenset())
    assert await recorder.take((await stand.ledger.feed(None, limit=1_000)).events) == RUNS * (22 - 7)
    assert await published(one) == await published(other)
    await one.close()
    await other.close()

"""What the projector publishes, and what readers may rely on while it does."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand, is_of_rebuild
from trellis.documents import audit, ids, run_documents
from trellis.documents.audit_chain import AuditSealer
from trellis.documents.publisher import DocumentPublisher, PublishedRuns, published_version
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId
from trellis.engine.records import RetentionOptions
from trellis.engine.step_runner import DriveOutcome
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import ProposalContent
from trellis.runs.orchestrator import RunDriver, RunDriverOptions
from trellis.runs.projector import AWAITED_S, EventRecorder, Projector
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import (
    OVERWRITE,
    ObjectStore,
    PutCondition,
    PutRefused,
    PutStored,
    StoredObject,
    StoreUnavailable,
    put_one_by_one,
)

SLUG = "archivist-violin"


class Traced:
    """An object store that notes every write that happened, and can be out of order for a while."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.tried: list[str] = []
        self.writes: list[str] = []
        self.bodies: list[bytes] = []
        self.down = 0
        self.lose_answers = 0

    @property
    def url(self) -> str:
        return self._objects.url

    async def get(self, key: str) -> StoredObject | None:
        return await self._objects.get(key)

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        self.tried.append(key)
        if self.down:
            self.down -= 1
            raise StoreUnavailable(verb="put", key=key, reason="503")
        answer = await self._objects.put(key, body, when=when)
        if isinstance(answer, PutStored):
            self.writes.append(key)
            self.bodies.append(body)
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreUnavailable(verb="put", key=key, reason="no answer")
        return answer

    async def put_many(self, sequences: Any) -> Any:
        return await put_one_by_one(self.put, sequences)

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)


class Press:
    """Ledger, store and projectors of one test."""

    def __init__(self, stand: Stand, objects: ObjectStore) -> None:
        self.stand = stand
        self.store = objects
        self.objects = Traced(objects)
        self.published = PublishedRuns(self.objects, stand.clock)  # type: ignore[arg-type]

    def projector(self, name: str = "projector@test") -> Projector:
        return Projector(
            ledger=self.stand.ledger,
            actor=Actor(role=Role.PROJECTOR, name=name),
            publisher=DocumentPublisher(self.objects),  # type: ignore[arg-type]
            clock=self.stand.clock,
        )

    async def all(self, projector: Projector) -> int:
        """Publish until there is nothing more; how many events."""
        count = 0
        while (report := await projector.run_once()).events:
            count += report.events
        return count

    async def drive(self, projector: Projector) -> tuple[JobId, DriveOutcome]:
        """A run from request to end, with the projector at work beside the driver."""
        run_id = await self.stand.run_of()
        claimed = await self.stand.claim()
        assert claimed is not None
        driver = RunDriver(
            ledger=self.stand.ledger,
            actor=ORCHESTRATOR,
            clock=self.stand.clock,
            steps=self.stand.steps.mapping(),
            published=self.published.reached,
            options=RunDriverOptions(),
        )
        driving = asyncio.ensure_future(driver.drive(claimed))
        while not driving.done():
            await projector.run_once()
            self.stand.clock.advance(0.01)
            await self.stand.ledger.job(run_id)
        await self.all(projector)
        return run_id, driving.result()

    async def version(self, slug: str, run_id: JobId) -> int | None:
        """What a run's status.json shows."""
        status = await self.published.status(slug, run_id)
        return None if status is None else status["version"]

    async def folder(self, prefix: str = "") -> dict[str, bytes]:
        page = await self.objects._objects.list(prefix)
        found = [await self.objects.get(info.key) for info in page.items if not is_of_rebuild(info.key)]
        return {one.key: one.body for one in found if one is not None}


@pytest.fixture
async def press(stand: Stand, tmp_path: Path) -> AsyncGenerator[Press]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Press(stand, objects)
    await objects.close()


@pytest.mark.requirement("OBS-2", "OBS-7", "PIPE-8", "PIPE-10", "PIPE-15", "D11")
async def test_a_run_ends_with_its_folder_complete_and_written_in_order(press: Press):
    run_id, outcome = await press.drive(press.projector())
    assert outcome.state == "completed"
    folder = ids.run_folder(SLUG, run_id) + "/"
    written = [key.removeprefix(folder) for key in press.objects.writes if key.startswith(folder)]
    first_step = written.index("steps/01-load-context.json")
    # Events before the first step's end share a status if they are read together. A step waits until readers see the one before.
    assert set(written[:first_step]) <= {"status.json"}
    assert written[first_step:] == [
        "steps/01-load-context.json",
        "status.json",
        "steps/02-execute-agent.json",
        "status.json",
        "output/proposal.json",
        "steps/03-persist-results.json",
        "status.json",
        "steps/04-finalize.json",
        "status.json",
        "manifest.json",
        "status.json",
    ]
    status = await press.published.status(SLUG, run_id)
    assert status is not None
    assert (status["status"], status["steps_completed"], status["version"]) == ("completed", 4, 8)


@pytest.mark.requirement("D58")
async def test_the_file_of_a_step_comes_before_its_record_and_that_before_the_status_that_counts_it(press: Press):
    run_id, _ = await press.drive(press.projector())
    written, counted = press.objects.writes, ids.status_key(SLUG, run_id)
    shown = {published_version(press.objects.bodies[n]): n for n, key in enumerate(written) if key == counted}
    events = await press.stand.ledger.events(run_id)
    steps = [event for event in events if event.type == "run.step.completed"]
    assert len(steps) == 4
    for number, event in enumerate(steps, 1):
        file = written.index(ids.step_key(SLUG, run_id, number))
        record = written.index(ids.audit_key(event.ts, event.id))
        assert file < record < shown[event.version], number


@pytest.mark.requirement("OBS-1", "D35")
async def test_every_event_has_exactly_one_audit_record(press: Press):
    run_id, _ = await press.drive(press.projector())
    events = await press.stand.events(run_id)
    records = await press.folder("audit/")
    known = await press.stand.ledger.recorded(events)
    assert records == {ids.audit_key(one.event.ts, one.event.id): audit.to_bytes(one) for one in known}
    assert len(records) == 8


@pytest.mark.requirement("PIPE-8", "PIPE-11", "RUN-2")
async def test_publishing_the_whole_feed_again_writes_nothing(press: Press):
    run_id, _ = await press.drive(press.projector())
    before, writes = await press.folder(), len(press.objects.writes)
    page = await press.stand.ledger.feed(None, limit=1_000)
    again = EventRecorder(press.stand.ledger, DocumentPublisher(press.objects), frozenset())  # type: ignore[arg-type]
    assert await again.take(page.events) == 0
    assert await press.folder() == before
    assert len(press.objects.writes) == writes
    assert (await press.stand.state(run_id)) == "completed"


@pytest.mark.requirement("RUN-3", "D14")
async def test_an_older_version_never_replaces_a_newer_one(press: Press):
    run_id, _ = await press.drive(press.projector())
    facts = await press.stand.facts(run_id)
    key, late = ids.status_key(SLUG, run_id), DocumentPublisher(press.objects)  # type: ignore[arg-type]
    for version in range(1, len(facts.events) + 1):
        old = run_documents.Publication(
            key, run_documents.status(replace(facts, events=facts.events[:version])), version
        )
        assert await late.publish([old]) == 0
    status = await press.published.status(SLUG, run_id)
    assert status is not None
    assert status["version"] == 8


@pytest.mark.requirement("D14")
async def test_a_second_projector_waits_and_then_goes_on_where_the_first_stopped(press: Press):
    first, second = press.projector("one"), press.projector("two")
    await press.stand.run_of()
    assert (await first.run_once()).events == 2
    assert not (await second.run_once()).following
    await first.release()
    await press.stand.run_of("architect-guardian")
    report = await second.run_once()
    assert (report.following, report.events) == (True, 2)


@pytest.mark.requirement("D14", "PIPE-12")
@pytest.mark.parametrize("fault", ["down", "lose_answers"])
async def test_a_store_that_fails_is_tried_again_and_nothing_is_lost_or_doubled(press: Press, fault: str):
    run_id = await press.stand.run_of()
    projector = press.projector()
    setattr(press.objects, fault, 1)
    for _ in range(6):
        try:
            if not (await projector.run_once()).events:
                break
        except StoreUnavailable:
            continue
    status = await press.published.status(SLUG, run_id)
    assert status is not None
    assert status["status"] == "queued"
    assert len(await press.folder("audit/")) == 2
    keys = [key for key in press.objects.writes if not key.endswith("status.json")]
    assert len(keys) == len(set(keys))


@pytest.mark.requirement("OBS-1", "D14", "D61")
async def test_a_store_that_is_away_longer_than_work_is_kept_loses_no_record(press: Press):
    ledger, projector = press.stand.ledger, press.projector()
    press.objects.down = 1_000
    run_id = await press.stand.run_of()
    await ledger.cancel(ORCHESTRATOR, run_id, CancelMode.HARD, RequestId("c"), grace_s=0.0, cause=None)
    events = await ledger.events(run_id)
    assert len(events) == 3
    with pytest.raises(StoreUnavailable):
        await projector.run_once()
    press.stand.clock.advance(40 * 24 * 3600.0)
    assert (await ledger.retain(RetentionOptions())).jobs == 0
    press.objects.down = 0
    projector = press.projector()
    projector.sealer = AuditSealer(ledger=ledger, actor=projector.actor, objects=press.store, clock=press.stand.clock)
    await press.all(projector)
    records = await press.folder("audit/")
    assert {ids.audit_key(event.ts, event.id) for event in events} <= records.keys()
    assert (await ledger.retain(RetentionOptions())).jobs == 0, "it is published and not sealed yet"
    await projector.release()
    assert (await ledger.retain(RetentionOptions())).jobs == 1
    assert await ledger.job(run_id) is None


@pytest.mark.requirement("D14")
async def test_a_job_whose_object_differs_is_set_aside_and_the_others_go_on(
    press: Press, caplog: pytest.LogCaptureFixture
):
    stand, run_id = press.stand, await press.stand.run_of("one")
    first = (await stand.events(run_id))[0]
    key, alert = ids.audit_key(first.ts, first.id), ids.alert_key(run_id)
    await press.objects.put(key, b"somebody else's")
    projector = press.projector()
    others = [(f"other-{n}", await stand.run_of(f"other-{n}")) for n in range(2)]
    await press.all(projector)
    assert [await press.version(*one) for one in others] == [2, 2]
    assert await press.version("one", run_id) is None
    assert (await press.folder("audit/"))[key] == b"somebody else's"
    assert json.loads((await press.folder())[alert]) == {"job_id": run_id, "version": 1, "key": key}
    await stand.ledger.cancel(ORCHESTRATOR, run_id, CancelMode.HARD, RequestId("c"), grace_s=0, cause="enough")
    await press.all(projector)
    assert await press.version("one", run_id) is None, "nothing is shown of it that comes after what differs"
    assert press.objects.writes.count(alert) == 1
    assert caplog.text.count("set_aside") == 1
    await projector.release()
    await press.store.delete(key)
    later = await stand.run_of("one")
    await press.all(press.projector("next"))
    assert await press.version("one", later) == 2
    assert alert in await press.folder(), "it is tried again with its next event"


@pytest.mark.requirement("D14", "OBS-1")
async def test_a_record_that_differs_is_reported_for_a_job_without_documents(press: Press):
    job_id = JobId("q")
    await press.stand.ledger.submit(ORCHESTRATOR, [NewJob(job_id=job_id, type="inbox", lifecycle="queue-job")])
    (event,) = await press.stand.ledger.events(job_id)
    key = ids.audit_key(event.ts, event.id)
    await press.store.put(key, b"somebody else's")
    await press.all(press.projector())
    assert (await press.folder("audit/"))[key] == b"somebody else's"
    assert ids.alert_key(job_id) in await press.folder("alerts/")


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("how", ["the same projector", "the next one"])
async def test_a_job_that_was_set_aside_is_published_completely_later(press: Press, how: str):
    stand, run_id = press.stand, await press.stand.run_of("one")
    first = (await stand.events(run_id))[0]
    key, projector = ids.audit_key(first.ts, first.id), press.projector()
    await press.objects.put(key, b"somebody else's")
    await press.all(projector)
    await press.store.delete(key)
    if how == "the next one":
        await projector.release()
        projector = press.projector("next")
    await stand.ledger.cancel(ORCHESTRATOR, run_id, CancelMode.HARD, RequestId("c"), grace_s=0, cause="enough")
    await press.all(projector)
    assert await press.version("one", run_id) == 3
    assert len(await press.folder("audit/")) == 3
    assert ids.alert_key(run_id) not in await press.folder()


async def test_a_status_that_is_no_json_is_of_its_run_alone(press: Press):
    run_id = await press.stand.run_of("one")
    await press.objects.put(ids.status_key("one", run_id), b"no JSON")
    other = await press.stand.run_of("two")
    await press.all(press.projector())
    assert await press.version("two", other) == 2
    assert ids.alert_key(run_id) in await press.folder()


@pytest.mark.requirement("PIPE-7", "D21", "OBS-1")
async def test_proposals_are_published_with_their_state(press: Press):
    proposal = proposals.make_proposal(
        "run_2026-02-14_080000_abc123", SLUG, 1, ProposalContent(action="propose-edit", target="a", content={})
    )
    await proposals.store_proposals(press.stand.ledger, ORCHESTRATOR, [proposal])
    await press.all(press.projector())
    found = await press.folder(f"agents/{SLUG}/proposals/")
    assert [json.loads(body)["status"] for body in found.values()] == ["pending"]
    assert len(await press.folder("audit/")) == 1


@pytest.mark.requirement("RUN-3", "PIPE-10")
async def test_a_reader_never_sees_a_version_go_back_nor_a_step_counted_that_it_cannot_read(press: Press):
    projector, seen, faults = press.projector(), list[int](), list[str]()
    stop = asyncio.Event()

    async def read(run_id: str) -> None:
        while not stop.is_set():
            status = await press.published.status(SLUG, run_id)
            if status is not None:
                seen.append(status["version"])
                for number in range(1, status["steps_completed"] + 1):
                    if await press.objects.get(ids.step_key(SLUG, run_id, number)) is None:
                        faults.append(f"step {number} at version {status['version']}")
            await asyncio.sleep(0)

    reading = asyncio.ensure_future(read("run_2026-02-14_080000_000001"))
    run_id, _ = await press.drive(projector)
    assert run_id == "run_2026-02-14_080000_000001"
    await press.stand.until(lambda: bool(seen) and seen[-1] == 8)
    stop.set()
    await reading
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4
    assert not faults


async def test_the_next_documents_are_looked_for_sooner_while_some_are_published(press: Press):
    """A run waits until its step can be read, and then takes the next one: a long pause would be one in every step."""
    projector = press.projector()
    empty = await projector.run_once()
    assert (empty.events, projector.pause_s(empty)) == (0, projector.options.poll_s)
    await press.stand.run_of()
    assert await press.all(projector) > 0
    empty = await projector.run_once()
    assert projector.pause_s(empty) == projector.options.awaited_poll_s < projector.options.poll_s / 5
    press.stand.clock.advance(AWAITED_S)
    assert projector.pause_s(empty) == projector.options.poll_s


async def test_records_that_wait_for_their_segment_are_not_looked_for_sooner(press: Press):
    projector = press.projector()
    await press.stand.ledger.submit(GATEWAY, [NewJob(job_id=JobId("plain"), type="t", payload=b"{}")])
    while (report := await projector.run_once()).events:
        pass
    assert projector.pause_s(report) == projector.options.poll_s

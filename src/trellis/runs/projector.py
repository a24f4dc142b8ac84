"""The projector: publishes what the ledger decided, and keeps a list of jobs that it could not publish."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby

from trellis.artifacts.rows import ArtifactRow
from trellis.documents import audit, ids
from trellis.documents import run_documents as documents
from trellis.documents.act_records import ActRecorder
from trellis.documents.audit_segments import SegmentLine, SegmentWriter, line_of
from trellis.documents.errors import DocumentDiffers
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import Publication, RunFacts, RunRequest, encode
from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, JobId, Subscription
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, RecordedEvent
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN
from trellis.proposals import proposal
from trellis.runs import finalization
from trellis.storage.objects.store import ObjectStore, StoreError

# Jobs that the projector has set aside, because the object store holds something else where they publish.
#
# One object for each, `alerts/projector/<job>.json`, made when it happens and taken away when the job could be published after all. So
# the next projector, and `doctor`, know of it too.


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorAlert:
    """The first event of a job that could not be published whole, and the object that was in the way."""

    job_id: JobId
    version: int
    key: str

    def to_bytes(self) -> bytes:
        """As an object."""
        return encode(asdict(self))


async def read_alerts(objects: ObjectStore) -> AsyncGenerator[ProjectorAlert]:
    """Every alert there is; what cannot be read is none."""
    after: str | None = None
    while True:
        page = await objects.list(f"{ids.ALERT_FOLDER}/", after=after)
        for info in page.items:
            found = await objects.get(info.key)
            alert = None if found is None else _read(found.body)
            if alert is not None:
                yield alert
        if not page.more:
            return
        after = page.items[-1].key


async def raise_alert(objects: ObjectStore, alert: ProjectorAlert) -> None:
    """Make it known; one job has one alert, the newest."""
    await objects.put(ids.alert_key(alert.job_id), alert.to_bytes())


async def withdraw_alert(objects: ObjectStore, job_id: JobId) -> None:
    """The job is published after all."""
    await objects.delete(ids.alert_key(job_id))


def _read(body: bytes) -> ProjectorAlert | None:
    try:
        told = json.loads(body)
        return ProjectorAlert(job_id=JobId(told["job_id"]), version=int(told["version"]), key=told["key"])
    except (ValueError, KeyError, TypeError):
        return None


# Publishes what the ledger decided: follows the feed and puts documents and audit records into the object store (D14, D35, OBS-1).
#
# Administrative acts are not in the feed: each pass publishes those that have no record yet (`act_records`).
#
# One projector at a time follows; the ledger keeps its place, so the next one goes on where it stopped. An event may be published
# twice, after a crash between publishing and remembering: the second time nothing is written, because documents are functions of
# the ledger and are only ever created or raised. Records that wait for their segment hold the place back: it is remembered only when
# everything before it is published, documents never wait for it, and what one segment holds is found there by whoever comes again.
# Documents have a lane of their own: while more than a page is unread, each pass first publishes the next documents, wherever in the feed
# they stand, and only then a page of the rest. So people who wait for a run do not wait behind the records of 200,000 plain jobs.
# Only a store that is away holds the place: a job whose object is not what the ledger recorded is set aside.

SUBSCRIBER_NAME = "projector"
SEGMENTED = frozenset({LEASED_JOB.name, BUS_JOB.name})
"""Lifecycles whose events share segments; every other event has an audit record of its own."""
DOCUMENTED = frozenset(LIFECYCLES) - SEGMENTED
"""Lifecycles that people wait for: of these come the documents."""
PAYLOADS_MAX = 1_000
JOBS_AT_ONCE = 16
"""Jobs whose documents are put at the same time."""
BEGINNING = "-"
AHEAD = "documents="
"""What stands before the position up to which documents are published, where they are ahead; no job type looks like it."""
REBUILDING = "rebuilding"
"""The place of a projector while lost jobs are put back: nobody publishes them anew."""

_log = log_of("trellis.projector")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorOptions:
    """How it follows."""

    batch: int = 500
    lease_s: float = 5.0
    poll_s: float = 0.05
    """How soon it looks again at the earliest when there was nothing."""
    segment_s: float = 10.0
    """How long a record waits for others to share its segment."""
    alone: frozenset[str] = frozenset()
    """Job types whose every event gets an object of its own, where it would share a segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorReport:
    """What one pass did. `following` false: another projector does the work."""

    following: bool = False
    events: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class ProjectorPosition:
    """Where a projector goes on, and which types had records of their own from there: a choice holds from place to place.

    Up to `position` everything is published, up to `documents` everything but what goes into segments.
    """

    position: str | None
    alone: frozenset[str]
    documents: str | None = None
    """None when that is no further than `position`."""

    @classmethod
    def read(cls, text: str | None, alone: frozenset[str]) -> "ProjectorPosition":
        """From what the ledger remembers; a projector that begins has its own choice."""
        if text is None:
            return cls(None, alone)
        position, *others = text.split(" ")
        ahead = [one.removeprefix(AHEAD) for one in others if one.startswith(AHEAD)]
        types = [type_ for one in others if not one.startswith(AHEAD) for type_ in one.split(",")]
        place = None if position == BEGINNING else position
        return cls(place, frozenset(filter(None, types)), ahead[0] if ahead else None)

    def to_text(self) -> str:
        """What the ledger remembers."""
        ahead = "" if self.documents is None else f"{AHEAD}{self.documents}"
        return " ".join(filter(None, (self.position or BEGINNING, ",".join(sorted(self.alone)), ahead)))


@dataclass(frozen=True, slots=True)
class _JobPast:
    """Every event of a job, and its journal if one of the events to publish is about it."""

    events: tuple[Event, ...]
    journal: Mapping[str, bytes]


class EventRecorder:
    """Publishes events, those of one job in the order in which they are given: documents and single records at once, the others by segments.

    A job of which the store holds something else is set aside, and the others go on. With its next event it is tried again from where it
    stopped, so that nothing is shown of it that was not published before.
    """

    def __init__(self, ledger: Ledger, publisher: DocumentPublisher, alone: frozenset[str]) -> None:
        self.alone = alone
        self.segments = SegmentWriter(publisher.create, self._record_alone)
        self.older = 0
        """Records that are there in another format."""
        self.differing: dict[str, ProjectorAlert] = {}
        """What was found in the way, by its key."""
        self._ledger = ledger
        self._publisher = publisher
        self._payloads: OrderedDict[JobId, bytes] = OrderedDict()
        self._aside: dict[JobId, ProjectorAlert] | None = None

    async def take(self, events: Sequence[Event], between: Callable[[], Awaitable[None]] | None = None) -> int:
        """Publish what does not wait, then let the rest wait; how many objects were written.

        After an error the same events may be given again. `between` is called after every event that was published.
        """
        families, waiting = dict[JobId, list[RecordedEvent]](), list[RecordedEvent]()
        for record in await self._ledger.recorded(events):
            if record.event.lifecycle in SEGMENTED and record.type not in self.alone:
                waiting.append(record)
            else:
                families.setdefault(await self._family(record), []).append(record)
        written = await self._publish_families(families.values(), between) if families else 0
        for record in waiting:
            if not self.segments.is_recorded(record.event.id):
                self.segments.add(line_of(record))
        return written

    async def _family(self, record: RecordedEvent) -> JobId:
        """Whose events are published one after the other: a job's own, and those of the artifacts that were made for it."""
        row = await self._artifact(record)
        return record.event.job_id if row is None else row.job_id

    async def _publish_families(
        self, families: Iterable[Sequence[RecordedEvent]], between: Callable[[], Awaitable[None]] | None
    ) -> int:
        """Families beside each other, each one's events in their order. An error is raised when all have come to an end."""
        room = asyncio.Semaphore(JOBS_AT_ONCE)
        if self._aside is None:
            self._aside = {alert.job_id: alert async for alert in read_alerts(self._publisher.objects)}
        aside = self._aside

        async def one(family: Sequence[RecordedEvent]) -> int:
            async with room:
                jobs = [list(records) for _, records in groupby(family, key=lambda record: record.event.job_id)]
                return sum([await self._publish_job(records, between, aside) for records in jobs])

        answers = await asyncio.gather(*map(one, families), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(answer for answer in answers if isinstance(answer, int))

    async def _publish_job(
        self,
        records: Sequence[RecordedEvent],
        between: Callable[[], Awaitable[None]] | None,
        aside: dict[JobId, ProjectorAlert],
    ) -> int:
        job_id, written = records[0].event.job_id, 0
        alert = aside.get(job_id)
        if alert is not None:
            records = await self._since(alert.version, records)
        past = await self._past(records)
        for record in records:
            try:
                written += await self._publish(record, past)
            except DocumentDiffers as differs:
                aside[job_id] = await self._set_aside(record.event, str(differs.data["key"]), alert)
                return written
            if between is not None:
                await between()
        if aside.pop(job_id, None) is not None:
            await withdraw_alert(self._publisher.objects, job_id)
        return written

    async def _since(self, version: int, records: Sequence[RecordedEvent]) -> Sequence[RecordedEvent]:
        """These records, and before them those that could not be published."""
        first = records[0].event
        missed = [one for one in await self._ledger.events(first.job_id) if version <= one.version < first.version]
        return [*await self._ledger.recorded(missed), *records]

    async def _set_aside(self, event: Event, key: str, known: ProjectorAlert | None) -> ProjectorAlert:
        alert = ProjectorAlert(job_id=event.job_id, version=event.version, key=key)
        self.differing[key] = alert
        if alert != known:
            await raise_alert(self._publisher.objects, alert)
            _log.error(
                "set_aside", job_id=event.job_id, key=key, event_id=event.id, remedy="trellis rebuild --from ledger"
            )
        return alert

    async def _publish(self, record: RecordedEvent, past: "_JobPast") -> int:
        """Everything one event publishes. What it counts comes before its audit record, what it shows or takes away after it."""
        files, shown = await self._documents(record, past)
        written = await self._publisher.publish(files)
        for one in await self._before(record):
            written += await self._record(one)
        written += await self._record(record)
        row = await self._artifact(record)
        if row is not None:
            await finalization.delete_published(self._publisher.objects, row)
        return written + await self._publisher.publish(shown)

    async def _record(self, record: RecordedEvent) -> bool:
        event, body = record.event, audit.to_bytes(record)
        try:
            return await self._put_record(ids.audit_key(event.ts, event.id), event.id, body)
        except DocumentDiffers:
            if event.lifecycle != NLM_JOB.name:
                raise
            # A backend that lost its ledger executes the same job in the same epoch again: other events of the same names.
            other = f"{event.id}.{documents.sha256(body)[:16]}"
            return await self._put_record(ids.audit_key(event.ts, other), event.id, body)

    async def _put_record(self, key: str, event_id: str, body: bytes) -> bool:
        there = await self._publisher.create(key, body)
        if there != body:
            if not audit.is_older(there, event_id):
                raise DocumentDiffers(key=key)
            self.older += 1
        return there is body

    async def _record_alone(self, segment: str, line: SegmentLine) -> None:
        """Give an event an object of its own, because its segment's name is taken."""
        job_id, _, version = line.event_id.rpartition("-")
        alert = ProjectorAlert(job_id=JobId(job_id), version=int(version), key=segment)
        self.differing[segment] = alert
        await raise_alert(self._publisher.objects, alert)
        _log.error("segment_differs", key=segment, event_id=line.event_id)
        try:
            key = ids.audit_key(line.at, line.event_id)
            await self._put_record(key, line.event_id, audit.line_to_bytes(line.body))
        except DocumentDiffers as differs:
            self.differing[str(differs.data["key"])] = alert
            _log.error("set_aside", job_id=job_id, key=differs.data["key"], event_id=line.event_id)

    async def _past(self, records: Sequence[RecordedEvent]) -> "_JobPast":
        """What the documents of one job follow from, read once for all of its events in a page."""
        event = records[0].event
        if event.lifecycle not in {RUN.name, PROPOSAL.name}:
            return _JobPast((), {})
        counts = any(record.event.type == documents.STEP_DONE for record in records)
        journal = await self._ledger.read_journal(event.job_id) if counts else {}
        return _JobPast(tuple(await self._ledger.events(event.job_id)), journal)

    async def _documents(self, record: RecordedEvent, past: "_JobPast") -> tuple[list[Publication], list[Publication]]:
        """What one event counts, and what it shows."""
        event = record.event
        row = await self._artifact(record)
        if row is not None:
            return await finalization.publications(self._ledger, self._publisher.objects, row), []
        if event.lifecycle not in {RUN.name, PROPOSAL.name}:
            return [], []
        events = [one for one in past.events if one.version <= event.version]
        payload = await self._payload(record)
        if event.lifecycle == PROPOSAL.name:
            return [], [proposal.publication(payload, events)]
        facts = RunFacts(event.job_id, RunRequest.read(payload), tuple(events))
        return documents.step_publications(facts, past.journal), documents.state_publications(facts)

    async def _before(self, record: RecordedEvent) -> Sequence[RecordedEvent]:
        """What must be recorded before this: of an artifact's finalization the completion that made it."""
        row = await self._artifact(record)
        return () if row is None else await finalization.completion(self._ledger, row)

    async def _artifact(self, record: RecordedEvent) -> ArtifactRow | None:
        """The artifact as this event left it; None for any other job."""
        event = record.event
        if event.lifecycle != ARTIFACT.name:
            return None
        return ArtifactRow.of_payload(event.job_id, await self._payload(record), event.target, event.ts)

    async def _payload(self, record: RecordedEvent) -> bytes:
        job_id = record.event.job_id
        found = self._payloads.get(job_id)
        if found is None:
            job = await self._ledger.job(job_id) if record.submission is None else record.submission
            found = b"" if job is None or job.payload is None else job.payload
            self._payloads[job_id] = found
            if len(self._payloads) > PAYLOADS_MAX:
                self._payloads.popitem(last=False)
        return found


@dataclass(kw_only=True)
class Projector:
    """The service. A pass reads a page of the feed, publishes it, and remembers how far it came."""

    ledger: Ledger
    actor: Actor
    publisher: DocumentPublisher
    clock: Clock
    options: ProjectorOptions = field(default_factory=ProjectorOptions)
    name: str = "projector"
    waits_for_events = True
    _following: Subscription | None = None
    _recorder: EventRecorder = field(init=False)
    _acts: ActRecorder = field(init=False)
    _read_up_to: str | None = None
    """Up to here everything was taken; what goes into segments may still wait there."""
    _documents_up_to: str | None = None
    """Up to here every document is published; never before `_read_up_to`."""
    _is_behind: bool = False
    """Whether more than a page was unread when the last pass looked."""
    _remembered: str | None = None
    _waiting_since: float | None = None
    _kept_at: float = 0.0

    async def run_once(self) -> ProjectorReport:
        """Documents first, then one page. What the store does not take now is tried again from the same place."""
        following = self._following or await self._begin()
        if following is None:
            return ProjectorReport()
        done = ProjectorReport(following=True)
        try:
            if self._is_behind:
                done = await self._publish_documents(following, done)
            if self._recorder.segments.full:
                await self._write_segments()
            done = await self._publish_page(following, done)
            done = replace(done, written=done.written + await self._acts.publish_new())
            if self._segments_are_due():
                done = replace(done, written=done.written + await self._write_segments())
            await self._remember(following)
        except _TakenOver:
            self._following = None
            _log.warning("taken_over", projector=self.actor.name)
            return replace(done, following=False)
        return done

    async def _publish_documents(self, following: Subscription, done: ProjectorReport) -> ProjectorReport:
        """Publish the next documents, past whatever waits for segments before them."""
        page = await self.ledger.feed(self._documents_up_to, limit=self.options.batch, lifecycle=DOCUMENTED)
        written = await self._recorder.take(page.events, self._renewing(following))
        self._documents_up_to = page.position
        return replace(done, events=done.events + len(page.events), written=done.written + written)

    async def _publish_page(self, following: Subscription, done: ProjectorReport) -> ProjectorReport:
        """Take the next page, without the documents that are published already."""
        page = await self.ledger.feed(self._read_up_to, limit=self.options.batch)
        ahead = self._documents_up_to or ""
        events = [
            event
            for event, position in zip(page.events, page.positions, strict=True)
            if event.lifecycle in SEGMENTED or position > ahead
        ]
        written = await self._recorder.take(events, self._renewing(following))
        self._is_behind = len(page.events) >= self.options.batch
        self._read_up_to = page.position
        self._documents_up_to = max(ahead, page.position)
        return replace(done, events=done.events + len(page.events), written=done.written + written)

    def pause_s(self, report: ProjectorReport) -> float:
        """At once while there is more."""
        if not report.following:
            return self.options.lease_s / 5
        return 0.0 if report.events else self.options.poll_s

    async def release(self) -> None:
        """Write what waits, and let another projector go on at once."""
        following, self._following = self._following, None
        if following is None:
            return
        try:
            await self._write_segments()
            await self._remember(following)
        except (StoreError, _TakenOver) as error:
            # Nothing is lost: whoever is next goes on from the place that was remembered last.
            _log.warning("segments_left", projector=self.actor.name, error=str(error))
        await self.ledger.unsubscribe(following)

    async def _begin(self) -> Subscription | None:
        following = await self.ledger.subscribe(self.actor, SUBSCRIBER_NAME, lease_s=self.options.lease_s)
        if following is None:
            return None
        if following.position == REBUILDING:
            _log.warning("rebuild_unfinished", projector=self.actor.name, remedy="trellis rebuild --from objects")
            await self.ledger.unsubscribe(following)
            return None
        place = ProjectorPosition.read(following.position, self.options.alone)
        if following.position is None:
            await self.ledger.ack(following, place.to_text(), lease_s=self.options.lease_s)
        self._recorder = EventRecorder(self.ledger, self.publisher, place.alone)
        self._acts = ActRecorder(self.ledger, self.actor, self.publisher)
        self._following, self._waiting_since, self._kept_at = following, None, self.clock.monotonic()
        self._read_up_to = self._remembered = place.position
        self._documents_up_to, self._is_behind = place.documents or place.position, False
        return following

    def _renewing(self, following: Subscription) -> Callable[[], Awaitable[None]]:
        """Keeps the place while a long page is published."""
        renewed_at = self.clock.monotonic()

        async def renew() -> None:
            nonlocal renewed_at
            if self.clock.monotonic() > renewed_at + self.options.lease_s / 3:
                renewed_at = self.clock.monotonic()
                await self._keep(following, None)

        return renew

    async def _keep(self, following: Subscription, place: str | None) -> None:
        if not await self.ledger.ack(following, place, lease_s=self.options.lease_s):
            raise _TakenOver
        self._kept_at = self.clock.monotonic()

    async def _remember(self, following: Subscription) -> None:
        """The place, when it is another and nothing before it waits; else only now and then that somebody is here."""
        if self._read_up_to == self._remembered or not self._recorder.segments.settled:
            if self.clock.monotonic() >= self._kept_at + self.options.lease_s / 3:
                await self._keep(following, None)
            return
        ahead = self._documents_up_to if self._documents_up_to != self._read_up_to else None
        await self._keep(following, ProjectorPosition(self._read_up_to, self.options.alone, ahead).to_text())
        self._remembered, self._recorder.alone = self._read_up_to, self.options.alone

    def _segments_are_due(self) -> bool:
        if not self._recorder.segments.waiting:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = self.clock.monotonic()
        late = self.clock.monotonic() >= self._waiting_since + self.options.segment_s
        return late or self._recorder.segments.full

    async def _write_segments(self) -> int:
        written = await self._recorder.segments.write()
        self._waiting_since = None
        return written


class _TakenOver(Exception):
    """Another projector follows now."""

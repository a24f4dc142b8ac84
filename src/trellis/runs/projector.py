"""The projector: publishes the ledger's events as documents and audit records.

It keeps alerts for jobs that it cannot publish.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby

from trellis.artifacts.rows import ArtifactRow
from trellis.documents import audit, ids
from trellis.documents import run_documents as documents
from trellis.documents.audit_chain import AuditSealer, SealedRecord, is_block_of, sealed_line
from trellis.documents.audit_log import ActRecorder, SegmentLine, SegmentWriter, line_of
from trellis.documents.errors import DocumentDiffers
from trellis.documents.publisher import DocumentPublisher
from trellis.documents.run_documents import Publication, RunFacts
from trellis.engine.errors import LedgerError, TrellisError
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, FeedPage, RecordedEvent
from trellis.engine.subscription import PROJECTOR, FeedReport, FeedSubscriber, SubscriptionOptions, TakenOver
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.proposals import proposal
from trellis.runs import finalization
from trellis.runs.job_pasts import DOCUMENTED, JobPast, JobPasts
from trellis.storage.objects.canonical_json import encode, sha256
from trellis.storage.objects.store import ObjectStore, StoreError, listed_pages

# Alerts: jobs that the projector cannot publish, because the object store holds something else under one of their keys.
#
# Each alert is one object, `alerts/projector/<job>.json`. It is written when the conflict is found and deleted once the
# job could be published. So the next projector and `doctor` see it too.


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorAlert:
    """The first event of a job that could not be published completely, and the key of the object in the way."""

    job_id: JobId
    version: int
    key: str

    def to_bytes(self) -> bytes:
        return encode(asdict(self))


async def read_alerts(objects: ObjectStore) -> AsyncGenerator[ProjectorAlert]:
    """Every alert in the store. Unreadable alerts are skipped."""
    async for page in listed_pages(objects, f"{ids.ALERT_FOLDER}/"):
        for info in page.items:
            stored = await objects.get(info.key)
            alert = None if stored is None else _read(stored.body)
            if alert is not None:
                yield alert


async def raise_alert(objects: ObjectStore, alert: ProjectorAlert) -> None:
    """Store an alert. A job has one alert, the newest."""
    await objects.put(ids.alert_key(alert.job_id), alert.to_bytes())


async def withdraw_alert(objects: ObjectStore, job_id: JobId) -> None:
    """Delete the alert of a job that is published now."""
    await objects.delete(ids.alert_key(job_id))


def _read(body: bytes) -> ProjectorAlert | None:
    try:
        fields = json.loads(body)
        return ProjectorAlert(job_id=JobId(fields["job_id"]), version=int(fields["version"]), key=fields["key"])
    except (ValueError, KeyError, TypeError):
        return None


# The projector (D14, D35, OBS-1). It follows the ledger's feed and writes documents and audit records to the object
# store.
#
# - Administrative acts are not in the feed. Each pass publishes those without a record (`audit_log`).
# - One projector runs at a time. The ledger stores its position, so the next one continues there.
# - An event may be published twice, after a crash between publishing and storing the position. The second time writes
#   nothing: documents are functions of the ledger and are only created or replaced by a higher version.
# - The position is stored only when everything before it is published. Records that wait for their segment hold it
#   back; documents never wait for it. A projector that reads the same events again finds them in the segment already
#   written.
# - Documents are published ahead of segments. While more than a page is unread, each pass first publishes the next
#   documents, wherever they are in the feed, and then one page of the rest. So a document of a run does not wait behind
#   the records of 200,000 plain jobs.
# - What is published is sealed in the audit chain (`documents.audit_chain`), by the same process and after it is stored.
# - Only an unavailable store stops the projector. A job whose object differs from what the ledger recorded is set
#   aside.

SEGMENTED = frozenset({LEASED_JOB.name, BUS_JOB.name})
"""Lifecycles whose events share segments. Every other event has its own audit record object."""
NOT_SEGMENTED = frozenset(LIFECYCLES) - SEGMENTED
"""Lifecycles whose events are published one by one, ahead of the segments. All documents come from these."""
JOBS_AT_ONCE = 16
"""Number of jobs whose documents are written concurrently, where the store has something in their way."""
EVENTS_TOGETHER = 64
"""Number of events whose objects are written with one call of the store."""
AWAITED_S = 1.0
"""For how long after a document was published its job's next one is expected soon."""
NO_PAST = JobPast((), {})
NO_JOB = JobId("")
"""The alert about a block of the audit chain is stored under no job."""
NOTED_MAX = 20_000
"""The most hashes of published records that are remembered for the audit chain."""
BEGINNING = "-"
AHEAD = "documents="
"""Prefix of the position up to which documents are published, when that is ahead. No job type begins like this."""
REBUILDING = "rebuilding"
"""The projector's position while a ledger rebuild is unfinished. No projector publishes then."""

_log = log_of("trellis.projector")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorOptions(SubscriptionOptions):
    """Settings of the projector."""

    poll_s: float = 0.05
    awaited_poll_s: float = 0.005
    """`poll_s` while documents are expected. A run takes its next step when the one before can be read."""
    segment_s: float = 10.0
    """How long a record waits for others to share its segment."""
    alone: frozenset[str] = frozenset()
    """Job types whose events get an object each instead of sharing a segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorReport(FeedReport):
    """Result of one pass."""

    written: int = 0


@dataclass(frozen=True, slots=True)
class ProjectorPosition:
    """Where a projector continues, and which job types have separate records from there to the next stored position.

    Up to `position` everything is published. Up to `documents` everything except segments is published.
    """

    position: str | None
    alone: frozenset[str]
    documents: str | None = None
    """None when it is not ahead of `position`."""

    @classmethod
    def read(cls, text: str | None, alone: frozenset[str]) -> "ProjectorPosition":
        """Parse the position that the ledger stored. A projector without one takes `alone` from its own options."""
        if text is None:
            return cls(None, alone)
        position, *others = text.split(" ")
        ahead = [one.removeprefix(AHEAD) for one in others if one.startswith(AHEAD)]
        types = [type_ for one in others if not one.startswith(AHEAD) for type_ in one.split(",")]
        place = None if position == BEGINNING else position
        return cls(place, frozenset(filter(None, types)), ahead[0] if ahead else None)

    def to_text(self) -> str:
        """The text that the ledger stores."""
        ahead = "" if self.documents is None else f"{AHEAD}{self.documents}"
        return " ".join(filter(None, (self.position or BEGINNING, ",".join(sorted(self.alone)), ahead)))


Family = Sequence[RecordedEvent]
"""Events that are published in sequence: those of a job, with those of the artifacts that belong to it."""


class EventRecorder:
    """Publishes events, those of one job in the order given.

    Documents and single records are written at once, other records go into segments.

    A job for which the store holds something else is set aside, and the others go on. Its next event makes the recorder
    try again from the event where it stopped, so no later state is shown before the earlier ones are published.
    """

    def __init__(self, ledger: Ledger, publisher: DocumentPublisher, alone: frozenset[str]) -> None:
        self.alone = alone
        self.segments = SegmentWriter(publisher.create, self._record_alone, self._tell_foreign)
        self.older = 0
        """Number of existing records in another format."""
        self.differing: dict[str, ProjectorAlert] = {}
        """Alerts by the key of the object that was in the way."""
        self.noted: dict[str, SealedRecord] | None = None
        """Hashes of the records that were published, by event id, until the sealer takes them. None if nothing seals."""
        self._ledger = ledger
        self._publisher = publisher
        self._pasts = JobPasts(ledger)
        self._aside: dict[JobId, ProjectorAlert] | None = None

    async def take(self, events: Sequence[Event], between: Callable[[], Awaitable[None]] | None = None) -> int:
        """Publish documents and single records, and queue the rest for segments. Returns how many objects were written.

        After an error the same events may be given again. `between` is called after every published event.
        """
        families, waiting = dict[JobId, list[RecordedEvent]](), list[RecordedEvent]()
        for record in await self._ledger.recorded(events):
            if record.event.lifecycle in SEGMENTED and record.type not in self.alone:
                waiting.append(record)
            else:
                self._note(record)
                families.setdefault(await self._family(record), []).append(record)
        written = await self._publish_families(families.values(), between) if families else 0
        for record in waiting:
            line = line_of(record)
            self._note(record, line.body)
            self.segments.add(line)
        return written

    def _note(self, record: RecordedEvent, line: bytes | None = None) -> None:
        """Remember the hash of a record for the audit chain."""
        if self.noted is None:
            return
        if len(self.noted) >= NOTED_MAX:
            self.noted.clear()  # the sealer reads them from the ledger
        self.noted[record.event.id] = sealed_line(record.event, line or audit.to_line(record), "")

    async def _family(self, record: RecordedEvent) -> JobId:
        """The job whose events are published in sequence with these.

        This is the event's own job, or the job that an artifact belongs to.
        """
        row = await self._artifact(record)
        return record.event.job_id if row is None else row.job_id

    async def _publish_families(self, families: Iterable[Family], between: Callable[[], Awaitable[None]] | None) -> int:
        """Publish families concurrently, each family's events in order.

        An error is raised after all families have finished.
        """
        room = asyncio.Semaphore(JOBS_AT_ONCE)
        if self._aside is None:
            self._aside = {alert.job_id: alert async for alert in read_alerts(self._publisher.objects)}
        aside = self._aside

        async def one(family: Family) -> int:
            async with room:
                return sum([await self._publish_job(records, between, aside) for records in _jobs(family)])

        together, alone = list[Family](), list[Family]()
        for family in families:
            (together if self._is_plain(family, aside) else alone).append(family)
        answers: list[int | BaseException] = []
        for batch in _batches(together):
            try:
                written, error, left = await self._publish_together(batch)
            except LedgerError:
                raise
            except (TrellisError, ValueError, LookupError):  # the one that cannot be published says so when it is alone
                written, error, left = 0, None, batch
            answers += [written] if error is None else [written, error]
            alone += left
            if between is not None:
                await between()
        answers += await asyncio.gather(*map(one, alone), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(answer for answer in answers if isinstance(answer, int))

    def _is_plain(self, family: Family, aside: Mapping[JobId, ProjectorAlert]) -> bool:
        """Whether the objects of a family follow from its events alone, and nothing is known to be in their way."""
        return not any(record.event.lifecycle == ARTIFACT.name or record.event.job_id in aside for record in family)

    async def _publish_together(self, families: Sequence[Family]) -> tuple[int, StoreError | None, list[Family]]:
        """Publish several families with one call of the store.

        Returns how many objects were written, an error of the store, and the families that are not published, because
        the store has something else under a key of theirs.
        """
        pasts = await self._pasts.read(records for family in families for records in _jobs(family))
        sequences = [await self._objects_of(family, pasts.get(family[0].event.job_id, NO_PAST)) for family in families]
        results = await self._publisher.publish_all(sequences)
        error = next((result.error for result in results if result.error is not None), None)
        left = [
            family for family, result in zip(families, results, strict=True) if result.left and result.error is None
        ]
        return sum(result.written for result in results), error, left

    async def _objects_of(self, family: Family, past: JobPast) -> list[Publication]:
        """Every object that publishes consecutive events of a job, in order.

        A document with versions is made once, for the last event: readers would see the earlier versions for less than
        a millisecond.
        """
        objects, last = list[Publication](), family[-1]
        for record in family:
            merged = last.event.version - family[0].event.version if record is last else None
            files, shown = await self._documents(record, past, merged)
            key = ids.audit_key(record.event.ts, record.event.id)
            objects += (*files, Publication(key, audit.to_bytes(record)), *shown)
        return objects

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
        past = (await self._pasts.read([records])).get(job_id, NO_PAST)
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
        """These records, preceded by those that could not be published before."""
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

    async def _publish(self, record: RecordedEvent, past: JobPast) -> int:
        """Publish one event.

        Step files and artifact bytes come before its audit record, state documents and deletions after it.
        """
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
            # A backend that lost its ledger executes the same job in the same epoch again. The event ids repeat with
            # other content.
            other = f"{event.id}.{sha256(body)[:16]}"
            return await self._put_record(ids.audit_key(event.ts, other), event.id, body)

    async def _put_record(self, key: str, event_id: str, body: bytes) -> bool:
        there = await self._publisher.create(key, body)
        if there != body:
            if not audit.is_older(there, event_id):
                raise DocumentDiffers(key=key)
            self.older += 1
        return there is body

    async def _record_alone(self, segment: str, line: SegmentLine) -> None:
        """Write an event's record as a separate object, because the name of its segment is taken."""
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

    async def _tell_foreign(self, segment: str, event_id: str) -> None:
        """Tell that a segment has events of a state that the ledger has lost: it was set back."""
        job_id, _, version = event_id.rpartition("-")
        alert = ProjectorAlert(job_id=JobId(job_id), version=int(version), key=segment)
        self.differing[segment] = alert
        await raise_alert(self._publisher.objects, alert)
        _log.error("segment_of_lost_events", key=segment, event_id=event_id, remedy="docs/how-to/rebuild.md")

    async def _documents(
        self, record: RecordedEvent, past: JobPast, merged: int | None = 0
    ) -> tuple[list[Publication], list[Publication]]:
        """The documents to publish before the audit record of an event, and those to publish after it.

        `merged` versions of a document before this one are published with it. None leaves out documents with versions.
        """
        event = record.event
        row = await self._artifact(record)
        if row is not None:
            return await finalization.publications(self._ledger, self._publisher.objects, row), []
        if event.lifecycle not in DOCUMENTED:
            return [], []
        events = past.until(event)
        if event.lifecycle == PROPOSAL.name:
            payload = await self._pasts.payload(record)
            return [], [] if merged is None else [replace(proposal.publication(payload, events), merged=merged)]
        facts = RunFacts(event.job_id, await self._pasts.request(record), events)
        return documents.step_publications(facts, past.journal), documents.state_publications(facts, merged)

    async def _before(self, record: RecordedEvent) -> Sequence[RecordedEvent]:
        """Records that must be written before this one: for an artifact's finalization, the completion of its job."""
        row = await self._artifact(record)
        return () if row is None else await finalization.completion(self._ledger, row)

    async def _artifact(self, record: RecordedEvent) -> ArtifactRow | None:
        """The artifact as this event left it; None if the job is not an artifact."""
        event = record.event
        if event.lifecycle != ARTIFACT.name:
            return None
        return ArtifactRow.of_payload(event.job_id, await self._pasts.payload(record), event.target, event.ts)


def _jobs(family: Family) -> list[list[RecordedEvent]]:
    """The events of a family, those of one job that follow each other together."""
    return [list(records) for _, records in groupby(family, key=lambda record: record.event.job_id)]


def _batches(families: Sequence[Family]) -> Iterator[list[Family]]:
    """Families that are published together: of EVENTS_TOGETHER events, and of one family that has more."""
    batch, events = list[Family](), 0
    for family in families:
        if batch and events + len(family) > EVENTS_TOGETHER:
            yield batch
            batch, events = [], 0
        batch.append(family)
        events += len(family)
    if batch:
        yield batch


@dataclass(kw_only=True)
class Projector(FeedSubscriber[ProjectorOptions]):
    """The service. Each pass reads a page of the feed, publishes it, and stores how far it came.

    It reads at two positions of the feed and stores both, as one text.
    """

    publisher: DocumentPublisher
    sealer: AuditSealer | None = None
    """Seals what was published. None publishes without sealing."""
    options: ProjectorOptions = field(default_factory=ProjectorOptions)
    name: str = PROJECTOR
    follows_as: str = PROJECTOR
    _recorder: EventRecorder = field(init=False)
    _acts: ActRecorder = field(init=False)
    _events_up_to: str | None = None
    """Feed position up to which events were read. Their segment lines may still wait to be written."""
    _stored_up_to: str | None = None
    """The value of `_events_up_to` in the stored position."""
    _documents_up_to: str | None = None
    """Feed position up to which every document is published. Never before `_events_up_to`."""
    _is_behind: bool = False
    """Whether the last pass read a full page."""
    _may_have_chain_alert: bool = True
    """Whether an alert says that sealing has stopped, perhaps one of an earlier process."""
    _waiting_since: float | None = None
    _awaited_until: float = -math.inf
    """Until when further documents are expected soon, by this process's clock."""

    async def run_once(self) -> ProjectorReport:
        """Publish documents first, then one page.

        After a store error the next pass continues from the same position.
        """
        done = ProjectorReport(following=True)
        try:
            if not self.follows and not await self.begin():
                return ProjectorReport()
            if self.saved is None:
                await self.remember(ProjectorPosition(None, self._recorder.alone).to_text())
            if self._is_behind:
                done = await self._publish_documents(done)
            if self._recorder.segments.full:
                await self._write_segments()
            done = await self._publish_page(done)
            done = replace(done, written=done.written + await self._publish_acts())
            if self._segments_are_due():
                done = replace(done, written=done.written + await self._write_segments())
            await self._store_position()
            await self._seal()
        except TakenOver:
            return replace(done, following=False)
        return done

    def pause_s(self, report: FeedReport) -> float:
        """As of every subscriber, but shorter after an empty page while documents are expected."""
        is_awaited = report.following and not report.events and self.clock.monotonic() < self._awaited_until
        return self.options.awaited_poll_s if is_awaited else super().pause_s(report)

    async def _publish_documents(self, done: ProjectorReport) -> ProjectorReport:
        """Publish the next documents, ahead of records that wait for segments."""
        page = await self.ledger.feed(self._documents_up_to, limit=self.options.batch, lifecycle=NOT_SEGMENTED)
        written = await self._recorder.take(page.events, self.keep)
        self._documents_up_to = page.position
        self._note_documents(page.events)
        return replace(done, events=done.events + len(page.events), written=done.written + written)

    async def _publish_page(self, done: ProjectorReport) -> ProjectorReport:
        """Publish the next page, without the documents that are already published."""
        page = await self.ledger.feed(self._events_up_to, limit=self.options.batch)
        ahead = self._documents_up_to or ""
        events = [
            event
            for event, position in zip(page.events, page.positions, strict=True)
            if event.lifecycle in SEGMENTED or position > ahead
        ]
        written = await self._recorder.take(events, self.keep)
        self._note_documents(events)
        self._pass_on(page)
        self._is_behind = len(page.events) >= self.options.batch
        self._events_up_to = page.position
        self._documents_up_to = max(ahead, page.position)
        if not self._is_behind:
            await self._recorder.segments.feed_ended()
        return replace(done, events=done.events + len(page.events), written=done.written + written)

    def _note_documents(self, published: Sequence[Event]) -> None:
        if any(event.lifecycle in DOCUMENTED for event in published):
            self._awaited_until = self.clock.monotonic() + AWAITED_S

    def _pass_on(self, page: FeedPage) -> None:
        """Give the sealer the hashes of a page. If one is not known any more, it reads the page from the ledger."""
        noted = self._recorder.noted
        if self.sealer is None or noted is None:
            return
        known = [noted.pop(event.id, None) for event in page.events]
        records = [
            replace(one, position=position)
            for one, position in zip(known, page.positions, strict=True)
            if one is not None
        ]
        if len(records) == len(known) and page.position != self._events_up_to:
            self.sealer.note(self._events_up_to, page.position, records)

    async def _publish_acts(self) -> int:
        written = await self._acts.publish_new()
        if written and self.sealer is not None:
            self.sealer.act_published()
        return written

    async def _seal(self, *, ending: bool = False) -> None:
        """Seal what is published up to the stored position.

        A block that is not what the ledger says stops the sealing and nothing else. An alert tells it, and
        `trellis audit verify` names it.
        """
        if self.sealer is None:
            return
        try:
            if ending:
                await self.sealer.seal_before_end(self._stored_up_to)
            elif await self.sealer.seal(self._stored_up_to) and self._may_have_chain_alert:
                await self._withdraw_chain_alert(self.sealer.chain)
                self._may_have_chain_alert = False
        except DocumentDiffers as differs:
            if differs.data["key"] not in self._recorder.differing:
                key = str(differs.data["key"])
                alert = ProjectorAlert(job_id=NO_JOB, version=0, key=key)
                self._may_have_chain_alert = True
                await raise_alert(self.publisher.objects, alert)
                self._recorder.differing[key] = alert
                _log.error("audit_block_differs", key=key, remedy="trellis audit verify")

    async def _withdraw_chain_alert(self, chain: str) -> None:
        """Delete the alert about a block of this chain, if there is one: a bucket may allow no deletes."""
        stored = await self.publisher.objects.get(ids.alert_key(NO_JOB))
        alert = None if stored is None else _read(stored.body)
        if alert is not None and is_block_of(alert.key, chain):
            await withdraw_alert(self.publisher.objects, NO_JOB)
            self._recorder.differing.pop(alert.key, None)

    async def release(self) -> None:
        """Write the waiting segments, and give up the subscription so that another projector can continue at once."""
        if not self.follows:
            return
        try:
            await self._write_segments()
            await self._store_position()
            await self._seal(ending=True)
        except (StoreError, TakenOver) as error:
            # Nothing is lost: the next projector continues from the last stored position.
            _log.warning("segments_left", projector=self.actor.name, error=str(error))
        await super().release()

    async def begin(self, first: str | None = None) -> bool:
        """Take the subscription. False while another projector holds it, or a rebuild of the ledger is unfinished."""
        if not await super().begin(first):
            return False
        if self.saved == REBUILDING:
            _log.warning("rebuild_unfinished", projector=self.actor.name, remedy="trellis rebuild --from objects")
            await super().release()
            return False
        place = ProjectorPosition.read(self.saved, self.options.alone)
        self._recorder = EventRecorder(self.ledger, self.publisher, place.alone)
        self._acts = ActRecorder(self.ledger, self.actor, self.publisher)
        self._waiting_since = None
        self._events_up_to = self._stored_up_to = place.position
        self._documents_up_to, self._is_behind = place.documents or place.position, False
        if self.sealer is not None:
            self._recorder.noted = {}
            await self.sealer.begin()
        return True

    async def _store_position(self) -> None:
        """Store the position if it changed and no segment line waits.

        Otherwise only renew the subscription from time to time.
        """
        if self._events_up_to == self._stored_up_to or not self._recorder.segments.settled:
            await self.keep()
            return
        ahead = self._documents_up_to if self._documents_up_to != self._events_up_to else None
        await self.remember(ProjectorPosition(self._events_up_to, self.options.alone, ahead).to_text())
        self._stored_up_to, self._recorder.alone = self._events_up_to, self.options.alone

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

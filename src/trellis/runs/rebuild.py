"""Rebuilds the object store from the ledger, or a lost ledger from the audit records (D14, PIPE-8, OBS-1).

Both rebuilds hold the projector's subscription while they work, so no projector publishes at the same time. Both also
finish what a projector left undone, which includes deleting the bytes of an artifact whose end is recorded.

From the ledger: nothing that exists is changed. Missing objects are created, versioned documents only get a higher
version, and objects that differ are reported.

From the records: a job is restored completely or not at all, and a job that the ledger has is left alone. Until the
rebuild is complete, the projector's position is `REBUILDING`, so an interrupted rebuild can be started again and
continues. Restoring a job changes nothing in the object store. A document that shows a higher version than the records
proves that records are lost.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace

from trellis.auth.principals import require
from trellis.documents import audit, audit_log, ids, run_documents
from trellis.documents.audit_chain import INSTANCE_CHAIN, continue_chain, last_block, restart_chain
from trellis.documents.audit_log import ActRecorder, listed_keys, recorded_rebuild
from trellis.documents.errors import LedgerHasOthers, RebuildError, RecordInUse, RecordInvalid
from trellis.documents.publisher import DocumentPublisher, published_version
from trellis.documents.run_documents import RunRequest
from trellis.engine.errors import HistoryBroken, LedgerError, NotAllowed, Refused, TrellisError
from trellis.engine.jobs import Actor, JobId, Subscription
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, JobToRestore
from trellis.engine.restoration import check_restorable
from trellis.engine.subscription import PROJECTOR
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.runs import finalization
from trellis.runs.job_pasts import DOCUMENTED
from trellis.runs.projector import (
    REBUILDING,
    SEGMENTED,
    EventRecorder,
    ProjectorPosition,
    read_alerts,
    withdraw_alert,
)
from trellis.runs.spool import RecordedLife, RecordSpool
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.store import ObjectInfo, ObjectStore, StoreError, listed_pages

OBJECTS = "objects.rebuilt"
LEDGER = "ledger.rebuilt"
"""Event names of the administrative acts that record a rebuild."""
LEASE_S = 60.0
PAGE = 500
READS_AT_ONCE = 16
BATCH_JOBS = 200
BATCH_BYTES = 16 * 1024 * 1024
REFUSALS_KEPT = 1_000
ELSEWHERE = frozenset({NLM_JOB.name})
"""Lifecycles whose jobs are not restored.

The NLM backend has its own ledger and is asked again for lost jobs (D42, NLM-6).
"""

Progress = Callable[[str, int], None]
"""Callback that receives the name of the current phase and the number of items done in it."""
Keep = Callable[..., Awaitable[None]]
"""Renews the projector's subscription and, if a position is given, stores it.

Raises RecordInUse when it was taken over.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectsRebuildReport:
    """Result of a rebuild of the object store."""

    jobs: int = 0
    events: int = 0
    written: int = 0
    older: int = 0
    """Number of existing audit records in another format. They are left unchanged."""
    differing: tuple[str, ...] = ()
    """Keys of objects that differ from what the ledger recorded.

    They stay unchanged, and later events of their jobs are not published.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreRefusal:
    """A job that was not restored, and the reason."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRebuildReport:
    """Result of a rebuild of the ledger."""

    records: int = 0
    jobs: int = 0
    events: int = 0
    there: int = 0
    """Number of jobs that the ledger already had."""
    removed: int = 0
    """Number of jobs that retention had removed before: a later job has the same id or idempotency key."""
    refused: int = 0
    refusals: tuple[RestoreRefusal, ...] = field(default_factory=tuple)
    """The first `REFUSALS_KEPT` of the refused jobs."""


# --- from the ledger -------------------------------------------------------------------------------------------------


async def rebuild_objects(
    ledger: Ledger,
    objects: ObjectStore,
    actor: Actor,
    *,
    alone: frozenset[str] = frozenset(),
    chain: str = INSTANCE_CHAIN,
    cause: str | None = None,
    on_progress: Progress = lambda _what, _count: None,
) -> ObjectsRebuildReport:
    """Publish every object that the store lacks, and record the rebuild as an administrative act.

    `chain` is the audit chain of this ledger: the NLM backend's ledger has one of its own. Raises NotAllowed, before
    anything is written, when the actor may not record acts. Raises RebuildError while a ledger rebuild is unfinished,
    RecordInUse and StoreUnavailable.
    """
    require(actor, "record_act")
    done, position = ObjectsRebuildReport(), None
    recording = recorded_rebuild(ledger, objects, actor, OBJECTS, cause)
    async with _as_projector(ledger, actor) as following, recording as act:
        if following.position == REBUILDING:
            raise RebuildError(
                detail="Jobs are still being put back: finish that first, with `trellis rebuild --from objects`."
            )
        place, keep = ProjectorPosition.read(following.position, alone), _keeping(ledger, following)
        segments = set[str]()

        def wrote(key: str) -> None:
            act.wrote(key)
            if key.endswith(audit_log.SUFFIX):
                segments.add(key)

        recorder = EventRecorder(ledger, DocumentPublisher(objects, wrote), alone)
        with closing(RecordSpool()) as recorded:
            await _read_record(objects, recorded, on_progress, keep, bodies=False)
            while (page := await ledger.feed(position, limit=PAGE)).events:
                there = zip(page.events, page.positions, strict=True)
                written = await recorder.take([one for one, at in there if _is_wanted(one, at, place, recorded)])
                written += await recorder.segments.write() if recorder.segments.full else 0
                done = ObjectsRebuildReport(
                    jobs=done.jobs + sum(event.version == 1 for event in page.events),
                    events=done.events + len(page.events),
                    written=done.written + written,
                )
                position = page.position
                await keep()
                on_progress("events published", done.events)
        acts = ActRecorder(ledger, actor, DocumentPublisher(objects, act.wrote))
        written = done.written + await recorder.segments.write() + await acts.publish_all()
        await _withdraw_alerts(objects, recorder, segments)
        await restart_chain(ledger, objects, actor, chain)
        differing = tuple(sorted({*recorder.differing, *acts.differing}))
        done = replace(done, written=written, older=recorder.older, differing=differing)
        act.facts = {**asdict(done), "differing": listed_keys(list(done.differing))}
        return done


async def _withdraw_alerts(objects: ObjectStore, recorder: EventRecorder, written: Container[str]) -> None:
    """Delete alerts about objects that are gone, or were and are made again.

    The recorder withdraws alerts of published jobs itself; alerts about segments are withdrawn only here.
    """
    async for alert in read_alerts(objects):
        if alert.key not in recorder.differing and (alert.key in written or await objects.head(alert.key) is None):
            await withdraw_alert(objects, alert.job_id)


def _is_wanted(event: Event, at: str, place: ProjectorPosition, recorded: RecordSpool) -> bool:
    """Whether the rebuild publishes this event.

    Segments are rebuilt only up to the projector's position: it writes later ones itself.
    """
    if event.lifecycle not in SEGMENTED:
        return True
    return place.position is not None and at <= place.position and event not in recorded


# --- from the records ------------------------------------------------------------------------------------------------


async def rebuild_ledger(
    ledger: Ledger,
    objects: ObjectStore,
    actor: Actor,
    *,
    alone: frozenset[str] = frozenset(),
    tellers: Sequence[str] = (),
    cause: str | None = None,
    on_progress: Progress = lambda _what, _count: None,
) -> LedgerRebuildReport:
    """Restore every recorded job, and record the rebuild as an administrative act.

    `tellers` are feed subscribers that notify others. Those without a position start after the restored events, which
    were announced before the ledger was lost.

    Raises RecordInUse, LedgerHasOthers, RecordInvalid, NotAllowed, StoreUnavailable.
    """
    recording = recorded_rebuild(ledger, objects, actor, LEDGER, cause)
    async with _as_projector(ledger, actor) as following, recording as act:
        keep = _keeping(ledger, following)
        with closing(RecordSpool()) as spool:
            await _read_record(objects, spool, on_progress, keep, bodies=True)
            if following.position != REBUILDING:
                await _refuse_others(ledger, spool)
            await keep(REBUILDING)
            returning = _LedgerRestorer(ledger, objects, actor, spool)
            async for done in returning.all_jobs():
                await keep()
                on_progress("jobs put back", done.jobs + done.there)
            for acts in spool.acts():
                await ledger.restore_acts(actor, acts)
                await keep()
            recorder = EventRecorder(ledger, DocumentPublisher(objects, act.wrote), alone)
            end = await _publish_others(ledger, recorder, spool, returning.behind, keep)
            for name in tellers:
                await _begin_after(ledger, actor, name, end)
            await keep(ProjectorPosition(end, alone).to_text())
            if await last_block(objects, INSTANCE_CHAIN) is not None:
                await continue_chain(ledger, objects, actor)
            done = replace(returning.done, records=len(spool))
            counts = {name: value for name, value in asdict(done).items() if name != "refusals"}
            act.facts = {**counts, "refused_jobs": [refusal.job_id for refusal in done.refusals]}
            return done


async def _refuse_others(ledger: Ledger, spool: RecordSpool) -> None:
    """Raise LedgerHasOthers if the ledger holds a job that the records do not, or that has another history there.

    Such a ledger is a different one, or was not lost.
    """
    async for history in ledger.histories():
        if history.job.lifecycle in ELSEWHERE:
            continue
        born = audit.timestamp(history.job.created_at)
        known = [record.event for record in spool.records(history.job.job_id, born)]
        if not known:
            raise LedgerHasOthers(job_id=history.job.job_id, problem="is not in the record")
        if list(map(_facts, known)) != list(map(_facts, history.events)):
            raise LedgerHasOthers(job_id=history.job.job_id, problem="has another history there than in the record")


def _facts(event: Event) -> Event:
    """The event without `data`, whose white space is not recorded, and without `node`, which old records lack."""
    return replace(event, data=None, node=None)


async def _publish_others(
    ledger: Ledger, recorder: EventRecorder, spool: RecordSpool, behind: Container[JobId], keep: Keep
) -> str:
    """Publish events that are not recorded yet and documents that lag behind the records.

    Returns the end of the feed.
    """
    position = None
    while True:
        page = await ledger.feed(position, limit=PAGE)
        position = page.position
        await recorder.take([event for event in page.events if event.job_id in behind or event not in spool])
        await keep()
        if not page.events:
            await recorder.segments.write()
            return position
        if recorder.segments.full:
            await recorder.segments.write()


class _LedgerRestorer:
    """Restores recorded jobs into the ledger in batches."""

    def __init__(self, ledger: Ledger, objects: ObjectStore, actor: Actor, spool: RecordSpool) -> None:
        self._ledger = ledger
        self._objects = objects
        self._actor = actor
        self._spool = spool
        self._batch: list[JobToRestore] = []
        self._bytes = 0
        self.behind: set[JobId] = set()
        """Jobs whose documents show less than is recorded: their publisher died, or the documents are lost."""
        self.done = LedgerRebuildReport()

    async def all_jobs(self) -> AsyncGenerator[LedgerRebuildReport]:
        """Restore the jobs, oldest first. Yields the report so far after every batch."""
        for job_id, reason in self._spool.damaged():
            self._refuse(job_id, reason)
        for life in self._spool.lives():
            await self._take(life)
            if len(self._batch) >= BATCH_JOBS or self._bytes >= BATCH_BYTES:
                await self._put_back()
                yield self.done
        await self._put_back()
        yield self.done

    async def _take(self, life: RecordedLife) -> None:
        try:
            if _was_removed(life, self._spool.rivals(life)):
                self.done = replace(self.done, removed=self.done.removed + 1)
                return
            records = self._spool.records(life.job_id, life.submitted_at)
            if records[0].event.version != 1:
                raise HistoryBroken(job_id=life.job_id, reason="the record of its first event is missing")
            job = finalization.with_finalization(JobToRestore(records=tuple(records)), self._spool)
            check_restorable(job)
            if records[0].event.lifecycle in {ARTIFACT.name, QUEUE_JOB.name}:
                journal, is_behind = await finalization.artifact_journal(self._objects, self._spool, job)
                job = replace(job, journal=journal)
                self.behind |= {job.job_id} if is_behind else set()
            if records[0].event.lifecycle in DOCUMENTED:
                shown = await self._shown(job)
                if await self._ledger.job(job.job_id) is not None:
                    self.done = replace(self.done, there=self.done.there + 1)
                    return
                await self._refuse_ahead(job, shown)
                job = replace(job, journal=await self._journal(job))
        except TrellisError as error:
            if isinstance(error, StoreError | LedgerError):
                raise
            self._refuse(life.job_id, str(error.data.get("reason", error)))
            return
        self._batch.append(job)
        self._bytes += sum(len(record.event.data or b"") for record in records) + sum(map(len, job.journal.values()))
        self._bytes += len(records[0].submission.payload) if records[0].submission else 0

    async def _put_back(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0
        try:
            answers = await self._ledger.restore(self._actor, batch)
        except NotAllowed:
            raise
        except Refused:
            # The database refused one job of the batch. Restore them one by one, so that only that job is left out.
            answers = [await self._put_back_one(job) for job in batch]
        put = [job for job, answer in zip(batch, answers, strict=True) if answer]
        self.done = replace(
            self.done,
            jobs=self.done.jobs + len(put),
            events=self.done.events + sum(len(job.records) for job in put),
            there=self.done.there + answers.count(False),
        )

    async def _put_back_one(self, job: JobToRestore) -> bool | None:
        try:
            return (await self._ledger.restore(self._actor, [job]))[0]
        except Refused as refused:
            self._refuse(job.job_id, str(refused))
            return None

    def _refuse(self, job_id: JobId, reason: str) -> None:
        kept = self.done.refusals
        if len(kept) < REFUSALS_KEPT:
            kept = (*kept, RestoreRefusal(job_id=job_id, reason=reason))
        self.done = replace(self.done, refused=self.done.refused + 1, refusals=kept)

    async def _shown(self, job: JobToRestore) -> int:
        """The version that the documents of a job show; 0 if there are none."""
        key = _shown_key(job)
        there = await self._objects.get(key)
        try:
            shown = 0 if there is None else published_version(there.body)
        except (ValueError, KeyError, TypeError) as error:
            raise HistoryBroken(job_id=job.job_id, reason=f"{key} cannot be read") from error
        if shown < job.records[-1].event.version:
            self.behind.add(job.job_id)
        return shown

    async def _refuse_ahead(self, job: JobToRestore, shown: int) -> None:
        """Raise HistoryBroken if the job's documents are ahead of its records.

        A document is written after its audit record, so a document that shows more means that records are lost.
        """
        last = job.records[-1].event
        if shown > last.version:
            reason = f"{_shown_key(job)} shows version {shown} and the record ends with {last.version}"
            raise HistoryBroken(job_id=job.job_id, reason=reason)
        if last.lifecycle == RUN.name and not run_documents.has_ended(last):
            key = ids.manifest_key(_request(job).agent_slug, job.job_id)
            if await self._objects.head(key) is not None:
                raise HistoryBroken(
                    job_id=job.job_id, reason=f"{key} is there and the record does not say how it ended"
                )

    async def _journal(self, job: JobToRestore) -> dict[str, bytes]:
        """The journal entries of a run: the bytes of its step files, and its output.

        The last entry may belong to a step whose record was never written. The next driver of the run counts it
        unchanged.
        """
        if job.records[0].event.lifecycle != RUN.name:
            return {}
        slug, kept = _request(job).agent_slug, dict[str, bytes]()
        counted = [record.event for record in job.records if record.event.type == run_documents.STEP_DONE]
        for number, event in enumerate(counted, 1):
            key = ids.step_key(slug, job.job_id, number)
            body = await self._body(job, key)
            if sha256(body) != json.loads(event.data or b"{}").get("sha256"):
                raise HistoryBroken(job_id=job.job_id, reason=f"{key} is not what was recorded")
            kept[run_documents.STEP_ENTRY.format(number=number)] = body
        if len(counted) >= run_documents.PERSIST_STEP:
            kept[run_documents.OUTPUT_ENTRY] = await self._body(job, ids.output_key(slug, job.job_id))
        return kept | await self._uncounted(job, slug, len(counted) + 1)

    async def _uncounted(self, job: JobToRestore, slug: str, number: int) -> dict[str, bytes]:
        if number > len(ids.STEPS):
            return {}
        wanted = {run_documents.STEP_ENTRY.format(number=number): ids.step_key(slug, job.job_id, number)}
        if number == run_documents.PERSIST_STEP:
            wanted[run_documents.OUTPUT_ENTRY] = ids.output_key(slug, job.job_id)
        bodies = {entry: await self._objects.get(key) for entry, key in wanted.items()}
        return {entry: one.body for entry, one in bodies.items() if one is not None}

    async def _body(self, job: JobToRestore, key: str) -> bytes:
        stored = await self._objects.get(key)
        if stored is None:
            raise HistoryBroken(job_id=job.job_id, reason=f"{key} is missing")
        return stored.body


def _was_removed(life: RecordedLife, rivals: Sequence[RecordedLife]) -> bool:
    """Whether retention removed this job before another one came with its id or key.

    Retention removes only ended jobs. So a job that has not ended is still there, and of two ended jobs the one
    submitted later is. Raises HistoryBroken if neither this job nor a rival has ended: it cannot be decided which one
    to restore.
    """
    if life.has_ended:
        return any(not other.has_ended or other.submitted_at > life.submitted_at for other in rivals)
    running = next((other for other in rivals if not other.has_ended), None)
    if running is None:
        return False
    reason = f"job {running.job_id} of {running.submitted_at} has its id or key too, and the end of neither is recorded"
    raise HistoryBroken(job_id=life.job_id, reason=reason)


def _shown_key(job: JobToRestore) -> str:
    """The key of the document that shows the job's state."""
    if job.records[0].event.lifecycle == RUN.name:
        return ids.status_key(_request(job).agent_slug, job.job_id)
    submission = job.records[0].submission
    try:
        proposal = json.loads(submission.payload if submission is not None else b"")
        return ids.proposal_key(proposal["agent_slug"], proposal["id"])
    except (KeyError, ValueError, TypeError) as error:
        raise HistoryBroken(job_id=job.job_id, reason=f"its payload is no proposal: {error}") from error


def _request(job: JobToRestore) -> RunRequest:
    submission = job.records[0].submission
    assert submission is not None, "a checked job says what was asked"
    try:
        return RunRequest.read(submission.payload)
    except (KeyError, ValueError, TypeError) as error:
        raise HistoryBroken(job_id=job.job_id, reason=f"its payload is no request for a run: {error}") from error


# --- the record ------------------------------------------------------------------------------------------------------


async def _read_record(
    objects: ObjectStore, spool: RecordSpool, on_progress: Progress, keep: Keep, *, bodies: bool
) -> None:
    """Read every audit record into the spool; without `bodies` only the event ids.

    Raises RecordInvalid, StoreUnavailable.
    """
    async for page in listed_pages(objects, f"{ids.AUDIT_FOLDER}/"):
        records = [info for info in page.items if not info.key.startswith(f"{ids.CHAIN_FOLDER}/")]
        wanted = [info for info in records if bodies or info.key.endswith(audit_log.SUFFIX)]
        for few in (wanted[start : start + READS_AT_ONCE] for start in range(0, len(wanted), READS_AT_ONCE)):
            for key, body in zip(few, await asyncio.gather(*(_get(objects, info) for info in few)), strict=True):
                _spool(spool, key.key, body, bodies=bodies)
        if not bodies:
            singles = (info.key.split("/") for info in records if not info.key.endswith(audit_log.SUFFIX))
            spool.add_ids((name.removesuffix(".json"), day) for *_, day, name in singles)
        await keep()
        on_progress("records read", len(spool))


async def _get(objects: ObjectStore, info: ObjectInfo) -> bytes:
    stored = await objects.get(info.key)
    return b"" if stored is None else stored.body


def _spool(spool: RecordSpool, key: str, body: bytes, *, bodies: bool) -> None:
    if not key.endswith(audit_log.SUFFIX):
        try:
            records = [json.loads(body)]
        except ValueError as error:
            raise RecordInvalid(event=key, problem=str(error)) from error
    else:
        records = audit_log.lines(key, body)
    if not records or not isinstance(records[0], dict):
        raise RecordInvalid(event=key, problem="there is no record in it")
    if bodies:
        spool.add(one for one in records if one.get("lifecycle") not in ELSEWHERE)
    else:
        spool.add_ids((str(one.get("event_id")), str(one.get("ts"))) for one in records)


# --- the projector's subscription ----------------------------------------------------------------------------------


@asynccontextmanager
async def _as_projector(ledger: Ledger, actor: Actor) -> AsyncGenerator[Subscription]:
    # named for the process: the same person may not rebuild twice at once
    process = replace(actor, name=f"{actor.name}:{os.getpid()}")
    following = await ledger.subscribe(process, PROJECTOR, lease_s=LEASE_S, reads=False)
    if following is None:
        raise RecordInUse(lease_s=LEASE_S)
    try:
        yield following
    finally:
        await ledger.unsubscribe(following)


async def _begin_after(ledger: Ledger, actor: Actor, name: str, position: str) -> None:
    """Set the first position of a subscriber. One that has a position, or is running, keeps its own."""
    following = await ledger.subscribe(actor, name, lease_s=LEASE_S)
    if following is not None:
        await ledger.ack(following, None if following.position else position, lease_s=LEASE_S)
        await ledger.unsubscribe(following)


def _keeping(ledger: Ledger, following: Subscription) -> Keep:
    async def keep(place: str | None = None) -> None:
        if not await ledger.ack(following, place, lease_s=LEASE_S):
            raise RecordInUse(lease_s=LEASE_S)

    return keep

"""The artifact registry, and the collector that deletes staged content which is no longer needed."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trellis.artifacts.content import ARTIFACT_TYPE_OF_JOB_TYPE, ArtifactDraft, ArtifactType, JobType, checked_content
from trellis.artifacts.rows import (
    DISCARDED,
    FINALIZED,
    REMOVED,
    STAGED,
    ArtifactFinal,
    ArtifactGone,
    ArtifactKept,
    ArtifactLost,
    ArtifactNotFound,
    ArtifactRow,
    NewArtifact,
    NothingExpected,
    TooYoung,
    TypeNotYielded,
    is_artifact_id,
    journal_entry,
    make_artifact_id,
    stage_key,
    staged_folder,
    staged_id,
)
from trellis.auth.matrices import permit_actor
from trellis.engine import tracing
from trellis.engine.errors import LeaseConflictError
from trellis.engine.jobs import Actor, Epoch, JobId, Mismatch, Move, Moved, NewJob, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, IdempotencyKey, Job, JobFilter
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.storage.objects.canonical_json import timestamp
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored

# The artifact registry: staging, reading, listing and cleanup (D15, ART-1 to ART-8).
#
# Invariants:
# - There is one artifact per attempt of a job, however often it is staged and by how many processes. The row is written
#   first, under the attempt's idempotency key, then the blob, create-only. So every blob has a row, and a repeated call
#   completes what a crashed process left.
# - Only the attempt that the job waits for can stage. A newer attempt discards what an older one staged.
# - A finalized artifact never changes. Nothing here finalizes one: the completion of its job does, in the ledger.
# - Readers see only finalized artifacts, and only bytes with the recorded hash.
# - Cleanup moves rows, which is audited, and deletes no bytes. The bytes are deleted when the removal is recorded in
#   the object store. So if the ledger is lost before that, everything its records mention still exists.

SCOPE = "artifacts"
STAGED_IN = "NOTEBOOKLM_CALL"
"""The state of a job that waits for its artifact."""
WAITED_FOR_IN = frozenset({STAGED_IN, "ARTIFACT_WRITE"})
"""States of a job in which its staged artifact can still become final."""
DAYS_DEFAULT = 90
OF_JOB_MAX = 100
CLEANUP_MAX = 1_000
CLEANUP_PAGE = 500
FINALIZED_EVENT = "artifact.finalized"
NLM_CALLED_EVENT = "job_nlm_called"
"""The event of a job that names the run its attempt belongs to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedArtifact:
    """The result of staging. `created` is False if the artifact already existed."""

    artifact_id: JobId
    sha256: str
    size: int
    created: bool
    row: ArtifactRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactPage:
    """Finalized artifacts, newest first. `cursor` is for the next page; None at the end."""

    rows: tuple[ArtifactRow, ...]
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanupReport:
    """What a cleanup removed or would remove. `more` is True if another cleanup would find more."""

    older_than_days: int
    dry_run: bool
    rows: tuple[ArtifactRow, ...]
    more: bool
    replayed: bool = False
    """Whether an earlier request with the same key began it."""


@dataclass(frozen=True, kw_only=True)
class ArtifactRegistry:
    """The artifact registry of one project, on the ledger and the object store."""

    ledger: Ledger
    objects: ObjectStore
    cid: str
    new_id: Callable[[], str]
    """Returns UUIDs (version 4)."""
    keep_days: int = DAYS_DEFAULT
    """Cleanup keeps artifacts that were finalized less than this many days ago."""

    # --- staging -----------------------------------------------------------------------------------------------------

    async def stage(
        self,
        actor: Actor,
        draft: ArtifactDraft,
        *,
        job: Job,
        epoch: int | None = None,
        request: RequestKey | None = None,
    ) -> StagedArtifact:
        """Stages the artifact of a job's current attempt, once per attempt. Readers see it when the job is complete.

        If the job already has an artifact, that one is returned (ART-4): a staged one whatever the draft says, a
        finalized one if the draft is equal. `request` is the key of the request, stored with a new artifact. Raises
        IdempotencyMismatch, NotAllowed, ContentInvalid, ArtifactTooLarge, TypeNotYielded,
        NothingExpected, ArtifactGone, ArtifactFinal, LeaseConflictError.
        """
        permit_actor(actor, "artifacts.write")
        making, fingerprint = await asyncio.to_thread(_new_artifact, draft, job, job.epoch if epoch is None else epoch)
        making = await self._of_run(making, job)
        final = await self.of_job(job.job_id, state=FINALIZED)
        if final:
            return await self._unchanged(final[0], making)
        if making.epoch != job.epoch:
            raise LeaseConflictError(job_id=job.job_id, epoch=making.epoch)
        attempt = stage_key(job.job_id, timestamp(job.created_at), making.epoch)
        key = IdempotencyKey(scope=SCOPE, key=attempt, fingerprint=fingerprint)
        there = await self.ledger.find_by_idempotency_key(key.scope, key.key, key.fingerprint)
        if there is not None:
            return await self._again(actor, there.job_id, making)
        if job.state != STAGED_IN:
            raise NothingExpected(job_id=job.job_id, reason=f"it is {job.state} and not {STAGED_IN}")
        artifact_id, created_at = make_artifact_id(self.new_id()), timestamp(await self.ledger.now())
        body = await asyncio.to_thread(making.body, artifact_id, created_at)
        new = NewJob(
            job_id=artifact_id,
            type=draft.type.value,
            lifecycle=ARTIFACT.name,
            payload=making.payload(self.cid, created_at, body),
            idempotency_key=key.key,
            idempotency_scope=key.scope,
            fingerprint=key.fingerprint,
            correlation_id=job.correlation_id,
            trace=job.trace or tracing.here(),
            parent_id=job.job_id,
        )
        (answer,) = await self.ledger.submit(actor, [new], key=request)
        if isinstance(answer, Mismatch) or not answer.created:
            return await self._again(actor, answer.job_id, making)
        await self._discard_older(actor, making)
        row = await self._found(artifact_id)
        await self._put(row, body)
        await self._refuse_overtaken(actor, row)
        return _staged_answer(row, created=True)

    async def _unchanged(self, row: ArtifactRow, making: NewArtifact) -> StagedArtifact:
        """Returns the finalized artifact if the new content is equal (ART-3). Raises ArtifactFinal otherwise."""
        if not row.is_of(await asyncio.to_thread(making.body, row.artifact_id, row.created_at)):
            raise ArtifactFinal(job_id=row.job_id, artifact=row.artifact_id)
        return _staged_answer(row, created=False)

    async def _of_run(self, making: NewArtifact, job: Job) -> NewArtifact:
        """Sets the run that the job belongs to now.

        A requeued job may have another run than it was submitted for (D20).
        """
        events = await self.ledger.events(job.job_id) if job.generation else []
        run_ids = [
            json.loads(event.data).get("run_id") for event in events if event.type == NLM_CALLED_EVENT and event.data
        ]
        return replace(making, run_id=next((run for run in reversed(run_ids) if run), making.run_id))

    async def _again(self, actor: Actor, artifact_id: JobId, making: NewArtifact) -> StagedArtifact:
        """Returns the artifact that this attempt already has, completing its blob and discarding older ones.

        Raises ArtifactGone.
        """
        row = await self._found(artifact_id)
        if row.state == STAGED:
            await self._discard_older(actor, making)
            body = await asyncio.to_thread(making.body, row.artifact_id, row.created_at)
            if row.is_of(body):
                await self._put(row, body)
            elif await self.staged_bytes(row.artifact_id) is None:
                raise _artifact_gone(row, "it was begun with other content, and its bytes never came")
        elif row.state == FINALIZED:
            return await self._unchanged(row, making)
        else:
            raise _artifact_gone(row, f"it is {row.state}")
        return _staged_answer(row, created=False)

    async def _put(self, row: ArtifactRow, body: bytes) -> None:
        if isinstance(await self.objects.put(row.staged_key, body, when=CREATE), PutStored):
            return
        there = await self.objects.get(row.staged_key)
        # A missing blob was published and collected meanwhile. A different one was written by another program.
        if there is not None and not row.is_of(there.body):
            raise ArtifactLost(artifact=row.artifact_id, key=row.staged_key)

    async def _discard_older(self, actor: Actor, making: NewArtifact) -> None:
        for row in await self.of_job(making.job_id, state=STAGED):
            if row.epoch < making.epoch:
                await self.discard(actor, row.artifact_id, cause=f"epoch {making.epoch} took over")

    async def _refuse_overtaken(self, actor: Actor, row: ArtifactRow) -> None:
        """Discards an artifact whose job moved to another attempt during staging. Raises LeaseConflictError."""
        job = await self.ledger.job(row.job_id)
        if job is None or job.epoch != row.epoch:
            await self.discard(actor, row.artifact_id, cause="its attempt was over before it was staged")
            raise LeaseConflictError(job_id=row.job_id, epoch=row.epoch)

    async def discard(self, actor: Actor, artifact_id: JobId, *, cause: str) -> bool:
        """Discards a staged artifact. Returns whether it is discarded now. A finalized one stays."""
        move = Move(job_id=artifact_id, target="discarded", request_id=RequestId(f"discard:{artifact_id}"), cause=cause)
        return isinstance(await self.ledger.move(actor, move), Moved)

    async def give_up(self, actor: Actor, artifact_id: str, *, cause: str) -> ArtifactRow:
        """Discards a staged artifact that its job no longer waits for: an operator's change to the registry (ART-8).

        Its content is not touched. Idempotent. Raises NotAllowed, ArtifactNotFound, ArtifactKept.
        """
        permit_actor(actor, "artifacts.registry")
        row = await self.row(artifact_id)
        if row is None or row.state == REMOVED:
            raise ArtifactNotFound(artifact=artifact_id)
        if row.state == FINALIZED:
            raise ArtifactKept(artifact=artifact_id, reason="it is final; a cleanup removes it when it is old enough")
        job = await self.ledger.job(row.job_id) if row.state == STAGED else None
        if job is not None and job.epoch == row.epoch and job.state in WAITED_FOR_IN:
            raise ArtifactKept(artifact=artifact_id, reason=f"job {job.job_id} is {job.state} and waits for it")
        await self.discard(actor, row.artifact_id, cause=cause)
        return await self._found(row.artifact_id)

    async def staged_bytes(self, artifact_id: str) -> bytes | None:
        """Returns the stored bytes of a staged artifact; None if there are none. The caller must verify their hash."""
        row = await self.row(artifact_id)
        if row is None:
            return None
        # In a restored ledger, an artifact may be staged again although it was already published.
        found = await self.objects.get(row.staged_key) or await self.objects.get(row.key)
        return None if found is None else found.body

    # --- reading -----------------------------------------------------------------------------------------------------

    async def row(self, artifact_id: str) -> ArtifactRow | None:
        """Returns the row with this id in any state; None if there is none or the id is invalid."""
        job = await self.ledger.job(JobId(artifact_id)) if is_artifact_id(artifact_id) else None
        return None if job is None or job.lifecycle != ARTIFACT.name else ArtifactRow.read(job)

    async def read(self, artifact_id: str) -> dict[str, Any] | None:
        """Returns the document of schema 3.1; None if no finalized artifact has this id. Raises ArtifactLost."""
        row, body = await self.row(artifact_id), await self.content(artifact_id)
        if row is None or body is None:
            return None
        document = await asyncio.to_thread(json.loads, body)
        return {**self.fields(row), "content": document["content"], "sources": document["sources"]}

    async def content(self, artifact_id: str) -> bytes | None:
        """Returns the stored bytes, which have the recorded SHA-256; None if no finalized artifact has this id.

        Raises ArtifactLost.
        """
        row = await self.row(artifact_id)
        if row is None or row.state != FINALIZED:
            return None
        return await stored_bytes(self.ledger, self.objects, row)

    def fields(self, row: ArtifactRow) -> dict[str, Any]:
        """Returns the fields of an artifact that listings show."""
        return row.fields(self.objects.url)

    async def of_job(self, job_id: JobId, *, state: str | None = None) -> tuple[ArtifactRow, ...]:
        """Returns the artifacts of a queue job, newest first: one per attempt that staged, at most OF_JOB_MAX.

        Artifacts of an earlier job with the same id are left out. They outlive that job, and retention frees its id.
        """
        where = JobFilter(lifecycle=ARTIFACT.name, state=state, parent_id=job_id)
        page, job = await self.ledger.jobs(where, limit=OF_JOB_MAX), await self.ledger.job(job_id)
        own = [one for one in page.jobs if job is None or one.created_at >= job.created_at]
        return tuple([row for one in own if (row := await self.row(one.job_id)) is not None])

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        type_: ArtifactType | None = None,
        job_id: str | None = None,
    ) -> ArtifactPage:
        """Returns a page of the finalized artifacts."""
        where = JobFilter(
            lifecycle=ARTIFACT.name,
            state=FINALIZED,
            type=None if type_ is None else type_.value,
            parent_id=None if job_id is None else JobId(job_id),
        )
        found = await self.ledger.jobs(where, limit=limit, cursor=cursor)
        rows = [await self.row(job.job_id) for job in found.jobs]
        shown = tuple(row for row in rows if row is not None and row.state == FINALIZED)
        return ArtifactPage(rows=shown, cursor=found.cursor)

    # --- cleaning up -------------------------------------------------------------------------------------------------

    async def cleanup(
        self,
        actor: Actor,
        *,
        older_than_days: int | None = None,
        limit: int = CLEANUP_MAX,
        dry_run: bool = False,
        key: RequestKey | None = None,
    ) -> CleanupReport:
        """Removes artifacts that were finalized at least this many days ago, oldest first. Each is one audited event.

        Readers no longer find them. Their bytes are deleted when the projector has recorded the removal.

        The first removal stores `key` with the list of artifacts to remove. The same request again removes those of the
        list that are left, and no others. A cleanup that removes nothing stores no key. Raises TooYoung, NotAllowed,
        IdempotencyMismatch.
        """
        permit_actor(actor, "artifacts.cleanup")
        days = self.keep_days if older_than_days is None else older_than_days
        if days < self.keep_days:
            raise TooYoung(days=self.keep_days, asked=days)
        stored = None if key is None or dry_run else await self.ledger.find_request(key)
        if stored is not None and stored.answer is not None:
            return await self._cleaned_up(actor, stored.answer, replayed=True)
        before = await self.ledger.now() - timedelta(days=days)
        oldest = await self._finalized_before(before, limit + 1)
        artifacts = [await self.row(job.job_id) for job in oldest[:limit]]
        rows = tuple(row for row in artifacts if row is not None and row.state == FINALIZED)
        more = len(oldest) > limit
        if dry_run or not rows:
            return CleanupReport(older_than_days=days, dry_run=dry_run, rows=rows, more=more)
        plan = json.dumps({"days": days, "more": more, "artifacts": [row.artifact_id for row in rows]}).encode()
        if key is not None and not await self._remove(actor, rows[0].artifact_id, days, replace(key, answer=plan)):
            stored = await self.ledger.find_request(key)  # of the same request at the same moment
            if stored is not None and stored.answer is not None:
                return await self._cleaned_up(actor, stored.answer, replayed=True)
        return await self._cleaned_up(actor, plan, replayed=False)

    async def _cleaned_up(self, actor: Actor, plan: bytes, *, replayed: bool) -> CleanupReport:
        """Removes what is left of a planned cleanup. Returns those that are removed now."""
        planned, removed = json.loads(plan), list[ArtifactRow]()
        for artifact_id in planned["artifacts"]:
            row = await self.row(artifact_id)
            if row is None:
                continue
            if row.state == REMOVED or await self._remove(actor, row.artifact_id, planned["days"]):
                removed.append(replace(row, state=REMOVED))
        return CleanupReport(
            older_than_days=planned["days"],
            dry_run=False,
            rows=tuple(removed),
            more=planned["more"],
            replayed=replayed,
        )

    async def _finalized_before(self, before: datetime, count: int) -> list[Job]:
        """Returns at most `count` artifacts that were finalized before that time, oldest created first.

        Removed ones are skipped. The search ends at artifacts created after that time, which became final even later.
        """
        where, found, cursor = JobFilter(lifecycle=ARTIFACT.name, state=FINALIZED), list[Job](), None
        while True:
            page = await self.ledger.jobs(where, limit=CLEANUP_PAGE, cursor=cursor, oldest_first=True)
            found += [job for job in page.jobs if job.updated_at < before]
            cursor = page.cursor
            if cursor is None or len(found) >= count or page.jobs[-1].created_at >= before:
                return found[:count]

    async def _remove(self, actor: Actor, artifact_id: JobId, days: int, key: RequestKey | None = None) -> bool:
        move = Move(
            job_id=artifact_id,
            target=REMOVED,
            request_id=RequestId(f"clean-up:{artifact_id}"),
            cause=f"finalized more than {days} days ago",
            key=key,
        )
        return isinstance(await self.ledger.move(actor, move), Moved)

    async def _found(self, artifact_id: JobId) -> ArtifactRow:
        row = await self.row(artifact_id)
        assert row is not None, "the ledger has just named it"
        return row


async def stored_bytes(ledger: Ledger, objects: ObjectStore, row: ArtifactRow) -> bytes:
    """Returns the bytes of an artifact: published, else staged, else from its job's journal. Raises ArtifactLost."""
    # Between the first two reads it may be published and its blob collected; the third read then finds it.
    for key in (row.key, row.staged_key, row.key):
        found = await objects.get(key)
        if found is not None and row.is_of(found.body):
            return found.body
    kept = (await ledger.read_journal(row.job_id)).get(journal_entry(row.artifact_id))
    if kept is None or not row.is_of(kept):
        raise ArtifactLost(artifact=row.artifact_id, key=row.key)
    return kept


async def delete_bytes(objects: ObjectStore, row: ArtifactRow) -> int:
    """Deletes the bytes of an ended artifact. Returns how many objects were deleted."""
    return sum([await objects.delete(key) for key in (row.staged_key, row.key)])


def _new_artifact(draft: ArtifactDraft, job: Job, epoch: int) -> tuple[NewArtifact, bytes]:
    """Builds the artifact to stage and its fingerprint. Raises NothingExpected, TypeNotYielded, ContentInvalid."""
    if job.lifecycle != QUEUE_JOB.name:
        raise NothingExpected(job_id=job.job_id, reason=f"it is a {job.lifecycle}; only a queue-job has an artifact")
    try:
        request = json.loads(job.payload or b"{}")
        job_type, run_id, slug = JobType(request["job_type"]), str(request["run_id"]), str(request["agent_slug"])
    except (KeyError, ValueError, TypeError):
        raise NothingExpected(job_id=job.job_id, reason="its payload is no request for an artifact") from None
    if draft.type is not ARTIFACT_TYPE_OF_JOB_TYPE[job_type]:
        expected = ARTIFACT_TYPE_OF_JOB_TYPE[job_type].value
        raise TypeNotYielded(job_id=job.job_id, job_type=job_type.value, expected=expected, type=draft.type.value)
    content = checked_content(draft.type, draft.content, frozenset(source.ref for source in draft.sources))
    made = NewArtifact(
        job_id=job.job_id, epoch=Epoch(epoch), run_id=run_id, agent_slug=slug, draft=draft, content=content
    )
    return made, made.fingerprint()


def _staged_answer(row: ArtifactRow, *, created: bool) -> StagedArtifact:
    return StagedArtifact(artifact_id=row.artifact_id, sha256=row.sha256, size=row.size, created=created, row=row)


def _artifact_gone(row: ArtifactRow, reason: str) -> ArtifactGone:
    return ArtifactGone(artifact=row.artifact_id, job_id=row.job_id, epoch=row.epoch, reason=reason)


# Collector of staged blobs that are no longer needed.
#
# Invariants: nothing is deleted without checking its row, and nothing because of its age. A blob is deleted when its
# row is discarded, which is final. The blob of a finalized or removed artifact is deleted only when that is recorded in
# the object store, and for a finalized one only when the published object has the recorded bytes. So a ledger lost at
# any moment can be rebuilt from what is stored. A blob without a known row is kept: it may belong to another ledger, or
# to a row that is being restored.
#
# The bytes of an ended artifact are deleted once, by the process that records its end (`runs.finalizing`). The
# collector then finds only blobs that were still being written.

BATCH = 100
FORMER_REQUESTS = "requests/"
"""Where requests kept their idempotency keys before they became rows of the ledger (decision 0030)."""
INTERVAL_S = 60.0
PAUSE_S_MIN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactCollectionReport:
    """What one pass did. `unknown` counts blobs without a row, which are kept."""

    looked_at: int = 0
    taken: int = 0
    unknown: int = 0
    requests: int = 0
    """Deleted objects of the former idempotency protocol."""
    more: bool = False


@dataclass(kw_only=True)
class ArtifactCollector:
    """The service that checks the staged blobs, a page at a time."""

    artifacts: ArtifactRegistry
    is_recorded: Callable[[Event], Awaitable[bool]]
    """Whether the object store has the audit record of an event."""
    batch: int = BATCH
    interval_s: float = INTERVAL_S
    name: str = "artifact-collector"
    _after: str | None = None
    _requests_left: bool = True

    async def run_once(self) -> ArtifactCollectionReport:
        """Checks one page of blobs, and deletes one page of former request objects."""
        taken, unknown = 0, 0
        blobs = await self.artifacts.objects.list(
            f"{staged_folder(self.artifacts.cid)}/", after=self._after, limit=self.batch
        )
        for blob in blobs.items:
            artifact_id = staged_id(blob.key)
            row = None if artifact_id is None else await self.artifacts.row(artifact_id)
            unknown += row is None
            if row is not None and blob.key == row.staged_key and await self._is_done(row):
                taken += await self.artifacts.objects.delete(blob.key)
        self._after = blobs.items[-1].key if blobs.more else None
        requests = await self._delete_requests() if self._requests_left else 0
        return ArtifactCollectionReport(
            looked_at=len(blobs.items),
            taken=taken,
            unknown=unknown,
            requests=requests,
            more=blobs.more or self._requests_left,
        )

    async def _delete_requests(self) -> int:
        """Deletes one page of the objects that held keys of requests before the ledger did. Nothing reads them.

        No program writes them any more, so a process stops looking once there are none.
        """
        page = await self.artifacts.objects.list(FORMER_REQUESTS, limit=self.batch)
        self._requests_left = page.more
        return sum([await self.artifacts.objects.delete(info.key) for info in page.items])

    def pause_s(self, report: ArtifactCollectionReport) -> float:
        """Short while the current round is not finished."""
        return PAUSE_S_MIN if report.more else self.interval_s

    async def _is_done(self, row: ArtifactRow) -> bool:
        """Whether the staged blob of this artifact is never needed again, even after loss of the ledger."""
        if row.state in {STAGED, DISCARDED}:
            return row.state == DISCARDED
        last = (await self.artifacts.ledger.events(row.artifact_id))[-1:]
        if [event.target for event in last] != [row.state] or not await self.is_recorded(last[0]):
            return False
        if row.state != FINALIZED:
            return True
        published = await self.artifacts.objects.get(row.key)
        return published is not None and row.is_of(published.body)

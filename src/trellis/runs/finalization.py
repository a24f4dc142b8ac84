"""Publishes a completed job together with its artifact, and restores both into a lost ledger (D14, D15, JQ-5, ART-6).

The ledger completes a job and finalizes its artifact in one transaction. The object store has no transactions, so the
order of writes matters: first the artifact's bytes, then the record of the completion, then the record of the
finalization. Whatever part of these a crash leaves, a rebuild makes the same pair from it: a recorded completion has
readable bytes, and implies the finalization that was not recorded.

An artifact that a cleanup removed is not published again. The bytes of an ended artifact are deleted after the record
of its end is written. If the process dies in between, the next projector or a rebuild deletes them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trellis.artifacts.registry import FINALIZED_EVENT, delete_bytes, stored_bytes
from trellis.artifacts.rows import ENDED_STATES, FINALIZED, STAGED, ArtifactLost, ArtifactRow, journal_entry
from trellis.documents import ids
from trellis.documents.errors import DocumentDiffers
from trellis.documents.run_documents import Publication
from trellis.engine.errors import HistoryBroken
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, JobToRestore, RecordedEvent, event_id
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.runs.spool import RecordSpool
from trellis.storage.objects.store import ObjectStore

COMPLETE = next(state.name for state in QUEUE_JOB.states if state.success)


# --- published -------------------------------------------------------------------------------------------------------


async def publications(ledger: Ledger, objects: ObjectStore, row: ArtifactRow) -> list[Publication]:
    """The bytes of a finalized artifact, unless they are published or the artifact was removed.

    Raises DocumentDiffers.
    """
    now = await ledger.job(row.artifact_id) if row.state == FINALIZED else None
    if now is None or now.state != FINALIZED:
        return []
    there = await objects.get(row.key)
    if there is not None and row.is_of(there.body):
        return []
    try:
        return [Publication(row.key, await stored_bytes(ledger, objects, row))]
    except ArtifactLost as error:
        raise DocumentDiffers(key=row.key) from error


async def completion(ledger: Ledger, row: ArtifactRow) -> list[RecordedEvent]:
    """The completion that finalized this artifact, if the ledger still has its job; empty for any other state."""
    if row.state != FINALIZED:
        return []
    completions = [event for event in await ledger.events(row.job_id) if _completes(event, row.artifact_id)]
    return await ledger.recorded(completions)


async def is_recorded(objects: ObjectStore, event: Event) -> bool:
    """Whether the audit record of an artifact's event is in the object store."""
    return await objects.head(ids.audit_key(event.ts, event.id)) is not None


async def delete_published(objects: ObjectStore, row: ArtifactRow) -> None:
    """Delete the bytes of an artifact whose end is recorded.

    A discarded artifact may have published bytes: its completion was lost with the ledger after they were published.
    """
    if row.state in ENDED_STATES:
        await delete_bytes(objects, row)


# --- restored
# ----------------------------------------------------------------------------------------------------------


def with_finalization(job: JobToRestore, spool: RecordSpool) -> JobToRestore:
    """The job as recorded.

    For a staged artifact whose job's completion is recorded, the implied finalization is appended.
    """
    last, submission = job.records[-1], job.records[0].submission
    if (
        last.event.lifecycle != ARTIFACT.name
        or last.event.target != STAGED
        or submission is None
        or submission.parent_id is None
    ):
        return job
    for event in (one.event for one in _recorded(spool, submission.parent_id)):
        if _completes(event, last.event.job_id):
            return replace(job, records=(*job.records, _finalization(last, event)))
    return job


async def artifact_journal(
    objects: ObjectStore, spool: RecordSpool, job: JobToRestore
) -> tuple[dict[str, bytes], bool]:
    """The journal entry that a completed job had for its artifact, and whether the artifact's object needs an update.

    It needs one if it is missing, or if it still exists although the artifact has ended. Raises HistoryBroken.
    """
    row = _row_of(spool, job)
    if row is not None and row.state in ENDED_STATES:
        return {}, job.job_id == row.artifact_id and await objects.head(row.key) is not None
    if row is None or row.state != FINALIZED:
        return {}, False
    for key in (row.key, row.staged_key):
        stored = await objects.get(key)
        if stored is not None and row.is_of(stored.body):
            entry = {} if job.job_id == row.artifact_id else {journal_entry(row.artifact_id): stored.body}
            return entry, key != row.key
    raise HistoryBroken(job_id=job.job_id, reason=f"{row.key} is missing, or is not what was recorded")


def _row_of(spool: RecordSpool, job: JobToRestore) -> ArtifactRow | None:
    """The artifact that this job is, or that it was completed with; raises HistoryBroken."""
    last = job.records[-1].event
    if last.lifecycle == ARTIFACT.name:
        return _row(job.records)
    artifact_id = _artifact_of(last)
    if artifact_id is None:
        return None
    records = _recorded(spool, artifact_id)
    if not records:
        raise HistoryBroken(job_id=job.job_id, reason=f"its artifact {artifact_id} is not recorded")
    return _row(with_finalization(JobToRestore(records=tuple(records)), spool).records)


def _row(records: Sequence[RecordedEvent]) -> ArtifactRow | None:
    first, last = records[0], records[-1].event
    return ArtifactRow.of_payload(
        last.job_id, first.submission.payload if first.submission else b"", last.target, last.ts
    )


def _recorded(spool: RecordSpool, job_id: JobId) -> list[RecordedEvent]:
    life = spool.last_life(job_id)
    return [] if life is None else spool.records(life.job_id, life.submitted_at)


def _finalization(staged: RecordedEvent, completed: Event) -> RecordedEvent:
    before = staged.event
    event = replace(
        before,
        id=event_id(before.job_id, before.version + 1),
        type=FINALIZED_EVENT,
        ts=completed.ts,
        role=completed.role,
        actor=completed.actor,
        cause=f"finalized by {completed.job_id}",
        source=STAGED,
        target=FINALIZED,
        version=before.version + 1,
        data=None,
    )
    return RecordedEvent(event=event, type=staged.type, submitted_at=staged.submitted_at)


def _completes(event: Event, artifact_id: JobId) -> bool:
    return _artifact_of(event) == artifact_id


def _artifact_of(event: Event) -> JobId | None:
    """The artifact that a job was completed with; None for any other event."""
    if event.lifecycle != QUEUE_JOB.name or event.target != COMPLETE or event.data is None:
        return None
    data: dict[str, Any] = json.loads(event.data)
    artifact_id = data.get("artifact_id")
    return JobId(artifact_id) if isinstance(artifact_id, str) else None

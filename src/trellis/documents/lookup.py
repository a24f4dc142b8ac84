"""Finds a run by its id, or by the short form without the time of day (D12).

A run that retention removed from the ledger is found by its id in the object store: the audit record of its first event
names its agent (D61).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from trellis.documents import audit, ids, run_documents
from trellis.documents.errors import RecordInvalid, RunIdAmbiguous, RunIdInvalid, RunNotFound
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.run import RUN
from trellis.storage.objects.store import ObjectStore

PAGE = 500
PAGES_MAX = 100
"""Pages of runs searched for a short form. Beyond that the long form is needed."""
AROUND_MIDNIGHT = timedelta(minutes=5)
"""A run id is made slightly before the run is stored, so its day may be the day before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """What the record of a run's first event says: its agent, and who requested it."""

    run_id: JobId
    agent_slug: str
    submitter: str


async def find_published(objects: ObjectStore, run_id: str) -> PublishedRun | None:
    """The published run with this long id; None if no readable record exists. Raises RunIdInvalid."""
    begun = _day(run_id)
    for day in (begun, begun + timedelta(days=1)):  # the run may be stored just after midnight
        stored = await objects.get(ids.audit_key(day, f"{run_id}-1"))
        if stored is None:
            continue
        try:
            record = audit.read_record(json.loads(stored.body))
            submission = record.submission
            if record.event.job_id == run_id and record.event.lifecycle == RUN.name and submission is not None:
                slug = RunRequest.read(submission.payload).agent_slug
                return PublishedRun(run_id=record.event.job_id, agent_slug=slug, submitter=record.event.actor)
        except (RecordInvalid, ValueError, KeyError, TypeError):
            continue
    return None


async def find_run(ledger: Ledger, text: str) -> JobId:
    """The id of the run that `text` names; raises RunIdInvalid, RunNotFound, RunIdAmbiguous."""
    day = _day(text)
    job = await ledger.job(JobId(text))
    if job is not None and job.lifecycle == RUN.name:
        return job.job_id
    run_ids = await _of_day(ledger, text, day - AROUND_MIDNIGHT) if ids.short_form(text) == text else []
    if not run_ids:
        raise RunNotFound(run_id=text)
    if len(run_ids) > 1:
        raise RunIdAmbiguous(run_id=text, found=" or ".join(run_ids))
    return run_ids[0]


async def listed_runs(ledger: Ledger, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Runs in the form of listings, with one query in total. Runs that retention removes meanwhile are left out."""
    contents = await ledger.contents_of([job.job_id for job in jobs]) if jobs else {}
    there = [(job, *contents[job.job_id]) for job in jobs if job.job_id in contents]
    return [run_documents.listing_document(replace(job, payload=payload), events) for job, payload, events in there]


async def _of_day(ledger: Ledger, short: str, begins: datetime) -> list[JobId]:
    """The runs with this short form, searched from the newest run back to `begins`."""
    run_ids: list[JobId] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await ledger.jobs(JobFilter(lifecycle=RUN.name), limit=PAGE, cursor=cursor)
        run_ids += [job.job_id for job in page.jobs if ids.short_form(job.job_id) == short]
        cursor = page.cursor
        if cursor is None or page.jobs[-1].created_at < begins:
            break
    return run_ids


def _day(text: str) -> datetime:
    try:
        return datetime.fromisoformat(ids.run_date(text)).replace(tzinfo=UTC)
    except ValueError:  # formed like a date, but not a valid one
        raise RunIdInvalid(run_id=text) from None

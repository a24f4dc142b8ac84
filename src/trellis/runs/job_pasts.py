"""What the documents of runs and proposals are made from: their payload, their events so far, and the files of their steps.

The projector meets every event of a job in order, so it keeps those that it met. It reads the ledger for a job that it
does not know yet, and once for the step files of all jobs that it publishes together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trellis.documents import run_documents as documents
from trellis.documents.run_documents import RunRequest
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, RecordedEvent
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN

JOBS_KEPT = 1_000
"""The most jobs whose payload and events are kept."""

DOCUMENTED = frozenset({RUN.name, PROPOSAL.name})
"""Lifecycles of which each state is published as a document."""


@dataclass(frozen=True, slots=True)
class JobPast:
    """Every known event of a job, oldest first, and the entries of its journal that the events to publish need."""

    events: tuple[Event, ...]
    journal: Mapping[str, bytes]

    def until(self, event: Event) -> tuple[Event, ...]:
        """The events up to this one."""
        return _until(self.events, event)


class JobPasts:
    """Reads the past of jobs, and keeps what it read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._payloads = LruCache[JobId, bytes](JOBS_KEPT)
        self._requests = LruCache[JobId, RunRequest](JOBS_KEPT)
        self._events = LruCache[JobId, tuple[Event, ...]](JOBS_KEPT)

    async def request(self, record: RecordedEvent) -> RunRequest:
        """The request of the run of this event, parsed once: a job's payload never changes."""
        job_id = record.event.job_id
        request = None if record.submission is not None else self._requests.get(job_id)
        if request is None:
            request = self._requests[job_id] = RunRequest.read(await self.payload(record))
        return request

    async def payload(self, record: RecordedEvent) -> bytes:
        """The payload of the job of this event; empty if the ledger has none."""
        job_id = record.event.job_id
        if record.submission is not None:
            self._payloads[job_id] = record.submission.payload
        payload = self._payloads.get(job_id)
        if payload is None:
            job = await self._ledger.job(job_id)
            payload = b"" if job is None or job.payload is None else job.payload
            self._payloads[job_id] = payload
        return payload

    async def read(self, jobs: Iterable[Sequence[RecordedEvent]]) -> dict[JobId, JobPast]:
        """The pasts of these jobs, of each of which some consecutive events are given. At most two queries."""
        documented = {
            records[0].event.job_id: [record.event for record in records]
            for records in jobs
            if records[0].event.lifecycle in DOCUMENTED
        }
        pasts = await self._events_of(documented)
        wanted = {
            (job_id, entry)
            for job_id, news in documented.items()
            for event in news
            for entry in documents.step_entries(_until(pasts[job_id], event))
        }
        journals: dict[JobId, dict[str, bytes]] = {}
        for (job_id, entry), body in (await self._ledger.journal_entries(sorted(wanted)) if wanted else {}).items():
            journals.setdefault(job_id, {})[entry] = body
        return {job_id: JobPast(events, journals.get(job_id, {})) for job_id, events in pasts.items()}

    async def _events_of(self, jobs: Mapping[JobId, Sequence[Event]]) -> dict[JobId, tuple[Event, ...]]:
        """The events of each job up to the last of the given ones, from those that were met before where these do."""
        pasts = {job_id: _joined(self._events.get(job_id) or (), news) for job_id, news in jobs.items()}
        unknown = [job_id for job_id, past in pasts.items() if past is None]
        stored = await self._ledger.events_of(unknown) if unknown else {}
        events = {job_id: tuple(stored.get(job_id, ())) if past is None else past for job_id, past in pasts.items()}
        for job_id, past in events.items():
            self._events[job_id] = past
        return events


def _joined(known: tuple[Event, ...], news: Sequence[Event]) -> tuple[Event, ...] | None:
    """The first events of a job with the given ones among or after them; None if some are missing in between."""
    first = news[0].version - 1
    if len(known) < first or any(one != new for one, new in zip(known[first:], news, strict=False)):
        return None
    joined = (*known, *news[len(known) - first :])
    return joined if [event.version for event in joined] == list(range(1, len(joined) + 1)) else None


def _until(events: tuple[Event, ...], last: Event) -> tuple[Event, ...]:
    return tuple(event for event in events if event.version <= last.version)

"""A queue job: the request that is stored as its payload, the job built from it, and its document."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import pydantic

from trellis.agents.definition import checked_slug
from trellis.agents.sources import AgentSource, AgentSources
from trellis.artifacts.content import JobType
from trellis.artifacts.payloads import ENTITY_REFS_MAX, ResearchPayload, read_payload
from trellis.documents import ids
from trellis.engine.errors import InputError, PayloadInvalid, TrellisError
from trellis.engine.event_data import data_of
from trellis.engine.jobs import JobId, NewJob, Priority
from trellis.engine.records import Event, Job, SampledEvent
from trellis.engine.restoration import RELEASED_CAUSE
from trellis.engine.text import nearest
from trellis.lifecycles import Role
from trellis.lifecycles.events import Cause
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.errors import RequestUnreadable, SourceNotARef, SourceUnreadable
from trellis.research.retry_policy import EXECUTIONS
from trellis.storage.objects.canonical_json import encode

# The request of a queue job, stored as its payload, and the job built from it (D34, D38, D41, JQ-11).
#
# A stored request was checked completely: the type is known, the payload fits it, the slug is valid, and no source is
# an address.

ENTITY_REF_CHARS_MAX = 200
KEY_NAMESPACE = "queue-job:"
"""Prefix of the concurrency key that limits an agent to one held job at a time (JQ-7)."""
SHOWN_CHARS_MAX = 60
SOURCES_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueRequest:
    """One request. `payload` is stored as submitted, and parsed again where it is used."""

    run_id: str
    job_type: JobType
    agent_slug: str
    payload: dict[str, Any]
    entity_refs: tuple[str, ...] = ()

    @classmethod
    def read(cls, job_id: str, body: bytes) -> "QueueRequest":
        """Reads the request from the job's payload. Raises RequestUnreadable."""
        try:
            return checked_request(**asdict(_REQUEST.validate_json(body)))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'/'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
            raise RequestUnreadable(job_id=job_id, problem=problem) from None
        except TrellisError as error:
            raise RequestUnreadable(job_id=job_id, problem=str(error)) from error

    def to_bytes(self) -> bytes:
        """Encodes the request as the job's payload."""
        return encode(_REQUEST.dump_python(self, mode="json"))


_REQUEST = pydantic.TypeAdapter(QueueRequest)


def checked_request(
    *, run_id: str, job_type: str, agent_slug: str | None, payload: Any, entity_refs: Sequence[str] = ()
) -> QueueRequest:
    """Checks and builds a request. Raises an InputError, SlugInvalid or RunIdInvalid that says what to change."""
    kind = _job_type_of(job_type)
    if agent_slug is None:
        raise InputError(detail=f"a {kind.value} job is an agent's: name it as agent_slug")
    if not isinstance(payload, dict):
        raise PayloadInvalid(type=kind.value, detail="it must be an object with the fields of its type.")
    body = cast("dict[str, Any]", payload)
    fits = read_payload(kind, body)
    for source in fits.sources if isinstance(fits, ResearchPayload) else ():
        if "://" in source:
            raise SourceNotARef(source=source[:SHOWN_CHARS_MAX])
    ids.run_date(run_id)
    return QueueRequest(
        run_id=run_id,
        job_type=kind,
        agent_slug=checked_slug(agent_slug),
        payload=body,
        entity_refs=_refs(entity_refs),
    )


def requested_sources(request: QueueRequest, read: AgentSources) -> tuple[AgentSource, ...]:
    """Returns the sources that may be cited: those that the payload names, else all of the agent.

    Raises SourceUnreadable.
    """
    payload = read_payload(request.job_type, request.payload)
    requested = payload.sources if isinstance(payload, ResearchPayload) else ()
    if not requested:
        return read.items
    known = {one.ref: one for one in read.items}
    missing = next((ref for ref in requested if ref not in known), None)
    if missing is not None:
        left_out = {one.ref: f"{one.reason.value}: {one.detail}" for one in read.left_out}
        why = (
            left_out.get(missing)
            or f"agent {request.agent_slug} has no such source ({_nearest_source(missing, known)})"
        )
        raise SourceUnreadable(source=missing[:SHOWN_CHARS_MAX], why=why)
    return tuple(known[ref] for ref in dict.fromkeys(requested))


def _nearest_source(missing: str, known: Iterable[str]) -> str:
    """Suggests the source that was probably meant, or lists the first ones."""
    refs = list(known)
    near = nearest(missing, refs)
    if near is not None:
        return f"did you mean {near}?"
    more = ", …" if len(refs) > SOURCES_SHOWN else ""
    return f"it has {', '.join(refs[:SOURCES_SHOWN])}{more}" if refs else "it has none"


def _job_type_of(job_type: str) -> JobType:
    try:
        return JobType(job_type)
    except ValueError:
        known = ", ".join(kind.value for kind in JobType)
        raise InputError(detail=f"there is no job_type {job_type[:SHOWN_CHARS_MAX]!r}; choose one of {known}") from None


def _refs(refs: Sequence[str]) -> tuple[str, ...]:
    if len(refs) > ENTITY_REFS_MAX:
        raise InputError(detail=f"entity_refs has {len(refs)} entries and the limit is {ENTITY_REFS_MAX}")
    for ref in refs:
        if not 1 <= len(ref) <= ENTITY_REF_CHARS_MAX or not ref.isprintable() or not ref.strip():
            detail = f"an entity ref is 1 to {ENTITY_REF_CHARS_MAX} printable characters, not {ref[:SHOWN_CHARS_MAX]!r}"
            raise InputError(detail=detail)
    return tuple(dict.fromkeys(refs))


def new_queue_job(
    request: QueueRequest,
    new_id: Callable[[], str],
    *,
    priority: Priority = Priority.BATCH,
    deadline_s: float | None = None,
    correlation_id: str | None = None,
    trace: str | None = None,
    parent_id: str | None = None,
) -> NewJob:
    """Builds the job of a request. The queue sets attempts and concurrency key; callers cannot choose them."""
    return NewJob(
        job_id=JobId(new_id()),
        type=request.job_type.value,
        payload=request.to_bytes(),
        lifecycle=QUEUE_JOB.name,
        priority=priority,
        deadline_s=deadline_s,
        max_attempts=EXECUTIONS,
        max_deaths=0,
        concurrency_key=f"{KEY_NAMESPACE}{request.agent_slug}",
        correlation_id=correlation_id,
        trace=trace,
        parent_id=None if parent_id is None else JobId(parent_id),
    )


# The document of a queue job (schema 1.3, JQ-10), as a pure function of its request, its row and its events.
#
# Nothing is stored besides the ledger: events say which run a job belongs to, where its snapshot is, its result and its
# error. `attempt` counts the retries made, and `max_attempts` is how many there may be (D38).

SNAPSHOT_READY = "job_nlm_called"
LEASE_LOST = "job_lease_expired"
FAILED_EVENT = "job_failed"
BACKOFF = "RETRY_BACKOFF"
IN_ERROR = frozenset({BACKOFF, "FAILED", "DEAD"})
COMPLETE = "COMPLETE"


def callback_url(gateway: str, job_id: str) -> str:
    """Returns the URL to which the NLM backend sends the result."""
    return f"{gateway}/jobs/{job_id}/result"


def snapshot_url(gateway: str, job_id: str, epoch: int) -> str:
    """Returns the URL from which it reads the context."""
    return f"{gateway}/jobs/{job_id}/context/{epoch}"


def snapshot_digest(events: Sequence[Event], epoch: int) -> str | None:
    """Returns the recorded sha256 of this epoch's context; None if none was recorded."""
    recorded = [data_of(event) for event in events if event.type == SNAPSHOT_READY]
    digests = (one.get("sha256") for one in recorded if str(one.get("snapshot_url")).endswith(f"/context/{epoch}"))
    return next((str(digest) for digest in digests if digest), None)


def document(job: Job, request: QueueRequest, events: Sequence[Event], *, gateway: str) -> dict[str, Any]:
    """Builds the document, field by field as in the schema."""
    return {
        "job_id": job.job_id,
        "run_id": run_of(request, events),
        "job_type": request.job_type.value,
        "agent_slug": request.agent_slug,
        "status": job.state,
        "attempt": job.attempt,
        "max_attempts": retries_of(job),
        "payload": request.payload,
        "context": {"memory_snapshot_url": _snapshot(events), "entity_refs": list(request.entity_refs)},
        "callback": callback_url(gateway, job.job_id),
        "artifact_id": _artifact(job, events),
        "error": error_of(job, events),
    }


def retries_of(job: Job) -> int:
    """Returns the maximum number of retries. The ledger counts executions, which is one more."""
    return job.max_attempts - 1


def run_of(request: QueueRequest, events: Sequence[Event], *, generation: int | None = None) -> str:
    """Returns the run that the job belongs to; with `generation`, the run at the end of that generation (D20)."""
    run_ids = [
        data_of(event).get("run_id")
        for event in events
        if event.type == SNAPSHOT_READY and (generation is None or event.generation <= generation)
    ]
    return next((str(run) for run in reversed(run_ids) if run), request.run_id)


def error_of(job: Job, events: Sequence[Event]) -> str | None:
    """Returns `CODE: message` of the job's failure while it is in an error state; None otherwise."""
    if job.state not in IN_ERROR:
        return None
    for event in reversed(events):
        if event.generation != job.generation:
            return None
        text = _error_in_event(event)
        if text is not None:
            return text
    return None


def _error_in_event(event: Event) -> str | None:
    data = data_of(event)
    if event.cause == RELEASED_CAUSE:
        return "LET_GO: the process that drove it was stopped; another takes it up"
    if "error" in data:
        return f"{data['error']['code']}: {data['error']['message']}"
    if event.type == FAILED_EVENT and is_cancel(event):
        return f"CANCELLED: {data.get('reason') or event.cause or 'no reason given'}"
    if event.type == LEASE_LOST:
        is_late = event.cause == Cause.DEADLINE_PASSED
        return "DEADLINE_PASSED: the job's deadline is over" if is_late else f"LEASE_LOST: {event.cause}"
    return None


def is_cancel(event: Event | SampledEvent) -> bool:
    """Whether a job_failed event is a cancel.

    It is, unless the orchestration layer failed the job out of a backoff, after its last attempt.
    """
    return event.source != BACKOFF or event.role is Role.CONTROL_PLANE


def _snapshot(events: Sequence[Event]) -> str | None:
    urls = [data_of(event).get("snapshot_url") for event in events if event.type == SNAPSHOT_READY]
    return next((str(url) for url in reversed(urls) if url), None)


def _artifact(job: Job, events: Sequence[Event]) -> str | None:
    """Returns the artifact id; None until COMPLETE, which sets it in the same transition (JQ-13)."""
    return str(data_of(events[-1])["artifact_id"]) if job.state == COMPLETE else None

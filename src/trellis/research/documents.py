"""The document of a queue job (schema 1.3, JQ-10), as a pure function of its request, its row and its events.

Nothing is stored besides the ledger: events say which run a job belongs to, where its snapshot is, its result and its
error. `attempt` counts the retries made, and `max_attempts` is how many there may be (D38).
"""

from collections.abc import Sequence
from typing import Any

from trellis.engine.records import Event, Job
from trellis.engine.restoration import RELEASED_CAUSE
from trellis.lifecycles import Role
from trellis.lifecycles.events import Cause
from trellis.research.requests import QueueRequest, data_of

SNAPSHOT_READY = "job_nlm_called"
RETRY_SCHEDULED = "job_retry_scheduled"
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
    told = [data_of(event.data) for event in events if event.type == SNAPSHOT_READY]
    found = (one.get("sha256") for one in told if str(one.get("snapshot_url")).endswith(f"/context/{epoch}"))
    return next((str(digest) for digest in found if digest), None)


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
        "payload": dict(request.payload),
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
    told = [
        data_of(event.data).get("run_id")
        for event in events
        if event.type == SNAPSHOT_READY and (generation is None or event.generation <= generation)
    ]
    return next((str(run) for run in reversed(told) if run), request.run_id)


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
    data = data_of(event.data)
    if event.cause == RELEASED_CAUSE:
        return "LET_GO: the process that drove it was stopped; another takes it up"
    if "error" in data:
        return f"{data['error']['code']}: {data['error']['message']}"
    if event.type == FAILED_EVENT and _is_cancel(event):
        return f"CANCELLED: {data.get('reason') or event.cause or 'no reason given'}"
    if event.type == LEASE_LOST:
        is_late = event.cause == Cause.DEADLINE_PASSED
        return "DEADLINE_PASSED: the job's deadline is over" if is_late else f"LEASE_LOST: {event.cause}"
    return None


def _is_cancel(event: Event) -> bool:
    """Whether a job_failed event is a cancel.

    It is, unless the orchestration layer failed the job out of a backoff, after its last attempt.
    """
    return event.source != BACKOFF or event.role is Role.CONTROL_PLANE


def _snapshot(events: Sequence[Event]) -> str | None:
    told = [data_of(event.data).get("snapshot_url") for event in events if event.type == SNAPSHOT_READY]
    return next((str(url) for url in reversed(told) if url), None)


def _artifact(job: Job, events: Sequence[Event]) -> str | None:
    """Returns the artifact id; None until COMPLETE, which sets it in the same transition (JQ-13)."""
    return str(data_of(events[-1].data)["artifact_id"]) if job.state == COMPLETE else None

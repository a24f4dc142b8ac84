"""Jobs and events as JSON documents, equal at the gateway and at the NLM backend (DJ-13)."""

import json
from typing import Any

from trellis.engine.event_data import cause_of
from trellis.engine.records import Event, Job, Signal
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.queue_job import retries_of
from trellis.storage.objects.canonical_json import timestamp


def short_document(job: Job, status: str, version: int) -> dict[str, Any]:
    """The identity of a job and its state after a transition."""
    return {
        "job_id": job.job_id,
        "lifecycle": job.lifecycle,
        "status": status,
        "type": job.type,
        "version": version,
    }


def job_document(job: Job) -> dict[str, Any]:
    """A job as shown in listings, without its payload."""
    return {
        **short_document(job, job.state, job.version),
        "priority": job.priority.name.lower(),
        "generation": job.generation,
        "attempt": job.attempts_spent,
        "max_attempts": retries_of(job) if job.lifecycle == QUEUE_JOB.name else job.attempts_allowed,
        "attempts_allowed": job.attempts_allowed,
        "created_at": timestamp(job.created_at),
        "updated_at": timestamp(job.updated_at),
        "due_at": None if job.due_at is None else timestamp(job.due_at),
        "deadline_at": None if job.deadline_at is None else timestamp(job.deadline_at),
        "owner": job.owner,
        "lease_expires_at": None if job.lease_expires_at is None else timestamp(job.lease_expires_at),
        "cancel_requested": job.cancel_requested,
        "correlation_id": job.correlation_id,
        "parent_id": job.parent_id,
        "compensates": job.compensates,
        "epoch": job.epoch,
    }


def whole_document(job: Job, result: bytes | None) -> dict[str, Any]:
    """A job with its payload, progress and result."""
    return {
        **job_document(job),
        "payload": json_value(job.payload),
        "progress": json_value(job.progress),
        "result": json_value(result),
        "place": job.place.value,
        "concurrency_key": job.concurrency_key,
        "cancel_asked_by": job.cancel_asked_by,
        "cancel_asked_at": None if job.cancel_asked_at is None else timestamp(job.cancel_asked_at),
        "cancel_cause": job.cancel_cause,
        "cancel_due_at": None if job.cancel_due_at is None else timestamp(job.cancel_due_at),
    }


def event_document(event: Event, trace_id: str | None) -> dict[str, Any]:
    """An event with the nine fields of document 003. The trace id is the job's."""
    data: Any = json_value(event.data)
    return {
        "id": event.id,
        "job_id": event.job_id,
        "type": event.type,
        "ts": timestamp(event.ts),
        "actor": event.actor,
        "correlation_id": event.correlation_id,
        "cause": cause_of(event),
        "payload": {
            "from": event.source,
            "to": event.target,
            "role": event.role.value,
            "generation": event.generation,
            "attempt": event.attempt,
            "epoch": event.epoch,
            "trace_id": trace_id,
            "data": data,
        },
        "version": event.version,
    }


def signal_document(signal: Signal) -> dict[str, Any]:
    """A log line or sign of progress of a job."""
    return {"ts": timestamp(signal.ts), "type": signal.type, "data": json_value(signal.data)}


def json_value(body: bytes | None) -> Any:
    """Decodes stored JSON. Bytes that are no JSON are returned as text."""
    if body is None:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")

"""The document of a bus job, as a pure function of its row, request, events and signals.

The worker, the reason for waiting, the safety kernel's decision and the outcome all come from the job's events; nothing
is stored outside the ledger.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import REQUEUE_CAUSE, JobRequest
from trellis.engine.event_data import data_of
from trellis.engine.records import Event, Job, JobPlace, Signal
from trellis.engine.restoration import GIVEN_BACK_PREFIX
from trellis.storage.objects.canonical_json import timestamp

DISPATCHED = "job_dispatched"
HOLD_EVENTS = frozenset({"job_held", "job_deferred"})
REPORT_EVENTS = frozenset({"job_started", "job_succeeded", "job_failed", "job_retry_scheduled"})
"""Events whose data is a worker's report."""
RETRY_EVENTS = frozenset({"job_retry_scheduled", "job_lease_expired"})
REFUSED_SIGNAL = "job_result_refused"
PARTS = ("meta", "budget", "context_hints", "identity", "context_ref")
"""Parts of a request that a document shows without unset fields."""
SIGNALS_READ_MAX = 200
ENDED_BY_US = {"DENIED": "SAFETY_DENIED", "TIMEOUT": "TIMEOUT", "CANCELLED": "CANCELLED"}
"""Error codes of ends that the control plane decided, where no worker gave one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldReason:
    """Why a job waits although it is ready to run."""

    kind: str
    reason: str
    until: datetime | None


def hold_of(job: Job, events: Sequence[Event]) -> HoldReason | None:
    """Why the job waits; None when only its place in the queue delays it, or it is already dispatched."""
    last = events[-1] if events else None
    if job.place is JobPlace.BLOCKED:
        return HoldReason(kind="tenant", reason="its tenant already has as many running jobs as it may", until=None)
    if job.state != "SCHEDULED" or last is None:
        return None
    if job.place is JobPlace.SCHEDULED:
        return _rest_of(job, last)
    cause = last.cause or ""
    if last.type in RETRY_EVENTS and cause.startswith(GIVEN_BACK_PREFIX):
        return HoldReason(kind="listener", reason=cause.removeprefix(GIVEN_BACK_PREFIX), until=None)
    return None


def _rest_of(job: Job, last: Event) -> HoldReason | None:
    if last.type in HOLD_EVENTS:
        data = data_of(last)
        reason = data.get("reason") or _decision_reason(data) or last.cause or ""
        return HoldReason(kind=str(data.get("hold", "throttle")), reason=str(reason), until=job.due_at)
    if last.type in RETRY_EVENTS:
        return HoldReason(kind="retry", reason=last.cause or "it pauses before its next attempt", until=job.due_at)
    return None


def decision_of(events: Sequence[Event]) -> dict[str, Any] | None:
    """The safety kernel's last decision."""
    for event in reversed(events):
        decision: Any = data_of(event).get("decision")
        if isinstance(decision, dict):
            return cast("dict[str, Any]", decision)
    return None


def dispatch_of(events: Sequence[Event]) -> Event | None:
    return next((event for event in reversed(events) if event.type == DISPATCHED), None)


def report_of(job: Job, events: Sequence[Event]) -> dict[str, Any]:
    """The worker's last report or, for an end that the control plane decided, its reason.

    Empty while there is no report about this attempt.
    """
    for event in reversed(events):
        if event.type in REPORT_EVENTS:
            return data_of(event) if event.target == job.state or event.type != "job_started" else {}
        if event.type == DISPATCHED:
            return {}
        if event.target == job.state and job.state in ENDED_BY_US:
            return {**_worker(events), **_ended_by_us(job, event)}
    return {}


def worker_of(job: Job, events: Sequence[Event]) -> str | None:
    """The worker that has the job, or had it last."""
    worker_id = report_of(job, events).get("worker_id") or _worker(events).get("worker_id")
    return str(worker_id) if worker_id else None


def result_pointer(events: Sequence[Event]) -> str | None:
    """The pointer to the result of a job that succeeded; None if its worker stored none."""
    pointer = next(
        (data_of(event).get("result_ptr") for event in reversed(events) if event.type == "job_succeeded"), None
    )
    return str(pointer) if pointer else None


def context_pointer(job: Job, events: Sequence[Event]) -> str | None:
    """The pointer to the payload that the worker gets: the redacted one if the safety kernel's last decision names one.

    None for a job without a payload, or whose request cannot be read.
    """
    try:
        request = JobRequest.read(job.payload or b"")
    except BusRequestInvalid:
        return None
    redacted = (decision_of(events) or {}).get("redacted")
    if not isinstance(redacted, dict) or not redacted:
        return request.context or None
    context = cast("dict[str, Any]", redacted)
    reference: Any = context.get("context_ref")
    uri = cast("dict[str, Any]", reference).get("uri") if isinstance(reference, dict) else None
    return str(context.get("context_ptr") or uri or "") or None


def requeue_cause(job: Job) -> str | None:
    """The operator's reason for requeueing a job as this one; None when it was not requeued or no reason was given."""
    try:
        return JobRequest.read(job.payload or b"").labels.get(REQUEUE_CAUSE)
    except BusRequestInvalid:
        return None


def refused_of(signals: Sequence[Signal]) -> list[dict[str, Any]]:
    """Refused reports, oldest first."""
    return [
        {"at": timestamp(signal.ts), **json.loads(signal.data or b"{}")}
        for signal in signals
        if signal.type == REFUSED_SIGNAL
    ]


def document(job: Job, request: JobRequest, events: Sequence[Event], signals: Sequence[Signal]) -> dict[str, Any]:
    """The fields that only bus jobs have."""
    report, hold = report_of(job, events), hold_of(job, events)
    fields = request.model_dump(mode="json", exclude={"job_id", "priority", *PARTS})
    parts = {name: getattr(request, name) for name in PARTS}
    return {
        **fields,
        "compensation": _without_defaults(request.compensation),
        **{name: _without_defaults(part) for name, part in parts.items()},
        "payload": None,
        "worker_id": worker_of(job, events),
        "execution_ms": report.get("execution_ms"),
        "error_code": report.get("error_code") or None,
        "error_message": report.get("error_message") or None,
        "result_ptr": report.get("result_ptr") or None,
        "artifact_ptrs": list(report.get("artifact_ptrs") or ()),
        "result_ref": report.get("result_ref"),
        "artifact_refs": list(report.get("artifact_refs") or ()),
        "worker_status": report.get("status"),
        "hold": None if hold is None else _hold(hold),
        "decision": decision_of(events),
        "dispatch": _dispatch(dispatch_of(events)),
        "refused_results": refused_of(signals),
        "children": f"/jobs?parent_id={job.job_id}",
    }


def _without_defaults(part: Any) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json", exclude_defaults=True)


def _hold(hold: HoldReason) -> dict[str, Any]:
    until = None if hold.until is None else timestamp(hold.until)
    return {"kind": hold.kind, "reason": hold.reason, "until": until}


def _dispatch(event: Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    data = data_of(event)
    return {
        "dispatch_id": str(data.get("dispatch_id", "")),
        "attempt": int(data.get("attempt", event.attempt)),
        "epoch": event.epoch,
        "worker_id": str(data.get("worker_id", "")),
        "subject": str(data.get("subject", "")),
        "at": timestamp(event.ts),
    }


def _worker(events: Sequence[Event]) -> dict[str, Any]:
    """The worker of the last attempt, as it named itself or as it was assigned."""
    for event in reversed(events):
        if event.type in REPORT_EVENTS or event.type == DISPATCHED:
            worker_id = data_of(event).get("worker_id")
            return {"worker_id": worker_id} if worker_id else {}
    return {}


def _ended_by_us(job: Job, event: Event) -> dict[str, Any]:
    data = data_of(event)
    reason = data.get("note") or _decision_reason(data) or data.get("reason") or event.cause
    return {"error_code": ENDED_BY_US[job.state], "error_message": reason}


def _decision_reason(data: dict[str, Any]) -> str | None:
    decision: Any = data.get("decision")
    return str(cast("dict[str, Any]", decision).get("reason", "")) if isinstance(decision, dict) else None

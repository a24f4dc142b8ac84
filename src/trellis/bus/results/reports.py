"""What workers report about a job, as events keep it, and what it means. Pure; `results` carries it out.

A report is fenced by its wire id: it speaks of one handing-out (an attempt), and only while that is the job's own. Whatever else comes is
refused and remarked with the reason:

| kind | meaning |
|---|---|
| late | the job ended otherwise, before the report came |
| stale | the attempt was taken back, or another dispatch was meant; the job goes on |
| duplicate | this worker said the same of this attempt before |
| contradictory | this worker said something else of this attempt before |
| foreign | another worker has, or had, this attempt |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, cast

from trellis.bus.documents import data_of, decision_of
from trellis.bus.messages import NOT_BEGUN, Dispatch, JobResult, Status, error_name
from trellis.bus.requests import ResourceRef
from trellis.bus.scheduling.dispatch_order import runtime_ms
from trellis.bus.topics import Topic
from trellis.engine.jobs import ERROR_CHARS_MAX, Epoch, HeldLease
from trellis.engine.records import Event
from trellis.engine.text import storable

TEXT_CHARS_MAX = 2_000
POINTERS_MAX = 1_000
POINTERS_CHARS_MAX = 200_000
"""Of all artifact pointers of a report together: whatever is kept also fits into a stored result and into a packet."""
PROGRESS_STATUSES = frozenset({Status.PENDING, Status.SCHEDULED, Status.DISPATCHED, Status.RUNNING})
"""Statuses that tell no end: a result with one of them is a sign of life."""
ATTEMPT_END_EVENTS = frozenset({"job_succeeded", "job_failed", "job_retry_scheduled", "job_cancelled"})
"""Events that can have a report in their data."""
GIVE_BACKS_MAX = 50
"""How often a worker gives back what it did not begin; from then on it counts as an attempt."""
ATTEMPT = "attempt"
"""In the event of a handing-out: the number of the attempt, from 1, as its worker was told it."""
RETRYABLE = "retryable"
"""In the event of a failure: whether it was worth another attempt, as its topic was configured then."""
STATUS_MISSING = "STATUS_MISSING"
CANCELLED_BY_WORKER = "CANCELLED_BY_WORKER"


class ReportRefusal(StrEnum):
    """Why a report changes nothing."""

    LATE = "late"
    STALE = "stale"
    DUPLICATE = "duplicate"
    CONTRADICTORY = "contradictory"
    FOREIGN = "foreign"


class ReportVerdict(StrEnum):
    """What a report does to the job that it speaks of."""

    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    """The next attempt, under the same id."""
    GIVE_BACK = "give back"
    """The same attempt once more, under the same id: nobody began it."""
    CANCEL = "cancel"
    """The worker stopped as it was asked to, or failed where nobody wants another attempt any more."""


REQUEUING_VERDICTS = frozenset({ReportVerdict.RETRY, ReportVerdict.GIVE_BACK})
"""The job waits anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """One worker's word about one attempt, fit to be stored."""

    status: str
    worker_id: str
    execution_ms: int = 0
    error_code: str = ""
    error_message: str = ""
    result_ptr: str = ""
    artifact_ptrs: tuple[str, ...] = ()
    dispatch_id: str = ""
    error_code_enum: int = 0
    """CAP's number of the error, as the worker told it."""
    result_ref: ResourceRef | None = None
    artifact_refs: tuple[ResourceRef, ...] = ()
    dispatch: Dispatch | None = field(default=None, compare=False)
    """Which handing-out it ended, as the ledger has it; no part of what the worker said."""

    @property
    def body(self) -> bytes:
        """As events and results keep it."""
        return _json(self._told)

    def judged(self, *, retryable: bool) -> bytes:
        """As the event of a failure keeps it."""
        return _json({**self._told, RETRYABLE: retryable})

    @property
    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "status": self.status,
            "worker_id": self.worker_id,
            "execution_ms": self.execution_ms,
            "error_code": self.error_code,
            "error_message": self.error_message,
            "result_ptr": self.result_ptr,
            "artifact_ptrs": list(self.artifact_ptrs),
        }
        if self.dispatch_id:
            told["dispatch_id"] = self.dispatch_id
        if self.error_code_enum:
            told["error_code_enum"] = self.error_code_enum
        if self.result_ref is not None:
            told["result_ref"] = self.result_ref.model_dump(exclude_defaults=True)
        if self.artifact_refs:
            told["artifact_refs"] = [ref.model_dump(exclude_defaults=True) for ref in self.artifact_refs]
        if self.dispatch is not None:
            told["dispatch"] = asdict(self.dispatch)
        return told

    @property
    def problem(self) -> str | None:
        """What went wrong, in one line; None when nothing did."""
        return ": ".join(filter(None, (self.error_code, self.error_message))) or None


def _json(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told, ensure_ascii=False).encode()


def report_of_result(said: JobResult, dispatch_id: str) -> WorkerReport:
    """What a worker says, cut to what is kept of it. A failure always has a code: its text, else its number, else its status."""
    status = said.status
    code = said.error_code or error_name(said.error_code_enum)
    if not code and status in {Status.UNSPECIFIED, Status.CANCELLED, Status.DENIED, Status.TIMEOUT}:
        code = {Status.UNSPECIFIED: STATUS_MISSING, Status.CANCELLED: CANCELLED_BY_WORKER}.get(status, status.name)
    return WorkerReport(
        status=status.name,
        worker_id=storable_text(said.worker_id),
        execution_ms=max(0, said.execution_ms),
        error_code=storable_text(code),
        error_message=storable_text(said.error_message, ERROR_CHARS_MAX),
        result_ptr=storable_text(said.result_ptr),
        artifact_ptrs=_storable_pointers(said.artifact_ptrs),
        dispatch_id=storable_text(dispatch_id),
        error_code_enum=said.error_code_enum,
        result_ref=None if said.result_ref is None else _storable_ref(said.result_ref),
        artifact_refs=_storable_refs(said.artifact_refs),
    )


def report_in(event: Event) -> WorkerReport | None:
    """The report that an event was made of; None where nobody reported."""
    told = data_of(event)
    if event.type not in ATTEMPT_END_EVENTS or "status" not in told:
        return None
    return WorkerReport(
        status=str(told["status"]),
        worker_id=str(told.get("worker_id", "")),
        execution_ms=int(told.get("execution_ms", 0)),
        error_code=str(told.get("error_code", "")),
        error_message=str(told.get("error_message", "")),
        result_ptr=str(told.get("result_ptr", "")),
        artifact_ptrs=tuple(map(str, told.get("artifact_ptrs", ()))),
        dispatch_id=str(told.get("dispatch_id", "")),
        error_code_enum=int(told.get("error_code_enum", 0)),
        result_ref=ResourceRef.model_validate(told["result_ref"]) if told.get("result_ref") else None,
        artifact_refs=tuple(map(ResourceRef.model_validate, told.get("artifact_refs", ()))),
        dispatch=Dispatch(**told["dispatch"]) if told.get("dispatch") else None,
    )


def storable_text(text: str, limit: int = TEXT_CHARS_MAX) -> str:
    """As much of a text from outside as is stored."""
    return storable(text[:limit]) or ""


def _storable_pointers(pointers: Sequence[str]) -> tuple[str, ...]:
    """As many pointers from the first on as are stored."""
    found: list[str] = []
    chars = 0
    for pointer in pointers[:POINTERS_MAX]:
        chars += len(pointer)
        if chars > POINTERS_CHARS_MAX:
            break
        found.append(storable_text(pointer))
    return tuple(found)


def _storable_ref(ref: ResourceRef) -> ResourceRef:
    """A reference without what no ledger can store."""
    texts = {name: storable_text(value) for name, value in ref.model_dump().items() if isinstance(value, str)}
    return ref.model_copy(update=texts)


def _storable_refs(refs: Sequence[ResourceRef]) -> tuple[ResourceRef, ...]:
    """As many references from the first on as are stored."""
    found: list[ResourceRef] = []
    chars = 0
    for ref in refs[:POINTERS_MAX]:
        chars += len(ref.model_dump_json(exclude_defaults=True))
        if chars > POINTERS_CHARS_MAX:
            break
        found.append(_storable_ref(ref))
    return tuple(found)


def is_retryable(report: WorkerReport | None, topic: Topic) -> bool:
    """Whether a failure is worth another attempt: the worker says so, or the topic's settings do (BUS-13)."""
    if report is None:
        return False
    if report.status == Status.FAILED_RETRYABLE.name:
        return True
    return report.status != Status.FAILED_FATAL.name and report.error_code in topic.retry


def give_backs(events: Sequence[Event]) -> int:
    """How often workers gave it back; what found nobody who listens was in no worker's hands."""
    reports = [report_in(event) for event in events if event.type == "job_retry_scheduled"]
    return sum(report is not None and report.error_code == NOT_BEGUN for report in reports)


def verdict_on(report: WorkerReport, topic: Topic, hold: HeldLease, given_back: int = 0) -> ReportVerdict:
    """What becomes of a job that is held, by its worker's last word; it was given back so often before."""
    if report.status == Status.SUCCEEDED.name:
        return ReportVerdict.SUCCEED
    again = is_retryable(report, topic)
    if hold.cancel and (again or report.status == Status.CANCELLED.name):
        return ReportVerdict.CANCEL
    if again and report.error_code == NOT_BEGUN and given_back < GIVE_BACKS_MAX:
        return ReportVerdict.GIVE_BACK
    attempts_left = hold.attempt + 1 < hold.max_attempts
    retries = topic.idempotent and attempts_left and again
    return ReportVerdict.RETRY if retries else ReportVerdict.FAIL


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchedAttempt:
    """One handing-out of a job, as its events tell it."""

    epoch: Epoch
    dispatch_id: str
    assigned: str
    """The worker it went to; empty when it went to whoever listened."""
    dispatched_at: datetime
    number: int
    """As its order names it: from 1. Orders that went out before that was recorded counted from 0."""
    starter: str | None = None
    token: str = ""
    """What the start was asked with, when the worker asked."""
    runtime_s: float | None = None
    """How long the safety policy lets it take; None when it says nothing."""

    def may_take_s(self, topic: Topic) -> float:
        """How long it is kept alive: as long as its topic and the policy let it."""
        return topic.running_s if self.runtime_s is None else min(topic.running_s, self.runtime_s)

    @property
    def worker(self) -> str:
        """Whose it is; empty while nobody knows."""
        return self.starter or self.assigned

    @property
    def dispatch(self) -> Dispatch:
        """As messages to its worker name it."""
        return Dispatch(dispatch_id=self.dispatch_id, attempt=self.number, worker_id=self.assigned)

    def objection(self, worker_id: str, dispatch: Dispatch | None) -> ReportRefusal | None:
        """Why this worker's word is not taken; None when it is. Whatever it echoes of a dispatch must be this one's."""
        said = dispatch or Dispatch()
        if self.worker not in {"", worker_id} or said.worker_id not in {"", self.assigned, worker_id}:
            return ReportRefusal.FOREIGN
        if said.dispatch_id not in {"", self.dispatch_id} or said.attempt not in {0, self.number}:
            return ReportRefusal.STALE
        return None


def attempt_in(events: Sequence[Event], epoch: Epoch) -> DispatchedAttempt | None:
    """The handing-out with this epoch; None when there was none."""
    own = _of_attempt(events, epoch)
    if not own:
        return None
    first, told = own[0], data_of(own[0])
    started = next((event for event in own if event.type == "job_started"), None)
    return DispatchedAttempt(
        epoch=epoch,
        dispatch_id=str(told.get("dispatch_id", "")),
        assigned=str(told.get("worker_id", "")),
        dispatched_at=first.ts,
        number=int(told.get(ATTEMPT, first.attempt)),
        starter=None if started is None else started.actor,
        token="" if started is None else str(data_of(started).get("token", "")),
        runtime_s=_runtime_s(first),
    )


def _runtime_s(dispatched: Event) -> float | None:
    constraints: Any = (decision_of([dispatched]) or {}).get("constraints")
    allowed_ms = runtime_ms(cast("dict[str, Any]", constraints)) if isinstance(constraints, dict) else None
    return None if allowed_ms is None else allowed_ms / 1000


def report_that_ended(events: Sequence[Event], epoch: Epoch) -> WorkerReport | None:
    """The report that ended this attempt; None when it ended otherwise or has not ended."""
    return next((report for event in _of_attempt(events, epoch) if (report := report_in(event))), None)


def refusal_of_stale(events: Sequence[Event], epoch: Epoch, report: WorkerReport, *, ended: bool) -> ReportRefusal:
    """Why a report about an attempt that is not under way changes nothing."""
    before = report_that_ended(events, epoch)
    attempt = attempt_in(events, epoch)
    if attempt is not None and attempt.worker not in {"", report.worker_id}:
        return ReportRefusal.FOREIGN
    if before is not None and before.worker_id != report.worker_id:
        return ReportRefusal.FOREIGN
    if before is not None:
        return ReportRefusal.DUPLICATE if before.status == report.status else ReportRefusal.CONTRADICTORY
    return ReportRefusal.LATE if ended else ReportRefusal.STALE


def _of_attempt(events: Sequence[Event], epoch: Epoch) -> Sequence[Event]:
    """The events from the dispatch with this epoch up to the next one."""
    starts = [number for number, event in enumerate(events) if event.type == "job_dispatched"]
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        if events[start].epoch == epoch:
            return events[start:end]
    return ()

"""Reports of workers about jobs: how events store them, and what they mean. Pure; `result_listener` applies them.

A report is fenced by its wire id: it is about one dispatch (an attempt), and counts only while that attempt is the
job's current one. Any other report is refused and recorded with the reason:

| kind | meaning |
|---|---|
| late | a late result: the job ended otherwise before the report arrived |
| stale | the attempt was revoked, or another dispatch was named; the job continues |
| duplicate | this worker reported the same about this attempt before |
| contradictory | this worker reported something else about this attempt before |
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
"""Maximum total length of all artifact pointers of a report, so that it also fits a stored result and a packet."""
PROGRESS_STATUSES = frozenset({Status.PENDING, Status.SCHEDULED, Status.DISPATCHED, Status.RUNNING})
"""Statuses that are not an end. A result with one of them is a heartbeat."""
ATTEMPT_END_EVENTS = frozenset({"job_succeeded", "job_failed", "job_retry_scheduled", "job_cancelled"})
"""Events whose data can be a report."""
GIVE_BACKS_MAX = 50
"""How often workers may return a job unstarted. After that, each return counts as an attempt."""
ATTEMPT = "attempt"
"""Key in the dispatch event: the number of the attempt, from 1, as sent to its worker."""
RETRYABLE = "retryable"
"""Key in the event of a failure: whether it was retryable under the topic's configuration at that time."""
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
    """What a report does to its job."""

    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    """Start the next attempt, under the same id."""
    GIVE_BACK = "give back"
    """Repeat the same attempt, under the same id: no worker started it."""
    CANCEL = "cancel"
    """The worker stopped on request, or failed retryably after a cancel was requested."""


REQUEUING_VERDICTS = frozenset({ReportVerdict.RETRY, ReportVerdict.GIVE_BACK})
"""Verdicts after which the job waits for dispatch again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """A worker's report about one attempt, cut to what can be stored."""

    status: str
    worker_id: str
    execution_ms: int = 0
    error_code: str = ""
    error_message: str = ""
    result_ptr: str = ""
    artifact_ptrs: tuple[str, ...] = ()
    dispatch_id: str = ""
    error_code_enum: int = 0
    """CAP's number of the error, as the worker sent it."""
    result_ref: ResourceRef | None = None
    artifact_refs: tuple[ResourceRef, ...] = ()
    dispatch: Dispatch | None = field(default=None, compare=False)
    """The dispatch that the report ended, from the ledger; not part of the worker's report."""

    @property
    def body(self) -> bytes:
        """The stored form, for events and results."""
        return _json(self._told)

    def judged(self, *, retryable: bool) -> bytes:
        """The stored form for the event of a failure."""
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
        """The error in one line; None when there is none."""
        return ": ".join(filter(None, (self.error_code, self.error_message))) or None


def _json(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told, ensure_ascii=False).encode()


def report_of_result(said: JobResult, dispatch_id: str) -> WorkerReport:
    """The report in a result, cut to the stored size.

    A failure always has a code: its text, else its number, else its status.
    """
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
    """The report stored in an event; None if it has none."""
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
    """A text from outside, cut to the stored size and cleaned."""
    return storable(text[:limit]) or ""


def _storable_pointers(pointers: Sequence[str]) -> tuple[str, ...]:
    """The first pointers, as many as are stored."""
    found: list[str] = []
    chars = 0
    for pointer in pointers[:POINTERS_MAX]:
        chars += len(pointer)
        if chars > POINTERS_CHARS_MAX:
            break
        found.append(storable_text(pointer))
    return tuple(found)


def _storable_ref(ref: ResourceRef) -> ResourceRef:
    """A reference without characters that the ledger cannot store."""
    texts = {name: storable_text(value) for name, value in ref.model_dump().items() if isinstance(value, str)}
    return ref.model_copy(update=texts)


def _storable_refs(refs: Sequence[ResourceRef]) -> tuple[ResourceRef, ...]:
    """The first references, as many as are stored."""
    found: list[ResourceRef] = []
    chars = 0
    for ref in refs[:POINTERS_MAX]:
        chars += len(ref.model_dump_json(exclude_defaults=True))
        if chars > POINTERS_CHARS_MAX:
            break
        found.append(_storable_ref(ref))
    return tuple(found)


def is_retryable(report: WorkerReport | None, topic: Topic) -> bool:
    """Whether a failure is retryable: the worker says so, or the topic's settings do (BUS-13)."""
    if report is None:
        return False
    if report.status == Status.FAILED_RETRYABLE.name:
        return True
    return report.status != Status.FAILED_FATAL.name and report.error_code in topic.retry


def give_backs(events: Sequence[Event]) -> int:
    """How often workers returned the job unstarted. Dispatches without a subscriber do not count."""
    reports = [report_in(event) for event in events if event.type == "job_retry_scheduled"]
    return sum(report is not None and report.error_code == NOT_BEGUN for report in reports)


def verdict_on(report: WorkerReport, topic: Topic, hold: HeldLease, given_back: int = 0) -> ReportVerdict:
    """What becomes of a held job after its worker's report.

    `given_back` is how often it was returned unstarted before.
    """
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
    """One dispatch of a job, from its events."""

    epoch: Epoch
    dispatch_id: str
    assigned: str
    """The worker it was sent to; empty when it went to the topic's own subject."""
    dispatched_at: datetime
    number: int
    """The attempt number in its order, from 1. Orders sent before this was recorded counted from 0."""
    starter: str | None = None
    token: str = ""
    """The token with which the worker asked to start; empty if it did not ask."""
    runtime_s: float | None = None
    """The policy's runtime limit in seconds; None without one."""

    def may_take_s(self, topic: Topic) -> float:
        """How long the attempt may run, in seconds: the shorter of the topic's and the policy's limit."""
        return topic.running_s if self.runtime_s is None else min(topic.running_s, self.runtime_s)

    @property
    def worker(self) -> str:
        """The worker that has it; empty while unknown."""
        return self.starter or self.assigned

    @property
    def dispatch(self) -> Dispatch:
        """The dispatch as named in messages to the worker."""
        return Dispatch(dispatch_id=self.dispatch_id, attempt=self.number, worker_id=self.assigned)

    def objection(self, worker_id: str, dispatch: Dispatch | None) -> ReportRefusal | None:
        """Why this worker's report is refused; None if it is accepted.

        Any field it echoes from a dispatch must match.
        """
        said = dispatch or Dispatch()
        if self.worker not in {"", worker_id} or said.worker_id not in {"", self.assigned, worker_id}:
            return ReportRefusal.FOREIGN
        if said.dispatch_id not in {"", self.dispatch_id} or said.attempt not in {0, self.number}:
            return ReportRefusal.STALE
        return None


def attempt_in(events: Sequence[Event], epoch: Epoch) -> DispatchedAttempt | None:
    """The dispatch with this epoch; None if there was none."""
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
    """The report that ended this attempt; None if it ended otherwise or has not ended."""
    return next((report for event in _of_attempt(events, epoch) if (report := report_in(event))), None)


def refusal_of_stale(events: Sequence[Event], epoch: Epoch, report: WorkerReport, *, ended: bool) -> ReportRefusal:
    """Why a report about an attempt that is not current is refused."""
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

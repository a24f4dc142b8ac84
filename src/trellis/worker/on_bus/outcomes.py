"""Turns the end of a handler into a JobResult. Pure functions: facts in, one result out.

| The handler | Result | Error code |
|---|---|---|
| returned | SUCCEEDED | |
| raised `TransientError` | FAILED_RETRYABLE | its `error_code`, else its class |
| raised `PermanentError` | FAILED_FATAL | its `error_code` or `reason_code`, else its class |
| raised `ValidationError`, or its payload does not fit | FAILED_FATAL | INVALID_INPUT |
| raised `Snooze` | FAILED_RETRYABLE | SNOOZED: on the bus the attempt counts |
| raised anything else | FAILED | its class: the topic decides which codes are retried |
| returned, but its result could not be stored | FAILED | RESULT_NOT_KEPT: the topic decides about a retry |
| exceeded its timeout | FAILED_RETRYABLE | TIMEOUT |
| stopped after a cancel request | CANCELLED | |
| stopped after its lease expired by the worker's clock | FAILED_RETRYABLE | WORKER_UNAVAILABLE |
| was stopped because the worker stops | FAILED_RETRYABLE | WORKER_UNAVAILABLE |
| never started: the worker stops or is full | FAILED_RETRYABLE | NOT_BEGUN (1) |

(1) Other schedulers than our own control plane get WORKER_UNAVAILABLE or RESOURCE_EXHAUSTED.

Every failure also has a CAP error number (`error_code_enum`): the number of its code; else the one for its class, such
as TIMEOUT for a `TimeoutError`; else HANDLER_FAILED (1000), in the range that CAP reserves for applications.
"""

from dataclasses import dataclass

from trellis.bus.messages import NOT_BEGUN, ErrorCode, JobResult, Status, error_number
from trellis.engine.errors import JobError, PermanentError, TransientError, ValidationError
from trellis.engine.retry_policy import storable
from trellis.engine.text import error_message
from trellis.worker.held import StopCause
from trellis.worker.on_bus.attempt import OrderAttempt
from trellis.worker.outcomes import Snooze

RESULT_NOT_KEPT = "RESULT_NOT_KEPT"
ERROR_CHARS_MAX = 2_000
CODE_CHARS_MAX = 200


class ResultNotKept(JobError):
    """The handler has returned, and what it returned could not be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlerEnding:
    """How a handler ended: with a pointer to its stored result (empty for none), or with an error."""

    result_ptr: str = ""
    error: BaseException | None = None


def result_of(attempt: OrderAttempt, ending: HandlerEnding, *, worker_id: str, now: float) -> JobResult:
    """Builds the result to report."""
    status, code, text = _status_and_code(attempt, ending.error)
    began = now if attempt.begun_at is None else attempt.begun_at
    return JobResult(
        job_id=attempt.wire_id,
        status=status,
        worker_id=worker_id,
        result_ptr=ending.result_ptr if status is Status.SUCCEEDED else "",
        artifact_ptrs=tuple(one.pointer for one in attempt.artifacts) if status is Status.SUCCEEDED else (),
        execution_ms=max(0, round((now - began) * 1000)),
        error_code=storable(code)[:CODE_CHARS_MAX],
        error_message=storable(text)[:ERROR_CHARS_MAX],
        error_code_enum=_number(status, code, ending.error),
        dispatch=attempt.dispatch,
    )


def not_run_result(attempt: OrderAttempt, status: Status, code: str, why: str, *, worker_id: str) -> JobResult:
    """Builds the result of an order whose handler never started.

    Our own control plane gets NOT_BEGUN for a retryable failure; other schedulers get `code`.
    """
    given_back = attempt.asks and status is Status.FAILED_RETRYABLE
    return JobResult(
        job_id=attempt.wire_id,
        status=status,
        worker_id=worker_id,
        error_code=NOT_BEGUN if given_back else code,
        error_message=why[:ERROR_CHARS_MAX],
        error_code_enum=error_number(code),
        dispatch=attempt.dispatch,
    )


def _number(status: Status, code: str, error: BaseException | None) -> int:
    if status in {Status.SUCCEEDED, Status.CANCELLED}:
        return 0
    named = error_number(code)
    return named or next((number for kind, number in _NUMBERS if isinstance(error, kind)), ErrorCode.HANDLER_FAILED)


_NUMBERS: tuple[tuple[type[BaseException], ErrorCode], ...] = (
    (TimeoutError, ErrorCode.TIMEOUT),
    (MemoryError, ErrorCode.RESOURCE_EXHAUSTED),
    (PermissionError, ErrorCode.PERMISSION_DENIED),
    (FileNotFoundError, ErrorCode.NOT_FOUND),
    (ConnectionError, ErrorCode.CONNECTION_LOST),
    (ValidationError, ErrorCode.INVALID_INPUT),
)
"""CAP error numbers for Python exceptions that a handler raises unchanged."""


def _status_and_code(attempt: OrderAttempt, error: BaseException | None) -> tuple[Status, str, str]:
    """Returns status, error code and message."""
    if attempt.cancel_requested and (error is not None or attempt.heard):
        return Status.CANCELLED, "", attempt.reason or "cancelled"
    if attempt.fate is StopCause.GIVEN_BACK and error is not None:
        return Status.FAILED_RETRYABLE, ErrorCode.WORKER_UNAVAILABLE.name, "the worker stopped before the handler ended"
    if attempt.fate is StopCause.TIMED_OUT and error is not None:
        return Status.FAILED_RETRYABLE, ErrorCode.TIMEOUT.name, f"no end after {attempt.timeout_s:g} s"
    if attempt.lease_over and attempt.heard and attempt.fate is None:
        text = "the handler stopped because its lease was over by the worker's clock"
        return Status.FAILED_RETRYABLE, ErrorCode.WORKER_UNAVAILABLE.name, text
    return (Status.SUCCEEDED, "", "") if error is None else _failed(error)


def _failed(error: BaseException) -> tuple[Status, str, str]:
    text = error_message(error) or type(error).__name__
    if isinstance(error, Snooze):
        return Status.FAILED_RETRYABLE, "SNOOZED", text
    if isinstance(error, TransientError):
        return Status.FAILED_RETRYABLE, _code(error), text
    if isinstance(error, ValidationError | PermanentError):
        return Status.FAILED_FATAL, _code(error), text
    if isinstance(error, ResultNotKept):
        return Status.FAILED, RESULT_NOT_KEPT, text
    return Status.FAILED, type(error).__name__, text


def _code(error: JobError) -> str:
    """Returns the error code set by the handler, or one derived from the error's class."""
    named = error.data.get("error_code") or error.data.get("reason_code")
    if isinstance(named, str):
        return named
    return ErrorCode.INVALID_INPUT.name if isinstance(error, ValidationError) else type(error).__name__

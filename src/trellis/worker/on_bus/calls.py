"""Calls the handler for an order, and turns its end into a JobResult.

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

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from trellis.bus.errors import PointerChanged
from trellis.bus.messages import NOT_BEGUN, POINTER_CHANGED, ErrorCode, JobResult, Status, error_number
from trellis.bus.requests import ResourceRef
from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.errors import InputError, JobError, PermanentError, TransientError, TrellisError, ValidationError
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import error_text, storable
from trellis.engine.text import error_message
from trellis.worker.app import HandlerKind, JobSpec
from trellis.worker.context import Context, Item
from trellis.worker.handlers import Handlers
from trellis.worker.held import StopCause
from trellis.worker.on_bus.attempt import OrderAttempt
from trellis.worker.on_bus.context import BusContext
from trellis.worker.options import PointerAccess
from trellis.worker.outcomes import Snooze
from trellis.worker.payloads import NULL, UnreadablePayload

# The result of an ended handler.

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


# Calling the handler.

IO_S = 30.0
"""Timeout of one try to read a payload or store a result."""
READ_S = 60.0
"""How long reading a payload is retried while the store is down. This avoids spending an attempt on a store restart."""
PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 10.0

T = TypeVar("T")
_log = log_of("trellis.worker")


@dataclass(frozen=True, kw_only=True)
class HandlerCalls:
    """Runs handlers; sync handlers run on threads."""

    resolver: PointerAccess
    clock: Clock
    handlers: Handlers
    worker_id: str
    stopping: Callable[[], bool]
    keep_s: float

    async def run(self, attempt: OrderAttempt, spec: JobSpec, grace_s: float) -> HandlerEnding:
        """Runs the handler to its end, in its own task. Cancelling that task ends only this job."""
        limits = [limit for limit in (spec.options.timeout_s, attempt.deadline_s) if limit is not None]
        attempt.timeout_s = min(limits, default=None)
        handling = asyncio.ensure_future(self._handle(attempt, spec))
        attempt.handling = handling
        guards: list[asyncio.Future[None]] = []

        def guard() -> None:
            attempt.on_stop = None
            guards.append(asyncio.ensure_future(self._guard(attempt, grace_s)))

        if attempt.timeout_s is None and not attempt.stop_event.is_set():
            attempt.on_stop = guard  # there is nothing to watch before
        else:
            guard()
        try:
            await asyncio.wait({handling})
        finally:
            attempt.ended, attempt.on_stop = True, None
            handling.cancel()
            for one in guards:
                one.cancel()
                await asyncio.gather(one, return_exceptions=True)
        error = asyncio.CancelledError() if handling.cancelled() else handling.exception()
        if error is not None:
            _note_failure(attempt, error)
            if spec.on_error and (failure := _failure_of(attempt, error)) is not None:
                await self.handlers.report_error(spec, self._context(attempt), failure)
            return HandlerEnding(error=error)
        return HandlerEnding(result_ptr=handling.result())

    async def _guard(self, attempt: OrderAttempt, grace_s: float) -> None:
        """Stops a handler that exceeds its timeout, or that continues for `grace_s` after it was told to stop."""
        limit_s = attempt.timeout_s
        try:
            await (
                attempt.stop_event.wait() if limit_s is None else within(self.clock, limit_s, attempt.stop_event.wait())
            )
        except TimeoutError:
            if not attempt.ended:
                _log.warning("handler_timed_out", job_id=attempt.job_id, timeout_s=limit_s)
                attempt.cut(StopCause.TIMED_OUT)
            return
        await self.clock.sleep(grace_s)
        attempt.cut(None)

    async def _handle(self, attempt: OrderAttempt, spec: JobSpec) -> str:
        about = {
            "trellis.job_id": attempt.job_id,
            "trellis.type": attempt.request.topic,
            "trellis.attempt": attempt.number,
            "trellis.epoch": attempt.epoch,
            "trellis.correlation_id": attempt.trace_id,
        }
        with tracing.carried(attempt.trace, f"job.handle {attempt.request.topic}", about, kind=tracing.CONSUMER):
            return await self._handled(attempt, spec)

    async def _handled(self, attempt: OrderAttempt, spec: JobSpec) -> str:
        payload = await self._payload(attempt, spec)
        attempt.called = True
        try:
            value = await self._called(attempt, spec, payload)
        except (SystemExit, KeyboardInterrupt) as error:
            # `sys.exit()` in a handler ends only the handler. Raised out of the task it would end the worker.
            raise RuntimeError(f"the handler raised {type(error).__name__}: {error_message(error)}") from error
        attempt.ended = True
        if value is None or (attempt.cancel_requested and attempt.heard):
            return ""
        attempt.keeping = True
        try:
            return await self._kept(attempt, spec, value)
        except asyncio.CancelledError:
            if attempt.fate is not None or not self.stopping():
                raise
            raise ResultNotKept("the handler has returned, but the worker stopped before a store took it") from None
        finally:
            attempt.keeping = False

    async def _called(self, attempt: OrderAttempt, spec: JobSpec, payload: Any) -> Any:
        context = self._context(attempt)
        if spec.kind is HandlerKind.BATCH:
            return await self._alone_in_batch(spec, context, payload)
        return await self.handlers.call(spec, context, attempt, payload)

    async def _alone_in_batch(self, spec: JobSpec, context: BusContext, payload: Any) -> Any:
        """Calls a batch handler with one job: the bus delivers jobs separately."""
        item = Item(cast("Context", context), payload)
        await self.handlers.call_batch(spec, [item])
        if item.error is not None:
            raise item.error
        return item.value

    def _context(self, attempt: OrderAttempt) -> BusContext:
        return BusContext(attempt, worker_id=self.worker_id, clock=self.clock, stopping=self.stopping)

    async def _payload(self, attempt: OrderAttempt, spec: JobSpec) -> Any:
        pointer = attempt.request.context
        body = await self._read(attempt, pointer) if pointer and spec.takes_payload else NULL
        if pointer and spec.takes_payload:
            _check_reference(body, attempt.request.context_ref)
        payload = spec.codec.read_payload(body)
        if isinstance(payload, UnreadablePayload):
            raise ValidationError(payload.detail)
        return payload

    async def _read(self, attempt: OrderAttempt, pointer: str) -> bytes:
        read = partial(self.resolver.read, pointer)
        try:
            return await self._patiently(attempt, read, f"reading {pointer}", READ_S)
        except PointerChanged as error:
            raise PermanentError(str(error), error_code=POINTER_CHANGED) from error
        except InputError as error:
            code = error.code if error.code in ErrorCode.__members__ else ErrorCode.INVALID_INPUT.name
            raise PermanentError(str(error), error_code=code) from error

    async def _kept(self, attempt: OrderAttempt, spec: JobSpec, value: Any) -> str:
        try:
            body = spec.codec.result_bytes(value)
            keep = partial(self.resolver.write, attempt.wire_id, body)
            return await self._patiently(attempt, keep, "keeping the result", self.keep_s)
        except InputError as error:
            raise PermanentError(str(error), error_code="RESULT_INVALID") from error
        except TransientError as error:
            # The work is done. A retryable failure would repeat it, even on topics where a repetition does harm.
            raise ResultNotKept(f"the handler has returned, but {error}") from error

    async def _patiently(
        self, attempt: OrderAttempt, work: Callable[[], Coroutine[Any, Any, T]], what: str, for_s: float
    ) -> T:
        """Retries `work` with backoff while the store is down, for about `for_s`. Raises the last TransientError."""
        began, pause_s = self.clock.monotonic(), PAUSE_S_FIRST
        while True:
            try:
                return await self._in_time(work(), what)
            except TransientError as error:
                if self.clock.monotonic() - began + pause_s > for_s:
                    raise
                _log.warning("store_away", job_id=attempt.job_id, error=str(error), again_in_s=pause_s)
            await self.clock.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return await within(self.clock, IO_S, work)
        except InputError:
            raise
        except TimeoutError:
            raise TransientError(f"{what} took longer than {IO_S:g} s", error_code="POINTER_UNAVAILABLE") from None
        except (TrellisError, OSError) as error:
            raise TransientError(f"{what}: {error}", error_code="POINTER_UNAVAILABLE") from error


def _check_reference(body: bytes, reference: ResourceRef | None) -> None:
    """Checks that the bytes match the size and hash of a structured reference. Raises PermanentError."""
    if reference is None:
        return
    digest = hashlib.sha256(body).hexdigest()
    if reference.sha256 not in {"", digest} or reference.size_bytes not in {0, len(body)}:
        detail = f"what is stored at {reference.uri} is not what context_ref names: it has {len(body)} bytes and sha256 {digest}"
        raise PermanentError(detail, error_code=POINTER_CHANGED)


def _note_failure(attempt: OrderAttempt, error: BaseException) -> None:
    """Writes the handler's traceback to the worker log. The reported result contains only the message."""
    if isinstance(error, Exception):
        shown = error if attempt.called else None
        topic = attempt.request.topic
        _log.warning("attempt_failed", job_id=attempt.job_id, topic=topic, error=error_text(error), exc_info=shown)


def _failure_of(attempt: OrderAttempt, error: BaseException) -> BaseException | None:
    """The error that this attempt failed with; None for one that was cancelled, snoozed, given back or lost."""
    if attempt.fate is StopCause.TIMED_OUT:
        late = TransientError(f"no end after {attempt.timeout_s:g} s")
        late.__cause__ = error
        return late
    stopped = attempt.cancel_requested or attempt.fate is not None
    return None if stopped or isinstance(error, Snooze | asyncio.CancelledError) else error

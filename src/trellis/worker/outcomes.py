"""Turns the end of a handler into the job's next transition. Pure functions: facts in, one `Advance` out."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from trellis.engine.errors import (
    InputError,
    PayloadTooLarge,
    PermanentError,
    ResultInvalid,
    TransientError,
)
from trellis.engine.event_data import artifacts_data
from trellis.engine.jobs import (
    DELAY_S_MAX,
    ERROR_CHARS_MAX,
    Advance,
    DeadLetterReason,
    ReasonCode,
    Stage,
    Wait,
    WaitMode,
    completion,
)
from trellis.engine.option_values import SECONDS, check_within
from trellis.engine.retry_policy import AttemptFacts, DeadLetterJob, Fail, Retry, error_text, on_error, storable
from trellis.engine.text import without_secrets
from trellis.lifecycles import Trigger
from trellis.worker.held import HeldJob, StopCause
from trellis.worker.payloads import UnreadablePayload

CAUSE_CHARS_MAX = 200
TRACEBACK_CHARS_MAX = 4_000
TRACEBACK_FRAMES_MAX = 8
CUT = "[earlier lines left out]\n"
_OURS = str(Path(__file__).parent)
STOP = "stop"
REJECT = "reject"
LEASE_DOUBT_CAUSE = "the lease was in doubt before the handler began"


class Snooze(Exception):
    """Raised by a handler to run again after `delay_s`. This attempt does not count."""

    def __init__(self, delay_s: float = 0.0) -> None:
        check_within("delay_s", delay_s, 0, DELAY_S_MAX, of=SECONDS)
        super().__init__(f"called again in {delay_s:g} s")
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[type["Snooze"], tuple[float]]:
        return Snooze, (self.delay_s,)


def _advance(held: HeldJob, trigger: str, **details: Any) -> Advance:
    return Advance(lease=held.lease, source=held.state, trigger=trigger, **details)


def start_advance(held: HeldJob) -> Advance:
    return Advance(held.lease, held.state, Trigger.START)


def release_advance(held: HeldJob, cause: str) -> Advance:
    """Releases the job to other workers. The attempt does not count."""
    return _advance(held, Trigger.RELEASE, spare_attempt=True, cause=cause)


def may_suspend(held: HeldJob) -> bool:
    """Whether a job that waits can be suspended. Otherwise it is cancelled or released like any other."""
    return not held.cancel_requested and not held.lease_over and held.fate in {None, StopCause.TIMED_OUT}


def suspend_advance(held: HeldJob, wait: Wait) -> Advance:
    """Suspends a job whose handler waits. The attempt does not count."""
    about: dict[str, Any] = {"children": len(wait.children), "signal": wait.signal, "timeout_s": wait.timeout_s}
    about["batch"] = wait.mode is WaitMode.BATCH
    data = json.dumps({"waits_for": {name: value for name, value in about.items() if value}}).encode()
    return _advance(held, Trigger.SUSPEND, spare_attempt=True, wait=wait, data=data)


def cancel_advance(held: HeldJob, cause: str) -> Advance:
    """Ends the job as cancelled, after a soft cancel."""
    return _advance(held, STOP, cause=cause)


def reject_unreadable(held: HeldJob, problem: UnreadablePayload) -> Advance:
    """Dead-letters a job whose payload does not fit its handler. The handler never ran."""
    text = problem.detail[:ERROR_CHARS_MAX]
    return _reject(held, DeadLetterReason(reason_code=problem.reason_code, stage=Stage.INPUT, last_error=text), None)


def complete_advance(held: HeldJob, value: Any) -> Advance:
    """The transition for a handler that returned.

    A handler that saw the cancel request before it returned has stopped, and the job is cancelled. A handler that did
    not see it has finished, and the job succeeds. A result that cannot be stored dead-letters the job: a retry would
    not help.
    """
    if held.cancel_requested and held.heard:
        return cancel_advance(held, "the handler returned after a soft cancel")
    if held.lease_over and held.heard:
        return release_advance(held, StopCause.DOUBTED.value)
    try:
        result = None if value is None else held.spec.codec.result_bytes(value)
    except (PayloadTooLarge, ResultInvalid) as error:
        text = error_text(error)
        death = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.OUTPUT, last_error=text)
        return _reject(held, death, error)
    data = artifacts_data(held.artifacts) if held.artifacts else None
    return completion(held.lease, held.state, data, result, held.spec.options.result_ttl_s)


def reject_uncommitted(completion: Advance, error: Exception) -> Advance:
    """Dead-letters a job whose completion the ledger refuses permanently: every further attempt would fail alike.

    An InputError is the handler's mistake (it named something invalid). Any other error counts as an infrastructure
    failure.
    """
    reason = ReasonCode.VALIDATION_FAILED if isinstance(error, InputError) else ReasonCode.INFRASTRUCTURE_FAILURE
    death = DeadLetterReason(reason_code=reason, stage=Stage.COMMIT, last_error=error_text(error))
    return Advance(
        lease=completion.lease,
        source=completion.source,
        trigger=REJECT,
        cause=death.last_error[:CAUSE_CHARS_MAX],
        data=_error_data(error, death.last_error, None),
        death=death,
    )


def advance_on_error(held: HeldJob, error: BaseException, draw: Callable[[], float]) -> Advance:
    """The transition for a handler that raised or was stopped."""
    fate = StopCause.DOUBTED if held.fate is None and held.lease_over and not held.cancel_requested else held.fate
    if fate in {StopCause.GIVEN_BACK, StopCause.DOUBTED}:
        return release_advance(held, fate.value)
    if held.cancel_requested:
        return cancel_advance(held, f"the handler ended after a soft cancel: {error_text(error)}"[:CAUSE_CHARS_MAX])
    if isinstance(error, Snooze):
        return _advance(held, Trigger.SNOOZE, delay_s=error.delay_s, spare_attempt=True)
    if held.fate is StopCause.TIMED_OUT:
        error = _timed_out(held, error)
    facts = AttemptFacts(held.claimed.attempts_spent, held.claimed.attempts_allowed)
    match on_error(facts, error, held.spec.errors, draw):
        case Retry(delay_s, text):
            return _advance(
                held,
                Trigger.RETRY,
                delay_s=delay_s,
                cause=text[:CAUSE_CHARS_MAX],
                data=_error_data(error, text, delay_s),
            )
        case Fail(text, death):
            return _advance(
                held,
                Trigger.FAIL,
                cause=text[:CAUSE_CHARS_MAX],
                data=_error_data(error, text, None),
                death=death,
            )
        case DeadLetterJob(_, death):
            return _reject(held, death, error)


def failure_of(held: HeldJob, error: BaseException | None, step: Advance) -> BaseException | None:
    """The error that an attempt with this next transition failed with; None if it did not fail.

    A snooze, a cancelled job and a released attempt are no failures.
    """
    if step.trigger not in {Trigger.RETRY, Trigger.FAIL, REJECT}:
        return None
    if error is None:
        return PermanentError(step.death.last_error if step.death is not None else step.cause or "")
    return _timed_out(held, error) if held.fate is StopCause.TIMED_OUT else error


def _timed_out(held: HeldJob, stopped: BaseException) -> TransientError:
    """The error of a handler that its `timeout_s` stopped. Its cause shows where the handler was."""
    late = f"no end after {held.spec.options.timeout_s:g} s (timeout_s)"
    error = TransientError(late, reason_code=ReasonCode.EXHAUSTED_RETRIES)
    error.__cause__ = stopped
    return error


def _reject(held: HeldJob, death: DeadLetterReason, error: BaseException | None) -> Advance:
    return _advance(
        held,
        REJECT,
        cause=death.last_error[:CAUSE_CHARS_MAX],
        data=_error_data(error, death.last_error, None),
        death=death,
    )


def _error_data(error: BaseException | None, text: str, delay_s: float | None) -> bytes:
    """Encodes the error for the event: message, type and a bounded traceback."""
    about: dict[str, Any] = {"message": text}
    if error is not None:
        about["type"] = type(error).__name__
        about["traceback"] = traceback_text(error)
    data: dict[str, Any] = {"error": about}
    if delay_s is not None:
        data["retry_in_s"] = round(delay_s, 3)
    return json.dumps(data, ensure_ascii=False, default=str).encode()


def traceback_text(error: BaseException) -> str:
    """The error's traceback as the ledger stores it: the last frames, bounded, with passwords and tokens masked."""
    lines = traceback.format_exception(type(error), error, _of_handler(error), limit=-TRACEBACK_FRAMES_MAX)
    # The text is masked before it is cut to its bound, so that the cut cannot leave the end of a secret unrecognised.
    text = storable(without_secrets("".join(lines)[-8 * TRACEBACK_CHARS_MAX :]))
    if len(text) <= TRACEBACK_CHARS_MAX:
        return text
    return CUT + text[-TRACEBACK_CHARS_MAX:].partition("\n")[2]


def _of_handler(error: BaseException) -> TracebackType | None:
    """Returns the traceback without the worker's own frames around the handler."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames

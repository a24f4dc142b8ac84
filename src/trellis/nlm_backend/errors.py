"""Errors of the NLM backend, for its callers and for callbacks.

IntakeRefused                the request is refused; nothing was written
├── StaleEpoch               a newer epoch of the job is known
├── ExecutionsSpent          too many executions in one epoch ended with ERROR
├── DeadlineOver             the deadline has passed by the backend's clock
├── DeadlineTooFar           the deadline is too far in the future
└── CallbackForeign          the callback URL is of an origin that gets no artifacts and tokens of ours
Fault                        ends one execution and is reported in its callback
Superseded                   ends one execution without a callback: the job belongs to another execution
CircuitOpen, ProviderHeld    the provider is not asked for a while (both are NlmUnavailable)
"""

from enum import StrEnum

from trellis.engine.errors import InputError, TrellisError
from trellis.nlm.provider import NlmError, NlmGarbage, NlmUnavailable

TOO_MANY_REQUESTS = 429


class FaultCode(StrEnum):
    """Why there is no artifact, as reported in the callback (D26). All but VALIDATION_ERROR are worth a retry."""

    RATE_LIMIT = "RATE_LIMIT"
    NLM_UNAVAILABLE = "NLM_UNAVAILABLE"
    CONTEXT_TIMEOUT = "CONTEXT_TIMEOUT"
    CONTEXT_INVALID = "CONTEXT_INVALID"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    GARBAGE = "GARBAGE"
    INTERRUPTED = "INTERRUPTED"
    STAGING_REFUSED = "STAGING_REFUSED"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    INTERNAL_ERROR = "INTERNAL_ERROR"


class Fault(TrellisError):
    """{detail}"""

    def __init__(self, *, fault: FaultCode, detail: str) -> None:
        self.fault = fault
        super().__init__(fault=fault.value, detail=detail)


class Superseded(TrellisError):
    """The job is not this execution's any more: {detail}."""


class IntakeRefused(TrellisError):
    """{detail}"""


class StaleEpoch(IntakeRefused):
    """Job {job_id} is known with epoch {known}; epoch {epoch} has lost it."""

    code = "LEASE_LOST"


class ExecutionsSpent(IntakeRefused):
    """Job {job_id} ended with ERROR {executions} times in epoch {epoch}; send it with a newer epoch."""

    code = "CONFLICT"


class DeadlineOver(IntakeRefused):
    """The deadline {deadline} is over: it is {now} here. Send it again with a later one, and compare the clocks."""

    code = "DEADLINE_OVER"


class DeadlineTooFar(IntakeRefused):
    """The deadline {deadline} is refused: it must be within {days} days after {now}."""

    code = "VALIDATION_FAILED"


class CallbackForeign(IntakeRefused):
    """The callback {url!r} is refused: only the gateway gets artifacts; set TRELLIS_GATEWAY to its address."""

    code = "VALIDATION_FAILED"


class CircuitOpen(NlmUnavailable):
    """NLM provider {provider} is left alone for {retry_after_s:.0f} s: {reason}."""


class ProviderHeld(NlmUnavailable):
    """NLM provider {provider} asked to be left alone for {retry_after_s:.0f} s: {reason}."""


def fault_of(error: NlmError | InputError) -> Fault:
    """Returns the fault for an error of the provider, or for an answer that cannot become an artifact."""
    match error:
        case CircuitOpen():
            code = FaultCode.NLM_UNAVAILABLE
        case NlmUnavailable(status=status, retry_after_s=after_s):
            limited = status == TOO_MANY_REQUESTS or after_s is not None
            code = FaultCode.RATE_LIMIT if limited else FaultCode.NLM_UNAVAILABLE
        case NlmGarbage():
            code = FaultCode.GARBAGE
        case _:
            code = FaultCode.VALIDATION_ERROR
    return Fault(fault=code, detail=str(error))

"""Decides what an error, or the death of a worker, means for a job: retry, fail or dead letter.

All functions are pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from trellis.engine.errors import JobError, LedgerError, OptionInvalid, PermanentError, TransientError, ValidationError
from trellis.engine.jobs import DELAY_S_MAX, ERROR_CHARS_MAX, DeadLetterReason, ReasonCode, Stage
from trellis.engine.text import error_message, without_secrets
from trellis.lifecycles import Lifecycle, State, Trigger

# Errors: the decision depends on the error's class, the attempts left and the type's policy.
#
# | The handler raised | Decision |
# |---|---|
# | `ValidationError` | dead letter `validation_failed`, no retry |
# | `PermanentError` | failed; also a dead letter (`validation_failed`) when the policy has `dlq_on_fail` |
# | `PermanentError` with a `reason_code` of NEVER_RETRIED_REASONS | dead letter with that reason, no retry |
# | `TransientError`, any other exception | retry while attempts are left, then as `on_exhausted` says |
#
# When the attempts are exhausted, the dead letter says `dependency_unavailable` if the last error was transient
# (`TransientError`, a lost or refused connection, a time-out of a dependency), `infrastructure_failure` if the ledger
# did not answer the handler, else `exhausted_retries`. A handler may name another of the eight reasons:
# `PermanentError("…", reason_code="policy_violation")`.
#
# The wait before attempt n + 1 is `base_s * factor ** n`, at most `max_s`, times a random share. Full jitter (0 to 100
# %) spreads many failed jobs evenly. A smaller `jitter` keeps the wait nearer to its nominal length.

RETRY_BASE_S_DEFAULT = 0.5
RETRY_FACTOR_DEFAULT = 2.0
RETRY_MAX_S_DEFAULT = 60.0


NEVER_RETRIED_REASONS = frozenset(
    {
        ReasonCode.POLICY_VIOLATION,
        ReasonCode.INFRASTRUCTURE_FAILURE,
        ReasonCode.PARSE_ERROR,
        ReasonCode.VALIDATION_FAILED,
    }
)
"""Reasons that dead-letter a job without a retry, whatever its type's policy says (DJ-18)."""
MESSAGE_CHARS_READ = 8 * ERROR_CHARS_MAX
"""How much of an error's message is searched for secrets before it is shortened."""
TRANSIENT_CAUSES = (TransientError, ConnectionError, TimeoutError)
"""Errors of a handler's dependencies. After the last attempt the dead letter says `dependency_unavailable`."""


def _check(option: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise OptionInvalid(option=option, value=value, expected=f"a number from {low:g} to {high:g}")


class OnExhausted(StrEnum):
    """What happens to a job whose last attempt failed."""

    DEAD_LETTER = "dead_letter"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter. `jitter` is the share of the wait that is drawn at random: 1.0 is full jitter."""

    base_s: float = RETRY_BASE_S_DEFAULT
    """The wait after the first attempt."""
    factor: float = RETRY_FACTOR_DEFAULT
    """How much longer each wait is than the one before."""
    max_s: float = RETRY_MAX_S_DEFAULT
    """The longest wait."""
    jitter: float = 1.0
    """The random share of each wait; 0 makes it exact, which tests like."""

    def __post_init__(self) -> None:
        _check("retry base_s", self.base_s, low=0.0, high=DELAY_S_MAX)
        _check("retry factor", self.factor, low=1.0, high=1_000.0)
        _check("retry max_s", self.max_s, low=0.0, high=DELAY_S_MAX)
        _check("retry jitter", self.jitter, low=0.0, high=1.0)

    def nominal_s(self, attempt: int) -> float:
        """The wait after attempt `attempt` (from 0) before jitter."""
        # Larger exponents only overflow; the cap is reached long before.
        return min(self.max_s, self.base_s * self.factor ** min(attempt, 64))

    def delay_s(self, attempt: int, draw: float) -> float:
        """The retry backoff: the wait after attempt `attempt`; `draw` is uniform in [0, 1)."""
        nominal = self.nominal_s(attempt)
        return nominal * (1.0 - self.jitter) + nominal * self.jitter * draw


RETRY_DEFAULT = RetryPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPolicy:
    """How a job type handles errors."""

    retry: RetryPolicy = RETRY_DEFAULT
    on_exhausted: OnExhausted = OnExhausted.DEAD_LETTER
    dlq_on_fail: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """Another attempt after `delay_s`."""

    delay_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job has failed. `death` is set when a dead letter is kept as well."""

    error: str
    death: DeadLetterReason | None


@dataclass(frozen=True, slots=True)
class DeadLetterJob:
    """The job is dead-lettered."""

    error: str
    death: DeadLetterReason


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """Which attempt failed (from 0) and how many attempts the job has."""

    attempt: int
    max_attempts: int

    @property
    def attempts_left(self) -> bool:
        """Whether another attempt may follow this one."""
        return self.attempt + 1 < self.max_attempts


def on_error(
    job: AttemptFacts, error: BaseException, policy: ErrorPolicy, draw: Callable[[], float]
) -> Retry | Fail | DeadLetterJob:
    """Decide what a handler's error means for its job. `draw` returns a number in [0, 1) for the jitter."""
    text = error_text(error)
    if isinstance(error, ValidationError):
        return DeadLetterJob(text, _death(ReasonCode.VALIDATION_FAILED, text))
    if isinstance(error, PermanentError):
        named = _named_reason(error)
        if named is not None and named in NEVER_RETRIED_REASONS:
            return DeadLetterJob(text, _death(named, text))
        return _fail(text, named or ReasonCode.VALIDATION_FAILED, policy)
    if job.attempts_left:
        return Retry(_wait_s(job, error, policy.retry, draw), text)
    if policy.on_exhausted is OnExhausted.FAIL:
        return _fail(text, _reason_when_exhausted(error), policy)
    return DeadLetterJob(text, _death(_reason_when_exhausted(error), text))


def error_text(error: BaseException) -> str:
    """The error's class and message: never empty, never longer than the ledger stores, storable in every ledger.

    Passwords and tokens in the message are masked.
    """
    name = type(error).__name__
    message = storable(without_secrets(error_message(error)[:MESSAGE_CHARS_READ]))
    return (f"{name}: {message}" if message else name)[:ERROR_CHARS_MAX]


def storable(text: str) -> str:
    """The text with NUL bytes and lone surrogates, which databases refuse, escaped."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _wait_s(job: AttemptFacts, error: BaseException, retry: RetryPolicy, draw: Callable[[], float]) -> float:
    """The policy's wait, or the longer one that the failed dependency asked for (Retry-After)."""
    wait = retry.delay_s(job.attempt, draw())
    retry_after_s = error.data.get("retry_after_s") if isinstance(error, TransientError) else None
    if isinstance(retry_after_s, int | float) and math.isfinite(retry_after_s):
        return min(max(wait, float(retry_after_s)), DELAY_S_MAX)
    return wait


def _fail(text: str, reason: ReasonCode, policy: ErrorPolicy) -> Fail:
    return Fail(text, _death(reason, text) if policy.dlq_on_fail else None)


def _reason_when_exhausted(error: BaseException) -> ReasonCode:
    """The dead-letter reason when this error ended the last attempt."""
    if isinstance(error, LedgerError):
        return ReasonCode.INFRASTRUCTURE_FAILURE
    known = ReasonCode.DEPENDENCY_UNAVAILABLE if isinstance(error, TRANSIENT_CAUSES) else ReasonCode.EXHAUSTED_RETRIES
    return _named_reason(error) or known


def _named_reason(error: BaseException) -> ReasonCode | None:
    """The reason code that the handler named, if it is one of the eight."""
    named = error.data.get("reason_code") if isinstance(error, JobError) else None
    return ReasonCode(named) if named in set(ReasonCode) else None


def _death(reason: ReasonCode, text: str) -> DeadLetterReason:
    return DeadLetterReason(reason_code=reason, stage=Stage.EXEC, last_error=text)


# Worker deaths: what the death of a worker means for the jobs it held. `engine/decide.py` uses it. PostgreSQL calls
# `_runs_alone` and `_sparable`, which `trellis migrate` writes with the bounds of this module.
#
# A death counts for every job that the worker was running, because nothing shows which job killed it. So no job ends
# because of a death it shared: the death that reaches `max_deaths` (from 2 on) always finds the job alone in its
# worker.
#
# - After its first death a job runs beside others again. Most workers die of something else, and all their jobs
#   continue at once.
# - A job runs alone once it has died twice, or when one more death would exhaust its deaths or attempts.
# - One job at a time runs alone in the whole fleet, so that at most one worker is reserved and the others continue.
# - A job that was claimed and never started loses nothing: neither a death nor an attempt is counted.

SHARED_DEATHS_MAX = 2
"""After this many deaths a job runs alone, even if `max_deaths` allows more."""
UNBEGUN_LOSSES_MAX = 100
"""Up to this many attempts that were lost before they began do not count.

Later ones count, so that no job loops for ever.
"""


def stage_in(state: State) -> Stage:
    """The stage for a dead letter written by the engine: EXEC if user code runs in this state, else FETCH."""
    return Stage.EXEC if state.runs_code else Stage.FETCH


def releasable(lifecycle: Lifecycle, state: State) -> bool:
    """Whether no user code runs in this state and its holder may release the job.

    A lease lost there need not cost an attempt.
    """
    released = any(t.source == state.name and t.trigger == Trigger.RELEASE for t in lifecycle.transitions)
    return released and not state.runs_code


def sparable(attempt: int) -> bool:
    """Whether few enough attempts were lost that another one lost before it began does not count."""
    return attempt < UNBEGUN_LOSSES_MAX


def runs_alone(*, deaths: int, max_deaths: int, attempt: int, max_attempts: int) -> bool:
    """Whether a job must be the only job of its worker: it may kill workers, or one more death would end it."""
    if not deaths:
        return False
    last_death = 0 < max_deaths <= deaths + 1
    last_attempt = attempt + 1 >= max_attempts
    return deaths >= SHARED_DEATHS_MAX or last_death or last_attempt

"""What an error means for a job, as a pure decision."""

import pytest

from trellis.engine.errors import LedgerUnavailable, OptionInvalid, PermanentError, TransientError, ValidationError
from trellis.engine.jobs import ReasonCode, Stage
from trellis.engine.retry_policy import (
    NEVER_RETRIED_REASONS,
    AttemptFacts,
    DeadLetterJob,
    ErrorPolicy,
    Fail,
    OnExhausted,
    Retry,
    RetryPolicy,
    error_text,
    on_error,
)

FIRST = AttemptFacts(attempt=0, max_attempts=3)
LAST = AttemptFacts(attempt=2, max_attempts=3)
POLICY = ErrorPolicy()


def half() -> float:
    return 0.5


@pytest.mark.requirement("DJ-9")
def test_the_wait_doubles_from_half_a_second_to_a_minute():
    waits = [RetryPolicy().nominal_s(attempt) for attempt in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.requirement("DJ-9")
def test_full_jitter_spreads_the_wait_over_all_of_it_and_half_over_the_upper_half():
    full, half_jitter = RetryPolicy(), RetryPolicy(jitter=0.5)
    assert [full.delay_s(3, draw) for draw in (0.0, 0.25, 1.0)] == [0.0, 1.0, 4.0]
    assert [half_jitter.delay_s(3, draw) for draw in (0.0, 0.5, 1.0)] == [2.0, 3.0, 4.0]


def test_a_thousandth_attempt_still_has_a_wait():
    assert RetryPolicy(factor=1000).nominal_s(999) == 60


@pytest.mark.requirement("DJ-16")
@pytest.mark.parametrize("error", [TransientError("busy"), RuntimeError("odd"), KeyError("x")])
def test_transient_and_unknown_errors_are_retried_while_attempts_are_left(error: Exception):
    assert isinstance(on_error(FIRST, error, POLICY, half), Retry)


@pytest.mark.requirement("DJ-10")
def test_the_last_attempt_is_dead_lettered_by_default():
    decided = on_error(LAST, RuntimeError("busy"), POLICY, half)
    assert isinstance(decided, DeadLetterJob)
    assert decided.death.reason_code is ReasonCode.EXHAUSTED_RETRIES
    assert decided.death.stage is Stage.EXEC
    assert decided.death.last_error == "RuntimeError: busy"


@pytest.mark.requirement("DJ-10")
@pytest.mark.parametrize("letter", [False, True])
def test_the_last_attempt_fails_when_the_policy_says_so(letter: bool):
    policy = ErrorPolicy(on_exhausted=OnExhausted.FAIL, dlq_on_fail=letter)
    decided = on_error(LAST, RuntimeError("odd"), policy, half)
    assert isinstance(decided, Fail)
    assert (decided.death is not None) is letter


@pytest.mark.requirement("DJ-10", "DJ-16")
def test_a_permanent_error_fails_at_once():
    decided = on_error(FIRST, PermanentError("no such account"), POLICY, half)
    assert decided == Fail("PermanentError: no such account", None)


@pytest.mark.requirement("DJ-12")
@pytest.mark.parametrize(
    "named,reason",
    [
        ({}, ReasonCode.VALIDATION_FAILED),
        ({"reason_code": "no such code"}, ReasonCode.VALIDATION_FAILED),
        ({"reason_code": "timeout"}, ReasonCode.TIMEOUT),
    ],
)
def test_dead_letter_of_a_permanent_error_does_not_mention_retries(named: dict[str, str], reason: ReasonCode):
    decided = on_error(FIRST, PermanentError("no", **named), ErrorPolicy(dlq_on_fail=True), half)
    assert isinstance(decided, Fail)
    assert decided.death is not None
    assert (decided.death.reason_code, decided.death.stage) == (reason, Stage.EXEC)


@pytest.mark.requirement("DJ-18")
@pytest.mark.parametrize("code", sorted(NEVER_RETRIED_REASONS))
def test_a_permanent_error_that_names_a_hard_reason_is_dead_lettered_at_once(code: ReasonCode):
    decided = on_error(FIRST, PermanentError("no", reason_code=code.value), POLICY, half)
    assert isinstance(decided, DeadLetterJob)
    assert decided.death.reason_code is code


@pytest.mark.requirement("DJ-12", "DJ-10")
@pytest.mark.parametrize(
    "error,reason",
    [
        (TransientError("busy"), ReasonCode.DEPENDENCY_UNAVAILABLE),
        (ConnectionRefusedError(111, "refused"), ReasonCode.DEPENDENCY_UNAVAILABLE),
        (TimeoutError("no answer"), ReasonCode.DEPENDENCY_UNAVAILABLE),
        (LedgerUnavailable(reason="gone"), ReasonCode.INFRASTRUCTURE_FAILURE),
        (RuntimeError("odd"), ReasonCode.EXHAUSTED_RETRIES),
        (TransientError("late", reason_code="exhausted_retries"), ReasonCode.EXHAUSTED_RETRIES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_of_the_last_attempt_is_the_reason_of_the_dead_letter(error: Exception, reason: ReasonCode):
    decided = on_error(LAST, error, POLICY, half)
    assert isinstance(decided, DeadLetterJob)
    assert decided.death.reason_code is reason
    assert isinstance(on_error(FIRST, error, POLICY, half), Retry)


@pytest.mark.requirement("DJ-16", "DJ-18")
def test_a_validation_error_is_dead_lettered_with_attempts_left():
    decided = on_error(FIRST, ValidationError("no title"), POLICY, half)
    assert isinstance(decided, DeadLetterJob)
    assert decided.death.reason_code is ReasonCode.VALIDATION_FAILED


def test_a_dependency_that_names_a_longer_wait_gets_it():
    decided = on_error(FIRST, TransientError("slow down", retry_after_s=90), POLICY, half)
    assert isinstance(decided, Retry)
    assert decided.delay_s == 90


@pytest.mark.requirement("DJ-9")
def test_a_dependency_that_names_a_shorter_wait_does_not_shorten_the_backoff():
    backoff = POLICY.retry.delay_s(FIRST.attempt, half())
    decided = on_error(FIRST, TransientError("slow down", retry_after_s=backoff / 2), POLICY, half)
    assert isinstance(decided, Retry)
    assert decided.delay_s == backoff


def test_an_error_text_is_never_empty_and_always_storable():
    assert error_text(RuntimeError()) == "RuntimeError"
    assert error_text(RuntimeError("a\0b\ud800")) == "RuntimeError: a\\0b\\ud800"
    assert len(error_text(RuntimeError("x" * 100_000))) == 8_000


@pytest.mark.parametrize("broken", [{"base_s": -1}, {"factor": 0.5}, {"jitter": 2}, {"max_s": float("nan")}])
def test_a_policy_that_cannot_work_is_refused(broken: dict[str, float]):
    with pytest.raises(OptionInvalid):
        RetryPolicy(**broken)

"""When a queue job that failed is tried again: a pure decision from the error's class, the attempt and a draw (D7, D8, D38, JQ-8).

| The error | Decision |
|---|---|
| permanent, or the job's deadline is over | FAILED at once |
| any other, with attempts left | again after 15, 30, 60 s and up to a fifth more |
| any other, at the last attempt | FAILED at once |

A job has four attempts, and one more for each that an orderly end of its holder cut short: that one was no try of the job's. A lost
lease is the engine's: it waits for nothing, and counts as an attempt.
"""

from dataclasses import dataclass

from trellis.engine.jobs import DELAY_S_MAX
from trellis.research.errors import StageError

BACKOFF_S = (15.0, 30.0, 60.0)
JITTER = 0.2
RETRIES = len(BACKOFF_S)
EXECUTIONS = RETRIES + 1
"""Attempts 0, 1, 2 and 3: what the ledger counts; the job's document says how often it is tried again."""
FINAL_REST_S = DELAY_S_MAX
"""How long the backoff before FAILED would last if nobody ended it. No timer may turn a permanent error into another attempt."""
FINAL_REST_S_MIN = FINAL_REST_S / 2
"""A backoff that has longer to go than this is a permanent error's: no other waits for more than 72 s."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Another attempt after this long."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class FailForGood:
    """FAILED at once. `rest_s` is when the sweep looks at the backoff if its holder dies before it has ended it."""

    rest_s: float


def on_stage_error(error: StageError, attempt: int, attempts_max: int, draw: float) -> RetryLater | FailForGood:
    """What an error of attempt `attempt` (from 0) of so many means; `draw` is uniform in [0, 1)."""
    if not error.retries:
        return FailForGood(FINAL_REST_S)
    if attempt + 1 >= attempts_max:
        return FailForGood(0.0)
    return RetryLater(BACKOFF_S[min(attempt, RETRIES - 1)] * (1.0 + JITTER * draw))

"""Decides when a failed queue job is retried (D7, D8, D38, JQ-8).

The decision is a pure function of the error class, the attempt and a random draw.

| The error | Decision |
|---|---|
| permanent, or the job's deadline has passed | FAILED at once |
| any other, with attempts left | retry after 15, 30, 60 s, plus up to 20 % |
| any other, at the last attempt | FAILED at once |

A job has four attempts, plus one for each attempt cut short by an orderly shutdown of its holder. The engine handles a
lost lease: the job is retried without a wait, and the attempt counts.
"""

from dataclasses import dataclass

from trellis.engine.jobs import DELAY_S_MAX
from trellis.research.errors import StageError

BACKOFF_S = (15.0, 30.0, 60.0)
JITTER = 0.2
RETRIES = len(BACKOFF_S)
EXECUTIONS = RETRIES + 1
"""Attempts 0, 1, 2 and 3, as the ledger counts them. The job's document shows the number of retries instead."""
FINAL_REST_S = DELAY_S_MAX
"""Length of the backoff before FAILED if no process ends it, so that no timer retries a permanent error."""
FINAL_REST_S_MIN = FINAL_REST_S / 2
"""A longer remaining backoff belongs to a permanent error. Other backoffs last at most 72 s."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Retry after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class FailForGood:
    """Go to FAILED at once. `rest_s` is when the sweep takes over if the holder dies before that."""

    rest_s: float


def on_stage_error(error: StageError, attempt: int, attempts_max: int, draw: float) -> RetryLater | FailForGood:
    """Decides about an error of attempt `attempt` (from 0) of `attempts_max`. `draw` is uniform in [0, 1)."""
    if not error.retries:
        return FailForGood(FINAL_REST_S)
    if attempt + 1 >= attempts_max:
        return FailForGood(0.0)
    return RetryLater(BACKOFF_S[min(attempt, RETRIES - 1)] * (1.0 + JITTER * draw))

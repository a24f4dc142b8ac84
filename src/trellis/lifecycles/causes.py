"""The causes that the ledgers themselves record with an event or a dead letter, each written once.

`engine/decide.py` says which of them goes with which step. PostgreSQL's functions read the others from `_cause(name)`, which
migrating writes from this same enumeration (`scripts/contract.sql`).
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why the engine made a step on its own account. The names are what SQL asks for; the values are stored."""

    LEASE_EXPIRED = "lease expired"
    DEADLINE_PASSED = "deadline passed"
    ATTEMPTS_SPENT = "attempts spent"
    WORKER_DIED = "its worker died %s times while running this job"
    """With the number of deaths in the place of %s."""
    WORKER_DIED_ONCE = "its worker died once while running this job"
    CANCEL_LET_GO = "soft cancel: the holder let go"
    """The holder gave the job back, or came to start it, after it was asked to stop."""
    CANCEL_GRACE_OVER = "soft cancel: the grace is over"
    CANCEL_HOLDER_GONE = "soft cancel: the holder is gone"
    """The lease ended while its holder had been asked to stop."""
    COMPENSATED = "compensated by %s"
    """With the id of the compensating job in the place of %s."""


def sql_cases() -> str:
    """The branches of an SQL `case` from a cause's name to its text."""
    texts = {cause.name.lower(): cause.value.replace("'", "''") for cause in Cause}
    return " ".join(f"when '{name}' then '{text}'" for name, text in texts.items())

"""The causes that the ledgers themselves record with an event or a dead letter, each written once.

SQLite's ledger reads them from here. PostgreSQL's functions read them from `_cause(name)`, which migrating writes from
this same enumeration (`scripts/contract.sql`).
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why the engine made a step on its own account. The names are what SQL asks for; the values are stored."""

    LEASE_EXPIRED = "lease expired"
    DEADLINE_PASSED = "deadline passed"
    ATTEMPTS_SPENT = "attempts spent"
    WORKER_DIED = "its worker died %s while running this job"
    """With `died_often` in the place of %s."""
    CANCEL_LET_GO = "soft cancel: the holder let go"
    """The holder gave the job back, or came to start it, after it was asked to stop."""
    CANCEL_GRACE_OVER = "soft cancel: the grace is over"
    CANCEL_HOLDER_GONE = "soft cancel: the holder is gone"
    """The lease ended while its holder had been asked to stop."""


def died_often(deaths: int) -> str:
    """How often workers died under a job, in words."""
    return "once" if deaths == 1 else f"{deaths} times"


def sql_cases() -> str:
    """The branches of an SQL `case` from a cause's name to its text."""
    texts = {cause.name.lower(): cause.value.replace("'", "''") for cause in Cause}
    return " ".join(f"when '{name}' then '{text}'" for name, text in texts.items())

"""Event types, and the causes that ledgers record with events."""

from enum import StrEnum

# Every event type there is. The order is the stored code: append, never reorder.

EVENT_TYPES: tuple[str, ...] = (
    # leased-job and the words the other job lifecycles share with it
    "job_queued",
    "job_claimed",
    "job_started",
    "job_succeeded",
    "job_failed",
    "job_cancelled",
    "job_dead_lettered",
    "job_compensated",
    "job_retry_scheduled",
    "job_snoozed",
    "job_released",
    "job_lease_expired",
    "job_requeued",
    # queue-job
    "job_accepted",
    "job_nlm_called",
    "job_artifact_writing",
    # nlm-job
    "nlm_accepted",
    "nlm_context_fetching",
    "nlm_prompt_building",
    "nlm_queried",
    "nlm_structuring",
    "nlm_callback_sending",
    "nlm_done",
    "nlm_error",
    # run
    "run.requested",
    "run.queued",
    "run.started",
    "run.step.completed",
    "run.completed",
    "run.failed",
    # bus-job
    "job_scheduled",
    "job_dispatched",
    "job_denied",
    "job_timed_out",
    # proposal
    "proposal.created",
    "proposal.approved",
    "proposal.auto_approved",
    "proposal.rejected",
    "proposal.expired",
    "proposal.applying",
    "proposal.applied",
    "proposal.failed",
    # inbox-entry
    "inbox.received",
    "inbox.processed",
    "inbox.rejected",
    "inbox.expired",
    # artifact
    "artifact.staged",
    "artifact.finalized",
    "artifact.discarded",
    "artifact.removed",
    # bus-job: held by the safety kernel, put off by the scheduler, let go by a person
    "job_held",
    "job_deferred",
    "job_approved",
)

SIGNAL_TYPES: tuple[str, ...] = ("job_heartbeat", "job_lease_renewed", "job_log", "job_result_refused")
"""Not transitions: kept apart, with a time to live, outside the count of events."""

REMARK_TYPES: tuple[str, ...] = ("job_result_refused",)
"""Those of them that are not a holder's: what was said about a job and changed nothing."""

_CODES = {name: code for code, name in enumerate(EVENT_TYPES, start=1)}


def event_code(name: str) -> int:
    """The stored number of an event type."""
    return _CODES[name]


def event_name(code: int) -> str:
    """The event type behind a stored number."""
    return EVENT_TYPES[code - 1]


# The causes that the ledgers themselves record with an event or a dead letter, each written once.
#
# `engine/decide.py` says which of them goes with which step. PostgreSQL's functions read the others from `_cause(name)`, which
# migrating writes from this same enumeration (`scripts/contract.sql`).


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

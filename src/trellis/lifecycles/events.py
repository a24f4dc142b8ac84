"""Event types, and the causes that ledgers record with events."""

from enum import StrEnum

# Every event type. The position is the stored code: append, never reorder.

EVENT_TYPES: tuple[str, ...] = (
    # leased-job, and types that other job lifecycles share with it
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
    # bus-job: held by the safety kernel, postponed by the scheduler, released by a person
    "job_held",
    "job_deferred",
    "job_approved",
    # leased-job: waits for children, a signal or a time without a holder
    "job_suspended",
    "job_resumed",
    # operators: a dead letter that nobody needs, a delay that is over, another priority
    "job_discarded",
    "job_expedited",
    "job_reprioritized",
)

SIGNAL_TYPES: tuple[str, ...] = ("job_heartbeat", "job_lease_renewed", "job_log", "job_result_refused")
"""Records that are no transitions.

They are stored apart from events, with a time to live, and are not counted as events.
"""

REMARK_TYPES: tuple[str, ...] = ("job_result_refused",)
"""Signal types that do not come from a job's holder: remarks about a job that did not change it."""

_CODES = {name: code for code, name in enumerate(EVENT_TYPES, start=1)}


def event_code(name: str) -> int:
    """The stored number of an event type."""
    return _CODES[name]


def event_name(code: int) -> str:
    """The event type of a stored number."""
    return EVENT_TYPES[code - 1]


# The causes that the ledgers themselves record with an event or a dead letter. `engine/decide.py` says which cause goes
# with which step. PostgreSQL's functions read the others through `_cause(name)`, which `trellis migrate` generates from
# this enumeration (`scripts/contract.sql`).


class Cause(StrEnum):
    """Why the engine made a step by itself. SQL refers to the names; the values are stored."""

    LEASE_EXPIRED = "lease expired"
    DEADLINE_PASSED = "deadline passed"
    ATTEMPTS_SPENT = "attempts spent"
    WORKER_DIED = "its worker died %s times while running this job"
    """`%s` is the number of deaths."""
    WORKER_DIED_ONCE = "its worker died once while running this job"
    CANCEL_LET_GO = "soft cancel: the holder let go"
    """After a cancel request the holder released the job, or tried to start it."""
    CANCEL_GRACE_OVER = "soft cancel: the grace is over"
    CANCEL_HOLDER_GONE = "soft cancel: the holder is gone"
    """The lease ended while a cancel request was pending."""
    CHILDREN_ENDED = "the children it waited for have ended"
    BATCH_ENDED = "the jobs of its batch have ended"
    CHILD_FAILED = "a child it waited for ended without success"
    SIGNAL_ARRIVED = "signal %s arrived"
    """`%s` is the name of the signal."""
    BEGINS_ANEW = "its handler begins anew with another input"
    PARENT_ENDED = "its parent was cancelled"
    COMPENSATED = "compensated by %s"
    """`%s` is the id of the compensating job."""
    REPLACED = "replaced by %s"
    """`%s` is the id of the job with the same unique key that was submitted instead."""


def sql_cases() -> str:
    """The branches of an SQL `case` that maps a cause's name to its text."""
    texts = {cause.name.lower(): cause.value.replace("'", "''") for cause in Cause}
    return " ".join(f"when '{name}' then '{text}'" for name, text in texts.items())

"""Every event type there is. The order is the stored code: append, never reorder."""

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

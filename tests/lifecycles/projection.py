"""Translates a job's state into another lifecycle's vocabulary, for surfaces that show several lifecycles together.

A projection is for display only; the stored state is the lifecycle's own. Each state has a position in the life of any
job. Each vocabulary has a word for a position, or says why it has none. A caller that knows more than the state (a
FAILED whose error says CANCELLED, a dead letter's reason) asks for the word of that position instead.
"""

from dataclasses import dataclass
from enum import StrEnum

from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.lifecycle import Lifecycle
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN


class Position(StrEnum):
    """How far a job is, independent of any lifecycle's vocabulary."""

    NEW = "accepted, not yet validated"
    READY = "ready, or held back"
    BACKOFF = "waiting for the next attempt"
    SUSPENDED = "begun, and waiting for children, a signal or a time"
    CLAIMED = "claimed, no evidence of a start"
    WORKING = "at work"
    CONTEXT = "at work on its context"
    CALL = "at work on the call"
    WRITE = "at work on writing"
    SUCCEEDED = "good end"
    FAILED = "bad end"
    DEAD = "bad end, dead-lettered"
    DISCARDED = "bad end, given up by an operator"
    CANCELLED = "cancelled"
    DENIED = "refused by policy"
    TIMED_OUT = "time or attempts spent"


@dataclass(frozen=True, slots=True)
class Projection:
    """The word, or None and why there is none. `note` says what the word leaves out."""

    state: str | None
    note: str = ""


POSITIONS: dict[str, dict[str, Position]] = {
    RUN.name: {
        "requested": Position.NEW,
        "queued": Position.READY,
        "running": Position.WORKING,
        "completed": Position.SUCCEEDED,
        "failed": Position.FAILED,
    },
    QUEUE_JOB.name: {
        "PENDING": Position.NEW,
        "QUEUED": Position.READY,
        "CONTEXT_ASSEMBLY": Position.CONTEXT,
        "NOTEBOOKLM_CALL": Position.CALL,
        "ARTIFACT_WRITE": Position.WRITE,
        "COMPLETE": Position.SUCCEEDED,
        "RETRY_BACKOFF": Position.BACKOFF,
        "FAILED": Position.FAILED,
        "DEAD": Position.DEAD,
        "DISCARDED": Position.DISCARDED,
    },
    # An nlm-job exists only while its queue-job is in NOTEBOOKLM_CALL, even when it has ended: only the callback moves
    # on.
    NLM_JOB.name: {state.name: Position.CALL for state in NLM_JOB.states},
    LEASED_JOB.name: {
        "queued": Position.READY,
        "assigned": Position.CLAIMED,
        "running": Position.WORKING,
        "succeeded": Position.SUCCEEDED,
        "failed": Position.FAILED,
        "cancelled": Position.CANCELLED,
        "dead_lettered": Position.DEAD,
        "suspended": Position.SUSPENDED,
        "discarded": Position.DISCARDED,
    },
    BUS_JOB.name: {
        "PENDING": Position.NEW,
        "SCHEDULED": Position.READY,
        "DISPATCHED": Position.CLAIMED,
        "RUNNING": Position.WORKING,
        "SUCCEEDED": Position.SUCCEEDED,
        "FAILED": Position.FAILED,
        "CANCELLED": Position.CANCELLED,
        "DENIED": Position.DENIED,
        "TIMEOUT": Position.TIMED_OUT,
    },
}

NOT_STARTED = "claimed, not started: this vocabulary has no word for it"
NO_POLICY = "no word: a safety kernel is asked about bus-jobs only"

WORDS: dict[str, dict[Position, Projection]] = {
    BUS_JOB.name: {
        Position.NEW: Projection("PENDING"),
        Position.READY: Projection("SCHEDULED"),
        Position.BACKOFF: Projection("SCHEDULED", "of the next attempt"),
        Position.SUSPENDED: Projection("SCHEDULED", "waits for something else"),
        Position.CLAIMED: Projection("DISPATCHED"),
        Position.WORKING: Projection("RUNNING"),
        Position.CONTEXT: Projection("RUNNING", "on its context"),
        Position.CALL: Projection("RUNNING", "on the call"),
        Position.WRITE: Projection("RUNNING", "on writing"),
        Position.SUCCEEDED: Projection("SUCCEEDED"),
        Position.FAILED: Projection("FAILED"),
        Position.DEAD: Projection("FAILED", "dead-lettered"),
        Position.DISCARDED: Projection("FAILED", "given up by an operator"),
        Position.CANCELLED: Projection("CANCELLED"),
        Position.DENIED: Projection("DENIED"),
        Position.TIMED_OUT: Projection("TIMEOUT"),
    },
    LEASED_JOB.name: {
        Position.NEW: Projection("queued", "not yet validated"),
        Position.READY: Projection("queued"),
        Position.BACKOFF: Projection("queued", "the next attempt is due later"),
        Position.SUSPENDED: Projection("suspended"),
        Position.CLAIMED: Projection("assigned"),
        Position.WORKING: Projection("running"),
        Position.CONTEXT: Projection("running", "on its context"),
        Position.CALL: Projection("running", "on the call"),
        Position.WRITE: Projection("running", "on writing"),
        Position.SUCCEEDED: Projection("succeeded"),
        Position.FAILED: Projection("failed"),
        Position.DEAD: Projection("dead_lettered"),
        Position.DISCARDED: Projection("discarded"),
        Position.CANCELLED: Projection("cancelled"),
        Position.DENIED: Projection("dead_lettered", "policy_violation"),
        Position.TIMED_OUT: Projection("dead_lettered", "timeout or exhausted_retries"),
    },
    QUEUE_JOB.name: {
        Position.NEW: Projection("PENDING"),
        Position.READY: Projection("QUEUED"),
        Position.BACKOFF: Projection("RETRY_BACKOFF"),
        Position.SUSPENDED: Projection("QUEUED", "waits for something else"),
        Position.CLAIMED: Projection("QUEUED", NOT_STARTED),
        Position.WORKING: Projection(None, "no word: at work, on which stage is not known"),
        Position.CONTEXT: Projection("CONTEXT_ASSEMBLY"),
        Position.CALL: Projection("NOTEBOOKLM_CALL"),
        Position.WRITE: Projection("ARTIFACT_WRITE"),
        Position.SUCCEEDED: Projection("COMPLETE"),
        Position.FAILED: Projection("FAILED"),
        Position.DEAD: Projection("DEAD"),
        Position.DISCARDED: Projection("DISCARDED"),
        Position.CANCELLED: Projection("FAILED", "error CANCELLED"),
        Position.DENIED: Projection(None, NO_POLICY),
        Position.TIMED_OUT: Projection("DEAD"),
    },
    RUN.name: {
        Position.NEW: Projection("requested"),
        Position.READY: Projection("queued"),
        Position.BACKOFF: Projection("running", "a step retries"),
        Position.SUSPENDED: Projection("running", "waits for something else"),
        Position.CLAIMED: Projection("queued", NOT_STARTED),
        Position.WORKING: Projection("running"),
        Position.CONTEXT: Projection("running", "load-context"),
        Position.CALL: Projection("running", "execute-agent"),
        Position.WRITE: Projection("running", "persist-results"),
        Position.SUCCEEDED: Projection("completed"),
        Position.FAILED: Projection("failed"),
        Position.DEAD: Projection("failed"),
        Position.DISCARDED: Projection("failed", "given up by an operator"),
        Position.CANCELLED: Projection("failed", "error CANCELLED"),
        Position.DENIED: Projection(None, NO_POLICY),
        Position.TIMED_OUT: Projection("failed", "AGENT_TIMEOUT"),
    },
    NLM_JOB.name: dict.fromkeys(
        Position, Projection(None, "no word: the NLM backend alone knows how far it is inside NOTEBOOKLM_CALL")
    ),
}

WIRE_NUMBERS: dict[str, int] = {
    "PENDING": 1,
    "SCHEDULED": 2,
    "DISPATCHED": 3,
    "RUNNING": 4,
    "SUCCEEDED": 5,
    "FAILED": 6,
    "CANCELLED": 7,
    "DENIED": 8,
    "TIMEOUT": 9,
}
"""JobStatus of CAP v1.

A result may also say FAILED_RETRYABLE (10) or FAILED_FATAL (11), of an attempt rather than a job.
"""


def project(lifecycle: Lifecycle, state: str, to: Lifecycle) -> Projection:
    """The word in `to`'s vocabulary for a job of `lifecycle` in `state`."""
    own = lifecycle.by_name[state].name
    if to.name == lifecycle.name:
        return Projection(own)
    if lifecycle.name not in POSITIONS or to.name not in WORDS:
        return Projection(None, "no word: a proposal is a decision, the others are work")
    found = WORDS[to.name][POSITIONS[lifecycle.name][own]]
    if lifecycle is NLM_JOB:
        return Projection(found.state, f"NLM backend: {own}")
    return found


def word(position: Position, to: Lifecycle) -> Projection:
    """The word in `to`'s vocabulary for a position, for callers that know more than the state."""
    return WORDS[to.name][position]

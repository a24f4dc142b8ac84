"""Errors of runs, proposals, the inbox and rebuilds. The docstring of a class is its message.

RunError
├── RunIdInvalid
├── RunNotFound
├── ManifestMissing       the run has not ended
├── RunIdAmbiguous        a short run id that matches several runs
├── AgentNotRunnable      no such agent, malformed, or not active
├── TooManyWaiting        the agent's queue is full
├── CronInvalid           an invalid cron expression
├── ScheduleContended     other writers kept changing the schedule
├── TemporalAway          the Temporal server does not answer as it should
├── ProposalNotFound
├── ProposalDecided       it is not pending any more
├── ProposalOutdated      its target has changed, so it is not approved
├── ProposalConflict      another body under the same id
├── NoteTooShort          rejecting needs a reason
├── TargetRefused         a proposal about a file that it may not change
├── OutputRefused         a proposal with an action that its agent's file does not list
├── DuplicateProposal     an equal proposal waits for a person
├── RunOfAnother          a proposal that names a run of another agent
├── EntryNotFound
├── ApplyRefused          a proposal that cannot be applied in the current state
├── DocumentDiffers       an object differs from what the ledger recorded
├── RecordInvalid         an audit record that cannot be read
├── RebuildError
│   ├── LedgerHasOthers   the ledger holds other jobs than the records
│   └── RecordInUse       a projector is running
└── StepError             a step failed; status.json shows its `code` (RUN-7)
    ├── UpstreamUnavailable
    │   └── StoreAway     the run waits until the store answers
    ├── NlmDown
    ├── AgentTimeout
    │   └── RunTimeout
    ├── WorkflowCancelled  the run's workflow was cancelled in Temporal
    ├── AgentStopped      the run waits until its agent is active again
    └── StepHopeless      a retry would not help
"""

from typing import ClassVar

from trellis.engine.errors import InvalidTransition, TrellisError


class RunError(TrellisError):
    """{detail}."""


class RunIdInvalid(RunError):
    """{run_id!r} is no run id: it looks like run_2026-02-14_080000_abc123."""

    code = "VALIDATION_FAILED"


class RunNotFound(RunError):
    """There is no run {run_id}; `trellis runs` lists them. A queue job that no run submitted has a run id of its own."""

    code = "NOT_FOUND"


class ManifestMissing(RunError):
    """{run_id} has not ended: its manifest comes with its end."""

    code = "NOT_FOUND"


class RunIdAmbiguous(RunError):
    """{run_id} may be {found}; give the long form."""

    code = "VALIDATION_FAILED"


class AgentNotRunnable(RunError):
    """Agent {slug} cannot run: {reason}."""

    code = "CONFLICT"


class TooManyWaiting(RunError):
    """Agent {slug} has {waiting} runs waiting and {limit} is the limit; wait for one to end, or cancel one."""

    code = "RATE_LIMITED"


class CronInvalid(RunError):
    """Agent {slug} cannot run by {cron!r}: {problem}; expected {expected}, in `triggers.cron` of its file."""

    code = "VALIDATION_FAILED"


class ScheduleContended(RunError):
    """The schedule of agent {slug} was changed by others {tries} times in a row; look at it and ask again."""

    code = "CONFLICT"


class TemporalAway(RunError):
    """The Temporal server at {address}, namespace {namespace}, cannot be used: {reason}."""

    code = "UPSTREAM_UNAVAILABLE"


class ProposalNotFound(RunError):
    """There is no proposal {proposal}; `trellis proposals` lists them."""

    code = "NOT_FOUND"


class ProposalDecided(RunError, InvalidTransition):
    """Proposal {job_id} is {source} already{decided}; it can no longer become {target}."""

    code = "INVALID_TRANSITION"


class ProposalOutdated(RunError):
    """Proposal {proposal} was not approved and is still pending: {conflict}."""

    code = "CONFLICT"


class ProposalConflict(RunError):
    """Proposal {proposal} is there with another body: an id of ours never means two things; report this."""

    code = "CONFLICT"


class NoteTooShort(RunError):
    """Saying no needs a note of at least {least} characters that says why."""

    code = "VALIDATION_FAILED"


class TargetRefused(RunError):
    """{action} of {target!r} is refused: {detail}."""

    code = "VALIDATION_FAILED"


class OutputRefused(RunError):
    """Agent {slug} may not propose {action}: `safe_outputs` in its file does not list it."""

    code = "VALIDATION_FAILED"


class DuplicateProposal(RunError):
    """The same is proposed already: {proposal} is {status}. Decide about that one, or propose something else."""

    code = "DUPLICATE_ENTRY"


class RunOfAnother(RunError):
    """{run_id} is a run of agent {found}, not of {slug}."""

    code = "VALIDATION_FAILED"


class EntryNotFound(RunError):
    """There is no inbox entry {entry}."""

    code = "NOT_FOUND"


class ApplyRefused(RunError):
    """{reason}"""

    code = "CONFLICT"


class DocumentDiffers(RunError):
    """{key} in the object store is not what the ledger recorded; look at it, then run `trellis rebuild --from ledger`."""


class RecordInvalid(RunError):
    """The audit record of {event} cannot be read ({problem}); bring it back from a copy, or take it away and go on without its job."""


class RebuildError(RunError):
    """{detail}"""


class LedgerHasOthers(RebuildError):
    """The ledger is not the one that was recorded: job {job_id} {problem}. Point --ledger at a new one; nothing was changed."""


class RecordInUse(RebuildError):
    """A projector follows this ledger. Stop `trellis up` wherever it runs, wait {lease_s:g} s, and try again; nothing was changed."""


class StepError(RunError):
    """{detail}"""

    code: ClassVar[str] = "INTERNAL_ERROR"
    retries: ClassVar[bool] = True
    """Whether the step is retried. One layer retries each class of error (D7)."""
    waits: ClassVar[bool] = False
    """Whether the run waits until the cause is gone instead of failing: the run itself cannot fix it."""

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or StepError.__doc__  # the message


class UpstreamUnavailable(StepError):
    code = "UPSTREAM_UNAVAILABLE"


class StoreAway(UpstreamUnavailable):
    waits = True


class NlmDown(StepError):
    code = "NLM_UNAVAILABLE"
    retries = False


class AgentTimeout(StepError):
    code = "AGENT_TIMEOUT"


class RunTimeout(AgentTimeout):
    retries = False


class WorkflowCancelled(StepError):
    """The run's workflow was cancelled in Temporal."""

    code = "CANCELLED"
    retries = False


class AgentStopped(StepError):
    """Agent {slug} is {status}; only an active agent runs: `trellis agents activate {slug}`."""

    retries = False


class StepHopeless(StepError):
    retries = False

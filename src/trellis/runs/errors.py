"""What can go wrong with runs.

RunError
├── RunIdInvalid
├── RunNotFound
├── AgentNotRunnable      no such agent, malformed, or not active
├── TooManyWaiting        the agent's queue is full
├── ProposalNotFound
├── ProposalConflict      another body under the same id
├── NoteTooShort          rejecting needs a reason
├── TargetRefused         a proposal about something it may not touch
├── ApplyRefused          a proposal that cannot be applied as things are now
├── DocumentDiffers       the object store holds something the ledger does not know
└── StepError             a step failed; `code` is what status.json shows (RUN-7)
    ├── UpstreamUnavailable
    ├── NlmDown
    ├── AgentTimeout
    │   └── RunTimeout
    ├── StepFailed
    └── StepHopeless      no other try would help
"""

from typing import ClassVar

from trellis.engine.errors import TrellisError


class RunError(TrellisError):
    """{detail}."""


class RunIdInvalid(RunError):
    """{run_id!r} is no run id: it looks like run_2026-02-14_080000_abc123."""


class RunNotFound(RunError):
    """There is no run {run_id}."""


class AgentNotRunnable(RunError):
    """Agent {slug} cannot run: {reason}."""


class TooManyWaiting(RunError):
    """Agent {slug} has {waiting} runs waiting and {limit} is the limit; wait for one to end, or cancel one."""


class ProposalNotFound(RunError):
    """There is no proposal {proposal}; `trellis proposals` lists them."""


class ProposalConflict(RunError):
    """Proposal {proposal} is there with another body: an id of ours never means two things; report this."""


class NoteTooShort(RunError):
    """Rejecting a proposal needs a note of at least {least} characters that says why."""


class TargetRefused(RunError):
    """{action} may not touch {target!r}, or does not say what to do with it."""


class ApplyRefused(RunError):
    """{reason}"""


class DocumentDiffers(RunError):
    """{key} in the object store is not what the ledger recorded; look at it, then run `trellis rebuild --from ledger`."""


class StepError(RunError):
    """{detail}"""

    code: ClassVar[str] = "INTERNAL_ERROR"
    retries: ClassVar[bool] = True
    """Whether the step is worth another try: one layer retries each class of error (D7)."""


class UpstreamUnavailable(StepError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"


class NlmDown(StepError):
    """{detail}"""

    code = "NLM_UNAVAILABLE"
    retries = False


class AgentTimeout(StepError):
    """{detail}"""

    code = "AGENT_TIMEOUT"


class RunTimeout(AgentTimeout):
    """{detail}"""

    retries = False


class StepFailed(StepError):
    """{detail}"""


class StepHopeless(StepError):
    """{detail}"""

    retries = False

"""Errors of agents: of their files, and of their runs."""

from typing import ClassVar

from trellis.agents.refusals import ToolRefusal
from trellis.engine.errors import TrellisError

# Errors of agents' files. A missing or malformed file is a return value where callers expect it.
#
#     AgentError
#     ├── SlugInvalid
#     ├── AgentNotFound           no agent with that slug
#     ├── AgentExists             that slug is taken
#     ├── SourceRefused           a file that cannot be a source
#     ├── DefinitionMalformed     a file that had to be valid is not
#     ├── StatusChangeRefused     no such change of status
#     └── DefinitionContended     other writers kept changing the file


class AgentError(TrellisError):
    """{detail}."""

    code = "VALIDATION_FAILED"


class SlugInvalid(AgentError):
    """{slug!r} is no agent slug: lower-case letters, digits and hyphens, at most 63, not beginning with a hyphen."""


class AgentNotFound(AgentError):
    """There is no agent {slug}; `trellis agents` lists those there are."""

    code = "NOT_FOUND"


class AgentExists(AgentError):
    """{key} is there already and stays as it is; choose another name, or edit what is there."""

    code = "CONFLICT"


class SourceRefused(AgentError):
    """{file} cannot be a source: {reason}."""


class DefinitionMalformed(AgentError):
    """The agent's file has problems and stays as it is; correct them first: {problems}."""


class StatusChangeRefused(AgentError):
    """Agent {slug} cannot go from {source} to {target}; from {source} it may go to {allowed}."""

    code = "INVALID_TRANSITION"


class DefinitionContended(AgentError):
    """The file of agent {slug} was changed by others {tries} times in a row; look at it and ask again."""

    code = "CONFLICT"


# Errors that end an agent's run without an output. Mistakes of the model alone are reported to the model instead.
#
#     AgentRunError
#     ├── ModelUnknown            the definition names an unknown model
#     ├── ModelSettingInvalid     the model is known, but not configured
#     ├── ModelUnavailable        it does not answer now: the step is retried, and paid answers are replayed
#     ├── ModelRefused            it refuses the request, and would again
#     ├── ModelGarbage            its answer cannot be used
#     ├── JournalDiffers          the journal holds the answer to another request
#     ├── OutOfTime               the step's or the run's time is over
#     ├── StepsExceeded
#     ├── TokensExceeded
#     └── ToolCallsExceeded


class AgentRunError(AgentError):
    """{detail}."""

    code = "INTERNAL_ERROR"
    retries: ClassVar[bool] = False
    """Whether the step is retried (D7). Answered requests are then replayed, not repeated."""
    refused: tuple[ToolRefusal, ...] = ()
    """The tool calls that were refused to the model before the run ended."""


class ModelUnknown(AgentRunError):
    """{model!r} is no model this runtime can open; use {known}."""

    code = "VALIDATION_FAILED"


class ModelSettingInvalid(AgentRunError):
    """Model {model!r} cannot be opened: {detail}."""

    code = "VALIDATION_FAILED"


class ModelUnavailable(AgentRunError):
    """Model {model!r}{at} does not answer: {reason}.{remedy}"""

    code = "UPSTREAM_UNAVAILABLE"
    retries = True


class ModelRefused(AgentRunError):
    """Model {model!r}{at} refused the request: {reason}. Check its address, name and key."""

    code = "UPSTREAM_UNAVAILABLE"


class ModelGarbage(AgentRunError):
    """Model {model!r} sent nothing that can be used: {reason}."""


class JournalDiffers(AgentRunError):
    """Journal entry {entry!r} answers another request than this one: program or context changed. Start a new run."""


class OutOfTime(AgentRunError):
    """The agent's time was over before {what}; give it fewer steps, or the step more time."""

    code = "AGENT_TIMEOUT"
    retries = True


class StepsExceeded(AgentRunError):
    """The agent did not finish within {limit} model requests; {advice}{so_far}."""


class TokensExceeded(AgentRunError):
    """The agent's requests need {used} tokens and {limit} is the limit of a run; give it fewer sources or steps."""


class ToolCallsExceeded(AgentRunError):
    """The agent called tools {used} times and {limit} is the limit of a run; {advice}{so_far}."""

"""What can go wrong with agents: with their files, and while one works."""

from typing import ClassVar

from trellis.engine.errors import TrellisError

# What can go wrong with agents beyond a file that is missing or malformed: those two are answers, not errors.
#
# AgentError
# ├── SlugInvalid
# ├── AgentNotFound           nothing under that slug
# ├── AgentExists             something under that slug already
# ├── SourceRefused           a file that cannot be a source
# ├── DefinitionMalformed     a file that had to be good is not
# ├── StatusChangeRefused     no such change of status
# └── DefinitionContended     other writers kept changing the file


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


# What ends an agent's work before it has an output. Everything the model alone did wrong is told to the model instead.
#
# AgentRunError
# ├── ModelUnknown            the definition names a model nobody can open
# ├── ModelSettingInvalid     the model is known, but not set up
# ├── ModelUnavailable        it does not answer now: the step is worth another try, nothing paid for is lost
# ├── ModelRefused            it says no, and would say it again
# ├── ModelGarbage            it answered, but not with anything that can be used
# ├── JournalDiffers          what was recorded answers another request than the one made now
# ├── OutOfTime               the step's or the run's time is over
# └── LimitExceeded
# ├── StepsExceeded
# ├── TokensExceeded
# └── ToolCallsExceeded


class AgentRunError(AgentError):
    """{detail}."""

    code = "INTERNAL_ERROR"
    retries: ClassVar[bool] = False
    """Whether the step is worth another try (D7); requests that were answered are then replayed, not repeated."""


class ModelUnknown(AgentRunError):
    """{model!r} is no model this runtime can open; use {known}."""

    code = "VALIDATION_FAILED"


class ModelSettingInvalid(AgentRunError):
    """Model {model!r} cannot be opened: {detail}."""

    code = "VALIDATION_FAILED"


class ModelUnavailable(AgentRunError):
    """Model {model!r} does not answer: {reason}."""

    code = "UPSTREAM_UNAVAILABLE"
    retries = True


class ModelRefused(AgentRunError):
    """Model {model!r} refused the request: {reason}. Check its address, name and key."""

    code = "UPSTREAM_UNAVAILABLE"


class ModelGarbage(AgentRunError):
    """Model {model!r} sent nothing that can be used: {reason}."""


class JournalDiffers(AgentRunError):
    """Journal entry {entry!r} answers another request than this one: program or context changed. Start a new run."""


class OutOfTime(AgentRunError):
    """The agent's time was over before {what}; give it fewer steps, or the step more time."""

    code = "AGENT_TIMEOUT"
    retries = True


class LimitExceeded(AgentRunError):
    """{detail}."""


class StepsExceeded(LimitExceeded):
    """The agent did not finish within {limit} model requests; raise max_steps in its file, or ask for less."""


class TokensExceeded(LimitExceeded):
    """The agent's requests need {used} tokens and {limit} is the limit of a run; give it fewer sources or steps."""


class ToolCallsExceeded(LimitExceeded):
    """The agent called tools {used} times and {limit} is the limit of a run; its instructions let it run in circles."""

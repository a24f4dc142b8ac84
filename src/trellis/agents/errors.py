"""What can go wrong with agents beyond a file that is missing or malformed: those two are answers, not errors.

AgentError
├── SlugInvalid
├── AgentNotFound           nothing under that slug
├── AgentExists             something under that slug already
├── SourceRefused           a file that cannot be a source
├── DefinitionMalformed     a file that had to be good is not
├── StatusChangeRefused     no such change of status
└── DefinitionContended     other writers kept changing the file
"""

from trellis.engine.errors import TrellisError


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

"""What the runtime is given for one run. Everything here is read only: no port of an agent can change anything."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trellis.agents.annotations import Annotation
from trellis.agents.sources import AgentSource
from trellis.nlm.provider import NlmAnswer, NlmQuestion
from trellis.storage.memory.layout import DeepPart, ReadMode

TOKENS_MAX_DEFAULT = 500_000
PROPOSALS_MAX_DEFAULT = 10
TOOL_CALLS_MAX_DEFAULT = 64
OUTPUT_TOKENS_MAX_DEFAULT = 8_192


class JournalOnce(Protocol):
    """Keeps the first bytes made under a name, and gives them back ever after, also to another process."""

    def __call__(self, name: str, make: Callable[[], Awaitable[bytes]], /) -> Awaitable[bytes]:
        """The bytes under this name, made now if there are none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepMemoryPage:
    """Some of Layer 2, newest first; `more` is what to ask for next, None at the end."""

    items: Mapping[str, str]
    more: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolServices:
    """What the tools may use."""

    ask: Callable[[NlmQuestion, float], Awaitable[NlmAnswer]]
    """A grounded question and the seconds it may take. Raises NlmError; trying again is not the runtime's part (D7)."""
    read_memory: Callable[[ReadMode], Awaitable[Mapping[str, str]]]
    """Layer 1 by file."""
    read_memory_deep: Callable[[DeepPart, str | None, int], Awaitable[DeepMemoryPage]]
    """A page of Layer 2: which part, before which piece, at most how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    """What load-context found. The sources are a snapshot: what changes during a run is for the next run."""

    run_id: str
    sources: tuple[AgentSource, ...]
    annotations: tuple[Annotation, ...] = ()
    """What people let stand beside the sources: shown to the agent, never evidence."""
    memory: Mapping[str, str] = field(default_factory=dict[str, str])
    """Layer 1 by file, in the mode of the definition."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """The bounds of one run, beside the definition's own max_steps."""

    tokens_max: int = TOKENS_MAX_DEFAULT
    """Of all requests and answers of the run together."""
    output_tokens_max: int = OUTPUT_TOKENS_MAX_DEFAULT
    """Of one answer."""
    proposals_max: int = PROPOSALS_MAX_DEFAULT
    tool_calls_max: int = TOOL_CALLS_MAX_DEFAULT

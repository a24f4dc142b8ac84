"""The inputs of an agent run. Everything here is read-only: nothing an agent receives can change stored state."""

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
    """Keeps the first bytes made under a name, and returns them on every later call, also in another process."""

    def __call__(self, name: str, make: Callable[[], Awaitable[bytes]], /) -> Awaitable[bytes]:
        """The bytes under this name; made now if there are none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepMemoryPage:
    """A page of Layer 2, newest first. `more` is the cursor of the next page, None at the end."""

    items: Mapping[str, str]
    more: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolServices:
    """The services that the tools use."""

    ask: Callable[[NlmQuestion, float], Awaitable[NlmAnswer]]
    """Asks a grounded question within the given seconds. Raises NlmError; the runtime does not retry (D7)."""
    read_memory: Callable[[ReadMode], Awaitable[Mapping[str, str]]]
    """Returns Layer 1 by file."""
    read_memory_deep: Callable[[DeepPart, str | None, int], Awaitable[DeepMemoryPage]]
    """Returns a page of Layer 2: the part, the cursor, and the largest number of pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    """What load-context found. Sources are a snapshot: changes during a run are seen by the next run."""

    run_id: str
    sources: tuple[AgentSource, ...]
    annotations: tuple[Annotation, ...] = ()
    """Approved annotations of the sources. Shown to the agent, but never accepted as evidence."""
    memory: Mapping[str, str] = field(default_factory=dict[str, str])
    """Layer 1 by file, in the read mode of the definition."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of one run, besides the definition's own max_steps."""

    tokens_max: int = TOKENS_MAX_DEFAULT
    """Tokens of all requests and answers of the run together."""
    output_tokens_max: int = OUTPUT_TOKENS_MAX_DEFAULT
    """Tokens of one answer."""
    proposals_max: int = PROPOSALS_MAX_DEFAULT
    tool_calls_max: int = TOOL_CALLS_MAX_DEFAULT

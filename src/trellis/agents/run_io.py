"""What an agent run takes and what it returns."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, TypeAdapter

from trellis.agents.definition import SafeOutput
from trellis.agents.refusals import ToolRefusal
from trellis.agents.sources import AgentSource, Annotation
from trellis.nlm.provider import Citation, NlmAnswer, NlmQuestion
from trellis.storage.memory.layout import DeepPart, ReadMode
from trellis.storage.memory.updates import Operation, Update

# The inputs of an agent run. Everything here is read-only: nothing an agent receives can change stored state.

TOKENS_MAX_DEFAULT = 500_000
PROPOSALS_MAX_DEFAULT = 10
TOOL_CALLS_MAX_DEFAULT = 64
OUTPUT_TOKENS_MAX_DEFAULT = 8_192

JournalOnce = Callable[[str, Callable[[], Awaitable[bytes]]], Awaitable[bytes]]
"""Keeps the first bytes made under a name, and returns them on every later call, also in another process."""

BASE_URL_SETTING = "TRELLIS_MODEL_BASE_URL"
OPENAI = "openai"
"""The kind of a model at a server with the API of OpenAI: `openai:NAME`."""
REQUEST_TIMEOUT_S = 110.0
"""Below the step's own limit, so that a silent server is named as the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Settings of models. The key is left out of every representation."""

    base_url: str | None = None
    key: str | None = field(default=None, repr=False)
    scripts: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    """Functions `(messages, info) -> ModelResponse` by name, for `scripted:`."""
    request_timeout_s: float = REQUEST_TIMEOUT_S
    process: str | None = None
    """The process that executes runs with these settings, for messages."""

    @property
    def shown_address(self) -> str | None:
        """The address of the models' server, for messages: without credentials, query and fragment. None without one."""
        if not self.base_url:
            return None
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


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


# The output of an agent run: drafts of proposals, a summary, and the refused calls (PIPE-6).
#
# A draft holds only what the model may decide. It has no field for an id, a status, a priority or a reviewer: the
# orchestrator sets those from the action. The same run gives the same bytes.


class DraftChange(StrEnum):
    """How a draft changes its target."""

    APPEND = "append"
    REPLACE = "replace"
    CREATE = "create"
    CLOSE = "close"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalDraft:
    """A draft of a proposal. Every citation is found in a source that the run read."""

    action: SafeOutput
    target: str
    """A path below the agent's folder; for a memory-update, a file of its memory."""
    change: DraftChange
    summary: str
    text: str
    reasoning: str = ""
    citations: tuple[Citation, ...] = ()
    flags: tuple[str, ...] = ()
    not_found: Annotated[tuple[Citation, ...], Field(exclude_if=lambda quoted: not quoted)] = ()
    """What the model quoted and no source has, for the person who decides."""
    not_read: Annotated[tuple[Citation, ...], Field(exclude_if=lambda quoted: not quoted)] = ()
    """What the model quoted from a source that has it, but that the agent did not read in this run."""
    section: str | None = None
    loop_id: str | None = None
    resolution: str | None = None

    def update(self) -> Update:
        """The memory update that a memory-update draft asks for."""
        assert self.action is SafeOutput.MEMORY_UPDATE, self.action
        return Update(
            file=self.target,
            operation=Operation(self.change.value),
            content=self.text,
            section=self.section,
            loop_id=self.loop_id,
            resolution=self.resolution,
        )

    def to_dict(self) -> dict[str, Any]:
        """The form in JSON."""
        return _DRAFT.dump_python(self, mode="json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call, and whether it was accepted."""

    name: str
    ok: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Tokens of all model requests of the run."""

    input: int = 0
    output: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOutput:
    """The structured output of execute-agent."""

    proposals: tuple[ProposalDraft, ...]
    summary: str
    refused: tuple[ToolRefusal, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    model: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The form in JSON. `from_dict` parses it."""
        return _OUTPUT.dump_python(self, mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AgentOutput":
        return _OUTPUT.validate_python(data)

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_dict())


_DRAFT, _OUTPUT = TypeAdapter(ProposalDraft), TypeAdapter(AgentOutput)


def canonical_json(value: object) -> bytes:
    """JSON with one form for each value, for hashing, journaling and comparing."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()

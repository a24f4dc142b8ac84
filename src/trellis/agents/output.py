"""The output of an agent run: drafts of proposals, a summary, and the refused calls (PIPE-6).

A draft holds only what the model may decide. It has no field for an id, a status, a priority or a reviewer: the
orchestrator sets those from the action. The same run gives the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from trellis.agents.definition import SafeOutput
from trellis.nlm.provider import Citation
from trellis.storage.memory.updates import Operation, Update


class DraftChange(StrEnum):
    """How a draft changes its target."""

    APPEND = "append"
    REPLACE = "replace"
    CREATE = "create"
    CLOSE = "close"


class RefusalCode(StrEnum):
    """Why a tool refused a call."""

    TOOL_NOT_LISTED = "tool_not_listed"
    ACTION_NOT_ALLOWED = "action_not_allowed"
    TARGET_NOT_ALLOWED = "target_not_allowed"
    FIELD_MISSING = "field_missing"
    FIELD_INVALID = "field_invalid"
    FIELD_DROPPED = "field_dropped"
    TOO_LARGE = "too_large"
    TEXT_UNSAFE = "text_unsafe"
    UPDATE_INVALID = "update_invalid"
    TOO_MANY = "too_many"
    DUPLICATE = "duplicate"
    NOT_FOUND = "not_found"
    NOT_READABLE = "not_readable"


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
    not_found: tuple[Citation, ...] = ()
    """What the model quoted and no source has, for the person who decides."""
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
        plain = {name: value for name, value in asdict(self).items() if name != "not_found" or value}
        return {
            **plain,
            "action": self.action.value,
            "change": self.change.value,
            "citations": [asdict(one) for one in self.citations],
            "flags": list(self.flags),
            **({"not_found": [asdict(one) for one in self.not_found]} if self.not_found else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ProposalDraft":
        """Parse the result of `to_dict`."""
        plain: dict[str, Any] = {
            **data,
            "action": SafeOutput(data["action"]),
            "change": DraftChange(data["change"]),
            "citations": tuple(Citation(**one) for one in data["citations"]),
            "flags": tuple(data["flags"]),
            "not_found": tuple(Citation(**one) for one in data.get("not_found", ())),
        }
        return cls(**plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRefusal:
    """A refused tool call and the reason, as told to the model."""

    tool: str
    code: RefusalCode
    detail: str
    action: str | None = None
    target: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form in JSON."""
        return {**asdict(self), "code": self.code.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ToolRefusal":
        """Parse the result of `to_dict`."""
        plain: dict[str, Any] = {**data, "code": RefusalCode(data["code"])}
        return cls(**plain)


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
        """The form in JSON."""
        return {
            "proposals": [draft.to_dict() for draft in self.proposals],
            "summary": self.summary,
            "refused": [refusal.to_dict() for refusal in self.refused],
            "tool_calls": [asdict(call) for call in self.tool_calls],
            "usage": asdict(self.usage),
            "model": self.model,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AgentOutput":
        """Parse the result of `to_dict`."""
        return cls(
            proposals=tuple(ProposalDraft.from_dict(draft) for draft in data["proposals"]),
            summary=data["summary"],
            refused=tuple(ToolRefusal.from_dict(refusal) for refusal in data["refused"]),
            tool_calls=tuple(ToolCall(**call) for call in data["tool_calls"]),
            usage=TokenUsage(**data["usage"]),
            model=data["model"],
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes of this output."""
        return canonical_json(self.to_dict())


def canonical_json(value: object) -> bytes:
    """JSON with one form for each value, for hashing, journaling and comparing."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()

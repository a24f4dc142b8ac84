"""Result types of agent memory: contents, commit outcomes and history.

Also defines the two small JSON files stored with a memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from trellis.storage.memory.layout import SCHEMA_VERSION, AgentId, CommitId, DeepPart, ReadMode


class MemoryMeta(BaseModel):
    """meta.json: a summary of a memory. `version` counts its applied proposals."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    agent_id: str
    version: int = Field(ge=0)
    last_update: datetime
    last_run_id: str
    snapshot_token_count: int = Field(ge=0)
    open_loops_token_count: int = Field(ge=0)
    facts_token_count: int = Field(ge=0)
    open_loops_count: int = Field(ge=0)
    schema_version: str = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        return self.model_dump_json(by_alias=True, indent=2).encode() + b"\n"


class AppliedMarker(BaseModel):
    """The marker file of an applied proposal. It makes a repeated call cheap: no search of the history is needed."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    version: int = Field(ge=1)
    updates_digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        return self.model_dump_json(by_alias=True).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryView:
    """Layer 1 at one commit. The same commit gives the same view; a missing file is empty text."""

    agent_id: AgentId
    mode: ReadMode
    version: int
    """0 before the first applied proposal."""
    commit: CommitId | None
    content: Mapping[str, str]
    token_count: int
    last_update: datetime | None = None
    last_run_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepItem:
    """One piece of Layer 2: a decision, a day or a run."""

    name: str
    text: str
    token_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepView:
    """A page of Layer 2, newest first. `more` is the `before` of the next page."""

    agent_id: AgentId
    part: DeepPart
    version: int
    commit: CommitId | None
    items: tuple[DeepItem, ...]
    token_count: int
    more: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The proposal was applied by this call."""

    commit: CommitId
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyApplied:
    """The proposal was applied by an earlier call; nothing was written."""

    commit: CommitId
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionConflict:
    """The memory has changed since the proposal was made; nothing was written."""

    expected: int
    current: int


class ChangeKind(StrEnum):
    """How a commit changed a file."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedFileChange:
    """One file in one commit, with lines added and removed."""

    file: str
    kind: ChangeKind
    added: int
    removed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """One commit that changed a memory. Without a proposal, the apply engine did not make it: an audit signal."""

    commit: CommitId
    at: datetime
    author: str
    version: int | None
    proposal_id: str | None
    run_id: str | None
    auto_approved: bool | None
    reason: str | None
    files: tuple[CommittedFileChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPage:
    """Newest first. `more` is the `before` of the next page. A page may be empty and still have more."""

    entries: tuple[HistoryEntry, ...]
    more: CommitId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryVerifyReport:
    """The result of checking the whole repository. `complete` is False if it stopped at its limit."""

    commits: int
    objects: int
    findings: tuple[str, ...]
    complete: bool

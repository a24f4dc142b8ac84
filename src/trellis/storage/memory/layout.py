"""The layout of an agent's memory: file names, limits, ids and tokens, and the values that reads and commits return."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NewType, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.engine.extras import load_plugin
from trellis.storage.memory.errors import AgentIdInvalid

# File names, limits and ids.
#
# Layer 1 is what a run reads; Layer 2 is read only on explicit request. Every name that becomes a path in the
# repository is validated here. None can refer to anything outside `memory/{agentId}/`.

AgentId = NewType("AgentId", str)
CommitId = NewType("CommitId", str)
TokenCounter = Callable[[str], int]

ROOT = "memory"
SCHEMA_VERSION = "1.0"

SNAPSHOT = "snapshot.md"
OPEN_LOOPS = "open_loops.md"
FACTS = "facts.md"
DECISIONS = "decisions.md"
META = "meta.json"
TIMELINE = "timeline"
RUNS = "runs"
APPLIED = ".applied"
LAYER_1 = (SNAPSHOT, OPEN_LOOPS, FACTS)

FILE_TOKENS_MAX = {SNAPSHOT: 2_000, OPEN_LOOPS: 2_000, FACTS: 8_000, DECISIONS: 100_000}
RUN_TOKENS_MAX = 8_000
TIMELINE_TOKENS_MAX = 2_000
FOLDER_FILES_MAX = {RUNS: 2_000, TIMELINE: 4_000}
"""Above these numbers the oldest files are removed and named in the commit; git keeps them."""

DEEP_TOKENS_MAX = 32_000
FILE_BYTES_MAX = 1 << 20
"""A larger file is not read, whichever program wrote it."""

AGENT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""Run ids and proposal ids. Without dots and slashes, so that they are safe as file names."""


class ReadMode(StrEnum):
    """How much of Layer 1 a read returns."""

    BASIC = "basic"
    WIDE = "wide"


class DeepPart(StrEnum):
    """The parts of Layer 2."""

    DECISIONS = "decisions"
    TIMELINE = "timeline"
    RUNS = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLimits:
    """The files that a mode reads, and their token limit together."""

    files: tuple[str, ...]
    tokens_max: int


READ_LIMITS = {
    ReadMode.BASIC: ReadLimits(files=(SNAPSHOT, OPEN_LOOPS), tokens_max=4_100),
    ReadMode.WIDE: ReadLimits(files=(SNAPSHOT, OPEN_LOOPS, FACTS), tokens_max=12_200),
}


def count_tokens(text: str) -> int:
    """ceil(UTF-8 bytes / 3): an upper estimate that needs no tokenizer (D50)."""
    return -(-len(text.encode()) // 3)


def checked_agent_id(agent_id: str) -> AgentId:
    """The id; raises AgentIdInvalid."""
    if not AGENT_ID.fullmatch(agent_id):
        raise AgentIdInvalid(agent_id=agent_id)
    return AgentId(agent_id)


def checked_name(value: str, option: str) -> str:
    """A run id or a proposal id; raises OptionInvalid."""
    if not NAME.fullmatch(value):
        raise OptionInvalid(
            option=option,
            value=value,
            expected="use 1 to 128 letters, digits, '_' and '-', the first a letter or digit",
        )
    return value


def checked_count(value: int, option: str, most: int) -> int:
    """A number from 1 to `most`; raises OptionInvalid."""
    if not 1 <= value <= most:
        raise OptionInvalid(option=option, value=value, expected=f"use a number from 1 to {most}")
    return value


def checked_time(at: datetime) -> datetime:
    """The time in UTC and whole seconds, as git stores it; raises OptionInvalid."""
    if at.tzinfo is None or at.astimezone(UTC).year < 1970:
        raise OptionInvalid(option="at", value=at, expected="give a time since 1970 with its time zone")
    return at.astimezone(UTC).replace(microsecond=0)


def run_file(run_id: str) -> str:
    """The file with a run's own notes."""
    return f"{RUNS}/{run_id}.md"


def tokens_max(file: str) -> int | None:
    """The token limit of a file that a proposal may change; None for every other file."""
    folder, slash, name = file.partition("/")
    if slash and folder == RUNS and name.endswith(".md") and NAME.fullmatch(name.removesuffix(".md")):
        return RUN_TOKENS_MAX
    return FILE_TOKENS_MAX.get(file)


def is_readable(file: str) -> bool:
    """Whether this file is meant for people, not for bookkeeping."""
    return file.endswith(".md")


def layer(file: str) -> int:
    """1 for files that a run reads by itself, else 2."""
    return 1 if file in LAYER_1 else 2


# The token counter that a setting names (D50): `bytes`, the upper estimate, or one from an installed package.
#
# A package provides one with an entry point in the group `trellis.tokenizers`: a function that takes a text and returns
# its number of tokens.

BYTES = "bytes"
PLUGINS = "trellis.tokenizers"
SAMPLE = "Who made the violin?"


def open_tokenizer(setting: str = BYTES) -> TokenCounter:
    """The counter with this name, tested once on a sentence; raises SettingsInvalid."""
    if setting == BYTES:
        return count_tokens
    try:
        brought = load_plugin(PLUGINS, setting, ours=(BYTES,))
    except SettingsInvalid as error:
        raise SettingsInvalid(source="TRELLIS_TOKENIZER", detail=str(error.data["detail"])) from error
    tried: Any = brought(SAMPLE) if callable(brought) else None
    if not isinstance(tried, int) or tried < 1:
        detail = f"it must be a function that returns how many tokens a text has, and for {SAMPLE!r} it gave {tried!r}"
        raise SettingsInvalid(source="TRELLIS_TOKENIZER", detail=detail)
    return cast("TokenCounter", brought)


# Result types of agent memory: contents, commit outcomes and history.
#
# Also defines the two small JSON files stored with a memory.


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
        return self.model_dump_json(by_alias=True, indent=2).encode() + b"\n"


class AppliedMarker(BaseModel):
    """The marker file of an applied proposal. It makes a repeated call cheap: no search of the history is needed."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    version: int = Field(ge=1)
    updates_digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    def to_bytes(self) -> bytes:
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

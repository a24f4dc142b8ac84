"""Agent definitions: parses and validates the file `_agent.md`."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

from trellis.agents import frontmatter
from trellis.agents.cron import EXPECTED as CRON_EXPECTED
from trellis.agents.cron import cron_problem
from trellis.agents.errors import DefinitionMalformed, SlugInvalid, StatusChangeRefused
from trellis.agents.frontmatter import (
    FrontMatter,
    FrontMatterProblem,
    ListValue,
    Scalar,
    ScalarKind,
    TableEntry,
    TableValue,
    quoted_for_message,
)
from trellis.storage.memory.layout import ReadMode

# Reading the fields of a front matter table.
#
# An invalid field becomes a problem and yields a placeholder, so that every field is checked in one pass. Callers must
# check `problems` before they use a value: a file with problems never yields a definition.

Choice = TypeVar("Choice", bound=StrEnum)

SUGGESTION_SIMILARITY_MIN = 0.7
"""Similarity (0 to 1) above which a known word is suggested for an unknown one."""
_WHOLE = re.compile(r"\d{1,9}")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_STAND_IN_MOMENT = datetime(1970, 1, 1, tzinfo=UTC)


class FieldReader:
    """Reads the fields of one table. `within` is the path that leads to it, such as `triggers.`."""

    def __init__(
        self,
        table: TableValue,
        problems: list[FrontMatterProblem],
        *,
        unread: frozenset[str] = frozenset(),
        within: str = "",
    ) -> None:
        self._table = table
        self._problems = problems
        self._unread = unread
        self._within = within
        self._asked: list[str] = []
        self._missing: dict[str, str] = {}

    def text(self, name: str, *, chars_max: int, lines: bool = False) -> str:
        """Text that is not blank, in one line unless `lines`."""
        value = self._scalar(name, f"text of 1 to {chars_max} characters", lines=lines)
        if value is None:
            return ""
        if value.kind is not ScalarKind.TEXT:
            self._wrong(name, value.line, f"{value.text} reads as {value.kind}", "text: put it in quotes")
        elif not value.text.strip() or len(value.text) > chars_max:
            self._wrong(
                name,
                value.line,
                f"{quoted_for_message(value.text)} does not fit",
                f"text of 1 to {chars_max} characters",
            )
        elif not lines and not value.text.isprintable():
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} has a character without a shape", "plain text"
            )
        return value.text

    def matching(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Text that matches a pattern. An unquoted number is checked as it is written."""
        value = self._scalar(name, expected)
        if value is None:
            return ""
        if value.kind is ScalarKind.NOTHING or not pattern.fullmatch(value.text):
            self._wrong(name, value.line, f"{quoted_for_message(value.text)} does not fit", expected)
        return value.text

    def choice(self, name: str, choices: type[Choice], default: Choice | None = None) -> Choice:
        """One value of an enumeration."""
        stand_in = default or next(iter(choices))
        if default is not None and name not in self._table.entries:
            self._asked.append(name)
            return default
        value = self._scalar(name, f"one of {', '.join(choices)}")
        return stand_in if value is None else self._chosen(name, value, choices) or stand_in

    def choices(self, name: str, choices: type[Choice], *, required: bool = True) -> tuple[Choice, ...]:
        """Values of an enumeration, each at most once."""
        expected = f"a list of {', '.join(choices)}"
        entry = self._entry(name, expected, required=required)
        if entry is None or (not required and _is_empty(entry)):
            return ()
        if not isinstance(entry.value, ListValue):
            self._wrong(name, entry.line, "this is no list", f"{expected}, such as [{next(iter(choices))}]")
            return ()
        if required and not entry.value.items:
            self._wrong(name, entry.line, "the list is empty", expected)
        found: list[Choice] = []
        for item in entry.value.items:
            if not isinstance(item, Scalar):
                self._wrong(name, item.line, "an item is no single word", f"one of {', '.join(choices)}")
                continue
            chosen = self._chosen(name, item, choices)
            if chosen in found:
                self._wrong(name, item.line, f"{quoted_for_message(item.text)} comes twice", "it once")
            elif chosen is not None:
                found.append(chosen)
        return tuple(found)

    def moment(self, name: str) -> datetime:
        """An ISO 8601 time with its offset. A date alone means midnight UTC."""
        expected = "a moment such as 2026-02-14T08:00:00Z"
        value = self._scalar(name, expected)
        if value is None:
            return _STAND_IN_MOMENT
        try:
            moment = datetime.fromisoformat(value.text)
        except ValueError:
            moment = None
        if moment is not None and _DAY.fullmatch(value.text):
            return moment.replace(tzinfo=UTC)
        if moment is None or moment.tzinfo is None:
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} does not fit", f"{expected}, with Z or an offset"
            )
            return _STAND_IN_MOMENT
        return moment

    def whole(self, name: str, *, low: int, high: int, default: int) -> int:
        """A whole number between `low` and `high`."""
        value = self._optional(name, f"a whole number from {low} to {high}")
        if value is None:
            return default
        if not _WHOLE.fullmatch(value.text) or not low <= int(value.text) <= high:
            self._wrong(
                name,
                value.line,
                f"{quoted_for_message(value.text)} does not fit",
                f"a whole number from {low} to {high}",
            )
            return default
        return int(value.text)

    def number(self, name: str, *, low: float, high: float, default: float) -> float:
        """A number between `low` and `high`."""
        value = self._optional(name, f"a number from {low} to {high}")
        if value is None:
            return default
        number = float(value.text) if _NUMBER.fullmatch(value.text) else math.nan
        if not low <= number <= high:
            self._wrong(
                name, value.line, f"{quoted_for_message(value.text)} does not fit", f"a number from {low} to {high}"
            )
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._optional(name, "true or false")
        if value is None:
            return default
        if value.text not in {"true", "false"}:
            hint = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.text.lower())
            hint = hint or _nearest_name(value.text.lower(), ("true", "false"))
            self._wrong(name, value.line, f"{quoted_for_message(value.text)} does not fit", "true or false", hint)
        return value.text == "true"

    def optional_text(self, name: str, expected: str) -> tuple[str, int] | None:
        """Text and its line; None if the field is missing or empty."""
        value = self._optional(name, expected)
        return None if value is None or value.kind is ScalarKind.NOTHING else (value.text, value.line)

    def form(self, name: str) -> "FieldReader":
        """A reader for a nested table; empty if the field is missing."""
        entry = self._entry(name, "fields of its own", required=False)
        table = entry.value if entry else None
        if entry is not None and not isinstance(table, TableValue) and not _is_empty(entry):
            self._wrong(name, entry.line, "this is no table", "fields of its own, indented, one in each line")
        known = table if isinstance(table, TableValue) else TableValue(line=0, entries={})
        return FieldReader(known, self._problems, within=f"{self._within}{name}.")

    def close(self) -> None:
        """Report every field that was not requested as unknown, and every requested one that is absent as missing.

        An unknown name that resembles a missing one is reported as one problem, not two.
        """
        for name, entry in self._table.entries.items():
            if name not in self._asked:
                hint = _nearest_name(name.lower(), self._missing) or _nearest_name(name.lower(), self._asked)
                self._missing.pop(hint or "", None)
                self._wrong(name, entry.line, "there is no such field", f"one of {', '.join(self._asked)}", hint)
        for name, expected in self._missing.items():
            self._wrong(name, 1, "the field is missing", expected)

    def wrong(self, name: str, line: int, wrong: str, expected: str, suggestion: str | None = None) -> None:
        """Report a problem that the caller found."""
        self._wrong(name, line, wrong, expected, suggestion)

    def line(self, name: str) -> int:
        """The line of a field; 1 if it is missing."""
        entry = self._table.entries.get(name)
        return entry.line if entry else 1

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _chosen(self, name: str, value: Scalar, choices: type[Choice]) -> Choice | None:
        if value.text in set(choices):
            return choices(value.text)
        hint = _nearest_name(value.text.lower(), tuple(choices))
        self._wrong(
            name, value.line, f"{quoted_for_message(value.text)} is not known", f"one of {', '.join(choices)}", hint
        )
        return None

    def _entry(self, name: str, expected: str, *, required: bool = True) -> TableEntry | None:
        self._asked.append(name)
        entry = self._table.entries.get(name)
        if entry is None and required and name not in self._unread:
            self._missing[name] = expected
        return entry

    def _scalar(self, name: str, expected: str, *, lines: bool = False, required: bool = True) -> Scalar | None:
        entry = self._entry(name, expected, required=required)
        if entry is None:
            return None
        if not isinstance(entry.value, Scalar):
            what = "a list" if isinstance(entry.value, ListValue) else "a table"
            self._wrong(name, entry.line, f"this is {what}", expected)
            return None
        if required and entry.value.kind is ScalarKind.NOTHING:
            self._wrong(name, entry.line, "the field is empty", expected)
            return None
        if not lines and not entry.value.in_one_line:
            self._wrong(name, entry.line, "the value has several lines", f"{expected}, in one line")
            return None
        return entry.value

    def _optional(self, name: str, expected: str) -> Scalar | None:
        return self._scalar(name, expected, required=False)

    def _wrong(self, name: str, line: int, wrong: str, expected: str, suggestion: str | None = None) -> None:
        field = self._within + quoted_for_message(name).strip("'\"")
        self._problems.append(
            FrontMatterProblem(line=line, field=field, wrong=wrong, expected=expected, suggestion=suggestion)
        )


def _is_empty(entry: TableEntry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.kind is ScalarKind.NOTHING


def _nearest_name(word: str, known: Iterable[str]) -> str | None:
    words = [str(one) for one in known]
    return next(
        iter(get_close_matches(word.strip().replace(" ", "-"), words, n=1, cutoff=SUGGESTION_SIMILARITY_MIN)), None
    )


# Agent definitions (D24). Invariants:
# - The file decides: without `_agent.md` there is no agent, and nothing about an agent is stored elsewhere.
# - Parsing gives either a complete AgentDefinition or a list of everything to correct.
# - An agent can only propose. A definition without a tool to propose, or with an unknown tool, is malformed.
# - Changing the status changes only `status` and `updated_at`. Every other byte of the owner's file stays.

TEMPERATURE_DEFAULT = 0.3
MAX_STEPS_DEFAULT = 5
MAX_STEPS_MAX = 20
MAX_SOURCES_DEFAULT = 10
MAX_SOURCES_MAX = 50
NAME_CHARS_MAX = 100
DESCRIPTION_CHARS_MAX = 1_000
SOURCES_FOLDER = "sources"
FILES_REMEMBERED = 128
"""Number of parsed files that a process caches, keyed by their bytes: at most 8 MiB."""

SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,99}")
_SEMVER = re.compile(
    r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})"
    r"(-(0|[1-9]\d{0,8}|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d{0,8}|\d*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
)
_FOLDER = re.compile(r"sources(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){0,5}")


class Tool(StrEnum):
    """The tools that an agent may have."""

    READ_CONTEXT = "read-context"
    READ_MEMORY = "read-memory"
    READ_MEMORY_DEEP = "read-memory-deep"
    NOTEBOOKLM_QUERY = "notebooklm-query"
    CREATE_PROPOSAL = "create-proposal"


SAFE_OUTPUT_TOOLS = frozenset({Tool.CREATE_PROPOSAL})
"""The tools with which an agent proposes. It needs at least one of them."""


class SafeOutput(StrEnum):
    """The actions that an agent may propose."""

    PROPOSE_EDIT = "propose-edit"
    PROPOSE_SUMMARY = "propose-summary"
    PROPOSE_TAG = "propose-tag"
    PROPOSE_ARTIFACT = "propose-artifact"
    PROPOSE_NOTE = "propose-note"
    PROPOSE_COMMENT = "propose-comment"
    MEMORY_UPDATE = "memory-update"
    LOGIC_UPDATE = "logic-update"


class AgentStatus(StrEnum):
    """The status of an agent. Only an active agent may run."""

    DRAFT = "draft"
    ACTIVE = "active"
    PAUSED = "paused"
    ERROR = "error"
    ARCHIVED = "archived"


STATUS_CHANGES: Mapping[AgentStatus, tuple[AgentStatus, ...]] = {
    AgentStatus.DRAFT: (AgentStatus.ACTIVE, AgentStatus.ARCHIVED),
    AgentStatus.ACTIVE: (AgentStatus.PAUSED, AgentStatus.ERROR, AgentStatus.ARCHIVED),
    AgentStatus.PAUSED: (AgentStatus.ACTIVE, AgentStatus.ARCHIVED),
    AgentStatus.ERROR: (AgentStatus.ACTIVE, AgentStatus.PAUSED, AgentStatus.ARCHIVED),
    AgentStatus.ARCHIVED: (),
}


class TriggerEvent(StrEnum):
    """Events that may start a run, besides manual and cron triggers."""

    INBOX_ITEM_CREATED = "inbox.item.created"
    PROPOSAL_APPLIED = "proposal.applied"


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggers:
    """What starts a run of an agent."""

    manual: bool = True
    cron: str | None = None
    events: tuple[TriggerEvent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextOptions:
    """What an agent reads first: the source folder (`sources` or one inside it), and how much of its memory."""

    folder: str = SOURCES_FOLDER
    max_sources: int = MAX_SOURCES_DEFAULT
    mode: ReadMode = ReadMode.BASIC


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentDefinition:
    """A valid `_agent.md`. `sha256` is of the file's bytes. Warnings do not prevent the agent from running."""

    name: str
    slug: str
    version: str
    description: str
    model: str
    tools: tuple[Tool, ...]
    safe_outputs: tuple[SafeOutput, ...]
    status: AgentStatus
    created_at: datetime
    updated_at: datetime
    created_by: str
    temperature: float
    max_steps: int
    triggers: Triggers
    context: ContextOptions
    instructions: str
    sha256: str
    warnings: tuple[FrontMatterProblem, ...] = ()

    @property
    def may_run(self) -> bool:
        """Whether a run may start, by any trigger."""
        return self.status is AgentStatus.ACTIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMalformed:
    """An invalid `_agent.md`, with everything to correct in it, in line order.

    `slug` is its folder, where known. `sha256` is None for a file that was not read.
    """

    slug: str | None
    problems: tuple[FrontMatterProblem, ...]
    sha256: str | None

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


def checked_slug(slug: str) -> str:
    """The slug; raises SlugInvalid. Only a valid slug may become part of a key."""
    if not SLUG.fullmatch(slug):
        raise SlugInvalid(slug=slug[:100])
    return slug


def read_definition(data: bytes, *, slug: str | None = None) -> AgentDefinition | AgentMalformed:
    """Parse the file. `slug` is the folder it is in: the file must name the same one.

    Results are cached by the file's bytes: parsing takes about 10 ms, and a gateway loads the agent with every request.
    """
    return _read(data, slug)


@lru_cache(maxsize=FILES_REMEMBERED)
def _read(data: bytes, slug: str | None) -> AgentDefinition | AgentMalformed:
    return _checked_definition(frontmatter.read(data), data, slug)


def may_change(source: AgentStatus, target: AgentStatus) -> bool:
    """Whether an agent may change from one status to the other. The same status is always allowed."""
    return source is target or target in STATUS_CHANGES[source]


def with_status(data: bytes, status: AgentStatus, *, at: datetime) -> bytes:
    """The file with another status and `updated_at`; every other byte stays. The same status changes nothing.

    Raises DefinitionMalformed and StatusChangeRefused.
    """
    front = frontmatter.read(data)
    before = _checked_definition(front, data, None)
    if isinstance(before, AgentMalformed):
        raise DefinitionMalformed(problems=before)
    if before.status is status:
        return data
    if not may_change(before.status, status):
        allowed = ", ".join(STATUS_CHANGES[before.status]) or "nothing: it is final"
        raise StatusChangeRefused(slug=before.slug, source=before.status, target=status, allowed=allowed)
    moment = _written_time(at)
    changed = _with_values_replaced(front, {"status": status.value, "updated_at": moment})
    after = read_definition(changed)
    stamp = datetime.fromisoformat(moment)
    expected = replace(before, status=status, updated_at=stamp, sha256=_digest(changed), warnings=())
    assert isinstance(after, AgentDefinition), after
    assert replace(after, warnings=()) == expected, "a change of status changed something else"
    return changed


# --- helpers ----------------------------------------------------------------------------------------------------------


def _checked_definition(front: FrontMatter, data: bytes, slug: str | None) -> AgentDefinition | AgentMalformed:
    problems = list(front.problems)
    if front.table is None:
        return AgentMalformed(slug=slug, problems=tuple(problems), sha256=_digest(data))
    form = FieldReader(front.table, problems, unread=front.unread)
    definition = _definition(form, front.body, _digest(data))
    form.close()
    if slug is not None and SLUG.fullmatch(definition.slug) and definition.slug != slug:
        wrong = f"{quoted_for_message(definition.slug)} lies in the folder of {quoted_for_message(slug)}"
        form.wrong("slug", form.line("slug"), wrong, "the name of its folder", slug)
    if problems:
        ordered = sorted(problems, key=lambda problem: problem.line)
        return AgentMalformed(slug=slug, problems=tuple(ordered[: frontmatter.PROBLEMS_MAX]), sha256=_digest(data))
    return replace(definition, warnings=_warnings(definition, form))


def _definition(form: FieldReader, instructions: str, sha256: str) -> AgentDefinition:
    """Read every field, in the order in which problems are reported."""
    return AgentDefinition(
        name=form.text("name", chars_max=NAME_CHARS_MAX),
        slug=form.matching("slug", SLUG, "lower-case letters, digits and hyphens, at most 63"),
        version=form.matching("version", _SEMVER, "a semantic version such as 1.0.0"),
        description=form.text("description", chars_max=DESCRIPTION_CHARS_MAX, lines=True).strip(),
        model=form.matching("model", _MODEL, "the name of a model such as offline"),
        tools=_tools(form),
        safe_outputs=form.choices("safe_outputs", SafeOutput),
        status=form.choice("status", AgentStatus),
        created_at=form.moment("created_at"),
        updated_at=form.moment("updated_at"),
        created_by=form.text("created_by", chars_max=NAME_CHARS_MAX),
        temperature=form.number("temperature", low=0.0, high=1.0, default=TEMPERATURE_DEFAULT),
        max_steps=form.whole("max_steps", low=1, high=MAX_STEPS_MAX, default=MAX_STEPS_DEFAULT),
        triggers=_triggers(form.form("triggers")),
        context=_context(form.form("context")),
        instructions=instructions,
        sha256=sha256,
    )


def _tools(form: FieldReader) -> tuple[Tool, ...]:
    tools = form.choices("tools", Tool)
    if tools and not SAFE_OUTPUT_TOOLS.intersection(tools):
        expected = f"{', '.join(sorted(SAFE_OUTPUT_TOOLS))} among the tools"
        form.wrong("tools", form.line("tools"), "the agent has no way to propose anything", expected)
    return tools


def _triggers(form: FieldReader) -> Triggers:
    manual = form.flag("manual", default=True)
    cron = form.optional_text("cron", CRON_EXPECTED)
    problem = cron_problem(cron[0]) if cron else None
    if cron and problem:
        form.wrong("cron", cron[1], f"{quoted_for_message(cron[0])}: {problem}", CRON_EXPECTED)
    events = form.choices("events", TriggerEvent, required=False)
    form.close()
    return Triggers(manual=manual, cron=" ".join(cron[0].split()) if cron else None, events=events)


def _context(form: FieldReader) -> ContextOptions:
    folder = form.optional_text("folder", "`sources` or a folder inside it")
    if folder and not _FOLDER.fullmatch(folder[0]):
        form.wrong(
            "folder", folder[1], f"{quoted_for_message(folder[0])} does not fit", "`sources` or a folder inside it"
        )
    max_sources = form.whole("max_sources", low=1, high=MAX_SOURCES_MAX, default=MAX_SOURCES_DEFAULT)
    mode = form.choice("mode", ReadMode, ReadMode.BASIC)
    form.close()
    return ContextOptions(folder=folder[0] if folder else SOURCES_FOLDER, max_sources=max_sources, mode=mode)


def _warnings(definition: AgentDefinition, form: FieldReader) -> tuple[FrontMatterProblem, ...]:
    found: list[FrontMatterProblem] = []
    if not definition.instructions:
        wrong = "there are no instructions below the front matter"
        found.append(
            FrontMatterProblem(line=1, field=None, wrong=wrong, expected="what the agent is to do, as Markdown")
        )
    if definition.updated_at < definition.created_at:
        line = form.line("updated_at")
        found.append(
            FrontMatterProblem(
                line=line, field="updated_at", wrong="it lies before created_at", expected="a later moment"
            )
        )
    return tuple(found)


def _with_values_replaced(front: FrontMatter, values: Mapping[str, str]) -> bytes:
    """The text with some one-line values replaced, from last to first so that positions stay valid."""
    assert front.table is not None
    places: list[tuple[Scalar, str]] = []
    for name, new in values.items():
        value = front.table.entries[name].value
        assert isinstance(value, Scalar)
        places.append((value, new))
    text = front.text
    for value, new in sorted(places, key=lambda place: place[0].start, reverse=True):
        quote = text[value.start] if text[value.start] in "'\"" else ""
        text = text[: value.start] + quote + new + quote + text[value.end :]
    return text.encode()


def _written_time(at: datetime) -> str:
    if at.tzinfo is None:
        raise ValueError("a moment without an offset")
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

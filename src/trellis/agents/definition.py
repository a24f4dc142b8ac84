"""Agent definitions: parses and validates the file `_agent.md`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache, partial
from typing import TypeVar, cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trellis.agents import frontmatter
from trellis.agents.errors import DefinitionMalformed, SlugInvalid, StatusChangeRefused
from trellis.agents.frontmatter import (
    NOTHING,
    TEXT,
    Field,
    FrontMatter,
    FrontMatterProblem,
    Scalar,
    fields_of,
    line_of,
    quoted_for_message,
    scalar_of,
)
from trellis.engine.cron import EXPECTED as CRON_EXPECTED
from trellis.engine.cron import cron_problem
from trellis.engine.jobs import TYPE_PATTERN
from trellis.storage.memory.layout import ReadMode
from trellis.storage.objects.canonical_json import sha256, timestamp

# Reading the fields of a front matter table.
#
# An invalid field becomes a problem and yields a placeholder, so that every field is checked in one pass. Callers must
# check `problems` before they use a value: a file with problems never yields a definition.

Choice = TypeVar("Choice", bound=StrEnum)
Item = TypeVar("Item")
Number = TypeVar("Number", int, float)

SUGGESTION_SIMILARITY_MIN = 0.7
"""Similarity (0 to 1) above which a known word is suggested for an unknown one."""
_NUMBERS = {int: re.compile(r"\d{1,9}"), float: re.compile(r"\d{1,9}(\.\d{1,9})?")}
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_STAND_IN_MOMENT = datetime(1970, 1, 1, tzinfo=UTC)


class FieldReader:
    """Reads the fields of one table. `within` is the path that leads to it, such as `triggers.`."""

    def __init__(
        self,
        fields: Mapping[str, Field],
        problems: list[FrontMatterProblem],
        *,
        unread: frozenset[str] = frozenset(),
        within: str = "",
    ) -> None:
        self._fields = fields
        self._problems = problems
        self._unread = unread
        self._within = within
        self._known: list[str] = []
        self._missing: dict[str, str] = {}

    def text(self, name: str, *, chars_max: int, lines: bool = False) -> str:
        """Text that is not blank, in one line unless `lines`."""
        expected = f"text of 1 to {chars_max} characters"
        value = self._scalar(name, expected, lines=lines)
        if value is None:
            return ""
        if value.kind != TEXT:
            self.wrong(name, value.line, f"{value.text} reads as {value.kind}", "text: put it in quotes")
        elif not value.text.strip() or len(value.text) > chars_max:
            self._unfit(name, value, expected)
        elif not lines and not value.text.isprintable():
            wrong = f"{quoted_for_message(value.text)} has a character without a shape"
            self.wrong(name, value.line, wrong, "plain text")
        return value.text

    def matching(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Text that matches a pattern. An unquoted number is checked as it is written."""
        value = self._scalar(name, expected)
        if value is None:
            return ""
        if value.kind == NOTHING or not pattern.fullmatch(value.text):
            self._unfit(name, value, expected)
        return value.text

    def choice(self, name: str, choices: type[Choice], default: Choice | None = None) -> Choice:
        """One value of an enumeration."""
        stand_in = default or next(iter(choices))
        if default is not None and name not in self._fields:
            self._known.append(name)
            return default
        value = self._scalar(name, f"one of {', '.join(choices)}")
        return stand_in if value is None else self._chosen(name, value, choices) or stand_in

    def choices(self, name: str, choices: type[Choice], *, required: bool = True) -> tuple[Choice, ...]:
        """Values of an enumeration, each at most once."""
        return self.items(name, lambda value: self._chosen(name, value, choices), tuple(choices), required=required)

    def items(
        self, name: str, read: Callable[[Scalar], Item | None], known: Sequence[str], *, required: bool = True
    ) -> tuple[Item, ...]:
        """The items of a list, each at most once.

        `read` returns an item, or reports a problem and returns None. `known` is what messages say the items may be.
        """
        expected = f"a list of {', '.join(known)}"
        field = self._field(name, expected, required=required)
        if field is None or (not required and _is_empty(field)):
            return ()
        if not isinstance(field.value, SequenceNode):
            self.wrong(name, field.line, "this is no list", f"{expected}, such as [{known[0]}]")
            return ()
        nodes = cast("list[Node]", field.value.value)
        if required and not nodes:
            self.wrong(name, field.line, "the list is empty", expected)
        items: list[Item] = []
        for node in nodes:
            if not isinstance(node, ScalarNode):
                self.wrong(name, line_of(node), "an item is no single word", f"one of {', '.join(known)}")
                continue
            value = scalar_of(node)
            item = read(value)
            if item in items:
                self.wrong(name, value.line, f"{quoted_for_message(value.text)} comes twice", "it once")
            elif item is not None:
                items.append(item)
        return tuple(items)

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
            self._unfit(name, value, f"{expected}, with Z or an offset")
            return _STAND_IN_MOMENT
        return moment

    def number(self, name: str, kind: type[Number], *, low: Number, high: Number, default: Number) -> Number:
        """A number between `low` and `high`."""
        expected = f"{'a whole number' if kind is int else 'a number'} from {low} to {high}"
        value = self._scalar(name, expected, required=False)
        if value is None:
            return default
        if not _NUMBERS[kind].fullmatch(value.text) or not low <= kind(value.text) <= high:
            self._unfit(name, value, expected)
            return default
        return kind(value.text)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._scalar(name, "true or false", required=False)
        if value is None:
            return default
        if value.text not in {"true", "false"}:
            hint = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.text.lower())
            self._unfit(name, value, "true or false", hint or _nearest_name(value.text.lower(), ("true", "false")))
        return value.text == "true"

    def optional_text(self, name: str, expected: str) -> Scalar | None:
        """A single value; None if the field is missing or empty."""
        value = self._scalar(name, expected, required=False)
        return None if value is None or value.kind == NOTHING else value

    def form(self, name: str) -> "FieldReader":
        """A reader for a nested table; empty if the field is missing."""
        field, path = self._field(name, "fields of its own", required=False), f"{self._within}{name}."
        if field is not None and isinstance(field.value, MappingNode):
            return FieldReader(fields_of(field.value, path, self._problems), self._problems, within=path)
        if field is not None and not _is_empty(field):
            self.wrong(name, field.line, "this is no table", "fields of its own, indented, one in each line")
        return FieldReader({}, self._problems, within=path)

    def close(self) -> None:
        """Report every field that was not requested as unknown, and every requested one that is absent as missing.

        An unknown name that resembles a missing one is reported as one problem, not two.
        """
        for name, field in self._fields.items():
            if name not in self._known:
                hint = _nearest_name(name.lower(), self._missing) or _nearest_name(name.lower(), self._known)
                self._missing.pop(hint or "", None)
                self.wrong(name, field.line, "there is no such field", f"one of {', '.join(self._known)}", hint)
        for name, expected in self._missing.items():
            self.wrong(name, 1, "the field is missing", expected)

    def wrong(self, name: str, line: int, wrong: str, expected: str, suggestion: str | None = None) -> None:
        """Report a problem of a field."""
        field = self._within + quoted_for_message(name).strip("'\"")
        self._problems.append(
            FrontMatterProblem(line=line, field=field, wrong=wrong, expected=expected, suggestion=suggestion)
        )

    def line(self, name: str) -> int:
        """The line of a field; 1 if it is missing."""
        field = self._fields.get(name)
        return field.line if field else 1

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _unfit(self, name: str, value: Scalar, expected: str, suggestion: str | None = None) -> None:
        self.wrong(name, value.line, f"{quoted_for_message(value.text)} does not fit", expected, suggestion)

    def _chosen(self, name: str, value: Scalar, choices: type[Choice]) -> Choice | None:
        if value.text in set(choices):
            return choices(value.text)
        hint = _nearest_name(value.text.lower(), tuple(choices))
        wrong = f"{quoted_for_message(value.text)} is not known"
        self.wrong(name, value.line, wrong, f"one of {', '.join(choices)}", hint)
        return None

    def _field(self, name: str, expected: str, *, required: bool = True) -> Field | None:
        self._known.append(name)
        field = self._fields.get(name)
        if field is None and required and name not in self._unread:
            self._missing[name] = expected
        return field

    def _scalar(self, name: str, expected: str, *, lines: bool = False, required: bool = True) -> Scalar | None:
        field = self._field(name, expected, required=required)
        if field is None:
            return None
        if not isinstance(field.value, ScalarNode):
            what = "a list" if isinstance(field.value, SequenceNode) else "a table"
            self.wrong(name, field.line, f"this is {what}", expected)
            return None
        value = scalar_of(field.value)
        if required and value.kind == NOTHING:
            self.wrong(name, field.line, "the field is empty", expected)
            return None
        if not lines and not value.in_one_line:
            self.wrong(name, field.line, "the value has several lines", f"{expected}, in one line")
            return None
        return value


def _is_empty(field: Field) -> bool:
    return isinstance(field.value, ScalarNode) and scalar_of(field.value).kind == NOTHING


def _nearest_name(word: str, known: Iterable[str]) -> str | None:
    wanted = word.strip().replace(" ", "-")
    return next(iter(get_close_matches(wanted, map(str, known), n=1, cutoff=SUGGESTION_SIMILARITY_MIN)), None)


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
SLUG_EXPECTED = "lower-case letters, digits and hyphens, at most 63"
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
    JOB_ENDED = "job.ended"
    RUN_COMPLETED = "run.completed"
    RUN_FAILED = "run.failed"
    SOURCE_CHANGED = "source.changed"


EVENT_TRIGGERS_MAX = 20
"""The most items of `triggers.events`."""
EVENT_TRIGGER_FORMS = (
    *("inbox.item.created", "inbox.item.created:ACTION", "proposal.applied"),
    *("job.ended:TYPE", "run.completed:AGENT", "run.failed:AGENT", "source.changed"),
)
"""What may stand in `triggers.events`, as messages show it."""
ENTRY_ACTIONS = ("run", "job", *sorted(one for one in SafeOutput if one.startswith("propose-")))
"""What an inbox entry may ask for (`intent.action`)."""


@dataclass(frozen=True, slots=True)
class EventTrigger:
    """An event that starts a run of an agent, written `event` or `event:of`.

    `of` narrows it: to inbox entries of an action, jobs of a type, or runs of another agent. None means all.
    """

    event: TriggerEvent
    of: str | None = None

    def __str__(self) -> str:
        return self.event.value if self.of is None else f"{self.event.value}:{self.of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggers:
    """What starts a run of an agent."""

    manual: bool = True
    cron: str | None = None
    events: tuple[EventTrigger, ...] = ()


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


@lru_cache(maxsize=FILES_REMEMBERED)
def read_definition(data: bytes, *, slug: str | None = None) -> AgentDefinition | AgentMalformed:
    """Parse the file. `slug` is the folder it is in: the file must name the same one.

    Results are cached by the file's bytes: parsing takes about 10 ms, and a gateway loads the agent with every request.
    """
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
    expected = replace(before, status=status, updated_at=stamp, sha256=sha256(changed), warnings=())
    assert isinstance(after, AgentDefinition), after
    assert replace(after, warnings=()) == expected, "a change of status changed something else"
    return changed


# --- helpers ----------------------------------------------------------------------------------------------------------


def _checked_definition(front: FrontMatter, data: bytes, slug: str | None) -> AgentDefinition | AgentMalformed:
    problems = list(front.problems)
    if front.fields is None:
        return AgentMalformed(slug=slug, problems=tuple(problems), sha256=sha256(data))
    form = FieldReader(front.fields, problems, unread=front.unread)
    definition = _definition(form, front.body, sha256(data))
    form.close()
    if slug is not None and SLUG.fullmatch(definition.slug) and definition.slug != slug:
        wrong = f"{quoted_for_message(definition.slug)} lies in the folder of {quoted_for_message(slug)}"
        form.wrong("slug", form.line("slug"), wrong, "the name of its folder", slug)
    if problems:
        ordered = sorted(problems, key=lambda problem: problem.line)
        return AgentMalformed(slug=slug, problems=tuple(ordered[: frontmatter.PROBLEMS_MAX]), sha256=sha256(data))
    return replace(definition, warnings=_warnings(definition, form))


def _definition(form: FieldReader, instructions: str, digest: str) -> AgentDefinition:
    """Read every field, in the order in which problems are reported."""
    name = form.text("name", chars_max=NAME_CHARS_MAX)
    slug = form.matching("slug", SLUG, SLUG_EXPECTED)
    return AgentDefinition(
        name=name,
        slug=slug,
        version=form.matching("version", _SEMVER, "a semantic version such as 1.0.0"),
        description=form.text("description", chars_max=DESCRIPTION_CHARS_MAX, lines=True).strip(),
        model=form.matching("model", _MODEL, "the name of a model such as offline"),
        tools=_tools(form),
        safe_outputs=form.choices("safe_outputs", SafeOutput),
        status=form.choice("status", AgentStatus),
        created_at=form.moment("created_at"),
        updated_at=form.moment("updated_at"),
        created_by=form.text("created_by", chars_max=NAME_CHARS_MAX),
        temperature=form.number("temperature", float, low=0.0, high=1.0, default=TEMPERATURE_DEFAULT),
        max_steps=form.number("max_steps", int, low=1, high=MAX_STEPS_MAX, default=MAX_STEPS_DEFAULT),
        triggers=_triggers(form.form("triggers"), slug),
        context=_context(form.form("context")),
        instructions=instructions,
        sha256=digest,
    )


def _tools(form: FieldReader) -> tuple[Tool, ...]:
    tools = form.choices("tools", Tool)
    if tools and not SAFE_OUTPUT_TOOLS.intersection(tools):
        expected = f"{', '.join(sorted(SAFE_OUTPUT_TOOLS))} among the tools"
        form.wrong("tools", form.line("tools"), "the agent has no way to propose anything", expected)
    return tools


def _triggers(form: FieldReader, slug: str) -> Triggers:
    manual = form.flag("manual", default=True)
    cron = form.optional_text("cron", CRON_EXPECTED)
    problem = cron_problem(cron.text) if cron else None
    if cron and problem:
        form.wrong("cron", cron.line, f"{quoted_for_message(cron.text)}: {problem}", CRON_EXPECTED)
    events = form.items("events", partial(_event_trigger, form, slug), EVENT_TRIGGER_FORMS, required=False)
    if len(events) > EVENT_TRIGGERS_MAX:
        form.wrong("events", form.line("events"), f"it has {len(events)} items", f"at most {EVENT_TRIGGERS_MAX}")
    form.close()
    return Triggers(manual=manual, cron=" ".join(cron.text.split()) if cron else None, events=events)


def _event_trigger(form: FieldReader, slug: str, value: Scalar) -> EventTrigger | None:
    """One item of `triggers.events` of the agent `slug`; None if it is wrong, which is reported."""
    word, colon, of = value.text.partition(":")
    known = set(TriggerEvent)
    if word not in known:
        hint = _nearest_name(word.lower(), known)
        wrong = f"{quoted_for_message(value.text)} is not known"
        suggestion = None if hint is None else f"{hint}{colon}{of}"
        form.wrong("events", value.line, wrong, f"one of {', '.join(EVENT_TRIGGER_FORMS)}", suggestion)
        return None
    trigger = EventTrigger(TriggerEvent(word), of if colon else None)
    expected = _event_trigger_problem(trigger, slug)
    if expected is not None:
        form.wrong("events", value.line, f"{quoted_for_message(value.text)} does not fit", expected)
        return None
    return trigger


def _event_trigger_problem(trigger: EventTrigger, slug: str) -> str | None:
    """What should stand there instead of an event trigger of the agent `slug`; None if it is right."""
    event, of = trigger.event, trigger.of
    if event in {TriggerEvent.PROPOSAL_APPLIED, TriggerEvent.SOURCE_CHANGED}:
        return None if of is None else f"{event.value} alone"
    if event is TriggerEvent.INBOX_ITEM_CREATED:
        fits = of is None or of in ENTRY_ACTIONS
        return None if fits else f"{event.value} alone, or followed by : and one of {', '.join(ENTRY_ACTIONS)}"
    if event is TriggerEvent.JOB_ENDED:
        fits = of is not None and re.fullmatch(TYPE_PATTERN, of)
        return None if fits else f"{event.value}:TYPE with the type of the jobs, such as {event.value}:import"
    if of == slug:
        return f"{event.value}: and the slug of another agent; the runs of an agent never start runs of itself"
    fits = of is not None and SLUG.fullmatch(of)
    return None if fits else f"{event.value}:AGENT with the slug of another agent ({SLUG_EXPECTED})"


def _context(form: FieldReader) -> ContextOptions:
    expected = "`sources` or a folder inside it"
    folder = form.optional_text("folder", expected)
    if folder and not _FOLDER.fullmatch(folder.text):
        form.wrong("folder", folder.line, f"{quoted_for_message(folder.text)} does not fit", expected)
    max_sources = form.number("max_sources", int, low=1, high=MAX_SOURCES_MAX, default=MAX_SOURCES_DEFAULT)
    mode = form.choice("mode", ReadMode, ReadMode.BASIC)
    form.close()
    return ContextOptions(folder=folder.text if folder else SOURCES_FOLDER, max_sources=max_sources, mode=mode)


def _warnings(definition: AgentDefinition, form: FieldReader) -> tuple[FrontMatterProblem, ...]:
    warnings: list[FrontMatterProblem] = []
    if not definition.instructions:
        wrong, expected = "there are no instructions below the front matter", "what the agent is to do, as Markdown"
        warnings.append(FrontMatterProblem(line=1, field=None, wrong=wrong, expected=expected))
    if definition.updated_at < definition.created_at:
        line, wrong = form.line("updated_at"), "it lies before created_at"
        warnings.append(FrontMatterProblem(line=line, field="updated_at", wrong=wrong, expected="a later moment"))
    return tuple(warnings)


def _with_values_replaced(front: FrontMatter, values: Mapping[str, str]) -> bytes:
    """The text with some one-line values replaced, from last to first so that positions stay valid."""
    places = [
        (scalar_of(field.value), values[name])
        for name, field in (front.fields or {}).items()
        if name in values and isinstance(field.value, ScalarNode)
    ]
    text = front.text
    for value, new in sorted(places, key=lambda place: place[0].start, reverse=True):
        quote = text[value.start] if text[value.start] in "'\"" else ""
        text = text[: value.start] + quote + new + quote + text[value.end :]
    return text.encode()


def _written_time(at: datetime) -> str:
    if at.tzinfo is None:
        raise ValueError("a moment without an offset")
    return timestamp(at)

"""Memory updates of a proposal, and the pure function that applies them or reports why it cannot.

`apply_updates` is deterministic: the same files, updates and time give the same result. It applies all updates or none,
and reports all problems at once. A proposal can change Layer 1, decisions.md and the notes of its own run.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from enum import StrEnum

from trellis.storage.memory import markdown
from trellis.storage.memory.layout import (
    LAYER_1,
    OPEN_LOOPS,
    RUNS,
    TokenCounter,
    checked_time,
    count_tokens,
    run_file,
    tokens_max,
)

UPDATES_MAX = 32
CONTENT_BYTES_MAX = 512 << 10
SECTION_CHARS_MAX = 200
RESOLUTION_CHARS_MAX = 2_000
CLOSED_LOOP_KEPT = timedelta(days=7)
"""A loop closed longer ago is removed with the next change of open_loops.md; git keeps it."""


class Operation(StrEnum):
    """What an update does to its file."""

    APPEND = "append"
    REPLACE = "replace"
    CLOSE = "close"


class ProblemCode(StrEnum):
    """Why updates cannot be applied."""

    TOO_MANY = "too_many"
    FILE_NOT_ALLOWED = "file_not_allowed"
    FIELD_MISSING = "field_missing"
    FIELD_UNEXPECTED = "field_unexpected"
    TOO_LARGE = "too_large"
    TEXT_UNSAFE = "text_unsafe"
    SECTION_MISSING = "section_missing"
    SECTION_AMBIGUOUS = "section_ambiguous"
    HEADING_TOO_HIGH = "heading_too_high"
    FENCE_OPEN = "fence_open"
    LOOP_MISSING = "loop_missing"
    LOOP_CLOSED = "loop_closed"
    LOOP_AMBIGUOUS = "loop_ambiguous"
    OVER_LIMIT = "over_limit"
    NOTHING_CHANGED = "nothing_changed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One change of one file. `append` and `replace` may name a section; `close` names a loop and its resolution."""

    file: str
    operation: Operation
    content: str = ""
    section: str | None = None
    loop_id: str | None = None
    resolution: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateProblem:
    """What is wrong and what to change. `update` is the update's index; None if it concerns all of them together."""

    code: ProblemCode
    detail: str
    file: str | None = None
    update: int | None = None

    def __str__(self) -> str:
        where = "" if self.update is None else f"update {self.update}: "
        return f"{where}{self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedUpdates:
    """Every file after the updates, and which of them changed."""

    files: Mapping[str, str]
    changed: tuple[str, ...]
    evicted: tuple[str, ...] = ()
    """Loops removed from open_loops.md because they were closed long ago."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedUpdates:
    """Nothing was applied."""

    problems: tuple[UpdateProblem, ...]


class _UpdateWrong(Exception):
    def __init__(self, code: ProblemCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def apply_updates(
    files: Mapping[str, str],
    updates: Sequence[Update],
    at: datetime,
    *,
    run_id: str | None = None,
    counter: TokenCounter = count_tokens,
) -> AppliedUpdates | RejectedUpdates:
    """The files after all updates, or all problems. With `run_id`, notes of other runs are refused."""
    if not 1 <= len(updates) <= UPDATES_MAX:
        detail = f"there are {len(updates)} updates; send 1 to {UPDATES_MAX}"
        return RejectedUpdates(problems=(UpdateProblem(code=ProblemCode.TOO_MANY, detail=detail),))
    if problems := [
        problem for number, update in enumerate(updates) for problem in _shape_problems(number, update, run_id)
    ]:
        return RejectedUpdates(problems=tuple(problems))
    after, today = dict(files), checked_time(at).date()
    for number, update in enumerate(updates):
        try:
            after[update.file] = _step(after.get(update.file, ""), update, today)
        except _UpdateWrong as wrong:
            problems.append(UpdateProblem(code=wrong.code, detail=wrong.detail, file=update.file, update=number))
    evicted = () if after.get(OPEN_LOOPS) == files.get(OPEN_LOOPS) else _evict_loops(after, today)
    changed = tuple(sorted(name for name in after if after[name] != files.get(name, "")))
    problems += [problem for name in changed for problem in _outcome(name, after[name], counter)]
    if not problems and not changed:
        detail = "the updates change nothing; there is nothing to propose"
        problems.append(UpdateProblem(code=ProblemCode.NOTHING_CHANGED, detail=detail))
    return (
        RejectedUpdates(problems=tuple(problems))
        if problems
        else AppliedUpdates(files=after, changed=changed, evicted=evicted)
    )


def digest(updates: Sequence[Update]) -> str:
    """Identifies a list of updates, to recognize a proposal that is applied again."""
    listed = json.dumps([asdict(update) for update in updates], sort_keys=True)
    return hashlib.sha256(listed.encode()).hexdigest()


# -- checks of a single update -----------------------------------------------------------------------------------


def _shape_problems(number: int, update: Update, run_id: str | None) -> list[UpdateProblem]:
    """Problems of an update that do not depend on the files' content."""
    checks = (_file_problem(update, run_id), *_field_problems(update), *_text_problems(update))
    return [
        UpdateProblem(code=check.code, detail=check.detail, file=update.file, update=number)
        for check in checks
        if check
    ]


def _file_problem(update: Update, run_id: str | None) -> _UpdateWrong | None:
    if tokens_max(update.file) is None:
        allowed = ", ".join([*LAYER_1, "decisions.md", f"{RUNS}/<run>.md"])
        return _UpdateWrong(
            ProblemCode.FILE_NOT_ALLOWED, f"{update.file!r} is no file a proposal may change; use {allowed}"
        )
    if run_id is not None and update.file.startswith(f"{RUNS}/") and update.file != run_file(run_id):
        return _UpdateWrong(
            ProblemCode.FILE_NOT_ALLOWED, f"{update.file} belongs to another run; use {run_file(run_id)}"
        )
    if update.operation is Operation.CLOSE and update.file != OPEN_LOOPS:
        return _UpdateWrong(ProblemCode.FILE_NOT_ALLOWED, f"close works on {OPEN_LOOPS} only")
    return None


def _field_problems(update: Update) -> list[_UpdateWrong]:
    closing = update.operation is Operation.CLOSE
    wanted = {"loop_id": closing, "resolution": closing}
    if not closing and update.operation is Operation.APPEND:
        wanted["content"] = True
    refused = ("content", "section") if closing else ("loop_id", "resolution")
    missing = [name for name, needed in wanted.items() if needed and not (getattr(update, name) or "").strip()]
    surplus = [name for name in refused if getattr(update, name)]
    return [
        *(_UpdateWrong(ProblemCode.FIELD_MISSING, f"{update.operation} needs {name}") for name in missing),
        *(_UpdateWrong(ProblemCode.FIELD_UNEXPECTED, f"{update.operation} takes no {name}") for name in surplus),
    ]


def _text_problems(update: Update) -> list[_UpdateWrong]:
    wrong: list[_UpdateWrong] = []
    for name, text in (
        ("content", _lf(update.content)),
        ("section", update.section),
        ("resolution", update.resolution),
    ):
        if text and (problem := markdown.problem_in(text)):
            wrong.append(_UpdateWrong(ProblemCode.TEXT_UNSAFE, f"the {name} cannot be kept: {problem}"))
    if wrong:
        return wrong
    sizes = (
        ("content", len(update.content.encode()), CONTENT_BYTES_MAX, "bytes"),
        ("section", len(update.section or ""), SECTION_CHARS_MAX, "characters"),
        ("resolution", len(update.resolution or ""), RESOLUTION_CHARS_MAX, "characters"),
    )
    for name, size, most, unit in sizes:
        if size > most:
            wrong.append(_UpdateWrong(ProblemCode.TOO_LARGE, f"the {name} has {size} {unit} and the limit is {most}"))
    if update.section is not None and markdown.section_title(update.section) is None:
        wrong.append(
            _UpdateWrong(ProblemCode.SECTION_MISSING, f"{update.section!r} cannot be a heading; use one line of text")
        )
    if update.loop_id and not markdown.LOOP_ID.fullmatch(update.loop_id):
        wrong.append(
            _UpdateWrong(ProblemCode.LOOP_MISSING, f"{update.loop_id!r} is no loop id; use letters, digits, '_.-'")
        )
    return wrong


# -- applying to the files ---------------------------------------------------------------------------------------


def _step(text: str, update: Update, today: date) -> str:
    """The text after one update; raises _UpdateWrong."""
    block = _lf(update.content)
    if update.operation is Operation.CLOSE:
        return _close(text, update.loop_id or "", " ".join((update.resolution or "").split()), today)
    if markdown.outline(block.split("\n")).open_fence is not None:
        raise _UpdateWrong(ProblemCode.FENCE_OPEN, "a code fence in the content is not closed")
    if update.section is None:
        return markdown.append(text, block) if update.operation is Operation.APPEND else _whole(block)
    return _in_section(text, update.section, block, update.operation)


def _in_section(text: str, title: str, block: str, operation: Operation) -> str:
    sections = markdown.sections(text, title)
    if len(sections) > 1:
        raise _UpdateWrong(
            ProblemCode.SECTION_AMBIGUOUS, f"{len(sections)} sections are called {title!r}; replace the whole file"
        )
    if not sections and operation is Operation.REPLACE:
        raise _UpdateWrong(
            ProblemCode.SECTION_MISSING, f"there is no section {title!r}; append it or replace the whole file"
        )
    level = sections[0].level if sections else 2
    highest = markdown.highest_level(block)
    if highest is not None and highest <= level:
        detail = (
            f"the content has a heading of level {highest} inside section {title!r} of level {level}; use lower ones"
        )
        raise _UpdateWrong(ProblemCode.HEADING_TOO_HIGH, detail)
    if not sections:
        return markdown.append(markdown.append(text, f"## {markdown.section_title(title)}"), block)
    if operation is Operation.APPEND:
        return markdown.append_to_section(text, sections[0], block)
    return markdown.replace_section(text, sections[0], block)


def _close(text: str, loop_id: str, resolution: str, today: date) -> str:
    named = [loop for loop in markdown.loops(text) if loop.loop_id == loop_id]
    opened = [loop for loop in named if not loop.closed]
    if not named:
        raise _UpdateWrong(
            ProblemCode.LOOP_MISSING, f"there is no loop {loop_id!r}; a loop is written `- [ ] {loop_id}: text`"
        )
    if not opened:
        raise _UpdateWrong(ProblemCode.LOOP_CLOSED, f"loop {loop_id!r} is closed already")
    if len(opened) > 1:
        raise _UpdateWrong(
            ProblemCode.LOOP_AMBIGUOUS, f"{len(opened)} open loops are called {loop_id!r}; replace the file"
        )
    return markdown.close_loop(text, opened[0], resolution, today)


def _evict_loops(files: dict[str, str], today: date) -> tuple[str, ...]:
    text = files.get(OPEN_LOOPS, "")
    old = [
        loop
        for loop in markdown.loops(text)
        if loop.closed and loop.closed_on is not None and today - loop.closed_on > CLOSED_LOOP_KEPT
    ]
    if old:
        files[OPEN_LOOPS] = markdown.without_loops(text, old)
    return tuple(loop.loop_id for loop in old)


def _outcome(name: str, text: str, counter: TokenCounter) -> list[UpdateProblem]:
    """Problems of a file after the updates."""
    problems: list[UpdateProblem] = []
    tokens, limit = counter(text), tokens_max(name)
    if limit is not None and tokens > limit:
        detail = f"{name} would have {tokens} tokens and the limit is {limit}; shorten it with replace"
        problems.append(UpdateProblem(code=ProblemCode.OVER_LIMIT, detail=detail, file=name))
    if name == OPEN_LOOPS:
        ids = Counter(loop.loop_id for loop in markdown.loops(text) if not loop.closed)
        if twice := sorted(loop_id for loop_id, times in ids.items() if times > 1):
            detail = f"{name} would have two open loops called {', '.join(twice[:5])}; give each its own id"
            problems.append(UpdateProblem(code=ProblemCode.LOOP_AMBIGUOUS, detail=detail, file=name))
    return problems


def _whole(block: str) -> str:
    body = block.strip("\n")
    return f"{body}\n" if body.strip() else ""


def _lf(text: str) -> str:
    return text.replace("\r\n", "\n")

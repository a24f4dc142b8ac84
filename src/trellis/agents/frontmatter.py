"""Parses the front matter of a Markdown file into values with their positions in the file.

Invariants:
- YAML is composed, never constructed: tags, anchors and aliases are refused; depth and number of values are bounded.
- Every value has its line and its position in the text, so that problems name the line and edits keep the rest.
- One mistake does not hide the next: if the whole cannot be parsed, each field is parsed alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import yaml
from yaml.composer import ComposerError
from yaml.error import MarkedYAMLError
from yaml.events import AliasEvent, NodeEvent, ScalarEvent
from yaml.nodes import MappingNode, Node, ScalarNode

FILE_BYTES_MAX = 64 * 1024
HEADER_CHARS_MAX = 16 * 1024
DEPTH_MAX = 4
VALUES_MAX = 1_000
FIELDS_ALONE_MAX = 100
"""Most fields that are parsed one by one if the whole cannot be parsed."""
PROBLEMS_MAX = 50
SHOWN_CHARS_MAX = 60
FIELD_EXPECTED = "`field: value`"
FIELD_LINES = "`field: value` lines"

_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"
_FENCE = re.compile(r"---[ ]*\r?\n")
_CLOSING_FENCE = re.compile(r"^---[ ]*\r?$", re.MULTILINE)
_LIKE_A_FENCE = re.compile("[-_=~\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}]+\\s*")
_FIELD_START = re.compile(r"^[^\s#\-\[\]{}&*!|>%@`][^\n]*?:(?=\s|$)", re.MULTILINE)
_NOT_A_LINE_END = re.compile(r"[^\n]")
_NAME = re.compile(r"^[ ]*([\w-]+)[ ]*:", re.MULTILINE)
_FORBIDDEN_CHARACTER = re.compile(
    # C0 and C1 controls except tab and line ends, a lone carriage return, further byte order marks, non-characters
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]|\r(?!\n)"
    # line separators that not every tool counts, and characters that hide or reorder text
    "|[\u2028\u2029\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontMatterProblem:
    """One thing to correct in a file."""

    line: int
    field: str | None
    wrong: str
    expected: str
    suggestion: str | None = None

    def __str__(self) -> str:
        place = f"line {self.line}" + (f", field {self.field}" if self.field else "")
        hint = f" (did you mean {self.suggestion!r}?)" if self.suggestion else ""
        return f"{place}: {self.wrong}; expected {self.expected}{hint}"


KINDS = {
    "tag:yaml.org,2002:str": "text",
    "tag:yaml.org,2002:int": "a whole number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:bool": "true or false",
    "tag:yaml.org,2002:timestamp": "a date",
    "tag:yaml.org,2002:null": "nothing",
}
"""The types that YAML gives an unquoted value, in the words of messages."""
TEXT, NOTHING = "text", "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A single value. `start` and `end` enclose it, with its quotes, in the text of the file."""

    line: int
    text: str
    kind: str
    start: int
    end: int
    in_one_line: bool


@dataclass(frozen=True, slots=True)
class Field:
    """A named value. `line` is that of the name."""

    line: int
    value: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontMatter:
    """A parsed file. `unread` names the fields that are there and could not be parsed."""

    text: str
    fields: dict[str, Field] | None
    unread: frozenset[str]
    body: str
    problems: tuple[FrontMatterProblem, ...]


def read(data: bytes) -> FrontMatter:
    """Parse front matter and body of a file, with every problem that does not depend on the meaning of the fields."""
    if len(data) > FILE_BYTES_MAX:
        return _unreadable("", 1, f"the file has {len(data)} bytes", f"at most {FILE_BYTES_MAX}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _unreadable("", 1, "the file is UTF-16", "UTF-8: save it again with that encoding")
    problems: list[FrontMatterProblem] = []
    text = _decoded(data, problems)
    opening = _FENCE.match(text, 1 if text.startswith(_BOM) else 0)
    if opening is None:
        return _without_fence(text, problems)
    closing = _CLOSING_FENCE.search(text, opening.end())
    if closing is None:
        line = text.count("\n") + 1
        return _unreadable(text, line, "the front matter has no end", "a line `---` after its last field", problems)
    start, end = opening.end(), closing.start()
    body = text[closing.end() :].replace("\r\n", "\n").strip()
    if end - start > HEADER_CHARS_MAX:
        wrong = f"the front matter has {end - start} characters"
        return _unreadable(text, 1, wrong, f"at most {HEADER_CHARS_MAX}; instructions belong below it", problems)
    fields, unread = _parsed(_without_tabs(text[:end], problems), start, end, problems)
    problems.sort(key=lambda problem: problem.line)
    return FrontMatter(text=text, fields=fields, unread=unread, body=body, problems=tuple(problems[:PROBLEMS_MAX]))


def fields_of(table: MappingNode, path: str, problems: list[FrontMatterProblem]) -> dict[str, Field]:
    """The named values of a table, each name once. `path` leads to the table, such as `triggers.`."""
    fields: dict[str, Field] = {}
    for key, value in cast("list[tuple[Node, Node]]", table.value):
        line = line_of(key)
        if not isinstance(key, ScalarNode):
            problems.append(_problem(line, path.rstrip(".") or None, "a field has no plain name", FIELD_EXPECTED))
        elif (name := cast("str", key.value)) in fields:
            problems.append(_twice(path + name, line, fields[name].line))
        else:
            fields[name] = Field(line, value)
    return fields


def scalar_of(node: ScalarNode) -> Scalar:
    """A single value with its position."""
    return Scalar(
        line=line_of(node),
        text=cast("str", node.value),
        kind=KINDS.get(node.tag, "something else"),
        start=node.start_mark.index,
        end=node.end_mark.index,
        in_one_line=node.style not in {"|", ">"} and node.start_mark.line == node.end_mark.line,
    )


def line_of(node: Node) -> int:
    """The line of the file on which a value begins."""
    return node.start_mark.line + 1


def quoted_for_message(text: str) -> str:
    """A value for use in a message: quoted, escaped and shortened."""
    return repr(text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…")


# --- bytes to lines --------------------------------------------------------------------------------------------------


def _unreadable(
    text: str,
    line: int,
    wrong: str,
    expected: str,
    problems: Sequence[FrontMatterProblem] = (),
    hint: str | None = None,
) -> FrontMatter:
    reported = (_problem(line, None, wrong, expected, hint), *problems)[:PROBLEMS_MAX]
    ordered = tuple(sorted(reported, key=lambda problem: problem.line))
    return FrontMatter(text=text, fields=None, unread=frozenset(), body="", problems=ordered)


def _without_fence(text: str, problems: list[FrontMatterProblem]) -> FrontMatter:
    first = text.removeprefix(_BOM).split("\n", 1)[0].rstrip("\r")
    hint = "---" if _LIKE_A_FENCE.fullmatch(first) and first.strip() != "---" else None
    wrong = (
        f"the file begins with {quoted_for_message(first)}" if first else "the file does not begin with front matter"
    )
    return _unreadable(text, 1, wrong, "a first line `---`, then `field: value` lines, then `---`", problems, hint)


def _decoded(data: bytes, problems: list[FrontMatterProblem]) -> str:
    """The text, with a replacement of the same length for each forbidden character."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(_problem(line, None, f"byte {error.start} is not UTF-8", "a file in UTF-8"))
        text = data.decode(errors="replace")
    for unfit in _FORBIDDEN_CHARACTER.finditer(text, 1 if text.startswith(_BOM) else 0):
        line = text.count("\n", 0, unfit.start()) + 1
        wrong = f"the character U+{ord(unfit[0]):04X} is there"
        problems.append(_problem(line, None, wrong, "text without control characters"))
        if len(problems) >= PROBLEMS_MAX:
            break
    head = text[:1] if text.startswith(_BOM) else ""
    return head + _FORBIDDEN_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", text[len(head) :])


def _without_tabs(text: str, problems: list[FrontMatterProblem]) -> str:
    for number, line in enumerate(text.split("\n"), 1):
        if "\t" in line and len(problems) < PROBLEMS_MAX:
            problems.append(_problem(number, None, "the line has a tab", "spaces"))
    return text.replace("\t", " ")


def _problem(line: int, field: str | None, wrong: str, expected: str, hint: str | None = None) -> FrontMatterProblem:
    return FrontMatterProblem(line=line, field=field, wrong=wrong, expected=expected, suggestion=hint)


def _twice(field: str, line: int, first_line: int) -> FrontMatterProblem:
    return _problem(line, field, f"the field comes twice, first in line {first_line}", "it once")


# --- lines to values -------------------------------------------------------------------------------------------------


class _Composer(yaml.SafeLoader):
    """The safe loader, up to its nodes. Refuses tags, anchors, aliases and excessive size."""

    depth = 0
    values = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = cast("NodeEvent", self.peek_event())  # pyright: ignore[reportUnknownMemberType]
        self.values += 1
        if isinstance(event, AliasEvent) or event.anchor is not None:
            raise _refusal(event, "an anchor or alias (& or *)")
        if getattr(event, "tag", None) is not None:
            raise _refusal(event, "a tag (!)")
        if self.values > VALUES_MAX:
            raise _refusal(event, f"more than {VALUES_MAX} values")
        if self.depth >= DEPTH_MAX and not isinstance(event, ScalarEvent):
            raise _refusal(event, f"nesting deeper than {DEPTH_MAX}")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refusal(event: NodeEvent, what: str) -> ComposerError:
    return ComposerError(None, None, f"{what} is not taken here", event.start_mark)


def _parsed(
    text: str, start: int, end: int, problems: list[FrontMatterProblem]
) -> tuple[dict[str, Field] | None, frozenset[str]]:
    """The fields between two positions of the text, and the names of those that could not be parsed."""
    # What comes before is blanked and not cut off, so that the parser's positions are those of the file.
    try:
        node = _Composer(_NOT_A_LINE_END.sub(" ", text[:start]) + text[start:end].rstrip("\r\n")).get_single_node()
    except MarkedYAMLError as error:
        return _parsed_piecewise(text, start, end, problems, error)
    if isinstance(node, MappingNode):
        return fields_of(node, "", problems), frozenset()
    if node is None:
        problems.append(_problem(text.count("\n", 0, start) + 1, None, "the front matter is empty", FIELD_LINES))
    else:
        problems.append(_problem(line_of(node), None, "the front matter has no fields", FIELD_LINES))
    return None, frozenset()


def _parsed_piecewise(
    text: str, start: int, end: int, problems: list[FrontMatterProblem], error: MarkedYAMLError
) -> tuple[dict[str, Field] | None, frozenset[str]]:
    """Parse each field alone, so that an invalid one does not hide the others."""
    header = text[start:end]
    begins = [start + start_match.start() for start_match in _FIELD_START.finditer(header)]
    if not 1 < len(begins) <= FIELDS_ALONE_MAX:
        problems.append(_syntax_problem(text, start, header, error))
        return {}, frozenset(_NAME.findall(header))
    fields: dict[str, Field] = {}
    unread: set[str] = set()
    before = len(problems)
    for first, last in pairwise([start, *begins[1:], end]):
        piece, lost = _parsed(text, first, last, problems)
        unread.update(lost)
        for name, field in (piece or {}).items():
            if name in fields:
                problems.append(_twice(name, field.line, fields[name].line))
            else:
                fields[name] = field
    if len(problems) == before:
        problems.append(_syntax_problem(text, start, header, error))
    return fields, frozenset(unread)


def _syntax_problem(text: str, start: int, header: str, error: MarkedYAMLError) -> FrontMatterProblem:
    mark = error.problem_mark or error.context_mark
    field_start = _FIELD_START.match(header)
    field = field_start[0].rstrip(":").strip(" '\"") if field_start else None
    wrong = (error.problem or "this is no YAML").replace("\n", " ")
    line = mark.line + 1 if mark else text.count("\n", 0, start) + 1
    return _problem(line, field, wrong, _EXPECTED_INSTEAD.get(wrong, FIELD_EXPECTED))


# The parser's message -> what a person should write.
_EXPECTED_INSTEAD = {
    "mapping values are not allowed here": "quotes around a value that has a colon in it",
    "could not find expected ':'": "`field: value`, with a space after the colon",
    "found unexpected end of stream": "the closing quote or bracket",
    "found unexpected document separator": "the closing quote or bracket",
    "expected ',' or ']', but got '<stream end>'": "the closing bracket `]`",
    "expected ',' or '}', but got '<stream end>'": "the closing brace `}`",
    "expected <block end>, but found '?'": "fields that begin in the same column",
    "expected <block end>, but found '<block mapping start>'": "fields that begin in the same column",
    "expected <block end>, but found '<scalar>'": "one value; put quotes around the whole of it",
}

"""Parses the front matter of a Markdown file into values with their positions in the file.

Invariants:
- YAML is composed, never constructed: tags, anchors and aliases are refused; depth and number of values are bounded.
- Every value has its line and its position in the text, so that problems name the line and edits keep the rest.
- One mistake does not hide the next: if the whole cannot be parsed, each field is parsed alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import yaml
from yaml.composer import ComposerError
from yaml.error import Mark, MarkedYAMLError
from yaml.events import AliasEvent, NodeEvent, ScalarEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

FILE_BYTES_MAX = 64 * 1024
HEADER_CHARS_MAX = 16 * 1024
DEPTH_MAX = 4
VALUES_MAX = 1_000
FIELDS_ALONE_MAX = 100
"""Most fields that are parsed one by one if the whole cannot be parsed."""
PROBLEMS_MAX = 50
SHOWN_CHARS_MAX = 60

_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"
_FENCE = re.compile(r"---[ ]*\r?\n")
_CLOSING_FENCE = re.compile(r"^---[ ]*\r?$", re.MULTILINE)
_LIKE_A_FENCE = re.compile("[-_=~\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}]+\\s*")
_FIELD_START = re.compile(r"^[^\s#\-\[\]{}&*!|>%@`][^\n]*?:(?=\s|$)", re.MULTILINE)
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


class ScalarKind(StrEnum):
    """The type that YAML gives an unquoted value."""

    TEXT = "text"
    INTEGER = "a whole number"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    MOMENT = "a date"
    NOTHING = "nothing"
    OTHER = "something else"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A single value. `start` and `end` enclose it, with its quotes, in the text of the file."""

    line: int
    text: str
    kind: ScalarKind
    start: int
    end: int
    in_one_line: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ListValue:
    """A list."""

    line: int
    items: tuple["Value", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableValue:
    """Named values, each name once."""

    line: int
    entries: dict[str, "TableEntry"]


Value = Scalar | ListValue | TableValue


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """A named value. `line` is that of the name."""

    line: int
    value: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontMatter:
    """A parsed file. `unread` names the fields that are there and could not be parsed."""

    text: str
    table: TableValue | None
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
    header = text[opening.end() : closing.start()]
    body = text[closing.end() :].replace("\r\n", "\n").strip()
    if len(header) > HEADER_CHARS_MAX:
        wrong = f"the front matter has {len(header)} characters"
        return _unreadable(text, 1, wrong, f"at most {HEADER_CHARS_MAX}; instructions belong below it", problems)
    source = _HeaderParser(_without_tabs(header, problems), first_line=2, offset=opening.end(), problems=problems)
    table, unread = source.table()
    problems.sort(key=lambda problem: problem.line)
    return FrontMatter(text=text, table=table, unread=unread, body=body, problems=tuple(problems[:PROBLEMS_MAX]))


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
    problem = FrontMatterProblem(line=line, field=None, wrong=wrong, expected=expected, suggestion=hint)
    found = (problem, *problems)[:PROBLEMS_MAX]
    ordered = tuple(sorted(found, key=lambda problem: problem.line))
    return FrontMatter(text=text, table=None, unread=frozenset(), body="", problems=ordered)


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
        wrong = f"byte {error.start} is not UTF-8"
        problems.append(FrontMatterProblem(line=line, field=None, wrong=wrong, expected="a file in UTF-8"))
        text = data.decode(errors="replace")
    for unfit in _FORBIDDEN_CHARACTER.finditer(text, 1 if text.startswith(_BOM) else 0):
        line = text.count("\n", 0, unfit.start()) + 1
        wrong = f"the character U+{ord(unfit[0]):04X} is there"
        problems.append(
            FrontMatterProblem(line=line, field=None, wrong=wrong, expected="text without control characters")
        )
        if len(problems) >= PROBLEMS_MAX:
            break
    head = text[:1] if text.startswith(_BOM) else ""
    return head + _FORBIDDEN_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", text[len(head) :])


def _without_tabs(header: str, problems: list[FrontMatterProblem]) -> str:
    for number, line in enumerate(header.split("\n"), 2):
        if "\t" in line and len(problems) < PROBLEMS_MAX:
            problems.append(FrontMatterProblem(line=number, field=None, wrong="the line has a tab", expected="spaces"))
    return header.replace("\t", " ")


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


@dataclass(frozen=True, slots=True)
class _HeaderParser:
    """A part of the header, with its position in the file."""

    header: str
    first_line: int
    offset: int
    problems: list[FrontMatterProblem]

    def table(self) -> tuple[TableValue | None, frozenset[str]]:
        """The fields, and the names of those that could not be parsed."""
        try:
            node = _composed(self.header)
        except MarkedYAMLError as error:
            return self._piecewise(error)
        if node is None:
            self._problem(self.first_line, None, "the front matter is empty", "`field: value` lines")
            return None, frozenset()
        if not isinstance(node, MappingNode):
            self._problem(self._line(node.start_mark), None, "the front matter has no fields", "`field: value` lines")
            return None, frozenset()
        return self._table(node, ""), frozenset()

    def _piecewise(self, error: MarkedYAMLError) -> tuple[TableValue | None, frozenset[str]]:
        """Parse each field alone, so that an invalid one does not hide the others."""
        starts = [found.start() for found in _FIELD_START.finditer(self.header)]
        if not 1 < len(starts) <= FIELDS_ALONE_MAX:
            self._syntax(error)
            return TableValue(line=self.first_line, entries={}), frozenset(_NAME.findall(self.header))
        entries: dict[str, TableEntry] = {}
        unread: set[str] = set()
        before = len(self.problems)
        for start, end in zip([0, *starts[1:]], [*starts[1:], len(self.header)], strict=True):
            piece = _HeaderParser(
                self.header[start:end].rstrip("\r\n"),
                self.first_line + self.header.count("\n", 0, start),
                self.offset + start,
                self.problems,
            )
            table, lost = piece.table()
            unread.update(lost)
            for key, entry in (table.entries if table else {}).items():
                if key in entries:
                    self._twice(key, entry.line, entries[key].line)
                else:
                    entries[key] = entry
        if len(self.problems) == before:
            self._syntax(error)
        return TableValue(line=self.first_line, entries=entries), frozenset(unread)

    def _syntax(self, error: MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        line = self._line(mark) if mark else self.first_line
        found = _FIELD_START.match(self.header)
        field = found[0].rstrip(":").strip(" '\"") if found else None
        wrong = (error.problem or "this is no YAML").replace("\n", " ")
        self._problem(line, field, wrong, _EXPECTED_INSTEAD.get(wrong, "`field: value`"))

    def _value(self, node: Node, path: str) -> Value:
        if isinstance(node, ScalarNode):
            return Scalar(
                line=self._line(node.start_mark),
                text=cast("str", node.value),
                kind=_KINDS.get(node.tag, ScalarKind.OTHER),
                start=self.offset + node.start_mark.index,
                end=self.offset + node.end_mark.index,
                in_one_line=node.style not in {"|", ">"} and node.start_mark.line == node.end_mark.line,
            )
        if isinstance(node, SequenceNode):
            items = cast("list[Node]", node.value)
            return ListValue(line=self._line(node.start_mark), items=tuple(self._value(item, path) for item in items))
        return self._table(cast("MappingNode", node), path)

    def _table(self, node: MappingNode, path: str) -> TableValue:
        entries: dict[str, TableEntry] = {}
        for key, value in cast("list[tuple[Node, Node]]", node.value):
            line = self._line(key.start_mark)
            if not isinstance(key, ScalarNode):
                self._problem(line, path.rstrip(".") or None, "a field has no plain name", "`field: value`")
                continue
            name = cast("str", key.value)
            if name in entries:
                self._twice(path + name, line, entries[name].line)
            else:
                entries[name] = TableEntry(line=line, value=self._value(value, f"{path}{name}."))
        return TableValue(line=self._line(node.start_mark), entries=entries)

    def _twice(self, field: str, line: int, first_line: int) -> None:
        self._problem(line, field, f"the field comes twice, first in line {first_line}", "it once")

    def _problem(self, line: int, field: str | None, wrong: str, expected: str) -> None:
        self.problems.append(FrontMatterProblem(line=line, field=field, wrong=wrong, expected=expected))

    def _line(self, mark: Mark) -> int:
        return self.first_line + mark.line


def _composed(header: str) -> Node | None:
    return _Composer(header).get_single_node()


_KINDS = {
    "tag:yaml.org,2002:str": ScalarKind.TEXT,
    "tag:yaml.org,2002:int": ScalarKind.INTEGER,
    "tag:yaml.org,2002:float": ScalarKind.NUMBER,
    "tag:yaml.org,2002:bool": ScalarKind.BOOLEAN,
    "tag:yaml.org,2002:timestamp": ScalarKind.MOMENT,
    "tag:yaml.org,2002:null": ScalarKind.NOTHING,
}

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

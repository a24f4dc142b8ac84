"""The blocks of a Markdown text: which lines are a heading, a paragraph, a list, a table or code.

Only what matters for finding and citing is told apart. Every block has spans of the text in rising order: one for a
paragraph or a piece of code, one for each item of a list and each row of a table. Sources come from anywhere, so no
pattern here takes more than a time that grows with the line's length.
"""

# ruff: noqa: RUF001 - marks of lists as people type them

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

HEADING_CHARS_MAX = 200
FRONT_MATTER_LINES_MAX = 200

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(\S.*)$")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$")
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,})")
_ITEM = re.compile(r"[ \t]*(?:[-*+•‣–]|\d{1,4}[.)])[ \t]+(?:\[[ xX]\][ \t]+)?(?=\S)")
_DELIMITER = re.compile(r"[ \t]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*+$")
_UNREAD = re.compile(r"[ \t]*(?:<!--.*-->[ \t]*$|\[[^\]]+\]:[ \t]+\S+)")
_QUOTED = re.compile(r"(?: {0,3}>[ \t]?)++")


class BlockKind(StrEnum):
    """What a block is."""

    PARAGRAPH = "paragraph"
    LIST = "list"
    TABLE = "table"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Block:
    """Spans of the text under a path of headings; `header` is the first row of a table, `(0, 0)` elsewhere."""

    kind: BlockKind
    headings: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    header: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    end: int
    text: str
    """Without the line's end and without the mark of a quotation."""

    @property
    def blank(self) -> bool:
        return not self.text or self.text.isspace()


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a text, in its order."""
    lines = list(_lines(text))
    path = _Path()
    at = _front_matter(lines)
    if at > 2:
        yield Block(BlockKind.LIST, (), tuple((line.start, line.end) for line in lines[1 : at - 1] if not line.blank))
    while at < len(lines):
        line = lines[at]
        if heading := _HEADING.match(line.text):
            path.enter(len(heading[1]), heading[2].rstrip().rstrip("#").rstrip())
            at += 1
        elif line.blank or _RULE.match(line.text) or _UNREAD.match(line.text):
            at += 1
        else:
            block, after = _block(lines, at, path)
            at = after
            if block is not None:
                yield block


class _Path:
    """The headings above a line."""

    def __init__(self) -> None:
        self._levels: list[tuple[int, str]] = []

    def enter(self, level: int, title: str) -> None:
        self._levels = [entry for entry in self._levels if entry[0] < level]
        if title:
            self._levels.append((level, title[:HEADING_CHARS_MAX]))

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(title for _, title in self._levels)


def _block(lines: list[_Line], at: int, path: _Path) -> tuple[Block | None, int]:
    """The block that begins at a line, and the line after it."""
    if fence := _FENCE.match(lines[at].text):
        return _code(lines, at, fence["mark"], path.titles)
    if _begins_table(lines, at):
        return _table(lines, at, path.titles)
    if _ITEM.match(lines[at].text):
        return _list(lines, at, path.titles)
    after = _paragraph_end(lines, at)
    if after == at + 1 and after < len(lines) and (underline := _UNDERLINE.match(lines[after].text)):
        path.enter(1 if underline[1][0] == "=" else 2, lines[at].text.strip())
        return None, after + 1
    return Block(BlockKind.PARAGRAPH, path.titles, ((lines[at].start, lines[after - 1].end),)), after


def _code(lines: list[_Line], at: int, mark: str, titles: tuple[str, ...]) -> tuple[Block | None, int]:
    inside = at + 1
    while inside < len(lines) and not lines[inside].text.strip().startswith(mark):
        inside += 1
    spans = ((lines[at + 1].start, lines[inside - 1].end),) if inside > at + 1 else ()
    return Block(BlockKind.CODE, titles, spans) if spans else None, inside + 1


def _begins_table(lines: list[_Line], at: int) -> bool:
    after = lines[at + 1].text if at + 1 < len(lines) else ""
    return "|" in lines[at].text and "|" in after and _DELIMITER.match(after) is not None


def _table(lines: list[_Line], at: int, titles: tuple[str, ...]) -> tuple[Block | None, int]:
    after = at + 2
    while after < len(lines) and "|" in lines[after].text:
        after += 1
    rows = tuple((line.start, line.end) for line in lines[at + 2 : after])
    header = lines[at]
    # A table without rows still says what its header says.
    spans, top = (rows, (header.start, header.end)) if rows else (((header.start, header.end),), (0, 0))
    return Block(BlockKind.TABLE, titles, spans, top), after


def _list(lines: list[_Line], at: int, titles: tuple[str, ...]) -> tuple[Block, int]:
    spans: list[tuple[int, int]] = []
    while at < len(lines) and (item := _ITEM.match(lines[at].text)):
        start = lines[at].start + item.end()
        after = at + 1
        while after < len(lines) and not _ends_item(lines, after):
            after += 1
        spans.append((start, lines[after - 1].end))
        at = after
        if at + 1 < len(lines) and lines[at].blank and _ITEM.match(lines[at + 1].text):
            at += 1
    return Block(BlockKind.LIST, titles, tuple(spans)), at


def _ends_item(lines: list[_Line], at: int) -> bool:
    return _ends_paragraph(lines, at) or _ITEM.match(lines[at].text) is not None


def _paragraph_end(lines: list[_Line], at: int) -> int:
    after = at + 1
    while after < len(lines) and not _ends_paragraph(lines, after) and not _ITEM.match(lines[after].text):
        after += 1
    return after


def _ends_paragraph(lines: list[_Line], at: int) -> bool:
    line = lines[at].text
    return (
        lines[at].blank
        or any(pattern.match(line) for pattern in (_HEADING, _FENCE, _RULE, _UNREAD, _UNDERLINE))
        or _begins_table(lines, at)
    )


def _front_matter(lines: list[_Line]) -> int:
    """The line after the front matter, 0 when there is none."""
    if not lines or lines[0].text.rstrip() != "---":
        return 0
    for at in range(1, min(len(lines), FRONT_MATTER_LINES_MAX)):
        if lines[at].text.rstrip() in {"---", "..."}:
            return at + 1
    return 0


def _lines(text: str) -> Iterator[_Line]:
    start = 0
    for raw in text.splitlines(keepends=True):
        whole = raw.rstrip("\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")
        quoted = _QUOTED.match(whole)
        inner = whole[quoted.end() :] if quoted else whole
        end = start + len(whole)
        yield _Line(end - len(inner), end, inner)
        start += len(raw)

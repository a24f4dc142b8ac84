"""The part of Markdown that memory needs: sections, code fences, open loops, and text that is not allowed.

Lines end in LF: `problem_in` refuses every other line break, so that every tool counts the same lines. All functions
are pure. The content of a code fence is never taken for a heading or a loop.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

FENCE = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})(?P<rest>.*)")
HEADING = re.compile(r" {0,3}(?P<marks>#{1,6})[ \t]+(?P<title>[^ \t].*?)(?:[ \t]+#+)?[ \t]*")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s")
TABLE_ROW = re.compile(r"\s*\|")
LOOP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ID = LOOP_ID.pattern
LOOP = re.compile(rf"[-*] \[(?P<mark>[ xX])\] (?:`(?P<a>{_ID})`|\*\*(?P<b>{_ID}):?\*\*|(?P<c>{_ID})(?=:)):?(?=\s|$)")
CLOSED = re.compile(r"\s+Closed (?P<day>\d{4}-\d{2}-\d{2}): ")

# Line breaks other than LF, other control characters, direction overrides and invisible characters: a reviewer must see
# exactly what the agent will read.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]")
ACTIVE = re.compile(
    r"<\s*/?\s*(?:script|iframe|frame|frameset|object|embed|applet|style|link|meta|base|form|svg|math|template)\b"
    r"|<!--|<[a-z][^<>]*\son[a-z]+\s*=|\b(?:java|vb)script\s*:|\bdata\s*:\s*text/html",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading: its line, its level and its text."""

    line: int
    level: int
    title: str


@dataclass(frozen=True, slots=True)
class Outline:
    """The positions of headings and code."""

    headings: tuple[Heading, ...]
    code_lines: frozenset[int]
    open_fence: int | None
    """The line of a code fence that is never closed."""


@dataclass(frozen=True, slots=True)
class Loop:
    """An open loop: `- [ ] id: text` with the indented lines under it; `[x]` if it is closed."""

    loop_id: str
    start: int
    end: int
    closed: bool
    closed_on: date | None


def problem_in(text: str) -> str | None:
    """Why this text is not allowed; None if it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it holds half a surrogate pair, which is no character"
    if unseen := UNSEEN.search(text):
        return f"it holds the control or invisible character U+{ord(unseen[0]):04X} in line {_line(text, unseen)}"
    if active := ACTIVE.search(text):
        return (
            f"it holds active or hidden HTML ({active[0][:20]!r} in line {_line(text, active)}); write plain Markdown"
        )
    return None


def outline(lines: Sequence[str]) -> Outline:
    """The headings and code of a text."""
    headings: list[Heading] = []
    code: set[int] = set()
    fence: str | None = None
    opened: int | None = None
    for number, line in enumerate(lines):
        fence_match = FENCE.fullmatch(line)
        if fence is not None:
            code.add(number)
            if fence_match and fence_match["fence"].startswith(fence) and not fence_match["rest"].strip():
                fence = opened = None
        elif fence_match and not (fence_match["fence"][0] == "`" and "`" in fence_match["rest"]):
            code.add(number)
            fence, opened = fence_match["fence"], number
        elif heading := HEADING.fullmatch(line):
            headings.append(Heading(number, len(heading["marks"]), heading["title"]))
    return Outline(tuple(headings), frozenset(code), opened)


def sections(text: str, title: str) -> list[Heading]:
    """The headings with this title. `## Title` and `Title` are equivalent."""
    wanted = title.strip().lstrip("#").strip()
    return [heading for heading in outline(text.split("\n")).headings if heading.title == wanted]


def section_title(title: str) -> str | None:
    """The title as it would appear in a heading; None if it cannot be one."""
    wanted = title.strip().lstrip("#").strip()
    matched = HEADING.fullmatch(f"## {wanted}")
    return wanted if matched and matched["title"] == wanted and "\n" not in wanted else None


def highest_level(text: str) -> int | None:
    """The level of the highest heading in a text; None if there is none."""
    return min((heading.level for heading in outline(text.split("\n")).headings), default=None)


def append(text: str, block: str) -> str:
    """The text with a block added at its end. A list or table continues; anything else starts after a blank line."""
    before, block = text.rstrip("\n"), block.strip("\n")
    if not before:
        return f"{block}\n"
    last, first = before.rsplit("\n", 1)[-1], block.split("\n", 1)[0]
    goes_on = any(pattern.match(last) and pattern.match(first) for pattern in (LIST_ITEM, TABLE_ROW))
    return f"{before}\n{'' if goes_on else chr(10)}{block}\n"


def append_to_section(text: str, section: Heading, block: str) -> str:
    """The text with a block added at the end of a section's own text, before its subsections."""
    lines = text.split("\n")
    later = (heading.line for heading in outline(lines).headings if heading.line > section.line)
    end = next(later, len(lines))
    return _joined(append("\n".join(lines[:end]), block), lines[end:])


def replace_section(text: str, section: Heading, block: str) -> str:
    """The text with another body under a heading. The body ends at the next heading of the same or a higher level."""
    lines = text.split("\n")
    later = (h.line for h in outline(lines).headings if h.line > section.line and h.level <= section.level)
    end = next(later, len(lines))
    head = "\n".join(lines[: section.line + 1]) + "\n"
    return _joined(append(head, block) if block.strip() else head, lines[end:])


def loops(text: str) -> list[Loop]:
    """The loops of a text, in order."""
    lines = text.split("\n")
    code = outline(lines).code_lines
    open_loops: list[Loop] = []
    for number, line in enumerate(lines):
        if number not in code and (matched := LOOP.match(line)):
            end = _end_of_item(lines, number)
            closings = (CLOSED.match(below) for below in lines[number + 1 : end])
            days = [date.fromisoformat(closing["day"]) for closing in closings if closing and _is_day(closing["day"])]
            open_loops.append(
                Loop(
                    loop_id=matched["a"] or matched["b"] or matched["c"],
                    start=number,
                    end=end,
                    closed=matched["mark"] != " ",
                    closed_on=max(days, default=None),
                )
            )
    return open_loops


def close_loop(text: str, loop: Loop, resolution: str, on: date) -> str:
    """The text with a loop checked off and its resolution under it."""
    lines = text.split("\n")
    ticked = lines[loop.start].replace("[ ]", "[x]", 1)
    closing = f"  Closed {on.isoformat()}: {resolution}"
    return "\n".join([*lines[: loop.start], ticked, *lines[loop.start + 1 : loop.end], closing, *lines[loop.end :]])


def without_loops(text: str, gone: Sequence[Loop]) -> str:
    """The text without these loops."""
    dropped = {number for loop in gone for number in range(loop.start, loop.end)}
    return "\n".join(line for number, line in enumerate(text.split("\n")) if number not in dropped)


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only a newline ends one: reviewers must see other Unicode line breaks."""
    return text.removesuffix("\n").split("\n") if text else []


def unified_diff(before: str, after: str, before_name: str | None, after_name: str | None) -> str:
    """The unified diff of two versions of a file. A name of None means that this version has no such file."""
    names = (before_name or "/dev/null", after_name or "/dev/null")
    return "".join(f"{line}\n" for line in difflib.unified_diff(lines_of(before), lines_of(after), *names, lineterm=""))


def _end_of_item(lines: Sequence[str], start: int) -> int:
    """The line after the last one that belongs to a list item, including lines indented under it."""
    end = start + 1
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if line.strip() and not line.startswith(("  ", "\t")):
            break
        if line.strip():
            end = number + 1
    return end


def _joined(head: str, rest: Sequence[str]) -> str:
    tail = "\n".join(rest).strip("\n")
    return f"{head.rstrip(chr(10))}\n\n{tail}\n" if tail else head


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1

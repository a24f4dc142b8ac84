"""Sentences of English and Ukrainian text, with their exact places.

A sentence ends at a full stop, question or exclamation mark or ellipsis that is followed by white space and by something
that begins a sentence. An abbreviation or an initial does not end one: a sentence too long is a smaller fault than half
of one, because half of one may say the opposite. Every pattern reads a text once, however it is written.
"""

# ruff: noqa: RUF001 - quotes and dashes as people type them

import re
from dataclasses import dataclass

from trellis.nlm.blocks import Block
from trellis.nlm.citations import is_citable
from trellis.nlm.words import ABBREVIATIONS

SENTENCE_CHARS_MAX = 600
"""Longer ones are cut between words."""

_END = re.compile(r"""(?<![.!?…])[.!?…]+["'»”’)\]*_`]*(?P<gap>\s+(?:>\s*)*)""")
_BEGIN = re.compile(r"""["'«“„‘(\[*_`\-–—#]*[^\W_]""")
_LAST_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*$")
_SPACE = re.compile(r"\s+(?:>[ \t]?)*\s*")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A span of a source, and how it reads on one line. `row` says that it is an item or a row and not running text."""

    start: int
    end: int
    shown: str
    row: bool = False
    citable: bool = True
    """Whether it is long enough to show something, and short enough to be an excerpt."""


def sentences(text: str, start: int, end: int, *, whole: bool = False, row: bool = False) -> list[Sentence]:
    """The sentences of a span; with `whole` it is cut for its length alone."""
    made: list[Sentence] = []
    begin = start
    for match in _END.finditer(text, start, end):
        if not whole and match.end() < end and _ends(text, begin, match, end):
            _add(made, text, begin, match.start("gap"), row=row)
            begin = match.end()
    _add(made, text, begin, end, row=row)
    return made


def row_sentences(text: str, table: Block) -> list[Sentence]:
    """The rows of a table, each cell shown after the name of its column."""
    names = _cells(text, *table.header)
    made: list[Sentence] = []
    for start, end in table.spans:
        cells = _cells(text, start, end)
        named = [
            f"{names[column]}: {cell}" if column < len(names) and names[column] else cell
            for column, cell in enumerate(cells)
            if cell
        ]
        first, last = _trimmed(text, start, end)
        if named and last - first <= SENTENCE_CHARS_MAX:
            made.append(Sentence(first, last, "; ".join(named), row=True, citable=is_citable(text[first:last])))
        else:
            made += sentences(text, start, end, row=True)
    return made


def _cells(text: str, start: int, end: int) -> list[str]:
    inner = text[start:end].strip()
    inner = inner.removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return [cell.strip().replace("\\|", "|") for cell in _CELL.split(inner)] if inner else []


def _ends(text: str, begin: int, match: re.Match[str], end: int) -> bool:
    after = _BEGIN.match(text, match.end(), end)
    if after is None or after[0][-1].islower():
        return False
    if text[match.start()] != "." or text[match.start() : match.start() + 2] == "..":
        return True
    word = _LAST_WORD.search(text, max(begin, match.start() - 40), match.start())
    if word is None:
        # "2." alone is the number of what follows.
        return any(letter.isalpha() for letter in text[begin : match.start()])
    return len(word[0]) > 1 and word[0].lower() not in ABBREVIATIONS


def _add(made: list[Sentence], text: str, start: int, end: int, *, row: bool) -> None:
    start, end = _trimmed(text, start, end)
    while start < end:
        cut = _cut(text, start, end)
        if any(letter.isalnum() for letter in text[start:cut]):
            shown = _SPACE.sub(" ", text[start:cut]).strip()
            made.append(Sentence(start, cut, shown, row, is_citable(text[start:cut])))
        start, _ = _trimmed(text, cut, end)


def _cut(text: str, start: int, end: int) -> int:
    """Where a sentence ends for its length: at the last gap that fits, else at the first gap there is."""
    if end - start <= SENTENCE_CHARS_MAX:
        return end
    for at in range(start + SENTENCE_CHARS_MAX, start, -1):
        if text[at].isspace():
            return at
    gap = _SPACE.search(text, start + SENTENCE_CHARS_MAX, end)
    return end if gap is None else gap.start()


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and (text[start].isspace() or text[start] == ">"):
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end

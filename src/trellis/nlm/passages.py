"""Splits sources into blocks, passages and sentences with exact positions, and ranks passages for a question."""

# ruff: noqa: RUF001 - marks of lists as people type them, quotes and dashes as people type them

import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import apsw

from trellis.ledgers.queries import NamedQueries
from trellis.nlm.citations import is_citable
from trellis.nlm.provider import NlmSource
from trellis.nlm.words import ABBREVIATIONS, stems

# The blocks of a Markdown text: headings, paragraphs, lists, tables and code.
#
# Only what matters for finding and citing is distinguished. Every block has spans of the text in ascending order: one
# for a paragraph or a piece of code, one for each list item and each table row. Sources are untrusted, so every pattern
# here runs in time linear in the line's length.

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
    """The kind of a block."""

    PARAGRAPH = "paragraph"
    LIST = "list"
    TABLE = "table"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Block:
    """Spans of the text under a path of headings. `header` is the first row of a table, `(0, 0)` for other blocks."""

    kind: BlockKind
    headings: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    header: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    end: int
    text: str
    """Without the line end and without quotation marks (`>`)."""

    @property
    def blank(self) -> bool:
        return not self.text or self.text.isspace()


def blocks(text: str) -> Iterator[Block]:
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
    """The block that begins at a line, and the index of the line after it."""
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
    # A table without rows is represented by its header.
    spans, top = (rows, (header.start, header.end)) if rows else (((header.start, header.end),), (0, 0))
    return Block(BlockKind.TABLE, titles, spans, top), after


def _list(lines: list[_Line], at: int, titles: tuple[str, ...]) -> tuple[Block, int]:
    spans: list[tuple[int, int]] = []
    while at < len(lines) and (item := _ITEM.match(lines[at].text)):
        start = lines[at].start + item.end()
        at = _paragraph_end(lines, at)
        spans.append((start, lines[at - 1].end))
        if at + 1 < len(lines) and lines[at].blank and _ITEM.match(lines[at + 1].text):
            at += 1
    return Block(BlockKind.LIST, titles, tuple(spans)), at


def _paragraph_end(lines: list[_Line], at: int) -> int:
    """The index of the line after a paragraph or list item that begins here."""
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
    """The index of the line after the front matter; 0 if there is none."""
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


# Sentences of English and Ukrainian text, with their exact positions.
#
# A sentence ends at a full stop, question mark, exclamation mark or ellipsis that is followed by white space and by the
# beginning of a sentence. An abbreviation or an initial does not end one: a sentence that is too long is better than
# half of one, which may say the opposite. Every pattern reads a text once.

SENTENCE_CHARS_MAX = 600
"""Longer sentences are cut between words."""

_END = re.compile(r"""(?<![.!?…])[.!?…]+["'»”’)\]*_`]*(?P<gap>\s+(?:>\s*)*)""")
_BEGIN = re.compile(r"""["'«“„‘(\[*_`\-–—#]*[^\W_]""")
_LAST_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*$")
_SPACE = re.compile(r"\s+(?:>[ \t]?)*\s*")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A span of a source, and its text on one line.

    `row` means that it is a list item or table row, not running text.
    """

    start: int
    end: int
    shown: str
    row: bool = False
    citable: bool = True
    """Whether it is long enough to be evidence and short enough to be an excerpt."""


def sentences(text: str, start: int, end: int, *, whole: bool = False, row: bool = False) -> list[Sentence]:
    """The sentences of a span. With `whole` it is cut only by length."""
    cut: list[Sentence] = []
    begin = start
    for match in _END.finditer(text, start, end):
        if not whole and match.end() < end and _ends(text, begin, match, end):
            _add(cut, text, begin, match.start("gap"), row=row)
            begin = match.end()
    _add(cut, text, begin, end, row=row)
    return cut


def row_sentences(text: str, table: Block) -> list[Sentence]:
    """The rows of a table, each cell preceded by the name of its column."""
    names = _cells(text, *table.header)
    cut: list[Sentence] = []
    for start, end in table.spans:
        cells = _cells(text, start, end)
        named = [
            f"{names[column]}: {cell}" if column < len(names) and names[column] else cell
            for column, cell in enumerate(cells)
            if cell
        ]
        first, last = _trimmed(text, start, end)
        if named and last - first <= SENTENCE_CHARS_MAX:
            cut.append(Sentence(first, last, "; ".join(named), row=True, citable=is_citable(text[first:last])))
        else:
            cut += sentences(text, start, end, row=True)
    return cut


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
        # "2." alone is the number of the following item.
        return any(letter.isalpha() for letter in text[begin : match.start()])
    return len(word[0]) > 1 and word[0].lower() not in ABBREVIATIONS


def _add(sentences: list[Sentence], text: str, start: int, end: int, *, row: bool) -> None:
    start, end = _trimmed(text, start, end)
    while start < end:
        cut = _cut(text, start, end)
        if any(letter.isalnum() for letter in text[start:cut]):
            shown = _SPACE.sub(" ", text[start:cut]).strip()
            sentences.append(Sentence(start, cut, shown, row, is_citable(text[start:cut])))
        start, _ = _trimmed(text, cut, end)


def _cut(text: str, start: int, end: int) -> int:
    """Where a long sentence is cut: at the last gap that fits, otherwise at the first gap."""
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


# Passages, with the exact positions of their sentences.
#
# A passage is the unit of ranking: a few paragraphs, a list with its lead-in, rows of a table, or a block of code,
# always under one path of headings. A sentence is the unit of citing: `source.text[start:end]`, never cutting a word.
# Text that is not Markdown is treated as paragraphs. No input fails.

PASSAGE_CHARS_MAX = 900
"""A passage ends once it is this long: about a paragraph or two, the context that an answer needs."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Sentences that belong together.

    The first `leads` of them introduce the others, and may be repeated in several passages.
    """

    ref: str
    headings: tuple[str, ...]
    sentences: tuple[Sentence, ...]
    leads: int = 0


def passages(source: NlmSource) -> list[Passage]:
    """The passages of a source, in order."""
    cut: list[Passage] = []
    gathered: list[Sentence] = []
    under: tuple[str, ...] = ()

    def close(*, leads: int = 0) -> None:
        if gathered:
            cut.append(Passage(source.ref, under, tuple(gathered), leads))
            gathered.clear()

    for block in blocks(source.text):
        if block.headings != under:
            close()
            under = block.headings
        pieces = _passages_cut(source.text, block)
        if block.kind is BlockKind.PARAGRAPH:
            for sentence in pieces:
                gathered.append(sentence)
                if _size(gathered) >= PASSAGE_CHARS_MAX:
                    close()
            continue
        lead = _lead(gathered) if block.kind is BlockKind.LIST else ()
        # A list includes the sentence that introduces it; everything before that sentence is a separate passage.
        del gathered[len(gathered) - len(lead) :]
        close()
        for run in _runs(pieces):
            gathered.extend((*lead, *run))
            close(leads=len(lead))
    close()
    return cut


def _passages_cut(text: str, block: Block) -> list[Sentence]:
    if block.kind is BlockKind.TABLE:
        return row_sentences(text, block)
    whole, row = block.kind is BlockKind.CODE, block.kind is BlockKind.LIST
    return [sentence for start, end in block.spans for sentence in sentences(text, start, end, whole=whole, row=row)]


def _lead(before: list[Sentence]) -> tuple[Sentence, ...]:
    return (before[-1],) if before and before[-1].shown.endswith(":") else ()


def _runs(sentences: list[Sentence]) -> list[list[Sentence]]:
    """The sentences, grouped to about a passage's length."""
    runs: list[list[Sentence]] = [[]]
    for sentence in sentences:
        if runs[-1] and _size(runs[-1]) >= PASSAGE_CHARS_MAX:
            runs.append([])
        runs[-1].append(sentence)
    return [run for run in runs if run]


def _size(sentences: list[Sentence]) -> int:
    return sum(sentence.end - sentence.start for sentence in sentences)


# Ranks passages for a question: BM25 of SQLite's FTS5, in memory, over stems.
#
# The same corpus gives the same index and ranking: passages are numbered in the order of refs and text, and equal
# scores keep that order. An index is used by one thread at a time.

CONTEXT_WEIGHT = 1.5
"""The weight of a word in the headings relative to one in the text."""
QUERY_STEMS_MAX = 60


_QUERIES = NamedQueries("trellis.nlm:passages.sql")


@dataclass(frozen=True)
class IndexedPassage:
    """A passage with its stems."""

    number: int
    passage: Passage
    context: frozenset[str]
    body: frozenset[str]

    @cached_property
    def sentence_stems(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(stems(sentence.shown)) for sentence in self.passage.sentences)


@dataclass(frozen=True, slots=True)
class RankedPassage:
    """A passage that shares words with the question, and its score: higher is better."""

    entry: IndexedPassage
    score: float


class PassageIndex:
    """The index of one corpus."""

    def __init__(self, sources: Sequence[NlmSource]) -> None:
        self.entries: list[IndexedPassage] = []
        self.texts = {source.ref: source.text for source in sources}
        self.chars = sum(len(source.text) for source in sources)
        self._found_in: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._database: Any = apsw.Connection(":memory:")
        self._database.execute(_QUERIES.create_index)
        with self._database:
            self._database.executemany(_QUERIES.add_passage, self._rows(sources))

    def rank(self, wanted: Iterable[str], limit: int) -> list[RankedPassage]:
        """The best passages, at most `limit`."""
        known = [stem for stem in dict.fromkeys(wanted) if self._found_in[stem]][:QUERY_STEMS_MAX]
        if not known:
            return []
        match = " OR ".join(f'"{stem}"' for stem in known)
        with self._lock:
            rows: list[tuple[int, float]] = self._database.execute(
                _QUERIES.best_passages, (match, CONTEXT_WEIGHT, limit)
            ).fetchall()
        return [RankedPassage(self.entries[number - 1], score) for number, score in rows]

    def weight(self, stem: str) -> float:
        """The weight of a word: the fewer passages contain it, the higher.

        A word that none contains has the highest.
        """
        count = len(self.entries)
        return math.log(1.0 + (count + 1.0) / (self._found_in[stem] + 0.5))

    def _rows(self, sources: Sequence[NlmSource]) -> Iterable[tuple[int, str, str]]:
        for source in sources:
            for passage in passages(source):
                context = stems(" ".join((_spaced(passage.ref), *passage.headings)))
                body = [stem for sentence in passage.sentences for stem in stems(sentence.shown)]
                entry = IndexedPassage(len(self.entries) + 1, passage, frozenset(context), frozenset(body))
                self.entries.append(entry)
                self._found_in.update(entry.context | entry.body)
                yield entry.number, " ".join(context), " ".join(body)


def _spaced(ref: str) -> str:
    """The words of a ref, which is a path or an address."""
    return ref.rpartition(".")[0].replace("/", " ") or ref

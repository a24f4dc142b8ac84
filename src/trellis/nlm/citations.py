"""The citation check: whether the excerpt of a citation is in its source, and at which position."""


# ruff: noqa: RUF001 - quotes and dashes that look alike are the subject

import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from trellis.engine.text import storable
from trellis.nlm.provider import AnswerFlag, Citation, NlmAnswer, NlmSource

# Folding: normalizes white space, quotes, dashes and Markdown emphasis, and maps positions back.
#
# Every piece of the folded text knows its position in the original. So a match in the folded text is cited from the
# original, to the character. Nothing that carries meaning is folded: letters, digits, case and order stay.

OCCURRENCES_MAX = 1_000
"""Most occurrences of an excerpt that are checked for one that cuts no word."""

_ALIKE = str.maketrans(dict.fromkeys("«»“”„‟＂", '"') | dict.fromkeys("‘’‚‛ʼʹ′`´", "'") | dict.fromkeys("‐‑‒–—―−", "-"))
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
_SPECIAL = re.compile(
    r"""
      (?P<space>\s*\n[ \t]*(?:>[ \t]?)+\s*              # also the mark of a quoted line
        |\s{2,}|[^\S ])                                   # but not a single space, which is most of them
    | (?P<gone>[\u00ad\u200b-\u200d\u2060\ufeff]           # invisible
        |(?<![\w*`])[*`]+ | (?<![*`])[*`]++(?!\w))                  # emphasis, but not the star of 2*3
    | (?P<ellipsis>\.{3})
    | (?P<dash>[-‐‑‒–—―−]{2,})
    | (?P<letter>\w[\u0300-\u036f]+)                       # a letter and its accent written apart
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """`length` folded characters from `at` correspond to `source_length` from `source_at`; one to one if equal."""

    at: int
    length: int
    source_at: int
    source_length: int


class Folded:
    """A folded text with the original position of each character."""

    def __init__(self, text: str) -> None:
        self._parts: list[str] = []
        self._pieces: list[_Piece] = []
        self._length = 0
        done = 0
        for match in _SPECIAL.finditer(text):
            self._copy(text, done, match.start())
            self._add(self._folded(match), match.start(), match.end())
            done = match.end()
        self._copy(text, done, len(text))
        self.text = "".join(self._parts)
        self._starts = [piece.at for piece in self._pieces]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The original's span for a non-empty span of the folded text."""
        first, last = self._piece(start), self._piece(end - 1)
        begin = first.source_at + (start - first.at if first.length == first.source_length else 0)
        if last.length == last.source_length:
            return begin, last.source_at + end - last.at
        return begin, last.source_at + last.source_length

    def _piece(self, position: int) -> _Piece:
        return self._pieces[bisect_right(self._starts, position) - 1]

    def _copy(self, text: str, start: int, end: int) -> None:
        if self._spaced and text[start:end].startswith(" "):
            start += 1
        self._add(text[start:end].translate(_ALIKE), start, end)

    @property
    def _spaced(self) -> bool:
        return bool(self._parts) and self._parts[-1].endswith(" ")

    def _add(self, folded: str, start: int, end: int) -> None:
        if folded:
            self._parts.append(folded)
            self._pieces.append(_Piece(self._length, len(folded), start, end - start))
            self._length += len(folded)

    def _folded(self, match: re.Match[str]) -> str:
        match match.lastgroup:
            case "space":
                return "" if self._spaced else " "
            case "gone":
                return ""
            case "ellipsis":
                return "…"
            case "dash":
                return "-"
            case _:
                return unicodedata.normalize("NFC", match[0])


def find_whole(text: str, wanted: str) -> int:
    """The first position of `wanted` in the text that cuts no word, or -1: "illegal" does not contain "legal"."""
    at = text.find(wanted)
    for _ in range(OCCURRENCES_MAX):
        if at < 0 or is_whole(text, at, at + len(wanted)):
            return at
        at = text.find(wanted, at + 1)
    return -1


def is_whole(text: str, start: int, end: int) -> bool:
    """Whether a non-empty span begins and ends at word boundaries."""
    before = text[max(0, start - 4) : start].rstrip(_INVISIBLE)[-1:]
    after = text[end : end + 4].lstrip(_INVISIBLE)[:1]
    return not (before.isalnum() and text[start].isalnum()) and not (text[end - 1].isalnum() and after.isalnum())


# Verification: whether an answer's citations are in its sources. This defines "grounded" for every provider.
#
# An excerpt is searched unchanged, then folded. If found, it becomes the source's own text with its span. Otherwise it
# is dropped and flagged, never repaired: no other source, no similar wording, no guess. Verifying twice changes
# nothing.

CITATIONS_MAX = 50
EXCERPT_CHARS_MAX = 4_000
EXCERPT_LETTERS_MIN = 8
"""Least number of letters and digits. Shorter excerpts would be found in any text."""
ANSWER_CHARS_MAX = 20_000
FLAG_REF_CHARS_MAX = 200
_OUTER = " \"'…"


def verify(answer: NlmAnswer, sources: tuple[NlmSource, ...], *, unread: tuple[NlmSource, ...] = ()) -> NlmAnswer:
    """The citation check: the answer with only the citations found in its sources.

    A citation of an `unread` source is dropped too; its flag says whether that source contains the text.
    `confident` stays only if nothing had to be dropped.
    """
    places = {source.ref: _SourceText(source) for source in sources}
    others = {source.ref: _SourceText(source) for source in unread if source.ref not in places}
    kept: list[Citation] = []
    dropped: list[str] = []
    for citation in answer.citations[:CITATIONS_MAX]:
        located = _located(citation, places.get(citation.ref))
        if located is AnswerFlag.NOT_FOUND and isinstance(_located(citation, others.get(citation.ref)), Citation):
            located = AnswerFlag.NOT_READ
        if isinstance(located, AnswerFlag):
            dropped.append(f"{located}:{_shown(citation.ref)}")
        elif located not in kept:
            kept.append(located)
    if len(answer.citations) > CITATIONS_MAX:
        dropped.append(AnswerFlag.CITATIONS_CUT)
    text = storable(answer.text) or ""
    if len(text) > ANSWER_CHARS_MAX:
        text = text[:ANSWER_CHARS_MAX]
        dropped.append(AnswerFlag.TEXT_CUT)
    flags = [*answer.flags, *dropped, *([] if kept else [AnswerFlag.UNGROUNDED])]
    return replace(
        answer,
        text=text,
        citations=tuple(kept),
        flags=tuple(dict.fromkeys(str(flag) for flag in flags)),
        confident=answer.confident and bool(kept) and not dropped,
    )


def is_citable(excerpt: str) -> bool:
    """Whether an excerpt has an acceptable length."""
    letters = sum(letter.isalnum() for letter in excerpt[:EXCERPT_CHARS_MAX])
    return letters >= EXCERPT_LETTERS_MIN and len(excerpt) <= EXCERPT_CHARS_MAX


def has_excerpt(text: str, excerpt: str) -> bool:
    """Whether a text contains an excerpt, compared as the citation check does."""
    source = NlmSource("text", text)
    return isinstance(_located(Citation(source.ref, excerpt), _SourceText(source)), Citation)


class _SourceText:
    """A source, and its folded form once it is needed."""

    def __init__(self, source: NlmSource) -> None:
        self.text = source.text

    @cached_property
    def folded(self) -> Folded:
        return Folded(self.text)


def _located(citation: Citation, place: _SourceText | None) -> Citation | AnswerFlag:
    if place is None or len(citation.excerpt) > EXCERPT_CHARS_MAX:
        return AnswerFlag.NOT_FOUND
    if not is_citable(citation.excerpt):
        return AnswerFlag.TOO_SHORT
    span = _exact(citation, place.text) or _alike(citation.excerpt, place.folded)
    if span is None or span[1] - span[0] > EXCERPT_CHARS_MAX:
        return AnswerFlag.NOT_FOUND
    return replace(citation, excerpt=place.text[span[0] : span[1]], start=span[0], end=span[1])


def _exact(citation: Citation, text: str) -> tuple[int, int] | None:
    """The span that the provider gave if it is right, otherwise the first occurrence of the excerpt."""
    start, end = citation.start, citation.end
    if 0 <= start < end and text[start:end] == citation.excerpt and is_whole(text, start, end):
        return start, end
    excerpt = citation.excerpt.strip()
    at = find_whole(text, excerpt)
    return None if at < 0 else (at, at + len(excerpt))


def _alike(excerpt: str, folded: Folded) -> tuple[int, int] | None:
    wanted = Folded(excerpt).text.strip(_OUTER)
    at = find_whole(folded.text, wanted) if wanted else -1
    return None if at < 0 else folded.span(at, at + len(wanted))


def _shown(ref: str) -> str:
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in ref[:FLAG_REF_CHARS_MAX]
    )

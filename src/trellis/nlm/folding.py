"""Text as a quoting model sees it: white space, quotes, dashes and Markdown emphasis made alike, with the way back.

Every stretch of the folded text knows the stretch of the original it came from, so that what is found in the one is
cited from the other, to the character. Nothing that carries meaning is folded: letters, digits, case and order stay.
"""

# ruff: noqa: RUF001 - quotes and dashes that look alike are the subject

import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass

OCCURRENCES_MAX = 1_000
"""How many places of an excerpt are looked at for one that cuts no word."""

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
    """`length` folded characters from `at` stand for `source_length` from `source_at`; character by character if equal."""

    at: int
    length: int
    source_at: int
    source_length: int


class Folded:
    """A folded text that remembers where each of its characters came from."""

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
        """The original's span for a span of the folded text that is not empty."""
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
    """Where `wanted` first stands in the text without cutting a word in two, or -1: "legal" is not said by "illegal"."""
    at = text.find(wanted)
    for _ in range(OCCURRENCES_MAX):
        if at < 0 or is_whole(text, at, at + len(wanted)):
            return at
        at = text.find(wanted, at + 1)
    return -1


def is_whole(text: str, start: int, end: int) -> bool:
    """Whether a span that is not empty begins and ends between words."""
    before = text[max(0, start - 4) : start].rstrip(_INVISIBLE)[-1:]
    after = text[end : end + 4].lstrip(_INVISIBLE)[:1]
    return not (before.isalnum() and text[start].isalnum()) and not (text[end - 1].isalnum() and after.isalnum())

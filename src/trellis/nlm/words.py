"""Normalizes words for the index: lower case, without apostrophe and ending, shortened to a few letters.

No dictionary is used. English and Ukrainian have few endings (`languages.toml`), and the rest of a word is cut at
`STEM_CHARS_MAX` letters: "записує", "записати" and "запису" become equal, and so do "retry", "retries" and "retried".
Stop words are not compared at all.
"""

# ruff: noqa: RUF001 - apostrophes as people type them

import re
import tomllib
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

STEM_CHARS_MAX = 6
STEM_CHARS_MIN = 3
STEMS_CACHED = 50_000
WORD_CHARS_MAX = 80

_WORD = re.compile(r"[^\W_]+(?:['’ʼ`´][^\W_]+)*")
_APOSTROPHES = re.compile(r"['’ʼ`´]")
_POSSESSIVE = re.compile(r"['’]s$")
_NEVER_DOUBLED = "aeiouls"
_REFLEXIVE = ("ся", "сь")
_ENGLISH_LAST = ("e", "y", "i")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tables of one language. Its words begin with a letter between the first and the last of `letters`."""

    letters: str
    stop_words: frozenset[str]
    endings: tuple[str, ...]
    abbreviations: frozenset[str]


def _read() -> dict[str, Vocabulary]:
    tables = tomllib.loads(resources.files("trellis.nlm").joinpath("languages.toml").read_text(encoding="utf-8"))
    return {
        name: Vocabulary(
            letters=table["letters"],
            stop_words=frozenset(table["stop_words"].split()),
            endings=tuple(sorted(table["endings"].split(), key=lambda ending: (-len(ending), ending))),
            abbreviations=frozenset(table["abbreviations"].split()),
        )
        for name, table in tables.items()
    }


VOCABULARIES = _read()
STOP_WORDS = frozenset[str]().union(*(known.stop_words for known in VOCABULARIES.values()))
ABBREVIATIONS = frozenset[str]().union(*(known.abbreviations for known in VOCABULARIES.values()))


def words(text: str) -> list[str]:
    """The words of a text in order, in lower case."""
    return [match[0] for match in _WORD.finditer(unicodedata.normalize("NFC", text).lower())]


def spans(text: str) -> list[tuple[int, int]]:
    """The positions of the words of a text, in order."""
    return [match.span() for match in _WORD.finditer(text)]


def stems(text: str) -> list[str]:
    """The stems of a text's words, in order, without stop words."""
    return [stem(word[:WORD_CHARS_MAX]) for word in words(text) if word not in STOP_WORDS]


@lru_cache(maxsize=STEMS_CACHED)
def stem(word: str) -> str:
    """The word without its ending, at most `STEM_CHARS_MAX` letters. Names with digits stay unchanged."""
    plain = _APOSTROPHES.sub("", _POSSESSIVE.sub("", word))
    if any(letter.isdigit() for letter in plain):
        return plain
    for name, known in VOCABULARIES.items():
        if known.letters[0] <= plain[:1] <= known.letters[1]:
            return (_english(plain) if name == "en" else _ukrainian(plain))[:STEM_CHARS_MAX]
    return plain[:STEM_CHARS_MAX]


def _english(word: str) -> str:
    """Strip English endings.

    A doubled consonant before an ending is undone (stopp-ed, runn-ing), and "y" equals "i" (retr-y, retr-ies).
    """
    if not word.endswith(("ss", "us", "is")):
        word = _without(word, VOCABULARIES["en"].endings)
    if len(word) > STEM_CHARS_MIN and word[-1] == word[-2] and word[-1] not in _NEVER_DOUBLED:
        word = word[:-1]
    return _without(word, _ENGLISH_LAST)


def _ukrainian(word: str) -> str:
    """Strip Ukrainian endings. A reflexive verb has its ending before "ся"."""
    return _without(_without(word, _REFLEXIVE), VOCABULARIES["uk"].endings)


def _without(word: str, endings: tuple[str, ...]) -> str:
    for ending in endings:
        if word.endswith(ending) and len(word) - len(ending) >= STEM_CHARS_MIN:
            return word.removesuffix(ending)
    return word

"""Finds pairs of statements from two sources that may disagree: different figures, or one denies what the other states.

Words are compared, not meanings, so a pair is for a person to check and is never a verdict. Two statements are about
the same matter if they share enough words and name no different items (`TS-01` is not `TS-02`). Figures are compared
within their unit. Years need more shared words than measurements, because every story has several.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from itertools import combinations, islice
from typing import Any

from trellis.nlm.passages import passages
from trellis.nlm.provider import Language, NlmSource
from trellis.nlm.words import stem, stems, words

WORDS: dict[str, Any] = tomllib.loads(
    resources.files("trellis.agents.offline").joinpath("words.toml").read_text(encoding="utf-8")
)
"""The whole file: sentences, titles and comparison words."""
SENTENCES: Mapping[Language, Mapping[str, str]] = {
    Language(language): sentences for language, sentences in WORDS["sentences"].items()
}
"""The fixed sentences of the offline model, which contain no facts. Braces hold a number, a source's name or a quotation."""

STATEMENTS_MAX = 300
"""Most statements of all sources together: the number of pairs grows with the square."""
STATEMENTS_CACHED = 2_000
"""Statements whose features a process keeps: what a few runs compare."""
SUBJECTS_MAX = 4
YEAR = "year"
_NAME_WEIGHT = 2

_TABLE = WORDS["comparing"]
_RANGE = "|".join(re.escape(word) for word in _TABLE["ranges"])
_NUMBER = re.compile(
    r"(?<![\w.,/-])(?P<first>\d{1,9}(?:[.,]\d{1,6})?)"
    rf"(?:\s?(?:{_RANGE})\s?(?P<second>\d{{1,9}}(?:[.,]\d{{1,6}})?))?"
    r"(?:\s?(?P<unit>%|°C|[^\W\d_]+))?",
)
_COMPOUND = re.compile(r"\w+(?:-\w+)*")
_UNITS: dict[str, str] = {written: unit for unit, ways in _TABLE["units"].items() for written in ways}
_UNIT_STEMS = frozenset(stem(written.lower()) for written in _UNITS)
_PART = re.compile(r"[.;!?|]\s")
_BEFORE_YEARS = frozenset[str](_TABLE["before_years"])
_WORD_BEFORE = re.compile(r"([^\W\d_]+)\s\Z")
_WORD_BEFORE_CHARS_MAX = 24
_DENIALS = frozenset[str](_TABLE["denials"])


class ConflictKind(StrEnum):
    """How two statements may disagree."""

    FIGURES = "figures"
    DENIAL = "denial"


@dataclass(frozen=True, slots=True)
class Statement:
    """A piece of a source, with the features it is compared by."""

    ref: str
    excerpt: str
    stems: frozenset[str]
    names: frozenset[str]
    figures: frozenset[tuple[str, str]]
    denied: frozenset[str]
    """The stems of those parts that contain a denial."""
    denials: int
    """The number of denying words."""


@dataclass(frozen=True, slots=True)
class StatementConflict:
    """Two statements that may disagree. The more they have in common, the greater the weight."""

    kind: ConflictKind
    first: Statement
    second: Statement
    weight: float


def names_in(text: str) -> frozenset[str]:
    """The items that a text names by a word with a letter and a digit, such as TS-03."""
    return frozenset(match[0].lower() for match in _COMPOUND.finditer(text) if _is_name(match[0]))


def _is_name(word: str) -> bool:
    # Checked on the matched word: a lookahead in the pattern would take time quadratic in its length.
    return any(letter.isalpha() for letter in word) and any(letter.isdigit() for letter in word)


def _without_names(text: str) -> str:
    return _COMPOUND.sub(lambda match: " " if _is_name(match[0]) else match[0], text)


@lru_cache(maxsize=STATEMENTS_CACHED)
def statement(ref: str, excerpt: str) -> Statement:
    """The features by which a piece of text is compared. Each turn of a run compares the same pieces again."""
    matter = frozenset(one for one in stems(_without_names(excerpt)) if not any(letter.isdigit() for letter in one))
    return Statement(
        ref=ref,
        excerpt=excerpt,
        stems=matter - _UNIT_STEMS,
        names=names_in(excerpt),
        figures=frozenset(_figures(_without_names(excerpt))),
        denied=frozenset(one for part in _PART.split(excerpt) if _denials(part) for one in stems(part)),
        denials=_denials(excerpt),
    )


def conflicts(statements: Sequence[Statement]) -> list[StatementConflict]:
    """Pairs from different sources whose figures differ, weightiest first. Each statement is in at most one pair."""
    pairs = [pair for first, second in combinations(statements, 2) if (pair := _differ(first, second))]
    return _without_shared_statements(pairs)


def conflicts_between(ours: Sequence[Statement], theirs: Sequence[Statement]) -> list[StatementConflict]:
    """Pairs of one of `ours` and one of `theirs` whose figures differ, weightiest first.

    Each statement is in at most one pair.
    """
    return _without_shared_statements([pair for first in ours for second in theirs if (pair := _differ(first, second))])


def denials(question: str, answers: Sequence[Statement], others: Sequence[Statement]) -> list[StatementConflict]:
    """Pairs of which one denies what the question asks about and the other does not.

    One of the two must name an item that the question names. Otherwise a denial and a statement are usually about two
    different things. A quote from the answer to another question needs more shared words.
    """
    questioned = statement("", question)
    denied: list[StatementConflict] = []
    for first, second in combinations(dict.fromkeys([*answers, *others]), 2):
        contested = first.stems & second.stems & questioned.stems & (first.denied ^ second.denied)
        least = 1 if first in answers and second in answers else 2
        named = (first.names | second.names) & questioned.names
        if first.ref != second.ref and named and len(contested) >= least and not _name_different_items(first, second):
            emphasis = 0.1 * (first.denials + second.denials)
            denied.append(StatementConflict(ConflictKind.DENIAL, first, second, len(contested) + emphasis))
    return _without_shared_statements(denied)


def subjects(sources: Mapping[str, str]) -> list[str]:
    """The words that statements with different figures share: useful as questions."""
    return [_shared_words(pair) for pair in conflicts(statements_with_figures(sources))[:SUBJECTS_MAX]]


def statements_with_figures(sources: Mapping[str, str]) -> list[Statement]:
    """The statements of the sources that contain a figure."""
    return list(islice(_statements(sources), STATEMENTS_MAX))


def _statements(sources: Mapping[str, str]) -> Iterable[Statement]:
    for ref, text in sorted(sources.items()):
        for passage in passages(NlmSource(ref, text)):
            for sentence in passage.sentences:
                one = statement(ref, text[sentence.start : sentence.end]) if sentence.citable else None
                if one is not None and one.figures:
                    yield one


def _differ(first: Statement, second: Statement) -> StatementConflict | None:
    if first.ref == second.ref or _name_different_items(first, second):
        return None
    shared = first.stems & second.stems
    least = min(len(first.stems), len(second.stems))
    weight = len(shared) + _NAME_WEIGHT * len(first.names & second.names)
    if not shared or not least:
        return None
    share = len(shared) / least
    for unit in sorted({unit for unit, _ in first.figures} & {unit for unit, _ in second.figures}):
        ours = {value for kind, value in first.figures if kind == unit}
        theirs = {value for kind, value in second.figures if kind == unit}
        enough = (3, 0.5) if unit == YEAR or unit not in _UNITS.values() else (2, 0.25)
        if ours.isdisjoint(theirs) and weight >= enough[0] and share >= enough[1]:
            return StatementConflict(ConflictKind.FIGURES, first, second, weight + share)
    return None


def _denials(text: str) -> int:
    return sum(word in _DENIALS for word in words(text))


def _name_different_items(first: Statement, second: Statement) -> bool:
    """Whether both name items, and none in common."""
    return bool(first.names) and bool(second.names) and first.names.isdisjoint(second.names)


def _without_shared_statements(conflicts_found: list[StatementConflict]) -> list[StatementConflict]:
    """The weightiest pairs, such that no statement is in two."""
    kept: list[StatementConflict] = []
    seen: set[tuple[str, str]] = set()
    order = sorted(
        conflicts_found,
        key=lambda one: (-one.weight, one.first.ref, one.first.excerpt, one.second.ref, one.second.excerpt),
    )
    for pair in order:
        both = {(pair.first.ref, pair.first.excerpt), (pair.second.ref, pair.second.excerpt)}
        if not both & seen:
            seen |= both
            kept.append(pair)
    return kept


def _figures(text: str) -> Iterable[tuple[str, str]]:
    for match in _NUMBER.finditer(text):
        word = match["unit"] or ""
        values = [value.replace(",", ".") for value in (match["first"], match["second"]) if value]
        unit = _UNITS.get(word) or _UNITS.get(word.lower())
        counts = len(word) > 2 and bool(stems(word)) and word.islower()
        if (
            unit is None
            and not counts
            and _are_years(values, before=text[max(0, match.start() - _WORD_BEFORE_CHARS_MAX) : match.start()])
        ):
            unit = YEAR
        if unit is None and len(word) > 2 and stems(word):
            unit = f"of {stem(word.lower())}"
        if unit is not None:
            yield unit, " ".join(values)


def _are_years(values: Sequence[str], *, before: str) -> bool:
    """Whether figures without a unit are years: four digits each, after no word or after one such as "in" or "May"."""
    word = _WORD_BEFORE.search(before)
    return all(len(value) == 4 and "1000" <= value <= "2100" for value in values) and (
        word is None or word[1].lower() in _BEFORE_YEARS
    )


def _shared_words(pair: StatementConflict) -> str:
    shared, names = pair.first.stems & pair.second.stems, pair.first.names & pair.second.names
    kept = [word for word in words(pair.first.excerpt) if stem(word) in shared]
    return " ".join(dict.fromkeys([*sorted(name.upper() for name in names), *kept])) + "?"

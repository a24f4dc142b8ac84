"""Which things a text asks about by name, and which passages are theirs.

A name is a number such as TS-02, a known entity, words in quotation marks that some source holds, or the first words of a heading. A
heading that has several names for one thing (`TS-04, the export violin`) lets each of them stand for its number. Words are compared by
their stems, in the order in which they are written.
"""

# ruff: noqa: RUF001 - quotes and dashes as people type them

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from trellis.agents.offline.comparing import names_in
from trellis.agents.offline.wording import WORDS
from trellis.artifacts.snapshot import SnapshotEntity
from trellis.artifacts.structuring.entities import EntityFinder
from trellis.nlm.words import stems, words

HEADING_CHARS_MAX = 300
PREFIX_STEMS_MIN = 2
"""So many first words of a heading name what stands under it; a heading of one word needs that one."""
PHRASES_MAX = 20
QUOTED_CHARS_MAX = 100
TITLES = frozenset[str](WORDS["questions"]["titles"])
ARTICLES = frozenset({"the", "a", "an"})
_QUOTED = re.compile(rf"[«“„\"]([^«»“”„\"\n]{{2,{QUOTED_CHARS_MAX}}})[»”“\"]")
_PARTS = re.compile(r"[/,:;(]|\s[—–-]\s")

Phrase = tuple[str, ...]


class Nearness(IntEnum):
    """How a sentence belongs to what is named: more is nearer."""

    OTHER = 0
    MENTIONS = 1
    HEADED = 2
    """It stands under a heading that names it."""


@dataclass(frozen=True, slots=True)
class NamedItems:
    """What a text names: numbers such as ts-02 in lower case, and phrases as stems. Nothing at all is false."""

    numbers: frozenset[str] = frozenset()
    phrases: tuple[Phrase, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.phrases)

    def stands_in(self, text: str) -> bool:
        """Whether a text names one of them."""
        if self.numbers and not self.numbers.isdisjoint(names_in(text)):
            return True
        if not self.phrases:
            return False
        held = stems(text)
        return any(_holds(held, phrase) for phrase in self.phrases)

    def is_apart(self, text: str) -> bool:
        """Whether a text names others of the same series and none of these: TS-04 where TS-02 is asked about."""
        series = {_series(number) for number in self.numbers}
        found = names_in(text) if series else frozenset[str]()
        return self.numbers.isdisjoint(found) and any(_series(one) in series for one in found)

    def others(self, wanted: Iterable[str]) -> frozenset[str]:
        """The stems that are asked for beside the numbers: a number says which thing, and not what about it."""
        return frozenset(wanted).difference(*(stems(number) for number in self.numbers))


def named_in(text: str, headings: Iterable[str], entities: Sequence[SnapshotEntity] = ()) -> NamedItems:
    """What a text names, as far as numbers, entities, quotation marks and these headings tell."""
    held = stems(text)
    numbers = {one for one in names_in(text) if _series(one)}
    phrases: dict[Phrase, None] = {}
    occurring = EntityFinder(entities).occurring(text) if entities else []
    for entity in (entity for entity in entities if entity.slug in occurring):
        for written in (entity.name, entity.slug, *entity.aliases):
            numbers |= {one for one in names_in(written) if _series(one)}
            phrases |= dict.fromkeys([tuple(stems(written))])
    for match in _QUOTED.finditer(text):
        phrases |= dict.fromkeys([tuple(stems(match[1]))])
    given = [phrase for phrase in phrases if phrase]
    words_of_headings: list[Phrase] = []
    for heading in dict.fromkeys(one[:HEADING_CHARS_MAX] for one in headings):
        found = _beginning(held, heading)
        words_of_headings += [phrase for phrase in found if len(phrase) == 1]
        phrases |= dict.fromkeys(phrase for phrase in found if len(phrase) > 1)
        if any(len(phrase) > 1 for phrase in found) or any(_holds(stems(heading), phrase) for phrase in given):
            numbers |= _numbers_beside(heading, numbers)
    # One word is the weakest of names: it counts where there is no other.
    kept = [phrase for phrase in phrases if phrase and not _is_number(phrase, numbers)]
    kept = kept or ([] if numbers else list(dict.fromkeys(words_of_headings)))
    return NamedItems(frozenset(numbers), tuple(kept[:PHRASES_MAX]))


def _beginning(held: list[str], heading: str) -> list[Phrase]:
    """The first words of the heading's names that a text holds: of a name after the first only all of them."""
    made: list[Phrase] = []
    for at, part in enumerate(_PARTS.split(heading)):
        own = tuple(stems(part))
        if not own or part.strip(" *_").lower() in TITLES or (at and not names_in(heading) and "/" not in heading):
            continue
        if len(own) == 1 and set(words(part)) - ARTICLES != {words(part)[-1]}:
            continue  # "What holds" is no name, and "Amnesty" is one.
        least = len(own) if at else min(len(own), PREFIX_STEMS_MIN)
        length = next((size for size in range(len(own), least - 1, -1) if _holds(held, own[:size])), 0)
        made += [own[:length]] if length else []
    return made


def _numbers_beside(heading: str, numbers: set[str]) -> frozenset[str]:
    """The numbers of a heading that is called for by another of its names; of several that were asked for, those alone."""
    found = frozenset(one for one in names_in(heading) if _series(one))
    return frozenset() if found & numbers else found


def _is_number(phrase: Phrase, numbers: Iterable[str]) -> bool:
    """Whether a phrase only repeats a number."""
    return any(phrase == tuple(stems(number)) for number in numbers)


def _series(number: str) -> str:
    """What comes before the digits of a number: `ts-` of ts-02; nothing for 1880s."""
    return number.rstrip("0123456789") if number[:1].isalpha() else ""


def _holds(held: Sequence[str], phrase: Phrase) -> bool:
    """Whether stems stand one after the other among others."""
    size = len(phrase)
    return any(tuple(held[at : at + size]) == phrase for at, stem in enumerate(held) if stem == phrase[0])

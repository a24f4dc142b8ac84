"""Finds which entities a text names, and which passages are about named items."""


# ruff: noqa: RUF001 - quotes and dashes as people type them

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import islice, takewhile

from trellis.agents.offline.comparison import WORDS, names_in
from trellis.artifacts.payloads import SnapshotEntity
from trellis.nlm.words import VOCABULARIES, spans, stem, stems, words

# Entity matching, with a confidence.
#
# Names, slugs and aliases are compared word by word. The confidence is 1.0 for the exact name or slug, 0.95 in another
# case, and 0.9 in another form of the words (`nlm.words`, or other Ukrainian endings). An alias counts `ALIAS_SHARE` of
# that. A misspelt name counts `FUZZY_SHARE` of its letter similarity. If a text names several entities equally well,
# they share the confidence.

EXACT = 1.0
FOLDED = 0.95
INFLECTED = 0.9
ALIAS_SHARE = 0.95
FUZZY_SHARE = 0.8
FUZZY_LIKENESS_MIN = 0.84
WORD_LIKENESS_MIN = 0.75
FUZZY_CHARS_MIN = 5
SURE_MIN = 0.85
"""From this confidence on, a text counts as naming the entity."""
WORDS_MAX = 20_000
FUZZY_WORDS_MAX = 2_000
FUZZY_FORMS_MAX = 400
FORM_WORDS_MAX = 8
MATCHES_MAX = 200
BEGINNING_MIN = 4
_ENDINGS = frozenset((*VOCABULARIES["uk"].endings, ""))


@dataclass(frozen=True, slots=True)
class EntityOccurrence:
    """A place in a text that names an entity."""

    text: str
    slug: str
    confidence: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _EntityForm:
    """One spelling of an entity."""

    slug: str
    written: str
    share: float
    stems: tuple[str, ...]


class EntityFinder:
    """Finds the entities of a task in texts."""

    def __init__(self, entities: Sequence[SnapshotEntity]) -> None:
        self._order = [entity.slug for entity in entities]
        self.names = {entity.slug: entity.name for entity in entities}
        forms = [form for entity in entities for form in _forms(entity) if 1 <= len(form.stems) <= FORM_WORDS_MAX]
        self._by_stems: dict[tuple[str, ...], list[_EntityForm]] = {}
        for form in forms:
            self._by_stems.setdefault(form.stems, []).append(form)
        self._lengths = sorted({len(form.stems) for form in forms}, reverse=True)
        self._by_letter: dict[tuple[int, str], list[_EntityForm]] = {}
        for form in (form for form in forms if len(form.written) >= FUZZY_CHARS_MIN):
            self._by_letter.setdefault((len(form.stems), form.stems[0][:1]), []).append(form)

    def matches(self, text: str, *, fuzzy: bool = True) -> list[EntityOccurrence]:
        """Returns the places that name an entity, in text order. Longer names win; no word is used twice."""
        places = spans(text)[:WORDS_MAX]
        found_stems = [stem(text[start:end].lower()) for start, end in places]
        taken: set[int] = set()
        occurrences: list[EntityOccurrence] = []
        for length in self._lengths:
            for at in range(len(places) - length + 1):
                forms = self._by_stems.get(tuple(found_stems[at : at + length]))
                if forms and taken.isdisjoint(range(at, at + length)):
                    taken.update(range(at, at + length))
                    occurrences += _best(text, places[at][0], places[at + length - 1][1], forms)
        occurrences += self._alike(text, places[:FUZZY_WORDS_MAX], taken, fuzzy=fuzzy)
        return sorted(occurrences, key=lambda match: (match.start, match.slug))[:MATCHES_MAX]

    def occurring(self, text: str) -> list[str]:
        """Returns the slugs of entities that a text names with confidence `SURE_MIN`, in the order of the entities."""
        slugs = {match.slug for match in self.matches(text, fuzzy=False) if match.confidence >= SURE_MIN}
        return [slug for slug in self._order if slug in slugs]

    def written(self, slug: str, text: str) -> str:
        """Returns the entity's name; if only its slug is known, how the text writes it."""
        name = self.names[slug]
        if name != slug:
            return name
        return next((match.text for match in self.matches(text, fuzzy=False) if match.slug == slug), name)

    def _alike(
        self, text: str, places: list[tuple[int, int]], taken: set[int], *, fuzzy: bool
    ) -> Iterator[EntityOccurrence]:
        """Finds names with other endings or misspellings, among the words that match nothing else."""
        for length in self._lengths:
            for at in range(len(places) - length + 1):
                start, end = places[at][0], places[at + length - 1][1]
                forms = self._by_letter.get((length, text[start].lower()))
                if not forms or not taken.isdisjoint(range(at, at + length)):
                    continue
                written = text[start:end]
                sure, slug = max((_nearly(written, form, fuzzy=fuzzy), form.slug) for form in forms[:FUZZY_FORMS_MAX])
                if sure > 0.0:
                    taken.update(range(at, at + length))
                    yield EntityOccurrence(written, slug, round(sure, 2), start, end)


def with_unknown(entities: Sequence[SnapshotEntity], slugs: Iterable[str]) -> tuple[SnapshotEntity, ...]:
    """Returns the requested entities in the requested order, then the others. An unknown one gets its slug as name."""
    known = {entity.slug: entity for entity in entities}
    wanted = {slug: known.get(slug) or SnapshotEntity(slug=slug, name=slug) for slug in slugs}
    return (*wanted.values(), *(entity for entity in entities if entity.slug not in wanted))


def _forms(entity: SnapshotEntity) -> Iterator[_EntityForm]:
    ways = [(entity.name, 1.0), (entity.slug, 1.0), *((alias, ALIAS_SHARE) for alias in entity.aliases)]
    for written, share in ways:
        places = spans(written)
        yield _EntityForm(entity.slug, written, share, tuple(stem(written[start:end].lower()) for start, end in places))


def _best(text: str, start: int, end: int, forms: list[_EntityForm]) -> Iterator[EntityOccurrence]:
    """Returns the entities that best match this place, with the confidence divided between them."""
    written = text[start:end]
    sure: dict[str, float] = {}
    for form in forms:
        sure[form.slug] = max(sure.get(form.slug, 0.0), form.share * _alike_by(written, form.written))
    best = max(sure.values())
    named = sorted(slug for slug, confidence in sure.items() if confidence == best)
    return (
        EntityOccurrence(written, slug, round(best / len(named), 2), start, end) for slug in islice(named, MATCHES_MAX)
    )


def _alike_by(written: str, name: str) -> float:
    if written == name:
        return EXACT
    return FOLDED if _plain(written) == _plain(name) else INFLECTED


def _nearly(written: str, form: _EntityForm, *, fuzzy: bool) -> float:
    """Returns the confidence that a text is an inflected or misspelt form of a name; 0.0 if neither."""
    if _is_inflected(written.lower(), form.written.lower()):
        return INFLECTED * form.share
    likeness = _likeness(written.lower(), form.written.lower()) if fuzzy else 0.0
    return FUZZY_SHARE * form.share * likeness if likeness >= FUZZY_LIKENESS_MIN else 0.0


def _is_inflected(written: str, name: str) -> bool:
    """Whether the words differ only in Ukrainian endings: Онуфрієм Петриком is Онуфрій Петрик."""
    pairs = zip(words(written), words(name), strict=False)
    return all(_ends_otherwise(first, second) for first, second in pairs)


def _ends_otherwise(first: str, second: str) -> bool:
    if first == second:
        return True
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return common >= BEGINNING_MIN and first[common:] in _ENDINGS and second[common:] in _ENDINGS


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def _likeness(first: str, second: str) -> float:
    """Returns the letter similarity of two texts; 0.0 if their digits differ, because those are not misspellings."""
    if first[:1] != second[:1] or abs(len(first) - len(second)) > 2 or _digits(first) != _digits(second):
        return 0.0
    if any(_ratio(*pair) < WORD_LIKENESS_MIN for pair in zip(words(first), words(second), strict=False)):
        return 0.0
    return _ratio(first, second)


def _ratio(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def _digits(text: str) -> str:
    return "".join(letter for letter in text if letter.isdigit())


# Named items: which things a text asks about by name, and which passages are about them.
#
# A name is a number such as TS-02, a known entity, quoted words that occur in a source, or the first words of a
# heading. If a heading has several names for one thing (`TS-04, the export violin`), each of them stands for its
# number. Words are compared by their stems, in order.

HEADING_CHARS_MAX = 300
PREFIX_STEMS_MIN = 2
"""This many first words of a heading name the text under it. A heading of one word needs that one."""
PHRASES_MAX = 20
QUOTED_CHARS_MAX = 100
TITLES = frozenset[str](WORDS["questions"]["titles"])
ARTICLES = frozenset({"the", "a", "an"})
_QUOTED = re.compile(rf"[«“„\"]([^«»“”„\"\n]{{2,{QUOTED_CHARS_MAX}}})[»”“\"]")
_PARTS = re.compile(r"[/,:;(]|\s[—–-]\s")

Phrase = tuple[str, ...]


class Nearness(IntEnum):
    """How closely a sentence belongs to a named item. A higher value is closer."""

    OTHER = 0
    MENTIONS = 1
    HEADED = 2
    """The sentence is under a heading that names the item."""


@dataclass(frozen=True, slots=True)
class NamedItems:
    """What a text names: numbers such as ts-02 in lower case, and phrases as stems. False if empty."""

    numbers: frozenset[str] = frozenset()
    phrases: tuple[Phrase, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.phrases)

    def stands_in(self, text: str) -> bool:
        """Whether a text names one of the items."""
        if self.numbers and not self.numbers.isdisjoint(names_in(text)):
            return True
        if not self.phrases:
            return False
        held = stems(text)
        return any(_holds(held, phrase) for phrase in self.phrases)

    def is_apart(self, text: str) -> bool:
        """Whether a text names other items of the same series and none of these: TS-04 where TS-02 is asked about."""
        series = {_series(number) for number in self.numbers}
        names = names_in(text) if series else frozenset[str]()
        return self.numbers.isdisjoint(names) and any(_series(one) in series for one in names)

    def others(self, wanted: Iterable[str]) -> frozenset[str]:
        """Returns the requested stems without those of the numbers, which identify an item but do not describe it."""
        return frozenset(wanted).difference(*(stems(number) for number in self.numbers))


def named_in(text: str, headings: Iterable[str], entities: Sequence[SnapshotEntity] = ()) -> NamedItems:
    """Collects what a text names, by numbers, entities, quotation marks and these headings."""
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
        beginning = _beginning(held, heading)
        words_of_headings += [phrase for phrase in beginning if len(phrase) == 1]
        phrases |= dict.fromkeys(phrase for phrase in beginning if len(phrase) > 1)
        if any(len(phrase) > 1 for phrase in beginning) or any(_holds(stems(heading), phrase) for phrase in given):
            numbers |= _numbers_beside(heading, numbers)
    # A single word is the weakest kind of name. It counts only if there is no other.
    kept = [phrase for phrase in phrases if phrase and not _is_number(phrase, numbers)]
    kept = kept or ([] if numbers else list(dict.fromkeys(words_of_headings)))
    return NamedItems(frozenset(numbers), tuple(kept[:PHRASES_MAX]))


def _beginning(held: list[str], heading: str) -> list[Phrase]:
    """Returns the first words of the heading's names that occur in the text. Later names must occur in full."""
    phrases: list[Phrase] = []
    for at, part in enumerate(_PARTS.split(heading)):
        own = tuple(stems(part))
        if not own or part.strip(" *_").lower() in TITLES or (at and not names_in(heading) and "/" not in heading):
            continue
        if len(own) == 1 and set(words(part)) - ARTICLES != {words(part)[-1]}:
            continue  # "What holds" is no name; "Amnesty" is one.
        least = len(own) if at else min(len(own), PREFIX_STEMS_MIN)
        length = next((size for size in range(len(own), least - 1, -1) if _holds(held, own[:size])), 0)
        phrases += [own[:length]] if length else []
    return phrases


def _numbers_beside(heading: str, numbers: set[str]) -> frozenset[str]:
    """Returns the numbers of a heading matched by another of its names; none if one was already asked for."""
    serial_names = frozenset(one for one in names_in(heading) if _series(one))
    return frozenset() if serial_names & numbers else serial_names


def _is_number(phrase: Phrase, numbers: Iterable[str]) -> bool:
    """Whether a phrase only repeats a number."""
    return any(phrase == tuple(stems(number)) for number in numbers)


def _series(number: str) -> str:
    """Returns the part before the digits of a number: `ts-` for ts-02, nothing for 1880s."""
    return number.rstrip("0123456789") if number[:1].isalpha() else ""


def _holds(held: Sequence[str], phrase: Phrase) -> bool:
    """Whether the phrase's stems occur consecutively."""
    size = len(phrase)
    return any(tuple(held[at : at + size]) == phrase for at, stem in enumerate(held) if stem == phrase[0])

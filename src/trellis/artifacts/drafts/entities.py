"""Entities: which of them a text names, and which passages are about them."""


# ruff: noqa: RUF001 - quotes and dashes as people type them

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import islice, takewhile

from trellis.agents.offline.comparison import names_in
from trellis.agents.offline.phrases import WORDS
from trellis.artifacts.snapshot import SnapshotEntity
from trellis.nlm.words import VOCABULARIES, spans, stem, stems, words

# Which entities a text names, and how sure that is.
#
# Names, slugs and aliases are compared word by word. The confidence says how: 1.0 the name or slug letter by letter, 0.95 in other case,
# 0.9 in another form of the words (`nlm.words`, or with other endings of Ukrainian); an alias counts `ALIAS_SHARE` of that; a name with a slip of the pen counts `FUZZY_SHARE`
# of how alike the letters are. Where one text names several entities equally well, each gets its part of the confidence.

EXACT = 1.0
FOLDED = 0.95
INFLECTED = 0.9
ALIAS_SHARE = 0.95
FUZZY_SHARE = 0.8
FUZZY_LIKENESS_MIN = 0.84
WORD_LIKENESS_MIN = 0.75
FUZZY_CHARS_MIN = 5
SURE_MIN = 0.85
"""From here on a text is taken to name the entity."""
WORDS_MAX = 20_000
FUZZY_WORDS_MAX = 2_000
FUZZY_FORMS_MAX = 400
FORM_WORDS_MAX = 8
MATCHES_MAX = 200
BEGINNING_MIN = 4
_ENDINGS = frozenset((*VOCABULARIES["uk"].endings, ""))


@dataclass(frozen=True, slots=True)
class EntityOccurrence:
    """A text that names an entity."""

    text: str
    slug: str
    confidence: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _EntityForm:
    """One way to write an entity."""

    slug: str
    written: str
    share: float
    stems: tuple[str, ...]


class EntityFinder:
    """The entities of a task, ready to be looked for."""

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
        """What of the text names an entity, in its order; the longest names first, no word in two."""
        places = spans(text)[:WORDS_MAX]
        found_stems = [stem(text[start:end].lower()) for start, end in places]
        taken: set[int] = set()
        made: list[EntityOccurrence] = []
        for length in self._lengths:
            for at in range(len(places) - length + 1):
                forms = self._by_stems.get(tuple(found_stems[at : at + length]))
                if forms and taken.isdisjoint(range(at, at + length)):
                    taken.update(range(at, at + length))
                    made += _best(text, places[at][0], places[at + length - 1][1], forms)
        made += self._alike(text, places[:FUZZY_WORDS_MAX], taken, fuzzy=fuzzy)
        return sorted(made, key=lambda match: (match.start, match.slug))[:MATCHES_MAX]

    def occurring(self, text: str) -> list[str]:
        """The slugs of the entities that a text surely names, in the order of the entities."""
        found = {match.slug for match in self.matches(text, fuzzy=False) if match.confidence >= SURE_MIN}
        return [slug for slug in self._order if slug in found]

    def written(self, slug: str, text: str) -> str:
        """How a text writes an entity whose name is not known, else its name."""
        name = self.names[slug]
        if name != slug:
            return name
        return next((match.text for match in self.matches(text, fuzzy=False) if match.slug == slug), name)

    def _alike(
        self, text: str, places: list[tuple[int, int]], taken: set[int], *, fuzzy: bool
    ) -> Iterator[EntityOccurrence]:
        """Names with other endings or a slip of the pen, among the words that name nothing else."""
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
    """The entities that are meant, in the order in which they are asked for, then the others; of an unknown one only the slug is known."""
    known = {entity.slug: entity for entity in entities}
    wanted = {slug: known.get(slug) or SnapshotEntity(slug=slug, name=slug) for slug in slugs}
    return (*wanted.values(), *(entity for entity in entities if entity.slug not in wanted))


def _forms(entity: SnapshotEntity) -> Iterator[_EntityForm]:
    ways = [(entity.name, 1.0), (entity.slug, 1.0), *((alias, ALIAS_SHARE) for alias in entity.aliases)]
    for written, share in ways:
        places = spans(written)
        yield _EntityForm(entity.slug, written, share, tuple(stem(written[start:end].lower()) for start, end in places))


def _best(text: str, start: int, end: int, forms: list[_EntityForm]) -> Iterator[EntityOccurrence]:
    """The entities that this place names best, each with its part."""
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
    """How sure it is that a text is another form of a name, or a slip of the pen; 0.0 when it is neither."""
    if _is_inflected(written.lower(), form.written.lower()):
        return INFLECTED * form.share
    likeness = _likeness(written.lower(), form.written.lower()) if fuzzy else 0.0
    return FUZZY_SHARE * form.share * likeness if likeness >= FUZZY_LIKENESS_MIN else 0.0


def _is_inflected(written: str, name: str) -> bool:
    """Whether each word begins alike and goes on with an ending of Ukrainian: Онуфрієм Петриком is Онуфрій Петрик."""
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
    """How alike two texts are letter by letter; 0.0 where a figure differs, because figures are not slips."""
    if first[:1] != second[:1] or abs(len(first) - len(second)) > 2 or _digits(first) != _digits(second):
        return 0.0
    if any(_ratio(*pair) < WORD_LIKENESS_MIN for pair in zip(words(first), words(second), strict=False)):
        return 0.0
    return _ratio(first, second)


def _ratio(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def _digits(text: str) -> str:
    return "".join(letter for letter in text if letter.isdigit())


# Which things a text asks about by name, and which passages are theirs.
#
# A name is a number such as TS-02, a known entity, words in quotation marks that some source holds, or the first words of a heading. A
# heading that has several names for one thing (`TS-04, the export violin`) lets each of them stand for its number. Words are compared by
# their stems, in the order in which they are written.

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

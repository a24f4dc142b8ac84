"""Which entities a text names, and how sure that is.

Names, slugs and aliases are compared word by word. The confidence says how: 1.0 the name or slug letter by letter, 0.95 in other case,
0.9 in another form of the words (`nlm.words`, or with other endings of Ukrainian); an alias counts `ALIAS_SHARE` of that; a name with a slip of the pen counts `FUZZY_SHARE`
of how alike the letters are. Where one text names several entities equally well, each gets its part of the confidence.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice, takewhile

from trellis.artifacts.snapshot import SnapshotEntity
from trellis.nlm.words import VOCABULARIES, spans, stem, words

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

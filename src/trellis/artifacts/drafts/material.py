"""The material of a task: sentences of its sources, and how chosen ones become text."""


# ruff: noqa: RUF001 - dashes and quotes as people type them

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from trellis.agents.offline.comparison import names_in
from trellis.agents.offline.phrases import language_of
from trellis.artifacts.content import ITEMS_MAX, ArtifactDraft, ArtifactSource, ArtifactType, checked_content
from trellis.artifacts.drafts.entities import TITLES, NamedItems, Nearness, named_in
from trellis.artifacts.drafts.phrases import CONCLUDING, LEANING, OPEN
from trellis.artifacts.snapshot import SnapshotEntity
from trellis.nlm.citations import EXCERPT_CHARS_MAX
from trellis.nlm.extractive import COVERAGE_MIN, coverage, fit_of
from trellis.nlm.index import IndexedPassage, PassageIndex, RankedPassage
from trellis.nlm.passages import Sentence, sentences
from trellis.nlm.provider import Citation, Language, NlmSource, corpus
from trellis.nlm.words import stems, words

# The sources of a task as sentences that can be chosen, each with its exact place: nothing that is not a source's own can come out.
#
# What belongs to a question is decided as the extractive provider decides it (`nlm.extractive`): passages are ranked, one that holds
# less than `COVERAGE_MIN` of what is asked does not speak to it, and sentences are weighed by what they share with it.

PASSAGES_LOOKED_AT = 30
SCORE_SHARE_MIN = 0.4
"""A sentence belongs to a question if it fits at least this well against the best one."""
HEADED_EACH_MAX = 6
"""Of a passage under a heading that names what is asked about, so many sentences are chosen whatever they say."""
NAMED_FIT = 0.01
"""How well a sentence fits that says nothing but the name of what is asked: such sentences keep the order of their text."""
BESIDE_MIN = 0.5
BESIDE_STEMS_MIN = 2
"""How much of what is asked a passage holds that does not name it, where a heading does."""
PARAGRAPH_CHARS_MAX = 450
"""A paragraph up to this length is told whole: half of it may say the opposite."""
NAME_STEMS = (2, 6)
"""How many words a cell of a table has that may be a name."""
PARTS_MAX = 12
ATTRIBUTION_WORDS_MAX = 8
NAMES_NOTHING = NamedItems()
_DASHES = ("—", "–", "-")
_CLOSING = " \"'»”’)]*_`"


@dataclass(frozen=True, slots=True)
class SourceSentence:
    """A sentence of a source: `excerpt` is the source's text at its place, letter by letter."""

    ref: str
    headings: tuple[str, ...]
    passage: int
    at: int
    paragraph: int
    """Its paragraph, counted in its passage."""
    sentence: Sentence
    excerpt: str

    @property
    def place(self) -> tuple[str, int]:
        """What tells it from every other."""
        return self.ref, self.sentence.start

    @property
    def shown(self) -> str:
        """How it reads on one line."""
        return self.sentence.shown

    @property
    def key(self) -> str:
        """What a row or an item is about: its first cell, or what stands before its colon. Running text has none."""
        if not self.sentence.row:
            return ""
        first, cells, _ = self.shown.partition("; ")
        return first if cells else first.partition(": ")[0] if ": " in first else ""

    @property
    def is_open(self) -> bool:
        """Whether it asks, or says that something is not known or not done."""
        asks = self.shown.rstrip(_CLOSING).endswith("?")
        titles = [part.strip(" :*_").lower() for part in (self.headings or ("",))[-1].split("/")]
        return asks or OPEN.search(self.shown.lower()) is not None or not TITLES.isdisjoint(titles)

    @property
    def concludes(self) -> bool:
        """Whether it draws a conclusion, decides or states a result."""
        return not self.is_open and not self.shown.endswith(":") and CONCLUDING.search(self.shown.lower()) is not None

    @property
    def leans(self) -> bool:
        """Whether it is about something that the sentence before it names."""
        return LEANING.match(self.shown.lower().lstrip(" \"'«“(*_")) is not None

    @property
    def attributes(self) -> bool:
        """Whether it only says whose words stand above it."""
        return self.shown.startswith(_DASHES) and len(self.shown.split()) <= ATTRIBUTION_WORDS_MAX


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """A sentence and how well it fits: more is better."""

    told: SourceSentence
    score: float
    near: Nearness = Nearness.OTHER
    """Whether it is about something that is asked about by its name."""

    @property
    def is_named(self) -> bool:
        """Whether it is there for the name alone or among other things."""
        return self.near is not Nearness.OTHER or self.score <= NAMED_FIT

    @property
    def order(self) -> tuple[float, ...]:
        """What is named comes before what is not, then what fits better."""
        return -self.near, -self.score, self.told.passage, self.told.at


@dataclass(frozen=True, slots=True)
class PartFindings:
    """What the sources hold about one part of what is asked; `covered` goes from 0 to 1."""

    part: str
    covered: float
    missing: tuple[str, ...]
    """Its words that no passage about it holds."""
    chosen: tuple[RankedSentence, ...]

    @property
    def answered(self) -> bool:
        """Whether any source speaks to it."""
        return self.covered >= COVERAGE_MIN


@dataclass(frozen=True, slots=True)
class _QuestionPart:
    """A part of what is asked, as sentences are weighed against it."""

    wanted: list[str]
    named: NamedItems
    others: frozenset[str]
    language: Language
    spoken_of: bool
    """Whether the sources have something about what is asked about by its number."""


class SourceMaterial:
    """The sources of one task. Sentences that hold all words of an excluded topic are not there."""

    def __init__(self, sources: tuple[NlmSource, ...], *, exclude: Sequence[str] = ()) -> None:
        self._index = PassageIndex(corpus(sources).sources)
        self._under: dict[NamedItems, list[IndexedPassage]] = {}
        self._headings: dict[tuple[tuple[str, ...], NamedItems], bool] = {}
        self._excluded = [found for topic in exclude if (found := frozenset(stems(topic)))]

    def names(self, text: str, entities: Sequence[SnapshotEntity] = ()) -> NamedItems:
        """The things that a text names."""
        return named_in(text, self._callable, entities)

    @cached_property
    def _callable(self) -> list[str]:
        """The headings, and the rows of tables, that things can be called by."""
        # The title of a text is about all of it, and as a name it would call for all of it.
        paths = dict.fromkeys(entry.passage.headings for entry in self._index.entries)
        headings = [heading for path in paths for heading in path[-1:] if len(path) > 1 or names_in(heading)]
        rows = (told for entry in self._index.entries if entry.passage.sentences[-1].row for told in self._told(entry))
        return list(dict.fromkeys((*headings, *(name for told in rows for name in _names_of_row(told)))))

    def speaks_of(self, named: NamedItems) -> bool:
        """Whether a heading or a sentence has what is named."""
        return bool(self._headed(named)) or any(self.nearness(told, named) for told in self.all())

    def nearness(self, told: SourceSentence, named: NamedItems) -> Nearness:
        """How a sentence belongs to what is named."""
        if self._is_headed(told.headings, named) or (named and named.stands_in(told.key)):
            return Nearness.HEADED
        return Nearness.MENTIONS if named and named.stands_in(told.shown) else Nearness.OTHER

    def find(self, part: str, named: NamedItems = NAMES_NOTHING) -> PartFindings:
        """The sentences that speak to a part of what is asked, those about what is named before others, then the best first."""
        wanted = list(dict.fromkeys(stems(part)))
        ranked = self._index.rank(wanted, PASSAGES_LOOKED_AT) if wanted else []
        near = [(one, coverage(self._index, wanted, one.entry)) for one in ranked]
        best = max((covered for _, covered in near), default=0.0)
        near = [(one, covered) for one, covered in near if best >= COVERAGE_MIN]
        spoken = self._is_spoken_of([one.entry for one, _ in near], named)
        asked = _QuestionPart(wanted, named, named.others(wanted), language_of(part), spoken)
        scored = [chosen for one, covered in near for chosen in self._scored(one, ranked[0], covered, asked)]
        looked_at = {one.entry.number for one, _ in near}
        headed = [one for one in self._headed(named) if one.number not in looked_at]
        scored += [one for entry in headed for one in self._all_of(entry, wanted)]
        scored.sort(key=lambda chosen: chosen.order)
        held = frozenset[str]().union(*(one.body | one.context for one in (*(one.entry for one, _ in near), *headed)))
        missing = tuple(dict.fromkeys(word for word in words(part) if stems(word) and not held.issuperset(stems(word))))
        return PartFindings(part, best, missing, _best_each_once(scored))

    def _scored(
        self, one: RankedPassage, first: RankedPassage, covered: float, asked: _QuestionPart
    ) -> Iterator[RankedSentence]:
        """The sentences of a ranked passage that speak to what is asked; those about others of the same series do not."""
        beside = covered >= COVERAGE_MIN and self._is_beside(one.entry, asked)
        headed = self._headed(asked.named)
        for told in self._told(one.entry):
            near = self.nearness(told, asked.named)
            says = not asked.others.isdisjoint(one.entry.sentence_stems[told.at])
            # Words of two languages do not meet: there the name is enough, and so it is where no heading has it.
            mentioned = near and (says or not headed or _language(told) is not asked.language)
            if near is Nearness.HEADED or mentioned or (beside and not is_about_another_item(told, asked.named)):
                fit = fit_of(self._index, asked.wanted, one.entry, told.at) * (0.5 + 0.5 * one.score / first.score)
                fit = fit if says or not near else min(fit, NAMED_FIT)
                if fit > 0.0:
                    yield RankedSentence(
                        told, fit, near if says or near is Nearness.HEADED or not headed else Nearness.OTHER
                    )

    def _is_spoken_of(self, entries: Iterable[IndexedPassage], named: NamedItems) -> bool:
        """Whether the sources have something about what is asked about by its number."""
        near = (told for entry in entries for told in self._told(entry))
        return bool(named.numbers) and (bool(self._headed(named)) or any(self.nearness(told, named) for told in near))

    def _is_beside(self, entry: IndexedPassage, asked: _QuestionPart) -> bool:
        """Whether a passage may answer without a name: where the sources have something about what is named, it needs more for that."""
        held = asked.others & (entry.body | entry.context)
        enough = self.weight(held) >= BESIDE_MIN * self.weight(asked.others)
        return not asked.spoken_of or (enough and len(held) >= min(BESIDE_STEMS_MIN, len(asked.others)))

    def _all_of(self, entry: IndexedPassage, wanted: list[str]) -> Iterator[RankedSentence]:
        """The sentences of a passage whose heading names what is asked about."""
        for told in self._told(entry):
            yield RankedSentence(told, min(fit_of(self._index, wanted, entry, told.at), NAMED_FIT), Nearness.HEADED)

    def _headed(self, named: NamedItems) -> list[IndexedPassage]:
        """The passages under headings that name something."""
        if named not in self._under:
            entries = self._index.entries if named else []
            self._under[named] = [entry for entry in entries if self._is_headed(entry.passage.headings, named)]
        return self._under[named]

    def _is_headed(self, headings: tuple[str, ...], named: NamedItems) -> bool:
        if not named:
            return False
        known = self._headings.get((headings, named))
        if known is None:
            known = self._headings[headings, named] = any(named.stands_in(heading) for heading in headings)
        return known

    def shared(self, told: SourceSentence, wanted: Iterable[str]) -> frozenset[str]:
        """The stems that a sentence itself holds."""
        return self._index.entries[told.passage].sentence_stems[told.at].intersection(wanted)

    def weight(self, found: Iterable[str]) -> float:
        """How much stems tell together: the rarer, the more."""
        return sum(self._index.weight(stem) for stem in found)

    def share(self, told: SourceSentence, part: str) -> float:
        """How much of a part one sentence holds, its headings included: from 0 to 1."""
        wanted = _stems_once(part)
        entry = self._index.entries[told.passage]
        own = entry.sentence_stems[told.at] | frozenset(stems(" ".join(told.headings)))
        whole = sum(self._index.weight(stem) for stem in wanted)
        return sum(self._index.weight(stem) for stem in wanted & own) / whole if whole else 0.0

    def cited(self, citations: Iterable[Citation]) -> list[SourceSentence]:
        """The sentences that verified citations touch, in the order of the citations."""
        places = {told.place: told for told in self.all()}
        touched: dict[tuple[str, int], SourceSentence] = {}
        for citation in citations:
            for place, told in places.items():
                if place[0] == citation.ref and _overlap(told.sentence, citation):
                    touched.setdefault(place, told)
        return list(touched.values())

    def texts(self) -> Iterable[str]:
        """The whole texts."""
        return self._index.texts.values()

    def all(self) -> Iterator[SourceSentence]:
        """Every sentence once, in the order of refs and text."""
        for entry in self._index.entries:
            yield from self._told(entry)

    def passage(self, told: SourceSentence) -> list[SourceSentence]:
        """The sentences of its passage."""
        return self._told(self._index.entries[told.passage])

    def beside(self, told: SourceSentence) -> list[SourceSentence]:
        """A sentence with its paragraph if that is short, else with those before it as far as each leans on the one before."""
        if told.sentence.row:
            return [told]
        paragraph = {one.at: one for one in self.passage(told) if one.paragraph == told.paragraph}
        if sum(len(one.excerpt) for one in paragraph.values()) <= PARAGRAPH_CHARS_MAX:
            return list(paragraph.values())
        return self.led(told)

    def led(self, told: SourceSentence) -> list[SourceSentence]:
        """A sentence with those before it as far as each leans on the one before."""
        paragraph = {one.at: one for one in self.passage(told) if one.paragraph == told.paragraph}
        run = [told]
        while run[0].leans and (before := paragraph.get(run[0].at - 1)):
            run.insert(0, before)
        return run

    def _told(self, entry: IndexedPassage) -> list[SourceSentence]:
        passage = entry.passage
        text = self._index.texts[passage.ref]
        made: list[SourceSentence] = []
        paragraph = 0
        for at, sentence in enumerate(passage.sentences):
            before = passage.sentences[at - 1] if at else sentence
            # A blank line between two sentences, quoted or not, begins a paragraph; so does every item and row.
            paragraph += sentence.row or text.count("\n", before.end, sentence.start) > 1
            if at >= passage.leads and sentence.citable:
                excerpt = text[sentence.start : sentence.end]
                made.append(
                    SourceSentence(passage.ref, passage.headings, entry.number - 1, at, paragraph, sentence, excerpt)
                )
        return [one for one in made if not one.attributes and not self._is_excluded(entry, one)]

    def _is_excluded(self, entry: IndexedPassage, told: SourceSentence) -> bool:
        return any(topic <= entry.sentence_stems[told.at] for topic in self._excluded)


@lru_cache(maxsize=64)
def _stems_once(part: str) -> frozenset[str]:
    """Every sentence is weighed against the same few parts, and a part can be as long as all that is asked."""
    return frozenset(stems(part))


def parts_of(text: str) -> list[str]:
    """What is asked, piece by piece: its sentences and lines, those without a word of their own with the one before."""
    made: list[str] = []
    for line in text.replace(";", "\n").split("\n"):
        for sentence in sentences(line, 0, len(line)):
            part = sentence.shown.strip(" -*•")
            if stems(part) or not made:
                made.append(part)
            else:
                made[-1] = f"{made[-1]} {part}"
    kept = [part for part in made if part]
    return kept if len(kept) <= PARTS_MAX else [*kept[: PARTS_MAX - 1], " ".join(kept[PARTS_MAX - 1 :])]


def is_about_another_item(told: SourceSentence, named: NamedItems) -> bool:
    """Whether a sentence is about another thing of the series that is asked about."""
    return bool(named) and named.is_apart(" ".join((*told.headings[-1:], told.shown)))


def _names_of_row(told: SourceSentence) -> list[str]:
    """The names that a row gives what its first cell numbers, each as a heading would: `TS-04, The export violin`."""
    numbers = names_in(told.key)
    if len(numbers) != 1:
        return []
    cells = [cell.rpartition(": ")[2] for cell in told.shown.split("; ")[1:]]
    fitting = [cell for cell in cells if NAME_STEMS[0] <= len(stems(cell)) <= NAME_STEMS[1]]
    return [f"{next(iter(numbers))}, {cell}" for cell in fitting]


def _language(told: SourceSentence) -> Language:
    """The language of a sentence; numbers such as TS-02 have none."""
    return language_of(" ".join(word for word in told.shown.split() if not names_in(word)))


def _best_each_once(scored: list[RankedSentence]) -> tuple[RankedSentence, ...]:
    """Those that fit nearly as well as the best statement or are about what is named, each wording once."""
    least = SCORE_SHARE_MIN * max((one.score for one in scored if not one.told.is_open), default=0.0)
    first: dict[str, RankedSentence] = {}
    of_passage = Counter[int]()
    for chosen in scored:
        headed = chosen.near is Nearness.HEADED
        of_passage[chosen.told.passage] += headed
        named = of_passage[chosen.told.passage] <= HEADED_EACH_MAX if headed else chosen.is_named
        if chosen.score >= least or named:
            first.setdefault(chosen.told.shown, chosen)
    return tuple(first.values())


def _overlap(sentence: Sentence, citation: Citation) -> bool:
    return sentence.start < citation.end and citation.start < sentence.end


# How chosen sentences become text, and what an artifact shows as its sources. Every quotation is a source's own, letter by letter.

TAG_CHARS_MAX = 100
TAGS_MAX = 20
LEFT_OUT = "[…]"


class SourceQuotes:
    """What an artifact rests on: each excerpt once, those that the provider cited first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], None] = {}

    def cite(self, citations: Iterable[Citation]) -> None:
        """Citations that were verified."""
        for one in citations:
            self.add(one.ref, one.excerpt)

    def add(self, ref: str, excerpt: str) -> None:
        """One excerpt; a part of one that is there already adds nothing."""
        inside = any(ref == known and excerpt in whole for known, whole in self._found)
        if not inside and len(self._found) < ITEMS_MAX and len(excerpt) <= EXCERPT_CHARS_MAX:
            self._found[ref, excerpt] = None

    def sources(self) -> tuple[ArtifactSource, ...]:
        """As the artifact shows them."""
        return tuple(ArtifactSource(ref=ref, excerpt=excerpt) for ref, excerpt in self._found)


def sentences_text(told: Sequence[SourceSentence]) -> str:
    """Sentences as paragraphs, items and rows each on a line of their own; what was left out between two is marked."""
    made: list[str] = []
    for at, one in enumerate(told):
        before = told[at - 1] if at else None
        made.append(f"{_gap(before, one)}{'- ' if one.sentence.row else ''}{one.shown}")
    return "".join(made)


def _gap(before: SourceSentence | None, one: SourceSentence) -> str:
    if before is None:
        return ""
    if one.sentence.row:
        return "\n" if before.sentence.row else "\n\n"
    if (before.ref, before.passage, before.paragraph) != (one.ref, one.passage, one.paragraph):
        return "\n\n"
    return " " if one.at == before.at + 1 else f" {LEFT_OUT} "


def build_draft(
    type_: ArtifactType,
    content: Mapping[str, Any],
    quotes: SourceQuotes,
    *,
    tags: Sequence[str],
    entity_refs: Sequence[str],
) -> ArtifactDraft:
    """The draft of an artifact, its content checked; raises ContentInvalid, which no input should bring about."""
    sources = quotes.sources()
    return ArtifactDraft(
        type=type_,
        entity_refs=tuple(entity_refs)[:ITEMS_MAX],
        tags=tuple(dict.fromkeys(tag[:TAG_CHARS_MAX] for tag in tags if tag))[:TAGS_MAX],
        content=checked_content(type_, content, frozenset(source.ref for source in sources)),
        sources=sources,
    )

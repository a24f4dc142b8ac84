"""The sources of a task as sentences to choose from, and how chosen sentences become text."""


# ruff: noqa: RUF001 - dashes and quotes as people type them

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from trellis.agents.offline.comparison import names_in
from trellis.artifacts.content import ITEMS_MAX, ArtifactDraft, ArtifactSource, ArtifactType, checked_content
from trellis.artifacts.drafts.entities import TITLES, NamedItems, Nearness, named_in
from trellis.artifacts.drafts.phrases import CONCLUDING, LEANING, OPEN
from trellis.artifacts.payloads import SnapshotEntity
from trellis.nlm.citations import EXCERPT_CHARS_MAX
from trellis.nlm.extractive import COVERAGE_MIN, coverage, fit_of
from trellis.nlm.passages import IndexedPassage, PassageIndex, RankedPassage, Sentence, sentences
from trellis.nlm.provider import Citation, Language, NlmSource, corpus, language_of
from trellis.nlm.words import stems, words

# Source sentences, each with its exact position: nothing but the sources' own text can be quoted.
#
# Which sentences answer a question is decided as in the extractive provider (`nlm.extractive`). Passages are ranked. A
# passage that holds less than `COVERAGE_MIN` of the question does not address it. Sentences are scored by the words
# they share with it.

PASSAGES_LOOKED_AT = 30
SCORE_SHARE_MIN = 0.4
"""A sentence is chosen if its score is at least this share of the best one."""
HEADED_EACH_MAX = 6
"""Number of sentences chosen from a passage under a heading that names the item, whatever they say."""
NAMED_FIT = 0.01
"""Score of a sentence that shares only the item's name with the question. Such sentences keep their text order."""
BESIDE_MIN = 0.5
BESIDE_STEMS_MIN = 2
"""How much of the question a passage without the item's name must hold, if some heading names the item."""
PARAGRAPH_CHARS_MAX = 450
"""A paragraph up to this length is quoted whole, because half of it may say the opposite."""
NAME_STEMS = (2, 6)
"""Minimum and maximum number of words in a table cell that may be a name."""
PARTS_MAX = 12
ATTRIBUTION_WORDS_MAX = 8
NAMES_NOTHING = NamedItems()
_DASHES = ("—", "–", "-")
_CLOSING = " \"'»”’)]*_`"


@dataclass(frozen=True, slots=True)
class SourceSentence:
    """A sentence of a source. `excerpt` is the exact source text at its position."""

    ref: str
    headings: tuple[str, ...]
    passage: int
    at: int
    paragraph: int
    """Index of the paragraph in its passage."""
    sentence: Sentence
    excerpt: str

    @property
    def place(self) -> tuple[str, int]:
        """The unique position of the sentence."""
        return self.ref, self.sentence.start

    @property
    def shown(self) -> str:
        return self.sentence.shown

    @property
    def key(self) -> str:
        """What a row or list item is about: its first cell, or the text before its colon. Empty for running text."""
        if not self.sentence.row:
            return ""
        first, cells, _ = self.shown.partition("; ")
        return first if cells else first.partition(": ")[0] if ": " in first else ""

    @property
    def is_open(self) -> bool:
        """Whether the sentence is a question, or says that something is unknown or undone."""
        asks = self.shown.rstrip(_CLOSING).endswith("?")
        titles = [part.strip(" :*_").lower() for part in (self.headings or ("",))[-1].split("/")]
        return asks or OPEN.search(self.shown.lower()) is not None or not TITLES.isdisjoint(titles)

    @property
    def concludes(self) -> bool:
        """Whether the sentence draws a conclusion, decides, or states a result."""
        return not self.is_open and not self.shown.endswith(":") and CONCLUDING.search(self.shown.lower()) is not None

    @property
    def leans(self) -> bool:
        """Whether the sentence refers to something named in the sentence before it."""
        return LEANING.match(self.shown.lower().lstrip(" \"'«“(*_")) is not None

    @property
    def attributes(self) -> bool:
        """Whether the sentence only attributes the words above it."""
        return self.shown.startswith(_DASHES) and len(self.shown.split()) <= ATTRIBUTION_WORDS_MAX


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """A sentence with its score. A higher score fits better."""

    source: SourceSentence
    score: float
    near: Nearness = Nearness.OTHER
    """Whether the sentence is about an item that the question names."""

    @property
    def is_named(self) -> bool:
        """Whether the sentence was chosen because of the item's name."""
        return self.near is not Nearness.OTHER or self.score <= NAMED_FIT

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: sentences about named items first, then better scores."""
        return -self.near, -self.score, self.source.passage, self.source.at


@dataclass(frozen=True, slots=True)
class PartFindings:
    """What the sources hold about one part of the question. `covered` is between 0 and 1."""

    part: str
    covered: float
    missing: tuple[str, ...]
    """Words of the part that no relevant passage contains."""
    chosen: tuple[RankedSentence, ...]

    @property
    def answered(self) -> bool:
        """Whether any source addresses the part."""
        return self.covered >= COVERAGE_MIN


@dataclass(frozen=True, slots=True)
class _QuestionPart:
    """A part of the question, prepared for scoring sentences."""

    wanted: list[str]
    named: NamedItems
    others: frozenset[str]
    language: Language
    spoken_of: bool
    """Whether the sources say something about the item that the question names by its number."""


class SourceMaterial:
    """The sources of one task. Sentences that contain all words of an excluded topic are left out."""

    def __init__(self, sources: tuple[NlmSource, ...], *, exclude: Sequence[str] = ()) -> None:
        self._index = PassageIndex(corpus(sources).sources)
        self._under: dict[NamedItems, list[IndexedPassage]] = {}
        self._headings: dict[tuple[tuple[str, ...], NamedItems], bool] = {}
        self._excluded = [topic_stems for topic in exclude if (topic_stems := frozenset(stems(topic)))]

    def names(self, text: str, entities: Sequence[SnapshotEntity] = ()) -> NamedItems:
        return named_in(text, self._callable, entities)

    @cached_property
    def _callable(self) -> list[str]:
        """The headings and table rows by which items can be named."""
        # The title of a text covers all of it, so as a name it would match the whole text.
        paths = dict.fromkeys(entry.passage.headings for entry in self._index.entries)
        headings = [heading for path in paths for heading in path[-1:] if len(path) > 1 or names_in(heading)]
        rows = (
            sentence
            for entry in self._index.entries
            if entry.passage.sentences[-1].row
            for sentence in self._sentences_of(entry)
        )
        return list(dict.fromkeys((*headings, *(name for sentence in rows for name in _names_of_row(sentence)))))

    def speaks_of(self, named: NamedItems) -> bool:
        """Whether a heading or sentence contains a named item."""
        return bool(self._headed(named)) or any(self.nearness(sentence, named) for sentence in self.all())

    def nearness(self, sentence: SourceSentence, named: NamedItems) -> Nearness:
        """Returns how closely a sentence belongs to the named items."""
        if self._is_headed(sentence.headings, named) or (named and named.stands_in(sentence.key)):
            return Nearness.HEADED
        return Nearness.MENTIONS if named and named.stands_in(sentence.shown) else Nearness.OTHER

    def find(self, part: str, named: NamedItems = NAMES_NOTHING) -> PartFindings:
        """Returns the sentences that address a part of the question: those about named items first, then by score."""
        wanted = list(dict.fromkeys(stems(part)))
        ranked = self._index.rank(wanted, PASSAGES_LOOKED_AT) if wanted else []
        near = [(one, coverage(self._index, wanted, one.entry)) for one in ranked]
        best = max((covered for _, covered in near), default=0.0)
        near = [(one, covered) for one, covered in near if best >= COVERAGE_MIN]
        spoken = self._is_spoken_of([one.entry for one, _ in near], named)
        question = _QuestionPart(wanted, named, named.others(wanted), language_of(part), spoken)
        scored = [chosen for one, covered in near for chosen in self._scored(one, ranked[0], covered, question)]
        looked_at = {one.entry.number for one, _ in near}
        headed = [one for one in self._headed(named) if one.number not in looked_at]
        scored += [one for entry in headed for one in self._all_of(entry, wanted)]
        scored.sort(key=lambda chosen: chosen.order)
        held = frozenset[str]().union(*(one.body | one.context for one in (*(one.entry for one, _ in near), *headed)))
        missing = tuple(dict.fromkeys(word for word in words(part) if stems(word) and not held.issuperset(stems(word))))
        return PartFindings(part, best, missing, _best_each_once(scored))

    def _scored(
        self, one: RankedPassage, first: RankedPassage, covered: float, question: _QuestionPart
    ) -> Iterator[RankedSentence]:
        """Returns the relevant sentences of a ranked passage, without those about other items of the same series."""
        beside = covered >= COVERAGE_MIN and self._is_beside(one.entry, question)
        headed = self._headed(question.named)
        for sentence in self._sentences_of(one.entry):
            near = self.nearness(sentence, question.named)
            says = not question.others.isdisjoint(one.entry.sentence_stems[sentence.at])
            # Words of two languages do not match. There, or if no heading has the name, the name alone is enough.
            mentioned = near and (says or not headed or _language(sentence) is not question.language)
            if near is Nearness.HEADED or mentioned or (beside and not is_about_another_item(sentence, question.named)):
                fit = fit_of(self._index, question.wanted, one.entry, sentence.at) * (
                    0.5 + 0.5 * one.score / first.score
                )
                fit = fit if says or not near else min(fit, NAMED_FIT)
                if fit > 0.0:
                    yield RankedSentence(
                        sentence, fit, near if says or near is Nearness.HEADED or not headed else Nearness.OTHER
                    )

    def _is_spoken_of(self, entries: Iterable[IndexedPassage], named: NamedItems) -> bool:
        """Whether the sources say something about the item named by its number."""
        near = (sentence for entry in entries for sentence in self._sentences_of(entry))
        return bool(named.numbers) and (
            bool(self._headed(named)) or any(self.nearness(sentence, named) for sentence in near)
        )

    def _is_beside(self, entry: IndexedPassage, question: _QuestionPart) -> bool:
        """Whether a passage that does not name the item may answer. It needs more if the sources do cover the item."""
        held = question.others & (entry.body | entry.context)
        enough = self.weight(held) >= BESIDE_MIN * self.weight(question.others)
        return not question.spoken_of or (enough and len(held) >= min(BESIDE_STEMS_MIN, len(question.others)))

    def _all_of(self, entry: IndexedPassage, wanted: list[str]) -> Iterator[RankedSentence]:
        """Returns the sentences of a passage whose heading names the item."""
        for sentence in self._sentences_of(entry):
            yield RankedSentence(
                sentence, min(fit_of(self._index, wanted, entry, sentence.at), NAMED_FIT), Nearness.HEADED
            )

    def _headed(self, named: NamedItems) -> list[IndexedPassage]:
        """Returns the passages under headings that name an item."""
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

    def shared(self, sentence: SourceSentence, wanted: Iterable[str]) -> frozenset[str]:
        """Returns which of the stems a sentence itself contains."""
        return self._index.entries[sentence.passage].sentence_stems[sentence.at].intersection(wanted)

    def weight(self, stems: Iterable[str]) -> float:
        """Returns the total weight of stems. Rarer stems weigh more."""
        return sum(self._index.weight(stem) for stem in stems)

    def share(self, sentence: SourceSentence, part: str) -> float:
        """Returns which share of a part one sentence contains, including its headings: from 0 to 1."""
        wanted = _stems_once(part)
        entry = self._index.entries[sentence.passage]
        own = entry.sentence_stems[sentence.at] | frozenset(stems(" ".join(sentence.headings)))
        whole = sum(self._index.weight(stem) for stem in wanted)
        return sum(self._index.weight(stem) for stem in wanted & own) / whole if whole else 0.0

    def cited(self, citations: Iterable[Citation]) -> list[SourceSentence]:
        """Returns the sentences that verified citations overlap, in the order of the citations."""
        places = {sentence.place: sentence for sentence in self.all()}
        touched: dict[tuple[str, int], SourceSentence] = {}
        for citation in citations:
            for place, sentence in places.items():
                if place[0] == citation.ref and _overlap(sentence.sentence, citation):
                    touched.setdefault(place, sentence)
        return list(touched.values())

    def texts(self) -> Iterable[str]:
        return self._index.texts.values()

    def all(self) -> Iterator[SourceSentence]:
        """Yields every sentence once, in the order of refs and text."""
        for entry in self._index.entries:
            yield from self._sentences_of(entry)

    def passage(self, sentence: SourceSentence) -> list[SourceSentence]:
        return self._sentences_of(self._index.entries[sentence.passage])

    def beside(self, sentence: SourceSentence) -> list[SourceSentence]:
        """Returns a sentence with its whole paragraph if that is short, else with the sentences it depends on."""
        if sentence.sentence.row:
            return [sentence]
        paragraph = {one.at: one for one in self.passage(sentence) if one.paragraph == sentence.paragraph}
        if sum(len(one.excerpt) for one in paragraph.values()) <= PARAGRAPH_CHARS_MAX:
            return list(paragraph.values())
        return self.led(sentence)

    def led(self, sentence: SourceSentence) -> list[SourceSentence]:
        """Returns a sentence with the preceding ones it depends on."""
        paragraph = {one.at: one for one in self.passage(sentence) if one.paragraph == sentence.paragraph}
        run = [sentence]
        while run[0].leans and (before := paragraph.get(run[0].at - 1)):
            run.insert(0, before)
        return run

    def _sentences_of(self, entry: IndexedPassage) -> list[SourceSentence]:
        passage = entry.passage
        text = self._index.texts[passage.ref]
        source_sentences: list[SourceSentence] = []
        paragraph = 0
        for at, sentence in enumerate(passage.sentences):
            before = passage.sentences[at - 1] if at else sentence
            # A blank line between two sentences starts a paragraph, quoted or not. So does every list item and table
            # row.
            paragraph += sentence.row or text.count("\n", before.end, sentence.start) > 1
            if at >= passage.leads and sentence.citable:
                excerpt = text[sentence.start : sentence.end]
                source_sentences.append(
                    SourceSentence(passage.ref, passage.headings, entry.number - 1, at, paragraph, sentence, excerpt)
                )
        return [one for one in source_sentences if not one.attributes and not self._is_excluded(entry, one)]

    def _is_excluded(self, entry: IndexedPassage, sentence: SourceSentence) -> bool:
        return any(topic <= entry.sentence_stems[sentence.at] for topic in self._excluded)


@lru_cache(maxsize=64)
def _stems_once(part: str) -> frozenset[str]:
    """Cached, because every sentence is scored against the same few parts, and a part can be long."""
    return frozenset(stems(part))


def parts_of(text: str) -> list[str]:
    """Splits a question into its sentences and lines. A piece without significant words joins the one before."""
    parts: list[str] = []
    for line in text.replace(";", "\n").split("\n"):
        for sentence in sentences(line, 0, len(line)):
            part = sentence.shown.strip(" -*•")
            if stems(part) or not parts:
                parts.append(part)
            else:
                parts[-1] = f"{parts[-1]} {part}"
    kept = [part for part in parts if part]
    return kept if len(kept) <= PARTS_MAX else [*kept[: PARTS_MAX - 1], " ".join(kept[PARTS_MAX - 1 :])]


def is_about_another_item(sentence: SourceSentence, named: NamedItems) -> bool:
    """Whether a sentence is about another item of the same series."""
    return bool(named) and named.is_apart(" ".join((*sentence.headings[-1:], sentence.shown)))


def _names_of_row(row: SourceSentence) -> list[str]:
    """Returns the names that a table row gives to the item numbered in its first cell: `TS-04, The export violin`."""
    numbers = names_in(row.key)
    if len(numbers) != 1:
        return []
    cells = [cell.rpartition(": ")[2] for cell in row.shown.split("; ")[1:]]
    fitting = [cell for cell in cells if NAME_STEMS[0] <= len(stems(cell)) <= NAME_STEMS[1]]
    return [f"{next(iter(numbers))}, {cell}" for cell in fitting]


def _language(sentence: SourceSentence) -> Language:
    """Returns the language of a sentence, ignoring item numbers such as TS-02."""
    return language_of(" ".join(word for word in sentence.shown.split() if not names_in(word)))


def _best_each_once(scored: list[RankedSentence]) -> tuple[RankedSentence, ...]:
    """Keeps sentences with a good score or about named items, each wording once."""
    least = SCORE_SHARE_MIN * max((one.score for one in scored if not one.source.is_open), default=0.0)
    first: dict[str, RankedSentence] = {}
    of_passage = Counter[int]()
    for chosen in scored:
        headed = chosen.near is Nearness.HEADED
        of_passage[chosen.source.passage] += headed
        named = of_passage[chosen.source.passage] <= HEADED_EACH_MAX if headed else chosen.is_named
        if chosen.score >= least or named:
            first.setdefault(chosen.source.shown, chosen)
    return tuple(first.values())


def _overlap(sentence: Sentence, citation: Citation) -> bool:
    return sentence.start < citation.end and citation.start < sentence.end


# Formatting chosen sentences, and the sources of an artifact. Every quotation is the exact source text.

TAG_CHARS_MAX = 100
TAGS_MAX = 20
LEFT_OUT = "[…]"


class SourceQuotes:
    """The excerpts an artifact is based on, each once. Those that the provider cited come first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], None] = {}

    def cite(self, citations: Iterable[Citation]) -> None:
        for one in citations:
            self.add(one.ref, one.excerpt)

    def add(self, ref: str, excerpt: str) -> None:
        """Adds an excerpt, unless it is part of one already added."""
        inside = any(ref == known and excerpt in whole for known, whole in self._found)
        if not inside and len(self._found) < ITEMS_MAX and len(excerpt) <= EXCERPT_CHARS_MAX:
            self._found[ref, excerpt] = None

    def sources(self) -> tuple[ArtifactSource, ...]:
        return tuple(ArtifactSource(ref=ref, excerpt=excerpt) for ref, excerpt in self._found)


def sentences_text(chosen: Sequence[SourceSentence]) -> str:
    """Formats sentences as paragraphs, with list items and rows on their own lines. Omitted text is marked."""
    texts: list[str] = []
    for at, one in enumerate(chosen):
        before = chosen[at - 1] if at else None
        texts.append(f"{_gap(before, one)}{'- ' if one.sentence.row else ''}{one.shown}")
    return "".join(texts)


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
    """Builds the draft of an artifact and checks its content. Raises ContentInvalid, which no input should cause."""
    sources = quotes.sources()
    return ArtifactDraft(
        type=type_,
        entity_refs=tuple(entity_refs)[:ITEMS_MAX],
        tags=tuple(dict.fromkeys(tag[:TAG_CHARS_MAX] for tag in tags if tag))[:TAGS_MAX],
        content=checked_content(type_, content, frozenset(source.ref for source in sources)),
        sources=sources,
    )

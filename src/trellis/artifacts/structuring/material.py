"""The sources of a task as sentences that can be chosen, each with its exact place: nothing that is not a source's own can come out.

What belongs to a question is decided as the extractive provider decides it (`nlm.extractive`): passages are ranked, one that holds
less than `COVERAGE_MIN` of what is asked does not speak to it, and sentences are weighed by what they share with it.
"""

# ruff: noqa: RUF001 - dashes and quotes as people type them

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trellis.agents.offline.comparing import names_in
from trellis.agents.offline.wording import WORDS
from trellis.artifacts.structuring.wording import CONCLUDING, LEANING, OPEN
from trellis.nlm.extractive import COVERAGE_MIN, coverage, fit_of
from trellis.nlm.index import Entry, Index
from trellis.nlm.provider import Citation, Source, corpus
from trellis.nlm.sentences import Sentence, sentences
from trellis.nlm.words import stems, words

PASSAGES_LOOKED_AT = 30
SCORE_SHARE_MIN = 0.4
"""A sentence belongs to a question if it fits at least this well against the best one."""
NAMED_BONUS = 1.5
"""What it is worth that a sentence names an item that the question names, such as TS-03."""
PARAGRAPH_CHARS_MAX = 450
"""A paragraph up to this length is told whole: half of it may say the opposite."""
PARTS_MAX = 12
ATTRIBUTION_WORDS_MAX = 8
_TITLES = frozenset[str](WORDS["questions"]["titles"])
_DASHES = ("—", "–", "-")
_CLOSING = " \"'»”’)]*_`"


@dataclass(frozen=True, slots=True)
class Told:
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
    def is_open(self) -> bool:
        """Whether it asks, or says that something is not known or not done."""
        asks = self.shown.rstrip(_CLOSING).endswith("?")
        titles = [part.strip(" :*_").lower() for part in (self.headings or ("",))[-1].split("/")]
        return asks or OPEN.search(self.shown.lower()) is not None or not _TITLES.isdisjoint(titles)

    @property
    def concludes(self) -> bool:
        """Whether it draws a conclusion, decides or states a result."""
        return not self.is_open and CONCLUDING.search(self.shown.lower()) is not None

    @property
    def leans(self) -> bool:
        """Whether it is about something that the sentence before it names."""
        return LEANING.match(self.shown.lower().lstrip(" \"'«“(*_")) is not None

    @property
    def attributes(self) -> bool:
        """Whether it only says whose words stand above it."""
        return self.shown.startswith(_DASHES) and len(self.shown.split()) <= ATTRIBUTION_WORDS_MAX


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sentence and how well it fits: more is better."""

    told: Told
    score: float
    named: bool = False
    """Whether it speaks of an item that is asked about by its name."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the sources hold about one part of what is asked; `covered` goes from 0 to 1."""

    part: str
    covered: float
    missing: tuple[str, ...]
    """Its words that no passage about it holds."""
    chosen: tuple[Chosen, ...]

    @property
    def answered(self) -> bool:
        """Whether any source speaks to it."""
        return self.covered >= COVERAGE_MIN


class Material:
    """The sources of one task. Sentences that hold all words of an excluded topic are not there."""

    def __init__(self, sources: tuple[Source, ...], *, exclude: Sequence[str] = ()) -> None:
        self._index = Index(corpus(sources).sources)
        self._excluded = [found for topic in exclude if (found := frozenset(stems(topic)))]

    def find(self, part: str) -> Found:
        """The sentences that speak to a part of what is asked, the best first."""
        wanted = list(dict.fromkeys(stems(part)))
        names = names_in(part)
        ranked = self._index.rank(wanted, PASSAGES_LOOKED_AT)
        near = [(one, coverage(self._index, wanted, one.entry)) for one in ranked] if wanted else []
        best = max((covered for _, covered in near), default=0.0)
        near = [(one, covered) for one, covered in near if best >= COVERAGE_MIN]
        scored: list[Chosen] = []
        for one, covered in near:
            for told in self._told(one.entry):
                named = self._is_named(wanted, names, one.entry, told)
                if covered >= COVERAGE_MIN or named:
                    fit = fit_of(self._index, wanted, one.entry, told.at) * (0.5 + 0.5 * one.score / ranked[0].score)
                    scored.append(Chosen(told, fit * NAMED_BONUS if named else fit, named))
        scored = [chosen for chosen in scored if chosen.score > 0.0]
        scored.sort(key=lambda chosen: (-chosen.score, chosen.told.passage, chosen.told.at))
        held = frozenset[str]().union(*(one.entry.body | one.entry.context for one, _ in near))
        missing = tuple(dict.fromkeys(word for word in words(part) if stems(word) and not held.issuperset(stems(word))))
        return Found(part, best, missing, _once(scored))

    def _is_named(self, wanted: list[str], names: frozenset[str], entry: Entry, told: Told) -> bool:
        """Whether a sentence, or its heading, names an item that is asked about, and it says something else that is asked about."""
        named = names and names_in(" ".join((*told.headings[-1:], told.excerpt))) & names
        others = set(wanted) - {stem for name in named for stem in stems(name)}
        return bool(named) and not others.isdisjoint(entry.sentence_stems[told.at])

    def share(self, told: Told, part: str) -> float:
        """How much of a part one sentence holds, its headings included: from 0 to 1."""
        wanted = set(stems(part))
        entry = self._index.entries[told.passage]
        own = entry.sentence_stems[told.at] | frozenset(stems(" ".join(told.headings)))
        whole = sum(self._index.weight(stem) for stem in wanted)
        return sum(self._index.weight(stem) for stem in wanted & own) / whole if whole else 0.0

    def cited(self, citations: Iterable[Citation]) -> list[Told]:
        """The sentences that verified citations touch, in the order of the citations."""
        places = {told.place: told for told in self.all()}
        touched: dict[tuple[str, int], Told] = {}
        for citation in citations:
            for place, told in places.items():
                if place[0] == citation.ref and _overlap(told.sentence, citation):
                    touched.setdefault(place, told)
        return list(touched.values())

    def all(self) -> Iterator[Told]:
        """Every sentence once, in the order of refs and text."""
        for entry in self._index.entries:
            yield from self._told(entry)

    def passage(self, told: Told) -> list[Told]:
        """The sentences of its passage."""
        return self._told(self._index.entries[told.passage])

    def beside(self, told: Told) -> list[Told]:
        """A sentence with its paragraph if that is short, else with those before it as far as each leans on the one before."""
        if told.sentence.row:
            return [told]
        paragraph = {one.at: one for one in self.passage(told) if one.paragraph == told.paragraph}
        if sum(len(one.excerpt) for one in paragraph.values()) <= PARAGRAPH_CHARS_MAX:
            return list(paragraph.values())
        run = [told]
        while run[0].leans and (before := paragraph.get(run[0].at - 1)):
            run.insert(0, before)
        return run

    def _told(self, entry: Entry) -> list[Told]:
        passage = entry.passage
        text = self._index.texts[passage.ref]
        made: list[Told] = []
        paragraph = 0
        for at, sentence in enumerate(passage.sentences):
            before = passage.sentences[at - 1] if at else sentence
            # A blank line between two sentences, quoted or not, begins a paragraph; so does every item and row.
            paragraph += sentence.row or text.count("\n", before.end, sentence.start) > 1
            if at >= passage.leads and sentence.citable:
                excerpt = text[sentence.start : sentence.end]
                made.append(Told(passage.ref, passage.headings, entry.number - 1, at, paragraph, sentence, excerpt))
        return [one for one in made if not one.attributes and not self._is_excluded(entry, one)]

    def _is_excluded(self, entry: Entry, told: Told) -> bool:
        return any(topic <= entry.sentence_stems[told.at] for topic in self._excluded)


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


def _once(scored: list[Chosen]) -> tuple[Chosen, ...]:
    """Those that fit nearly as well as the best statement or name what is asked about, each wording once."""
    least = SCORE_SHARE_MIN * max((one.score for one in scored if not one.told.is_open), default=0.0)
    first: dict[str, Chosen] = {}
    for chosen in scored:
        if chosen.score >= least or chosen.named:
            first.setdefault(chosen.told.shown, chosen)
    return tuple(first.values())


def _overlap(sentence: Sentence, citation: Citation) -> bool:
    return sentence.start < citation.end and citation.start < sentence.end

"""The extractive provider: answers put together from sentences of the sources, without a model.

Evaluation, 12 documents in English and Ukrainian: hit@3 46/46, held out 12/12; refused without an answer 20/20, held out 8/8.
"""


# ruff: noqa: RUF001 - a typographer's sign

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from trellis.nlm.citations import EXCERPT_CHARS_MAX, verify
from trellis.nlm.errors import NlmTimeout
from trellis.nlm.index import IndexedPassage, PassageIndex, RankedPassage
from trellis.nlm.passages import Passage, Sentence
from trellis.nlm.provider import (
    Citation,
    NlmAnswer,
    NlmQuestion,
    NlmSource,
    PreparedCorpus,
    ProviderHealth,
    check_fits,
    corpus,
    no_answer,
)
from trellis.nlm.words import stems

# An answer put together from sentences of sources: readable, each stretch followed by the number of its citation.
#
# Every word of it is a source's own, the headings and column names included; what is added are colons, dashes and numbers.
# Sentences that stand side by side are one stretch and one citation.

HEADINGS_JOINED = " › "
_SHOWN_GAP = "\n\n"


class _CitationNumbers:
    """Citations by number, each place once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = {}

    def mark(self, ref: str, start: int, end: int) -> str:
        return f"[{self._numbers.setdefault((ref, start, end), len(self._numbers) + 1)}]"

    def places(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(self._numbers)


def stitch_answer(
    parts: list[tuple[Passage, tuple[int, ...]]], texts: dict[str, str]
) -> tuple[str, tuple[Citation, ...]]:
    """The answer's text and its citations, from the chosen sentences of each passage in the order of telling."""
    numbers = _CitationNumbers()
    told = [_paragraph(passage, _with_leads(passage, chosen), numbers) for passage, chosen in parts]
    citations = (Citation(ref, texts[ref][start:end], start, end) for ref, start, end in numbers.places())
    return _SHOWN_GAP.join(told), tuple(citations)


def _with_leads(passage: Passage, chosen: tuple[int, ...]) -> list[Sentence]:
    """An item without the line that leads to it may mean anything: the lead comes along."""
    leads = range(passage.leads) if chosen else ()
    return [passage.sentences[at] for at in sorted({*leads, *chosen}) if passage.sentences[at].citable]


def _paragraph(passage: Passage, sentences: list[Sentence], numbers: _CitationNumbers) -> str:
    lines = [HEADINGS_JOINED.join(passage.headings) + ":"] if passage.headings else []
    for stretch in _stretches(passage, sentences):
        mark = numbers.mark(passage.ref, stretch[0].start, stretch[-1].end)
        shown = " ".join(sentence.shown for sentence in stretch) + " " + mark
        if stretch[0].row:
            lines.append(f"\n- {shown}")
        else:
            lines.append(f" {shown}" if lines else shown)
    return "".join(lines).strip()


def _stretches(passage: Passage, sentences: list[Sentence]) -> list[list[Sentence]]:
    """Sentences side by side are told in one breath; items and rows each have their own line."""
    stretches: list[list[Sentence]] = []
    for sentence in sentences:
        last = stretches[-1] if stretches else []
        if last and not sentence.row and not last[-1].row and _is_adjacent(passage, last, sentence):
            last.append(sentence)
        else:
            stretches.append([sentence])
    return stretches


def _is_adjacent(passage: Passage, stretch: list[Sentence], sentence: Sentence) -> bool:
    follows = passage.sentences.index(sentence) == passage.sentences.index(stretch[-1]) + 1
    return follows and sentence.end - stretch[0].start <= EXCERPT_CHARS_MAX


# The provider that needs no key and no network: it answers with the sources' own sentences.
#
# The passages that share most with the question are ranked (`index`), the sentences in them that share most are taken as
# they are, put under their headings and cited to the character. It invents nothing, and the same sources and question give
# the same bytes. It compares words: a question in one language finds nothing in a source of the other.
#
# What is asked is weighed word by word: the fewer passages hold a word, the more it tells, and one that no source holds
# tells most. A passage that holds less than `COVERAGE_MIN` of it does not answer the question, and an answer is confident
# from `COVERAGE_CONFIDENT` on. In the evaluation (`tests/nlm/evaluation.toml`) the best passage for a question without an
# answer never holds more than 0.28, which is one word of three met by chance, and for one with an answer never less than
# 0.31; with 900 passages instead of 41, chance reached 0.57.

NAME = "extractive"
COVERAGE_MIN = 0.3
COVERAGE_CONFIDENT = 0.7
SENTENCES_MAX = 6
SENTENCE_SHARE_MIN = 0.6
"""A sentence joins the answer if it fits at least this well against the best one."""
CONTEXT_SHARE = 0.4
"""What a word counts for a sentence when only its heading holds it."""
LENGTH_HALVES = 1_200.0
"""The length at which a sentence counts half: a long one holds many words without being about them."""
FIRST_BONUS = 1.25
"""What it is worth that a sentence begins with a word of the question: definitions do."""
FIRST_CHARS = 60
POOL = 3
"""How many times more passages are looked into than are told."""
INDEXES_MAX = 16
INDEXED_CHARS_MAX = 8_000_000


class ExtractiveProvider:
    """Answers from an index of the sources. Indexes are kept while there is room and rebuilt when they are gone."""

    name = NAME

    def __init__(self) -> None:
        self._indexes: OrderedDict[str, PassageIndex] = OrderedDict()

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        """Index the sources."""
        prepared = corpus(sources)
        await self.index(prepared)
        return prepared

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        """The sources' own sentences, or that there are none."""
        check_fits(prepared, question)
        try:
            async with asyncio.timeout(deadline_s):
                index = await self.index(prepared)
                found = await asyncio.to_thread(answer, index, question)
        except TimeoutError:
            raise NlmTimeout(provider=NAME, reason=f"{deadline_s:g} s were not enough") from None
        return verify(found, prepared.sources)

    async def health(self) -> ProviderHealth:
        """It is always there."""
        return ProviderHealth(ok=True, detail="answers from the sources alone, no network")

    async def release(self, prepared: PreparedCorpus) -> None:
        """The first to go when room is needed."""
        if prepared.key in self._indexes:
            self._indexes.move_to_end(prepared.key, last=False)

    async def close(self) -> None:
        """Forget every index."""
        self._indexes.clear()

    async def index(self, prepared: PreparedCorpus) -> PassageIndex:
        """The index of a corpus, from memory or made now."""
        found = self._indexes.get(prepared.key)
        if found is None:
            found = await asyncio.to_thread(PassageIndex, prepared.sources)
            self._indexes[prepared.key] = found
            self._make_room()
        if prepared.key in self._indexes:
            self._indexes.move_to_end(prepared.key)
        return found

    def _make_room(self) -> None:
        # An index that is dropped here may still be answering: it goes when its last user lets go of it.
        while len(self._indexes) > INDEXES_MAX or (
            len(self._indexes) > 1 and sum(index.chars for index in self._indexes.values()) > INDEXED_CHARS_MAX
        ):
            self._indexes.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _SentenceChoice:
    """A sentence of a passage that may go into the answer."""

    rank: int
    at: int
    score: float


def answer(index: PassageIndex, question: NlmQuestion) -> NlmAnswer:
    """The answer to a question from an index; not verified yet."""
    wanted = list(dict.fromkeys(stems(question.text)))
    ranked = index.rank(wanted, question.max_passages * POOL)
    choices = _choices(index, wanted, ranked, question.max_passages)
    told = {choice.rank for choice in choices}
    covered = max((coverage(index, wanted, ranked[rank].entry) for rank in told), default=0.0)
    if covered < COVERAGE_MIN:
        return no_answer(question, model=NAME)
    text, citations = stitch_answer(_parts(ranked, choices), index.texts)
    return NlmAnswer(text=text, citations=citations, confident=covered >= COVERAGE_CONFIDENT, model=NAME)


def coverage(index: PassageIndex, wanted: list[str], entry: IndexedPassage) -> float:
    """How much of the question a passage holds, from 0 to 1."""
    held = sum(index.weight(stem) for stem in wanted if stem in entry.body or stem in entry.context)
    return held / sum(index.weight(stem) for stem in wanted)


def _choices(
    index: PassageIndex, wanted: list[str], ranked: list[RankedPassage], passages_max: int
) -> list[_SentenceChoice]:
    """The sentences that fit best, in the order in which they are told."""
    scored: list[_SentenceChoice] = []
    for rank, best in enumerate(ranked):
        share = best.score / ranked[0].score if ranked[0].score > 0 else 1.0
        for at, sentence in enumerate(best.entry.passage.sentences):
            if at >= best.entry.passage.leads and sentence.citable:
                fit = fit_of(index, wanted, best.entry, at)
                if fit > 0:
                    scored.append(_SentenceChoice(rank, at, fit * (0.5 + 0.5 * share)))
    scored.sort(key=lambda choice: (-choice.score, choice.rank, choice.at))
    told = list(dict.fromkeys(choice.rank for choice in scored))[:passages_max]
    scored = _once(ranked, [choice for choice in scored if choice.rank in told])
    return sorted(_picked(wanted, ranked, scored), key=lambda choice: (told.index(choice.rank), choice.at))


def _once(ranked: list[RankedPassage], scored: list[_SentenceChoice]) -> list[_SentenceChoice]:
    """Without what another source says in the same words."""
    first: dict[str, _SentenceChoice] = {}
    for choice in scored:
        first.setdefault(ranked[choice.rank].entry.passage.sentences[choice.at].shown, choice)
    return list(first.values())


def _picked(wanted: list[str], ranked: list[RankedPassage], scored: list[_SentenceChoice]) -> list[_SentenceChoice]:
    """The sentences that fit nearly as well as the best, then those that say something asked and not yet said."""
    good = [choice for choice in scored if choice.score >= SENTENCE_SHARE_MIN * scored[0].score][:SENTENCES_MAX]
    unsaid = set(wanted).difference(*(_own(ranked, choice) for choice in good))
    for choice in scored[len(good) :]:
        if len(good) < SENTENCES_MAX and choice.rank == scored[0].rank and not unsaid.isdisjoint(_own(ranked, choice)):
            good.append(choice)
            unsaid -= _own(ranked, choice)
    return good


def _own(ranked: list[RankedPassage], choice: _SentenceChoice) -> frozenset[str]:
    return ranked[choice.rank].entry.sentence_stems[choice.at]


def fit_of(index: PassageIndex, wanted: list[str], entry: IndexedPassage, at: int) -> float:
    """What a sentence shares with the question; what only stands in its headings or leads to it counts less."""
    own = entry.sentence_stems[at]
    around = entry.context.union(*entry.sentence_stems[: entry.passage.leads])
    told = sum(index.weight(stem) for stem in wanted if stem in own)
    context = sum(index.weight(stem) for stem in wanted if stem not in own and stem in around)
    sentence = entry.passage.sentences[at]
    length = 1.0 + (sentence.end - sentence.start) / LENGTH_HALVES
    begins = stems(sentence.shown[:FIRST_CHARS])[:1]
    return (told + CONTEXT_SHARE * context) / length * (FIRST_BONUS if begins and begins[0] in wanted else 1.0)


def _parts(ranked: list[RankedPassage], choices: list[_SentenceChoice]) -> list[tuple[Passage, tuple[int, ...]]]:
    """The chosen sentences of each passage, the best passage first."""
    chosen: dict[int, list[int]] = {}
    for choice in choices:
        chosen.setdefault(choice.rank, []).append(choice.at)
    return [(ranked[rank].entry.passage, tuple(positions)) for rank, positions in chosen.items()]

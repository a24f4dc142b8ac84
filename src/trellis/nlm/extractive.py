"""The extractive provider: builds answers from sentences of the sources, without a model, a key or a network.

Passages are ranked by the words they share with the question (`index`). The best sentences in them are quoted unchanged
under their headings, with exact citations. Nothing is invented, and the same sources and question give the same bytes.
Only words are compared: a question in one language finds nothing in a source of another.

The words of the question are weighted: the fewer passages contain a word, the higher its weight, and a word that no
source contains has the highest. A passage that covers less than `COVERAGE_MIN` of the weight does not answer the
question. From `COVERAGE_CONFIDENT` on an answer is confident. In the evaluation (`tests/nlm/evaluation.toml`) the best
passage for a question without an answer never covers more than 0.28, which is one word of three matched by chance, and
for one with an answer never less than 0.31. With 900 passages instead of 41, chance reached 0.57.

Evaluation, 12 documents in English and Ukrainian:
- hit@3 46/46, held out 12/12;
- refused without an answer 20/20, held out 8/8.
"""


# ruff: noqa: RUF001 - a typographer's sign

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from trellis.nlm.citations import EXCERPT_CHARS_MAX, verify
from trellis.nlm.passages import IndexedPassage, Passage, PassageIndex, RankedPassage, Sentence
from trellis.nlm.provider import (
    Citation,
    NlmAnswer,
    NlmQuestion,
    NlmSource,
    NlmTimeout,
    PreparedCorpus,
    ProviderHealth,
    check_fits,
    corpus,
    no_answer,
)
from trellis.nlm.words import stems

# Building the answer: sentences of the sources, each stretch followed by the number of its citation.
#
# All words come from the sources, including headings and column names. Only colons, dashes and numbers are added.
# Adjacent sentences form one stretch with one citation.

HEADINGS_JOINED = " › "
_SHOWN_GAP = "\n\n"


_CitationNumbers = dict[tuple[str, int, int], int]
"""The number of each citation, by ref, start and end."""


def stitch_answer(
    parts: list[tuple[Passage, tuple[int, ...]]], texts: dict[str, str]
) -> tuple[str, tuple[Citation, ...]]:
    """The answer's text and citations, from the chosen sentences of each passage in the order of the answer."""
    numbers: _CitationNumbers = {}
    paragraphs = [_paragraph(passage, _with_leads(passage, chosen), numbers) for passage, chosen in parts]
    citations = (Citation(ref, texts[ref][start:end], start, end) for ref, start, end in numbers)
    return _SHOWN_GAP.join(paragraphs), tuple(citations)


def _with_leads(passage: Passage, chosen: tuple[int, ...]) -> list[Sentence]:
    """The chosen sentences with the lead-in of their list: an item without its lead-in may be misleading."""
    leads = range(passage.leads) if chosen else ()
    return [passage.sentences[at] for at in sorted({*leads, *chosen}) if passage.sentences[at].citable]


def _paragraph(passage: Passage, sentences: list[Sentence], numbers: _CitationNumbers) -> str:
    lines = [HEADINGS_JOINED.join(passage.headings) + ":"] if passage.headings else []
    for stretch in _stretches(passage, sentences):
        number = numbers.setdefault((passage.ref, stretch[0].start, stretch[-1].end), len(numbers) + 1)
        shown = " ".join(sentence.shown for sentence in stretch) + f" [{number}]"
        if stretch[0].row:
            lines.append(f"\n- {shown}")
        else:
            lines.append(f" {shown}" if lines else shown)
    return "".join(lines).strip()


def _stretches(passage: Passage, sentences: list[Sentence]) -> list[list[Sentence]]:
    """Group adjacent sentences. List items and table rows each have their own line."""
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


# The provider: chooses the sentences of an answer.

NAME = "extractive"
COVERAGE_MIN = 0.3
COVERAGE_CONFIDENT = 0.7
SENTENCES_MAX = 6
SENTENCE_SHARE_MIN = 0.6
"""A sentence joins the answer if its score is at least this share of the best one's."""
CONTEXT_SHARE = 0.4
"""The weight of a word for a sentence if only its heading or lead-in contains it."""
LENGTH_HALVES = 1_200.0
"""The length at which a sentence's score is halved: long sentences contain many words without being about them."""
FIRST_BONUS = 1.25
"""Factor for a sentence that begins with a word of the question, as definitions do."""
FIRST_CHARS = 60
POOL = 3
"""How many times more passages are searched than are quoted."""
INDEXES_MAX = 16
INDEXED_CHARS_MAX = 8_000_000


class ExtractiveProvider:
    """Answers from an index of the sources. Indexes are cached while there is room, and rebuilt when needed."""

    name = NAME

    def __init__(self) -> None:
        self._indexes: OrderedDict[str, PassageIndex] = OrderedDict()

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        prepared = corpus(sources)
        await self.index(prepared)
        return prepared

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        """Sentences of the sources, or the answer that there are none."""
        check_fits(prepared, question)
        try:
            async with asyncio.timeout(deadline_s):
                index = await self.index(prepared)
                answered = await asyncio.to_thread(answer, index, question)
        except TimeoutError:
            raise NlmTimeout(provider=NAME, reason=f"{deadline_s:g} s were not enough") from None
        return verify(answered, prepared.sources)

    async def health(self) -> ProviderHealth:
        return ProviderHealth(ok=True, detail="answers from the sources alone, no network")

    async def release(self, prepared: PreparedCorpus) -> None:
        """Make this corpus the first to be dropped when room is needed."""
        if prepared.key in self._indexes:
            self._indexes.move_to_end(prepared.key, last=False)

    async def close(self) -> None:
        self._indexes.clear()

    async def index(self, prepared: PreparedCorpus) -> PassageIndex:
        """The index of a corpus, cached or built now."""
        known = self._indexes.get(prepared.key)
        if known is None:
            known = await asyncio.to_thread(PassageIndex, prepared.sources)
            self._indexes[prepared.key] = known
            self._make_room()
        if prepared.key in self._indexes:
            self._indexes.move_to_end(prepared.key)
        return known

    def _make_room(self) -> None:
        # A dropped index may still be in use: it is freed when its last user releases it.
        while len(self._indexes) > INDEXES_MAX or (
            len(self._indexes) > 1 and sum(index.chars for index in self._indexes.values()) > INDEXED_CHARS_MAX
        ):
            self._indexes.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _SentenceChoice:
    """A candidate sentence for the answer."""

    rank: int
    at: int
    score: float


def answer(index: PassageIndex, question: NlmQuestion) -> NlmAnswer:
    """The answer to a question from an index, not verified yet."""
    wanted = list(dict.fromkeys(stems(question.text)))
    ranked = index.rank(wanted, question.max_passages * POOL)
    choices = _choices(index, wanted, ranked, question.max_passages)
    ranks = {choice.rank for choice in choices}
    covered = max((coverage(index, wanted, ranked[rank].entry) for rank in ranks), default=0.0)
    if covered < COVERAGE_MIN:
        return no_answer(question, model=NAME)
    text, citations = stitch_answer(_parts(ranked, choices), index.texts)
    return NlmAnswer(text=text, citations=citations, confident=covered >= COVERAGE_CONFIDENT, model=NAME)


def coverage(index: PassageIndex, wanted: list[str], entry: IndexedPassage) -> float:
    """The share of the question's weight that a passage contains, from 0 to 1."""
    held = sum(index.weight(stem) for stem in wanted if stem in entry.body or stem in entry.context)
    return held / sum(index.weight(stem) for stem in wanted)


def _choices(
    index: PassageIndex, wanted: list[str], ranked: list[RankedPassage], passages_max: int
) -> list[_SentenceChoice]:
    """The best sentences, in the order of the answer."""
    scored: list[_SentenceChoice] = []
    for rank, best in enumerate(ranked):
        share = best.score / ranked[0].score if ranked[0].score > 0 else 1.0
        for at, sentence in enumerate(best.entry.passage.sentences):
            if at >= best.entry.passage.leads and sentence.citable:
                fit = fit_of(index, wanted, best.entry, at)
                if fit > 0:
                    scored.append(_SentenceChoice(rank, at, fit * (0.5 + 0.5 * share)))
    scored.sort(key=lambda choice: (-choice.score, choice.rank, choice.at))
    ranks = list(dict.fromkeys(choice.rank for choice in scored))[:passages_max]
    scored = _once(ranked, [choice for choice in scored if choice.rank in ranks])
    return sorted(_picked(wanted, ranked, scored), key=lambda choice: (ranks.index(choice.rank), choice.at))


def _once(ranked: list[RankedPassage], scored: list[_SentenceChoice]) -> list[_SentenceChoice]:
    """Drop sentences that repeat another source word for word."""
    first: dict[str, _SentenceChoice] = {}
    for choice in scored:
        first.setdefault(ranked[choice.rank].entry.passage.sentences[choice.at].shown, choice)
    return list(first.values())


def _picked(wanted: list[str], ranked: list[RankedPassage], scored: list[_SentenceChoice]) -> list[_SentenceChoice]:
    """The sentences that score nearly as well as the best, then those that add further words of the question."""
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
    """How well a sentence fits the question. Words that are only in its headings or lead-in count less."""
    own = entry.sentence_stems[at]
    around = entry.context.union(*entry.sentence_stems[: entry.passage.leads])
    direct = sum(index.weight(stem) for stem in wanted if stem in own)
    context = sum(index.weight(stem) for stem in wanted if stem not in own and stem in around)
    sentence = entry.passage.sentences[at]
    length = 1.0 + (sentence.end - sentence.start) / LENGTH_HALVES
    begins = stems(sentence.shown[:FIRST_CHARS])[:1]
    return (direct + CONTEXT_SHARE * context) / length * (FIRST_BONUS if begins and begins[0] in wanted else 1.0)


def _parts(ranked: list[RankedPassage], choices: list[_SentenceChoice]) -> list[tuple[Passage, tuple[int, ...]]]:
    """The chosen sentences of each passage, the best passage first."""
    chosen: dict[int, list[int]] = {}
    for choice in choices:
        chosen.setdefault(choice.rank, []).append(choice.at)
    return [(ranked[rank].entry.passage, tuple(positions)) for rank, positions in chosen.items()]

"""An answer put together from sentences of sources: readable, each stretch followed by the number of its citation.

Every word of it is a source's own, the headings and column names included; what is added are colons, dashes and numbers.
Sentences that stand side by side are one stretch and one citation.
"""

# ruff: noqa: RUF001 - a typographer's sign

from trellis.nlm.citations import EXCERPT_CHARS_MAX
from trellis.nlm.passages import Passage
from trellis.nlm.provider import Citation
from trellis.nlm.sentences import Sentence

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

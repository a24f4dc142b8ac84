"""Markdown cut into passages and sentences, each with its exact place in the source.

A passage is what is ranked: a few paragraphs, a list with the line that leads to it, rows of a table, a block of code,
always under one path of headings. A sentence is what is cited: `source.text[start:end]`, never cutting a word. Whatever
is not Markdown is paragraphs, and every text can be cut: there is no input that fails.
"""

from dataclasses import dataclass

from trellis.nlm.blocks import Block, BlockKind, blocks
from trellis.nlm.provider import NlmSource
from trellis.nlm.sentences import Sentence, row_sentences, sentences

PASSAGE_CHARS_MAX = 900
"""Where a passage ends once it is that long: about a paragraph or two, which is what an answer needs around it."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Sentences that belong together. The first `leads` of them only lead to the others, and may be led twice."""

    ref: str
    headings: tuple[str, ...]
    sentences: tuple[Sentence, ...]
    leads: int = 0


def passages(source: NlmSource) -> list[Passage]:
    """The passages of a source, in its order."""
    made: list[Passage] = []
    gathered: list[Sentence] = []
    under: tuple[str, ...] = ()

    def close(*, leads: int = 0) -> None:
        if gathered:
            made.append(Passage(source.ref, under, tuple(gathered), leads))
            gathered.clear()

    for block in blocks(source.text):
        if block.headings != under:
            close()
            under = block.headings
        found = _cut(source.text, block)
        if block.kind is BlockKind.PARAGRAPH:
            for sentence in found:
                gathered.append(sentence)
                if _size(gathered) >= PASSAGE_CHARS_MAX:
                    close()
            continue
        lead = _lead(gathered) if block.kind is BlockKind.LIST else ()
        # A list goes with the sentence that leads to it; everything before that sentence is a passage of its own.
        del gathered[len(gathered) - len(lead) :]
        close()
        for run in _runs(found):
            gathered.extend((*lead, *run))
            close(leads=len(lead))
    close()
    return made


def _cut(text: str, block: Block) -> list[Sentence]:
    if block.kind is BlockKind.TABLE:
        return row_sentences(text, block)
    whole, row = block.kind is BlockKind.CODE, block.kind is BlockKind.LIST
    return [sentence for start, end in block.spans for sentence in sentences(text, start, end, whole=whole, row=row)]


def _lead(before: list[Sentence]) -> tuple[Sentence, ...]:
    return (before[-1],) if before and before[-1].shown.endswith(":") else ()


def _runs(found: list[Sentence]) -> list[list[Sentence]]:
    """The sentences in runs of about a passage's length."""
    runs: list[list[Sentence]] = [[]]
    for sentence in found:
        if runs[-1] and _size(runs[-1]) >= PASSAGE_CHARS_MAX:
            runs.append([])
        runs[-1].append(sentence)
    return [run for run in runs if run]


def _size(found: list[Sentence]) -> int:
    return sum(sentence.end - sentence.start for sentence in found)

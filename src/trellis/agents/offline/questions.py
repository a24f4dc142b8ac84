"""Chooses the questions that the offline model asks.

They come from the owner's instructions, from disagreements between sources, from open loops, and from the sources.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trellis.agents.offline import comparison
from trellis.agents.offline.phrases import WORDS
from trellis.nlm.passages import Block, BlockKind, blocks
from trellis.storage.memory import markdown
from trellis.storage.memory.layout import OPEN_LOOPS

QUESTION_CHARS_MAX = 400
QUESTIONS_MAX = 14

_TITLES = frozenset[str](WORDS["questions"]["titles"])
_SPACE = re.compile(r"\s+(?:>\s?)*")


class Origin(StrEnum):
    """Where a question came from."""

    OWNER = "owner"
    CONFLICT = "conflict"
    LOOP = "loop"
    SOURCE = "source"


_QUESTIONS_MAX_BY_ORIGIN: Mapping[Origin, int] = {Origin.OWNER: 8, Origin.CONFLICT: 2, Origin.LOOP: 4, Origin.SOURCE: 2}


@dataclass(frozen=True, slots=True)
class QuestionToAsk:
    """A question to ask. `ref` is the source that asks it: quotes from that source do not answer it."""

    text: str
    origin: Origin
    ref: str | None = None


def questions(owner: str, sources: Mapping[str, str], memory: Mapping[str, str]) -> list[QuestionToAsk]:
    """The questions, each once, the owner's first; limited per origin and in total."""
    found = [
        *_first(Origin.OWNER, (QuestionToAsk(text, Origin.OWNER) for text in _listed(owner))),
        *_first(Origin.CONFLICT, (QuestionToAsk(text, Origin.CONFLICT) for text in comparison.subjects(sources))),
        *_first(Origin.LOOP, (QuestionToAsk(text, Origin.LOOP) for text in _loops(memory.get(OPEN_LOOPS, "")))),
        *_first(
            Origin.SOURCE,
            (
                QuestionToAsk(text, Origin.SOURCE, ref)
                for ref, source in sorted(sources.items())
                for text in _listed(source)
            ),
        ),
    ]
    return list({asked.text: asked for asked in reversed(found)}.values())[::-1][:QUESTIONS_MAX]


def _first(origin: Origin, found: Iterator[QuestionToAsk]) -> list[QuestionToAsk]:
    fitting = (asked for asked in found if asked.text and len(asked.text) <= QUESTION_CHARS_MAX)
    return [asked for asked, _ in zip(fitting, range(_QUESTIONS_MAX_BY_ORIGIN[origin]), strict=False)]


def _listed(text: str) -> Iterator[str]:
    """The items of lists under a title such as "Questions", or after a line that ends in "Questions:"."""
    lead = ""
    for block in blocks(text):
        if block.kind is BlockKind.LIST and (_is_title(lead) or any(map(_is_title, block.headings[-1:]))):
            yield from (_on_one_line(text[start:end]) for start, end in block.spans)
        lead = _last_line(text, block) if block.kind is BlockKind.PARAGRAPH else ""


def _is_title(text: str) -> bool:
    return any(part.strip(" :*_#").lower() in _TITLES for part in text.split("/"))


def _last_line(text: str, block: Block) -> str:
    start, end = block.spans[-1]
    line = text[start:end].rsplit("\n", 1)[-1]
    return line if line.rstrip(" *_").endswith(":") else ""


def _loops(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for loop in markdown.loops(text):
        if not loop.closed:
            whole = "\n".join(lines[loop.start : loop.end])
            yield _on_one_line(markdown.LOOP.sub("", whole, count=1))


def _on_one_line(text: str) -> str:
    return _SPACE.sub(" ", text).strip()

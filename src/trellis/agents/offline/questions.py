"""What the offline model asks: the owner's questions, what sources disagree on, open loops, the sources' own questions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trellis.agents.offline import comparing
from trellis.agents.offline.wording import WORDS
from trellis.nlm.blocks import Block, Kind, blocks
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


_MOST: Mapping[Origin, int] = {Origin.OWNER: 8, Origin.CONFLICT: 2, Origin.LOOP: 4, Origin.SOURCE: 2}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to ask. `ref` is the source that asks it: what stands there does not answer it."""

    text: str
    origin: Origin
    ref: str | None = None


def questions(owner: str, sources: Mapping[str, str], memory: Mapping[str, str]) -> list[Asked]:
    """Each question once, those of the owner first, bounded by where they come from and together."""
    found = [
        *_first(Origin.OWNER, (Asked(text, Origin.OWNER) for text in _listed(owner))),
        *_first(Origin.CONFLICT, (Asked(text, Origin.CONFLICT) for text in comparing.subjects(sources))),
        *_first(Origin.LOOP, (Asked(text, Origin.LOOP) for text in _loops(memory.get(OPEN_LOOPS, "")))),
        *_first(
            Origin.SOURCE,
            (Asked(text, Origin.SOURCE, ref) for ref, source in sorted(sources.items()) for text in _listed(source)),
        ),
    ]
    return list({asked.text: asked for asked in reversed(found)}.values())[::-1][:QUESTIONS_MAX]


def _first(origin: Origin, found: Iterator[Asked]) -> list[Asked]:
    fitting = (asked for asked in found if asked.text and len(asked.text) <= QUESTION_CHARS_MAX)
    return [asked for asked, _ in zip(fitting, range(_MOST[origin]), strict=False)]


def _listed(text: str) -> Iterator[str]:
    """The items of lists under a title such as "Questions", or after a line that ends in "Questions:"."""
    lead = ""
    for block in blocks(text):
        if block.kind is Kind.LIST and (_is_title(lead) or any(map(_is_title, block.headings[-1:]))):
            yield from (_flat(text[start:end]) for start, end in block.spans)
        lead = _last_line(text, block) if block.kind is Kind.PARAGRAPH else ""


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
            yield _flat(markdown.LOOP.sub("", whole, count=1))


def _flat(text: str) -> str:
    return _SPACE.sub(" ", text).strip()

"""Whether an answer's citations stand in its sources. This is what "grounded" means here, for every provider.

An excerpt is looked for as it is, then with white space, quotes, dashes and emphasis made alike (`folding`); found, it
becomes the source's own text with its span. What is not found is dropped and flagged, never repaired: no other
source, no similar wording, no guess. Verifying twice changes nothing.
"""

from dataclasses import replace

from trellis.engine.text import storable
from trellis.nlm.folding import Folded, find_whole, is_whole
from trellis.nlm.provider import AnswerFlag, Citation, NlmAnswer, NlmSource

CITATIONS_MAX = 50
EXCERPT_CHARS_MAX = 4_000
EXCERPT_LETTERS_MIN = 8
"""Letters and digits. Fewer are found in any text and show nothing."""
ANSWER_CHARS_MAX = 20_000
FLAG_REF_CHARS_MAX = 200
_OUTER = " \"'…"


def verify(answer: NlmAnswer, sources: tuple[NlmSource, ...]) -> NlmAnswer:
    """The answer with the citations that its sources hold; `confident` only if it was and nothing had to be dropped."""
    places = {source.ref: _SourceText(source) for source in sources}
    kept: list[Citation] = []
    dropped: list[str] = []
    for citation in answer.citations[:CITATIONS_MAX]:
        found = _located(citation, places.get(citation.ref))
        if isinstance(found, AnswerFlag):
            dropped.append(f"{found}:{_shown(citation.ref)}")
        elif found not in kept:
            kept.append(found)
    if len(answer.citations) > CITATIONS_MAX:
        dropped.append(AnswerFlag.CITATIONS_CUT)
    text = storable(answer.text) or ""
    if len(text) > ANSWER_CHARS_MAX:
        text = text[:ANSWER_CHARS_MAX]
        dropped.append(AnswerFlag.TEXT_CUT)
    flags = [*answer.flags, *dropped, *([] if kept else [AnswerFlag.UNGROUNDED])]
    return replace(
        answer,
        text=text,
        citations=tuple(kept),
        flags=tuple(dict.fromkeys(str(flag) for flag in flags)),
        confident=answer.confident and bool(kept) and not dropped,
    )


def is_citable(excerpt: str) -> bool:
    """Whether an excerpt has a length that shows something."""
    letters = sum(letter.isalnum() for letter in excerpt[:EXCERPT_CHARS_MAX])
    return letters >= EXCERPT_LETTERS_MIN and len(excerpt) <= EXCERPT_CHARS_MAX


class _SourceText:
    """A source, and its folded form once an excerpt needs it."""

    def __init__(self, source: NlmSource) -> None:
        self.text = source.text
        self._folded: Folded | None = None

    @property
    def folded(self) -> Folded:
        if self._folded is None:
            self._folded = Folded(self.text)
        return self._folded


def _located(citation: Citation, place: _SourceText | None) -> Citation | AnswerFlag:
    if place is None or len(citation.excerpt) > EXCERPT_CHARS_MAX:
        return AnswerFlag.NOT_FOUND
    if not is_citable(citation.excerpt):
        return AnswerFlag.TOO_SHORT
    span = _exact(citation, place.text) or _alike(citation.excerpt, place.folded)
    if span is None or span[1] - span[0] > EXCERPT_CHARS_MAX:
        return AnswerFlag.NOT_FOUND
    return replace(citation, excerpt=place.text[span[0] : span[1]], start=span[0], end=span[1])


def _exact(citation: Citation, text: str) -> tuple[int, int] | None:
    """The span the provider gave if it is right, else the first place of the excerpt."""
    start, end = citation.start, citation.end
    if 0 <= start < end and text[start:end] == citation.excerpt and is_whole(text, start, end):
        return start, end
    excerpt = citation.excerpt.strip()
    at = find_whole(text, excerpt)
    return None if at < 0 else (at, at + len(excerpt))


def _alike(excerpt: str, folded: Folded) -> tuple[int, int] | None:
    wanted = Folded(excerpt).text.strip(_OUTER)
    at = find_whole(folded.text, wanted) if wanted else -1
    return None if at < 0 else folded.span(at, at + len(wanted))


def _shown(ref: str) -> str:
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in ref[:FLAG_REF_CHARS_MAX]
    )

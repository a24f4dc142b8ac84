"""Decides which part of a provider's answer is usable. Its own words count only if the cited sources support them.

A model's sentence is kept if every word with a digit and at least half of its words occur in the cited passages. In a
language other than the passages', words cannot be compared: then only words with digits decide, and the draft is tagged
`translated`. Everything else is dropped, and the draft says so. The extractive provider has no words of its own.
"""

import re
from dataclasses import dataclass

from trellis.agents.offline.phrases import language_of
from trellis.nlm import extractive
from trellis.nlm.citations import verify
from trellis.nlm.passages import sentences
from trellis.nlm.provider import AnswerFlag, Citation, NlmAnswer, NlmSource
from trellis.nlm.words import stems, words

SHARE_MIN = 0.5
AROUND_CHARS = 600
"""How many characters around a citation count as its passage."""
OWN_WORDS_CHARS_MAX = 4_000
_MARK = re.compile(r"\s*\[\d{1,3}\]")


@dataclass(frozen=True, slots=True)
class GroundedAnswer:
    """The usable part of an answer."""

    citations: tuple[Citation, ...]
    own_words: str
    refused: bool
    """Whether a model read the sources and gave no answer that can be shown from them."""
    unproven: bool
    """Whether it did give an answer, which was dropped because no quotation of it stands in a source."""
    dropped: bool
    """Whether words of the provider were dropped."""
    by_model: bool
    """Whether a model chose the citations. The extractive provider only ranks words, which structuring does better."""
    tags: tuple[str, ...]

    def says(self, part: str) -> bool:
        """Whether the provider's own words address a part of the question."""
        wanted, own = set(stems(part)), set(stems(self.own_words))
        return bool(wanted) and len(wanted & own) >= SHARE_MIN * len(wanted)


def ground_answer(answer: NlmAnswer, sources: tuple[NlmSource, ...]) -> GroundedAnswer:
    """Returns the verified citations, and the provider's sentences that they support."""
    verified = verify(answer, sources)
    own = verified.model != extractive.NAME and AnswerFlag.NO_ANSWER not in verified.flags
    text = _MARK.sub("", verified.text) if own else ""
    said = [one.shown for one in sentences(text, 0, len(text))]
    evidence = _evidence(verified.citations, {source.ref: source.text for source in sources})
    foreign = bool(evidence) and all(language_of(one) is not language_of(verified.text) for one in evidence)
    kept = [sentence for sentence in said if evidence and _is_carried(sentence, evidence, foreign=foreign)]
    own_words = " ".join(kept)[:OWN_WORDS_CHARS_MAX]
    dropped = len(kept) < len(said)
    tags = (
        *(("ungrounded-dropped",) if dropped else ()),
        *(("translated",) if foreign and kept else ()),
        *(("citations-dropped",) if _lost_citations(verified.flags) else ()),
        *(("sources-cut",) if AnswerFlag.SOURCES_CUT in verified.flags else ()),
    )
    by_model = verified.model != extractive.NAME
    refused = not verified.citations and by_model
    unproven = refused and AnswerFlag.NO_ANSWER not in verified.flags
    return GroundedAnswer(verified.citations, own_words, refused, unproven, dropped, by_model, tags)


def _evidence(citations: tuple[Citation, ...], texts: dict[str, str]) -> list[str]:
    """Returns each citation with the text around it."""
    return [
        texts[one.ref][max(0, one.start - AROUND_CHARS) : one.end + AROUND_CHARS]
        for one in citations
        if one.ref in texts
    ]


def _is_carried(sentence: str, evidence: list[str], *, foreign: bool) -> bool:
    held = {word for text in evidence for word in words(text)}
    if any(word not in held for word in words(sentence) if any(letter.isdigit() for letter in word)):
        return False
    own = stems(sentence)
    carried = {stem for text in evidence for stem in stems(text)}
    return foreign or sum(stem in carried for stem in own) >= SHARE_MIN * len(own)


def _lost_citations(flags: tuple[str, ...]) -> bool:
    lost = (AnswerFlag.NOT_FOUND, AnswerFlag.TOO_SHORT, AnswerFlag.CITATIONS_CUT)
    return any(flag.partition(":")[0] in lost for flag in flags)

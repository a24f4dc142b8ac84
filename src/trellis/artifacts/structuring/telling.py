"""How chosen sentences become text, and what an artifact shows as its sources. Every quotation is a source's own, letter by letter."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trellis.artifacts.content import ITEMS_MAX, ArtifactDraft, ArtifactSource, ArtifactType, checked_content
from trellis.artifacts.structuring.material import SourceSentence
from trellis.nlm.citations import EXCERPT_CHARS_MAX
from trellis.nlm.provider import Citation

TAG_CHARS_MAX = 100
TAGS_MAX = 20
LEFT_OUT = "[…]"


class SourceQuotes:
    """What an artifact rests on: each excerpt once, those that the provider cited first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], None] = {}

    def cite(self, citations: Iterable[Citation]) -> None:
        """Citations that were verified."""
        for one in citations:
            self.add(one.ref, one.excerpt)

    def add(self, ref: str, excerpt: str) -> None:
        """One excerpt; a part of one that is there already adds nothing."""
        inside = any(ref == known and excerpt in whole for known, whole in self._found)
        if not inside and len(self._found) < ITEMS_MAX and len(excerpt) <= EXCERPT_CHARS_MAX:
            self._found[ref, excerpt] = None

    def sources(self) -> tuple[ArtifactSource, ...]:
        """As the artifact shows them."""
        return tuple(ArtifactSource(ref=ref, excerpt=excerpt) for ref, excerpt in self._found)


def sentences_text(told: Sequence[SourceSentence]) -> str:
    """Sentences as paragraphs, items and rows each on a line of their own; what was left out between two is marked."""
    made: list[str] = []
    for at, one in enumerate(told):
        before = told[at - 1] if at else None
        made.append(f"{_gap(before, one)}{'- ' if one.sentence.row else ''}{one.shown}")
    return "".join(made)


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
    """The draft of an artifact, its content checked; raises ContentInvalid, which no input should bring about."""
    sources = quotes.sources()
    return ArtifactDraft(
        type=type_,
        entity_refs=tuple(entity_refs)[:ITEMS_MAX],
        tags=tuple(dict.fromkeys(tag[:TAG_CHARS_MAX] for tag in tags if tag))[:TAGS_MAX],
        content=checked_content(type_, content, frozenset(source.ref for source in sources)),
        sources=sources,
    )

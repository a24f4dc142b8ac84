"""Builds a research brief (RESEARCH_BRIEF): what the sources say about a query, their conclusions, and open questions.

Every sentence of a section, every conclusion and every quoted question is the source's own text. Only the title, the
first sentence of the summary and the words around an unanswered part are generated, and they state no fact. No sentence
occurs in two of sections, conclusions and open questions.
"""

# ruff: noqa: RUF001 - Ukrainian

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from trellis.agents.offline import comparison
from trellis.artifacts.content import LINE_CHARS_MAX, TITLE_CHARS_MAX, ArtifactDraft, ArtifactType
from trellis.artifacts.drafts.entities import EntityFinder, NamedItems, Nearness
from trellis.artifacts.drafts.material import (
    PartFindings,
    RankedSentence,
    SourceMaterial,
    SourceQuotes,
    SourceSentence,
    build_draft,
    is_about_another_item,
    parts_of,
    sentences_text,
)
from trellis.artifacts.drafts.phrases import clipped, filled_sentence
from trellis.artifacts.drafts.task import GroundedAnswer, StructuringPrompt, StructuringTask
from trellis.artifacts.payloads import ResearchPayload
from trellis.nlm.extractive import COVERAGE_CONFIDENT, HEADINGS_JOINED
from trellis.nlm.provider import Language, NlmSource, language_of
from trellis.nlm.words import stems
from trellis.storage.memory.layout import OPEN_LOOPS

TITLE_QUERY_CHARS = 120
SENTENCES_EACH_MAX = 12
SENTENCES_BESIDE_MAX = 6
"""Additional sentences from elsewhere, if a heading names the item."""
SECTION_SENTENCES_MAX = 10
SENTENCES_MAX = 100
"""Over all sections. With citations, conclusions and open questions, all still fit into the artifact's sources."""
CONCLUSIONS_MAX = 6
CONCLUSION_SHARE_MIN = 0.3
"""Minimum share of the question that a conclusion itself must contain."""
CONCLUSION_STEMS_MIN = 2
"""Minimum number of its words, if the question names an item that the conclusion does not."""
OPEN_MAX = 10
DISPUTES_MAX = 4
SUMMARY_SENTENCES = 3
COMPARED_MAX = 60
OPEN_SHARE_MIN = 0.3
MISSING_WORDS_MAX = 8
_PROPER = re.compile(r"(?<=[^\W\d_] )[^\W\d_a-zа-яєіїґ][^\W\d_]+(?!\w|-\d)")
"""A proper name inside a sentence. Two statements that share only a name are not about the same matter."""


@dataclass(slots=True)
class _SourceSection:
    """Sentences of one source under one path of headings."""

    order: tuple[float, ...]
    """Sort key of the section's best sentence. The lowest comes first."""
    best: tuple[str, int]
    """Position of the section's best sentence, which may be shown elsewhere."""
    sentences: dict[tuple[str, int], SourceSentence] = field(default_factory=dict[tuple[str, int], SourceSentence])

    @property
    def has_best(self) -> bool:
        return self.best in self.sentences


def build_research_brief(
    task: StructuringTask, payload: ResearchPayload, prompt: StructuringPrompt, grounded: GroundedAnswer
) -> ArtifactDraft:
    """Builds the brief. If the sources have nothing, it has no sections and says so."""
    material = SourceMaterial(prompt.corpus(), exclude=payload.constraints.exclude)
    parts = [*parts_of(payload.query), *payload.constraints.focus]
    named = material.names(payload.query, task.snapshot.entities)
    by_part = {part: material.names(part, task.snapshot.entities) or named for part in parts}
    answers = [] if grounded.refused else [material.find(part, by_part[part]) for part in parts]
    quotes = SourceQuotes()
    quotes.cite(grounded.citations if grounded.by_model else ())
    chosen = _chosen(material, answers, named, grounded)
    disputes = _disputes(answers, [shown for one in chosen for shown in material.beside(one.source)])
    disputed = [one for pair in disputes for one in (pair.first, pair.second)]
    concluded = _conclusions(material, answers, chosen, {one.place for one in disputed}, named)
    sections = _sections(material, chosen, concluded, payload.constraints.max_sections)
    shown = {place for section in sections for place in section.sentences}
    concluded = [one for one in concluded if one.place not in shown]
    opened = _open(material, [one.part for one in answers], {*shown, *(one.place for one in concluded)}, named)
    unmet = _unanswered_parts(prompt, payload, parts, answers, grounded)
    loops = _loops(task, payload.query)
    for one in (*_all_sentences(sections), *concluded, *disputed, *opened, *loops):
        quotes.add(one.ref, one.excerpt)
    content = {
        "title": clipped(
            filled_sentence(prompt.language, "research_title", query=clipped(payload.query, TITLE_QUERY_CHARS)),
            TITLE_CHARS_MAX,
        ),
        "summary": _summary(prompt, sections, [*disputed[:2], *concluded[:1]], grounded),
        "sections": [_shown(prompt, section) for section in sections],
        "conclusions": [_quoted(prompt, one) for one in concluded],
        "open_questions": _lines(
            [
                *unmet,
                *(_dispute(prompt, pair) for pair in disputes),
                *(_quoted(prompt, one) for one in (*opened, *loops)),
            ]
        ),
    }
    tags = ["research", *(["disputed"] if disputes else []), *(["partial"] if unmet and sections else [])]
    return build_draft(
        ArtifactType.RESEARCH_BRIEF,
        content,
        quotes,
        tags=[*tags, *(["nothing-found"] if not sections else []), *grounded.tags, prompt.language.value],
        entity_refs=EntityFinder(task.snapshot.entities).occurring("\n".join(map(str, content.values()))),
    )


def _chosen(
    material: SourceMaterial, findings: list[PartFindings], named: NamedItems, grounded: GroundedAnswer
) -> list[RankedSentence]:
    """Returns the sentences a model cited, then those the sources hold about each part; each sentence once."""
    best = max((one.score for part in findings for one in part.chosen), default=1.0)
    by_model = material.cited(grounded.citations) if grounded.by_model else []
    first: dict[tuple[str, int], RankedSentence] = {}
    cited = [RankedSentence(one, best, material.nearness(one, named)) for one in by_model]
    for one in (*cited, *(one for part in findings for one in part.chosen[: _each_max(part)])):
        known = first.get(one.source.place)
        if known is None or known.order > one.order:
            first[one.source.place] = one
    return list(first.values())


def _each_max(part: PartFindings) -> int:
    """Limits the sentences per part. Those under headings of named items are all kept, within the artifact's bound."""
    headed = sum(one.near is Nearness.HEADED for one in part.chosen)
    return min(SENTENCES_MAX, max(SENTENCES_EACH_MAX, headed + SENTENCES_BESIDE_MAX))


def _conclusions(
    material: SourceMaterial,
    findings: list[PartFindings],
    chosen: list[RankedSentence],
    disputed: set[tuple[str, int]],
    named: NamedItems,
) -> list[SourceSentence]:
    """Returns concluding sentences about the question, best first, without those that another source denies."""
    parts = [one.part for one in findings]
    fitting = [*chosen, *(one for part in findings for one in part.chosen)]
    fitting.sort(key=lambda one: one.order)
    first = {
        one.source.shown: one.source
        for one in reversed(fitting)
        if one.source.concludes
        and one.source.place not in disputed
        and any(_is_asked(material, one, part, named) for part in parts)
    }
    return list(reversed(first.values()))[:CONCLUSIONS_MAX]


def _is_asked(material: SourceMaterial, one: RankedSentence, part: str, named: NamedItems) -> bool:
    """Whether a conclusion is about the question: it says part of it about the named item, or enough by itself."""
    others = named.others(stems(part))
    shared = material.shared(one.source, others)
    if one.near:
        return bool(shared) or not others or named.stands_in(one.source.shown)
    enough = material.weight(shared) >= CONCLUSION_SHARE_MIN * material.weight(others)
    return enough and len(shared) >= (CONCLUSION_STEMS_MIN if named else 1)


def _sections(
    material: SourceMaterial, chosen: list[RankedSentence], concluded: list[SourceSentence], sections_max: int
) -> list[_SourceSection]:
    """Groups the sentences by source and heading, best section first. No section is emptied to form conclusions."""
    moved = {one.place for one in concluded}
    left = SENTENCES_MAX
    sections: dict[tuple[str, tuple[str, ...]], _SourceSection] = {}
    for one in sorted(chosen, key=lambda one: one.order):
        section = sections.setdefault(
            (one.source.ref, one.source.headings), _SourceSection(one.order, one.source.place)
        )
        for sentence in material.beside(one.source):
            new = sentence.place not in section.sentences and not sentence.is_open
            if new and left and len(section.sentences) < SECTION_SENTENCES_MAX:
                section.sentences[sentence.place] = sentence
                left -= 1
    sections = {key: section for key, section in sections.items() if section.sentences}
    for section in sections.values():
        rest = {place: sentence for place, sentence in section.sentences.items() if place not in moved}
        section.sentences = rest or section.sentences
    ordered = sorted(sections.values(), key=lambda section: section.order)
    return ordered[:sections_max]


def _all_sentences(sections: list[_SourceSection]) -> Iterable[SourceSentence]:
    return (sentence for section in sections for sentence in section.sentences.values())


def _shown(prompt: StructuringPrompt, section: _SourceSection) -> dict[str, object]:
    ordered = sorted(section.sentences.values(), key=lambda one: one.sentence.start)
    titles = {source.ref: source.title for source in prompt.sources}
    heading = HEADINGS_JOINED.join(ordered[0].headings) or titles.get(ordered[0].ref) or ordered[0].ref
    return {"heading": clipped(heading, TITLE_CHARS_MAX), "body": sentences_text(ordered), "sources": [ordered[0].ref]}


def _summary(
    prompt: StructuringPrompt, sections: list[_SourceSection], weighty: list[SourceSentence], grounded: GroundedAnswer
) -> str:
    """Says how much was found, then quotes the most important sentences, with both sides of a dispute."""
    if not sections and not grounded.own_words:
        nothing = "unproven_summary" if grounded.unproven else "nothing_summary"
        what = nothing if prompt.sources else "no_sources_summary"
        return filled_sentence(prompt.language, what, read=len(prompt.sources))
    refs = {sentence.ref for sentence in (*_all_sentences(sections), *weighty)}
    opening = filled_sentence(prompt.language, "found_summary", refs=len(refs), read=len(prompt.sources))
    if len(weighty) > 1:
        opening = f"{opening} {filled_sentence(prompt.language, 'disputed_summary')}"
    if grounded.own_words:
        return f"{opening} {grounded.own_words}"
    nearest = [section for section in sections if section.order[:1] == sections[0].order[:1]]
    best = [*weighty, *(section.sentences[section.best] for section in nearest if section.has_best)]
    best = best or [one for section in sections for one in list(section.sentences.values())[:1]]
    prose = [one for one in best if one in weighty or _reads_alone(one)] or best
    shown = dict.fromkeys(sentences_text([one]) for one in prose)
    return "\n\n".join((opening, *list(shown)[:SUMMARY_SENTENCES]))


def _reads_alone(sentence: SourceSentence) -> bool:
    """Whether a sentence is complete prose that neither introduces others nor is a fragment."""
    whole = sentence.shown.count("(") == sentence.shown.count(")")
    return whole and not sentence.sentence.row and not sentence.shown.endswith(":")


def _unanswered_parts(
    prompt: StructuringPrompt,
    payload: ResearchPayload,
    parts: list[str],
    findings: list[PartFindings],
    grounded: GroundedAnswer,
) -> list[str]:
    """Lists what the sources lack: requested sources, parts of the question, and words of parts."""
    there = {source.ref for source in prompt.sources}
    missing = [
        filled_sentence(prompt.language, "missing_source", ref=ref) for ref in payload.sources if ref not in there
    ]
    if grounded.refused:
        what = "unproven" if grounded.unproven else "unanswered"
        return [*missing, *(filled_sentence(prompt.language, what, part=part) for part in parts)]
    for one in findings:
        answered = grounded.says(one.part)
        if not one.answered and not answered:
            missing.append(filled_sentence(prompt.language, "unanswered", part=one.part))
        elif one.missing and one.covered < COVERAGE_CONFIDENT and not answered:
            words = ", ".join(one.missing[:MISSING_WORDS_MAX])
            missing.append(filled_sentence(prompt.language, "partly", part=one.part, words=words))
    return missing


def _open(
    material: SourceMaterial, parts: list[str], shown: set[tuple[str, int]], named: NamedItems
) -> list[SourceSentence]:
    """Returns the sources' own open questions about the query, closest first."""
    opened = [
        one
        for one in material.all()
        if one.is_open and one.place not in shown and not is_about_another_item(one, named)
    ]
    near = [(_nearness(material, one, parts), one) for one in opened]
    near = [(share, one) for share, one in near if share >= OPEN_SHARE_MIN]
    near.sort(key=lambda pair: (-pair[0], pair[1].place))
    return list({one.shown: one for _, one in reversed(near)}.values())[::-1][:OPEN_MAX]


def _nearness(material: SourceMaterial, sentence: SourceSentence, parts: Sequence[str]) -> float:
    """Scores how close a sentence is to the question. Across languages, an item that both name is enough."""
    shares = [material.share(sentence, part) for part in parts]
    language, names = language_of(sentence.shown), comparison.names_in(sentence.shown)
    for part in parts:
        spoken, meant = _language_and_items(part)
        if spoken is not language and not meant.isdisjoint(names):
            shares.append(OPEN_SHARE_MIN)
    return max(shares, default=0.0)


@lru_cache(maxsize=64)
def _language_and_items(part: str) -> tuple[Language, frozenset[str]]:
    """Returns the language of a part and the items it names. Cached, because every sentence is compared with it."""
    return language_of(part), comparison.names_in(part)


def _loops(task: StructuringTask, query: str) -> list[SourceSentence]:
    """Returns open loops of the agent's memory about the question."""
    files = [NlmSource(file.ref, file.text) for file in task.snapshot.memory.files if file.ref.endswith(OPEN_LOOPS)]
    texts = {file.ref: file.text for file in files}
    memory = SourceMaterial(tuple(files))
    near = [(_nearness(memory, one, parts_of(query)), one) for one in memory.all() if one.sentence.row]
    kept = [(share, one) for share, one in near if share >= OPEN_SHARE_MIN and not _is_closed(texts[one.ref], one)]
    return [one for _, one in sorted(kept, key=lambda pair: (-pair[0], pair[1].place))][:OPEN_MAX]


def _is_closed(text: str, sentence: SourceSentence) -> bool:
    line = text.rfind("\n", 0, sentence.sentence.start) + 1
    return "[x]" in text[line : sentence.sentence.start].lower()


@dataclass(frozen=True, slots=True)
class _ConflictingSentences:
    """Two sentences that may conflict, and the kind of conflict."""

    kind: comparison.ConflictKind
    first: SourceSentence
    second: SourceSentence


def _disputes(findings: list[PartFindings], near: Iterable[SourceSentence]) -> list[_ConflictingSentences]:
    """Returns pairs of relevant sentences that may conflict."""
    compared = [one for one in {one.place: one for one in near}.values() if not one.is_open][:COMPARED_MAX]
    by_excerpt = {(one.ref, one.excerpt): one for one in compared}
    statements = [comparison.statement(one.ref, one.excerpt) for one in compared]
    pairs = [pair for one in findings for pair in comparison.denials(_PROPER.sub(" ", one.part), statements, ())]
    pairs += comparison.conflicts([one for one in statements if one.figures])
    first = {frozenset((pair.first.excerpt, pair.second.excerpt)): pair for pair in reversed(pairs)}
    return [
        _ConflictingSentences(pair.kind, *(by_excerpt[one.ref, one.excerpt] for one in (pair.first, pair.second)))
        for pair in list(reversed(first.values()))[:DISPUTES_MAX]
    ]


def _dispute(prompt: StructuringPrompt, pair: _ConflictingSentences) -> str:
    first, second = pair.first, pair.second
    return filled_sentence(
        prompt.language,
        pair.kind.value,
        first=first.shown,
        first_ref=first.ref,
        second=second.shown,
        second_ref=second.ref,
    )


def _quoted(prompt: StructuringPrompt, sentence: SourceSentence) -> str:
    return filled_sentence(prompt.language, "quoted", text=sentence.shown, ref=sentence.ref)


def _lines(texts: Iterable[str]) -> list[str]:
    return [clipped(line, LINE_CHARS_MAX) for line in dict.fromkeys(texts)]

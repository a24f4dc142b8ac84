"""Prepares a proposal draft for review (PREPROCESSED_PROPOSAL).

The result holds the draft as submitted, a normalised form with its names resolved, the issues found, and the entities
it mentions. The draft itself is never changed, and nothing is approved or refused here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from trellis.agents.definition import SafeOutput
from trellis.agents.drafts import REASONING_CHARS_MAX, SUMMARY_CHARS_MAX, TARGET_CHARS_MAX, TEXT_BYTES_MAX
from trellis.agents.offline import comparison
from trellis.artifacts.content import ITEMS_MAX, LINE_CHARS_MAX, ArtifactDraft, ArtifactType, Issue, IssueSeverity
from trellis.artifacts.drafts.draft_rules import (
    CITATIONS,
    ResolvedTarget,
    TargetResolver,
    every_text,
    is_cited,
    is_empty,
    is_published,
    normalised,
    prose,
    rule_violation,
    texts_of,
    values_at,
)
from trellis.artifacts.drafts.entities import EntityFinder, EntityOccurrence
from trellis.artifacts.drafts.material import SourceMaterial, SourceQuotes, build_draft
from trellis.artifacts.drafts.phrases import PLACEHOLDERS, RATIONALE, clipped, filled_sentence
from trellis.artifacts.drafts.task import GroundedAnswer, StructuringPrompt, StructuringTask
from trellis.artifacts.payloads import PreprocessPayload
from trellis.nlm.citations import EXCERPT_CHARS_MAX, verify
from trellis.nlm.passages import sentences
from trellis.nlm.provider import Citation, Language, NlmAnswer, NlmSource
from trellis.nlm.words import stems
from trellis.storage.memory import markdown

RESOLVED = "resolved"
SHOWN_CHARS_MAX = 300
EVIDENCE_MAX = 10
COMPARED_MAX = 300
DENIED_MAX = 40
STATEMENTS_MAX = 60
CONTRADICTIONS_MAX = 10
SHARED_STEMS_MIN = 2
QUOTED_MIN = 12
"""A shorter excerpt may occur in a sentence by chance."""
FIELD_CHARS_MAX = 500
LIMITS = {
    "summary": SUMMARY_CHARS_MAX,
    "reasoning": REASONING_CHARS_MAX,
    "target": TARGET_CHARS_MAX,
    "text": TEXT_BYTES_MAX,
}
_QUOTING = re.compile(r"[>|*_`«»“”„\"]")
REQUIRED_FIELDS = ("action", "summary", "text")


def preprocess_proposal(
    task: StructuringTask, payload: PreprocessPayload, prompt: StructuringPrompt, grounded: GroundedAnswer
) -> ArtifactDraft:
    """Returns the draft with everything found about it."""
    original = payload.proposal_draft
    plain: dict[str, Any] = normalised(original)
    known = EntityFinder(task.snapshot.entities)
    names = TargetResolver(task.snapshot, known)
    sources = task.snapshot.corpus()
    matches = _matches(known, plain)
    target, target_issues = _target(plain, names, prompt.language)
    material = SourceMaterial(sources)
    evidence = _evidence(plain, material)
    cited, citation_issues = _citations(values_at(plain, CITATIONS), sources, prompt.language)
    contradicted, quoted = _contradictions(plain, material, prompt.language)
    violations = [rule_violation(rule, plain, names, prompt.language) for rule in payload.validation_rules]
    issues = [
        *_field_issues(plain, prompt.language),
        *target_issues,
        *(issue for issue in violations if issue),
        *citation_issues,
        *contradicted,
        *_evidence_issues(grounded, (*cited, *quoted, *evidence), prompt.language),
        *([_issue(RESOLVED, IssueSeverity.INFO, prompt.language, "field_replaced")] if RESOLVED in plain else []),
    ]
    quotes = SourceQuotes()
    quotes.cite((*cited, *quoted, *grounded.citations, *evidence))
    content = {
        "original": original,
        "enriched": _enriched(plain, target, names, matches, (*cited, *grounded.citations, *evidence), prompt.language),
        "issues": [issue.model_dump(mode="json") for issue in dict.fromkeys(issues)][:ITEMS_MAX],
        "entity_matches": [
            {"text": match.text, "entity_id": match.slug, "confidence": match.confidence}
            for match in _each_match_once(matches)
        ],
    }
    worst = {issue.severity for issue in issues}
    return build_draft(
        ArtifactType.PREPROCESSED_PROPOSAL,
        content,
        quotes,
        tags=[
            "proposal",
            *(f"has-{one.value}" for one in IssueSeverity if one in worst),
            *grounded.tags,
            prompt.language,
        ],
        entity_refs=[slug for slug in known.names if any(match.slug == slug for match in matches)],
    )


def _enriched(
    plain: Mapping[str, Any],
    target: ResolvedTarget | None,
    names: TargetResolver,
    matches: Sequence[EntityOccurrence],
    citations: Sequence[Citation],
    language: Language,
) -> dict[str, Any]:
    """Returns the normalised draft with its target resolved, and the findings beside it."""
    enriched = dict(plain)
    if target is not None:
        enriched["target"] = names.text_of(target)
    evidence = dict.fromkeys((one.ref, one.excerpt) for one in citations)
    enriched[RESOLVED] = {
        "target": None if target is None else target.to_dict(),
        "entities": list(dict.fromkeys(match.slug for match in matches)),
        "evidence": [{"ref": ref, "excerpt": excerpt} for ref, excerpt in list(evidence)[:EVIDENCE_MAX]],
        "language": language.value,
    }
    return enriched


def _matches(known: EntityFinder, plain: Mapping[str, Any]) -> list[EntityOccurrence]:
    # A published proposal has much metadata. Only its texts and its target were written by its author.
    texts_by_path = {**texts_of(plain), "target": plain.get("target")} if is_published(plain) else every_text(plain)
    texts = [text for path, text in texts_by_path.items() if isinstance(text, str) and not is_cited(path)]
    return [match for text in texts for match in known.matches(text)]


def _each_match_once(matches: Sequence[EntityOccurrence]) -> list[EntityOccurrence]:
    """Keeps each wording of each entity once, highest confidence first."""
    first: dict[tuple[str, str], EntityOccurrence] = {}
    for match in matches:
        known = first.get((match.text, match.slug))
        if known is None or known.confidence < match.confidence:
            first[match.text, match.slug] = match
    return sorted(first.values(), key=lambda match: (-match.confidence, match.slug, match.text))[:ITEMS_MAX]


def _target(
    plain: Mapping[str, Any], names: TargetResolver, language: Language
) -> tuple[ResolvedTarget | None, list[Issue]]:
    value = plain.get("target")
    if is_empty(value):
        return None, [_issue("target", IssueSeverity.ERROR, language, "target_missing")]
    if not isinstance(value, str):
        return None, [_issue("target", IssueSeverity.ERROR, language, "field_not_text")]
    entity = names.resolve(value, plain.get("action"))
    if len(entity) == 1:
        return entity[0], []
    shown = clipped(value, SHOWN_CHARS_MAX)
    if not entity:
        return None, [_issue("target", IssueSeverity.WARNING, language, "target_unresolved", value=shown)]
    ambiguous = {"value": shown, "found": prose(entity)}
    return None, [_issue("target", IssueSeverity.WARNING, language, "target_ambiguous", **ambiguous)]


def _field_issues(plain: Mapping[str, Any], language: Language) -> Iterator[Issue]:
    for name in REQUIRED_FIELDS:
        if not values_at(plain, name):
            yield _issue(name, IssueSeverity.WARNING, language, "field_missing")
    action = plain.get("action")
    if not is_empty(action) and action not in list(SafeOutput):
        known = ", ".join(SafeOutput)
        shown = clipped(str(action), SHOWN_CHARS_MAX)
        yield _issue("action", IssueSeverity.ERROR, language, "action_unknown", value=shown, known=known)
    reasons = (
        *(value for name, value in plain.items() if name.casefold() in RATIONALE),
        *values_at(plain, "reasoning").values(),
    )
    if all(is_empty(value) for value in reasons):
        yield _issue("rationale", IssueSeverity.WARNING, language, "rationale_missing")
    for path, text in every_text(plain).items():
        yield from _text_issues(path, text, language)


def _text_issues(path: str, text: str, language: Language) -> Iterator[Issue]:
    if not text.strip():
        yield _issue(path, IssueSeverity.WARNING, language, "field_empty")
    limit = LIMITS.get(path.removeprefix("content."), TEXT_BYTES_MAX)
    if len(text) > limit:
        yield _issue(path, IssueSeverity.ERROR, language, "field_long", size=len(text), limit=limit)
    if problem := markdown.problem_in(text):
        yield _issue(path, IssueSeverity.ERROR, language, "field_unsafe", problem=problem)
    if not is_cited(path) and (left := PLACEHOLDERS.search(text.lower())):
        yield _issue(path, IssueSeverity.WARNING, language, "placeholder", text=left[0])


def _citations(
    draft: Mapping[str, object], sources: tuple[NlmSource, ...], language: Language
) -> tuple[tuple[Citation, ...], list[Issue]]:
    """Returns the draft's citations that occur in their sources, and issues for the others."""
    kept: list[Citation] = []
    issues: list[Issue] = []
    for path, value in draft.items():
        if not isinstance(value, list):
            if not is_empty(value):
                issues.append(_issue(path, IssueSeverity.WARNING, language, "citation_shape"))
            continue
        for at, item in enumerate(cast("list[object]", value)[:ITEMS_MAX]):
            verified, issue = _citation(f"{path}.{at}", item, sources, language)
            kept += verified
            issues += [issue] if issue else []
    return tuple(kept), issues


def _citation(
    path: str, item: object, sources: tuple[NlmSource, ...], language: Language
) -> tuple[tuple[Citation, ...], Issue | None]:
    one = cast("dict[str, object]", item) if isinstance(item, dict) else {}
    ref, excerpt = one.get("ref"), one.get("excerpt")
    if not isinstance(ref, str) or not isinstance(excerpt, str):
        return (), _issue(path, IssueSeverity.WARNING, language, "citation_shape")
    claimed = Citation(ref, excerpt[: EXCERPT_CHARS_MAX + 1])
    verified = verify(NlmAnswer(text="", citations=(claimed,)), sources).citations
    if verified:
        return verified, None
    shown = {"ref": clipped(ref, SHOWN_CHARS_MAX), "text": clipped(excerpt, SHOWN_CHARS_MAX)}
    return (), _issue(path, IssueSeverity.WARNING, language, "citation_not_found", **shown)


def _contradictions(
    plain: Mapping[str, Any], material: SourceMaterial, language: Language
) -> tuple[list[Issue], list[Citation]]:
    """Finds statements where a source has another figure or denies what the draft says. A person must judge both."""
    # What the draft quotes or cites is no contradiction, and no claim of its own.
    quoting = "\n".join(_normalised_quote(text) for text in every_text(plain).values())
    excerpts = _excerpts(plain)
    held = "\n".join((*excerpts, *(_normalised_quote(text) for text in material.texts())))
    claims = [(path, one) for path, one in _statements(plain) if not _is_no_claim(one.excerpt, held, excerpts)]
    fields = {one.ref: path for path, one in claims}
    shared = frozenset[str]().union(*(one.stems for _, one in claims))
    sharing = (
        sentence
        for sentence in material.all()
        if len(shared & frozenset(stems(sentence.shown))) >= SHARED_STEMS_MIN
        and _normalised_quote(sentence.excerpt) not in quoting
        and _normalised_quote(sentence.shown) not in quoting
    )
    near = [comparison.statement(sentence.ref, sentence.excerpt) for sentence in islice(sharing, COMPARED_MAX)]
    ours = [one for _, one in claims]
    pairs = [*comparison.conflicts_between(ours, near), *(pair for one in ours for pair in _denied(one, near))]
    issues: list[Issue] = []
    quoted: list[Citation] = []
    for pair in pairs[:CONTRADICTIONS_MAX]:
        own, theirs = (pair.first, pair.second) if pair.first.ref in fields else (pair.second, pair.first)
        shown = clipped(theirs.excerpt, LINE_CHARS_MAX // 2)
        claims = {"text": shown, "ref": theirs.ref}
        issues.append(_issue(fields[own.ref], IssueSeverity.WARNING, language, f"contradiction_{pair.kind}", **claims))
        quoted.append(Citation(theirs.ref, theirs.excerpt))
    return issues, quoted


def _own_lines(text: str) -> str:
    """Removes the lines that a text marks as quoted."""
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(">"))


def _excerpts(plain: Mapping[str, Any]) -> list[str]:
    """Returns the excerpts that the draft cites."""
    return [
        text
        for path, one in every_text(plain).items()
        if is_cited(path) and len(text := _normalised_quote(one)) >= QUOTED_MIN
    ]


def _is_no_claim(sentence: str, held: str, excerpts: Sequence[str]) -> bool:
    """Whether a sentence of the draft is no claim of its own: a question, a source's sentence, or a citation."""
    flat = _normalised_quote(sentence)
    return flat.endswith("?") or flat in held or any(excerpt in flat for excerpt in excerpts)


def _normalised_quote(text: str) -> str:
    """Normalises a text for comparing quotations: no extra white space, case, or quotation marks."""
    return " ".join(_QUOTING.sub(" ", text).casefold().split()).rstrip(" .…")


def _statements(plain: Mapping[str, Any]) -> list[tuple[str, comparison.Statement]]:
    """Returns the draft's sentences with the path of their field. Refs start with a line break, unlike source refs."""
    own = (
        (path, f"\n{path}\n{at}", sentence)
        for path, text in ((path, _own_lines(text)) for path, text in texts_of(plain).items())
        for at, sentence in enumerate(sentences(text, 0, len(text)))
    )
    return [(path, comparison.statement(ref, one.shown)) for path, ref, one in islice(own, STATEMENTS_MAX)]


def _denied(one: comparison.Statement, near: Sequence[comparison.Statement]) -> list[comparison.StatementConflict]:
    close = sorted(near, key=lambda other: (-len(one.stems & other.stems), other.ref, other.excerpt))[:DENIED_MAX]
    pairs = comparison.denials(one.excerpt, [one], close)
    return [pair for pair in pairs if one in (pair.first, pair.second)]


def _evidence(plain: Mapping[str, Any], material: SourceMaterial) -> list[Citation]:
    """Returns for each sentence of the draft the closest source sentence, if any is close."""
    chosen = [material.find(one.excerpt).chosen[:1] for _, one in _statements(plain)[:EVIDENCE_MAX]]
    return [Citation(one.source.ref, one.source.excerpt) for some in chosen for one in some]


def _evidence_issues(grounded: GroundedAnswer, shown: Sequence[Citation], language: Language) -> Iterator[Issue]:
    if not grounded.citations and not shown:
        yield _issue("draft", IssueSeverity.INFO, language, "no_evidence")
    if grounded.dropped:
        yield _issue("draft", IssueSeverity.INFO, language, "model_dropped")


def _issue(field: str, severity: IssueSeverity, language: Language, sentence: str, **data: object) -> Issue:
    message = filled_sentence(language, sentence, **data)
    return Issue(field=field[:FIELD_CHARS_MAX] or "draft", severity=severity, message=clipped(message, LINE_CHARS_MAX))

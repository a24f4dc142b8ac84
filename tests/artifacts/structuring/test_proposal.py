"""Preprocessed proposals: the draft untouched, what it names resolved, what is wrong with it said."""

# ruff: noqa: RUF001 - Ukrainian

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.artifacts.structuring.tasks import drafted, says, scripted, snapshot, task
from trellis.agents.definition import SafeOutput
from trellis.agents.run_io import DraftChange
from trellis.agents.run_io import ProposalDraft as AgentDraft
from trellis.artifacts.content import ArtifactDraft, ArtifactType, JobType
from trellis.engine.jobs import Epoch
from trellis.engine.records import Event
from trellis.lifecycles import Role
from trellis.nlm.provider import Citation, NlmProvider
from trellis.proposals.proposal import ProposalContent as ProposalDraft
from trellis.proposals.proposal import document, make_proposal

GOOD: dict[str, Any] = {
    "action": "propose-edit",
    "target": "sources/04-repairs.md",
    "summary": "TS-01: the crack was measured in 2019",
    "text": "TS-01: тріщину від правого ефа поміряно, 41 мм.",
    "reasoning": "The crack should be measured every year.",
}
NO_PLACE = "this stands nowhere at all"


async def preprocess(
    draft: dict[str, Any], *rules: dict[str, Any], provider: NlmProvider | None = None, **changes: Any
) -> ArtifactDraft:
    given = {**draft, **changes}
    payload = {"proposal_draft": given, "validation_rules": list(rules)}
    return await drafted(task(JobType.PROPOSAL_PREPROCESS, payload), provider)


def issues(made: ArtifactDraft, field: str) -> list[tuple[str, str]]:
    return [(one["severity"], one["message"]) for one in made.content["issues"] if one["field"] == field]


@pytest.mark.requirement("JQ-13", "NLM-8")
async def test_valid_draft_has_no_problems_and_lists_its_sources() -> None:
    made = await preprocess(GOOD)
    assert made.type is ArtifactType.PREPROCESSED_PROPOSAL
    assert made.content["issues"] == []
    evidence = made.content["enriched"]["resolved"]["evidence"]
    assert any("41 мм" in one["excerpt"] for one in evidence)
    assert {(one["ref"], one["excerpt"]) for one in evidence} <= {(one.ref, one.excerpt) for one in made.sources}


async def test_the_original_is_what_came_letter_by_letter() -> None:
    draft = {**GOOD, "summary": "  Вологість \r\n для TS-02 ", "extra": {"deep": [" x ", 1, None, {"y": 0.5}]}}
    kept = copy.deepcopy(draft)
    made = await preprocess(draft)
    assert made.content["original"] == kept == draft
    assert made.content["enriched"]["summary"] == "Вологість для TS-02"
    assert made.content["enriched"]["extra"] == {"deep": ["x", 1, None, {"y": 0.5}]}


@pytest.mark.parametrize(
    "target, action, ref, kind",
    [
        ("sources/04-repairs.md", "propose-edit", "sources/04-repairs.md", "source"),
        ("agents/archivist-violin/sources/04-repairs.md", "propose-edit", "sources/04-repairs.md", "source"),
        ("04-repairs", "propose-edit", "sources/04-repairs.md", "source"),
        ("Repairs", "propose-edit", "sources/04-repairs.md", "source"),
        ("зошит ремонтів", "propose-edit", "sources/04-repairs.md", "source"),
        ("скрипку Петрика", "propose-edit", "ts-03", "entity"),
        ("TS-02", "propose-edit", "sources/05-provenance.md", "entity"),
        ("open_loops.md", "memory-update", "open_loops.md", "memory"),
        ("open_loops.md", "propose-comment", "memory/open_loops.md", "memory"),
        ("facts.md", "memory-update", "facts.md", "memory"),
        ("notes/crack.md", "propose-note", "notes/crack.md", "new"),
        ("_agent.md", "logic-update", "_agent.md", "definition"),
    ],
)
async def test_a_target_is_resolved_to_what_it_names(target: str, action: str, ref: str, kind: str) -> None:
    made = await preprocess(GOOD, target=target, action=action)
    assert issues(made, "target") == []
    assert made.content["enriched"]["target"] == ref
    assert made.content["enriched"]["resolved"]["target"]["kind"] == kind


@pytest.mark.parametrize("target", ["sources/99-nothing.md", "notes/crack.md", "../secret", "facts.md"])
async def test_a_target_that_names_nothing_is_a_warning_and_stays(target: str) -> None:
    made = await preprocess(GOOD, target=target)
    assert [severity for severity, _ in issues(made, "target")] == ["warning"]
    assert made.content["enriched"]["target"] == target
    assert made.content["enriched"]["resolved"]["target"] is None


async def test_a_target_that_may_mean_two_texts_names_neither() -> None:
    sources = {"a/notes.md": "# A\n\nOne text.", "b/notes.md": "# B\n\nAnother text."}
    payload = {"proposal_draft": {**GOOD, "target": "notes.md"}}
    made = await drafted(task(JobType.PROPOSAL_PREPROCESS, payload, snapshot(sources=sources)))
    assert "a/notes.md, b/notes.md" in issues(made, "target")[0][1]


@pytest.mark.parametrize(
    "changes, field, severity",
    [
        ({"target": ""}, "target", "error"),
        ({"target": 5}, "target", "error"),
        ({"summary": "   "}, "summary", "warning"),
        ({"summary": "x" * 501}, "summary", "error"),
        ({"text": "hidden \u202e text"}, "text", "error"),
        ({"text": "To be written: TBD"}, "text", "warning"),
        ({"action": "propose-everything"}, "action", "error"),
        ({"reasoning": ""}, "rationale", "warning"),
        ({"citations": [{"ref": "sources/04-repairs.md", "excerpt": NO_PLACE}]}, "citations.0", "warning"),
        ({"citations": "none"}, "citations", "warning"),
        ({"citations": ["none"]}, "citations.0", "warning"),
        ({"resolved": 1}, "resolved", "info"),
    ],
)
async def test_error_in_a_proposal_names_the_wrong_field(changes: dict[str, Any], field: str, severity: str) -> None:
    assert issues(await preprocess(GOOD), field) == []
    made = await preprocess(GOOD, **changes)
    assert severity in [found for found, _ in issues(made, field)]
    assert f"has-{severity}" in made.tags


async def test_a_figure_that_a_source_gives_otherwise_is_shown_with_the_source() -> None:
    made = await preprocess(GOOD, text="Усі шафи тримають 60–65 % відносної вологості.")
    found = [message for _, message in issues(made, "text") if "45–55 %" in message]
    assert found
    assert "sources/06-humidity-and-storage.md" in found[0]
    assert any("45–55 %" in source.excerpt for source in made.sources)


async def test_statement_denied_by_a_source_is_shown_with_that_source() -> None:
    text = "The deed of TS-04 and the paper of TS-04 are kept in the estate of a teacher."
    sources = {"sources/a.md": "The deed of TS-04 was never kept in the estate, no paper of TS-04 is there."}
    payload = {"proposal_draft": {**GOOD, "target": "a.md", "text": text}}
    made = await drafted(task(JobType.PROPOSAL_PREPROCESS, payload, snapshot(sources=sources)))
    assert any("denies" in message and "sources/a.md" in message for _, message in issues(made, "text"))


ONE, OTHER = (
    "And it must be kept at a relative humidity of 60 to 65 percent at all times; the archive confirmed this when it signed.",
    "For instruments that are played, advice usually lies somewhere between 40 and 60 percent relative humidity.",
)
CITED = [
    {"ref": "sources/05-provenance.md", "excerpt": ONE},
    {"ref": "sources/06-humidity-and-storage.md", "excerpt": OTHER},
]
GROUNDS: dict[str, Any] = {"reasoning": "Words were compared.", "citations": CITED, "flags": []}
RUN = "run_2026-02-14_080000_abc123"


def published(draft: ProposalDraft) -> dict[str, Any]:
    """As `trellis proposals show ID --json` has it."""
    proposal = make_proposal(RUN, "archivist-violin", 0, draft)
    moved = Event(
        id=f"{proposal.id}-1",
        job_id=proposal.id,
        lifecycle="proposal",
        type="proposal",
        ts=datetime(2026, 2, 14, tzinfo=UTC),
        role=Role.ORCHESTRATOR,
        actor="orchestrator",
        correlation_id=RUN,
        cause=None,
        source=None,
        target="pending",
        generation=1,
        attempt=0,
        epoch=Epoch(0),
        version=1,
    )
    return json.loads(document(proposal.body, [moved]))


def doubt() -> ProposalDraft:
    text = (
        f"Two figures:\n\n> {ONE}\n>\n> (from sources/05-provenance.md)\n\n> {OTHER}\n\nA person should compare them."
    )
    content = {"summary": "They may not agree", "change": {"type": "append", "text": text}, **GROUNDS}
    return ProposalDraft(action="propose-comment", target="sources/05-provenance.md", content=content)


def facts() -> ProposalDraft:
    update = {
        "file": "facts.md",
        "operation": "append",
        "content": f"- {ONE} (from sources/05-provenance.md)\n- {OTHER}",
    }
    content = {"summary": "What was quoted", "updates": [update], "expected_version": 1, "grounds": [GROUNDS]}
    return ProposalDraft(action="memory-update", target="facts.md+open_loops.md", content=content)


def own_draft() -> dict[str, Any]:
    """As an agent of ours drafts it."""
    return AgentDraft(
        action=SafeOutput.PROPOSE_COMMENT,
        target="sources/05-provenance.md",
        change=DraftChange.APPEND,
        summary="They may not agree",
        text=f"> {ONE}\n\n> {OTHER}",
        reasoning="Words were compared.",
        citations=tuple(Citation(one["ref"], one["excerpt"]) for one in CITED),
    ).to_dict()


@pytest.mark.parametrize(
    "draft", [published(doubt()), published(facts()), own_draft()], ids=["file", "memory", "draft"]
)
async def test_a_proposal_of_our_own_has_nothing_missing_and_what_it_quotes_contradicts_nothing(
    draft: dict[str, Any],
) -> None:
    made = await preprocess(draft)
    assert made.content["issues"] == []
    assert [one["excerpt"] for one in made.content["enriched"]["resolved"]["evidence"][:2]] == [ONE, OTHER]


async def test_error_in_our_own_proposal_names_its_own_fields() -> None:
    draft = published(doubt())
    change = {"type": "append", "text": "TBD. Усі шафи тримають 60–65 % відносної вологості."}
    citations = [{"ref": "sources/04-repairs.md", "excerpt": NO_PLACE}]
    draft["content"] = {"summary": "x" * 501, "change": change, "reasoning": "", "citations": citations}
    made = await preprocess(draft)
    assert [severity for severity, _ in issues(made, "content.summary")] == ["error"]
    assert any("45–55 %" in message for _, message in issues(made, "content.change.text"))
    assert len(issues(made, "content.change.text")) == 2
    assert issues(made, "content.citations.0")
    assert issues(made, "rationale")


@pytest.mark.parametrize(
    "rule, holds, breaks",
    [
        ({"rule": "required"}, "x", ""),
        ({"rule": "max_chars", "value": 3}, "abc", "abcd"),
        ({"rule": "matches", "value": "^TS-[0-9]{2}$"}, "TS-03", "TS-3"),
        ({"rule": "one_of", "value": ["a", 1, True]}, "a", "b"),
        ({"rule": "resolves", "value": "source"}, "repairs", "TS-02"),
        ({"rule": "resolves", "value": "entity"}, "TS-02", "repairs"),
        ({"rule": "resolves"}, "TS-02", "nobody knows this"),
    ],
)
async def test_a_rule_that_does_not_hold_is_an_issue_of_its_severity(
    rule: dict[str, Any], holds: str, breaks: str
) -> None:
    checked = {"field": "content.item", "severity": "info", **rule}
    kept = await preprocess(GOOD, checked, content={"item": holds})
    broken = await preprocess(GOOD, checked, content={"item": breaks})
    assert issues(kept, "content.item") == []
    assert "info" in [severity for severity, _ in issues(broken, "content.item")]


async def test_entities_are_matched_with_a_confidence_that_says_how() -> None:
    made = await preprocess(GOOD, text="TS-02, ts-03, Скрипку Петрика, Онуфрієм Петриком, Онуфрій Петрык.")
    found = {one["text"]: (one["entity_id"], one["confidence"]) for one in made.content["entity_matches"]}
    assert found["TS-02"] == ("ts-02", 1.0)
    assert found["Скрипку Петрика"] == ("ts-03", 0.9)
    assert found["Онуфрієм Петриком"] == ("onufriy-petryk", 0.9)
    slug, confidence = found["Онуфрій Петрык"]
    assert slug == "onufriy-petryk"
    assert 0.6 < confidence < 0.8
    assert made.content["enriched"]["resolved"]["entities"] == ["ts-02", "ts-03", "onufriy-petryk"]


async def test_draft_without_a_matching_source_is_reported() -> None:
    draft = {**GOOD, "summary": "Bananas", "text": "Bananas grow on tropical islands.", "reasoning": "They are yellow."}
    made = await preprocess(draft)
    assert [severity for severity, _ in issues(made, "draft")] == ["info"]


async def test_a_models_ungrounded_words_are_dropped_and_flagged() -> None:
    provider = scripted(says("It was sold for 900 crowns.", ("sources/04-repairs.md", NO_PLACE)))
    made = await preprocess(GOOD, provider=provider)
    assert "crowns" not in str(made.content)
    assert "ungrounded-dropped" in made.tags
    assert any("left out" in message or "вилучено" in message for _, message in issues(made, "draft"))

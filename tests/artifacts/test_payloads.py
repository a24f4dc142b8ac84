"""What a queue job may be asked to do: what fits is taken, everything else is refused with what to change."""

from typing import Any

import pytest

from trellis.artifacts.content import IssueSeverity, JobType
from trellis.artifacts.payloads import (
    BriefPayload,
    PreprocessPayload,
    ResearchPayload,
    StyleGuide,
    read_payload,
)
from trellis.engine.errors import InputError, PayloadInvalid

DRAFT = {"proposal_draft": {"text": "x"}}
DEEP: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": 1}}}}}}}}}


def rules(*some: dict[str, Any]) -> dict[str, Any]:
    return {**DRAFT, "validation_rules": list(some)}


def rule(name: str, **more: Any) -> dict[str, Any]:
    return rules({"field": "text", "rule": name, **more})


@pytest.mark.requirement("D34")
def test_each_type_has_its_own_payload() -> None:
    research = read_payload(JobType.RESEARCH, {"query": "Why?", "sources": ["a.md"], "constraints": {"language": "uk"}})
    brief = read_payload(JobType.BRIEF, {"vision_text": "A plan.", "entity_refs": ["ts-01"]})
    proposal = read_payload(JobType.PROPOSAL_PREPROCESS, rule("max_chars", value=5, severity="warning"))
    assert isinstance(research, ResearchPayload)
    assert research.sources == ("a.md",)
    assert isinstance(brief, BriefPayload)
    assert brief.style_guide == StyleGuide()
    assert isinstance(proposal, PreprocessPayload)
    assert proposal.validation_rules[0].severity is IssueSeverity.WARNING


@pytest.mark.requirement("D34")
@pytest.mark.parametrize(
    "job_type, payload, problem",
    [
        (JobType.RESEARCH, {}, "query"),
        (JobType.RESEARCH, {"query": ""}, "query"),
        (JobType.RESEARCH, {"query": "?!"}, "at least one word"),
        (JobType.RESEARCH, {"query": 5}, "query"),
        (JobType.RESEARCH, {"query": "x" * 2_001}, "2000 characters"),
        (JobType.RESEARCH, {"query": "x\0"}, "zero byte"),
        (JobType.RESEARCH, {"query": "x", "vision_text": "y"}, "vision_text"),
        (JobType.RESEARCH, {"query": "x", "sources": "a.md"}, "sources"),
        (JobType.RESEARCH, {"query": "x", "sources": ["a\nb"]}, "printable"),
        (JobType.RESEARCH, {"query": "x", "constraints": {"max_sections": 21}}, "max_sections"),
        (JobType.RESEARCH, {"query": "x", "constraints": {"language": "fr"}}, "language"),
        (JobType.RESEARCH, {"query": "x", "constraints": {"tone": "dry"}}, "tone"),
        (JobType.BRIEF, {"vision_text": "x"}, "entity_refs"),
        (JobType.BRIEF, {"vision_text": "x", "entity_refs": [""]}, "entity_refs/0"),
        (JobType.BRIEF, {"vision_text": "x", "entity_refs": ["a"] * 51}, "50 items"),
        (JobType.BRIEF, {"vision_text": "x", "entity_refs": [], "style_guide": {"words": 29}}, "30"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {}}, "proposal_draft"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": []}, "proposal_draft"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": DEEP}}, "deeper than 8 levels"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": ["\0"]}}, "no text"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": "\ud800"}}, "JSON cannot"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": float("nan")}}, "JSON cannot"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": object()}}, "JSON cannot"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": "y" * 131_073}}, "131072 bytes"),
        (JobType.PROPOSAL_PREPROCESS, {"proposal_draft": {"x": "y" * 262_144}}, "262144"),
        (JobType.PROPOSAL_PREPROCESS, rule("exists"), "'required', 'max_chars', 'matches', 'one_of', 'resolves'"),
        (JobType.PROPOSAL_PREPROCESS, rule("required", value=1), "value"),
        (
            JobType.PROPOSAL_PREPROCESS,
            rule("max_chars", valeu=5),
            "validation_rules/0/max_chars/valeu: there is no such field (did you mean value?)",
        ),
        (JobType.PROPOSAL_PREPROCESS, rule("max_chars", value="5"), "value"),
        (JobType.PROPOSAL_PREPROCESS, rule("matches", value="("), "no pattern"),
        (JobType.PROPOSAL_PREPROCESS, rule("matches", value="(?=x)"), "look-around"),
        (JobType.PROPOSAL_PREPROCESS, rule("matches", value=r"(\w{20}){20}"), "100 times"),
        (JobType.PROPOSAL_PREPROCESS, rule("matches"), "value"),
        (JobType.PROPOSAL_PREPROCESS, rule("one_of", value=[]), "value"),
        (JobType.PROPOSAL_PREPROCESS, rule("resolves", value="planet"), "value"),
        (JobType.PROPOSAL_PREPROCESS, rule("required", severity="fatal"), "severity"),
        (JobType.PROPOSAL_PREPROCESS, rules(*({"field": "x", "rule": "required"},) * 51), "50 items"),
        (JobType.PROPOSAL_PREPROCESS, rules(*({"field": "x", "rule": "matches", "value": "a"},) * 11), "10 patterns"),
    ],
)
def test_invalid_payload_is_refused_with_the_reason(job_type: JobType, payload: dict[str, Any], problem: str) -> None:
    with pytest.raises(PayloadInvalid) as caught:
        read_payload(job_type, payload)
    assert isinstance(caught.value, InputError)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 2_000


def test_a_payload_within_its_bounds_is_taken_in_any_script() -> None:
    draft = {"text": "ї" * 65_000}
    made = read_payload(JobType.PROPOSAL_PREPROCESS, {"proposal_draft": draft})
    assert isinstance(made, PreprocessPayload)
    assert made.proposal_draft == draft

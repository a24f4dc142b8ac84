"""What an artifact may hold, by its type: exactly the fields of the document, with a bound on each."""

from typing import Any

import pydantic
import pytest

from tests.artifacts.desk import CONTENTS, SOURCES
from trellis.artifacts.content import (
    ARTIFACT_TYPE_OF_JOB_TYPE,
    ITEMS_MAX,
    LINE_CHARS_MAX,
    TEXT_CHARS_MAX,
    ArtifactDraft,
    ArtifactType,
    ContentInvalid,
    JobType,
    checked_content,
)

REFS = frozenset({"sources/bows.md"})
RESEARCH, BRIEF, PREPROCESSED = (CONTENTS[kind] for kind in JobType)


@pytest.mark.requirement("ART-2", "JQ-13")
def test_each_job_type_yields_one_artifact_type_with_unchanged_content():
    assert {kind: type_ for kind, (type_, _) in CONTENTS.items()} == dict(ARTIFACT_TYPE_OF_JOB_TYPE)
    for type_, content in CONTENTS.values():
        assert checked_content(type_, content, REFS) == content


@pytest.mark.requirement("ART-2")
@pytest.mark.parametrize("type_, content", CONTENTS.values(), ids=lambda value: getattr(value, "value", ""))
def test_a_field_that_is_missing_or_unknown_is_refused(type_: ArtifactType, content: dict[str, Any]):
    for name in content:
        with pytest.raises(ContentInvalid, match=name):
            checked_content(type_, {key: value for key, value in content.items() if key != name}, REFS)
    with pytest.raises(ContentInvalid, match="more"):
        checked_content(type_, {**content, "more": 1}, REFS)


@pytest.mark.requirement("ART-2")
@pytest.mark.parametrize(
    "made, changed, told",
    [
        (RESEARCH, {"title": ""}, "title"),
        (RESEARCH, {"summary": "x" * (TEXT_CHARS_MAX + 1)}, "summary"),
        (RESEARCH, {"sections": [{"heading": "h", "body": "b"}]}, "sections/0/sources"),
        (RESEARCH, {"sections": [{"heading": "h", "body": "b", "sources": ["x.md"]}]}, "'x.md'"),
        (RESEARCH, {"conclusions": [""]}, "conclusions/0"),
        (RESEARCH, {"open_questions": ["q"] * (ITEMS_MAX + 1)}, "open_questions"),
        (RESEARCH, {"conclusions": ["c" * (LINE_CHARS_MAX + 1)]}, "conclusions/0"),
        (BRIEF, {"word_count": 3}, "has 4 words"),
        (BRIEF, {"word_count": -1}, "word_count"),
        (BRIEF, {"entity_map": {"bow": 1}}, "entity_map"),
        (BRIEF, {"entity_map": {"": "x"}}, "entity_map"),
        (PREPROCESSED, {"issues": [{"field": "f", "severity": "fatal", "message": "m"}]}, "severity"),
        (PREPROCESSED, {"entity_matches": [{"text": "t", "entity_id": "e", "confidence": 1.1}]}, "confidence"),
        (PREPROCESSED, {"entity_matches": [{"text": "t", "entity_id": "e", "confidence": -0.1}]}, "confidence"),
        (PREPROCESSED, {"original": []}, "original"),
    ],
)
def test_invalid_artifact_content_is_refused_with_the_place(
    made: tuple[ArtifactType, dict[str, Any]], changed: dict[str, Any], told: str
):
    type_, content = made
    with pytest.raises(ContentInvalid) as refused:
        checked_content(type_, content | changed, REFS)
    assert (type_.value in str(refused.value), told in str(refused.value)) == (True, True)


@pytest.mark.requirement("ART-6")
@pytest.mark.parametrize(
    "changed",
    [
        {"sources": [{"ref": "a.md"}]},
        {"sources": [{"ref": "", "excerpt": "x"}]},
        {"sources": [{"ref": "a.md", "excerpt": ""}]},
        {"sources": SOURCES * (ITEMS_MAX + 1)},
        {"type": "NOVEL"},
        {"tags": [""]},
        {"entity_refs": ["x" * 201]},
        {"finalized": True},
        {"url": "file:///etc/passwd"},
        {"artifact_id": "art-1"},
    ],
)
def test_a_draft_has_sources_with_ref_and_excerpt_and_nothing_of_the_registrys(changed: dict[str, Any]):
    type_, content = RESEARCH
    with pytest.raises(pydantic.ValidationError):
        ArtifactDraft.model_validate({"type": type_, "content": content, "sources": SOURCES, **changed})

"""docs/how-to/submit-queue-jobs.md does what it says, and names every field and rule of every payload."""

import json
from pathlib import Path
from typing import get_args

import pydantic
import pytest

from tests.docs.documents import ROOT, run
from trellis.artifacts.content import ArtifactType, JobType
from trellis.artifacts.payloads import (
    EXAMPLES,
    PAYLOAD_MODELS,
    MatchesRule,
    MaxCharsRule,
    OneOfRule,
    RequiredRule,
    ResearchConstraints,
    ResolvesRule,
    StyleGuide,
)
from trellis.nlm.provider import SOURCES_MAX

PAGE = ROOT / "docs" / "how-to" / "submit-queue-jobs.md"
INSIDE: dict[str, type[pydantic.BaseModel]] = {"constraints": ResearchConstraints, "style_guide": StyleGuide}
RULES = (RequiredRule, MaxCharsRule, MatchesRule, OneOfRule, ResolvesRule)


@pytest.mark.prove
def test_queue_jobs_guide_commands_work(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert [kind for kind in ArtifactType if kind.value not in output] == []
    assert "## Entities" in output


def test_the_guide_has_every_field_rule_and_example():
    text = PAGE.read_text(encoding="utf-8")
    for job_type, payload in PAYLOAD_MODELS.items():
        for name in payload.model_fields:
            told = [f"{name}.{inner}" for inner in INSIDE[name].model_fields] if name in INSIDE else [name]
            assert [one for one in told if f"| `{one}` |" not in text] == []
        example = json.dumps(EXAMPLES[job_type], ensure_ascii=False)
        assert f"trellis submit {job_type.value} '{example}' --agent archivist-violin" in text
    rules = [get_args(rule.model_fields["rule"].annotation)[0] for rule in RULES]
    assert [rule for rule in rules if f"| `{rule}` |" not in text] == []
    assert f"at most {SOURCES_MAX}; all of them" in text
    assert len(EXAMPLES) == len(JobType)

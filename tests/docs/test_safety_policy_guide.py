"""docs/how-to/safety-policy.md does what it says, and names every decision, condition, constraint and bound."""

from pathlib import Path

import pytest

from tests.docs.documents import ROOT, run
from trellis.bus.safety.kernel import FAILURES_MAX, OPEN_S, TIMEOUT_S
from trellis.bus.safety.policy import DELAY_S_DEFAULT, DecisionKind, PolicyConstraints, RuleMatch
from trellis.proposals.proposal import NOTE_CHARS_MIN

PAGE = ROOT / "docs" / "how-to" / "safety-policy.md"


@pytest.mark.prove
def test_safety_policy_guide_commands_work(tmp_path: Path):
    said = run(PAGE, tmp_path, {})
    assert "allow_with_constraints by files" in said
    assert "require_human by deletes-need-a-person" in said


def test_the_guide_names_every_decision_condition_constraint_and_bound():
    text = PAGE.read_text(encoding="utf-8")
    named = [*(kind.value for kind in DecisionKind), *RuleMatch.model_fields, *PolicyConstraints.model_fields]
    assert [name for name in named if f"`{name}`" not in text] == []
    assert (FAILURES_MAX, OPEN_S, TIMEOUT_S, DELAY_S_DEFAULT, NOTE_CHARS_MIN) == (3, 30, 2, 10, 10)

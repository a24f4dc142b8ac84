"""The runbooks name what there is."""

import re

from tests.docs.documents import ROOT
from trellis.engine.jobs import ReasonCode

PAGE = ROOT / "docs" / "runbooks" / "dead-letters.md"
CODE = re.compile(r"`([a-z]+(?:_[a-z]+)+)`")


def test_every_reason_code_of_the_runbook_of_dead_letters_is_one():
    named = set(CODE.findall(PAGE.read_text(encoding="utf-8")))
    assert named - set(ReasonCode) == set()
    assert len(named) >= 4

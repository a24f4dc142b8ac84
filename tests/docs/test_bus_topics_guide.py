"""docs/how-to/serve-bus-topics.md does what it says, and names every option and every way a handler can end."""

from pathlib import Path

import pytest

from tests.docs.documents import ROOT, run
from trellis.cli.workers import BUS_ONLY

PAGE = ROOT / "docs" / "how-to" / "serve-bus-topics.md"
CODES = (
    "INVALID_INPUT",
    "NEEDS_LEDGER",
    "NOT_BEGUN",
    "NOT_FOUND",
    "POINTER_CHANGED",
    "POINTER_UNAVAILABLE",
    "SNOOZED",
    "TIMEOUT",
    "WORKER_UNAVAILABLE",
)


@pytest.mark.prove
def test_topics_guide_commands_work(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert output.count('"status": "SUCCEEDED"') == 2, "the first, and the retry of the second"


def test_the_guide_has_every_option_and_every_code():
    text = PAGE.read_text(encoding="utf-8")
    assert [option for option in BUS_ONLY if f"| `{option}` |" not in text] == []
    assert [code for code in CODES if f"`{code}`" not in text] == []

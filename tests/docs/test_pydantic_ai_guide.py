"""docs/how-to/pydantic-ai.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.jobs import PAYLOAD_BYTES_MAX
from trellis.worker.durable import JOURNAL_BYTES_MAX, JOURNAL_ENTRIES_MAX

PAGE = ROOT / "docs" / "how-to" / "pydantic-ai.md"


@pytest.mark.prove
def test_the_guide_to_pydantic_ai_does_what_it_says(tmp_path: Path):
    assert "1 passed" in run(PAGE, tmp_path, {})


def test_the_guide_to_pydantic_ai_states_the_bounds():
    text = PAGE.read_text()
    bounds = (
        f"may have {PAYLOAD_BYTES_MAX // 2**20} MiB",
        f"{JOURNAL_ENTRIES_MAX:,} entries",
        f"{JOURNAL_BYTES_MAX // 2**20} MiB",
    )
    assert [bound for bound in bounds if bound not in text] == []
    local = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in local if not (PAGE.parent / target).exists()] == []

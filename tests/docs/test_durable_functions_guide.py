"""docs/how-to/durable-functions.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.jobs import JOB_SIGNALS_MAX
from trellis.worker.durable import JOURNAL_BYTES_MAX, JOURNAL_ENTRIES_MAX, SPAWN_MAX

PAGE = ROOT / "docs" / "how-to" / "durable-functions.md"


@pytest.mark.prove
def test_the_guide_to_durable_functions_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "2 passed" in output
    assert "1 passed" in output
    assert "Send a signal to a job" in output


def test_the_guide_to_durable_functions_states_the_bounds():
    text = PAGE.read_text()
    bounds = (
        f"At most {JOB_SIGNALS_MAX:,}",
        f"{JOURNAL_ENTRIES_MAX:,} entries",
        f"{JOURNAL_BYTES_MAX // 2**20} MiB",
        f"{SPAWN_MAX:,} in one transaction",
    )
    assert [bound for bound in bounds if bound not in text] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

"""docs/how-to/batches.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.job_batches import BATCH_BYTES_MAX, BATCH_MAX
from trellis.worker.batches import RESULTS_BYTES_MAX

PAGE = ROOT / "docs" / "how-to" / "batches.md"


@pytest.mark.prove
def test_the_guide_to_batches_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "{'day': 'monday', 'succeeded': 2, 'failed': 1, 'broken': ['PermanentError: 404'], 'size': 7}" in output
    assert "2 jobs of its batch" in output


def test_the_guide_to_batches_states_the_bounds():
    text = PAGE.read_text()
    bounds = [f"{BATCH_MAX:,} jobs", f"{BATCH_BYTES_MAX >> 20} MiB of", f"at most {RESULTS_BYTES_MAX >> 20} MiB"]
    assert [bound for bound in bounds if bound not in " ".join(text.split())] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

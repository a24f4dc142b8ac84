"""docs/how-to/back-up.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run

PAGE = ROOT / "docs" / "how-to" / "back-up.md"


@pytest.mark.prove
def test_the_guide_to_backups_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "no violation" in output
    assert "the backup is whole" in output
    assert "restored:" in output
    assert "report-3" in output
    assert [target for target in LINK.findall(PAGE.read_text()) if not (PAGE.parent / target).exists()] == []

"""docs/how-to/rebuild.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run

PAGE = ROOT / "docs" / "how-to" / "rebuild.md"


@pytest.mark.prove
def test_rebuild_guide_commands_work(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "no violation" in output
    assert "put back" in output
    assert "report-3" in output
    assert [target for target in LINK.findall(PAGE.read_text()) if not (PAGE.parent / target).exists()] == []

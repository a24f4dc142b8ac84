"""docs/how-to/use-temporal.md does what it says, and names every setting of the Temporal server."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from tests.servers.temporal import free_port
from trellis.app.settings import Settings

PAGE = ROOT / "docs" / "how-to" / "use-temporal.md"
PORT = "7233"


@pytest.mark.prove
def test_the_guide_to_temporal_does_what_it_says(tmp_path: Path):
    here = tmp_path / "page.md"
    here.write_text(PAGE.read_text(encoding="utf-8").replace(PORT, str(free_port())), encoding="utf-8")
    output = run(here, tmp_path, {})
    assert "namespace default, answers" in output
    assert "trellis-runs/run_" in output
    assert "Completed" in output


def test_the_guide_to_temporal_names_every_setting_of_the_server():
    text = PAGE.read_text(encoding="utf-8")
    named = [name for name in Settings.model_fields if name.startswith(("temporal_", "orchestrator"))]
    assert [name for name in named if f"TRELLIS_{name.upper()}" not in text] == []
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []

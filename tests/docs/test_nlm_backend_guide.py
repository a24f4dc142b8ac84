"""docs/how-to/run-the-nlm-backend.md does what it says, and names every setting, code and bound of the backend."""

from pathlib import Path

import pytest

from tests.docs.documents import ROOT, run
from trellis.app.settings import Settings
from trellis.nlm_backend.errors import FaultCode
from trellis.nlm_backend.intake import WAITING_MAX
from trellis.nlm_backend.limits import FAILURES_MAX, OPEN_S

PAGE = ROOT / "docs" / "how-to" / "run-the-nlm-backend.md"


@pytest.mark.prove
def test_nlm_backend_guide_commands_work(tmp_path: Path):
    assert '"status":"ok"' in run(PAGE, tmp_path, {})


def test_the_guide_names_every_setting_code_and_bound():
    text = PAGE.read_text(encoding="utf-8")
    named = [name for name in Settings.model_fields if name.startswith("nlm")]
    assert [name for name in [*named, "outgoing"] if f"TRELLIS_{name.upper()}" not in text] == []
    assert [code for code in FaultCode if code.value not in text] == []
    settings = Settings.model_validate({})
    for told in (
        f"`TRELLIS_NLM_CONCURRENCY` ({settings.nlm_concurrency})",
        f"After {FAILURES_MAX} failures in a row the provider is left alone for {OPEN_S:g} s",
        f"when {WAITING_MAX:,} jobs wait",
    ):
        assert told in text, told

"""docs/how-to/rate-limits.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.jobs import DELAY_S_MAX
from trellis.engine.key_rates import KEY_BURST_MAX, KEY_RATE_MAX, KEY_TOKEN_WAIT_S_MIN
from trellis.worker.options import KEY_LIMIT_MAX, POLL_S_DEFAULT

PAGE = ROOT / "docs" / "how-to" / "rate-limits.md"


@pytest.mark.prove
def test_the_guide_to_rate_limits_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "2/s per key" in output
    assert "waiting for the rate of its key 'acme' (2 a second)" in output


def test_the_guide_to_rate_limits_names_the_bounds():
    text = PAGE.read_text()
    assert f"to {KEY_RATE_MAX:,.0f} |" in text
    assert f"from 0.000001 to {DELAY_S_MAX:,.0f}. Its burst" in text
    assert f"two polls of a worker ({POLL_S_DEFAULT} s)" in text
    assert f"1 to {KEY_BURST_MAX:,}" in text
    assert f"without this, {KEY_LIMIT_MAX:,} |" in text
    assert KEY_TOKEN_WAIT_S_MIN == 0.1
    assert "ten times a second" in text
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

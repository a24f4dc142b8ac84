"""docs/how-to/schedule-jobs.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.schedules import CATCH_UP_MAX, JITTER_S_MAX, LATE_S, Misfire, Overlap
from trellis.worker.schedules import POLL_S_DEFAULT

PAGE = ROOT / "docs" / "how-to" / "schedule-jobs.md"


@pytest.mark.prove
def test_the_guide_to_schedules_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "nightly is paused" in output
    assert "nightly is removed" in output


def test_the_guide_to_schedules_names_every_policy_and_bound():
    text = PAGE.read_text()
    numbers = {
        f"{CATCH_UP_MAX} at most",
        f"{JITTER_S_MAX:g} seconds",
        f"{LATE_S:g} seconds",
        f"{POLL_S_DEFAULT:g} seconds",
    }
    assert [word for word in (*(f"`{one}`" for one in (*Misfire, *Overlap)), *numbers) if word not in text] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

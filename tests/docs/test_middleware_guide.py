"""docs/how-to/middleware.md does what it says, and has the numbers of the code."""

from pathlib import Path

from tests.docs.documents import ROOT, run
from trellis.worker import handlers, outcomes, processes, resources

PAGE = ROOT / "docs" / "how-to" / "middleware.md"


def test_the_guide_to_middleware_does_what_it_says(tmp_path: Path, environment: dict[str, str]):
    assert "3 passed" in run(PAGE, tmp_path, environment)


def test_the_guide_to_middleware_names_every_bound():
    text = " ".join(PAGE.read_text().split())
    phrases = (
        f"longer than {resources.OPEN_S_MAX:g} seconds",
        f"Closing gets {resources.CLOSE_S_MAX:g} seconds",
        f"may take {handlers.ERROR_HOOK_S_MAX:g} seconds",
        f"the last {outcomes.TRACEBACK_FRAMES_MAX} frames, at most {outcomes.TRACEBACK_CHARS_MAX:,} characters",
        f"the process {processes.GRACE_S:g} seconds later",
        f"after {processes.CALLS_MAX:,} calls",
    )
    assert [phrase for phrase in phrases if phrase not in text] == []

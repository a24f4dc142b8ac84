"""docs/how-to/unique-jobs.md does what it says."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.uniqueness import DEBOUNCE_FACTOR, OnConflict, WhileHeld
from trellis.worker.requests import UNIQUE_SETTINGS

PAGE = ROOT / "docs" / "how-to" / "unique-jobs.md"


@pytest.mark.prove
def test_the_guide_to_unique_jobs_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "created returned True\nreplaced True\nTrue\n" in output
    assert output.count("this job was there already") == 2


def test_the_guide_to_unique_jobs_names_every_option():
    text = PAGE.read_text()
    words = [f"`{word}`" for word in (*UNIQUE_SETTINGS, *WhileHeld, *OnConflict)]
    assert [word for word in (*words, f"{DEBOUNCE_FACTOR} times") if word not in text] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

"""docs/how-to/change-many-jobs.md does what it says."""

from dataclasses import fields
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.job_changes import CHANGED_MAX, JobChange, changeable_states
from trellis.operations.job_changes import COUNTED_MAX, ChangeFilter

PAGE = ROOT / "docs" / "how-to" / "change-many-jobs.md"


@pytest.mark.prove
def test_the_guide_to_changes_of_many_jobs_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "would cancel 1200\ncancelled 700, more to do: True\n" in output
    assert "500 jobs would be cancelled; the oldest:" in output
    assert "500 jobs cancelled\n1 job made ready\n1 job given another priority\n" in output


def test_the_guide_to_changes_of_many_jobs_names_every_change_state_and_bound():
    text = PAGE.read_text()
    states = {one.state for one in changeable_states(JobChange.DISCARD)}
    words = [*(f"`{change.value.replace('_', '-')}`" for change in JobChange), *(f"`{state}`" for state in states)]
    words += [f"`{field.name}`" for field in fields(ChangeFilter)]
    assert [word for word in (*words, f"{CHANGED_MAX} jobs", f"{COUNTED_MAX:,}") if word not in text] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []

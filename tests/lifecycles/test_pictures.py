"""The Mermaid pictures show every state and every transition; the README shows the one of a leased job as it is."""

import pytest

from tests.lifecycles.documents import TABLES, places
from tests.lifecycles.generated import ROOT
from trellis.lifecycles import LIFECYCLES, Lifecycle
from trellis.lifecycles.describe import mermaid

every_lifecycle = pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=list(LIFECYCLES))


def test_the_readme_shows_the_lifecycle_of_a_leased_job_as_it_is():
    assert f"```mermaid\n{mermaid(LIFECYCLES['leased-job'])}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@every_lifecycle
def test_mermaid_has_every_transition_with_its_roles(lifecycle: Lifecycle):
    lines = mermaid(lifecycle).splitlines()
    assert lines[0] == "stateDiagram-v2"
    arrows = dict(line.strip().split(" : ", 1) for line in lines if " : " in line)
    told = {(pair, label) for pair, labels in arrows.items() for label in labels.split("<br/>")}
    assert told == {
        (
            f"{row.source or '[*]'} --> {row.target}",
            f"{row.trigger}{'' if row.origin == 'doc' else '†'} ({', '.join(sorted(row.roles))})",
        )
        for row in TABLES[lifecycle.name]
    }


@every_lifecycle
def test_mermaid_colours_phases_and_ends_what_ends(lifecycle: Lifecycle):
    lines = [line.strip() for line in mermaid(lifecycle).splitlines()]
    by_phase = {line.split()[2]: set(line.split()[1].split(",")) for line in lines if line.startswith("class ")}
    there = {place.phase for place in places(lifecycle.name)}
    assert by_phase == {
        phase: {place.name for place in places(lifecycle.name) if place.phase == phase} for phase in there
    }
    ends = {line.split()[0] for line in lines if line.endswith("--> [*]")}
    assert ends == by_phase["ended"]

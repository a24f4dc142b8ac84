"""A lifecycle in words says what the documents say."""

import pytest

from tests.lifecycles.documents import TABLES, places
from trellis.lifecycles import LIFECYCLES, Lifecycle
from trellis.lifecycles.describe import describe

PROGRESS = {"same": "same attempt", "attempt": "next attempt", "generation": "new generation"}


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=list(LIFECYCLES))
def test_describe_lists_every_state_and_transition(lifecycle: Lifecycle):
    told = describe(lifecycle)
    assert {(line.state, line.phase.value, int(line.rank)) for line in told.states} == set(places(lifecycle.name))
    assert {
        (t.source, t.target, t.trigger, t.who, t.event, t.progress, "fenced" in t.notes, "extension" in t.notes)
        for t in told.transitions
    } == {
        (
            r.source or "[new]",
            r.target,
            r.trigger,
            ", ".join(sorted(r.roles)),
            r.event,
            PROGRESS[r.opens],
            r.fenced,
            r.origin != "doc",
        )
        for r in TABLES[lifecycle.name]
    }


@pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=list(LIFECYCLES))
def test_description_begins_with_what_the_lifecycle_is(lifecycle: Lifecycle):
    told = describe(lifecycle)
    assert (told.name, told.title, told.version) == (lifecycle.name, lifecycle.title, lifecycle.version)
    assert told.swept_by == lifecycle.swept_by


def test_description_of_a_state_names_its_special_properties():
    notes = {line.state: line.notes for line in describe(LIFECYCLES["leased-job"]).states}
    assert notes == {
        "queued": "first; claimable",
        "assigned": "a lost lease pulls expire; an error pulls release; no user code runs",
        "running": "a lost lease pulls expire; an error pulls retry",
        "succeeded": "success",
        "failed": "",
        "cancelled": "",
        "dead_lettered": "needs a dead letter",
        "suspended": "",
        "discarded": "",
    }
    run = {line.state: line.notes for line in describe(LIFECYCLES["run"]).states}
    assert run["running"] == "a lost lease leaves it here, to be claimed again; an error pulls fail"
    timers = {"queue-job": ("FAILED", "due after 0.25 h"), "proposal": ("pending", "first; due after 72 h")}
    for name, line in timers.items():
        assert line in {(told.state, told.notes) for told in describe(LIFECYCLES[name]).states}

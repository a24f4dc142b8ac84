"""How a job reads in another vocabulary, row by row of the table in docs/reference/decisions.md."""

import re
from itertools import product
from pathlib import Path

import pytest

from tests.lifecycles.projection import (
    POSITIONS,
    WIRE_NUMBERS,
    WORDS,
    Position,
    Projection,
    project,
    word,
)
from trellis.lifecycles import LIFECYCLES

DECISIONS = Path(__file__).parents[2] / "docs/reference/decisions.md"
VOCABULARIES = ("bus-job", "leased-job", "queue-job", "run")
WORK = ("run", "queue-job", "nlm-job", "leased-job", "bus-job")
ROWS = {
    Position.NEW: "accepted, not yet validated",
    Position.READY: "ready, or held back (approval, throttle, busy key)",
    Position.BACKOFF: "waiting for the next attempt",
    Position.CLAIMED: "claimed, no evidence of a start",
    Position.CONTEXT: "at work on its context",
    Position.CALL: "at work on the call",
    Position.WRITE: "at work on writing",
    Position.SUCCEEDED: "good end",
    Position.FAILED: "bad end",
    Position.DEAD: "bad end, dead-lettered",
    Position.CANCELLED: "cancelled",
    Position.DENIED: "refused by policy",
    Position.TIMED_OUT: "time or attempts spent",
}


def table() -> dict[str, dict[str, str | None]]:
    """The document's table: meaning -> vocabulary -> the word its cell begins with."""
    text = DECISIONS.read_text(encoding="utf-8").partition("## Projection between vocabularies")[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    header, _, *body = lines
    return {
        meaning: {name: _first_word(cell) for name, cell in zip(header[1:], cells, strict=True)}
        for meaning, *cells in body
    }


def _first_word(cell: str) -> str | None:
    found = re.match(r"[A-Za-z_]+", cell)
    return found[0] if found else None


@pytest.mark.requirement("D54")
@pytest.mark.parametrize("position, to", list(product(ROWS, VOCABULARIES)))
def test_projected_words_are_those_of_the_table(position: Position, to: str):
    assert word(position, LIFECYCLES[to]).state == table()[ROWS[position]][to]


def test_the_table_has_no_other_row_that_is_a_position():
    assert set(table()) - set(ROWS.values()) == {"operator requeue (D39)"}


@pytest.mark.requirement("D54")
@pytest.mark.parametrize("source, to", list(product(LIFECYCLES, LIFECYCLES)))
def test_every_state_has_a_word_or_a_reason_in_every_vocabulary(source: str, to: str):
    for state in LIFECYCLES[source].states:
        found = project(LIFECYCLES[source], state.name, LIFECYCLES[to])
        if found.state is None:
            assert found.note.startswith("no word: ") or found.note.startswith("NLM backend: ")
        else:
            assert found.state in LIFECYCLES[to].by_name


def test_projection_data_covers_every_state_and_position():
    assert set(POSITIONS) == set(WORDS) == set(WORK)
    for name, positions in POSITIONS.items():
        assert set(positions) == set(LIFECYCLES[name].by_name)
    for words in WORDS.values():
        assert set(words) == set(Position)


@pytest.mark.parametrize("name", list(LIFECYCLES))
def test_a_job_state_is_unchanged_in_its_own_vocabulary(name: str):
    lifecycle = LIFECYCLES[name]
    assert {project(lifecycle, s.name, lifecycle) for s in lifecycle.states} == {
        Projection(s.name) for s in lifecycle.states
    }


@pytest.mark.parametrize(
    "source, state, to, expected",
    [
        ("leased-job", "assigned", "bus-job", "DISPATCHED"),
        ("leased-job", "assigned", "queue-job", "QUEUED"),
        ("leased-job", "running", "queue-job", None),
        ("leased-job", "dead_lettered", "queue-job", "DEAD"),
        ("leased-job", "cancelled", "queue-job", "FAILED"),
        ("queue-job", "NOTEBOOKLM_CALL", "run", "running"),
        ("queue-job", "RETRY_BACKOFF", "bus-job", "SCHEDULED"),
        ("queue-job", "FAILED", "leased-job", "failed"),
        ("bus-job", "DENIED", "leased-job", "dead_lettered"),
        ("bus-job", "DENIED", "run", None),
        ("bus-job", "TIMEOUT", "run", "failed"),
        ("run", "requested", "bus-job", "PENDING"),
        ("run", "running", "nlm-job", None),
    ],
)
def test_example_states_are_projected_as_documented(source: str, state: str, to: str, expected: str | None):
    assert project(LIFECYCLES[source], state, LIFECYCLES[to]).state == expected


@pytest.mark.parametrize("state", [state.name for state in LIFECYCLES["nlm-job"].states])
def test_an_nlm_job_is_a_stage_inside_the_call(state: str):
    shown = project(LIFECYCLES["nlm-job"], state, LIFECYCLES["queue-job"])
    assert shown == Projection("NOTEBOOKLM_CALL", f"NLM backend: {state}")


@pytest.mark.parametrize("name", WORK)
def test_a_proposal_has_no_word_for_work_and_work_none_for_a_proposal(name: str):
    work, proposal = LIFECYCLES[name], LIFECYCLES["proposal"]
    assert project(work, work.initial.name, proposal).state is None
    assert project(proposal, "pending", work).state is None


def test_a_state_of_another_lifecycle_is_no_state():
    with pytest.raises(KeyError):
        project(LIFECYCLES["run"], "RUNNING", LIFECYCLES["bus-job"])


@pytest.mark.requirement("BUS-1")
def test_wire_numbers_are_those_of_cap_v1_and_equal_the_stored_codes():
    order = ("PENDING", "SCHEDULED", "DISPATCHED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "DENIED", "TIMEOUT")
    assert {name: number for number, name in enumerate(order, 1)} == WIRE_NUMBERS
    assert {s.name: LIFECYCLES["bus-job"].code_of(s.name) for s in LIFECYCLES["bus-job"].states} == WIRE_NUMBERS

"""The numbers a database is loaded with say exactly what the documents say."""

from itertools import product

import pytest

from tests.lifecycles.documents import FINALIZES, TABLES, places
from trellis.lifecycles import LIFECYCLES, Role, event_code, event_name
from trellis.lifecycles.contract import (
    LIFECYCLES_MAX,
    PHASES,
    ROLES_MAX,
    STATES_SLOTS,
    completed_states,
    final_states,
    lifecycle_rows,
    rank_bytes,
    state_rows,
    transition_bit,
    transition_bits,
    transition_rows,
)
from trellis.lifecycles.events import EVENT_TYPES

# The stored number of a state is its place in the documents' own lists, counted from 1 (D22 for proposals).
STATE_ORDER = {
    "run": "requested queued running completed failed",
    "queue-job": (
        "PENDING QUEUED CONTEXT_ASSEMBLY NOTEBOOKLM_CALL ARTIFACT_WRITE COMPLETE RETRY_BACKOFF FAILED DEAD DISCARDED"
    ),
    "nlm-job": "ACCEPTED FETCHING_CONTEXT BUILDING_PROMPT NLM_QUERY STRUCTURING CALLBACK DONE ERROR",
    "leased-job": "queued assigned running succeeded failed cancelled dead_lettered suspended discarded",
    "bus-job": "PENDING SCHEDULED DISPATCHED RUNNING SUCCEEDED FAILED CANCELLED DENIED TIMEOUT",
    "proposal": "pending approved auto_approved applying failed applied rejected expired",
    "inbox-entry": "pending processed rejected expired",
    "artifact": "staged finalized discarded removed",
}
LIFECYCLE_CODES = {
    "run": 1,
    "queue-job": 2,
    "nlm-job": 3,
    "leased-job": 4,
    "bus-job": 5,
    "proposal": 6,
    "inbox-entry": 7,
    "artifact": 8,
}


def number(lifecycle: str, state: str | None) -> int:
    return 0 if state is None else STATE_ORDER[lifecycle].split().index(state) + 1


def test_transition_bits_are_set_for_exactly_the_declared_transitions_and_roles():
    declared = {
        (LIFECYCLE_CODES[name], Role(role).code, number(name, row.source), number(name, row.target))
        for name, table in TABLES.items()
        for row in table
        for role in row.roles
    }
    bits = transition_bits()
    cells = product(range(LIFECYCLES_MAX), range(ROLES_MAX), range(STATES_SLOTS), range(STATES_SLOTS))
    places_of_bits = [(cell, transition_bit(*cell)) for cell in cells]
    assert sorted(place for _, place in places_of_bits) == list(range(len(bits) * 8))
    assert {cell for cell, place in places_of_bits if bits[place // 8] >> place % 8 & 1} == declared


@pytest.mark.requirement("D54")
def test_rank_bytes_are_set_for_states_and_zero_elsewhere():
    expected = bytearray(LIFECYCLES_MAX * STATES_SLOTS)
    for name, code in LIFECYCLE_CODES.items():
        for place in places(name):
            expected[code * STATES_SLOTS + number(name, place.name)] = place.rank
    assert rank_bytes() == bytes(expected)


def test_state_rows_carry_every_flag():
    rows = {(row.lifecycle, row.state): row for row in state_rows()}
    assert len(rows) == sum(len(places(name)) for name in LIFECYCLE_CODES)
    for name, code in LIFECYCLE_CODES.items():
        for place in places(name):
            row, state = rows[code, number(name, place.name)], LIFECYCLES[name].by_name[place.name]
            assert (row.name, PHASES[row.phase].value, row.rank) == place
            assert (row.claimable, row.runs_code, row.dead_letter, row.success, row.timer_s) == (
                state.claimable,
                state.runs_code,
                state.dead_letter,
                state.success,
                state.timer_s,
            )
            assert row.stays == (name in {"run", "nlm-job"} and place.phase == "held")


def test_transition_rows_read_back_as_the_documents():
    names = {code: name for name, code in LIFECYCLE_CODES.items()}
    opens = ("same", "attempt", "generation")
    read = {
        (
            names[row.lifecycle],
            row.source,
            row.target,
            row.trigger,
            frozenset(role.value for role in Role if row.roles >> role.code & 1),
            event_name(row.event),
            opens[row.opens],
            row.fenced,
        )
        for row in transition_rows()
    }
    assert read == {
        (name, number(name, r.source), number(name, r.target), r.trigger, r.roles, r.event, r.opens, r.fenced)
        for name, table in TABLES.items()
        for r in table
    }
    assert max(row.roles for row in transition_rows()) < 1 << ROLES_MAX


@pytest.mark.requirement("JQ-5", "D15")
def test_exactly_the_documented_steps_finalize_an_artifact():
    codes = {code: name for name, code in LIFECYCLE_CODES.items()}
    rows = [row for row in transition_rows() if row.finalizes]
    assert {(codes[row.lifecycle], row.source, row.trigger) for row in rows} == {
        (name, number(name, source), trigger) for name, source, trigger in FINALIZES
    }
    assert completed_states() == [(2, number("queue-job", "COMPLETE"))]
    assert final_states() == [(8, number("artifact", "finalized")), (8, number("artifact", "removed"))]


def test_lifecycle_rows_name_who_sweeps():
    rows = {row.name: (row.lifecycle, row.version, list(Role)[row.swept_by].value) for row in lifecycle_rows()}
    assert rows == {
        "run": (1, 1, "orchestrator"),
        "queue-job": (2, 1, "orchestrator"),
        "nlm-job": (3, 1, "nlm-backend"),
        "leased-job": (4, 1, "sweeper"),
        "bus-job": (5, 1, "reconciler"),
        "proposal": (6, 1, "apply-engine"),
        "inbox-entry": (7, 1, "gateway"),
        "artifact": (8, 1, "orchestrator"),
    }


def test_event_codes_and_names_lead_to_one_another():
    assert [event_name(event_code(name)) for name in EVENT_TYPES] == list(EVENT_TYPES)
    assert event_code(EVENT_TYPES[0]) == 1

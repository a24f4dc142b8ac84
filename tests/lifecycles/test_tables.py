"""The eight tables against the documents: each pair of states is tried by each role, and nothing else passes."""

from itertools import product

import pytest

from tests.lifecycles.documents import TABLES, places
from trellis.lifecycles import (
    BY_CODE,
    EVENT_TYPES,
    LIFECYCLES,
    REMARK_TYPES,
    SIGNAL_TYPES,
    Illegal,
    LeaseLoss,
    Lifecycle,
    Phase,
    Progress,
    Role,
    State,
    Transition,
    Trigger,
    next_state,
    progress,
)

DOCUMENTED = [
    pytest.param(LIFECYCLES["queue-job"], marks=pytest.mark.requirement("JQ-1", "JQ-2", "JQ-6"), id="queue-job"),
    pytest.param(LIFECYCLES["nlm-job"], marks=pytest.mark.requirement("NLM-2"), id="nlm-job"),
    pytest.param(LIFECYCLES["run"], marks=pytest.mark.requirement("RUN-1"), id="run"),
    pytest.param(LIFECYCLES["leased-job"], marks=pytest.mark.requirement("DJ-1"), id="leased-job"),
    pytest.param(LIFECYCLES["bus-job"], marks=pytest.mark.requirement("BUS-1"), id="bus-job"),
    pytest.param(LIFECYCLES["proposal"], marks=pytest.mark.requirement("D22"), id="proposal"),
    pytest.param(LIFECYCLES["inbox-entry"], marks=pytest.mark.requirement("D51", "D56"), id="inbox-entry"),
    pytest.param(LIFECYCLES["artifact"], marks=pytest.mark.requirement("D15", "D56"), id="artifact"),
]
OPENS = {"same": Progress.SAME, "attempt": Progress.ATTEMPT, "generation": Progress.GENERATION}
SWEPT = (Trigger.EXPIRE, Trigger.EXHAUST, Trigger.DUE, Trigger.DEADLINE, Trigger.CANCEL)

every_lifecycle = pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=list(LIFECYCLES))
documented = pytest.mark.parametrize("lifecycle", DOCUMENTED)


def sources(lifecycle: Lifecycle) -> list[str | None]:
    return [None, *(place.name for place in places(lifecycle.name))]


@documented
def test_every_pair_of_states_and_every_role_passes_exactly_as_documented(lifecycle: Lifecycle):
    declared = {(row.source, row.target, role) for row in TABLES[lifecycle.name] for role in row.roles}
    targets = [place.name for place in places(lifecycle.name)]
    passed = {
        (source, target, role.value)
        for source, target, role in product(sources(lifecycle), targets, Role)
        if isinstance(lifecycle.between(source, target, role), Transition)
    }
    assert passed == declared


@documented
def test_every_trigger_leads_exactly_where_documented(lifecycle: Lifecycle):
    declared = {(r.source, r.trigger, role): r.target for r in TABLES[lifecycle.name] for role in r.roles}
    triggers = {row.trigger for table in TABLES.values() for row in table}
    led: dict[tuple[str | None, str, str], str] = {}
    for source, trigger, role in product(sources(lifecycle), sorted(triggers), Role):
        target = next_state(lifecycle, source, trigger, role)
        if isinstance(target, State):
            led[source, trigger, role.value] = target.name
    assert led == declared


@documented
def test_every_transition_has_its_event_its_progress_and_its_fence(lifecycle: Lifecycle):
    expected = {(r.source, r.target, r.trigger, r.event, OPENS[r.opens], r.fenced) for r in TABLES[lifecycle.name]}
    assert {(t.source, t.target, t.trigger, t.event, t.opens, t.fenced) for t in lifecycle.transitions} == expected


@documented
def test_transitions_beyond_the_document_are_marked_as_extensions(lifecycle: Lifecycle):
    added = {(row.source, row.trigger) for row in TABLES[lifecycle.name] if row.origin != "doc"}
    assert {(t.source, t.trigger) for t in lifecycle.transitions if t.extension} == added


@pytest.mark.requirement("D54")
@every_lifecycle
def test_phases_and_ranks_are_those_of_the_decision(lifecycle: Lifecycle):
    told = {(state.name, state.phase.value, state.rank) for state in lifecycle.states}
    assert told == set(places(lifecycle.name))


@pytest.mark.requirement("JQ-3")
def test_queue_job_has_no_transition_out_of_complete():
    queue_job = LIFECYCLES["queue-job"]
    answers = [queue_job.between("COMPLETE", state.name, role) for state in queue_job.states for role in Role]
    assert {type(answer) for answer in answers} == {Illegal}


@pytest.mark.requirement("JQ-4")
def test_only_an_operator_takes_a_job_out_of_dead():
    queue_job = LIFECYCLES["queue-job"]
    leaving = {
        (state.name, role)
        for state in queue_job.states
        for role in Role
        if isinstance(queue_job.between("DEAD", state.name, role), Transition)
    }
    assert leaving == {("QUEUED", Role.CONTROL_PLANE), ("DISCARDED", Role.CONTROL_PLANE)}
    requeued = queue_job.between("FAILED", "QUEUED", Role.CONTROL_PLANE)
    assert isinstance(requeued, Transition)
    assert requeued.trigger == Trigger.REQUEUE
    assert isinstance(queue_job.between("FAILED", "QUEUED", Role.ORCHESTRATOR), Illegal)


@pytest.mark.requirement("RUN-1", "RUN-2")
@pytest.mark.parametrize("source", ["completed", "failed"])
def test_run_has_no_transition_out_of_its_ends(source: str):
    run = LIFECYCLES["run"]
    assert not [s for s in run.states for role in Role if isinstance(run.between(source, s.name, role), Transition)]


@pytest.mark.requirement("D39")
def test_requeue_exists_exactly_where_decided():
    requeues = {
        (name, t.source): (t.opens, t.actors)
        for name, lifecycle in LIFECYCLES.items()
        for t in lifecycle.transitions
        if t.trigger == Trigger.REQUEUE
    }
    by_operator = (Progress.GENERATION, frozenset({Role.CONTROL_PLANE}))
    assert requeues == {
        ("queue-job", "FAILED"): by_operator,
        ("queue-job", "DEAD"): by_operator,
        ("queue-job", "DISCARDED"): by_operator,
        ("leased-job", "failed"): by_operator,
        ("leased-job", "dead_lettered"): by_operator,
        ("leased-job", "discarded"): by_operator,
    }


@pytest.mark.requirement("D37")
def test_only_these_self_transitions_are_declared():
    loops = {(n, t.source, t.event) for n, life in LIFECYCLES.items() for t in life.transitions if t.source == t.target}
    assert loops == {
        ("run", "running", "run.step.completed"),
        ("leased-job", "succeeded", "job_compensated"),
        ("leased-job", "queued", "job_expedited"),
        ("leased-job", "queued", "job_reprioritized"),
        ("bus-job", "SUCCEEDED", "job_compensated"),
        ("bus-job", "SCHEDULED", "job_held"),
        ("bus-job", "SCHEDULED", "job_deferred"),
        ("bus-job", "SCHEDULED", "job_approved"),
    }


@pytest.mark.requirement("D19")
@pytest.mark.parametrize(
    "name, target",
    [
        ("leased-job", "cancelled"),
        ("bus-job", "CANCELLED"),
        ("queue-job", "FAILED"),
        ("run", "failed"),
        ("nlm-job", "ERROR"),
    ],
)
def test_work_can_be_cancelled_in_every_state_that_has_not_ended(name: str, target: str):
    lifecycle = LIFECYCLES[name]
    open_states = {s.name for s in lifecycle.states if s.phase is not Phase.ENDED and s.name != target}
    cancels = {t.source: t.target for t in lifecycle.transitions if t.trigger == Trigger.CANCEL}
    assert cancels == dict.fromkeys(open_states, target)


@pytest.mark.requirement("D1")
@every_lifecycle
def test_no_transition_can_lower_progress(lifecycle: Lifecycle):
    opened = {Progress.SAME: (4, 7), Progress.ATTEMPT: (4, 8), Progress.GENERATION: (5, 0)}
    moves = [t for t in lifecycle.transitions if t.source is not None]
    lowered = [
        t for t in moves if progress(lifecycle, *opened[t.opens], t.target) < progress(lifecycle, 4, 7, t.source or "")
    ]
    assert moves
    assert lowered == []


@pytest.mark.requirement("D1")
@every_lifecycle
def test_going_back_always_opens_an_attempt_or_a_generation(lifecycle: Lifecycle):
    ranks = {place.name: place.rank for place in places(lifecycle.name)}
    back = [r for r in TABLES[lifecycle.name] if r.source and ranks[r.target] < ranks[r.source]]
    pulled = [lifecycle.pull(row.source, row.trigger) for row in back]
    assert [t for t in pulled if t is None or t.opens is Progress.SAME] == []


@every_lifecycle
def test_only_a_requeue_or_a_discard_leaves_an_ended_state(lifecycle: Lifecycle):
    ends = {place.name for place in places(lifecycle.name) if place.phase == "ended"}
    leaving = {t.trigger for t in lifecycle.transitions if t.source in ends and t.target != t.source}
    assert leaving <= {Trigger.REQUEUE, Trigger.DISCARD}


@every_lifecycle
def test_the_sweep_may_do_whatever_falls_to_it(lifecycle: Lifecycle):
    refused = [t for t in lifecycle.transitions if t.trigger in SWEPT and lifecycle.swept_by not in t.actors]
    fenced = [t for t in lifecycle.transitions if t.trigger in SWEPT and t.fenced]
    assert (refused, fenced) == ([], [])


@every_lifecycle
def test_every_state_can_be_reached_and_every_job_can_end(lifecycle: Lifecycle):
    arrows = [(t.source, t.target) for t in lifecycle.transitions]
    reached: set[str | None] = {None}
    ending: set[str | None] = {state.name for state in lifecycle.states if state.phase is Phase.ENDED}
    for _ in lifecycle.states:
        reached |= {target for source, target in arrows if source in reached}
        ending |= {source for source, target in arrows if target in ending}
    assert reached == ending | {None} == {None, *(state.name for state in lifecycle.states)}


@pytest.mark.requirement("D16")
def test_a_lost_lease_leaves_only_runs_and_nlm_jobs_where_they_are():
    stays = {n for n, life in LIFECYCLES.items() for s in life.states if s.lease_loss is LeaseLoss.STAY}
    expires = {n for n, life in LIFECYCLES.items() for s in life.states if s.lease_loss is LeaseLoss.EXPIRE}
    assert stays == {"run", "nlm-job"}
    assert expires == {"queue-job", "leased-job", "bus-job", "proposal"}


@every_lifecycle
def test_exactly_the_held_states_can_be_lost(lifecycle: Lifecycle):
    assert [s for s in lifecycle.states if (s.lease_loss is not None) is not (s.phase is Phase.HELD)] == []


def test_only_the_listed_states_are_a_success_or_a_dead_letter():
    """What the tables say beside phase and rank, in one place."""
    flags = {
        flag: {(n, s.name) for n, life in LIFECYCLES.items() for s in life.states if getattr(s, flag)}
        for flag in ("success", "dead_letter")
    }
    assert flags["dead_letter"] == {("leased-job", "dead_lettered")}
    assert flags["success"] == {
        ("run", "completed"),
        ("queue-job", "COMPLETE"),
        ("nlm-job", "DONE"),
        ("leased-job", "succeeded"),
        ("bus-job", "SUCCEEDED"),
        ("proposal", "applied"),
        ("inbox-entry", "processed"),
    }
    claimable = {(n, s.name) for n, life in LIFECYCLES.items() for s in life.states if s.claimable and not s.runs_code}
    assert claimable == {
        ("run", "queued"),
        ("queue-job", "QUEUED"),
        ("nlm-job", "ACCEPTED"),
        ("leased-job", "queued"),
        ("bus-job", "SCHEDULED"),
        ("proposal", "approved"),
        ("proposal", "auto_approved"),
    }
    codeless = {
        (n, s.name) for n, x in LIFECYCLES.items() for s in x.states if s.phase is Phase.HELD and not s.runs_code
    }
    assert codeless == {("leased-job", "assigned"), ("bus-job", "DISPATCHED")}


def test_timers_are_the_operator_window_and_the_life_of_proposals_entries_and_staged_artifacts():
    """D8: FAILED rests 15 minutes for an operator; D22, D51: what nobody decides expires after 72 hours; D15: what no job names."""
    timers = {(n, s.name): s.timer_s for n, life in LIFECYCLES.items() for s in life.states if s.timer_s is not None}
    assert timers == {
        ("queue-job", "FAILED"): 900.0,
        ("proposal", "pending"): 259_200.0,
        ("inbox-entry", "pending"): 259_200.0,
        ("artifact", "staged"): 604_800.0,
    }
    assert all(LIFECYCLES[name].pull(state, Trigger.DUE) for name, state in timers)


def test_an_error_in_a_held_state_pulls_what_the_documents_say():
    pulls = {n: {s.name: s.on_error for s in life.states if s.on_error} for n, life in LIFECYCLES.items()}
    assert pulls == {
        "run": {"running": "fail"},
        "queue-job": {"CONTEXT_ASSEMBLY": "retry", "NOTEBOOKLM_CALL": "retry", "ARTIFACT_WRITE": "retry"},
        "nlm-job": dict.fromkeys(
            ("FETCHING_CONTEXT", "BUILDING_PROMPT", "NLM_QUERY", "STRUCTURING", "CALLBACK"), "fail"
        ),
        "leased-job": {"assigned": "release", "running": "retry"},
        "bus-job": {"DISPATCHED": "retry", "RUNNING": "retry"},
        "proposal": {"applying": "fail"},
        "inbox-entry": {},
        "artifact": {},
    }


def test_transition_refusal_names_the_target_and_the_permitted_roles():
    run = LIFECYCLES["run"]
    assert run.between("running", "completed", Role.WORKER) == Illegal(
        lifecycle="run",
        source="running",
        target="completed",
        trigger=None,
        actor=Role.WORKER,
        reason="only orchestrator may",
    )
    assert run.between("completed", "running", Role.ORCHESTRATOR) == Illegal(
        lifecycle="run",
        source="completed",
        target="running",
        trigger=None,
        actor=Role.ORCHESTRATOR,
        reason="not declared",
    )
    assert next_state(run, "queued", "complete", Role.ORCHESTRATOR) == Illegal(
        lifecycle="run",
        source="queued",
        target=None,
        trigger="complete",
        actor=Role.ORCHESTRATOR,
        reason="not declared",
    )
    assert next_state(run, None, "submit", Role.WORKER) == Illegal(
        lifecycle="run",
        source=None,
        target="requested",
        trigger="submit",
        actor=Role.WORKER,
        reason="only gateway, orchestrator may",
    )


def test_states_of_unknown_names_are_refused_like_any_other_pair():
    refused = LIFECYCLES["run"].between("running", "archived", Role.ORCHESTRATOR)
    assert isinstance(refused, Illegal)
    assert refused.reason == "not declared"


def test_names_and_codes_lead_to_one_another():
    assert {life.code: life for life in LIFECYCLES.values()} == BY_CODE
    for lifecycle in LIFECYCLES.values():
        assert lifecycle.code_of(None) == 0
        assert [lifecycle.state_of(lifecycle.code_of(s.name)) for s in lifecycle.states] == list(lifecycle.states)


@pytest.mark.requirement("D5")
def test_every_event_type_is_used_and_known_and_signals_are_none():
    used = {row.event for table in TABLES.values() for row in table}
    assert used == set(EVENT_TYPES)
    assert len(set(EVENT_TYPES)) == len(EVENT_TYPES)
    assert {"job_heartbeat", "job_lease_renewed"} <= set(SIGNAL_TYPES)
    assert set(REMARK_TYPES) < set(SIGNAL_TYPES)
    assert not set(SIGNAL_TYPES) & set(EVENT_TYPES)

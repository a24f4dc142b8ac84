"""Data that is no lifecycle is refused when it is made, with every problem named."""

from dataclasses import replace

import pytest

from trellis.lifecycles import LeaseLoss, Lifecycle, Progress, Role, State, Transition, Trigger
from trellis.lifecycles.lifecycle import STATES_MAX, arrow, ended, held, waiting

STATES = (waiting("open", 0, claimable=True), held("busy", 1, on_error=Trigger.RETRY), ended("done", 2, success=True))
SUBMIT = arrow(None, "open", Trigger.SUBMIT, Role.SUBMITTER, "job_queued", "asked")
CLAIM = arrow("open", "busy", Trigger.CLAIM, Role.WORKER, "job_claimed", "taken")
RETRY = arrow("busy", "open", Trigger.RETRY, Role.WORKER, "job_queued", "again", opens=Progress.ATTEMPT, fenced=True)
EXPIRE = arrow("busy", "open", Trigger.EXPIRE, Role.SWEEPER, "job_queued", "lost", opens=Progress.ATTEMPT)
COMPLETE = arrow("busy", "done", Trigger.COMPLETE, Role.WORKER, "job_succeeded", "made", fenced=True)
TRANSITIONS = (SUBMIT, CLAIM, RETRY, EXPIRE, COMPLETE)


def make(states: tuple[State, ...] = STATES, transitions: tuple[Transition, ...] = TRANSITIONS) -> Lifecycle:
    return Lifecycle(
        name="sample", code=9, title="A sample", swept_by=Role.SWEEPER, states=states, transitions=transitions
    )


def test_a_sound_lifecycle_is_accepted():
    assert make().initial.name == "open"


def problem(states: tuple[State, ...] = STATES, transitions: tuple[Transition, ...] = TRANSITIONS) -> str:
    with pytest.raises(ValueError, match=r"^lifecycle sample: ") as refused:
        make(states, transitions)
    return str(refused.value).removeprefix("lifecycle sample: ")


def test_a_state_that_is_declared_twice_is_refused():
    assert problem((*STATES, ended("done", 2))) == "a state is declared twice"


def test_more_states_than_the_contract_allows_are_refused():
    most = (*STATES, *(ended(f"end{n}", 2) for n in range(STATES_MAX - len(STATES))))
    assert len(make(most).states) == STATES_MAX
    assert problem((*most, ended("one_more", 2))) == "more than 15 states"


def test_a_trigger_that_pulls_two_transitions():
    assert problem(transitions=(*TRANSITIONS, replace(COMPLETE, target="open", opens=Progress.ATTEMPT))) == (
        "a trigger pulls two transitions in one state"
    )


@pytest.mark.parametrize(
    "born",
    [(), (replace(SUBMIT, trigger="make"),), (SUBMIT, replace(SUBMIT, trigger="make"))],
    ids=["none", "another trigger", "two ways"],
)
def test_lifecycle_with_other_than_one_submit_is_invalid(born: tuple[Transition, ...]):
    assert problem(transitions=(*born, *TRANSITIONS[1:])) == "exactly one submit makes a job"


def test_a_transition_between_unknown_states():
    lost = arrow("busy", "nowhere", "lose", Role.WORKER, "job_failed", "")
    assert problem(transitions=(*TRANSITIONS, lost)) == "busy → nowhere names the unknown state nowhere"
    found = arrow("nowhere", "done", "find", Role.WORKER, "job_failed", "")
    assert problem(transitions=(*TRANSITIONS, found)) == "nowhere → done names the unknown state nowhere"


def test_a_transition_that_nobody_may_make():
    assert problem(transitions=(replace(SUBMIT, actors=frozenset()), *TRANSITIONS[1:])) == "None → open has no actor"
    assert problem(transitions=(*TRANSITIONS[:-1], replace(COMPLETE, actors=frozenset()))) == (
        "busy → done has no actor"
    )


@pytest.mark.requirement("D1")
def test_going_back_inside_an_attempt():
    assert problem(transitions=(SUBMIT, CLAIM, replace(RETRY, opens=Progress.SAME), EXPIRE, COMPLETE)) == (
        "busy → open moves back inside an attempt"
    )


def test_a_fence_where_nobody_holds_the_job():
    assert problem(transitions=(SUBMIT, replace(CLAIM, fenced=True), RETRY, EXPIRE, COMPLETE)) == (
        "open → busy is fenced but nobody holds open"
    )


def test_a_transition_out_of_an_ended_state_is_refused():
    reopen = arrow("done", "open", "reopen", Role.CONTROL_PLANE, "job_queued", "", opens=Progress.GENERATION)
    assert problem(transitions=(*TRANSITIONS, reopen)) == "done → open leaves an ended state"
    for allowed in (Trigger.REQUEUE, Trigger.COMPENSATED):
        make(transitions=(*TRANSITIONS, replace(reopen, trigger=allowed)))


def test_a_claimable_state_that_nothing_claims():
    assert problem((waiting("open", 0, claimable=True), *STATES[1:]), (SUBMIT, RETRY, EXPIRE, COMPLETE)) == (
        "open is claimable and no claim leaves it"
    )


def test_a_lease_that_can_be_lost_without_a_way_out():
    assert problem(transitions=(SUBMIT, CLAIM, RETRY, COMPLETE)) == "busy can be lost and declares no expire"
    staying = held("busy", 1, lease_loss=LeaseLoss.STAY, on_error=Trigger.RETRY)
    assert make((STATES[0], staying, STATES[2]), (SUBMIT, CLAIM, RETRY, COMPLETE)).by_name["busy"].claimable


def test_an_error_without_a_transition():
    assert problem(transitions=(SUBMIT, CLAIM, EXPIRE, COMPLETE)) == (
        "busy has no transition for its error trigger retry"
    )


def test_every_problem_of_a_lifecycle_is_reported_at_once():
    told = problem(transitions=(SUBMIT, CLAIM, COMPLETE))
    assert told == "busy can be lost and declares no expire; busy has no transition for its error trigger retry"


@pytest.mark.parametrize(
    "wrong",
    [replace(COMPLETE, finalizes=True, fenced=False), replace(RETRY, finalizes=True)],
    ids=["anybody's step", "no end"],
)
def test_a_step_that_finalizes_and_is_no_success_of_its_holder(wrong: Transition):
    others = tuple(t for t in TRANSITIONS if t.trigger != wrong.trigger)
    label = f"{wrong.source} → {wrong.target}"
    assert problem(transitions=(*others, wrong)) == f"{label} finalizes an artifact and is not a holder's success"

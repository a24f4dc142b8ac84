"""A recorded history holds, or the first step that cannot be is named."""

from dataclasses import replace

import pytest

from trellis.lifecycles import LIFECYCLES, Role
from trellis.lifecycles.replay import RecordedStep, Replayed, ReplayRule, ReplayViolation, replay

LEASED = LIFECYCLES["leased-job"]


def step(
    version: int, source: str | None, target: str, event: str, role: Role = Role.WORKER, *, at: tuple[int, int] = (0, 0)
) -> RecordedStep:
    return RecordedStep(
        version=version, source=source, target=target, role=role, event=event, generation=at[0], attempt=at[1]
    )


HISTORY = [
    step(1, None, "queued", "job_queued", Role.SUBMITTER),
    step(2, "queued", "assigned", "job_claimed"),
    step(3, "assigned", "running", "job_started"),
    step(4, "running", "queued", "job_lease_expired", Role.SWEEPER, at=(0, 1)),
    step(5, "queued", "assigned", "job_claimed", at=(0, 1)),
    step(6, "assigned", "running", "job_started", at=(0, 1)),
    step(7, "running", "failed", "job_failed", at=(0, 1)),
    step(8, "failed", "queued", "job_requeued", Role.CONTROL_PLANE, at=(1, 0)),
    step(9, "queued", "assigned", "job_claimed", at=(1, 0)),
    step(10, "assigned", "running", "job_started", at=(1, 0)),
    step(11, "running", "succeeded", "job_succeeded", at=(1, 0)),
    step(12, "succeeded", "succeeded", "job_compensated", at=(1, 0)),
]


@pytest.mark.parametrize("length", range(1, len(HISTORY) + 1))
def test_every_beginning_of_a_sound_history_holds(length: int):
    last = HISTORY[length - 1]
    assert replay(LEASED, HISTORY[:length]) == Replayed(
        state=last.target, generation=last.generation, attempt=last.attempt, version=length
    )


def test_a_job_without_events_cannot_be():
    found = replay(LEASED, [])
    assert isinstance(found, ReplayViolation)
    assert (found.rule, found.version) == (ReplayRule.EMPTY, 0)


def broken(at: int, **change: object) -> tuple[ReplayRule, int]:
    steps = list(HISTORY)
    steps[at] = replace(steps[at], **change)
    found = replay(LEASED, steps)
    assert isinstance(found, ReplayViolation), found
    assert found.detail
    return found.rule, found.version


def test_versions_rise_by_one_from_one():
    assert broken(0, version=0) == (ReplayRule.VERSION, 0)
    assert broken(2, version=4) == (ReplayRule.VERSION, 4)
    assert broken(2, version=2) == (ReplayRule.VERSION, 2)


@pytest.mark.parametrize("missing", range(len(HISTORY) - 1))
def test_a_missing_event_is_found(missing: int):
    found = replay(LEASED, [s for n, s in enumerate(HISTORY) if n != missing])
    assert isinstance(found, ReplayViolation)
    assert found.rule is ReplayRule.VERSION


@pytest.mark.parametrize("missing", range(1, 7))
def test_a_missing_event_whose_gap_was_closed_is_found_by_its_state(missing: int):
    kept = [s for n, s in enumerate(HISTORY) if n != missing]
    found = replay(LEASED, [replace(s, version=n) for n, s in enumerate(kept, 1)])
    assert isinstance(found, ReplayViolation)
    assert found.rule is ReplayRule.SOURCE


def test_a_step_leaves_the_state_the_job_is_in():
    assert broken(2, source="queued") == (ReplayRule.SOURCE, 3)
    assert broken(0, source="queued") == (ReplayRule.SOURCE, 1)
    assert broken(3, source=None) == (ReplayRule.SOURCE, 4)


def test_replay_accepts_only_declared_transitions_and_roles():
    assert broken(2, target="succeeded") == (ReplayRule.DECLARED, 3)
    assert broken(2, target="no_such_state") == (ReplayRule.DECLARED, 3)
    assert broken(2, role=Role.OWNER) == (ReplayRule.DECLARED, 3)
    assert broken(0, role=Role.SWEEPER) == (ReplayRule.DECLARED, 1)


def test_the_event_is_the_one_of_the_transition():
    assert broken(2, event="job_claimed") == (ReplayRule.EVENT, 3)
    # The pair allows snoozing, but the sweep records another event for it than a worker.
    assert broken(3, event="job_snoozed") == (ReplayRule.EVENT, 4)


@pytest.mark.requirement("D1", "DJ-3")
def test_progress_never_falls():
    assert broken(3, attempt=0) == (ReplayRule.PROGRESS, 4)
    assert broken(7, generation=0) == (ReplayRule.PROGRESS, 8)
    assert broken(5, attempt=0) == (ReplayRule.PROGRESS, 6)


@pytest.mark.requirement("D1")
def test_a_step_opens_what_it_is_declared_to_open():
    assert broken(0, attempt=1) == (ReplayRule.OPENS, 1)
    assert broken(2, attempt=1) == (ReplayRule.OPENS, 3)
    assert broken(3, attempt=2) == (ReplayRule.OPENS, 4)
    assert broken(7, attempt=1) == (ReplayRule.OPENS, 8)


def test_one_pair_of_states_may_record_several_event_types():
    for event in ("job_retry_scheduled", "job_snoozed", "job_released"):
        given_back = step(4, "running", "queued", event, at=(0, 1))
        assert isinstance(replay(LEASED, [*HISTORY[:3], given_back]), Replayed)

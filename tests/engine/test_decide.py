"""What happens to jobs by themselves is decided in one place, and PostgreSQL holds every answer of it."""

import re
from importlib.resources import files

import pytest

from trellis.engine.decide import NO_FACTS, Decision, Fact, Occasion, decision, decision_rows
from trellis.engine.jobs import ReasonCode, Stage
from trellis.lifecycles import LIFECYCLES, Lifecycle, Trigger
from trellis.lifecycles.events import Cause
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN

USUAL = Fact.ATTEMPTS_LEFT | Fact.FIRST_DEATH | Fact.SPARABLE


def decide(lifecycle: Lifecycle, state: str, occasion: Occasion, facts: Fact = NO_FACTS) -> Decision | None:
    return decision(lifecycle.code, lifecycle.code_of(state), occasion, facts)


def dead(cause: Cause, reason: ReasonCode, stage: Stage, trigger: str = Trigger.EXHAUST) -> Decision:
    died = trigger == Trigger.EXHAUST
    return Decision(trigger=trigger, cause=cause, reason_code=reason, stage=stage, counts_death=died)


@pytest.mark.requirement("DJ-8", "DJ-12")
@pytest.mark.parametrize(
    "state, facts, expected",
    [
        ("running", USUAL, Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, counts_death=True)),
        ("assigned", USUAL, Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, spares_attempt=True)),
        ("assigned", Fact.SPARABLE, Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, spares_attempt=True)),
        (
            "assigned",
            NO_FACTS,
            Decision(
                trigger=Trigger.EXHAUST,
                cause=Cause.LEASE_EXPIRED,
                reason_code=ReasonCode.EXHAUSTED_RETRIES,
                stage=Stage.FETCH,
            ),
        ),
        ("running", NO_FACTS, dead(Cause.LEASE_EXPIRED, ReasonCode.EXHAUSTED_RETRIES, Stage.EXEC)),
        (
            "running",
            USUAL | Fact.LAST_DEATH,
            dead(Cause.WORKER_DIED_ONCE, ReasonCode.INFRASTRUCTURE_FAILURE, Stage.EXEC),
        ),
        (
            "running",
            Fact.ATTEMPTS_LEFT | Fact.LAST_DEATH,
            dead(Cause.WORKER_DIED, ReasonCode.INFRASTRUCTURE_FAILURE, Stage.EXEC),
        ),
        ("running", USUAL | Fact.CANCEL_REQUESTED, Decision(trigger=Trigger.CANCEL, cause=Cause.CANCEL_HOLDER_GONE)),
        ("queued", USUAL, None),
    ],
)
def test_a_lost_lease_of_a_leased_job(state: str, facts: Fact, expected: Decision | None):
    assert decide(LEASED_JOB, state, Occasion.LEASE_LOST, facts) == expected


def test_a_lost_lease_leaves_a_run_in_its_state_and_counts_a_death():
    stays = Decision(trigger=None, counts_death=True)
    assert decide(RUN, "running", Occasion.LEASE_LOST, USUAL | Fact.LAST_DEATH) == stays


@pytest.mark.parametrize(
    "facts, trigger, cause",
    [
        (Fact.ATTEMPTS_LEFT, Trigger.DUE, None),
        (Fact.ATTEMPTS_LEFT | Fact.DEADLINE_PASSED, Trigger.EXHAUST, Cause.DEADLINE_PASSED),
        (NO_FACTS, Trigger.EXHAUST, Cause.ATTEMPTS_SPENT),
    ],
)
def test_a_retry_timer_of_a_queue_job(facts: Fact, trigger: str, cause: Cause | None):
    made = decide(QUEUE_JOB, "RETRY_BACKOFF", Occasion.TIMER_DUE, facts)
    assert made is not None
    assert (made.trigger, made.cause) == (trigger, cause)


def test_cause_of_a_dead_letter_counts_the_deaths_of_workers():
    made = decide(LEASED_JOB, "running", Occasion.LEASE_LOST, Fact.LAST_DEATH)
    assert made is not None
    assert made.cause_after(3) == "its worker died 3 times while running this job"


def test_every_decision_is_a_declared_step_with_a_letter_exactly_where_its_target_has_one():
    by_code = {lifecycle.code: lifecycle for lifecycle in LIFECYCLES.values()}
    for code, state, occasion, _, trigger, cause, reason, stage, _, _ in decision_rows():
        lifecycle = by_code[code]
        if trigger is None:
            continue
        step = lifecycle.pull(lifecycle.state_of(state).name, trigger)
        assert step is not None, (lifecycle.name, occasion, trigger)
        needs_letter = lifecycle.by_name[step.target].dead_letter
        assert (reason is not None, stage is not None) == (needs_letter, needs_letter), (lifecycle.name, step)
        assert cause is not None or not needs_letter


def test_no_sql_function_names_a_reason_a_stage_or_a_cause_of_its_own():
    """PostgreSQL's functions pass on what `decision` says. A compensation alone changes the reason of its letter (D36)."""
    texts = {cause.value for cause in Cause} | set(ReasonCode) | {Stage.FETCH, Stage.EXEC, Stage.COMMIT}
    folder = files("trellis.ledgers.postgres").joinpath("functions")
    for entry in folder.iterdir():
        literals = set(re.findall(r"'((?:[^']|'')*)'", entry.read_text(encoding="utf-8")))
        assert not literals & (texts - {ReasonCode.COMPENSATION_FAILED}), entry.name

"""Every step of every lifecycle tried by hand, in plain SQL: exactly the declared ones pass."""

import pytest

from tests.ledgers.sqlite.shell import EVENT, LETTER, Shell
from trellis.lifecycles import LIFECYCLES, Lifecycle, Progress, Role, Transition, Trigger, event_code

UNDECLARED = "trellis: transition not declared"
OTHER_ROLE = "trellis: transition not allowed for this role"
NOT_ALONE = "trellis: an artifact is finalized only by the completion of its job"


@pytest.mark.requirement("D55", "DJ-1", "D1", "JQ-2", "RUN-1", "BUS-1")
@pytest.mark.parametrize("name", LIFECYCLES)
def test_exactly_the_declared_steps_pass(shell: Shell, name: str):
    lifecycle = LIFECYCLES[name]
    passed, tried = set(), 0
    for source in (None, *lifecycle.by_name):
        job = shell.new_job(lifecycle) if source is None else shell.job_in(name, source)
        for step in _every_step(lifecycle, source):
            tried += 1
            for role in Role:
                refusal = _try(shell, job, step, lifecycle, role)
                assert refusal in {None, f"ConstraintError: {UNDECLARED}", UNDECLARED, OTHER_ROLE, NOT_ALONE}, (
                    step,
                    role,
                    refusal,
                )
                if refusal is None:
                    passed.add((source, step.target, step.event, role))
    assert passed == {
        (t.source, t.target, t.event, role)
        for t in lifecycle.transitions
        for role in t.actors
        if t.trigger != Trigger.FINALIZE
    }
    assert tried > len(lifecycle.transitions), "undeclared steps were tried as well"


@pytest.mark.requirement("D55")
@pytest.mark.parametrize("name", LIFECYCLES)
def test_step_puts_the_job_into_the_state_of_its_event(shell: Shell, name: str):
    lifecycle = LIFECYCLES[name]
    for state in lifecycle.by_name:
        job = shell.job_in(name, state)
        (stored,) = shell.rows("SELECT state, version, seq FROM trellis_job WHERE id = ?", job)
        (last,) = shell.rows(
            "SELECT target, version, seq FROM trellis_event WHERE job = ? ORDER BY version DESC LIMIT 1", job
        )
        assert stored == last
        assert stored[0] == lifecycle.code_of(state)


def _every_step(lifecycle: Lifecycle, source: str | None):
    """The declared steps as declared, and every other (target, event of the lifecycle)."""
    declared = {(t.target, t.event): t for t in lifecycle.transitions if t.source == source}
    actors = frozenset({Role.OWNER})
    for target in lifecycle.by_name:
        for event in {t.event for t in lifecycle.transitions}:
            other = Transition(
                source=source, target=target, trigger="none", actors=actors, event=event, opens=Progress.SAME
            )
            yield declared.get((target, event), other)


def _try(shell: Shell, job: int, step: Transition, lifecycle: Lifecycle, role: Role) -> str | None:
    """Try one event and take it back, whatever came of it."""
    values = shell.event(job, step, lifecycle, role)
    assert values["type"] == event_code(step.event)
    shell.db.execute("BEGIN")
    try:
        if lifecycle.by_name[step.target].dead_letter:
            shell.db.execute(LETTER, (job, values["version"]))
        if step.finalizes:
            shell.name_artifact(job, shell.staged(job))
        shell.db.execute(EVENT, values)
    except Exception as error:  # noqa: BLE001 - the message is what the test looks at
        return str(error)
    else:
        return None
    finally:
        shell.db.execute("ROLLBACK")

"""Why a ledger refuses a step, in the same words on every store. Pure: asked of the lifecycle and the job's state alone."""

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Advance, DeadLetterReason
from trellis.lifecycles import Lifecycle, Phase, Role, State, Transition, Trigger

ENGINE_TRIGGERS = {
    Trigger.COMPENSATED: "the engine itself records that a compensation succeeded",
    Trigger.FINALIZE: "only the completion of its job finalizes an artifact",
}
"""Steps that nobody asks for by name, and why: each is a part of another job's step."""

KEY_IS_FULL = "its concurrency key is at its limit"


def transition_or_refusal(lifecycle: Lifecycle, source: str, target: str, role: Role) -> Transition | str:
    """The transition that a `move` of this role makes from one state to another, or why there is none."""
    if target not in lifecycle.by_name:
        return f"{lifecycle.name} has no such state"
    declared = [t for t in lifecycle.transitions if (t.source, t.target) == (source, target)]
    if not declared:
        return "not declared"
    allowed = [t for t in declared if role in t.actors]
    if not allowed:
        return f"only {', '.join(sorted({one.value for t in declared for one in t.actors}))} may"
    free = [t for t in allowed if not t.fenced]
    if not free:
        return "only the lease holder may"
    return ENGINE_TRIGGERS.get(free[0].trigger, free[0])


def trigger_refusal(lifecycle: Lifecycle, state: str, trigger: str, role: Role) -> str:
    """Why this role's cancel or requeue does nothing to a job in this state."""
    if lifecycle.pull(state, trigger) is not None:
        return f"{role.value} may not {trigger} it"
    ended = trigger == Trigger.CANCEL and lifecycle.by_name[state].phase is Phase.ENDED
    return f"it ended as {state}" if ended else f"{state} declares no {trigger}"


def advance_refusal(transition: Transition | None, role: Role, advance: Advance) -> str | None:
    """Why this role cannot make this step as a lease holder, whoever holds the job; None when it can."""
    if transition is None:
        return "not declared"
    if role not in transition.actors:
        return "another role makes this step"
    if not transition.fenced:
        return "it is not the lease holder's step"
    if transition.finalizes and advance.finalizes is None:
        return "it names no artifact"
    if advance.finalizes is not None and not transition.finalizes:
        return "this step finalizes no artifact"
    return None


def version_refusal(found: int, asked: int | None) -> str:
    return f"the job has version {found}, not {asked}"


def check_death(target: State, death: DeadLetterReason | None) -> None:
    """A state that needs a dead letter is entered with one that says what went wrong; raises OptionInvalid."""
    if death is not None and not death.last_error:
        raise OptionInvalid(option="last_error", value="", expected="a dead letter says what went wrong")
    if death is None and target.dead_letter:
        raise OptionInvalid(option="death", value=None, expected=f"{target.name} needs a dead letter")

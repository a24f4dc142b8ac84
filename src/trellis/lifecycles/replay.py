"""Replays a job's recorded history through its lifecycle: where it ends, or the first invalid event.

Pure. `verify` feeds it from a ledger; the frozen v1 logs feed it from files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from trellis.lifecycles.lifecycle import Lifecycle, Progress, Role, Transition, progress


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """The fields of an event that replay needs. `generation` and `attempt` are those after the step."""

    version: int
    source: str | None
    target: str
    role: Role
    event: str
    generation: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The history is valid, and the job must be in this state."""

    state: str
    generation: int
    attempt: int
    version: int


class ReplayRule(StrEnum):
    """The rules that a history can break."""

    EMPTY = "empty"
    VERSION = "version"
    SOURCE = "source"
    DECLARED = "declared"
    EVENT = "event"
    PROGRESS = "progress"
    OPENS = "opens"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayViolation:
    """The first invalid step, and the rule it breaks. `version` is the one the step itself states."""

    rule: ReplayRule
    version: int
    detail: str


def replay(lifecycle: Lifecycle, steps: Iterable[RecordedStep]) -> Replayed | ReplayViolation:
    """Replay a job's events, oldest first."""
    at: RecordedStep | None = None
    for step in steps:
        violation = _violation(lifecycle, at, step)
        if violation is not None:
            return violation
        at = step
    if at is None:
        return ReplayViolation(rule=ReplayRule.EMPTY, version=0, detail="a job has at least the event of its submit")
    return Replayed(state=at.target, generation=at.generation, attempt=at.attempt, version=at.version)


def _violation(lifecycle: Lifecycle, before: RecordedStep | None, step: RecordedStep) -> ReplayViolation | None:
    for rule, detail in _broken_rules(lifecycle, before, step):
        return ReplayViolation(rule=rule, version=step.version, detail=detail)
    return None


def _broken_rules(
    lifecycle: Lifecycle, before: RecordedStep | None, step: RecordedStep
) -> Iterable[tuple[ReplayRule, str]]:
    """Each rule a step breaks. A later rule is checked only when the earlier ones hold."""
    version, state = (before.version, before.target) if before else (0, None)
    if step.version != version + 1:
        yield ReplayRule.VERSION, f"version {step.version} follows {version}"
    if step.source != state:
        yield ReplayRule.SOURCE, f"leaves {step.source}, but the job was {_place(state)}"
    pair = [t for t in lifecycle.transitions if t.source == step.source and t.target == step.target]
    allowed = [t for t in pair if step.role in t.actors]
    if not allowed:
        yield ReplayRule.DECLARED, f"{step.role} may not go {_place(step.source)} → {step.target}"
    recorded = [t for t in allowed if t.event == step.event]
    if not recorded:
        yield ReplayRule.EVENT, f"{step.event} is not what {_place(step.source)} → {step.target} records"
    now = (step.generation, step.attempt)
    if before and progress(lifecycle, *now, step.target) < progress(
        lifecycle, before.generation, before.attempt, before.target
    ):
        yield ReplayRule.PROGRESS, f"generation {now[0]} attempt {now[1]} {step.target} is behind {before.target}"
    if not any(now == _opened(t, before) for t in recorded):
        yield ReplayRule.OPENS, f"generation {now[0]} attempt {now[1]} is not what {step.event} opens"


def _opened(t: Transition, before: RecordedStep | None) -> tuple[int, int]:
    if before is None:
        return (0, 0)
    return {
        Progress.SAME: (before.generation, before.attempt),
        Progress.ATTEMPT: (before.generation, before.attempt + 1),
        Progress.GENERATION: (before.generation + 1, 0),
    }[t.opens]


def _place(state: str | None) -> str:
    return state if state is not None else "not there yet"

"""Pure functions from lifecycle data and a job's row to the step that is written.

Nothing in this module touches the database. The numbers are those of `migrations/0001_ledger.sql`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trellis.engine.decide import NO_FACTS, Decision, Fact, Occasion, decision
from trellis.engine.errors import UnknownLifecycle
from trellis.engine.jobs import JobKey, lease_length_s
from trellis.engine.records import JobPlace
from trellis.engine.text import storable
from trellis.lifecycles import (
    BY_CODE,
    LIFECYCLES,
    Lifecycle,
    Phase,
    Role,
    State,
    Transition,
    Trigger,
    event_code,
)
from trellis.lifecycles.contract import final_states

NOWHERE, READY, RESTING, PARKED, HELD, ENDED_WELL, ENDED_OTHERWISE = range(7)
PLACES = (None, JobPlace.READY, JobPlace.SCHEDULED, JobPlace.BLOCKED, JobPlace.LEASED, JobPlace.ENDED, JobPlace.ENDED)
CLAIMABLE = 1 << READY | 1 << PARKED
US = 1_000_000


def place_code(place: JobPlace | None) -> int | None:
    """The number of a place that a caller named. Ended jobs have two places; the lower number stands for both."""
    return None if place is None else PLACES.index(place)


RowT = TypeVar("RowT", bound=tuple[Any, ...])


def row_reader(kind: type[RowT]) -> Callable[[Sequence[Any]], RowT]:
    """A function that makes rows of a query into named tuples. `_make` would also count the columns of each row."""
    return partial(tuple[Any, ...].__new__, kind)


class JobRow(NamedTuple):
    """A row of `job`, in the column order of the query `standing`."""

    id: JobKey
    lifecycle: int
    type: int
    state: int
    place: int
    version: int
    epoch: int
    generation: int
    attempt: int
    prio: int
    max_attempts: int
    deaths: int
    length: int | None
    until: int | None
    owner: int | None
    due_at: int | None
    deadline_at: int | None
    cancel_at: int | None
    ckey: int | None
    slot: int | None
    compensates: int | None

    @property
    def attempts_left(self) -> bool:
        return self.attempt + 1 < self.max_attempts


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """A declared transition in stored numbers, with the properties of its target. Each exists once, in STEPS."""

    lifecycle: int
    source: int
    target: int
    event: int
    opens: int
    roles: int
    fenced: bool
    trigger: str
    target_name: str
    held: bool
    ended: bool
    claimable: bool
    timed: bool
    """The target has its own timer, which fires `due` or `exhaust`."""
    timer_us: int | None
    """The length of that timer, unless the step sets another."""
    dead_letter: bool
    success: bool
    end_place: int
    finalizes: bool
    asks_to_start: bool
    """Refused once the lease has expired, because user code would begin."""
    ends_wait: bool
    """The source is a state in which jobs wait without a holder (`suspend`)."""

    def allows(self, role: int) -> bool:
        return bool(self.roles >> role & 1)


class ActorRef(NamedTuple):
    """The acting role and name in stored numbers."""

    role: int
    actor: int


class StepWrite(NamedTuple):
    """What the events of one statement have in common. Jobs that make the same step are written together."""

    step: StoredStep
    who: ActorRef
    place: int
    wait: int | None
    revokes: bool = False
    """The epoch rises: a lease is granted or revoked."""
    cause: str | None = None
    data: bytes | None = None
    request: str | None = None

    def bindings(self, now: int, jobs: str) -> tuple[int | str | bytes | None, ...]:
        """The values of the query `insert_events`."""
        step = self.step
        return (
            step.event,
            step.source,
            step.target,
            self.who.role,
            self.who.actor,
            int(self.revokes),
            step.opens,
            step.opens,
            now,
            self.place,
            self.wait,
            storable(self.cause),
            self.data,
            self.request,
            jobs,
        )


def _step(lifecycle: Lifecycle, t: Transition) -> StoredStep:
    target = lifecycle.by_name[t.target]
    leaving = {other.trigger for other in lifecycle.transitions if other.source == t.target}
    return StoredStep(
        lifecycle=lifecycle.code,
        source=lifecycle.code_of(t.source),
        target=lifecycle.code_of(t.target),
        event=event_code(t.event),
        opens=int(t.opens),
        roles=sum(1 << role.code for role in t.actors),
        fenced=t.fenced,
        trigger=t.trigger,
        target_name=t.target,
        held=target.phase is Phase.HELD,
        ended=target.phase is Phase.ENDED,
        claimable=target.phase is Phase.WAITING and target.claimable,
        timed=bool(leaving & {Trigger.DUE, Trigger.EXHAUST}),
        timer_us=None if target.timer_s is None else int(target.timer_s * US),
        dead_letter=target.dead_letter,
        success=target.success,
        end_place=ENDED_WELL if target.success else ENDED_OTHERWISE,
        finalizes=t.finalizes,
        asks_to_start=lifecycle.asks_to_start(t),
        ends_wait=any(other.trigger == Trigger.SUSPEND and other.target == t.source for other in lifecycle.transitions),
    )


STEPS: dict[tuple[int, int, str], StoredStep] = {
    (lifecycle.code, lifecycle.code_of(t.source), t.trigger): _step(lifecycle, t)
    for lifecycle in BY_CODE.values()
    for t in lifecycle.transitions
}
STATE_NAMES: dict[tuple[int, int], str] = {
    (lifecycle.code, lifecycle.code_of(state.name)): state.name
    for lifecycle in BY_CODE.values()
    for state in lifecycle.states
}
STATE_CODES: dict[tuple[str, str], int] = {
    (lifecycle.name, state.name): lifecycle.code_of(state.name)
    for lifecycle in BY_CODE.values()
    for state in lifecycle.states
}
NAMED_STEPS: dict[tuple[str, str, str], StoredStep] = {
    (BY_CODE[code].name, STATE_NAMES[code, source], trigger): step
    for (code, source, trigger), step in STEPS.items()
    if (code, source) in STATE_NAMES
}
"""The steps by the names of lifecycle, source and trigger. Submits leave no state and are not here."""
FINAL_STATES = frozenset(final_states())
HOLDERS_STEPS: dict[int, str] = {
    code: json.dumps(
        [(s.source * 16 + s.target) * 256 + s.event for s in STEPS.values() if s.lifecycle == code and s.fenced]
    )
    for code in BY_CODE
}
"""The fenced steps of each lifecycle, as arguments of the query `last_steps_of_epoch`."""
ROLE_CODES: dict[Role, int] = {role: role.code for role in Role}


def state_of(lifecycle: int, code: int) -> State:
    return BY_CODE[lifecycle].state_of(code)


def lifecycle_code(name: str | None) -> int | None:
    """The stored number of a lifecycle that a caller named; None stays None."""
    if name is None:
        return None
    if name not in LIFECYCLES:
        raise UnknownLifecycle(name=name, known=", ".join(LIFECYCLES))
    return LIFECYCLES[name].code


def lifecycle_bits(names: str | frozenset[str] | None) -> int | None:
    """A bit mask of the lifecycles that a caller named; None stays None."""
    if names is None:
        return None
    return sum(1 << (lifecycle_code(name) or 0) for name in ({names} if isinstance(names, str) else names))


def target_place(step: StoredStep, *, keyed: bool, delay_us: int | None) -> tuple[int, int | None]:
    """The place a step without a lease puts the job in, and how long it waits there.

    A claimable job with a concurrency key is parked first. Slots of a key are handed out in one place of the code.
    """
    if step.ended:
        return step.end_place, None
    if not step.claimable:
        return RESTING, delay_us if step.timed else None
    if delay_us is not None and delay_us > 0:
        return RESTING, delay_us
    return (PARKED if keyed else READY), None


def decision_for(row: JobRow, occasion: Occasion, facts: Fact = NO_FACTS) -> tuple[Decision, StoredStep | None] | None:
    """The decision for this job on an occasion, with its step; None where nothing happens."""
    decided = decision(row.lifecycle, row.state, occasion, facts)
    if decided is None:
        return None
    return decided, None if decided.trigger is None else STEPS[row.lifecycle, row.state, decided.trigger]


def sweeping_role(lifecycle: int) -> int:
    return ROLE_CODES[BY_CODE[lifecycle].swept_by]


def lease_length_us(lease_s: float, heartbeat_s: float) -> int:
    """How long a silent holder keeps its lease, in microseconds."""
    return int(lease_length_s(lease_s, heartbeat_s) * US)

"""The lifecycles as numbers, loaded into the databases so that they can refuse illegal steps themselves.

`transition_bits` has one bit for each (lifecycle, role, source, target); `rank_bytes` has one byte for each (lifecycle,
state). Rows for the `state` and `transition` tables hold everything the sweep needs, so that no SQL names a state.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.events import event_code
from trellis.lifecycles.lifecycle import LeaseLoss, Lifecycle, Phase, Trigger

LIFECYCLES_MAX = 16
ROLES_MAX = 16
STATES_SLOTS = 16
PHASES = (Phase.WAITING, Phase.HELD, Phase.ENDED)


class StateRow(NamedTuple):
    """One row of the databases' `state` table, in the order of its columns."""

    lifecycle: int
    state: int
    name: str
    phase: int
    rank: int
    claimable: bool
    stays: bool
    runs_code: bool
    dead_letter: bool
    success: bool
    timer_s: float | None


class TransitionRow(NamedTuple):
    """One row of the databases' `transition` table, in the order of its columns. `roles` is a bit mask over role codes."""

    lifecycle: int
    source: int
    target: int
    trigger: str
    roles: int
    event: int
    opens: int
    fenced: bool
    finalizes: bool


class LifecycleRow(NamedTuple):
    """One row of the databases' `lifecycle` table, in the order of its columns."""

    lifecycle: int
    name: str
    version: int
    swept_by: int


def lifecycle_rows() -> Iterator[LifecycleRow]:
    """Every lifecycle, as stored."""
    for lifecycle in LIFECYCLES.values():
        yield LifecycleRow(
            lifecycle=lifecycle.code,
            name=lifecycle.name,
            version=lifecycle.version,
            swept_by=lifecycle.swept_by.code,
        )


def state_rows() -> Iterator[StateRow]:
    """Every state of every lifecycle, as stored."""
    for lifecycle in LIFECYCLES.values():
        for state in lifecycle.states:
            yield StateRow(
                lifecycle=lifecycle.code,
                state=lifecycle.code_of(state.name),
                name=state.name,
                phase=PHASES.index(state.phase),
                rank=state.rank,
                claimable=state.claimable,
                stays=state.lease_loss is LeaseLoss.STAY,
                runs_code=state.runs_code,
                dead_letter=state.dead_letter,
                success=state.success,
                timer_s=state.timer_s,
            )


def transition_rows() -> Iterator[TransitionRow]:
    """Every transition of every lifecycle, as stored."""
    for lifecycle in LIFECYCLES.values():
        for t in lifecycle.transitions:
            yield TransitionRow(
                lifecycle=lifecycle.code,
                source=lifecycle.code_of(t.source),
                target=lifecycle.code_of(t.target),
                trigger=t.trigger,
                roles=sum(1 << role.code for role in t.actors),
                event=event_code(t.event),
                opens=int(t.opens),
                fenced=t.fenced,
                finalizes=t.finalizes,
            )


def completed_states() -> list[tuple[int, int]]:
    """(lifecycle, state) of jobs that must have an artifact to be in that state."""
    return sorted({(row.lifecycle, row.target) for row in transition_rows() if row.finalizes})


def final_states() -> list[tuple[int, int]]:
    """(lifecycle, state) of finalized artifacts, including the states that follow finalization."""
    rows = [(row.lifecycle, row.source, row.target) for row in transition_rows()]
    states = {(row.lifecycle, row.target) for row in transition_rows() if row.trigger == Trigger.FINALIZE}
    while more := {(lifecycle, target) for lifecycle, source, target in rows if (lifecycle, source) in states} - states:
        states |= more
    return sorted(states)


def transition_bit(lifecycle: int, role: int, source: int, target: int) -> int:
    """The bit position of one (lifecycle, role, source, target)."""
    return ((lifecycle * ROLES_MAX + role) * STATES_SLOTS + source) * STATES_SLOTS + target


def transition_bits() -> bytes:
    """One bit for each declared (lifecycle, role, source, target), lowest bit of a byte first."""
    bits = bytearray(LIFECYCLES_MAX * ROLES_MAX * STATES_SLOTS * STATES_SLOTS // 8)
    for lifecycle in LIFECYCLES.values():
        for place in _declared(lifecycle):
            bits[place // 8] |= 1 << place % 8
    return bytes(bits)


def rank_bytes() -> bytes:
    """One byte for each (lifecycle, state): its rank; 0 for undefined states."""
    ranks = bytearray(LIFECYCLES_MAX * STATES_SLOTS)
    for row in state_rows():
        ranks[row.lifecycle * STATES_SLOTS + row.state] = row.rank
    return bytes(ranks)


def _declared(lifecycle: Lifecycle) -> Iterator[int]:
    for t in lifecycle.transitions:
        for role in t.actors:
            yield transition_bit(lifecycle.code, role.code, lifecycle.code_of(t.source), lifecycle.code_of(t.target))

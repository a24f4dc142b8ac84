"""Loads the lifecycles into the tables the triggers read, when they differ from what is there. Additive only (DJ-22)."""

import hashlib
from dataclasses import astuple
from functools import cache
from typing import LiteralString

from trellis.engine.errors import LedgerNotMigrated
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.connection import Database
from trellis.ledgers.sqlite.plan import CLAIMABLE, ENDED_OTHERWISE, ENDED_WELL, HELD, RESTING
from trellis.lifecycles import EVENT_TYPES, Role, Trigger
from trellis.lifecycles.contract import StateRow, TransitionRow, lifecycle_rows, state_rows, transition_rows

_WAITING, _HELD = 0, 1
ArrowRow = tuple[int, int, int, int, int, int, int]
FinalizerRow = tuple[int, int, int, int, int, int]


class _ContractQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/contract.sql"):
    read_hash: LiteralString
    write_hash: LiteralString
    begin_loading: LiteralString
    end_loading: LiteralString
    stored_states: LiteralString
    stored_event_types: LiteralString
    put_lifecycle: LiteralString
    put_role: LiteralString
    put_event_type: LiteralString
    put_state: LiteralString
    put_finalizer: LiteralString
    put_arrow: LiteralString


def load_contract(connection: Database, url: str) -> None:
    """Bring the contract tables up to this program's lifecycles; the caller holds a write transaction."""
    wanted = contract_hash()
    if connection.execute(_ContractQueries.read_hash).fetchall() == [(wanted,)]:
        return
    _refuse_other_meanings(connection, url)
    connection.execute(_ContractQueries.begin_loading)
    connection.executemany(
        _ContractQueries.put_lifecycle,
        [(row.lifecycle, row.name, row.version, row.swept_by) for row in lifecycle_rows()],
    )
    connection.executemany(_ContractQueries.put_role, [(role.code, role.value) for role in Role])
    connection.executemany(_ContractQueries.put_event_type, list(enumerate(EVENT_TYPES, start=1)))
    connection.executemany(_ContractQueries.put_state, [_state(row) for row in state_rows()])
    connection.executemany(_ContractQueries.put_arrow, arrow_rows())
    connection.executemany(_ContractQueries.put_finalizer, finalizer_rows())
    connection.execute(_ContractQueries.end_loading)
    connection.execute(_ContractQueries.write_hash, (wanted,))


@cache
def contract_hash() -> str:
    """What tells one set of lifecycles from another. Asked at every opening, the same for the whole life of a process."""
    rows = [repr(astuple(row)) for source in (lifecycle_rows(), state_rows(), transition_rows()) for row in source]
    return hashlib.sha256("\n".join([*rows, *EVENT_TYPES, *Role]).encode()).hexdigest()


@cache
def arrow_rows() -> tuple[ArrowRow, ...]:
    """One row for each (lifecycle, source, target, event type); the roles of transitions that share it are joined."""
    states = {(row.lifecycle, row.state): row for row in state_rows()}
    arrows: dict[int, ArrowRow] = {}
    for t in transition_rows():
        row = _arrow(t, states.get((t.lifecycle, t.source)), states[t.lifecycle, t.target])
        known = arrows.get(row[0], row)
        assert known[2] == row[2], f"two transitions share an event and differ in what they open: {t}"
        arrows[row[0]] = (row[0], known[1] | row[1], *row[2:])
    return tuple(arrows.values())


@cache
def finalizer_rows() -> tuple[FinalizerRow, ...]:
    """The completion of a job with an artifact and the finalization of one; what tells them must not need the lifecycle."""
    rows: dict[int, FinalizerRow] = {}
    for t in transition_rows():
        if t.finalizes or t.trigger == Trigger.FINALIZE:
            step = (t.source * 16 + t.target) * 256 + t.event
            assert step not in rows, f"another lifecycle has a step of the same numbers: {t}"
            rows[step] = (step, t.lifecycle, t.source, t.target, t.event, int(t.finalizes))
    return tuple(rows.values())


def arrow_code(lifecycle: int, source: int, target: int, event: int) -> int:
    return ((lifecycle * 16 + source) * 16 + target) * 256 + event


def _arrow(t: TransitionRow, source: StateRow | None, target: StateRow) -> ArrowRow:
    came_held = source is not None and source.phase == _HELD
    entered = 1 << HELD if target.phase == _HELD else _places(target)
    return (
        arrow_code(t.lifecycle, t.source, t.target, t.event),
        t.roles,
        t.opens,
        target.rank - (source.rank if source else 0),
        entered,
        int(target.dead_letter),
        int(target.phase == _HELD and not came_held),
    )


def _places(row: StateRow) -> int:
    """The places a job may be in while it has this state; one whose lease was lost may be claimed where it stays."""
    if row.phase == _WAITING:
        return 1 << RESTING | (CLAIMABLE if row.claimable else 0)
    if row.phase == _HELD:
        return 1 << HELD | (CLAIMABLE if row.stays else 0)
    return 1 << (ENDED_WELL if row.success else ENDED_OTHERWISE)


def _state(row: StateRow) -> tuple[int, int, str, int, int, int, int]:
    code = row.lifecycle * 16 + row.state
    return (code, row.lifecycle, row.name, row.phase, row.rank, _places(row), int(row.dead_letter))


def _refuse_other_meanings(connection: Database, url: str) -> None:
    """A stored number that means something else here was written by a program this one cannot share a ledger with."""
    ours = {(row.lifecycle * 16 + row.state): row.name for row in state_rows()}
    states = connection.execute(_ContractQueries.stored_states).fetchall()
    types = connection.execute(_ContractQueries.stored_event_types).fetchall()
    clash = [name for code, name in states if ours.get(code, name) != name]
    clash += [name for code, name in types if code <= len(EVENT_TYPES) and EVENT_TYPES[code - 1] != name]
    if clash:
        raise LedgerNotMigrated(found=f"another meaning of {', '.join(clash)}", needed="this program's", url=url)

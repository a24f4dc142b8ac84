"""The parts of a ledger that a move copies, in their order."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, LiteralString, TypeAlias

from trellis.engine.positions import to_postgres
from trellis.ledgers.queries import NamedQueries
from trellis.lifecycles import Role

SOURCE = NamedQueries("trellis.ledgers.moving:source.sql")
WRITE = NamedQueries("trellis.ledgers.moving:write.sql")
TARGET = NamedQueries("trellis.ledgers.moving:target.sql")
UNKNOWN_ROLE = Role.CONTROL_PLANE.code
"""The role of an actor of which no event and no act says one."""

MovedRow: TypeAlias = tuple[Any, ...]
_POSITION = re.compile(r"^(!?)(\d{16})(?= |$)|(?<= documents=)(\d{16})(?= |$)")


@dataclass(frozen=True, kw_only=True)
class LedgerPart:
    """Rows that are copied together. `start` is a key before the first one, in SQLite and in PostgreSQL."""

    name: str
    tables: tuple[str, ...]
    """The SQLite tables whose rows it has."""
    start: tuple[Any, ...]
    target_start: tuple[Any, ...] | None = None
    """Where PostgreSQL is read by another key."""
    source: LiteralString
    write: LiteralString
    target: LiteralString | None
    """None for names that are compared where other rows have them."""
    adapt: Callable[[MovedRow], MovedRow] = lambda row: row
    """An SQLite row as PostgreSQL shall have it."""
    in_order: Callable[[MovedRow], MovedRow] = lambda row: row
    """A row that was read from PostgreSQL in the order of the SQLite columns."""
    repeats: bool = False
    """Whether each run writes all its rows again, which changes nothing: a resumed move may have another login."""
    further: tuple[Any, ...] = ()
    """Parameters of the SQLite query between the key and the limit."""


def with_postgres_positions(place: str | None) -> str | None:
    """The stored position of a subscriber, which may be left behind (!) and may hold a second position."""
    if place is None:
        return None
    return _POSITION.sub(lambda m: f"{m[1] or ''}{to_postgres(m[2] or m[3])}", place)


def _follower(row: MovedRow) -> MovedRow:
    return (*row[:-1], with_postgres_positions(row[-1]))


def _event(row: MovedRow) -> MovedRow:
    return (row[2], row[0], row[1], *row[3:])


def _part(name: str, tables: tuple[str, ...], start: tuple[Any, ...], **more: Any) -> LedgerPart:
    read: LiteralString = getattr(SOURCE, name)
    target: LiteralString | None = None if name == "actors" else getattr(TARGET, name)
    return LedgerPart(
        name=name, tables=tables, start=start, source=read, write=getattr(WRITE, name), target=target, **more
    )


FIRST_NUMBER = -(2**62)
PARTS: tuple[LedgerPart, ...] = (
    _part("actors", ("trellis_actor",), ("", "", -1), repeats=True, further=(UNKNOWN_ROLE,)),
    _part("types", ("trellis_job_type", "trellis_type_control"), ("",)),
    _part("type_options", ("trellis_type_options",), (-1, "")),
    _part("keys", ("trellis_concurrency_key",), ("",)),
    _part("key_rates", ("trellis_key_rate",), ("", "", 0)),
    _part("jobs", ("trellis_job", "trellis_submission"), (FIRST_NUMBER,)),
    _part("events", ("trellis_event",), (FIRST_NUMBER,), target_start=(FIRST_NUMBER, 0), in_order=_event),
    _part("dead_letters", ("trellis_dead_letter",), (FIRST_NUMBER, 0)),
    _part("idempotency_keys", ("trellis_idempotency",), ("", "")),
    _part("unique_jobs", ("trellis_unique_job",), (FIRST_NUMBER,)),
    _part("results", ("trellis_result",), (FIRST_NUMBER,)),
    _part("checkpoints", ("trellis_checkpoint",), (FIRST_NUMBER,)),
    _part("journal", ("trellis_journal",), (FIRST_NUMBER, "")),
    _part("signals", ("trellis_signal",), (FIRST_NUMBER,)),
    _part("renewals", ("trellis_signal",), (FIRST_NUMBER,)),
    _part("job_signals", ("trellis_job_signal",), (FIRST_NUMBER,)),
    _part("spawned", ("trellis_spawned",), (FIRST_NUMBER, FIRST_NUMBER)),
    _part("suspensions", ("trellis_suspension",), (FIRST_NUMBER,)),
    _part("cancel_requests", ("trellis_wish",), (FIRST_NUMBER,)),
    _part("workers", ("trellis_worker",), ("",)),
    _part("followers", ("trellis_follower",), ("",), adapt=_follower),
    _part("acts", ("trellis_act",), (0,)),
    _part("request_keys", ("trellis_request_key",), ("", "")),
    _part("alerts", ("trellis_alert",), ("",)),
    _part("schedules", ("trellis_schedule",), ("",)),
    _part("audit_head", ("trellis_audit_head",), (0,)),
    _part("settings", ("trellis_meta",), ("",)),
)
"""In the order in which they are copied: names first, because the others refer to them."""

"""Schedules of jobs in an SQLite ledger. Each change by a person or an application is one administrative act."""

from trellis.engine.admin_acts import ACTIVITY, TEXT_CHARS_MAX, NewAct
from trellis.engine.errors import InputError
from trellis.engine.jobs import Actor
from trellis.engine.schedules import (
    ADDED,
    CHANGED,
    DUE_MAX,
    PAUSED,
    REMOVED,
    RESUMED,
    SCHEDULES_MAX,
    DueSchedules,
    ScheduleRecord,
    ScheduleSpec,
)
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import control, rows
from trellis.ledgers.sqlite.lanes import Transaction

_SCHEDULE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/schedules.sql")


def find(tx: Transaction, name: str | None = None) -> list[ScheduleRecord]:
    stored = tx.db.execute(_SCHEDULE_QUERIES.all, {"name": name, "limit": SCHEDULES_MAX})
    return [_record(row) for row in stored]


def due(tx: Transaction, *, topics: bool) -> DueSchedules:
    """The schedules that are due, and when the next of the others is."""
    values = {"now": tx.now, "topics": int(topics)}
    schedules = [_record(row) for row in tx.db.execute(_SCHEDULE_QUERIES.due, {**values, "limit": DUE_MAX})]
    ((next_at,),) = tx.db.execute(_SCHEDULE_QUERIES.next_at, values).fetchall()
    return DueSchedules(now=rows.moment(tx.now), due=tuple(schedules), next_at=rows.moment_or_none(next_at))


def save(tx: Transaction, actor: Actor, record: ScheduleRecord, *, cause: str | None = None) -> bool:
    """Store a new schedule, or one in place of the version that was read."""
    before = next(iter(find(tx, record.name)), None)
    if before is not None and _is_same(before, record):
        return True
    if (0 if before is None else before.version) != record.version:
        return False
    if before is None and tx.db.execute(_SCHEDULE_QUERIES.count).fetchall()[0][0] >= SCHEDULES_MAX:
        raise InputError(detail=f"there are {SCHEDULES_MAX} schedules already; remove one")
    texts = (record.name, record.version + 1, record.spec.to_json(), int(record.spec.topic is not None))
    times = [None if at is None else rows.microseconds(at) for at in (record.since, record.next_at)]
    by = (tx.names.actor_id(actor.name), tx.now)
    tx.db.execute(
        _SCHEDULE_QUERIES.put, (*texts, int(record.paused), record.owner, *times, None, None, None, None, *by)
    )
    _record_acts(tx, actor, before, record, cause)
    return True


def _is_same(before: ScheduleRecord, after: ScheduleRecord) -> bool:
    return (before.spec.to_json(), before.paused) == (after.spec.to_json(), after.paused)


def _record_acts(
    tx: Transaction, actor: Actor, before: ScheduleRecord | None, after: ScheduleRecord, cause: str | None
) -> None:
    if before is None or before.spec.to_json() != after.spec.to_json():
        source = None if before is None else before.spec.to_json()[:TEXT_CHARS_MAX]
        target, event = after.spec.to_json()[:TEXT_CHARS_MAX], ADDED if before is None else CHANGED
        act = NewAct(event=event, subject=after.name, source=source, target=target, cause=cause)
        control.record(tx, actor, act)
    if (before is not None and before.paused) != after.paused:
        event, source = (PAUSED if after.paused else RESUMED), ACTIVITY[not after.paused]
        act = NewAct(event=event, subject=after.name, source=source, target=ACTIVITY[after.paused], cause=cause)
        control.record(tx, actor, act)


def remove(tx: Transaction, actor: Actor, name: str, *, cause: str | None = None) -> bool:
    removed = tx.db.execute(_SCHEDULE_QUERIES.remove, (name,)).fetchall()
    if removed:
        act = NewAct(event=REMOVED, subject=name, source=removed[0][0][:TEXT_CHARS_MAX], cause=cause)
        control.record(tx, actor, act)
    return bool(removed)


def advance(tx: Transaction, actor: Actor, record: ScheduleRecord) -> bool:  # noqa: ARG001 - not recorded
    """Store what was decided about the instants, if the version is the one that was read."""
    times = {"since": record.since, "next_at": record.next_at, "firing": record.firing, "last_at": record.last_at}
    values = {name: None if at is None else rows.microseconds(at) for name, at in times.items()}
    named = {"name": record.name, "version": record.version, "last_job": record.last_job, "skipped": record.skipped}
    return bool(tx.db.execute(_SCHEDULE_QUERIES.advance, {**values, **named}).fetchall())


def _record(row: rows.SqliteRow) -> ScheduleRecord:
    name, version, spec, paused, owner, since, next_at, firing, last_at, last_job, skipped = row
    return ScheduleRecord(
        spec=ScheduleSpec.from_json(name, spec),
        owner=owner,
        version=version,
        paused=bool(paused),
        since=rows.moment(since),
        next_at=rows.moment_or_none(next_at),
        firing=rows.moment_or_none(firing),
        last_at=rows.moment_or_none(last_at),
        last_job=last_job,
        skipped=skipped,
    )

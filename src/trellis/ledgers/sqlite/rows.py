"""Converts stored rows into the values readers see."""

from datetime import UTC, datetime, timedelta
from typing import Any

from trellis.engine.admin_acts import node_of
from trellis.engine.jobs import Epoch, HeldLease, JobId, JobKey, Lease, Priority, ReasonCode, Stage
from trellis.engine.records import DeadLetter, Event, Job, SampledEvent, event_id
from trellis.ledgers.sqlite.plan import HELD, PLACES, STATE_NAMES, US
from trellis.lifecycles import BY_CODE, Lifecycle, event_name
from trellis.lifecycles.lifecycle import ROLES

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SqliteRow = Any


def moment(us: int) -> datetime:
    """The datetime, clamped to the supported range: no stored row may prevent others from being read."""
    return _EPOCH + timedelta(microseconds=min(max(us, _FIRST_US), _LAST_US))


def moment_or_none(us: int | None) -> datetime | None:
    return None if us is None else moment(us)


def microseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


_FIRST_US = microseconds(datetime.min.replace(tzinfo=UTC))
_LAST_US = microseconds(datetime.max.replace(tzinfo=UTC))


def event(row: SqliteRow) -> Event:
    """A row of the queries that select `event_columns`."""
    (job_id, lifecycle, correlation, version, kind, source, target, role, actor) = row[:9]
    (epoch, generation, attempt, at, cause, data) = row[9:15]
    return Event(
        id=event_id(job_id, version),
        job_id=job_id,
        lifecycle=BY_CODE[lifecycle].name,
        type=event_name(kind),
        ts=moment(at),
        role=ROLES[int(role)],
        actor=actor,
        correlation_id=correlation,
        cause=cause,
        source=None if source == 0 else STATE_NAMES[lifecycle, source],
        target=STATE_NAMES[lifecycle, target],
        generation=generation,
        attempt=attempt,
        epoch=Epoch(epoch),
        version=version,
        data=data,
        node=node_of(actor, row[16]),
    )


def sampled_event(row: SqliteRow, lifecycle: Lifecycle) -> SampledEvent:
    kind, at, submitted_at, role, source, cause, data = row
    return SampledEvent(
        type=event_name(kind),
        ts=moment(at),
        submitted_at=moment(submitted_at),
        role=ROLES[int(role)],
        source=lifecycle.state_of(source).name if source else None,
        cause=cause,
        data=data,
    )


def job(row: SqliteRow) -> Job:
    """A row of the queries that select `job_columns`."""
    (job_id, lifecycle, kind, state, place, prio, generation, attempt, max_attempts, max_attempts_given) = row[:10]
    (version, epoch, deaths, created_at, updated_at, due_at, deadline_at, owner, until, cancel_at) = row[10:20]
    (key, correlation, trace, parent, compensates, payload, progress) = row[20:27]
    held = place == HELD
    where = PLACES[int(place)]
    assert where is not None, "a job that was never submitted is in no place"
    return Job(
        job_id=job_id,
        lifecycle=BY_CODE[lifecycle].name,
        type=kind,
        state=STATE_NAMES[lifecycle, state],
        place=where,
        priority=Priority(prio),
        generation=generation,
        attempt=attempt,
        max_attempts=max_attempts,
        spared=max_attempts - max_attempts_given,
        version=version,
        epoch=Epoch(epoch),
        deaths=deaths,
        created_at=moment(created_at),
        updated_at=moment(updated_at),
        due_at=moment_or_none(due_at),
        deadline_at=moment_or_none(deadline_at),
        owner=owner if held else None,
        lease_expires_at=moment_or_none(until) if held else None,
        cancel_requested=cancel_at is not None,
        cancel_due_at=moment_or_none(cancel_at),
        concurrency_key=key,
        correlation_id=correlation,
        trace=trace,
        parent_id=None if parent is None else JobId(parent),
        compensates=compensates,
        payload=payload,
        progress=progress,
    )


def hold(row: SqliteRow, now: int) -> HeldLease:
    (
        key,
        epoch,
        job_id,
        lifecycle,
        kind,
        state,
        attempt,
        max_attempts,
        version,
        owner,
        until,
        cancel_at,
        correlation,
    ) = row
    return HeldLease(
        lease=Lease(JobKey(key), Epoch(epoch), JobId(job_id), BY_CODE[lifecycle].name),
        type=kind,
        state=STATE_NAMES[lifecycle, state],
        attempt=attempt,
        max_attempts=max_attempts,
        version=version,
        owner=owner,
        left_s=(until - now) / US,
        cancel=cancel_at is not None,
        correlation_id=correlation,
    )


def dead_letter(row: SqliteRow) -> DeadLetter:
    """A row of the queries that select `dead_letter_columns`."""
    (job_id, kind, lifecycle, state, reason, stage, error, attempts, owner, until, correlation, at, version) = row
    return DeadLetter(
        job_id=job_id,
        type=kind,
        lifecycle=BY_CODE[lifecycle].name,
        state=STATE_NAMES[lifecycle, state],
        reason_code=ReasonCode(reason),
        stage=Stage(stage),
        last_error=error,
        attempts=attempts,
        last_owner=owner,
        last_lease_expires_at=moment_or_none(until),
        correlation_id=correlation,
        at=moment(at),
        version=version,
    )

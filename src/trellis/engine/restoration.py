"""Decides how a lost job is restored from its recorded events. Pure; every ledger follows it.

Invariants: a job is restored only if its whole history replays. No earlier holder keeps any right: a held job comes
back with an ended lease, and every job's epoch is far above any recorded one, because a holder may still have an epoch
that was never recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from trellis.engine.errors import HistoryBroken
from trellis.engine.event_data import priority_in
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, Epoch, Priority
from trellis.engine.records import Event, JobPlace, JobToRestore, RecordedEvent, event_id
from trellis.engine.retry_policy import releasable, sparable
from trellis.engine.verify import recorded_step
from trellis.lifecycles import LIFECYCLES, LeaseLoss, Lifecycle, Phase, Trigger
from trellis.lifecycles.events import Cause
from trellis.lifecycles.replay import ReplayViolation, replay

EPOCHS_ABOVE = 1_000
"""How far above the highest recorded epoch a restored job's epoch is."""
SPARING_TRIGGERS = frozenset({Trigger.SNOOZE, Trigger.RELEASE, Trigger.SUSPEND})
"""Steps that close an attempt without counting it."""

RELEASED_CAUSE = "the holder was stopped and let go"
"""The cause a stopped holder records when it closes an attempt as a retry that does not count."""
GIVEN_BACK_PREFIX = "given back: "
"""The prefix of the cause when an undelivered job is given back and the attempt does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredPlace:
    """Where a restored job is put.

    READY means claimable: a job with a concurrency key is parked, and the sweep gives it its slot.
    """

    place: JobPlace
    epoch: Epoch
    max_attempts: int
    deaths: int
    due_at: datetime | None
    deadline_at: datetime | None
    held_by: Event | None
    """The last event of this generation that left the job held."""
    held_until: datetime | None


def check_restorable(job: JobToRestore) -> Lifecycle:
    """The lifecycle of a job whose history is valid. Raises HistoryBroken."""
    reason = next(_problems(job), None)
    if reason is not None:
        raise HistoryBroken(job_id=job.job_id if job.records else None, reason=reason)
    return LIFECYCLES[job.records[0].event.lifecycle]


def may_have_letter(event: Event) -> bool:
    """Whether a dead letter may belong to this event."""
    state = LIFECYCLES[event.lifecycle].by_name[event.target]
    return state.phase is Phase.ENDED and not state.success


def restored_place(job: JobToRestore, now: datetime) -> RestoredPlace:
    """Where a checked job belongs now."""
    lifecycle = LIFECYCLES[job.records[0].event.lifecycle]
    first, last = job.records[0], job.records[-1]
    assert first.submission is not None, "a checked job says what was asked"
    own = [one.event for one in job.records if one.event.generation == last.event.generation]
    length = first.submission.deadline_us
    held_by, held_until = _holder(lifecycle, own)
    place, due_at = _place_after(lifecycle, last, now)
    return RestoredPlace(
        place=place,
        epoch=Epoch(last.event.epoch + EPOCHS_ABOVE),
        max_attempts=first.submission.max_attempts + sum(_spares(lifecycle, event) for event in own[1:]),
        deaths=sum(_killed(lifecycle, event) for event in own[1:]),
        due_at=due_at,
        deadline_at=None if length is None else own[0].ts + timedelta(microseconds=length),
        held_by=held_by,
        held_until=None if held_until is None else min(held_until, now),
    )


def restored_priority(job: JobToRestore) -> Priority:
    """The priority of a checked job: the last one that an operator gave it, else the one it was submitted with."""
    submission = job.records[0].submission
    assert submission is not None, "a checked job says what was asked"
    given = [priority_in(one.event) for one in job.records]
    return next((priority for priority in reversed(given) if priority is not None), submission.priority)


def _problems(job: JobToRestore) -> Iterator[str]:
    if not job.records:
        yield "nothing is recorded of it"
        return
    first = job.records[0].event
    lifecycle = LIFECYCLES.get(first.lifecycle)
    if lifecycle is None:
        yield f"there is no lifecycle {first.lifecycle}"
        return
    if job.records[0].submission is None:
        yield "the record of its first event does not say what was asked"
        return
    if len(job.records[0].submission.payload) > PAYLOAD_BYTES_MAX:
        yield f"its payload has more than {PAYLOAD_BYTES_MAX} bytes"
    replayed = replay(lifecycle, [recorded_step(one.event) for one in job.records])
    if isinstance(replayed, ReplayViolation):
        yield f"version {replayed.version}: {replayed.detail}"
    epoch = 0
    for one in job.records:
        yield from _event_problems(lifecycle, first, one)
        if one.event.epoch < epoch:
            yield f"version {one.event.version}: the epoch falls from {epoch} to {one.event.epoch}"
        epoch = one.event.epoch


def _event_problems(lifecycle: Lifecycle, first: Event, one: RecordedEvent) -> Iterator[str]:
    event, letter = one.event, one.dead_letter
    same = (event.job_id, event.lifecycle, event.correlation_id) == (
        first.job_id,
        first.lifecycle,
        first.correlation_id,
    )
    if not same or event.id != event_id(first.job_id, event.version):
        yield f"version {event.version} is of another job"
    if one.submitted_at != first.ts:
        yield f"version {event.version} is of another job of the same id"
    state = lifecycle.by_name.get(event.target)
    if state is not None and state.dead_letter and letter is None:
        yield f"version {event.version}: it was dead-lettered and the dead letter is not recorded"
    if letter is not None and (letter.version != event.version or not letter.last_error):
        yield f"version {event.version}: its dead letter is of another event or says nothing"
    if letter is not None and (letter.last_owner is None) != (letter.last_lease_expires_at is None):
        yield f"version {event.version}: its dead letter names a last owner without a lease, or a lease without an owner"


def _place_after(lifecycle: Lifecycle, last: RecordedEvent, now: datetime) -> tuple[JobPlace, datetime | None]:
    state = lifecycle.by_name[last.event.target]
    if state.phase is Phase.ENDED:
        return JobPlace.ENDED, None
    if state.phase is Phase.HELD:
        return JobPlace.LEASED, None
    if state.claimable and (last.due_at is None or last.due_at <= now):
        return JobPlace.READY, None
    if any(t.target == state.name and t.trigger == Trigger.SUSPEND for t in lifecycle.transitions):
        # What it waits for is recorded nowhere but in its journal: it goes on, and waits again if it has to.
        return JobPlace.SCHEDULED, now
    return JobPlace.SCHEDULED, last.due_at


def _holder(lifecycle: Lifecycle, own: list[Event]) -> tuple[Event | None, datetime | None]:
    """The event that made the job held last in this generation, and the latest time that lease can have ended."""
    held = [n for n, event in enumerate(own) if lifecycle.by_name[event.target].phase is Phase.HELD]
    if not held:
        return None, None
    last = held[-1]
    return own[last], own[min(last + 1, len(own) - 1)].ts


def _spares(lifecycle: Lifecycle, event: Event) -> bool:
    """Whether this step closed an attempt without counting it."""
    made_by, cause = _triggers(lifecycle, event), event.cause or ""
    source = lifecycle.by_name[event.source] if event.source is not None else None
    if (
        source is not None
        and made_by == frozenset({Trigger.EXPIRE})
        and releasable(lifecycle, source)
        and sparable(event.attempt - 1)
    ):
        return True
    return made_by <= SPARING_TRIGGERS or (
        Trigger.RETRY in made_by and (cause == RELEASED_CAUSE or cause.startswith(GIVEN_BACK_PREFIX))
    )


def _triggers(lifecycle: Lifecycle, event: Event) -> frozenset[str]:
    """The triggers that can have caused this step. Never empty in a history that replays."""
    step = (event.source, event.target, event.type)
    return frozenset(
        t.trigger for t in lifecycle.transitions if (t.source, t.target, t.event) == step and event.role in t.actors
    )


def _killed(lifecycle: Lifecycle, event: Event) -> bool:
    """Whether a worker was lost while it ran the job's code."""
    source = lifecycle.by_name[event.source] if event.source is not None else None
    lost = source is not None and source.runs_code and source.lease_loss is LeaseLoss.EXPIRE
    return lost and event.cause != Cause.DEADLINE_PASSED and Trigger.EXPIRE in _triggers(lifecycle, event)

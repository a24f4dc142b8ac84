"""Claiming: selects ready jobs by priority, rate limit and other limits, and grants their leases."""

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from trellis.engine.jobs import CLAIM_MAX, Actor, Claim, Claimed, JobId, JobKey, Lease, Priority, TypeClaim
from trellis.engine.retry_policy import runs_alone
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_may
from trellis.ledgers.sqlite.key_rates import any_rate, look_at, rated_jobs
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    HELD,
    PARKED,
    STATE_NAMES,
    STEPS,
    US,
    ActorRef,
    StepWrite,
    lease_length_us,
    row_reader,
)
from trellis.ledgers.sqlite.steps import STEP_QUERIES, array, job_row, overtake, promote, promote_due, write_step
from trellis.lifecycles import LIFECYCLES, Lifecycle, Trigger

_CLAIM_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/turn.sql")


class _ReadyRow(NamedTuple):
    """A ready job, in the order of the query `to_claim`."""

    id: JobKey
    type: int
    state: int
    version: int
    epoch: int
    generation: int
    attempt: int
    max_attempts: int
    deaths: int
    deadline_at: int | None
    job_id: JobId
    correlation: str | None
    trace: str | None
    parent: JobId | None
    payload: bytes
    compensates: JobId | None
    checkpoint: bytes | None
    place: int
    owner: int | None
    max_deaths: int
    spared: int

    @property
    def runs_alone(self) -> bool:
        return self.deaths > 0 and runs_alone(
            deaths=self.deaths, max_deaths=self.max_deaths, attempt=self.attempt, max_attempts=self.max_attempts
        )


_ready_row = row_reader(_ReadyRow)
_new_lease = row_reader(Lease)
_new_claimed = row_reader(Claimed)


@dataclass(frozen=True, slots=True)
class _TypeDemand:
    """One job type of a claim: its number, its lease terms, and how many jobs may be taken now."""

    id: int
    claim: TypeClaim
    length: int
    room: int
    tokens: float | None


def claim(tx: Transaction, actor: Actor, who: ActorRef, request: Claim, *, least_urgent_first: bool) -> list[Claimed]:
    """Grant leases on up to `start + prefetch` ready jobs and start the first `start` of them."""
    check_may(actor.role, Trigger.CLAIM, request.lifecycle)
    lifecycle = LIFECYCLES[request.lifecycle]
    tx.took_all = False
    before = _claimed_before(tx, who, lifecycle, request)
    if before is not None:
        return before
    count = min(request.start + request.prefetch, CLAIM_MAX)
    rated = any_rate(tx)
    if rated:
        promote_due(tx, count)
    wanted = _type_demands(tx, lifecycle, request, count)
    only = None if request.only is None else _overtaking(tx, wanted, lifecycle, request.only)
    held_back = array(_held_back(tx, lifecycle, wanted)) if request.isolates else "[]"
    if request.only is None:
        ids = _pick(tx, wanted, count, held_back, least_urgent_first=least_urgent_first)
    else:
        ids = [key for (key,) in tx.db.execute(_CLAIM_QUERIES.ready_job, (only, held_back, count))]
    rated_keys: set[int] = set()
    if rated and ids:
        ids, rated_keys = _within_rates(tx, ids)
    tx.took_all = len(ids) < count and not rated  # jobs whose keys have no tokens may have stood before others
    if not ids:
        return []
    by_type = {one.id: one for one in wanted}
    rows = _load(tx, ids)
    claimed = _grant(tx, lifecycle, who, rows, by_type, request)
    _spend(tx, by_type, rows)
    promote(tx, rated_keys)  # notes when the keys have the next tokens for the jobs that wait
    leases = json.dumps([(one.lease.key, one.lease.epoch) for one in claimed], separators=(",", ":"))
    tx.db.execute(_CLAIM_QUERIES.record_claim, (request.claim_id, tx.now, leases))
    return claimed


# --- which -----------------------------------------------------------------------------------------------------------


def _type_demands(tx: Transaction, lifecycle: Lifecycle, request: Claim, count: int) -> list[_TypeDemand]:
    """The types of a claim that exist, are not paused and have rate-limit tokens left."""
    controls = {row[0]: row[1:] for row in tx.db.execute(_CLAIM_QUERIES.controls)}
    wanted: dict[int, _TypeDemand] = {}
    for one in request.types:
        number = tx.names.known_type(lifecycle.code, one.type)
        if number is None:
            continue
        paused, rate, burst, tokens, filled_at, held_max = controls.get(one.type, (0, None, 1, 0.0, 0, None))
        room, left = count, None
        if rate is not None:
            left = min(burst, tokens + rate * (tx.now - filled_at) / US)
            room = min(count, int(left))
        if held_max is not None:
            room = min(room, held_max - tx.db.execute(_CLAIM_QUERIES.held_of_type, (one.type,)).fetchall()[0][0])
        if not paused and room > 0:
            wanted[number] = _TypeDemand(number, one, lease_length_us(one.lease_s, one.heartbeat_s), room, left)
    return list(wanted.values())


def _held_back(tx: Transaction, lifecycle: Lifecycle, wanted: list[_TypeDemand]) -> list[int]:
    """Jobs that must run alone and cannot be claimed now: all but the first, or all while another such job is held."""
    died = tx.db.execute(_CLAIM_QUERIES.died_and_claimable_or_held, (lifecycle.code,))
    alone = [
        (place, prio, pos, key, type_)
        for key, type_, place, prio, pos, deaths, max_deaths, attempt, max_attempts in died
        if runs_alone(deaths=deaths, max_deaths=max_deaths, attempt=attempt, max_attempts=max_attempts)
    ]
    ready = sorted(row for row in alone if row[0] != HELD)
    types = {one.id for one in wanted}
    first = next((row for row in ready if row[4] in types), None) if len(ready) == len(alone) else None
    return [row[3] for row in ready if row is not first]


def _pick(
    tx: Transaction, wanted: list[_TypeDemand], count: int, held_back: str, *, least_urgent_first: bool
) -> list[int]:
    """Keys of ready jobs by priority and readiness, limited by the room of each type."""
    if least_urgent_first:
        return _pick_by_class(tx, wanted, count, held_back)
    heads = [tx.db.execute(_CLAIM_QUERIES.ready_of_type, (w.id, held_back, w.room)).fetchall() for w in wanted]
    merged: Iterable[tuple[int, int, int]] = heads[0] if len(heads) == 1 else heapq.merge(*heads)
    return [key for _, _, key in islice(merged, count)]


def _overtaking(tx: Transaction, wanted: list[_TypeDemand], lifecycle: Lifecycle, job_id: JobId) -> JobKey | None:
    """The only job of a claim, if it is of a demanded type. If it waits for its key, it gets a slot that is not held."""
    stored = tx.db.execute(STEP_QUERIES.find_key_of_job, (job_id,)).fetchall()
    row = job_row(tx, stored[0][0]) if stored else None
    if row is None or row.lifecycle != lifecycle.code or row.type not in {one.id for one in wanted}:
        return None
    if row.place == PARKED:
        overtake(tx, row)
    return row.id


def _pick_by_class(tx: Transaction, wanted: list[_TypeDemand], count: int, held_back: str) -> list[int]:
    """`_pick` with the least urgent priority first. The priorities share each type's room."""
    picked: list[int] = []
    room = {w.id: w.room for w in wanted}
    for priority in reversed(Priority):
        heads = [
            tx.db.execute(_CLAIM_QUERIES.ready_of_class, (w, int(priority), held_back, left)).fetchall()
            for w, left in room.items()
        ]
        for _, key, type_ in islice(heapq.merge(*heads), count - len(picked)):
            picked.append(key)
            room[type_] -= 1
    return picked


def _within_rates(tx: Transaction, ids: list[int]) -> tuple[list[int], set[int]]:
    """Those of these ready jobs whose keys have tokens for them, and these keys. The other jobs wait again."""
    rated = rated_jobs(tx, ids)
    for job in rated.over:
        tx.db.execute(STEP_QUERIES.take_slot_back, (job.id,))
        look_at(tx, job.ckey, tx.now)
    without = {job.id for job in rated.over}
    return [key for key in ids if key not in without], rated.keys


def _load(tx: Transaction, ids: list[int]) -> list[_ReadyRow]:
    return [_ready_row(row) for row in tx.db.execute(_CLAIM_QUERIES.to_claim, (array(ids),))]


def _spend(tx: Transaction, by_type: dict[int, _TypeDemand], rows: list[_ReadyRow]) -> None:
    for one in by_type.values():
        if one.tokens is not None:
            taken = sum(row.type == one.id for row in rows)
            tx.db.execute(_CLAIM_QUERIES.spend_tokens, (one.tokens - taken, tx.now, one.claim.type))


# --- leases ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ClaimPlan:
    """How jobs of one type in one state are claimed, and which jobs those are."""

    claim: StepWrite | None
    start: StepWrite | None
    state: int
    jobs: list[int] = field(default_factory=list[int])


def _claim_plan(lifecycle: Lifecycle, who: ActorRef, state: int, length: int, *, start: bool) -> _ClaimPlan:
    step = STEPS.get((lifecycle.code, state, Trigger.CLAIM))
    if step is None:
        return _ClaimPlan(None, None, state)
    claiming = StepWrite(step, who, HELD, length, revokes=True)
    begin = STEPS.get((lifecycle.code, step.target, Trigger.START)) if start else None
    if begin is None or not begin.allows(who.role):
        return _ClaimPlan(claiming, None, step.target)
    return _ClaimPlan(claiming, StepWrite(begin, who, HELD, length), begin.target)


def _grant(
    tx: Transaction,
    lifecycle: Lifecycle,
    who: ActorRef,
    rows: list[_ReadyRow],
    by_type: dict[int, _TypeDemand],
    request: Claim,
) -> list[Claimed]:
    """Write the events of the claims, then of the starts. Jobs that kept a held state get a lease without an event.

    A job that must run alone is not started here: the other jobs of its worker may have to end first, and may kill the
    worker.
    """
    courses: dict[tuple[int, int, bool], _ClaimPlan] = {}
    claimed: list[Claimed] = []
    isolates, start = request.isolates, request.start
    for number, row in enumerate(rows):
        kind = (row.type, row.state, number < start and not (row.deaths and isolates and row.runs_alone))
        course = courses.get(kind)
        if course is None:
            length = by_type[row.type].length
            course = courses[kind] = _claim_plan(lifecycle, who, row.state, length, start=kind[2])
        course.jobs.append(row.id)
        claimed.append(_claimed(row, lifecycle, course.state, row.epoch + 1, by_type[row.type], tx.now))
    for (type_, _, _), course in courses.items():
        if course.claim is None:
            length = by_type[type_].length
            tx.db.execute(_CLAIM_QUERIES.take_over, (length, tx.now + length, who.actor, array(course.jobs)))
        else:
            write_step(tx, course.claim, course.jobs)
        if course.start is not None:
            write_step(tx, course.start, course.jobs)
    return claimed


def _claimed(row: _ReadyRow, lifecycle: Lifecycle, state: int, epoch: int, want: _TypeDemand, now: int) -> Claimed:
    """A claimed job. Every job has one: it is built from a tuple, which takes half the time of a call for each field."""
    # fmt: off
    (key, _, _, _, _, generation, attempt, max_attempts, deaths, deadline_at, job_id, correlation, trace, parent, payload,
     compensates, checkpoint, _, _, _, spared) = row
    # fmt: on
    return _new_claimed(
        (
            _new_lease((key, epoch, job_id, lifecycle.name)),
            want.claim.type,
            STATE_NAMES[lifecycle.code, state],
            payload,
            attempt,
            generation,
            max_attempts,
            deaths,
            want.length / US,
            want.claim.heartbeat_s,
            correlation or job_id,
            trace,
            parent,
            compensates,
            checkpoint,
            None if deadline_at is None else (deadline_at - now) / US,
            deaths > 0 and row.runs_alone,
            spared,
        )
    )


def _claimed_before(tx: Transaction, who: ActorRef, lifecycle: Lifecycle, request: Claim) -> list[Claimed] | None:
    """The jobs that this claim id gave this claimer before, if their leases live; None when the id was never used.

    They are in the order in which they were submitted, as on PostgreSQL, which does not keep the order of a claim.
    """
    stored = tx.db.execute(_CLAIM_QUERIES.claim_before, (request.claim_id,)).fetchall()
    if not stored:
        return None
    leases: dict[int, int] = dict(json.loads(stored[0][0]))
    types = {tx.names.known_type(lifecycle.code, one.type): one for one in request.types}
    living: list[Claimed] = []
    for row in _load(tx, sorted(leases)):
        one = types.get(row.type)
        if row.epoch == leases[row.id] and row.place == HELD and row.owner == who.actor and one is not None:
            want = _TypeDemand(row.type, one, lease_length_us(one.lease_s, one.heartbeat_s), 0, None)
            living.append(_claimed(row, lifecycle, row.state, row.epoch, want, tx.now))
    return living

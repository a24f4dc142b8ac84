"""Steps by roles that hold no lease: move, cancel, requeue. Repeating a request id returns the first answer."""

import json
from collections.abc import Sequence

from trellis.engine.event_data import CancelRequest, with_cancel_request
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    CancelRequested,
    DeadLetterReason,
    Epoch,
    JobId,
    JobKey,
    Lease,
    Move,
    Moved,
    NotMoved,
    RequestId,
    RequestKey,
)
from trellis.engine.records import JobFilter
from trellis.engine.request_keys import CANCEL_ANSWERS, REQUEUE_ANSWERS
from trellis.engine.text import storable
from trellis.ledgers import refusals
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import request_keys
from trellis.ledgers.sqlite.key_rates import has_token
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    HELD,
    ROLE_CODES,
    STATE_NAMES,
    STEPS,
    US,
    ActorRef,
    JobRow,
    StepWrite,
    StoredStep,
    lease_length_us,
    lifecycle_code,
    place_code,
    state_of,
    target_place,
)
from trellis.ledgers.sqlite.rows import moment_or_none
from trellis.ledgers.sqlite.steps import STEP_QUERIES, StepBatch, find_job_row, job_id_of
from trellis.ledgers.sqlite.unique_jobs import requeue_refusal
from trellis.lifecycles import BY_CODE, Phase, Trigger, event_code
from trellis.lifecycles.lifecycle import IN_PLACE, ROLES

REQUEUED = event_code("job_requeued")
STOP = "stop"
"""The trigger with which a holder follows a soft cancel."""


_MOVE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/moves.sql")


def move(tx: Transaction, actor: Actor, move: Move) -> Moved | NotMoved:
    """Make one declared, unfenced step, and store the request's key with it."""
    if move.key is None:
        return _move(tx, actor, move)
    before = request_keys.take(tx, move.key)
    if before is not None and before.answer is not None:
        row = find_job_row(tx, move.job_id)
        return _not_moved(row, move.job_id, move.target, refusals.REQUEST_IS_ANSWERED)
    answer = _move(tx, actor, move)
    if move.key.answer is not None and isinstance(answer, Moved):
        request_keys.store_answer(tx, move.key, move.key.answer)
    return answer


def _move(tx: Transaction, actor: Actor, request: Move) -> Moved | NotMoved:
    row = find_job_row(tx, request.job_id)
    before = made_before(tx, row, request.job_id, request.request_id)
    if before is not None:
        return before
    if request.version is not None and request.version != row.version:
        return _not_moved(row, request.job_id, request.target, refusals.version_refusal(row.version, request.version))
    lifecycle = BY_CODE[row.lifecycle]
    name = STATE_NAMES[row.lifecycle, row.state]
    stays = [t for t in lifecycle.transitions if t.source == t.target == name and t.trigger not in IN_PLACE]
    if request.target == name and not stays:
        return Moved(job_id=request.job_id, source=name, target=name, version=row.version, repeated=True)
    transition = refusals.transition_or_refusal(lifecycle, name, request.target, actor.role)
    if isinstance(transition, str):
        return _not_moved(row, request.job_id, request.target, transition)
    step = STEPS[row.lifecycle, row.state, transition.trigger]
    full = _key_is_full(tx, row) if step.held else requeue_refusal(tx, row, step)
    if full is not None:
        return _not_moved(row, request.job_id, request.target, full)
    delay = None if request.delay_s is None else int(request.delay_s * US)
    length = lease_length_us(request.lease_s, request.heartbeat_s)
    return make_step(
        tx,
        actor,
        row,
        step,
        request.job_id,
        delay_us=delay,
        length=length,
        cause=request.cause,
        data=request.data,
        request_id=request.request_id,
        death=request.death,
    )


def make_step(
    tx: Transaction,
    actor: Actor,
    row: JobRow,
    step: StoredStep,
    job_id: JobId,
    *,
    delay_us: int | None = None,
    length: int | None = None,
    cause: str | None,
    data: bytes | None = None,
    request_id: RequestId | None = None,
    death: DeadLetterReason | None = None,
) -> Moved:
    """Write one decided step. A step out of a held place revokes the lease; a step into one grants a lease."""
    who = ActorRef(ROLE_CODES[actor.role], tx.names.actor_id(actor.name))
    place, wait = (HELD, length) if step.held else target_place(step, keyed=row.ckey is not None, delay_us=delay_us)
    if state_of(row.lifecycle, row.state).phase is Phase.ENDED and step.ended:
        place = row.place
    revokes = HELD in {row.place, place}
    batch = StepBatch()
    # A cancel does not copy an earlier cancel request into its event, nor does a move that is identical to a cancel.
    cancel = STEPS.get((row.lifecycle, row.state, Trigger.CANCEL))
    is_cancel = cancel is not None and (step.target, step.event) == (cancel.target, cancel.event)
    event_data = data if is_cancel else ended_otherwise(tx, row, step, data)
    batch.add(row, StepWrite(step, who, place, wait, revokes, cause, event_data, request_id), death)
    batch.write(tx)
    return Moved(
        job_id=job_id,
        source=STATE_NAMES[row.lifecycle, row.state],
        target=step.target_name,
        version=row.version + 1,
        lease=_lease(row, row.epoch + 1, job_id) if place == HELD else None,
    )


def cancel(
    tx: Transaction,
    actor: Actor,
    job_id: JobId,
    mode: CancelMode,
    request_id: RequestId,
    *,
    grace_s: float,
    cause: str | None,
    key: RequestKey | None = None,
) -> Moved | NotMoved | CancelRequested:
    """End a job by its lifecycle's `cancel`. A soft cancel of a held job only records the request for its holder."""

    def change() -> Moved | NotMoved | CancelRequested:
        row = find_job_row(tx, job_id)
        before = made_before(tx, row, job_id, request_id)
        if before is not None:
            return before
        name = STATE_NAMES[row.lifecycle, row.state]
        step = STEPS.get((row.lifecycle, row.state, Trigger.CANCEL))
        if step is None or not step.allows(ROLE_CODES[actor.role]):
            return not_pulled(row, job_id, Trigger.CANCEL, actor)
        if mode is CancelMode.SOFT and row.place == HELD:
            request_cancel(tx, actor, row, grace_s=grace_s, cause=cause)
            return CancelRequested(job_id=job_id, state=name, version=row.version)
        return make_step(tx, actor, row, step, job_id, cause=cause, request_id=request_id)

    return request_keys.answer_once(tx, key, CANCEL_ANSWERS, change)


def request_cancel(tx: Transaction, actor: Actor, row: JobRow, *, grace_s: float, cause: str | None) -> None:
    """Record a cancel request for the holder of a job, unless it has one."""
    if row.cancel_at is None:
        tx.db.execute(_MOVE_QUERIES.ask_to_cancel, (tx.now + int(grace_s * US), row.id))
        by = tx.names.actor_id(actor.name)
        request = (row.id, row.epoch, ROLE_CODES[actor.role], by, storable(cause), tx.now)
        tx.db.execute(_MOVE_QUERIES.remember_wish, request)


def cancel_request_data(tx: Transaction, row: JobRow) -> bytes | None:
    """The cancel event's data: who requested the cancel, and why. None without a request."""
    request = _cancel_request(tx, row)
    if request is None:
        return None
    about = {"asked_by": request.actor, "asked_as": request.role, "reason": request.cause}
    return json.dumps(about, ensure_ascii=False).encode()


def ended_otherwise(tx: Transaction, row: JobRow, step: StoredStep, data: bytes | None) -> bytes | None:
    """The step's data. If it ends a job with a pending cancel request, who requested it, when and why is added."""
    if row.cancel_at is None or row.place != HELD or not step.ended or step.trigger in {Trigger.CANCEL, STOP}:
        return data
    return with_cancel_request(data, _cancel_request(tx, row))


def _cancel_request(tx: Transaction, row: JobRow) -> CancelRequest | None:
    rows = tx.db.execute(_MOVE_QUERIES.wish, (row.id, row.epoch)).fetchall() if row.cancel_at is not None else []
    if not rows:
        return None
    name, role, cause, at = rows[0]
    return CancelRequest(actor=name, role=ROLES[int(role)].value, at=moment_or_none(at), cause=cause)


def requeue(
    tx: Transaction,
    actor: Actor,
    jobs: Sequence[JobId] | JobFilter,
    request_id: RequestId,
    *,
    limit: int,
    cause: str | None,
    key: RequestKey | None = None,
) -> list[Moved | NotMoved]:
    """Start the next generation of jobs that declare a requeue.

    The oldest come first, so that they get free slots of their keys first.
    """

    def change() -> list[Moved | NotMoved]:
        ids = _jobs_of_filter(tx, jobs, request_id, limit) if isinstance(jobs, JobFilter) else jobs
        oldest_first = sorted(dict.fromkeys(ids), key=lambda job_id: find_job_row(tx, job_id).id)
        answers = {job_id: _requeue_one(tx, actor, job_id, request_id, cause) for job_id in oldest_first}
        return [answers[job_id] for job_id in ids]

    return request_keys.answer_once(tx, key, REQUEUE_ANSWERS, change)


def _requeue_one(
    tx: Transaction, actor: Actor, job_id: JobId, request_id: RequestId, cause: str | None
) -> Moved | NotMoved:
    row = find_job_row(tx, job_id)
    before = made_before(tx, row, job_id, request_id)
    if before is not None:
        return before
    step = STEPS.get((row.lifecycle, row.state, Trigger.REQUEUE))
    if step is None or not step.allows(ROLE_CODES[actor.role]):
        return not_pulled(row, job_id, Trigger.REQUEUE, actor)
    taken = requeue_refusal(tx, row, step)
    if taken is not None:
        return _not_moved(row, job_id, step.target_name, taken)
    return make_step(tx, actor, row, step, job_id, cause=cause, request_id=request_id)


def _jobs_of_filter(tx: Transaction, where: JobFilter, request_id: RequestId, limit: int) -> list[JobId]:
    """The jobs a filter selects. A repeated request id selects the same jobs as the first time."""
    rows = tx.db.execute(_MOVE_QUERIES.jobs_of_request, (request_id, REQUEUED)).fetchall()
    if not rows:
        states = [step.lifecycle * 16 + step.source for step in STEPS.values() if step.trigger == Trigger.REQUEUE]
        values = {
            "states": json.dumps(_states_named(states, where.state)),
            "lifecycle": lifecycle_code(where.lifecycle),
            "type": where.type,
            "correlation": where.correlation_id,
            "key": where.concurrency_key,
            "reason": None if where.reason_code is None else where.reason_code.value,
            "parent": where.parent_id,
            "place": place_code(where.place),
            "limit": limit,
        }
        rows = tx.db.execute(_MOVE_QUERIES.requeueable, values).fetchall()
    return [job_id_of(tx, key) for (key,) in rows]


def _states_named(states: list[int], name: str | None) -> list[int]:
    return [code for code in states if name is None or STATE_NAMES[code // 16, code % 16] == name]


def made_before(tx: Transaction, row: JobRow, job_id: JobId, request_id: RequestId) -> Moved | None:
    """The answer that a request with this id got for this job before; None the first time."""
    rows = tx.db.execute(_MOVE_QUERIES.made_before, (row.id, request_id)).fetchall()
    if not rows:
        return None
    version, source, target, epoch = rows[0]
    held = state_of(row.lifecycle, target).phase is Phase.HELD
    return Moved(
        job_id=job_id,
        source=STATE_NAMES[row.lifecycle, source],
        target=STATE_NAMES[row.lifecycle, target],
        version=version,
        lease=_lease(row, epoch, job_id) if held else None,
        repeated=True,
    )


def _key_is_full(tx: Transaction, row: JobRow) -> str | None:
    if not has_token(tx, row):
        return refusals.KEY_RATE_IS_USED
    if row.ckey is None or row.slot is not None:
        return None
    room: int = tx.db.execute(STEP_QUERIES.key_room, (row.ckey,)).fetchall()[0][0]
    return None if room > 0 else refusals.KEY_IS_FULL


def _lease(row: JobRow, epoch: int, job_id: JobId) -> Lease:
    return Lease(JobKey(row.id), Epoch(epoch), job_id, BY_CODE[row.lifecycle].name)


def not_pulled(row: JobRow, job_id: JobId, trigger: str, actor: Actor) -> NotMoved:
    """The answer for a job whose state does not let this actor fire the trigger."""
    lifecycle, state = BY_CODE[row.lifecycle], STATE_NAMES[row.lifecycle, row.state]
    reason = refusals.trigger_refusal(lifecycle, state, trigger, actor.role)
    return _not_moved(row, job_id, refusals.trigger_target(lifecycle, state, trigger), reason)


def _not_moved(row: JobRow, job_id: JobId, target: str, reason: str) -> NotMoved:
    return NotMoved(job_id=job_id, state=STATE_NAMES[row.lifecycle, row.state], target=target, reason=reason)

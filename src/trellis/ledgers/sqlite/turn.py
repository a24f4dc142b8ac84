"""A lease holder's turn on SQLite: steps, heartbeats, checkpoints, journal entries and signals.

Every call is fenced by the lease's epoch: a late result, of a holder that lost its lease, is answered `LeaseLost` and
changes nothing.
"""

from collections.abc import Sequence

from trellis.engine.decide import Occasion
from trellis.engine.errors import ChildExists
from trellis.engine.jobs import (
    REMARKS_MAX,
    Actor,
    Advance,
    JobId,
    JobKey,
    Lease,
    LeaseLost,
    Mismatch,
    NewJob,
    Renewed,
    StepApplied,
    Turn,
    TurnResult,
)
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import (
    check_annotation,
    check_children_of,
    check_signals,
    check_steps,
    refused_step,
)
from trellis.ledgers.sqlite.claims import claim
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.moves import STOP, cancel_request_data, ended_otherwise
from trellis.ledgers.sqlite.plan import (
    FINAL_STATES,
    HELD,
    HOLDERS_STEPS,
    NAMED_STEPS,
    ROLE_CODES,
    STATE_NAMES,
    STEPS,
    US,
    ActorRef,
    JobRow,
    StepWrite,
    StoredStep,
    decision_for,
    sweeping_role,
    target_place,
)
from trellis.ledgers.sqlite.steps import STEP_QUERIES, WAIT_QUERIES, StepBatch, array, children_array, job_rows
from trellis.ledgers.sqlite.submit import submit
from trellis.lifecycles import Progress, Trigger

# A holder's writes besides steps: heartbeats, checkpoints, journal entries, signals, all fenced. And remarks by others.


_HOLDER_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/holder.sql")


def renew(
    tx: Transaction,
    actor: Actor,  # noqa: ARG001 - the epoch decides, not the name
    leases: Sequence[Lease],
) -> list[Renewed | LeaseLost]:
    """Lease renewal: each lease lasts its own length from now. An expired one that was not revoked is renewed, too."""
    answers: list[Renewed | LeaseLost] = []
    for lease in leases:
        values = {"now": tx.now, "job": lease.key, "epoch": lease.epoch}
        rows = tx.db.execute(_HOLDER_QUERIES.renew, values).fetchall()
        answers.append(Renewed(cancel=bool(rows[0][0])) if rows else LeaseLost(lease))
    kept = {lease.key for lease, answer in zip(leases, answers, strict=True) if isinstance(answer, Renewed)}
    tx.db.executemany(_HOLDER_QUERIES.note_renewal, [{"job": key, "now": tx.now} for key in kept])
    return answers


def save_checkpoint(tx: Transaction, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.execute(_HOLDER_QUERIES.put_checkpoint, (lease.key, lease.epoch, tx.now, body))
    return StepApplied(version)


def journal(tx: Transaction, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
    """The first body under a name stays and is returned."""
    if _version_held(tx, lease) is None:
        return LeaseLost(lease)
    rows = tx.db.execute(_HOLDER_QUERIES.journal_entry, (lease.key, entry)).fetchall()
    if rows:
        return rows[0][0]
    tx.db.execute(_HOLDER_QUERIES.put_journal, (lease.key, entry, lease.epoch, tx.now, body))
    return body


def spawn(
    tx: Transaction,
    actor: Actor,
    lease: Lease,
    jobs: Sequence[NewJob],
    entry: str,
    body: bytes,
    *,
    abandoned: frozenset[JobId],
) -> bytes | LeaseLost:
    """Submit children and journal them. An entry that exists is that of an earlier call."""
    check_children_of(lease, jobs)
    if _version_held(tx, lease) is None:
        return LeaseLost(lease)
    rows = tx.db.execute(_HOLDER_QUERIES.journal_entry, (lease.key, entry)).fetchall()
    if rows:
        return rows[0][0]
    for answer in submit(tx, actor, jobs):
        if isinstance(answer, Mismatch) or not answer.created:
            raise ChildExists(job_id=answer.job_id, parent_id=lease.job_id)
    tx.db.execute(_HOLDER_QUERIES.put_journal, (lease.key, entry, lease.epoch, tx.now, body))
    ids = {job.job_id for job in jobs}
    children = children_array(ids, ids - abandoned)
    tx.db.execute(WAIT_QUERIES.link_children, {"parent": lease.key, "children": children})
    return body


def signal(tx: Transaction, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
    check_signals(signals)
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.executemany(_HOLDER_QUERIES.put_signal, [(lease.key, type_, tx.now, data) for type_, data in signals])
    return StepApplied(version)


def annotate(tx: Transaction, actor: Actor, job_id: JobId, type_: str, body: bytes) -> bool:  # noqa: ARG001 - not recorded
    check_annotation(type_, body)
    values = {"type": type_, "now": tx.now, "data": body, "job_id": job_id, "most": REMARKS_MAX}
    return bool(tx.db.execute(_HOLDER_QUERIES.put_remark, values).fetchall())


def _version_held(tx: Transaction, lease: Lease) -> int | None:
    rows = tx.db.execute(_HOLDER_QUERIES.version_held, (lease.key, lease.epoch)).fetchall()
    return rows[0][0] if rows else None


# A holder's turn: settle and start its jobs. Claims are in `claims`.

_NO_DELAY_OR_DATA = (0.0, False, None, None)
"""The fields `delay_s` to `data` of an advance that has none of them."""
_NOTHING_ELSE = (None, None, None, False, None)
"""The fields from `death` on, likewise. Between the two are the result and how long it is kept."""


def turn(tx: Transaction, request: Turn, *, least_urgent_first: bool) -> TurnResult:
    """Settle, start, then claim, in one transaction."""
    who = ActorRef(ROLE_CODES[request.actor.role], tx.names.actor_id(request.actor.name))
    outcomes = settle(tx, request.actor, who, request.advances) if request.advances else []
    if request.claim is None:
        return TurnResult(outcomes, [])
    claimed = claim(tx, request.actor, who, request.claim, least_urgent_first=least_urgent_first)
    return TurnResult(outcomes, claimed)


def settle(tx: Transaction, actor: Actor, who: ActorRef, advances: Sequence[Advance]) -> list[StepApplied | LeaseLost]:
    """One outcome per advance, in order. Steps of one job in one turn see each other."""
    check_steps(actor.role, advances)
    batch = StepBatch()
    applied = _settle_plain(tx, batch, who, advances)
    if len(applied) < len(advances):
        return _settle_each(tx, batch, actor, who, advances, applied)
    batch.write(tx)
    return [applied[advance.lease.key] for advance in advances]


def _settle_plain(
    tx: Transaction, batch: StepBatch, who: ActorRef, advances: Sequence[Advance]
) -> dict[JobKey, StepApplied | LeaseLost]:
    """Add the steps to the batch that nothing but the lease decides about. Returns their outcomes by job.

    These are the only step of their job in this turn, start or end it, and write nothing but a result. Jobs with a
    cancel request, compensations and leases that expired are left to `_settle_each`.
    """
    by_step: dict[tuple[str, str, str], dict[JobKey, Advance]] = {}
    seen: set[JobKey] = set()
    for advance in advances:
        key = advance.lease.key
        if key in seen:
            return {}
        seen.add(key)
        if advance[3:7] == _NO_DELAY_OR_DATA and advance[9:] == _NOTHING_ELSE:
            name = (advance.lease.lifecycle, advance.source, advance.trigger)
            of_step = by_step.get(name)
            if of_step is None:
                of_step = by_step[name] = {}
            of_step[key] = advance
    applied: dict[JobKey, StepApplied | LeaseLost] = {}
    for name, of_step in by_step.items():
        step = NAMED_STEPS[name]
        if _is_plain(step):
            _add_plain(tx, batch, who, step, of_step, applied)
    return applied


def _is_plain(step: StoredStep) -> bool:
    goes_on = step.dead_letter or step.ends_wait or step.opens == Progress.GENERATION
    return (step.held or step.ended) and not goes_on


def _add_plain(
    tx: Transaction,
    batch: StepBatch,
    who: ActorRef,
    step: StoredStep,
    advances: dict[JobKey, Advance],
    applied: dict[JobKey, StepApplied | LeaseLost],
) -> None:
    """Add one step of many jobs to the batch: of those that are held with the epoch of their lease."""
    writes: dict[int, StepWrite] = {}
    of_lease = (array(advances), step.lifecycle, step.source, tx.now)
    rows = {row[0]: row for row in tx.db.execute(STEP_QUERIES.held_plainly, of_lease)}
    for key, advance in advances.items():
        row = rows.get(key)
        if row is None or row[1] != advance.lease.epoch:
            continue
        _, _, version, length, ckey = row
        write = writes.get(length)
        if write is None:
            place, wait = (HELD, length) if step.held else (step.end_place, None)
            write = writes[length] = StepWrite(step, who, place, wait)
        batch.add_plain(key, write, ckey)
        if advance.result is not None and step.success:
            batch.results.append((key, advance.result, _kept_until(tx, advance)))
        applied[key] = StepApplied(version + 1)


def _settle_each(
    tx: Transaction,
    batch: StepBatch,
    actor: Actor,
    who: ActorRef,
    advances: Sequence[Advance],
    applied: dict[JobKey, StepApplied | LeaseLost],
) -> list[StepApplied | LeaseLost]:
    """Decide about each step that is not in the batch yet, and write the batch."""
    outcomes: list[StepApplied | LeaseLost] = []
    moved = set[JobKey]()
    rows = job_rows(tx, (advance.lease.key for advance in advances if advance.lease.key not in applied))
    for number, advance in enumerate(advances):
        key = advance.lease.key
        if key in applied:
            outcomes.append(applied[key])
            continue
        step = NAMED_STEPS[advance.lease.lifecycle, advance.source, advance.trigger]
        if key in moved:
            batch.write(tx)
            rows |= job_rows(tx, moved)
            batch, moved = StepBatch(), set[JobKey]()
        row = rows.get(key)
        if row is None or not _is_step_of_lease(row, advance, step, tx.now):
            outcomes.append(_repeated_or_lost(tx, row, who, advance, step, _later(advances, number)))
            continue
        moved.add(key)
        if advance.finalizes is not None:
            batch.finalized.append((key, _staged(tx, actor, advance, step)))
        asked_to_stop = row.cancel_at is not None and _runs_no_user_code(step, _later(advances, number))
        cancelled = asked_to_stop and _cancel_instead(tx, batch, row, who)
        if not cancelled:
            _decide(tx, batch, row, step, who, advance)
        refused = cancelled and step.trigger == Trigger.START
        outcomes.append(LeaseLost(advance.lease) if refused else StepApplied(row.version + 1))
    batch.write(tx)
    return outcomes


def _staged(tx: Transaction, actor: Actor, advance: Advance, step: StoredStep) -> JobKey:
    """The artifact that this step names.

    It must be staged and belong to the job; otherwise nothing of the turn is written.
    """
    artifacts = tx.db.execute(STEP_QUERIES.artifact_of, (advance.finalizes, advance.lease.key)).fetchall()
    if not artifacts:
        raise refused_step(advance, actor.role, step.target_name, f"{advance.finalizes} is no artifact of this job")
    artifact, lifecycle, state = artifacts[0]
    if (lifecycle, state, Trigger.FINALIZE) not in STEPS:
        stands = f"artifact {advance.finalizes} is {STATE_NAMES[lifecycle, state]}"
        raise refused_step(advance, actor.role, step.target_name, stands)
    final = tx.db.execute(STEP_QUERIES.final_artifact_of, (advance.lease.key,)).fetchall()
    if final:
        raise refused_step(advance, actor.role, step.target_name, f"artifact {final[0][0]} of this job is final")
    return artifact


def _is_step_of_lease(row: JobRow, advance: Advance, step: StoredStep, now: int) -> bool:
    return (
        row.epoch == advance.lease.epoch
        and row.place == HELD
        and row.state == step.source
        and advance.version in {None, row.version}
        and not (advance.unless_cancelled and step.ended and row.cancel_at is not None)
        and not (step.asks_to_start and row.cancel_at is None and row.until is not None and row.until <= now)
    )


def _later(advances: Sequence[Advance], number: int) -> int:
    """How many steps of the same lease follow this one in the turn."""
    return sum(other.lease == advances[number].lease for other in advances[number + 1 :])


def _runs_no_user_code(step: StoredStep, later: int) -> bool:
    """Whether no user code runs at this step: it has not begun, or the holder releases the job.

    If later steps of the same lease follow a start in the turn, the work has already run.
    """
    return (step.trigger == Trigger.START and not later) or not (step.held or step.ended)


def _cancel_instead(tx: Transaction, batch: StepBatch, row: JobRow, who: ActorRef) -> bool:
    """Cancel a job with a cancel request instead of starting or releasing it, while no user code runs.

    False where the lifecycle has no cancel here.
    """
    decision = decision_for(row, Occasion.CANCEL_LET_GO)
    what, step = decision or (None, None)
    if what is None or step is None:
        return False
    sweeper = ActorRef(sweeping_role(row.lifecycle), who.actor)
    place, wait = target_place(step, keyed=row.ckey is not None, delay_us=None)
    batch.add(
        row, StepWrite(step, sweeper, place, wait, revokes=True, cause=what.cause, data=cancel_request_data(tx, row))
    )
    return True


def _decide(tx: Transaction, batch: StepBatch, row: JobRow, step: StoredStep, who: ActorRef, advance: Advance) -> None:
    if step.held:
        place, wait = HELD, row.length
    else:
        place, wait = target_place(step, keyed=row.ckey is not None, delay_us=_delay_us(advance))
    data = advance.data if row.cancel_at is None else ended_otherwise(tx, row, step, advance.data)
    if data is None and step.trigger == STOP:
        data = cancel_request_data(tx, row)
    act = StepWrite(step, who, place, wait, cause=advance.cause, data=data)
    batch.add(row, act, advance.death)
    if advance.wait is not None:
        batch.waits.append((row.id, advance.wait))
    if advance.spare_attempt and not step.held and not step.ended:
        batch.spared.append(row.id)
    if advance.result is not None and step.success:
        batch.results.append((row.id, advance.result, _kept_until(tx, advance)))


def _kept_until(tx: Transaction, advance: Advance) -> int | None:
    return None if advance.result_ttl_s is None else tx.now + int(advance.result_ttl_s * US)


def _delay_us(advance: Advance) -> int | None:
    delay_s = advance.delay_s if advance.wait is None else advance.wait.timeout_s
    return None if delay_s is None else int(delay_s * US)


def _repeated_or_lost(
    tx: Transaction, row: JobRow | None, who: ActorRef, advance: Advance, step: StoredStep, later: int
) -> StepApplied | LeaseLost:
    """`StepApplied` if this step was already made in this epoch and its answer was lost; else `LeaseLost`.

    The step must be the last that a holder made in this epoch. If `later` steps of the same lease follow in the turn,
    it may be that many steps earlier. A step into a held state counts as made only while the lease lives, because its
    caller would continue.
    """
    lease, step_codes = advance.lease, (step.source, step.target, step.event)
    if step.held and (row is None or row.epoch != lease.epoch or (later == 0 and row.place != HELD)):
        return LeaseLost(lease)
    if advance.version is None:
        holders = HOLDERS_STEPS[step.lifecycle]
        rows = tx.db.execute(STEP_QUERIES.last_steps_of_epoch, (lease.key, lease.epoch, holders, later)).fetchall()
    else:
        rows = tx.db.execute(STEP_QUERIES.step_at, (lease.key, advance.version + 1, lease.epoch)).fetchall()
    versions = [version for version, *rest in rows if tuple(rest) == step_codes]
    if versions and (advance.finalizes is None or _is_final(tx, advance)):
        return StepApplied(versions[0], repeated=True)
    return _cancelled_instead(tx, who, advance, step) or LeaseLost(lease)


def _cancelled_instead(tx: Transaction, who: ActorRef, advance: Advance, step: StoredStep) -> StepApplied | None:
    """The cancel that was made instead of this step when it released a job with a cancel request.

    It is the first event of the next epoch and has no request id.
    """
    cancel = STEPS.get((step.lifecycle, step.source, Trigger.CANCEL))
    if cancel is None or step.held or step.ended:
        return None
    cancel_codes = (cancel.source, cancel.target, cancel.event)
    lease = advance.lease
    for version, *rest in tx.db.execute(STEP_QUERIES.unasked_step_of_epoch, (lease.key, lease.epoch + 1, who.actor)):
        if tuple(rest) == cancel_codes and advance.version in {None, version - 1}:
            return StepApplied(version, repeated=True)
    return None


def _is_final(tx: Transaction, advance: Advance) -> bool:
    """Whether this artifact was finalized by the job's completion. A job has one final artifact."""
    artifacts = tx.db.execute(STEP_QUERIES.artifact_of, (advance.finalizes, advance.lease.key)).fetchall()
    return bool(artifacts) and artifacts[0][1:] in FINAL_STATES

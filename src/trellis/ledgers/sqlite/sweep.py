"""The sweep: lease extension after an outage, then soft cancels, expired leases, timers, deadlines and parked keys.

`engine/decide.py` decides what happens to each job. The acting role is the one the lifecycle names for its sweep.
"""

import json

from trellis.engine.decide import Decision, Fact, Occasion
from trellis.engine.jobs import Actor, DeadLetterReason, JobKey
from trellis.engine.key_rates import KEY_TOKEN_WAIT_S_MIN
from trellis.engine.records import SWEEP_QUIET_S, SweepOptions, SweepReport
from trellis.engine.retry_policy import sparable
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.moves import cancel_request_data, ended_otherwise
from trellis.ledgers.sqlite.plan import (
    HELD,
    PARKED,
    READY,
    STEPS,
    US,
    ActorRef,
    JobRow,
    StepWrite,
    StoredStep,
    decision_for,
    state_of,
    sweeping_role,
    target_place,
)
from trellis.ledgers.sqlite.steps import StepBatch, job_rows, promote, promote_due, rows_changed
from trellis.ledgers.sqlite.waits import cancel_orphans
from trellis.lifecycles import BY_CODE, Trigger

DEADLINE_STATES = json.dumps(
    [step.lifecycle * 16 + step.source for step in STEPS.values() if step.trigger == Trigger.DEADLINE]
)


_SWEEP_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/sweep.sql")


def sweep(tx: Transaction, actor: Actor, options: SweepOptions) -> SweepReport:
    """One pass. Does nothing when another sweep ran less than an interval ago, or when nothing is due."""
    interval = int(options.interval_s * US)
    rows = tx.db.execute(_SWEEP_QUERIES.last_tick).fetchall()
    gap = tx.now - rows[0][0] if rows else None
    if options.elect and gap is not None and 0 <= gap < interval:
        return SweepReport(elected=False, next_due_s=(interval - gap) / US)
    if options.elect and gap is not None and 0 <= gap < int(SWEEP_QUIET_S * US) and _is_quiet(tx, interval):
        return SweepReport(elected=False)
    forgiven = _amnesty(tx, gap, interval)
    cancelled = _harden_cancels(tx, actor, options)
    expired, exhausted, also_cancelled = _end_leases(tx, actor, options)
    due, run_out = _pull_timers(tx, actor, options)
    deadlines = _pass_deadlines(tx, actor, options)
    cancelled += cancel_orphans(tx, actor, options.batch)
    promoted = promote_due(tx, options.batch) + _heal_keys(tx, options.batch)
    tx.db.execute(_SWEEP_QUERIES.write_tick, (tx.now,))
    return SweepReport(
        elected=True,
        amnesty=forgiven,
        expired=expired,
        exhausted=exhausted + run_out,
        due=due,
        deadlines=deadlines,
        cancelled=cancelled + also_cancelled,
        promoted=promoted,
        next_due_s=_next_due_s(tx, options),
    )


def _is_quiet(tx: Transaction, interval: int) -> bool:
    """Whether nothing falls due before the next sweep."""
    return bool(tx.db.execute(_SWEEP_QUERIES.is_quiet, {"soon": tx.now + interval}).fetchall()[0][0])


def _amnesty(tx: Transaction, gap: int | None, interval: int) -> int:
    """Extend leases after an outage of more than half a lease (D31). Live holders can then renew before leases expire.

    A sweep delayed by a busy machine is not an outage.
    """
    late = int(2.5 * interval)
    if gap is None or gap <= late:
        return 0
    tx.db.execute(_SWEEP_QUERIES.amnesty, {"now": tx.now, "last": tx.now - gap, "late": late})
    return rows_changed(tx)


def _harden_cancels(tx: Transaction, actor: Actor, options: SweepOptions) -> int:
    keys = tx.db.execute(_SWEEP_QUERIES.overdue_cancels, (tx.now, options.batch)).fetchall()
    return _apply_verdicts(tx, actor, options, [key for (key,) in keys], Occasion.CANCEL_GRACE_OVER)


def _end_leases(tx: Transaction, actor: Actor, options: SweepOptions) -> tuple[int, int, int]:
    """End expired leases. Returns how many expired, ran out of attempts, or ended in a requested cancel."""
    max_deaths: dict[int, int] = dict(tx.db.execute(_SWEEP_QUERIES.expired, (tx.now, options.batch)).fetchall())
    counts = {Trigger.EXPIRE: 0, Trigger.EXHAUST: 0, Trigger.CANCEL: 0}
    batch = StepBatch()
    in_place: list[JobKey] = []
    for row in job_rows(tx, max_deaths).values():
        what, step = _on_lease_lost(row, max_deaths[row.id])
        if what.counts_death:
            tx.db.execute(_SWEEP_QUERIES.count_death, (row.id,))
        if step is None:
            _lose_in_place(tx, batch, row)
            in_place.append(row.id)
        else:
            _add_to_batch(batch, tx, actor, options, row, what, step)
        if what.spares_attempt:
            batch.spared.append(row.id)
        counts[Trigger.EXPIRE if step is None else step.trigger] += 1
    batch.write(tx)
    for key in in_place:  # after the slots were handed out: a job that lost its lease has no claim to be first
        tx.db.execute(_SWEEP_QUERIES.goes_behind, (_take_position(tx), key))
    return counts[Trigger.EXPIRE], counts[Trigger.EXHAUST], counts[Trigger.CANCEL]


def _on_lease_lost(row: JobRow, max_deaths: int) -> tuple[Decision, StoredStep | None]:
    facts = Fact(0)
    if row.cancel_at is not None:
        facts |= Fact.CANCEL_REQUESTED
    if row.attempts_left:
        facts |= Fact.ATTEMPTS_LEFT
    if not row.deaths:
        facts |= Fact.FIRST_DEATH
    if 0 < max_deaths <= row.deaths + 1:
        facts |= Fact.LAST_DEATH
    if sparable(row.attempt):
        facts |= Fact.SPARABLE
    decision = decision_for(row, Occasion.LEASE_LOST, facts)
    assert decision is not None, "a held state always says what a lost lease means"
    return decision


def _lose_in_place(tx: Transaction, batch: StepBatch, row: JobRow) -> None:
    """Let the job keep its state and be claimable there. Its slot goes to the next job of its key."""
    tx.db.execute(_SWEEP_QUERIES.lose_in_place, (READY if row.ckey is None else PARKED, row.id))
    if row.ckey is None:
        tx.woke = True
    else:
        batch.keys.add(row.ckey)


def _pull_timers(tx: Transaction, actor: Actor, options: SweepOptions) -> tuple[int, int]:
    """Handle due timers. Returns how many waits ended, and how many jobs exhausted their attempts.

    Jobs whose timer makes a step come first, then those whose delay is over; each oldest first, as on PostgreSQL.
    """
    keys = tx.db.execute(_SWEEP_QUERIES.due, (tx.now, options.batch)).fetchall()
    due = exhausted = 0
    batch = StepBatch()
    rested: list[JobRow] = []
    for row in job_rows(tx, (key for (key,) in keys)).values():
        decision = decision_for(row, Occasion.TIMER_DUE, _facts_when_due(row, tx.now))
        what, step = decision or (None, None)
        if what is None or step is None:
            rested.append(row)
            continue
        _add_to_batch(batch, tx, actor, options, row, what, step)
        run_out = step.trigger == Trigger.EXHAUST
        exhausted += run_out
        due += not run_out
    batch.write(tx)
    _end_rests(tx, rested)
    return due + len(rested), exhausted


def _take_position(tx: Transaction) -> int:
    """A position behind all ready jobs, for a job that becomes claimable without an event."""
    return int(tx.db.execute(_SWEEP_QUERIES.take_position).fetchall()[0][0])


def _facts_when_due(row: JobRow, now: int) -> Fact:
    late = row.deadline_at is not None and row.deadline_at <= now
    return (Fact.DEADLINE_PASSED if late else Fact(0)) | (Fact.ATTEMPTS_LEFT if row.attempts_left else Fact(0))


def _end_rests(tx: Transaction, rows: list[JobRow]) -> None:
    """End waits without a step: the jobs become claimable, or keep waiting where a timer has no meaning."""
    if not rows:
        return
    position, keys = _take_position(tx), set[int]()
    for row in rows:
        if not state_of(row.lifecycle, row.state).claimable:
            tx.db.execute(_SWEEP_QUERIES.rests_on, (row.id,))
        elif row.ckey is None:
            tx.db.execute(_SWEEP_QUERIES.becomes_claimable, (READY, position, row.id))
            tx.woke = True
        else:
            tx.db.execute(_SWEEP_QUERIES.becomes_claimable, (PARKED, position, row.id))
            keys.add(row.ckey)
    promote(tx, keys)


def _pass_deadlines(tx: Transaction, actor: Actor, options: SweepOptions) -> int:
    values = {"now": tx.now, "states": DEADLINE_STATES, "limit": options.batch}
    keys = tx.db.execute(_SWEEP_QUERIES.past_deadline, values).fetchall()
    return _apply_verdicts(tx, actor, options, [key for (key,) in keys], Occasion.DEADLINE)


def _heal_keys(tx: Transaction, limit: int) -> int:
    """Hand out idle slots of some keys each time, in rotation.

    Every exit already hands on its slot; this is a safety net.
    """
    rows = tx.db.execute(_SWEEP_QUERIES.healed_up_to).fetchall()
    values = {"after": rows[0][0] if rows else 0, "now": tx.now, "limit": limit}
    keys = tx.db.execute(_SWEEP_QUERIES.keys_with_parked, values).fetchall()
    reached = keys[-1][0] if len(keys) == limit else 0
    if reached != (rows[0][0] if rows else 0):
        tx.db.execute(_SWEEP_QUERIES.write_healed, (reached,))
    return promote(tx, [key for key, waits in keys if not waits])


def _apply_verdicts(tx: Transaction, actor: Actor, options: SweepOptions, keys: list[int], occasion: Occasion) -> int:
    """Make the decided step of each job, where the lifecycle has one for this occasion."""
    batch, count = StepBatch(), 0
    for row in job_rows(tx, keys).values():
        decision = decision_for(row, occasion)
        if decision is not None and decision[1] is not None:
            _add_to_batch(batch, tx, actor, options, row, decision[0], decision[1])
            count += 1
    batch.write(tx)
    return count


def _add_to_batch(
    batch: StepBatch,
    tx: Transaction,
    actor: Actor,
    options: SweepOptions,
    row: JobRow,
    what: Decision,
    step: StoredStep,
) -> None:
    who = ActorRef(sweeping_role(row.lifecycle), tx.names.actor_id(actor.name))
    place, wait = target_place(step, keyed=row.ckey is not None, delay_us=_rest_us(step, options))
    data = cancel_request_data(tx, row) if step.trigger == Trigger.CANCEL else ended_otherwise(tx, row, step, None)
    cause = what.cause_after(row.deaths + 1)
    death = None
    if what.reason_code is not None and what.stage is not None and cause is not None:
        death = DeadLetterReason(reason_code=what.reason_code, stage=what.stage, last_error=cause)
    act = StepWrite(step, who, place, wait, revokes=row.place == HELD, cause=cause, data=data)
    batch.add(row, act, death)


def _rest_us(step: StoredStep, options: SweepOptions) -> int | None:
    """Microseconds that the job waits in the target.

    A lost lease and a passed deadline do not wait (D8). Otherwise the target's own timer or the configured window
    applies.
    """
    if step.trigger in {Trigger.EXPIRE, Trigger.DEADLINE}:
        return 0
    if step.trigger == Trigger.CANCEL:
        return None
    window_s = options.windows_s.get((BY_CODE[step.lifecycle].name, step.target_name))
    return step.timer_us if window_s is None else int(window_s * US)


def _next_due_s(tx: Transaction, options: SweepOptions) -> float:
    token_at = tx.now + int(KEY_TOKEN_WAIT_S_MIN * US)
    at = tx.db.execute(_SWEEP_QUERIES.next_due, (tx.now, token_at)).fetchall()[0][0]
    return options.interval_s if at is None else min(max(at - tx.now, 0) / US, options.interval_s)

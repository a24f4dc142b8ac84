"""The sweep: amnesty after an outage, then soft cancels, expired leases, timers, deadlines and parked keys.

Each decision is a pure function of the job's standing and its lifecycle; the role that acts is the lifecycle's own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import LiteralString

from trellis.engine.deaths import spares_attempt, stage_in
from trellis.engine.jobs import Actor, DeathCertificate, ReasonCode, Stage
from trellis.engine.records import SWEEP_QUIET_S, SweepOptions, SweepReport
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.moves import asked, ended_otherwise
from trellis.ledgers.sqlite.plan import (
    HELD,
    PARKED,
    READY,
    STEPS,
    US,
    Act,
    Standing,
    Step,
    Who,
    landing,
    state_of,
    sweeping_role,
    swept,
    wished_cancel,
)
from trellis.ledgers.sqlite.steps import Batch, changed, promote, standings
from trellis.lifecycles import BY_CODE, LeaseLoss, Trigger
from trellis.lifecycles.causes import Cause, died_often

DEADLINE_STATES = json.dumps(
    [step.lifecycle * 16 + step.source for step in STEPS.values() if step.trigger == Trigger.DEADLINE]
)


class _Sql(NamedQueries, file="trellis.ledgers.sqlite:queries/sweep.sql"):
    last_tick: LiteralString
    write_tick: LiteralString
    is_quiet: LiteralString
    amnesty: LiteralString
    overdue_cancels: LiteralString
    expired: LiteralString
    due: LiteralString
    past_deadline: LiteralString
    count_death: LiteralString
    lose_in_place: LiteralString
    becomes_claimable: LiteralString
    rests_on: LiteralString
    keys_with_parked: LiteralString
    healed_up_to: LiteralString
    write_healed: LiteralString
    next_due: LiteralString


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What happens to a job whose time has come: a step, or None to stay in its state."""

    step: Step | None
    death: DeathCertificate | None = None
    cause: str | None = None
    died: bool = False
    spared: bool = False


def sweep(tx: Transaction, actor: Actor, options: SweepOptions) -> SweepReport:
    """One pass; does nothing when another sweep passed less than an interval ago, or when there is nothing to do."""
    interval = int(options.interval_s * US)
    rows = tx.db.execute(_Sql.last_tick).fetchall()
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
    promoted = _heal_keys(tx, options.batch)
    tx.db.execute(_Sql.write_tick, (tx.now,))
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
    """Whether there is nothing that time can do before the next sweep."""
    return bool(tx.db.execute(_Sql.is_quiet, {"soon": tx.now + interval}).fetchall()[0][0])


def _amnesty(tx: Transaction, gap: int | None, interval: int) -> int:
    """After an outage of more than half a lease the living must be able to renew before anything is reaped (D31).

    A tick that a busy machine made late is no outage.
    """
    late = int(2.5 * interval)
    if gap is None or gap <= late:
        return 0
    tx.db.execute(_Sql.amnesty, {"now": tx.now, "last": tx.now - gap, "late": late})
    return changed(tx)


def _harden_cancels(tx: Transaction, actor: Actor, options: SweepOptions) -> int:
    keys = tx.db.execute(_Sql.overdue_cancels, (tx.now, options.batch)).fetchall()
    return _carry_out(tx, actor, options, [key for (key,) in keys], _on_cancel_overdue)


def _on_cancel_overdue(row: Standing) -> _Verdict:
    return _Verdict(STEPS.get((row.lifecycle, row.state, Trigger.CANCEL)), cause=Cause.CANCEL_GRACE_OVER)


def _end_leases(tx: Transaction, actor: Actor, options: SweepOptions) -> tuple[int, int, int]:
    """How many leases expired, ran out of attempts, or ended in a cancel that had been asked for."""
    max_deaths: dict[int, int] = dict(tx.db.execute(_Sql.expired, (tx.now, options.batch)).fetchall())
    made = {Trigger.EXPIRE: 0, Trigger.EXHAUST: 0, Trigger.CANCEL: 0}
    batch = Batch()
    for row in standings(tx, max_deaths).values():
        verdict = on_lease_lost(row, max_deaths[row.id])
        if verdict.died:
            tx.db.execute(_Sql.count_death, (row.id,))
        if verdict.step is None:
            _lose_in_place(tx, batch, row)
        else:
            _take_in(batch, tx, actor, options, row, verdict)
        if verdict.spared:
            batch.spared.append(row.id)
        made[Trigger.EXPIRE if verdict.step is None else verdict.step.trigger] += 1
    batch.write(tx)
    return made[Trigger.EXPIRE], made[Trigger.EXHAUST], made[Trigger.CANCEL]


def on_lease_lost(row: Standing, max_deaths: int) -> _Verdict:
    """What a lost lease means: a cancel that was asked for, the next attempt, or the end."""
    state = state_of(row.lifecycle, row.state)
    cancel = wished_cancel(row)
    if cancel is not None:
        return _Verdict(cancel, cause=Cause.CANCEL_HOLDER_GONE)
    if state.lease_loss is LeaseLoss.STAY:
        return _Verdict(None, died=state.runs_code)
    expire = STEPS[row.lifecycle, row.state, Trigger.EXPIRE]
    if spares_attempt(BY_CODE[row.lifecycle], state, row.attempt):
        return _Verdict(expire, cause="lease expired", spared=True)
    exhaust = STEPS.get((row.lifecycle, row.state, Trigger.EXHAUST))
    deaths = row.deaths + int(state.runs_code)
    if exhaust is not None and 0 < max_deaths <= deaths:
        error = Cause.WORKER_DIED % died_often(deaths)
        death = DeathCertificate(reason_code=ReasonCode.INFRASTRUCTURE_FAILURE, stage=stage_in(state), last_error=error)
        return _Verdict(exhaust, death, cause=error, died=state.runs_code)
    if exhaust is not None and not row.attempts_left:
        error = Cause.LEASE_EXPIRED
        death = DeathCertificate(reason_code=ReasonCode.EXHAUSTED_RETRIES, stage=stage_in(state), last_error=error)
        return _Verdict(exhaust, death, cause=error, died=state.runs_code)
    return _Verdict(expire, cause=Cause.LEASE_EXPIRED, died=state.runs_code)


def _lose_in_place(tx: Transaction, batch: Batch, row: Standing) -> None:
    """The job keeps its state and may be claimed there again; its slot is handed out anew, to whoever comes first."""
    tx.db.execute(_Sql.lose_in_place, (READY if row.ckey is None else PARKED, row.id))
    if row.ckey is None:
        tx.woke = True
    else:
        batch.keys.add(row.ckey)


def _pull_timers(tx: Transaction, actor: Actor, options: SweepOptions) -> tuple[int, int]:
    """How many rests ended, and how many of them in the end of the job's attempts."""
    keys = tx.db.execute(_Sql.due, (tx.now, options.batch)).fetchall()
    due = exhausted = 0
    batch = Batch()
    for row in standings(tx, (key for (key,) in keys)).values():
        verdict = on_due(row, tx.now)
        if verdict.step is None:
            _end_rest(tx, batch, row)
        else:
            _take_in(batch, tx, actor, options, row, verdict)
        run_out = verdict.step is not None and verdict.step.trigger == Trigger.EXHAUST
        exhausted += run_out
        due += not run_out
    batch.write(tx)
    return due, exhausted


def on_due(row: Standing, now: int) -> _Verdict:
    """What a timer means where a job rests: the next attempt, the end, or only that the rest is over."""
    due = STEPS.get((row.lifecycle, row.state, Trigger.DUE))
    exhaust = STEPS.get((row.lifecycle, row.state, Trigger.EXHAUST))
    if due is None or exhaust is None:
        return _Verdict(due)
    late = row.deadline_at is not None and row.deadline_at <= now
    if row.attempts_left and not late:
        return _Verdict(due)
    error = Cause.DEADLINE_PASSED if late else Cause.ATTEMPTS_SPENT
    reason = ReasonCode.TIMEOUT if late else ReasonCode.EXHAUSTED_RETRIES
    return _Verdict(exhaust, DeathCertificate(reason_code=reason, stage=Stage.EXEC, last_error=error), cause=error)


def _end_rest(tx: Transaction, batch: Batch, row: Standing) -> None:
    """No step: the job only becomes claimable, or goes on resting where a timer means nothing."""
    if not state_of(row.lifecycle, row.state).claimable:
        tx.db.execute(_Sql.rests_on, (row.id,))
    elif row.ckey is None:
        tx.db.execute(_Sql.becomes_claimable, (READY, row.id))
        tx.woke = True
    else:
        tx.db.execute(_Sql.becomes_claimable, (PARKED, row.id))
        batch.keys.add(row.ckey)


def _pass_deadlines(tx: Transaction, actor: Actor, options: SweepOptions) -> int:
    values = {"now": tx.now, "states": DEADLINE_STATES, "limit": options.batch}
    keys = tx.db.execute(_Sql.past_deadline, values).fetchall()
    return _carry_out(tx, actor, options, [key for (key,) in keys], _on_deadline)


def _on_deadline(row: Standing) -> _Verdict:
    stage = stage_in(state_of(row.lifecycle, row.state))
    death = DeathCertificate(reason_code=ReasonCode.TIMEOUT, stage=stage, last_error=Cause.DEADLINE_PASSED)
    return _Verdict(STEPS.get((row.lifecycle, row.state, Trigger.DEADLINE)), death, cause=Cause.DEADLINE_PASSED)


def _heal_keys(tx: Transaction, limit: int) -> int:
    """Every exit hands its slot on by itself; this looks at some keys each time, in turn, so that no slot stays idle."""
    rows = tx.db.execute(_Sql.healed_up_to).fetchall()
    keys = tx.db.execute(_Sql.keys_with_parked, (rows[0][0] if rows else 0, limit)).fetchall()
    reached = keys[-1][0] if len(keys) == limit else 0
    if reached != (rows[0][0] if rows else 0):
        tx.db.execute(_Sql.write_healed, (reached,))
    return promote(tx, [key for (key,) in keys])


def _carry_out(
    tx: Transaction, actor: Actor, options: SweepOptions, keys: list[int], decide: Callable[[Standing], _Verdict]
) -> int:
    """Make the step that `decide` names for each job, where the lifecycle lets the sweep make it."""
    batch, made = Batch(), 0
    for row in standings(tx, keys).values():
        verdict = decide(row)
        if verdict.step is not None and swept(verdict.step):
            _take_in(batch, tx, actor, options, row, verdict)
            made += 1
    batch.write(tx)
    return made


def _take_in(
    batch: Batch, tx: Transaction, actor: Actor, options: SweepOptions, row: Standing, verdict: _Verdict
) -> None:
    step = verdict.step
    assert step is not None, "a verdict without a step is not written"
    who = Who(sweeping_role(row.lifecycle), tx.names.actor_id(actor.name))
    place, wait = landing(step, keyed=row.ckey is not None, delay_us=_rest_us(step, options))
    data = asked(tx, row) if step.trigger == Trigger.CANCEL else ended_otherwise(tx, row, step, None)
    act = Act(step, who, place, wait, revokes=row.place == HELD, cause=verdict.cause, data=data)
    batch.add(row, act, verdict.death if step.dead_letter else None)


def _rest_us(step: Step, options: SweepOptions) -> int | None:
    """A lost lease and a passed deadline wait for nothing (D8); otherwise the target's own timer runs, or the set window."""
    if step.trigger in {Trigger.EXPIRE, Trigger.DEADLINE}:
        return 0
    if step.trigger == Trigger.CANCEL:
        return None
    window_s = options.windows_s.get((BY_CODE[step.lifecycle].name, step.target_name))
    return step.timer_us if window_s is None else int(window_s * US)


def _next_due_s(tx: Transaction, options: SweepOptions) -> float:
    at = tx.db.execute(_Sql.next_due, (tx.now,)).fetchall()[0][0]
    return options.interval_s if at is None else min(max(at - tx.now, 0) / US, options.interval_s)

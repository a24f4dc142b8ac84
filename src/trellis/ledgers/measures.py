"""Counts what a ledger is asked and what it answers, once for every implementation and every role.

The class decorator `measured` wraps the verbs of the port. Whatever claims, settles, renews or sweeps goes through a
ledger, so no role counts for itself.
"""

import time
from collections.abc import Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from trellis.engine.jobs import (
    Advance,
    AlikeJobs,
    Claimed,
    JobKey,
    LeaseLost,
    NewJob,
    Renewed,
    StepApplied,
    Submitted,
    Turn,
    TurnResult,
)
from trellis.engine.ledger import Ledger
from trellis.engine.metrics import (
    CLAIM_CONFLICTS,
    CLAIMED,
    DEAD_LETTERS,
    FAILURES,
    HELD_SECONDS,
    LEASE_EXPIRIES,
    LEDGER_ERRORS,
    LEDGER_SECONDS,
    REMOVED,
    RENEWALS,
    RENEWALS_REFUSED,
    RETRIES,
    SETTLED,
    SUBMITTED,
    SWEPT,
    Counted,
    measured_class,
    process_metrics,
    type_label,
)
from trellis.engine.records import RetentionReport, SweepReport
from trellis.lifecycles import LIFECYCLES, Phase, Trigger

NOT_MEASURED = frozenset({"close", "wait_for_work", "wait_for_events", "hints"})
"""Verbs that wait by design: their time says nothing."""
CANCELS = frozenset({Trigger.CANCEL, "stop"})
"""Steps with which a holder ends a job because somebody cancelled it: no failure (D19)."""
UNKNOWN_TYPE = "unknown"
"""The type of a job that this process holds without having claimed it, as after a restart."""
SWEPT_KINDS = ("amnesty", "expired", "exhausted", "due", "deadlines", "cancelled", "promoted")
REMOVED_KINDS = ("jobs", "events", "results", "signals", "keys")

_LEAVES = {
    (lifecycle.name, transition.source, transition.trigger): lifecycle.by_name[transition.target]
    for lifecycle in LIFECYCLES.values()
    for transition in lifecycle.transitions
    if transition.source is not None and lifecycle.by_name[transition.target].phase is not Phase.HELD
}
"""The steps with which a holder lets go of a job, with the state that it enters."""

HELD_MAX = 50_000
"""Most held jobs of one ledger whose type and beginning are remembered. Lost leases leave theirs behind."""

LedgerT = TypeVar("LedgerT")
HeldJobs = dict[JobKey, tuple[str, float]]
"""Type and beginning of the jobs that this process holds. Jobs that were claimed together share one entry."""

_held_by: WeakKeyDictionary[Any, HeldJobs] = WeakKeyDictionary()


def measured(ledger: type[LedgerT]) -> type[LedgerT]:
    """Wrap the verbs of a ledger class, so that their calls are timed and their answers counted."""
    verbs = [name for name in vars(Ledger) if not name.startswith("_") and name not in NOT_MEASURED]
    return measured_class(
        ledger, [verb for verb in verbs if hasattr(ledger, verb)], LEDGER_SECONDS, LEDGER_ERRORS, _COUNTED
    )


def _count_turn(ledger: Any, args: Sequence[Any], answer: TurnResult) -> None:
    turn: Turn = args[0]
    held = _held_by.setdefault(ledger, {})
    now = time.monotonic()
    if turn.advances:
        _count_steps(held, turn.advances, answer.outcomes, now)
    if answer.claimed:
        _count_claimed(held, answer.claimed, now)


def _count_claimed(held: HeldJobs, jobs: Sequence[Claimed], now: float) -> None:
    lifecycle = jobs[0].lease.lifecycle  # a claim has one
    for type_, of_type in groupby(jobs, key=attrgetter("type")):
        label = type_label(type_, lifecycle)
        keys = [job.lease.key for job in of_type]
        held.update(dict.fromkeys(keys, (label, now)))
        process_metrics.count(CLAIMED, len(keys), label)
    if len(held) > HELD_MAX:
        held.clear()


def _count_steps(
    held: HeldJobs, advances: Sequence[Advance], outcomes: Sequence[StepApplied | LeaseLost], now: float
) -> None:
    """Count the steps of a turn. Neighbours that are alike are counted as one.

    A drain settles thousands of jobs a second, so a step like the one before it costs a few comparisons by identity:
    equal values that are different objects only end a group early.
    """
    alike: tuple[Any, ...] = ()
    started: dict[str, tuple[str, float]] = {}
    entry = source = trigger = death = None
    n = conflicts = 0
    entries = map(held.pop, [advance.lease.key for advance in advances], repeat(None))
    for this, advance, outcome in zip(entries, advances, outcomes, strict=True):
        if isinstance(outcome, LeaseLost):
            conflicts += 1
            continue
        if n and this is entry and advance[2] is trigger and advance[1] is source and advance[9] is death:
            n += 1
            continue
        _count_settled(alike, n, now)
        entry, source, trigger, death = this, advance.source, advance.trigger, advance.death
        if (advance.lease.lifecycle, source, trigger) in _LEAVES:
            alike, n = (entry, advance.lease.lifecycle, source, trigger, death), 1
        else:
            alike, n = (), 0
            entry = entry or (UNKNOWN_TYPE, now)
            # Jobs that are started together share one entry, so that they are alike when they end.
            held[advance.lease.key] = (
                started.setdefault(entry[0], (entry[0], now)) if trigger == Trigger.START else entry
            )
    _count_settled(alike, n, now)
    process_metrics.count(CLAIM_CONFLICTS, conflicts)


def _count_settled(alike: tuple[Any, ...], n: int, now: float) -> None:
    if not n:
        return
    entry, lifecycle, source, trigger, death = alike
    type_, began = entry or (UNKNOWN_TYPE, now)
    target = _LEAVES[lifecycle, source, trigger]
    process_metrics.count(SETTLED, n, type_, trigger)
    process_metrics.observe(HELD_SECONDS, now - began, type_, n=n)
    if trigger == Trigger.RETRY:
        process_metrics.count(RETRIES, n, type_)
    if death is not None:
        process_metrics.count(DEAD_LETTERS, n, type_, death.reason_code)
    if target.phase is Phase.ENDED and not target.success and trigger not in CANCELS:
        process_metrics.count(FAILURES, n, type_)


def _count_submit(ledger: Any, args: Sequence[Any], answer: Sequence[Any]) -> None:  # noqa: ARG001 - as all counters
    jobs: Sequence[NewJob] = args[1]
    if isinstance(jobs, AlikeJobs):
        n = 0
        for outcome in answer:
            n += isinstance(outcome, Submitted) and outcome[1]
        process_metrics.count(SUBMITTED, n, type_label(jobs.common.type, jobs.common.lifecycle))
        return
    created: dict[tuple[str, str], int] = {}
    for job, outcome in zip(jobs, answer, strict=True):
        if isinstance(outcome, Submitted) and outcome.created:
            named = (job.type, job.lifecycle)
            created[named] = created.get(named, 0) + 1
    for named, n in created.items():
        process_metrics.count(SUBMITTED, n, type_label(*named))


def _count_renewals(ledger: Any, args: Sequence[Any], answer: Sequence[Any]) -> None:  # noqa: ARG001 - as all counters
    renewed = sum(isinstance(one, Renewed) for one in answer)
    process_metrics.count(RENEWALS, renewed)
    process_metrics.count(RENEWALS_REFUSED, len(answer) - renewed)


def _count_sweep(ledger: Any, args: Any, answer: SweepReport) -> None:  # noqa: ARG001 - as all counters
    process_metrics.count(LEASE_EXPIRIES, answer.expired)
    for kind in SWEPT_KINDS:
        process_metrics.count(SWEPT, getattr(answer, kind), kind)


def _count_retention(ledger: Any, args: Any, answer: RetentionReport) -> None:  # noqa: ARG001 - as all counters
    for kind in REMOVED_KINDS:
        process_metrics.count(REMOVED, getattr(answer, kind), kind)


_COUNTED: dict[str, Counted] = {
    "turn": _count_turn,
    "submit": _count_submit,
    "renew": _count_renewals,
    "sweep": _count_sweep,
    "retain": _count_retention,
}

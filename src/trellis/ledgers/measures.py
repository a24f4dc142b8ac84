"""Counts what a ledger is asked and what it answers, once for every implementation and every role.

The class decorator `measured` wraps the verbs of the port. Whatever claims, settles, renews or sweeps goes through a
ledger, so no role counts for itself.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from trellis.engine.jobs import JobKey, LeaseLost, Renewed, Submitted, Turn, TurnResult
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
        _count_steps(held, turn, answer, now)
    if answer.claimed:
        by_type: dict[str, list[JobKey]] = {}
        for claimed in answer.claimed:
            by_type.setdefault(type_label(claimed.type, claimed.lease.lifecycle), []).append(claimed.lease.key)
        for type_, keys in by_type.items():
            held.update(dict.fromkeys(keys, (type_, now)))
            process_metrics.count(CLAIMED, len(keys), type_)
        if len(held) > HELD_MAX:
            held.clear()


def _count_steps(held: HeldJobs, turn: Turn, answer: TurnResult, now: float) -> None:
    """Count the steps of a turn. Neighbours that are alike are counted as one: a drain must not feel this."""
    alike: tuple[object, ...] = ()
    n = conflicts = 0
    for advance, outcome in zip(turn.advances, answer.outcomes, strict=True):
        lease, source, trigger = advance[:3]
        entry = held.pop(lease.key, None)
        if isinstance(outcome, LeaseLost):
            conflicts += 1
            continue
        this = (entry, lease.lifecycle, source, trigger, advance.death)
        if this == alike:
            n += 1
            continue
        _count_settled(alike, n, now)
        if (lease.lifecycle, source, trigger) in _LEAVES:
            alike, n = this, 1
        else:
            alike, n = (), 0
            type_, began = entry or (UNKNOWN_TYPE, now)
            held[lease.key] = (type_, now if trigger == Trigger.START else began)
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
    created = Counter(
        type_label(job.type, job.lifecycle)
        for job, one in zip(args[1], answer, strict=True)
        if isinstance(one, Submitted) and one.created
    )
    for type_, n in created.items():
        process_metrics.count(SUBMITTED, n, type_)


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

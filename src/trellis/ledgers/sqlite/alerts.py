"""Alerts in an SQLite ledger, and the reads that only their conditions need. The rules are in `engine/alerts.py`."""

from collections.abc import Sequence
from typing import LiteralString, NamedTuple

from trellis.engine.alerts import (
    ALERTS_MAX,
    STAGE_STEP_TYPES,
    Alert,
    AlertChange,
    AlertChangeKind,
    AlertMark,
    AlertObservation,
    AlertRound,
    is_in,
    report_jobs,
)
from trellis.engine.jobs import Actor, NewJob, submit_parts
from trellis.engine.records import Event, WaitingType
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_alerts
from trellis.ledgers.sqlite import rows, submit
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import US
from trellis.lifecycles import BY_CODE, event_code

OPEN_MAX = 100_000
"""All open alerts, in practice: a round observes at most ALERTS_MAX."""
DROP_MAX = 500
"""Most resolved alerts that one round removes."""


_ALERT_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/alerts.sql")


def observe(tx: Transaction, actor: Actor, checked: AlertRound) -> list[AlertChange]:
    """Store what a round observed. Returns the alerts that it raised or resolved."""
    check_alerts(checked)
    ((number,),) = tx.db.execute(_ALERT_QUERIES.next_round).fetchall()
    tx.db.execute(_ALERT_QUERIES.evaluated, {"now": tx.now, "stale": int(checked.stale_s * US)})
    observers = {id_: _Observer(*seen) for id_, *seen in tx.db.execute(_ALERT_QUERIES.observers)}
    opened = {(one.name, one.subject): one for one in _alerts(tx, _ALERT_QUERIES.open_alerts, OPEN_MAX)}
    observed = {(one.name, one.subject): one for one in checked.observed}
    changes: list[AlertChange] = []
    for key, one in observed.items():
        if key in opened:
            values = {"value": one.value, "text": one.text, "now": tx.now, "round": number, "open_id": opened[key].id}
            tx.db.execute(_ALERT_QUERIES.see, {**values, "by": actor.name})
        else:
            changes += _raised(tx, actor, one, checked, number)
    for key, alert in opened.items():
        if key in observed:
            continue
        if is_in(alert, checked.unread):
            tx.db.execute(_ALERT_QUERIES.not_read, (tx.now, alert.id))
        elif _is_over(tx, actor, alert, checked, observers[alert.id]):
            (row,) = tx.db.execute(_ALERT_QUERIES.resolve, (tx.now, number, alert.id)).fetchall()
            changes.append(AlertChange(kind=AlertChangeKind.RESOLVED, alert=_alert(row)))
    reports = _reports(tx, checked.report_types, number)
    for part in submit_parts(reports):
        submit.submit(tx, actor, part)
    tx.db.execute(_ALERT_QUERIES.drop_resolved, (tx.now - int(checked.keep_s * US), DROP_MAX))
    return changes


class _Observer(NamedTuple):
    """Who saw an open alert last."""

    seen_in: int
    seen_by: str
    unread_at: int


def _reports(tx: Transaction, types: Sequence[str], number: int) -> list[NewJob]:
    """The jobs that report alerts through these channels, as far as they have not. Stores which channels have."""
    if not types:
        return []
    jobs: list[NewJob] = []
    for id_, stored in tx.db.execute(_ALERT_QUERIES.to_report, {"now": tx.now, "round": number}).fetchall():
        changed, reported = alert(tx, id_), stored.split()
        assert changed is not None, "it was read in this transaction"
        may_begin = changed.resolved_at is None or rows.microseconds(changed.resolved_at) == tx.now
        missing = [one for one in types if one not in reported] if may_begin else []
        jobs += report_jobs(changed, AlertChangeKind.RAISED, missing)
        reported += missing
        if changed.resolved_at is not None:
            jobs += report_jobs(changed, AlertChangeKind.RESOLVED, [one for one in reported if one in types])
            reported = [one for one in reported if one not in types]
        if reported != stored.split():
            tx.db.execute(_ALERT_QUERIES.reported, (" ".join(reported), id_))
    return jobs


def _raised(
    tx: Transaction, actor: Actor, one: AlertObservation, checked: AlertRound, number: int
) -> list[AlertChange]:
    values = {
        "id": one.id,
        "name": one.name,
        "subject": one.subject,
        "value": one.value,
        "text": one.text,
        "now": tx.now,
        "round": number,
        "mark": checked.mark,
        "by": actor.name,
    }
    raised = tx.db.execute(_ALERT_QUERIES.raise_alert, values).fetchall()
    return [AlertChange(kind=AlertChangeKind.RAISED, alert=_alert(row)) for row in raised]


def _is_over(tx: Transaction, actor: Actor, alert: Alert, checked: AlertRound, seen: _Observer) -> bool:
    """Whether an alert that this round did not observe is to be resolved."""
    seen_at = rows.microseconds(alert.last_seen_at)
    may_decide = seen.seen_by in {"", actor.name} or seen_at <= tx.now - int(checked.hold_s * US)
    is_unseen = seen.seen_in <= checked.mark
    is_old = max(seen_at, seen.unread_at) < tx.now - int(checked.unseen_s * US)
    return (may_decide and is_unseen and is_in(alert, checked.scopes)) or is_old


def mark(tx: Transaction) -> AlertMark:
    ((number, has_open, unreported, evaluated_at, stale_at),) = tx.db.execute(_ALERT_QUERIES.mark).fetchall()
    return AlertMark(
        mark=number,
        has_open=bool(has_open),
        unreported=frozenset(unreported.split()),
        evaluated_at=rows.moment_or_none(evaluated_at),
        stale_at=rows.moment_or_none(stale_at),
    )


def alerts(tx: Transaction, *, limit: int = ALERTS_MAX, only_open: bool = False) -> list[Alert]:
    """Open alerts, then resolved ones, each newest first."""
    limit = min(limit, ALERTS_MAX)
    listed = _alerts(tx, _ALERT_QUERIES.open_alerts, limit)
    if not only_open and len(listed) < limit:
        listed += _alerts(tx, _ALERT_QUERIES.resolved_alerts, limit - len(listed))
    return listed


def alert(tx: Transaction, alert_id: str) -> Alert | None:
    stored = tx.db.execute(_ALERT_QUERIES.alert, (alert_id,)).fetchall()
    return _alert(stored[0]) if stored else None


def waiting_types(tx: Transaction, *, limit: int) -> list[WaitingType]:
    stored = tx.db.execute(_ALERT_QUERIES.waiting_since, (min(limit, ALERTS_MAX),)).fetchall()
    return [
        WaitingType(type=name, lifecycle=BY_CODE[lifecycle].name, waited_s=max(0.0, (tx.now - since) / US))
        for name, lifecycle, since in stored
    ]


def stage_steps(tx: Transaction, *, each: int) -> list[Event]:
    codes, most = [event_code(type_) for type_ in STAGE_STEP_TYPES], min(each, ALERTS_MAX)
    return [rows.event(row) for code in codes for row in tx.db.execute(_ALERT_QUERIES.stage_steps, (code, most))]


def _alerts(tx: Transaction, query: LiteralString, limit: int) -> list[Alert]:
    return [_alert(row) for row in tx.db.execute(query, (limit,))]


def _alert(row: rows.SqliteRow) -> Alert:
    id_, name, subject, value, text, raised_at, seen_at, resolved_at = row
    return Alert(
        id=id_,
        name=name,
        subject=subject,
        value=value,
        text=text,
        raised_at=rows.moment(raised_at),
        last_seen_at=rows.moment(seen_at),
        resolved_at=rows.moment_or_none(resolved_at),
    )

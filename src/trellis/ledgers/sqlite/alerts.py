"""Alerts in an SQLite ledger, and the reads that only their conditions need. The rules are in `engine/alerts.py`."""

from typing import LiteralString

from trellis.engine.alerts import (
    STAGE_STEP_TYPES,
    Alert,
    AlertChange,
    AlertChangeKind,
    AlertMark,
    AlertObservation,
    AlertRound,
    report_jobs,
)
from trellis.engine.jobs import Actor
from trellis.engine.records import Event, WaitingType
from trellis.ledgers.queries import NamedQueries
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
    ((number,),) = tx.db.execute(_ALERT_QUERIES.next_round).fetchall()
    unseen = {row[0] for row in tx.db.execute(_ALERT_QUERIES.not_seen_after, (checked.mark,))}
    opened = {(one.name, one.subject): one for one in _alerts(tx, _ALERT_QUERIES.open_alerts, OPEN_MAX)}
    observed = {(one.name, one.subject): one for one in checked.observed}
    changes: list[AlertChange] = []
    for key, one in observed.items():
        if key in opened:
            values = {"value": one.value, "text": one.text, "now": tx.now, "round": number, "open_id": opened[key].id}
            tx.db.execute(_ALERT_QUERIES.see, values)
        else:
            changes += _raised(tx, one, checked, number)
    for key, alert in opened.items():
        if key not in observed and _is_over(tx, alert, checked, is_unseen=alert.id in unseen):
            (row,) = tx.db.execute(_ALERT_QUERIES.resolve, (tx.now, number, alert.id)).fetchall()
            changes.append(AlertChange(kind=AlertChangeKind.RESOLVED, alert=_alert(row)))
    tx.db.execute(_ALERT_QUERIES.drop_resolved, (tx.now - int(checked.keep_s * US), DROP_MAX))
    reports = report_jobs(changes, checked.report_types)
    if reports:
        submit.submit(tx, actor, reports)
    return changes


def _raised(tx: Transaction, one: AlertObservation, checked: AlertRound, number: int) -> list[AlertChange]:
    values = {
        "id": one.id,
        "name": one.name,
        "subject": one.subject,
        "value": one.value,
        "text": one.text,
        "now": tx.now,
        "round": number,
        "mark": checked.mark,
    }
    raised = tx.db.execute(_ALERT_QUERIES.raise_alert, values).fetchall()
    return [AlertChange(kind=AlertChangeKind.RAISED, alert=_alert(row)) for row in raised]


def _is_over(tx: Transaction, alert: Alert, checked: AlertRound, *, is_unseen: bool) -> bool:
    """Whether an alert that this round did not observe is to be resolved.

    `is_unseen` says that no other round has seen it since this one began to read.
    """
    in_scope = any(one.name == alert.name and f"{alert.subject}\n".startswith(one.pattern) for one in checked.scopes)
    is_old = rows.microseconds(alert.last_seen_at) < tx.now - int(checked.unseen_s * US)
    return (in_scope and is_unseen) or is_old


def mark(tx: Transaction) -> AlertMark:
    ((number, has_open),) = tx.db.execute(_ALERT_QUERIES.mark).fetchall()
    return AlertMark(mark=number, has_open=bool(has_open))


def alerts(tx: Transaction, *, limit: int, only_open: bool) -> list[Alert]:
    """Open alerts, then resolved ones, each newest first."""
    listed = _alerts(tx, _ALERT_QUERIES.open_alerts, limit)
    if not only_open and len(listed) < limit:
        listed += _alerts(tx, _ALERT_QUERIES.resolved_alerts, limit - len(listed))
    return listed


def alert(tx: Transaction, alert_id: str) -> Alert | None:
    stored = tx.db.execute(_ALERT_QUERIES.alert, (alert_id,)).fetchall()
    return _alert(stored[0]) if stored else None


def waiting_types(tx: Transaction, *, limit: int) -> list[WaitingType]:
    stored = tx.db.execute(_ALERT_QUERIES.waiting_since, (limit,)).fetchall()
    return [
        WaitingType(type=name, lifecycle=BY_CODE[lifecycle].name, waited_s=max(0.0, (tx.now - since) / US))
        for name, lifecycle, since in stored
    ]


def stage_steps(tx: Transaction, *, each: int) -> list[Event]:
    codes = [event_code(type_) for type_ in STAGE_STEP_TYPES]
    return [rows.event(row) for code in codes for row in tx.db.execute(_ALERT_QUERIES.stage_steps, (code, each))]


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

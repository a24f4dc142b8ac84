"""Alerts on PostgreSQL: what a round observed, and the jobs that report its changes, in one transaction."""

from collections.abc import Awaitable, Callable

from trellis.engine.alerts import Alert, AlertChange, AlertChangeKind, AlertRound, report_jobs
from trellis.engine.jobs import NewJob
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow

OBSERVE = "select * from observe_alerts($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)"
REPORT = "report "
"""How a row begins that is about a report, not a change."""


async def observe(
    connection: PostgresConnection,
    actor: int,
    checked: AlertRound,
    submit_reports: Callable[[PostgresConnection, list[NewJob]], Awaitable[None]],
) -> list[AlertChange]:
    """Store what a round observed. Returns the alerts that it raised or resolved."""
    observed = {(one.name, one.subject): one for one in checked.observed}.values()
    async with connection.transaction():
        rows = await connection.fetch(
            OBSERVE,
            actor,
            checked.mark,
            [one.id for one in observed],
            [one.name for one in observed],
            [one.subject for one in observed],
            [one.value for one in observed],
            [one.text for one in observed],
            [scope.name for scope in checked.scopes],
            [scope.pattern for scope in checked.scopes],
            [scope.name for scope in checked.unread],
            [scope.pattern for scope in checked.unread],
            list(checked.report_types),
            checked.hold_s,
            checked.unseen_s,
            checked.keep_s,
            checked.stale_s,
        )
        reports = [
            job
            for row in rows
            if row["change"].startswith(REPORT)
            for job in report_jobs(alert(row), AlertChangeKind(row["change"].removeprefix(REPORT)), row["report_types"])
        ]
        if reports:
            await submit_reports(connection, reports)
    changed = [row for row in rows if not row["change"].startswith(REPORT)]
    return [AlertChange(kind=AlertChangeKind(row["change"]), alert=alert(row)) for row in changed]


def alert(row: PostgresRow) -> Alert:
    return Alert(
        id=row["id"],
        name=row["name"],
        subject=row["subject"],
        value=row["value"],
        text=row["text"],
        raised_at=row["raised_at"],
        last_seen_at=row["last_seen_at"],
        resolved_at=row["resolved_at"],
    )

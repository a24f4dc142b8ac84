"""`trellis schedules`: agents that run on a schedule, their next run, and the outcome of the last one."""

from dataclasses import dataclass
from datetime import datetime

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.instances import open_for_command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.runs.timetable import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScheduleRow:
    agent: str
    cron: str | None
    registered_at: datetime
    next_at: datetime | None
    last_at: datetime | None
    last_run: str | None
    skipped: str | None


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "schedules", section="Agents")(schedules)


async def schedules(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents that run by themselves, with the next and the last time.

    An agent's file declares it as `triggers.cron`, in UTC; `trellis up` registers it within half a minute. Where the last instant
    began no run it says why: the agent was not active, its queue was full, or the instant was missed by more than an hour.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    async with open_for_command(cli) as instance:
        now = await instance.ledger.now()
        found = [_row(schedule, now) for schedule in (await instance.layer.schedules())[:wanted]]
    columns = [
        ListingColumn[_ScheduleRow](title="AGENT", cell=lambda row: row.agent),
        ListingColumn[_ScheduleRow](title="CRON", cell=lambda row: row.cron or ""),
        ListingColumn[_ScheduleRow](title="NEXT", cell=lambda row: _moment(row.next_at)),
        ListingColumn[_ScheduleRow](title="LAST", cell=lambda row: _moment(row.last_at)),
        ListingColumn[_ScheduleRow](title="RUN", cell=_last, gives_way=True),
    ]
    cli.out.listing(
        found, columns, empty="No schedules. An agent declares one as `triggers.cron`; `trellis up` keeps it."
    )


def _row(schedule: Schedule, now: datetime) -> _ScheduleRow:
    last = schedule.last
    return _ScheduleRow(
        agent=schedule.agent_slug,
        cron=schedule.cron,
        registered_at=schedule.registered_at,
        next_at=schedule.next(now),
        last_at=last.instant if last else None,
        last_run=last.run_id if last else None,
        skipped=last.skipped if last else None,
    )


def _moment(at: datetime | None) -> str:
    return "" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def _last(row: _ScheduleRow) -> Text:
    return Text(row.last_run) if row.last_run else Text(f"skipped: {row.skipped}" if row.skipped else "", "yellow")

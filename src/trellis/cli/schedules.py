"""`trellis schedules`: agents that run on a schedule, their next run, and the outcome of the last one."""

from dataclasses import dataclass
from datetime import datetime

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn


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
    command(program, "schedules", section="Agents", gateway=True)(schedules)


async def schedules(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the agents that run by themselves, with the next and the last time.

    An agent's file declares it as `triggers.cron`, in UTC; `trellis up` registers it within half a minute. Where the last instant
    began no run it says why: the agent was not active, its queue was full, or the instant was missed by more than an hour.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        found = [_ScheduleRow(**one.model_dump()) for one in (await api.system.schedules()).items[:wanted]]
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


def _moment(at: datetime | None) -> str:
    return "" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def _last(row: _ScheduleRow) -> Text:
    return Text(row.last_run) if row.last_run else Text(f"skipped: {row.skipped}" if row.skipped else "", "yellow")

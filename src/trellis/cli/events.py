"""`trellis events`: the events of one job or of all."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, Output, as_record, table
from trellis.engine.errors import InputError, JobNotFound
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event
from trellis.operations.explain import event_note

FOLLOW_PAUSE_S = 0.25
PAGE_MAX = 500


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "events", section="Jobs")(events)


async def events(
    cli: Cli,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this job's, all of them.")] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until stopped, from now on.")] = False,
    after: Annotated[str | None, typer.Option("--after", metavar="POSITION", help="Begin after this position.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only this event type, such as job_failed.")] = None,
    correlation: Annotated[str | None, typer.Option("--correlation", help="Only what belongs to this.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="With --type: ISO 8601 with zone.")
    ] = None,
    lifecycle: Annotated[str | None, typer.Option("--lifecycle", metavar="NAME", help="Only this lifecycle.")] = None,
    limit: LimitOption = LIMIT_DEFAULT,
) -> None:
    """Show events, of one job or of all, oldest first.

    With --type or --correlation it looks them up, else it reads the feed of all jobs. The feed yields every event once, in order; --after goes on from a position it gave.
    """
    wanted, kind = values.limit(limit, LIMIT_MAX), values.lifecycle(lifecycle)
    event_type, moment = values.event_type(type_), values.moment("--since", since)
    looked_up = event_type is not None or correlation is not None
    if (job or looked_up) and (follow or after):
        raise InputError(detail="The feed is of all jobs: leave out JOB, --type and --correlation.")
    if moment is not None and not looked_up:
        raise InputError(detail="--since goes with --type or --correlation; the feed goes on with --after.")
    async with cli.open() as ledger:
        if job is not None:
            print_events(cli.out, await _of_job(ledger, job), EVENT_COLUMNS)
        elif looked_up:
            found = await ledger.find_events(type_=event_type, correlation_id=correlation, since=moment, limit=wanted)
            print_events(cli.out, [event for event in found if kind in {None, event.lifecycle}], FEED_COLUMNS)
        elif follow:
            await _follow(cli, ledger, after, kind)
        else:
            await _feed(cli, ledger, after, kind, wanted)


async def _of_job(ledger: Ledger, job_id: str) -> list[Event]:
    found = await ledger.events(JobId(job_id))
    if not found:
        raise JobNotFound(job_id=job_id)
    return found


async def _feed(cli: Cli, ledger: Ledger, after: str | None, lifecycle: str | None, wanted: int) -> None:
    found: list[Event] = []
    position = after
    while len(found) < wanted:
        page = await ledger.feed(position, limit=min(PAGE_MAX, wanted - len(found)), lifecycle=lifecycle)
        position = page.position
        if not page.events:
            break
        found += page.events
    print_events(cli.out, found, FEED_COLUMNS)
    if found:
        cli.out.note(f"go on from here: --after {position}")


async def _follow(cli: Cli, ledger: Ledger, after: str | None, lifecycle: str | None) -> None:
    position = after or await ledger.feed_end()
    cli.out.note("following; Ctrl-C ends it")
    while True:
        page = await ledger.feed(position, limit=PAGE_MAX, lifecycle=lifecycle)
        position = page.position
        for event in page.events:
            if cli.out.as_json:
                cli.out.record(as_record(event))
            else:
                cli.out.line(_line(event))
        if not page.events:
            await asyncio.sleep(FOLLOW_PAUSE_S)


def _line(event: Event) -> str:
    note = event_note(event)
    return f"{event.ts:%H:%M:%S.%f}"[:12] + f"  {event.type:<20} {event.job_id}" + (f"  {note}" if note else "")


def print_events(out: Output, found: Sequence[Event], columns: Sequence[ListingColumn[Event]]) -> None:
    """A table of events. Times are relative to the first one, to show how long things took."""
    if found and not out.as_json:
        first = found[0].ts
        out.line(f"from {first:%Y-%m-%d %H:%M:%S} UTC", style="dim")
        after = ListingColumn[Event](title="AFTER", cell=lambda event: _offset(event.ts, first), right=True)
        out.show(table(found, [columns[0], after, *columns[1:]], out.console.width))
        return
    out.listing(found, columns, empty="No event is like that.")


def _offset(moment: datetime, first: datetime) -> str:
    seconds = (moment - first).total_seconds()
    return f"{seconds:.3f}s" if seconds < 1000 else f"{seconds / 60:.0f}min"


_WHAT = ListingColumn[Event](title="EVENT", cell=lambda event: event.type)
_TRY = ListingColumn[Event](title="TRY", cell=lambda event: str(event.attempt + 1), right=True)
_BY = ListingColumn[Event](title="BY", cell=lambda event: event.actor, gives_way=True)
_NOTE = ListingColumn[Event](title="NOTE", cell=event_note, wraps=True)

EVENT_COLUMNS = (
    ListingColumn[Event](title="#", cell=lambda event: str(event.version), right=True),
    _WHAT,
    _TRY,
    _BY,
    _NOTE,
)
FEED_COLUMNS = (
    ListingColumn[Event](title="JOB", cell=lambda event: event.job_id),
    _WHAT,
    ListingColumn[Event](title="NOTE", cell=event_note, gives_way=True),
)

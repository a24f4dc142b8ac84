"""`trellis events`: the events of one job or of all."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.app.system import SystemClock
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, CorrelationOption, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, Output, as_record, table
from trellis.engine.attempts import attempt_number
from trellis.engine.errors import InputError, TrellisError
from trellis.engine.jobs import JobId
from trellis.engine.records import Event, Job
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES, Phase, Role

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.api.local import LocalApi
    from trellis.http.client import GatewayClient
    from trellis.http.operation_shapes import EventListed
    from trellis.http.shapes import EventShape, JobWhole

FOLLOW_PAUSE_S = 0.25
GATEWAY_PAUSE_S = 1.0
"""How often new events are asked for through a gateway, which limits the requests of a caller."""
PAGE_MAX = 500


def add_to(program: typer.Typer) -> None:
    command(program, "events", section="Jobs", gateway=True)(events)


async def events(
    cli: Cli,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Print all events of this job.")] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until stopped.")] = False,
    after: Annotated[str | None, typer.Option("--after", metavar="POSITION", help="Begin after this position.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only this event type, such as job_failed.")] = None,
    correlation: CorrelationOption = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="With --type: only since then, ISO 8601 with zone.")
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
    async with cli.api() as api:
        if job is not None:
            job_events = await _found(cli, api, LIMIT_MAX, job_id=job)
            print_events(cli.out, job_events, EVENT_COLUMNS)
            await _print_cancel_request(cli, api, job_events)
        elif looked_up:
            where = {"type_": event_type, "correlation_id": correlation, "since": moment, "lifecycle": kind}
            print_events(cli.out, await _found(cli, api, wanted, **where), FEED_COLUMNS)
        elif follow:
            await _follow(cli, api, after, kind)
        else:
            await _feed(cli, api, after, kind, wanted)


async def _found(cli: Cli, api: "GatewayClient | LocalApi", limit: int, **where: Any) -> list[Event]:
    events = event_rows((await api.feed.find(limit=limit, **where)).items)
    if cli.gateway_url is None:
        return events
    from trellis.http.pages import EVENTS_MAX  # loads the documents of a gateway

    if len(events) == EVENTS_MAX < limit:
        cli.out.note(f"a gateway tells {EVENTS_MAX} events at most; there may be more")
    return events


async def _print_cancel_request(cli: Cli, api: "GatewayClient | LocalApi", events: Sequence[Event]) -> None:
    """Say that a soft cancel was requested of a job that has not ended: it is no event until it is carried out."""
    if not events or LIFECYCLES[events[-1].lifecycle].by_name[events[-1].target].phase is not Phase.HELD:
        return
    from trellis.api.jobs import WholeJob

    with suppress(TrellisError):  # whoever may read the events may not read every job
        answer = await api.jobs.get(events[-1].job_id)
        job = answer.job if isinstance(answer, WholeJob) else answer
        if job.cancel_requested:
            cli.out.note(f"asked to stop {asked_to_stop(job)}; it has not ended yet")


def asked_to_stop(job: "Job | JobWhole") -> str:
    """Who requested the cancel of a job, when and why."""
    at = (
        job.cancel_asked_at if not isinstance(job.cancel_asked_at, str) else datetime.fromisoformat(job.cancel_asked_at)
    )
    when = f", {at:%Y-%m-%d %H:%M:%S} UTC" if at else ""
    why = f": {job.cancel_cause}" if job.cancel_cause else ""
    return f"by {job.cancel_asked_by or 'somebody'}{when}{why}"


async def _feed(
    cli: Cli, api: "GatewayClient | LocalApi", after: str | None, lifecycle: str | None, wanted: int
) -> None:
    events, position = list[Event](), after
    while len(events) < wanted:
        page = await api.feed.page(position, lifecycle=lifecycle, limit=min(PAGE_MAX, wanted - len(events)))
        if page.position == position:
            break
        position = page.position
        events += event_rows(page.items)
    print_events(cli.out, events, FEED_COLUMNS)
    if events:
        cli.out.note(f"go on from here: --after {position}")


async def _follow(cli: Cli, api: "GatewayClient | LocalApi", after: str | None, lifecycle: str | None) -> None:
    position = after or (await api.feed.page("latest")).position
    pause_s = FOLLOW_PAUSE_S if cli.gateway_url is None else GATEWAY_PAUSE_S
    cli.out.note("following; Ctrl-C ends it")
    while True:
        page = await api.feed.page(position, lifecycle=lifecycle, limit=PAGE_MAX)
        for event in event_rows(page.items):
            if cli.out.as_json:
                cli.out.record(as_record(event))
            else:
                cli.out.line(_line(event))
        position = page.position
        if not page.items:
            await SystemClock().sleep(pause_s)


def event_rows(items: "Sequence[Event | EventListed]") -> list[Event]:
    """Events as the ledger has them, also those that a gateway told."""
    return [one if isinstance(one, Event) else event_row(one, one.lifecycle) for one in items]


def event_row(shape: "EventShape", lifecycle: str) -> Event:
    """An event of a gateway's document, as the ledger has it."""
    step = shape.payload
    return Event(
        id=shape.id,
        job_id=JobId(shape.job_id),
        lifecycle=lifecycle,
        type=shape.type,
        ts=datetime.fromisoformat(shape.ts),
        role=Role(step["role"]),
        actor=shape.actor,
        correlation_id=shape.correlation_id,
        cause=shape.cause,
        source=step["from"],
        target=step["to"],
        generation=step["generation"],
        attempt=step["attempt"],
        epoch=step["epoch"],
        version=shape.version,
        data=None if step["data"] is None else json.dumps(step["data"]).encode(),
    )


def _line(event: Event) -> str:
    note = _note(event)
    return f"{event.ts:%H:%M:%S.%f}"[:12] + f"  {event.type:<20} {event.job_id}" + (f"  {note}" if note else "")


def print_events(out: Output, events: Sequence[Event], columns: Sequence[ListingColumn[Event]]) -> None:
    """A table of events. Times are relative to the first one, to show how long things took."""
    if events and not out.as_json:
        first = events[0].ts
        out.line(f"from {first:%Y-%m-%d %H:%M:%S} UTC", style="dim")
        after = ListingColumn[Event](title="AFTER", cell=lambda event: _offset(event.ts, first), right=True)
        out.show(table(events, [columns[0], after, *columns[1:]], out.console.width))
        return
    out.listing(events, columns, empty="No event is like that.")


def _offset(moment: datetime, first: datetime) -> str:
    seconds = (_millisecond(moment) - _millisecond(first)).total_seconds()
    return f"{seconds:.3f}s" if seconds < 1000 else f"{seconds / 60:.0f}min"


def _millisecond(moment: datetime) -> datetime:
    """The time as a gateway has it: without the part of a millisecond that only the ledger knows."""
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _note(event: Event) -> str:
    """What the event says beside its type."""
    from trellis.operations.explain import event_note  # loads the bus

    return event_note(event)


_WHAT = ListingColumn[Event](title="EVENT", cell=lambda event: event.type)
_TRY = ListingColumn[Event](title="TRY", cell=lambda event: str(attempt_number(event)), right=True)
_BY = ListingColumn[Event](title="BY", cell=lambda event: event.actor, gives_way=True)
_NOTE = ListingColumn[Event](title="NOTE", cell=_note, wraps=True)

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
    _TRY,
    _BY,
    ListingColumn[Event](title="NOTE", cell=_note, gives_way=True),
)


async def stop_text(cli: Cli, api: "GatewayClient | LocalApi", job_id: str) -> str:
    """What a soft cancel did, and when the job is ended if its holder does not stop before.

    A second cancel does not extend the time that the first one gave.
    """
    from trellis.api.jobs import WholeJob

    due_at: datetime | None = None
    with suppress(TrellisError):  # who may cancel a job may not be allowed to read it
        read = await api.jobs.get(job_id)
        due = read.job.cancel_due_at if isinstance(read, WholeJob) else read.cancel_due_at
        due_at = datetime.fromisoformat(due) if isinstance(due, str) else due
    if due_at is None:
        return "was asked to stop; it is ended after its grace period if it does not"
    left_s = (due_at - await cli.ledger_time(api)).total_seconds()
    after = f"in {duration(math.ceil(left_s))}" if left_s > 0 else "by the next sweep"
    return f"was asked to stop; it is ended {after} if it does not"

"""`trellis schedules`: when agents run and jobs are submitted by themselves; add, pause, run and remove those of jobs."""

from datetime import datetime
from typing import Annotated
from zoneinfo import ZoneInfo

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.http.operation_shapes import ScheduleDetail, ScheduleShape

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of a schedule of jobs.")]


def add_to(program: typer.Typer) -> None:
    schedules = group(
        program,
        "schedules",
        section="Jobs",
        help_="When agents run and jobs are submitted by themselves.",
        lists=True,
    )
    command(schedules, "list", gateway=True)(list_schedules)
    command(schedules, "show", gateway=True)(show)
    command(schedules, "add", gateway=True)(add)
    command(schedules, "pause", gateway=True)(pause)
    command(schedules, "resume", gateway=True)(resume)
    command(schedules, "run", gateway=True)(run)
    command(schedules, "remove", gateway=True)(remove)


async def list_schedules(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List what runs by itself, agents and jobs, with the next and the last time.

    An agent's file declares its schedule as `triggers.cron`, in UTC; `trellis up` registers it within half a minute. An application
    declares one with `@app.periodic`, and `trellis schedules add` adds one. Where the last instant began nothing it says why.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        schedules = (await api.schedules.list()).items[:wanted]
    columns = [
        ListingColumn[ScheduleShape](title="NAME", cell=lambda row: row.name),
        ListingColumn[ScheduleShape](title="STARTS", cell=_target),
        ListingColumn[ScheduleShape](title="CRON", cell=_cron),
        ListingColumn[ScheduleShape](title="NEXT", cell=_next),
        ListingColumn[ScheduleShape](title="LAST", cell=lambda row: _moment(row.last_at)),
        ListingColumn[ScheduleShape](title="BEGAN", cell=_last, gives_way=True),
    ]
    empty = "No schedules. `trellis schedules add` makes one; an agent declares one as `triggers.cron`."
    cli.out.listing(schedules, columns, empty=empty)


async def show(cli: Cli, name: NameArgument) -> None:
    """Show a schedule of jobs: what it submits, its policies, and when its next five instants fire."""
    async with cli.api() as api:
        _print(cli, await api.schedules.get(name))


async def add(  # noqa: PLR0917 - the options of a command
    cli: Cli,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name: a-z 0-9 . _ -, at most 64.")],
    cron: Annotated[str, typer.Option("--cron", metavar="CRON", help="Minute hour day month weekday, as in cron.")],
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Kyiv.")] = "UTC",
    type_: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="The type of its jobs.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Or their topic on the bus.")] = None,
    payload: Annotated[str | None, typer.Option("--payload", metavar="JSON", help="The payload of its jobs.")] = None,
    misfire: Annotated[
        str, typer.Option("--misfire", metavar="POLICY", help="Instants that were missed: skip, once or all.")
    ] = "once",
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="POLICY", help="While the job before runs: allow, skip or queue.")
    ] = "allow",
    jitter: Annotated[
        float, typer.Option("--jitter", metavar="SECONDS", help="Fire up to so much later, the same for all.")
    ] = 0.0,
    concurrency_key: Annotated[
        str | None, typer.Option("--concurrency-key", metavar="KEY", help="The concurrency key of its jobs.")
    ] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Fire nothing until it is resumed.")] = False,  # noqa: FBT002 - a flag
    reason: ReasonOption = None,
) -> None:
    """Add a schedule: a job of a type, or on a topic, at every instant of a cron expression.

    Workers and `trellis up` fire it, each instant once. Adding the same again changes nothing.
    """
    body = None if payload is None else values.payload(type_ or topic or name, payload)
    async with cli.api() as api:
        schedule = await api.schedules.add(
            name,
            cron=cron,
            tz=tz,
            type_=type_,
            topic=topic,
            payload=body,
            concurrency_key=concurrency_key,
            misfire=misfire,
            overlap=overlap,
            jitter_s=jitter,
            paused=paused,
            reason=reason,
        )
    _print(cli, schedule)


async def pause(cli: Cli, name: NameArgument, reason: ReasonOption = None) -> None:
    """Fire no instant of a schedule of jobs until it is resumed."""
    async with cli.api() as api:
        schedule = await api.schedules.pause(name, reason=reason)
    cli.out.answer({"name": schedule.name, "paused": schedule.paused}, f"{schedule.name} is paused")


async def resume(cli: Cli, name: NameArgument, reason: ReasonOption = None) -> None:
    """Fire a schedule of jobs again, from now on; instants of the pause are not made up for."""
    async with cli.api() as api:
        schedule = await api.schedules.resume(name, reason=reason)
    line = f"{schedule.name} fires next at {_moment(schedule.next_at)}"
    cli.out.answer({"name": schedule.name, "paused": schedule.paused}, line)


async def run(cli: Cli, name: NameArgument) -> None:
    """Submit the job of a schedule now, whether it is paused or not."""
    async with cli.api() as api:
        ran = await api.schedules.run(name)
    cli.out.answer({"name": ran.name, "job_id": ran.job_id}, ran.job_id)


async def remove(cli: Cli, name: NameArgument, reason: ReasonOption = None) -> None:
    """Remove a schedule of jobs; the jobs that it submitted stay."""
    async with cli.api() as api:
        removed = await api.schedules.remove(name, reason=reason)
    cli.out.answer({"name": removed.name}, f"{removed.name} is removed")


def _print(cli: Cli, schedule: ScheduleDetail) -> None:
    if cli.out.as_json:
        cli.out.record(schedule.model_dump(mode="json"))
        return
    target = f"a job of type {schedule.type}" if schedule.type else f"a job on topic {schedule.topic}"
    state = "paused" if schedule.paused else "active"
    jitter = f", jitter {schedule.jitter_s:g} s" if schedule.jitter_s else ""
    cli.out.line(f"{schedule.name} ({state}) submits {target} at {schedule.cron} ({schedule.tz})")
    cli.out.line(f"misfire {schedule.misfire}, overlap {schedule.overlap}{jitter}; owner {schedule.owner}")
    if schedule.last_at is not None:
        cli.out.line(f"last {_moment(schedule.last_at)}: {_last(schedule)}")
    for at in schedule.next:
        there = "" if schedule.tz == "UTC" else f"  ({at.astimezone(ZoneInfo(schedule.tz)):%Y-%m-%d %H:%M} there)"
        cli.out.line(f"  {_moment(at)}{there}")


def _target(row: ScheduleShape) -> str:
    return f"agent {row.agent}" if row.agent else f"job {row.type}" if row.type else f"topic {row.topic}"


def _cron(row: ScheduleShape) -> str:
    return (row.cron or "") + ("" if row.tz == "UTC" else f" {row.tz}")


def _next(row: ScheduleShape) -> Text:
    return Text("paused", "bold red") if row.paused else Text(_moment(row.next_at))


def _moment(at: datetime | None) -> str:
    return "" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def _last(row: ScheduleShape) -> Text:
    began = row.last_run or row.last_job
    if row.skipped:
        return Text(f"skipped: {row.skipped}", "yellow")
    return Text(began or "")

"""`trellis queues`: job counts per type; pause and resume a type."""

from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.engine.text import duration
from trellis.http.operation_shapes import QueueShape

ForceOption = Annotated[bool, typer.Option("--force", help="Also if no job of the type was ever seen.")]
TypeArgument = Annotated[str, typer.Argument(metavar="TYPE", help="The job type.")]


def add_to(program: typer.Typer) -> None:
    queues = group(
        program, "queues", section="Queues", help_="Depth of each job type; pause and resume one.", lists=True
    )
    command(queues, "list", gateway=True)(list_queues)
    command(queues, "pause", gateway=True)(pause)
    command(queues, "resume", gateway=True)(resume)


async def list_queues(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """Count the jobs of each type and lifecycle: ready, scheduled, blocked by a key, and held by workers."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        queues = (await api.system.queues()).items
    cli.out.listing(queues[:wanted], COLUMNS, empty="No job waits and none is held.")


async def pause(
    cli: Cli,
    type_: TypeArgument,
    force: ForceOption = False,  # noqa: FBT002 - a flag
    reason: ReasonOption = None,
) -> None:
    """Pause a job type: no more of its jobs are claimed. Held jobs continue."""
    await _set(cli, type_, paused=True, force=force, reason=reason)


async def resume(
    cli: Cli,
    type_: TypeArgument,
    force: ForceOption = False,  # noqa: FBT002 - a flag
    reason: ReasonOption = None,
) -> None:
    """Resume a job type: its jobs are claimed again."""
    await _set(cli, type_, paused=False, force=force, reason=reason)


async def _set(cli: Cli, type_: str, *, paused: bool, force: bool, reason: str | None) -> None:
    async with cli.api() as api:
        done = await (api.system.pause if paused else api.system.resume)(type_, reason=reason, force=force)
    line = f"{done.type} is {'paused' if done.paused else 'handed out again'}"
    cli.out.answer({"type": done.type, "paused": done.paused}, line)


def _oldest(queue: QueueShape) -> str:
    return "" if queue.oldest_ready_s is None else duration(queue.oldest_ready_s)


def _count(value: int) -> Text:
    return Text(str(value), style="" if value else "dim")


def _status(queue: QueueShape) -> Text:
    return Text("paused", "bold red") if queue.paused else Text("open", "dim")


def _lifecycle(queue: QueueShape) -> Text:
    """The lifecycle, by which two queues of the same type differ; empty if no job tells it, because none is open."""
    is_empty = not (queue.ready or queue.scheduled or queue.blocked or queue.held)
    return Text("" if is_empty else queue.lifecycle, style="dim")


def _rate(queue: QueueShape) -> str:
    of_type = "" if queue.rate_limit is None else f"{queue.rate_limit:g}/s"
    per_key = "" if queue.rate_per_key is None else f"{queue.rate_per_key:g}/s per key"
    return ", ".join(part for part in (of_type, per_key) if part)


COLUMNS = (
    ListingColumn[QueueShape](title="TYPE", cell=lambda queue: queue.type, gives_way=True),
    ListingColumn[QueueShape](title="LIFECYCLE", cell=_lifecycle),
    ListingColumn[QueueShape](title="READY", cell=lambda queue: _count(queue.ready), right=True),
    ListingColumn[QueueShape](title="OLDEST", cell=_oldest, right=True),
    ListingColumn[QueueShape](title="SCHEDULED", cell=lambda queue: _count(queue.scheduled), right=True),
    ListingColumn[QueueShape](title="BLOCKED", cell=lambda queue: _count(queue.blocked), right=True),
    ListingColumn[QueueShape](title="HELD", cell=lambda queue: _count(queue.held), right=True),
    ListingColumn[QueueShape](title="STATUS", cell=_status),
    ListingColumn[QueueShape](title="RATE LIMIT", cell=_rate),
)

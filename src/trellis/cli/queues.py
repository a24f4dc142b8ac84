"""`trellis queues`: job counts per type; pause and resume a type."""

from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.engine.errors import Refused
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, QueueDepth
from trellis.operations.explain import duration, served_types
from trellis.worker.app import checked_type

ForceOption = Annotated[bool, typer.Option("--force", help="Also when nothing of the type was seen yet.")]
TypeArgument = Annotated[str, typer.Argument(metavar="TYPE", help="The job type.")]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    queues = group(
        program, "queues", section="Queues", help_="Depth of each job type; pause and resume one.", lists=True
    )
    command(queues, "list")(list_queues)
    command(queues, "pause")(pause)
    command(queues, "resume")(resume)


async def list_queues(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """How many jobs of each type wait, rest, are parked and are held."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        found = await ledger.queues()
    cli.out.listing(found[:wanted], COLUMNS, empty="No job waits and none is held.")


async def pause(
    cli: Cli,
    type_: TypeArgument,
    force: ForceOption = False,  # noqa: FBT002 - a flag
    reason: ReasonOption = None,
) -> None:
    """Stop handing out a type; what is held goes on."""
    await _set(cli, type_, paused=True, force=force, reason=reason)


async def resume(
    cli: Cli,
    type_: TypeArgument,
    force: ForceOption = False,  # noqa: FBT002 - a flag
    reason: ReasonOption = None,
) -> None:
    """Hand out a type again."""
    await _set(cli, type_, paused=False, force=force, reason=reason)


async def _set(cli: Cli, type_: str, *, paused: bool, force: bool, reason: str | None) -> None:
    async with cli.connect(operator=True) as trellis:
        if not force:
            await _refuse_unknown(trellis.ledger, checked_type(type_))
        await (trellis.pause if paused else trellis.resume)(checked_type(type_), reason=reason)
    if cli.out.as_json:
        cli.out.record({"type": type_, "paused": paused})
    else:
        cli.out.line(f"{type_} is {'paused' if paused else 'handed out again'}")


async def _refuse_unknown(ledger: Ledger, type_: str) -> None:
    """Raise for an unknown type: pausing a mistyped name would leave the intended one running."""
    known = {queue.type for queue in await ledger.queues()}
    known |= {served for worker in await ledger.workers() for served in served_types(worker)}
    if type_ in known or (await ledger.jobs(JobFilter(type=type_), limit=1)).jobs:
        return
    near = values.nearest(type_, known)
    hint = f"did you mean {near}?" if near else "`trellis queues` lists those that are."
    raise Refused(
        detail=f"Type {type_!r} is not known here: nothing of it was submitted and no worker serves it; {hint}"
        " --force does it all the same, before its first job."
    )


def _oldest(queue: QueueDepth) -> str:
    return "" if queue.oldest_ready_s is None else duration(queue.oldest_ready_s)


def _count(value: int) -> Text:
    return Text(str(value), style="" if value else "dim")


def _status(queue: QueueDepth) -> Text:
    return Text("paused", "bold red") if queue.paused else Text("open", "dim")


def _rate(queue: QueueDepth) -> str:
    return "" if queue.rate_limit is None else f"{queue.rate_limit:g}/s"


COLUMNS = (
    ListingColumn[QueueDepth](title="TYPE", cell=lambda queue: queue.type, gives_way=True),
    ListingColumn[QueueDepth](title="READY", cell=lambda queue: _count(queue.ready), right=True),
    ListingColumn[QueueDepth](title="OLDEST", cell=_oldest, right=True),
    ListingColumn[QueueDepth](title="RESTING", cell=lambda queue: _count(queue.resting), right=True),
    ListingColumn[QueueDepth](title="PARKED", cell=lambda queue: _count(queue.parked), right=True),
    ListingColumn[QueueDepth](title="HELD", cell=lambda queue: _count(queue.held), right=True),
    ListingColumn[QueueDepth](title="STATUS", cell=_status),
    ListingColumn[QueueDepth](title="RATE LIMIT", cell=_rate),
)

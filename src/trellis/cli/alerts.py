"""`trellis alerts`: what needs an operator."""

from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LimitOption, command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, RecordColumn
from trellis.engine.alerts import ALERTS_MAX
from trellis.engine.text import duration
from trellis.http.operation_shapes import AlertShape
from trellis.operations.alerts import runbook_of
from trellis.operations.runbooks import runbook_names, runbook_title

OpenOption = Annotated[bool, typer.Option("--open", help="Only alerts that are open.")]
STYLES = {"open": "red", "resolved": "dim"}


def add_to(program: typer.Typer) -> None:
    help_ = "What needs an operator: list alerts, print the page that helps."
    commands = group(program, "alerts", section="Ledger", help_=help_, lists=True)
    command(commands, "list", gateway=True)(list_alerts)
    command(commands, "runbook")(print_runbook)


async def list_alerts(cli: Cli, only_open: OpenOption = False, limit: LimitOption = LIMIT_DEFAULT) -> None:  # noqa: FBT002 - a flag
    """List what needs an operator: open alerts, then those resolved lately.

    A process with the role `alerts` of `trellis up` raises and resolves them. The command in the last column prints the page that
    helps.
    """
    wanted = values.limit(limit, ALERTS_MAX)
    async with cli.api() as api:
        page = await api.system.alerts(only_open=only_open, limit=wanted)
        now = await cli.ledger_time(api)
    cli.out.listing(page.items, COLUMNS, empty="No alert is open, and none was resolved lately.")
    if not page.evaluated:
        cli.out.note(_unwatched(page.evaluated_at, now))


def _unwatched(evaluated_at: str | None, now: datetime) -> str:
    """What to say if nobody evaluates alerts now."""
    until_then = "`trellis up` does, in its role alerts. Until then none is raised"
    if evaluated_at is None:
        return f"Nobody has looked for alerts on this ledger yet: {until_then}."
    ago = duration((now - datetime.fromisoformat(evaluated_at)).total_seconds())
    return f"Nobody looks for alerts on this ledger now, and the last one did {ago} ago: {until_then} or resolved."


def print_runbook(
    cli: Cli,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The runbook, or the alert; without it, all names.")
    ] = None,
) -> None:
    """Print the page of an alert or of an alerting rule, with the commands that help; without a name, list the pages."""
    if name is None:
        cli.out.listing([{"name": one, "title": runbook_title(one)} for one in runbook_names()], PAGES, empty="")
    else:
        page, text = runbook_of(name)
        cli.out.answer({"name": page, "text": text}, text.rstrip())


PAGES = (
    RecordColumn(title="RUNBOOK", cell=lambda page: page["name"]),
    RecordColumn(title="ABOUT", cell=lambda page: page["title"]),
)
COLUMNS = (
    ListingColumn[AlertShape](title="ALERT", cell=lambda alert: alert.name),
    ListingColumn[AlertShape](title="STATUS", cell=lambda alert: Text(alert.state, style=STYLES[alert.state])),
    ListingColumn[AlertShape](title="SINCE", cell=lambda alert: alert.raised_at),
    ListingColumn[AlertShape](title="WHAT", cell=lambda alert: alert.text, wraps=True),
    ListingColumn[AlertShape](title="RUNBOOK", cell=lambda alert: alert.runbook),
)

"""`trellis alerts`: what needs an operator."""

from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.engine.alerts import ALERTS_MAX
from trellis.http.operation_shapes import AlertShape

OpenOption = Annotated[bool, typer.Option("--open", help="Only alerts that are open.")]
STYLES = {"open": "red", "resolved": "dim"}


def add_to(program: typer.Typer) -> None:
    """Put this command into the program."""
    command(program, "alerts", section="Ledger", gateway=True)(alerts)


async def alerts(cli: Cli, only_open: OpenOption = False, limit: LimitOption = LIMIT_DEFAULT) -> None:  # noqa: FBT002 - a flag
    """List what needs an operator: open alerts, then those resolved lately.

    A process with the role `alerts` of `trellis up` raises and resolves them. The page in the last column of --json has the commands
    that help.
    """
    wanted = values.limit(limit, ALERTS_MAX)
    async with cli.api() as api:
        shown = (await api.system.alerts(only_open=only_open, limit=wanted)).items
    cli.out.listing(shown, COLUMNS, empty="No alert is open, and none was resolved lately.")


COLUMNS = (
    ListingColumn[AlertShape](title="ALERT", cell=lambda alert: alert.name),
    ListingColumn[AlertShape](title="STATUS", cell=lambda alert: Text(alert.state, style=STYLES[alert.state])),
    ListingColumn[AlertShape](title="SINCE", cell=lambda alert: alert.raised_at),
    ListingColumn[AlertShape](title="WHAT", cell=lambda alert: alert.text, wraps=True),
    ListingColumn[AlertShape](title="RUNBOOK", cell=lambda alert: alert.runbook),
)

"""`trellis slo`: the service level objectives, and whether each is met."""

import typer
from rich.text import Text

from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.http.operation_shapes import SloShape
from trellis.operations.slo import window_text

STYLES = {"met": "green", "missed": "bold red", "no data": "dim"}


def add_to(program: typer.Typer) -> None:
    command(program, "slo", section="Ledger", gateway=True)(slo)


async def slo(cli: Cli) -> None:
    """Show the service level objectives, and whether each is met.

    Measured from what the ledger has stored over the window of each. BUDGET is the part of the error budget that is left; below 0 it
    is overspent. A `+` behind the samples: the window has more, and these are the newest.
    """
    async with cli.api() as api:
        measurements = (await api.system.slo()).items
    cli.out.listing(measurements, COLUMNS, empty="There is no objective.")


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{100 * value:.4g} %" if unit == "ratio" else f"{value:.3g} s"


def _target(one: SloShape) -> str:
    return f"{'>' if one.goal == 'above' else '<'} {_amount(one.target, one.unit)}"


def _budget(one: SloShape) -> Text:
    left = one.error_budget_left
    return Text("" if left is None else f"{100 * left:.0f} %", style="red" if left is not None and left <= 0 else "")


COLUMNS = (
    ListingColumn[SloShape](title="OBJECTIVE", cell=lambda one: one.title),
    ListingColumn[SloShape](title="STATUS", cell=lambda one: Text(one.status, STYLES[one.status])),
    ListingColumn[SloShape](title="VALUE", cell=lambda one: _amount(one.value, one.unit), right=True),
    ListingColumn[SloShape](title="TARGET", cell=_target, right=True),
    ListingColumn[SloShape](title="BUDGET", cell=_budget, right=True),
    ListingColumn[SloShape](title="SAMPLES", cell=lambda one: f"{one.samples}{'+' if one.partial else ''}", right=True),
    ListingColumn[SloShape](title="WINDOW", cell=lambda one: window_text(one.window_s), right=True),
    ListingColumn[SloShape](title="COUNTS", cell=lambda one: one.counts, wraps=True),
)

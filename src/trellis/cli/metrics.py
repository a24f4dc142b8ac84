"""`trellis metrics`: what the ledger shows to Prometheus, and the dashboard and rules for it."""

import json
from typing import Annotated

import typer

from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.engine.errors import OptionInvalid

GrafanaOption = Annotated[bool, typer.Option("--grafana", help="Print the Grafana dashboard instead, as JSON.")]
ReferenceOption = Annotated[bool, typer.Option("--reference", help="Print the list of all metrics instead.")]
RulesOption = Annotated[bool, typer.Option("--rules", help="Print the Prometheus alerting rules instead, as YAML.")]

RunbooksOption = Annotated[
    str | None,
    typer.Option("--runbooks", metavar="URL", help="With --rules: where the pages of docs/runbooks can be read."),
]


def add_to(program: typer.Typer) -> None:
    command(program, "metrics", section="Ledger", gateway=True)(metrics)


async def metrics(
    cli: Cli,
    grafana: GrafanaOption = False,  # noqa: FBT002 - a flag
    rules: RulesOption = False,  # noqa: FBT002 - a flag
    reference: ReferenceOption = False,  # noqa: FBT002 - a flag
    runbooks: RunbooksOption = None,
) -> None:
    """Print the ledger's metrics in Prometheus' text format: queues, ages, workers, followers.

    With --gateway, what the gateway's process has counted, too. Counters of every other role and worker are at `/metrics` of their
    address in TRELLIS_HEALTH_ADDRESS.
    """
    if grafana + rules + reference > 1:
        raise OptionInvalid(option="--grafana", value=True, expected="only one of --grafana, --rules and --reference")
    if runbooks is not None and (not rules or not runbooks.startswith(("https://", "http://"))):
        raise OptionInvalid(option="--runbooks", value=runbooks, expected="an https:// address, together with --rules")
    if grafana or rules or reference:
        from trellis.operations import dashboards

        text = dashboards.reference() if reference else dashboards.alerting_rules_text(runbooks)
        typer.echo(json.dumps(dashboards.grafana_dashboard(), indent=2) + "\n" if grafana else text, nl=False)
        return
    async with cli.api() as api:
        typer.echo(await api.system.metrics(), nl=False)

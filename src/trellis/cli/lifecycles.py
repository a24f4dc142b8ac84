"""`trellis lifecycles`: the declared states and transitions, as tables or Mermaid."""

from typing import Annotated

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, as_record, state_text
from trellis.engine.errors import OptionInvalid
from trellis.lifecycles import LIFECYCLES, Lifecycle
from trellis.lifecycles.describe import StateLine, TransitionLine, describe, mermaid


def add_to(program: typer.Typer) -> None:
    command(program, "lifecycles", section="Reference")(lifecycles)


def lifecycles(
    cli: Cli,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one, in full.")] = None,
    mermaid_: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid state diagram.")] = False,  # noqa: FBT002
    limit: LimitOption = LIMIT_DEFAULT,
) -> None:
    """Show what may happen to a job: states and transitions."""
    wanted = values.limit(limit, LIMIT_MAX)
    chosen = values.lifecycle(name)
    if chosen is None:
        if mermaid_:
            raise OptionInvalid(option="NAME", value=None, expected=f"name one of {', '.join(LIFECYCLES)}")
        _list(cli, wanted)
        return
    lifecycle = LIFECYCLES[chosen]
    if mermaid_:
        cli.out.line(mermaid(lifecycle).rstrip("\n"))
    else:
        _describe(cli, lifecycle)


def _list(cli: Cli, wanted: int) -> None:
    lifecycles = list(LIFECYCLES.values())[:wanted]
    if cli.out.as_json:
        for lifecycle in lifecycles:
            cli.out.record({"name": lifecycle.name, "title": lifecycle.title, "states": list(lifecycle.by_name)})
        return
    columns = [
        ListingColumn[Lifecycle](title="NAME", cell=lambda one: one.name),
        ListingColumn[Lifecycle](title="WHAT", cell=lambda one: one.title, wraps=True),
        ListingColumn[Lifecycle](title="STATES", cell=_states, wraps=True),
    ]
    cli.out.listing(lifecycles, columns, empty="")


def _states(lifecycle: Lifecycle) -> Text:
    return Text(" ").join(state_text(lifecycle.name, state) for state in lifecycle.by_name)


def _describe(cli: Cli, lifecycle: Lifecycle) -> None:
    document = describe(lifecycle)
    if cli.out.as_json:
        states, transitions = [as_record(s) for s in document.states], [as_record(t) for t in document.transitions]
        cli.out.record({**as_record(document), "states": states, "transitions": transitions})
        return
    cli.out.line(f"{document.name}: {document.title}", style="bold")
    cli.out.line(f"version {document.version}, swept by {document.swept_by}\n", style="dim")
    cli.out.listing(document.states, _state_columns(lifecycle), empty="")
    cli.out.line()
    cli.out.listing(document.transitions, TRANSITION_COLUMNS, empty="")


def _state_columns(lifecycle: Lifecycle) -> list[ListingColumn[StateLine]]:
    return [
        ListingColumn(title="STATE", cell=lambda line: state_text(lifecycle.name, line.state)),
        ListingColumn(title="PHASE", cell=lambda line: line.phase.value),
        ListingColumn(title="RANK", cell=lambda line: line.rank, right=True),
        ListingColumn(title="NOTES", cell=lambda line: line.notes, wraps=True),
    ]


TRANSITION_COLUMNS = (
    ListingColumn[TransitionLine](title="FROM", cell=lambda line: line.source),
    ListingColumn[TransitionLine](title="TO", cell=lambda line: line.target),
    ListingColumn[TransitionLine](title="TRIGGER", cell=lambda line: line.trigger),
    ListingColumn[TransitionLine](title="WHO: WHEN", cell=lambda line: f"{line.who}: {line.when}", wraps=True),
)

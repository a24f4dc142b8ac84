"""The program: every command under its heading, and what happens when the command line itself is wrong."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version as installed_version
from types import MappingProxyType
from typing import Annotated

import typer

from trellis.cli.commands import DataOption, DebugOption, LedgerOption, Sections

PROGRAM = "trellis"
PACKAGE = "trellis-engine"
VERSION = "--version"
COMPLETING = "_TRELLIS_COMPLETE"
"""Set by a shell that asks how a line may go on."""

NOUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "init": ("init",),
        "demo": ("demo",),
        "agents": ("agents",),
        "runs": ("run", "runs"),
        "proposals": ("proposals",),
        "artifacts": ("artifacts",),
        "memory": ("memory",),
        "schedules": ("schedules",),
        "submitting": ("submit",),
        "jobs": ("jobs", "job"),
        "policy": ("policy",),
        "events": ("events",),
        "queues": ("queues",),
        "dlq": ("dlq",),
        "workers": ("worker", "workers"),
        "up": ("up",),
        "waiting": ("wait",),
        "ledgers": ("migrate", "verify", "sweep", "followers", "doctor", "version"),
        "rebuild": ("rebuild",),
        "tokens": ("token",),
        "lifecycles": ("lifecycles",),
        "completion": ("completion",),
    }
)
"""Which module brings which commands, in the order in which help lists them. Only the one that is asked for is imported: that is
half of the time a command takes.
"""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - the shape of a callback
    if wanted:
        typer.echo(f"{PROGRAM} {installed_version(PACKAGE)}")
        raise typer.Exit


def root(
    ctx: typer.Context,
    ledger: LedgerOption = None,
    data: DataOption = None,
    debug: DebugOption = False,  # noqa: FBT002 - a flag of the command line
    version: Annotated[  # noqa: ARG001, FBT002 - its callback has done the work
        bool, typer.Option(VERSION, is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Trellis: durable background jobs and AI agents, on SQLite or PostgreSQL.

    Every command takes --ledger URL or --data DIR; without them the settings decide (TRELLIS_LEDGER,
    trellis.toml, else sqlite:///trellis.db in this folder). Listings take --json and --limit.
    """
    ctx.obj = {"ledger": ledger, "data": data, "debug": debug}


def make_program(word: str | None = None) -> typer.Typer:
    """The program with the command that is called `word`; with all commands when there is none of that name.

    Its version it tells without any.
    """
    program = typer.Typer(
        cls=Sections,
        name=PROGRAM,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    program.callback()(root)
    wanted = [noun for noun, words in NOUNS.items() if word in words]
    for noun in () if word == VERSION else wanted or NOUNS:
        import_module(f"trellis.cli.{noun}").add_to(program)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code of the process."""
    chosen = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETING in os.environ:
        from trellis.cli.completion import prepare

        prepare()
    try:
        program = typer.main.get_command(make_program(chosen[0] if chosen else None))
        answer = program.main(args=chosen, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        return _misused(error)
    except typer.Abort:
        from trellis.cli.problems import REFUSED

        typer.echo("stopped: nothing was changed", err=True)
        return REFUSED
    return answer if isinstance(answer, int) else 0


def _misused(error: typer.TyperException) -> int:
    """Help where nothing was asked, else the mistake and where to read about the command."""
    context: typer.Context | None = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
        return 0 if context is None or context.parent is None else error.exit_code
    typer.echo(f"error: {error.format_message()}", err=True)
    if context is not None:
        typer.echo(f"  → {context.command_path} --help", err=True)
    return error.exit_code

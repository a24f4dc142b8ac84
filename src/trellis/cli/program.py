"""The program: every command under its heading, and the handling of command line mistakes."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from trellis.cli.commands import DataOption, DebugOption, LedgerOption
from trellis.cli.places import ON_THIS_MACHINE, PROGRAM

VERSION = "--version"
COMPLETING = "_TRELLIS_COMPLETE"
"""Set by a shell that requests completion."""

LISTED: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "init": ("init", "Begin", "Make an embedded instance in this folder, or in the folder of --data."),
        "demo": ("demo", "Begin", "Run an agent from trigger to proposals that wait for your decision."),
        "run": ("runs", "Agents", "Start a run of an agent."),
        "agents": ("agents", "Agents", "The agents: make one, let it run, or stop it."),
        "runs": ("runs", "Agents", "Runs of agents: list, show, cancel."),
        "proposals": ("proposals", "Agents", "Proposals of agents: list, show, approve, reject."),
        "artifacts": ("artifacts", "Agents", "Artifacts of queue jobs: list, show, download, discard, clean up."),
        "memory": ("memory", "Agents", "Memory of agents: list, read, history, diff, export, import."),
        "mcp": ("mcp", "Agents", "Serve runs, proposals and jobs as tools for an MCP client, on..."),
        "submit": ("submit", "Jobs", "Submit one job and print its id."),
        "batch": ("batch", "Jobs", "Submit the jobs of a file, and one that starts when all have ended."),
        "jobs": ("jobs", "Jobs", "Jobs: list them; cancel, discard, run now or prioritize many."),
        "events": ("events", "Jobs", "Show events, of one job or of all, oldest first."),
        "schedules": ("schedules", "Jobs", "When agents run and jobs are submitted by themselves."),
        "job": ("jobs", "Jobs", "Show, explain, wait for, change, requeue or decide about one job."),
        "policy": ("policy", "Jobs", "The safety policy: check, explain, simulate."),
        "queues": ("queues", "Queues", "Depth of each job type; pause and resume one."),
        "dlq": ("dlq", "Queues", "Dead letters: list, show, requeue."),
        "worker": ("workers", "Workers", "Run the jobs of an application until stopped."),
        "workers": ("workers", "Workers", "List worker processes seen lately: alive, silent since when, or drained."),
        "up": ("up", "Workers", "Serve the gateway and run the services of an instance until stopped."),
        "health": ("health", "Workers", "Ask a process of this machine whether it is ready; exit 1 if not."),
        "wait": ("wait", "Workers", "Wait until the gateway of `trellis up` answers, and print its address."),
        "migrate": ("ledgers", "Ledger", "Make the ledger, or bring it to this program's schema."),
        "verify": ("ledgers", "Ledger", "Check every job's history against its lifecycle and its row."),
        "audit": ("audit", "Ledger", "The sealed audit records: check them, print the newest block."),
        "retention": ("retention", "Ledger", "What is kept of ended jobs: see what would go, let it go now."),
        "sweep": ("ledgers", "Ledger", "Run the sweeper once."),
        "doctor": ("ledgers", "Ledger", "Check this installation and its ledger, and print what is wrong and..."),
        "backup": ("backup", "Ledger", "Save an embedded instance into one file while it runs."),
        "restore": ("backup", "Ledger", "Make the instance of a backup again, in this folder or in the folder..."),
        "move": ("move", "Ledger", "Move an embedded instance to PostgreSQL and S3, with nothing lost."),
        "rebuild": ("rebuild", "Ledger", "Rebuild a lost ledger or object store from the other one."),
        "metrics": ("metrics", "Ledger", "Print the ledger's metrics in Prometheus' text format: queues, ages,..."),
        "alerts": ("alerts", "Ledger", "What needs an operator: list alerts, print the page that helps."),
        "slo": ("slo", "Ledger", "Show the service level objectives, and whether each is met."),
        "followers": ("ledgers", "Ledger", "Subscribers of the event feed, and how far each is behind."),
        "token": ("tokens", "Ledger", "Access tokens: issue one, make a key, record an issuer."),
        "version": ("ledgers", "Reference", "Print the versions of the program and of its libraries."),
        "lifecycles": ("lifecycles", "Reference", "Show what may happen to a job: states and transitions."),
        "authority": ("authority", "Reference", "Show which role may do what."),
        "completion": (
            "completion",
            "Reference",
            "Print the script that makes your shell complete `trellis` commands.",
        ),
    }
)
"""Every command, in the order of the help: its module, its heading, and its line in the help.

Only the module of the requested command is imported, which halves a command's start time; the program's help imports
none. A test compares the headings and lines with the commands.
"""

GATEWAY = "--gateway"


@cache
def commands_of(module: str) -> Mapping[str, Any]:
    """The commands that a module puts into a program with its `add_to`, by name.

    They are made once in a process: `main` may be called many times.
    """
    part = typer.Typer(rich_markup_mode=None)
    import_module(f"trellis.cli.{module}").add_to(part)
    return typer.main.get_group(part).commands


class Commands(Mapping[str, Any]):
    """The commands by name. The module of a command is imported on first access."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made |= commands_of(LISTED[name][0])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    def __len__(self) -> int:
        return len(LISTED)


class RootOption(TyperOption):
    """An option of the program itself, whose type is built only when the option is given.

    The library builds it to convert even a missing value, and loads pydantic for that: over a quarter of the time of help.
    """

    def process_value(self, ctx: Any, value: Any) -> Any:
        """The converted value. None, the value of an option that is not given, stays None."""
        if value is not None or self.required or self.multiple or self.nargs != 1:
            return super().process_value(ctx, value)
        return None if self.callback is None else self.callback(ctx, self, None)


class Program(TyperGroup):
    """The program. Its help lists the commands under headings, in the order in which a user meets them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = Commands()  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the program, --help among them, as `RootOption`: the library lets nobody choose their class."""
        options = super().get_params(ctx)
        for option in options:
            if type(option) is TyperOption:
                option.__class__ = RootOption
        return options

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the library's signature
        """The names of the commands."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        """Write one list per heading."""
        for heading, names in groupby(LISTED, lambda name: LISTED[name][1]):
            with formatter.section(heading):
                formatter.write_dl([(name, LISTED[name][2]) for name in names])


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - the shape of a callback
    if wanted:
        from trellis.engine.extras import program_version

        typer.echo(f"{PROGRAM} {program_version()}")
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


def make_program() -> typer.Typer:
    """The program with all its commands."""
    program = typer.Typer(
        cls=Program,
        name=PROGRAM,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    program.callback()(root)
    return program


@cache
def _root_command() -> Any:
    """The program as the library runs it, made once in a process."""
    return typer.main.get_command(make_program())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code of the process."""
    chosen = list(sys.argv[1:] if arguments is None else arguments)
    if COMPLETING in os.environ:
        from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

        completion_init()
    try:
        answer = _root_command().main(args=chosen, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        return _misused(error)
    except typer.Abort:
        from trellis.cli.problems import REFUSED

        typer.echo("stopped: nothing was changed", err=True)
        return REFUSED
    return answer if isinstance(answer, int) else 0


def _misused(error: typer.TyperException) -> int:
    """Print the help if nothing was given, otherwise the mistake and where to read about the command."""
    context: typer.Context | None = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
        return 0 if context is None or context.parent is None else error.exit_code
    if context is not None and getattr(error, "option_name", None) == GATEWAY:
        _explain_no_gateway(context)
        return error.exit_code
    typer.echo(f"error: {error.format_message()}", err=True)
    if context is not None:
        typer.echo(f"  → {context.command_path} --help", err=True)
    return error.exit_code


def _explain_no_gateway(context: typer.Context) -> None:
    """Print why this command takes no --gateway, and what to do instead."""
    path = context.command_path.removeprefix(PROGRAM).strip()
    below: Mapping[str, Any] = {} if context.parent is None else getattr(context.command, "commands", {})
    paths = [f"{path} {name}" for name in below] or [path]
    if all(one in ON_THIS_MACHINE for one in paths):
        known = ON_THIS_MACHINE[paths[0]]
        message, remedy = f"`{PROGRAM} {path}` takes no {GATEWAY}, because it {known.because}.", known.instead
    else:
        message = f"{GATEWAY} is an option of single commands, not of `{context.command_path}`."
        remedy = f"Give it after the command, such as `{PROGRAM} jobs {GATEWAY} URL`, or set TRELLIS_GATEWAY."
    typer.echo(f"error: {message}\n  → {remedy}", err=True)

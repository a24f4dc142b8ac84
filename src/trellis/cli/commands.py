"""Declares commands: functions that take a `Cli` and their own parameters. The shared options are added here."""

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from trellis.engine.errors import TrellisError

if TYPE_CHECKING:  # imported only when a command runs: printing the version does not need the engine
    from trellis.cli.invocation import Cli

PIPE_CLOSED = 141
"""128 + SIGPIPE: the reader closed the pipe."""
LIMIT_DEFAULT = 50
LIMIT_MAX = 1_000_000

LedgerOption = Annotated[
    str | None,
    typer.Option("--ledger", metavar="URL", help="sqlite:///path or postgresql://…; default: from the settings."),
]
DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Use the embedded ledger in this folder.")
]
GatewayOption = Annotated[
    str | None, typer.Option("--gateway", metavar="URL", help="Use this gateway (http://…) and no ledger.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
IdsOption = Annotated[bool, typer.Option("--ids", help="Print the ids alone, one per line.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why, for the audit record.")]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", help="At most this many.")]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
StatusOption = Annotated[str | None, typer.Option("--status", "--state", help="Only jobs of this status.")]
CorrelationOption = Annotated[str | None, typer.Option("--correlation", help="Only those with this correlation id.")]
KeyOption = Annotated[str | None, typer.Option("--concurrency-key", help="Only jobs of this key.")]
ParentOption = Annotated[str | None, typer.Option("--parent", metavar="ID", help="Only jobs that this one caused.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class ListByDefault(TyperGroup):
    """A command group that runs `list` when no verb is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Treat `trellis dlq --json` as `trellis dlq list --json`.

        Shell completion of `trellis dlq` still offers the verbs.
        """
        bare = (not args and not ctx.resilient_parsing) or (bool(args) and args[0][0:1] == "-" and args[0] != "--help")
        return super().parse_args(ctx, ["list", *args] if bare else args)


def group(parent: typer.Typer, name: str, *, section: str, help_: str, lists: bool = False) -> typer.Typer:
    """Add a command group."""
    commands = typer.Typer(
        cls=ListByDefault if lists else TyperGroup, help=help_, rich_markup_mode=None, no_args_is_help=not lists
    )
    parent.add_typer(commands, name=name, rich_help_panel=section)
    return commands


def command(
    parent: typer.Typer,
    name: str,
    *,
    section: str | None = None,
    json: bool = True,
    gateway: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Register `function(cli, …)`, sync or async, as a command; its return value is the exit code.

    `gateway` says that the function asks `cli.api()`, so that it also works with `--gateway`. A parameter that is a
    dataclass stands for options: those of its fields.
    """

    def register(function: FunctionT) -> FunctionT:
        own = list(inspect.signature(function).parameters.values())[1:]
        groups: dict[str, Any] = {one.name: one.annotation for one in own if is_dataclass(one.annotation)}
        shared = {
            "ledger": LedgerOption,
            "data": DataOption,
            **({"gateway": GatewayOption} if gateway else {}),
            **({"json": JsonOption} if json else {}),
            "debug": DebugOption,
        }
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        added = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_default(option))
            for option, kind in shared.items()
        ]
        options = [option for one in own for option in (_options(one.annotation) if one.name in groups else [one])]
        keyword = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

        def invoke(ctx: typer.Context, **given: Any) -> None:
            for parameter, options_ in groups.items():
                given[parameter] = options_(**{one.name: given.pop(one.name) for one in fields(options_)})
            _invoke(function, ctx, given)

        invoke.__doc__ = function.__doc__
        invoke.__signature__ = inspect.Signature([context, *keyword, *added])  # pyright: ignore[reportFunctionMemberAccess]
        parent.command(name, rich_help_panel=section)(invoke)
        return function

    return register


def _options(options: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass of options, as parameters of a command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(one.name, kind, annotation=one.type, default=one.default) for one in fields(options)]


def _default(option: str) -> Any:
    return False if option in {"json", "debug"} else None


def _invoke(function: Callable[..., Any], ctx: typer.Context, given: dict[str, Any]) -> None:
    from trellis.cli.invocation import Cli
    from trellis.cli.output import Output

    above: dict[str, Any] = ctx.find_root().obj or {}
    ledger, data = given.pop("ledger") or above.get("ledger"), given.pop("data") or above.get("data")
    debug = given.pop("debug") or above.get("debug", False)
    gateway = given.pop("gateway", None)
    cli = Cli(ledger=ledger, data=data, gateway=gateway, out=Output(as_json=given.pop("json", False)))
    cli.out.typed = cli.typed
    try:
        code = function(cli, **given)
        if inspect.iscoroutine(code):
            import asyncio

            code = asyncio.run(_finish(code))
    except TrellisError as error:
        if debug:
            traceback.print_exc()
        code = _report(cli, error)
    except BrokenPipeError:
        # The buffered output has no reader; without this the interpreter reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    if code:
        raise typer.Exit(code)


async def _finish(coroutine: Coroutine[Any, Any, int | None]) -> int | None:
    return await coroutine


def _report(cli: "Cli", error: TrellisError) -> int:
    from trellis.cli import problems

    url: str | None = None
    with contextlib.suppress(TrellisError):
        url = cli.url
    error = problems.with_source(error, cli.source_of)
    cli.out.error(problems.without_password(problems.message_for_person(error), url), problems.remedy_for(error))
    return problems.exit_code(error)

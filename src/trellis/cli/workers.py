"""`trellis worker MODULE:APP` runs jobs; `trellis workers` says who does."""

import asyncio
import gc
import importlib
import json as json_
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.invocation import Cli
from trellis.cli.logs import configure_logging
from trellis.cli.output import Column, age
from trellis.engine.records import WorkerSeen
from trellis.operations.explain import is_alive, served_types
from trellis.wiring import process_name, run_worker
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions

SECTION = "Workers"


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "worker", section=SECTION, json=False)(worker)
    command(program, "workers", section=SECTION)(list_workers)


def worker(
    cli: Cli,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the application is: module:attribute.")],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="Handlers at the same time.")
    ] = None,
    prefetch: Annotated[int | None, typer.Option("--prefetch", metavar="N", help="Jobs held beyond those.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads for sync handlers.")] = None,
    drain_s: Annotated[
        str | None, typer.Option("--drain-s", metavar="TIME", help="How long running handlers get to end.")
    ] = None,
    no_hints: Annotated[bool, typer.Option("--no-hints", help="Rely on polling alone.")] = False,  # noqa: FBT002
    name: Annotated[str | None, typer.Option("--name", help="What people see; by default host and process.")] = None,
) -> int:
    """Run the jobs of an application until stopped.

    It ends with SIGTERM or Ctrl-C. The first signal lets running handlers end, the second gives their jobs back at once. Exit code 0: every job
    begun has ended; 75: some were given back; 69: the ledger could not be told some outcomes.
    """
    loaded = load_app(app)
    loaded.check()
    chosen: dict[str, Any] = {
        "concurrency": concurrency,
        "prefetch": prefetch,
        "threads": threads,
        "drain_s": values.seconds("--drain-s", drain_s),
        "hints": False if no_hints else None,
    }
    given = {option: value for option, value in chosen.items() if value is not None}
    options = replace(cli.settings.worker_options(name or process_name("worker")), **given)
    configure_logging(cli.settings)
    _tune_process()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(_work(cli, loaded, options))


async def _work(cli: Cli, app: App, options: WorkerOptions) -> int:
    async with cli.open() as ledger:
        types = ", ".join(spec.type for spec in app)
        cli.out.note(f"{options.name} serves {types}; Ctrl-C drains, twice hurries")
        return await run_worker(app, ledger, options)


def _tune_process() -> None:
    """This process does nothing but run jobs. Its many short-lived values make the collector run often for nothing, and a
    ledger's thread waits for the interpreter while handlers spin: both were measured (docs/benchmarks.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    sys.setswitchinterval(0.0005)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop, where the `fast` extra is installed."""
    try:
        module = importlib.import_module("uvloop")
    except ImportError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", module.new_event_loop)


async def list_workers(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List worker processes seen lately."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        now = await ledger.now()
        found = sorted(await ledger.workers(), key=lambda seen: seen.seen_at, reverse=True)
    cli.out.listing(found[:wanted], _columns(now), empty="No worker was seen.")


def _columns(now: datetime) -> list[Column[WorkerSeen]]:
    def sign(seen: WorkerSeen) -> Text:
        return Text(age(seen.seen_at, now), style="green" if is_alive(seen, now) else "red")

    return [
        Column(title="WORKER", cell=lambda seen: seen.name),
        Column(title="SEEN", cell=sign, right=True),
        Column(title="HELD", cell=lambda seen: str(seen.held), right=True),
        Column(title="ROOM", cell=_concurrency, right=True),
        Column(title="TYPES", cell=lambda seen: ", ".join(served_types(seen)), wraps=True),
    ]


def _concurrency(seen: WorkerSeen) -> str:
    about: Any = json_.loads(seen.info) if seen.info else {}
    return str(cast("dict[str, Any]", about).get("concurrency", "")) if isinstance(about, dict) else ""

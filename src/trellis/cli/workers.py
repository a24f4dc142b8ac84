"""`trellis worker MODULE:APP` runs jobs; `trellis workers` lists worker processes."""

from collections.abc import Coroutine
from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from trellis.app.system import process_name
from trellis.app.wiring import make_worker, open_when_available
from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, command
from trellis.cli.invocation import Cli, refuse_missing
from trellis.cli.long_running import run_tuned, tune_worker
from trellis.cli.metrics_export import process_observed
from trellis.cli.output import ListingColumn, brief
from trellis.cli.telemetry import configure_tracing, log_only
from trellis.cli.up_process import print_health
from trellis.engine.closing import closing
from trellis.engine.errors import OptionInvalid
from trellis.http.operation_shapes import WorkerShape
from trellis.http_server.health import ProcessHealth
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions
from trellis.worker.worker import ExitCode, run_until_signalled

SECTION = "Workers"
LEDGER_ONLY = ("--prefetch", "--no-hints")
BUS_ONLY = ("--pool", "--region", "--capability", "--label", "--heartbeat-s")

ProcessesOption = Annotated[
    int | None, typer.Option("--processes", metavar="N", help="Processes for handlers with runner='process'.")
]
BusOption = Annotated[
    str | None, typer.Option("--bus", metavar="URL", help="Serve topics of this bus (nats://…) instead of a ledger.")
]
PoolOption = Annotated[str | None, typer.Option("--pool", help="On the bus: the worker's pool.")]
RegionOption = Annotated[str | None, typer.Option("--region", help="On the bus: the worker's region.")]
CapabilityOption = Annotated[
    list[str] | None,
    typer.Option("--capability", metavar="WORD", help="On the bus: a capability that jobs may require."),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="On the bus: a label that jobs may select it by."),
]
HeartbeatOption = Annotated[
    str | None, typer.Option("--heartbeat-s", metavar="TIME", help="On the bus: time between heartbeats.")
]


def add_to(program: typer.Typer) -> None:
    command(program, "worker", section=SECTION, json=False)(worker)
    command(program, "workers", section=SECTION, gateway=True)(list_workers)


def worker(
    cli: Cli,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the application is: module:attribute.")],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="How many handlers run at the same time.")
    ] = None,
    prefetch: Annotated[
        int | None, typer.Option("--prefetch", metavar="N", help="How many more jobs are claimed in advance.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads for sync handlers.")] = None,
    drain_s: Annotated[
        str | None,
        typer.Option("--drain-s", metavar="TIME", help="How long running handlers may continue after a stop."),
    ] = None,
    no_hints: Annotated[bool, typer.Option("--no-hints", help="Only poll; do not listen for notifications.")] = False,  # noqa: FBT002
    name: Annotated[str | None, typer.Option("--name", help="The worker's name; default: host and process id.")] = None,
    *,
    processes: ProcessesOption = None,
    bus: BusOption = None,
    pool: PoolOption = None,
    region: RegionOption = None,
    capability: CapabilityOption = None,
    label: LabelOption = None,
    heartbeat_s: HeartbeatOption = None,
) -> int:
    """Run the jobs of an application until stopped.

    With --bus its job types are topics, and their jobs come over the bus. It ends with SIGTERM or Ctrl-C. The first signal lets running handlers end, the second gives their jobs back at once. Exit code 0: every job
    begun has ended; 75: some were given back; 69: the ledger could not be told some outcomes.
    """
    loaded = load_app(app)
    loaded.check()
    drain = values.seconds("--drain-s", drain_s)
    if bus is not None:
        _refuse(LEDGER_ONLY, (prefetch, no_hints), "it is for workers on a ledger; leave it out with --bus")
        from trellis.cli import bus_worker

        own = {"pool": pool, "region": region, "heartbeat_s": values.seconds("--heartbeat-s", heartbeat_s)}
        pools = {"threads": threads, "processes": processes}
        given = {"max_parallel_jobs": concurrency, **pools, "drain_s": drain, **own}
        on_bus = bus_worker.chosen_options(cli.settings, given, capability or (), label or ())
        return _run(cli, bus_worker.run_on_bus(cli, loaded, bus, name, on_bus))
    _refuse(BUS_ONLY, (pool, region, capability, label, heartbeat_s), "it is for workers on the bus; give --bus too")
    cli.require(Role.WORKER, action="run jobs")
    chosen: dict[str, Any] = {
        "concurrency": concurrency,
        "prefetch": prefetch,
        "threads": threads,
        "processes": processes,
        "drain_s": drain,
        "hints": False if no_hints else None,
    }
    given = {option: value for option, value in chosen.items() if value is not None}
    options = replace(cli.settings.worker_options(name or process_name("worker")), **given)
    return _run(cli, _work(cli, loaded, options))


def _refuse(options: tuple[str, ...], given: tuple[object, ...], expected: str) -> None:
    for option, value in zip(options, given, strict=True):
        if value:
            raise OptionInvalid(option=option, value=value, expected=expected)


def _run(cli: Cli, work: Coroutine[Any, Any, int]) -> int:
    log_only(cli.settings, cli.out)
    configure_tracing()
    return run_tuned(work, tune=tune_worker)


async def _work(cli: Cli, app: App, options: WorkerOptions) -> int:
    refuse_missing(cli.url)
    health = ProcessHealth()
    async with process_observed(cli.settings, health) as address:
        print_health(cli, address)
        ledger = await open_when_available(cli.url, part=options.name)
        if ledger is None:
            return ExitCode.DRAINED
        async with closing(ledger):
            health.needs(ledger=ledger.ping)
            types = ", ".join(spec.type for spec in app)
            cli.out.note(
                f"{options.name} serves {types}; Ctrl-C finishes running jobs, then stops; a second Ctrl-C gives them back at once"
            )
            return await run_until_signalled(make_worker(app, ledger, options), on_stop=health.stopping)


async def list_workers(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List worker processes seen lately: alive, silent since when, or drained."""
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.api() as api:
        workers = (await api.system.workers()).items
    cli.out.listing(workers[:wanted], COLUMNS, empty="No worker was seen.")


STYLES = {"alive": "green", "silent": "red", "drained": "dim"}


def _info(seen: WorkerShape) -> dict[str, Any]:
    info: Any = seen.info
    return cast("dict[str, Any]", info) if isinstance(info, dict) else {}


def _state(seen: WorkerShape) -> Text:
    for_ = brief(seen.silent_s)
    presence = {"alive": "alive", "silent": f"silent for {for_}", "drained": f"drained {for_} ago"}[seen.state]
    return Text(presence, style=STYLES[seen.state])


def _types(seen: WorkerShape) -> str:
    info = _info(seen)
    alone = info.get("alone")
    return ", ".join(map(str, info.get("types", ()))) + (f"; runs {alone} alone" if alone else "")


COLUMNS = (
    ListingColumn[WorkerShape](title="WORKER", cell=lambda seen: seen.name),
    ListingColumn[WorkerShape](title="STATUS", cell=_state),
    ListingColumn[WorkerShape](title="HELD", cell=lambda seen: str(seen.held), right=True),
    ListingColumn[WorkerShape](title="ROOM", cell=lambda seen: str(_info(seen).get("concurrency", "")), right=True),
    ListingColumn[WorkerShape](title="TYPES", cell=_types, wraps=True),
)

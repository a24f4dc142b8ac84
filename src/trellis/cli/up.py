"""`trellis up`: the services of an instance, until stopped."""

import asyncio
import random
import signal
from typing import Annotated, Any

import typer

from trellis.cli.commands import command
from trellis.cli.invocation import Cli, make_folder, sqlite_path
from trellis.cli.logs import configure_logging
from trellis.cli.problems import without_password
from trellis.engine.jobs import Actor
from trellis.engine.service import Retention, Service, Sweeper, serve
from trellis.instance import open_instance
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.wiring import SystemClock, make_development_key, open_when_there, process_name

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "up", section="Workers", json=False)(up)


async def up(
    cli: Cli,
    demo: Annotated[bool, typer.Option("--demo", help="Bring the two agents of the demonstration garden.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Run the services of an instance until stopped.

    The orchestrator drives agent runs, the projector publishes their documents, the apply engine applies what was approved; the sweeper takes back
    jobs whose worker died and ends backoffs, deadlines and soft cancels; retention removes ended work whose time is over. Jobs themselves are run by
    `trellis worker`. On PostgreSQL runs need TRELLIS_OBJECTS and TRELLIS_MEMORY. There is no HTTP server in this version.
    """
    configure_logging(cli.settings)
    cli.require(Role.SWEEPER, Role.CONTROL_PLANE, action="sweep")
    make_folder(cli.url)
    ledger = await open_when_there(cli.url)
    if ledger is None:
        return
    try:
        if sqlite_path(cli.url) is not None:
            make_development_key(cli.url)
    finally:
        await ledger.close()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    cli.out.line(f"ledger    {without_password(cli.url, cli.url)}")
    if sqlite_path(cli.url) is None and (cli.settings.objects is None or cli.settings.memory is None):
        await _serve_jobs(cli, stop)
    else:
        await _serve_all(cli, stop, demo=demo)
    cli.out.line("stopped")


async def _serve_all(cli: Cli, stop: asyncio.Event, *, demo: bool) -> None:
    async with open_instance(cli.settings, cli.url, name=process_name("up")) as instance:
        if demo:
            await instance.plant()
        cli.out.line(f"objects   {instance.objects.url}")
        cli.out.line(f"memory    {instance.places.memory}")
        _say_services(cli, [service.name for service in instance.services()])
        await instance.serve(stop)


async def _serve_jobs(cli: Cli, stop: asyncio.Event) -> None:
    """Without a place for documents there are no runs, but jobs are looked after all the same."""
    ledger = await open_ledger(cli.url)
    try:
        services: list[Service[Any]] = [
            Sweeper(ledger=ledger, actor=Actor(role=Role.SWEEPER, name=process_name("up"))),
            Retention(ledger=ledger),
        ]
        cli.out.line("runs      none: set TRELLIS_OBJECTS and TRELLIS_MEMORY")
        _say_services(cli, [service.name for service in services])
        rng = random.Random()  # noqa: S311 - spreads retries of services, nothing secret
        await asyncio.gather(*(serve(service, SystemClock(), rng, stop) for service in services))
    finally:
        await ledger.close()


def _say_services(cli: Cli, names: list[str]) -> None:
    cli.out.line(f"services  {', '.join(names)}")
    cli.out.line("workers   none in this process: trellis worker MODULE:APP")
    if sqlite_path(cli.url) is not None:
        cli.out.line(f"tokens    trellis token issue --role ROLE --ledger {cli.url}")
    cli.out.line("Ctrl-C stops it")

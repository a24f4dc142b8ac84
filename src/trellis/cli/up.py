"""`trellis up`: the services of an instance, until stopped."""

import asyncio
import random
import signal
from typing import Any

import typer

from trellis.cli.commands import command
from trellis.cli.invocation import Cli, make_folder, sqlite_path
from trellis.cli.logs import configure_logging
from trellis.cli.problems import without_password
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.service import Retention, Service, Sweeper, serve
from trellis.lifecycles import Role
from trellis.wiring import SystemClock, make_development_key, open_when_there, process_name

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "up", section="Workers", json=False)(up)


async def up(cli: Cli) -> None:
    """Run sweeper and retention until stopped.

    The sweeper takes back jobs whose worker died and ends backoffs, deadlines and soft cancels; retention removes
    ended work whose time is over. Jobs themselves are run by `trellis worker`. There is no HTTP server in this version.
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
        await _serve(cli, ledger)
    finally:
        await ledger.close()


async def _serve(cli: Cli, ledger: Ledger) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    name = process_name("up")
    services: list[Service[Any]] = [
        Sweeper(ledger=ledger, actor=Actor(role=Role.SWEEPER, name=name)),
        Retention(ledger=ledger),
    ]
    cli.out.line(f"ledger    {without_password(cli.url, cli.url)}")
    cli.out.line(f"services  {', '.join(service.name for service in services)}")
    cli.out.line("workers   none in this process: trellis worker MODULE:APP")
    if sqlite_path(cli.url) is not None:
        cli.out.line(f"tokens    trellis token issue --role ROLE --ledger {cli.url}")
    cli.out.line("Ctrl-C stops it")
    rng = random.Random()  # noqa: S311 - spreads retries of services, nothing secret
    await asyncio.gather(*(serve(service, SystemClock(), rng, stop) for service in services))
    cli.out.line("stopped")

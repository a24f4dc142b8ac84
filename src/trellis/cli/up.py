"""`trellis up`: the gateway and the services of an instance, until stopped."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Annotated, Any

import typer

from trellis.app.roles import role_of
from trellis.app.system import SystemClock, process_name
from trellis.app.wiring import make_development_key, open_when_available
from trellis.cli import values
from trellis.cli.commands import command
from trellis.cli.invocation import Cli, make_folder, sqlite_path
from trellis.cli.long_running import run_tuned, tune_server
from trellis.cli.lost_ledger import refuse_lost_ledger
from trellis.cli.metrics_export import process_observed
from trellis.cli.problems import without_password
from trellis.cli.telemetry import configure_tracing, log_only
from trellis.cli.up_process import (
    NLM,
    ON_BUS,
    ROLES,
    SAFETY_KERNEL,
    UpOptions,
    print_ready,
    print_services,
    process_part_name,
    run_together,
    stopped_by_signals,
)
from trellis.engine.closing import closing
from trellis.engine.disk_room import require_room
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.engine.jobs import Actor
from trellis.engine.lease_runner import LeaseRunner
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.service import Retention, Service, Sweeper, serve
from trellis.http_server.health import ProcessHealth
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.operations.metrics import ledger_gauges


def add_to(program: typer.Typer) -> None:
    command(program, "up", section="Workers", json=False)(up)


def up(
    cli: Cli,
    roles: Annotated[
        str | None,
        typer.Option(
            "--roles", metavar="ROLE,…", help=f"Only these, as a list with commas; all by default: {', '.join(ROLES)}."
        ),
    ] = None,
    *,
    choices: UpOptions,
) -> None:
    """Serve the gateway and run the services of an instance until stopped.

    The gateway answers HTTP on 127.0.0.1:8420, or where TRELLIS_HOST and TRELLIS_PORT say; on an address that others can reach only with a configured
    key. The orchestrator drives agent runs, schedules begin them by themselves, the projector publishes their documents, agent-health stops an agent that
    failed three times in a row (not counting failures of its model's server or another upstream, which only raise an alert), the apply engine applies what was approved; the NLM backend makes what queue jobs ask for (on 127.0.0.1:8421, or where
    TRELLIS_NLM_HOST and TRELLIS_NLM_PORT say; `--roles nlm` runs it alone); alerts watches what needs an operator and reports it; the sweeper takes back jobs whose worker died and ends backoffs, deadlines and
    soft cancels; retention removes ended work whose time is over, and what it kept in the object store for the bus. The scheduler hands out jobs on topics
    over the bus (TRELLIS_BUS) after asking the safety kernel (TRELLIS_POLICY), and the reconciler looks after them; `--roles safety-kernel` is a kernel that other processes ask, on 127.0.0.1:8422.
    Jobs themselves are run by `trellis worker`, those of the local bus by `--app`. On PostgreSQL gateway and runs need TRELLIS_OBJECTS and
    TRELLIS_MEMORY, and the gateway a key.
    """
    log_only(cli.settings, cli.out)
    configure_tracing()
    run_tuned(_up(cli, _wanted_roles(roles), choices), tune=tune_server)


async def _up(cli: Cli, wanted: frozenset[str] | None, choices: UpOptions) -> None:
    health = ProcessHealth()
    async with process_observed(cli.settings, health) as address:
        if address is not None:
            cli.out.line(f"health    {address}/system/ready")
        if not await _served_alone(cli, wanted, health):
            await _served(cli, wanted, choices, health)


async def _served(cli: Cli, wanted: frozenset[str] | None, choices: UpOptions, health: ProcessHealth) -> None:
    """Serve these roles, or all, once the ledger is available."""
    cli.require(Role.SWEEPER, Role.CONTROL_PLANE, action="sweep")
    _refuse_full_disk(cli)
    await refuse_lost_ledger(cli)
    make_folder(cli.url)
    ledger = await open_when_available(cli.url, part=process_part_name(wanted))
    if ledger is None:
        return
    async with closing(ledger):
        if sqlite_path(cli.url) is not None:
            make_development_key(cli.url)
    stop = stopped_by_signals(health)
    cli.out.line(f"ledger    {without_password(cli.url, cli.url)}")
    if sqlite_path(cli.url) is None and (cli.settings.objects is None or cli.settings.memory is None):
        await _serve_jobs(cli, wanted, stop, app=choices.app, health=health)
    else:
        # The web framework is slow to import, and only this command needs it.
        from trellis.cli.up_gateway import serve_all

        await serve_all(cli, wanted, stop, choices, health)
    cli.out.line("stopped")


def _refuse_full_disk(cli: Cli) -> None:
    """Raise DiskFull if a disk of the instance has no room: opening its parts would fail one by one, each in its way."""
    from trellis.app.fleet import local_folders, storage_locations  # loads the object store

    with suppress(SettingsInvalid, OSError):  # what opens the place says what is wrong with it
        require_room(local_folders(storage_locations(cli.settings, cli.url)))


async def _served_alone(cli: Cli, wanted: frozenset[str] | None, health: ProcessHealth) -> bool:
    """Serve the one requested role if it needs no main ledger; returns whether it did."""
    if wanted == frozenset({NLM}):
        from trellis.cli.up_nlm import serve_nlm_alone

        make_folder(cli.url)
        await serve_nlm_alone(cli, stopped_by_signals(health), health)
        cli.out.line("stopped")
        return True
    if wanted == frozenset({SAFETY_KERNEL}):
        from trellis.cli.up_bus import serve_safety_kernel

        health.needs()
        await serve_safety_kernel(cli, stopped_by_signals(health), alone=True)
        cli.out.line("stopped")
        return True
    return False


def _wanted_roles(roles: str | None) -> frozenset[str] | None:
    """The requested roles, None for all; raises OptionInvalid."""
    if roles is None:
        return None
    wanted = frozenset(name.strip() for name in roles.split(","))
    unknown = sorted(wanted - set(ROLES))
    if unknown:
        hint = values.did_you_mean(unknown[0], ROLES)
        raise OptionInvalid(option="--roles", value=unknown[0], expected=f"choose of {', '.join(ROLES)}{hint}")
    return wanted


async def _serve_jobs(
    cli: Cli, roles: frozenset[str] | None, stop: asyncio.Event, *, app: str | None, health: ProcessHealth
) -> None:
    """Serve jobs only: without TRELLIS_OBJECTS and TRELLIS_MEMORY there are no runs."""
    from trellis.cli.up_bus import bus_probe, bus_roles, open_part, serve_safety_kernel, serve_services, wants_kernel

    if app is not None:
        raise SettingsInvalid(source="--app", detail="it needs TRELLIS_OBJECTS and TRELLIS_MEMORY")
    async with AsyncExitStack() as stack:
        ledger = await open_ledger(cli.url, part=process_part_name(roles))
        stack.push_async_callback(ledger.close)
        services = [one for one in _looking_after(cli, ledger, roles) if roles is None or role_of(one.name) in roles]
        missing = sorted((roles or frozenset()) - {service.name for service in services} - {*ON_BUS, SAFETY_KERNEL})
        if missing:
            raise SettingsInvalid(source=f"--roles {missing[0]}", detail="it needs TRELLIS_OBJECTS and TRELLIS_MEMORY")
        cli.out.line("runs      none: set TRELLIS_OBJECTS and TRELLIS_MEMORY")
        print_services(cli, [service.name for service in services])
        wanted = bus_roles(roles)
        on_bus = await stack.enter_async_context(open_part(cli, ledger, wanted)) if wanted else None
        rng = random.Random()  # noqa: S311 - spreads retries of services, nothing secret
        parts = [serve(service, SystemClock(), rng, stop) for service in services]
        health.needs(ledger=ledger.ping)
        health.measures(partial(ledger_gauges, ledger))
        if on_bus is not None:
            health.needs(bus=bus_probe(on_bus))
            parts.append(serve_services(on_bus, stop))
        if wants_kernel(roles):
            parts.append(serve_safety_kernel(cli, stop, alone=False))
        print_ready(cli)
        await run_together(stop, *parts)
        for service in services:
            if isinstance(service, LeaseRunner):
                await service.drain()


def _looking_after(cli: Cli, ledger: Ledger, roles: frozenset[str] | None) -> list[Service[Any]]:
    """The services that every ledger with jobs needs. Those of alerts are built only for a process with that role."""
    from trellis.app.alerts import alert_services  # loads an HTTP client

    sweeper = Actor(role=Role.SWEEPER, name=process_name("up"))
    options = SweepOptions(windows_s=cli.settings.windows_s)
    retention = Retention(ledger=ledger, actor=sweeper, options=cli.settings.retention)
    is_alerting = roles is None or "alerts" in roles
    alerts = alert_services(cli.settings, ledger, name=process_name("up")) if is_alerting else []
    return [Sweeper(ledger=ledger, actor=sweeper, options=options), retention, *alerts]

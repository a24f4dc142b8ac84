"""The process of `trellis up`: its roles, its status lines, and parts that end together."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from trellis.app.system import process_name
from trellis.cli.invocation import Cli
from trellis.cli.wait import is_alive
from trellis.engine.ledger import Ledger
from trellis.engine.subscription import SubscriptionOptions
from trellis.http_server.health import ProcessHealth

# Roles of `trellis up`, and the lines that its parts print at start.

UP = "up"
"""How the names of these processes begin."""
GATEWAY = "gateway"
ORCHESTRATOR = "orchestrator"
NLM = "nlm"
SAFETY_KERNEL = "safety-kernel"
ON_BUS = ("scheduler", "reconciler")
ROLES = (
    GATEWAY,
    ORCHESTRATOR,
    NLM,
    "projector",
    "apply-engine",
    "schedules",
    "agent-health",
    "inbox-keeper",
    "artifact-collector",
    "sweeper",
    "retention",
    *ON_BUS,
    SAFETY_KERNEL,
    "alerts",
)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
USES_MEMORY = frozenset({GATEWAY, ORCHESTRATOR, "apply-engine"})


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options of the command line besides the roles."""

    host: Annotated[
        str | None, typer.Option("--host", metavar="HOST", help="The address on which the gateway listens.")
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", min=0, max=65_535, help="The port; 0 chooses a free one.")
    ] = None
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:APP", help="Run this application's topics here, on the local bus."),
    ] = None
    demo: Annotated[bool, typer.Option("--demo", help="Bring the two agents of the demonstration garden.")] = False


def uses_memory(roles: frozenset[str] | None) -> bool:
    """Whether one of these roles reads or changes agents' memory."""
    return roles is None or not roles.isdisjoint(USES_MEMORY)


def process_part_name(roles: frozenset[str] | None) -> str:
    """The name of this process in lists of servers: its roles, or `up` for all of them."""
    return "up" if roles is None else "+".join(sorted(roles))


def print_health(cli: Cli, address: str | None) -> None:
    """Print the address of the health listener, if there is one."""
    if address is not None:
        cli.out.note(f"health at {address}/system/ready")


def print_services(cli: Cli, names: list[str]) -> None:
    """Print the services of this process."""
    cli.out.line(f"services  {', '.join(names) or 'none in this process'}")
    cli.out.line(f"workers   none for jobs of the ledger in this process: {cli.command('worker MODULE:APP')}")


async def print_others(cli: Cli, ledger: Ledger) -> None:
    """Say which other processes serve this ledger. That is no mistake: they share the work.

    They are known by the event feed: each service that reads it does so in one process at a time. A process that was
    killed stands there until its lease ends, so those of this machine that are gone are left out.
    """
    now = await ledger.now()
    others = sorted({seen.actor for seen in await ledger.followers() if seen.waits and seen.until > now})
    others = [name for name in others if name.startswith(f"{UP}@") and not _is_gone(name)]
    if others:
        cli.out.note(
            f"this ledger is served already, by {', '.join(others)} (reported within the last"
            f" {SubscriptionOptions().lease_s:g} s): the processes share its jobs and runs, and each is done once. Stop"
            " the other one if you meant to replace it."
        )


def _is_gone(name: str) -> bool:
    """Whether a process name is of this machine and no other process has its id now.

    A container that starts again has the id of the one before, so the name of this process was another's before.
    """
    process, _, pid = name.rpartition(":")
    if process != process_name(UP).rpartition(":")[0] or not pid.isdecimal():
        return False
    return int(pid) == os.getpid() or not is_alive(int(pid))


def print_ready(cli: Cli) -> None:
    """Print the last line, when everything has started."""
    cli.out.line("Ctrl-C stops it")


def stopped_by_signals(health: ProcessHealth) -> asyncio.Event:
    """An event that is set on SIGTERM or SIGINT. The process is not ready from then on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        health.stopping()
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    return stop


async def run_together(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Run until all parts have ended. If one fails, the others are stopped in order and its error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    for task in tasks:
        await task

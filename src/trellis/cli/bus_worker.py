"""`trellis worker MODULE:APP --bus URL`: the same handlers, for jobs that come over the bus."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from trellis.app.fleet import bus_options, connect_bus, open_pointers_at, storage_locations
from trellis.app.settings import BUS_SCHEMES, LOCAL_BUS, Settings
from trellis.app.system import SystemClock, elapsed_s, new_id, process_name
from trellis.bus.pointers import Pointers
from trellis.bus.port import Bus, ping
from trellis.cli.invocation import Cli, sqlite_path
from trellis.cli.metrics_export import process_observed
from trellis.cli.up_process import print_health
from trellis.cli.values import pairs
from trellis.engine.clock import Clock
from trellis.engine.closing import closing
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.http_server.health import ProcessHealth
from trellis.worker.app import App
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions, as_worker_id, checked_worker_id
from trellis.worker.worker import run_until_signalled

LOOK_S = 0.5
"""How often a worker checks whether the bus answers, in seconds."""


class ProcessLoad:
    """CPU use of this process since the last call, in percent of the machine."""

    def __init__(
        self,
        *,
        used_s: Callable[[], float] = time.process_time,
        elapsed: Callable[[], float] = elapsed_s,
        cores: int | None = None,
    ) -> None:
        self._used_s, self._elapsed = used_s, elapsed
        self._cores = cores or os.cpu_count() or 1
        self._last = (used_s(), elapsed())

    def __call__(self) -> float:
        now = (self._used_s(), self._elapsed())
        used, elapsed = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return 100 * used / elapsed / self._cores if elapsed > 0 else 0.0


def chosen_options(
    settings: Settings, given: Mapping[str, Any], capabilities: Sequence[str], labels: Sequence[str]
) -> BusWorkerOptions:
    """Worker options: those of the command line over those of the settings; raises OptionInvalid.

    If signatures are required, the signature proves the sender of a dispatch: then only those of our control plane are
    accepted.
    """
    known: dict[str, Any] = {
        "orders_from": (settings.bus_sender,) if settings.bus_require_signatures else (),
        "max_parallel_jobs": settings.concurrency,
        "threads": settings.threads,
        "processes": settings.processes,
        "drain_s": settings.drain_s,
        **{name: value for name, value in given.items() if value is not None},
    }
    return BusWorkerOptions(
        **known, capabilities=tuple(capabilities), labels=pairs("--label", labels, form="NAME=VALUE")
    )


async def run_on_bus(cli: Cli, app: App, url: str, name: str | None, options: BusWorkerOptions) -> int:
    """Serve the topics of an application until a signal arrives; returns the exit code."""
    settings = cli.settings
    sender_id = as_worker_id(process_name("worker")) if name is None else checked_worker_id(name)
    of_worker = replace(bus_options(settings), url=checked_url(url), sender_id=sender_id)
    async with _places(settings, cli.url) as resolver, closing(await connect_bus(of_worker)) as bus:
        worker = BusWorker(
            app, bus, options, clock=SystemClock(), new_id=new_id, resolver=resolver, cpu_load=ProcessLoad()
        )
        serves = f"{worker.worker_id} serves {', '.join(worker.topics)} at {bus.url}; Ctrl-C finishes running jobs, then stops; a second Ctrl-C gives them back at once"
        telling = asyncio.create_task(print_served(cli, bus, serves, SystemClock()))
        try:
            health = ProcessHealth({"bus": partial(ping, bus)})
            async with process_observed(settings, health) as address:
                print_health(cli, address)
                return await run_until_signalled(worker, on_stop=health.stopping)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


async def print_served(cli: Cli, bus: Bus, serves: str, clock: Clock) -> None:
    """Print that the worker waits for the bus, and what it serves once the bus answers."""
    if not bus.connected:
        cli.out.note(f"waiting for {bus.url}, which does not answer; Ctrl-C ends it")
    while not bus.connected:
        await clock.sleep(LOOK_S)
    cli.out.note(serves)


def checked_url(url: str) -> str:
    """A bus URL that other processes can reach; raises OptionInvalid."""
    if url == LOCAL_BUS:
        expected = (
            "the local bus is inside one process; serve the application there with `trellis up --app MODULE:APP`, "
            "or give the address of a NATS server, such as nats://127.0.0.1:4222"
        )
        raise OptionInvalid(option="--bus", value=url, expected=expected)
    if not all(part.strip().startswith(BUS_SCHEMES) for part in url.split(",")):
        raise OptionInvalid(option="--bus", value=url.rpartition("@")[2], expected="write nats://host:4222")
    return url


def _places(settings: Settings, ledger_url: str) -> AbstractAsyncContextManager[Pointers]:
    """The stores that pointers may name: from the settings, or the folder of an existing embedded ledger."""
    address = settings.objects or _folder_beside_ledger(settings, ledger_url)
    if address is None and settings.redis_url is None:
        detail = (
            "set TRELLIS_OBJECTS or TRELLIS_REDIS to the stores of the control plane: payloads and results are there"
        )
        raise SettingsInvalid(source="TRELLIS_OBJECTS", detail=detail)
    return open_pointers_at(address, settings.redis_url)


def _folder_beside_ledger(settings: Settings, ledger_url: str) -> str | None:
    """The object folder of an existing ledger. Without a ledger no other process would read that folder."""
    path = sqlite_path(ledger_url)
    return storage_locations(settings, ledger_url).objects if path is not None and path.exists() else None

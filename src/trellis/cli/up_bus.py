"""The bus part of `trellis up`: scheduler and reconciler, an application on the local bus, and a shared safety kernel.

An unavailable bus does not prevent the start: jobs are accepted, and dispatched once the bus answers.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from trellis.app.fleet import bus_options, connect_bus, is_without_policy, kernel_of, topics_of
from trellis.app.settings import LOCAL_BUS, Settings
from trellis.app.system import SystemClock, elapsed_s, new_id, process_name
from trellis.bus.pointers import Pointers
from trellis.bus.port import Bus, ping
from trellis.bus.safety.kernel import SafetyKernel, ServingOptions, is_kernel_address, serve_kernel
from trellis.bus.services import BusDependencies, BusRole, BusServices
from trellis.bus.topics import Topics
from trellis.bus.wire.local import LocalBus
from trellis.cli.invocation import Cli
from trellis.cli.up_process import SAFETY_KERNEL, print_ready
from trellis.engine.closing import closing
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.engine.ledger import Ledger
from trellis.engine.service import serve
from trellis.http_server.health import Probe
from trellis.worker.app import App
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions, as_worker_id


@dataclass(frozen=True, kw_only=True)
class BusProcess:
    """What this process does on the bus.

    Created before anything starts, so that invalid settings are reported at once.
    """

    settings: Settings
    ledger: Ledger
    topics: Topics
    kernel: SafetyKernel
    roles: frozenset[BusRole]
    app: App | None = None
    pointers: Pointers | None = None
    schedulers: list[Callable[[], None]] | None = None
    """The instance's list of functions that wake a scheduler after a submit."""

    @asynccontextmanager
    async def opened(self, cli: Cli) -> AsyncGenerator[BusServices]:
        """Connect to the bus, start the services and print a line about it; stops them in order on exit."""
        clock = SystemClock()
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(closing(await connect_bus(bus_options(self.settings))))
            parts = BusDependencies(
                ledger=self.ledger,
                bus=bus,
                topics=self.topics,
                kernel=self.kernel,
                clock=clock,
                new_id=new_id,
                name=process_name("up"),
                cancel_grace_s=self.settings.cancel_grace_s,
            )
            services = BusServices(parts, self.roles)
            stack.push_async_callback(services.stop)
            await services.start()
            if self.schedulers is not None and BusRole.SCHEDULER in self.roles:
                self.schedulers.append(services.scheduler.wake)
                stack.callback(self.schedulers.remove, services.scheduler.wake)
            if self.app is not None:
                await stack.enter_async_context(self._worker(bus, self.app))
            self._say(cli, bus)
            yield services

    def _say(self, cli: Cli, bus: Bus) -> None:
        """Print the bus, and what this process does on it."""
        does = ", ".join(sorted(self.roles))
        served = "" if self.app is None else f"; serves {', '.join(sorted(spec.type for spec in self.app))}"
        waits = "" if bus.connected else "; it does not answer yet, jobs wait"
        cli.out.line(f"bus       {bus.url}: {does}{served}{waits}")
        if BusRole.SCHEDULER in self.roles and is_without_policy(self.settings, cli.url):
            cli.out.note("warning: there is no safety policy, so every job on a topic is denied; set TRELLIS_POLICY")

    def _worker(self, bus: Bus, app: App) -> BusWorker:
        """The application as a worker inside this process."""
        assert isinstance(bus, LocalBus), "checked_app has refused every other"
        assert self.pointers is not None, "whoever has an application has an instance"
        options = BusWorkerOptions(max_parallel_jobs=self.settings.concurrency, drain_s=self.settings.drain_s)
        here = bus.sibling(as_worker_id(process_name("up")))
        return BusWorker(app, here, options, clock=SystemClock(), new_id=new_id, resolver=self.pointers)


def bus_roles(roles: frozenset[str] | None) -> frozenset[BusRole]:
    """The bus roles among the requested roles; all by default."""
    return frozenset(role for role in BusRole if roles is None or role.value in roles)


def check_app(settings: Settings, roles: frozenset[str] | None) -> None:
    """Check that an application can be served in this process; raises OptionInvalid."""
    if settings.bus != LOCAL_BUS:
        expected = "it is for the local bus; on any other start `trellis worker MODULE:APP --bus`"
        raise OptionInvalid(option="--app", value="given", expected=expected)
    if BusRole.SCHEDULER not in bus_roles(roles):
        raise OptionInvalid(option="--app", value="given", expected="it needs the role scheduler in the same process")


@asynccontextmanager
async def open_part(cli: Cli, ledger: Ledger, roles: frozenset[BusRole]) -> AsyncGenerator[BusServices]:
    """Run these roles on a ledger without an instance."""
    topics = topics_of(cli.settings)
    async with closing(kernel_of(cli.settings, cli.url, monotonic=elapsed_s)) as kernel:
        part = BusProcess(settings=cli.settings, ledger=ledger, topics=topics, kernel=kernel, roles=roles)
        async with part.opened(cli) as services:
            yield services


def bus_probe(services: BusServices) -> Probe:
    """A readiness probe of the services' bus."""
    return partial(ping, services.parts.bus)


async def serve_services(services: BusServices, stop: asyncio.Event) -> None:
    """Run the services until `stop` is set."""
    rng = random.Random()  # noqa: S311 - spreads retries, nothing secret
    await asyncio.gather(*(serve(service, SystemClock(), rng, stop) for service in services.services))


async def serve_safety_kernel(cli: Cli, stop: asyncio.Event, *, alone: bool) -> None:
    """Serve the safety kernel to other processes until `stop` is set; raises SettingsInvalid, OptionInvalid."""
    settings = cli.settings
    if settings.policy is None or is_kernel_address(settings.policy):
        detail = "set it to a policy file: this process is the kernel that others ask"
        raise SettingsInvalid(source="TRELLIS_POLICY", detail=detail)
    kernel = kernel_of(settings, cli.url, monotonic=elapsed_s)
    options = ServingOptions(
        host=settings.safety_host,
        port=settings.safety_port,
        cert_file=settings.tls_cert_file,
        key_file=settings.tls_key_file,
    )
    async with serve_kernel(kernel, options) as port:
        scheme = "grpc" if settings.tls_cert_file is None else "grpcs"
        cli.out.line(f"kernel    {scheme}://{settings.safety_host}:{port}")
        if alone:
            print_ready(cli)
        await stop.wait()


def wants_kernel(roles: frozenset[str] | None) -> bool:
    """Whether the role of a shared safety kernel was requested by name."""
    return roles is not None and SAFETY_KERNEL in roles

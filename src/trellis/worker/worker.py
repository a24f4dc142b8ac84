"""The worker, which runs jobs from a ledger, and the process that drains it on a signal."""

import asyncio
import json
import math
import random
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

from trellis.auth.ownership import owner_of_process
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import LedgerError
from trellis.engine.extras import program_version
from trellis.engine.jobs import DECLARED, Actor, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.service import OpenLedger, PresenceBeacon, Retention, Service, Sweeper, serve, wait_for_ledger
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.handlers import Handlers
from trellis.worker.heartbeat import HeldJobWatch, WorkerLeaseHeartbeat
from trellis.worker.held import HeldJobs, StopCause
from trellis.worker.options import WorkerOptions
from trellis.worker.outcomes import release_advance
from trellis.worker.payloads import any_json_bytes
from trellis.worker.requests import SubmitSettings, new_job
from trellis.worker.runners import Runners, SignalWriter
from trellis.worker.schedules import JobScheduleFirer, declare_schedules
from trellis.worker.turns import PrefetchPolicy, TurnLoop, WorkListener

# A worker, from start to drain.
#
#     async with Worker(app, ledger, options, clock=clock, rng=rng, new_id=new_id) as worker:
#         ...                               # claims and runs until the block ends, then drains
#
# Draining stops claiming, releases jobs that have not started, and lets running handlers finish for `drain_s`. Then it
# stops them and releases their jobs too; those attempts do not count. Leases are renewed to the end.

TICK_S_MAX = 0.5
TICK_S_MIN = 0.02
SIGNALS_INTERVAL_S = 1.0
LEAVE_S_MAX = 1.0
LEFT_OVER_MIN = 0.1
"""A rate of so many claims a poll, or more, would lose a noticeable part of them between polls."""

_log = log_of("trellis.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """The result of draining a worker."""

    not_begun: int = 0
    """Jobs released before their handler started."""
    cut_short: int = 0
    """Jobs released because their handlers did not finish in time."""
    unsettled: int = 0
    """Outcomes that the ledger did not accept in time. Their leases will expire."""


class Worker:
    """Runs the jobs of one application from one ledger. Also provides the `WorkerServices` of its contexts."""

    def __init__(
        self,
        app: App,
        ledger: Ledger,
        options: WorkerOptions,
        *,
        clock: Clock,
        rng: random.Random,
        new_id: Callable[[], str],
        resources: Mapping[Any, Any] | None = None,
    ) -> None:
        """`resources` are values to use instead of opening the application's resources of these types, for tests."""
        self.handlers = Handlers(
            app, clock=clock, threads=options.threads_max, processes=options.processes_max, resources=resources
        )
        self.app = app
        self.ledger = ledger
        self.options = options
        self.clock = clock
        self.actor = Actor(role=Role.WORKER, name=options.name)
        self.loop = asyncio.get_running_loop()
        self.stopping = False
        self.drained: Drained | None = None
        self._seen = False
        self._rng = rng
        self._new_id = new_id
        self._stop_services = asyncio.Event()
        self._turning: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.held_jobs = HeldJobs()
        self.runners = Runners(
            held_jobs=self.held_jobs, worker=self, size=options.concurrency, handlers=self.handlers, draw=rng.random
        )
        room = PrefetchPolicy(concurrency=options.concurrency, prefetch_max=options.prefetch_max)
        self.turns = TurnLoop(
            app=app, worker=self, held_jobs=self.held_jobs, room=room, runners=self.runners, rng=rng, new_id=new_id
        )

    def request(self, type_: str, payload: Any, settings: SubmitSettings) -> NewJob:
        """Builds a child job for a handler: of this application's types, or of a type that another worker serves."""
        known = self.app if type_ in self.app else None
        return new_job(type_, payload, settings, app=known, new_id=self._new_id)

    def payload_bytes(self, type_: str, payload: Any) -> bytes:
        """Encodes the payload of a child job, as `request` does."""
        return self.app.spec(type_).codec.accept(payload)[1] if type_ in self.app else any_json_bytes(payload, type_)

    def read_result(self, type_: str, body: bytes | None) -> Any:
        """Decodes the result of a job: as its handler's return type, or as JSON if another application has it."""
        if body is None:
            return None
        return self.app.spec(type_).codec.read_result(body) if type_ in self.app else json.loads(body)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def start(self, *, listening: bool = True) -> None:
        """Opens the application's resources, declares its types and schedules, and starts claiming.

        Without `listening`, the worker runs what is already in the ledger and then stays idle. Raises ResourceFailed.
        """
        await self.handlers.open()
        async with AsyncExitStack() as failed:
            failed.push_async_callback(self.handlers.close)
            await self._declare()
            failed.pop_all()
        services = self._services() if listening else self._own_services()
        self._seen = listening
        loops = range(self.ledger.turns_at_once)
        self._turning = {self.loop.create_task(self.turns.run(), name=f"turns {n}") for n in loops}
        self._tasks = [
            self.loop.create_task(serve(service, self.clock, self._rng, self._stop_services), name=service.name)
            for service in services
        ]

    async def _declare(self) -> None:
        """Records the application's types, schedules and rates in the ledger."""
        await self.ledger.declare_types(self.actor, [spec.declared for spec in self.app])
        await declare_schedules(self.ledger, self.actor, owner_of_process(self.options.name), self.app.schedules())
        for spec in self.app:
            if spec.options.rate is not None:
                # One more than a poll's worth, so that the part of a claim that a poll leaves over is not lost. A slow
                # rate loses next to nothing, and stays strict: one claim at a time.
                each_poll = spec.options.rate * self.options.poll_s
                burst = math.ceil(each_poll) + (each_poll >= LEFT_OVER_MIN)
                await self.ledger.limit_rate(self.actor, spec.type, spec.options.rate, burst, cause=DECLARED)

    async def until_stopped(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set. Raises the error that ended a turn loop."""
        waiting = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({*self._turning, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for turning in self._turning:
            if turning.done() and not turning.cancelled():
                turning.result()

    async def until_idle(self) -> None:
        """Waits until no job is held and nothing can be claimed now. Raises the error that ended a turn loop."""
        await self.until_stopped(self.turns.idle)

    async def drain(self, hurry: asyncio.Event | None = None) -> Drained:
        """Stops claiming and lets running handlers finish for `drain_s`. `hurry` (a second signal) ends that wait."""
        if self.drained is not None:
            return self.drained
        hurry = hurry or asyncio.Event()
        self.stopping, self.turns.claiming = True, False
        not_begun = self._give_back_waiting()
        await self._quiet_within(self.options.drain_s, hurry)
        cut_short = self._give_back_running()
        await self._quiet_within(self.options.settle_s, asyncio.Event())
        self.drained = Drained(not_begun=not_begun, cut_short=cut_short, unsettled=len(self.held_jobs.jobs))
        await self._close()
        await self._take_leave()
        _log.info("worker_drained", not_begun=not_begun, cut_short=cut_short, unsettled=self.drained.unsettled)
        return self.drained

    def _give_back_waiting(self) -> int:
        waiting = [*self.held_jobs.waiting(), *list(self.held_jobs.quarantined)[:1]]
        waiting = [
            held for held in waiting if held.began_at is None and not held.finished and not self.turns.in_flight(held)
        ]
        self.held_jobs.take_back(set(waiting))
        for held in waiting:
            self.held_jobs.settle(held, release_advance(held, "the worker drains"))
        self.held_jobs.changed.set()
        return len(waiting)

    def _give_back_running(self) -> int:
        running = [held for held in self.held_jobs.jobs.values() if held.began_at is not None and not held.finished]
        for held in running:
            held.interrupt(StopCause.GIVEN_BACK)
            if held.fate is StopCause.LOST:
                self.held_jobs.forget(held)
            elif held.task is None or held.in_thread:
                # A thread cannot be stopped. Release its job anyway: the process is about to end.
                self.held_jobs.settle(held, release_advance(held, StopCause.GIVEN_BACK.value))
        return len(running)

    async def _quiet_within(self, seconds: float, hurry: asyncio.Event) -> None:
        """Waits until no job is held, at most `seconds`, or until `hurry` is set or every turn loop has ended."""
        self.turns.quiet.clear()
        self.held_jobs.changed.set()
        quiet = asyncio.ensure_future(self.turns.quiet.wait())
        limit = asyncio.ensure_future(sleep_or_stop(self.clock, hurry, seconds))
        try:
            while not quiet.done() and not limit.done() and (turning := {t for t in self._turning if not t.done()}):
                await asyncio.wait({quiet, limit, *turning}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            quiet.cancel()
            limit.cancel()
            await asyncio.gather(quiet, limit, return_exceptions=True)

    async def kill(self) -> None:
        """Stops at once, as if the process had died: nothing is settled, and leases are left to expire. For tests."""
        self.drained = Drained(not_begun=0, cut_short=0, unsettled=len(self.held_jobs.jobs))
        await self._close()

    async def _close(self) -> None:
        self._stop_services.set()
        for task in (*self._turning, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._turning, *self._tasks, return_exceptions=True)
        await self.runners.close()
        await self.handlers.close()

    async def _take_leave(self) -> None:
        """Reports that this worker ended on purpose, so that operators do not take it for crashed. Best effort."""
        if not self._seen or self.held_jobs.jobs:
            return
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(min(LEAVE_S_MAX, self.options.settle_s)):
                await self.ledger.heartbeat_worker(self.actor, self._about())

    def _about(self) -> bytes:
        """What the heartbeat tells operators about this worker, as JSON."""
        suspects = self.held_jobs.quarantined
        alone = suspects[0].lease.job_id if suspects and suspects[0].began_at is not None else None
        return json.dumps(
            {
                "types": [spec.type for spec in self.app],
                "concurrency": self.options.concurrency,
                "version": program_version(),
                **({"alone": alone} if alone else {}),
                **({"drained": True} if self.drained else {}),
            }
        ).encode()

    def _own_services(self) -> list[Service[Any]]:
        """The services for the jobs this worker holds: lease renewal, local checks, and progress and logs."""
        tick_s = self._tick_s()
        return [
            WorkerLeaseHeartbeat(
                ledger=self.ledger,
                actor=self.actor,
                clock=self.clock,
                held_jobs=self.held_jobs,
                tick_s=tick_s,
            ),
            HeldJobWatch(clock=self.clock, held_jobs=self.held_jobs, tick_s=tick_s),
            SignalWriter(ledger=self.ledger, held_jobs=self.held_jobs, interval_s=min(SIGNALS_INTERVAL_S, 2 * tick_s)),
        ]

    def _services(self) -> list[Service[Any]]:
        types = tuple(spec.type for spec in self.app)
        listener = WorkListener(
            ledger=self.ledger,
            clock=self.clock,
            rng=self._rng,
            types=types,
            poll_s=self.options.poll_s,
            hints=self.options.hints,
            found=self.turns.hint,
        )
        services = [
            *self._own_services(),
            listener,
            PresenceBeacon(ledger=self.ledger, actor=self.actor, about=self._about),
            JobScheduleFirer(ledger=self.ledger, actor=self.actor, new_id=self._new_id),
        ]
        if self.options.sweep is not None:
            sweeping = Actor(role=Role.SWEEPER, name=self.options.name)
            services.append(Sweeper(ledger=self.ledger, actor=sweeping, options=self.options.sweep))
        if self.options.retention is not None:
            removing = Actor(role=Role.SWEEPER, name=self.options.name)
            services.append(Retention(ledger=self.ledger, actor=removing, options=self.options.retention))
        return services

    def _tick_s(self) -> float:
        """The tick interval, short enough for the shortest heartbeat and timeout of the application."""
        spans = [spec.options.heartbeat_s / 10 for spec in self.app]
        spans += [spec.options.timeout_s / 4 for spec in self.app if spec.options.timeout_s is not None]
        return min(TICK_S_MAX, max(TICK_S_MIN, min(spans)))


# The worker process: runs until a signal, then drains. A second signal shortens the drain.

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ExitCode(IntEnum):
    """Exit code of a worker process, with the numbers of sysexits."""

    DRAINED = 0
    """Every started job has ended."""
    UNSETTLED = 69
    """The ledger did not accept some outcomes. Their leases will expire and the jobs run again."""
    GAVE_BACK = 75
    """Some running jobs were stopped and released."""


class WorkerProcess(Protocol):
    """A worker on a ledger or on the bus, as a process runs it."""

    loop: asyncio.AbstractEventLoop

    async def start(self) -> None: ...

    async def until_stopped(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set. Raises what broke the worker."""
        ...

    async def drain(self, hurry: asyncio.Event | None = None) -> Drained:
        """Stops the worker: running handlers may finish within the drain time."""
        ...


async def open_until_signalled(open_ledger: OpenLedger, clock: Clock, rng: random.Random) -> Ledger | None:
    """Opens the ledger, waiting while it does not answer. Returns None if SIGTERM or SIGINT came first."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        return await wait_for_ledger(open_ledger, clock, rng, stop)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def run_until_signalled(worker: WorkerProcess, *, on_stop: Callable[[], None] | None = None) -> ExitCode:
    """Runs a worker on this event loop until SIGTERM or SIGINT, then drains it. Raises what breaks it.

    `on_stop` is called at the first signal.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled(name: str) -> None:
        _log.info("signal_received", signal=name, second=stop.is_set())
        if on_stop is not None:
            on_stop()
        (hurry if stop.is_set() else stop).set()

    for number in SIGNALS:
        worker.loop.add_signal_handler(number, signalled, number.name)
    try:
        await worker.start()
        try:
            await worker.until_stopped(stop)
        finally:
            drained = await worker.drain(hurry)
    finally:
        for number in SIGNALS:
            worker.loop.remove_signal_handler(number)
    return exit_code(drained)


def exit_code(drained: Drained) -> ExitCode:
    if drained.unsettled:
        return ExitCode.UNSETTLED
    return ExitCode.GAVE_BACK if drained.cut_short else ExitCode.DRAINED

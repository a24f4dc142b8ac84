"""A worker as a process: run until a signal, then drain. The second signal hurries."""

import asyncio
import random
import signal
from enum import IntEnum
from typing import Protocol

from trellis.engine.clock import Clock
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.waiting import OpenLedger, wait_for_ledger
from trellis.worker.worker import Drained

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = log_of("trellis.worker")


class ExitCode(IntEnum):
    """How a worker process ended, in the numbers of sysexits."""

    DRAINED = 0
    """Every job it had begun has ended."""
    UNSETTLED = 69
    """The ledger could not be told some outcomes: their leases run out and the jobs run again."""
    GAVE_BACK = 75
    """Some running jobs were cut short and given back."""


class WorkerProcess(Protocol):
    """A worker, on a ledger or on the bus."""

    loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        """Begin to work."""
        ...

    async def until_stopped(self, stop: asyncio.Event) -> None:
        """Come back when `stop` is set, or raise what broke the worker."""
        ...

    async def drain(self, hurry: asyncio.Event | None = None) -> Drained:
        """Stop as gently as there is time for."""
        ...


async def open_until_signalled(open_ledger: OpenLedger, clock: Clock, rng: random.Random) -> Ledger | None:
    """The ledger, waited for while it does not answer; None when SIGTERM or SIGINT came first."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        return await wait_for_ledger(open_ledger, clock, rng, stop)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def run_until_signalled(worker: WorkerProcess) -> ExitCode:
    """Run a worker on this event loop until SIGTERM or SIGINT; raises what breaks it."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled(name: str) -> None:
        _log.info("signal_received", signal=name, second=stop.is_set())
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
    """What the process says about how it ended."""
    if drained.unsettled:
        return ExitCode.UNSETTLED
    return ExitCode.GAVE_BACK if drained.cut_short else ExitCode.DRAINED

"""Runs the handlers of one subscription: several concurrently, up to a limit, whatever they raise."""

import asyncio
from collections.abc import Awaitable, Callable

from trellis.engine.errors import TrellisError
from trellis.engine.logs import log_of

HANDLERS_MAX = 64
CLOSE_S_MAX = 10.0
AGAIN_S_FIRST = 0.25
AGAIN_S_MAX = 30.0
DELIVERIES_MAX = 1_000
"""How often a packet is delivered to a durable subscriber whose handler raises: some hours, given the pauses below."""

log = log_of("trellis.bus")


def redelivery_delay_s(deliveries: int) -> float:
    """Delay before redelivery after the nth failure of a handler (from 1), in seconds."""
    return min(AGAIN_S_MAX, AGAIN_S_FIRST * 2.0 ** min(deliveries - 1, 16))


class HandlerPool:
    """The running handlers of one subscription."""

    def __init__(self, at_once: int = HANDLERS_MAX) -> None:
        self._at_once = at_once
        self._slots = asyncio.Semaphore(at_once)
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a handler as soon as there is room."""
        await self._slots.acquire()
        task = asyncio.create_task(self._run(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def room(self) -> int:
        """Wait for room; returns how many more handlers may start, at least one."""
        async with self._slots:
            return max(1, self._at_once - len(self._running))

    async def finish(self, within_s: float | None = None) -> None:
        """Wait for running handlers, and cancel those that still run after `within_s` seconds."""
        running = self._running - {asyncio.current_task()}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            self._slots.release()


async def run_handler(subject: str, work: Awaitable[None]) -> bool:
    """Run the handler of a packet. Returns whether it finished without an error."""
    try:
        await work
    except TrellisError as error:
        log.warning("handler_failed", subject=subject, error=str(error))
        return False
    except Exception:  # An exception of a handler loses only its own packet.
        log.exception("handler_failed", subject=subject)
        return False
    return True

"""The clock of the engine's loops: a monotonic reading and a sleep, injected so that tests never wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time of this process. It is unrelated to the ledger's time and never compared with it."""

    def monotonic(self) -> float:
        """Seconds that never decrease."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds of this clock."""
        ...


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` for at most this many seconds of this clock, else raise TimeoutError.

    On time-out or cancellation, `work` is cancelled and awaited first.
    """
    working = asyncio.ensure_future(work)
    limit = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({working, limit}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        for task in (working, limit):
            task.cancel()
        await asyncio.gather(working, limit, return_exceptions=True)
    raise TimeoutError


async def sleep_or_stop(
    clock: Clock, stop: asyncio.Event, seconds: float, *, sooner: Coroutine[Any, Any, None] | None = None
) -> bool:
    """Sleep until the time is over, `stop` is set or `sooner` returns. True when `stop` is set."""
    if stop.is_set() or seconds <= 0:
        if sooner is not None:
            sooner.close()
        await asyncio.sleep(0)
        return stop.is_set()
    waits = [clock.sleep(seconds), stop.wait(), *(() if sooner is None else (sooner,))]
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return stop.is_set()

"""How the engine's loops see time: a monotonic reading and a sleep, passed in so that tests never wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time of this process. It says nothing about the ledger's time and is never compared with it."""

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Come back after that long by this clock."""
        ...


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or TimeoutError after that long by this clock; then, and when cut from outside, it is ended first."""
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


async def sleep_or_stop(clock: Clock, stop: asyncio.Event, seconds: float) -> bool:
    """Sleep, but no longer than until `stop` is set; True when it is."""
    if stop.is_set() or seconds <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({sleeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeping.cancel()
        stopping.cancel()
        await asyncio.gather(sleeping, stopping, return_exceptions=True)
    return stop.is_set()

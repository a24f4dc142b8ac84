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


async def sleep_or_stop(
    clock: Clock, stop: asyncio.Event, seconds: float, *, sooner: Coroutine[Any, Any, None] | None = None
) -> bool:
    """Sleep, but no longer than until `stop` is set or `sooner` comes back; True when `stop` is set."""
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

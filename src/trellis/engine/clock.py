"""The clock of the engine's loops: a monotonic reading and a sleep, injected so that tests never wait."""

import asyncio
import contextlib
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


STOP_S = 1.0
"""How much longer than its limit work may take that is being stopped when the limit is reached, in seconds."""


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` for at most this many seconds of this clock, else raise TimeoutError.

    `work` runs in the caller's task, as with `asyncio.timeout`. On time-out or cancellation it is cancelled and awaited
    first. Work that is being stopped already, by its caller or by a limit of its own, has `STOP_S` more seconds.
    """
    task = asyncio.current_task()
    assert task is not None, "awaited by a task"
    cancels, is_late = task.cancelling(), False

    async def stop() -> None:
        nonlocal is_late
        await clock.sleep(seconds)
        await asyncio.sleep(0)  # work that ends at this moment has ended
        if task.cancelling() > cancels:
            await clock.sleep(STOP_S)
        is_late = True
        task.cancel()

    limit = asyncio.ensure_future(stop())
    try:
        return await work
    finally:
        limit.cancel()
        if is_late and task.uncancel() <= cancels:
            raise TimeoutError from None


async def sleep_or_stop(
    clock: Clock, stop: asyncio.Event, seconds: float, *, sooner: Coroutine[Any, Any, None] | None = None
) -> bool:
    """Sleep until the time is over, `stop` is set or `sooner` returns. True when `stop` is set."""
    if stop.is_set() or seconds <= 0:
        if sooner is not None:
            sooner.close()
        await asyncio.sleep(0)
        return stop.is_set()
    if sooner is None:
        with contextlib.suppress(TimeoutError):
            await within(clock, seconds, stop.wait())
        return stop.is_set()
    waiting = [asyncio.ensure_future(wait) for wait in (clock.sleep(seconds), stop.wait(), sooner)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return stop.is_set()

"""The same loops for every subject, so that only the engine differs."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

READY_S_MAX = 60.0
"""How long all callers may take to make their first call."""


def batches(jobs: int, size: int) -> Iterator[list[int]]:
    """`jobs` payloads in batches; a payload is the time it was sent."""
    for first in range(0, jobs, size):
        yield [time.time_ns()] * min(size, jobs - first)


async def timed(batch: Callable[[list[int]], Awaitable[object]], jobs: int, size: int) -> float:
    """Seconds to submit `jobs` in batches."""
    began = time.perf_counter()
    for each in batches(jobs, size):
        await batch(each)
    return time.perf_counter() - began


async def many_callers(send: Callable[[int], Awaitable[object]], jobs: int, callers: int) -> float:
    """Seconds for `callers` coroutines to submit `jobs` between them, one at a time each; the first is not counted."""
    await send(time.time_ns())
    todo = iter(range(jobs))

    async def caller() -> None:
        for _ in todo:
            await send(time.time_ns())

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - began


def many_threads(send: Callable[[int], object], jobs: int, callers: int) -> float:
    """`many_callers` for an engine that blocks; raises what one of them raises.

    The first call of each thread is not counted: it makes its connection.
    """
    todo, lock, ready = iter(range(jobs)), threading.Lock(), threading.Barrier(callers + 1, timeout=READY_S_MAX)

    def caller() -> None:
        try:
            send(time.time_ns())
        except BaseException:
            ready.abort()
            raise
        ready.wait()
        while True:
            with lock:
                if next(todo, None) is None:
                    return
            send(time.time_ns())

    with ThreadPoolExecutor(callers) as pool:
        calling = [pool.submit(caller) for _ in range(callers)]
        with suppress(threading.BrokenBarrierError):  # whoever broke it says why
            ready.wait()
        began = time.perf_counter()
        wait(calling)
        seconds = time.perf_counter() - began
    for error in sorted(filter(None, (one.exception() for one in calling)), key=_is_consequence):
        raise error
    return seconds


def _is_consequence(error: BaseException) -> bool:
    """Whether a caller failed because another one did."""
    return isinstance(error, threading.BrokenBarrierError)


async def at_pace(send: Callable[[int], Awaitable[object]], jobs: int, per_s: float) -> None:
    """Submit on a fixed beat, however long each submit takes."""
    began = time.perf_counter()
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number / per_s - time.perf_counter()))
        await send(time.time_ns())


def at_pace_blocking(send: Callable[[int], object], jobs: int, per_s: float) -> None:
    """`at_pace` for an engine that blocks."""
    began = time.perf_counter()
    for number in range(jobs):
        time.sleep(max(0.0, began + number / per_s - time.perf_counter()))
        send(time.time_ns())

"""A limit in time for work, on a clock that the tests move."""

import asyncio
import contextlib

import pytest

from trellis.engine.clock import STOP_S, sleep_or_stop, within
from trellis.testing import FakeClock


async def asleep(clock: FakeClock) -> None:
    while not clock.sleeping:  # noqa: ASYNC110 - the clock of the tests tells nobody
        await asyncio.sleep(0)


class Work:
    """Work that never ends by itself. It may take a moment to stop, or have an answer or an error when it is stopped."""

    def __init__(self, ending: str = "cancelled") -> None:
        self.ending, self.has_stopped = ending, False

    async def __call__(self) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.has_stopped = True
            if self.ending == "error":
                raise OSError("while it was stopped") from None
            if self.ending == "answer":
                return "too late"
            raise
        return "never"


async def test_work_that_ends_in_time_has_its_answer_and_leaves_no_timer():
    clock = FakeClock()
    assert await within(clock, 5, asyncio.sleep(0, "done")) == "done"
    await asyncio.sleep(0)
    assert clock.sleeping == 0


@pytest.mark.parametrize("ending", ["cancelled", "error", "answer"])
async def test_work_that_is_late_is_stopped_first_and_its_caller_goes_on(ending: str):
    clock, work = FakeClock(), Work(ending)

    async def call() -> bool:
        with pytest.raises(TimeoutError):
            await within(clock, 5, work())
        await asyncio.sleep(0)  # no cancellation is left over
        return work.has_stopped

    calling = asyncio.ensure_future(call())
    await asleep(clock)
    clock.advance(5)
    assert await calling


async def test_work_that_ends_at_the_moment_of_its_limit_leaves_its_caller_alone():
    clock, stop = FakeClock(), asyncio.Event()

    async def call() -> bool:
        answer = await within(clock, 5, stop.wait())
        for _ in range(3):
            await asyncio.sleep(0)
        return answer

    calling = asyncio.ensure_future(call())
    await asleep(clock)
    asyncio.get_running_loop().call_soon(stop.set)
    clock.advance(5)
    assert await calling


async def test_error_of_work_is_raised():
    async def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await within(FakeClock(), 5, fail())


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_cancelled_caller_stops_its_work_even_if_that_is_late_as_well(is_late: bool):
    clock, work = FakeClock(), Work()
    calling = asyncio.ensure_future(within(clock, 5, work()))
    await asleep(clock)
    if is_late:
        clock.advance(5)
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
    assert work.has_stopped


async def _limited_by_itself(may_stop: asyncio.Event) -> None:
    """Work that tries again and again, each time within a limit of its own, and takes until it may stop to do so."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                try:
                    await asyncio.Event().wait()
                finally:
                    await may_stop.wait()


@pytest.mark.parametrize("goes_on", [False, True])
async def test_work_that_stops_by_a_limit_of_its_own_does_not_outlast_its_callers_limit(goes_on: bool):
    clock, may_stop = FakeClock(), asyncio.Event()
    calling = asyncio.ensure_future(within(clock, 5, _limited_by_itself(may_stop)))
    await asyncio.sleep(0.05)  # the first try is over and being stopped
    clock.advance(5)
    await asyncio.sleep(0)
    if goes_on:
        may_stop.set()
    await asyncio.sleep(0.01)
    assert not calling.done()
    clock.advance(STOP_S)
    done, _ = await asyncio.wait({calling}, timeout=1)
    calling.cancel()
    assert [type(one.exception()) for one in done] == [TimeoutError]


async def test_a_sleep_ends_with_its_time_or_when_it_is_stopped():
    clock, stop = FakeClock(), asyncio.Event()
    sleeping = asyncio.ensure_future(sleep_or_stop(clock, stop, 5))
    await asleep(clock)
    clock.advance(5)
    assert not await sleeping
    sleeping = asyncio.ensure_future(sleep_or_stop(clock, stop, 5))
    await asleep(clock)
    stop.set()
    assert await sleeping

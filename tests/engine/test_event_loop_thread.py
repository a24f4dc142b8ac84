"""An event loop in a thread of its own: what is under way when it is stopped, and what comes after."""

import asyncio

import pytest

from trellis.engine.event_loop_thread import EventLoopStopped, EventLoopThread


def test_stop_lets_tasks_clean_up_and_refuses_later_calls():
    thread, steps = EventLoopThread("under test"), []

    async def hold() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0)
        return task

    assert not thread.run(start()).done()
    thread.stop()
    assert steps == ["cleaned up"]
    with pytest.raises(EventLoopStopped):
        thread.run(start())
    thread.stop()

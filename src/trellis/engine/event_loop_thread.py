"""An event loop in a thread of its own, for code that blocks and needs an asynchronous object."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

STOP_S_MAX = 10.0
"""How long `EventLoopThread.stop` waits for the tasks that it cancelled."""


class EventLoopStopped(RuntimeError):
    """The event loop was stopped before this call was done."""


class EventLoopThread:
    """An event loop that runs in its own thread until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._starting = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `work` and return its result. Ctrl-C cancels it. Raises EventLoopStopped if `stop` ends it."""
        with self._starting:
            if self._stopped:
                work.close()
                raise EventLoopStopped("the event loop of this call was stopped")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            if self._stopped:
                raise EventLoopStopped("the event loop was stopped during this call") from None
            raise
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel the remaining tasks and end the thread. Threads that wait in `run` get EventLoopStopped."""
        with self._starting:  # what was started before is a task when `_end_tasks` runs; nothing starts after it
            if self._stopped:
                return
            self._stopped = True
            ended = asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S_MAX)
        await self._loop.shutdown_asyncgens()

"""Threads for sync handlers. They are daemons: a handler that never returns must not keep a stopped worker alive."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from trellis.engine.text import error_message

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class Threads:
    """At most `size` threads, started on demand. Further calls wait. A worker makes at most one call per slot."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads = 0
        self._busy = 0
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run `call` on a thread, with the caller's context variables."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()
        self._busy += 1
        if self._busy > self._threads and self._threads < self._size:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"trellis-handler-{self._threads}", daemon=True).start()
        self._work.put((lambda: context.run(call), future, loop))
        try:
            return await future
        finally:
            self._busy -= 1

    def close(self) -> None:
        for _ in range(self._threads):
            self._work.put(None)

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:
            call, future, loop = job
            value, error = _call_caught(call)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the result is no longer needed
                loop.call_soon_threadsafe(resolve, future, value, error)


def _call_caught(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is the job's outcome
        return None, error


def resolve(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    """Ends the future with what a handler returned or raised. Does nothing if it has ended already."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(ordinary(error))


def is_closed(task: "asyncio.Task[Any] | None") -> bool:
    """Whether the coroutine of this task is closed from outside, as when its event loop has ended: it must not wait again.

    A GeneratorExit that user code raises looks the same, but the task runs then.
    """
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no event loop runs
        return True


def ordinary(error: BaseException) -> BaseException:
    """The error itself, or an ordinary one instead of those that mean something to the event loop."""
    if isinstance(error, StopIteration | KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
        return RuntimeError(f"the handler raised {type(error).__name__}: {error_message(error)}")
    return error

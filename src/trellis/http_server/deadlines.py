"""Deadlines of requests that cost no timer each.

`asyncio.timeout` sets a timer for every request and stops it again, which costs more than a small request's routing.
Here all requests have the same time, so they are late in the order in which they began, and one timer is enough.

Invariants:
- a task that is late is cancelled once, never before its deadline;
- a cancellation from elsewhere stays one: `close` takes back that of the deadline alone.
"""

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class SharedDeadline:
    """One deadline of a task. `stop` it when it no longer counts, and `close` it in any case at the end."""

    waiting: "dict[SharedDeadline, None]"
    """All deadlines that may still come, in the order of their time."""
    task: "asyncio.Task[Any]"
    at: float
    """When the task is cancelled, by the clock of the event loop."""
    cancelling: int
    """How many cancellations the task had before."""
    is_over: bool = False

    def stop(self) -> None:
        """Let the task take as long as it needs from now on."""
        self.waiting.pop(self, None)

    def close(self) -> bool:
        """Stop, and take the cancellation of the deadline back; whether it was the only one."""
        self.stop()
        if not self.is_over:
            return False
        self.is_over = False
        return self.task.uncancel() <= self.cancelling


class SharedDeadlines:
    """The deadlines in one event loop, each `seconds` after it began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[SharedDeadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> SharedDeadline:
        """A deadline of the present task, `seconds` from now."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        if loop is not self._loop:  # a loop that has ended calls no timer any more
            self._loop, self._waiting, self._timer = loop, {}, None
        deadline = SharedDeadline(self._waiting, task, loop.time() + self.seconds, task.cancelling())
        self._waiting[deadline] = None
        if self._timer is None:
            self._timer = loop.call_at(deadline.at, self._cancel_late, self._waiting)
        return deadline

    def _cancel_late(self, waiting: dict[SharedDeadline, None]) -> None:
        """Cancel the tasks that are over their deadline, and set the timer for the next one."""
        loop = asyncio.get_running_loop()
        now, timer = loop.time(), None
        for deadline in list(waiting):
            if deadline.at > now:
                timer = loop.call_at(deadline.at, self._cancel_late, waiting)
                break
            del waiting[deadline]
            deadline.is_over = True
            deadline.task.cancel()
        if waiting is self._waiting:
            self._timer = timer

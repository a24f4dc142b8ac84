"""Waiting for work: a commit of this process wakes at once, one of another process within a poll of `data_version`.

Hints may be lost; whoever waits polls the ledger itself as well.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from trellis.engine.errors import LedgerError

POLL_S = 0.015


class Bell:
    """Who waits for work in this process, in whichever event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._rung = 0

    @property
    def rung(self) -> int:
        """How often it rang: a claim that found nothing remembers this, so that nothing rung since is missed."""
        return self._rung

    def ring(self) -> None:
        """Wake everybody; may be called from any thread."""
        with self._lock:
            self._rung += 1
            waiting, self._waiting = self._waiting, {}
        for future, loop in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop was closed
                continue

    def wait(self, since: int) -> "asyncio.Future[None]":
        """A future that is done when the bell rings, at once if it rang after `since`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._rung == since:
                self._waiting[future] = loop
                return future
        future.set_result(None)
        return future

    def leave(self, future: "asyncio.Future[None]") -> None:
        with self._lock:
            self._waiting.pop(future, None)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Watch:
    """Polls for commits of other processes while somebody waits."""

    def __init__(
        self,
        data_version: Callable[[], Awaitable[int]],
        any_ready: Callable[[Sequence[str]], Awaitable[bool]],
    ) -> None:
        self._data_version = data_version
        self._any_ready = any_ready
        self._seen: int | None = None

    async def for_change(self, types: Sequence[str]) -> None:
        """Return when another process has committed and there is something to claim of these types."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                version = await self._data_version()
                changed = self._seen is not None and version != self._seen
                self._seen = version
                if changed and await self._any_ready(types):
                    return
            except LedgerError:  # a hint less: the caller's own polling says what is wrong
                continue

"""Hints that work may be there. A hint may be lost or late: polling is the truth.

A ring is sent after the commit, on a connection of its own and at most one at a time: NOTIFY inside the writing
transaction would make every commit of the server wait for every other one.
"""

import asyncio
import contextlib

from trellis.engine.errors import TrellisError
from trellis.ledgers.postgres.connection import LOST, Connection, connect, listens
from trellis.ledgers.postgres.lanes import Lane, LaneOptions

CHANNEL = "trellis_work"


class Doorbell:
    """Rings for others and hears them."""

    def __init__(self, url: str, options: LaneOptions, *, on: bool) -> None:
        self._url = url
        self._options = options
        self._on = on
        self._listens = on
        """Whether hints can be heard; through a pooler only polling finds work."""
        self._lane = Lane(url, options)
        self._heard = asyncio.Event()
        self._listener: Connection | None = None
        self._ringing: asyncio.Task[None] | None = None
        self._again = False

    def ring(self) -> None:
        """Tell whoever waits; rings under way swallow the ones that follow, but for one."""
        self._heard.set()
        if not self._on:
            return
        if self._ringing is not None and not self._ringing.done():
            self._again = True
        else:
            self._ringing = asyncio.create_task(self._ring())

    async def _ring(self) -> None:
        while True:
            self._again = False
            with contextlib.suppress(TrellisError):
                await self._lane.call(
                    "ring", "", lambda c, _: c.execute(f"select pg_notify('{CHANNEL}', '')"), window_s=0
                )
            if not self._again:
                return

    def hush(self) -> None:
        """Forget what was heard: a claim that looks now will see it."""
        self._heard.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next hint since `hush`, or after the time."""
        if self._listens:
            await self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()

    async def _listen(self) -> None:
        if self._listener is not None and not self._listener.is_closed():
            return
        with contextlib.suppress(TrellisError, *LOST):
            made = await connect(
                self._url,
                timeout_s=self._options.connect_timeout_s,
                application_name=self._options.application_name,
            )
            if not listens(made):
                self._listens = False
                made.terminate()
                return
            self._listener = made
            await self._listener.add_listener(CHANNEL, lambda *_: self._heard.set())
            self._heard.set()

    async def close(self) -> None:
        """Hang up."""
        if self._ringing is not None:
            await asyncio.wait([self._ringing])
        await self._lane.close()
        if self._listener is not None:
            self._listener.terminate()

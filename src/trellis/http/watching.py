"""How something stands, again and again until it has ended. Looking is the truth; the stream of events only says when to look.

So a stream that cannot be had costs time and nothing else: then it is looked at every `POLL_S`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from trellis.engine.clock import Clock, sleep_or_stop, within
from trellis.http.errors import GatewayError
from trellis.http.shapes import LiveEvent

POLL_S = 5.0
SOON_S = 0.05
"""After a hint the document may be a moment behind the event."""


class Versioned(Protocol):
    """What is looked at."""

    @property
    def version(self) -> int:
        """It rises with every change."""
        ...


SeenT = TypeVar("SeenT", bound=Versioned)


async def changes(
    look: Callable[[SeenT | None], Awaitable[SeenT | None]],
    hints: AsyncIterator[LiveEvent],
    *,
    ended: Callable[[SeenT], bool],
    clock: Clock,
) -> AsyncGenerator[SeenT]:
    """Each newer state that is seen, up to the one that has ended. `look(last)` gives None when nothing changed since."""
    ear = _StreamHints()
    listening = asyncio.ensure_future(ear.listen(hints))
    try:
        last, pause_s = None, SOON_S  # the first looks come close together: the stream may not be there yet
        while True:
            seen = await look(last)
            if seen is not None and (last is None or seen.version > last.version):
                last = seen
                yield seen
                if ended(seen):
                    return
            if last is not None and last.version >= ear.version > 0:
                pause_s = POLL_S
            if await sleep_or_stop(clock, ear.heard, pause_s):
                ear.heard.clear()
                pause_s = SOON_S
            else:
                pause_s = min(POLL_S, 2 * pause_s)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


class _StreamHints:
    """What the stream has said since the last look."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.version = 0

    async def listen(self, hints: AsyncIterator[LiveEvent]) -> None:
        with contextlib.suppress(GatewayError):  # whoever looks meets the same trouble, or none
            async for event in hints:
                self.version = max(self.version, event.version or 0)
                self.heard.set()


async def wait_for_last(states: AsyncGenerator[SeenT], clock: Clock, timeout_s: float | None, about: str) -> SeenT:
    """The state in which it ended; raises TimeoutError, which says how it stands."""
    seen: list[SeenT] = []

    async def drain() -> None:
        async with contextlib.aclosing(states):
            async for state in states:
                seen[:] = [state]

    try:
        await (drain() if timeout_s is None else within(clock, timeout_s, drain()))
    except TimeoutError:
        stands = f"is {getattr(seen[0], 'status', 'there')}" if seen else "has not been seen"
        raise TimeoutError(f"{about} {stands} after {timeout_s:g} s") from None
    return seen[0]

"""Real time, ids and randomness of this process. Everything else is given them by `wiring`.

It is a module of its own because it is needed where an ongoing call is named, and `wiring` loads the whole engine. The
event loop is loaded by what waits: a help text does not.
"""

import os
import socket
import sys
import time
from collections.abc import Callable

if sys.platform == "linux":

    def elapsed_s() -> float:
        """Returns a monotonic clock that also counts while the machine sleeps.

        Python's own clock stops during sleep on Linux, while leases continue to expire.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)
else:
    elapsed_s = time.monotonic


class SystemClock:
    """The process's own clock."""

    monotonic = staticmethod(elapsed_s)
    """Seconds that never decrease. Includes time asleep where the system counts it."""

    async def sleep(self, seconds: float) -> None:
        """Waits for `seconds`."""
        import asyncio

        await asyncio.sleep(seconds)


ID_DIGITS = 32
"""Hexadecimal digits of a UUID."""
VARIANT_DIGITS = {f"{digit:x}": f"{digit & 3 | 8:x}" for digit in range(16)}
"""The digit that marks a UUID as one of RFC 9562, for each random digit in its place."""


class RandomIds:
    """Random UUIDs (version 4), made in advance from a page of random bytes.

    Reading each id from the kernel is far slower, because every such call releases the interpreter lock. Taking the last
    id of a list needs no lock of its own.
    """

    PAGE_BYTES = 4096

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read
        self._ids: list[str] = []
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self) -> str:
        while True:
            try:
                return self._ids.pop()
            except IndexError:
                self._ids = self._page()

    def _page(self) -> list[str]:
        digits = self._read(self.PAGE_BYTES).hex()
        texts = [digits[at : at + ID_DIGITS] for at in range(0, len(digits), ID_DIGITS)]
        return [f"{t[:8]}-{t[8:12]}-4{t[13:16]}-{VARIANT_DIGITS[t[16]]}{t[17:20]}-{t[20:]}" for t in texts]

    def _forget(self) -> None:
        """Drops the ids in a forked child, which must not repeat its parent's."""
        self._ids = []


new_id = RandomIds()


def process_name(kind: str) -> str:
    """Returns a name by which operators can find the process."""
    return f"{kind}@{socket.gethostname()}:{os.getpid()}"

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
ID_DASHES = (8, 13, 18, 23)
ID_STRIDE = 37
"""The length of a UUID's text, and of the space behind it in a page."""
ID_PLACES = [place for place in range(ID_STRIDE - 1) if place not in ID_DASHES]
VARIANT_DIGITS = bytes.maketrans(b"0123456789abcdef", b"89ab" * 4)
"""The digit that marks a UUID as one of RFC 9562, for each random digit in its place."""


class RandomIds:
    """Random UUIDs (version 4), made in advance from a page of random bytes.

    Reading each id from the kernel is far slower, because every such call releases the interpreter lock. Taking the last
    id of a list needs no lock of its own.
    """

    PAGE_BYTES = 4096
    SHARED_DIGITS = 0
    """With how many equal digits the ids of a page begin."""

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
        """Writes the first digit of all ids, then the second of all, and so on: 32 steps for a page instead of for an id."""
        digits = self._read(self.PAGE_BYTES).hex().encode()
        n = len(digits) // ID_DIGITS
        text = bytearray(b"-" * (ID_STRIDE * n))
        for digit, place in enumerate(ID_PLACES):
            shared = digit < self.SHARED_DIGITS
            text[place::ID_STRIDE] = digits[digit : digit + 1] * n if shared else digits[digit::ID_DIGITS]
        text[14::ID_STRIDE] = b"4" * n
        text[19::ID_STRIDE] = text[19::ID_STRIDE].translate(VARIANT_DIGITS)
        text[ID_STRIDE - 1 :: ID_STRIDE] = b" " * n
        return text.decode().split()

    def _forget(self) -> None:
        """Drops the ids in a forked child, which must not repeat its parent's."""
        self._ids = []


class NeighbourIds(RandomIds):
    """Random UUIDs (version 4) of which those of one page are neighbours in an index: they begin with the same 12 digits.

    Those digits are random too, and say nothing about time or place. 74 bits of each id are its own, so no id can be
    guessed from another. Only whole ids are unique: where a part of an id is used, use `new_id`.
    """

    SHARED_DIGITS = 12


new_id = RandomIds()
new_job_id = NeighbourIds()


def process_name(kind: str) -> str:
    """Returns a name by which operators can find the process."""
    return f"{kind}@{socket.gethostname()}:{os.getpid()}"

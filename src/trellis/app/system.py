"""Real time, ids and randomness of this process. Everything else is given them by `wiring`.

It is a module of its own because it is needed where an ongoing call is named, and `wiring` loads the whole engine.
"""

import asyncio
import gc
import os
import socket
import sys
import threading
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

    def monotonic(self) -> float:
        """Seconds that never decrease. Includes time asleep where the system counts it."""
        return elapsed_s()

    async def sleep(self, seconds: float) -> None:
        """Waits for `seconds`."""
        await asyncio.sleep(seconds)


ID_DIGITS = 32
"""Hexadecimal digits of a UUID."""
VARIANT_DIGITS = {f"{digit:x}": f"{digit & 3 | 8:x}" for digit in range(16)}
"""The digit that marks a UUID as one of RFC 9562, for each random digit in its place."""


class RandomIds:
    """Random UUIDs (version 4), cut from a page of random bytes.

    Reading each id from the kernel is far slower, because every such call releases the interpreter lock.
    """

    PAGE_BYTES = 4096

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._page, self._at = "", 0
        os.register_at_fork(after_in_child=self._forget)

    def __call__(self) -> str:
        with self._lock:
            at = self._at
            if at >= len(self._page):
                self._page, at = self._read(self.PAGE_BYTES).hex(), 0
            self._at = at + ID_DIGITS
            text = self._page[at : at + ID_DIGITS]
        return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{VARIANT_DIGITS[text[16]]}{text[17:20]}-{text[20:]}"

    def _forget(self) -> None:
        """Drops the page in a forked child, which must not repeat its parent's ids."""
        self._lock = threading.Lock()
        self._page, self._at = "", 0


new_id = RandomIds()


def process_name(kind: str) -> str:
    """Returns a name by which operators can find the process."""
    return f"{kind}@{socket.gethostname()}:{os.getpid()}"


def tune_process() -> None:
    """Tune garbage collection and thread switching for a process that runs jobs or services until it is stopped.

    Many short-lived values trigger useless collections. A thread of the ledger or the object store gives up the
    interpreter at every system call, and would wait up to 5 ms to get it back from a busy event loop. Both effects were
    measured (docs/benchmarks.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    sys.setswitchinterval(0.0005)

"""Sleeping until a file is written, where the system can say so: Linux, by inotify.

SQLite writes a commit into the write-ahead log before other processes can see it, so a write is a hint that a commit
comes, never proof of one.
"""

import ctypes
import os
import select
import sys
from pathlib import Path
from typing import Self

IN_MODIFY = 0x2
READ_BYTES = 4096
MS = 1_000


class FileWatch:
    """One file. `wait` is for one thread; `interrupt` may be called from any other."""

    def __init__(self, notify: int, stop: int) -> None:
        self._notify = notify
        self._stop = stop
        self._poll = select.poll()
        self._poll.register(notify, select.POLLIN)
        self._poll.register(stop, select.POLLIN)

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """A watch of this file; None where the system has no such thing, or gives out no more of them."""
        if sys.platform != "linux":
            return None
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "inotify_init1"):
            return None
        notify: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if notify < 0:
            return None
        if libc.inotify_add_watch(notify, os.fsencode(path), IN_MODIFY) < 0:
            os.close(notify)
            return None
        try:
            stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # no descriptor is left
            os.close(notify)
            return None
        return cls(notify, stop)

    def wait(self, timeout_s: float) -> bool:
        """Whether the file was written or `interrupt` was called; False after the time."""
        ready = self._poll.poll(timeout_s * MS)
        if any(number == self._notify for number, _ in ready):
            os.read(self._notify, READ_BYTES)
        return bool(ready)

    def interrupt(self) -> None:
        """End every wait, this one and those to come."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting."""
        os.close(self._notify)
        os.close(self._stop)

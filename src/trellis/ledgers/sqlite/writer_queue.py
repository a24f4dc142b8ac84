"""A fair queue of the writers of one SQLite file, also of several processes.

SQLite's lock goes to whichever writer asks first after a commit, which is nearly always the one that just committed.
So a waiting writer takes a shared lock on a file beside the database. A writer that has committed checks that file
and pauses briefly if others wait. Every wait is bounded and sleeps in small steps.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from trellis.engine.private_files import open_beside

POLL_S = (0.001, 0.002, 0.003, 0.002)
GIVE_WAY_S = 0.003


class WriterQueue:
    """One writer's place in the queue, kept in the file `<database>-queue`."""

    def __init__(self, database: Path, patience_s: float) -> None:
        self._file = open_beside(Path(f"{database}-queue"), database, os.O_RDWR | os.O_CLOEXEC)
        self._patience_s = patience_s
        self._waited_s = 0.0

    def wait(self, tries: int) -> bool:
        """Sleep once while another writer has the lock. False when the patience is over."""
        if tries == 0:
            self._waited_s = 0.0
            with contextlib.suppress(BlockingIOError):  # a writer is just checking whether others wait
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        pause_s = POLL_S[(tries + self._file) % len(POLL_S)]
        self._waited_s += pause_s
        time.sleep(pause_s)
        return self._waited_s < self._patience_s

    def enter(self) -> None:
        """Stop waiting: this writer has the lock."""
        if self._waited_s:
            self._waited_s = 0.0
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def others_wait(self) -> bool:
        """Whether writers of other connections wait for the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        os.close(self._file)

"""Taking turns at one file: the lock that writers of several processes wait for is handed on, not grabbed again.

SQLite's lock goes to whoever asks first after a commit, which is nearly always the writer that just committed. So a
writer that has to wait shows it, with a shared lock on a file beside the database, and one that has committed looks
there and lets others go first. Nobody waits without a bound: waiting is sleeping in small steps.
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
    """One writer's place at the file `<database>-queue`."""

    def __init__(self, database: Path, patience_s: float) -> None:
        self._file = open_beside(Path(f"{database}-queue"), database, os.O_RDWR | os.O_CLOEXEC)
        self._patience_s = patience_s
        self._waited_s = 0.0

    def wait(self, tries: int) -> bool:
        """Called while another has the lock; False gives up."""
        if tries == 0:
            self._waited_s = 0.0
            with contextlib.suppress(BlockingIOError):  # somebody looks whether anyone waits, just now
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        pause_s = POLL_S[(tries + self._file) % len(POLL_S)]
        self._waited_s += pause_s
        time.sleep(pause_s)
        return self._waited_s < self._patience_s

    def enter(self) -> None:
        """The lock is ours: no longer waiting."""
        if self._waited_s:
            self._waited_s = 0.0
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def leave(self) -> None:
        """The lock is free again: let those who wait go first."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(GIVE_WAY_S)
        else:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)

"""Waiting for work and for events on SQLite: woken by commits, of this process or of another one."""

import asyncio
import ctypes
import os
import select
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import apsw

from trellis.engine.errors import LedgerError
from trellis.ledgers.sqlite.connection import Database

# Sleeping until a file is written, where the system can say so: Linux, by inotify.
#
# SQLite writes a commit into the write-ahead log before other processes can see it, so a write is a hint that a commit
# comes, never proof of one.

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


# Waiting for work and for events: a commit of this process wakes at once, one of another process a moment later.
#
# Hints may be lost; whoever waits polls the ledger itself as well.

POLL_S = 0.015
"""Between looks at the commits of others while the log is being written, or where nothing says when it is."""
FIRST_POLL_S = 0.002
"""After the log was written: the commit can be seen as soon as its frames are on the disk."""
WRITING_S = 0.1
"""How long after a write to the log a commit is expected."""
UNTOLD_POLL_S = 0.5
"""Between looks while the log is not written: some file systems do not tell of what another machine writes."""


class WorkNotifier:
    """Who waits for work in this process, in whichever event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._rung = 0

    @property
    def notifications(self) -> int:
        """How often it rang: a claim that found nothing remembers this, so that nothing rung since is missed."""
        return self._rung

    def notify(self) -> None:
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


class CommitWatch:
    """Looks for commits of other connections, in a thread of its own, while somebody waits for one.

    `on_commit` is called after any commit, `on_events` after one that appended events; both from that thread.
    """

    def __init__(
        self,
        open_connection: Callable[[], apsw.Connection],
        log: Path,
        *,
        on_commit: Callable[[], None],
        on_events: Callable[[], None],
    ) -> None:
        self._open_connection = open_connection
        self._log = log
        self._on_commit = on_commit
        self._on_events = on_events
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: FileWatch | None = None

    @contextmanager
    def attend(self) -> Generator[None]:
        """Somebody waits for commits as long as this lasts."""
        with self._changed:
            self._waiting += 1
            self._changed.notify()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="trellis-commits", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def close(self) -> None:
        """End the thread; blocks until it has let go of its connection."""
        with self._changed:
            self._closed.set()
            self._changed.notify()
            if self._file is not None:
                self._file.interrupt()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        try:
            connection = self._open_connection()
        except LedgerError:  # no hints of others: whoever waits polls
            return
        try:
            self._watch(connection)
        finally:
            connection.close()

    def _watch(self, connection: apsw.Connection) -> None:
        seen, newest = _version(connection), _newest_event(connection)
        file = self._watch_file()
        pause_s, written_s = POLL_S, 0.0
        while self._is_wanted():
            version = _version(connection)
            if version != seen:
                seen, before, newest = version, newest, _newest_event(connection)
                self._on_commit()
                if newest != before:
                    self._on_events()
                # One commit comes rarely alone: while others follow, they are looked for at the pace of POLL_S.
                pause_s, written_s = POLL_S, WRITING_S
            if file is None or written_s > 0:
                self._closed.wait(pause_s)
                written_s, pause_s = written_s - pause_s, min(2 * pause_s, POLL_S)
            elif file.wait(UNTOLD_POLL_S):
                written_s, pause_s = WRITING_S, FIRST_POLL_S
        if file is not None:
            with self._changed:
                self._file = None
            file.close()

    def _watch_file(self) -> FileWatch | None:
        with self._changed:
            if not self._closed.is_set():
                self._file = FileWatch.of(self._log)
            return self._file

    def _is_wanted(self) -> bool:
        """True as soon as somebody waits; False when the ledger is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
        return not self._closed.is_set()


def _version(connection: Database) -> int | None:
    """A number that changes with every commit of another connection; None when the file does not answer."""
    return _number(connection, "PRAGMA data_version")


def _newest_event(connection: Database) -> int | None:
    return _number(connection, "SELECT max(seq) FROM trellis_event")


def _number(connection: Database, sql: str) -> int | None:
    try:
        return connection.execute(sql).fetchall()[0][0]
    except apsw.Error:  # a hint less
        return None

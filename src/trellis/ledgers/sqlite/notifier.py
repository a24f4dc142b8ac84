"""Waiting for work and events on SQLite, woken by commits of this or another process."""

import asyncio
import ctypes
import os
import select
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import apsw

from trellis.engine.errors import LedgerError
from trellis.ledgers.sqlite.connection import Database

# Waiting until a file is written, through inotify on Linux. SQLite writes a commit into the write-ahead log before
# other processes can see it. So a write is a hint that a commit follows, never proof of one.

IN_MODIFY = 0x2
READ_BYTES = 4096
MS = 1_000


class FileWatch:
    """Watches one file. One thread may `wait`; any other may `interrupt`."""

    def __init__(self, notify: int, stop: int) -> None:
        self._notify = notify
        self._stop = stop
        self._poll = select.poll()
        self._poll.register(notify, select.POLLIN)
        self._poll.register(stop, select.POLLIN)

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """A watch of this file; None where the system has no inotify or no free watches."""
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
        except OSError:  # no file descriptor is left
            os.close(notify)
            return None
        return cls(notify, stop)

    def wait(self, timeout_s: float) -> bool:
        """Whether the file was written or `interrupt` was called; False after the time-out."""
        ready = self._poll.poll(timeout_s * MS)
        if any(number == self._notify for number, _ in ready):
            os.read(self._notify, READ_BYTES)
        return bool(ready)

    def forget(self) -> None:
        """Let no earlier write end the next `wait`."""
        with suppress(BlockingIOError):
            os.read(self._notify, READ_BYTES)

    def interrupt(self) -> None:
        """End the current wait and all later ones."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Close the descriptors. No thread may be waiting."""
        os.close(self._notify)
        os.close(self._stop)


# Notifications: a commit of this process wakes waiters at once, one of another process a moment later. Hints may be
# lost, so waiters also poll the ledger.

POLL_S = 0.015
"""The interval between checks for other processes' commits without inotify."""
FIRST_POLL_S = 0.0005
"""The first check after a write to the log: the commit is visible as soon as its frames are on the disk.

Each further pause is twice as long, so a commit is found after at most twice the time that its sync took.
"""
WRITING_S = 0.1
"""How long after a write to the log a commit is expected."""
AFTER_COMMIT_S = 0.003
"""The pause after a commit, before the next check: busy writers do not keep this process busy too."""
UNTOLD_POLL_S = 0.5
"""The interval between checks while the log is not written.

Some file systems do not report writes of other machines.
"""

MARKS_MAX = 1_000
"""The most sets of job types whose waiters are told apart."""


class WorkNotifier:
    """The waiters for work in this process, over all event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._rung = 0

    @property
    def notifications(self) -> int:
        """How many notifications there were.

        A claim that found nothing passes it to `wait`, so that no later one is missed.
        """
        return self._rung

    def notify(self) -> None:
        """Wake all waiters. May be called from any thread."""
        with self._lock:
            self._rung += 1
            waiting, self._waiting = self._waiting, {}
        for future, loop in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop was closed
                continue

    def wait(self, since: int) -> "asyncio.Future[None]":
        """A future that completes at the next notification, or at once if there was one after `since`."""
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


class SeenMarks:
    """A number that the waiters for the same job types have seen. Waiters for other types have their own."""

    def __init__(self) -> None:
        self._by_types: dict[frozenset[str], int] = {}

    def of(self, types: Iterable[str]) -> int:
        """The number noted last for these types; 0 if there is none."""
        return self._by_types.get(frozenset(types), 0)

    def note(self, types: Iterable[str], number: int) -> None:
        """Note a number for these types. May be called from any thread. A mark that is forgotten costs one look more."""
        if len(self._by_types) >= MARKS_MAX:
            self._by_types.clear()
        self._by_types[frozenset(types)] = number


class CommitWatch:
    """Checks for commits of other connections, in its own thread, while a caller waits for one.

    After a commit that thread itself asks, by `any_ready`, whether a waiter's types have work, and wakes only those
    waiters. `on_events` is called from it after a commit that appended events.
    """

    def __init__(
        self,
        open_connection: Callable[[], apsw.Connection],
        log: Path,
        *,
        any_ready: Callable[[Database, Sequence[str]], bool],
        on_events: Callable[[], None],
    ) -> None:
        self._open_connection = open_connection
        self._log = log
        self._any_ready = any_ready
        self._on_events = on_events
        self.commits = 0
        """How many times a check found new commits."""
        self._wanted: dict[WorkNotifier, Sequence[str]] = {}
        """The waiters for work, each with its types."""
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: FileWatch | None = None

    @contextmanager
    def attend(self, types: Sequence[str] = ()) -> Generator[WorkNotifier]:
        """Watch for commits while this context is open. What it gives is notified when these types have work."""
        ready = WorkNotifier()
        with self._changed:
            if types:
                self._wanted[ready] = types
            self._waiting += 1
            self._changed.notify()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="trellis-commits", daemon=True)
                self._thread.start()
        try:
            yield ready
        finally:
            with self._changed:
                self._wanted.pop(ready, None)
                self._waiting -= 1

    def close(self) -> None:
        """End the thread. Blocks until it has closed its connection."""
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
        except LedgerError:  # no hints of other processes: waiters poll
            return
        try:
            self._watch(connection)
        finally:
            connection.close()

    def _watch(self, connection: apsw.Connection) -> None:
        seen, newest = _version(connection), _newest_event(connection)
        file = self._watch_file()
        pause_s, expected_s = FIRST_POLL_S, 0.0
        while self._is_wanted():
            version = _version(connection)
            if version != seen:
                seen, before, newest = version, newest, _newest_event(connection)
                self.commits += 1
                self._wake_waiters(connection)
                if newest != before:
                    self._on_events()
                # The write that was reported may have been that of the next commit, whose sync has not ended yet.
                expected_s, pause_s = WRITING_S, 2 * AFTER_COMMIT_S
                self._closed.wait(AFTER_COMMIT_S)
                if file is not None:  # what was written until now is committed at the next check, or expected anyway
                    file.forget()
            elif file is None:
                self._closed.wait(POLL_S)
            elif file.wait(pause_s if expected_s > 0 else UNTOLD_POLL_S):
                expected_s, pause_s = WRITING_S, FIRST_POLL_S
                self._closed.wait(FIRST_POLL_S)
            else:
                expected_s, pause_s = expected_s - pause_s, 2 * pause_s
        if file is not None:
            with self._changed:
                self._file = None
            file.close()

    def _wake_waiters(self, connection: Database) -> None:
        with self._changed:
            wanted = list(self._wanted.items())
        for ready, types in wanted:
            try:
                if self._any_ready(connection, types):
                    ready.notify()
            except apsw.Error:  # only a hint is lost
                return

    def _watch_file(self) -> FileWatch | None:
        with self._changed:
            if not self._closed.is_set():
                self._file = FileWatch.of(self._log)
            return self._file

    def _is_wanted(self) -> bool:
        """Block until a caller waits (True) or the ledger is closed (False)."""
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
    except apsw.Error:  # only a hint is lost
        return None

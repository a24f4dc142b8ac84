"""Lanes of an SQLite ledger: one thread and one connection each."""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, islice
from queue import SimpleQueue
from types import coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import apsw

from trellis.engine.errors import LedgerError, OutcomeUnknown, Refused
from trellis.engine.logs import log_of
from trellis.ledgers.refusals import ledger_closed
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S, HAS_ARRAYS, Database, spoils_transaction, to_ledger_error
from trellis.ledgers.sqlite.ledger_file import LedgerFile
from trellis.ledgers.sqlite.names import NameNumbers
from trellis.ledgers.sqlite.plan import US
from trellis.ledgers.sqlite.writer_queue import GIVE_WAY_S, POLL_S, WriterQueue

# The writer and reader threads, with one connection each.
#
# Group commit without timers: the writer takes every waiting call, runs them in one transaction with a savepoint each,
# commits once and wakes every event loop once. An idle writer starts at once, so a single call does not wait.
#
# Handing a small call to the thread and its answer back takes longer than the call: two switches of threads, each with a
# wait for the interpreter lock. So small calls of one event loop run in that loop, together, while the thread has
# nothing to do and the last small calls were quick: each caller gives way to the loop's other tasks once, and whoever
# goes on first runs the calls of all. The thread gets all that may take long: larger calls, calls that
# meet other writers, checkpoints, pauses, and every call while the disk is slow. So a loop stands still for about
# IN_PLACE_S_MAX at the most, but for the first calls on a disk that becomes slow.
#
# A commit does not checkpoint the write-ahead log: the thread does, after the answers, when the log is long, or when the
# writer has little to do.

_log = log_of("trellis.ledger")

T = TypeVar("T")
CALLS_MAX = 512
"""The most calls that share one transaction. Further calls go into the next one."""
SHARED_ITEMS_MAX = 1_000
"""The most items of calls that run as one."""
QUIET_S = 5.0
QUIET_COMMITS_MAX = 50
"""A writer with at most this many commits within `QUIET_S` is quiet."""
PAGE_BYTES = 4096 + 24
"""The size of a page in the log, with its header."""
NO_LIMIT = -1
QUIET_PAGES_MAX = 64
"""Pages of the write-ahead log that a quiet writer leaves unmerged."""
LOG_PAGES_MAX = 4_000
"""Pages of the write-ahead log after which it is checkpointed, busy or not.

That is four times SQLite's default, so that hot pages are written back less often. Three noisy runs put it ahead of
both 1,000 and 16,000.
"""
IN_PLACE_ITEMS_MAX = 32
"""The most items of calls that run together in their caller's event loop."""
IN_PLACE_S_MAX = 0.002
"""Small calls count as quick if they take at most so long together, with their commit."""
QUICK_RUNS_MIN = 4
"""How many times in a row small calls must have been quick before they run in their caller's event loop."""
INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What a signal handler raises in the thread of an event loop. They end the program, and are no call's own error."""
NO_ANSWER = object()
"""Stands for the answer of a call that has none yet. None is an answer."""


@dataclass(slots=True)
class Transaction:
    """What a call works with: a connection inside a transaction, the ledger's time, and the numbers of names."""

    db: Database
    names: NameNumbers
    now: int
    cursor: Database
    """Like `db`, but each statement ends the one before it, whose rows must have been fetched.

    A connection makes a new cursor for each statement, which takes longer than many a statement itself.
    """
    has_arrays: bool = False
    """Whether statements can read arrays of the library. Those on a connection of the caller's cannot."""
    woke: bool = False
    """A job became claimable: waiters for work are notified after the commit."""
    appended: bool = False
    """Events were appended: waiters for events or work are notified after the commit."""
    took_all: bool = False
    """The last claim has looked for work and left no job that it could have taken."""


LaneWork = Callable[[Transaction], Any]


class SharedCall(NamedTuple):
    """A call that can be merged with others of its kind.

    `work` takes the items of each call and answers all items in order.
    """

    kind: Hashable
    items: Sequence[Any]
    work: Callable[[Transaction, Sequence[Sequence[Any]]], list[Any]]

    def alone(self, transaction: Transaction) -> list[Any]:
        return self.work(transaction, (self.items,))


@dataclass(slots=True, eq=False)
class _LaneCall:
    work: LaneWork
    loop: "_CallersLoop"
    shared: SharedCall | None = None
    size: int | None = None
    is_taken: bool = False
    """Whether it was run in its event loop, or given to the thread."""
    done: "asyncio.Future[None] | None" = None
    """For a call of the thread: completes when the call has its answer or its error."""
    answer: Any = NO_ANSWER
    error: BaseException | None = None


class _CallersLoop(Protocol):
    """An event loop with callers of a lane, as the lane's thread sees it."""

    def resolve(self, calls: list[_LaneCall]) -> None:
        """Deliver answers. Called from the lane's thread."""
        ...

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver what has been answered and stop watching. Called in the loop itself."""
        ...


class _WatchedLoop:
    """An event loop that watches an eventfd for answers.

    That takes half as long as asyncio's `call_soon_threadsafe`, which makes a handle, writes to a socket and reads it twice.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._answered: deque[list[_LaneCall]] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The lane's thread may still write when the loop is gone, so the descriptor is closed with this object.
        weakref.finalize(self, os.close, self._signal)
        loop.add_reader(self._signal, self._resolve_answered)

    def resolve(self, calls: list[_LaneCall]) -> None:
        self._answered.append(calls)
        os.eventfd_write(self._signal, 1)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._signal)
        self._resolve_all()

    def _resolve_answered(self) -> None:
        os.eventfd_read(self._signal)
        self._resolve_all()

    def _resolve_all(self) -> None:
        while self._answered:
            _resolve(self._answered.popleft())


class _CalledLoop:
    """An event loop that cannot watch an eventfd, as outside Linux, or whose own way is quicker, as uvloop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)

    def resolve(self, calls: list[_LaneCall]) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: no caller waits there any more
                loop.call_soon_threadsafe(_resolve, calls)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """It watches nothing."""


def _callers_loop(loop: asyncio.AbstractEventLoop) -> _CallersLoop:
    if hasattr(os, "eventfd") and isinstance(loop, asyncio.SelectorEventLoop):
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor is left, or the loop watches none
            return _WatchedLoop(loop)
    return _CalledLoop(loop)


@dataclass(slots=True, weakref_slot=True)
class _Callers:
    """The callers of a lane in one event loop."""

    loop: _CallersLoop
    gathered: list[_LaneCall] = field(default_factory=list[_LaneCall])
    """Small calls that run in the loop soon."""

    def take(self) -> list[_LaneCall]:
        calls, self.gathered = self.gathered, []
        for call in calls:
            call.is_taken = True
        return calls

    def give_up(self, call: _LaneCall) -> None:
        """The caller does not want its call any more. What has begun goes on."""
        if not call.is_taken:
            self.gathered.remove(call)
        elif call.done is not None:
            call.done.cancel()


@coroutine
def _next_turn() -> Generator[None, None, None]:
    """Go on in the event loop's next turn, after the tasks that are ready now."""
    yield


@dataclass(slots=True, kw_only=True)
class _Stop:
    closed: threading.Event = field(default_factory=threading.Event)


class _Upkeep:
    """Work of the lane's thread after a commit that was made in a caller's event loop."""


_UPKEEP = _Upkeep()


class SqliteLane:
    """One thread with one connection. Calls run in the order of arrival."""

    def __init__(
        self,
        connection: apsw.Connection,
        *,
        url: str,
        name: str,
        clock: Callable[[], float],
        node: str,
        writes: bool,
        room: WriterQueue | None = None,
        on_wake: Callable[[], None] = lambda: None,
        on_events: Callable[[], None] = lambda: None,
        file: LedgerFile | None = None,
    ) -> None:
        self._connection = connection
        self._db: Database = connection
        self._cursor: Database = connection.cursor()
        self._url = url
        self._clock = clock
        self._names = NameNumbers(connection, node)
        self._on_wake = on_wake
        self._on_events = on_events
        self._file = file
        self._room = room
        connection.set_busy_handler(self._wait_for_lock)
        if room is not None:
            connection.set_wal_hook(self._note_log)
        self._calls: SimpleQueue[_LaneCall | _Upkeep | _Stop] = SimpleQueue()
        self.waiting = 0
        """Calls in progress or queued."""
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Callers] = weakref.WeakKeyDictionary()
        self._last: tuple[Callable[[], object], Callable[[], _Callers | None]] = (lambda: None, lambda: None)
        """The event loop that called last, and its callers, held weakly. Nearly always the next call comes from it too."""
        self._connection_lock = threading.RLock()
        """Held by the thread that uses the connection: the lane's, or that of a caller's event loop. It knows who holds it."""
        self._count_lock = threading.Lock()
        self._in_thread = 0
        """What was given to the thread and is not done."""
        self._has_ended = False
        """Whether the thread takes nothing any more."""
        self._in_place = False
        """Whether a caller's event loop uses the connection, which must not wait."""
        self._quick_runs = 0
        """How many times in a row small calls were quick."""
        self._log_pages = 0
        self._is_period_over = False
        self._stop: _Stop | None = None
        self.damage: LedgerError | None = None
        """What was found to be damaged, by the last call that met it."""
        self._writes = writes
        self._run_batch = self._write if writes else self._read
        self._changes = connection.total_changes()
        self._commits = 0
        self._quiet_since = 0.0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _lanes.add(self)

    def share(self, shared: SharedCall, size: int | None = None) -> Coroutine[Any, Any, list[Any]]:
        """Like `run`, but waiting calls of one kind are merged into one."""
        return self.run(shared.alone, shared, size)

    async def run(
        self, work: Callable[[Transaction], T], shared: SharedCall | None = None, size: int | None = None
    ) -> T:
        """The result of `work`, after its commit. A call whose `size` in items is known and small may run in its loop."""
        if self._stop is not None:
            raise ledger_closed()
        loop = asyncio.get_running_loop()
        last_loop, last_callers = self._last
        callers = (last_callers() if last_loop() is loop else None) or self._callers_in(loop)
        call = _LaneCall(work, callers.loop, shared, size)
        callers.gathered.append(call)
        self.waiting += 1
        try:
            if size is None or self._in_thread or self._quick_runs < QUICK_RUNS_MIN:
                self._give_to_thread(callers.take(), loop)
            else:
                await _next_turn()
                if not call.is_taken:
                    self._run_gathered(callers, loop)
            if call.done is not None:
                await call.done
        except BaseException:
            callers.give_up(call)
            raise
        finally:
            self.waiting -= 1
        if call.error is not None:
            raise call.error
        if call.answer is NO_ANSWER:  # an interrupt came between its taking and its run, in the caller that took it
            raise _interrupted()
        return call.answer

    def _callers_in(self, loop: asyncio.AbstractEventLoop) -> _Callers:
        callers = self._loops.get(loop)
        if callers is None:
            callers = self._loops[loop] = _Callers(_callers_loop(loop))
        self._last = (weakref.ref(loop), weakref.ref(callers))
        return callers

    def now(self) -> int:
        """The ledger's time, in microseconds."""
        return int(self._clock() * US)

    async def close(self) -> None:
        """Finish the calls in progress, then close the connection."""
        loop = asyncio.get_running_loop()
        if self._stop is None:
            self._stop = _Stop()
            callers = self._loops.get(loop)
            if callers is not None:
                self._give_to_thread(callers.take(), loop)
            self._give([self._stop])
        await loop.run_in_executor(None, self._stop.closed.wait)
        callers = self._loops.pop(loop, None)
        if callers is not None:
            callers.loop.leave(loop)

    def _give_to_thread(self, calls: list[_LaneCall], loop: asyncio.AbstractEventLoop) -> None:
        """Give calls of this event loop to the thread. Called in the loop."""
        for call in calls:
            call.done = loop.create_future()
        self._give(calls)

    def _give(self, calls: "Sequence[_LaneCall | _Upkeep | _Stop]") -> None:
        """Give calls to the thread. If it has ended meanwhile, they are refused."""
        with self._count_lock:
            if not self._has_ended:
                self._in_thread += len(calls)
                for call in calls:
                    self._calls.put(call)
                return
        _refuse([call for call in calls if isinstance(call, _LaneCall)])

    # --- in the caller's event loop ------------------------------------------------------------------------------

    def _run_gathered(self, callers: _Callers, loop: asyncio.AbstractEventLoop) -> None:
        """Run the small calls of an event loop in it, if that is quick, or give them to the thread."""
        calls = callers.take()
        is_done = False
        try:
            if not self._in_thread and _are_few(calls) and self._connection_lock.acquire(blocking=False):
                is_done = self._stop is None and self._run_in_place(calls)
        except apsw.Error as error:
            is_done = True
            self._break_off(calls, error)
        except BaseException as error:  # noqa: BLE001 - the loop raises it, goes on later perhaps, and so do the callers
            is_done = True
            for call in calls:
                call.error = _interrupted()
            loop.call_soon(_interrupt, error)
        finally:
            # An interrupt may come right after the lock was taken, so only the lock knows. Nothing may come in between here.
            try:  # noqa: SIM105
                self._connection_lock.release()
            except RuntimeError:  # this thread does not hold it
                pass
        if not is_done:
            self._give_to_thread(calls, loop)

    def _run_in_place(self, calls: list[_LaneCall]) -> bool:
        """Run calls without waiting for anything but the disk. False, and nothing was done, if other writers are busy."""
        self._in_place = True
        try:
            if not self._run_timed(calls, are_few=True):
                return False
        finally:
            self._in_place = False
        if self._wants_upkeep():
            self._give([_UPKEEP])
        return True

    def _run_timed(self, calls: list[_LaneCall], *, are_few: bool) -> bool:
        """Run calls, and note whether small ones were quick."""
        began = time.perf_counter()
        is_done = self._run_batch(calls)
        if are_few:
            is_quick = is_done and time.perf_counter() - began <= IN_PLACE_S_MAX
            self._quick_runs = self._quick_runs + 1 if is_quick else 0
        return is_done

    # --- in the lane's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            batch, stop, taken = self._gather()
            if batch:
                with self._connection_lock:
                    self._run_whatever_happens(batch)
            with self._count_lock:
                self._in_thread -= taken
            # Callers hear last: a caller's thread that wakes while this one runs has to wait for the interpreter.
            _answer_callers(batch)
            self._keep_up_whatever_happens()
            if stop is not None:
                with self._connection_lock:
                    self._finish(stop)
                return

    def _run_whatever_happens(self, batch: list[_LaneCall]) -> None:
        """Run calls. If that breaks, their callers hear it, and the thread goes on with the next calls."""
        try:
            self._run_timed(batch, are_few=_are_few(batch))
        except BaseException as error:  # noqa: BLE001 - a thread that ended would leave its callers waiting for ever
            self._break_off(batch, error)

    def _break_off(self, batch: list[_LaneCall], error: BaseException) -> None:
        """Give callers an error that is not their own. A write may have been committed; a read that was answered stands."""
        _log.error("ledger_call_broke", error=repr(error), exc_info=error)
        with contextlib.suppress(apsw.Error):
            self._roll_back()
        broken: LedgerError = OutcomeUnknown(verb="a call", request=f"it broke: {type(error).__name__}: {error}")
        if isinstance(error, apsw.Error) and not self._writes:
            broken = self._to_ledger_error(error)
        broken.__cause__ = error
        for call in batch:
            if call.error is None and (self._writes or call.answer is NO_ANSWER):
                call.error = broken

    def _keep_up_whatever_happens(self) -> None:
        try:
            if self._wants_upkeep():
                with self._connection_lock:
                    self._keep_up()
        except Exception:  # noqa: BLE001 - the next commit tries again
            _log.exception("ledger_upkeep_broke")

    def _gather(self) -> tuple[list[_LaneCall], _Stop | None, int]:
        """Wait for the first call, then take all waiting calls. The number is how many were taken."""
        batch: list[_LaneCall] = []
        item = self._calls.get()
        for taken in count(1):
            if isinstance(item, _Stop):
                return batch, item, taken
            if isinstance(item, _LaneCall) and item.done is not None and not item.done.cancelled():
                batch.append(item)
            # Only this thread takes calls, so a queue that is not empty has one.
            if len(batch) >= CALLS_MAX or self._calls.empty():
                return batch, None, taken
            item = self._calls.get_nowait()
        raise AssertionError

    def leave_to_parent(self) -> None:
        """Refuse every call in a process that was forked from the one that opened this lane."""
        self._connection_lock, self._count_lock = threading.RLock(), threading.Lock()  # their holders are not here
        self._stop, self._has_ended = _Stop(), True
        self._stop.closed.set()

    def _finish(self, stop: _Stop) -> None:
        with self._count_lock:
            self._has_ended = True
        _refuse(self._late())
        try:
            self._connection.close()
            if self._room is not None:
                self._room.close()
        finally:
            stop.closed.set()

    def _late(self) -> list[_LaneCall]:
        late: list[_LaneCall] = []
        while not self._calls.empty():
            item = self._calls.get()
            if isinstance(item, _LaneCall):
                late.append(item)
        return late

    # --- writing -------------------------------------------------------------------------------------------------

    def _wait_for_lock(self, tries: int) -> bool:
        """Sleep once while another connection has the lock. False if an event loop would wait, or after too long."""
        if self._in_place:
            return False
        if self._room is not None:
            return self._room.wait(tries)
        time.sleep(POLL_S[0])
        return tries * POLL_S[0] < BUSY_TIMEOUT_S

    def _note_log(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        """Note the length of the write-ahead log after a commit, in place of SQLite's own checkpoints."""
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _write(self, batch: list[_LaneCall]) -> bool:
        lost = None if self._file is None else self._file.problem()
        if lost is not None:
            for call in batch:
                call.error = lost
            return True
        if not self._commit(batch):
            return False
        self._count_commit()
        return True

    def _begin(self) -> None:
        try:
            self._cursor.execute("BEGIN IMMEDIATE")
        finally:
            if self._room is not None:
                self._room.enter()

    def _commit(self, batch: list[_LaneCall]) -> bool:
        """Run calls in one transaction. False, and nothing was done, if it could not begin and must not wait."""
        begun = committing = False
        try:
            self._begin()
            begun = True
            transaction = Transaction(self._db, self._names, int(self._clock() * US), self._cursor, HAS_ARRAYS)
            for calls in _units(batch):
                if len(calls) == 1:
                    self._one(calls[0], transaction, alone=len(batch) == 1)
                else:
                    self._together(calls, transaction)
            committing = True
            if self._connection.in_transaction:
                self._cursor.execute("COMMIT")
        except apsw.Error as error:
            if self._in_place and not begun and isinstance(error, apsw.BusyError):
                return False
            self._spoil(batch, error, committing=committing)
            return True
        except BaseException:  # an interrupt of the thread of an event loop
            self._roll_back()
            raise
        if transaction.woke:
            self._on_wake()
        if transaction.appended or transaction.woke:
            self._on_events()
        return True

    def _one(self, call: _LaneCall, transaction: Transaction, *, alone: bool) -> None:
        """Run one call. A failure rolls back only this call's writes."""
        if not alone:
            self._db.execute("SAVEPOINT call")
        try:
            call.answer = call.work(transaction)
        except BaseException as error:  # any other error belongs to the caller of this work
            if self._ends_all(error):
                raise
            call.error = _error_for_caller(error, self._url)
            self._names.forget()
            self._db.execute("ROLLBACK" if alone else "ROLLBACK TO call")
        if not alone:
            self._db.execute("RELEASE call")

    def _together(self, calls: list[_LaneCall], transaction: Transaction) -> None:
        """Run calls of one kind as one. If that fails, run each alone, so that only the failing call fails."""
        shares = [call.shared for call in calls if call.shared is not None]
        self._db.execute("SAVEPOINT call")
        try:
            answers = iter(shares[0].work(transaction, [shared.items for shared in shares]))
        except BaseException as error:
            if self._ends_all(error):
                raise
            self._names.forget()
            self._db.execute("ROLLBACK TO call")
            self._db.execute("RELEASE call")
            for call in calls:
                self._one(call, transaction, alone=False)
            return
        self._db.execute("RELEASE call")
        for call, shared in zip(calls, shares, strict=True):
            call.answer = list(islice(answers, len(shared.items)))

    def _ends_all(self, error: BaseException) -> bool:
        """Whether an error ends the whole transaction, not only the call in which it was raised."""
        return spoils_transaction(error) or (self._in_place and isinstance(error, INTERRUPTS))

    def _spoil(self, batch: list[_LaneCall], error: apsw.Error, *, committing: bool) -> None:
        """The store failed: the transaction is rolled back, and every caller gets the error."""
        self._roll_back()
        for call in batch:
            call.error = self._to_ledger_error(error, committing=committing)

    def _to_ledger_error(self, error: apsw.Error, *, committing: bool = False) -> LedgerError:
        """The error for a caller. Damage is logged once, and remembered."""
        ledger_error = to_ledger_error(error, self._url, committing=committing)
        if isinstance(error, apsw.CorruptError):
            if self.damage is None:
                _log.error("ledger_damaged", url=self._url, error=str(error))
            self.damage = ledger_error
        return ledger_error

    def _roll_back(self) -> None:
        self._names.forget()
        if self._connection.in_transaction:
            self._db.execute("ROLLBACK")

    def _count_commit(self) -> None:
        """Count a commit that changed something, and note whether it is the last one of a period of `QUIET_S`."""
        if self._room is None:
            return
        changes = self._connection.total_changes()
        if changes == self._changes:
            return
        self._changes = changes
        self._commits += 1
        if self._commits == QUIET_COMMITS_MAX + 1:
            self._limit_log(NO_LIMIT)
        self._is_period_over = not 0 <= self._clock() - self._quiet_since < QUIET_S

    def _wants_upkeep(self) -> bool:
        """Whether other writers wait for this one to pause, or the log is to be checkpointed."""
        if self._room is None:
            return False
        return self._is_period_over or self._log_pages >= LOG_PAGES_MAX or self._room.others_wait()

    def _keep_up(self) -> None:
        """Do what a commit leaves to the thread."""
        assert self._room is not None
        if self._room.others_wait():
            time.sleep(GIVE_WAY_S)
        if self._log_pages >= LOG_PAGES_MAX:
            self._log_pages = 0
            with contextlib.suppress(apsw.Error):  # the next commit tries again
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        if self._is_period_over:
            self._is_period_over = False
            self._fold_back_when_quiet()

    def _fold_back_when_quiet(self) -> None:
        """Checkpoint the write-ahead log when the writer is quiet, so that later commits reuse it from its beginning.

        A passive checkpoint neither waits for nor blocks readers and writers of other connections.
        """
        assert self._room is not None
        quiet = self._commits <= QUIET_COMMITS_MAX
        self._quiet_since, self._commits = self._clock(), 0
        if not quiet:
            return
        self._limit_log(QUIET_PAGES_MAX * PAGE_BYTES)
        self._connection.set_busy_handler(None)
        try:
            pages, _ = self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if pages > QUIET_PAGES_MAX:
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error:  # a reader or another writer is active: the next checkpoint does it
            pass
        finally:
            self._connection.set_busy_handler(self._wait_for_lock)

    def _limit_log(self, size: int) -> None:
        """Set the size to which the log is truncated when it restarts.

        A busy writer would only have to extend it again, and a commit that extends a file takes the disk two to four
        times as long as one that overwrites it.
        """
        with contextlib.suppress(apsw.Error):  # only the size of the log depends on it
            self._db.execute(f"PRAGMA journal_size_limit = {size}")

    # --- reading -------------------------------------------------------------------------------------------------

    def _read(self, batch: list[_LaneCall]) -> bool:
        """Run calls in a transaction each. False if one would have to wait and must not: it reads again in the thread."""
        for call in batch:
            try:
                self._cursor.execute("BEGIN")
                call.answer = call.work(Transaction(self._db, self._names, int(self._clock() * US), self._cursor))
            except apsw.Error as error:
                if self._in_place and isinstance(error, apsw.BusyError):
                    return False
                call.error = self._to_ledger_error(error)
            except BaseException as error:
                if self._ends_all(error):
                    raise
                call.error = error
            finally:
                self._end_reading()
        return True

    def _end_reading(self) -> None:
        if self._connection.in_transaction:
            try:
                self._cursor.execute("COMMIT")
            except apsw.Error:  # it may say once more why a statement failed, and ends the transaction all the same
                if self._connection.in_transaction:
                    self._db.execute("ROLLBACK")


_lanes: weakref.WeakSet[SqliteLane] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked process has no thread of a lane, and may not use the connection: SQLite allows that to nobody but its opener."""
    for lane in _lanes:
        lane.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _error_for_caller(error: BaseException, url: str) -> BaseException:
    """The error for one call's own failure. A trigger of the database that raises is a refusal."""
    if isinstance(error, apsw.ConstraintError):
        return Refused(detail=str(error))
    return to_ledger_error(error, url) if isinstance(error, apsw.Error) else error


def _are_few(calls: Sequence[_LaneCall]) -> bool:
    """Whether calls are small together."""
    items = 0
    for call in calls:
        if call.size is None:
            return False
        items += call.size
    return items <= IN_PLACE_ITEMS_MAX


def _units(batch: list[_LaneCall]) -> list[list[_LaneCall]]:
    """Groups of calls that run as one, up to a bound. Every other call is a group of its own."""
    if len(batch) == 1:
        return [batch]
    units: list[list[_LaneCall]] = []
    open_units: dict[Hashable, tuple[list[_LaneCall], int]] = {}
    for kind, neighbours in groupby(batch, lambda call: call.shared and call.shared.kind):
        if kind is None:
            units += ([call] for call in neighbours)
            continue
        calls: list[_LaneCall]
        calls, items = open_units.get(kind, ([], 0))
        for call in neighbours:
            assert call.shared is not None
            size = len(call.shared.items)
            if not calls or items + size > SHARED_ITEMS_MAX:
                calls, items = [], 0
                units.append(calls)
            calls.append(call)
            items += size
        open_units[kind] = (calls, items)
    return units


def _answer_callers(batch: list[_LaneCall]) -> None:
    """Deliver all answers, with one wake-up per event loop."""
    by_loop: dict[_CallersLoop, list[_LaneCall]] = {}
    for call in batch:
        by_loop.setdefault(call.loop, []).append(call)
    for loop, calls in by_loop.items():
        loop.resolve(calls)


def _refuse(calls: list[_LaneCall]) -> None:
    """Tell the callers that the ledger is closed."""
    for call in calls:
        call.error = ledger_closed()
    _answer_callers(calls)


def _resolve(calls: list[_LaneCall]) -> None:
    for call in calls:
        if call.done is not None and not call.done.done():
            call.done.set_result(None)


def _interrupted() -> OutcomeUnknown:
    return OutcomeUnknown(verb="a call", request="this thread was interrupted")


def _interrupt(error: BaseException) -> None:
    """End the event loop that calls this, as the interrupt would have that came while a call was run in it."""
    raise error

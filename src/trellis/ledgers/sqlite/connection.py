"""Opens the SQLite file: URLs, library version, pragmas, and the translation of errors."""

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import apsw

from trellis.engine.errors import (
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerReadOnly,
    LedgerTooOld,
    LedgerUnavailable,
    LedgerUpgraded,
    LedgerUrlInvalid,
    OutcomeUnknown,
)
from trellis.engine.private_files import make_private

SQLITE_NEEDED = (3, 51, 3)
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for another process's write before it raises LedgerUnavailable."""
WAL_SWITCH_POLL_S = 0.01
WAL_SWITCH_TRIES = int(BUSY_TIMEOUT_S / WAL_SWITCH_POLL_S)
"""How often the switch to the write-ahead log is tried before opening raises LedgerUnavailable."""
CACHE_KIB = 64 * 1024
HAS_ARRAYS = "ENABLE_CARRAY" in apsw.compile_options
"""Whether statements on our connections can read arrays (`apsw.carray`). The library of a distribution may lack that."""
STATEMENTS = 256
_AS_ACTING_USER = os.access in os.supports_effective_ids
SCHEME = "sqlite://"
_MEMORY = ("", "/:memory:", ":memory:")
_FULL_AT_IO = (apsw.SQLITE_IOERR_WRITE, apsw.SQLITE_IOERR_SHMSIZE, apsw.SQLITE_IOERR_SHMMAP)
_OTHER_SCHEMA = ("no query solution", "no such index", "no such table", "no such column")
"""How SQLite begins to say that a statement does not fit the schema: an index, a table or a column is gone."""


bound_array = cast("Callable[[Sequence[str] | Sequence[bytes] | array[int]], object]", getattr(apsw, "carray", None))
"""Makes a binding that a statement reads with `carray`: a tuple of texts or of bytes, or an array of numbers."""


class ResultRows(Protocol):
    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """The part of a connection that the verbs use. Connections of apsw and of the standard library both have it."""

    def execute(self, sql: str, bindings: Any = ..., /) -> ResultRows: ...

    def executemany(self, sql: str, bindings: Any, /) -> ResultRows: ...


class ScratchDatabase(Database, Protocol):
    """A database in a temporary file, which is deleted when it is closed."""

    def close(self) -> None: ...


def open_scratch_database(tables: str) -> ScratchDatabase:
    """Open a database for intermediate results, with the tables that these statements create.

    Nothing in it survives the process.
    """
    database = cast("ScratchDatabase", apsw.Connection(""))  # SQLite chooses a temporary file for an empty name
    for statement in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", tables):
        database.execute(statement).fetchall()
    return database


@dataclass(frozen=True, kw_only=True, slots=True)
class SqliteTarget:
    """The location of a ledger: a file, or None for a database in this process's memory."""

    url: str
    path: Path | None


def parse_url(url: str) -> SqliteTarget:
    """Parse `sqlite:///relative.db`, `sqlite:////absolute.db` or `sqlite://` (memory). Raises for anything else."""
    if url == ":memory:":
        return SqliteTarget(url=url, path=None)
    if not url.startswith(SCHEME):
        raise LedgerUrlInvalid(url=url, reason="it does not begin with sqlite://")
    rest = url.removeprefix(SCHEME)
    if rest in _MEMORY:
        return SqliteTarget(url=url, path=None)
    if not rest.startswith("/"):
        raise LedgerUrlInvalid(url=url, reason="a path follows three slashes, an absolute one four")
    name = rest[1:]
    if not name or name.endswith("/") or "\x00" in name or "?" in name:
        raise LedgerUrlInvalid(url=url, reason="it names no file")
    return SqliteTarget(url=url, path=Path(name))


def refuse_old_library(version: str) -> None:
    """Refuse SQLite before 3.51.3: it can damage a file that several connections write (the WAL-reset bug)."""
    if tuple(int(part) for part in version.split(".")[:3]) < SQLITE_NEEDED:
        needed = ".".join(map(str, SQLITE_NEEDED))
        reason = "older ones can damage a database that several connections write"
        raise LedgerTooOld(software="SQLite", found=version, needed=needed, reason=reason)


def connect(target: SqliteTarget, *, sleep: Callable[[float], None] = time.sleep) -> apsw.Connection:
    """A connection configured for the ledger. Creates the file if it does not exist."""
    refuse_old_library(apsw.sqlite_lib_version())
    _refuse_impossible(target)
    name = ":memory:" if target.path is None else str(target.path)
    if target.path is not None:
        make_private(target.path)  # SQLite gives its other files the mode of this one
        _refuse_unwritable(target.path)
    try:
        connection = apsw.Connection(name, statementcachesize=STATEMENTS)
    except apsw.Error as error:
        raise to_ledger_error(error, target.url) from error
    if connection.readonly("main"):
        connection.close()
        raise LedgerReadOnly(reason=f"{target.path} may not be written by this user")
    try:
        # A plan does not depend on the values that are bound. Otherwise SQLite prepares a statement again with every
        # call where a value could decide about a partial index, which takes ten times as long as the query itself.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        _configure(connection, sleep)
    except apsw.Error as error:
        connection.close()
        raise to_ledger_error(error, target.url) from error
    return connection


def _configure(connection: Database, sleep: Callable[[float], None]) -> None:
    _switch_to_wal(connection, sleep)
    for pragma in (
        f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}",
        "PRAGMA synchronous = FULL",
        "PRAGMA foreign_keys = ON",
        "PRAGMA temp_store = MEMORY",
        f"PRAGMA cache_size = -{CACHE_KIB}",
    ):
        connection.execute(pragma).fetchall()


def _switch_to_wal(connection: Database, sleep: Callable[[float], None]) -> None:
    """Switch to the write-ahead log. SQLite's busy timeout does not cover this switch, so concurrent openers retry."""
    for _ in range(WAL_SWITCH_TRIES - 1):
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
        except apsw.BusyError:
            sleep(WAL_SWITCH_POLL_S)
        else:
            return
    connection.execute("PRAGMA journal_mode = WAL").fetchall()


def _refuse_impossible(target: SqliteTarget) -> None:
    path = target.path
    if path is None:
        return
    if path.is_dir():
        raise LedgerUrlInvalid(url=target.url, reason=f"{path} is a folder")
    if not path.parent.is_dir():
        raise LedgerUrlInvalid(url=target.url, reason=f"the folder {path.parent} does not exist")


def _refuse_unwritable(path: Path) -> None:
    """Refuse a ledger of which a file may not be written, before SQLite makes others beside it with the same mode."""
    for end in ("", "-wal", "-shm"):
        file = path.with_name(path.name + end)
        # The last process that closes the ledger deletes the others, perhaps at this moment.
        if file.exists() and not os.access(file, os.R_OK | os.W_OK, effective_ids=_AS_ACTING_USER) and file.exists():
            raise LedgerReadOnly(reason=f"{file} may not be written by this user")


def to_ledger_error(error: apsw.Error, url: str, *, committing: bool = False) -> LedgerError:
    """The LedgerError for an error of the library."""
    if isinstance(error, apsw.FullError) or getattr(error, "extendedresult", 0) in _FULL_AT_IO:
        ledger_error: LedgerError = LedgerFull(ledger=url.removeprefix(f"{SCHEME}/"))
    elif isinstance(error, apsw.ReadOnlyError):
        ledger_error = LedgerReadOnly(reason=str(error))
    elif isinstance(error, apsw.NotADBError):
        reason = "the file is not an SQLite database; if it was one, it is damaged: keep it and restore the last backup"
        ledger_error = LedgerUrlInvalid(url=url, reason=reason)
    elif isinstance(error, apsw.CorruptError):
        ledger_error = LedgerDamaged(reason=str(error))
    elif isinstance(error, (apsw.BusyError, apsw.LockedError)):
        ledger_error = LedgerUnavailable(reason=f"another process has been writing for {BUSY_TIMEOUT_S:g} s")
    elif isinstance(error, apsw.SQLError) and str(error).startswith(_OTHER_SCHEMA):
        ledger_error = LedgerUpgraded(reason=str(error))
    elif committing and isinstance(error, apsw.IOError):
        ledger_error = OutcomeUnknown(verb="a write", request=str(error))
    else:
        ledger_error = LedgerUnavailable(reason=f"{type(error).__name__}: {error}")
    ledger_error.__cause__ = error
    return ledger_error


def spoils_transaction(error: BaseException) -> bool:
    """Whether an error is the store's, so that every call of the transaction fails, or one call's own."""
    return isinstance(error, apsw.Error) and not isinstance(error, (apsw.ConstraintError, apsw.SQLError))

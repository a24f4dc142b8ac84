"""Copies an SQLite ledger as it was at one instant, while other processes go on writing it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from trellis.ledgers.sqlite.connection import Database, connect, parse_url, to_ledger_error

PAGES_A_STEP = 1_000
"""Pages that are copied before progress is reported."""
_NOT_OF_THE_FILE = (apsw.FullError, apsw.IOError, apsw.CantOpenError, apsw.NoMemError)
"""Errors of the machine that checks a file. They say nothing about the file."""


class SqliteSnapshot:
    """A ledger file as it was between `hold` and `release`. Between the two no other process can write it.

    The state stays readable after `release`, until `close`. SQLite's log grows meanwhile, by what others write.
    """

    def __init__(self, path: Path) -> None:
        self._target = parse_url(f"sqlite:///{path}")
        self._blocking = connect(self._target)
        self._reading = connect(self._target)

    def hold(self, *, wait_s: float) -> None:
        """Keep others from writing. Waits for their transactions; raises LedgerUnavailable if one does not end."""
        self._blocking.set_busy_timeout(int(wait_s * 1000))
        try:
            _execute(self._blocking, "BEGIN IMMEDIATE")
            _execute(self._reading, "BEGIN")
            _execute(self._reading, "SELECT count(*) FROM sqlite_schema")  # the first read fixes the state
        except apsw.Error as error:
            raise to_ledger_error(error, self._target.url) from error

    def release(self) -> None:
        """Let others write again."""
        self._blocking.close()  # which rolls its transaction back; closing it twice is allowed

    def copy_to(self, path: Path, on_pages: Callable[[int], None]) -> None:
        """Write the held state into a new file. `on_pages` is called with the number of pages copied."""
        try:
            target = apsw.Connection(str(path))
            try:
                _execute(target, "PRAGMA synchronous = OFF")  # whoever asked for the copy syncs what it keeps
                with target.backup("main", self._reading, "main") as copying:
                    while not copying.done:
                        copying.step(PAGES_A_STEP)
                        on_pages(copying.page_count - copying.remaining)
            finally:
                target.close()
        except apsw.Error as error:
            raise to_ledger_error(error, self._target.url) from error

    def close(self) -> None:
        """Give up the state. It may be called twice."""
        self._blocking.close()
        self._reading.close()


def damage_of(path: Path) -> str | None:
    """What SQLite's own check finds wrong with a file; None if it finds nothing.

    Raises LedgerError if the file could not be checked, for example because its disk is full.
    """
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            answer = str(_execute(connection, "PRAGMA integrity_check(1)")[0][0])
        finally:
            connection.close()
    except _NOT_OF_THE_FILE as error:
        raise to_ledger_error(error, f"sqlite:///{path}") from error
    except apsw.Error as error:
        return str(error)
    return None if answer == "ok" else " ".join(answer.split()).removeprefix("*** in database main *** ")


def _execute(database: Database, sql: str) -> list[Any]:
    return database.execute(sql).fetchall()

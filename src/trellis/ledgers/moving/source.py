"""The SQLite ledger that is moved: reading its rows, and closing it for every writer.

A closed ledger refuses writes by triggers on each of its tables, so that also a program that knows nothing of moves is
refused. The triggers are made when the ledger is closed: an open ledger has none, and pays nothing for them.
"""

import fcntl
import json
import os
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, LiteralString

import apsw

from trellis.engine.errors import LedgerUnavailable, Refused
from trellis.engine.private_files import open_beside
from trellis.ledgers.moving.parts import SOURCE, UNKNOWN_ROLE, LedgerPart, MovedRow
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S, Database, connect, parse_url, to_ledger_error
from trellis.ledgers.sqlite.schema import check_version, stored_version

PAGE_ROWS = 1_000
PAGE_BYTES = 4 * 1024 * 1024
"""A page ends after the row with which it has this many bytes."""
FORMAT = 1


class MoveRefused(Refused):
    """The instance was not moved: {reason}."""

    code = "VALIDATION_FAILED"


class MovedAway(Refused):
    """This ledger is closed: its instance moves, or has moved, to {ledger}. {remedy}"""

    code = "VALIDATION_FAILED"


class MoveStage(StrEnum):
    """How far a source is."""

    CLOSED = "closed"
    MOVED = "moved"


@dataclass(frozen=True, kw_only=True)
class MoveMark:
    """What a source says about its move. Addresses have no passwords."""

    id: str
    ledger: str
    objects: str
    memory: str | None
    nlm_ledger: str | None
    by: str
    version: str
    stage: MoveStage = MoveStage.CLOSED
    format: int = FORMAT

    @property
    def options(self) -> str:
        """The options of the command that began it."""
        named = {"--to-ledger": self.ledger, "--to-objects": self.objects, "--to-memory": self.memory}
        named["--to-nlm-ledger"] = self.nlm_ledger
        return " ".join(f"{option} {shlex.quote(value)}" for option, value in named.items() if value is not None)

    @property
    def remedy(self) -> str:
        """What can be done about a closed ledger."""
        if self.stage is MoveStage.MOVED:
            return "The instance is open there; nothing is to be done here."
        return f"`trellis move {self.options}` goes on with it, and `trellis move --undo {self.options}` opens this one again."


def read_mark(url: str) -> MoveMark | None:
    """What an SQLite ledger says about its move; None if it is open, not there, or not on SQLite."""
    if not url.startswith("sqlite:///"):
        return None
    path = parse_url(url).path
    if path is None or not path.exists():
        return None
    try:
        database = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        database.set_busy_timeout(int(BUSY_TIMEOUT_S * 1000))
        try:
            return _mark_in(database)
        finally:
            database.close()
    except apsw.Error as error:
        raise to_ledger_error(error, url) from error


def refuse_closed(url: str) -> None:
    """Raise MovedAway if this ledger is closed."""
    mark = read_mark(url)
    if mark is not None:
        raise MovedAway(ledger=mark.ledger, remedy=mark.remedy)


def _mark_in(database: Database) -> MoveMark | None:
    if not stored_version(database):
        return None
    rows = database.execute(SOURCE.mark).fetchall()
    if not rows:
        return None
    fields: dict[str, Any] = json.loads(rows[0][0])
    fields["stage"] = MoveStage(fields["stage"])
    return MoveMark(**fields)


@contextmanager
def only_move(path: Path) -> Generator[None]:
    """Keep a second move of this ledger away. The lock ends with its process."""
    file = open_beside(Path(f"{path}-move"), path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MoveRefused(reason=f"another move works on {path}; wait for it, or stop it") from error
        yield
    finally:
        os.close(file)


class SqliteSource:
    """The ledger in one file, opened by the move."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self._connection = connect(parse_url(self.url))
        self._database: Database = self._connection
        self._has_roles = False

    def close_connection(self) -> None:
        """Close the connection; what was closed for writers stays so."""
        self._connection.close()

    def mark(self) -> MoveMark | None:
        """What the ledger says about its move."""
        return _mark_in(self._database)

    def check(self) -> None:
        """Raise unless this program can move the ledger."""
        check_version(self._database, self.url)
        if self._execute(SOURCE.rebuilding):
            raise MoveRefused(reason="a rebuild of this ledger is unfinished; let `trellis rebuild` end first")

    # --- closing -------------------------------------------------------------------------------------------------

    def begin_alone(self) -> None:
        """Begin a transaction that no other process can be beside. Raises MoveRefused if one has the ledger open.

        Only a connection that is alone can leave the write-ahead log, so SQLite itself says whether this one is.
        """
        try:
            self._execute("PRAGMA journal_mode = DELETE")
            self._execute("BEGIN EXCLUSIVE")
        except LedgerUnavailable as error:
            if not isinstance(error.__cause__, apsw.BusyError):
                raise
            seen = [row[0] for row in self._execute(SOURCE.seen_lately)]
            who = f", such as {', '.join(seen)}" if seen else ""
            reason = f"another process has {self.path} open{who}; stop `trellis up`, workers and other commands first"
            raise MoveRefused(reason=reason) from error

    def abandon(self) -> None:
        """End what `begin_alone` began, without a change."""
        self._execute("ROLLBACK")
        self._execute("PRAGMA journal_mode = WAL")

    def close_for_writers(self, mark: MoveMark) -> None:
        """Write the mark and make the triggers, and commit what `begin_alone` began."""
        message = str(MovedAway(ledger=mark.ledger, remedy=mark.remedy))
        self._put_mark(mark)
        for (statement,) in self._execute(SOURCE.closing, (message,)):
            self._execute(statement)
        self._execute("COMMIT")
        self._execute("PRAGMA journal_mode = WAL")

    def note_moved(self) -> None:
        """Say that the instance is open elsewhere: the move can no longer be undone."""
        mark = self.mark()
        if mark is not None and mark.stage is not MoveStage.MOVED:
            self._put_mark(replace(mark, stage=MoveStage.MOVED))

    def reopen(self) -> None:
        """Take the mark and the triggers away."""
        self._execute("BEGIN IMMEDIATE")
        for (statement,) in self._execute(SOURCE.opening):
            self._execute(statement)
        self._execute(SOURCE.remove_mark)
        self._execute("COMMIT")

    def _put_mark(self, mark: MoveMark) -> None:
        self._execute(SOURCE.write_mark, (json.dumps(asdict(mark)),))

    # --- reading -------------------------------------------------------------------------------------------------

    def page(self, part: LedgerPart, after: Sequence[Any]) -> list[MovedRow]:
        """The next rows of a part, as PostgreSQL shall have them."""
        if not self._has_roles:
            self._execute(SOURCE.roles_of_events)
            self._execute(SOURCE.roles, (UNKNOWN_ROLE,))
            self._has_roles = True
        rows: list[MovedRow] = []
        size = 0
        for row in self._rows(part.source, (*after, *part.further, PAGE_ROWS)):
            rows.append(part.adapt(row))
            size += sum(len(value) for value in row if isinstance(value, bytes | str))
            if size >= PAGE_BYTES:
                break
        return rows

    def numbers(self) -> tuple[int, int, int, int, int]:
        """The last numbers that were given to jobs, positions of the feed, notes of holders, acts and signals to jobs."""
        row = self._execute(SOURCE.numbers)[0]
        return row[0], row[1], row[2], row[3], row[4]

    def _execute(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return self._database.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise to_ledger_error(error, self.url) from error

    def _rows(self, sql: LiteralString, bindings: tuple[Any, ...]) -> Iterator[MovedRow]:
        try:
            yield from self._database.execute(sql, bindings)
        except apsw.Error as error:
            raise to_ledger_error(error, self.url) from error

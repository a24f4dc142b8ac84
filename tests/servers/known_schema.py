"""Lets a new SQLite ledger begin as a copy of one that was made before in this test process.

Most tests on SQLite begin with a new file, and the statements that make its tables take longer than many of the tests. The file that
is copied was made by the program itself. Only `open_ledger` is given a copy; `trellis migrate`, and every other process, makes its own.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

import apsw

from trellis.ledgers.sqlite import ledger as opened
from trellis.ledgers.sqlite.connection import SqliteTarget, connect
from trellis.ledgers.sqlite.schema import prepare


@cache
def _made() -> bytes:
    with tempfile.TemporaryDirectory(prefix="trellis-schema-") as folder:
        path = Path(folder) / "ledger.db"
        connection = connect(SqliteTarget(url=f"sqlite:///{path}", path=path))
        prepare(connection, f"sqlite:///{path}")
        connection.close()  # and what is in the log goes into the file
        return path.read_bytes()


def copied(target: SqliteTarget) -> apsw.Connection:
    """`connect`, where a file that is not there appears at once and whole."""
    path = target.path
    if path is not None and path.parent.is_dir() and not path.exists():
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".trellis-schema-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_made())
            os.link(name, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)  # noqa: PTH108 a name, as it came
    return connect(target)


def remember_schema() -> None:
    """From now on, in this process."""
    opened.connect = copied  # type: ignore[attr-defined]

"""Submitting inside the caller's own transaction, on the caller's connection to the ledger's file.

The job is there when the caller commits and never was when it rolls back. The caller's library must be one that does
not damage files (3.51.3); the standard library's `sqlite3` is often older.
"""

from collections.abc import Sequence
from typing import Protocol

from trellis.engine.errors import LedgerNotMigrated, OptionInvalid
from trellis.engine.jobs import Actor, Mismatch, NewJob, Submitted
from trellis.engine.nodes import this_node
from trellis.ledgers.sqlite.connection import Database, refuse_old_library
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.migrate import SCHEMA_VERSION, stored_version
from trellis.ledgers.sqlite.names import NameNumbers
from trellis.ledgers.sqlite.submit import submit


class OuterConnection(Database, Protocol):
    """The caller's open connection, of any SQLite driver that has `execute` and `executemany`."""


def submit_on(
    connection: OuterConnection, actor: Actor, jobs: Sequence[NewJob], now: int
) -> list[Submitted | Mismatch]:
    """Submit in the transaction that is open on `connection`; the caller commits it or rolls it back."""
    refuse_old_library(connection.execute("SELECT sqlite_version()").fetchall()[0][0])
    if not _in_transaction(connection):
        raise OptionInvalid(option="connection", value="not in a transaction", expected="begin one first")
    found = stored_version(connection)
    if found != SCHEMA_VERSION:
        raise LedgerNotMigrated(found=found, needed=SCHEMA_VERSION, url="of this connection")
    return submit(Transaction(connection, NameNumbers(connection, this_node()), now), actor, jobs)


def _in_transaction(connection: OuterConnection) -> bool:
    return bool(getattr(connection, "in_transaction", True))

"""Brings a file to this program's schema: numbered `.sql` files, applied in order, each once, in one transaction."""

import re
from functools import cache
from importlib import resources
from typing import LiteralString

import apsw

from trellis.engine.errors import LedgerNotMigrated
from trellis.ledgers.migration import OPENED, MigratedBy, migrated_by, migration_act
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import acts
from trellis.ledgers.sqlite.connection import Database, SqliteTarget, connect, to_ledger_error
from trellis.ledgers.sqlite.contract import load_contract
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.names import NameNumbers
from trellis.ledgers.sqlite.plan import US

_NUMBERED = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")


class _SchemaQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/migrate.sql"):
    has_meta: LiteralString
    read_version: LiteralString
    write_version: LiteralString
    nothing_is_restored: LiteralString
    nobody_restores: LiteralString


@cache
def migrations() -> dict[int, str]:
    """The text of every migration by its number; the numbers are 1, 2, 3, … without a gap."""
    folder = resources.files("trellis.ledgers.sqlite").joinpath("migrations")
    found = {
        int(match[1]): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if (match := _NUMBERED.match(entry.name))
    }
    assert sorted(found) == list(range(1, len(found) + 1)), "migrations are numbered without a gap"
    return found


SCHEMA_VERSION = len(migrations())


def migrate(target: SqliteTarget, *, by: MigratedBy | None = None) -> int:
    """Make or upgrade the schema and load the lifecycles; returns the version that was there before."""
    connection = connect(target)
    try:
        return prepare(connection, target.url, by=by)
    finally:
        connection.close()


def prepare(connection: Database, url: str, *, by: MigratedBy | None = None) -> int:
    """`migrate` on an open connection: processes that open one file at once wait here for each other.

    A change of the schema is one administrative act in the same transaction; only a new file that nobody is named for has none.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = _apply(connection, url)
            load_contract(connection, url)
            connection.execute(_SchemaQueries.nothing_is_restored)
            connection.execute(_SchemaQueries.nobody_restores)
            if found != SCHEMA_VERSION and (by is not None or found):
                _record(connection, by or migrated_by(cause=OPENED), found)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except apsw.Error as error:
        raise to_ledger_error(error, url) from error
    return found


def _record(connection: Database, by: MigratedBy, before: int) -> None:
    tx = Transaction(connection, NameNumbers(connection, by.node), int(by.at * US))
    acts.record(tx, by.actor, migration_act(by, before, SCHEMA_VERSION))


def stored_version(connection: Database) -> int:
    """The schema version of a file; 0 when it holds no ledger."""
    if not connection.execute(_SchemaQueries.has_meta).fetchall():
        return 0
    rows = connection.execute(_SchemaQueries.read_version).fetchall()
    return rows[0][0] if rows else 0


def _apply(connection: Database, url: str) -> int:
    found = stored_version(connection)
    if found > SCHEMA_VERSION:
        raise LedgerNotMigrated(found=f"{found} (made by a newer program)", needed=SCHEMA_VERSION, url=url)
    for number, sql in sorted(migrations().items()):
        if number > found:
            connection.execute(sql)
            connection.execute(_SchemaQueries.write_version, (number,))
    return found

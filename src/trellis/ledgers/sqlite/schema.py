"""The schema of an SQLite ledger: its migrations, the lifecycles loaded into it, and the findings for `doctor`."""

import hashlib
import re
from functools import cache
from importlib import resources

import apsw

from trellis.engine.errors import LedgerNewer, LedgerNotMigrated
from trellis.engine.records import Finding, FindingSeverity
from trellis.ledgers.migration import OPENED, MigratedBy, migrated_by, migration_act
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import control
from trellis.ledgers.sqlite.connection import Database, SqliteTarget, connect, to_ledger_error
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.names import NameNumbers
from trellis.ledgers.sqlite.plan import CLAIMABLE, ENDED_OTHERWISE, ENDED_WELL, HELD, RESTING, US
from trellis.lifecycles import EVENT_TYPES, Role, Trigger
from trellis.lifecycles.contract import StateRow, TransitionRow, lifecycle_rows, state_rows, transition_rows

# Loading the lifecycles into the tables that the triggers read, when they differ. Additive only (DJ-22).

_WAITING, _HELD = 0, 1
ArrowRow = tuple[int, int, int, int, int, int, int]
FinalizerRow = tuple[int, int, int, int, int, int]


_CONTRACT_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/contract.sql")


def load_contract(connection: Database, url: str) -> None:
    """Update the contract tables to this program's lifecycles. The caller holds a write transaction."""
    wanted = contract_hash()
    if connection.execute(_CONTRACT_QUERIES.read_hash).fetchall() == [(wanted,)]:
        return
    _refuse_other_meanings(connection, url)
    connection.execute(_CONTRACT_QUERIES.begin_loading)
    connection.executemany(_CONTRACT_QUERIES.put_lifecycle, lifecycle_rows())
    connection.executemany(_CONTRACT_QUERIES.put_role, [(role.code, role.value) for role in Role])
    connection.executemany(_CONTRACT_QUERIES.put_event_type, list(enumerate(EVENT_TYPES, start=1)))
    connection.executemany(_CONTRACT_QUERIES.put_state, [_state(row) for row in state_rows()])
    connection.executemany(_CONTRACT_QUERIES.put_arrow, arrow_rows())
    connection.executemany(_CONTRACT_QUERIES.put_finalizer, finalizer_rows())
    connection.execute(_CONTRACT_QUERIES.end_loading)
    connection.execute(_CONTRACT_QUERIES.write_hash, (wanted,))


@cache
def contract_hash() -> str:
    """A hash of this program's lifecycles. Computed once per process, compared at every opening."""
    rows = [repr(tuple(row)) for source in (lifecycle_rows(), state_rows(), transition_rows()) for row in source]
    return hashlib.sha256("\n".join([*rows, *EVENT_TYPES, *Role]).encode()).hexdigest()


@cache
def arrow_rows() -> tuple[ArrowRow, ...]:
    """One row for each (lifecycle, source, target, event type). The roles of transitions that share it are joined."""
    states = {(row.lifecycle, row.state): row for row in state_rows()}
    arrows: dict[int, ArrowRow] = {}
    for t in transition_rows():
        row = _arrow(t, states.get((t.lifecycle, t.source)), states[t.lifecycle, t.target])
        known = arrows.get(row[0], row)
        assert known[2] == row[2], f"two transitions share an event and differ in what they open: {t}"
        arrows[row[0]] = (row[0], known[1] | row[1], *row[2:])
    return tuple(arrows.values())


@cache
def finalizer_rows() -> tuple[FinalizerRow, ...]:
    """The steps that complete a job with an artifact or finalize one.

    Their codes must be unique without the lifecycle.
    """
    rows: dict[int, FinalizerRow] = {}
    for t in transition_rows():
        if t.finalizes or t.trigger == Trigger.FINALIZE:
            step = (t.source * 16 + t.target) * 256 + t.event
            assert step not in rows, f"another lifecycle has a step of the same numbers: {t}"
            rows[step] = (step, t.lifecycle, t.source, t.target, t.event, int(t.finalizes))
    return tuple(rows.values())


def arrow_code(lifecycle: int, source: int, target: int, event: int) -> int:
    return ((lifecycle * 16 + source) * 16 + target) * 256 + event


def _arrow(t: TransitionRow, source: StateRow | None, target: StateRow) -> ArrowRow:
    came_held = source is not None and source.phase == _HELD
    entered = 1 << HELD if target.phase == _HELD else _places(target)
    return (
        arrow_code(t.lifecycle, t.source, t.target, t.event),
        t.roles,
        t.opens,
        target.rank - (source.rank if source else 0),
        entered,
        int(target.dead_letter),
        int(target.phase == _HELD and not came_held),
    )


def _places(row: StateRow) -> int:
    """The places a job in this state may be in.

    A job that keeps its state after a lost lease may be claimable there.
    """
    if row.phase == _WAITING:
        return 1 << RESTING | (CLAIMABLE if row.claimable else 0)
    if row.phase == _HELD:
        return 1 << HELD | (CLAIMABLE if row.stays else 0)
    return 1 << (ENDED_WELL if row.success else ENDED_OTHERWISE)


def _state(row: StateRow) -> tuple[int, int, str, int, int, int, int]:
    code = row.lifecycle * 16 + row.state
    return (code, row.lifecycle, row.name, row.phase, row.rank, _places(row), int(row.dead_letter))


def _refuse_other_meanings(connection: Database, url: str) -> None:
    """Refuse a ledger whose stored numbers have another meaning: an incompatible program wrote it."""
    ours = {(row.lifecycle * 16 + row.state): row.name for row in state_rows()}
    states = connection.execute(_CONTRACT_QUERIES.stored_states).fetchall()
    types = connection.execute(_CONTRACT_QUERIES.stored_event_types).fetchall()
    clash = [name for code, name in states if ours.get(code, name) != name]
    clash += [name for code, name in types if code <= len(EVENT_TYPES) and EVENT_TYPES[code - 1] != name]
    if clash:
        raise LedgerNotMigrated(found=f"another meaning of {', '.join(clash)}", needed="this program's", url=url)


# Migrations: numbered `.sql` files, applied in order, each once, in one transaction.

_NUMBERED = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")


_SCHEMA_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/migrate.sql")


@cache
def migrations() -> dict[int, str]:
    """The text of every migration by its number. The numbers are 1, 2, 3, … without a gap."""
    folder = resources.files("trellis.ledgers.sqlite").joinpath("migrations")
    scripts = {
        int(match[1]): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if (match := _NUMBERED.match(entry.name))
    }
    assert sorted(scripts) == list(range(1, len(scripts) + 1)), "migrations are numbered without a gap"
    return scripts


SCHEMA_VERSION = len(migrations())


def migrate(target: SqliteTarget, *, by: MigratedBy | None = None) -> int:
    """Create or upgrade the schema and load the lifecycles. Returns the version found before."""
    connection = connect(target)
    try:
        return prepare(connection, target.url, by=by)
    finally:
        connection.close()


def prepare(connection: Database, url: str, *, by: MigratedBy | None = None) -> int:
    """`migrate` on an open connection. Processes that open one file at the same time wait for each other here.

    A schema change is one administrative act in the same transaction. Only a new file without a named author has none.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _apply(connection)
            load_contract(connection, url)
            connection.execute(_SCHEMA_QUERIES.nothing_is_restored)
            connection.execute(_SCHEMA_QUERIES.nobody_restores)
            if version != SCHEMA_VERSION and (by is not None or version):
                _record(connection, by or migrated_by(cause=OPENED), version)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except apsw.Error as error:
        raise to_ledger_error(error, url) from error
    return version


def _record(connection: Database, by: MigratedBy, before: int) -> None:
    tx = Transaction(connection, NameNumbers(connection, by.node), int(by.at * US), connection)
    control.record(tx, by.actor, migration_act(by, before, SCHEMA_VERSION))


def stored_version(connection: Database) -> int:
    """The schema version of a file; 0 when it holds no ledger."""
    if not connection.execute(_SCHEMA_QUERIES.has_meta).fetchall():
        return 0
    rows = connection.execute(_SCHEMA_QUERIES.read_version).fetchall()
    return rows[0][0] if rows else 0


def check_version(connection: Database, url: str = "URL") -> None:
    """Raise LedgerNewer or LedgerNotMigrated unless the file has this program's schema."""
    version = stored_version(connection)
    _refuse_newer(version)
    if version < SCHEMA_VERSION:
        raise LedgerNotMigrated(found=version, needed=SCHEMA_VERSION, url=url)


def _refuse_newer(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise LedgerNewer(found=version, oldest=version, known=SCHEMA_VERSION)


def _apply(connection: Database) -> int:
    version = stored_version(connection)
    _refuse_newer(version)
    for number, sql in sorted(migrations().items()):
        if number > version:
            connection.execute(sql)
            connection.execute(_SCHEMA_QUERIES.write_version, (number,))
    return version


# Findings for `doctor`.

WAL_BYTES_WARN = 256 * 1024 * 1024


def inspect(tx: Transaction, target: SqliteTarget) -> list[Finding]:
    """Check the library, the schema, the file's integrity and the size of its write-ahead log."""
    findings = [
        Finding(check="sqlite", severity=FindingSeverity.OK, detail=f"SQLite {apsw.sqlite_lib_version()}"),
        Finding(
            check="schema",
            severity=FindingSeverity.OK,
            detail=f"version {stored_version(tx.db)} of {SCHEMA_VERSION}",
        ),
        _integrity(tx),
    ]
    if target.path is not None:
        findings.append(_wal(target))
    return findings


def _integrity(tx: Transaction) -> Finding:
    answer = [row[0] for row in tx.db.execute("PRAGMA quick_check(1)")]
    if answer == ["ok"]:
        return Finding(check="file", severity=FindingSeverity.OK, detail="quick_check finds nothing wrong")
    return Finding(
        check="file",
        severity=FindingSeverity.ERROR,
        detail=f"quick_check: {answer[0]}",
        remedy="stop every process of this ledger, keep the file, restore the last backup",
    )


def _wal(target: SqliteTarget) -> Finding:
    assert target.path is not None
    wal = target.path.with_name(f"{target.path.name}-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size < WAL_BYTES_WARN:
        return Finding(check="write-ahead log", severity=FindingSeverity.OK, detail=f"{size} bytes")
    return Finding(
        check="write-ahead log",
        severity=FindingSeverity.WARNING,
        detail=f"{size} bytes: it cannot be folded back while a reader keeps a transaction open",
        remedy="find the process that reads this file and holds a transaction open",
    )

"""What `doctor` should know about an SQLite ledger."""

import apsw

from trellis.engine.records import Finding, FindingSeverity
from trellis.ledgers.sqlite.connection import SqliteTarget
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.migrate import SCHEMA_VERSION, stored_version

WAL_BYTES_WARN = 256 * 1024 * 1024


def inspect(tx: Transaction, target: SqliteTarget) -> list[Finding]:
    """The library, the schema, the file's own check and the size of its write-ahead log."""
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

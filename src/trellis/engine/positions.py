"""Positions in the feed as texts: those of SQLite and of PostgreSQL, and what one is in a ledger that was moved."""

SQLITE_DIGITS = 16
KEY_MAX = 2**63 - 1
"""The highest number of a job. As part of a position it stands for all jobs of a transaction."""


def of_sqlite(number: int) -> str:
    """The position of an SQLite ledger: the number of an event."""
    return f"{number:0{SQLITE_DIGITS}d}"


def of_postgres(place: int, key: int, version: int) -> str:
    """The position of a PostgreSQL ledger: the place of a transaction, and in it a job's key and version."""
    return f"{place:020d}.{key:020d}.{version:010d}"


def is_of_sqlite(text: str) -> bool:
    """Whether an SQLite ledger gave this position."""
    return len(text) == SQLITE_DIGITS and text.isascii() and text.isdigit()


def to_postgres(text: str) -> str:
    """The same position after a move to PostgreSQL, where every moved event is a transaction of its own."""
    return of_postgres(int(text), KEY_MAX, 0)

"""What `doctor` finds on a PostgreSQL server: its settings, the login, and what is late."""

from trellis.engine.records import Finding, FindingSeverity
from trellis.ledgers.postgres.connection import PostgresRow
from trellis.ledgers.postgres.lanes import CONNECTIONS_MAX

SWEEP_AGE_S_MAX = 10.0
OLD_TRANSACTION_S = 60.0
UNSEQUENCED_MAX = 10_000
CONNECTIONS_USED_SHARE = 0.8
"""If a larger share of the server's connections is in use, the next processes may get none."""


def findings(row: PostgresRow, *, is_pooled: bool) -> list[Finding]:
    """One finding per check. `is_pooled`: whether the ledger's connections go through a pooler."""
    checks = (_writes, _role, _sweep, _old_transaction, _feed, _connections)
    return [*_durability(row), *(check(row) for check in checks), _hints(is_pooled=is_pooled)]


def _durability(row: PostgresRow) -> list[Finding]:
    problems: list[Finding] = []
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        off = row[setting] == "off"
        problems.append(
            Finding(
                check=f"postgresql {setting}",
                severity=FindingSeverity.ERROR if off else FindingSeverity.OK,
                detail=f"{setting} = {row[setting]} on PostgreSQL {row['version']}",
                remedy="set it on: acknowledged work can be lost in a crash" if off else "",
            )
        )
    vacuum_off = row["autovacuum"] == "off"
    return [
        *problems,
        Finding(
            check="postgresql autovacuum",
            severity=FindingSeverity.WARNING if vacuum_off else FindingSeverity.OK,
            detail=f"autovacuum = {row['autovacuum']}",
            remedy="set it on: claims slow down as dead rows pile up" if vacuum_off else "",
        ),
    ]


def _writes(row: PostgresRow) -> Finding:
    read_only = row["is_read_only"]
    return Finding(
        check="postgresql writes",
        severity=FindingSeverity.ERROR if read_only else FindingSeverity.OK,
        detail="the server takes no writes from this login" if read_only else "the server takes writes",
        remedy="is it a standby, or default_transaction_read_only on for the login? Nothing runs meanwhile"
        if read_only
        else "",
    )


def _role(row: PostgresRow) -> Finding:
    strong = row["is_superuser"] or row["is_owner"]
    return Finding(
        check="postgresql role",
        severity=FindingSeverity.WARNING if strong else FindingSeverity.OK,
        detail=f"connected as {row['db_role']}" + (", which may write past the ledger's functions" if strong else ""),
        remedy="connect as a login role that is only a member of trellis_app" if strong else "",
    )


def _sweep(row: PostgresRow) -> Finding:
    age = row["sweep_age_s"]
    late = age is None or age > SWEEP_AGE_S_MAX
    return Finding(
        check="sweep",
        severity=FindingSeverity.WARNING if late else FindingSeverity.OK,
        detail="nobody has swept yet" if age is None else f"last sweep {age:.1f} s ago, {row['held']} jobs held",
        remedy="start a worker or `trellis up`: nobody takes lost jobs back" if late else "",
    )


def _old_transaction(row: PostgresRow) -> Finding:
    age = row["oldest_transaction_s"] or 0.0
    old = age > OLD_TRANSACTION_S
    return Finding(
        check="postgresql oldest transaction",
        severity=FindingSeverity.WARNING if old else FindingSeverity.OK,
        detail=f"the oldest open transaction of the server is {age:.0f} s old",
        remedy="find it in pg_stat_activity: it delays the feed and keeps dead rows" if old else "",
    )


def _feed(row: PostgresRow) -> Finding:
    many = row["unsequenced"] > UNSEQUENCED_MAX
    return Finding(
        check="feed",
        severity=FindingSeverity.WARNING if many else FindingSeverity.OK,
        detail=f"{row['unsequenced']} transactions wait for their place in the feed",
        remedy="a transaction that writes holds the feed back, or nobody sweeps" if many else "",
    )


def _connections(row: PostgresRow) -> Finding:
    used, most = row["connections"], row["connections_max"]
    few = used > CONNECTIONS_USED_SHARE * most
    return Finding(
        check="postgresql connections",
        severity=FindingSeverity.WARNING if few else FindingSeverity.OK,
        detail=f"{used} of {most} are in use, {row['own_connections']} of them by Trellis;"
        f" a process uses at most {CONNECTIONS_MAX} for each ledger that it opens",
        remedy="raise max_connections, put several roles into one process (`trellis up --roles A,B`), or put pgbouncer in between"
        if few
        else "",
    )


def _hints(*, is_pooled: bool) -> Finding:
    """Says whether work is found by hints. Through a pooler nobody can listen for them."""
    if not is_pooled:
        return Finding(check="hints", severity=FindingSeverity.OK, detail="the connection is direct, so hints arrive")
    return Finding(
        check="hints",
        severity=FindingSeverity.WARNING,
        detail="there is a pooler before PostgreSQL: no hints arrive, so new work is found by polling, within a second",
        remedy="name the server itself in TRELLIS_LEDGER, or leave it so: nothing is lost",
    )

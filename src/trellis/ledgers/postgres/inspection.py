"""What `doctor` says about a PostgreSQL ledger."""

from trellis.engine.records import Finding, Severity
from trellis.ledgers.postgres.connection import Row

SWEEP_AGE_S_MAX = 10.0
OLD_TRANSACTION_S = 60.0
UNSEQUENCED_MAX = 10_000


def findings(row: Row) -> list[Finding]:
    """One finding for each thing looked at."""
    return [*_durability(row), _role(row), _sweep(row), _old_transaction(row), _feed(row)]


def _durability(row: Row) -> list[Finding]:
    found: list[Finding] = []
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        off = row[setting] == "off"
        found.append(
            Finding(
                check=f"postgresql {setting}",
                severity=Severity.ERROR if off else Severity.OK,
                detail=f"{setting} = {row[setting]} on PostgreSQL {row['version']}",
                remedy="set it on: acknowledged work can be lost in a crash" if off else "",
            )
        )
    vacuum_off = row["autovacuum"] == "off"
    return [
        *found,
        Finding(
            check="postgresql autovacuum",
            severity=Severity.WARNING if vacuum_off else Severity.OK,
            detail=f"autovacuum = {row['autovacuum']}",
            remedy="set it on: claims slow down as dead rows pile up" if vacuum_off else "",
        ),
    ]


def _role(row: Row) -> Finding:
    strong = row["is_superuser"] or row["is_owner"]
    return Finding(
        check="postgresql role",
        severity=Severity.WARNING if strong else Severity.OK,
        detail=f"connected as {row['db_role']}" + (", which may write past the ledger's functions" if strong else ""),
        remedy="connect as a login role that is only a member of trellis_app" if strong else "",
    )


def _sweep(row: Row) -> Finding:
    age = row["sweep_age_s"]
    late = age is None or age > SWEEP_AGE_S_MAX
    return Finding(
        check="sweep",
        severity=Severity.WARNING if late else Severity.OK,
        detail="nobody has swept yet" if age is None else f"last sweep {age:.1f} s ago, {row['held']} jobs held",
        remedy="start a worker or `trellis up`: nobody takes lost jobs back" if late else "",
    )


def _old_transaction(row: Row) -> Finding:
    age = row["oldest_transaction_s"] or 0.0
    old = age > OLD_TRANSACTION_S
    return Finding(
        check="postgresql oldest transaction",
        severity=Severity.WARNING if old else Severity.OK,
        detail=f"the oldest open transaction of the server is {age:.0f} s old",
        remedy="find it in pg_stat_activity: it delays the feed and keeps dead rows" if old else "",
    )


def _feed(row: Row) -> Finding:
    many = row["unsequenced"] > UNSEQUENCED_MAX
    return Finding(
        check="feed",
        severity=Severity.WARNING if many else Severity.OK,
        detail=f"{row['unsequenced']} transactions wait for their place in the feed",
        remedy="a transaction that writes holds the feed back, or nobody sweeps" if many else "",
    )

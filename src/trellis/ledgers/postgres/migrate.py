"""Migrates a PostgreSQL database to this program's schema and grants access to it.

Tables come from numbered migrations, each applied once. Functions, views and the lifecycles are replaced at every run.
Everything belongs to `trellis_owner`, which cannot log in. The application's role gets SELECT and EXECUTE, so that the
database can refuse what the functions do not allow.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, LiteralString, cast

from trellis.auth.matrices import RULES
from trellis.auth.principals import ACTIONS, ADMINISTRATION
from trellis.engine.admin_acts import GRANTED, NewAct
from trellis.engine.decide import Fact, decision_rows
from trellis.engine.errors import LedgerNewer, LedgerNotMigrated, LedgerReadOnly, LedgerUnavailable
from trellis.engine.job_batches import BATCH_MAX
from trellis.engine.job_changes import CHANGED_MAX
from trellis.engine.jobs import (
    DERIVING_ROLES,
    JOB_SIGNALS_MAX,
    ORPHAN_GRACE_S,
    REPORT_ID_PATTERN,
    REPORTING_ROLE,
    RESERVED_ID_MARKS,
    RESERVED_ID_PATTERN,
    Priority,
)
from trellis.engine.key_rates import KEY_TOKEN_WAIT_S_MIN, UNCLAIMED_WAIT_S
from trellis.engine.request_keys import KEY_S_MIN
from trellis.engine.retry_policy import SHARED_DEATHS_MAX, UNBEGUN_LOSSES_MAX
from trellis.ledgers.migration import MigratedBy, migrated_by, migration_act
from trellis.ledgers.postgres.connection import InsufficientPrivilege, LockNotAvailable, PostgresConnection, connect
from trellis.lifecycles import EVENT_TYPES, LIFECYCLES, Role, event_code
from trellis.lifecycles.contract import lifecycle_rows, rank_bytes, state_rows, transition_bits, transition_rows
from trellis.lifecycles.events import sql_cases
from trellis.lifecycles.lifecycle import ROLES

APP_ROLE = "trellis_app"
OLDEST_PROGRAM = 22
"""The oldest schema version whose programs can use a ledger of this version, beside this program's.

A change that breaks them raises it to the version of that change: dropping what they read, or changing the arguments or
answers of a function that they call. New tables, columns and functions do not break them. A test compares what they use
with `tests/ledgers/postgres/used_by_older.json`.
"""
MIGRATION_LOCK_S = 60
"""How long a migration waits for another one to end."""
TABLES = ("actor", "job", "ready", "resting", "parked", "lease", "ended", "event")
"""The tables that a migration locks, in the verbs' locking order: concurrent calls wait for it, without deadlock."""
TABLE_LOCK_S = 2.0
"""How long a migration waits for its tables at a time. Whoever comes meanwhile waits behind it."""
TABLE_LOCK_TRIES = 30
TABLE_LOCK_PAUSE_S = 1.0
SCAN_S_PER_ROW = 1e-6
_INDEX = r"create\s+(?:unique\s+)?index\s+(?:if\s+not\s+exists\s+)?\w+\s+on"
_CHANGED = re.compile(
    rf"(?:alter\s+table|{_INDEX}|create\s+policy\s+\w+\s+on|drop\s+policy\s+\w+\s+on)\s+(\w+)", re.IGNORECASE
)
_MADE = re.compile(r"create\s+table\s+(\w+)", re.IGNORECASE)
_SCANS = re.compile(rf"{_INDEX}\s+(\w+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Migrated:
    """The result of a migration."""

    version_before: int
    version: int
    applied: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingMigration:
    """A migration that was not applied yet. `scans` are the tables that it reads whole, with their estimated rows."""

    name: str
    scans: Mapping[str, int]

    @property
    def estimated_s(self) -> float:
        """About how long it takes: indexes were built at 1.0 to 1.7 million rows a second, small ones in no time."""
        return sum(self.scans.values()) * SCAN_S_PER_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationPlan:
    """What a migration would do. While it does it, other sessions wait for the tables `locks`."""

    version_before: int
    version: int
    pending: tuple[PendingMigration, ...]
    locks: tuple[str, ...]


def sql_files(folder: Literal["migrations", "functions"]) -> Iterable[tuple[str, LiteralString]]:
    """The SQL files of a folder in order. They ship with the program, so their text counts as literal."""
    for entry in sorted(files("trellis.ledgers.postgres").joinpath(folder).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".sql"):
            yield entry.name, cast("LiteralString", entry.read_text(encoding="utf-8"))


@cache
def schema_version() -> int:
    """The schema version this program needs: the number of its last migration. Cached, because every opening reads it.

    A database stores how many migrations it has. One that is put into a gap later would be left out there.
    """
    numbers = [int(name.partition("_")[0]) for name, _ in sql_files("migrations")]
    assert numbers == list(range(1, len(numbers) + 1)), "migrations are numbered without a gap"
    return len(numbers)


async def migrate(
    url: str,
    *,
    clock: Literal["system", "test"] = "system",
    grants: Sequence[tuple[str, Role]] = (),
    by: MigratedBy | None = None,
) -> Migrated:
    """Create or upgrade the schema. `grants` lets further database roles act in single Trellis roles.

    A schema change, and each new grant, is one administrative act in the same transaction. Only a new schema without a
    named author has none. A newer schema that still serves this program is left as it is, so that a program that was
    rolled back starts; its grants are made by the newer program. Raises LedgerNewer for one that serves it no more.
    """
    connection = await connect(url)
    try:
        async with connection.transaction():
            return await _migrate(connection, clock, grants, by)
    except LockNotAvailable as error:
        reason = f"a table that the migration needs is in use ({error}); nothing was changed, run it again"
        raise LedgerUnavailable(reason=reason) from error
    except InsufficientPrivilege as error:
        raise LedgerReadOnly(reason=f"{error}; migrate as a superuser or as a role that may create roles") from error
    finally:
        await connection.close()


async def _migrate(
    connection: PostgresConnection,
    clock: Literal["system", "test"],
    grants: Sequence[tuple[str, Role]],
    by: MigratedBy | None,
) -> Migrated:
    await _lock_migrations(connection)
    await connection.execute(_script("roles"))
    await connection.execute("set local search_path = trellis, pg_temp")
    before = await stored_version(connection)
    if before > schema_version():
        await check_serves(connection, before)
        if grants:
            raise LedgerNewer(found=before, oldest=before, known=schema_version())
        return Migrated(version_before=before, version=before, applied=())
    pending = list(sql_files("migrations"))[before:]
    if before and pending:
        await _lock_tables(connection, locked_tables([text for _, text in pending]))
    applied: list[str] = []
    for name, text in pending:
        await connection.execute(text)
        applied.append(name)
    await _load_contract(connection)
    for _, text in sql_files("functions"):
        await connection.execute(text)
    if clock == "test":
        await connection.execute(_script("test_clock"))
    await connection.execute("select _fold_contract(); select _ensure_partitions()")
    await connection.execute(
        "insert into meta (name, value) values ('schema_version', $1), ('oldest_program', $2)"
        " on conflict (name) do update set value = excluded.value",
        str(schema_version()),
        str(OLDEST_PROGRAM),
    )
    granted = await _grant(connection, grants)
    await connection.execute(_script("grants"))
    author = by or migrated_by()
    if before != schema_version() and (by is not None or before):
        await record_as_owner(connection, author, migration_act(author, before, schema_version()))
    for db_role, role in granted:
        act = NewAct(event=GRANTED, subject=db_role, target=role.value, cause=author.cause)
        await record_as_owner(connection, author, act)
    return Migrated(version_before=before, version=schema_version(), applied=tuple(applied))


def locked_tables(migrations: Sequence[str]) -> tuple[str, ...]:
    """The tables that these migrations need: TABLES first, then others that they change and do not create."""
    new_tables = {table for text in migrations for table in _MADE.findall(text)}
    changed = {table for text in migrations for table in _CHANGED.findall(text)}
    return (*TABLES, *sorted(changed - new_tables - set(TABLES)))


async def _lock_tables(connection: PostgresConnection, tables: Sequence[str]) -> None:
    """Lock the tables, in short tries: behind a long transaction every other session would wait with the migration.

    What comes after waits as briefly for any other lock, and the migration is given up if it does not get it.
    """
    await connection.execute(f"set local lock_timeout = {int(TABLE_LOCK_S * 1000)}")
    for _ in range(TABLE_LOCK_TRIES):
        try:
            async with connection.transaction():
                await connection.execute(f"lock table {', '.join(tables)} in access exclusive mode")
                return
        except LockNotAvailable:
            await asyncio.sleep(TABLE_LOCK_PAUSE_S)
    raise LedgerUnavailable(reason=f"its tables are in use: {await _sessions_using(connection, tables)}")


async def _sessions_using(connection: PostgresConnection, tables: Sequence[str]) -> str:
    """The sessions that hold a lock on one of the tables longest, for an operator to end."""
    rows = await connection.fetch(
        "select a.pid, a.usename, a.application_name, extract(epoch from clock_timestamp() - a.xact_start)::int as held_s"
        " from pg_locks l join pg_stat_activity a using (pid) join pg_class c on c.oid = l.relation"
        " where l.granted and c.relname = any($1) and c.relnamespace = 'trellis'::regnamespace and a.pid <> pg_backend_pid()"
        " group by 1, 2, 3, 4 order by held_s desc nulls last limit 5",
        list(tables),
    )
    sessions = ", ".join(f"{r['pid']} ({r['usename']}, {r['application_name']}, since {r['held_s']} s)" for r in rows)
    return f"end the session {sessions} with pg_terminate_backend, or migrate later" if sessions else "migrate later"


async def plan_migration(url: str) -> MigrationPlan:
    """What `migrate` would do to the schema now. Changes nothing. Raises LedgerNewer."""
    connection = await connect(url)
    try:
        before = await stored_version(connection)
        if before > schema_version():
            await check_serves(connection, before)
            return MigrationPlan(version_before=before, version=before, pending=(), locks=())
        files_left = list(sql_files("migrations"))[before:]
        scanned = {name: {str(table) for table in _SCANS.findall(text)} for name, text in files_left}
        rows = await connection.fetch(
            "select relname, greatest(reltuples, 0)::bigint as n from pg_class"
            " where relnamespace = to_regnamespace('trellis') and relname = any($1)",
            sorted({table for tables in scanned.values() for table in tables}),
        )
    finally:
        await connection.close()
    sizes = {row["relname"]: row["n"] for row in rows}
    pending = tuple(
        PendingMigration(name=name, scans={table: sizes[table] for table in sorted(tables) if sizes.get(table)})
        for name, tables in scanned.items()
    )
    locks = locked_tables([text for _, text in files_left]) if pending and before else ()
    return MigrationPlan(version_before=before, version=schema_version(), pending=pending, locks=locks)


async def _grant(connection: PostgresConnection, grants: Sequence[tuple[str, Role]]) -> list[tuple[str, Role]]:
    """Let the application act in every role, and the given logins in theirs. Returns the new grants of the latter."""
    statement = "insert into authority (db_role, role) values ($1, $2) on conflict do nothing returning db_role"
    await connection.executemany(statement, [(APP_ROLE, role.code) for role in ROLES])
    return [one for one in grants if await connection.fetchval(statement, one[0], one[1].code) is not None]


async def record_as_owner(connection: PostgresConnection, by: MigratedBy, act: NewAct) -> None:
    """Record an act as the owner of the tables: the migrating login need not be one of the application's."""
    await connection.execute(
        "insert into actor (role, db_role, name, node) values ($1, session_user, $2, $3) on conflict do nothing",
        by.actor.role.code,
        by.name,
        by.node,
    )
    await connection.execute(
        "select _record_act(a.id, a.role, $4, $5, $6, $7, $8, null, null, $9) from actor a"
        " where a.role = $1 and a.db_role = session_user and a.name = $2 and a.node = $3",
        *(by.actor.role.code, by.name, by.node),
        *(
            act.event,
            act.subject,
            act.source,
            act.target,
            act.cause,
            json.dumps(dict(act.facts)) if act.facts else None,
        ),
    )


async def _lock_migrations(connection: PostgresConnection) -> None:
    """Block concurrent migrations. Any login can hold an advisory lock, so the wait is bounded."""
    await connection.execute(f"set local lock_timeout = '{MIGRATION_LOCK_S}s'")
    try:
        await connection.execute("select pg_advisory_xact_lock(hashtext('trellis.migrate'))")
    except LockNotAvailable as error:
        reason = (
            f"another session has held the lock of migrations for {MIGRATION_LOCK_S} s: wait for that migration, or "
            "find the session in pg_locks (locktype advisory) and end it with pg_terminate_backend"
        )
        raise LedgerUnavailable(reason=reason) from error
    await connection.execute("set local lock_timeout = 0")


async def stored_version(connection: PostgresConnection) -> int:
    """The schema version of a database; 0 for none."""
    if await connection.fetchval("select to_regclass('trellis.meta')") is None:
        return 0
    return int(await connection.fetchval("select value from trellis.meta where name = 'schema_version'") or 0)


async def check_version(connection: PostgresConnection, url: str) -> None:
    """Check that this program can use the ledger, which has its version or a newer one that still serves it.

    Raises LedgerNotMigrated for an older ledger, and LedgerNewer for one that serves this version no more.
    """
    stored, needed = await stored_version(connection), schema_version()
    if stored < needed:
        raise LedgerNotMigrated(found=stored, needed=needed, url=url)
    if stored > needed:
        await check_serves(connection, stored)


async def check_serves(connection: PostgresConnection, stored: int) -> None:
    """Raise LedgerNewer unless this newer schema serves programs of this version too."""
    oldest = await connection.fetchval("select value from trellis.meta where name = 'oldest_program'")
    if oldest is None or int(oldest) > schema_version():
        raise LedgerNewer(found=stored, oldest=oldest or stored, known=schema_version())


def _constants() -> LiteralString:
    """The functions that return constants and texts for other functions."""
    deriving = ", ".join(f"({LIFECYCLES[name].code}, {role.code})" for name, role in DERIVING_ROLES.items())
    text = (
        _script("contract")
        .replace("{bits}", transition_bits().hex())
        .replace("{ranks}", rank_bytes().hex())
        .replace("{causes}", cast("LiteralString", sql_cases()))
        .replace("{reserved}", RESERVED_ID_PATTERN)
        .replace("{reserved_marks}", " or ".join(f"strpos(p_job_ids, '{mark}') > 0" for mark in RESERVED_ID_MARKS))
        .replace("{deriving}", deriving)
        .replace("{reports}", REPORT_ID_PATTERN)
        .replace("{reporting}", str(REPORTING_ROLE.code))
        .replace("{fact_names}", ", ".join(f"{fact.name} boolean default false".lower() for fact in Fact))
        .replace("{fact_bits}", " | ".join(f"{fact.name}::int * {fact.value}".lower() for fact in Fact))
        .replace("{unbegun_losses_max}", str(UNBEGUN_LOSSES_MAX))
        .replace("{company_deaths_max}", str(SHARED_DEATHS_MAX))
        .replace("{key_s}", str(KEY_S_MIN))
        .replace("{orphan_grace_s}", str(ORPHAN_GRACE_S))
        .replace("{token_wait_s}", str(KEY_TOKEN_WAIT_S_MIN))
        .replace("{unclaimed_wait_s}", str(UNCLAIMED_WAIT_S))
        .replace("{batch_max}", str(BATCH_MAX))
        .replace("{job_signals_max}", str(JOB_SIGNALS_MAX))
        .replace("{changed_max}", str(CHANGED_MAX))
        .replace("{priorities}", ",".join(priority.name.lower() for priority in Priority))
        .replace("{actions}", " ".join(f"when '{verb}' then '{action}'" for verb, action in ACTIONS.items()))
    )
    return cast("LiteralString", text)


async def _load_contract(connection: PostgresConnection) -> None:
    """Load the lifecycles and decisions as rows, the constants of functions, and the grants of roles."""
    await connection.execute(_constants())
    await connection.executemany(
        "insert into lifecycle (lifecycle, name, version, swept_by) values ($1, $2, $3, $4)"
        " on conflict (lifecycle) do update set version = excluded.version, swept_by = excluded.swept_by",
        lifecycle_rows(),
    )
    await connection.execute("delete from state; delete from transition")
    await connection.executemany(
        "insert into state values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        state_rows(),
    )
    await connection.executemany(
        "insert into transition values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        transition_rows(),
    )
    await connection.execute("delete from rule_grant")
    await connection.executemany(
        "insert into rule_grant (rule, role, reach) values ($1, $2, $3)",
        [(rule.name, role.code, reach.value) for rule in RULES.values() for role, reach in rule.grants.items()]
        + [(f"ledger.{verb}", role.code, "yes") for verb, roles in ADMINISTRATION.items() for role in roles],
    )
    await connection.execute("delete from decision")
    await connection.executemany(
        "insert into decision values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)", list(decision_rows())
    )
    await connection.executemany(
        "insert into event_type values ($1, $2) on conflict do nothing", [(event_code(n), n) for n in EVENT_TYPES]
    )
    await connection.executemany(
        "insert into role values ($1, $2) on conflict do nothing", [(role.code, role.value) for role in ROLES]
    )


def _script(name: str) -> LiteralString:
    text = files("trellis.ledgers.postgres").joinpath("scripts", f"{name}.sql").read_text(encoding="utf-8")
    return cast("LiteralString", text)

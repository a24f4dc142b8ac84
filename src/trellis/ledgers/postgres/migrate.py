"""Migrates a PostgreSQL database to this program's schema and grants access to it.

Tables come from numbered migrations, each applied once. Functions, views and the lifecycles are replaced at every run.
Everything belongs to `trellis_owner`, which cannot log in. The application's role gets SELECT and EXECUTE, so that the
database can refuse what the functions do not allow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, LiteralString, cast

from trellis.auth.matrices import RULES
from trellis.auth.principals import ACTIONS, ADMINISTRATION
from trellis.engine.admin_acts import GRANTED, NewAct
from trellis.engine.decide import Fact, decision_rows
from trellis.engine.errors import LedgerNotMigrated, LedgerReadOnly, LedgerUnavailable
from trellis.engine.jobs import DERIVING_ROLES, RESERVED_ID_PATTERN
from trellis.engine.request_keys import KEY_S_MIN
from trellis.engine.retry_policy import SHARED_DEATHS_MAX, UNBEGUN_LOSSES_MAX
from trellis.ledgers.migration import MigratedBy, migrated_by, migration_act
from trellis.ledgers.postgres.connection import InsufficientPrivilege, LockNotAvailable, PostgresConnection, connect
from trellis.lifecycles import EVENT_TYPES, LIFECYCLES, Role, event_code
from trellis.lifecycles.contract import lifecycle_rows, rank_bytes, state_rows, transition_bits, transition_rows
from trellis.lifecycles.events import sql_cases
from trellis.lifecycles.lifecycle import ROLES

OWNER_ROLE = "trellis_owner"
APP_ROLE = "trellis_app"
MIGRATION_LOCK_S = 60
"""How long a migration waits for another one to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Migrated:
    """The result of a migration."""

    version_before: int
    version: int
    applied: tuple[str, ...]


def sql_files(folder: Literal["migrations", "functions"]) -> Iterable[tuple[str, LiteralString]]:
    """The SQL files of a folder in order. They ship with the program, so their text counts as literal."""
    for entry in sorted(files("trellis.ledgers.postgres").joinpath(folder).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".sql"):
            yield entry.name, cast("LiteralString", entry.read_text(encoding="utf-8"))


@cache
def schema_version() -> int:
    """The schema version this program needs. Cached, because it is read at every opening."""
    return len(list(sql_files("migrations")))


async def migrate(
    url: str,
    *,
    clock: Literal["system", "test"] = "system",
    grants: Sequence[tuple[str, Role]] = (),
    by: MigratedBy | None = None,
) -> Migrated:
    """Create or upgrade the schema. `grants` lets further database roles act in single Trellis roles.

    A schema change, and each new grant, is one administrative act in the same transaction. Only a new schema without a
    named author has none.
    """
    connection = await connect(url)
    try:
        async with connection.transaction():
            return await _migrate(connection, clock, grants, by)
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
        raise LedgerNotMigrated(found=before, needed=schema_version(), url="<a newer program's ledger>")
    if 0 < before < schema_version():
        # In the verbs' locking order: concurrent calls wait for the migration, without deadlock.
        tables = "actor, job, ready, resting, parked, lease, ended, event"
        await connection.execute(f"lock table {tables} in access exclusive mode")
    applied: list[str] = []
    for name, text in list(sql_files("migrations"))[before:]:
        await connection.execute(text)
        applied.append(name)
    await _load_contract(connection)
    for _, text in sql_files("functions"):
        await connection.execute(text)
    if clock == "test":
        await connection.execute(_script("test_clock"))
    await connection.execute("select _fold_contract(); select _ensure_partitions()")
    await connection.execute(
        "insert into meta (name, value) values ('schema_version', $1) on conflict (name) do update set value = excluded.value",
        str(schema_version()),
    )
    granted = await _grant(connection, grants)
    await connection.execute(_script("grants"))
    author = by or migrated_by()
    if before != schema_version() and (by is not None or before):
        await _record(connection, author, migration_act(author, before, schema_version()))
    for db_role, role in granted:
        act = NewAct(event=GRANTED, subject=db_role, target=role.value, cause=author.cause)
        await _record(connection, author, act)
    return Migrated(version_before=before, version=schema_version(), applied=tuple(applied))


async def _grant(connection: PostgresConnection, grants: Sequence[tuple[str, Role]]) -> list[tuple[str, Role]]:
    """Let the application act in every role, and the given logins in theirs. Returns the new grants of the latter."""
    statement = "insert into authority (db_role, role) values ($1, $2) on conflict do nothing returning db_role"
    await connection.executemany(statement, [(APP_ROLE, role.code) for role in ROLES])
    return [one for one in grants if await connection.fetchval(statement, one[0], one[1].code) is not None]


async def _record(connection: PostgresConnection, by: MigratedBy, act: NewAct) -> None:
    """Record an act as the owner of the tables: the migrating login need not be one of the application's."""
    await connection.execute(
        "insert into actor (role, db_role, name, node) values ($1, session_user, $2, $3) on conflict do nothing",
        by.actor.role.code,
        by.name,
        by.node,
    )
    await connection.execute(
        "select _record_act(a.id, a.role, $4, $5, $6, $7, $8, null) from actor a"
        " where a.role = $1 and a.db_role = session_user and a.name = $2 and a.node = $3",
        *(by.actor.role.code, by.name, by.node),
        *(act.event, act.subject, act.source, act.target, act.cause),
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


def _constants() -> LiteralString:
    """The functions that return constants and texts for other functions."""
    deriving = ", ".join(f"({LIFECYCLES[name].code}, {role.code})" for name, role in DERIVING_ROLES.items())
    text = (
        _script("contract")
        .replace("{bits}", transition_bits().hex())
        .replace("{ranks}", rank_bytes().hex())
        .replace("{causes}", cast("LiteralString", sql_cases()))
        .replace("{reserved}", RESERVED_ID_PATTERN)
        .replace("{deriving}", deriving)
        .replace("{fact_names}", ", ".join(f"{fact.name} boolean default false".lower() for fact in Fact))
        .replace("{fact_bits}", " | ".join(f"{fact.name}::int * {fact.value}".lower() for fact in Fact))
        .replace("{unbegun_losses_max}", str(UNBEGUN_LOSSES_MAX))
        .replace("{company_deaths_max}", str(SHARED_DEATHS_MAX))
        .replace("{key_s}", str(KEY_S_MIN))
        .replace("{actions}", " ".join(f"when '{verb}' then '{action}'" for verb, action in ACTIONS.items()))
    )
    return cast("LiteralString", text)


async def _load_contract(connection: PostgresConnection) -> None:
    """Load the lifecycles and decisions as rows, the constants of functions, and the grants of roles."""
    await connection.execute(_constants())
    await connection.executemany(
        "insert into lifecycle (lifecycle, name, version, swept_by) values ($1, $2, $3, $4)"
        " on conflict (lifecycle) do update set version = excluded.version, swept_by = excluded.swept_by",
        [(r.lifecycle, r.name, r.version, r.swept_by) for r in lifecycle_rows()],
    )
    await connection.execute("delete from state; delete from transition")
    await connection.executemany(
        "insert into state values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        [
            (
                r.lifecycle,
                r.state,
                r.name,
                r.phase,
                r.rank,
                r.claimable,
                r.stays,
                r.runs_code,
                r.dead_letter,
                r.success,
                r.timer_s,
            )
            for r in state_rows()
        ],
    )
    await connection.executemany(
        "insert into transition values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        [
            (r.lifecycle, r.source, r.target, r.trigger, r.roles, r.event, r.opens, r.fenced, r.finalizes)
            for r in transition_rows()
        ],
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

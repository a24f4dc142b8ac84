"""Submits jobs in a transaction of your own on PostgreSQL: of SQLAlchemy, psycopg, Django or asyncpg.

with Session(engine) as session, session.begin():
    session.add(order)
    submit_on(session, "order.ship", {"order": order.id}, app=app)

The job exists if and only if your transaction commits. Everything that `Trellis.submit` checks is checked before a
statement is sent: the payload against the handler, the settings and their names, the keys of the application. The
statement calls the database function `trellis.submit_unique_job`, which takes what the submit leaves out from the
declaration of the type, and acts as the login of your connection. A refusal by the database aborts your transaction,
like any statement that fails; a savepoint around the submit keeps the rest of it.
"""

import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack, cast

from trellis.engine.errors import OptionInvalid, PayloadInvalid, TrellisError
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.jobs import ChosenOptions, JobId, NewJob, Submitted
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.worker.app import App
from trellis.worker.requests import KEY_NAMESPACE, SubmitSettings, new_job

with extra_needed(Extra.POSTGRES, "Submitting in a transaction on PostgreSQL"):
    from trellis.ledgers.postgres.lanes import to_trellis_error
    from trellis.ledgers.postgres.notifier import CHANNEL, EVENTS_CHANNEL

PARAMETERS = {
    "p_type": "text",
    "p_payload": "jsonb",
    "p_job_id": "text",
    "p_priority": "text",
    "p_delay_s": "float8",
    "p_run_at": "timestamptz",
    "p_deadline_s": "float8",
    "p_max_attempts": "int",
    "p_concurrency_key": "text",
    "p_concurrency_limit": "int",
    "p_idempotency_key": "text",
    "p_correlation_id": "text",
    "p_trace": "text",
    "p_parent_id": "text",
    "p_unique": "text",
    "p_while": "text",
    "p_window_s": "float8",
    "p_on_conflict": "text",
    "p_debounce_s": "float8",
    "p_debounce_max_s": "float8",
}
"""The parameters of the database function, with their types. Every value is sent as text, which each driver can do."""
NOT_IN_SQL = frozenset({"compensates", "idempotency_scope", "lifecycle"})
"""The settings of a submit that the database function does not take."""
ACCEPTED = (
    "a Session or Connection of SQLAlchemy, a connection of psycopg or of Django (django.db.connection); "
    "submit_on_async takes an AsyncSession or AsyncConnection of SQLAlchemy, and one of psycopg or asyncpg"
)
REFUSALS = frozenset({"42501", "42883", "3F000"})
"""States of PostgreSQL that are about the ledger: no privilege, no such function, no such schema. Others begin `TR`."""
_IDLE = 0
"""The transaction status of a libpq connection on which no transaction is open."""
_CHAIN_MAX = 10
"""How many errors are looked at of those that libraries wrapped around one another."""
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""A NUL character in JSON."""


def submit_on(
    connection: Any,
    type_: str,
    payload: Any = None,
    *,
    app: App | None = None,
    wake: bool = True,
    **settings: Unpack[SubmitSettings],
) -> Submitted:
    """Submit a job in the transaction that is open on `connection`. It exists once that transaction commits.

    `connection` is a Session or Connection of SQLAlchemy, or a connection of psycopg or Django. With `app`, the payload
    is checked against the handler. A worker is woken when the transaction commits; `wake=False` leaves that to polling
    (within a second): PostgreSQL commits transactions that wake one after the other, and prepares none in two phases.
    """
    statement = _statement(type_, payload, settings, app=app, wake=wake)
    with _refusals_translated():
        return _submitted(_execute(connection, statement))


async def submit_on_async(
    connection: Any,
    type_: str,
    payload: Any = None,
    *,
    app: App | None = None,
    wake: bool = True,
    **settings: Unpack[SubmitSettings],
) -> Submitted:
    """As `submit_on`, for an AsyncSession or AsyncConnection of SQLAlchemy, or a connection of psycopg or asyncpg."""
    statement = _statement(type_, payload, settings, app=app, wake=wake)
    with _refusals_translated():
        return _submitted(await _execute_async(connection, statement))


# What is sent.


@dataclass(frozen=True, slots=True)
class SubmitStatement:
    """One call of the database function."""

    values: dict[str, str]
    """The arguments by parameter, as text."""
    wake: bool

    def text(self, placeholder: Callable[[int, str], str]) -> str:
        """The statement. `placeholder` writes a parameter in the driver's way, from its number and its name."""
        arguments = ", ".join(
            f"{name} => cast(cast({placeholder(number, name)} as text) as {PARAMETERS[name]})"
            for number, name in enumerate(self.values, start=1)
        )
        hints = f", pg_notify('{CHANNEL}', ''), pg_notify('{EVENTS_CHANNEL}', '')" if self.wake else ""
        return f"select s.job_id, s.outcome, s.replaced{hints} from trellis.submit_unique_job({arguments}) s"  # noqa: S608 - names from PARAMETERS


def _statement(type_: str, payload: Any, settings: SubmitSettings, *, app: App | None, wake: bool) -> SubmitStatement:
    """Checks the submit as `Trellis.submit` does, and returns the call. Raises an InputError."""
    job = new_job(type_, payload, settings, app=app, new_id=lambda: "the-database-chooses")
    for name in sorted(NOT_IN_SQL & settings.keys()):
        if name != "lifecycle" or job.lifecycle != LEASED_JOB.name:
            _refuse(name, settings.get(name), "it cannot be given in a transaction of your own; use Trellis.submit")
    if "deadline_s" in settings and job.deadline_s is None:
        _refuse(
            "deadline_s", None, "leave it out, or give seconds; only Trellis.submit can take a type's deadline away"
        )
    if job.chosen & ChosenOptions.CONCURRENCY_KEY and job.concurrency_key is None:
        _refuse("concurrency_key", None, f"the application gives this job of {type_} none; use Trellis.submit for it")
    if _NUL.search(job.payload):
        raise PayloadInvalid(type=type_, detail="it has a NUL character, which PostgreSQL's jsonb cannot store")
    given = {name: str(value) for name, value in _arguments(job, settings).items() if value is not None}
    return SubmitStatement(given, wake=wake and not (job.delay_s or job.run_at))


def _arguments(job: NewJob, settings: SubmitSettings) -> dict[str, object]:
    """What the submit sets, by parameter. Options of the type are not sent: the ledger has them."""
    key, rule = job.concurrency_key, job.unique
    arguments: dict[str, object] = {
        "p_type": job.type,
        "p_payload": job.payload.decode(),
        "p_job_id": settings.get("job_id"),
        "p_priority": job.priority.name.lower() if job.chosen & ChosenOptions.PRIORITY else None,
        "p_delay_s": job.delay_s or None,
        "p_run_at": None if job.run_at is None else job.run_at.isoformat(),
        "p_deadline_s": job.deadline_s if job.chosen & ChosenOptions.DEADLINE else None,
        "p_max_attempts": job.max_attempts if job.chosen & ChosenOptions.MAX_ATTEMPTS else None,
        "p_concurrency_key": None if key is None else key.removeprefix(KEY_NAMESPACE),
        "p_concurrency_limit": job.concurrency_limit if job.chosen & ChosenOptions.CONCURRENCY_LIMIT else None,
        "p_idempotency_key": job.idempotency_key,
        "p_correlation_id": job.correlation_id,
        "p_trace": job.trace,
        "p_parent_id": job.parent_id,
    }
    if rule is not None:
        arguments |= {
            "p_unique": rule.key,
            "p_while": rule.while_,
            "p_window_s": rule.window_s,
            "p_on_conflict": rule.on_conflict,
            "p_debounce_s": rule.debounce_s,
            "p_debounce_max_s": rule.debounce_max_s,
        }
    return arguments


def _submitted(row: Any) -> Submitted:
    job_id, outcome, replaced = row[:3]
    return Submitted(
        job_id=JobId(job_id),
        created=outcome != "returned",
        replaced=None if outcome == "returned" or replaced is None else JobId(replaced),
    )


# On which connection. Libraries are recognised without importing them: whoever has a connection has imported its library.


def _execute(connection: Any, statement: SubmitStatement) -> Any:
    if _is_a(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "AsyncConnection", "async_scoped_session") or _is_a(
        connection, "psycopg", "AsyncConnection"
    ):
        _refuse("connection", connection, "it is asynchronous: await submit_on_async(connection, …)")
    if _is_a(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        connection = connection.connection()
    if _is_a(connection, "sqlalchemy.engine", "Connection"):
        _refuse_unfit_alchemy(connection)
        return connection.execute(_alchemy_text(statement), statement.values).one()
    if _is_a(connection, "psycopg", "Connection"):
        _refuse_autocommit(connection)
        with connection.cursor(row_factory=_tuple_rows()) as cursor:
            return cursor.execute(statement.text(_percent), tuple(statement.values.values())).fetchone()
    if hasattr(connection, "in_atomic_block") and hasattr(connection, "vendor"):  # Django's, or a proxy of it
        if connection.vendor != "postgresql":
            _refuse_other_database(connection.vendor)
        if not connection.in_atomic_block and connection.get_autocommit():
            _refuse_no_transaction("use transaction.atomic()")
        with connection.cursor() as cursor:
            cursor.execute(statement.text(_percent), tuple(statement.values.values()))
            return cursor.fetchone()
    raise _unknown(connection)


async def _execute_async(connection: Any, statement: SubmitStatement) -> Any:
    if _is_a(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "async_scoped_session"):
        connection = await connection.connection()
    if _is_a(connection, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        _refuse_unfit_alchemy(connection.sync_connection)
        return (await connection.execute(_alchemy_text(statement), statement.values)).one()
    if _is_a(connection, "psycopg", "AsyncConnection"):
        _refuse_autocommit(connection)
        async with connection.cursor(row_factory=_tuple_rows()) as cursor:
            await cursor.execute(statement.text(_percent), tuple(statement.values.values()))
            return await cursor.fetchone()
    if _is_a(connection, "asyncpg", "Connection") or _is_a(connection, "asyncpg.pool", "PoolConnectionProxy"):
        if not connection.is_in_transaction():
            _refuse_no_transaction("use `async with connection.transaction():`")
        row = await connection.fetchrow(statement.text(lambda number, _: f"${number}"), *statement.values.values())
        return tuple(row.values())
    raise _unknown(connection)


def _is_a(value: Any, module: str, *names: str) -> bool:
    """Whether the value is an instance of one of these classes, if their module is loaded."""
    home = sys.modules.get(module)
    classes = tuple(cast("type", getattr(home, name)) for name in names if hasattr(home, name))
    return isinstance(value, classes)


def _alchemy_text(statement: SubmitStatement) -> Any:
    return sys.modules["sqlalchemy"].text(statement.text(lambda _, name: f":{name}"))


def _tuple_rows() -> Any:
    return sys.modules["psycopg"].rows.tuple_row


def _percent(_number: int, _name: str) -> str:
    return "%s"


def _refuse_unfit_alchemy(connection: Any) -> None:
    if connection.dialect.name != "postgresql":
        _refuse_other_database(connection.dialect.name)
    if getattr(connection.connection, "autocommit", False):
        _refuse_no_transaction("use another isolation level than AUTOCOMMIT")


def _refuse_autocommit(connection: Any) -> None:
    """Refuses a connection of psycopg on which every statement would be a transaction of its own."""
    if connection.autocommit and connection.info.transaction_status == _IDLE:
        _refuse_no_transaction("use `with connection.transaction():`")


def _refuse_no_transaction(remedy: str) -> None:
    _refuse("connection", "not in a transaction", f"the job would be submitted at once; {remedy}")


def _refuse_other_database(name: str) -> None:
    expected = "it must be PostgreSQL, with the ledger's schema; for an SQLite ledger use Trellis.submit_on"
    _refuse("connection", name, expected)


def _refuse(option: str, value: object, expected: str) -> None:
    raise OptionInvalid(option=option, value=value, expected=expected)


def _unknown(connection: object) -> OptionInvalid:
    return OptionInvalid(option="connection", value=type(connection).__name__, expected=f"it must be {ACCEPTED}")


# What the database refuses.


class DatabaseRefusal(Exception):
    """A refusal by the ledger's functions, as every driver reports it: `sqlstate`, message and `detail`."""

    def __init__(self, message: str, *, sqlstate: str, detail: str) -> None:
        super().__init__(message)
        self.sqlstate, self.detail = sqlstate, detail


@contextmanager
def _refusals_translated() -> Generator[None]:
    """Raises the TrellisError for a refusal by the ledger. Every other error of the driver is raised unchanged."""
    try:
        yield
    except TrellisError:
        raise
    except Exception as error:
        refusal = _refusal_in(error)
        if refusal is None:
            raise
        raise to_trellis_error(refusal) from error


def _refusal_in(error: BaseException | None) -> DatabaseRefusal | None:
    """The ledger's refusal in an error of a driver, or in what a library wrapped around it; None if there is none."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            break
        state = str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")
        report = getattr(error, "diag", None)
        if (state.startswith("TR") or state in REFUSALS) and (report is not None or hasattr(error, "detail")):
            message = getattr(report, "message_primary", None) or getattr(error, "message", None) or str(error)
            detail = getattr(report, "message_detail", None) or getattr(error, "detail", None) or ""
            return DatabaseRefusal(str(message), sqlstate=state, detail=str(detail))
        error = error.__cause__ or getattr(error, "orig", None)
    return None

"""Connections to PostgreSQL, direct or through a pooler. Only this module knows the driver."""


# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The driver ships no complete types; `PostgresConnection` below declares what is used of it.

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

import asyncpg

from trellis.engine.errors import LedgerLoginRefused, LedgerTooOld, LedgerUnavailable, LedgerUrlInvalid, PoolerUnfit
from trellis.engine.logs import log_of
from trellis.ledgers.postgres.number_arrays import NumberArrays

# A connection through a pooler that may assign every transaction to another server session, as pgbouncer does in
# transaction mode. Session settings would be lost, or would affect other clients. So each statement runs in a
# transaction that sets what it needs with `set local`. No statement is prepared under a name. LISTEN is not used: work
# is found by polling.

ROLLBACK_S = 2.0


class PooledConnection:
    """A pooled connection, for one transaction at a time. `lost` are the errors that mean the connection is gone."""

    def __init__(self, connection: "PostgresConnection", local: str, lost: tuple[type[Exception], ...]) -> None:
        self._connection, self._local, self._lost = connection, local, lost
        self._in_transaction = False

    async def fetch(self, query: str, *args: object) -> "list[PostgresRow]":
        async with self._transaction():
            return await self._connection.fetch(query, *args)

    async def fetchval(self, query: str, *args: object) -> Any:
        async with self._transaction():
            return await self._connection.fetchval(query, *args)

    async def execute(self, query: str, *args: object) -> str:
        async with self._transaction():
            return await self._connection.execute(query, *args)

    async def executemany(self, command: str, args: Iterable[Sequence[object]]) -> None:
        """Run a statement for each tuple of arguments."""
        async with self._transaction():
            await self._connection.executemany(command, args)

    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[object]:
        """A transaction with the local settings; the driver's own transaction could not set them."""
        level = "" if isolation is None else f" isolation level {isolation.replace('_', ' ')}"
        return self._transaction(f"begin{level}{' read only' if readonly else ''}")

    @asynccontextmanager
    async def _transaction(self, begin: str = "begin") -> AsyncGenerator[None]:
        """Join the open transaction, or begin a new one."""
        if self._in_transaction:
            yield
            return
        await self._connection.execute(f"{begin}; {self._local}")
        self._in_transaction, ended = True, False
        try:
            yield
            await self._connection.execute("commit")
            ended = True
        finally:
            self._in_transaction = False
            if not ended:
                await self._roll_back()

    async def _roll_back(self) -> None:
        """Roll back. A connection that does not confirm the rollback is terminated."""
        if self._connection.is_closed():
            return
        try:
            async with asyncio.timeout(ROLLBACK_S):
                await self._connection.execute("rollback")
        except self._lost:
            self._connection.terminate()

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
        """Not possible through a pooler: the next transaction may run in another session."""
        raise AssertionError(f"{channel}, {callback}: ask `listens` first")

    def get_server_version(self) -> "ServerVersion":
        return self._connection.get_server_version()

    def get_server_pid(self) -> int:
        """The pooler's number for this connection."""
        return self._connection.get_server_pid()

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 the driver's own name
        await self._connection.close(timeout=timeout)

    def terminate(self) -> None:
        """Close the connection at once, without telling the server."""
        self._connection.terminate()

    def is_closed(self) -> bool:
        return self._connection.is_closed()


# Making connections, and classifying the driver's errors.

CONNECT_TIMEOUT_S = 10.0
SERVER_VERSION_MIN = 15
DEFAULT_PORT = 5432
APPLICATION_NAME = "trellis"
APPLICATION_NAME_MAX = 63
"""The server truncates longer names."""
SESSION_SETTINGS = {
    "search_path": "trellis",
    "timezone": "UTC",
    "jit": "off",
    "idle_in_transaction_session_timeout": "5000",
    "plan_cache_mode": "force_generic_plan",
}
"""Settings of every connection: per session, or per transaction behind a pooler.

Every statement is written so that one plan serves all values, and planning a list takes longer than running it.
"""
LOCAL_SETTINGS = "; ".join(f"set local {name} = '{value}'" for name, value in SESSION_SETTINGS.items())
BEHIND_POOLER = "TR009"
"""The SQLSTATE of the check in `_direct`: the process that answers did not accept the connection."""
_pooled_urls: set[str] = set()
"""Addresses where this process found a pooler. A direct connection is not tried there again."""

_POOLER_REFUSES = re.compile("startup parameter|pooling mode")

_log = log_of("trellis.ledger")

PostgresRow: TypeAlias = Any
"""A record: values by position and by name."""


class ServerVersion(NamedTuple):
    """The server version that the driver reports."""

    major: int
    minor: int
    micro: int
    releaselevel: str
    serial: int


class PostgresConnection(Protocol):
    """The part of a connection that the ledger uses."""

    async def fetch(self, query: str, *args: object) -> list[PostgresRow]: ...
    async def fetchval(self, query: str, *args: object) -> Any: ...
    async def execute(self, query: str, *args: object) -> str: ...
    async def executemany(self, command: str, args: Iterable[Sequence[object]]) -> None: ...
    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[object]: ...
    def get_server_version(self) -> ServerVersion: ...
    def get_server_pid(self) -> int: ...
    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None: ...
    async def close(self, *, timeout: float | None = None) -> None: ...  # noqa: ASYNC109 the driver's own name
    def terminate(self) -> None: ...
    def is_closed(self) -> bool: ...


PostgresError: type[Exception] = asyncpg.PostgresError
UniqueViolation: type[Exception] = asyncpg.UniqueViolationError
ReadOnly: type[Exception] = asyncpg.ReadOnlySQLTransactionError
InsufficientPrivilege: type[Exception] = asyncpg.InsufficientPrivilegeError
LockNotAvailable: type[Exception] = asyncpg.LockNotAvailableError

CONNECTION_LOST_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a call on a session that was ended from outside
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
)
"""The connection is gone or was never made. The call may or may not have had its effect."""

CONFLICT_ERRORS: tuple[type[Exception], ...] = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InternalServerError,  # "cache lookup failed": an object in use was replaced, for example by a migration
)
"""The transaction was rolled back because of a conflict. It had no effect and may be repeated."""

STOPPED_ERRORS: tuple[type[Exception], ...] = (
    asyncpg.QueryCanceledError,  # by an operator, or by a `statement_timeout` of the login
    asyncpg.LockNotAvailableError,  # a `lock_timeout` of the login
    asyncpg.OutOfMemoryError,
    asyncpg.PostgresIOError,
)
"""The server stopped the transaction, which had no effect. It may do so again: what takes too long takes so each time."""

DAMAGED_ERRORS: tuple[type[Exception], ...] = (asyncpg.DataCorruptedError, asyncpg.IndexCorruptedError)
"""The server's files are damaged. A repeated call meets that again."""


UNENCODED = (
    "in its user name or password write @ as %40, : as %3A, / as %2F, # as %23, ? as %3F, [ as %5B and % as %25, and its"
    " port as a number"
)
"""Why an address cannot be read. Nobody knows where its password ends, so none of it is quoted."""

ONE_HOST = "it must name one host, such as an address that follows the primary, or one that a pooler serves"


def check_url(url: str) -> None:
    """Refuse an invalid address before connecting."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # it would quote a piece of the password
        if "," in url.rpartition("@")[2].partition("?")[0]:
            raise LedgerUrlInvalid(url=url, reason=ONE_HOST) from None
        raise LedgerUrlInvalid(url=url, reason=UNENCODED if "@" in url else str(error)) from None
    if parts.scheme not in {"postgresql", "postgres"}:
        raise LedgerUrlInvalid(url=url, reason=f"scheme {parts.scheme!r} is not postgresql")
    ended_early = ":" in parts.netloc and "@" not in parts.netloc and "@" in parts.path + parts.fragment
    if parts.netloc.count("@") > 1 or ended_early:
        raise LedgerUrlInvalid(url=url, reason=UNENCODED)


async def connect(
    url: str, *, timeout_s: float = CONNECT_TIMEOUT_S, application_name: str = APPLICATION_NAME
) -> PostgresConnection:
    """A connection to a server that is new enough. Raises otherwise. Detects a pooler in between."""
    check_url(url)
    name = {"application_name": application_name[:APPLICATION_NAME_MAX]}
    connection: PostgresConnection | None = None
    try:
        if url not in _pooled_urls:
            connection = await _direct(url, timeout_s, {**name, **SESSION_SETTINGS})
        if connection is None:
            connection = await _pooled(url, timeout_s, name)
    except (asyncpg.InvalidCatalogNameError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        raise LedgerLoginRefused(url=url, reason=str(error)) from error
    except ValueError as error:
        raise LedgerUrlInvalid(url=url, reason=str(error)) from error
    except CONNECTION_LOST_ERRORS as error:
        raise LedgerUnavailable(reason=_why_lost(error, url, timeout_s)) from error
    check_server(connection.get_server_version())
    return connection


def listens(connection: PostgresConnection) -> bool:
    """Whether this connection receives notifications."""
    return not isinstance(connection, PooledConnection)


def is_pooled(url: str) -> bool:
    """Whether this process found a pooler at this address when it connected."""
    return url in _pooled_urls


ARRAY_TYPES = {
    1000: ("bool", 16),
    1001: ("bytea", 17),
    1005: ("int2", 21),
    1007: ("int4", 23),
    1009: ("text", 25),
    1016: ("int8", 20),
    1022: ("float8", 701),
    1185: ("timestamptz", 1184),
}
"""The array types of the ledger's calls: the name and number of the element type, by their own number in every PostgreSQL."""


NUMBER_ARRAYS = {1005: NumberArrays(21, "h"), 1007: NumberArrays(23, "i"), 1016: NumberArrays(20, "q")}
"""How arrays of numbers are sent and received, by the number of their type."""


class _NothingRun(NamedTuple):
    """Stands for the driver's query about types where none was needed; a name says that no unnamed statement was used."""

    name: str = "none"


class ConnectionThatKnowsArrays(asyncpg.Connection):
    """A connection that does not ask the server about `ARRAY_TYPES`.

    The driver asks each new connection about every array type it meets, by a query that takes the server longer to plan
    than the ledger's first calls take. It asks as before about any other type.
    """

    async def _introspect_types(self, typeoids: Iterable[int], *args: Any, **options: Any) -> Any:
        if not all(oid in ARRAY_TYPES for oid in typeoids):
            return await super()._introspect_types(typeoids, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        return [_array_type(oid) for oid in typeoids], _NothingRun()


def _array_type(oid: int) -> dict[str, Any]:
    """What the driver's query would return for this array type."""
    name, element = ARRAY_TYPES[oid]
    of_other_kinds = dict.fromkeys(("range_subtype", "attrtypoids", "attrnames", "basetype"))
    return {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{name}",
        "kind": b"b",
        "elemtype": element,
        "elemtype_name": name,
        "elemdelim": ",",
        **of_other_kinds,
    }


async def _open(url: str, timeout_s: float, settings: dict[str, str], **options: Any) -> PostgresConnection:
    connection = await asyncpg.connect(
        url,
        timeout=cast("Any", timeout_s),
        server_settings=settings,
        connection_class=ConnectionThatKnowsArrays,
        **options,
    )
    set_number_arrays(connection)
    return cast("PostgresConnection", connection)


def set_number_arrays(connection: Any) -> None:
    """Have a connection send and receive `NUMBER_ARRAYS` as they say.

    The driver's `set_type_codec` refuses arrays, so this reaches inside. A driver that has no such place any more, or
    refuses there, too, keeps its own way, which is right and slower.
    """
    with contextlib.suppress(AttributeError, TypeError, asyncpg.InterfaceError):
        settings_of_types = connection._protocol.get_settings()  # noqa: SLF001 - the driver offers no other way
        for oid, form in NUMBER_ARRAYS.items():
            settings_of_types.add_python_codec(
                oid, f"_{ARRAY_TYPES[oid][0]}", "pg_catalog", [], "scalar", form.encode, form.decode, "binary"
            )


async def _direct(url: str, timeout_s: float, settings: dict[str, str]) -> PostgresConnection | None:
    """A direct server session; None if there is a pooler in between.

    A pooler refuses session settings, or reports a process number that no server process has.
    """
    try:
        connection = await _open(url, timeout_s, settings)
    except asyncpg.ProtocolViolationError as error:
        if "startup parameter" not in str(error):
            raise
        return None
    question = f"do $$ begin if pg_backend_pid() <> {connection.get_server_pid()} then raise sqlstate '{BEHIND_POOLER}'; end if; end $$"
    is_direct = False
    try:
        async with asyncio.timeout(timeout_s):
            await connection.execute(question)
        is_direct = True
    except asyncpg.PostgresError as error:
        if getattr(error, "sqlstate", None) != BEHIND_POOLER:
            raise
    finally:
        if not is_direct:
            connection.terminate()
    return connection if is_direct else None


async def _pooled(url: str, timeout_s: float, settings: dict[str, str]) -> PostgresConnection:
    """A connection that uses only what poolers accept. Raises PoolerUnfit if the pooler refuses it."""
    try:
        # Without a cache no statement is prepared under a name, which another session would not know.
        connection = await _open(url, timeout_s, settings, statement_cache_size=0)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.execute(f"begin; {LOCAL_SETTINGS}")
                await connection.execute("commit")
        except BaseException:
            connection.terminate()  # otherwise it stays in the pooler's queue and takes a session when its turn comes
            raise
    except asyncpg.PostgresConnectionError as error:
        if not _POOLER_REFUSES.search(str(error)):
            raise
        raise PoolerUnfit(reason=str(error)) from error
    if url not in _pooled_urls:
        _pooled_urls.add(url)
        remedy = "name the server itself in TRELLIS_LEDGER for hints and fewer round trips"
        _log.info("pooler_noticed", hints="off: work is found by polling, within a second", remedy=remedy)
    return PooledConnection(connection, LOCAL_SETTINGS, CONNECTION_LOST_ERRORS)


def _why_lost(error: Exception, url: str, timeout_s: float) -> str:
    """Why no connection was made, in words instead of the system's error names."""
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or DEFAULT_PORT
    match error:
        case socket.gaierror():
            return f"there is no host named {host!r}, or this machine cannot look it up"
        case ConnectionRefusedError():
            return f"nothing listens at {host}, port {port}"
        case TimeoutError():
            return f"{host}, port {port}, said nothing for {timeout_s:g} s"
        case asyncpg.TooManyConnectionsError():
            return f"the server has no connection left ({error}); docs/how-to/size-a-fleet.md says how many are needed"
        case _:
            return f"{type(error).__name__}: {error}"


def check_server(version: ServerVersion) -> None:
    """Refuse a server that is too old for the ledger's SQL."""
    if version.major < SERVER_VERSION_MIN:
        raise LedgerTooOld(
            software="PostgreSQL",
            found=f"{version.major}.{version.minor}",
            needed=str(SERVER_VERSION_MIN),
            reason="the ledger's SQL needs it",
        )

"""Connections to PostgreSQL: direct, or through a pooler."""


# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The driver ships no complete types; `PostgresConnection` below says what we use of it.

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

import asyncpg

from trellis.engine.errors import LedgerTooOld, LedgerUnavailable, LedgerUrlInvalid, PoolerUnfit
from trellis.engine.logs import log_of

# A connection through a pooler that may give every transaction to another session of the server.
#
# That is how pgbouncer works in transaction mode. What is set for a session is gone with the next statement, or is there for
# somebody else's. So each statement runs in a transaction that sets what it needs for itself alone, nothing is prepared under
# a name, and nobody listens: work is found by polling.

ROLLBACK_S = 2.0


class PooledConnection:
    """The connection, for one transaction at a time; `lost` are the errors that mean it is gone."""

    def __init__(self, connection: "PostgresConnection", local: str, lost: tuple[type[Exception], ...]) -> None:
        self._connection, self._local, self._lost = connection, local, lost
        self._in_transaction = False

    async def fetch(self, query: str, *args: object) -> "list[PostgresRow]":
        """The rows."""
        async with self._transaction():
            return await self._connection.fetch(query, *args)

    async def fetchval(self, query: str, *args: object) -> Any:
        """The first value of the first row."""
        async with self._transaction():
            return await self._connection.fetchval(query, *args)

    async def execute(self, query: str, *args: object) -> str:
        """Run it."""
        async with self._transaction():
            return await self._connection.execute(query, *args)

    async def executemany(self, command: str, args: Iterable[Sequence[object]]) -> None:
        """Run it for each."""
        async with self._transaction():
            await self._connection.executemany(command, args)

    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[object]:
        """A transaction; the driver's own could not set what must hold in it."""
        level = "" if isolation is None else f" isolation level {isolation.replace('_', ' ')}"
        return self._transaction(f"begin{level}{' read only' if readonly else ''}")

    @asynccontextmanager
    async def _transaction(self, begin: str = "begin") -> AsyncGenerator[None]:
        """The one that is open, else a new one."""
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
        """A connection that cannot say that it did must not be used again."""
        if self._connection.is_closed():
            return
        try:
            async with asyncio.timeout(ROLLBACK_S):
                await self._connection.execute("rollback")
        except self._lost:
            self._connection.terminate()

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
        """Nothing would be heard: the session that listens is another one in the next transaction."""
        raise AssertionError(f"{channel}, {callback}: ask `listens` first")

    def get_server_version(self) -> "ServerVersion":
        """What the driver says of the server."""
        return self._connection.get_server_version()

    def get_server_pid(self) -> int:
        """The pooler's number for this connection."""
        return self._connection.get_server_pid()

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 the driver's own name
        """Hang up."""
        await self._connection.close(timeout=timeout)

    def terminate(self) -> None:
        """Hang up without a word."""
        self._connection.terminate()

    def is_closed(self) -> bool:
        """Whether it is gone."""
        return self._connection.is_closed()


# How a connection to PostgreSQL is made, and which of its errors mean what. The only module that knows the driver.

CONNECT_TIMEOUT_S = 10.0
SERVER_VERSION_MIN = 15
DEFAULT_PORT = 5432
APPLICATION_NAME = "trellis"
APPLICATION_NAME_MAX = 63
"""The server cuts what is longer."""
SESSION_SETTINGS = {
    "search_path": "trellis",
    "timezone": "UTC",
    "jit": "off",
    "idle_in_transaction_session_timeout": "5000",
}
"""What holds on every connection: for its whole time, or for each transaction where a pooler shares out the sessions."""
LOCAL_SETTINGS = "; ".join(f"set local {name} = '{value}'" for name, value in SESSION_SETTINGS.items())
BEHIND_POOLER = "TR009"
"""What the question below ends with when the answer comes from another process than the one that let us in."""
_pooled_urls: set[str] = set()
"""Addresses where this process has met a pooler: it is not tried again as if there were none."""

_POOLER_REFUSES = re.compile("startup parameter|pooling mode")

_log = log_of("trellis.ledger")

PostgresRow: TypeAlias = Any
"""A record: values by position and by name."""


class ServerVersion(NamedTuple):
    """What the driver says of the server."""

    major: int
    minor: int
    micro: int
    releaselevel: str
    serial: int


class PostgresConnection(Protocol):
    """What the ledger uses of a connection."""

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
InsufficientPrivilege: type[Exception] = asyncpg.InsufficientPrivilegeError
LockNotAvailable: type[Exception] = asyncpg.LockNotAvailableError

CONNECTION_LOST_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a call that meets a session which was ended from outside
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
)
"""The connection is gone or was never there: what was asked may or may not have happened."""

CONFLICT_ERRORS: tuple[type[Exception], ...] = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InternalServerError,  # "cache lookup failed": what it was about to use was replaced, by a migration say
)
"""The transaction was chosen as the victim of another: it did nothing and may be made again."""


def check_url(url: str) -> None:
    """Refuse an address that is none, before anything is tried."""
    parts = urlsplit(url)
    if parts.scheme not in {"postgresql", "postgres"}:
        raise LedgerUrlInvalid(url=url, reason=f"scheme {parts.scheme!r} is not postgresql")
    try:
        _ = parts.port
    except ValueError as error:
        raise LedgerUrlInvalid(url=url, reason=str(error)) from error


async def connect(
    url: str, *, timeout_s: float = CONNECT_TIMEOUT_S, application_name: str = APPLICATION_NAME
) -> PostgresConnection:
    """A connection to a server that is new enough, or what is wrong with it. A pooler in between is noticed."""
    check_url(url)
    name = {"application_name": application_name[:APPLICATION_NAME_MAX]}
    made: PostgresConnection | None = None
    try:
        if url not in _pooled_urls:
            made = await _direct(url, timeout_s, {**name, **SESSION_SETTINGS})
        if made is None:
            made = await _pooled(url, timeout_s, name)
    except (asyncpg.InvalidCatalogNameError, asyncpg.InvalidAuthorizationSpecificationError, ValueError) as error:
        raise LedgerUrlInvalid(url=url, reason=str(error)) from error
    except CONNECTION_LOST_ERRORS as error:
        raise LedgerUnavailable(reason=_why_lost(error, url, timeout_s)) from error
    check_server(made.get_server_version())
    return made


def listens(connection: PostgresConnection) -> bool:
    """Whether notifications reach this connection."""
    return not isinstance(connection, PooledConnection)


async def _open(url: str, timeout_s: float, settings: dict[str, str], **options: Any) -> PostgresConnection:
    made = await asyncpg.connect(url, timeout=cast("Any", timeout_s), server_settings=settings, **options)
    return cast("PostgresConnection", made)


async def _direct(url: str, timeout_s: float, settings: dict[str, str]) -> PostgresConnection | None:
    """A session of the server's own; None where a pooler is in between.

    A pooler refuses settings of a session, or lets in under a number that no process of the server has.
    """
    try:
        made = await _open(url, timeout_s, settings)
    except asyncpg.ProtocolViolationError as error:
        if "startup parameter" not in str(error):
            raise
        return None
    question = f"do $$ begin if pg_backend_pid() <> {made.get_server_pid()} then raise sqlstate '{BEHIND_POOLER}'; end if; end $$"
    is_direct = False
    try:
        async with asyncio.timeout(timeout_s):
            await made.execute(question)
        is_direct = True
    except asyncpg.PostgresError as error:
        if getattr(error, "sqlstate", None) != BEHIND_POOLER:
            raise
    finally:
        if not is_direct:
            made.terminate()
    return made if is_direct else None


async def _pooled(url: str, timeout_s: float, settings: dict[str, str]) -> PostgresConnection:
    """A connection that gives a pooler nothing to refuse; raises PoolerUnfit when it refuses all the same."""
    try:
        # Without a cache no statement gets a name: the session that knows the name may be another's by then.
        made = await _open(url, timeout_s, settings, statement_cache_size=0)
        try:
            async with asyncio.timeout(timeout_s):
                await made.execute(f"begin; {LOCAL_SETTINGS}")
                await made.execute("commit")
        except BaseException:
            made.terminate()  # else it stays in the pooler's line, and takes a session when its turn comes
            raise
    except asyncpg.PostgresConnectionError as error:
        if not _POOLER_REFUSES.search(str(error)):
            raise
        raise PoolerUnfit(reason=str(error)) from error
    if url not in _pooled_urls:
        _pooled_urls.add(url)
        remedy = "name the server itself in TRELLIS_LEDGER for hints and fewer round trips"
        _log.info("pooler_noticed", hints="off: work is found by polling, within a second", remedy=remedy)
    return PooledConnection(made, LOCAL_SETTINGS, CONNECTION_LOST_ERRORS)


def _why_lost(error: Exception, url: str, timeout_s: float) -> str:
    """Why no connection came about, in words rather than in the names of the system's errors."""
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or DEFAULT_PORT
    match error:
        case socket.gaierror():
            return f"there is no host named {host!r}, or this machine cannot look it up"
        case ConnectionRefusedError():
            return f"nothing listens at {host}, port {port}"
        case TimeoutError():
            return f"{host}, port {port}, said nothing for {timeout_s:g} s"
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

"""How a connection to PostgreSQL is made, and which of its errors mean what. The only module that knows the driver."""

# The driver ships no complete types; `Connection` below says what we use of it.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

import asyncpg

from trellis.engine.errors import LedgerTooOld, LedgerUnavailable, LedgerUrlInvalid

CONNECT_TIMEOUT_S = 10.0
SERVER_VERSION_MIN = 15
DEFAULT_PORT = 5432
SERVER_SETTINGS = {
    "application_name": "trellis",
    "search_path": "trellis",
    "timezone": "UTC",
    "jit": "off",
    "idle_in_transaction_session_timeout": "5000",
}

Row: TypeAlias = Any
"""A record: values by position and by name."""


class ServerVersion(NamedTuple):
    """What the driver says of the server."""

    major: int
    minor: int
    micro: int
    releaselevel: str
    serial: int


class Connection(Protocol):
    """What the ledger uses of a connection."""

    async def fetch(self, query: str, *args: object) -> list[Row]: ...
    async def fetchval(self, query: str, *args: object) -> Any: ...
    async def execute(self, query: str, *args: object) -> str: ...
    async def executemany(self, command: str, args: Iterable[Sequence[object]]) -> None: ...
    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[object]: ...
    def get_server_version(self) -> ServerVersion: ...
    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None: ...
    async def close(self, *, timeout: float | None = None) -> None: ...  # noqa: ASYNC109 the driver's own name
    def terminate(self) -> None: ...
    def is_closed(self) -> bool: ...


PostgresError: type[Exception] = asyncpg.PostgresError
UniqueViolation: type[Exception] = asyncpg.UniqueViolationError
InsufficientPrivilege: type[Exception] = asyncpg.InsufficientPrivilegeError

LOST: tuple[type[Exception], ...] = (
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

CONFLICT: tuple[type[Exception], ...] = (
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


async def connect(url: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
    """A connection to a server that is new enough, or what is wrong with it."""
    check_url(url)
    try:
        made = cast(
            "Connection", await asyncpg.connect(url, timeout=cast("Any", timeout_s), server_settings=SERVER_SETTINGS)
        )
    except (asyncpg.InvalidCatalogNameError, asyncpg.InvalidAuthorizationSpecificationError, ValueError) as error:
        raise LedgerUrlInvalid(url=url, reason=str(error)) from error
    except LOST as error:
        raise LedgerUnavailable(reason=_why_lost(error, url, timeout_s)) from error
    check_server(made.get_server_version())
    return made


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

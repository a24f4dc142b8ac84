"""A connection through a pooler that may give every transaction to another session of the server.

That is how pgbouncer works in transaction mode. What is set for a session is gone with the next statement, or is there for
somebody else's. So each statement runs in a transaction that sets what it needs for itself alone, nothing is prepared under
a name, and nobody listens: work is found by polling.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow, ServerVersion

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

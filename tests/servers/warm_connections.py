"""Keeps connections to PostgreSQL for the next test instead of hanging up.

A new session costs the server several times as much as most tests ask of it: it starts a process, which then reads the catalogue and
compiles every function anew. A connection that its user closes in good order is set back to how it began and kept. Whoever asks for the
same address with the same settings gets it. One that was terminated, is inside a transaction or listens is ended. All of that holds in
the event loop that asked for it, and nowhere else: a connection belongs to its loop.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import asyncpg

KEPT_MAX = 12
"""Connections of one kind that wait for a next user."""
KEPT_OF_ALL_MAX = 60
"""Connections of every kind together. A database that no test uses any more would otherwise keep its connections until the server
has none left."""
SET_BACK = "SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; RESET ALL; DISCARD TEMP"

Kind: TypeAlias = tuple[str | None, str]

CONNECT: Callable[..., Awaitable[Any]] = asyncpg.connect
CLOSE: Callable[..., Awaitable[None]] = asyncpg.Connection.close
"""The driver's own ways."""


class WarmConnections:
    """What is kept; made by `keeping_connections`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept: defaultdict[Kind, list[Any]] = defaultdict(list)
        self._kinds: WeakKeyDictionary[Any, Kind] = WeakKeyDictionary()

    async def connect(self, dsn: str | None = None, **settings: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            return await CONNECT(dsn, **settings)
        kind = (dsn, repr(sorted(settings.items(), key=str)))
        kept = self._kept[kind] = self._kept.pop(kind, [])  # now the kind that was used last
        while kept:
            connection = kept.pop()
            if not connection.is_closed():
                return connection
        connection = await CONNECT(dsn, **settings)
        self._kinds[connection] = kind
        return connection

    async def close(self, connection: Any, **options: Any) -> None:
        kind = self._kinds.get(connection)
        if kind is None or not _is_idle(connection) or len(self._kept[kind]) >= KEPT_MAX:
            await CLOSE(connection, **options)
            return
        try:
            await connection.execute(SET_BACK)
        except BaseException:
            connection.terminate()
            raise
        self._kept[kind].append(connection)
        while sum(map(len, self._kept.values())) > KEPT_OF_ALL_MAX:
            await CLOSE(next(kept for kept in self._kept.values() if kept).pop(0))

    async def end(self) -> None:
        """Hang up everywhere."""
        for connection in [one for kept in self._kept.values() for one in kept]:
            await CLOSE(connection)
        self._kept.clear()


def _is_idle(connection: Any) -> bool:
    return not (connection.is_closed() or connection.is_in_transaction() or connection._listeners)


@asynccontextmanager
async def keeping_connections() -> AsyncIterator[WarmConnections]:
    """From now on, in this event loop."""
    warm = WarmConnections()
    asyncpg.connect = warm.connect

    async def close(connection: Any, **options: Any) -> None:
        await warm.close(connection, **options)

    asyncpg.Connection.close = close  # type: ignore[method-assign]
    try:
        yield warm
    finally:
        asyncpg.connect, asyncpg.Connection.close = CONNECT, CLOSE  # type: ignore[method-assign]
        await warm.end()

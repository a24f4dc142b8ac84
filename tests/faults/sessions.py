"""Two database sessions, each with one call inside one transaction, in every order their steps can have.

A step that must wait for the other session is noticed by `pg_blocking_pids` and left waiting while the others go on, as
a person with two SQL shells would do. A deadlock is ended by the server; its victim tries again, as the ledger does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import asyncpg

from trellis.engine.ledger import Ledger
from trellis.ledgers.postgres.connection import SESSION_SETTINGS
from trellis.ledgers.postgres.lanes import LaneOptions, PostgresLane
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.turn import LowWaterMarks, TurnCaller

BLOCK_POLL_S = 0.002
PATIENCE_S = 60.0

Call = Callable[[Ledger], Awaitable[Any]]


class BoundLane(PostgresLane):
    """A lane on a connection whose transaction somebody else opens and ends; a deadlock is that one's to handle."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        super().__init__("", LaneOptions())
        self._bound: Any = connection

    async def call(self, verb: str, request: str, ask: Any, *, window_s: float | None = None) -> Any:
        return await ask(self._bound, False)


def bound(connection: asyncpg.Connection) -> Ledger:
    """The ledger's own verbs, inside whatever transaction this connection is in."""
    ledger = PostgresLedger("", LaneOptions(), hints=False)
    lane = BoundLane(connection)
    for name in [name for name in vars(ledger) if name.endswith("_lane")]:
        setattr(ledger, name, lane)
    ledger._turners = [TurnCaller(lane, LowWaterMarks())]
    return cast("Ledger", ledger)


@dataclass(frozen=True)
class Outcome:
    """What both sessions were told, and what the interleaving met on the way."""

    first: Any
    second: Any
    waited: bool
    deadlocks: int


def orders() -> Iterator[tuple[str, ...]]:
    """Every order of (a calls, a commits) and (b calls, b commits); `a` and `b` each appear twice."""
    yield from sorted(set(permutations("aabb")))


class Session:
    """One connection; its two steps are the call and the commit."""

    def __init__(self, connection: asyncpg.Connection, call: Call) -> None:
        self.connection = connection
        self.ledger = bound(connection)
        self.call = call
        self.answer: Any = None
        self.deadlocks = 0
        self.steps = iter((self._call, self._commit))
        self.running: asyncio.Task[None] | None = None
        self._transaction: Any = None

    async def _call(self) -> None:
        self._transaction = self.connection.transaction()
        await self._transaction.start()
        try:
            self.answer = await self.call(self.ledger)
        except asyncpg.DeadlockDetectedError:
            self.deadlocks += 1
            await self._transaction.rollback()
            await self._call()

    async def _commit(self) -> None:
        await self._transaction.commit()

    def step(self) -> None:
        """Begin the next step; after one that still waits, queue behind it."""
        begun, earlier = next(self.steps), self.running

        async def in_order() -> None:
            if earlier is not None:
                await earlier
            await begun()

        self.running = asyncio.create_task(in_order())


async def settled(session: Session, watcher: asyncpg.Connection) -> bool:
    """Wait until the session's step is done; False when it waits for a lock of the other one instead."""
    assert session.running is not None
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not session.running.done():
        blocked = await watcher.fetchval(
            "select cardinality(pg_blocking_pids($1)) > 0", session.connection.get_server_pid()
        )
        if blocked:
            return False
        assert asyncio.get_running_loop().time() < end, "a step neither ends nor waits for a lock"
        await asyncio.wait([session.running], timeout=BLOCK_POLL_S)
    session.running.result()
    return True


async def interleave(order: tuple[str, ...], first: Session, second: Session, watcher: asyncpg.Connection) -> Outcome:
    """Make the steps in this order, then let everything that waits come to its end."""
    waited = False
    for name in order:
        session = first if name == "a" else second
        session.step()
        waited |= not await settled(session, watcher)
    async with asyncio.timeout(PATIENCE_S):
        for session in (first, second):
            assert session.running is not None
            await session.running
    return Outcome(first.answer, second.answer, waited, first.deadlocks + second.deadlocks)


@asynccontextmanager
async def three_connections(url: str, admin_url: str):
    """Two for the sessions, as the application; one for the watcher."""
    opened = [await asyncpg.connect(url, server_settings=SESSION_SETTINGS) for _ in range(2)]
    opened.append(await asyncpg.connect(admin_url))
    try:
        yield opened
    finally:
        for connection in opened:
            await connection.close()

"""How a rig is opened: on a SQLite file with a clock of its own, or on a copy of the clocked PostgreSQL template."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from tests.ledgers.conformance.rig import Rig
from tests.servers.pooler import pooling
from tests.servers.postgres import PostgresServer
from tests.servers.templates import CLOCKED_TEMPLATE, LOGIN
from trellis.ledgers import open_ledger

SQLITE_START_S = 1_800_000_000.0
REUSED_JOBS_MAX = 500
"""A database that held more is left behind: emptying it would cost more than a new one."""


@asynccontextmanager
async def sqlite_rig(path: Path) -> AsyncIterator[Rig]:
    now_s = SQLITE_START_S

    async def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def reopen():
        return await open_ledger(f"sqlite:///{path}", clock=lambda: now_s)

    async def empty(rig: Rig):
        await rig.close()
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
        rig.others.clear()
        rig.ledger = await reopen()
        return rig.ledger

    rig = Rig(kind="sqlite", ledger=await reopen(), advance=advance, reopen=reopen, empty=empty)
    try:
        yield rig
    finally:
        await rig.close()


@asynccontextmanager
async def postgres_rig(server: PostgresServer, kind: str) -> AsyncIterator[Rig]:
    """With TRELLIS_TEST_POOLER set the ledger works through a pooler in transaction mode."""
    name = _database(server)
    app_url = server.url(name, LOGIN)
    if not os.environ.get("TRELLIS_TEST_POOLER"):
        async with _postgres_rig(server, kind, name, app_url) as rig:
            yield rig
        return
    async with pooling(app_url) as (_, pooled_url), _postgres_rig(server, kind, name, pooled_url) as rig:
        yield rig


@asynccontextmanager
async def _postgres_rig(server: PostgresServer, kind: str, name: str, app_url: str) -> AsyncIterator[Rig]:
    admin = await asyncpg.connect(server.url(name))

    async def advance(seconds: float) -> None:
        await admin.execute("UPDATE trellis.test_clock SET at = at + make_interval(secs => $1)", seconds)

    async def admin_sql(statement: str, *arguments: object) -> list[tuple]:
        return [tuple(row) for row in await admin.fetch(statement, *arguments)]

    async def reopen():
        return await open_ledger(app_url)

    async def empty(rig: Rig):
        await rig.close()
        at = await admin.fetchval("SELECT at FROM trellis.test_clock")
        await admin.execute("SELECT fresh.reset()")
        await admin.execute("UPDATE trellis.test_clock SET at = $1", at)
        rig.used_up = True
        rig.ledger = await reopen()
        rig.others[:] = [await open_ledger(server.url(name))]
        return rig.others[0]

    try:
        ledger = await reopen()
        rig = Rig(
            kind=kind,
            ledger=ledger,
            advance=advance,
            reopen=reopen,
            empty=empty,
            admin_sql=admin_sql,
            app_url=app_url,
            admin_url=server.url(name),
        )
        try:
            yield rig
        finally:
            await rig.close()
        if not rig.used_up:
            await _give_back(server, name, admin)
    finally:
        await admin.close()


_numbers = iter(range(1, 1_000_000))
_clean: dict[int, list[str]] = {}
"""By the server's port: databases that are as good as new. One whose test failed does not come back."""


def _database(server: PostgresServer) -> str:
    clean = _clean.setdefault(server.port, [])
    if clean:
        return clean.pop()
    name = f"rig_{next(_numbers)}"
    server.create_database(name, CLOCKED_TEMPLATE)
    return name


async def _give_back(server: PostgresServer, name: str, admin: asyncpg.Connection) -> None:
    if int(await admin.fetchval("SELECT count(*) FROM trellis.job") or 0) > REUSED_JOBS_MAX:
        return
    await admin.execute("SELECT fresh.reset()")
    _clean[server.port].append(name)

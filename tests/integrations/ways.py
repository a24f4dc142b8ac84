"""Connections of the libraries that submit a job in their own transaction, behind one face."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, cast

import asyncpg
import psycopg
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from trellis.integrations.sql import submit_on, submit_on_async


@dataclass
class Way:
    """One connection: how a transaction, and one inside it, begins, and how a statement is run on it."""

    connection: Any
    begin: Callable[[], Any]
    nest: Callable[[], Any]
    run: Callable[..., Any]
    is_async: bool = True

    @asynccontextmanager
    async def transaction(self, *, nested: bool = False) -> AsyncGenerator[None]:
        """Commits, or rolls back if the block raises."""
        manager = self.nest() if nested else self.begin()
        if hasattr(manager, "__aenter__"):
            async with manager:
                yield
        else:
            with manager:
                yield

    async def sql(self, statement: str) -> None:
        answer = self.run(statement)
        if isawaitable(answer):
            await answer

    async def submit(self, *arguments: Any, **options: Any):
        if self.is_async:
            return await submit_on_async(self.connection, *arguments, **options)
        return submit_on(self.connection, *arguments, **options)


def driven_by(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@asynccontextmanager
async def sqlalchemy_session(url: str):
    engine = create_engine(driven_by(url, "psycopg"), poolclass=NullPool)
    with Session(engine) as it:
        yield Way(it, it.begin, it.begin_nested, lambda sql: it.execute(text(sql)), is_async=False)


@asynccontextmanager
async def sqlalchemy_connection(url: str):
    engine = create_engine(driven_by(url, "psycopg"), poolclass=NullPool)
    with engine.connect() as it:
        yield Way(it, it.begin, it.begin_nested, lambda sql: it.execute(text(sql)), is_async=False)


@asynccontextmanager
async def sqlalchemy_async_session(url: str):
    engine = create_async_engine(driven_by(url, "asyncpg"), poolclass=NullPool)
    async with AsyncSession(engine) as it:
        yield Way(it, it.begin, it.begin_nested, lambda sql: it.execute(text(sql)))


@asynccontextmanager
async def sqlalchemy_async_connection(url: str):
    engine = create_async_engine(driven_by(url, "psycopg"), poolclass=NullPool)
    async with engine.connect() as it:
        yield Way(it, it.begin, it.begin_nested, lambda sql: it.execute(text(sql)))


@asynccontextmanager
async def psycopg_connection(url: str):
    with psycopg.connect(url, autocommit=True, row_factory=cast("Any", dict_row)) as it:
        yield Way(it, it.transaction, it.transaction, it.execute, is_async=False)


@asynccontextmanager
async def psycopg_async_connection(url: str):
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as it:
        yield Way(it, it.transaction, it.transaction, it.execute)


@asynccontextmanager
async def asyncpg_connection(url: str):
    it = await asyncpg.connect(url)
    try:
        yield Way(it, it.transaction, it.transaction, it.execute)
    finally:
        await it.close()


WAYS = {
    way.__name__: way
    for way in (
        sqlalchemy_session,
        sqlalchemy_connection,
        sqlalchemy_async_session,
        sqlalchemy_async_connection,
        psycopg_connection,
        psycopg_async_connection,
        asyncpg_connection,
    )
}

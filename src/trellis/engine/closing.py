"""A context that closes what it is given."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Closable(Protocol):
    """A ledger, a store, a connection: whatever is closed at its end."""

    async def close(self) -> None: ...


ClosableT = TypeVar("ClosableT", bound=Closable)


@asynccontextmanager
async def closing(opened: ClosableT) -> AsyncGenerator[ClosableT]:
    """The same, closed when the context ends."""
    try:
        yield opened
    finally:
        await opened.close()

"""A fresh ledger of each kind."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from trellis.engine.ledger import Ledger
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(request: pytest.FixtureRequest) -> str:
    return "sqlite:///:memory:" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def any_ledger(any_url: str) -> AsyncGenerator[Ledger]:
    """One of each kind, for what could differ."""
    async with _opened(any_url) as opened:
        yield opened


@pytest.fixture
async def ledger() -> AsyncGenerator[Ledger]:
    async with _opened("sqlite:///:memory:") as opened:
        yield opened


@asynccontextmanager
async def _opened(url: str) -> AsyncGenerator[Ledger]:
    opened = await open_ledger(url)
    try:
        yield opened
        report = await verify(opened)
        assert report.ok, report.violations[:5]
    finally:
        await opened.close()

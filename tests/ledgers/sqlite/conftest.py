"""Ledgers on files of their own, and a SQL shell beside them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.ledgers.sqlite.shell import Shell
from trellis.ledgers.sqlite.connection import SqliteTarget
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.ledgers.sqlite.schema import migrate

START_S = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def shell(path: Path) -> Shell:
    """A shell on a fresh, empty ledger."""
    migrate(SqliteTarget(url=f"sqlite:///{path}", path=path))
    return Shell(path)


@pytest.fixture
async def reopen(path: Path) -> AsyncIterator[Callable[[], Awaitable[SqliteLedger]]]:
    """Opens the ledger at `path`, as often as asked; closed with the test."""
    opened: list[SqliteLedger] = []

    async def reopen() -> SqliteLedger:
        opened.append(await SqliteLedger.open(f"sqlite:///{path}", clock=lambda: START_S))
        return opened[-1]

    yield reopen
    for ledger in opened:
        await ledger.close()


@pytest.fixture
async def ledger(reopen: Callable[[], Awaitable[SqliteLedger]]) -> SqliteLedger:
    return await reopen()


def leave_upkeep(ledger: SqliteLedger) -> SqliteLedger:
    """Let the first commit give the thread nothing to do, so that the calls after it do not depend on how fast that is."""
    ledger.writer._quiet_since = START_S
    return ledger

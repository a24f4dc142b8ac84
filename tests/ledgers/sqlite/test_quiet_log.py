"""The write-ahead log of a ledger with little to do stays small; nobody waits for that, and nothing is lost by it."""

import asyncio
from pathlib import Path

import apsw
import pytest

from tests.ledgers.sqlite.people import ADMIN, WORKER, submit
from trellis.ledgers.sqlite.lanes import QUIET_COMMITS_MAX, QUIET_PAGES_MAX
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.testing import FakeClock

PAGE_BYTES = 4096 + 24
WAL_BYTES_MAX = (QUIET_PAGES_MAX + 20) * PAGE_BYTES
"""What a quiet writer leaves, and what it may write before it looks again."""


def wal_bytes(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


async def quiet_hours(ledger: SqliteLedger, clock: FakeClock, commits: int = 300) -> None:
    """A process that says that it is alive, and a follower that keeps its place, and nothing else."""
    following = await ledger.subscribe(ADMIN, "projector", lease_s=5.0)
    assert following is not None
    for _ in range(commits // 2):
        clock.advance(2.0)
        await ledger.heartbeat_worker(WORKER, None)
        assert await ledger.ack(following, None, lease_s=5.0)


@pytest.fixture
async def ledger_of(tmp_path: Path):
    clock = FakeClock(1.8e9)
    ledger = await SqliteLedger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock.monotonic)
    yield ledger, clock, tmp_path / "ledger.db"
    await ledger.close()


async def test_the_log_of_a_quiet_ledger_does_not_grow(ledger_of: tuple[SqliteLedger, FakeClock, Path]):
    ledger, clock, path = ledger_of
    await quiet_hours(ledger, clock)
    assert wal_bytes(path) <= WAL_BYTES_MAX


async def test_a_log_that_was_long_is_short_again_soon_after_the_load(
    ledger_of: tuple[SqliteLedger, FakeClock, Path],
):
    ledger, clock, path = ledger_of
    for _ in range(4 * QUIET_COMMITS_MAX):
        await submit(ledger)
        clock.advance(0.001)
    assert wal_bytes(path) > WAL_BYTES_MAX, "a busy writer leaves it to SQLite"
    await quiet_hours(ledger, clock, commits=20)
    assert wal_bytes(path) <= WAL_BYTES_MAX


async def test_long_reader_does_not_block_writers_and_the_log_shrinks_afterwards(
    ledger_of: tuple[SqliteLedger, FakeClock, Path],
):
    ledger, clock, path = ledger_of
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM trellis_job").fetchall()
    await asyncio.wait_for(quiet_hours(ledger, clock), 60)
    assert wal_bytes(path) > WAL_BYTES_MAX
    reader.execute("COMMIT")
    reader.close()
    await quiet_hours(ledger, clock, commits=20)
    assert wal_bytes(path) <= WAL_BYTES_MAX


async def test_a_burst_overwrites_its_log_instead_of_truncating_and_extending_it(
    ledger_of: tuple[SqliteLedger, FakeClock, Path],
):
    ledger, clock, path = ledger_of
    for _ in range(QUIET_COMMITS_MAX + 1):
        await submit(ledger)
        clock.advance(0.001)
    ledger.writer._connection.wal_autocheckpoint(1)  # every commit checkpoints, so the next one restarts the log
    await submit(ledger)
    length = wal_bytes(path)
    for _ in range(3):
        await submit(ledger)
    assert wal_bytes(path) == length > WAL_BYTES_MAX

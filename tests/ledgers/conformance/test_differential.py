"""Both ledgers play the same random stories: what one answers and records, the other must, field by field."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.ledgers.conformance.histories import compare_histories
from tests.ledgers.conformance.opening import SQLITE_START_S, postgres_rig, sqlite_rig
from tests.ledgers.conformance.story import HAPPENS, Player, Story
from tests.servers.postgres import PostgresServer

SEEDS = 30
STEPS = 24
MANY_SEEDS = 500
MANY_STEPS = 120
TOGETHER = 20
"""So many of the long stories are played in the same two ledgers."""


async def play(server: PostgresServer, path: Path, seeds: Iterable[int], steps: int) -> Counter[str]:
    """Play these stories one after the other in two new ledgers; how often each thing happened in them."""
    async with sqlite_rig(path) as sqlite, postgres_rig(server, "postgres") as postgres:
        assert postgres.admin_sql is not None
        await postgres.admin_sql("UPDATE trellis.test_clock SET at = to_timestamp($1)", SQLITE_START_S)
        for seed in seeds:
            await Story(seed=seed, players=(Player(rig=sqlite), Player(rig=postgres))).play(steps)
        happened = await compare_histories(sqlite, postgres)
        for rig in (sqlite, postgres):
            report = await rig.verify()
            assert report.ok, (rig.kind, seeds, report.violations[:5])
    return happened


@pytest.mark.requirement("D1", "D2", "DJ-4", "DJ-12", "DJ-15", "DJ-3")
async def test_both_ledgers_agree_on_random_stories(clocked_postgres: PostgresServer, tmp_path: Path):
    happened = await play(clocked_postgres, tmp_path / "ledger.db", range(SEEDS), STEPS)
    assert HAPPENS - happened.keys() == set()


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.requirement("D1", "D2", "DJ-4", "DJ-12", "DJ-15", "DJ-3")
async def test_both_ledgers_agree_on_many_stories(clocked_postgres: PostgresServer, tmp_path: Path):
    first = int(os.environ.get("TRELLIS_STORY_SEED", "1000"))
    for seed in range(first, first + MANY_SEEDS, TOGETHER):
        await play(clocked_postgres, tmp_path / f"{seed}.db", range(seed, seed + TOGETHER), MANY_STEPS)

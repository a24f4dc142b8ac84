"""Both ledgers play the same random stories: what one answers and records, the other must, field by field."""

import os
from pathlib import Path

import pytest

from tests.ledgers.conformance.opening import SQLITE_START_S, postgres_rig, sqlite_rig
from tests.ledgers.conformance.story import Player, Story
from tests.servers.postgres import PostgresServer

STEPS = 70
SEEDS = 5
MANY_SEEDS = 200


async def play(server: PostgresServer, folder: Path, seed: int, steps: int) -> None:
    async with sqlite_rig(folder / f"{seed}.db") as sqlite, postgres_rig(server, "postgres") as postgres:
        assert postgres.admin_sql is not None
        await postgres.admin_sql("UPDATE trellis.test_clock SET at = to_timestamp($1)", SQLITE_START_S)
        await Story(seed=seed, players=(Player(rig=sqlite), Player(rig=postgres))).play(steps)
        for rig in (sqlite, postgres):
            report = await rig.verify()
            assert report.ok, (rig.kind, seed, report.violations[:5])


@pytest.mark.requirement("D1", "D2", "D19", "DJ-2", "DJ-4", "DJ-7", "DJ-12", "DJ-15")
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_both_ledgers_tell_the_same_story(clocked_postgres: PostgresServer, tmp_path: Path, seed: int):
    await play(clocked_postgres, tmp_path, seed, STEPS)


@pytest.mark.prove
@pytest.mark.requirement("D1", "D2", "D19", "DJ-2", "DJ-4", "DJ-7", "DJ-12", "DJ-15")
async def test_both_ledgers_tell_many_stories_the_same(clocked_postgres: PostgresServer, tmp_path: Path):
    first = int(os.environ.get("TRELLIS_STORY_SEED", "1000"))
    for seed in range(first, first + MANY_SEEDS):
        await play(clocked_postgres, tmp_path, seed, 2 * STEPS)

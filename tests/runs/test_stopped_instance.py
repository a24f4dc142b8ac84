"""What the services of a process leave behind when it stops in order."""

import asyncio
from pathlib import Path

import pytest

from trellis.app.instance import open_instance
from trellis.app.settings import Settings

FOLLOWERS = {"agent-health", "event-triggers", "projector"}
PATIENCE_S = 30.0


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path / 'ledger.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    )


async def test_a_stopped_process_lets_another_follow_the_feed_at_once(url: str, tmp_path: Path):
    """Nobody has to wait until its subscriptions expire."""
    places = {"objects": f"file://{tmp_path / 'objects'}", "memory": tmp_path / "memory.git"}
    async with open_instance(Settings.model_validate(places), url) as instance:
        stop = asyncio.Event()
        serving = asyncio.ensure_future(instance.serve(stop, frozenset({"projector", "agent-health", "schedules"})))
        async with asyncio.timeout(PATIENCE_S):
            while {one.name for one in await instance.ledger.followers()} < FOLLOWERS:  # noqa: ASYNC110 - the services change it
                await asyncio.sleep(0)
        stop.set()
        await serving
        now = await instance.ledger.now()
        assert [one.name for one in await instance.ledger.followers() if one.until > now] == []

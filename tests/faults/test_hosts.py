"""The roles on hosts of their own: hosts that are cut off or die for good, and stores that crash or cannot be reached."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.hosted_platform import (
    GATE,
    LEASE_S,
    NATS,
    OBJECTS,
    POSTGRES,
    HostedPlatform,
    check_nothing_lost,
    progress,
    tell,
)
from tests.faults.platform import SUCCESS, Load, until

CUT_S = {"worker": 1.5 * LEASE_S, "orchestrator": 1.5 * LEASE_S, "bus-worker": 4.0 * LEASE_S}
"""How long each host is cut off. The worker on the bus is the only one of its topics, and three attempts take less."""
CRASHES = 5
OUTAGES_S = {POSTGRES: 3.0 * LEASE_S, OBJECTS: 60.0, NATS: 60.0}
"""How long each store is unreachable."""
HELD = 2
"""How many handlers on the ledger, and how many on the bus, run through each trouble."""


@pytest.mark.prove
@pytest.mark.timeout(1_800)
@pytest.mark.requirement("PIPE-12", "D16", "JQ-7")
def test_host_that_is_cut_off_or_dies_for_good_costs_no_accepted_work(tmp_path: Path, figures: Callable[..., None]):
    async def story(platform: HostedPlatform, load: Load) -> None:
        async with load.flowing():
            await until(lambda: load.count and platform.effects(), "work is done")
            for host, seconds in CUT_S.items():
                platform.network.cut(host)
                await asyncio.sleep(seconds)
                platform.network.heal(host)
                await progress(load)
            platform.kill_host(GATE)
            await progress(load)
        outcome = await check_nothing_lost(platform, load)
        figures(
            hosts=len(platform.network.hosts),
            cut_s=CUT_S,
            **outcome.counts,
            lost_leases=outcome.lost_leases,
            repeated=outcome.repeated,
        )

    tell(tmp_path, story)


class HeldJobs:
    """Jobs whose handlers run from before a trouble until after it."""

    def __init__(self, platform: HostedPlatform, load: Load, trouble: str) -> None:
        self.platform, self.load, self.trouble = platform, load, trouble
        self.ids: dict[str, str] = {}

    async def begin(self) -> None:
        for number in range(HELD):
            word = f"held-{self.trouble}-{number}"
            self.ids[word] = await self.load.plain(word, "hold")
            word = f"held-bus-{self.trouble}-{number}"
            self.ids[word] = await self.load.on_bus(word, "job.hold")
        await until(lambda: set(self.ids) <= set(self.platform.effects()), f"handlers run before {self.trouble}")

    async def end(self) -> dict[str, int]:
        """By word: how often its handler began."""
        for words in (f"held-{self.trouble}", f"held-bus-{self.trouble}"):
            self.platform.let_go(words)
        for job_id in self.ids.values():
            assert (await self.load.ended(job_id)).state in {SUCCESS["plain"], SUCCESS["bus"]}
        effects = self.platform.effects()
        return {word: effects[word] for word in self.ids}


@pytest.mark.prove
@pytest.mark.timeout(1_800)
@pytest.mark.requirement("D31", "DJ-2", "BUS-10", "PIPE-12")
def test_stores_that_crash_or_cannot_be_reached_cost_no_accepted_work_and_run_no_living_worker_twice(
    tmp_path: Path, figures: Callable[..., None]
):
    async def story(platform: HostedPlatform, load: Load) -> None:
        began: dict[str, int] = {}
        async with load.flowing():
            await until(lambda: load.count and platform.effects(), "work is done")
            held = HeldJobs(platform, load, "crashes")
            await held.begin()
            for crash in range(CRASHES):
                count, effects = load.count, len(platform.effects())
                await until(lambda n=count: load.count >= n + 8, f"work is accepted before crash {crash}")
                await until(lambda n=effects: len(platform.effects()) >= n + 4, f"work is done before crash {crash}")
                await asyncio.to_thread(platform.postgres.restart, "immediate")
            await progress(load)
            began |= await held.end()
            for store, seconds in OUTAGES_S.items():
                held = HeldJobs(platform, load, store)
                await held.begin()
                await platform.without(store, seconds)
                await progress(load)
                began |= await held.end()
        outcome = await check_nothing_lost(platform, load)
        assert platform.ended_by_themselves() == []
        figures(
            hosts=len(platform.network.hosts),
            crashes=CRASHES,
            outages_s=OUTAGES_S,
            **outcome.counts,
            sent_again=load.sent_again,
            lost_leases=outcome.lost_leases,
            repeated=outcome.repeated,
            held=began,
        )
        assert set(began.values()) == {1}, f"handlers of living workers ran once: {began}"
        assert outcome.repeated == {}, "no lease of a living worker was lost"
        assert load.sent_again > 0, "submitters felt it too"

    tell(tmp_path, story)

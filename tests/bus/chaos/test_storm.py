"""NATS killed, restarted and erased, and messages lost, repeated, late and out of order, while jobs run over it.

0 lost, 0 done twice by our own workers, every job ends once and as its lifecycle allows, and its client hears of that one end.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bus.chaos.storm import a_storm
from tests.faults.conftest import SEED
from tests.faults.fleet import Nursery
from tests.servers.nats import LEFT_BEHIND

pytestmark = [
    pytest.mark.long,  # it mostly waits: for leases and for messages that come late
    pytest.mark.filterwarnings(LEFT_BEHIND),
]

FAULTS = ("cut", "restart", "erase", "cut", "restart", "erase")


@pytest.mark.requirement("BUS-2", "BUS-10", "BUS-11", "BUS-12", "D29", "D30")
@pytest.mark.timeout(600)
async def test_a_bus_that_breaks_loses_nothing_and_does_nothing_twice(
    ledger_url: str, tmp_path: Path, bus_nursery: Nursery, figures: Callable[..., None]
):
    async with a_storm(ledger_url, tmp_path, bus_nursery, seed=SEED) as storm:
        await storm.start()
        await storm.rage(100, FAULTS[:3])
        await storm.settle()
        figures(**await storm.check())


@pytest.mark.requirement("BUS-2", "BUS-10", "BUS-11", "BUS-12", "D29", "D30")
@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ledger_url", ["sqlite", "postgres"], indirect=True)
async def test_a_bus_that_breaks_for_a_long_time(
    ledger_url: str, tmp_path: Path, bus_nursery: Nursery, figures: Callable[..., None]
):
    """With control planes that are killed too."""
    faults = (*FAULTS, "kill_plane", "erase", "cut", "kill_plane") * 6
    async with a_storm(ledger_url, tmp_path, bus_nursery, seed=SEED, lease_s=20, round_s=2) as storm:
        await storm.start()
        await storm.rage(2_000, faults)
        await storm.settle()
        figures(**await storm.check())


@pytest.mark.prove
@pytest.mark.timeout(300)
async def test_workers_that_begin_without_asking_are_noticed(ledger_url: str, tmp_path: Path, bus_nursery: Nursery):
    async with a_storm(ledger_url, tmp_path, bus_nursery, seed=SEED) as storm:
        await storm.start(asks=False)
        await storm.rage(100, FAULTS[:3])
        await storm.settle()
        with pytest.raises(AssertionError, match=r"begun before the ledger said so|was done"):
            await storm.check()

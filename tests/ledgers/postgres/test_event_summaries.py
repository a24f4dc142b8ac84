"""A read of new events reads few pages of a busy ledger: its readers keep the index on their batch and time complete."""

from itertools import count
from typing import Any

import pytest

from tests.ledgers.conformance.rig import Rig
from trellis.ledgers.postgres.event_summaries import EVERY_S, EventSummaries

pytestmark = pytest.mark.only("postgres")

JOBS, EACH = 6_000, 1_000
"""So many that their events fill more than three ranges of 16 pages."""
MISSING = "SELECT brin_summarize_new_values('trellis.event_0_batch_at_idx')"


async def _fill(rig: Rig) -> EventSummaries:
    """Submit the jobs; the summaries of the rig's ledger are due at every read from now on."""
    ledger: Any = rig.ledger
    seconds = count(step=EVERY_S)
    ledger._summaries = EventSummaries(clock=lambda: next(seconds))
    for _ in range(JOBS // EACH):
        await rig.submit(EACH)
    return ledger._summaries


@pytest.mark.requirement("DJ-13")
async def test_readers_of_the_feed_make_the_summaries_that_are_missing(rig: Rig):
    """Also in a partition of an earlier version, which has an index of its own on the time."""
    assert rig.admin_sql is not None
    rig.used_up = True
    await rig.admin_sql("CREATE INDEX of_before ON trellis.event_0 USING brin (at) WITH (pages_per_range = 16)")
    summaries = await _fill(rig)
    for _ in range(50):
        page = await rig.ledger.feed(None, limit=1)
        assert len(page.events) == 1
        if summaries.ranges.get(0, 0) >= 3:
            break
    ((missing,),) = await rig.admin_sql(MISSING)
    ((of_before,),) = await rig.admin_sql("SELECT brin_summarize_new_values('trellis.of_before')")
    assert max(missing, of_before) <= 2, "all have one but the last two, which may still be filled"


async def test_a_read_does_not_wait_for_a_vacuum_that_makes_the_summaries_itself(rig: Rig):
    assert rig.admin_sql is not None
    await rig.admin_sql("BEGIN")
    try:
        # From before the events: autovacuum takes this lock, too, and would make the summaries.
        await rig.admin_sql("LOCK TABLE ONLY trellis.event_0 IN SHARE UPDATE EXCLUSIVE MODE")
        summaries = await _fill(rig)
        assert len((await rig.ledger.feed(None, limit=10)).events) == 10
        assert summaries.ranges == {0: 0, 1: 0}
        ((missing,),) = await rig.admin_sql(MISSING)
        assert missing > 2, "none was made while another held the lock"
    finally:
        await rig.admin_sql("ROLLBACK")


async def test_summaries_are_looked_for_once_a_second_and_sooner_while_some_are_missing():
    now, calls = [100.0], list[tuple[list[int], list[int]]]()
    whole = 5

    async def fetch(_: str, parts: list[int], ranges: list[int]) -> list[dict[str, int]]:
        calls.append((parts, ranges))
        return [{"part": 0, "ranges": min(whole, 3 * len(calls)), "whole": whole}]

    summaries = EventSummaries(clock=lambda: now[0])
    for now[0] in (100.0, 100.05, 100.2, 100.9, 101.3):
        await summaries.keep(fetch)
    assert calls == [([], []), ([0], [3]), ([0], [5])]

"""Keeps the index on the batch and time of events (BRIN) complete, so that a read of the newest events reads few pages.

That index holds a summary of every 16 pages. Pages that have none are read by every search. PostgreSQL makes summaries
when it vacuums, and by at most 256 requests a minute, which a busy ledger exceeds many times over: after 60,000 new jobs
a read of the feed took 40 times as long. So whoever reads by this index has missing summaries made, from time to time.
Readers do this, not writers: a ledger whose feed nobody reads does not pay for it.
"""

import time
from collections.abc import Awaitable, Callable
from typing import LiteralString

from trellis.ledgers.postgres.connection import PostgresRow

EVERY_S = 1.0
"""The time between two calls when no summary is missing."""
NEXT_S = 0.1
"""The time between two calls while summaries are missing. A call makes them for at most 10 ms, see the function."""
SUMMARIZE: LiteralString = "select part, ranges, whole from summarize_events($1::bigint[], $2::bigint[])"

Fetch = Callable[..., Awaitable[list[PostgresRow]]]


class EventSummaries:
    """Which parts of the events are known to have summaries, as this process saw it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = 0.0
        self.ranges: dict[int, int] = {}
        """How many page ranges of each partition have a summary, counted from the first."""

    async def keep(self, fetch: Fetch) -> None:
        """Make some missing summaries, if it is time to look for them."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + EVERY_S
        stored = await fetch(SUMMARIZE, list(self.ranges), list(self.ranges.values()))
        self.ranges = {row["part"]: row["ranges"] for row in stored}
        if any(row["ranges"] < row["whole"] for row in stored):
            self._due_at = now + NEXT_S

"""How much may wait on the topics: a request beyond that is refused at the door, before anything of it is stored.

What waits is every job on a topic that no worker has and that has not ended; the ledger counts it, for all topics at once. A count is
good for a second, or some where counting takes long, and for ten while a door has let in no more than an eighth of the room there was: so
several doors together let in a little more than the number at most, and a submit does not pay for counting. What was accepted once is never refused: a request that is
repeated goes on to the ledger, which answers with its job. Retries and compensations of accepted jobs pass no door.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trellis.bus.errors import TopicFull
from trellis.bus.topics import Topics
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.records import QueueDepth
from trellis.lifecycles.bus_job import BUS_JOB

COUNT_FRESH_S = 1.0
"""How long a count is good for whatever room it found, at least."""
COUNT_COST_FACTOR = 20
"""And so many times as long as it took: where there is much to count, it is counted less often."""
COUNT_FRESH_S_MAX = 10.0
"""How long it is good for a part of the room."""
STALE_COUNT_SHARE = 8
"""One in so many: how much of the room a door gives away on an older count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _BacklogCount:
    """What waited at one moment."""

    at: float
    good_s: float
    waiting: Counter[str]
    total: int


_EMPTY_COUNT = _BacklogCount(at=0.0, good_s=0.0, waiting=Counter(), total=0)


@dataclass(kw_only=True)
class BacklogLimit:
    """One for each process that takes requests in."""

    ledger: Ledger
    clock: Clock
    _last: _BacklogCount | None = None
    _admitted: Counter[str] = field(default_factory=Counter[str])
    """Since the last count, by topic."""
    _count_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _counts: int = 0
    """How many came to an end, well or not."""
    _failed: LedgerError | None = None
    """Why the last one did not answer."""

    async def admit(self, job: NewJob, topics: Topics) -> None:
        """Let this job in; raises TopicFull when too many wait already, unless it is in the ledger. Also raises LedgerError."""
        full = await self._full(job.type, topics)
        if full is not None:
            if await self._is_known(job):
                return
            raise full
        self._admitted[job.type] += 1

    async def _full(self, topic: str, topics: Topics) -> TopicFull | None:
        if self._is_count_fresh_for(topic, topics):
            return self._full_or_none(topic, topics)
        counts = self._counts
        async with self._count_lock:  # those who come at the same time share one count, and its failure
            if not self._is_count_fresh_for(topic, topics):
                if self._failed is not None and self._counts > counts:
                    raise self._failed
                await self._count()
        return self._full_or_none(topic, topics)

    def _is_count_fresh_for(self, topic: str, topics: Topics) -> bool:
        """Whether the last count is good enough for this topic."""
        if self._last is None:
            return False
        age_s = self.clock.monotonic() - self._last.at
        if age_s < self._last.good_s:
            return True
        return age_s < COUNT_FRESH_S_MAX and all(
            used < (limit - waiting) // STALE_COUNT_SHARE for waiting, used, limit in self._measures(topic, topics)
        )

    def _full_or_none(self, topic: str, topics: Topics) -> TopicFull | None:
        of_topic, of_all = self._measures(topic, topics)
        for (waiting, used, limit), named in ((of_topic, f"on {topic}"), (of_all, "on all topics")):
            if waiting + used >= limit:
                return TopicFull(place=named, waiting=waiting + used, limit=limit)
        return None

    def _measures(self, topic: str, topics: Topics) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """What waited, what was let in since and how much may wait: of the topic, and of all of them."""
        last = self._last or _EMPTY_COUNT
        of_topic = last.waiting[topic], self._admitted[topic], topics.of(topic).waiting_max
        return of_topic, (last.total, self._admitted.total(), topics.waiting_max)

    async def _count(self) -> None:
        # Whoever is let in while the ledger counts may be counted twice; whoever was let in before and is not in the ledger yet, not at all.
        before, began = Counter(self._admitted), self.clock.monotonic()
        waiting: Counter[str] = Counter()
        for depth in await self._depths():
            if depth.lifecycle == BUS_JOB.name:
                waiting[depth.type] += depth.ready + depth.resting + depth.parked
        at = self.clock.monotonic()
        good_s = min(COUNT_FRESH_S_MAX, max(COUNT_FRESH_S, COUNT_COST_FACTOR * (at - began)))
        self._last = _BacklogCount(at=at, good_s=good_s, waiting=waiting, total=waiting.total())
        self._admitted -= before

    async def _depths(self) -> Sequence[QueueDepth]:
        self._failed = None
        try:
            return await self.ledger.queues()
        except LedgerError as error:
            self._failed = error
            raise
        finally:
            self._counts += 1

    async def _is_known(self, job: NewJob) -> bool:
        """Whether an earlier request made it, under its id or under its key."""
        if await self.ledger.job(job.job_id) is not None:
            return True
        if job.idempotency_key is None:
            return False
        return (
            await self.ledger.find_by_idempotency_key(job.idempotency_scope, job.idempotency_key, job.fingerprint)
            is not None
        )

"""Keeps attempts alive whose workers live, as long as one attempt may take. As many processes as one likes.

A heartbeat names no jobs: it speaks for as many as the worker says it has, those first that are known to have begun, and only for what was
seen here before it came. So a job that its worker never got is not kept alive by others for long, and a hung one not beyond its topic's
`running_s`. Workers that send progress for each job renew it at once, in `results`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trellis.bus.attempts import Attempts, Signs, Stopping
from trellis.bus.recent import Recent
from trellis.bus.reports import Attempt
from trellis.bus.topics import LEASE_S_DEFAULT, Topics
from trellis.engine.clock import Clock
from trellis.engine.jobs import CLAIM_MAX, Actor, Hold, Renewed
from trellis.engine.ledger import Ledger
from trellis.lifecycles.bus_job import BUS_JOB

PASSES_PER_LEASE = 6
PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 5.0
MORE_S = 0.02
AT_ONCE = 16
"""Attempts that are read at the same time, when this process sees them first."""
REMEMBERED_MAX = 20_000
RENEWED_BELOW = 2 / 3
"""Of its length: a lease that has more left is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What one pass did."""

    held: int = 0
    renewed: int = 0
    more: bool = False


@dataclass(kw_only=True)
class Renewals:
    """The service."""

    ledger: Ledger
    topics: Topics
    workers: Signs
    actor: Actor
    clock: Clock
    attempts: Attempts
    stopping: Stopping
    name: str = "bus-renewals"
    _seen: Recent[tuple[str, int], float] = field(default_factory=lambda: Recent(REMEMBERED_MAX))
    """By job and epoch: this process's clock when it was seen first."""

    async def run_once(self) -> Kept:
        """Look at what is held, and renew what lives."""
        holds = await self.ledger.expiring(BUS_JOB.name, within_s=max(self._leases_s()), limit=CLAIM_MAX)
        by_worker: dict[str, list[tuple[Hold, Attempt]]] = {}
        for hold, attempt in zip(holds, await self._attempts(holds), strict=True):
            if attempt is None:
                continue
            if hold.cancel:
                await self.stopping.tell(hold, attempt)
            self._see(hold)
            by_worker.setdefault(attempt.worker, []).append((hold, attempt))
        living = [one for worker_id, has in by_worker.items() for one in self._living(worker_id, has)]
        renewed = await self._renew(living)
        return Kept(held=len(holds), renewed=renewed, more=len(holds) == CLAIM_MAX and renewed > 0)

    def pause_s(self, report: Kept) -> float:
        """Some passes in every lease, so that a heartbeat is not missed."""
        return MORE_S if report.more else min(PAUSE_S_MAX, max(PAUSE_S_MIN, min(self._leases_s()) / PASSES_PER_LEASE))

    async def _attempts(self, holds: Sequence[Hold]) -> list[Attempt | None]:
        found: list[Attempt | None] = []
        for start in range(0, len(holds), AT_ONCE):
            found += await asyncio.gather(*map(self.attempts.of, holds[start : start + AT_ONCE]))
        return found

    def _leases_s(self) -> list[float]:
        return [LEASE_S_DEFAULT, *(topic.lease_s for topic in self.topics.topics.values())]

    def _see(self, hold: Hold) -> None:
        key = (hold.lease.job_id, hold.lease.epoch)
        if self._seen.get(key) is None:
            self._seen.put(key, self.clock.monotonic())

    def _living(self, worker_id: str, has: Sequence[tuple[Hold, Attempt]]) -> Iterable[tuple[Hold, Attempt]]:
        """Those of a worker's attempts that its last heartbeat speaks for."""
        sign = self.workers.alive(worker_id) if worker_id else None
        heard_at = None if sign is None else sign.heard_at
        if sign is None or heard_at is None:
            return ()
        known = sorted(has, key=lambda one: (one[0].state != "RUNNING", one[1].dispatched_at))
        spoken_for = known[: max(0, sign.active_jobs)]
        return [one for one in spoken_for if heard_at > self._first_seen(one[0])]

    def _first_seen(self, hold: Hold) -> float:
        seen_at = self._seen.get((hold.lease.job_id, hold.lease.epoch))
        return self.clock.monotonic() if seen_at is None else seen_at

    async def _renew(self, living: Sequence[tuple[Hold, Attempt]]) -> int:
        ending = [one for one in living if one[0].left_s < RENEWED_BELOW * self.topics.of(one[0].type).lease_s]
        if not ending:
            return 0
        now = await self.ledger.now()
        leases = [hold.lease for hold, attempt in ending if not self._hangs(hold, attempt, now)]
        answers = await self.ledger.renew(self.actor, leases) if leases else []
        return sum(isinstance(answer, Renewed) for answer in answers)

    def _hangs(self, hold: Hold, attempt: Attempt, now: datetime) -> bool:
        return (now - attempt.dispatched_at).total_seconds() > self.topics.of(hold.type).running_s

"""Prefetch: how many jobs a worker claims, and when it polls."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trellis.engine.clock import Clock
from trellis.engine.jobs import CLAIM_MAX
from trellis.engine.ledger import Ledger

# How many jobs to claim: pure arithmetic over what the worker holds and its recent pace.
#
# Free slots are always claimed for. Beyond them a worker holds only jobs it will start soon at its recent pace. Short
# jobs thus come in large batches, and a worker with long jobs takes none that another worker could start now.

AHEAD_S = 0.05
"""Jobs that will start within this time are started in the claim itself, which saves one transition."""
LOOKAHEAD_S = 0.5
"""Jobs that will start within this time are claimed but not yet started."""
PACE_WINDOW_S = 0.002
PACE_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class ClaimSize:
    """How many jobs a claim asks for."""

    start: int
    prefetch: int

    @property
    def total(self) -> int:
        """Started and prefetched jobs together."""
        return self.start + self.prefetch


class JobPace:
    """Jobs that end per second while the worker is busy, as a moving average."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._since: float | None = None
        self._count = 0

    def note(self, settled: int, now: float, *, busy: bool) -> None:
        """Updates the average from the number of jobs settled so far. Idle time is ignored."""
        if self._since is None or not busy:
            self._since, self._count = now, settled
            return
        elapsed, ended = now - self._since, settled - self._count
        if elapsed < PACE_WINDOW_S or not ended:
            return
        self.per_s += PACE_WEIGHT * (ended / elapsed - self.per_s)
        self._since, self._count = now, settled


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchPolicy:
    """Limits how many jobs a worker holds."""

    concurrency: int
    prefetch_max: int

    def ahead(self, per_s: float) -> int:
        """How many jobs beyond the slots may already be started."""
        return min(self.prefetch_max, int(per_s * AHEAD_S))

    def wanted(self, per_s: float, *, running: int, ready: int, assigned: int) -> ClaimSize:
        """How many jobs to claim now."""
        reach = min(self.prefetch_max, int(per_s * LOOKAHEAD_S))
        room = min(CLAIM_MAX, self.concurrency + reach - running - ready - assigned)
        if room <= 0:
            return ClaimSize(0, 0)
        start = min(room, max(0, self.concurrency + self.ahead(per_s) - running - ready - assigned))
        return ClaimSize(start, room - start)

    def startable(self, per_s: float, *, running: int, ready: int) -> int:
        """How many of the claimed jobs to start now."""
        return max(0, self.concurrency + self.ahead(per_s) - running - ready)


# Waiting for work. Hints only save time: a lost hint delays work by one poll interval at most.


@dataclass(frozen=True, kw_only=True)
class WorkListener:
    """Wakes the turn loop after a hint or a poll interval."""

    ledger: Ledger
    clock: Clock
    rng: random.Random
    types: tuple[str, ...]
    poll_s: float
    hints: bool
    found: Callable[[], Awaitable[None]]
    """Called when there may be work. Returns after a claim has been made."""
    name: str = "listener"

    async def run_once(self) -> None:
        """Waits for one hint or one poll interval. The interval is jittered so that workers do not poll in step."""
        wait_s = self.poll_s * (0.75 + 0.25 * self.rng.random())
        if self.hints:
            await self.ledger.wait_for_work(self.types, wait_s)
        else:
            await self.clock.sleep(wait_s)
        await self.found()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        """No pause: `run_once` itself waits."""
        return 0.0

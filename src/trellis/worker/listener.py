"""Waits for a hint that work may be there. Polling is the truth: a lost hint costs one poll, nothing more."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trellis.engine.clock import Clock
from trellis.engine.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class WorkListener:
    """Tells the turn loop to look, after a hint or a poll interval."""

    ledger: Ledger
    clock: Clock
    rng: random.Random
    types: tuple[str, ...]
    poll_s: float
    hints: bool
    found: Callable[[], Awaitable[None]]
    """Called when there may be work; comes back when a claim has looked."""
    name: str = "listener"

    async def run_once(self) -> None:
        """One hint or one poll. The interval varies, so that many workers do not poll in step."""
        wait_s = self.poll_s * (0.75 + 0.25 * self.rng.random())
        if self.hints:
            await self.ledger.wait_for_work(self.types, wait_s)
        else:
            await self.clock.sleep(wait_s)
        await self.found()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        """The waiting is in the pass itself."""
        return 0.0

"""Runs passes of a service on demand, so that a change is handled before the next scheduled pass."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trellis.engine.errors import LedgerError
from trellis.engine.outage_log import Failures

ReportT = TypeVar("ReportT")


@dataclass(kw_only=True)
class CoalescedTrigger(Generic[ReportT]):
    """Runs `run` on demand. Calls that arrive during a run share the next one. Never runs twice at the same time."""

    run: Callable[[], Awaitable[ReportT]]
    more: Callable[[ReportT], bool]
    """Whether to run again directly after a pass with this report."""
    gap_s: float = 0.0
    """Shortest time from the start of a pass to the start of the next requested one, in seconds."""
    then: Callable[[], None] | None = None
    """Called after each requested pass."""
    _one_pass: asyncio.Lock = field(default_factory=asyncio.Lock)
    _woken: "asyncio.Task[None] | None" = None
    _again: bool = False
    """Whether a pass was requested since the last one began. It stays so if that one failed, and nobody begins the next."""
    _stopped: bool = False
    _began_at: float = -math.inf
    _late: asyncio.TimerHandle | None = None
    """Requests a pass later, unless one begins before."""
    _failures: Failures = field(default_factory=lambda: Failures("woken pass"))

    async def once(self) -> ReportT:
        """Run one pass now, after any running one. Raises what the pass raises."""
        async with self._one_pass:
            self._forget_late()
            self._began_at = asyncio.get_running_loop().time()
            return await self.run()

    def wake(self) -> None:
        """Request a pass. Returns at once."""
        self._forget_late()
        self._again = True
        if not self._stopped and (self._woken is None or self._woken.done()):
            self._woken = asyncio.get_running_loop().create_task(self._run_while_woken())

    def wake_within(self, seconds: float) -> None:
        """Request a pass that may begin so much later. A pass that begins before serves this request, too."""
        is_next_near = self._again and self._woken is not None and not self._woken.done()
        if is_next_near or self._stopped:
            return
        loop = asyncio.get_running_loop()
        if self._late is None or self._late.when() > loop.time() + seconds:
            self._forget_late()
            self._late = loop.call_later(seconds, self.wake)

    async def drain(self) -> None:
        """Finish the requested passes and accept no more requests."""
        self._stopped = True
        self._forget_late()
        if self._woken is not None:
            await asyncio.gather(self._woken, return_exceptions=True)

    def _forget_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    async def _run_while_woken(self) -> None:
        while self._again and not self._stopped:
            early_s = self._began_at + self.gap_s - asyncio.get_running_loop().time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            self._again = False
            try:
                report = await self.once()
            except LedgerError as error:
                # The service's next scheduled pass tries again.
                self._failures.failed(error, now=asyncio.get_running_loop().time())
                return
            self._failures.succeeded(now=asyncio.get_running_loop().time())
            if self.then is not None:
                self.then()
            self._again = self._again or self.more(report)

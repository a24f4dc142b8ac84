"""Asks the safety kernel about one job at a time, and holds it to its answer. Whatever is not an answer lets nothing go (BUS-4)."""

import asyncio
import json

from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.bus.safety.decisions import DecisionKernel, SafetyDecision
from trellis.bus.safety.errors import KernelRefuses
from trellis.engine.logs import log_of

CHECK_S_MAX = 5.0
"""How long the kernel may think about one job; others wait for it."""

_log = log_of("trellis.bus.scheduling.scheduler")


class KernelChecks:
    """One scheduler's questions to its kernel. The log says once that the kernel is away, and once that it is back."""

    def __init__(self) -> None:
        self._away = False
        self._breaks: set[type[Exception]] = set()
        """What a kernel raised that none should, for the log."""

    async def check(self, kernel: DecisionKernel, request: JobRequest) -> SafetyDecision:
        """The decision about this very request; raises KernelUnavailable, and KernelRefuses for what no kernel should raise or say."""
        try:
            async with asyncio.timeout(CHECK_S_MAX):
                decision = await kernel.check(request)
            json.dumps(decision.to_dict())  # what no event can record is no decision
        except KernelRefuses:
            raise
        except KernelUnavailable as error:
            raise self._is_away(error) from None
        except TimeoutError:
            raise self._is_away(KernelUnavailable(detail=f"no answer within {CHECK_S_MAX:g} s")) from None
        except Exception as error:
            if type(error) not in self._breaks:
                _log.exception("kernel_broke", job_id=request.job_id)  # once: every job would tell the same
            self._breaks.add(type(error))
            raise KernelRefuses(detail=f"it broke: {type(error).__name__}") from error
        if decision.job_hash != request.hash:
            raise KernelRefuses(detail="it answers about another job")
        return decision

    def passed(self, *, away: bool) -> None:
        """A pass is over, and the kernel left a question of it without an answer, or none."""
        if self._away and not away:
            _log.info("kernel_back")
        self._away = away

    def _is_away(self, error: KernelUnavailable) -> KernelUnavailable:
        if not self._away:
            _log.warning("kernel_unavailable", error=str(error))
            self._away = True
        return error

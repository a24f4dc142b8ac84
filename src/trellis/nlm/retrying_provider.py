"""Asks a provider for an agent's tool: retries after 1, 2 and 4 seconds, one question per agent at a time.

Only this layer retries a question (D7). The deadline covers everything: waiting for the agent's other question,
preparing, every try and every pause. Every answer is verified here, whichever provider gave it.
"""

import asyncio
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.logs import log_of
from trellis.nlm.citations import verify
from trellis.nlm.provider import (
    NlmAnswer,
    NlmError,
    NlmInputInvalid,
    NlmProvider,
    NlmQuestion,
    NlmTimeout,
    NlmUnavailable,
)

DELAYS_S = (1.0, 2.0, 4.0)
DEADLINE_S_MAX = 3_600.0

log = log_of(__name__)


def wait_s(error: NlmError, delay_s: float, left_s: float) -> float | None:
    """The pause before another try; None if it is not worth it or would be too late."""
    if not error.retries:
        return None
    asked_s = error.retry_after_s if isinstance(error, NlmUnavailable) else None
    wait = max(delay_s, asked_s or 0.0)
    return wait if wait < left_s else None


@dataclass(slots=True)
class _PendingQuestion:
    """A question in progress."""

    question: NlmQuestion
    agent: str
    until: float
    errors: list[NlmError] = field(default_factory=list[NlmError])


class RetryingProvider:
    """A provider with retries and verification, for agents."""

    def __init__(self, provider: NlmProvider, *, clock: Clock, delays_s: tuple[float, ...] = DELAYS_S) -> None:
        self._provider = provider
        self._clock = clock
        self._delays_s = delays_s
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(self, question: NlmQuestion, *, agent: str, deadline_s: float) -> NlmAnswer:
        """The verified answer, within `deadline_s`. Raises NlmError, the last one that occurred."""
        if not 0.0 < deadline_s <= DEADLINE_S_MAX:
            raise NlmInputInvalid(what="deadline_s", detail=f"choose more than 0 and at most {DEADLINE_S_MAX:g}")
        call = _PendingQuestion(replace(question, agent=agent), agent, self._clock.monotonic() + deadline_s)
        try:
            # Enforced here too: a provider may not stop in time.
            with tracing.span("nlm.ask", {"trellis.provider": self._provider.name, "trellis.agent": agent}):
                return await within(self._clock, deadline_s, self._turn(call))
        except TimeoutError:
            last = f"; last: {call.errors[-1]}" if call.errors else ""
            reason = f"{deadline_s:g} s were not enough{last}"
            raise NlmTimeout(provider=self._provider.name, reason=reason) from None

    async def _turn(self, call: _PendingQuestion) -> NlmAnswer:
        async with self._turns.setdefault(call.agent, asyncio.Lock()):
            for delay_s in self._delays_s:
                try:
                    return await self._try(call)
                except NlmError as error:
                    await self._pause(call, error, delay_s)
            return await self._try(call)

    async def _try(self, call: _PendingQuestion) -> NlmAnswer:
        prepared = await self._provider.prepare(call.question.sources)
        try:
            left_s = call.until - self._clock.monotonic()
            answer = await self._provider.query(prepared, call.question, deadline_s=left_s)
        finally:
            await self._provider.release(prepared)
        return verify(answer, prepared.sources)

    async def _pause(self, call: _PendingQuestion, error: NlmError, delay_s: float) -> None:
        """Wait before the next try, or raise this error."""
        call.errors.append(error)
        wait = wait_s(error, delay_s, call.until - self._clock.monotonic())
        if wait is None:
            raise error
        log.warning("nlm_retry", agent=call.agent, tries=len(call.errors), wait_s=wait, error=str(error))
        await self._clock.sleep(wait)

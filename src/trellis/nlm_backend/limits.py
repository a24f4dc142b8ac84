"""Limits the load on one provider: concurrency, rate, and a circuit breaker that also honours `Retry-After`.

Invariants:
- A question that may not be asked now is refused before it costs anything. One that only has to wait for its turn waits
  within its deadline.
- Five failures in a row open the circuit for 30 seconds. Then one trial question decides whether it closes or opens
  again.
- A provider's `Retry-After` applies to all callers.

The limits apply to this process alone. The clock is injected.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.logs import log_of
from trellis.nlm.provider import (
    NlmAnswer,
    NlmError,
    NlmProvider,
    NlmQuestion,
    NlmSource,
    NlmTimeout,
    NlmUnavailable,
    PreparedCorpus,
    ProviderHealth,
)
from trellis.nlm_backend.errors import CircuitOpen, ProviderHeld
from trellis.nlm_backend.metrics import Metrics

FAILURES_MAX = 5
OPEN_S = 30.0
HELD_S_MAX = 3_600.0
WAITING_MAX = 100
PATIENCE_S_MIN = 10.0
"""A timeout shorter than this does not count as a failure of the provider."""

_log = log_of("trellis.nlm_backend")


class CircuitState(StrEnum):
    """Whether questions are let through."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


@dataclass(slots=True)
class ProviderCircuit:
    """Counts consecutive failures, and stores the provider's `Retry-After`."""

    monotonic: Callable[[], float]
    failures_max: int = FAILURES_MAX
    open_s: float = OPEN_S
    _failures: int = 0
    _open_until: float | None = None
    _held_until: float | None = None
    _trying: bool = False

    @property
    def state(self) -> CircuitState:
        if self._open_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self.monotonic() < self._open_until else CircuitState.TRYING

    def closed_for_s(self) -> float:
        """Returns for how many seconds no question may be asked; 0 if one may be asked now."""
        now = self.monotonic()
        return max(0.0, (self._open_until or now) - now, (self._held_until or now) - now)

    def admit(self, provider: str) -> bool:
        """Lets one question through. Returns whether it is the trial question. Raises CircuitOpen, ProviderHeld."""
        now = self.monotonic()
        if self._held_until is not None and now < self._held_until:
            reason = "it said when to come back"
            raise ProviderHeld(provider=provider, reason=reason, retry_after_s=self._held_until - now)
        if self._open_until is None:
            return False
        if now < self._open_until or self._trying:
            reason = f"it failed {self._failures} times in a row"
            raise CircuitOpen(provider=provider, reason=reason, retry_after_s=max(1.0, self._open_until - now))
        self._trying = True
        return True

    def answered(self) -> None:
        self._failures, self._open_until, self._trying = 0, None, False

    def failed(self, retry_after_s: float | None) -> None:
        now = self.monotonic()
        self._failures += 1
        if retry_after_s is not None:
            self._held_until = max(self._held_until or now, now + min(retry_after_s, HELD_S_MAX))
        if self._trying or self._failures >= self.failures_max:
            if self._open_until is None:
                _log.warning("circuit_opened", failures=self._failures, seconds=self.open_s)
            self._open_until = now + self.open_s
        self._trying = False

    def tried(self) -> None:
        """Ends the trial question, even without a result, so that another one may try."""
        self._trying = False


@dataclass(slots=True)
class RequestPace:
    """Limits questions to `per_second`, evenly spaced; None for no limit."""

    monotonic: Callable[[], float]
    per_second: float | None
    _next_at: float = 0.0

    def wait_s(self, patience_s: float) -> float | None:
        """Takes the next turn and returns how long to wait for it.

        Returns None, without taking a turn, if the wait exceeds `patience_s`.
        """
        if self.per_second is None:
            return 0.0
        now = self.monotonic()
        at = max(now, self._next_at)
        if at - now > patience_s:
            return None
        self._next_at = at + 1.0 / self.per_second
        return at - now


@dataclass(frozen=True, kw_only=True)
class LimitedProvider:
    """A provider with limits and metrics. `before` is awaited just before a question is sent."""

    inner: NlmProvider
    clock: Clock
    metrics: Metrics
    circuit: ProviderCircuit
    pace: RequestPace
    slots: asyncio.Semaphore
    waiting: list[None] = field(default_factory=list[None])
    """One entry for each question that waits for a slot, of all copies that `noting` returns."""
    before: Callable[[], Awaitable[None]] | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    def noting(self, before: Callable[[], Awaitable[None]]) -> "LimitedProvider":
        """Returns the same provider for one caller that must know when its question is sent."""
        return replace(self, before=before)

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        return await self.inner.prepare(sources)

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        """Waits for a turn and asks. Raises NlmError."""
        until = self.clock.monotonic() + deadline_s
        async with self._turn(until):
            if self.before is not None:
                await self.before()
            return await self._asked(prepared, question, until - self.clock.monotonic())

    @asynccontextmanager
    async def _turn(self, until: float) -> AsyncGenerator[None]:
        if len(self.waiting) >= WAITING_MAX:
            raise NlmUnavailable(provider=self.name, reason=f"{WAITING_MAX} questions wait already", retry_after_s=1.0)
        self.waiting.append(None)
        try:
            await self.slots.acquire()
        finally:
            self.waiting.pop()
        try:
            wait_s = self.pace.wait_s(until - self.clock.monotonic())
            if wait_s is None:
                reason = f"more than {self.pace.per_second:g} questions a second wait for it"
                raise NlmUnavailable(provider=self.name, reason=reason, retry_after_s=1.0)
            if wait_s > 0:
                await self.clock.sleep(wait_s)
            tries = self.circuit.admit(self.name)
            try:
                yield
            finally:
                if tries:
                    self.circuit.tried()
        finally:
            self.slots.release()

    async def _asked(self, prepared: PreparedCorpus, question: NlmQuestion, deadline_s: float) -> NlmAnswer:
        circuit, began, result = self.circuit, self.clock.monotonic(), "cut"
        try:
            with tracing.span("nlm.query", {"trellis.provider": self.name}, kind=tracing.CLIENT):
                answer = await self.inner.query(prepared, question, deadline_s=deadline_s)
            result = "answered"
            circuit.answered()
        except NlmUnavailable as error:
            result = "unavailable"
            if not isinstance(error, NlmTimeout) or deadline_s >= PATIENCE_S_MIN:
                circuit.failed(error.retry_after_s)
            raise
        except NlmError:
            result = "refused"
            circuit.answered()  # the answer is useless, but the provider is up
            raise
        finally:
            self.metrics.provider_asked(result, self.clock.monotonic() - began)
        return answer

    async def health(self) -> ProviderHealth:
        return await self.inner.health()

    async def release(self, prepared: PreparedCorpus) -> None:
        await self.inner.release(prepared)

    async def close(self) -> None:
        await self.inner.close()

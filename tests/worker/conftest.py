"""A worker on a real SQLite ledger whose time, like the worker's own, moves only when the test moves it."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trellis.auth.principals import Principal
from trellis.client import JobHandle, Trellis
from trellis.engine.errors import LedgerUnavailable, OutcomeUnknown, Refused
from trellis.engine.jobs import Actor, Claim, Claimed, ClaimId, JobId, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, SweepOptions, SweepReport
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import FakeClock
from trellis.worker import turns
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions
from trellis.worker.worker import Worker

WORKER_OPTIONS = WorkerOptions(name="w1", hints=False, sweep=None)
PATIENCE_S = 60.0


class Faults:
    """The ledger behind a line that can be cut: calls fail before they arrive, or their answers are lost."""

    def __init__(self, ledger: Ledger, turns_at_once: int) -> None:
        self._ledger = ledger
        self.turns_at_once = turns_at_once
        self.down = False
        self.lose_answers = 0
        self.answers = asyncio.Event()
        """Cleared, answers of turns are held back on their way."""
        self.answers.set()
        self.failed: list[str] = []
        self.under_way = 0
        """Calls that the ledger has not answered yet; how long it takes is up to the machine."""
        self.refuses: str | None = None
        """A trigger the ledger will not have, in whichever turn it comes."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._ledger, name)
        if name not in {"turn", "renew", "signal", "save_checkpoint", "journal", "sweep", "wait_for_work"}:
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.down:
                self.failed.append(name)
                raise LedgerUnavailable(reason="the line is cut")
            if name == "turn" and any(step.trigger == self.refuses for step in args[0].advances):
                self.failed.append(name)
                raise Refused(detail="never")
            answer = await (real(*args, **kwargs) if name == "wait_for_work" else self._asked(real(*args, **kwargs)))
            if name == "turn":
                await self.answers.wait()
            if name == "turn" and self.lose_answers:
                self.lose_answers -= 1
                self.failed.append(name)
                raise OutcomeUnknown(verb=name, request="of a test")
            return answer

        return call

    async def _asked(self, call: Awaitable[Any]) -> Any:
        self.under_way += 1
        try:
            return await call
        finally:
            self.under_way -= 1


class Stand:
    """Ledger, caller and clock of one test."""

    def __init__(self, ledger: Ledger, clock: FakeClock, turns_at_once: int = 1) -> None:
        self.clock = clock
        self.ledger = ledger
        self.faults = Faults(ledger, turns_at_once)
        self._ids = itertools.count(1)
        principal = Principal(name="test", roles=frozenset(Role))
        self.trellis = Trellis(ledger, principal, clock=clock, new_id=self.new_id)

    def new_id(self) -> str:
        return f"id-{next(self._ids)}"

    async def submit(self, type_: str, payload: Any = None, **settings: Any) -> JobHandle:
        return await self.trellis.submit(type_, payload, **settings)

    def worker(self, app: App, **changes: Any) -> Worker:
        options = replace(WORKER_OPTIONS, **changes)
        return Worker(
            app,
            self.faults,  # type: ignore[arg-type]
            options,
            clock=self.clock,
            rng=random.Random(7),
            new_id=self.new_id,
        )

    @asynccontextmanager
    async def running(self, app: App, **changes: Any) -> AsyncGenerator[Worker]:
        worker, hurry = self.worker(app, **changes), asyncio.Event()
        await worker.start()
        try:
            yield worker
        except BaseException:
            # A test that failed should say so at once, not wait for a clock that nobody moves any more.
            self.faults.down = False
            hurry.set()
            raise
        finally:
            await worker.drain(hurry)

    async def run_until_idle(self, app: App, **changes: Any) -> None:
        worker = self.worker(app, **changes)
        await worker.start(listening=False)
        try:
            await asyncio.wait_for(worker.until_idle(), PATIENCE_S)
        finally:
            await worker.drain()

    async def until(self, holds: Callable[[], bool | Awaitable[bool]], *, step_s: float = 0.0) -> None:
        """Wait for the thing itself; each look is a trip to the ledger and moves the clock by `step_s`.

        While the ledger is at work for the worker the clock stands still, so that a slow machine costs nobody a lease.
        """
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                if step_s and not self.faults.under_way:
                    self.clock.advance(step_s)
                await self.ledger.job(JobId("nobody"))

    async def job(self, handle: JobHandle) -> Job:
        return await handle.status()

    async def in_state(self, handle: JobHandle, state: str, *, step_s: float = 0.0) -> Job:
        async def reached() -> bool:
            return (await handle.status()).state == state

        await self.until(reached, step_s=step_s)
        return await handle.status()

    async def events(self, handle: JobHandle) -> list[str]:
        return [event.type for event in await handle.events()]

    async def sweep(self) -> SweepReport:
        return await self.ledger.sweep(Actor(role=Role.SWEEPER, name="test"), SweepOptions(elect=False))

    async def claim(self, type_: str, *, start: int = 1, lease_s: float = 60, heartbeat_s: float = 15) -> list[Claimed]:
        """Jobs in the hands of another worker, that will never be heard of again."""
        types = (TypeClaim(type=type_, lease_s=lease_s, heartbeat_s=heartbeat_s),)
        claim = Claim(claim_id=ClaimId(self.new_id()), types=types, start=start)
        return (await self.ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="dead"), claim=claim))).claimed


@pytest.fixture(params=[1, 2], ids=["one-turn", "two-turns"])
async def stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncGenerator[Stand]:
    """Once with one turn in flight and once with two, where a single step is enough for the second."""
    clock = FakeClock()
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock)
    monkeypatch.setattr(turns, "SECOND_TURN_MIN", 1)
    yield Stand(ledger, clock, turns_at_once=request.param)
    report = await verify(ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await ledger.close()

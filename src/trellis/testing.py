"""Test support for applications: an in-memory ledger with a clock you control, and a worker that runs until idle.

    async def test_a_broken_document_is_retried():
        async with sandbox(app) as box:
            job = await box.submit("index.document", {"id": 7})
            await box.run_until_idle()                     # the first attempt fails
            await box.advance(60)                          # the backoff is over
            await box.run_until_idle()
            await box.assert_events(job, ["job_queued", "job_claimed", "job_started", "job_retry_scheduled",
                                          "job_claimed", "job_started", "job_succeeded"])

It is the real engine: the same SQLite ledger and the same worker, with middleware, resources, error hooks and processes.
Only the ledger's clock is fake.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from trellis.app.wiring import SystemClock, new_id
from trellis.auth.principals import Principal
from trellis.client import JobHandle, Trellis
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace, SweepOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions
from trellis.worker.requests import SubmitSettings
from trellis.worker.worker import Worker

EPOCH_S = 1_767_225_600.0
"""The start of fake time: 2026-01-01T00:00:00Z."""
WAITS_MAX = 1_000
PAGE_MAX = 500
SWEEPS_MAX = 1_000


class FakeClock:
    """A clock that stands still until it is advanced. Callable as a ledger's clock, and also a `Clock` for loops."""

    def __init__(self, start_s: float = EPOCH_S) -> None:
        self._now = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self._now

    def monotonic(self) -> float:
        """Return the current fake time, for elapsed time."""
        return self._now

    @property
    def sleeping(self) -> int:
        """How many sleepers wait for this clock."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Advance the clock and wake the sleepers that are due."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)


class Sandbox:
    """One application on its own `ledger`, with its `clock` and a caller (`trellis`) that has every role."""

    def __init__(self, app: App, ledger: Ledger, clock: FakeClock, resources: Mapping[Any, Any] | None = None) -> None:
        self.app = app
        self._resources = resources
        self.ledger = ledger
        self.clock = clock
        self._ids = itertools.count(1)
        self._rng = random.Random(0)  # noqa: S311 - tests want the same waits every time
        principal = Principal(name="test", roles=frozenset(Role))
        self.trellis = Trellis(ledger, principal, clock=SystemClock(), new_id=self._new_id, app=app)

    async def submit(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> JobHandle:
        """Submit a job."""
        return await self.trellis.submit(type_, payload, **settings)

    async def run(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> Any:
        """Submit a job, run it through all its retries, and return its result or raise why it has none."""
        job = await self.submit(type_, payload, **settings)
        await self.run_until_idle(skip_waits=True)
        return await job.result(timeout_s=0)

    async def run_until_idle(self, *, skip_waits: bool = False, options: WorkerOptions | None = None) -> None:
        """Run everything that can run now. With `skip_waits`, also advance the clock through backoffs and delays."""
        for _ in range(WAITS_MAX):
            await self.sweep()
            await run_until_idle(self.app, self.ledger, options=options, rng=self._rng, resources=self._resources)
            wait_s = await self._next_wait_s() if skip_waits else None
            if wait_s is None:
                return
            self.clock.advance(wait_s)
        raise AssertionError(f"jobs still wait for something after {WAITS_MAX} waits were skipped")

    async def advance(self, seconds: float) -> None:
        """Advance the ledger's clock, then sweep."""
        self.clock.advance(seconds)
        await self.sweep()

    async def sweep(self) -> None:
        """Apply everything that is due: backoffs, expired leases, deadlines."""
        actor = Actor(role=Role.SWEEPER, name="test")
        for _ in range(SWEEPS_MAX):
            report = await self.ledger.sweep(actor, SweepOptions(elect=False))
            if not (report.expired or report.exhausted or report.due or report.deadlines or report.promoted):
                return

    async def assert_events(self, job: JobHandle, expected: Sequence[str]) -> None:
        """Assert that the job has exactly these events, oldest first."""
        types = [event.type for event in await job.events()]
        assert types == list(expected), f"events of {job.id}:\n  found    {types}\n  expected {list(expected)}"

    async def _next_wait_s(self) -> float | None:
        """Returns the seconds until the next scheduled job is due; None if there is none."""
        now = await self.ledger.now()
        waits: list[float] = []
        cursor: str | None = None
        while True:
            page = await self.ledger.jobs(JobFilter(), limit=PAGE_MAX, cursor=cursor)
            resting = (job for job in page.jobs if job.place is JobPlace.SCHEDULED and job.due_at is not None)
            waits += [max(0.0, (job.due_at - now).total_seconds()) for job in resting if job.due_at is not None]
            cursor = page.cursor
            if cursor is None:
                return min(waits, default=None)

    def _new_id(self) -> str:
        return f"test-{next(self._ids)}"


@asynccontextmanager
async def sandbox(
    app: App, url: str = "sqlite://:memory:", *, resources: Mapping[Any, Any] | None = None
) -> AsyncGenerator[Sandbox]:
    """Open a new ledger for one test, in memory unless another address is given.

    `resources` are values to use instead of the application's resources of these types; the others are opened and
    closed with each run of the worker. Handlers with `runner="process"` run in real processes, as everywhere.
    """
    clock = FakeClock()
    ledger = await open_ledger(url, clock=clock)
    try:
        yield Sandbox(app, ledger, clock, resources)
    finally:
        await ledger.close()


async def run_until_idle(
    app: App,
    ledger: Ledger,
    *,
    options: WorkerOptions | None = None,
    rng: random.Random | None = None,
    resources: Mapping[Any, Any] | None = None,
) -> None:
    """Run a worker until no job is held and nothing can be claimed now. `resources`: as for `sandbox`."""
    chosen = rng or random.Random(0)  # noqa: S311 - tests want the same waits every time
    worker = Worker(
        app,
        ledger,
        options or WorkerOptions(name="test-worker"),
        clock=SystemClock(),
        rng=chosen,
        new_id=new_id,  # a claim id of an earlier run would return that run's jobs
        resources=resources,
    )
    await worker.start(listening=False)
    try:
        await worker.until_idle()
    finally:
        await worker.drain()

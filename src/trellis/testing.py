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
import inspect
import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Unpack, cast

from trellis.app.system import SystemClock, new_id
from trellis.auth.principals import Principal
from trellis.client import BatchHandle, JobHandle, Trellis
from trellis.engine.closing import closing
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace, SweepOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.options import WorkerOptions
from trellis.worker.requests import BatchJob, SubmitSettings
from trellis.worker.worker import Worker

EPOCH_S = 1_767_225_600.0
"""The start of fake time: 2026-01-01T00:00:00Z."""
WAITS_MAX = 1_000
PAGE_MAX = 500
SWEEPS_MAX = 1_000
SWEEPS_OF_A_LEASE = 10
"""How often the sandbox sweeps while a lease ends. Sweeps that are further apart would count as an outage."""
WRITES = frozenset({"turn", "journal", "spawn", "save_checkpoint", "signal", "submit", "send_signal"})
"""The verbs of a worker that `Sandbox.crash_at` counts."""


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


class _DyingLedger:
    """Passes the calls of a worker on, until the worker dies at one of its writes. Later calls are never answered."""

    def __init__(self, inner: Ledger, write: int, *, committed: bool) -> None:
        self._inner, self.left, self._committed = inner, write, committed
        self._unanswered: list[asyncio.Future[None]] = []
        self.died = asyncio.Event()

    @property
    def ledger(self) -> Ledger:
        return cast("Ledger", self)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        return partial(self._call, name, real) if inspect.iscoroutinefunction(real) else real

    async def _call(self, name: str, real: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        if name in WRITES and not self.died.is_set():
            self.left -= 1
            if self.left == 0:
                if self._committed:
                    await real(*args, **kwargs)
                self.died.set()
        if self.died.is_set():
            never = asyncio.get_running_loop().create_future()
            self._unanswered.append(never)
            await never
        return await real(*args, **kwargs)

    def let_go(self) -> None:
        """End the calls that wait for an answer."""
        for call in self._unanswered:
            call.cancel()


class Sandbox:
    """One application on its own `ledger`, with its `clock` and a caller (`trellis`) that has every role."""

    def __init__(self, app: App, ledger: Ledger, clock: FakeClock, resources: Mapping[Any, Any] | None = None) -> None:
        self.app = app
        self._resources = resources
        self.ledger = ledger
        self.clock = clock
        self._ids = itertools.count(1)
        self._rng = random.Random(0)  # noqa: S311 - tests want the same waits every time
        self._crash: tuple[int, bool] | None = None
        self.crashed = False
        """Whether the worker of the last `crash_at` died."""
        principal = Principal(name="test", roles=frozenset(Role))
        self.trellis = Trellis(ledger, principal, clock=SystemClock(), new_id=self._new_id, app=app)

    async def submit(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> JobHandle:
        """Submit a job."""
        return await self.trellis.submit(type_, payload, **settings)

    async def submit_batch(
        self, jobs: Sequence[BatchJob], *, on_complete: BatchJob, abandon: bool = False
    ) -> BatchHandle:
        """Submit a batch of jobs and its completion job."""
        return await self.trellis.submit_batch(jobs, on_complete=on_complete, abandon=abandon)

    async def run(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> Any:
        """Submit a job, run it through all its retries, and return its result or raise why it has none."""
        job = await self.submit(type_, payload, **settings)
        await self.run_until_idle(skip_waits=True)
        return await job.result(timeout_s=0)

    async def run_until_idle(self, *, skip_waits: bool = False, options: WorkerOptions | None = None) -> None:
        """Run everything that can run now. With `skip_waits`, also advance the clock through backoffs and delays."""
        for _ in range(WAITS_MAX):
            await self.sweep()
            if self._crash is None:
                await run_until_idle(self.app, self.ledger, options=options, rng=self._rng, resources=self._resources)
            elif await self._crashes(*self._crash, options):
                continue
            wait_s = await self._next_wait_s() if skip_waits else None
            if wait_s is None:
                return
            self.clock.advance(wait_s)
        raise AssertionError(f"jobs still wait for something after {WAITS_MAX} waits were skipped")

    def crash_at(self, write: int, *, committed: bool = False) -> None:
        """Let a worker die at the `write`-th write to the ledger from now on, counted from 1.

        Nothing of what it does from there on reaches the ledger. With `committed`, that write itself does, and only its
        answer is lost. Its leases end, and a new worker goes on in the same `run_until_idle`. `crashed` says afterwards
        whether the worker came so far. To prove a workflow, count `write` up until it did not:

            for write in itertools.count(1):
                async with sandbox(app) as box:
                    box.crash_at(write)
                    assert await box.run("order", order) == expected
                    if not box.crashed:
                        break
        """
        self._crash = (write, committed)
        self.crashed = False

    async def signal(self, job: JobHandle, name: str, payload: Any = None) -> None:
        """Send a signal to a job, which `ctx.wait_signal` returns."""
        await self.trellis.signal(job.id, name, payload)

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

    async def _crashes(self, write: int, committed: bool, options: WorkerOptions | None) -> bool:  # noqa: FBT001 - as given
        """Run a worker until it dies or is idle. After its death its leases end, while somebody sweeps."""
        dying = _DyingLedger(self.ledger, write, committed=committed)
        self.crashed = await _run_until_dead(
            _new_worker(self.app, dying.ledger, options, self._rng, self._resources), dying
        )
        self._crash = None if self.crashed else (dying.left, committed)
        if self.crashed:
            lease_s = max((spec.options.lease_s for spec in self.app), default=0.0)
            for _ in range(SWEEPS_OF_A_LEASE):
                await self.advance(lease_s / (SWEEPS_OF_A_LEASE - 2))
        return self.crashed

    async def _next_wait_s(self) -> float | None:
        """Returns the seconds until the next scheduled job is due, or a key has its next token; None if none is."""
        now = await self.ledger.now()
        rates = {queue.type: queue.rate_per_key for queue in await self.ledger.queues()}
        waits: list[float] = []
        cursor: str | None = None
        while True:
            page = await self.ledger.jobs(JobFilter(), limit=PAGE_MAX, cursor=cursor)
            resting = (job for job in page.jobs if job.place is JobPlace.SCHEDULED and job.due_at is not None)
            waits += [max(0.0, (job.due_at - now).total_seconds()) for job in resting if job.due_at is not None]
            blocked = (rates.get(job.type) for job in page.jobs if job.place is JobPlace.BLOCKED)
            waits += [1 / rate for rate in blocked if rate is not None]
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
    async with closing(await open_ledger(url, clock=clock)) as ledger:
        yield Sandbox(app, ledger, clock, resources)


async def run_until_idle(
    app: App,
    ledger: Ledger,
    *,
    options: WorkerOptions | None = None,
    rng: random.Random | None = None,
    resources: Mapping[Any, Any] | None = None,
) -> None:
    """Run a worker until no job is held and nothing can be claimed now. `resources`: as for `sandbox`."""
    worker = _new_worker(app, ledger, options, rng or random.Random(0), resources)  # noqa: S311 - tests want the same waits every time
    await worker.start(listening=False)
    try:
        await worker.until_idle()
    finally:
        await worker.drain()


def _new_worker(
    app: App, ledger: Ledger, options: WorkerOptions | None, rng: random.Random, resources: Mapping[Any, Any] | None
) -> Worker:
    return Worker(
        app,
        ledger,
        options or WorkerOptions(name="test-worker"),
        clock=SystemClock(),
        rng=rng,
        new_id=new_id,  # a claim id of an earlier run would return that run's jobs
        resources=resources,
    )


async def _run_until_dead(worker: Worker, dying: _DyingLedger) -> bool:
    """Run a worker until it dies, which is True, or until it is idle."""
    await worker.start(listening=False)
    idle, died = asyncio.ensure_future(worker.until_idle()), asyncio.ensure_future(dying.died.wait())
    try:
        await asyncio.wait({idle, died}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        idle.cancel()
        died.cancel()
        await asyncio.gather(idle, died, return_exceptions=True)
        if dying.died.is_set():
            await worker.kill()
            dying.let_go()
        else:
            await worker.drain()
    return dying.died.is_set()

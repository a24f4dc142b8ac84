"""A real worker process with handlers that leave a trace; `tests.faults.nursery` starts them.

Each line of the trace is one write with O_APPEND, so that lines of many processes never mix and a killed process
leaves whole lines only. Times are the machine's monotonic clock, which all processes share.
"""

import asyncio
import datetime as dt
import json
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from trellis.app.wiring import run_worker
from trellis.engine.errors import LeaseConflictError
from trellis.engine.records import SweepOptions
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.options import WorkerOptions

EFFECT, POISON = "faults.effect", "faults.poison"
WORKFLOW, PART = "faults.workflow", "faults.part"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How a worker process behaves; passed as JSON."""

    url: str
    trace: str
    name: str
    lease_s: float = 2.0
    heartbeat_s: float = 0.5
    concurrency: int = 4
    prefetch: int | None = None
    sweep_s: float | None = 0.25
    """The sweep's interval, as short beside the test's lease as it is in production; None sweeps not at all."""
    hints: bool = True
    skew_s: float = 0.0
    call_timeout_s: float = 1.0
    window_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a handler is asked to do: be busy that long, or until a file appears."""

    hold_s: float = 0.0
    until: str | None = None
    checkpoint: bool = False
    journal: bool = False
    looks: bool = False
    """It stops when it is told to, and leaves a trace of that."""


class Trace:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, op: str, ctx: Context, **more: object) -> None:
        line = {"op": op, "job": ctx.idempotency_key, "epoch": ctx.epoch, "pid": os.getpid(), "at": time.monotonic()}
        os.write(self._fd, json.dumps({**line, **more}).encode() + b"\n")


async def told_before(work: Work, ctx: Context) -> bool:
    """Wait for the file, if any; True when the handler looks and is told to stop before it is there."""
    while work.until and not os.path.exists(work.until):  # noqa: ASYNC240, PTH110 - another process makes it
        if work.looks and ctx.cancelled:
            return True
        await asyncio.sleep(0.02)
    return False


async def charge(trace: Trace, ctx: Context) -> int:
    trace.write("charged", ctx)
    return int(ctx.epoch)


def add_workflow(app: App, trace: Trace, terms: dict[str, Any]) -> None:
    """A workflow with steps, children, a timer and a signal."""

    @app.job(PART, **terms, max_deaths=0)
    async def part(ctx: Context, number: int) -> int:
        trace.write("began", ctx)
        await asyncio.sleep(0.01)
        trace.write("ended", ctx)
        return number * number

    @app.job(WORKFLOW, **terms, max_deaths=0)
    async def workflow(ctx: Context, number: int) -> list[int]:
        trace.write("began", ctx)
        try:
            first = await ctx.step("first", partial(charge, trace, ctx))
            squares = await ctx.gather(*(ctx.spawn(PART, number + n) for n in range(3)))
            await ctx.sleep(0.1)
            bonus = await ctx.wait_signal("bonus")
            last = await ctx.step("last", partial(charge, trace, ctx))
            trace.write("done", ctx, what=json.dumps([first, last]))
            return [*squares, bonus]
        finally:
            trace.write("ended", ctx)


def make_app(orders: Orders, trace: Trace) -> App:
    app = App(testing=True)
    terms = {"lease_s": orders.lease_s, "heartbeat_s": orders.heartbeat_s, "max_attempts": 100}

    @app.job(EFFECT, **terms)
    async def effect(ctx: Context, work: Work) -> str:
        trace.write("began", ctx)
        if work.hold_s:
            await asyncio.sleep(work.hold_s)
        if await told_before(work, ctx):
            trace.write("told", ctx)
            return "told to stop"
        if work.journal:
            await ctx.journal("charge", partial(charge, trace, ctx))
        if work.checkpoint:
            await leave_checkpoint(ctx)
        trace.write("ended", ctx)
        return f"epoch {ctx.epoch}"

    async def leave_checkpoint(ctx: Context) -> None:
        try:
            await ctx.checkpoint({"epoch": ctx.epoch})
        except LeaseConflictError:
            trace.write("refused", ctx)
            raise

    add_workflow(app, trace, terms)

    @app.job(POISON, **terms)
    async def poison(ctx: Context) -> None:
        trace.write("began", ctx)
        os.kill(os.getpid(), signal.SIGKILL)

    return app


def shift_clocks(skew_s: float) -> None:
    """Every way Python code asks for the time of day now answers `skew_s` off; monotonic clocks are no time of day."""
    real_time, real_ns, real_datetime = time.time, time.time_ns, dt.datetime

    class Shifted(real_datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "Shifted":
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> "Shifted":
            return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + skew_s
    time.time_ns = lambda: real_ns() + int(skew_s * 1e9)
    dt.datetime = Shifted  # type: ignore[misc]


async def main(orders: Orders) -> int:
    lanes = LaneOptions(call_timeout_s=orders.call_timeout_s, outcome_window_s=orders.window_s, connect_timeout_s=2.0)
    options = {"options": lanes, "hints": orders.hints} if orders.url.startswith("postgresql") else {}
    ledger = await open_ledger(orders.url, **options)
    worker = WorkerOptions(
        name=orders.name,
        concurrency=orders.concurrency,
        prefetch=orders.prefetch,
        sweep=None if orders.sweep_s is None else SweepOptions(interval_s=orders.sweep_s),
        drain_s=5.0,
    )
    try:
        return await run_worker(make_app(orders, Trace(orders.trace)), ledger, worker)
    finally:
        await ledger.close()

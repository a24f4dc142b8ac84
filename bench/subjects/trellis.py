"""Ours, as users call it: the client and a worker process, on either ledger."""

import trellis.ledgers.postgres.ledger
import trellis.ledgers.sqlite.ledger  # noqa: F401 - both are imported here, so that no import is inside a measurement
from bench.marks import Marker
from bench.subjects.pacing import at_pace, many_callers, timed
from bench.task import Task
from trellis import App, Context
from trellis.app.wiring import connect, process_name, run_worker
from trellis.cli.long_running import tune_worker
from trellis.ledgers import open_ledger
from trellis.worker.options import WorkerOptions

TYPE = "bench.noop"
STEPS = ("fetch", "ask", "write", "check")


async def bulk(task: Task) -> float:
    """Submit many in each call."""
    async with connect(task.url) as trellis:
        await trellis.submit(TYPE, 0)
        return await timed(lambda sent: trellis.submit_many(TYPE, sent), task.jobs, task.batch)


async def singles(task: Task) -> float:
    """Submit one in each call."""
    async with connect(task.url) as trellis:
        return await many_callers(lambda sent: trellis.submit(TYPE, sent), task.jobs, task.concurrency)


async def paced(task: Task) -> None:
    """Submit on a beat."""
    async with connect(task.url) as trellis:
        await at_pace(lambda sent: trellis.submit(TYPE, sent), task.jobs, task.per_s)


async def worker(task: Task) -> None:
    """A worker process with every guard and service on."""
    await run_application(application(task), task)


async def run_application(app: App, task: Task) -> None:
    """Work for an application until the process is ended, in a process tuned as `trellis worker` tunes its own."""
    tune_worker()
    ledger = await open_ledger(task.url)
    options = WorkerOptions(
        name=process_name("bench"), concurrency=task.concurrency, prefetch=task.batch, hints=task.hints, drain_s=1.0
    )
    try:
        await run_worker(app, ledger, options)
    finally:
        await ledger.close()


def application(task: Task) -> App:
    """One type whose handler does next to nothing, or journals four steps."""
    app, mark = App(), Marker(task.folder).mark

    async def noop(ctx: Context, sent_ns: int) -> None:  # noqa: ARG001 - the shape of a handler
        mark(sent_ns)

    async def steps(ctx: Context, sent_ns: int) -> None:
        mark(sent_ns)
        for step in STEPS:
            await ctx.journal(step, nothing)

    app.job(TYPE)({"noop": noop, "steps": steps}[task.handler])
    return app


async def nothing() -> None:
    """A step without work of its own."""

"""Our durable functions: four steps, a fan-out with join, and a sleep."""

import trellis.ledgers.postgres.ledger  # noqa: F401 - imported here, so that no import is inside a measurement
from bench.marks import Marker
from bench.subjects.trellis import nothing, run_application
from bench.task import CHILDREN, SLEEP_S, STEPS, Task
from trellis import App, Context
from trellis.app.wiring import connect

TYPE, CHILD = "bench.workflow", "bench.child"


async def bulk(task: Task) -> None:
    """Submit all workflows."""
    async with connect(task.url) as trellis:
        await trellis.submit(CHILD, 0)
        await trellis.submit_many(TYPE, [0] * task.jobs)


async def worker(task: Task) -> None:
    """A worker process with every guard and service on."""
    await run_application(application(task), task)


def application(task: Task) -> App:
    """The workflow that the task names, and the child of a fan-out."""
    app, mark = App(), Marker(task.folder).mark

    async def steps(ctx: Context, number: int) -> None:
        mark(number)
        for step in range(STEPS):
            await ctx.step(str(step), nothing)

    async def join(ctx: Context, number: int) -> int:
        mark(number)
        return sum(await ctx.gather(*(ctx.spawn(CHILD, child) for child in range(CHILDREN))))

    async def sleep(ctx: Context, number: int) -> None:
        mark(number)
        await ctx.sleep(SLEEP_S)

    @app.job(CHILD)
    async def child(ctx: Context, number: int) -> int:  # noqa: ARG001 - the shape of a handler
        return number

    app.job(TYPE)({"steps": steps, "join": join, "sleep": sleep}[task.handler])
    return app

"""Procrastinate as its own documents use it: psycopg, uvloop, a worker that is woken by LISTEN."""

import logging
from typing import Any

import procrastinate  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.subjects.pacing import at_pace, many_callers, timed
from bench.task import Task

TASK = "noop"
CONCURRENCY = 10
"""Jobs at a time. A job takes three statements of its own, so that more do not help."""


def _app(task: Task, connections: int = 1) -> procrastinate.App:
    """All connections are made when it is opened."""
    logging.disable(logging.INFO)  # it writes a line for each job
    connector = procrastinate.PsycopgConnector(conninfo=task.url, min_size=connections, max_size=connections)
    return procrastinate.App(connector=connector)


async def setup(task: Task) -> None:
    """Install its tables."""
    app = _app(task)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def bulk(task: Task) -> float:
    """Defer many in each call."""
    app = _app(task)
    async with app.open_async():
        defer = app.configure_task(TASK).batch_defer_async

        async def send(sent: list[int]) -> None:
            jobs: list[dict[str, Any]] = [{"sent_ns": one} for one in sent]
            await defer(*jobs)

        return await timed(send, task.jobs, task.batch)


async def singles(task: Task) -> float:
    """Defer one in each call, a connection for every caller."""
    app = _app(task, task.concurrency)
    async with app.open_async():
        send = app.configure_task(TASK).defer_async
        return await many_callers(lambda sent: send(sent_ns=sent), task.jobs, task.concurrency)


async def paced(task: Task) -> None:
    """Defer on a beat."""
    app = _app(task)
    async with app.open_async():
        send = app.configure_task(TASK).defer_async
        await at_pace(lambda sent: send(sent_ns=sent), task.jobs, task.per_s)


async def worker(task: Task) -> None:
    """Its worker."""
    app, mark = _app(task, CONCURRENCY + 2), Marker(task.folder).mark

    @app.task(name=TASK)
    async def noop(sent_ns: int) -> None:
        mark(sent_ns)

    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)

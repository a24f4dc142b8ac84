"""Absurd as its own documents use it: tasks of four steps, a fan-out that awaits tasks of another queue, and a sleep.

One thread in each process with batches of 100: its documents recommend more processes, not threads. It is polled every 20 ms instead of every
250. A task that awaits another one keeps its thread, so a fan-out has as many threads as tasks at a time.
"""

import os
import threading
from pathlib import Path
from typing import Any

import psycopg  # pyright: ignore[reportMissingImports]
from absurd_sdk import Absurd  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.task import CHILDREN, SLEEP_S, STEPS, Task

QUEUE, OTHER_QUEUE = "work", "children"
POLL_S = 0.02
BATCH = 100


def setup(task: Task) -> None:
    """Install its schema, which is a file that the variable ABSURD_SQL names."""
    with psycopg.connect(task.url, autocommit=True) as connection:
        connection.execute(Path(os.environ["ABSURD_SQL"]).read_bytes())
    for queue in (QUEUE, OTHER_QUEUE):
        Absurd(task.url).create_queue(queue)


def bulk(task: Task) -> None:
    """Spawn, one by one: it has no other way."""
    client = Absurd(task.url, queue_name=QUEUE)
    for _ in range(task.jobs):
        client.spawn(task.handler, {}, queue=QUEUE)


def worker(task: Task) -> None:
    """Its worker; for a fan-out also one of the other queue."""
    mark = Marker(task.folder).mark
    app, others = Absurd(task.url, queue_name=QUEUE), Absurd(task.url, queue_name=OTHER_QUEUE)
    spawner = Absurd(task.url, queue_name=OTHER_QUEUE)
    lock = threading.Lock()

    def steps(params: Any, ctx: Any) -> None:  # noqa: ARG001 - the shape of a task
        mark(0)
        for step in range(STEPS):
            ctx.step(str(step), lambda: None)

    def join(params: Any, ctx: Any) -> int:  # noqa: ARG001 - the shape of a task
        mark(0)

        def spawn() -> list[str]:
            with lock:
                return [
                    str(spawner.spawn("child", {"number": n}, queue=OTHER_QUEUE)["task_id"]) for n in range(CHILDREN)
                ]

        ids = ctx.step("spawn", spawn)
        return sum(ctx.await_task_result(one, queue_name=OTHER_QUEUE).result for one in ids)

    def sleep(params: Any, ctx: Any) -> None:  # noqa: ARG001 - the shape of a task
        mark(0)
        ctx.sleep_for("nap", SLEEP_S)

    def child(params: Any, ctx: Any) -> int:  # noqa: ARG001 - the shape of a task
        return int(params["number"])

    chosen = {"steps": steps, "join": join, "sleep": sleep}[task.handler]
    app.register_task(task.handler)(chosen)
    others.register_task("child")(child)
    if task.handler == "join":
        serve = {"concurrency": 1, "batch_size": BATCH, "poll_interval": POLL_S}
        threading.Thread(target=others.start_worker, kwargs=serve, daemon=True).start()
        app.start_worker(concurrency=task.concurrency, poll_interval=POLL_S)
    else:
        app.start_worker(concurrency=1, batch_size=BATCH, poll_interval=POLL_S)

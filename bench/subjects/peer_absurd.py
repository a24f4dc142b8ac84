"""Absurd as its own documents use it: tasks without work, of four steps, a fan-out that awaits tasks of another queue, and a sleep.

One thread in each process with batches of 100: its documents recommend more processes, not threads. It is polled every 20 ms, or
every 10 where latency is measured, instead of every 250. A task that awaits another one keeps its thread, so a fan-out has as many threads as tasks at a time.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg  # pyright: ignore[reportMissingImports]
from absurd_sdk import Absurd  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.subjects.pacing import at_pace_blocking, many_threads
from bench.task import CHILDREN, SLEEP_S, STEPS, Task

QUEUE, OTHER_QUEUE = "work", "children"
BATCH = 100


def setup(task: Task) -> None:
    """Install its schema, which is a file that the variable ABSURD_SQL names."""
    with psycopg.connect(task.url, autocommit=True) as connection:
        connection.execute(Path(os.environ["ABSURD_SQL"]).read_bytes())
    for queue in (QUEUE, OTHER_QUEUE):
        Absurd(task.url).create_queue(queue)


def _sender(task: Task) -> Callable[[int], object]:
    """Spawns a task; each thread that calls it has a connection of its own."""
    here = threading.local()

    def send(sent_ns: int) -> None:
        if not hasattr(here, "client"):
            here.client = Absurd(task.url, queue_name=QUEUE)
        here.client.spawn(task.handler, {"sent_ns": sent_ns}, queue=QUEUE)

    return send


def bulk(task: Task) -> None:
    """Spawn, one by one: it has no other way."""
    send = _sender(task)
    for _ in range(task.jobs):
        send(0)


def singles(task: Task) -> float:
    """Spawn one in each call, a thread and a connection for every caller."""
    return many_threads(_sender(task), task.jobs, task.concurrency)


def paced(task: Task) -> None:
    """Spawn on a beat."""
    at_pace_blocking(_sender(task), task.jobs, task.per_s)


def worker(task: Task) -> None:
    """Its worker; for a fan-out also one of the other queue."""
    mark = Marker(task.folder).mark
    app, others = Absurd(task.url, queue_name=QUEUE), Absurd(task.url, queue_name=OTHER_QUEUE)
    spawner = Absurd(task.url, queue_name=OTHER_QUEUE)
    lock = threading.Lock()

    def noop(params: Any, ctx: Any) -> None:  # noqa: ARG001 - the shape of a task
        mark(params["sent_ns"])

    def steps(params: Any, ctx: Any) -> None:
        mark(params["sent_ns"])
        for step in range(STEPS):
            ctx.step(str(step), lambda: None)

    def join(params: Any, ctx: Any) -> int:
        mark(params["sent_ns"])

        def spawn() -> list[str]:
            with lock:
                return [
                    str(spawner.spawn("child", {"number": n}, queue=OTHER_QUEUE)["task_id"]) for n in range(CHILDREN)
                ]

        ids = ctx.step("spawn", spawn)
        return sum(ctx.await_task_result(one, queue_name=OTHER_QUEUE).result for one in ids)

    def sleep(params: Any, ctx: Any) -> None:
        mark(params["sent_ns"])
        ctx.sleep_for("nap", SLEEP_S)

    def child(params: Any, ctx: Any) -> int:  # noqa: ARG001 - the shape of a task
        return int(params["number"])

    chosen = {"noop": noop, "steps": steps, "join": join, "sleep": sleep}[task.handler]
    app.register_task(task.handler)(chosen)
    others.register_task("child")(child)
    if task.handler == "join":
        serve = {"concurrency": 1, "batch_size": BATCH, "poll_interval": task.poll_s}
        threading.Thread(target=others.start_worker, kwargs=serve, daemon=True).start()
        app.start_worker(concurrency=task.concurrency, poll_interval=task.poll_s)
    else:
        app.start_worker(concurrency=1, batch_size=BATCH, poll_interval=task.poll_s)

"""DBOS as its own documents use it: a queue, and workflows without work of their own: none, four steps, a fan-out with join, a sleep.

Synchronous workflows on threads, which were faster here than asynchronous ones, but for the sleep, where each would keep a thread; the queue is
polled every 20 ms, or every 10 where latency is measured, instead of every second.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dbos import DBOS, DBOSClient  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.subjects.pacing import at_pace_blocking, many_threads
from bench.task import CHILDREN, SLEEP_S, STEPS, Task

QUEUE, OTHER_QUEUE = "bench", "children"
VERSION = "1"
THREADS = 200


def setup(task: Task) -> None:
    """Install its tables."""
    _launch(task)
    DBOS.register_queue(QUEUE, worker_concurrency=task.concurrency, polling_interval_sec=task.poll_s)
    DBOS.destroy()


@contextmanager
def _sender(task: Task) -> Iterator[Callable[[int], object]]:
    client = DBOSClient(system_database_url=_address(task))
    try:
        yield lambda sent_ns: client.enqueue(
            {"queue_name": QUEUE, "workflow_name": task.handler, "app_version": VERSION}, sent_ns
        )
    finally:
        client.destroy()


def bulk(task: Task) -> None:
    """Enqueue, one by one: it has no other way."""
    with _sender(task) as send:
        for _ in range(task.jobs):
            send(0)


def singles(task: Task) -> float:
    """Enqueue one in each call, a thread for every caller."""
    with _sender(task) as send:
        return many_threads(send, task.jobs, task.concurrency)


def paced(task: Task) -> None:
    """Enqueue on a beat."""
    with _sender(task) as send:
        at_pace_blocking(send, task.jobs, task.per_s)


def worker(task: Task) -> None:
    """Its executor."""
    mark = Marker(task.folder).mark

    @DBOS.step()
    def step(number: int) -> int:
        return number

    @DBOS.workflow(name="noop")
    def noop(sent_ns: int) -> None:  # pyright: ignore[reportUnusedFunction]
        mark(sent_ns)

    @DBOS.workflow(name="steps")
    def steps(sent_ns: int) -> None:  # pyright: ignore[reportUnusedFunction]
        mark(sent_ns)
        for number in range(STEPS):
            step(number)

    @DBOS.workflow(name="child")
    def child(number: int) -> int:
        return number

    @DBOS.workflow(name="join")
    def join(sent_ns: int) -> int:  # pyright: ignore[reportUnusedFunction]
        mark(sent_ns)
        handles = [DBOS.enqueue_workflow(OTHER_QUEUE, child, number) for number in range(CHILDREN)]
        return sum(handle.get_result() for handle in handles)

    @DBOS.workflow(name="sleep")
    async def sleep(sent_ns: int) -> None:  # pyright: ignore[reportUnusedFunction]
        mark(sent_ns)
        await DBOS.sleep_async(SLEEP_S)

    _launch(task)
    for queue in (QUEUE, OTHER_QUEUE):
        DBOS.register_queue(
            queue, worker_concurrency=task.concurrency, polling_interval_sec=task.poll_s, on_conflict="always_update"
        )
    threading.Event().wait()


def _launch(task: Task) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": _address(task),
            "log_level": "ERROR",
            "application_version": VERSION,
            "executor_id": str(os.getpid()),
            "max_executor_threads": THREADS,
        }
    )
    DBOS.launch()


def _address(task: Task) -> str:
    if task.url.startswith("postgresql://"):
        return task.url.replace("postgresql://", "postgresql+psycopg://", 1)
    return f"sqlite:///{task.url}"

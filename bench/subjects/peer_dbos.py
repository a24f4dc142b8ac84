"""DBOS as its own documents use it: a queue, and a workflow of four durable steps without work of their own.

Synchronous workflows on threads, which were faster here than asynchronous ones; the queue is polled every 20 ms instead of every second.
"""

import os
import threading

from dbos import DBOS, DBOSClient  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.task import Task

QUEUE = "bench"
POLL_S = 0.02
VERSION = "1"
STEPS = 4


def setup(task: Task) -> None:
    """Install its tables."""
    _launch(task)
    DBOS.register_queue(QUEUE, worker_concurrency=task.concurrency, polling_interval_sec=POLL_S)
    DBOS.destroy()


def bulk(task: Task) -> None:
    """Enqueue, one by one: it has no other way."""
    client = DBOSClient(system_database_url=_address(task))
    for _ in range(task.jobs):
        client.enqueue({"queue_name": QUEUE, "workflow_name": "run", "app_version": VERSION})
    client.destroy()


def worker(task: Task) -> None:
    """Its executor."""
    mark = Marker(task.folder).mark

    @DBOS.step()
    def step(number: int) -> int:
        return number

    @DBOS.workflow(name="run")
    def run() -> None:
        mark(0)
        for number in range(STEPS):
            step(number)

    _launch(task)
    DBOS.register_queue(
        QUEUE, worker_concurrency=task.concurrency, polling_interval_sec=POLL_S, on_conflict="always_update"
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
        }
    )
    DBOS.launch()


def _address(task: Task) -> str:
    if task.url.startswith("postgresql://"):
        return task.url.replace("postgresql://", "postgresql+psycopg://", 1)
    return f"sqlite:///{task.url}"

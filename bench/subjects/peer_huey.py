"""huey on SQLite with `fsync=True` (synchronous=FULL), results off: it has no leases, so nothing is settled."""

from collections.abc import Callable

from huey import SqliteHuey  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.subjects.pacing import at_pace_blocking, many_threads
from bench.task import Task

BUSY_TIMEOUT_S = 30


def _queue(task: Task) -> SqliteHuey:
    return SqliteHuey("bench", filename=task.url, results=False, fsync=True, timeout=BUSY_TIMEOUT_S)


def _handler(mark: Callable[[int], None]) -> Callable[[int], None]:
    """Made here in both processes: huey knows a task by its module and name."""

    def noop(sent_ns: int) -> None:
        mark(sent_ns)

    return noop


def _send(task: Task) -> Callable[[int], object]:
    return _queue(task).task(name="noop")(_handler(lambda _: None))


def singles(task: Task) -> float:
    """Enqueue one in each call, a thread for every caller."""
    return many_threads(_send(task), task.jobs, task.concurrency)


def paced(task: Task) -> None:
    """Enqueue on a beat."""
    at_pace_blocking(_send(task), task.jobs, task.per_s)


def worker(task: Task) -> None:
    """Its consumer, `concurrency` threads."""
    queue = _queue(task)
    queue.task(name="noop")(_handler(Marker(task.folder).mark))
    consumer = queue.create_consumer(
        workers=task.concurrency,
        worker_type="thread",
        initial_delay=task.poll_s,
        max_delay=task.poll_s,
        backoff=1.001,
        periodic=False,
    )
    consumer.run()

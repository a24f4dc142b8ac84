"""How a figure is taken: drains, submits and latencies, each of one subject on a fresh store."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import apsw
import asyncpg

from bench.marks import Marks
from bench.processes import Child, ChildFailed, ask, ask_and_count, children, cpu_s, family
from bench.stores import OURS, Database, Stores
from bench.task import Task

DRAIN_TIMEOUT_S = 60.0
POLL_S = 0.02
UNSETTLED = {
    "trellis": "select exists (select from trellis.ready) or exists (select from trellis.lease)",
    "floor_postgres": "select exists (select from floor.ready) or exists (select from floor.lease)",
    "peer_pgqueuer": "select exists (select from pgqueuer)",
    "peer_procrastinate": "select exists (select from procrastinate_jobs where status in ('todo', 'doing'))",
    "peer_dbos": "select exists (select from dbos.workflow_status where status in ('ENQUEUED', 'PENDING'))",
}
UNSETTLED["ledger"] = UNSETTLED["trellis"]
UNSETTLED["workflows"] = f"{UNSETTLED['trellis']} or exists (select from trellis.resting)"
UNSETTLED["peer_absurd"] = " or ".join(
    f"exists (select from absurd.t_{queue} where state not in ('completed', 'failed', 'cancelled'))"
    for queue in ("work", "children")
)
UNSETTLED["peer_absurd"] = f"select {UNSETTLED['peer_absurd']}"
UNSETTLED["runs"] = f"{UNSETTLED['trellis']} or exists (select from trellis.parked)"
UNSETTLED_IN_FILE = {
    "trellis": "select exists (select 1 from trellis_job where place in (1, 4))",
    "runs": "select exists (select 1 from trellis_job where place in (1, 3, 4))",
    "floor_sqlite": "select exists (select 1 from job where state < 4)",
    "peer_dbos": "select exists (select 1 from workflow_status where status in ('ENQUEUED', 'PENDING'))",
}
UNSETTLED_IN_FILE["ledger"] = UNSETTLED_IN_FILE["trellis"]
SETTLED_POLL_S = 0.005
SETTLED_POLL_S_DBOS = 0.02
"""Its file has a rollback journal, where a reader keeps the writer waiting."""
MADE_BEFOREHAND = frozenset({"floor_sqlite", "peer_dbos"})
"""Subjects whose tables are made by an action of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """One drain: jobs per second from the first handler start to the last durable end, and what it cost."""

    per_s: float
    worker_cpu_us: float
    """Processor time of the worker processes for each job, in microseconds."""
    server_cpu_us: float = 0.0
    wal_bytes: float = 0.0


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextmanager
def fresh_url(stores: Stores, store: str, subject: str) -> Iterator[str]:
    """Where the subject finds an empty store of its own, `pg` or `sqlite`, with its tables."""
    if store == "pg":
        database = stores.database(subject)
        try:
            yield database.url(subject)
        finally:
            database.drop()
    else:
        url = file_url(subject, stores.file(subject))
        if subject in MADE_BEFOREHAND:
            ask(subject, "setup", Task(url=url).as_dict(), stores.folder)
        yield url


def submit_rate(stores: Stores, store: str, subject: str, action: str, task: Task) -> tuple[float, float]:
    """Acknowledged jobs per second of one client process, and what client and server spend on one, in microseconds."""
    with fresh_url(stores, store, subject) as url:
        options, server = replace(task, url=url).as_dict(), stores.server.pid if store == "pg" else None
        seconds, used = ask_and_count(subject, action, options, stores.folder, server)
    return task.jobs / seconds, used / task.jobs * 1e6


# --- PostgreSQL ----------------------------------------------------------------------------------------------------


def drain(
    stores: Stores,
    subject: str,
    task: Task,
    *,
    workers: int = 1,
    alter: Callable[[Database], None] | None = None,
    shown: Callable[[], None] | None = None,
) -> Drained:
    """Fill a fresh database, then have worker processes empty it. `alter` changes the schema first.

    `shown` comes back when everything can be seen elsewhere too; then the time ends there.
    """
    database = stores.database(subject)
    try:
        if alter is not None:
            alter(database)
        return drain_database(stores, database, subject, task, workers=workers, shown=shown)
    finally:
        database.drop()


def drain_database(
    stores: Stores,
    database: Database,
    subject: str,
    task: Task,
    *,
    workers: int,
    shown: Callable[[], None] | None = None,
) -> Drained:
    """`drain` on a database that is there."""
    marks = Marks(stores.fresh_marks())
    task = replace(task, url=database.url(subject), marks=str(marks.folder))
    filler = "trellis" if subject == "ledger" else subject
    ask(filler, "bulk", replace(task, batch=1_000, concurrency=1).as_dict(), stores.folder)
    database.settle_down()
    with children(subject, "worker", [task.as_dict()] * workers, stores.folder) as started:
        return asyncio.run(_drained(database, UNSETTLED[subject], started, marks, task.jobs, shown))


async def _drained(
    database: Database,
    unsettled: str,
    workers: list[Child],
    marks: Marks,
    jobs: int,
    shown: Callable[[], None] | None,
) -> Drained:
    connection = await asyncpg.connect(database.server.url(database.name))
    try:
        began_wal = await connection.fetchval("select pg_current_wal_insert_lsn()")
        worker_pids, server_pid = [child.process.pid for child in workers], database.server.pid
        began = cpu_s(worker_pids), cpu_s(family(server_pid))
        for child in workers:
            child.go()
        wait_for_marks(marks, jobs, workers)
        deadline = _deadline(workers[0].name)
        while await connection.fetchval(unsettled):
            deadline.check()
            await asyncio.sleep(SETTLED_POLL_S)
        if shown is not None:
            shown()
        ended_ns = time.time_ns()
        ended = cpu_s(worker_pids), cpu_s(family(server_pid))
        wal = await connection.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", began_wal)
    finally:
        await connection.close()
    return Drained(
        per_s=jobs / ((ended_ns - min(mark.began_ns for mark in marks.records)) / 1e9),
        worker_cpu_us=(ended[0] - began[0]) / jobs * 1e6,
        server_cpu_us=(ended[1] - began[1]) / jobs * 1e6,
        wal_bytes=float(wal) / jobs,
    )


@dataclass(frozen=True, slots=True)
class _Deadline:
    """When to give up waiting for a subject."""

    name: str
    at: float

    def check(self, what: str = "not settled") -> None:
        """Raise ChildFailed when the time has come."""
        if time.monotonic() > self.at:
            raise ChildFailed(f"{self.name}: {what} after {DRAIN_TIMEOUT_S:g} s")


def _deadline(name: str) -> _Deadline:
    return _Deadline(name, time.monotonic() + DRAIN_TIMEOUT_S)


def wait_for_marks(marks: Marks, jobs: int, workers: list[Child]) -> None:
    """Come back when `jobs` handlers have started; raises when a worker ends or nothing happens any more."""
    deadline = _deadline(workers[0].name)
    while marks.poll() < jobs:
        for child in workers:
            child.check()
        deadline.check(f"{len(marks.records)} of {jobs} jobs")
        time.sleep(POLL_S)


# --- SQLite --------------------------------------------------------------------------------------------------------


def file_url(subject: str, path: Path) -> str:
    """How a subject names its file."""
    return f"sqlite:///{path}" if subject in OURS else str(path)


def drain_file(stores: Stores, subject: str, task: Task, *, shown: Callable[[], None] | None = None) -> Drained:
    """Fill a fresh file, then have one worker process empty it; `shown` as for `drain`."""
    path, marks = stores.file(subject), Marks(stores.fresh_marks())
    task = replace(task, url=file_url(subject, path), marks=str(marks.folder))
    if subject in MADE_BEFOREHAND:
        ask(subject, "setup", task.as_dict(), stores.folder)
    filler = "trellis" if subject == "ledger" else subject
    fill = "singles" if subject == "peer_huey" else "bulk"
    ask(filler, fill, replace(task, batch=1_000, concurrency=4).as_dict(), stores.folder)
    with children(subject, "worker", [task.as_dict()], stores.folder) as (worker,):
        began = cpu_s([worker.process.pid])
        worker.go()
        wait_for_marks(marks, task.jobs, [worker])
        ended_ns = _when_settled(path, subject) or max(mark.began_ns for mark in marks.records)
        if shown is not None:
            shown()
            ended_ns = time.time_ns()
        used = cpu_s([worker.process.pid]) - began
    seconds = (ended_ns - min(mark.began_ns for mark in marks.records)) / 1e9
    return Drained(per_s=task.jobs / seconds, worker_cpu_us=used / task.jobs * 1e6)


def _when_settled(path: Path, subject: str) -> int | None:
    """When the file shows every job ended; None for an engine that forgets a job when it starts."""
    if subject not in UNSETTLED_IN_FILE:
        return None
    deadline, connection = _deadline(subject), apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(1_000)
    try:
        while not _has_settled(connection, subject):
            deadline.check()
            time.sleep(SETTLED_POLL_S_DBOS if subject == "peer_dbos" else SETTLED_POLL_S)
    finally:
        connection.close()
    return time.time_ns()


def _has_settled(connection: apsw.Connection, subject: str) -> bool:
    """False also while writers keep the reader out, as in a file with a rollback journal they may for long."""
    try:
        return not connection.execute(UNSETTLED_IN_FILE[subject]).fetchall()[0][0]
    except apsw.BusyError:
        return False


# --- latency -------------------------------------------------------------------------------------------------------

WARM_UP_JOBS = 10
SETTLE_S = 1.0


def latencies_ms(stores: Stores, store: str, subject: str, task: Task) -> tuple[list[float], float]:
    """Milliseconds from before the submit to the handler's start, on an idle worker, at a gentle pace.

    Also what the worker spends on one job meanwhile, in microseconds of processor time.
    """
    marks = Marks(stores.fresh_marks())
    with fresh_url(stores, store, subject) as url:
        task = replace(task, url=url, marks=str(marks.folder))
        with children(subject, "worker", [task.as_dict()], stores.folder) as workers:
            workers[0].go()
            ask(subject, "paced", replace(task, jobs=WARM_UP_JOBS).as_dict(), stores.folder)
            wait_for_marks(marks, WARM_UP_JOBS, workers)
            time.sleep(SETTLE_S)
            began = cpu_s([workers[0].process.pid])
            ask(subject, "paced", task.as_dict(), stores.folder)
            wait_for_marks(marks, WARM_UP_JOBS + task.jobs, workers)
            used = cpu_s([workers[0].process.pid]) - began
    return [(mark.began_ns - mark.sent_ns) / 1e6 for mark in marks.records[WARM_UP_JOBS:]], used / task.jobs * 1e6


# --- a server ------------------------------------------------------------------------------------------------------


def reports(
    stores: Stores, store: str, subject: str, tasks: Mapping[str, Task]
) -> Iterator[tuple[str, dict[str, float]]]:
    """What each action reports about one server process of the subject, on a fresh store."""
    marks = stores.fresh_marks()
    with fresh_url(stores, store, subject) as url:
        place = Task(url=url, marks=str(marks), objects=str(stores.objects()))
        with children(subject, "worker", [place.as_dict()], stores.folder) as (server,):
            server.go()
            _wait_for_place(marks, server)
            for action, task in tasks.items():
                there = replace(task, url=place.url, marks=place.marks, objects=place.objects)
                yield action, ask(subject, action, there.as_dict(), stores.folder)


def _wait_for_place(marks: Path, server: Child) -> None:
    """Come back when the server has said where it is."""
    deadline = _deadline(server.name)
    while not any(marks.glob("*.json")):  # another checkout may give the file another name
        server.check()
        deadline.check("does not serve")
        time.sleep(POLL_S)

"""What is measured, in groups that can be asked for by name. A group takes every subject's figure once; a run is rounds.

A figure's name is `<what>.<store>.<subject>`; the table (`table.py`) refers to figures by these names.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from bench.guards import GUARDS
from bench.measures import Drained, asked, drain, drain_file, latencies_ms, percentile, submit_rate, submit_rate_file
from bench.published import Folder
from bench.stores import Stores
from bench.task import Task
from trellis.worker.options import CONCURRENCY_DEFAULT, PREFETCH_PER_SLOT

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much work a measurement takes: enough for a steady rate, small enough for ten minutes in all."""

    bulk: int = 20_000
    singles: int = 1_500
    drain: int = 40_000
    peer_drain: int = 20_000
    guard_drain: int = 20_000
    sqlite_drain: int = 20_000
    huey_drain: int = 5_000
    latency: int = 200
    latency_without_hints: int = 40
    steps: int = 600
    runs: int = 600
    published_runs: int = 100
    dbos_runs: int = 80
    workflows: tuple[int, int, int] = (3_000, 300, 100)
    joins: tuple[int, int, int] = (80, 6, 3)
    """How many workflows each of ours, Absurd and DBOS makes."""
    sleeps: int = 1_000
    polls: int = 2_000
    http_submits: int = 1_000
    listeners: int = 1_000
    told: int = 40
    trips: int = 600
    single_trips: int = 150


SMALL = Sizes(
    bulk=200,
    singles=20,
    drain=400,
    peer_drain=200,
    guard_drain=100,
    sqlite_drain=200,
    huey_drain=50,
    latency=10,
    latency_without_hints=5,
    steps=10,
    runs=6,
    published_runs=6,
    dbos_runs=6,
    workflows=(10, 5, 3),
    joins=(2, 1, 1),
    sleeps=10,
    polls=64,
    http_submits=32,
    listeners=20,
    told=5,
    trips=20,
    single_trips=5,
)
"""For the test of this program."""

WORKER = Task(url="", concurrency=500)
"""How our worker is set for drains; the batch is the one PgQueuer gets."""
DEFAULTS = Task(url="", concurrency=CONCURRENCY_DEFAULT, batch=PREFETCH_PER_SLOT * CONCURRENCY_DEFAULT)
"""How a worker is set that nobody tuned."""
LATENCY_PER_S = 20.0
HUEY_THREADS = (1, 4)
RUNS_AT_ONCE = 50
RUN_PROCESSES = 2
"""On PostgreSQL, where DBOS is faster with two; an SQLite file is used by one."""
HTTP_CONNECTIONS = 16
TOLD_PER_S = 20.0
TRIPS_AT_ONCE = 32
RUN_SUBJECTS = {"runs": "runs", "published": "runs", "peer_dbos": "peer_dbos"}
"""What is measured, and the module that does it."""


def submits(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Acknowledged submits per second of one client process."""
    for subject in ("trellis", "peer_pgqueuer"):
        yield {f"bulk.pg.{subject}": submit_rate(stores, subject, "bulk", Task(url="", jobs=sizes.bulk))}
    yield {"bulk.sqlite.trellis": submit_rate_file(stores, "trellis", "bulk", Task(url="", jobs=sizes.bulk))}
    for callers in (1, 16):
        task = Task(url="", jobs=sizes.singles, concurrency=callers)
        for subject in ("trellis", "peer_pgqueuer"):
            yield {f"single{callers}.pg.{subject}": submit_rate(stores, subject, "singles", task)}
        for subject in ("trellis", "peer_huey"):
            yield {f"single{callers}.sqlite.{subject}": submit_rate_file(stores, subject, "singles", task)}


def drains(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Claim to settle on PostgreSQL, with one and two worker processes."""
    jobs = {"trellis": sizes.drain, "peer_pgqueuer": sizes.peer_drain, "floor_postgres": sizes.drain}
    for workers in (1, 2):
        for subject, count in {**jobs, "ledger": sizes.drain}.items():
            task = replace(WORKER, jobs=count)
            yield _drain_figures(f"{workers}.pg.{subject}", drain(stores, subject, task, workers=workers))
    yield _drain_figures("1.pg.trellis_default", drain(stores, "trellis", replace(DEFAULTS, jobs=sizes.drain)))


def _drain_figures(name: str, drained: Drained) -> Figures:
    return {
        f"drain{name}": drained.per_s,
        f"cpu{name}": drained.worker_cpu_us + drained.server_cpu_us,
        f"cpu_worker{name}": drained.worker_cpu_us,
        f"cpu_server{name}": drained.server_cpu_us,
        f"wal{name}": drained.wal_bytes,
    }


def sqlite_drains(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Claim to settle on SQLite with synchronous=FULL, one worker process."""
    for subject in ("trellis", "ledger", "floor_sqlite"):
        yield _file_figures(subject, drain_file(stores, subject, replace(WORKER, jobs=sizes.sqlite_drain)))
    for threads in HUEY_THREADS:
        task = Task(url="", jobs=sizes.huey_drain, concurrency=threads)
        yield _file_figures(f"peer_huey{threads}", drain_file(stores, "peer_huey", task))


def _file_figures(subject: str, drained: Drained) -> Figures:
    return {f"drain1.sqlite.{subject}": drained.per_s, f"cpu1.sqlite.{subject}": drained.worker_cpu_us}


def latency(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Submit to handler start on an idle worker."""
    task = Task(url="", jobs=sizes.latency, per_s=LATENCY_PER_S, concurrency=16, batch=100)
    for subject in ("trellis", "peer_pgqueuer"):
        yield _percentiles(f"pg.{subject}", latencies_ms(stores, subject, task))
    without = replace(task, hints=False, jobs=sizes.latency_without_hints, per_s=7.0)
    yield _percentiles("pg_no_hints.trellis", latencies_ms(stores, "trellis", without))


def _percentiles(name: str, values: list[float]) -> Figures:
    figures = {f"latency{share}.{name}": percentile(values, share / 100) for share in (50, 95, 99)}
    return {**figures, f"latency_max.{name}": max(values)}


def guards(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Our ledger, one connection, with one guard taken away at a time."""
    task = Task(url="", jobs=sizes.guard_drain)
    for guard in GUARDS:
        drained = drain(stores, "ledger", task, alter=guard.remove)
        yield {
            f"guard.pg.{guard.name}": drained.per_s,
            f"guard_cpu.pg.{guard.name}": drained.server_cpu_us,
            f"guard_wal.pg.{guard.name}": drained.wal_bytes,
        }


def steps(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Jobs of four journalled steps, with one and two worker processes."""
    for workers in (1, 2):
        task = Task(url="", jobs=sizes.steps, handler="steps", concurrency=100, batch=100)
        yield {f"steps{workers}.pg.trellis": drain(stores, "trellis", task, workers=workers).per_s}


def runs(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Agent runs of four steps, durable in the ledger and with everything published, beside DBOS."""
    for subject, module in RUN_SUBJECTS.items():
        task, shown = _run_task(stores, sizes, subject)
        drained = drain(stores, module, task, workers=RUN_PROCESSES, shown=shown)
        yield _run_figures(f"pg.{subject}", drained)
    for subject, module in RUN_SUBJECTS.items():
        task, shown = _run_task(stores, sizes, subject)
        yield _run_figures(f"sqlite.{subject}", drain_file(stores, module, task, shown=shown))


def _run_task(stores: Stores, sizes: Sizes, subject: str) -> tuple[Task, Callable[[], None] | None]:
    counts = {"runs": sizes.runs, "published": sizes.published_runs, "peer_dbos": sizes.dbos_runs}
    task = Task(url="", jobs=counts[subject], concurrency=RUNS_AT_ONCE)
    if subject != "published":
        return task, None
    folder = Folder(stores.objects(), task.jobs)
    return replace(task, objects=str(folder.path)), folder.wait


def _run_figures(name: str, drained: Drained) -> Figures:
    return {f"runs.{name}": drained.per_s, f"cpu_runs.{name}": (drained.worker_cpu_us + drained.server_cpu_us) / 1e3}


WORKFLOW_SUBJECTS = ("workflows", "peer_absurd", "peer_dbos")
"""Ours and the peers, in the order in which `Sizes` counts their workflows."""
JOINS_AT_ONCE = 8
"""How many fan-outs a process of a peer has under way. Each keeps a thread."""


def absurd_is_missing() -> str | None:
    """Why Absurd is not measured; None if it can be."""
    if find_spec("absurd_sdk") is None:
        return "the package absurd-sdk is not installed"
    return None if os.environ.get("ABSURD_SQL") else "ABSURD_SQL does not name its schema, the file sql/absurd.sql"


def workflows(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Workflows of four steps, fan-outs of 100 with a join, and sleeps of a second, ours beside Absurd and DBOS."""
    missing = absurd_is_missing()
    if missing is not None:
        print(f"  Absurd is left out: {missing}", file=sys.stderr, flush=True)
    counts = {"steps": sizes.workflows, "join": sizes.joins, "sleep": (sizes.sleeps,) * 3}
    for processes in (1, 2):
        for handler, per_subject in counts.items():
            for subject, jobs in zip(WORKFLOW_SUBJECTS, per_subject, strict=True):
                if subject == "peer_absurd" and missing is not None:
                    continue
                task = _workflow_task(subject, handler, jobs)
                drained = drain(stores, subject, task, workers=processes)
                value = jobs / drained.per_s if handler == "sleep" else drained.per_s
                yield {f"{handler}{processes}.workflows.{subject}": value}


def _workflow_task(subject: str, handler: str, jobs: int) -> Task:
    """A workflow is named `noop` where the runs of agents are measured too."""
    at_once = {"workflows": 200, "peer_absurd": JOINS_AT_ONCE, "peer_dbos": RUNS_AT_ONCE}[subject]
    if subject == "peer_dbos" and handler == "sleep":
        at_once = jobs
    named = "noop" if (subject, handler) == ("peer_dbos", "steps") else handler
    return Task(url="", jobs=jobs, handler=named, concurrency=at_once, batch=at_once)


def gateway(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """The gateway over HTTP, one process: polls, submits, and live events to many listeners."""
    tasks = {
        "status": Task(url="", jobs=sizes.polls, concurrency=HTTP_CONNECTIONS),
        "not_modified": Task(url="", jobs=sizes.polls, concurrency=HTTP_CONNECTIONS),
        "submits": Task(url="", jobs=sizes.http_submits, concurrency=HTTP_CONNECTIONS),
        "fan_out": Task(url="", jobs=sizes.told, concurrency=sizes.listeners, per_s=TOLD_PER_S),
    }
    for store in ("pg", "sqlite"):
        for action, figures in asked(stores, store, "gateway", tasks):
            yield {f"http_{action}_{name}.{store}.gateway": value for name, value in figures.items()}


def bus(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Round trips of jobs over NATS, through a worker of the CAP SDK and through ours, one at a time and many at once."""
    many = Task(url="", jobs=sizes.trips, concurrency=TRIPS_AT_ONCE)
    alone = Task(url="", jobs=sizes.single_trips)
    tasks = {"sdk_alone": alone, "ours_alone": alone, "sdk": many, "ours": many}
    for store in ("pg", "sqlite"):
        for action, figures in asked(stores, store, "bus", tasks):
            yield {f"bus_{action}_{name}.{store}.bus": value for name, value in figures.items()}


GROUPS: dict[str, Callable[[Stores, Sizes], Iterator[Figures]]] = {
    "submit": submits,
    "drain": drains,
    "sqlite": sqlite_drains,
    "latency": latency,
    "guards": guards,
    "steps": steps,
    "runs": runs,
    "workflows": workflows,
    "gateway": gateway,
    "bus": bus,
}

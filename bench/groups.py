"""What is measured, in groups that can be asked for by name. A group takes every subject's figure once; a run is rounds.

A figure's name is `<what>.<store>.<subject>`; the table (`table.py`) refers to figures by these names.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from bench.commands import COMMANDS, seconds
from bench.guards import GUARDS
from bench.measures import (
    Drained,
    drain,
    drain_file,
    file_url,
    fresh_url,
    latencies_ms,
    percentile,
    reports,
    submit_rate,
)
from bench.peers import PEERS, present
from bench.preload import preload
from bench.preload_file import preload_file
from bench.processes import ChildFailed, ask
from bench.published import Folder
from bench.stores import Stores
from bench.task import Task
from trellis.worker.options import CONCURRENCY_DEFAULT, PREFETCH_PER_SLOT

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much work a measurement takes: enough for a steady rate, small enough for half an hour in all."""

    bulk: int = 20_000
    singles: int = 4_000
    drain: int = 40_000
    peer_drain: int = 20_000
    slow_singles: int = 500
    slow_bulk: int = 5_000
    slow_drain: int = 600
    slow_file_drain: int = 200
    slow_latency: int = 100
    """What the peers do that make some hundred jobs a second (`SLOW`)."""
    guard_drain: int = 20_000
    sqlite_drain: int = 20_000
    huey_drain: int = 5_000
    latency: int = 200
    latency_without_hints: int = 40
    steps: int = 2_000
    runs: int = 600
    published_runs: int = 200
    peer_runs: int = 150
    """How often Absurd and DBOS make four steps."""
    workflows: int = 3_000
    joins: tuple[int, int, int] = (80, 6, 3)
    """How many fan-outs each of ours, Absurd and DBOS makes."""
    sleeps: int = 1_000
    polls: int = 2_000
    http_submits: int = 1_000
    listeners: int = 1_000
    told: int = 40
    trips: int = 600
    single_trips: int = 150
    plain_trips: int = 5_000
    ended: int = 1_000_000
    waiting: int = 1_000
    lists: int = 50
    listed_runs: int = 120
    starts: int = 5


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
    slow_singles=10,
    slow_bulk=50,
    slow_drain=20,
    slow_file_drain=10,
    slow_latency=5,
    peer_runs=5,
    workflows=10,
    joins=(2, 1, 1),
    sleeps=10,
    polls=64,
    http_submits=32,
    listeners=20,
    told=5,
    trips=20,
    single_trips=5,
    plain_trips=50,
    ended=200,
    waiting=150,
    lists=2,
    listed_runs=6,
    starts=1,
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
QUEUES = ("peer_pgqueuer", "peer_absurd", "peer_procrastinate", "peer_dbos")
FILE_QUEUES = ("peer_huey", "peer_dbos")
FLOORS = {"pg": ("floor_postgres",), "sqlite": ("floor_sqlite",)}
"""The least code with the same guards; it has one caller."""
WITH_BULK = ("peer_pgqueuer", "peer_procrastinate")
"""Peers that submit many jobs in a call."""
WITH_STEPS = ("peer_absurd", "peer_dbos")
SLOW = frozenset({"peer_absurd", "peer_procrastinate", "peer_dbos"})
POLL_S = 0.01
"""How often a peer that cannot be woken looks for work where latency is measured, and huey always."""
RUN_SUBJECTS = {"runs": "runs", "published": "runs", **{peer: peer for peer in WITH_STEPS}}
"""What is measured, and the module that does it."""


def of_each(subjects: Iterable[str], measure: Callable[[str], Figures]) -> Iterator[Figures]:
    """Figures of every subject that is here. A peer that fails costs its own figure; ours ends the run."""
    for subject in present(*subjects):
        try:
            yield measure(subject)
        except ChildFailed as error:
            if subject not in PEERS:
                raise
            print(f"  {PEERS[subject].name} failed and has no figure here: {error}", file=sys.stderr, flush=True)


# --- submits -------------------------------------------------------------------------------------------------------


def submits(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Acknowledged submits per second of one client process."""

    def rate(what: str, store: str, action: str, callers: int, jobs: int, slow: int, subject: str) -> Figures:
        task = Task(url="", jobs=slow if subject in SLOW else jobs, concurrency=callers)
        per_s, cpu_us = submit_rate(stores, store, subject, action, task)
        return {f"{what}.{store}.{subject}": per_s, f"cpu_{what}.{store}.{subject}": cpu_us}

    many = partial(rate, "bulk", action="bulk", callers=1, jobs=sizes.bulk, slow=sizes.slow_bulk)
    yield from of_each(("trellis", *WITH_BULK, "floor_postgres"), lambda one: many(store="pg", subject=one))
    yield from of_each(("trellis", "floor_sqlite"), lambda one: many(store="sqlite", subject=one))
    for callers in (1, 16):
        single = partial(
            rate, f"single{callers}", action="singles", callers=callers, jobs=sizes.singles, slow=sizes.slow_singles
        )
        floors = FLOORS if callers == 1 else {}
        for store, queues in {"pg": QUEUES, "sqlite": FILE_QUEUES}.items():
            subjects = ("trellis", *queues, *floors.get(store, ()))
            yield from of_each(subjects, lambda one, single=single, store=store: single(store=store, subject=one))


# --- drains --------------------------------------------------------------------------------------------------------


def drains(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Claim to settle on PostgreSQL, with one and two worker processes."""
    jobs = {"trellis": sizes.drain, "peer_pgqueuer": sizes.peer_drain, "floor_postgres": sizes.drain}

    def drained(workers: int, subject: str) -> Figures:
        task = _slow_task(sizes.slow_drain) if subject in SLOW else replace(WORKER, jobs=jobs[subject])
        return _drain_figures(f"{workers}.pg.{subject}", drain(stores, subject, task, workers=workers))

    for workers in (1, 2):
        yield from of_each(("trellis", *QUEUES, "floor_postgres"), partial(drained, workers))
        ledger = drain(stores, "ledger", replace(WORKER, jobs=sizes.drain), workers=workers)
        yield _drain_figures(f"{workers}.pg.ledger", ledger)
    yield _drain_figures("1.pg.trellis_default", drain(stores, "trellis", replace(DEFAULTS, jobs=sizes.drain)))


def _slow_task(jobs: int) -> Task:
    return Task(url="", jobs=jobs, concurrency=RUNS_AT_ONCE)


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

    def drained(name: str, task: Task, subject: str) -> Figures:
        result = drain_file(stores, subject, task)
        return {f"drain1.sqlite.{name}": result.per_s, f"cpu1.sqlite.{name}": result.worker_cpu_us}

    for subject in present("trellis", "ledger", "floor_sqlite"):
        yield drained(subject, replace(WORKER, jobs=sizes.sqlite_drain), subject)
    for threads in HUEY_THREADS:
        task = Task(url="", jobs=sizes.huey_drain, concurrency=threads, poll_s=POLL_S)
        yield from of_each(("peer_huey",), partial(drained, f"peer_huey{threads}", task))
    yield from of_each(("peer_dbos",), partial(drained, "peer_dbos", _slow_task(sizes.slow_file_drain)))


# --- latency -------------------------------------------------------------------------------------------------------


def latency(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Submit to handler start on an idle worker."""
    task = Task(url="", jobs=sizes.latency, per_s=LATENCY_PER_S, concurrency=16, batch=100, poll_s=POLL_S)

    def waited(store: str, subject: str) -> Figures:
        jobs = sizes.slow_latency if subject in SLOW else sizes.latency
        threads = 1 if subject == "peer_huey" else task.concurrency
        of_subject = replace(task, jobs=jobs, concurrency=threads)
        return _latency_figures(f"{store}.{subject}", latencies_ms(stores, store, subject, of_subject))

    yield from of_each(("trellis", *QUEUES), partial(waited, "pg"))
    without = replace(task, hints=False, jobs=sizes.latency_without_hints, per_s=7.0)
    yield _latency_figures("pg_no_hints.trellis", latencies_ms(stores, "pg", "trellis", without))
    yield from of_each(("trellis", *FILE_QUEUES), partial(waited, "sqlite"))


def _latency_figures(name: str, measured: tuple[list[float], float]) -> Figures:
    values, cpu_us = measured
    figures = {f"latency{share}.{name}": percentile(values, share / 100) for share in (50, 95, 99)}
    return {**figures, f"latency_max.{name}": max(values), f"cpu_latency.{name}": cpu_us}


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


# --- steps, runs and workflows -------------------------------------------------------------------------------------


def steps(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Jobs of four journalled steps and workflows of four steps, with one and two worker processes."""

    def drained(workers: int, subject: str) -> Figures:
        task = {
            "trellis": Task(url="", jobs=sizes.steps, handler="steps", concurrency=100, batch=100),
            "workflows": _workflow_task("workflows", "steps", sizes.workflows),
        }.get(subject) or _workflow_task(subject, "steps", sizes.peer_runs)
        done = drain(stores, subject, task, workers=workers)
        cpu_us = done.worker_cpu_us + done.server_cpu_us
        return {f"steps{workers}.pg.{subject}": done.per_s, f"cpu_steps{workers}.pg.{subject}": cpu_us}

    for workers in (1, 2):
        yield from of_each(("trellis", "workflows", *WITH_STEPS), partial(drained, workers))


def runs(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Agent runs of four steps, durable in the ledger and with everything published, beside workflows of four steps."""

    def on_postgres(subject: str) -> Figures:
        task, shown = _run_task(stores, sizes, subject)
        drained = drain(stores, RUN_SUBJECTS[subject], task, workers=RUN_PROCESSES, shown=shown)
        return _run_figures(f"pg.{subject}", drained)

    def on_sqlite(subject: str) -> Figures:
        task, shown = _run_task(stores, sizes, subject)
        return _run_figures(f"sqlite.{subject}", drain_file(stores, RUN_SUBJECTS[subject], task, shown=shown))

    yield from of_each(RUN_SUBJECTS, on_postgres)
    yield from of_each((one for one in RUN_SUBJECTS if one != "peer_absurd"), on_sqlite)


def _run_task(stores: Stores, sizes: Sizes, subject: str) -> tuple[Task, Callable[[], None] | None]:
    jobs = {"runs": sizes.runs, "published": sizes.published_runs}.get(subject, sizes.peer_runs)
    task = Task(url="", jobs=jobs, handler="steps", concurrency=RUNS_AT_ONCE)
    if subject != "published":
        return task, None
    folder = Folder(stores.objects(), task.jobs)
    return replace(task, objects=str(folder.path)), folder.wait


def _run_figures(name: str, drained: Drained) -> Figures:
    return {f"runs.{name}": drained.per_s, f"cpu_runs.{name}": (drained.worker_cpu_us + drained.server_cpu_us) / 1e3}


NO_STORE = "plain"
"""In the names of figures, where no ledger is involved."""
WORKFLOW_SUBJECTS = ("workflows", "peer_absurd", "peer_dbos")
"""Ours and the peers, in the order in which `Sizes` counts their fan-outs."""
JOINS_AT_ONCE = 8
"""How many fan-outs a process of a peer has under way. Each keeps a thread."""


def workflows(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Fan-outs of 100 with a join, and sleeps of a second, ours beside Absurd and DBOS."""
    counts = {"join": sizes.joins, "sleep": (sizes.sleeps,) * 3}

    def drained(handler: str, processes: int, subject: str) -> Figures:
        jobs = counts[handler][WORKFLOW_SUBJECTS.index(subject)]
        result = drain(stores, subject, _workflow_task(subject, handler, jobs), workers=processes)
        value = jobs / result.per_s if handler == "sleep" else result.per_s
        return {f"{handler}{processes}.pg.{subject}": value}

    for processes in (1, 2):
        for handler in counts:
            yield from of_each(WORKFLOW_SUBJECTS, partial(drained, handler, processes))


def _workflow_task(subject: str, handler: str, jobs: int) -> Task:
    at_once = {"workflows": 200, "peer_absurd": JOINS_AT_ONCE, "peer_dbos": RUNS_AT_ONCE}[subject]
    if subject == "peer_dbos" and handler == "sleep":
        at_once = jobs
    return Task(url="", jobs=jobs, handler=handler, concurrency=at_once, batch=at_once)


# --- servers, lists and commands -----------------------------------------------------------------------------------


def gateway(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """One server process over HTTP, the gateway and a bare one: polls, submits, and live events to many listeners."""
    tasks = {
        "status": Task(url="", jobs=sizes.polls, concurrency=HTTP_CONNECTIONS),
        "not_modified": Task(url="", jobs=sizes.polls, concurrency=HTTP_CONNECTIONS),
        "submits": Task(url="", jobs=sizes.http_submits, concurrency=HTTP_CONNECTIONS),
        "fan_out": Task(url="", jobs=sizes.told, concurrency=sizes.listeners, per_s=TOLD_PER_S),
    }
    places = {"gateway": ("pg", "sqlite"), "floor_gateway": (NO_STORE,)}
    for store, subject in ((store, name) for name in present(*places) for store in places[name]):
        for action, figures in reports(stores, store, subject, tasks):
            yield {f"http_{action}_{name}.{store}.{subject}": value for name, value in figures.items()}


def bus(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """Round trips of jobs over NATS through either worker, and plain requests, one at a time and many at once."""
    many = Task(url="", jobs=sizes.trips, concurrency=TRIPS_AT_ONCE)
    alone = Task(url="", jobs=sizes.single_trips)
    tasks = {"sdk_alone": alone, "ours_alone": alone, "sdk": many, "ours": many}
    plain = {"alone": alone, "many": replace(many, jobs=sizes.plain_trips)}
    places = {"bus": {"pg": tasks, "sqlite": tasks}, "floor_nats": {NO_STORE: plain}}
    each = (
        (store, subject, of_subject) for subject in present(*places) for store, of_subject in places[subject].items()
    )
    for store, subject, of_subject in each:
        for action, figures in reports(stores, store, subject, of_subject):
            yield {f"bus_{action}_{name}.{store}.{subject}": value for name, value in figures.items()}


def lists(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
    """A page of jobs by state where very many have ended, and what a page of runs asks the ledger."""
    database = stores.kept("ended", lambda fresh: preload(fresh, ready=sizes.waiting, finished=sizes.ended))
    file = stores.kept_file("ended", lambda path: preload_file(path, ready=sizes.waiting, finished=sizes.ended))
    for store, url_of in (("pg", database.url), ("sqlite", lambda subject: file_url(subject, file))):
        for subject, action in (("lists", "by_ledger"), ("floor_lists", "by_hand")):
            task = Task(url=url_of(subject), jobs=sizes.lists)
            figures = ask("lists", action, task.as_dict(), stores.folder)
            yield {f"list_{state}.{store}.{subject}": value for state, value in figures.items()}
    for store in ("pg", "sqlite"):
        with fresh_url(stores, store, "lists") as url:
            task = Task(url=url, jobs=sizes.listed_runs, objects=str(stores.objects()))
            figures = ask("lists", "runs", task.as_dict(), stores.folder)
        yield {f"list_runs_{name}.{store}.lists": value for name, value in figures.items()}


def commands(stores: Stores, sizes: Sizes) -> Iterator[Figures]:  # noqa: ARG001 - the shape of a group
    """The quickest of a few starts of each command; the commands take turns."""
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(sizes.starts):
        for name, times in took.items():
            times.append(seconds(name))
    for name, times in took.items():
        yield {f"start.{NO_STORE}.{name}": min(times)}


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
    "lists": lists,
    "help": commands,
}

"""The lines of the table: what is compared with what, and which target it has."""

from dataclasses import dataclass, replace

from bench.commands import COMMANDS
from bench.groups import FILE_QUEUES, FLOORS, HUEY_THREADS, NO_STORE, QUEUES, WITH_BULK, WITH_STEPS
from bench.peers import PEERS
from bench.task import LISTED_STATES

LESS_IS_BETTER = frozenset({"µs/job", "µs", "ms/job", "ms/run", "ms", "s", "bytes/job", "KiB", "%", "calls"})
"""Units of costs. Of every other unit more is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: our figure, the best of the figures beside it, and what the ratio or our own figure must be.

    The ratio is ours / theirs. `at_least` bounds it from below. `ahead` requires it to be better than 1. `limit` bounds our own figure, from
    above for a cost and from below for a rate; a line with a limit and nothing beside it has the ratio to the limit.
    """

    title: str
    unit: str
    ours: str
    beside: tuple[str, ...] = ()
    at_least: float | None = None
    limit: float | None = None
    ahead: bool = False
    aim: str = ""
    in_summary: bool = False

    @property
    def less_is_better(self) -> bool:
        """Whether the figure is a cost."""
        return self.unit in LESS_IS_BETTER

    @property
    def target(self) -> str:
        """What is required, in words; empty if nothing is."""
        required = ""
        if self.at_least is not None:
            required = f"≥ {self.at_least:g}x"
        elif self.limit is not None:
            required = f"{'≤' if self.less_is_better else '≥'} {self.limit:,g} {self.unit}"
        elif self.ahead:
            required = "ahead"
        return ", ".join(part for part in (required, self.aim) if part)

    def met(self, ours: float, theirs: float | None) -> bool | None:
        """Whether the target is met; None without one, or without anything that it refers to."""
        if self.limit is not None:
            return ours <= self.limit if self.less_is_better else ours >= self.limit
        if theirs is None:
            return None
        if self.at_least is not None:
            return ours >= self.at_least * theirs
        if self.ahead:
            return ours < theirs if self.less_is_better else ours > theirs
        return None


def _of(what: str, store: str, subjects: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{what}.{store}.{subject}" for subject in subjects)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


# --- submits, drains and latency -----------------------------------------------------------------------------------


def _submit_lines(store: str, queues: tuple[str, ...], bulk: tuple[str, ...]) -> list[Line]:
    def line(title: str, what: str, beside: tuple[str, ...], at_least: float | None = None) -> Line:
        ours = f"{what}.{store}.trellis"
        named = _of(what, store, beside)
        return Line(title=title, unit="jobs/s", ours=ours, beside=named, at_least=at_least, in_summary=bool(at_least))

    lines = [
        line("single submit, 1 caller", "single1", queues, SINGLE1_AT_LEAST),
        line("single submit, 1 caller", "single1", FLOORS[store]),
        line("single submit, 16 callers", "single16", queues, SINGLE16_AT_LEAST),
    ]
    if bulk:
        lines.append(line("bulk submit, 500 a call", "bulk", bulk, BULK_AT_LEAST))
    lines.append(line("bulk submit, 500 a call", "bulk", FLOORS[store]))
    who = "client + server" if store == "pg" else "client"
    costs = {"single1": queues, "single16": queues, "bulk": (*bulk, *FLOORS[store])}
    titles = {one.ours.partition(".")[0]: one.title for one in lines}
    return [
        *lines,
        *(
            replace(line(f"CPU, {who}, {titles[what]}", f"cpu_{what}", beside), unit="µs/job")
            for what, beside in costs.items()
        ),
    ]


def _drain_lines(workers: int) -> list[Line]:
    title, what = f"drain, {_processes(workers)}", f"drain{workers}"
    floor = _of(what, "pg", ("floor_postgres",))
    drain = Line(title=title, unit="jobs/s", ours=f"{what}.pg.trellis", beside=_of(what, "pg", QUEUES))
    return [
        replace(drain, at_least=DRAIN_AT_LEAST[workers], in_summary=True),
        replace(drain, beside=floor, at_least=0.5),
        replace(drain, title=f"{title}, ledger alone", ours=f"{what}.pg.ledger", beside=floor),
    ]


def _cost_lines() -> list[Line]:
    def line(title: str, what: str, beside: tuple[str, ...], unit: str = "µs/job", limit: float | None = None) -> Line:
        return Line(title=title, unit=unit, ours=f"{what}.pg.trellis", beside=_of(what, "pg", beside), limit=limit)

    return [
        line("CPU, worker + server, 1 process", "cpu1", QUEUES),
        line("CPU, worker + server, 1 process", "cpu1", ("floor_postgres",)),
        line("CPU, worker process alone", "cpu_worker1", QUEUES),
        line("CPU, server alone", "cpu_server1", QUEUES),
        line("WAL, claim → settle", "wal1", QUEUES, "bytes/job", 1_500.0),
    ]


def _latency_lines(store: str, queues: tuple[str, ...]) -> list[Line]:
    cost = Line(
        title="CPU of the worker at 20 jobs a second",
        unit="µs/job",
        ours=f"cpu_latency.{store}.trellis",
        beside=_of("cpu_latency", store, queues),
    )
    waits = [
        Line(
            title=f"submit → handler start, idle, p{share}",
            unit="ms",
            ours=f"latency{share}.{store}.trellis",
            beside=_of(f"latency{share}", store, queues),
            ahead=True,
            in_summary=share != 95,
        )
        for share in (50, 95, 99)
    ]
    return [*waits, cost]


# --- steps, runs and workflows -------------------------------------------------------------------------------------


def _step_lines() -> list[Line]:
    journalled = [
        Line(
            title=f"4 journalled steps, {_processes(workers)}",
            unit="runs/s",
            ours=f"steps{workers}.pg.trellis",
            beside=_of(f"steps{workers}", "pg", WITH_STEPS),
            at_least=STEPS_AT_LEAST,
            in_summary=True,
        )
        for workers in (1, 2)
    ]
    costs = [
        Line(
            title=f"CPU, worker + server, {rate.title}",
            unit="µs/job",
            ours=f"cpu_{rate.ours}",
            beside=tuple(f"cpu_{name}" for name in rate.beside),
        )
        for rate in journalled
    ]
    both = Line(
        title="4 journalled steps, 2 processes beside 1",
        unit="runs/s",
        ours="steps2.pg.trellis",
        beside=("steps1.pg.trellis",),
        ahead=True,
        in_summary=True,
    )
    return [*journalled, both, *costs]


def _run_lines(store: str, processes: int, peers: tuple[str, ...]) -> list[Line]:
    title, beside = f"4-step runs, {_processes(processes)}", _of("runs", store, peers)
    ours, readable = f"runs.{store}.runs", f"runs.{store}.published"
    durable = Line(title=f"{title}, durable", unit="runs/s", ours=ours)
    return [
        *(replace(durable, beside=(one,), at_least=RUNS_AT_LEAST[one.rpartition(".")[2]]) for one in beside),
        Line(
            title=f"{title}, until readable",
            unit="runs/s",
            ours=readable,
            beside=beside,
            at_least=READABLE_AT_LEAST,
            in_summary=True,
        ),
        *(
            Line(title=f"CPU, {title}, {word}", unit="ms/run", ours=f"cpu_{one}", beside=_of("cpu_runs", store, peers))
            for one, word in ((ours, "durable"), (readable, "until readable"))
        ),
    ]


def _workflow_lines(processes: int) -> list[Line]:
    word = _processes(processes)
    rates = {"steps": "workflows of 4 steps", "join": "joins of 100 children"}

    def line(handler: str, title: str, unit: str, peer: str) -> Line:
        what = f"{handler}{processes}"
        return Line(title=f"{title}, {word}", unit=unit, ours=f"{what}.pg.workflows", beside=_of(what, "pg", (peer,)))

    return [
        *(
            replace(line(handler, title, "/s", peer), at_least=at_least)
            for handler, title in rates.items()
            for peer, at_least in WORKFLOWS_AT_LEAST.items()
        ),
        *(replace(line("sleep", "1,000 sleeps of 1 s", "s", peer), ahead=True) for peer in WORKFLOWS_AT_LEAST),
    ]


# --- servers, lists and commands -----------------------------------------------------------------------------------


def _gateway_lines(store: str) -> list[Line]:
    def line(title: str, unit: str, figure: str, limit: float | None = None) -> Line:
        beside = _of(f"http_{figure}", NO_STORE, ("floor_gateway",))
        ours = f"http_{figure}.{store}.gateway"
        return Line(title=title, unit=unit, ours=ours, beside=beside, limit=limit, in_summary=limit is not None)

    return [
        line("HTTP: CPU of a status poll", "µs", "status_cpu_us", POLL_CPU_US),
        line("HTTP: CPU of a 304", "µs", "not_modified_cpu_us", POLL_CPU_US),
        line("HTTP: CPU of a submit", "µs", "submits_cpu_us", SUBMIT_CPU_US),
        line("HTTP: status polls, 16 connections", "/s", "status_per_s"),
        line("HTTP: polls answered 304", "/s", "not_modified_per_s"),
        line("HTTP: job submits, 16 connections", "/s", "submits_per_s"),
        line("events: submit → heard, 1,000 listeners, p50", "ms", "fan_out_p50_ms"),
        line("events: submit → heard, 1,000 listeners, p99", "ms", "fan_out_p99_ms"),
        line("events: CPU of one event to one listener", "µs", "fan_out_cpu_us"),
        line("events: memory of an idle listener", "KiB", "fan_out_memory_kib"),
        line("events: processor with 1,000 idle listeners", "%", "fan_out_idle_cpu"),
    ]


def _bus_lines(store: str) -> list[Line]:
    def line(title: str, unit: str, figure: str, plain: str, limit: float | None = None) -> Line:
        ours, beside = f"bus_{figure}.{store}.bus", _of(f"bus_{plain}", NO_STORE, ("floor_nats",))
        return Line(title=title, unit=unit, ours=ours, beside=beside, limit=limit, in_summary=limit is not None)

    return [
        one
        for worker, name in (("sdk", "CAP SDK worker"), ("ours", "our worker"))
        for one in (
            line(f"bus: round trips, 32 at once, {name}", "/s", f"{worker}_per_s", "many_per_s", TRIPS_PER_S),
            line(f"bus: CPU of the control plane, {name}", "ms/job", f"{worker}_cpu_ms", "many_cpu_ms"),
            line(f"bus: submit → result, alone, {name}, p50", "ms", f"{worker}_alone_p50_ms", "alone_p50_ms"),
            line(f"bus: submit → result, alone, {name}, p99", "ms", f"{worker}_alone_p99_ms", "alone_p99_ms"),
            line(
                f"bus: dispatch → result, alone, {name}, p50", "ms", f"{worker}_alone_dispatch_p50_ms", "alone_p50_ms"
            ),
            line(
                f"bus: dispatch → result, alone, {name}, p99", "ms", f"{worker}_alone_dispatch_p99_ms", "alone_p99_ms"
            ),
            line(f"bus: submit → result, 32 at once, {name}, p99", "ms", f"{worker}_p99_ms", "many_p99_ms"),
        )
    ]


def _list_lines(store: str) -> list[Line]:
    by_state = [
        Line(
            title=f"100 jobs by state at 1,000,000 ended: {state}",
            unit="ms",
            ours=f"list_{state}.{store}.lists",
            beside=_of(f"list_{state}", store, ("floor_lists",)),
            limit=LIST_MS,
            in_summary=True,
        )
        for state in LISTED_STATES
    ]
    runs = Line(
        title="ledger calls of GET /runs?limit=100",
        unit="calls",
        ours=f"list_runs_calls.{store}.lists",
        limit=RUN_LIST_CALLS,
        in_summary=True,
    )
    return [*by_state, runs]


def _command_lines() -> list[Line]:
    titles = {"trellis_help": "trellis --help", "jobs_help": "trellis jobs --help"}
    return [
        Line(
            title=titles[ours],
            unit="s",
            ours=f"start.{NO_STORE}.{ours}",
            beside=_of("start", NO_STORE, (floor,)),
            limit=HELP_S,
            in_summary=floor == "floor_typer",
        )
        for ours in titles
        for floor in COMMANDS
        if floor not in titles
    ]


# --- targets -------------------------------------------------------------------------------------------------------

SINGLE1_AT_LEAST, SINGLE16_AT_LEAST = 1.0, 3.0
BULK_AT_LEAST = 1.5
DRAIN_AT_LEAST = {1: 3.0, 2: 2.0}
"""By the number of worker processes."""
SQLITE_DRAIN_AT_LEAST = 4.0
STEPS_AT_LEAST = 4.0
READABLE_AT_LEAST = 3.0
WORKFLOWS_AT_LEAST = {"peer_absurd": 4.0, "peer_dbos": 10.0}
"""How many times as many workflows as each peer."""
RUNS_AT_LEAST = {"peer_absurd": 2.0, "peer_dbos": 5.0}
"""How many times as many durable runs as each peer."""
POLL_CPU_US, SUBMIT_CPU_US = 300.0, 600.0
TRIPS_PER_S = 500.0
LIST_MS = 10.0
RUN_LIST_CALLS = 2.0
HELP_S = 0.4

HUEYS = tuple(f"peer_huey{threads}" for threads in HUEY_THREADS)
SECTIONS = {
    "PostgreSQL": (
        *_submit_lines("pg", QUEUES, WITH_BULK),
        *_drain_lines(1),
        *_drain_lines(2),
        Line(
            title="drain, 1 process, default options",
            unit="jobs/s",
            ours="drain1.pg.trellis_default",
            beside=_of("drain1", "pg", QUEUES),
        ),
        *_cost_lines(),
        *_latency_lines("pg", QUEUES),
        Line(
            title="the same, hints off, slowest",
            unit="ms",
            ours="latency_max.pg_no_hints.trellis",
            limit=1_000.0,
        ),
        *_step_lines(),
        *_run_lines("pg", 2, WITH_STEPS),
        *_workflow_lines(1),
        *_workflow_lines(2),
        *_gateway_lines("pg"),
        *_bus_lines("pg"),
        *_list_lines("pg"),
    ),
    "SQLite, synchronous=FULL": (
        *_submit_lines("sqlite", FILE_QUEUES, ()),
        Line(
            title="drain, 1 process",
            unit="jobs/s",
            ours="drain1.sqlite.trellis",
            beside=_of("drain1", "sqlite", (*HUEYS, "peer_dbos")),
            at_least=SQLITE_DRAIN_AT_LEAST,
            in_summary=True,
        ),
        Line(
            title="drain, 1 process",
            unit="jobs/s",
            ours="drain1.sqlite.trellis",
            beside=("drain1.sqlite.floor_sqlite",),
            at_least=0.5,
        ),
        Line(
            title="drain, ledger alone",
            unit="jobs/s",
            ours="drain1.sqlite.ledger",
            beside=("drain1.sqlite.floor_sqlite",),
        ),
        Line(title="CPU, 1 process", unit="µs/job", ours="cpu1.sqlite.trellis", beside=("cpu1.sqlite.floor_sqlite",)),
        *_latency_lines("sqlite", FILE_QUEUES),
        *_run_lines("sqlite", 1, ("peer_dbos",)),
        *_gateway_lines("sqlite"),
        *_bus_lines("sqlite"),
        *_list_lines("sqlite"),
    ),
    "Command line": tuple(_command_lines()),
}
"""The lines, by the title of their table."""
NAMES = {
    **{subject: peer.name for subject, peer in PEERS.items()},
    **{f"peer_huey{threads}": f"huey, {threads} thread{'s' if threads > 1 else ''}" for threads in HUEY_THREADS},
    "floor_postgres": "hand-written SQL",
    "floor_sqlite": "hand-written apsw",
    "floor_gateway": "bare Starlette",
    "floor_nats": "plain NATS",
    "floor_lists": "hand-written SQL",
    "floor_python": "python -c pass",
    "floor_typer": 'python -c "import typer"',
    "trellis": "ours, 1 process",
}
"""What a subject beside ours is called in the table."""

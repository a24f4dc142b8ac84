"""What a call costs does not depend on how many jobs have ended and how many wait."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bench.preload import preload
from bench.preload_file import preload_file
from bench.stores import APPLICATION as BENCH_LOGIN
from bench.stores import Database
from bench.subjects.trellis import TYPE
from tests.ledgers.lists import LISTS
from tests.servers.postgres import PostgresServer
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.connection import SESSION_SETTINGS
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.reads import BY_INDEX
from trellis.lifecycles import Role

FEW, ENDED, READY = 200, 1_000_000, 200_000
GROWTH_MAX = 1.3
LIST_S_MAX = 0.010
NOISE_S = 0.000_05
"""What one measurement of a call differs from the next by."""
PAGES_MORE = 1_600
"""PostgreSQL: each of the 100 jobs of a page is looked up in several trees, and those of many rows are deeper. The
smallest table of many jobs has 2,200 pages, that of events 50,000."""
RANGES_S = 0.000_5
"""What is found by time or batch reads an index of page ranges from its beginning to its end: 3,100 ranges here, which
take about 0.5 ms, and at most 12,000 in a partition of events."""
BY_RANGES = frozenset({"the feed", "the feed of single submits", "events: job_queued", "events: job_succeeded"})
ROUNDS = 12
TRIES = 6
"""A call that seems to grow is measured again so often: other work on the machine makes calls slower, never faster."""
WORKER, SUBMITTER = Actor(role=Role.WORKER, name="growth"), Actor(role=Role.SUBMITTER, name="growth")
SINGLES = 40
_numbers = count(1)
_singles_begin: dict[Ledger, str] = {}
"""Where in the feed of each ledger the single submits begin."""

Call = Callable[[Ledger], Awaitable[object]]


async def _submit(ledger: Ledger) -> None:
    await ledger.submit(SUBMITTER, [NewJob(job_id=JobId(f"growth-{next(_numbers)}"), type=TYPE)])


async def _claim_and_complete(ledger: Ledger) -> None:
    claim = Claim(claim_id=ClaimId(f"growth-{next(_numbers)}"), types=(TypeClaim(type=TYPE),))
    (held,) = (await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    await ledger.turn(Turn(actor=WORKER, advances=(Advance(held.lease, "running", "complete"),)))


async def _feed_of_singles(ledger: Ledger) -> None:
    """A page of the feed that many transactions wrote."""
    page = await ledger.feed(_singles_begin[ledger], limit=SINGLES)
    assert len(page.events) == SINGLES


async def _submit_singles(ledger: Ledger) -> None:
    _singles_begin[ledger] = await ledger.feed_end()
    for _ in range(SINGLES):
        await _submit(ledger)


def calls() -> dict[str, Call]:
    def listed(where: JobFilter, ledger: Ledger) -> Awaitable[object]:
        return ledger.jobs(where, limit=100)

    def buried(where: JobFilter, ledger: Ledger) -> Awaitable[object]:
        return ledger.dead_letters(where, limit=100)

    def events_of_type(type_: str, ledger: Ledger) -> Awaitable[object]:
        return ledger.find_events(type_=type_, correlation_id=None, since=None, limit=100)

    many = {
        "the frequent type": JobFilter(type=TYPE),
        "the frequent type that succeeded": JobFilter(type=TYPE, state="succeeded"),
        "the frequent type that waits": JobFilter(type=TYPE, state="queued"),
        "the frequent type that failed": JobFilter(type=TYPE, state="failed"),
        "leased jobs": JobFilter(lifecycle="leased-job"),
    }
    return {
        "submit": _submit,
        "claim and complete": _claim_and_complete,
        "status": lambda ledger: ledger.job(JobId("bench-0000000001")),
        "queues": lambda ledger: ledger.queues(),
        "waiting types": lambda ledger: ledger.waiting_types(limit=100),
        "jobs that wait, oldest first": lambda ledger: ledger.jobs(
            JobFilter(lifecycle="leased-job", state="queued"), limit=100, oldest_first=True
        ),
        **{
            f"events: {type_}": partial(events_of_type, type_)
            for type_ in ("job_queued", "job_succeeded", "job_failed")
        },
        "the feed": lambda ledger: ledger.feed(None, limit=100),
        "the feed of single submits": _feed_of_singles,
        **{f"jobs: {name}": partial(listed, where) for name, where in (LISTS | many).items()},
        **{f"dead letters: {name}": partial(buried, where) for name, where in LISTS.items()},
    }


@dataclass(frozen=True)
class Cost:
    """What a call costs: processor time, of this process and of the server's for it, and time by the clock, in seconds."""

    cpu_s: float
    wall_s: float

    def least(self, other: "Cost") -> "Cost":
        return Cost(min(self.cpu_s, other.cpu_s), min(self.wall_s, other.wall_s))


def _cpu_ns(ledger: Any) -> int:
    """Processor time so far. Unlike time by the clock, it does not count how long others had the processor."""
    lanes = ledger._lanes() if isinstance(ledger, PostgresLedger) else []
    connections = [lane._connection for _, lane in lanes if lane._connection is not None]
    served = [Path(f"/proc/{one.get_server_pid()}/schedstat").read_text(encoding="ascii") for one in connections]
    return time.process_time_ns() + sum(int(text.split()[0]) for text in served)


async def _best(call: Call, ledgers: tuple[Ledger, Ledger]) -> list[Cost]:
    """The least cost on each ledger, measured in turns."""
    best = [Cost(math.inf, math.inf)] * len(ledgers)
    for _ in range(ROUNDS):
        for number, ledger in enumerate(ledgers):
            cpu, began = _cpu_ns(ledger), time.perf_counter()
            await call(ledger)
            took_s = time.perf_counter() - began
            best[number] = best[number].least(Cost((_cpu_ns(ledger) - cpu) / 1e9, took_s))
    return best


def _is_too_much(name: str, few: Cost, many: Cost, list_s_max: float) -> bool:
    more_s = RANGES_S if name in BY_RANGES else NOISE_S
    return many.cpu_s > GROWTH_MAX * few.cpu_s + more_s or many.wall_s > list_s_max


async def _pages_read(call: Call, ledger: Any, url: str) -> int:
    """How many pages of the database the reads of this call use. Unlike its time, that is the same at every run."""
    statements: list[tuple[str, Sequence[object]]] = []
    await ledger.job(JobId("none"))
    with ledger._read_lane._connection.query_logger(lambda one: statements.append((one.query, one.args))):
        await call(ledger)
        await asyncio.sleep(0)  # the last one is logged in the next turn of the loop
    connection, pages = await asyncpg.connect(url, server_settings=SESSION_SETTINGS), 0
    try:
        await connection.execute("begin")
        for text, arguments in statements:
            if re.match(r"(--.*\n)*\s*(select|with)\b", text) and "summarize_events" not in text:
                ((plan,),) = await connection.fetch(f"explain (analyze, buffers, format json) {text}", *arguments)
                whole = json.loads(plan)[0]["Plan"]
                pages += whole["Shared Hit Blocks"] + whole["Shared Read Blocks"]
            elif text == BY_INDEX:
                await connection.execute(text)
    finally:
        await connection.close()
    return pages


@asynccontextmanager
async def _open_both(few_url: str, many_url: str) -> AsyncIterator[tuple[Ledger, Ledger]]:
    """Both ledgers, each with five jobs of a rare type and SINGLES that were submitted one by one."""
    ledgers = (await open_ledger(few_url), await open_ledger(many_url))
    marks = {"concurrency_key": "k", "concurrency_limit": 9, "correlation_id": "c", "parent_id": JobId("p")}
    try:
        for ledger in ledgers:
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId(f"rare-{n}"), type="rare", **marks) for n in range(5)])  # type: ignore[arg-type]
            await _submit_singles(ledger)
        yield ledgers
    finally:
        _singles_begin.clear()
        for ledger in ledgers:
            await ledger.close()


async def check_pages(few_url: str, many_url: str) -> None:
    """Every read uses about as many pages with many jobs as with few."""
    too_many: dict[str, tuple[int, int]] = {}
    async with _open_both(few_url, many_url) as (few, many):
        for name, call in calls().items():
            pages = (await _pages_read(call, few, few_url), await _pages_read(call, many, many_url))
            print(f"{name:50} {pages[0]:7} {pages[1]:7} pages", flush=True)  # noqa: T201 - figures of the proof
            if pages[1] > pages[0] + PAGES_MORE:
                too_many[name] = pages
    assert too_many == {}, "pages read with few and with many jobs"


async def check_growth(few_url: str, many_url: str, list_s_max: float) -> None:
    too_much: dict[str, list[Cost]] = {}
    async with _open_both(few_url, many_url) as ledgers:
        for name, call in calls().items():
            await _best(call, ledgers)  # opens connections and plans statements
            few, many = await _best(call, ledgers)
            for _ in range(TRIES):
                if not _is_too_much(name, few, many, list_s_max):
                    break
                few, many = (
                    one.least(other) for one, other in zip((few, many), await _best(call, ledgers), strict=True)
                )
            figures = f"{1e3 * few.cpu_s:7.2f} {1e3 * many.cpu_s:7.2f} ms CPU {1e3 * few.wall_s:7.2f} {1e3 * many.wall_s:7.2f} ms"
            print(f"{name:50} {figures}", flush=True)  # noqa: T201 - figures of the proof
            if _is_too_much(name, few, many, list_s_max):
                too_much[name] = [few, many]
    assert too_much == {}, "with few and with many jobs"


@pytest.mark.prove
@pytest.mark.quiet
@pytest.mark.timeout(1_200)
@pytest.mark.requirement("DJ-13")
def test_no_call_costs_more_with_a_million_ended_and_200000_ready_jobs_on_postgres(
    postgres_server: PostgresServer, new_postgres_database: Callable[..., str], postgres_template: str
):
    postgres_server.sql(f"create role {BENCH_LOGIN} login in role trellis_app")
    urls: list[str] = []
    for ready, finished in ((FEW, FEW), (READY, ENDED)):
        urls.append(new_postgres_database(template=postgres_template))
        name = urls[-1].rpartition("/")[2].partition("?")[0]
        preload(Database(server=postgres_server, name=name), ready=ready, finished=finished)
    asyncio.run(check_pages(*urls))
    asyncio.run(check_growth(*urls, list_s_max=LIST_S_MAX))


@pytest.mark.prove
@pytest.mark.quiet
@pytest.mark.timeout(1_200)
@pytest.mark.requirement("DJ-13")
def test_no_call_costs_more_with_a_million_ended_and_200000_ready_jobs_on_sqlite(tmp_path: Path):
    few = preload_file(tmp_path / "few.db", ready=FEW, finished=FEW)
    many = preload_file(tmp_path / "many.db", ready=READY, finished=ENDED)
    asyncio.run(check_growth(few, many, list_s_max=LIST_S_MAX))

"""`python -m bench --large`: does a claim stay as cheap on big tables, while an old snapshot keeps dead rows alive?

Two databases: one with only the jobs the rounds will take, one with `ready` waiting and `finished` ended jobs and a
read-only transaction held open. In each, rounds of claims, then of settlements. Pages touched are what the server counts
for our tables and indexes (hit or read), all claims of a round together: no claim's scan is left out.
"""

import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench.machine import describe
from bench.preload import preload
from bench.processes import ChildFailed
from bench.stores import Database, Stores, open_stores
from bench.subjects.trellis import TYPE
from bench.table import markdown, number
from trellis.engine.jobs import Actor, Advance, Claim, Claimed, ClaimId, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger

ROUNDS = 5
CLAIMS = 200
CLAIM_SIZE = 25
TARGET = 1.5
FLAT = 1.5
"""p50 is called flat when no round is slower than this many times the first."""
BYTES_PER_JOB = 1_500
PAGES = """select coalesce(sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)
  + coalesce(toast_blks_hit + toast_blks_read + tidx_blks_hit + tidx_blks_read, 0)), 0)::bigint
  from pg_statio_all_tables where schemaname = 'trellis'"""
ACTOR = Actor(role=Role.WORKER, name="bench-large")


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round on one database."""

    claim_pages: float
    """Pages touched by one claim of CLAIM_SIZE jobs."""
    settle_pages: float
    claim_p50_ms: float
    claim_max_ms: float


def run_large(*, ready: int, finished: int, json_file: Path | None) -> int:
    """Measure and print; 0 when it was measured."""
    needed = ROUNDS * CLAIMS * CLAIM_SIZE
    if ready < needed:
        raise ChildFailed(f"--ready {ready}: the rounds take {needed} jobs")
    began = time.monotonic()
    with open_stores(
        wal_level="minimal", max_wal_senders=0, max_wal_size="4GB", maintenance_work_mem="256MB"
    ) as stores:
        free, wanted = shutil.disk_usage(stores.server.folder).free, (ready + finished) * BYTES_PER_JOB
        if free < wanted:
            raise ChildFailed(f"about {wanted / 1e9:.0f} GB of disk are needed and {free / 1e9:.0f} GB are free")
        about = describe(stores.server, stores.folder)
        empty = _measure(stores, ready=needed, finished=0, snapshot=False)
        full = _measure(stores, ready=ready, finished=finished, snapshot=True)
    about["took"] = f"{time.monotonic() - began:.0f} s"
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print(f"\n{_table(empty, full, ready, finished)}")
    if json_file:
        body = {"about": about, "ready": ready, "finished": finished}
        rounds = {"empty": [asdict(each) for each in empty], "full": [asdict(each) for each in full]}
        json_file.write_text(json.dumps({**body, **rounds}, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(stores: Stores, *, ready: int, finished: int, snapshot: bool) -> list[Round]:
    database = stores.database("trellis")
    try:
        preload(database, ready=ready, finished=finished)
        return asyncio.run(_rounds(database, snapshot=snapshot))
    finally:
        database.drop()


async def _rounds(database: Database, *, snapshot: bool) -> list[Round]:
    control = await asyncpg.connect(database.server.url(database.name))
    try:
        async with _held_snapshot(database, held=snapshot):
            rounds: list[Round] = []
            for count in range(1, ROUNDS + 1):
                rounds.append(await _round(control, database.url("trellis")))
                last = rounds[-1]
                print(
                    f"  round {count}/{ROUNDS}  {last.claim_pages:.0f} pages a claim, p50 {last.claim_p50_ms:.2f} ms",
                    file=sys.stderr,
                    flush=True,
                )
            return rounds
    finally:
        await control.close()


@contextlib.asynccontextmanager
async def _held_snapshot(database: Database, *, held: bool) -> AsyncIterator[None]:
    """A transaction that has read something and stays open: no row that dies from now on can be removed."""
    if not held:
        yield
        return
    connection = await asyncpg.connect(database.server.url(database.name))
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.fetchval("select count(*) from trellis.lease")
            yield
    finally:
        await connection.close()


async def _round(control: Any, url: str) -> Round:
    claimed: list[list[Claimed]] = []
    took: list[float] = []

    async def claim(ledger: Ledger) -> None:
        for _ in range(CLAIMS):
            wanted = Claim(claim_id=ClaimId(str(uuid.uuid4())), types=(TypeClaim(type=TYPE),), start=CLAIM_SIZE)
            began = time.perf_counter()
            claimed.append((await ledger.turn(Turn(actor=ACTOR, claim=wanted))).claimed)
            took.append(time.perf_counter() - began)

    async def settle(ledger: Ledger) -> None:
        for batch in claimed:
            done = tuple(Advance(lease=job.lease, source=job.state, trigger=Trigger.COMPLETE) for job in batch)
            await ledger.turn(Turn(actor=ACTOR, advances=done))

    claim_pages = await _pages(control, url, claim)
    settle_pages = await _pages(control, url, settle)
    if sum(map(len, claimed)) != CLAIMS * CLAIM_SIZE:
        raise ChildFailed("a claim came back short")
    return Round(
        claim_pages=claim_pages / CLAIMS,
        settle_pages=settle_pages / CLAIMS,
        claim_p50_ms=statistics.median(took) * 1000,
        claim_max_ms=max(took) * 1000,
    )


async def _pages(control: Any, url: str, work: Callable[[Ledger], Coroutine[Any, Any, None]]) -> int:
    """Pages of our tables touched by a piece of work. A backend tells its counts when it ends, so each has its own."""
    before = await control.fetchval(PAGES)
    ledger = await open_ledger(url, hints=False)
    try:
        await work(ledger)
    finally:
        await ledger.close()
    while await control.fetchval("select count(*) from pg_stat_activity where application_name = 'trellis'"):  # noqa: ASYNC110 - another process's end
        await asyncio.sleep(0.01)
    await control.execute("select pg_stat_clear_snapshot()")
    return await control.fetchval(PAGES) - before


def _table(empty: list[Round], full: list[Round], ready: int, finished: int) -> str:
    rows: list[tuple[str, ...]] = []
    for title, field in (
        ("pages touched by a claim", "claim_pages"),
        ("pages touched by its settlement", "settle_pages"),
    ):
        small, large = ([getattr(each, field) for each in rounds] for rounds in (empty, full))
        ratio = statistics.median(large) / statistics.median(small)
        met = ("met" if ratio <= TARGET else "MISSED") if field == "claim_pages" else ""
        target = f"<= {TARGET}x" if field == "claim_pages" else ""
        rows.append((title, _list(small), _list(large), f"{ratio:.2f}x", target, met))
    small, large = ([each.claim_p50_ms for each in rounds] for rounds in (empty, full))
    flat = max(large) <= FLAT * large[0]
    rows.append(("p50 of a claim, ms, by round", _list(small), _list(large), "", "flat", "met" if flat else "MISSED"))
    rows.append(
        ("slowest claim, ms, by round", *(_list([e.claim_max_ms for e in r]) for r in (empty, full)), "", "", "")
    )
    head = (
        f"{CLAIMS} claims of {CLAIM_SIZE}, by round",
        "empty tables",
        f"{ready:,} ready, {finished:,} finished, snapshot held",
        "ratio",
        "target",
        "",
    )
    return markdown(head, rows)


def _list(values: list[float]) -> str:
    return " ".join(number(value) if value >= 10 else f"{value:.2f}" for value in values)

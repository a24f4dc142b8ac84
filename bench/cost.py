"""`python -m bench --cost`: what one job costs over its whole life, for plans of a fleet (docs/explanation/scale.md).

One process, one PostgreSQL server, every guard in force. Each phase counts processor time of the client and of the
server, the bytes of the write-ahead log, and the bytes that stay in the database. Counts of processor time and bytes
hardly depend on what else runs on the machine.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench.machine import describe
from bench.processes import cpu_s, family
from bench.stores import Database, open_stores
from bench.subjects.trellis import TYPE
from bench.table import markdown
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import RetentionOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Phase, Role, Trigger

JOBS = 20_000
SINGLE = 4_000
SMALL = 500
BULK = 500
PAYLOAD = b'{"order": 12345, "note": "a hundred bytes of payload, as a job that names what it works on would have"}'
WORKER = Actor(role=Role.WORKER, name="bench-cost")
SUBMITTER = Actor(role=Role.SUBMITTER, name="bench-cost")
SWEEPER = Actor(role=Role.SWEEPER, name="bench-cost")
WAL = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
SIZE = "select pg_database_size(current_database())"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one job costs in one phase."""

    phase: str
    jobs: int
    client_us: float
    server_us: float
    wal_bytes: float
    kept_bytes: float
    """How much the database grew. Negative where it shrank."""


def run_cost(*, small: bool, json_file: Path | None) -> int:
    """Measure and print; 0 when it was measured."""
    with open_stores() as stores:
        about = describe(stores.server, stores.folder)
        database = stores.database("trellis")
        costs = asyncio.run(_costs(database, SMALL if small else JOBS, SMALL if small else SINGLE))
    print("\n".join(f"- {name}: {text}" for name, text in about.items()))
    print(_table(costs))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(cost) for cost in costs], indent=2))
    return 0


async def _costs(database: Database, jobs: int, single: int) -> list[Cost]:
    control = await asyncpg.connect(database.server.url(database.name))
    ledger = await open_ledger(database.url("trellis"), hints=False)
    try:
        await control.execute("vacuum analyze")
        await control.execute("checkpoint")
        costs: list[Cost] = []

        async def phase(name: str, n: int, work: Callable[[], Awaitable[object]]) -> None:
            costs.append(await _measured(database, control, name, n, work))

        await phase("submit, 500 a call", jobs, lambda: _submitted(ledger, jobs, BULK))
        await phase("claim, start and settle, 500 at a time", jobs, lambda: _worked(ledger, jobs, BULK))
        await phase("submit, one a call", single, lambda: _submitted(ledger, single, 1))
        await phase("claim, start and settle, one at a time", single, lambda: _worked(ledger, single, 1))
        await control.execute("update trellis.ended set at = at - interval '1 year'")
        await phase("retention", jobs + single, lambda: _removed(ledger))
        return costs
    finally:
        await ledger.close()
        await control.close()


async def _measured(
    database: Database, control: Any, name: str, jobs: int, work: Callable[[], Awaitable[object]]
) -> Cost:
    client, server = time.process_time(), cpu_s(family(database.server.pid))
    wal, size = await control.fetchval(WAL), await control.fetchval(SIZE)
    await work()
    client, server = time.process_time() - client, cpu_s(family(database.server.pid)) - server
    wal = await control.fetchval(WAL) - wal
    await control.execute("vacuum")
    kept = await control.fetchval(SIZE) - size
    return Cost(
        phase=name,
        jobs=jobs,
        client_us=1e6 * client / jobs,
        server_us=1e6 * server / jobs,
        wal_bytes=wal / jobs,
        kept_bytes=kept / jobs,
    )


async def _submitted(ledger: Ledger, jobs: int, at_once: int) -> None:
    for _ in range(0, jobs, at_once):
        batch = [NewJob(job_id=JobId(str(uuid.uuid4())), type=TYPE, payload=PAYLOAD) for _ in range(at_once)]
        await ledger.submit(SUBMITTER, batch)


async def _worked(ledger: Ledger, jobs: int, at_once: int) -> None:
    done: tuple[Advance, ...] = ()
    taken = 0
    while taken < jobs or done:
        start = min(at_once, jobs - taken)
        claim = (
            Claim(claim_id=ClaimId(str(uuid.uuid4())), types=(TypeClaim(type=TYPE),), start=start) if start else None
        )
        claimed = (await ledger.turn(Turn(actor=WORKER, advances=done, claim=claim))).claimed
        done = tuple(Advance(lease=job.lease, source=job.state, trigger=Trigger.COMPLETE) for job in claimed)
        taken += len(claimed)


async def _removed(ledger: Ledger) -> None:
    ended = {
        (one.name, state.name): 1.0 for one in LIFECYCLES.values() for state in one.states if state.phase is Phase.ENDED
    }
    options = RetentionOptions(states_s=ended, testing=True)
    while (await ledger.retain(options, by=SWEEPER)).more:
        pass


def _table(costs: list[Cost]) -> str:
    rows = [
        (
            cost.phase,
            f"{cost.client_us:.0f}",
            f"{cost.server_us:.0f}",
            f"{cost.wal_bytes:,.0f}",
            f"{cost.kept_bytes:,.0f}",
        )
        for cost in costs
    ]
    head = ("a job", "client, µs of CPU", "PostgreSQL, µs of CPU", "WAL, bytes", "database grows by, bytes")
    return markdown(head, rows)

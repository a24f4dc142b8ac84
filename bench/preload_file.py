"""Fills an SQLite ledger with a long past, fast: one job is taken to its end by the ledger, and its rows are copied by SQL."""

import asyncio
from pathlib import Path

import apsw

from bench.preload import verify_sample
from bench.subjects.trellis import TYPE
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger

BATCH = 500
CACHE_KIB = 200_000
COPIES = {
    "trellis_submission": {"id": "n", "job_id": "printf('bench-%010d', n)"},
    "trellis_event": {"seq": "seq + (n - 1) * 4", "job": "n"},
    "trellis_job": {"id": "n", "seq": "n * 4", "pos": "(n - 1) * 4 + 1"},
}
"""By table: the columns in which copy number `n` differs. A job has four events."""


def preload_file(path: Path, *, ready: int, finished: int) -> str:
    """Jobs 1 … finished have succeeded, the rest wait; proves on a sample that the ledger itself would have made them.

    Returns the address of the ledger.
    """
    url = f"sqlite:///{path}"
    asyncio.run(_end_one(url))
    _copy(path, finished)
    asyncio.run(_submit(url, range(finished + 1, finished + ready + 1)))
    asyncio.run(verify_sample(url, ready + finished))
    return url


async def _end_one(url: str) -> None:
    await _submit(url, range(1, 2))
    ledger, worker = await open_ledger(url), Actor(role=Role.WORKER, name="bench-worker")
    try:
        claim = Claim(claim_id=ClaimId("first"), types=(TypeClaim(type=TYPE),), start=1)
        (held,) = (await ledger.turn(Turn(actor=worker, claim=claim))).claimed
        done = Advance(lease=held.lease, source=held.state, trigger=Trigger.COMPLETE)
        await ledger.turn(Turn(actor=worker, advances=(done,)))
    finally:
        await ledger.close()


async def _submit(url: str, numbers: range) -> None:
    ledger, submitter = await open_ledger(url), Actor(role=Role.SUBMITTER, name="bench-submitter")
    try:
        for first in range(0, len(numbers), BATCH):
            some = numbers[first : first + BATCH]
            jobs = [NewJob(job_id=JobId(f"bench-{number:010d}"), type=TYPE, payload=b"0") for number in some]
            await ledger.submit(submitter, jobs)
    finally:
        await ledger.close()


def _copy(path: Path, count: int) -> None:
    """Triggers are off: what they would have checked holds by construction, and a sample is verified afterwards."""
    connection = apsw.Connection(str(path))
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.pragma("synchronous", "off")
    connection.pragma("cache_size", -CACHE_KIB)
    try:
        with connection:
            for table, differs in COPIES.items():
                columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
                values = ", ".join(differs.get(column, f'"{column}"') for column in columns)
                key = "job" if "job" in differs else "id"
                connection.execute(
                    f"with recursive copies(n) as (select 2 where 2 <= ?1 union all select n + 1 from copies where n < ?1)"
                    f" insert into {table} select {values} from copies cross join {table} where {key} = 1",
                    (count,),
                )
        connection.pragma("wal_checkpoint(truncate)")
    finally:
        connection.close()

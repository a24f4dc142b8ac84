"""Fills a new SQLite ledger with a long past and a long queue, fast: two jobs that the ledger made, copied many times."""

import asyncio
from pathlib import Path
from typing import Any

import apsw

from bench.preload import verify_sample
from bench.subjects.trellis import TYPE
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

ENDED, READY = 1, 2
"""The numbers of the two jobs that are copied."""
NUMBERS = "WITH RECURSIVE g(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM g WHERE n + 1 < :copies)"


def preload_sqlite(path: Path, *, ready: int, finished: int) -> str:
    """Make the jobs and prove on a sample that they are what the ledger itself would have made. Returns the address."""
    url = f"sqlite:///{path}"
    asyncio.run(_make_originals(url))
    _copy(path, {ENDED: finished - 1, READY: ready - 1})
    asyncio.run(verify_sample(url, ready + finished))
    return url


async def _make_originals(url: str) -> None:
    """One job that succeeded, and one that waits."""
    submitter, worker = Actor(role=Role.SUBMITTER, name="bench-submitter"), Actor(role=Role.WORKER, name="bench-worker")
    ledger = await open_ledger(url)
    try:
        await ledger.submit(submitter, [NewJob(job_id=_name(number), type=TYPE, payload=b"0") for number in (1, 2)])
        claim = Claim(claim_id=ClaimId("preload"), types=(TypeClaim(type=TYPE),))
        (held,) = (await ledger.turn(Turn(actor=worker, claim=claim))).claimed
        await ledger.turn(Turn(actor=worker, advances=(Advance(held.lease, "running", "complete"),)))
    finally:
        await ledger.close()


def _name(number: int) -> JobId:
    return JobId(f"bench-{number:010d}")


def _copy(path: Path, copies: dict[int, int]) -> None:
    """Copy the rows of each original without the triggers: what they would check holds of a copy as of its original."""
    db: Any = apsw.Connection(str(path))
    try:
        db.execute("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -262144")
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        first, seq = READY + 1, db.execute("SELECT max(seq) + 1 FROM trellis_event").fetchall()[0][0]
        for original, number in copies.items():
            seq = _copy_job(db, original, number, first, seq)
            first += number
        for _, sql in triggers:
            db.execute(sql)
        db.execute("PRAGMA journal_mode = WAL")
    finally:
        db.close()


def _copy_job(db: Any, original: int, copies: int, first: int, seq: int) -> int:
    """Copy a job to the numbers from `first` and its events to the positions from `seq`. Returns the next position."""
    if copies < 1:
        return seq
    (events,) = db.execute("SELECT count(*) FROM trellis_event WHERE job = ?", (original,)).fetchall()[0]
    values = {"copies": copies, "first": first, "seq": seq, "events": events, "original": original}
    last = ":seq + g.n * :events + :events - 1"
    own = {
        "trellis_event": {"seq": ":seq + g.n * :events + o.version - 1", "job": ":first + g.n"},
        "trellis_submission": {"id": ":first + g.n", "job_id": "printf('bench-%010d', :first + g.n)"},
        "trellis_job": {"id": ":first + g.n", "seq": last, "pos": f"iif(o.place = 1, {last}, o.pos)"},
    }
    for table, changed in own.items():
        number = "job" if table == "trellis_event" else "id"
        columns = [name for (_, name, *_) in db.execute(f"PRAGMA table_info({table})")]
        chosen = ", ".join(changed.get(column, f"o.{column}") for column in columns)
        db.execute(f"CREATE TEMP TABLE original AS SELECT * FROM {table} WHERE {number} = ?", (original,))
        db.execute(
            f"{NUMBERS} INSERT INTO {table} ({', '.join(columns)}) SELECT {chosen} FROM g CROSS JOIN original o",
            {name: value for name, value in values.items() if f":{name}" in NUMBERS + chosen},
        )
        db.execute("DROP TABLE temp.original")
    return seq + copies * events

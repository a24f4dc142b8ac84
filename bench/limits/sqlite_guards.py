"""What the SQLite ledger's guards cost: claim + start + complete in batches, by hand and through the ledger.

    python -m bench.limits.sqlite_guards [--jobs 30000] [--batch 500] [--rounds 3] [--folder DIR]

Rounds are interleaved. `CPU` is this process's processor time for one job: on a shared machine it is the steadier figure.
By hand means apsw and prepared batch statements on the ledger's own tables, synchronous=FULL, nothing of our code:

- rows one by one, no guards: executemany of UPDATE and INSERT on tables without triggers and without AUTOINCREMENT
- no guards, guards: one INSERT … SELECT for each batch of equal steps; without and with the triggers
- … without the (type, at) index: the same, and that index dropped
- ledger: `Ledger.turn`, one turn settling a batch and claiming the next
"""

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.ledgers.sqlite.schema import load_contract, migrations
from trellis.lifecycles import Role

LENGTH = 31_000_000
WORKER, SUBMITTER = Actor(role=Role.WORKER, name="worker"), Actor(role=Role.SUBMITTER, name="submitter")
PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "temp_store = MEMORY",
    "cache_size = -65536",
    "wal_autocheckpoint = 4000",
)
TRIGGERS = re.compile(r"^CREATE TRIGGER.*?^(?:END;|BEGIN SELECT[^\n]*END;)$", re.MULTILINE | re.DOTALL)
TYPE_INDEX = re.compile(r"^CREATE INDEX trellis_event_type_at.*?;$", re.MULTILINE)
COLUMNS = "job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait"
ONE = f"INSERT INTO trellis_event ({COLUMNS}) VALUES (?, ?, ?, ?, ?, 9, 1, ?, 0, 0, ?, ?, ?)"
MANY = f"""INSERT INTO trellis_event ({COLUMNS}) SELECT j.id, j.version + 1, ?, ?, ?, 9, 1, j.epoch + ?, j.generation,
  j.attempt, ?, ?, ? FROM json_each(?) w CROSS JOIN trellis_job j ON j.id = w.value"""
MOVE = """UPDATE trellis_job SET state = ?, place = ?, version = version + 1, epoch = ?, length = ?, until = ?, owner = 1
  WHERE id = ? AND state = ? AND epoch = ?"""
MOVES = """UPDATE trellis_job SET state = ?, place = ?, version = version + 1, epoch = epoch + ?, length = ?, until = ?,
  owner = 1 WHERE id IN (SELECT value FROM json_each(?)) AND state = ?"""
READY = """SELECT j.id, j.version, j.epoch, s.job_id, s.payload FROM trellis_job j JOIN trellis_submission s ON s.id = j.id
  WHERE j.place = 1 AND j.type = 1 ORDER BY j.prio, j.pos LIMIT ?"""
# (event type, source, target, epoch raised by, place): claim, start, complete of a leased-job.
STEPS = ((2, 1, 2, 1, 4), (3, 2, 3, 0, 4), (4, 3, 4, 0, 5))


class ByHand:
    """The same writes without our code."""

    def __init__(self, path: Path, *, guards: bool, singly: bool, type_index: bool) -> None:
        schema = migrations()[1]
        schema = schema if guards else TRIGGERS.sub("", schema).replace(" AUTOINCREMENT", "")
        self.db = apsw.Connection(str(path))
        for pragma in PRAGMAS:
            self.db.execute(f"PRAGMA {pragma}").fetchall()
        self.db.execute(schema if type_index else TYPE_INDEX.sub("", schema))
        load_contract(self.db, "")
        self.guards, self.singly = guards, singly

    def submit(self, jobs: int, batch: int) -> None:
        for first in range(1, jobs + 1, batch):
            ids = range(first, first + batch)
            self.db.execute("BEGIN IMMEDIATE")
            self.db.executemany(
                "INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts) VALUES (?, 4, 1, 2, 5)",
                [(i,) for i in ids],
            )
            self.db.executemany(
                "INSERT INTO trellis_submission (id, job_id, created_at, max_attempts, max_deaths, payload)"
                " VALUES (?, ?, 0, 5, 2, ?)",
                [(i, f"job-{i:032d}", b'{"a": 1}') for i in ids],
            )
            self.db.execute(MANY.replace("9, 1,", "10, 1,", 1), (1, 0, 1, 0, 0, 1, None, json.dumps(list(ids))))
            if not self.guards:
                self.db.execute(
                    "UPDATE trellis_job SET state = 1, place = 1, version = 1, pos = id WHERE id BETWEEN ? AND ?",
                    (first, first + batch - 1),
                )
            self.db.execute("COMMIT")

    def drain(self, batch: int) -> None:
        held: list[Any] = []
        while True:
            self.db.execute("BEGIN IMMEDIATE")
            if held:
                self.step(STEPS[2], held)
            held = self.db.execute(READY, (batch,)).fetchall()
            if held:
                self.step(STEPS[0], held)
                self.step(STEPS[1], held)
            self.db.execute("COMMIT")
            if not held:
                return

    def step(self, step: tuple[int, int, int, int, int], held: list[Any]) -> None:
        type_, source, target, raises, place = step
        now = time.time_ns() // 1000
        length = LENGTH if place == 4 else None
        if not self.singly:
            ids = json.dumps([row[0] for row in held])
            self.db.execute(MANY, (type_, source, target, raises, now, place, length, ids))
            if not self.guards:
                self.db.execute(MOVES, (target, place, raises, length, now + LENGTH, ids, source))
            return
        number = target - 1
        self.db.executemany(
            ONE, [(i, v + number, type_, source, target, e + 1, now, place, length) for i, v, e, *_ in held]
        )
        self.db.executemany(
            MOVE,
            [(target, place, e + 1, length, now + LENGTH, i, source, e + 1 - raises) for i, _, e, *_ in held],
        )


def by_hand(**options: bool) -> Callable[[Path, int, int], tuple[float, float]]:
    def run(path: Path, jobs: int, batch: int) -> tuple[float, float]:
        hand = ByHand(path, **options)
        hand.submit(jobs, batch)
        wall, cpu = time.perf_counter(), time.process_time()
        hand.drain(batch)
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def through_the_ledger(path: Path, jobs: int, batch: int) -> tuple[float, float]:
    return asyncio.run(_through_the_ledger(path, jobs, batch))


async def _through_the_ledger(path: Path, jobs: int, batch: int) -> tuple[float, float]:
    ledger = await SqliteLedger.open(f"sqlite:///{path}", clock=time.time)
    for first in range(0, jobs, batch):
        new = [NewJob(job_id=JobId(f"job-{first + i:032d}"), type="t", payload=b'{"a": 1}') for i in range(batch)]
        await ledger.submit(SUBMITTER, new)
    wall, cpu = time.perf_counter(), time.process_time()
    advances: tuple[Advance, ...] = ()
    for number in range(jobs):
        claim = Claim(claim_id=ClaimId(str(number)), types=(TypeClaim(type="t"),), start=batch)
        result = await ledger.turn(Turn(actor=WORKER, advances=advances, claim=claim))
        advances = tuple(Advance(lease=c.lease, source="running", trigger="complete") for c in result.claimed)
        if not advances:
            break
    spent = time.perf_counter() - wall, time.process_time() - cpu
    await ledger.close()
    return spent


VARIANTS = {
    "rows one by one, no guards": by_hand(guards=False, singly=True, type_index=True),
    "no guards": by_hand(guards=False, singly=False, type_index=True),
    "no guards, without the (type, at) index": by_hand(guards=False, singly=False, type_index=False),
    "guards": by_hand(guards=True, singly=False, type_index=True),
    "guards, without the (type, at) index": by_hand(guards=True, singly=False, type_index=False),
    "ledger": through_the_ledger,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the files are made (default: the temporary folder)")
    options = parser.parse_args()
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, run in VARIANTS.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                spent[name].append(run(Path(folder) / "ledger.db", options.jobs, options.batch))
    print(f"{'claim + start + complete':42} {'jobs/s':>8} {'range':>17} {'CPU µs/job':>11}")
    for name, rounds in spent.items():
        rates = sorted(options.jobs / wall for wall, _ in rounds)
        cpu = statistics.median(cpu for _, cpu in rounds) / options.jobs * 1e6
        print(f"{name:42} {statistics.median(rates):8,.0f} {rates[0]:8,.0f}-{rates[-1]:8,.0f} {cpu:11.1f}")


if __name__ == "__main__":
    main()

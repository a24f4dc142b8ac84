"""The hand-written floor on SQLite: apsw, synchronous=FULL, one transaction for each batch."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw

from bench.marks import Marker
from bench.subjects.pacing import batches
from bench.task import Task

SCHEMA = Path(__file__).parent.parent / "floor" / "sqlite.sql"
IDLE_S = 0.005
JOB = "insert into job (payload) values (?) returning id"
EVENT = """insert into event (job, version, at, epoch, owner, attempt, source, target, role)
 values (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
PICK = "select id, version, epoch + 1, attempt, payload from job where state = 1 order by id limit ?"
HELD = "select id, version, epoch, attempt from job where id = ? and epoch = ? and state = 3"


def _open(task: Task) -> apsw.Connection:
    connection = apsw.Connection(task.url)
    connection.set_busy_timeout(10_000)
    for pragma in ("journal_mode = wal", "synchronous = full", "cache_size = -65536", "temp_store = memory"):
        connection.execute(f"pragma {pragma}").fetchall()
    return connection


def setup(task: Task) -> None:
    """Make its schema."""
    _open(task).execute(SCHEMA.read_text(encoding="utf-8"))


def bulk(task: Task) -> float:
    """Submit many in each transaction."""
    connection = _open(task)
    began = time.perf_counter()
    for sent in batches(task.jobs, task.batch):
        _submit(connection, sent)
    return time.perf_counter() - began


def singles(task: Task) -> float:
    """Submit one in each transaction, one after the other."""
    return bulk(replace(task, batch=1))


def _submit(connection: apsw.Connection, sent: Sequence[int]) -> None:
    connection.execute("begin immediate")
    ids = [connection.execute(JOB, (b"%d" % each,)).fetchall()[0][0] for each in sent]
    now = time.time()
    connection.executemany(EVENT, [(job, 1, now, 0, 0, 0, 0, 1, 1) for job in ids])
    connection.execute("commit")


def worker(task: Task) -> None:
    """Transaction after transaction until the process is ended."""
    connection = _open(task)
    mark = Marker(task.folder).mark
    held: list[tuple[int, int]] = []
    while True:
        held = _turn(connection, held, task.batch, mark)
        if not held:
            time.sleep(IDLE_S)


def _turn(
    connection: apsw.Connection, held: list[tuple[int, int]], want: int, mark: Callable[[int], None]
) -> list[tuple[int, int]]:
    """Settle what is held, claim and start the next; the leases of those."""
    owner, now = os.getpid(), time.time()
    connection.execute("begin immediate")
    found: list[Any] = [row for lease in held for row in connection.execute(HELD, lease)]
    connection.executemany(
        EVENT, [(job, version + 1, now, epoch, owner, tries, 3, 4, 2) for job, version, epoch, tries in found]
    )
    taken: list[Any] = connection.execute(PICK, (want,)).fetchall()
    for source in (1, 2):
        connection.executemany(
            EVENT,
            [
                (job, version + source, now, epoch, owner, tries, source, source + 1, 2)
                for job, version, epoch, tries, _ in taken
            ],
        )
    connection.execute("commit")
    for *_, payload in taken:
        mark(int(payload))
    return [(job, epoch) for job, _, epoch, _, _ in taken]

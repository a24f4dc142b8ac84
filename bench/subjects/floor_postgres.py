"""The hand-written floor on PostgreSQL: asyncpg and two functions."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import asyncpg

from bench.marks import Marker
from bench.subjects.pacing import timed
from bench.task import Task

SCHEMA = Path(__file__).parent.parent / "floor" / "postgres.sql"
IDLE_S = 0.005


async def setup(task: Task) -> None:
    """Make its schema."""
    connection = await asyncpg.connect(task.url)
    await connection.execute(SCHEMA.read_text(encoding="utf-8"))
    await connection.close()


async def bulk(task: Task) -> float:
    """Submit many in each call."""
    connection = await asyncpg.connect(task.url)
    statement = await connection.prepare("select floor.submit($1)")
    return await timed(lambda sent: statement.fetch([b"%d" % each for each in sent]), task.jobs, task.batch)


async def singles(task: Task) -> float:
    """Submit one in each call, one after the other."""
    return await bulk(replace(task, batch=1))


async def worker(task: Task) -> None:
    """Turn after turn until the process is ended."""
    connection = await asyncpg.connect(task.url)
    turn = await connection.prepare("select id, epoch, payload from floor.turn($1, $2, $3, $4, $5)")
    mark = Marker(task.folder).mark
    owner, low, held = os.getpid(), 0, []
    while True:
        done = ([row[0] for row in held], [row[1] for row in held]) if held else (None, None)
        held = await turn.fetch(owner, *done, low, task.batch)
        low = max((row[0] for row in held), default=0)
        for row in held:
            mark(int(row[2]))
        if not held:
            await asyncio.sleep(IDLE_S)

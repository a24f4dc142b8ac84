"""Fills a database with a long past and a long queue, fast, by SQL as superuser (`preload.sql`)."""

import asyncio
import random
import re
import sys
from pathlib import Path

import asyncpg

from bench.stores import APPLICATION, Database
from bench.subjects.trellis import TYPE
from trellis.engine.jobs import JobId
from trellis.engine.records import JobHistory
from trellis.engine.verify import check_history
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Role, Trigger, event_code

SQL = Path(__file__).with_name("preload.sql")
PARTITION = 4_194_304
SAMPLE = 200


class PreloadBroken(Exception):
    """A preloaded job does not verify: the schema has changed and the preload has not."""


def preload(database: Database, *, ready: int, finished: int) -> None:
    """Make the jobs and prove on a sample that they are what the ledger itself would have made."""
    asyncio.run(_fill(database, ready, finished))
    asyncio.run(verify_sample(database.url("trellis"), ready + finished))


async def _fill(database: Database, ready: int, finished: int) -> None:
    numbers = _numbers(ready, finished)
    connection = await asyncpg.connect(database.server.url(database.name), server_settings={"search_path": "trellis"})
    try:
        await _make_partitions(connection, ready + finished)
        await connection.execute("set session_replication_role = replica")
        for name, text in _statements():
            print(f"  preload: {name}", file=sys.stderr, flush=True)
            # A table emptied and filled in one transaction needs no WAL where the server's wal_level is minimal.
            async with connection.transaction():
                await connection.execute(_filled(text, numbers))
        await connection.execute("vacuum (freeze, analyze)")
        await connection.execute("checkpoint")
    finally:
        await connection.close()


async def _make_partitions(connection: asyncpg.Connection, jobs: int) -> None:
    """Move the id sequence on step by step: each step makes the partitions of the next ids."""
    for last in (*range(PARTITION, jobs, PARTITION), jobs):
        await connection.execute("select setval(pg_get_serial_sequence('job', 'id'), $1)", last)
        await connection.execute("select trellis._ensure_partitions()")


def _statements() -> list[tuple[str, str]]:
    parts = re.split(r"^-- name: (\w+)\n", SQL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _filled(text: str, numbers: dict[str, object]) -> str:
    for name, value in numbers.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _numbers(ready: int, finished: int) -> dict[str, object]:
    """The codes of one uneventful life of a leased-job, from its lifecycle."""
    lifecycle, state, steps = LIFECYCLES["leased-job"], None, []
    for trigger in (Trigger.SUBMIT, Trigger.CLAIM, Trigger.START, Trigger.COMPLETE):
        step = lifecycle.pull(state, trigger)
        assert step is not None
        role = Role.SUBMITTER if trigger is Trigger.SUBMIT else Role.WORKER
        source = lifecycle.code_of(state) if state else 0
        steps.append((len(steps) + 1, event_code(step.event), source, lifecycle.code_of(step.target), role.code))
        state = step.target
    return {
        "ready": ready,
        "finished": finished,
        "type": TYPE,
        "db_role": APPLICATION,
        "lifecycle": lifecycle.code,
        "submitter": Role.SUBMITTER.code,
        "worker": Role.WORKER.code,
        "waiting": steps[0][3],
        "succeeded": steps[-1][3],
        "steps": ", ".join(f"({', '.join(map(str, step))})" for step in steps),
    }


async def verify_sample(url: str, jobs: int) -> None:
    """Raises PreloadBroken if the ledger would not have made one of the jobs as it is."""
    ledger = await open_ledger(url)
    try:
        for number in sorted(random.sample(range(1, jobs + 1), min(SAMPLE, jobs))):
            job_id = JobId(f"bench-{number:010d}")
            job = await ledger.job(job_id)
            if job is None:
                raise PreloadBroken(job_id)
            found = check_history(JobHistory(job=job, events=tuple(await ledger.events(job_id)), dead_letters=()))
            if found:
                raise PreloadBroken(f"{job_id}: {found[0].detail}")
    finally:
        await ledger.close()

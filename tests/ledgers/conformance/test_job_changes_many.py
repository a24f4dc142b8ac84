"""A change of a hundred among hundreds of thousands of jobs reads through indexes, and never all of them for a batch."""

import time
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER
from trellis.engine.job_changes import (
    ChangeOrder,
    JobChange,
    JobSelection,
    JobToChange,
    changeable_states,
    counts,
)
from trellis.engine.jobs import JobId, NewJob, RequestId
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.ledgers.queries import NamedQueries

OTHERS, MEANT = 200_000, 100
SUBMITTED_AT_ONCE = 1_000


async def fill(ledger: Ledger) -> None:
    for first in range(0, OTHERS, SUBMITTED_AT_ONCE):
        jobs = [NewJob(job_id=JobId(f"o{first + n}"), type="other") for n in range(SUBMITTED_AT_ONCE)]
        await ledger.submit(SUBMITTER, jobs)
        if first == OTHERS // 2:
            await ledger.submit(SUBMITTER, [NewJob(job_id=JobId(f"m{n}"), type="meant") for n in range(MEANT)])


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_hundred_of_two_hundred_thousand_jobs_are_cancelled_without_reading_the_others(
    kind: str, tmp_path: Path, new_postgres_database: Callable[..., str], postgres_template: str
):
    on_server = kind == "postgres"
    url = new_postgres_database(template=postgres_template) if on_server else f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = await open_ledger(url)
    try:
        await fill(ledger)
        await change_some(ledger, kind)
        if on_server:
            await look_at_plans(url)
    finally:
        await ledger.close()


async def look_at_plans(url: str) -> None:
    """No page of a selection reads a whole table: neither that of a rare type, nor the walk over a common one."""
    queries, connection = NamedQueries("trellis.ledgers.postgres:job_selection.sql"), await asyncpg.connect(url)
    try:
        await connection.execute("set search_path to trellis; analyze ready")
        type_ = await connection.fetchval("select id from job_type where name = 'meant'")
        few = await connection.fetch(f"explain {queries.in_places}", type_, [4], [1], ["ready"], 10_001)
        walk = await connection.fetch(f"explain {queries.next_jobs}", 100_000, [4], [1], ["ready"], 2_000)
    finally:
        await connection.close()
    assert "Index Only Scan using ready_claim" in str(few) or "Index Scan using ready_claim" in str(few), few
    assert "Index Only Scan using ready_id" in str(walk) or "Index Scan using ready_id" in str(walk), walk
    assert "Seq Scan on ready" not in str(walk)


async def change_some(ledger: Ledger, kind: str) -> None:
    where = JobSelection(states=changeable_states(JobChange.CANCEL), type="meant")
    began = time.perf_counter()
    page = await ledger.select_jobs(where, limit=500)
    selected_s = time.perf_counter() - began
    assert len(page.jobs) == MEANT
    assert page.cursor is None
    order = ChangeOrder(change=JobChange.CANCEL, request_id=RequestId("many"), selected_by="type=meant")
    changed = await ledger.change_jobs(ADMIN, order, [JobToChange(job.job_id, job.version) for job in page.jobs])
    changed_s = time.perf_counter() - began - selected_s
    assert counts(changed.answers)["changed"] == MEANT
    every, cursor, pages, longest_s = 0, None, 0, 0.0
    began = time.perf_counter()
    while True:
        start = time.perf_counter()
        page = await ledger.select_jobs(JobSelection(states=where.states), limit=500, cursor=cursor)
        longest_s = max(longest_s, time.perf_counter() - start)
        every, cursor, pages = every + len(page.jobs), page.cursor, pages + 1
        if cursor is None:
            break
    walked_s = time.perf_counter() - began
    print(f"{kind}: select {selected_s * 1000:.0f} ms, change {changed_s * 1000:.0f} ms, ", end="")  # noqa: T201
    print(f"{every} of all in {pages} pages, {walked_s:.1f} s, longest {longest_s * 1000:.0f} ms")  # noqa: T201
    assert every == OTHERS
    assert max(selected_s, longest_s) < 2.0, "a page costs what it examines, not what the ledger has"

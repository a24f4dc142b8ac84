"""Lists: jobs by their state where very many have ended, ours beside SQL by hand, and what a list of runs asks the ledger.

    by_ledger(task)     `jobs` lists of each state through the ledger, one after the other
    by_hand(task)       the same page by SQL that is written for its index
    runs(task)          `GET /runs?limit=100` with `jobs` runs, on a fresh store

All report a dictionary of figures.
"""

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import httpx2

import trellis.ledgers.postgres.ledger
import trellis.ledgers.sqlite.ledger
import trellis.storage.objects.local  # noqa: F401 - as above: imported before the gate opens
from bench.subjects import runs as agent_runs
from bench.subjects.gateway import KEY, OPTIONS
from bench.task import LISTED_STATES, Task
from trellis.app.instance import open_instance
from trellis.app.settings import read_settings
from trellis.app.wiring import new_id
from trellis.auth.tokens import issue
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.records import JobFilter
from trellis.gateway import create_app
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.lifecycles.run import RUN
from trellis.runs.orchestrator import TYPE

PAGE = 100
JOB_LIFECYCLE = LIFECYCLES["leased-job"]
ENDED_BY_HAND = """select j.job_id, t.name, a.name, n.state, n.version, n.epoch, n.attempt, n.max_attempts, j.created_at, n.at
  from (select * from trellis.ended where lifecycle = $1 and state = $2 order by lifecycle desc, state desc, id desc limit $3) n
  join trellis.job j using (id) join trellis.job_type t on t.id = j.type left join trellis.actor a on a.id = n.owner
 order by n.id desc"""
IN_FILE = """select s.job_id, t.name, a.name, j.state, j.version, j.epoch, j.attempt, j.max_attempts, s.created_at, e.at
  from (select * from trellis_job where lifecycle = ?1 and state = ?2 and {where} order by {order} limit ?3) j
  join trellis_submission s using (id) join trellis_job_type t on t.id = j.type left join trellis_actor a on a.id = j.owner
  join trellis_event e on e.seq = j.seq order by j.id desc"""
FILE_BY_HAND = {
    "succeeded": IN_FILE.format(where="place = 5", order="id desc"),
    "queued": IN_FILE.format(where="place = 1 and type = 1", order="prio desc, pos desc"),
    "dead_lettered": IN_FILE.format(where="place = 6 and place > 0 and place <> 4 and type = 1", order="id desc"),
}
"""All jobs have one type, so that the indexes of those that wait and of those that died begin where the page does."""
READY_BY_HAND = """select j.job_id, t.name, n.state, n.version, n.epoch, n.attempt, n.max_attempts, j.created_at
  from (select * from trellis.ready where lifecycle = $1 and state = $2 order by id desc limit $3) n
  join trellis.job j using (id) join trellis.job_type t on t.id = j.type
 order by n.id desc"""


async def by_ledger(task: Task) -> dict[str, float]:
    """Milliseconds of a page, of each state."""
    ledger = await open_ledger(task.url)
    try:

        async def page(state: str) -> int:
            return len((await ledger.jobs(JobFilter(state=state), limit=PAGE)).jobs)

        return await _pages_ms(page, task)
    finally:
        await ledger.close()


async def by_hand(task: Task) -> dict[str, float]:
    """The same with one prepared statement for each state, as the owner of the tables."""
    if not task.url.startswith("postgresql://"):
        return await _by_hand_in_file(task)
    connection = await asyncpg.connect(task.url)
    try:
        ended, ready = await connection.prepare(ENDED_BY_HAND), await connection.prepare(READY_BY_HAND)

        async def page(state: str) -> int:
            statement = ready if state == "queued" else ended
            return len(await statement.fetch(JOB_LIFECYCLE.code, JOB_LIFECYCLE.code_of(state), PAGE))

        return await _pages_ms(page, task)
    finally:
        await connection.close()


async def _by_hand_in_file(task: Task) -> dict[str, float]:
    connection = apsw.Connection(task.url, flags=apsw.SQLITE_OPEN_READWRITE)

    async def page(state: str) -> int:
        values = (JOB_LIFECYCLE.code, JOB_LIFECYCLE.code_of(state), PAGE)
        return len(connection.execute(FILE_BY_HAND[state], values).fetchall())

    try:
        return await _pages_ms(page, task)
    finally:
        connection.close()


async def _pages_ms(page: Callable[[str], Awaitable[int]], task: Task) -> dict[str, float]:
    """Medians; states take turns. Raises when a page has other jobs than there are."""
    took: dict[str, list[float]] = {state: [] for state in LISTED_STATES}
    for _ in range(task.jobs + 1):  # the first of each plans its statement
        for state, times in took.items():
            began = time.perf_counter()
            count = await page(state)
            times.append((time.perf_counter() - began) * 1e3)
            if count != (0 if state == "dead_lettered" else PAGE):
                raise AssertionError(f"{count} jobs in a page of {state}")
    return {state: statistics.median(times[1:]) for state, times in took.items()}


# --- runs ----------------------------------------------------------------------------------------------------------


class _CountedLedger:
    """The same ledger; counts how often one of its methods is used."""

    def __init__(self, ledger: Any) -> None:
        self._ledger, self.calls = ledger, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._ledger, name)


async def runs(task: Task) -> dict[str, float]:
    """Ledger calls and milliseconds of a page of runs, half of which have ended."""
    await agent_runs.bulk(task)
    folder = Path(task.objects)
    settings = read_settings({"TRELLIS_OBJECTS": folder.as_uri(), "TRELLIS_MEMORY": f"{folder}/memory.git"}, folder)
    async with open_instance(settings, task.url) as instance:
        await instance.plant()
        await _end_half(instance.ledger, task.jobs)
        counted: Any = _CountedLedger(instance.ledger)
        app = create_app(
            replace(instance, ledger=counted), [KEY], monotonic=time.monotonic, new_id=new_id, options=OPTIONS
        )
        token = issue(KEY, name="bench", roles=[Role.OWNER], ttl_s=3_600, now=time.time())
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://bench", headers={"Authorization": f"Bearer {token}"}
        )
        async with client:
            await _page_of_runs(client, task.jobs)  # what is made at the first request
            counted.calls, began = 0, time.perf_counter()
            await _page_of_runs(client, task.jobs)
            return {"calls": counted.calls, "ms": (time.perf_counter() - began) * 1e3}


async def _page_of_runs(client: httpx2.AsyncClient, there: int) -> None:
    answer = await client.get("/runs", params={"limit": PAGE})
    listed = answer.raise_for_status().json()["items"]
    if len(listed) != min(PAGE, there):
        raise AssertionError(f"{len(listed)} runs in a page, and there are {there}")


async def _end_half(ledger: Any, count: int) -> None:
    actor = Actor(role=Role.ORCHESTRATOR, name="bench")
    claim = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type=TYPE),), start=count // 2, lifecycle=RUN.name)
    held = (await ledger.turn(Turn(actor=actor, claim=claim))).claimed
    done = tuple(Advance(lease=one.lease, source=one.state, trigger=Trigger.COMPLETE) for one in held)
    await ledger.turn(Turn(actor=actor, advances=done))

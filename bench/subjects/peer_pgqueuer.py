"""PgQueuer, as its own documents use it: asyncpg, uvloop, a large dequeue batch."""

import asyncpg
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries  # pyright: ignore[reportMissingImports]

from bench.marks import Marker
from bench.subjects.pacing import at_pace, many_callers, timed
from bench.task import Task

ENTRYPOINT = "noop"


async def setup(task: Task) -> None:
    """Install its tables."""
    connection = await asyncpg.connect(task.url)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def _queries(task: Task) -> Queries:
    size = max(1, task.concurrency)
    return Queries(AsyncpgPoolDriver(await asyncpg.create_pool(task.url, min_size=size, max_size=size)))


async def bulk(task: Task) -> float:
    """Enqueue many in each call."""
    queries = await _queries(task)

    async def send(sent: list[int]) -> None:
        await queries.enqueue([ENTRYPOINT] * len(sent), [b"%d" % each for each in sent], [0] * len(sent))

    return await timed(send, task.jobs, task.batch)


async def singles(task: Task) -> float:
    """Enqueue one in each call, a connection for every caller."""
    queries = await _queries(task)
    return await many_callers(lambda sent: queries.enqueue(ENTRYPOINT, b"%d" % sent), task.jobs, task.concurrency)


async def paced(task: Task) -> None:
    """Enqueue on a beat."""
    queries = await _queries(task)
    await at_pace(lambda sent: queries.enqueue(ENTRYPOINT, b"%d" % sent), task.jobs, task.per_s)


async def worker(task: Task) -> None:
    """Its queue manager."""
    manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(task.url)))
    mark = Marker(task.folder).mark

    @manager.entrypoint(ENTRYPOINT)
    async def noop(job: Job) -> None:
        mark(int(job.payload or b"0"))

    await manager.run(batch_size=task.batch)

"""Plain request and reply over NATS: one process answers, with the server beside it, another asks. Nothing is durable."""

import asyncio
import json
import time
from typing import Any

import nats

from bench.measures import percentile
from bench.processes import cpu_s
from bench.subjects.bus import ROUND_TRIP_S_MAX, WARM_UP
from bench.task import Task
from tests.servers.nats import NatsServer

SUBJECT = "bench.request"
BODY = json.dumps({"job_id": "0" * 36, "topic": "job.bench"}).encode()


async def worker(task: Task) -> None:
    """Answer until ended."""
    server = NatsServer.start(jetstream=True)
    connection = await nats.connect(server.url)

    async def answer(message: Any) -> None:
        await message.respond(message.data)

    await connection.subscribe(SUBJECT, cb=answer)
    await connection.flush()
    task.write_place(url=server.url)
    await asyncio.Event().wait()


async def many(task: Task) -> dict[str, float]:
    """`jobs` round trips, `concurrency` at once."""
    place = task.read_place()
    connection = await nats.connect(place["url"])
    at_once = asyncio.Semaphore(task.concurrency)

    async def one() -> float:
        async with at_once:
            began = time.perf_counter()
            await connection.request(SUBJECT, BODY, timeout=ROUND_TRIP_S_MAX)
            return time.perf_counter() - began

    try:
        for _ in range(WARM_UP):
            await one()
        used, began = cpu_s([place["pid"]]), time.perf_counter()
        took = await asyncio.gather(*(one() for _ in range(task.jobs)))
        seconds = time.perf_counter() - began
        used = cpu_s([place["pid"]]) - used
    finally:
        await connection.close()
    return {
        "per_s": task.jobs / seconds,
        "cpu_ms": used / task.jobs * 1e3,
        "p50_ms": percentile(took, 0.5) * 1e3,
        "p99_ms": percentile(took, 0.99) * 1e3,
    }


alone = many

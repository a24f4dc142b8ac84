"""Jobs over the bus: one process is the control plane, with a NATS server beside it; another is a client of the CAP SDK and a worker.

    worker(task)           the control plane, until ended; writes where the bus is beside the marks
    sdk(task)              `jobs` round trips, `concurrency` at once, through a worker of the unmodified SDK (`run_worker`)
    ours(task)             the same through our own worker, which asks before it begins and has its results answered
    sdk_alone, ours_alone  the same one after the other

A round trip is the client's: its submit on the bus to the result under its own id. What lies between dispatch and result is taken from
the ledger's own events.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import cap
import nats
from cap.pb.cordum.agent.v1 import buspacket_pb2 as _packets
from cap.pb.cordum.agent.v1 import job_pb2 as _jobs

from bench.measures import percentile
from bench.processes import cpu_s
from bench.task import Task
from tests.servers.nats import NatsServer
from trellis import App
from trellis.app.wiring import SystemClock, new_id
from trellis.bus.messages import RESULT
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.safety.policy import ALLOW_ALL_POLICY
from trellis.bus.services import BusDependencies, BusServices
from trellis.bus.topics import Topics
from trellis.bus.wire import BusOptions, open_bus
from trellis.cli.long_running import tune_server
from trellis.engine.jobs import JobId
from trellis.engine.service import serve
from trellis.ledgers import open_ledger
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

buspacket_pb2: Any = _packets
job_pb2: Any = _jobs
TOPIC = "job.bench"
WARM_UP = 20
ROUND_TRIP_S_MAX = 120.0
PARALLEL = 64
EVENTS_AT_ONCE = 16


async def worker(task: Task) -> None:
    """The control plane: scheduler and reconciler."""
    tune_server()
    server, ledger = NatsServer.start(jetstream=True), await open_ledger(task.url)
    options = BusOptions(url=server.url)
    bus = await open_bus(options, clock=SystemClock(), now=lambda: datetime.now(UTC), new_id=new_id)
    parts = BusDependencies(
        ledger=ledger,
        bus=bus,
        topics=Topics.model_validate({"topics": {TOPIC: {"idempotent": True}}}),
        kernel=PolicyKernel(ALLOW_ALL_POLICY),
        clock=SystemClock(),
        new_id=new_id,
        name="bench",
    )
    services = BusServices(parts)
    await services.start()
    task.write_place(url=server.url)
    rng = random.Random(1)
    await asyncio.gather(*(serve(one, SystemClock(), rng, asyncio.Event()) for one in services.services))


async def sdk(task: Task) -> dict[str, float]:
    """Through the SDK's own worker loop, which does one job at a time."""
    place = task.read_place()

    async def handler(_: Any) -> Any:
        return job_pb2.JobResult(status=job_pb2.JOB_STATUS_SUCCEEDED)

    serving = asyncio.ensure_future(cap.run_worker(place["url"], TOPIC, handler, sender_id="bench-sdk"))
    try:
        return await _measured(task, place)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def ours(task: Task) -> dict[str, float]:
    """Through our own worker."""
    place, app = task.read_place(), App()

    @app.job(TOPIC)
    async def handler(ctx: Any, payload: None) -> None:
        """Nothing."""

    bus = await open_bus(
        BusOptions(url=place["url"], sender_id="bench-ours"),
        clock=SystemClock(),
        now=lambda: datetime.now(UTC),
        new_id=new_id,
    )
    options = BusWorkerOptions(max_parallel_jobs=PARALLEL)
    async with BusWorker(app, bus, options, clock=SystemClock(), new_id=new_id, resolver=_NoPointers()):
        return await _measured(task, place)


sdk_alone, ours_alone = sdk, ours


class _NoPointers:
    """There is nothing to read, and a result of nothing is kept nowhere."""

    async def read(self, pointer: str) -> bytes:
        raise AssertionError(pointer)

    async def write(self, job_id: str, body: bytes) -> str:
        return f"objects://{job_id}/{len(body)}"


# --- the client ----------------------------------------------------------------------------------------------------


class _Client:
    """Submits with the SDK and hears results."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._waiting: dict[str, asyncio.Future[int]] = {}

    async def heard(self, message: Any) -> None:
        packet = buspacket_pb2.BusPacket.FromString(message.data)
        waiting = self._waiting.pop(packet.job_result.job_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(packet.job_result.status)

    async def round_trip(self, job_id: str) -> float:
        began = time.perf_counter()
        done = self._waiting[job_id] = asyncio.get_running_loop().create_future()
        await cap.submit_job(self._connection, job_pb2.JobRequest(job_id=job_id, topic=TOPIC), job_id, "bench-client")
        status = await asyncio.wait_for(done, ROUND_TRIP_S_MAX)
        if status != job_pb2.JOB_STATUS_SUCCEEDED:
            raise AssertionError(f"{job_id} ended with status {status}")
        return time.perf_counter() - began


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncGenerator[_Client]:
    connection = await nats.connect(url)
    client = _Client(connection)
    await connection.subscribe(RESULT, cb=client.heard)
    await connection.flush()
    try:
        yield client
    finally:
        await connection.close()


async def _measured(task: Task, place: dict[str, Any]) -> dict[str, float]:
    """Rate with `concurrency` at once, latency of the client and between dispatch and result."""
    async with _client(place["url"]) as client:
        for _ in range(WARM_UP):
            await client.round_trip(new_id())
        names, at_once = [new_id() for _ in range(task.jobs)], asyncio.Semaphore(task.concurrency)

        async def one(name: str) -> float:
            async with at_once:
                return await client.round_trip(name)

        used, began = cpu_s([place["pid"]]), time.perf_counter()
        took = await asyncio.gather(*(one(name) for name in names))
        seconds = time.perf_counter() - began
        used = cpu_s([place["pid"]]) - used
    between = await _dispatch_to_result_s(task.url, names)
    return {
        "per_s": task.jobs / seconds,
        "cpu_ms": used / task.jobs * 1e3,
        "p50_ms": percentile(took, 0.5) * 1e3,
        "p99_ms": percentile(took, 0.99) * 1e3,
        "dispatch_p50_ms": percentile(between, 0.5) * 1e3,
        "dispatch_p99_ms": percentile(between, 0.99) * 1e3,
    }


async def _dispatch_to_result_s(url: str, names: list[str]) -> list[float]:
    """By the ledger's clock: from the event that hands a job out to the one that ends it."""
    ledger, at_once = await open_ledger(url), asyncio.Semaphore(EVENTS_AT_ONCE)

    async def one(name: str) -> float:
        async with at_once:
            at = {event.type: event.ts for event in await ledger.events(JobId(name))}
        return (at["job_succeeded"] - at["job_dispatched"]).total_seconds()

    try:
        return await asyncio.gather(*(one(name) for name in names))
    finally:
        await ledger.close()

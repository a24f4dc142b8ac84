"""The processes on a bus that is made to misbehave: control planes, our workers, and workers of the unmodified CAP SDK.

Each is forked from a nursery that has imported everything. A handler tells of its effect in one write with O_APPEND, at the moment it has
it: so what ran is known of every process, also of one that is killed.
"""

import asyncio
import json
import logging
import os
import random
import signal
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cap.pb.cordum.agent.v1 import job_pb2
from cap.runtime import Agent
from cap.worker import run_worker

from tests.faults.nursery import tend
from tests.stopped_tasks import stopped
from trellis.app.wiring import SystemClock, new_id
from trellis.bus.messages import JOB_ID_IN_ENV
from trellis.bus.pointers import make_pointers
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.services import BusDependencies, BusRole, BusServices
from trellis.bus.topics import Topics
from trellis.bus.wire import (
    BusOptions,
    nats,  # noqa: F401 - imported before the fork
    open_bus,
)
from trellis.engine.jobs import Actor, Move, Moved, NotMoved
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.service import Sweeper, serve
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.storage.objects.open import open_objects
from trellis.worker.app import App
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.reports import BusReporter, ControlAnswer
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

PLANE, OURS, SDK_WORKER, SDK_AGENT = "plane", "ours", "sdk-worker", "sdk-agent"
ONCE, AGAIN, SILENT = "job.ours.once", "job.ours.again", "job.silent"
"""Topics of our workers, not idempotent and idempotent; and one at which somebody listens who never says a word."""
PLAIN, AGENTS = "job.sdk.plain", "job.sdk.agent"
SWEEP_S = 0.25
HEARTBEAT_S = 1.0
pb: Any = job_pb2


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How a process behaves; passed as JSON."""

    url: str
    """Of the ledger."""
    trace: str
    name: str
    part: str
    bus: str
    topics: dict[str, Any] = field(default_factory=dict[str, Any])
    roles: tuple[str, ...] = tuple(BusRole)
    parallel: int = 8
    ask_s: float = 1.0
    hold_s: float = 0.0
    """How long a handler takes, before and after its effect."""
    asks: bool = True
    """False makes a worker that begins without asking: the proof must notice."""
    minds_others: bool = True
    """False makes a scheduler that hands out what another has handed out already: the proof must notice."""

    async def open_bus(self, sender_id: str) -> Any:
        options = BusOptions(url=self.bus, sender_id=sender_id)
        return await open_bus(options, clock=SystemClock(), now=lambda: datetime.now(UTC), new_id=new_id)


class Trace:
    """What was done, by whom."""

    def __init__(self, orders: Orders) -> None:
        self._fd = os.open(orders.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._hold_s = orders.hold_s

    def note(self, op: str, job: str = "", what: str = "") -> None:
        line = {"op": op, "job": job, "epoch": 0, "pid": os.getpid(), "at": time.monotonic(), "what": what}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    async def effect(self, job: str, wire_id: str) -> None:
        """What a handler does in the world."""
        await asyncio.sleep(self._hold_s)
        self.note("effect", job, wire_id)
        await asyncio.sleep(self._hold_s)


class Careless:
    """A ledger that says of every handing-out that it was made, also of one that another process has made."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def move(self, actor: Actor, move: Move) -> Moved | NotMoved:
        answer = await self._ledger.move(actor, move)
        if isinstance(answer, Moved) or move.target != "DISPATCHED":
            return answer
        holds = await self._ledger.holds([move.job_id])
        if not holds:
            return answer
        return Moved(
            job_id=move.job_id,
            source="SCHEDULED",
            target=move.target,
            version=holds[0].version,
            lease=holds[0].lease,
        )


async def be_plane(orders: Orders, trace: Trace, stop: asyncio.Event) -> None:
    """A process of the control plane, as `trellis up` makes it, with a sweep as short beside the leases as it is in production."""
    clock, rng = SystemClock(), random.Random(orders.name)
    ledger: Any = await open_ledger(orders.url)
    if not orders.minds_others:
        ledger = Careless(ledger)
    bus = await orders.open_bus("trellis")
    services = BusServices(
        BusDependencies(
            ledger=ledger,
            bus=bus,
            topics=Topics.model_validate({"topics": orders.topics}),
            kernel=PolicyKernel(),
            clock=clock,
            new_id=new_id,
            name=orders.name,
        ),
        frozenset(map(BusRole, orders.roles)),
    )
    serving: list[Any] = list(services.services)
    if BusRole.RECONCILER in orders.roles:
        sweeping = SweepOptions(interval_s=SWEEP_S)
        serving.append(Sweeper(ledger=ledger, actor=Actor(role=Role.SWEEPER, name=orders.name), options=sweeping))
    await services.start()
    trace.note("opened", what=orders.name)
    try:
        await asyncio.gather(*(serve(service, clock, rng, stop) for service in serving))
    finally:
        await services.stop()
        await bus.close()
        await ledger.close()


async def be_ours(orders: Orders, trace: Trace, stop: asyncio.Event) -> None:
    app = App(testing=True)

    async def work(ctx: BusContext) -> None:
        await trace.effect(ctx.job_id, ctx.request.job_id)

    if not orders.asks:
        BusReporter.may_start = _always  # type: ignore[method-assign]
    app.job(ONCE)(work)
    app.job(AGAIN)(work)
    objects = await open_objects(f"file://{Path(orders.trace).parent / 'objects'}")
    bus = await orders.open_bus(orders.name)
    options = BusWorkerOptions(
        max_parallel_jobs=orders.parallel, heartbeat_s=HEARTBEAT_S, ask_s=orders.ask_s, drain_s=1.0
    )
    pointers = make_pointers(objects, None)
    async with BusWorker(app, bus, options, clock=SystemClock(), new_id=new_id, resolver=pointers):
        trace.note("opened", what=orders.name)
        await stop.wait()
    await bus.close()
    await objects.close()


async def _always(*_: object) -> ControlAnswer:
    return ControlAnswer.YES


async def be_sdk_worker(orders: Orders, trace: Trace, stop: asyncio.Event) -> None:
    async def handle(request: Any) -> Any:
        await trace.effect(request.env[JOB_ID_IN_ENV], request.job_id)
        return pb.JobResult(job_id=request.job_id, status=pb.JOB_STATUS_SUCCEEDED)

    running = asyncio.create_task(run_worker(orders.bus, PLAIN, handle, sender_id=orders.name))
    trace.note("opened", what=orders.name)
    await stop.wait()
    running.cancel()
    await stopped(running)


class Contexts:
    """A store in which every context is there."""

    async def get(self, key: str) -> bytes | None:
        return json.dumps({"key": key}).encode()

    async def set(self, key: str, data: bytes) -> None:
        """Results are looked at elsewhere."""

    async def close(self) -> None:
        """Nothing is held."""


async def be_sdk_agent(orders: Orders, trace: Trace, stop: asyncio.Event) -> None:
    agent = Agent(
        nats_url=orders.bus,
        store=Contexts(),
        worker_id=orders.name,
        max_parallel=orders.parallel,
        heartbeat_interval=HEARTBEAT_S,
    )

    @agent.job(AGENTS)
    async def handle(context: Any, _: Any) -> dict[str, str]:
        await trace.effect(context.job.env[JOB_ID_IN_ENV], context.job_id)
        return {}

    await agent.start()
    trace.note("opened", what=orders.name)
    await stop.wait()
    await agent.close()


BE = {PLANE: be_plane, OURS: be_ours, SDK_WORKER: be_sdk_worker, SDK_AGENT: be_sdk_agent}


async def main(orders: Orders) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await BE[orders.part](orders, Trace(orders), stop)
    return 0


def be(orders: dict[str, Any]) -> int:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("trellis.worker").setLevel(logging.INFO)
    return asyncio.run(main(Orders(**orders)))


if __name__ == "__main__":
    tend(be)

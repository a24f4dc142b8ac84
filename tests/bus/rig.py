"""A scheduler on a bench: a real ledger and a bus of one process, on clocks that only a test moves, and workers that do what a test says.

job_id = await rig.submit(topic="job.code")
worker = await rig.worker("w1", "job.code")
await rig.run()
assert worker.orders and await rig.state(job_id) == "DISPATCHED"
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from tests.ledgers.conformance.opening import postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import Rig as Bench
from tests.servers.postgres import PostgresServer
from trellis.bus.errors import BusUnavailable, KernelUnavailable
from trellis.bus.messages import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    Handshake,
    JobOrder,
    JobResult,
    OnRefused,
    Packet,
    PacketBody,
    Status,
    WorkerHeartbeat,
    direct_subject,
)
from trellis.bus.port import BusSubscription, PacketHandler, ReceivedPacket
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.safety.policy import DecisionKind, SafetyDecision
from trellis.bus.scheduling.dispatch_policy import DispatchOutcome, SchedulerOptions, SchedulerReport
from trellis.bus.scheduling.registry import WorkerRegistry
from trellis.bus.scheduling.scheduler import Scheduler
from trellis.bus.topics import Topics
from trellis.bus.wire.local import LocalBus
from trellis.engine.jobs import RESERVED_ID_PATTERN, Actor, JobId, Mismatch, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, SweepOptions
from trellis.lifecycles import Role
from trellis.testing import FakeClock

TOPIC = "job.test"
SENDER = "trellis"
POLICY = "policy-1"
TURNS = 50
PATIENCE_S = 30.0
PASSES_MAX = 1_000
Check = Callable[[JobRequest], SafetyDecision]


def decision(request: JobRequest, kind: DecisionKind = DecisionKind.ALLOW, **said: Any) -> SafetyDecision:
    told: dict[str, Any] = {"rule": "test", "reason": f"{kind} it", "policy_hash": POLICY} | said
    return SafetyDecision(kind=kind, job_hash=request.hash, **told)


@dataclass
class ScriptedKernel:
    """Allows everything, unless the test says otherwise."""

    answer: Check = decision
    away: bool = False
    asked: list[str] = field(default_factory=list[str])

    async def check(self, request: JobRequest) -> SafetyDecision:
        self.asked.append(request.job_id)
        if self.away:
            raise KernelUnavailable(detail="it is away")
        return self.answer(request)

    def says(self, kind: DecisionKind, **said: Any) -> None:
        self.answer = lambda request: decision(request, kind, **said)


class Switched:
    """A bus that a test can switch off; everything else is the bus's own."""

    def __init__(self, bus: LocalBus) -> None:
        self._bus = bus
        self.url, self.sender_id = bus.url, bus.sender_id
        self.on_refused: OnRefused | None = None
        self.down = False
        self.published: list[tuple[str, PacketBody]] = []
        self.message_ids: list[str | None] = []
        self.before: Callable[[str, PacketBody], None] | None = None
        """Called before a packet goes out; what it raises, publishing raises."""
        self.after: Callable[[str, PacketBody], None] | None = None
        """Called when a packet has gone out; what it raises, publishing raises all the same."""

    @property
    def connected(self) -> bool:
        return not self.down and self._bus.connected

    async def publish(
        self,
        subject: str,
        body: PacketBody,
        *,
        trace_id: str,
        message_id: str | None = None,
        needs_listener: bool = False,
        kept: bool = False,
    ) -> None:
        if self.before is not None:
            self.before(subject, body)
        self._check()
        how = {"message_id": message_id, "needs_listener": needs_listener, "kept": kept}
        await self._bus.publish(subject, body, trace_id=trace_id, **how)  # type: ignore[arg-type]
        self.published.append((subject, body))
        self.message_ids.append(message_id)
        if self.after is not None:
            self.after(subject, body)

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        self._check()
        return await self._bus.ask(subject, body, trace_id=trace_id, timeout_s=timeout_s)

    async def listen(
        self,
        subject: str,
        handler: PacketHandler,
        *,
        group: str | None = None,
        durable: bool = False,
        alerts: bool = True,
        echoes: bool = True,
    ) -> BusSubscription:
        return await self._bus.listen(subject, handler, group=group, durable=durable, alerts=alerts, echoes=echoes)

    async def close(self) -> None:
        await self._bus.close()

    @property
    def orders(self) -> list[JobOrder]:
        """Every order that went out here."""
        return [body for _, body in self.published if isinstance(body, JobOrder)]

    def _check(self) -> None:
        if self.down:
            raise BusUnavailable(url=self.url, detail="it is switched off")


@dataclass
class ScriptedWorker:
    """A worker that keeps what it gets. It says nothing by itself."""

    worker_id: str
    bus: LocalBus
    orders: list[JobOrder] = field(default_factory=list[JobOrder])
    listening: list[BusSubscription] = field(default_factory=list[BusSubscription])
    _got: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def has(self, number: int) -> None:
        """Wait until it has got so many orders."""
        async with asyncio.timeout(PATIENCE_S), self._got:
            await self._got.wait_for(lambda: len(self.orders) >= number)

    async def listen(self, *topics: str, direct: bool = True) -> None:
        for topic in topics:
            self.listening.append(await self.bus.listen(topic, self._take, group=topic))
        if direct:
            self.listening.append(await self.bus.listen(direct_subject(self.worker_id), self._take))

    async def leave(self) -> None:
        """It is gone, without a word."""
        while self.listening:
            await self.listening.pop().stop()

    async def beat(self, **said: Any) -> None:
        await self._say(HEARTBEAT, WorkerHeartbeat(worker_id=self.worker_id, **said))

    async def shake(self, *topics: str, **said: Any) -> None:
        await self._say(HANDSHAKE, Handshake(component_id=self.worker_id, ready_topics=topics, **said))

    async def finish(self, order: JobOrder, status: Status = Status.SUCCEEDED, **said: Any) -> None:
        result = JobResult(job_id=order.request.job_id, status=status, worker_id=self.worker_id, **said)
        await self._say(RESULT, result)

    @property
    def jobs(self) -> list[str]:
        """The plain ids of what it got."""
        return [order.request.env["job_id"] for order in self.orders]

    async def _take(self, received: ReceivedPacket) -> None:
        assert isinstance(received.packet.body, JobOrder)
        async with self._got:
            self.orders.append(received.packet.body)
            self._got.notify_all()

    async def _say(self, subject: str, body: PacketBody) -> None:
        await self.bus.publish(subject, body, trace_id="t-worker")
        await quiet()


async def quiet() -> None:
    """Let everything in this process have its turn."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


@dataclass(kw_only=True)
class Rig:
    """What a test works with."""

    bench: Bench
    ledger: Ledger
    bus: Switched
    clock: FakeClock
    topics: Topics
    kernel: ScriptedKernel
    workers: WorkerRegistry
    scheduler: Scheduler
    numbers: "count[int]" = field(default_factory=lambda: count(1))
    made: list[LocalBus] = field(default_factory=list[LocalBus])

    # --- what is asked ---------------------------------------------------------------------------------------------

    async def submit(self, topic: str = TOPIC, *, job_id: str | None = None, by: str = "gateway", **fields: Any) -> str:
        """A job by the gateway, or by somebody else, which is PENDING then."""
        said = {"job_id": job_id or f"j{next(self.numbers)}", "topic": topic, **fields}
        answer = await self.put(JobRequest.checked(said), by=by, role=Role.GATEWAY)
        assert isinstance(answer, Submitted)
        assert answer.created
        return answer.job_id

    async def put(
        self, request: JobRequest, *, by: str = "gateway", role: Role | None = None, **how: Any
    ) -> Submitted | Mismatch:
        """A request as it is, also with labels and ids that only the engine may give."""
        role = role or (Role.RECONCILER if re.search(RESERVED_ID_PATTERN, request.job_id) else Role.GATEWAY)
        job = new_bus_job(request, self.topics, trace_id=f"t-{request.job_id}", **how)
        (answer,) = await self.ledger.submit(Actor(role=role, name=by), [job])
        return answer

    async def submit_many(self, number: int, topic: str = TOPIC, **fields: Any) -> list[str]:
        requests = [
            JobRequest.checked({"job_id": f"m{next(self.numbers)}", "topic": topic, **fields}) for _ in range(number)
        ]
        jobs = [new_bus_job(request, self.topics, trace_id="t-many") for request in requests]
        for start in range(0, number, 1_000):
            await self.ledger.submit(Actor(role=Role.GATEWAY, name="gateway"), jobs[start : start + 1_000])
        return [request.job_id for request in requests]

    # --- what is there ---------------------------------------------------------------------------------------------

    async def job(self, job_id: str) -> Job:
        found = await self.ledger.job(JobId(job_id))
        assert found is not None
        return found

    async def state(self, job_id: str) -> str:
        return (await self.job(job_id)).state

    async def events(self, job_id: str) -> list[Event]:
        return await self.ledger.events(JobId(job_id))

    async def path(self, job_id: str) -> list[str]:
        """The types of its events."""
        return [event.type for event in await self.events(job_id)]

    async def said(self, job_id: str, type_: str) -> Mapping[str, Any]:
        """What the last event of this type says."""
        found = [event for event in await self.events(job_id) if event.type == type_]
        assert found, f"{job_id} has no {type_}"
        return json.loads(found[-1].data or b"{}")

    # --- what happens ----------------------------------------------------------------------------------------------

    async def run(self) -> SchedulerReport:
        """Passes until one brings nothing on; what they did together. Time stands still."""
        did: Counter[DispatchOutcome] = Counter()
        for _ in range(PASSES_MAX):
            report = await self.scheduler.run_once()
            did.update(report.did)
            if not report.moved:
                await quiet()
                return SchedulerReport(did=did, bus_away=report.bus_away)
        raise AssertionError("the scheduler does not come to rest")

    async def advance(self, seconds: float) -> None:
        """Move every clock and let what is due happen."""
        self.clock.advance(seconds)
        await self.bench.advance(seconds)
        await self.sweep()
        await quiet()

    async def sweep(self) -> None:
        await self.ledger.sweep(Actor(role=Role.SWEEPER, name="sweeper"), SweepOptions(elect=False))

    # --- who is there ----------------------------------------------------------------------------------------------

    def sender(self, name: str) -> LocalBus:
        """Somebody else on the same bus."""
        made = self.bus._bus.sibling(name)
        self.made.append(made)
        return made

    async def worker(
        self, worker_id: str, *topics: str, direct: bool = True, beats: Mapping[str, Any] | None = None
    ) -> ScriptedWorker:
        """One that listens on these topics; with `beats` it has sent such a heartbeat."""
        worker = ScriptedWorker(worker_id, self.sender(worker_id))
        await worker.listen(*topics, direct=direct)
        if beats is not None:
            await worker.beat(**beats)
        return worker

    async def another(self, name: str) -> Scheduler:
        """The scheduler of another process: it has its own view of the ledger and its own workers."""
        bus = Switched(self.sender(SENDER))
        workers = WorkerRegistry(clock=self.clock)
        await workers.listen(bus)
        return _scheduler(await self.bench.open_another(), bus, workers, self, name)


@asynccontextmanager
async def rigged(
    topics: Topics, folder: Path, server: PostgresServer | None = None, options: SchedulerOptions | None = None
) -> AsyncGenerator[Rig]:
    """A rig on a fresh ledger: SQLite in this folder, or a database of this server."""
    clock = FakeClock()
    opening = sqlite_rig(folder / "ledger.db") if server is None else postgres_rig(server, "postgres")
    async with opening as bench:
        bus = Switched(LocalBus(SENDER, clock=clock, now=lambda: datetime.fromtimestamp(clock(), UTC)))
        workers, kernel = WorkerRegistry(clock=clock), ScriptedKernel()
        await workers.listen(bus)
        scheduler = Scheduler(
            ledger=bench.ledger,
            actor=Actor(role=Role.SCHEDULER, name="scheduler-1"),
            bus=bus,
            workers=workers,
            topics=topics,
            kernel=kernel,
            clock=clock,
            new_id=_ids("scheduler-1"),
            options=options or SchedulerOptions(),
        )
        rig = Rig(
            bench=bench,
            ledger=bench.ledger,
            bus=bus,
            clock=clock,
            topics=topics,
            kernel=kernel,
            workers=workers,
            scheduler=scheduler,
        )
        yield rig
        await scheduler.drain()
        for made in (*rig.made, bus):
            await made.close()
        report = await bench.verify()
        assert report.ok, "\n".join(map(str, report.violations[:20]))


def _scheduler(ledger: Ledger, bus: Switched, workers: WorkerRegistry, rig: Rig, name: str) -> Scheduler:
    return Scheduler(
        ledger=ledger,
        actor=Actor(role=Role.SCHEDULER, name=name),
        bus=bus,
        workers=workers,
        topics=rig.topics,
        kernel=rig.kernel,
        clock=rig.clock,
        new_id=_ids(name),
        options=rig.scheduler.options,
    )


def _ids(name: str) -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"{name}-{next(numbers)}"

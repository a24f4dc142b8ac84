"""A worker on the local bus with a control plane that answers as the test says, and a clock that moves when the test moves it."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from trellis.bus.errors import BusUnavailable, PointerGone, PointerUnknown
from trellis.bus.messages import (
    ASK_FIRST,
    HANDSHAKE,
    HEARTBEAT,
    JOB_ID_IN_ENV,
    PROGRESS,
    RESULT,
    START_STEP,
    Dispatch,
    Handshake,
    JobCancel,
    JobOrder,
    JobProgress,
    JobResult,
    OnRefused,
    Packet,
    PacketBody,
    Status,
    WorkerHeartbeat,
    direct_subject,
)
from trellis.bus.port import BusSubscription, PacketHandler, ReceivedPacket
from trellis.bus.requests import JobRequest, wire_id
from trellis.bus.wire.local import LocalBus
from trellis.engine.jobs import Epoch, JobId
from trellis.testing import EPOCH_S, FakeClock
from trellis.worker.app import App
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions, PointerAccess

PATIENCE_S = 60.0
WORKER = "w-1"
TOPIC = "job.echo"
Answer = Callable[[JobProgress | JobResult], str | None]


class Kept:
    """Pointers of the scheme `mem`, in memory."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.failing: list[Exception] = []
        """What the next calls raise."""

    def put(self, value: Any) -> str:
        pointer = f"mem://{len(self.bodies)}"
        self.bodies[pointer] = json.dumps(value).encode()
        return pointer

    def value(self, pointer: str) -> Any:
        return json.loads(self.bodies[pointer])

    async def read(self, pointer: str) -> bytes:
        self._fail()
        if not pointer.startswith("mem://"):
            raise PointerUnknown(scheme=pointer.partition(":")[0], known="mem")
        if pointer not in self.bodies:
            raise PointerGone(pointer=pointer)
        return self.bodies[pointer]

    async def write(self, job_id: str, body: bytes) -> str:
        self._fail()
        self.bodies[f"mem://res/{job_id}"] = body
        return f"mem://res/{job_id}"

    def _fail(self) -> None:
        if self.failing:
            raise self.failing.pop(0)


class Line:
    """The bus of the worker behind a line that can be cut."""

    def __init__(self, bus: LocalBus) -> None:
        self._bus = bus
        self.url, self.sender_id = bus.url, bus.sender_id
        self.on_refused: OnRefused | None = None
        self.lost_questions = 0
        """So many questions do not arrive."""
        self.lost_answers = 0
        """So many questions arrive and their answers do not."""
        self.down = False

    @property
    def connected(self) -> bool:
        return not self.down

    async def publish(self, subject: str, body: PacketBody, **how: Any) -> None:
        self._refuse()
        await self._bus.publish(subject, body, **how)

    async def ask(self, subject: str, body: PacketBody, *, trace_id: str, timeout_s: float) -> Packet:
        self._refuse()
        if self.lost_questions:
            self.lost_questions -= 1
            raise BusUnavailable(url=self.url, detail="the question is lost")
        answer = await self._bus.ask(subject, body, trace_id=trace_id, timeout_s=timeout_s)
        if self.lost_answers:
            self.lost_answers -= 1
            raise BusUnavailable(url=self.url, detail="the answer is lost")
        return answer

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

    def _refuse(self) -> None:
        if self.down:
            raise BusUnavailable(url=self.url, detail="the line is cut")


class Control:
    """A control plane as a script: it keeps what it hears, and answers what `answer` says, or not."""

    def __init__(self, bus: LocalBus) -> None:
        self._bus = bus
        self._numbers = itertools.count(1)
        self.answer: Answer = lambda said: "accepted"
        self.starts: list[JobProgress] = []
        self.beats: list[JobProgress] = []
        self.results: list[JobResult] = []
        self.heartbeats: list[WorkerHeartbeat] = []
        self.handshakes: list[Handshake] = []

    async def open(self) -> None:
        for subject in (PROGRESS, RESULT, HEARTBEAT, HANDSHAKE):
            await self._bus.listen(subject, self._heard)

    async def _heard(self, received: ReceivedPacket) -> None:
        body = received.packet.body
        match body:
            case JobProgress():
                (self.starts if body.step_id == START_STEP else self.beats).append(body)
            case JobResult():
                self.results.append(body)
            case WorkerHeartbeat():
                self.heartbeats.append(body)
            case Handshake():
                self.handshakes.append(body)
            case _:
                raise AssertionError(body)
        if isinstance(body, JobProgress | JobResult):
            said = self.answer(body)
            if said is not None:
                await received.answer(JobProgress(job_id=body.job_id, status=Status.RUNNING, message=said))

    def order(self, *, asks: bool = True, epoch: int = 1, **fields: Any) -> JobOrder:
        """A new job for the worker."""
        number = next(self._numbers)
        job_id, env = f"job-{number}", dict(fields.pop("env", {}))
        if asks:
            env = {ASK_FIRST: "ask", JOB_ID_IN_ENV: job_id, **env}
        told = {
            "job_id": wire_id(JobId(job_id), Epoch(epoch)) if asks else job_id,
            "topic": fields.pop("topic", TOPIC),
            "env": env,
            **fields,
        }
        dispatch = Dispatch(dispatch_id=f"d-{number}", attempt=epoch) if asks else Dispatch()
        return JobOrder(request=JobRequest.model_validate(told), dispatch=dispatch)

    async def send(self, order: JobOrder, *, subject: str | None = None) -> JobOrder:
        await self._bus.publish(subject or order.request.topic, order, trace_id="trace-1", needs_listener=True)
        return order

    async def dispatch(self, **fields: Any) -> JobOrder:
        return await self.send(self.order(**fields))

    async def dispatch_to(self, worker_id: str, **fields: Any) -> JobOrder:
        return await self.send(self.order(**fields), subject=direct_subject(worker_id))

    async def cancel(self, job_id: str, dispatch: Dispatch | None = None) -> None:
        cancel = JobCancel(job_id=job_id, reason="not wanted", requested_by="trellis", dispatch=dispatch)
        await self._bus.publish("sys.job.cancel", cancel, trace_id="trace-1")

    def result_of(self, order: JobOrder) -> JobResult:
        return next(result for result in self.results if result.job_id == order.request.job_id)


class Rig:
    """Everything of one test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.bus = LocalBus("trellis", clock=self.clock, now=self.now)
        self.line = Line(self.bus.sibling(WORKER))
        self.control = Control(self.bus)
        self.kept = Kept()
        self.resolver: PointerAccess = self.kept
        self._ids = itertools.count(1)

    def now(self) -> datetime:
        return datetime.fromtimestamp(EPOCH_S, UTC)

    def worker(self, app: App, **changes: Any) -> BusWorker:
        return BusWorker(
            app,
            self.line,
            BusWorkerOptions(**changes),
            clock=self.clock,
            new_id=lambda: f"id-{next(self._ids)}",
            resolver=self.resolver,
        )

    @asynccontextmanager
    async def serving(self, app: App, **changes: Any) -> AsyncGenerator[BusWorker]:
        worker, hurry = self.worker(app, **changes), asyncio.Event()
        await self.control.open()
        await worker.start()
        try:
            yield worker
        except BaseException:
            # A test that failed should say so at once, not wait for a clock that nobody moves any more.
            hurry.set()
            raise
        finally:
            draining = asyncio.ensure_future(worker.drain(hurry))
            await self.until(draining.done, step_s=1.0)
            await draining
            await self.bus.close()

    async def until(self, holds: Callable[[], bool], *, step_s: float = 0.0) -> None:
        """Wait for the thing itself; each look moves the clock by `step_s`."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                if step_s:
                    self.clock.advance(step_s)
                await self.quiet()

    async def quiet(self) -> None:
        """Let everything run that can run without time passing."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float, *, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            await self.quiet()

    async def result(self, order: JobOrder, *, step_s: float = 0.0) -> JobResult:
        """What the worker reports about it."""
        job_id = order.request.job_id
        await self.until(lambda: any(one.job_id == job_id for one in self.control.results), step_s=step_s)
        return self.control.result_of(order)

"""Our control plane on a real NATS server, with everybody else on the same server speaking through the CAP SDK.

Time is a test's own: the ledger, the leases and the picture of the workers stand on clocks that only `pass_time` moves. Messages take as
long as they take, and `until` waits for what they bring.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
from cap.client import submit_job
from cap.packet_boundary import finalize_packet, parse_packet
from cap.pb.cordum.agent.v1 import buspacket_pb2, job_pb2

from tests.bus.interop.wiretap import Wiretap, tapped
from tests.bus.rig import ScriptedKernel, quiet
from tests.ledgers.conformance.opening import sqlite_rig
from tests.ledgers.conformance.rig import Rig as Bench
from tests.servers.nats import NatsServer, caught_up
from trellis.app.wiring import SystemClock
from trellis.bus.messages import ALERT, CANCEL, RESULT, JobCancel, direct_subject
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.services import BusDependencies, BusServices
from trellis.bus.topics import Topics
from trellis.bus.wire import BusOptions, open_bus
from trellis.bus.wire.nats import NatsBus
from trellis.engine.jobs import Actor, CancelMode, JobId, RequestId, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter, SweepOptions
from trellis.lifecycles import Role
from trellis.testing import FakeClock

PATIENCE_S = 30.0
LOOK_AGAIN_S = 0.005
OURS = "trellis"
TOPIC = "job.test"
RAN = ["job_accepted", "job_scheduled", "job_dispatched", "job_started"]
SUCCEEDED = [*RAN, "job_succeeded"]
FAILED = [*RAN, "job_failed"]
pb: Any = job_pb2
packets: Any = buspacket_pb2


def now() -> datetime:
    return datetime.now(UTC)


def new_id() -> str:
    return str(uuid.uuid4())


async def until(holds: Callable[[], Any]) -> None:
    """Wait for something that comes over the wire or from another process."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await SystemClock().sleep(LOOK_AGAIN_S)


@dataclass
class Peer:
    """Somebody else on the bus, who says what a test says; the SDK makes its packets and reads ours."""

    client: Any
    sender_id: str
    key: Any = None
    heard: list[Any] = field(default_factory=list[Any])

    async def hear(self, subject: str, queue: str = "") -> None:
        """Keep every packet to this subject."""

        async def take(message: Any) -> None:
            self.heard.append(parse_packet(message.data))

        await self.client.subscribe(subject, queue=queue, cb=take)
        await caught_up(self.client)

    async def serve(self, topic: str = TOPIC, *, direct: bool = False, **beat: Any) -> None:
        """Be a worker of this topic: by its name, or as one that introduces itself and sends a heartbeat."""
        await self.hear(direct_subject(self.sender_id) if direct else topic, "" if direct else topic)
        if direct:
            await self.shake(ready_topics=[topic])
            await self.beat(**beat)

    async def say(self, subject: str, *, later_s: float = 0.0, **payload: Any) -> None:
        """One packet of ours, complete; created so much later than now."""
        packet = packets.BusPacket(trace_id=f"t-{self.sender_id}", sender_id=self.sender_id, protocol_version=1)
        packet.created_at.FromDatetime(now() + timedelta(seconds=later_s))
        for name, body in payload.items():
            getattr(packet, name).CopyFrom(body)
        await self.throw(subject, finalize_packet(packet, self.key).SerializeToString(deterministic=True))

    async def throw(self, subject: str, data: bytes) -> None:
        """Whatever bytes."""
        await self.client.publish(subject, data)
        await caught_up(self.client)

    async def beat(self, **said: Any) -> None:
        from cap.pb.cordum.agent.v1 import heartbeat_pb2

        made: Any = heartbeat_pb2
        beat = made.Heartbeat(worker_id=self.sender_id, **{"max_parallel_jobs": 8, **said})
        await self.say("sys.heartbeat", heartbeat=beat)

    async def shake(self, **said: Any) -> None:
        from cap.pb.cordum.agent.v1 import handshake_pb2

        made: Any = handshake_pb2
        told = {"role": made.COMPONENT_ROLE_WORKER, "supported_versions": [1], **said}
        await self.say("sys.handshake", handshake=made.Handshake(component_id=self.sender_id, **told))

    async def report(self, job_id: str, status: str = "SUCCEEDED", **said: Any) -> None:
        """The result of an attempt."""
        told = {"worker_id": self.sender_id, **said}
        result = pb.JobResult(job_id=job_id, status=pb.JobStatus.Value(f"JOB_STATUS_{status}"), **told)
        await self.say(RESULT, job_result=result)

    async def progress(self, job_id: str, status: str = "RUNNING", **said: Any) -> None:
        told = pb.JobProgress(job_id=job_id, status=pb.JobStatus.Value(f"JOB_STATUS_{status}"), **said)
        await self.say("sys.job.progress", job_progress=told)

    async def submit(self, job_id: str, topic: str = TOPIC, **said: Any) -> None:
        """A request, as the SDK's client sends it."""
        request = pb.JobRequest(job_id=job_id, topic=topic, **said)
        await submit_job(self.client, request, f"t-{job_id}", self.sender_id, self.key)
        await caught_up(self.client)

    async def cancel(self, job_id: str, *, later_s: float = 0.0, **said: Any) -> None:
        wish = pb.JobCancel(job_id=job_id, reason="not wanted", requested_by=self.sender_id, **said)
        await self.say(CANCEL, later_s=later_s, job_cancel=wish)

    async def got(self, number: int) -> list[Any]:
        """The first so many orders."""
        await until(lambda: len(self.orders) >= number)
        return self.orders

    @property
    def orders(self) -> list[Any]:
        return self._of("job_request")

    @property
    def stops(self) -> list[str]:
        """The wire ids that it was told to stop."""
        return [cancel.job_id for cancel in self._of("job_cancel")]

    def results(self, job_id: str) -> list[str]:
        """What the control plane told it of a job's end."""
        told = [packet.job_result for packet in self.heard if packet.sender_id == OURS]
        return [
            pb.JobStatus.Name(result.status).removeprefix("JOB_STATUS_") for result in told if result.job_id == job_id
        ]

    @property
    def alerts(self) -> list[int]:
        """The codes."""
        return [alert.error_code_enum for alert in self._of("alert")]

    def _of(self, kind: str) -> list[Any]:
        return [getattr(packet, kind) for packet in self.heard if packet.WhichOneof("payload") == kind]


@dataclass(kw_only=True)
class Plane:
    """One process of the control plane, both roles, and the doors to it."""

    bench: Bench
    ledger: Ledger
    clock: FakeClock
    topics: Topics
    kernel: ScriptedKernel
    bus: NatsBus
    services: BusServices
    tap: Wiretap
    server_url: str
    peers: list[Peer] = field(default_factory=list[Peer])

    async def peer(self, sender_id: str, *subjects: str, key: Any = None) -> Peer:
        """Somebody who hears these subjects."""
        peer = Peer(await nats.connect(self.server_url), sender_id, key)
        self.peers.append(peer)
        for subject in subjects:
            await peer.hear(subject)
        return peer

    async def client(self, sender_id: str = "client-1", key: Any = None) -> Peer:
        """Somebody who hears of ends and alerts."""
        return await self.peer(sender_id, RESULT, ALERT, key=key)

    # --- what is asked at our own door -----------------------------------------------------------------------------

    async def submit(self, job_id: str, topic: str = TOPIC, **said: Any) -> str:
        """A job by the SDK's client: it is PENDING until a pass."""
        request = JobRequest.checked({"job_id": job_id, "topic": topic, **said})
        job = new_bus_job(request, self.topics, trace_id=f"t-{job_id}")
        (answer,) = await self.ledger.submit(Actor(role=Role.GATEWAY, name="<bus>client-1"), [job])
        assert isinstance(answer, Submitted)
        return job_id

    async def cancel(self, job_id: str, mode: CancelMode = CancelMode.HARD) -> None:
        by = Actor(role=Role.SUBMITTER, name="somebody")
        await self.ledger.cancel(by, JobId(job_id), mode, RequestId(new_id()), grace_s=30.0, cause="not wanted")

    # --- what happens ----------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """One pass of everything."""
        await self.services.scheduler.run_once()
        await self.services.renewals.run_once()
        await self.services.reconciler.run_once()
        await self.services.publisher.run_once()

    async def until(self, holds: Callable[[], Awaitable[Any]]) -> None:
        """Passes until it is so; time stands still."""
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await self.tick()
                await SystemClock().sleep(LOOK_AGAIN_S)

    async def reaches(self, job_id: str, state: str) -> None:
        async def is_there() -> bool:
            return await self.state_or_none(job_id) == state

        await self.until(is_there)

    async def told(self, peer: Peer, job_id: str, *ends: str) -> None:
        """This client has heard of the end; and, as far as everything sent by now shows, of nothing else."""

        async def heard() -> bool:
            return len(peer.results(job_id)) >= len(ends)

        await self.until(heard)
        await self.settle()
        assert peer.results(job_id) == list(ends)

    async def settle(self) -> None:
        """Whatever was sent before is heard, and whatever follows from it is done and sent."""
        for _ in range(3):
            await self.heard_everything()
            await self.tick()
        await self._has_sent_everything()

    async def runs_to(self, job_id: str, state: str) -> None:
        """Time passes while the job waits for somebody, and stands still while somebody has it."""
        async with asyncio.timeout(PATIENCE_S):
            while (stands := await self.state_or_none(job_id)) != state:
                if stands == "SCHEDULED":
                    await self.pass_time(1)
                await self.tick()
                await SystemClock().sleep(LOOK_AGAIN_S)

    async def pass_time(self, seconds: float, *, beats: Sequence[str] = (), step_s: float = 1.0) -> None:
        """Move every clock, and let what is due happen; these workers live and are heard after each step."""
        left = seconds
        await self._sweep()
        while left > 0:
            step = min(left, step_s)
            left -= step
            self.clock.advance(step)
            await self.bench.advance(step)
            for worker_id in beats:
                await until(lambda worker_id=worker_id: self._heard_now(worker_id))
            await self.tick()
            await self._sweep()
        await self.tick()

    def _heard_now(self, worker_id: str) -> bool:
        seen = self.services.workers.alive(worker_id)
        return seen is not None and seen.heard_at == self.clock.monotonic()

    async def _sweep(self) -> None:
        await self.ledger.sweep(Actor(role=Role.SWEEPER, name="sweeper"), SweepOptions(elect=False))

    async def heard_everything(self) -> None:
        """The server hands over in order: once a mark has come, everything before it has; then it is handled."""
        mark, marked = f"job.mark.{new_id()}", asyncio.Event()

        async def take(_: object) -> None:
            marked.set()

        listening = await self.bus.listen(mark, take)
        for peer in self.peers:
            await caught_up(peer.client)
        await self.peers[0].say(mark, job_cancel=pb.JobCancel(job_id="mark", requested_by="test"))
        await asyncio.wait_for(marked.wait(), PATIENCE_S)
        await quiet()
        await until(lambda: not any(one._handling._running for one in self.bus._listening if one is not listening))
        await listening.stop()

    async def _has_sent_everything(self) -> None:
        """And everybody else has it: publishing comes back when the server has everything up to there."""
        await self.bus.publish("job.mark.sent", JobCancel(job_id="mark", requested_by=OURS), trace_id="t-mark")
        for peer in self.peers:
            await caught_up(peer.client)
        await quiet()

    # --- what is there ---------------------------------------------------------------------------------------------

    async def job(self, job_id: str) -> Job:
        found = await self.ledger.job(JobId(job_id))
        assert found is not None
        return found

    async def state(self, job_id: str) -> str:
        return (await self.job(job_id)).state

    async def state_or_none(self, job_id: str) -> str | None:
        """None while a request is still on its way."""
        job = await self.ledger.job(JobId(job_id))
        return job.state if job is not None else None

    async def events(self, job_id: str) -> list[Event]:
        return await self.ledger.events(JobId(job_id))

    async def path(self, job_id: str) -> list[str]:
        """The types of its events, all of them."""
        return [event.type for event in await self.events(job_id)]

    async def said(self, job_id: str, type_: str) -> Mapping[str, Any]:
        """What the last event of this type says."""
        found = [event for event in await self.events(job_id) if event.type == type_]
        assert found, f"{job_id} has no {type_}"
        return json.loads(found[-1].data or b"{}")

    async def refused(self, job_id: str) -> list[tuple[str, str, str]]:
        """What was said of a job and changed nothing: why, what, by whom."""
        found = await self.ledger.signals(JobId(job_id), limit=500)
        told = [json.loads(one.data or b"{}") for one in found if one.type == "job_result_refused"]
        return [(one["kind"], one["status"], one["worker_id"]) for one in told]

    async def jobs(self) -> list[str]:
        page = await self.ledger.jobs(JobFilter(lifecycle="bus-job"), limit=500)
        return sorted(job.job_id for job in page.jobs)


@asynccontextmanager
async def plane_on(
    server: NatsServer, folder: Path, topics: Mapping[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Plane]:
    """A control plane on a fresh ledger. At the end its ledger verifies, and everything it sent was a packet of CAP."""
    clock, kernel = FakeClock(), ScriptedKernel()
    known = Topics.model_validate(topics or {})
    async with sqlite_rig(folder / "ledger.db") as bench, tapped(server) as tap:
        bus = await open_bus(
            BusOptions(url=tap.url, sender_id=OURS, **options), clock=SystemClock(), now=now, new_id=new_id
        )
        assert isinstance(bus, NatsBus)
        parts = BusDependencies(
            ledger=bench.ledger,
            bus=bus,
            topics=known,
            kernel=kernel,
            clock=clock,
            new_id=new_id,
            name="plane-1",
        )
        services = BusServices(parts)
        await services.start()
        plane = Plane(
            bench=bench,
            ledger=bench.ledger,
            clock=clock,
            topics=known,
            kernel=kernel,
            bus=bus,
            services=services,
            tap=tap,
            server_url=server.url,
        )
        try:
            yield plane
        finally:
            for peer in plane.peers:
                await peer.client.close()
            await services.stop()
            await bus.close()
        tap.check()
        report = await bench.verify()
        assert report.ok, "\n".join(map(str, report.violations[:20]))

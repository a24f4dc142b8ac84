"""What happens to jobs that are held or have ended, on a rig: results, renewals, aftermath and publisher of one process.

parts = await parts_of(rig)
held = await parts.dispatched("job.test")
await parts.result(held, "w1", Status.SUCCEEDED)
await parts.settle()
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

from tests.bus.rig import TOPIC, Rig, Switched, quiet
from trellis.bus.messages import (
    CANCEL,
    PROGRESS,
    RESULT,
    Dispatch,
    JobCancel,
    JobProgress,
    JobResult,
    Packet,
    PacketBody,
    Status,
)
from trellis.bus.outcomes.attempts import AttemptCache, LeaseRenewals, StopNotifier
from trellis.bus.outcomes.linked_jobs import ATTEMPTS, attempts_of
from trellis.bus.outcomes.publisher import BusPublisher
from trellis.bus.outcomes.reconciler import OutcomeReconciler
from trellis.bus.outcomes.result_listener import ResultListener
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import wire_id
from trellis.engine.jobs import Actor, CancelMode, CancelRequested, JobId, Move, Moved, NotMoved, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, JobFilter
from trellis.lifecycles import Role

PASSES_MAX = 500
_numbers = count(1)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A job that was handed out."""

    job_id: str
    wire_id: str
    dispatch_id: str


@dataclass(kw_only=True)
class Parts:
    """The parts of one process that act on held and ended jobs."""

    rig: Rig
    ledger: Ledger
    results: ResultListener
    renewals: LeaseRenewals
    reconciler: OutcomeReconciler
    publisher: BusPublisher

    # --- what happens ----------------------------------------------------------------------------------------------

    async def dispatched(self, topic: str = TOPIC, *, worker_id: str = "", **fields: Any) -> Held:
        """A new job, handed out to this worker, or to whoever listens."""
        job_id = await self.rig.submit(topic, **fields)
        await self.schedule(job_id)
        return await self.dispatch(job_id, worker_id)

    async def schedule(self, job_id: str) -> None:
        answer = await self.move(job_id, "SCHEDULED", Role.SCHEDULER)
        assert isinstance(answer, Moved)

    async def dispatch(self, job_id: str, worker_id: str = "") -> Held:
        """As the scheduler does it, without a bus."""
        dispatch_id, job = f"d{next(_numbers)}", await self.rig.job(job_id)
        topic = self.rig.topics.of(job.type)
        lease_s = topic.lease_s
        told = {"dispatch_id": dispatch_id, "worker_id": worker_id, "subject": job.type, ATTEMPTS: attempts_of(topic)}
        moved = await self.move(
            job_id,
            "DISPATCHED",
            Role.SCHEDULER,
            lease_s=lease_s,
            heartbeat_s=lease_s,
            data=json.dumps(told).encode(),
        )
        assert isinstance(moved, Moved), moved
        assert moved.lease is not None
        return Held(job_id=job_id, wire_id=wire_id(JobId(job_id), moved.lease.epoch), dispatch_id=dispatch_id)

    async def move(self, job_id: str, target: str, role: Role, **how: Any) -> Moved | NotMoved:
        request_id = RequestId(f"test-{next(_numbers)}")
        move = Move(job_id=JobId(job_id), target=target, request_id=request_id, **how)
        return await self.ledger.move(Actor(role=role, name="test"), move)

    async def cancel(
        self, job_id: str, mode: CancelMode = CancelMode.HARD, grace_s: float = 30.0
    ) -> Moved | NotMoved | CancelRequested:
        by, request_id = Actor(role=Role.SUBMITTER, name="client"), RequestId(f"test-{next(_numbers)}")
        return await self.ledger.cancel(by, JobId(job_id), mode, request_id, grace_s=grace_s, cause="not wanted")

    async def result(
        self, held: Held | str, worker_id: str, status: Status = Status.SUCCEEDED, **said: Any
    ) -> JobProgress:
        """A worker's word; the answer, as it asked for one."""
        named = held if isinstance(held, str) else held.wire_id
        body = JobResult(job_id=named, status=status, worker_id=worker_id, **said)
        return await self.hear(worker_id, body)

    async def progress(self, held: Held, worker_id: str, **said: Any) -> JobProgress:
        return await self.hear(worker_id, JobProgress(job_id=held.wire_id, **said))

    async def start(self, held: Held, worker_id: str, token: str = "token") -> JobProgress:
        """The question of our own workers whether they may begin."""
        dispatch = Dispatch(dispatch_id=held.dispatch_id)
        return await self.progress(held, worker_id, step_id="start", message=token, dispatch=dispatch)

    async def hear(self, sender_id: str, body: PacketBody) -> JobProgress:
        """Have a packet handled, as if it had come over the bus with a question; the answer."""
        (answer,) = await self.answers(sender_id, body)
        return answer

    async def answers(self, sender_id: str, body: PacketBody) -> list[JobProgress]:
        """Every answer to a packet; none when it is not heard at all."""
        answers: list[JobProgress] = []

        async def answer(said: PacketBody) -> None:
            assert isinstance(said, JobProgress)
            answers.append(said)

        now = datetime.fromtimestamp(self.rig.clock(), UTC)
        packet = Packet(trace_id="t", sender_id=sender_id, created_at=now, body=body)
        is_result = isinstance(body, JobResult)
        received = ReceivedPacket(
            subject=RESULT if is_result else PROGRESS, packet=packet, answer=answer, wants_answer=True
        )
        await (self.results.handle_result(received) if is_result else self.results.handle_progress(received))
        return answers

    async def follow_up(self) -> int:
        """Aftermath until there is nothing more; how many steps it took."""
        made = 0
        for _ in range(PASSES_MAX):
            report = await self.reconciler.run_once()
            made += report.made
            if not report.events:
                return made
        raise AssertionError("the aftermath does not come to rest")

    async def tell(self) -> int:
        """Publisher until there is nothing more or the bus is down; how many packets went out."""
        sent = 0
        for _ in range(PASSES_MAX):
            report = await self.publisher.run_once()
            sent += report.sent
            if not report.events or report.held_up:
                return sent
        raise AssertionError("the publisher does not come to rest")

    async def settle(self) -> None:
        """Everything that follows now, and everybody is told."""
        await self.follow_up()
        await self.tell()
        await quiet()

    async def pass_time(self, seconds: float, step_s: float = 1.0) -> None:
        """Time passes with a living sweeper, so that nothing is forgiven."""
        left = seconds
        await self.rig.sweep()
        while left > 0:
            step = min(left, step_s)
            left -= step
            await self.rig.advance(step)

    # --- what is there ---------------------------------------------------------------------------------------------

    @property
    def told(self) -> list[JobResult]:
        """What clients were told."""
        published = self.rig.bus.published
        return [body for subject, body in published if subject == RESULT and isinstance(body, JobResult)]

    @property
    def stops(self) -> list[JobCancel]:
        """What workers were told to stop."""
        published = self.rig.bus.published
        return [body for subject, body in published if subject == CANCEL and isinstance(body, JobCancel)]

    async def remarks(self, job_id: str) -> list[Mapping[str, Any]]:
        found = await self.ledger.signals(JobId(job_id), limit=500)
        return [json.loads(one.data or b"{}") for one in found if one.type == "job_result_refused"]

    async def jobs(self) -> dict[str, str]:
        """Every job with its state."""
        page = await self.ledger.jobs(JobFilter(lifecycle="bus-job"), limit=500)
        return {str(job.job_id): job.state for job in page.jobs}

    async def fingerprint(self) -> dict[str, list[str]]:
        """What happened to every job, without who did it and when."""
        return {job_id: await self.rig.path(job_id) for job_id in sorted(await self.jobs())}

    async def last(self, job_id: str) -> Event:
        return (await self.rig.events(job_id))[-1]


def parts_of(rig: Rig, *, name: str = "process-1", ledger: Ledger | None = None, bus: Switched | None = None) -> Parts:
    """The parts of one process; with another name and view of the ledger those of another."""
    ledger, bus = ledger or rig.ledger, bus or rig.bus
    attempts, stopping = AttemptCache(ledger), StopNotifier(bus)
    control = Actor(role=Role.CONTROL_PLANE, name=name)
    publisher = BusPublisher(ledger=ledger, actor=control, clock=rig.clock, bus=bus, topics=rig.topics)
    results = ResultListener(
        ledger=ledger,
        bus=bus,
        topics=rig.topics,
        workers=rig.workers,
        clock=rig.clock,
        name=name,
        attempts=attempts,
        stopping=stopping,
        publisher=publisher,
    )
    renewals = LeaseRenewals(
        ledger=ledger,
        topics=rig.topics,
        workers=rig.workers,
        actor=Actor(role=Role.RECONCILER, name=name),
        clock=rig.clock,
        attempts=attempts,
        stopping=stopping,
        bus=bus,
    )
    reconciler = OutcomeReconciler(ledger=ledger, actor=control, clock=rig.clock, topics=rig.topics)
    return Parts(rig=rig, ledger=ledger, results=results, renewals=renewals, reconciler=reconciler, publisher=publisher)

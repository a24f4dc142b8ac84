"""The cases that CAP's conformance list has for a worker, each by its id there, driven over NATS against our own worker.

The scheduler is somebody else's: a script that sends orders as raw packets, answers nothing, and hears what the worker reports.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest

from tests.bus.interop.plane import Peer, new_id, now, packets, pb, until
from tests.servers.nats import NatsServer
from tests.worker.on_bus_rig import Kept
from trellis.app.wiring import SystemClock
from trellis.bus.messages import ALERT, CANCEL, PROGRESS, RESULT, direct_subject
from trellis.bus.wire import BusOptions, open_bus
from trellis.engine.errors import PermanentError, TransientError, ValidationError
from trellis.worker.app import App
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

WORKER, SCHEDULER, TOPIC = "wrk-1", "sched-1", "job.kit"
MALFORMED, VERSION, UNKNOWN, INVALID = 101, 100, 102, 203
ENDS = ("SUCCEEDED", "FAILED", "CANCELLED", "FAILED_RETRYABLE", "FAILED_FATAL")
ERRORS: dict[str, Exception] = {
    "plain": RuntimeError("it broke"),
    "timeout": TimeoutError("too slow"),
    "transient": TransientError("later"),
    "fatal": PermanentError("never", error_code="NOT_FOUND"),
    "invalid": ValidationError("not so"),
}


@dataclass
class Stage:
    """A worker whose handler does what an order's env says, and a scheduler that speaks to it."""

    scheduler: Peer
    begun: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """The jobs that the handler was called for, with their attempts."""
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def order(self, job_id: str = "j1", attempt: int = 1, *, dispatch_id: str = "dsp-1", **said: Any) -> Any:
        """Sends an order to the worker; the packet."""
        named = {"dispatch_id": dispatch_id, "attempt": attempt, "assigned_worker_id": said.pop("to", WORKER)}
        request = pb.JobRequest(job_id=job_id, topic=TOPIC, dispatch=named, **said)
        await self.scheduler.say(direct_subject(WORKER), job_request=request)
        return request

    async def cancel(self, job_id: str = "j1", **dispatch: Any) -> None:
        named = {"dispatch_id": "dsp-1", "attempt": 1, "assigned_worker_id": WORKER, **dispatch}
        wish = pb.JobCancel(job_id=job_id, reason="not wanted", requested_by=SCHEDULER, dispatch=named)
        await self.scheduler.say(CANCEL, job_cancel=wish)

    async def has_begun(self, *jobs: tuple[str, int]) -> None:
        """The handler was called for these, in this order, and for nothing else."""
        await until(lambda: len(self.begun) >= len(jobs))
        assert self.begun == list(jobs)

    async def ends(self, *ends: tuple[str, str]) -> None:
        """The worker has reported these ends: of a marker behind everything else too, so that nothing comes later."""
        self.go.set()
        await self.order("marker", dispatch_id="dsp-marker")
        await until(lambda: ("marker", "SUCCEEDED") in self.results)
        assert sorted(self.results) == sorted([*ends, ("marker", "SUCCEEDED")])

    @property
    def reports(self) -> list[Any]:
        return [packet.job_result for packet in self.scheduler.heard if packet.WhichOneof("payload") == "job_result"]

    @property
    def results(self) -> list[tuple[str, str]]:
        return [
            (report.job_id, pb.JobStatus.Name(report.status).removeprefix("JOB_STATUS_")) for report in self.reports
        ]


@asynccontextmanager
async def stage_on(server: NatsServer) -> AsyncGenerator[Stage]:
    scheduler = Peer(await nats.connect(server.url), SCHEDULER)
    for subject in (RESULT, PROGRESS, ALERT):
        await scheduler.hear(subject)
    stage, app = Stage(scheduler), App()

    @app.job(TOPIC)
    async def handler(ctx: BusContext) -> None:
        stage.begun.append((ctx.job_id, ctx.attempt))
        if "raise" in ctx.env:
            raise ERRORS[ctx.env["raise"]]
        if ctx.job_id != "marker":
            await stage.go.wait()

    bus = await open_bus(BusOptions(url=server.url, sender_id=WORKER), clock=SystemClock(), now=now, new_id=new_id)
    options = BusWorkerOptions(cancel_grace_s=0, drain_s=0, settle_s=1, heartbeat_s=60)
    worker = BusWorker(app, bus, options, clock=SystemClock(), new_id=new_id, resolver=Kept())
    try:
        async with worker:
            yield stage
    finally:
        await bus.close()
        await scheduler.client.close()


Show = Callable[[Stage], Awaitable[None]]
CASES: list[tuple[str, Show, tuple[str, ...]]] = []


def case(*names: str, proves: tuple[str, ...] = ("BUS-2", "D68")) -> Callable[[Show], Show]:
    def added(show: Show) -> Show:
        CASES.extend((name, show, proves) for name in names)
        return show

    return added


# --- lifecycle -------------------------------------------------------------------------------------------------------


@case("lifecycle/worker-running-to-succeeded")
async def _succeeded(stage: Stage) -> None:
    await stage.order()
    await stage.ends(("j1", "SUCCEEDED"))
    report = next(one for one in stage.reports if one.job_id == "j1")
    echoed = (report.dispatch.dispatch_id, report.dispatch.attempt, report.dispatch.assigned_worker_id)
    assert (report.worker_id, echoed) == (WORKER, ("dsp-1", 1, WORKER))


async def _fails(stage: Stage, how: str, status: str, code: str, number: int) -> None:
    await stage.order(env={"raise": how})
    await stage.ends(("j1", status))
    report = next(one for one in stage.reports if one.job_id == "j1")
    assert (report.error_code, report.error_code_enum) == (code, number)


@case("lifecycle/worker-running-to-failed")
async def _failed(stage: Stage) -> None:
    await _fails(stage, "plain", "FAILED", "RuntimeError", 1000)


@case("lifecycle/worker-running-to-failed (CAP's number for an error of Python)")
async def _failed_by_time(stage: Stage) -> None:
    await _fails(stage, "timeout", "FAILED", "TimeoutError", 200)


@case("lifecycle/worker-running-to-failed-retryable")
async def _retryable(stage: Stage) -> None:
    await _fails(stage, "transient", "FAILED_RETRYABLE", "TransientError", 1000)


@case("lifecycle/worker-running-to-failed-fatal")
async def _fatal(stage: Stage) -> None:
    await _fails(stage, "fatal", "FAILED_FATAL", "NOT_FOUND", 204)


@case("lifecycle/worker-running-to-failed-fatal (input that does not fit)")
async def _invalid(stage: Stage) -> None:
    await _fails(stage, "invalid", "FAILED_FATAL", "INVALID_INPUT", 203)


@case("lifecycle/worker-same-state-idempotent")
async def _same_again(stage: Stage) -> None:
    await stage.order()
    await stage.has_begun(("j1", 1))
    await stage.order()
    await stage.order("behind", dispatch_id="dsp-2")
    await stage.has_begun(("j1", 1), ("behind", 1))  # what was sent before it has been handled: j1 still ran
    await stage.ends(("j1", "SUCCEEDED"), ("behind", "SUCCEEDED"))
    assert stage.begun.count(("j1", 1)) == 1


@case("lifecycle/worker-rejects-backwards-transition", "lifecycle/worker-rejects-second-terminal")
async def _one_end(stage: Stage) -> None:
    await stage.order()
    await stage.ends(("j1", "SUCCEEDED"))
    heard = len(stage.scheduler.heard)
    await stage.cancel()
    await stage.order()
    await until(lambda: stage.results.count(("j1", "SUCCEEDED")) == 2)  # the same end again, and nothing else
    assert {packet.WhichOneof("payload") for packet in stage.scheduler.heard[heard:]} == {"job_result"}
    assert stage.begun.count(("j1", 1)) == 1


# --- cancellation ----------------------------------------------------------------------------------------------------


@case("cancellation/worker-honors-cancel", "retries/worker-honors-active-cancel", proves=("BUS-2", "D29", "D68"))
async def _cancelled(stage: Stage) -> None:
    await stage.order(attempt=2)
    await stage.has_begun(("j1", 2))
    await stage.cancel(attempt=2)
    await until(lambda: stage.results == [("j1", "CANCELLED")])


# --- duplicates and retries ------------------------------------------------------------------------------------------


@case(
    "duplicates/worker-exact-redelivery-invokes-handler-once",
    "duplicates/worker-exact-redelivery-replays-idempotent-result",
)
async def _redelivered(stage: Stage) -> None:
    for _ in range(3):
        await stage.order()
    await stage.ends(("j1", "SUCCEEDED"))
    await stage.order()
    await until(lambda: stage.results.count(("j1", "SUCCEEDED")) == 2)
    assert stage.begun.count(("j1", 1)) == 1


@case("duplicates/worker-distinct-dispatch-is-not-suppressed")
async def _other_dispatch(stage: Stage) -> None:
    stage.go.set()
    await stage.order()
    await until(lambda: stage.results)
    await stage.order(dispatch_id="dsp-2")
    await stage.ends(("j1", "SUCCEEDED"), ("j1", "SUCCEEDED"))


@case("retries/worker-new-attempt-invokes-once")
async def _next_attempt(stage: Stage) -> None:
    await stage.order(attempt=1)
    await stage.has_begun(("j1", 1))
    await stage.order(attempt=2)  # its scheduler has given the first one up: nothing is reported of it
    await stage.has_begun(("j1", 1), ("j1", 2))
    await stage.ends(("j1", "SUCCEEDED"))
    assert next(one for one in stage.reports if one.job_id == "j1").dispatch.attempt == 2


@case("retries/worker-rejects-stale-attempt", "retries/worker-rejects-future-attempt", proves=("BUS-6", "D68"))
async def _other_attempts(stage: Stage) -> None:
    """While attempt 2 runs, and after it has ended. A jump forward is given back, and the scheduler goes on with the attempt after it."""
    await stage.order(attempt=2)
    await stage.has_begun(("j1", 2))
    for attempt in (1, 9):
        await stage.order(attempt=attempt)
    await stage.ends(("j1", "SUCCEEDED"), ("j1", "FAILED_RETRYABLE"))
    for attempt in (1, 9):
        await stage.order(attempt=attempt)
    await stage.order("after", dispatch_id="dsp-after")
    await until(lambda: ("after", "SUCCEEDED") in stage.results)
    assert [job for job in stage.begun if job[0] == "j1"] == [("j1", 2)]
    await stage.order(attempt=10)
    await until(lambda: ("j1", 10) in stage.begun)


@case("retries/worker-rejects-wrong-worker-attempt", proves=("BUS-6", "D68"))
async def _other_worker(stage: Stage) -> None:
    await stage.order(to="wrk-other")
    await stage.ends()
    assert stage.begun == [("marker", 1)]


@case(
    "retries/worker-rejects-stale-cancel", "retries/worker-rejects-wrong-worker-cancel", proves=("BUS-6", "D29", "D68")
)
async def _other_cancels(stage: Stage) -> None:
    await stage.order(attempt=2)
    await stage.has_begun(("j1", 2))
    for wrong in ({"attempt": 1}, {"attempt": 3}, {"assigned_worker_id": "wrk-other"}, {"dispatch_id": "dsp-2"}):
        await stage.cancel(**{"attempt": 2, **wrong})
    await stage.ends(("j1", "SUCCEEDED"))


# --- malformed packets -----------------------------------------------------------------------------------------------


def packet(**request: Any) -> Any:
    told = packets.BusPacket(trace_id="t-1", sender_id=SCHEDULER, protocol_version=1)
    told.created_at.GetCurrentTime()
    told.job_request.CopyFrom(pb.JobRequest(job_id="bad", topic=TOPIC, **request))
    return told


def longer_number(data: bytes) -> bytes:
    """The same packet with its protocol version written in two bytes instead of one."""
    assert data.count(b"\x20\x01") == 1
    return data.replace(b"\x20\x01", b"\x20\x81\x00")


def longer_number_in_the_request() -> bytes:
    """The step index of the request is written in two bytes: 1 as 0x81 0x00."""
    request = packet().job_request.SerializeToString() + b"\x48\x81\x00"
    outer = packet()
    outer.ClearField("job_request")
    return outer.SerializeToString() + b"\x52" + bytes([len(request)]) + request


def with_version(version: int) -> bytes:
    told = packet()
    told.protocol_version = version
    return told.SerializeToString()


def without_payload(more: bytes = b"") -> bytes:
    told = packet()
    told.ClearField("job_request")
    return told.SerializeToString() + more


def two_payloads() -> bytes:
    other = packets.BusPacket(job_cancel=pb.JobCancel(job_id="bad", requested_by=SCHEDULER))
    return other.SerializeToString() + packet().SerializeToString()


MALFORMED_CASES: dict[str, tuple[Callable[[], bytes], int]] = {
    "truncated-wire": (lambda: packet().SerializeToString()[:-3], MALFORMED),
    "overlong-wire": (lambda: packet(env={"x": "y" * 1_100_000}).SerializeToString(), MALFORMED),
    "non-minimal-encoding": (lambda: longer_number(packet().SerializeToString()), MALFORMED),
    "non-minimal-encoding (inside the payload)": (longer_number_in_the_request, MALFORMED),
    "duplicate-oneof": (two_payloads, MALFORMED),
    "duplicate-oneof (the same one twice)": (lambda: packet().SerializeToString() * 2, MALFORMED),
    "empty-envelope": (without_payload, MALFORMED),
    "empty-envelope (no bytes at all)": (lambda: b"", MALFORMED),
    "unsupported-protocol-version": (lambda: with_version(2), VERSION),
    "unknown-payload": (lambda: without_payload(b"\xf2\x06\x00"), UNKNOWN),
    "oversize-string": (lambda: packet(adapter_id="x" * 300).SerializeToString(), INVALID),
    "oversize-map": (lambda: packet(labels={f"l{n}": "x" for n in range(1_001)}).SerializeToString(), INVALID),
    "oversize-repeated": (
        lambda: packet(meta=pb.JobMetadata(requires=["x"] * 1_001)).SerializeToString(),
        INVALID,
    ),
}


@pytest.mark.requirement("BUS-2")
async def test_a_malformed_order_is_dropped_with_one_alert_and_never_reaches_the_handler(interop_server: NatsServer):
    async with stage_on(interop_server) as stage:
        for name, (make, code) in MALFORMED_CASES.items():
            stage.scheduler.heard.clear()
            await stage.scheduler.throw(direct_subject(WORKER), make())
            await until(lambda: stage.scheduler.alerts)
            assert stage.scheduler.alerts == [code], f"malformed/{name}"
        await stage.ends()
        assert stage.begun == [("marker", 1)]


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "show", [pytest.param(show, id=name, marks=pytest.mark.requirement(*proves)) for name, show, proves in CASES]
)
async def test_our_worker_behaves_as_the_case_asks(interop_server: NatsServer, show: Show):
    async with stage_on(interop_server) as stage:
        await show(stage)


def test_every_case_of_the_list_is_here():
    names = {name.partition(" ")[0] for name, _, _ in CASES}
    malformed = {name.partition(" ")[0] for name in MALFORMED_CASES}
    assert (len(names), len(malformed)) == (18, 10)

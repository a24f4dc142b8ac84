"""One trace and one correlation id of a job on a topic: request, handing-out, handler, result, publication (OBS-6)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from cap.client import submit_job
from cap.packet_boundary import parse_packet
from cap.pb.cordum.agent.v1 import job_pb2
from cap.worker import run_worker

from tests.gateway.conftest import Gateway
from tests.servers.nats import NatsServer, caught_up, running_nats
from tests.spans import SPAN_ID, TRACE, TRACE_ID, Spans, parent_of, recorded, span_id
from tests.stopped_tasks import stopped
from trellis.app.wiring import SystemClock, new_id
from trellis.bus.errors import BusUnavailable, NotKept
from trellis.bus.messages import RESULT, JobResult, Status
from trellis.bus.pointers import make_pointers
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.services import BusDependencies, BusServices
from trellis.bus.wire import BusOptions, open_bus
from trellis.engine import tracing
from trellis.engine.jobs import JobId
from trellis.worker.app import App
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

pytestmark = pytest.mark.requirement("OBS-6")

TOPIC = "job.echo"
ON_TOPIC = {f"job.{what} {TOPIC}" for what in ("submit", "dispatch", "result", "publish")}
ORDER = "order-7"
PATIENCE_S = 30.0
pb: Any = job_pb2


@dataclass(kw_only=True)
class Line:
    """A gateway, a control plane and a client on one server."""

    gateway: Gateway
    server: NatsServer
    services: BusServices
    client: Any
    results: list[Any] = field(default_factory=list[Any])
    """What the client heard from the control plane, as packets."""
    seen: list[str | None] = field(default_factory=list[str | None])
    """The traces that handlers found themselves in."""

    async def hear(self) -> None:
        async def take(message: Any) -> None:
            packet = parse_packet(message.data)
            if packet.sender_id == "trellis":
                self.results.append(packet)

        await self.client.subscribe(RESULT, cb=take)
        await caught_up(self.client)

    async def submit(self, way: str) -> str:
        """A job of a caller from outside, who has a trace and a correlation id; its id."""
        if way == "http":
            headers = {"traceparent": TRACE, "X-Correlation-ID": ORDER}
            answer = await self.gateway.client("submitter").post("/jobs", json={"topic": TOPIC}, headers=headers)
            assert answer.status_code == 202
            return answer.json()["job_id"]
        request = pb.JobRequest(job_id="mine", topic=TOPIC, env={tracing.IN_ENV: TRACE})
        await submit_job(self.client, request, ORDER, "client-1")
        await caught_up(self.client)
        return "mine"

    async def until(self, holds: Callable[[], Any]) -> None:
        """Passes of everything until it is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                for service in self.services.services:
                    await service.run_once()
                await SystemClock().sleep(0.005)


@pytest.fixture(scope="module")
def bus_server() -> Iterator[NatsServer]:
    with running_nats(jetstream=True) as server:
        yield server


@asynccontextmanager
async def a_line(gateway: Gateway, server: NatsServer) -> AsyncGenerator[Line]:
    bus = await opened(server, "trellis")
    parts = BusDependencies(
        ledger=gateway.instance.ledger,
        bus=bus,
        topics=gateway.instance.topics,
        kernel=PolicyKernel(),
        clock=gateway.clock,
        new_id=new_id,
        name="plane-1",
    )
    services, client = BusServices(parts), await nats.connect(server.url)
    line = Line(gateway=gateway, server=server, services=services, client=client)
    try:
        await services.start()
        await line.hear()
        yield line
    finally:
        await client.close()
        await services.stop()
        await bus.close()


async def opened(server: NatsServer, sender_id: str) -> Any:
    options = BusOptions(url=server.url, sender_id=sender_id)
    return await open_bus(options, clock=SystemClock(), now=lambda: datetime.now(UTC), new_id=new_id)


@asynccontextmanager
async def our_worker(line: Line) -> AsyncGenerator[None]:
    app = App(testing=True)

    @app.job(TOPIC)
    async def echo(_: BusContext) -> None:
        line.seen.append(tracing.here())

    bus = await opened(line.server, "w-1")
    options = BusWorkerOptions(drain_s=1.0)
    resolver = make_pointers(line.gateway.instance.objects, None)
    async with BusWorker(app, bus, options, clock=SystemClock(), new_id=new_id, resolver=resolver):
        yield
    await bus.close()


@asynccontextmanager
async def sdk_worker(line: Line) -> AsyncGenerator[None]:
    """Unmodified: it knows nothing of traces, but for what its handler finds in the env.

    It listens before anything else happens: a topic without a listener is tried again later, and a test's time stands still.
    """
    listens = asyncio.Event()

    async def connect(**how: Any) -> Any:
        connection: Any = await nats.connect(**how)
        subscribe = connection.subscribe

        async def subscribe_first(*given: Any, **named: Any) -> Any:
            connection.subscribe = subscribe
            made = await subscribe(*given, **named)
            await caught_up(connection)
            listens.set()
            return made

        connection.subscribe = subscribe_first
        return connection

    async def handle(request: Any) -> Any:
        line.seen.append(request.env[tracing.IN_ENV])
        return pb.JobResult(job_id=request.job_id, status=pb.JOB_STATUS_SUCCEEDED)

    worker = run_worker(line.server.url, TOPIC, handle, sender_id="sdk-1", connect_fn=connect)
    running = asyncio.create_task(worker)
    try:
        await asyncio.wait_for(listens.wait(), PATIENCE_S)
        yield
    finally:
        running.cancel()
        await stopped(running)


def is_there(spans: Spans, name: str) -> Callable[[], bool]:
    return lambda: any(span.name == name for span in spans.all())


@pytest.mark.parametrize("way", ["http", "bus"])
@pytest.mark.parametrize("worker", [our_worker, sdk_worker])
async def test_a_job_on_a_topic_is_one_trace_from_the_caller_to_the_publication(
    make_gateway: Callable[..., Gateway], bus_server: NatsServer, worker: Callable[..., Any], way: str
):
    with recorded() as spans:
        async with a_line(make_gateway(), bus_server) as line, worker(line):
            job_id = await line.submit(way)
            await line.until(lambda: line.results)
            await line.until(is_there(spans, f"job.publish {TOPIC}"))
            events = await line.gateway.instance.ledger.events(JobId(job_id))
        submit = spans.named("job.submit" if way == "http" else f"job.submit {TOPIC}")
        dispatch, result, publish = (spans.named(f"job.{what} {TOPIC}") for what in ("dispatch", "result", "publish"))
        begun = [spans.named("POST /jobs")] if way == "http" else []
        handled = [spans.named(f"job.handle {TOPIC}")] if worker is our_worker else []
        assert {span_id(span) for span in spans.of(TRACE_ID)} == {
            span_id(span) for span in (*begun, submit, dispatch, *handled, result, publish)
        }
    assert {span.name for span in (dispatch, result, publish)} <= ON_TOPIC
    assert [parent_of(span) for span in (*begun, submit)] == [SPAN_ID, *map(span_id, begun)]
    assert {parent_of(span) for span in (dispatch, result, publish)} == {span_id(submit)}
    assert [parent_of(span) for span in handled] == [span_id(dispatch)] * len(handled)
    (seen,) = line.seen
    assert seen is not None
    assert seen.split("-")[1:3] == [TRACE_ID, span_id(handled[0] if handled else dispatch)]
    assert {event.correlation_id for event in events} == {ORDER}
    (told,) = line.results
    assert (told.trace_id, told.job_result.job_id) == (ORDER, job_id)
    said = dict(publish.attributes or {})
    assert (said["trellis.job_id"], said["trellis.correlation_id"], said["trellis.status"]) == (
        job_id,
        ORDER,
        "SUCCEEDED",
    )
    assert dict(result.attributes or {})["trellis.answer"] == "accepted"


@pytest.mark.parametrize("error", [BusUnavailable(url="nats", detail="away"), NotKept(subject=RESULT, detail="full")])
async def test_a_publication_that_was_not_taken_is_a_failed_span_and_the_next_one_is_in_the_same_trace(
    make_gateway: Callable[..., Gateway], bus_server: NatsServer, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    with recorded() as spans:
        async with a_line(make_gateway(), bus_server) as line, sdk_worker(line):
            bus: Any = line.services.parts.bus
            publish: Callable[..., Awaitable[None]] = bus.publish
            failing = [error]

            async def fails_once(subject: str, *body: Any, **how: Any) -> None:
                if subject == RESULT and failing:
                    raise failing.pop()
                await publish(subject, *body, **how)

            monkeypatch.setattr(bus, "publish", fails_once)
            await line.submit("http")
            await line.until(lambda: line.results)
        first, second = [span for span in spans.of(TRACE_ID) if span.name == f"job.publish {TOPIC}"]
    assert [span.status.is_ok for span in (first, second)] == [False, True]
    assert first.status.description == str(error)


async def test_result_without_a_job_starts_no_trace(make_gateway: Callable[..., Gateway], bus_server: NatsServer):
    with recorded() as spans:
        async with a_line(make_gateway(), bus_server) as line:
            bus = await opened(bus_server, "w-9")
            await bus.publish(
                RESULT, JobResult(job_id="none@1", status=Status.SUCCEEDED, worker_id="w-9"), trace_id="t"
            )
            await line.submit("http")
            async with sdk_worker(line):
                await line.until(lambda: line.results)
            await bus.close()
        assert [span.name for span in spans.all() if span.name.startswith("job.result")] == [f"job.result {TOPIC}"]

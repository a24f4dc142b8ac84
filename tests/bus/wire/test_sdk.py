"""The unmodified CAP SDK at the other end: its workers, its agents and its client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pydantic
import pytest
from cap.client import submit_job
from cap.pb.cordum.agent.v1 import job_pb2
from cap.runtime import Agent, InMemoryBlobStore
from cap.worker import run_worker

from tests.bus.test_cap import FULL
from tests.bus.test_signatures import OURS, THEIRS, pem, private_file, public_pem
from tests.bus.wire.conftest import Heard, Net
from tests.servers.nats import caught_up
from tests.stopped_tasks import stopped
from trellis.app.wiring import SystemClock
from trellis.bus.errors import NoResponders
from trellis.bus.messages import (
    ALERT,
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    SUBMIT,
    BusAlert,
    Dispatch,
    ErrorCode,
    Handshake,
    JobOrder,
    JobResult,
    Status,
    WorkerHeartbeat,
    direct_subject,
)
from trellis.bus.requests import JobRequest

pytestmark = pytest.mark.requirement("BUS-2")
pb: Any = job_pb2


@contextlib.asynccontextmanager
async def sdk_worker(url: str, topic: str, **keys: Any) -> AsyncIterator[list[Any]]:
    requests: list[Any] = []

    async def handle(request: Any) -> Any:
        requests.append(request)
        if request.env.get("fail"):
            raise ValueError("no")
        return pb.JobResult(job_id=request.job_id, status=pb.JOB_STATUS_SUCCEEDED, result_ptr="redis://res:x")

    running = asyncio.create_task(run_worker(url, topic, handle, sender_id="sdk-1", **keys))
    try:
        yield requests
    finally:
        running.cancel()
        await stopped(running)


def order(topic: str, **fields: Any) -> JobOrder:
    request = JobRequest.checked({**FULL, "job_id": "job-1@3", "topic": topic, **fields})
    return JobOrder(request=request, dispatch=Dispatch(dispatch_id="d-1", attempt=3))


async def publish_when_heard(bus: Any, subject: str, body: Any) -> None:
    """An SDK worker says nowhere that it listens; the bus knows."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(NoResponders):
                await bus.publish(subject, body, trace_id="t-1", needs_listener=True)
                return
            await SystemClock().sleep(0.02)


async def test_an_sdk_worker_takes_our_order_and_we_take_its_result(nats_net: Net):
    bus, topic, heard = await nats_net.bus(), nats_net.subject(), Heard()
    await bus.listen(RESULT, heard, group="trellis", durable=True)
    async with sdk_worker(nats_net.url, topic) as requests:
        await publish_when_heard(bus, topic, order(topic))
        await heard.until(1)
    (request,) = requests
    assert (request.job_id, request.topic, request.priority) == ("job-1@3", topic, pb.JOB_PRIORITY_CRITICAL)
    assert dict(request.env) == FULL["env"]
    assert request.meta.requires == FULL["meta"]["requires"]
    packet = heard.packets[0].packet
    assert (packet.trace_id, packet.sender_id) == ("t-1", "sdk-1")
    assert packet.body == JobResult(
        job_id="job-1@3", status=Status.SUCCEEDED, worker_id="sdk-1", result_ptr="redis://res:x"
    )


async def test_an_sdk_workers_failure_is_read(nats_net: Net):
    bus, topic, heard = await nats_net.bus(), nats_net.subject(), Heard()
    await bus.listen(RESULT, heard)
    async with sdk_worker(nats_net.url, topic):
        await publish_when_heard(bus, topic, order(topic, env={"fail": "yes"}))
        await heard.until(1)
    body = heard.packets[0].packet.body
    assert isinstance(body, JobResult)
    assert (body.status, body.error_message) == (Status.FAILED, "handler failed")


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, Any]:
    private_file(tmp_path / "own.pem", pem(OURS))
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "sdk-1.pem").write_bytes(public_pem(THEIRS))
    return {"key_file": tmp_path / "own.pem", "keys_dir": tmp_path / "known", "require_signatures": True}


async def test_signed_orders_and_results_pass_both_ways(nats_net: Net, key_files: dict[str, Any]):
    bus, topic, heard = await nats_net.bus(**key_files), nats_net.subject(), Heard()
    await bus.listen(RESULT, heard)
    keys = {"public_keys": {"trellis": OURS.public_key()}, "private_key": THEIRS}
    async with sdk_worker(nats_net.url, topic, **keys) as requests:
        await publish_when_heard(bus, topic, order(topic))
        await heard.until(1)
    assert len(requests) == 1


async def test_an_unsigned_result_is_dropped_with_an_alert_where_signatures_are_required(
    nats_net: Net, key_files: dict[str, Any]
):
    bus, topic, heard, alerts = await nats_net.bus(**key_files), nats_net.subject(), Heard(), Heard()
    await bus.listen(RESULT, heard)
    await bus.listen(ALERT, alerts)
    async with sdk_worker(nats_net.url, topic):
        await publish_when_heard(bus, topic, order(topic))
        await alerts.until(1)
    alert = alerts.packets[0].packet.body
    assert isinstance(alert, BusAlert)
    assert alert.code is ErrorCode.SIGNATURE_MISSING
    assert heard.packets == []


class Numbers(pydantic.BaseModel):
    numbers: list[int]


async def test_an_sdk_agent_says_hello_and_works_by_topic_and_by_its_own_subject(nats_net: Net):
    bus, topic = await nats_net.bus(), nats_net.subject()
    hello, beats, results = Heard(), Heard(), Heard()
    await bus.listen(HANDSHAKE, hello)
    await bus.listen(HEARTBEAT, beats)
    await bus.listen(RESULT, results)
    store = InMemoryBlobStore()
    await store.set("ctx:1", b'{"numbers": [1, 2, 3]}')
    agent = Agent(
        nats_url=nats_net.url, store=store, worker_id="agent-1", pool="sums", max_parallel=2, heartbeat_interval=0.1
    )

    @agent.job(topic, input_model=Numbers)
    async def add(_: Any, data: Numbers) -> dict[str, int]:
        return {"sum": sum(data.numbers)}

    await agent.start()
    try:
        for subject in (topic, direct_subject("agent-1")):
            await publish_when_heard(bus, subject, order(topic, context_ptr="redis://ctx:1"))
        await results.until(2)
        await beats.until(1)
    finally:
        await agent.close()
    bodies = [received.packet.body for received in results.packets]
    assert [body.status for body in bodies if isinstance(body, JobResult)] == [Status.SUCCEEDED] * 2
    assert await store.get("res:job-1@3") == b'{"sum": 6}'
    handshake, beat = hello.packets[0].packet.body, beats.packets[0].packet.body
    assert isinstance(handshake, Handshake)
    assert (handshake.component_id, handshake.role, handshake.ready_topics) == ("agent-1", "worker", (topic,))
    assert isinstance(beat, WorkerHeartbeat)
    assert (beat.worker_id, beat.pool, beat.max_parallel_jobs) == ("agent-1", "sums", 2)


async def test_a_job_that_the_sdks_client_submits_is_a_request_of_ours(stream_net: Net):
    bus, heard = await stream_net.bus(), Heard()
    await bus.listen(SUBMIT, heard, group=stream_net.mark, durable=True)
    client: Any = await nats.connect(stream_net.url)
    job_id = f"sdk-{stream_net.mark}"
    sent = pb.JobRequest(job_id=job_id, topic="job.a", priority=pb.JOB_PRIORITY_BATCH, labels={"x": "y"})
    await submit_job(client, sent, "t-7", "client-1")
    await caught_up(client)
    await client.close()
    await heard.until(1)
    packet = heard.packets[-1].packet
    assert (packet.trace_id, packet.sender_id) == ("t-7", "client-1")
    assert packet.body == JobRequest.checked(
        {"job_id": job_id, "topic": "job.a", "priority": "batch", "labels": {"x": "y"}}
    )

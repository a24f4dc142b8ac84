"""What goes wrong with workers and clients, told over a real bus: each story ends as decided, with one event for each step."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.bus.interop.plane import (
    PATIENCE_S,
    RAN,
    SUCCEEDED,
    TOPIC,
    Plane,
    new_id,
    now,
    packets,
    pb,
    plane_on,
    until,
)
from tests.bus.interop.sdk import sdk_agent, sdk_worker, succeed
from tests.bus.interop.wiretap import Sent
from tests.servers.nats import NatsServer, running_nats
from tests.worker.on_bus_rig import Kept
from trellis.app.wiring import SystemClock
from trellis.bus.messages import CANCEL, HEARTBEAT, PROGRESS, RESULT, SUBMIT
from trellis.bus.pointers import PointerPart, make_pointers
from trellis.bus.requests import RETRY_OF, JobRequest
from trellis.bus.wire import BusOptions, open_bus
from trellis.engine.jobs import CancelMode
from trellis.worker.app import App
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")  # by the SDK's own store
HANDED_OUT = ["job_accepted", "job_scheduled", "job_dispatched"]
AGAIN, ONCE = "job.again", "job.once"
TOPICS = {
    "topics": {
        AGAIN: {"idempotent": True, "lease_s": 12, "backoff_s": 1, "max_attempts": 3},
        ONCE: {"lease_s": 12, "backoff_s": 1, "max_attempts": 3},
    }
}
"""Leases longer than it takes until a silent worker counts as lost."""


# --- workers that are lost -------------------------------------------------------------------------------------------


@contextmanager
def agent_process(plane: Plane, redis_url: str, *topics: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bus.interop.sdk_agent_process", plane.server_url, redis_url, "agent-1"]
    process = subprocess.Popen([*command, *topics], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.requirement("BUS-5", "BUS-7", "BUS-12", "D29", "D30")
async def test_a_worker_killed_in_the_middle_costs_an_attempt_or_leads_to_a_linked_job(
    interop_server: NatsServer, tmp_path: Path, redis_url: str
):
    async with plane_on(interop_server, tmp_path, TOPICS) as plane:
        client, pointers = await plane.client(), make_pointers(None, redis_url)
        context = await pointers.put(b'{"numbers": [4, 5]}', part=PointerPart.CONTEXT, scheme="redis")
        await pointers.close()
        with agent_process(plane, redis_url, AGAIN, ONCE) as process:
            await until(lambda: plane.services.workers.alive("agent-1"))
            await plane.pass_time(1, beats=["agent-1"])
            await client.submit("again", AGAIN, context_ptr=context)
            await client.submit("once", ONCE, context_ptr=context)
            await plane.reaches("again", "DISPATCHED")
            await plane.reaches("once", "DISPATCHED")
            assert process.stdout is not None
            begun = {await asyncio.to_thread(process.stdout.readline) for _ in range(2)}
            assert begun == {"again@1\n", "once@1\n"}
            await plane.pass_time(18, beats=["agent-1"])  # its heartbeats keep both, far beyond their lease
            assert [await plane.path(job_id) for job_id in ("again", "once")] == [HANDED_OUT] * 2
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
        async with sdk_agent(plane, redis_url, AGAIN, ONCE, worker_id="agent-2") as seen:
            while await plane.state_or_none("once.r1") != "SUCCEEDED":
                await plane.pass_time(1, beats=["agent-2"])
            await plane.reaches("again", "SUCCEEDED")
            await plane.told(client, "again", "SUCCEEDED")
            await plane.told(client, "once", "TIMEOUT")
            await plane.told(client, "once.r1", "SUCCEEDED")
        rerun = ["job_lease_expired", "job_dispatched", "job_started", "job_succeeded"]
        assert await plane.path("again") == [*HANDED_OUT, *rerun]
        assert await plane.path("once") == [*HANDED_OUT, "job_timed_out"]
        assert await plane.path("once.r1") == SUCCEEDED
        retry = JobRequest.read((await plane.job("once.r1")).payload or b"")
        assert (retry.parent_job_id, retry.labels[RETRY_OF], retry.context_ptr) == ("once", "once", context)
        assert sorted(job_id.partition("@")[0] for job_id in seen) == ["again", "once.r1"]


@pytest.mark.requirement("BUS-5", "BUS-7", "BUS-12", "D30")
async def test_a_worker_that_never_answers_costs_every_attempt_and_then_the_job(
    interop_server: NatsServer, tmp_path: Path
):
    async with plane_on(interop_server, tmp_path, TOPICS) as plane:
        client, mute = await plane.client(), await plane.peer("mute", CANCEL)
        await mute.serve(AGAIN)
        await mute.serve(ONCE)
        await client.submit("again", AGAIN)
        await client.submit("once", ONCE)
        await plane.reaches("once", "DISPATCHED")
        await plane.pass_time(60)
        await plane.told(client, "again", "TIMEOUT")
        for job_id in ("once", "once.r1", "once.r2"):
            await plane.told(client, job_id, "TIMEOUT")
            assert await plane.path(job_id) == [*HANDED_OUT, "job_timed_out"]
        lost = ["job_lease_expired", "job_dispatched"]
        assert await plane.path("again") == [*HANDED_OUT, *lost, *lost, "job_timed_out"]
        assert await plane.jobs() == ["again", "once", "once.r1", "once.r2"]
        wire_ids = sorted(order.job_id for order in mute.orders)
        assert len(set(wire_ids)) == len(wire_ids) == 6
        assert sorted(mute.stops) == wire_ids  # each was told that nobody waits for it any more


# --- words that are not taken ----------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-6", "BUS-11", "D28", "D29")
async def test_a_packet_about_a_job_from_a_worker_that_does_not_hold_it_changes_nothing(plane: Plane):
    client, worker, other = await plane.client(), await plane.peer("worker-1"), await plane.peer("worker-2")
    await worker.serve(direct=True)
    await client.submit("j1")
    await plane.reaches("j1", "DISPATCHED")
    (order,) = await worker.got(1)
    await other.report(order.job_id)
    await other.throw(RESULT, forged(order.job_id, worker_id="worker-1", sender_id="worker-2"))
    await other.progress(order.job_id)
    await worker.report("j1@7")
    await worker.report("j1")
    await worker.report("nobody@1")
    await worker.report(order.job_id, dispatch=pb.DispatchIdentity(dispatch_id="another"))
    await plane.settle()
    assert await plane.path("j1") == HANDED_OUT
    assert set(client.alerts) == {101}  # the one in another's name
    await worker.report(order.job_id, execution_ms=12)
    await plane.told(client, "j1", "SUCCEEDED")
    await other.report(order.job_id)
    await worker.report(order.job_id, "FAILED")
    await worker.report(order.job_id, execution_ms=12)
    await plane.settle()
    assert (await plane.path("j1"), await plane.jobs()) == (SUCCEEDED, ["j1"])
    assert (await plane.said("j1", "job_succeeded"))["execution_ms"] == 12
    assert sorted(await plane.refused("j1")) == [
        ("contradictory", "FAILED", "worker-1"),
        ("duplicate", "SUCCEEDED", "worker-1"),
        ("foreign", "SUCCEEDED", "worker-2"),
        ("stale", "SUCCEEDED", "worker-1"),
        ("stale", "SUCCEEDED", "worker-1"),
    ]
    await plane.told(client, "j1", "SUCCEEDED")


def forged(job_id: str, *, worker_id: str, sender_id: str) -> bytes:
    """A result in another's name, which the SDK would not make."""
    packet = packets.BusPacket(trace_id="t", sender_id=sender_id, protocol_version=1)
    packet.created_at.GetCurrentTime()
    packet.job_result.CopyFrom(pb.JobResult(job_id=job_id, status=pb.JOB_STATUS_SUCCEEDED, worker_id=worker_id))
    return packet.SerializeToString()


@pytest.mark.requirement("BUS-2")
async def test_packets_that_cannot_be_read_raise_an_alert_and_disturb_nothing(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    await client.submit("j1")
    await plane.reaches("j1", "DISPATCHED")
    (order,) = await worker.got(1)
    later = packets.BusPacket(trace_id="t", sender_id="worker-1", protocol_version=2)
    later.created_at.GetCurrentTime()
    empty = packets.BusPacket(trace_id="t", sender_id="worker-1", protocol_version=1)
    empty.created_at.GetCurrentTime()
    newer = empty.SerializeToString() + b"\xf2\x06\x00"  # a field that no version has yet
    later.job_result.CopyFrom(pb.JobResult(job_id=order.job_id, status=pb.JOB_STATUS_FAILED, worker_id="worker-1"))
    for subject in (SUBMIT, RESULT, PROGRESS, CANCEL, HEARTBEAT):
        for data in (b"\xff\xff\xff", later.SerializeToString(), empty.SerializeToString(), newer):
            await worker.throw(subject, data)
    await plane.settle()
    assert set(client.alerts) == {100, 101, 102}
    await worker.report(order.job_id)
    await plane.told(client, "j1", "SUCCEEDED")
    assert (await plane.path("j1"), await plane.refused("j1")) == (SUCCEEDED, [])


# --- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-11", "BUS-12")
async def test_the_same_request_again_is_the_same_job_and_another_with_its_id_is_refused(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    for _ in range(3):
        await client.submit("j1", labels={"team": "a"})
    await plane.reaches("j1", "DISPATCHED")
    await client.submit("j1", labels={"team": "b"})
    await client.submit("j1", "job.other", labels={"team": "a"})
    (order,) = await worker.got(1)
    await worker.report(order.job_id)
    await plane.told(client, "j1", "SUCCEEDED")
    await client.submit("j1", labels={"team": "a"})  # perhaps it missed the result
    await plane.told(client, "j1", "SUCCEEDED", "SUCCEEDED")
    first, second = plane.tap.packets(RESULT)
    assert first == second
    assert (await plane.path("j1"), len(worker.orders), await plane.jobs()) == (SUCCEEDED, 1, ["j1"])
    assert client.alerts == [205, 205]
    assert plane.tap.packets("job.other") == []


@pytest.mark.requirement("BUS-6", "BUS-12", "D29")
async def test_a_job_is_cancelled_at_once_although_its_worker_goes_on(plane: Plane):
    go, begun = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Any:
        begun.set()
        await go.wait()
        return await succeed(request)

    client, listener = await plane.client(), await plane.peer("listener", CANCEL)
    async with sdk_worker(plane, slow):
        await client.submit("j1")
        await plane.runs_to("j1", "DISPATCHED")
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        before = await plane.path("j1")
        await plane.cancel("j1")
        await plane.told(client, "j1", "CANCELLED")
        assert listener.stops == [f"j1@{(await plane.job('j1')).epoch - 1}"]
        go.set()

        async def is_refused() -> bool:
            return bool(await plane.refused("j1"))

        await plane.until(is_refused)
    await plane.told(client, "j1", "CANCELLED")
    assert await plane.path("j1") == [*before, "job_cancelled"]
    assert await plane.refused("j1") == [("late", "SUCCEEDED", "sdk-1")]


@asynccontextmanager
async def our_worker(plane: Plane, app: App) -> AsyncGenerator[None]:
    """A worker of ours, through the same tap: what it sends is judged too."""
    bus = await open_bus(BusOptions(url=plane.tap.url, sender_id="ours-1"), clock=SystemClock(), now=now, new_id=new_id)
    ids = count(1)
    worker = BusWorker(
        app,
        bus,
        BusWorkerOptions(drain_s=0, settle_s=1, cancel_grace_s=0),
        clock=SystemClock(),
        new_id=lambda: f"ours-{next(ids)}",
        resolver=Kept(),
    )
    await worker.start()
    try:
        await until(lambda: plane.services.workers.alive("ours-1"))
        yield
    finally:
        await worker.drain()
        await bus.close()


@pytest.mark.requirement("BUS-1", "BUS-12", "D29")
@pytest.mark.parametrize("by", ["client", "owner"])
async def test_a_cancel_stops_the_handler_of_our_own_worker(plane: Plane, by: str):
    app, begun, stopped = App(), asyncio.Event(), asyncio.Event()

    @app.job(TOPIC)
    async def handler(ctx: BusContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    client = await plane.client()
    async with our_worker(plane, app):
        await client.submit("j1")
        await plane.reaches("j1", "RUNNING")
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        if by == "client":
            await client.cancel("j1")
        else:
            await plane.cancel("j1", CancelMode.HARD)
        await plane.reaches("j1", "CANCELLED")
        await plane.told(client, "j1", "CANCELLED")
        await asyncio.wait_for(stopped.wait(), PATIENCE_S)
    assert await plane.path("j1") == [*RAN, "job_cancelled"]


# --- while the control plane is away ---------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-10")
async def test_packets_sent_without_a_control_plane_reach_the_next_one(tmp_path: Path):
    with running_nats(jetstream=True) as server:
        async with plane_on(server, tmp_path) as first:
            worker = await first.peer("worker-1")
            await worker.serve()
            await first.submit("asked-before")
            await first.reaches("asked-before", "DISPATCHED")
            (order,) = await worker.got(1)
            wire_id = order.job_id
        async with plane_on(server, tmp_path) as bystander:
            await bystander.services.stop()
            client, worker = await bystander.client(), await bystander.peer("worker-1")
            await client.submit("asked-meanwhile")
            await worker.report(wire_id)
        async with plane_on(server, tmp_path) as second:
            client = await second.client()
            await second.reaches("asked-before", "SUCCEEDED")
            await second.reaches("asked-meanwhile", "SCHEDULED")
            await second.told(client, "asked-before", "SUCCEEDED")
            assert await second.path("asked-before") == SUCCEEDED


# --- workflows -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-8", "BUS-12", "D36")
async def test_the_steps_of_a_workflow_go_in_order_and_are_undone_in_reverse(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve(TOPIC)
    await worker.serve("job.undo")
    for step in (1, 2, 3):
        await client.submit(
            f"s{step}",
            parent_job_id="flow",
            workflow_id="wf",
            step_index=step,
            compensation=pb.Compensation(topic="job.undo"),
        )
    await client.submit("s4", parent_job_id="flow", workflow_id="wf", step_index=4)
    ends = ["SUCCEEDED", "SUCCEEDED", "FAILED", "SUCCEEDED", "SUCCEEDED"]
    for number, status in enumerate(ends):
        await plane.reaches(("s1", "s2", "s3", "s2.c", "s1.c")[number], "DISPATCHED")
        order = (await worker.got(number + 1))[number]
        await plane.settle()
        assert len(worker.orders) == number + 1  # one after the other
        await worker.report(order.job_id, status)
    for job_id, end in (("s3", "FAILED"), ("s4", "CANCELLED"), ("s2.c", "SUCCEEDED"), ("s1.c", "SUCCEEDED")):
        await plane.told(client, job_id, end)
    undone = [(order.env["job_id"], order.topic, order.parent_job_id) for order in worker.orders[3:]]
    assert undone == [("s2.c", "job.undo", "s2"), ("s1.c", "job.undo", "s1")]
    assert [packet.trace_id for packet in worker.heard] == ["t-s1", "t-s2", "t-s3", "t-s2", "t-s1"]
    assert [(await plane.path(step))[-1] for step in ("s1", "s2")] == ["job_compensated"] * 2
    assert (await plane.path("s4"))[-1] == "job_cancelled"


@pytest.mark.requirement("BUS-8", "BUS-12")
async def test_a_cancel_of_the_parent_reaches_its_children(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1", CANCEL)
    await worker.serve()
    await client.submit("parent")
    await plane.reaches("parent", "DISPATCHED")
    await client.submit("child", parent_job_id="parent")
    await plane.reaches("child", "DISPATCHED")
    await plane.settle()
    await plane.cancel("parent")
    await plane.told(client, "parent", "CANCELLED")
    await plane.told(client, "child", "CANCELLED")
    assert [await plane.path(job_id) for job_id in ("parent", "child")] == [[*HANDED_OUT, "job_cancelled"]] * 2
    assert sorted(worker.stops) == ["child@1", "parent@1"]


# --- everything that we say ------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-2")
async def test_every_kind_of_packet_that_we_send_is_one_by_the_sdks_own_judgement(plane: Plane):
    app = App()

    @app.job(TOPIC)
    async def handler(ctx: BusContext) -> str:
        return "done"

    client = await plane.client()
    async with our_worker(plane, app):
        await client.submit("j1")
        await plane.told(client, "j1", "SUCCEEDED")
        mute = await plane.peer("mute")
        await mute.serve("job.mute")
        await client.submit("j2", "job.mute")
        await plane.reaches("j2", "DISPATCHED")
        await plane.cancel("j2")
        await plane.told(client, "j2", "CANCELLED")
        await client.throw(SUBMIT, b"\xff")
        await plane.settle()
    assert await plane.path("j1") == SUCCEEDED
    plane.tap.check()
    kinds = {sent.kind for sent in plane.tap.sent}
    assert kinds == {"handshake", "heartbeat", "job_request", "job_progress", "job_result", "job_cancel", "alert"}


async def test_the_judgement_finds_a_packet_that_is_none(plane: Plane):
    plane.tap.check()
    missing = packets.BusPacket(trace_id="t", sender_id="somebody", protocol_version=1)
    missing.created_at.GetCurrentTime()
    missing.job_request.CopyFrom(pb.JobRequest(job_id="j1"))
    plane.tap.sent.append(Sent("job.test", missing.SerializeToString()))
    with pytest.raises(AssertionError):
        plane.tap.check()
    plane.tap.sent.clear()

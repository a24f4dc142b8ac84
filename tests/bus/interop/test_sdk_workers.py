"""Unmodified workers and clients of the CAP SDK under our control plane: jobs run, and both sides read each other's every packet."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cap.packet_boundary import parse_packet, verify_packet
from cap.progress import emit_progress, progress_payload

from tests.bus.interop.plane import FAILED, OURS, SUCCEEDED, TOPIC, Plane, new_id, now, pb, plane_on
from tests.bus.interop.sdk import fail, sdk_agent, sdk_worker, succeed
from tests.bus.test_signatures import OURS as OUR_KEY
from tests.bus.test_signatures import THEIRS as THEIR_KEY
from tests.bus.test_signatures import pem, private_file, public_pem
from tests.servers.nats import NatsServer
from trellis.app.wiring import SystemClock
from trellis.auth.principals import Principal
from trellis.bus.messages import direct_subject
from trellis.bus.pointers import make_pointers
from trellis.bus.safety.policy import DecisionKind
from trellis.bus.services import BusDependencies, BusServices
from trellis.bus.submitter import BacklogLimit, BusSubmitter
from trellis.bus.wire import BusOptions, open_bus
from trellis.bus.wire.nats import NatsBus
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role
from trellis.testing import FakeClock

pytestmark = [
    pytest.mark.requirement("BUS-2"),
    pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning"),  # by the SDK's own store
]


@pytest.mark.requirement("BUS-1", "BUS-11", "D28", "D29", "D53")
async def test_worker_without_a_handshake_gets_jobs_once_it_listens(plane: Plane):
    client = await plane.client()
    await client.submit("j1", labels={"team": "a"})
    await plane.reaches("j1", "SCHEDULED")
    await plane.settle()
    nobody = ["job_accepted", "job_scheduled", "job_dispatched", "job_retry_scheduled"]
    assert await plane.path("j1") == nobody  # handed out, and taken back at once: nobody listened
    async with sdk_worker(plane):
        await plane.runs_to("j1", "SUCCEEDED")
        await plane.told(client, "j1", "SUCCEEDED")
    job, events = await plane.job("j1"), await plane.events("j1")
    after = [event.type for event in events][len(nobody) :]
    assert [type_ for type_ in after if type_ not in nobody[2:]] == ["job_started", "job_succeeded"]
    assert (events[-1].role, events[-1].actor) == (Role.WORKER, "sdk-1")
    assert job.max_attempts - job.attempt == 1  # what nobody took has cost no attempt
    report = await plane.said("j1", "job_succeeded")
    assert (report["status"], report["worker_id"], report["result_ptr"]) == ("SUCCEEDED", "sdk-1", "redis://res:x")


@pytest.mark.requirement("BUS-3", "BUS-9", "D53")
async def test_an_agent_gets_its_payload_through_redis_and_its_jobs_directly(
    interop_server: NatsServer, tmp_path: Path, redis_url: str
):
    async with plane_on(interop_server, tmp_path, {"topics": {TOPIC: {"context": "redis"}}}) as plane:
        client, pointers = await plane.client(), make_pointers(None, redis_url)
        room = BacklogLimit(ledger=plane.ledger, clock=FakeClock())
        asking = BusSubmitter(topics=plane.topics, pointers=pointers, room=room, new_id=new_id)
        made = await asking.job(
            {"job_id": "sum", "topic": TOPIC},
            payload={"numbers": [1, 2, 3]},
            principal=Principal(name="me", roles=frozenset()),
        )
        async with sdk_agent(plane, redis_url) as seen:
            await plane.pass_time(1, beats=["agent-1"])
            await plane.ledger.submit(Actor(role=Role.GATEWAY, name="gateway"), [made])
            await plane.reaches("sum", "SUCCEEDED")
            await plane.told(client, "sum", "SUCCEEDED")
        assert await plane.path("sum") == SUCCEEDED
        dispatched, report = await plane.said("sum", "job_dispatched"), await plane.said("sum", "job_succeeded")
        assert (dispatched["worker_id"], dispatched["subject"]) == ("agent-1", direct_subject("agent-1"))
        (order,) = plane.tap.packets("worker.agent-1.jobs", "job_request")
        assert order.context_ptr.startswith("redis://ctx:")
        assert (seen, order.env["job_id"]) == ([order.job_id], "sum")
        assert report["result_ptr"] == f"redis://res:{order.job_id}"
        assert json.loads(await pointers.read(report["result_ptr"])) == {"sum": 6}
        await pointers.close()


@pytest.mark.requirement("BUS-13", "D29")
async def test_a_handler_that_raises_is_a_failure_and_that_is_the_end(plane: Plane):
    client = await plane.client()
    async with sdk_worker(plane, fail):
        await client.submit("j1")
        await plane.runs_to("j1", "FAILED")
        await plane.told(client, "j1", "FAILED")
    assert (await plane.path("j1"))[-2:] == FAILED[-2:]
    assert (await plane.said("j1", "job_failed"))["error_message"] == "handler failed"
    assert await plane.jobs() == ["j1"]


@pytest.mark.requirement("BUS-13")
async def test_an_agent_that_cannot_have_its_payload_fails_the_job(plane: Plane, redis_url: str):
    client = await plane.client()
    async with sdk_agent(plane, redis_url):
        await plane.pass_time(1, beats=["agent-1"])
        await client.submit("j1", context_ptr="redis://ctx:nothing-there")
        await plane.reaches("j1", "FAILED")
        await plane.told(client, "j1", "FAILED")
    assert await plane.path("j1") == FAILED
    assert (await plane.said("j1", "job_failed"))["error_message"] == "context not found"


@pytest.mark.requirement("BUS-4")
async def test_constraints_of_the_policy_travel_with_the_job(plane: Plane):
    plane.kernel.says(DecisionKind.ALLOW_WITH_CONSTRAINTS, constraints={"max_runtime_ms": 5000})
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    await client.submit("j1", budget=pb.Budget(deadline_ms=60_000, max_total_tokens=9))
    await plane.reaches("j1", "DISPATCHED")
    (order,) = await worker.got(1)
    assert json.loads(order.env["TRELLIS_POLICY_CONSTRAINTS"]) == {"max_runtime_ms": 5000}
    assert (order.budget.deadline_ms, order.budget.max_total_tokens) == (5000, 9)


@pytest.mark.requirement("BUS-5", "D29")
async def test_progress_that_a_handler_sends_starts_its_job_and_keeps_it(interop_server: NatsServer, tmp_path: Path):
    go = asyncio.Event()
    async with plane_on(interop_server, tmp_path, {"topics": {TOPIC: {"lease_s": 6}}}) as plane:
        client, handler = await plane.client(), await plane.peer("sdk-1")

        async def slow(request: Any) -> Any:
            await emit_progress(handler.client, progress_payload("sdk-1", request.job_id, "parse", 10, "page 1"))
            await go.wait()
            return await succeed(request)

        async with sdk_worker(plane, slow):
            await client.submit("j1")
            await plane.runs_to("j1", "RUNNING")
            wire_id = f"j1@{(await plane.job('j1')).epoch}"
            for percent in range(20, 40):
                await emit_progress(handler.client, progress_payload("sdk-1", wire_id, "parse", percent, "on"))
                await plane.heard_everything()
                await plane.pass_time(1)
            assert await plane.state("j1") == "RUNNING"  # three leases later
            go.set()
            await plane.told(client, "j1", "SUCCEEDED")
        assert (await plane.path("j1"))[-3:] == SUCCEEDED[-3:]
        assert [event.actor for event in (await plane.events("j1"))[-2:]] == ["sdk-1"] * 2


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, Any]:
    private_file(tmp_path / "own.pem", pem(OUR_KEY))
    (tmp_path / "known").mkdir()
    for sender in ("sdk-1", "agent-1", "client-1"):
        (tmp_path / "known" / f"{sender}.pem").write_bytes(public_pem(THEIR_KEY))
    return {"key_file": tmp_path / "own.pem", "keys_dir": tmp_path / "known", "require_signatures": True}


async def test_required_signatures_on_both_sides_sign_every_packet(
    interop_server: NatsServer, tmp_path: Path, key_files: dict[str, Any], redis_url: str
):
    trusts: Any = {"public_keys": {OURS: OUR_KEY.public_key()}, "private_key": THEIR_KEY}
    async with plane_on(interop_server, tmp_path, **key_files) as plane:
        client = await plane.client(key=THEIR_KEY)
        async with sdk_worker(plane, **trusts), sdk_agent(plane, redis_url, "job.sum", **trusts):
            await plane.pass_time(1, beats=["agent-1"])
            await client.submit("to-worker")
            await client.submit("to-agent", "job.sum", context_ptr="redis://ctx:nothing-there")
            await plane.runs_to("to-worker", "SUCCEEDED")
            await plane.reaches("to-agent", "FAILED")
            await plane.told(client, "to-worker", "SUCCEEDED")
            await plane.told(client, "to-agent", "FAILED")
        log, keys = logging.getLogger("cap.test"), {OURS: OUR_KEY.public_key()}
        assert plane.tap.sent
        assert all(verify_packet(sent.packet, keys, log) for sent in plane.tap.sent)


async def test_unsigned_packet_is_ignored_where_signatures_are_required(
    interop_server: NatsServer, tmp_path: Path, key_files: dict[str, Any]
):
    async with plane_on(interop_server, tmp_path, **key_files) as plane:
        client, worker = await plane.client(key=THEIR_KEY), await plane.peer("sdk-1", key=THEIR_KEY)
        liar = await plane.peer("sdk-1")
        await worker.serve()
        await liar.submit("unsigned")
        await client.submit("j1")
        await plane.reaches("j1", "DISPATCHED")
        (order,) = await worker.got(1)
        await liar.report(order.job_id, "FAILED")
        liar.key = OUR_KEY  # somebody else's
        await liar.report(order.job_id, "FAILED")
        await plane.settle()
        assert await plane.state("j1") == "DISPATCHED"
        assert set(client.alerts) == {103, 104}
        await worker.report(order.job_id)
        await plane.told(client, "j1", "SUCCEEDED")
        assert (await plane.path("j1"), await plane.jobs()) == (SUCCEEDED, ["j1"])


@pytest.mark.requirement("BUS-11")
async def test_copies_of_signed_packets_that_another_process_takes_change_nothing(
    interop_server: NatsServer, tmp_path: Path, key_files: dict[str, Any]
):
    """What a process has had is remembered by that process alone: the ledger decides that a copy is no second request, result or cancel."""
    async with plane_on(interop_server, tmp_path, **key_files) as plane:
        client, worker = await plane.client(key=THEIR_KEY), await plane.peer("sdk-1", key=THEIR_KEY)
        thief, copies = await plane.peer("thief"), list[tuple[str, bytes]]()

        async def copy(message: Any) -> None:
            if parse_packet(message.data).sender_id in {"client-1", "sdk-1"}:
                copies.append((message.subject, message.data))

        await thief.client.subscribe("sys.job.>", cb=copy)
        await worker.serve()
        await client.submit("j1")
        await plane.reaches("j1", "DISPATCHED")
        (order,) = await worker.got(1)
        await worker.progress(order.job_id)
        await worker.report(order.job_id)
        await plane.told(client, "j1", "SUCCEEDED")
        await client.submit("j2", "job.nobody")  # with a worker on it, the cancel would wait for that one's answer
        await plane.reaches("j2", "SCHEDULED")
        await plane.settle()
        await client.cancel("j2")
        await plane.reaches("j2", "CANCELLED")
        await plane.settle()
        before = [await plane.path(job_id) for job_id in ("j1", "j2")]
        assert len({subject for subject, _ in copies}) == 4, "a request, a progress, a result, a cancel"
        await plane.services.stop()
        async with another_process(plane, **key_files) as (plane.bus, plane.services):
            for subject, data in list(copies):
                await thief.throw(subject, data)
            await plane.settle()
            assert [await plane.path(job_id) for job_id in ("j1", "j2")] == before
            assert (await plane.jobs(), len(worker.orders)) == (["j1", "j2"], 1)
            assert set(client.results("j1")) == {"SUCCEEDED"}, "told again, and the same"


@asynccontextmanager
async def another_process(plane: Plane, **options: Any) -> AsyncGenerator[tuple[NatsBus, BusServices]]:
    """A second process of the same control plane, which remembers no packet."""
    opened = BusOptions(url=plane.tap.url, sender_id=OURS, **options)
    bus = await open_bus(opened, clock=SystemClock(), now=now, new_id=new_id)
    assert isinstance(bus, NatsBus)
    parts = BusDependencies(
        ledger=plane.ledger,
        bus=bus,
        topics=plane.topics,
        kernel=plane.kernel,
        clock=plane.clock,
        new_id=new_id,
        name="plane-2",
    )
    services = BusServices(parts)
    await services.start()
    try:
        yield bus, services
    finally:
        await services.stop()
        await bus.close()

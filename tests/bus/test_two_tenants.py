"""Two owners on the bus: nobody cancels, holds up, ends or undoes what is another's, nor takes its keys (D62, BUS-8).

Steps that strangers hung below another's parent before that was refused are stored, and are tested as such: they are put into the ledger.
"""

from typing import Any

import pytest
import pytest_asyncio

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import TOPIC, Rig
from tests.bus.test_intake import Client, intake_of
from trellis.auth import matrices
from trellis.bus.messages import CANCEL, SUBMIT, ErrorCode, JobCancel, Status
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.engine.jobs import Actor, JobId
from trellis.lifecycles import Role

OWNER, STRANGER = "iryna", "mallory"
ONCE = {TOPIC: {"max_attempts": 2, "backoff_s": 0}}
UNDO = {"topic": TOPIC}


async def step(rig: Rig, job_id: str, index: int, by: str = OWNER, **said: Any) -> str:
    """A step of one workflow of one tenant, by all that a caller chooses."""
    return await rig.submit(
        job_id=job_id, by=by, parent_job_id="p", workflow_id="w", tenant_id="acme", step_index=index, **said
    )


async def end(parts: Parts, job_id: str, status: Status = Status.SUCCEEDED) -> None:
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    await parts.result(await parts.dispatch(job_id, "w1"), "w1", status)


@pytest_asyncio.fixture(loop_scope="session", params=["there", "not there"])
async def parent(request: pytest.FixtureRequest, rig: Rig) -> str:
    if request.param == "there":
        await rig.submit(job_id="p", by=OWNER)
    return "p"


@pytest.mark.on_both
@pytest.mark.requirement("D62", "BUS-8")
async def test_a_failed_step_of_another_tenant_compensates_nothing(rig: Rig, parent: str):
    parts = parts_of(rig)
    await step(rig, "s0", 0, compensation=UNDO)
    await end(parts, "s0")
    await step(rig, "bad", 1, by=STRANGER)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    assert not any(one.endswith(".c") for one in await parts.jobs()), parent
    await step(rig, "s1", 1)
    await end(parts, "s1", Status.FAILED)
    await parts.follow_up()
    assert "s0.c" in await parts.jobs(), "a failed step of its own does"


@pytest.mark.on_both
@pytest.mark.requirement("D62", "BUS-8")
async def test_a_step_of_another_tenant_delays_no_workflow(rig: Rig, parent: str):
    worker = await rig.worker("w1", TOPIC)
    await step(rig, "never", 0, by=STRANGER, topic="job.unserved")
    await step(rig, "s1", 1)
    await rig.run()
    assert "s1" in worker.jobs, parent
    await step(rig, "s0", 0, by="<tenant=acme>olha", topic="job.unserved")
    await step(rig, "s2", 2, by="<tenant=acme>iryna")
    await rig.run()
    assert "s2" not in worker.jobs, "a step of the same tenant does"


@pytest.mark.requirement("D62")
async def test_a_failed_step_of_another_tenant_ends_no_workflow(rig: Rig):
    parts = parts_of(rig)
    await step(rig, "bad", 0, by=STRANGER)
    await step(rig, "s1", 1)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    assert await rig.state("s1") == "PENDING"


@pytest.mark.on_both
@pytest.mark.requirement("D62")
@pytest.mark.parametrize("first", ["the steps", "the parent"])
async def test_cancel_of_a_job_with_the_id_of_another_tenants_parent_ends_no_child(rig: Rig, first: str):
    parts = parts_of(rig)
    if first == "the steps":
        await step(rig, "s0", 0)
    await rig.submit(job_id="p", by=STRANGER)
    await parts.cancel("p")
    if first == "the parent":
        await step(rig, "s0", 0)
    await parts.follow_up()
    assert await rig.state("s0") == "PENDING"


@pytest.mark.requirement("D62", "BUS-7")
async def test_a_cancelled_parent_of_another_tenant_prevents_no_retry(rig_of: Opens):
    async with rig_of(topics=ONCE) as rig:
        parts = parts_of(rig)
        await step(rig, "s0", 0)
        await rig.submit(job_id="p", by=STRANGER)
        await parts.cancel("p")
        await end(parts, "s0", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert "s0.r1" in await parts.jobs()


@pytest.mark.requirement("BUS-8")
async def test_child_made_by_the_worker_of_a_job_is_cancelled_with_it(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(job_id="p", by=OWNER, worker_id="w1")
    await parts.start(held, "w1")
    await rig.submit(job_id="part", by="<bus>w1", parent_job_id="p")
    await rig.submit(job_id="alien", by=STRANGER, parent_job_id="p")
    await parts.cancel("p")
    await parts.follow_up()
    assert (await rig.state("part"), await rig.state("alien")) == ("CANCELLED", "PENDING")


# --- packets -----------------------------------------------------------------------------------------------------------


def client_of(rig: Rig, name: str) -> Client:
    return Client(rig.sender(name), intake_of(rig, rig.topics))


def request(job_id: str, **said: object) -> JobRequest:
    return JobRequest.model_validate({"job_id": job_id, "topic": TOPIC, **said})


@pytest.mark.on_both
@pytest.mark.requirement("D62", "BUS-1", "AUTH-1")
async def test_a_sender_cancels_its_own_jobs_alone(rig: Rig):
    one, other = client_of(rig, "client-1"), client_of(rig, OWNER)
    await one.send(SUBMIT, request("mine"))
    await rig.submit(job_id="by-http", by=OWNER, principal_id=OWNER)
    await other.listen()
    for job_id in ("mine", "by-http"):
        await other.send(CANCEL, JobCancel(job_id=job_id, requested_by="client-1"))
        assert await rig.state(job_id) == "PENDING"
    assert other.alerts == [ErrorCode.PERMISSION_DENIED] * 2
    await one.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    assert await rig.state("mine") == "CANCELLED"


@pytest.mark.requirement("AUTH-1", "AUTH-7")
async def test_the_authority_matrix_decides_about_requests_and_cancels_on_the_bus(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """A sender is a submitter: with that role's grants taken from the table, the bus takes nothing from it."""
    sender = client_of(rig, "client-1")
    await sender.listen()
    await sender.send(SUBMIT, request("mine"))
    rows = {**matrices.ROWS, Role.SUBMITTER: matrices.MatrixRow()}
    monkeypatch.setattr(matrices, "RULES", matrices.table(matrices.COLUMNS, rows))
    await sender.send(SUBMIT, request("more"))
    await sender.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    assert sender.alerts == [ErrorCode.PERMISSION_DENIED] * 2
    assert [result.job_id for result in sender.results] == ["more"], "its client gets an answer"
    assert (await rig.ledger.job(JobId("more")), await rig.state("mine")) == (None, "PENDING")


@pytest.mark.requirement("D62")
async def test_a_sender_still_cancels_a_job_that_it_sent_to_the_version_before(rig: Rig):
    await rig.submit(job_id="old", by="client-1", principal_id="somebody")
    await client_of(rig, "client-1").send(CANCEL, JobCancel(job_id="old", requested_by="client-1"))
    assert await rig.state("old") == "CANCELLED"


@pytest.mark.requirement("D62", "BUS-8")
async def test_a_sender_hangs_jobs_below_its_own_and_below_what_it_works_on(rig: Rig):
    parts = parts_of(rig)
    one, other = client_of(rig, "client-1"), client_of(rig, "client-2")
    await one.send(SUBMIT, request("p"))
    await other.listen()
    await other.send(SUBMIT, request("alien", parent_job_id="p"))
    assert other.alerts == [ErrorCode.INVALID_INPUT]
    assert [result.error_code for result in other.results] == ["INVALID_INPUT"]
    assert await rig.ledger.job("alien") is None  # type: ignore[arg-type]
    await one.send(SUBMIT, request("step", parent_job_id="p"))
    await parts.schedule("p")
    await parts.dispatch("p", "client-2")
    await other.send(SUBMIT, request("part", parent_job_id="p"))
    assert (await rig.state("step"), await rig.state("part")) == ("PENDING", "PENDING")


@pytest.mark.requirement("D62", "BUS-6", "BUS-8")
async def test_a_child_under_a_wire_id_shows_the_start_of_an_attempt_only_from_a_worker_of_its_topic(rig: Rig):
    parts, stranger, worker = parts_of(rig), client_of(rig, "stranger"), client_of(rig, "worker-1")
    for one in (stranger, worker):
        one.intake.works_on = parts.results.works_on
    held = await parts.dispatched(job_id="p", by="<bus>client-1")
    elsewhere = await rig.worker("stranger", "job.other")
    await elsewhere.shake("job.other")
    await stranger.send(SUBMIT, request("theirs", parent_job_id=held.wire_id))
    assert await rig.state("p") == "DISPATCHED"
    serving = await rig.worker("worker-1", TOPIC)
    await serving.shake(TOPIC)
    await worker.send(SUBMIT, request("part", parent_job_id=held.wire_id))
    started = (await rig.events("p"))[-1]
    assert (started.type, started.actor) == ("job_started", "worker-1")
    assert (await parts.result(held, "worker-1")).message == "accepted"


@pytest.mark.on_both
@pytest.mark.requirement("D62", "BUS-11")
async def test_a_sender_takes_nobodys_key(rig: Rig):
    one, other = client_of(rig, "client-1"), client_of(rig, "client-2")
    for client, job_id in ((other, "theirs"), (one, "mine")):
        await client.listen()
        await client.send(SUBMIT, request(job_id, tenant_id="acme", meta={"idempotency_key": "order-4711"}))
        assert await rig.state(job_id) == "PENDING"
    await one.send(SUBMIT, request("again", tenant_id="acme", meta={"idempotency_key": "order-4711"}))
    assert await rig.ledger.job("again") is None  # type: ignore[arg-type]
    assert one.alerts == other.alerts == []


@pytest.mark.requirement("D62", "BUS-11")
async def test_a_key_that_a_sender_used_before_still_means_its_job(rig: Rig):
    old = new_bus_job(request("old", meta={"idempotency_key": "k"}), rig.topics, trace_id="t")
    await rig.ledger.submit(Actor(role=Role.GATEWAY, name="client-1"), [old])
    await client_of(rig, "client-1").send(SUBMIT, request("new", meta={"idempotency_key": "k"}))
    assert await rig.ledger.job("new") is None  # type: ignore[arg-type]

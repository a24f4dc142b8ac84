"""What another implementer of CAP would notice of our control plane, driven with packets over NATS."""

from typing import Any

import pytest

from tests.bus.interop.plane import RAN, TOPIC, Peer, Plane, pb
from trellis.bus.scheduling.early_cancels import KEPT_S

DUPLICATE, INVALID_INPUT = 205, 203


def told(peer: Peer, job_id: str) -> list[Any]:
    """The results that the control plane told this client of a job."""
    return [
        packet.job_result
        for packet in peer.heard
        if packet.sender_id == "trellis" and packet.job_result.job_id == job_id
    ]


async def handed_out(plane: Plane, client: Peer, worker: Peer, job_id: str = "j1", **request: Any) -> Any:
    """The order of a new job of this client, which only this worker gets."""
    before = len(worker.orders)
    await client.submit(job_id, **request)
    await plane.reaches(job_id, "DISPATCHED")
    return (await worker.got(before + 1))[-1]


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3", "D68")
async def test_a_worker_without_our_version_that_names_no_topics_gets_nothing_by_the_topics_own_subject(plane: Plane):
    client, later = await plane.client(), await plane.peer("later")
    await later.shake(supported_versions=[2])
    await later.hear(TOPIC, TOPIC)
    await plane.heard_everything()
    await client.submit("j1")
    await plane.reaches("j1", "SCHEDULED")
    await plane.settle()
    assert "later names no topics" in (await plane.said("j1", "job_deferred"))["reason"]
    assert later.orders == []
    able = await plane.peer("able")
    await able.serve(direct=True)
    await plane.heard_everything()
    await client.submit("j2")
    await able.got(1)
    assert later.orders == []


# --- parents ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-8", "D68")
async def test_children_of_an_orchestrator_that_names_its_parent_by_the_wire_id_are_children_of_the_job(plane: Plane):
    client, orchestrator = await plane.client(), await plane.peer("orchestrator")
    await orchestrator.serve()
    order = await handed_out(plane, client, orchestrator, "p")
    await orchestrator.submit("child", "job.nobody", parent_job_id=order.job_id, workflow_id="wf")
    await plane.reaches("child", "SCHEDULED")
    assert ((await plane.job("child")).parent_id, await plane.state("p")) == ("p", "RUNNING")
    await orchestrator.submit("child", "job.nobody", parent_job_id="p@2", workflow_id="wf")  # as by its next attempt
    await client.cancel("p")
    await plane.heard_everything()
    await orchestrator.report(order.job_id, "CANCELLED")
    await plane.told(client, "p", "CANCELLED")
    await plane.told(client, "child", "CANCELLED")
    assert (await plane.jobs(), client.alerts) == (["child", "p"], [])


# --- idempotency keys ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-11", "BUS-12", "D68")
@pytest.mark.parametrize("env", [{}, {"other": "work"}], ids=["same request", "other request"])
async def test_a_repeated_idempotency_key_under_a_second_job_id_is_refused_under_that_id(
    plane: Plane, env: dict[str, str]
):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    meta = pb.JobMetadata(idempotency_key="k1")
    await worker.report((await handed_out(plane, client, worker, "first", meta=meta)).job_id)
    await plane.told(client, "first", "SUCCEEDED")
    await client.submit("second", meta=meta, env=env)
    await plane.told(client, "second", "FAILED")
    (refusal,) = told(client, "second")
    assert (refusal.error_code, refusal.error_code_enum) == ("DUPLICATE", DUPLICATE)
    assert "first" in refusal.error_message
    assert (client.results("first"), client.alerts) == (["SUCCEEDED"], [DUPLICATE])
    assert await plane.jobs() == ["first"]


# --- cancels ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-1", "BUS-12", "D68")
async def test_a_cancel_that_overtakes_its_request_cancels_the_job(plane: Plane):
    client, worker, stranger = await plane.client(), await plane.peer("worker-1"), await plane.peer("stranger")
    await worker.serve()
    await client.cancel("j1")
    await stranger.cancel("j2")
    await plane.heard_everything()
    for job_id in ("j1", "j2"):
        await client.submit(job_id)
    await plane.told(client, "j1", "CANCELLED")
    await plane.reaches("j2", "DISPATCHED")  # whose job it is not does not cancel it
    assert [order.env["job_id"] for order in worker.orders] == ["j2"]
    await client.cancel("j3")
    await plane.heard_everything()
    await plane.pass_time(KEPT_S + 1, step_s=KEPT_S + 1)
    await client.submit("j3")
    await plane.reaches("j3", "DISPATCHED")  # it is remembered for some seconds, not for ever


@pytest.mark.requirement("BUS-12", "D68")
async def test_a_cancel_that_another_process_heard_before_the_request_cancels_the_job(plane: Plane):
    """The process that hears the cancel is not the one that takes the request in: it finds the job in the ledger."""
    client = await plane.client()
    await client.cancel("j1")
    await plane.heard_everything()
    await plane.submit("j1")  # straight into the ledger, as another process would
    await plane.pass_time(1)
    await plane.told(client, "j1", "CANCELLED")


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-6", "D29", "D68")
async def test_a_result_or_cancel_of_another_attempt_or_worker_of_the_same_dispatch_changes_nothing(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve(direct=True)
    await plane.heard_everything()
    order = await handed_out(plane, client, worker)
    sent = order.dispatch
    assert (sent.attempt, sent.assigned_worker_id) == (1, "worker-1")
    for wrong in ({"attempt": 2}, {"attempt": 9}, {"assigned_worker_id": "worker-2"}):
        said = {"dispatch_id": sent.dispatch_id, "attempt": 1, "assigned_worker_id": "worker-1", **wrong}
        await worker.report(order.job_id, dispatch=said)
        await worker.progress(order.job_id, dispatch=said)
        await client.cancel("j1", dispatch=said)
    await plane.settle()
    assert await plane.path("j1") == RAN[:-1]
    assert {kind for kind, _, _ in await plane.refused("j1")} == {"stale", "foreign"}
    await worker.report(order.job_id, dispatch=sent)
    await plane.told(client, "j1", "SUCCEEDED")


@pytest.mark.requirement("BUS-2", "BUS-13", "D68")
@pytest.mark.parametrize(
    "said, code, number",
    [
        ({"error_code_enum": 201}, "RESOURCE_EXHAUSTED", 201),
        ({"error_code_enum": 4711}, "4711", 4711),
        ({"error_code": "ERROR_CODE_JOB_NOT_FOUND"}, "ERROR_CODE_JOB_NOT_FOUND", 204),
        ({"error_code": "MINE", "error_code_enum": 301}, "MINE", 301),
    ],
)
async def test_the_error_code_of_a_worker_reaches_the_client_as_number_and_text(
    plane: Plane, said: dict[str, Any], code: str, number: int
):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    await worker.report((await handed_out(plane, client, worker)).job_id, "FAILED", **said)
    await plane.told(client, "j1", "FAILED")
    (result,) = told(client, "j1")
    assert (result.error_code, result.error_code_enum) == (code, number)

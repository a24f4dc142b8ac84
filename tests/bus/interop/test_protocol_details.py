"""What another implementer of CAP would notice of our control plane, driven with packets over NATS."""

from datetime import timedelta
from typing import Any

import pytest

from tests.bus.interop.plane import RAN, TOPIC, Peer, Plane, now, packets, pb, until
from trellis.bus.messages import DEAD_LETTERS, HANDSHAKE, HEARTBEAT, RESULT, direct_subject
from trellis.bus.safety.policy import DecisionKind
from trellis.bus.scheduling.intake import KEPT_S
from trellis.bus.scheduling.placement import DOUBT_S_MAX

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
    assert (later.orders, client.alerts) == ([], [100])
    able = await plane.peer("able")
    await able.serve(direct=True)
    await plane.heard_everything()
    await client.submit("j2")
    await plane.runs_to("j1", "DISPATCHED")
    for order in await able.got(2):
        await able.report(order.job_id)
    for job_id in ("j1", "j2"):
        await plane.reaches(job_id, "SUCCEEDED")
    assert later.orders == []
    silent = await plane.peer("silent")
    await silent.serve("job.new")  # listens on a topic that nobody has used, and never introduces itself
    await client.submit("first", "job.new")
    await plane.reaches("first", "SCHEDULED")
    await plane.settle()
    assert silent.orders == []
    for part in range(5):
        assert silent.orders == [], part
        await later.beat()
        await plane.heard_everything()
        await plane.pass_time(DOUBT_S_MAX / 5, step_s=DOUBT_S_MAX / 5)
    assert "later" in {seen.worker_id for seen in plane.services.workers.live()}
    await plane.runs_to("first", "DISPATCHED")
    assert [order.job_id for order in await silent.got(1)] == ["first@1"], "held back for a while, and not for good"


# --- parents ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-8", "D68")
async def test_children_of_an_orchestrator_that_names_its_parent_by_the_wire_id_are_children_of_the_job(plane: Plane):
    client, orchestrator = await plane.client(), await plane.peer("orchestrator")
    await orchestrator.serve(direct=True)
    await plane.heard_everything()
    order = await handed_out(plane, client, orchestrator, "p")
    await orchestrator.submit("child", "job.nobody", parent_job_id=order.job_id, workflow_id="wf")
    await plane.reaches("child", "SCHEDULED")
    await plane.reaches("p", "RUNNING")
    assert (await plane.job("child")).parent_id == "p"
    await orchestrator.submit("child", "job.nobody", parent_job_id="p@2", workflow_id="wf")  # as by its next attempt
    await client.cancel("p")
    await plane.heard_everything()
    await orchestrator.report(order.job_id, "CANCELLED")
    await plane.told(client, "p", "CANCELLED")
    await plane.told(client, "child", "CANCELLED")
    assert (await plane.jobs(), client.alerts) == (["child", "p"], [])


# --- idempotency keys ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-12")
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
    assert (client.results("first"), client.alerts) == (["SUCCEEDED"], [DUPLICATE] if env else [])
    assert await plane.jobs() == ["first"]


# --- cancels ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-1", "BUS-12")
async def test_a_cancel_that_overtakes_its_request_cancels_the_job(plane: Plane):
    client, worker, stranger = await plane.client(), await plane.peer("worker-1"), await plane.peer("stranger")
    await worker.serve()
    await client.cancel("j1", later_s=30)  # created behind its request, and heard before it
    await stranger.cancel("j2", later_s=30)
    await client.cancel("j4")  # created before its request: that one is wanted
    await plane.heard_everything()
    for job_id in ("j1", "j2", "j4"):
        await client.submit(job_id)
    await plane.told(client, "j1", "CANCELLED")
    await plane.reaches("j2", "DISPATCHED")  # whose job it is not does not cancel it
    await plane.reaches("j4", "DISPATCHED")
    assert sorted(order.env["job_id"] for order in worker.orders) == ["j2", "j4"]
    await client.cancel("j3", later_s=300)
    await plane.heard_everything()
    await plane.pass_time(KEPT_S + 1, step_s=KEPT_S + 1)
    await client.submit("j3")
    await plane.reaches("j3", "DISPATCHED")  # it is remembered for some seconds, not for ever


@pytest.mark.requirement("BUS-12")
async def test_a_cancel_that_another_process_received_before_the_request_cancels_the_job(plane: Plane):
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


@pytest.mark.requirement("BUS-2", "D68")
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


@pytest.mark.requirement("BUS-2", "BUS-12", "D68")
@pytest.mark.parametrize("said", ["FAILED_FATAL", "TIMEOUT", "DENIED", "CANCELLED"])
async def test_failure_reported_by_a_worker_reaches_the_client_and_the_dead_letters(plane: Plane, said: str):
    client, worker, tomb = await plane.client(), await plane.peer("worker-1"), await plane.peer("tomb", DEAD_LETTERS)
    await worker.serve()
    order = await handed_out(plane, client, worker)
    await worker.report(order.job_id, said, error_message="why")
    ours = said != "FAILED_FATAL"
    await plane.told(client, "j1", "FAILED" if ours else said)
    assert await plane.state("j1") == "FAILED"
    message = f"why (its worker reported {said})" if ours else "why"
    dead = [(one.job_id, one.error_message, one.error_code_enum) for one in told(tomb, "j1")]
    assert dead == [("j1", message, 0)], "no number of a denial or timeout of ours"


@pytest.mark.requirement("BUS-7", "BUS-12", "D68")
async def test_a_failure_that_is_done_again_names_its_retry_and_is_no_dead_letter(plane: Plane):
    client, worker, tomb = await plane.client(), await plane.peer("worker-1"), await plane.peer("tomb", DEAD_LETTERS)
    await worker.serve()
    await worker.report((await handed_out(plane, client, worker)).job_id, "FAILED_RETRYABLE", error_code="BUSY")
    await plane.told(client, "j1", "FAILED_RETRYABLE")
    assert "it is done again as job j1.r1" in told(client, "j1")[0].error_message
    await plane.runs_to("j1.r1", "DISPATCHED")
    await worker.report((await worker.got(2))[1].job_id, "FAILED")
    await plane.told(client, "j1.r1", "FAILED")
    assert (told(tomb, "j1"), len(told(tomb, "j1.r1"))) == ([], 1)


@pytest.mark.requirement("BUS-2", "BUS-9", "D68")
async def test_references_and_identity_reach_the_worker_and_references_and_dispatch_the_client(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    ref = pb.ResourceRef(resolver_id="s", uri="objects://ctx/x", sha256=b"\x0f" * 32, size_bytes=7, purpose="input")
    ref.expires_at.FromJsonString("2030-01-02T03:04:05.000000006Z")
    who = pb.IdentityBinding(tenant_id="acme", principal_id="ann", actor_id="bot", delegation_id="d")
    order = await handed_out(plane, client, worker, context_ref=ref, identity=who, env={"job_id": "mine"})
    assert (order.context_ref, order.identity) == (ref, who)
    assert (order.env["job_id"], order.env["trellis.job_id"]) == ("mine", "j1")
    await worker.report(order.job_id, result_ref=ref, artifact_refs=[pb.ResourceRef(uri="a://1"), ref])
    await plane.told(client, "j1", "SUCCEEDED")
    (result,) = told(client, "j1")
    assert (result.result_ref, list(result.artifact_refs)) == (ref, [pb.ResourceRef(uri="a://1"), ref])
    sent = pb.DispatchIdentity(dispatch_id=order.dispatch.dispatch_id, attempt=1, assigned_worker_id="worker-1")
    assert result.dispatch == sent


@pytest.mark.requirement("BUS-2")
async def test_request_with_contradicting_principals_is_refused(plane: Plane):
    client = await plane.client()
    await client.submit("j1", tenant_id="acme", identity=pb.IdentityBinding(tenant_id="other"))
    await plane.told(client, "j1", "FAILED")
    assert "identity/tenant_id" in told(client, "j1")[0].error_message


@pytest.mark.requirement("BUS-2", "BUS-12")
async def test_an_unusable_job_id_is_refused_under_that_id(plane: Plane):
    client = await plane.client()
    for job_id in ("a/b", "\u00e4", "a b", "x" * 250, "line\nbreak"):
        await client.submit(job_id)
        heard_as = job_id[:200].replace("\n", "")
        await plane.told(client, heard_as, "FAILED")
        assert (told(client, heard_as)[0].error_code_enum, await plane.jobs()) == (INVALID_INPUT, [])
    assert client.alerts == [INVALID_INPUT] * 5


@pytest.mark.requirement("BUS-2")
async def test_each_bad_result_raises_one_alert_and_a_noisy_sender_mutes_no_other(plane: Plane):
    client, noisy, quiet = await plane.client(), await plane.peer("noisy"), await plane.peer("quiet")
    for sender, number in ((noisy, 20), (quiet, 1)):
        bad = packets.BusPacket(trace_id="t", sender_id=sender.sender_id, protocol_version=2)
        bad.created_at.GetCurrentTime()
        bad.job_result.CopyFrom(pb.JobResult(job_id="j@1", status=5, worker_id=sender.sender_id))
        for _ in range(number):
            await sender.throw(RESULT, bad.SerializeToString())
    await plane.settle()
    about = [alert.details["sender_id"] for alert in client._of("alert")]
    assert (about.count("noisy"), about.count("quiet")) == (5, 1)


# --- who is there ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-3", "D68")
async def test_a_day_old_heartbeat_or_handshake_wins_no_orders(plane: Plane):
    client, old = await plane.client(), await plane.peer("old", direct_subject("old"))
    presence: dict[str, Any] = {
        HANDSHAKE: {
            "handshake": {"component_id": "old", "role": 3, "ready_topics": [TOPIC], "supported_versions": [1]}
        },
        HEARTBEAT: {"heartbeat": {"worker_id": "old", "max_parallel_jobs": 8}},
    }
    for age_s in (86_400, -86_400):
        for subject, body in presence.items():
            packet = packets.BusPacket(trace_id="t", sender_id="old", protocol_version=1, **body)
            packet.created_at.FromDatetime(now() - timedelta(seconds=age_s))
            await old.throw(subject, packet.SerializeToString())
    await plane.settle()
    await client.submit("j1")
    await plane.reaches("j1", "SCHEDULED")
    await plane.settle()
    assert (plane.services.workers.alive("old"), old.orders, client.alerts) == (None, [], [101] * 4)


@pytest.mark.requirement("BUS-2")
async def test_the_scheduler_introduces_itself(plane: Plane):
    client = await plane.peer("watcher", HANDSHAKE)
    assert plane.services.introduction in plane.services.services
    assert await plane.services.introduction.run_once()
    await until(lambda: client.heard)
    (said,) = [packet.handshake for packet in client.heard if packet.sender_id == "trellis"]
    assert (said.role, list(said.supported_versions), said.component_id) == (2, [1], "trellis")
    assert said.capabilities["cancel"]


# --- the safety kernel -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-4")
async def test_redacted_context_replaces_the_context_of_the_request(plane: Plane):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    plane.kernel.says(DecisionKind.ALLOW, redacted={"context_ptr": "objects://ctx/clean"})
    secret = pb.ResourceRef(uri="objects://ctx/secret")
    undo = pb.Compensation(topic="job.undo", context_ptr="objects://ctx/secret", context_ref=secret)
    order = await handed_out(
        plane, client, worker, context_ptr="objects://ctx/secret", context_ref=secret, compensation=undo
    )
    assert (order.context_ptr, order.HasField("context_ref")) == ("objects://ctx/clean", False)
    assert order.compensation == pb.Compensation(topic="job.undo")


# --- cancels of silent workers ---------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-1")
async def test_a_success_within_the_grace_of_a_cancel_counts_also_for_a_worker_that_never_says_that_it_began(
    plane: Plane,
):
    client, worker = await plane.client(), await plane.peer("worker-1")
    await worker.serve()
    order = await handed_out(plane, client, worker)
    await client.cancel("j1")
    await plane.settle()
    await worker.report(order.job_id)
    await plane.told(client, "j1", "SUCCEEDED")

"""Jobs on topics over HTTP: what is asked, what is kept, what is told (BUS-2, BUS-9, BUS-11)."""

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.bus.safety.holding import held
from tests.gateway.conftest import Gateway
from tests.gateway.world import everything
from trellis.app.wiring import new_id
from trellis.bus.outcomes.reconciler import OutcomeReconciler
from trellis.bus.pointers import BYTES_MAX, PointerPart
from trellis.bus.requests import JobRequest
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.safety.policy import SafetyDecision
from trellis.bus.services import BusDependencies, BusServices
from trellis.bus.wire.local import LocalBus
from trellis.engine.jobs import Actor, Advance, JobId, Lease, Move, Moved, NewJob, RequestId, Turn
from trellis.engine.restoration import GIVEN_BACK_PREFIX
from trellis.lifecycles import Role, Trigger
from trellis.storage.objects.store import CREATE
from trellis.testing import FakeClock

PATIENCE_S = 30.0
WHOLE: dict[str, Any] = {
    "job_id": "order-7.step-1",
    "topic": "job.echo",
    "priority": "critical",
    "context_ptr": "redis://ctx:somewhere",
    "adapter_id": "adapter",
    "env": {"A": "1"},
    "parent_job_id": "order-7",
    "workflow_id": "flow",
    "step_index": 1,
    "memory_id": "memory",
    "context_hints": {"max_input_tokens": 10, "tags": ["short"]},
    "budget": {"max_total_tokens": 100, "deadline_ms": 60_000},
    "tenant_id": "acme",
    "labels": {"worker.region": "eu"},
    "meta": {"actor_type": "human", "risk_tags": ["delete"], "requires": ["gpu"]},
    "compensation": {"topic": "job.undo", "env": {"B": "2"}},
}
"""All that can be said."""
SCHEDULER = Actor(role=Role.SCHEDULER, name="scheduler@test")
WORKER = Actor(role=Role.WORKER, name="echo-1")
DECISION = {"decision": "allow", "rule": "all", "reason": "fine", "policy_hash": "p", "job_hash": "j"}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Moves one job as the parts of the bus do."""

    gateway: Gateway
    job_id: JobId

    async def move(self, target: str, by: Actor = SCHEDULER, *, delay_s: float | None = None, **data: Any) -> Moved:
        move = Move(
            job_id=self.job_id,
            target=target,
            request_id=RequestId(new_id()),
            delay_s=delay_s,
            data=json.dumps(data).encode(),
        )
        answer = await self.gateway.instance.ledger.move(by, move)
        assert isinstance(answer, Moved), answer
        return answer

    async def dispatched(self) -> Lease:
        await self.move("SCHEDULED", delay_s=0)
        said = {"dispatch_id": "d-1", "worker_id": "echo-1", "subject": "worker.echo-1.jobs", "decision": DECISION}
        lease = (await self.move("DISPATCHED", **said)).lease
        assert lease is not None
        return lease

    async def reported(self, lease: Lease, trigger: str, **report: Any) -> None:
        data = json.dumps({"worker_id": "echo-1", **report}).encode()
        advances = (
            Advance(lease, "DISPATCHED", Trigger.START, data=b'{"worker_id":"echo-1"}'),
            Advance(lease, "RUNNING", trigger, data=data, result=data if trigger == Trigger.COMPLETE else None),
        )
        await self.gateway.instance.ledger.turn(Turn(actor=WORKER, advances=advances))


async def submitted(gateway: Gateway, **said: Any) -> Steps:
    answer = await gateway.client("owner", name="iryna").post("/jobs", json={"topic": "job.echo", **said})
    assert answer.status_code == 202, answer.text
    return Steps(gateway=gateway, job_id=JobId(answer.json()["job_id"]))


async def shown(steps: Steps) -> dict[str, Any]:
    return (await steps.gateway.client("owner").get(f"/jobs/{steps.job_id}")).json()


@pytest.mark.requirement("BUS-2", "BUS-9", "D53")
async def test_every_field_of_a_request_is_kept_and_shown_and_no_pointer_is_looked_at(gateway: Gateway):
    answer = await gateway.client("submitter", name="ada").post("/jobs", json=WHOLE)
    made = answer.json()
    assert (answer.status_code, made["lifecycle"], made["status"]) == (202, "bus-job", "PENDING")
    assert (made["job_id"], made["type"]) == ("order-7.step-1", "job.echo")
    found = (await gateway.client("submitter", name="ada").get("/jobs/order-7.step-1")).json()
    assert {name: found[name] for name in WHOLE} == WHOLE
    assert (found["principal_id"], found["parent_id"], found["payload"]) == ("ada", "order-7", None)
    assert (found["deadline_at"], found["children"]) == ("2026-01-01T00:01:00.000Z", "/jobs?parent_id=order-7.step-1")
    (event,) = await gateway.instance.ledger.events(JobId("order-7.step-1"))
    assert (event.role, event.actor) == (Role.SUBMITTER, "ada")
    listed = (await gateway.client("owner").get("/jobs?parent_id=order-7")).json()["items"]
    assert [one["job_id"] for one in listed] == ["order-7.step-1"]


@pytest.mark.requirement("BUS-9")
async def test_a_payload_is_kept_behind_a_pointer_and_not_in_the_ledger(gateway: Gateway):
    steps = await submitted(gateway, payload={"text": "hello"})
    job = await gateway.instance.ledger.job(steps.job_id)
    assert job is not None
    request = JobRequest.read(job.payload or b"")
    assert request.context_ptr.startswith("objects://ctx/")
    assert await gateway.instance.pointers.read(request.context_ptr) == b'{"text":"hello"}'
    assert (request.principal_id, b"hello" in (job.payload or b"")) == ("iryna", False)


@pytest.mark.requirement("BUS-11", "DJ-5")
async def test_the_same_request_again_is_the_same_job_and_another_is_refused(gateway: Gateway):
    client = gateway.client("owner", name="iryna")
    named = {"topic": "job.echo", "job_id": "mine", "payload": {"n": 1}}
    for key in (None, "k1", "k2"):
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = await client.post("/jobs", json=named, headers=headers)
        assert (answer.status_code, answer.json()["job_id"]) == (202, "mine")
        assert (answer.headers.get("Idempotency-Replayed") is None) == (key is None)
        other = await client.post("/jobs", json=named | {"payload": {"n": 2}}, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert len((await client.get("/jobs?lifecycle=bus-job")).json()["items"]) == 1


@pytest.mark.requirement("DJ-5")
async def test_a_key_means_one_job_whether_the_header_or_the_request_has_it(gateway: Gateway):
    client = gateway.client("owner", name="iryna")
    plain, keyed = {"topic": "job.echo", "payload": [1]}, {"topic": "job.echo", "meta": {"idempotency_key": "once"}}
    first, again = [await client.post("/jobs", json=plain, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert (first.json(), again.headers["Idempotency-Replayed"]) == (again.json(), "true")
    bare, same = await client.post("/jobs", json=keyed), await client.post("/jobs", json=keyed | {"job_id": "other"})
    assert same.json()["job_id"] == bare.json()["job_id"]
    both = await client.post("/jobs", json=keyed, headers={"Idempotency-Key": "once"})
    assert both.json()["job_id"] == bare.json()["job_id"]
    torn = await client.post("/jobs", json=keyed, headers={"Idempotency-Key": "twice"})
    assert (torn.status_code, "send one of them" in torn.json()["detail"]) == (422, True)
    changed = await client.post("/jobs", json=keyed | {"env": {"A": "1"}})
    assert changed.json()["code"] == "IDEMPOTENCY_MISMATCH"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"topic": "two words"}, "topic"),
    ({"topic": ""}, "topic"),
    ({"topic": "job.>"}, "topic"),
    ({"topic": "job.echo", "job_id": "no good"}, "job_id"),
    ({"topic": "job.echo", "payload": 1, "context_ptr": "redis://x"}, "exclude each other"),
    ({"topic": "job.echo", "payload": "x" * BYTES_MAX}, "bytes"),
    ({"topic": "job.echo", "labels": {"retry_of": "x"}}, "set by the control plane"),
    ({"topic": "sys.job.submit"}, "a subject of the bus itself"),
    ({"topic": "worker.w-1.jobs"}, "a subject of the bus itself"),
    ({"topic": "_INBOX.a.1"}, "a subject of the bus itself"),
    ({"topic": "job.echo", "compensation": {"topic": "sys.job.cancel"}}, "a subject of the bus itself"),
    ({"topic": "job.echo", "labels": {"trellis.parent": "x"}}, "set by the control plane"),
    ({"topic": "job.echo", "meta": {"labels": {"trellis.compensates": "x"}}}, "set by the control plane"),
    ({"topic": "job.echo", "compensation": {"labels": {"retry_of": "x"}}}, "set by the control plane"),
    ({"topic": "job.echo", "compensation": {"meta": {"labels": {"retry_of": "x"}}}}, "set by the control plane"),
    ({"topic": "job.echo", "labels": {"a": 1}}, "labels/a"),
    ({"topic": "job.echo", "step_index": -1}, "step_index"),
    ({"topic": "job.echo", "budget": {"deadline": 1}}, "budget/deadline"),
    ({"topic": "job.echo", "priority": "now"}, "priority"),
    ({"topic": "job.echo", "principal_id": "somebody-else"}, "principal_id"),
    ({"topic": "job.echo", "agent_slug": "a"}, "'agent_slug' belongs to jobs named by 'job_type'"),
    ({"topic": "job.echo", "max_attempts": 2}, "'max_attempts' is not for jobs on a topic"),
    ({"topic": "job.echo", "deadline_s": 2}, "budget.deadline_ms"),
    ({"topic": "job.echo", "parent_id": "x"}, "parent_job_id"),
    ({"job_type": "RESEARCH", "topic": "job.echo"}, "exactly one of"),
]


@pytest.mark.requirement("BUS-2")
async def test_invalid_bus_request_is_refused_with_its_field_and_stores_no_job(gateway: Gateway):
    before, client = await everything(gateway), gateway.client("owner")
    for wish, told in REFUSED:
        answer = await client.post("/jobs", json=wish)
        assert (answer.status_code in {413, 422}, told in answer.text) == (True, True), (told, answer.text[:300])
    assert await everything(gateway) == before


@pytest.mark.requirement("BUS-9", "BUS-2")
async def test_a_succeeded_bus_job_shows_its_worker_and_its_result_is_fetched(gateway: Gateway):
    steps = await submitted(gateway)
    pending = await shown(steps)
    assert (pending["worker_id"], pending["dispatch"], pending["decision"]) == (None, None, None)
    lease = await steps.dispatched()
    held = await shown(steps)
    assert (held["status"], held["worker_id"], held["decision"]) == ("DISPATCHED", "echo-1", DECISION)
    assert (held["dispatch"]["dispatch_id"], held["dispatch"]["subject"]) == ("d-1", "worker.echo-1.jobs")
    pointer = await gateway.instance.pointers.put(b"\x00 bytes", part=PointerPart.RESULT)
    await steps.reported(lease, Trigger.COMPLETE, result_ptr=pointer, execution_ms=12, artifact_ptrs=["redis://a"])
    done = await shown(steps)
    told = {name: done[name] for name in ("status", "worker_id", "execution_ms", "result_ptr", "artifact_ptrs")}
    assert told == {
        "status": "SUCCEEDED",
        "worker_id": "echo-1",
        "execution_ms": 12,
        "result_ptr": pointer,
        "artifact_ptrs": ["redis://a"],
    }
    assert (done["error_code"], done["hold"], done["result"]["execution_ms"]) == (None, None, 12)
    fetched = await gateway.client("owner").get(f"/jobs/{steps.job_id}/result")
    assert (fetched.content, fetched.headers["content-type"]) == (b"\x00 bytes", "application/octet-stream")


@pytest.mark.requirement("BUS-9", "D45")
async def test_a_payload_that_was_written_over_is_shown_to_nobody(gateway: Gateway):
    ada = gateway.client("submitter", name="ada")
    made = (await ada.post("/jobs", json={"topic": "job.echo", "payload": {"text": "hello"}})).json()
    (kept,) = [info.key for info in (await gateway.instance.objects.list("bus/ctx/")).items]
    await gateway.instance.objects.put(kept, b'{"text":"other"}')
    for client in (ada, gateway.client("owner")):
        refused = await client.get(f"/jobs/{made['job_id']}/context")
        assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
        assert "was changed" in refused.json()["detail"]


@pytest.mark.requirement("BUS-9")
@pytest.mark.parametrize(
    "pointer, status",
    [("s3://bucket/x", 422), ("objects://../agents/x", 422), ("objects://res/gone", 404), ("redis://res:1", 422)],
)
async def test_a_result_that_points_elsewhere_is_not_followed(gateway: Gateway, pointer: str, status: int):
    steps = await submitted(gateway)
    await steps.reported(await steps.dispatched(), Trigger.COMPLETE, result_ptr=pointer)
    answer = await gateway.client("owner").get(f"/jobs/{steps.job_id}/result")
    assert answer.status_code == status


@pytest.mark.requirement("BUS-9")
async def test_a_worker_cannot_show_a_reader_what_is_kept_as_something_else_than_a_result(gateway: Gateway):
    secret = await gateway.instance.pointers.put(b"the payload of somebody else", part=PointerPart.CONTEXT)
    steps = await submitted(gateway)
    await steps.reported(await steps.dispatched(), Trigger.COMPLETE, result_ptr=secret)
    answer = await gateway.client("owner").get(f"/jobs/{steps.job_id}/result")
    assert (answer.status_code, "only what is kept as res" in answer.text) == (422, True)


@pytest.mark.requirement("BUS-2")
async def test_a_failed_bus_job_is_shown_with_code_and_message_and_has_no_result(gateway: Gateway):
    steps = await submitted(gateway)
    report = {"error_code": "BAD_INPUT", "error_message": "no text", "execution_ms": 3}
    await steps.reported(await steps.dispatched(), Trigger.FAIL, **report)
    found = await shown(steps)
    assert {name: found[name] for name in report} == report
    assert (await gateway.client("owner").get(f"/jobs/{steps.job_id}/result")).status_code == 404


@pytest.mark.requirement("D45", "BUS-4")
async def test_a_job_that_waits_says_for_what_and_until_when(gateway: Gateway):
    steps = await submitted(gateway)
    await steps.move("SCHEDULED", delay_s=0)
    assert (await shown(steps))["hold"] is None
    for kind in sorted({"throttle", "kernel", "order", "placement"}):
        await steps.move("SCHEDULED", delay_s=5, hold=kind, reason="for a while")
        assert (await shown(steps))["hold"]["kind"] == kind
    await steps.move("SCHEDULED", delay_s=5, hold="throttle", reason="too many", decision=DECISION)
    found = await shown(steps)
    assert found["hold"] == {"kind": "throttle", "reason": "too many", "until": "2026-01-01T00:00:05.000Z"}
    kernel = Actor(role=Role.SAFETY_KERNEL, name="kernel@test")
    human = DECISION | {"decision": "require_human", "reason": "somebody looks"}
    await steps.move("SCHEDULED", by=kernel, delay_s=3600, hold="human", decision=human)
    found = await shown(steps)
    assert (found["hold"]["kind"], found["hold"]["reason"], found["decision"]) == ("human", "somebody looks", human)
    await steps.move("DENIED", by=Actor(role=Role.OWNER, name="iryna"), note="not this one, please")
    found = await shown(steps)
    assert (found["status"], found["hold"]) == ("DENIED", None)
    assert (found["error_code"], found["error_message"]) == ("SAFETY_DENIED", "not this one, please")


@pytest.mark.requirement("D38")
async def test_orders_that_reached_nobody_are_no_attempts_of_the_document(gateway: Gateway):
    steps = await submitted(gateway)
    for given_back in range(1, 4):
        lease = await steps.dispatched() if given_back == 1 else (await steps.move("DISPATCHED")).lease
        assert lease is not None
        cause = f"{GIVEN_BACK_PREFIX}nobody listens at job.echo"
        back = Advance(lease, "DISPATCHED", Trigger.RETRY, spare_attempt=True, cause=cause)
        await gateway.instance.ledger.turn(Turn(actor=SCHEDULER, advances=(back,)))
        told = await shown(steps)
        assert (told["attempt"], told["max_attempts"], told["hold"]["kind"]) == (0, 1, "listener")
    (listed,) = (await gateway.client("owner").get("/jobs?lifecycle=bus-job")).json()["items"]
    assert (listed["attempt"], listed["max_attempts"]) == (0, 1)


@pytest.mark.requirement("BUS-6")
async def test_reports_that_changed_nothing_are_shown(gateway: Gateway):
    steps = await submitted(gateway)
    said = {"kind": "late", "status": "SUCCEEDED", "state": "FAILED"}
    assert await gateway.instance.ledger.annotate(
        SCHEDULER, steps.job_id, "job_result_refused", json.dumps(said).encode()
    )
    (refused,) = (await shown(steps))["refused_results"]
    assert refused == {"at": "2026-01-01T00:00:00.000Z", **said}


@pytest.mark.requirement("D39")
async def test_a_failed_job_is_run_again_as_a_new_one_that_names_it(gateway: Gateway):
    steps = await submitted(gateway, payload=[1], meta={"idempotency_key": "once"}, budget={"deadline_ms": 60_000})
    admin = gateway.client("control-plane")
    early = await admin.post(f"/jobs/{steps.job_id}/requeue")
    assert (early.status_code, early.json()["code"]) == (409, "INVALID_TRANSITION")
    await steps.reported(await steps.dispatched(), Trigger.FAIL, error_code="BAD")
    why = {"reason": "the disk has room"}
    first, again = [
        await admin.post(f"/jobs/{steps.job_id}/requeue", json=why, headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    made = first.json()
    assert (first.status_code, made["status"], made["version"]) == (200, "PENDING", 1)
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (made, "true")
    found = (await admin.get(first.headers["Location"])).json()
    old = await shown(steps)
    assert (found["parent_job_id"], found["labels"], found["context_ptr"]) == (
        steps.job_id,
        {"retry_of": steps.job_id, "trellis.requeue_cause": "the disk has room"},
        old["context_ptr"],
    )
    assert (old["status"], found["principal_id"], found["deadline_at"] is not None) == ("FAILED", "iryna", True)
    other = await admin.post(f"/jobs/{steps.job_id}/requeue")
    assert (other.status_code, f"as {made['job_id']}, which is PENDING" in other.json()["detail"]) == (409, True)
    await admin.post(f"/jobs/{made['job_id']}/cancel")
    other = (await admin.post(f"/jobs/{steps.job_id}/requeue")).json()
    assert other["job_id"] not in {made["job_id"], steps.job_id}
    assert (await gateway.client("owner").post(f"/jobs/{steps.job_id}/requeue")).status_code == 403


@pytest.mark.requirement("BUS-7", "BUS-12")
async def test_cancel_of_a_retried_bus_job_names_the_retry_which_may_be_cancelled(gateway: Gateway):
    ada, other = (gateway.client("submitter", name=name) for name in ("ada", "eve"))
    admin = gateway.client("control-plane")
    steps = Steps(gateway=gateway, job_id=JobId("mine"))
    assert (await ada.post("/jobs", json={"topic": "job.echo", "job_id": "mine"})).status_code == 202
    await steps.reported(await steps.dispatched(), Trigger.FAIL, status="FAILED_RETRYABLE")
    soon = await ada.post("/jobs/mine/cancel")
    assert (soon.status_code, "about to be done again" in soon.json()["detail"]) == (409, True)
    assert (await ada.get("/jobs/mine")).json()["retry"] == {"job_id": None, "status": None, "due": True}
    await _follow_up(gateway)
    refused = [await ada.post("/jobs/mine/cancel"), await admin.post("/jobs/mine/requeue")]
    assert [(one.status_code, "as mine.r1, which is" in one.json()["detail"]) for one in refused] == [(409, True)] * 2
    assert (await ada.get("/jobs/mine")).json()["retry"] == {"job_id": "mine.r1", "status": "SCHEDULED", "due": False}
    assert (await other.post("/jobs/mine.r1/cancel")).status_code == 403
    assert (await ada.post("/jobs/mine.r1/cancel")).json()["status"] == "CANCELLED"
    in_vain = await ada.post("/jobs/mine/cancel")
    assert (in_vain.status_code, "as mine.r1, which is CANCELLED" in in_vain.json()["detail"]) == (409, True)
    assert (await ada.get("/jobs/mine.r1")).json()["retry"] is None
    assert (await admin.post("/jobs/mine/requeue")).status_code == 200


async def _follow_up(gateway: Gateway) -> None:
    ledger, clock = gateway.instance.ledger, FakeClock()
    control = Actor(role=Role.CONTROL_PLANE, name="control@test")
    aftermath = OutcomeReconciler(ledger=ledger, actor=control, clock=clock, topics=gateway.instance.topics)
    while (await aftermath.run_once()).events:
        pass
    await aftermath.release()


async def test_a_submitter_sees_and_fetches_its_own_alone(gateway: Gateway):
    steps = await submitted(gateway)
    stranger = gateway.client("submitter", name="somebody")
    for path in ("", "/result", "/context"):
        assert (await stranger.get(f"/jobs/{steps.job_id}{path}")).status_code == 403


@pytest.mark.requirement("BUS-11", "D27")
async def test_ids_that_the_engine_derives_are_refused(gateway: Gateway):
    for role in ("submitter", "owner"):
        refused = await gateway.client(role).post("/jobs", json={"topic": "job.echo", "job_id": "theirs.c"})
        assert (refused.status_code, refused.json()["code"]) == (422, "VALIDATION_FAILED"), refused.text
        assert "choose another id" in refused.json()["detail"]
    assert (await gateway.client("owner").get("/jobs/theirs.c")).status_code == 404


# --- what its worker is given --------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-9", "D45")
async def test_input_of_a_worker_is_readable_to_readers_of_its_job(gateway: Gateway):
    ada = gateway.client("submitter", name="ada")
    made = (await ada.post("/jobs", json={"topic": "job.echo", "payload": {"text": "hello"}})).json()
    for client in (ada, gateway.client("owner"), gateway.client("frontend"), gateway.client("control-plane")):
        answer = await client.get(f"/jobs/{made['job_id']}/context")
        assert (answer.status_code, answer.content) == (200, b'{"text":"hello"}')
        assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.requirement("BUS-9")
async def test_a_context_pointer_to_another_object_is_followed_only_for_roles_that_approve(gateway: Gateway):
    objects, ada = gateway.instance.objects, gateway.client("submitter", name="ada")
    await objects.put("bus/ctx/of-eve", b"the payload of somebody else", when=CREATE)
    for number, key in enumerate(("of-eve", "of-nobody")):
        asked = {"topic": "job.echo", "job_id": f"j{number}", "context_ptr": f"objects://ctx/{key}"}
        assert (await ada.post("/jobs", json=asked)).status_code == 202
        for client in (ada, gateway.client("worker"), gateway.client("frontend")):
            refused = await client.get(f"/jobs/j{number}/context")
            assert (refused.status_code, refused.json()["rule"]) == (403, "jobs.approve")
    for role in ("owner", "control-plane"):
        assert (await gateway.client(role).get("/jobs/j0/context")).content == b"the payload of somebody else"
        assert (await gateway.client(role).get("/jobs/j1/context")).status_code == 404


@pytest.mark.requirement("BUS-9")
@pytest.mark.parametrize(
    "pointer, status",
    [("s3://bucket/x", 422), ("objects://res/x", 422), ("objects://../agents/x", 422), ("redis://ctx:1", 422)],
)
async def test_object_that_is_no_context_cannot_be_read_as_one(gateway: Gateway, pointer: str, status: int):
    await gateway.instance.objects.put("bus/res/x", b"a result", when=CREATE)
    steps = await submitted(gateway, context_ptr=pointer)
    assert (await gateway.client("owner").get(f"/jobs/{steps.job_id}/context")).status_code == status


@pytest.mark.requirement("BUS-4", "BUS-9")
@pytest.mark.parametrize("form", ["context_ptr", "context_ref"])
async def test_with_a_redacted_context_that_one_is_shown_as_what_the_worker_is_given(gateway: Gateway, form: str):
    await gateway.instance.objects.put("bus/ctx/clean", b"redacted", when=CREATE)
    steps, pointer = await submitted(gateway, context_ptr="objects://ctx/secret"), "objects://ctx/clean"
    redacted = {form: pointer if form == "context_ptr" else {"uri": pointer}}
    await steps.move("SCHEDULED", delay_s=0)
    await steps.move("DISPATCHED", decision={**DECISION, "redacted": redacted})
    assert (await gateway.client("owner").get(f"/jobs/{steps.job_id}/context")).content == b"redacted"


async def test_a_job_without_a_context_says_so(gateway: Gateway):
    owner, steps = gateway.client("owner"), await submitted(gateway)
    other = (await owner.post("/jobs", json={"type": "work"})).json()["job_id"]
    for job_id, told in ((steps.job_id, "has none"), (other, "is a leased-job")):
        answer = await owner.get(f"/jobs/{job_id}/context")
        assert (answer.status_code, told in answer.json()["detail"]) == (404, True)


# --- waking the scheduler of this process ----------------------------------------------------------------------------------


async def test_new_or_released_job_on_a_topic_wakes_the_scheduler_beside_the_gateway(gateway: Gateway):
    owner, woken = gateway.client("owner"), list[str]()
    gateway.instance.schedulers.append(lambda: woken.append("now"))
    asked = {"topic": "job.echo", "job_id": "mine"}
    for body, often in ((asked, 1), (asked, 1), ({"type": "work"}, 1)):
        assert (await owner.post("/jobs", json=body)).status_code == 202
        assert len(woken) == often
    held_ones = [await held(gateway.instance.ledger, job_id=name) for name in ("one", "two")]
    assert (await owner.post(f"/jobs/{held_ones[0]}/approval", json={"decision": "approve"})).status_code == 200
    path = f"/proposals/approval-{held_ones[1]}"
    assert (await owner.patch(path, json={"decision": "approve"})).status_code == 200
    steps = Steps(gateway=gateway, job_id=JobId("mine"))
    await steps.reported(await steps.dispatched(), Trigger.FAIL, status="FAILED_FATAL")
    assert (await gateway.client("control-plane").post("/jobs/mine/requeue")).status_code == 200
    assert len(woken) == 4
    intent = {"action": "job", "target": "job.echo", "payload": {"topic": "job.echo"}}
    assert (await owner.post("/inbox/submit", json={"intent": intent})).status_code == 202
    assert len(woken) == 5


class Heard(PolicyKernel):
    """Lets everything go, and says of which job it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.about = asyncio.Queue[str]()

    async def check(self, request: JobRequest) -> SafetyDecision:
        self.about.put_nowait(request.job_id)
        return await super().check(request)


async def test_a_job_submitted_over_http_is_looked_at_before_the_schedulers_next_pass(gateway: Gateway):
    clock, instance, kernel = FakeClock(), gateway.instance, Heard()
    bus = LocalBus("trellis", clock=clock, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    parts = BusDependencies(
        ledger=instance.ledger,
        bus=bus,
        topics=instance.topics,
        kernel=kernel,
        clock=clock,
        new_id=new_id,
        name="up@test",
    )
    services = BusServices(parts)
    instance.schedulers.append(services.scheduler.wake)
    steps = await submitted(gateway)
    assert await asyncio.wait_for(kernel.about.get(), PATIENCE_S) == steps.job_id, "no service runs, and time stands"
    await services.scheduler.drain()
    await bus.close()


async def test_a_request_that_is_none_of_ours_is_shown_as_it_was_stored(gateway: Gateway):
    odd = NewJob(job_id=JobId("odd"), type="job.echo", lifecycle="bus-job", payload=b'{"n":1}')
    await gateway.instance.ledger.submit(Actor(role=Role.SUBMITTER, name="x"), [odd])
    found = (await gateway.client("owner").get("/jobs/odd")).json()
    assert (found["payload"], found["lifecycle"], "hold" in found) == ({"n": 1}, "bus-job", False)


@pytest.mark.requirement("BUS-2", "D51")
async def test_an_entry_of_the_inbox_becomes_a_job_on_a_topic_in_its_senders_name(gateway: Gateway):
    entry = {
        "source": {"type": "ui"},
        "intent": {"action": "job", "target": "job.echo", "payload": {"topic": "job.echo", "payload": {"n": 1}}},
        "metadata": {"priority": "normal"},
    }
    answer = (await gateway.client("owner", name="olena").post("/inbox/submit", json=entry)).json()
    found = (await gateway.client("owner").get(f"/jobs/{answer['job_id']}")).json()
    assert (found["topic"], found["principal_id"], found["lifecycle"]) == ("job.echo", "olena", "bus-job")


async def test_workers_on_the_bus_are_listed_with_the_others(gateway: Gateway):
    said = {"types": ["job.echo"], "bus": True, "pool": "echo"}
    await gateway.instance.ledger.heartbeat_worker(WORKER, json.dumps(said).encode())
    (worker,) = (await gateway.client("owner").get("/workers")).json()["items"]
    assert (worker["name"], worker["info"]["pool"]) == ("echo-1", "echo")

"""Nothing is handed out without a decision about this very job, whatever a kernel does; and nobody but the policy says what it allows."""

import json

import pytest

from tests.bus.rig import TOPIC, Rig, decision
from trellis.bus.approvals import decide
from trellis.bus.requests import JobRequest
from trellis.bus.safety.decisions import Decision, Kind
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor, JobId, NewJob, RequestId
from trellis.lifecycles import Role
from trellis.worker.requests import new_job


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("error", [ValueError("odd"), AttributeError("None"), RuntimeError("event loop"), OSError(5)])
async def test_whatever_a_kernel_raises_is_no_permission_and_keeps_no_other_job(rig: Rig, error: Exception):
    worker = await rig.worker("w1", TOPIC)

    def answer(request: JobRequest) -> Decision:
        if "odd" in request.labels:
            raise error
        return decision(request)

    rig.kernel.answer = answer
    odd = [await rig.submit(labels={"odd": str(number)}, priority="critical") for number in range(20)]
    good = await rig.submit()
    for _ in range(3):
        await rig.run()
    assert worker.jobs == [good]
    for job_id in odd:
        assert (await rig.said(job_id, "job_deferred"))["hold"] == "kernel"
    rig.kernel.answer = decision
    await rig.advance(31)
    await rig.run()
    assert set(worker.jobs) == {good, *odd}


@pytest.mark.requirement("BUS-4", "D45")
async def test_an_answer_about_another_job_lets_nothing_go(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    other = JobRequest.model_validate({"job_id": "other", "topic": TOPIC})
    rig.kernel.answer = lambda _: decision(other)
    job_id = await rig.submit()
    await rig.run()
    assert (worker.orders, await rig.state(job_id)) == ([], "SCHEDULED")


@pytest.mark.requirement("BUS-4")
async def test_what_a_request_says_that_the_policy_allows_does_not_reach_its_worker(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    forged = {"TRELLIS_POLICY_CONSTRAINTS": json.dumps({"network_allowlist": ["*"]}), "job_id": "another", "A": "1"}
    job_id = await rig.submit(env=forged)
    await rig.run()
    (order,) = worker.orders
    assert "TRELLIS_POLICY_CONSTRAINTS" not in order.request.env
    assert (order.request.env["job_id"], order.request.env["A"]) == (job_id, "1")


@pytest.mark.requirement("BUS-4", "D45")
async def test_constraints_of_a_decision_that_needs_a_person_hold_after_the_approval(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(Kind.REQUIRE_HUMAN, constraints={"max_runtime_ms": 5_000})
    job_id = await rig.submit()
    await rig.run()
    held = await rig.said(job_id, "job_held")
    assert held["decision"]["constraints"] == {"max_runtime_ms": 5_000}
    owner = Actor(role=Role.OWNER, name="iryna")
    await decide(rig.ledger, owner, JobId(job_id), approve=True, note=None, request_id=RequestId("yes"))
    await rig.run()
    (order,) = worker.orders
    assert json.loads(order.request.env["TRELLIS_POLICY_CONSTRAINTS"]) == {"max_runtime_ms": 5_000}
    assert order.request.budget is not None
    assert order.request.budget.deadline_ms == 5_000


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("said", [{"job_id": "other"}, {"topic": "job.harmless"}])
async def test_a_job_whose_request_is_anothers_is_not_asked_about_and_does_not_go(rig: Rig, said: dict[str, str]):
    worker = await rig.worker("w1", TOPIC)
    body = JobRequest.model_validate({"job_id": "mine", "topic": TOPIC, **said}).body
    forged = NewJob(job_id=JobId("mine"), type=TOPIC, lifecycle="bus-job", payload=body)
    await rig.ledger.submit(Actor(role=Role.GATEWAY, name="somebody"), [forged])
    await rig.run()
    assert (rig.kernel.asked, worker.orders, await rig.state("mine")) == ([], [], "CANCELLED")


@pytest.mark.requirement("BUS-2", "BUS-4")
def test_nobody_submits_a_job_on_a_topic_past_the_checks_of_requests():
    spoofed = {"job_id": "a", "topic": "job.x", "principal_id": "root", "labels": {"retry_of": "z"}}
    with pytest.raises(OptionInvalid, match="use submit_topic"):
        new_job("job.x", spoofed, {"lifecycle": "bus-job"}, app=None, new_id=lambda: "a")

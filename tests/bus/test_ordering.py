"""Steps of one parent go by their number; a retry stands for its step; a step that ended badly ends those after it."""

import json
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import TOPIC, Rig
from trellis.bus.messages import Status
from trellis.bus.outcomes.job_tree import StepState, WorkflowFrontier
from trellis.bus.outcomes.workflows import StepDoomed, StepNotDue, turn_of
from trellis.bus.requests import COMPENSATES, FIRST_PARENT, RETRY_ATTEMPT, RETRY_OF, JobRequest
from trellis.engine.jobs import Actor, Advance, CancelMode, HeldLease, JobId, RequestId, Turn
from trellis.engine.records import Job
from trellis.lifecycles import Role, Trigger


def seen(number: int, state: str) -> StepState:
    return StepState(index=number, job_id=JobId(f"s{number}"), state=state)


@pytest.mark.requirement("BUS-8")
def test_a_step_waits_for_those_with_a_lower_number_only():
    assert turn_of(WorkflowFrontier(open=seen(1, "RUNNING"), failed=seen(2, "FAILED")), 1) is None
    assert turn_of(WorkflowFrontier(), 2) is None
    assert turn_of(WorkflowFrontier(open=seen(1, "RUNNING")), 2) == StepNotDue(step_index=1, job_id="s1")
    bad = turn_of(WorkflowFrontier(open=seen(0, "RUNNING"), failed=seen(1, "FAILED")), 2)
    assert bad == StepDoomed(step_index=1, job_id="s1", state="FAILED")


async def steps(rig: Rig, *numbers: int, parent: str = "parent") -> list[str]:
    return [
        await rig.submit(job_id=f"s{number}", parent_job_id=parent, workflow_id="flow", step_index=number)
        for number in numbers
    ]


async def hold(rig: Rig, job_id: str) -> HeldLease:
    (found,) = await rig.ledger.holds([JobId(job_id)])
    return found


async def end(rig: Rig, job_id: str, trigger: str = Trigger.COMPLETE, **said: Any) -> None:
    """Its worker says how it ended."""
    lease = (await hold(rig, job_id)).lease
    start = Advance(lease, "DISPATCHED", Trigger.START)
    done = Advance(lease, "RUNNING", trigger, data=json.dumps(said).encode())
    await rig.ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="w1"), advances=(start, done)))


async def cancel(rig: Rig, job_id: str) -> None:
    admin = Actor(role=Role.CONTROL_PLANE, name="operator")
    await rig.ledger.cancel(
        admin, JobId(job_id), CancelMode.HARD, RequestId(f"c:{job_id}"), grace_s=0.0, cause="enough"
    )


async def retry(rig: Rig, of: str, number: int, root: str, step_index: int) -> str:
    labels = {RETRY_OF: of, RETRY_ATTEMPT: str(number), FIRST_PARENT: "parent"}
    said = {"topic": TOPIC, "parent_job_id": of, "workflow_id": "flow", "step_index": step_index, "labels": labels}
    request = JobRequest.read(json.dumps({"job_id": f"{root}.r{number}", **said}).encode())
    await rig.put(request)
    return request.job_id


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8")
async def test_the_next_step_goes_when_the_one_before_it_has_succeeded(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    last, first, second = await steps(rig, 2, 0, 1)
    await rig.run()
    assert worker.jobs == [first]
    told = await rig.said(second, "job_deferred")
    assert (told["hold"], told["reason"]) == ("order", f"step 0 ({first}) has not ended")
    await end(rig, first)
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == [first, second]
    await end(rig, second)
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == [first, second, last]


@pytest.mark.requirement("BUS-8")
async def test_steps_of_one_number_and_of_other_workflows_do_not_wait_for_each_other(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    jobs = await steps(rig, 0)
    jobs.append(await rig.submit(job_id="beside", parent_job_id="parent", workflow_id="flow", step_index=0))
    jobs.append(await rig.submit(job_id="elsewhere", parent_job_id="parent", workflow_id="other", step_index=5))
    jobs.append(await rig.submit(job_id="orphan", workflow_id="flow", step_index=5))
    await rig.submit(job_id="next", parent_job_id="parent", workflow_id="flow", step_index=1)  # it waits
    await rig.run()
    assert sorted(worker.jobs) == sorted(jobs)


@pytest.mark.requirement("BUS-8")
async def test_step_that_another_tenant_adds_to_a_workflow_blocks_no_job(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    own = {"parent_job_id": "parent", "workflow_id": "flow", "tenant_id": "acme"}
    await rig.submit(job_id="foreign", **{**own, "tenant_id": "mallory"}, step_index=0)
    await rig.run()
    await end(rig, "foreign", Trigger.FAIL)
    step = await rig.submit(job_id="own", **own, step_index=1)
    await rig.submit(job_id="later", **own, step_index=2)  # it waits for the step before it of its own tenant
    await rig.run()
    assert worker.jobs == ["foreign", step]


@pytest.mark.requirement("BUS-8")
async def test_a_step_after_one_that_ended_badly_is_cancelled(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    first, second = await steps(rig, 0, 1)
    await rig.run()
    await end(rig, first, Trigger.FAIL, status=Status.FAILED.name, error_code="BROKEN")
    await rig.advance(30.5)
    await rig.run()
    last = (await rig.events(second))[-1]
    assert (last.target, last.role, last.cause) == ("CANCELLED", Role.RECONCILER, "step 0 did not succeed")
    assert worker.jobs == [first]


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_retry_stands_for_its_step(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    first, second = await steps(rig, 0, 1)
    await rig.run()
    await end(rig, first, Trigger.FAIL, status=Status.FAILED_RETRYABLE.name, error_code="BUSY")
    await rig.advance(30.5)
    await rig.run()
    assert await rig.state(second) == "SCHEDULED", "the retry is still to be made"
    again = await retry(rig, first, 1, first, 0)
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == [first, again]
    await end(rig, again)
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == [first, again, second]


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_retry_waits_for_the_steps_before_it_like_the_step_itself(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    first = (await steps(rig, 0))[0]
    again = await retry(rig, "s1", 1, "s1", 1)
    await rig.run()
    assert worker.jobs == [first]
    assert "job_deferred" in await rig.path(again)


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_step_whose_last_retry_failed_has_failed(rig_of: Opens):
    async with rig_of(topics={"job.>": {"max_attempts": 2}}) as rig:
        await rig.worker("w1", TOPIC)
        first, second = await steps(rig, 0, 1)
        await rig.run()
        retryable = {"status": Status.FAILED_RETRYABLE.name}
        await end(rig, first, Trigger.FAIL, **retryable)
        again = await retry(rig, first, 1, first, 0)
        await rig.run()
        await end(rig, again, Trigger.FAIL, **retryable)
        await rig.advance(30.5)
        await rig.run()
        assert await rig.state(second) == "CANCELLED"


@pytest.mark.requirement("BUS-8")
async def test_step_that_becomes_due_while_deferred_is_not_delayed(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    (first,) = await steps(rig, 0)
    await rig.run()
    (second,) = await steps(rig, 1)
    read = rig.ledger.job

    async def stale(job_id: JobId) -> Job | None:
        """What was read just before the first step ended."""
        found = await read(job_id)
        if job_id == first and await rig.ledger.holds([job_id]):
            await end(rig, first)
        return found

    rig.ledger.job = stale
    await rig.run()
    await rig.run()
    assert worker.jobs == [first, second], "without waiting for the end of its rest"


@pytest.mark.requirement("BUS-8")
async def test_a_cancelled_step_ends_those_after_it_at_once(rig: Rig):
    await rig.worker("w1", TOPIC)
    first, second = await steps(rig, 0, 1)
    await rig.run()
    await cancel(rig, first)
    await rig.advance(30.5)
    await rig.run()
    assert await rig.state(second) == "CANCELLED"


@pytest.mark.requirement("BUS-8")
async def test_a_compensation_is_no_step(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    first, second = await steps(rig, 0, 2)
    await rig.run()
    labels = {COMPENSATES: "s1"}
    said = {"topic": TOPIC, "parent_job_id": "parent", "workflow_id": "flow", "step_index": 1, "labels": labels}
    await rig.put(JobRequest.read(json.dumps({"job_id": "s1.c", **said}).encode()))
    await rig.run()
    assert worker.jobs == [first, "s1.c"], "it does not wait for steps"
    await end(rig, first)
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs[-1] == second, "and no step waits for it"


async def test_a_step_that_waits_long_is_looked_at_ever_more_seldom(rig: Rig):
    await rig.worker("w1", TOPIC)
    _, second = await steps(rig, 0, 1)
    for _ in range(120):
        held = await rig.ledger.holds([JobId("s0")])
        await rig.ledger.renew(Actor(role=Role.SCHEDULER, name="scheduler-1"), [one.lease for one in held])
        await rig.run()
        await rig.advance(29)
    assert (await rig.path(second)).count("job_deferred") <= 20

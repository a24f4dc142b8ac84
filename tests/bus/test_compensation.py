"""A workflow that came to a bad end is undone: the last step first, one after the other, each once."""

from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import TOPIC, Rig
from trellis.bus.messages import Status
from trellis.bus.outcomes.job_tree import find_successor
from trellis.bus.outcomes.linked_jobs import derived_ids
from trellis.bus.requests import JobRequest
from trellis.bus.topics import Topics
from trellis.engine.errors import IdReserved
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role

UNDO = {"topic": "job.undo", "context_ptr": "redis://undo"}


async def _request(rig: Rig, job_id: str) -> JobRequest:
    return JobRequest.read((await rig.job(job_id)).payload or b"")


async def _step(parts: Parts, job_id: str, index: int, status: Status | None = Status.SUCCEEDED, **fields: Any) -> None:
    """A step of the workflow that ended so; without a status it is only asked for."""
    said: dict[str, Any] = {"compensation": UNDO} | fields
    await parts.rig.submit(job_id=job_id, parent_job_id="p", workflow_id="wf", step_index=index, **said)
    if status is not None:
        await _end(parts, job_id, status)


async def _end(parts: Parts, job_id: str, status: Status = Status.SUCCEEDED) -> None:
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    await parts.result(await parts.dispatch(job_id, "w1"), "w1", status)


async def _undone(parts: Parts) -> list[str]:
    """The compensations there are, in the order in which they were made."""
    found = [job_id for job_id in await parts.jobs() if job_id.endswith(".c")]
    made = [(await parts.rig.events(job_id))[0] for job_id in found]
    return [event.job_id for event in sorted(made, key=lambda event: event.ts)]


@pytest.mark.on_both
@pytest.mark.requirement("D36")
async def test_ids_of_a_compensation_cannot_be_taken_before_it_is_made(rig: Rig):
    parts = parts_of(rig)
    for job_id in derived_ids("a", ".c"):
        with pytest.raises(IdReserved):
            await rig.submit(job_id=job_id)
    await _step(parts, "a", 1)
    await _step(parts, "b", 2, Status.FAILED)
    await parts.follow_up()
    assert await _undone(parts) == ["a.c"]


@pytest.mark.on_both
@pytest.mark.requirement("D36")
async def test_a_step_is_undone_though_older_jobs_have_both_of_its_first_ids(rig: Rig):
    parts, taken = parts_of(rig), derived_ids("a", ".c")[:2]
    for job_id in taken:
        await rig.put(JobRequest.checked({"job_id": job_id, "topic": TOPIC}))
    await _step(parts, "a", 1)
    await _step(parts, "b", 2, Status.FAILED)
    await parts.follow_up()
    (made,) = set(await _undone(parts)) - set(taken)
    assert (await _request(rig, made)).topic == "job.undo"


@pytest.mark.on_both
@pytest.mark.requirement("D36", "BUS-8")
async def test_steps_are_undone_in_reverse_one_after_the_other(rig: Rig):
    parts = parts_of(rig)
    for name, index in (("a", 1), ("b", 2), ("b2", 2), ("c", 3)):
        await _step(parts, name, index)
        await rig.advance(1)
    await _step(parts, "d", 4, Status.FAILED)
    order: list[str] = []
    for _ in range(4):
        await parts.follow_up()
        open_now = [job_id for job_id, state in (await parts.jobs()).items() if state == "PENDING"]
        assert len(open_now) == 1
        order += open_now
        await rig.advance(1)
        await _end(parts, open_now[0])
    assert order == ["c.c", "b2.c", "b.c", "a.c"]
    await parts.follow_up()
    assert await _undone(parts) == order
    for name in ("a", "b", "b2", "c"):
        assert (await rig.path(name)).count("job_compensated") == 1
        assert await rig.state(name) == "SUCCEEDED"


@pytest.mark.requirement("D36")
async def test_a_compensation_is_as_its_template_says_and_else_as_the_step(rig: Rig):
    parts = parts_of(rig)
    undo = {"context_ptr": "redis://undo", "labels": {"x": "y"}, "env": {"e": "2"}}
    meta = {"tenant_id": "acme", "actor_id": "me", "risk_tags": ["money"], "idempotency_key": "k"}
    other_meta = {"tenant_id": "other", "risk_tags": ["undo"], "capability": "refund"}
    await _step(
        parts,
        "a",
        1,
        priority="critical",
        adapter_id="model",
        memory_id="m",
        principal_id="who",
        env={"e": "1"},
        meta=meta,
        compensation={**undo, "meta": other_meta},
    )
    await _step(parts, "b", 2, Status.FAILED, tenant_id="acme")
    await parts.follow_up()
    made, job = await _request(rig, "a.c"), await rig.job("a.c")
    assert (made.topic, made.priority, made.adapter_id, made.memory_id) == (TOPIC, "critical", "model", "m")
    assert (made.context_ptr, made.env, made.principal_id) == ("redis://undo", {"e": "2"}, "who")
    assert made.labels == {"x": "y", "trellis.compensates": "a"}
    assert made.meta is not None
    assert (made.meta.tenant_id, made.meta.actor_id, made.meta.capability) == ("acme", "me", "refund")
    assert made.meta.risk_tags == ("money", "undo")
    assert made.meta.idempotency_key == "a.c"
    assert (made.workflow_id, made.step_index, made.parent_job_id) == ("", 0, "a")
    assert (job.compensates, job.correlation_id) == ("a", (await rig.job("a")).correlation_id)


@pytest.mark.requirement("D36")
async def test_steps_without_a_template_and_other_workflows_are_left_alone(rig: Rig):
    parts = parts_of(rig)
    await _step(parts, "plain", 1, compensation=None)
    await rig.submit(job_id="other", parent_job_id="p", workflow_id="wf2", step_index=1, compensation=UNDO)
    await _end(parts, "other")
    await _step(parts, "b", 2, Status.FAILED)
    await parts.follow_up()
    assert await _undone(parts) == []


@pytest.mark.requirement("D36")
@pytest.mark.parametrize("end", ["denied", "cancelled", "timeout"])
async def test_every_bad_end_is_one(rig_of: Opens, end: str):
    async with rig_of(topics={TOPIC: {"lease_s": 3, "max_attempts": 1}}) as rig:
        parts = parts_of(rig)
        await _step(parts, "a", 1)
        await _step(parts, "b", 2, None)
        await parts.schedule("b")
        if end == "denied":
            await parts.move("b", "DENIED", Role.SCHEDULER)
        elif end == "cancelled":
            await parts.cancel("b")
        else:
            await parts.dispatch("b")
            await parts.pass_time(4)
        await parts.follow_up()
        assert await _undone(parts) == ["a.c"]


@pytest.mark.requirement("D36")
async def test_compensation_waits_while_its_step_may_be_retried(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        await _step(parts, "a", 1)
        await _step(parts, "b", 2, Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert await _undone(parts) == []
        await _end(parts, "b.r1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert await _undone(parts) == ["a.c"]


@pytest.mark.requirement("D36", "BUS-7")
async def test_compensation_undoes_the_retry_and_not_the_failed_attempt_before_it(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        await _step(parts, "a", 1, Status.FAILED_RETRYABLE)
        await parts.follow_up()
        await _end(parts, "a.r1")
        await _step(parts, "b", 2, Status.FAILED)
        await parts.follow_up()
        assert await _undone(parts) == ["a.r1.c"]
        made = await _request(rig, "a.r1.c")
        assert made.labels == {"trellis.compensates": "a.r1"}
        assert not made.is_retry


@pytest.mark.requirement("D36")
async def test_undoing_waits_until_no_step_is_under_way(rig: Rig):
    parts = parts_of(rig)
    await _step(parts, "a", 1)
    await _step(parts, "slow", 2, None)
    await parts.schedule("slow")
    slow = await parts.dispatch("slow", "w1")
    await _step(parts, "b", 2, Status.FAILED)
    await parts.follow_up()
    assert await _undone(parts) == []
    await parts.result(slow, "w1")
    await parts.follow_up()
    assert await _undone(parts) == ["slow.c"]


@pytest.mark.on_both
@pytest.mark.requirement("D36")
async def test_a_compensation_that_fails_is_done_again_and_then_the_next_one_follows(
    rig_of: Opens, caplog: pytest.LogCaptureFixture
):
    async with rig_of(topics={"job.undo": {"max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        await _step(parts, "a", 1)
        await _step(parts, "b", 2)
        await _step(parts, "c", 3, Status.FAILED)
        await parts.follow_up()
        await _end(parts, "b.c", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert await _undone(parts) == ["b.c"]
        assert "not_undone" not in caplog.text
        assert (await rig.job("b.c.r1")).compensates == "b"
        await _end(parts, "b.c.r1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert set(await _undone(parts)) == {"b.c", "a.c"}
        letters = await rig.ledger.dead_letters(JobFilter(), limit=10)
        assert [letter.reason_code.value for letter in letters] == ["compensation_failed"] * 2
        assert caplog.text.count("not_undone") == 1
        assert "job_compensated" not in await rig.path("b")


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-8", "D36")
@pytest.mark.parametrize("change", [{"max_attempts": 5}, {"max_attempts": 5, "idempotent": False, "retry": ["LOST"]}])
async def test_a_workflow_that_is_undone_goes_on_when_its_topics_are_configured_otherwise(
    rig_of: Opens, change: dict[str, Any]
):
    """Whether a step is done again was settled when it ended, for whoever looks at it later."""
    async with rig_of(topics={TOPIC: {"max_attempts": 1, "idempotent": "retry" in change}}) as rig:
        parts = parts_of(rig)
        await _step(parts, "a", 1)
        await _step(parts, "b", 2)
        await _step(parts, "c", 3, None)
        status = Status.FAILED if "retry" in change else Status.FAILED_RETRYABLE
        await parts.schedule("c")
        await parts.result(await parts.dispatch("c"), "w1", status, error_code="LOST")
        await parts.follow_up()
        await parts.reconciler.release()
        rig.topics = Topics.model_validate({"topics": {TOPIC: change}})
        parts = parts_of(rig, name="process-2")
        await _end(parts, "b.c")
        await parts.follow_up()
        assert set(await _undone(parts)) == {"b.c", "a.c"}
        assert await find_successor(rig.ledger, await rig.job("c"), rig.topics) is None


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_retry_that_was_due_is_made_though_its_topic_is_configured_otherwise(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"max_attempts": 2, "retry": ["LOST"]}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a", parent_job_id="p", workflow_id="wf", step_index=1)
        await parts.result(held, "w1", Status.FAILED, error_code="LOST")
        rig.topics = Topics.model_validate({"topics": {TOPIC: {"max_attempts": 1}}})
        parts = parts_of(rig, name="process-2")
        await parts.follow_up()
        assert sorted(await parts.jobs()) == ["a", "a.r1"]


@pytest.mark.requirement("BUS-8", "D36")
async def test_a_cancelled_workflow_is_undone_and_its_compensations_are_not_cancelled(rig: Rig):
    parts = parts_of(rig)
    await rig.submit(job_id="p")
    await _step(parts, "a", 1)
    await _step(parts, "b", 2, None)
    await parts.cancel("p")
    await parts.follow_up()
    assert await parts.jobs() == {"p": "CANCELLED", "a": "SUCCEEDED", "b": "CANCELLED", "a.c": "PENDING"}
    # Taken again from the beginning, as after a crash, it comes to the same.
    again = parts_of(rig, name="process-2")
    again.reconciler.follows_as = "another-name"
    await again.follow_up()
    assert (await parts.jobs())["a.c"] == "PENDING"

"""Workflows of many steps: what a step costs does not grow with their number, and what is remembered of them is never wrong."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import TOPIC, Rig, ScriptedWorker, rigged
from trellis.bus.messages import Status
from trellis.bus.outcomes.job_tree import (
    RETRYABLE_ENDS,
    ChildJobs,
    EffectiveJob,
    JobTree,
    Workflow,
    WorkflowCache,
    WorkflowFrontier,
    WorkflowKey,
    requeue_as_new_job,
)
from trellis.bus.outcomes.linked_jobs import derived_ids
from trellis.bus.outcomes.workflows import StepDoomed, StepNotDue, WorkflowReader, turn_of
from trellis.bus.requests import COMPENSATES, FIRST_PARENT, RETRY_OF, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.errors import InvalidTransition, LedgerUnavailable
from trellis.engine.jobs import Actor, JobId, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobPlace, RetentionOptions
from trellis.lifecycles import Role

OPERATOR = Actor(role=Role.GATEWAY, name="olha")
KEY: WorkflowKey = ("p", "wf", "", "gateway")
UNDO = {"topic": TOPIC}
DAY_S = 86_400.0
READS = ("job", "jobs", "children", "events")
OF_A_STEP_MAX = 60
"""What is read of the ledger for one step, over scheduler and aftermath, also when it is done again and undone."""


@asynccontextmanager
async def fresh(folder: Path) -> AsyncGenerator[Rig]:
    """A rig of its own, on which a job that fails is done again once."""
    await asyncio.to_thread(folder.mkdir)
    async with rigged(Topics.model_validate({"topics": {TOPIC: {"max_attempts": 2, "backoff_s": 0}}}), folder) as rig:
        yield rig


async def step(rig: Rig, job_id: str, index: int, **fields: Any) -> str:
    return await rig.submit(job_id=job_id, parent_job_id="p", workflow_id="wf", step_index=index, **fields)


async def end(parts: Parts, job_id: str, status: Status = Status.SUCCEEDED) -> None:
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    await parts.result(await parts.dispatch(job_id, "w1"), "w1", status)


async def deny(parts: Parts, job_id: str) -> None:
    """As the safety kernel has it done."""
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    await parts.move(job_id, "DENIED", Role.SCHEDULER)


async def removed(rig: Rig, *job_ids: str) -> None:
    """Retention removes what has ended, and these are among it."""
    await rig.advance(2 * DAY_S)
    while (await rig.ledger.retain(RetentionOptions(ended_s=DAY_S))).more:
        pass
    assert [await rig.ledger.job(JobId(job_id)) for job_id in job_ids] == [None] * len(job_ids)


async def again(rig: Rig, job_id: str, request: str = "r") -> str:
    """An operator runs it again."""
    return (
        await requeue_as_new_job(rig.ledger, OPERATOR, await rig.job(job_id), rig.topics, RequestId(request))
    ).job_id


# --- what it costs ---------------------------------------------------------------------------------------------------


def watched(ledger: Ledger) -> Counter[str]:
    """Counts what is read from now on: jobs, events and ids, and at least one for each question."""
    read: Counter[str] = Counter()

    def counting(name: str) -> None:
        ask = getattr(ledger, name)

        async def asked(*args: Any, **how: Any) -> Any:
            answer = await ask(*args, **how)
            many = getattr(answer, "job_ids", None) or getattr(answer, "jobs", None) or answer
            read[name] += max(1, len(cast("list[Any]", many)) if isinstance(many, list | tuple) else 1)
            return answer

        setattr(ledger, name, asked)

    for name in READS:
        counting(name)
    return read


async def run(parts: Parts, worker: ScriptedWorker, status: Callable[[str], Status]) -> None:
    """Everything that happens until nothing does any more; `status` says how each order ends."""
    done = len(worker.orders)
    while True:
        await parts.rig.run()
        orders, done = worker.orders[done:], len(worker.orders)
        for order in orders:
            await parts.result(order.request.job_id, "w1", status(order.request.env["job_id"]))
        if not await parts.follow_up() and not orders:
            return


def _indexes(shape: str, number: int) -> list[int]:
    return [0] * (number - 1) + [1] if shape == "fan" else list(range(number))


def _status(shape: str, last: str) -> Callable[[str], Status]:
    def status(job_id: str) -> Status:
        if shape == "retried":
            return Status.SUCCEEDED if job_id.endswith(".r1") else Status.FAILED_RETRYABLE
        bad = job_id == (last if shape == "undone" else "s0" if shape == "doomed" else "")
        return Status.FAILED if bad else Status.SUCCEEDED

    return status


async def _read_of_each(folder: Path, shape: str, number: int) -> float:
    async with fresh(folder / str(number)) as rig:
        parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
        fields = {"compensation": UNDO} if shape == "undone" else {}
        names = [await step(rig, f"s{place}", index, **fields) for place, index in enumerate(_indexes(shape, number))]
        read = watched(rig.ledger)
        await run(parts, worker, _status(shape, names[-1]))
        states = [await rig.state(name) for name in names]
        expected = {"doomed": ["FAILED"] + ["CANCELLED"] * (number - 1), "retried": ["FAILED"] * number}
        assert states == expected.get(shape, ["SUCCEEDED"] * (number - 1) + [states[-1]])
        assert len(worker.orders) == {"doomed": 1, "retried": 2 * number, "undone": 2 * number - 1}.get(shape, number)
        return read.total() / number


@pytest.mark.parametrize("shape", ["chain", "fan", "doomed", "retried", "undone"])
async def test_reads_for_a_workflow_step_do_not_grow_with_the_number_of_steps(tmp_path: Path, shape: str):
    few, many = await _read_of_each(tmp_path, shape, 6), await _read_of_each(tmp_path, shape, 18)
    assert many <= few * 1.1
    assert many <= OF_A_STEP_MAX


async def test_a_workflow_that_grows_step_by_step_reads_each_step_once(rig: Rig):
    parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
    counts: list[int] = []
    for number in range(17):
        read = watched(rig.ledger) if number in {8, 16} else Counter[str]()
        await step(rig, f"s{number}", number)
        await run(parts, worker, lambda _: Status.SUCCEEDED)
        counts.append(read.total())
    assert len(worker.orders) == 17
    assert counts[16] <= counts[8] <= OF_A_STEP_MAX


# --- what holds ------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8")
async def test_a_step_that_is_added_late_is_waited_for(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    await step(rig, "s1", 1)
    await step(rig, "s3", 3)
    await rig.run()
    assert worker.jobs == ["s1"]
    await step(rig, "s2", 2)
    await parts_of(rig).result(worker.orders[0].request.job_id, "w1")
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == ["s1", "s2"]
    assert isinstance(turn_of(await WorkflowReader(tree=rig.scheduler._tree).front(KEY), 3), StepNotDue)


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8", "D39")
async def test_a_step_that_an_operator_runs_again_is_waited_for(rig: Rig):
    parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
    await step(rig, "s0", 0)
    await step(rig, "s1", 1)
    await rig.run()
    await parts.result(worker.orders[0].request.job_id, "w1", Status.FAILED)
    await rig.advance(30.5)
    await rig.run()
    assert await rig.state("s1") == "CANCELLED", "the scheduler has seen that it failed"
    name = await again(rig, "s0")
    await step(rig, "other-s1", 1)
    await rig.run()
    assert worker.jobs == ["s0", name]
    await parts.result(worker.orders[1].request.job_id, "w1")
    await rig.advance(30.5)
    await rig.run()
    assert worker.jobs == ["s0", name, "other-s1"]


@pytest.mark.requirement("BUS-8", "D36", "D39")
async def test_workflow_is_not_compensated_while_a_dead_lettered_step_is_run_again(rig: Rig):
    parts = parts_of(rig)
    await step(rig, "done", 0, compensation=UNDO)
    await end(parts, "done")
    for name in ("bad", "slow"):
        await step(rig, name, 1)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    name = await again(rig, "bad")
    await end(parts, "slow")
    await parts.follow_up()
    assert "done.c" not in await parts.jobs()
    await end(parts, name, Status.FAILED)
    await parts.follow_up()
    assert "done.c" in await parts.jobs()


@pytest.mark.requirement("BUS-8", "D39")
async def test_a_step_that_was_run_again_with_success_lets_the_next_go(rig: Rig):
    parts = parts_of(rig)
    await step(rig, "bad", 0)
    await step(rig, "slow", 0)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    name = await again(rig, "bad")
    await step(rig, "next", 1)
    await parts.schedule("next")
    await parts.move("next", "SCHEDULED", Role.SCHEDULER, delay_s=600.0, data=b'{"hold": "order"}')
    await end(parts, "slow")
    await parts.follow_up()
    assert (await rig.job("next")).place is JobPlace.SCHEDULED
    await end(parts, name)
    await parts.follow_up()
    assert (await rig.job("next")).place is JobPlace.READY


@pytest.mark.requirement("D36", "D39")
async def test_a_compensation_that_is_run_again_keeps_the_next_one_waiting(rig: Rig):
    parts = parts_of(rig)
    for index, name in enumerate(("a", "b", "c")):
        await step(rig, name, index, compensation=UNDO)
        await end(parts, name)
    await step(rig, "bad", 3)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    await end(parts, "c.c", Status.FAILED)
    await parts.follow_up()
    name = await again(rig, "c.c")
    await end(parts, "b.c")
    await parts.follow_up()
    assert "a.c" not in await parts.jobs(), "one after the other"
    await end(parts, name)
    await parts.follow_up()
    assert "a.c" in await parts.jobs()


@pytest.mark.requirement("D36", "D39")
@pytest.mark.parametrize("takes_over", [False, True])
async def test_a_step_that_succeeds_while_others_are_undone_waits_for_the_one_under_way(rig: Rig, *, takes_over: bool):
    parts, other = parts_of(rig), parts_of(rig, name="process-2")
    for name, index in (("a", 0), ("b", 0), ("bad", 1), ("next", 2)):
        await step(rig, name, index, compensation=UNDO)
    await end(parts, "a")
    await rig.advance(1)
    await end(parts, "b")
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    assert (await rig.state("next"), await rig.state("b.c")) == ("CANCELLED", "PENDING")
    name = await again(rig, "bad")
    await end(parts, name)
    if takes_over:
        await parts.reconciler.release()
        parts = other
    await parts.follow_up()
    assert f"{name}.c" not in await parts.jobs(), "one after the other"
    await end(parts, "b.c")
    await parts.follow_up()
    assert f"{name}.c" in await parts.jobs(), "the newest"
    assert "a.c" not in await parts.jobs()
    await end(parts, f"{name}.c")
    await parts.follow_up()
    assert "a.c" in await parts.jobs()


async def test_reconciler_that_follows_again_discards_its_cached_workflows(rig: Rig):
    parts, other = parts_of(rig), parts_of(rig, name="process-2")
    await step(rig, "done", 0, compensation=UNDO)
    await end(parts, "done")
    for name in ("bad", "slow"):
        await step(rig, name, 1)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    await parts.reconciler.release()
    await again(rig, "bad")
    await other.follow_up()
    await other.reconciler.release()
    await end(parts, "slow")
    await parts.follow_up()
    assert "done.c" not in await parts.jobs()


@pytest.mark.requirement("BUS-8")
async def test_a_step_that_failed_before_a_process_followed_ends_those_after_it(rig: Rig):
    parts, other = parts_of(rig), parts_of(rig, name="process-2")
    await step(rig, "bad", 1)
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    await parts.reconciler.release()
    for name, index in (("slow", 0), ("late", 0), ("next", 2)):
        await step(rig, name, index)
    await end(parts, "late")
    await other.follow_up()
    assert (await rig.state("slow"), await rig.state("next")) == ("PENDING", "CANCELLED")


@pytest.mark.requirement("BUS-8", "D36", "D39")
async def test_a_workflow_whose_steps_were_cancelled_is_undone_though_the_failed_one_succeeded_later(rig: Rig):
    parts = parts_of(rig)
    for name, index in (("done", 0), ("slow", 1), ("bad", 1), ("next", 2)):
        await step(rig, name, index, compensation=UNDO)
    await end(parts, "done")
    await end(parts, "bad", Status.FAILED)
    await parts.follow_up()
    assert await rig.state("next") == "CANCELLED"
    name = await again(rig, "bad")
    await end(parts, name)
    await parts.follow_up()
    assert not any(one.endswith(".c") for one in await parts.jobs())
    await end(parts, "slow")
    await parts.follow_up()
    assert "slow.c" in await parts.jobs()


async def test_workflow_is_reloaded_when_the_retried_step_is_ambiguous(rig: Rig):
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)
    workflows = WorkflowReader(tree=tree)
    await step(rig, "a", 0)
    await workflows.front(KEY)
    labels = {RETRY_OF: "gone", FIRST_PARENT: "p"}
    said = {"job_id": "gone.q", "topic": TOPIC, "parent_job_id": "gone", "workflow_id": "wf", "labels": labels}
    await workflows.again(KEY, JobRequest.read(json.dumps(said).encode()))
    assert tree.remembered.get(KEY) is None


@pytest.mark.requirement("BUS-8")
async def test_numbers_may_have_gaps(rig: Rig):
    parts = parts_of(rig)
    await step(rig, "first", 1)
    await step(rig, "next", 9)
    await parts.schedule("next")
    await parts.move("next", "SCHEDULED", Role.SCHEDULER, delay_s=600.0, data=b'{"hold": "order"}')
    await end(parts, "first")
    await parts.follow_up()
    assert (await rig.job("next")).place is JobPlace.READY


@pytest.mark.requirement("BUS-8", "D39")
async def test_a_step_whose_retry_was_cancelled_may_be_run_again(rig: Rig):
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    await step(rig, "a", 0)
    await end(parts, "a", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    await parts.cancel("a.r1")
    assert turn_of(await workflows.front(KEY), 1) == StepDoomed(step_index=0, job_id="a.r1", state="CANCELLED")
    name = await again(rig, "a")
    assert turn_of(await workflows.front(KEY), 1) == StepNotDue(step_index=0, job_id=name)
    await end(parts, name)
    assert turn_of(await workflows.front(KEY), 1) is None


@pytest.mark.requirement("BUS-8", "D39")
async def test_succeeded_retry_represents_its_workflow_step(rig: Rig):
    parts = parts_of(rig)
    await step(rig, "a", 0)
    await end(parts, "a", Status.FAILED)
    for number in (1, 2):
        labels = {RETRY_OF: "a", FIRST_PARENT: "p"}
        said = {"job_id": f"a.q-{number}", "topic": TOPIC, "parent_job_id": "a", "workflow_id": "wf", "labels": labels}
        await rig.put(JobRequest.read(json.dumps(said).encode()))
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)

    async def stands() -> EffectiveJob:
        found = await tree.effective_job(await rig.job("a"))
        assert found is not None
        return found

    assert (await stands()).job.job_id == "a.q-2", "the newest, while none has ended"
    await end(parts, "a.q-2", Status.FAILED)
    assert (await stands()).job.job_id == "a.q-1"
    assert (await stands()).open
    await end(parts, "a.q-1")
    assert (await stands()).job.state == "SUCCEEDED"


@pytest.mark.requirement("BUS-8", "D39")
async def test_a_step_that_was_denied_and_is_run_again_is_waited_for(rig: Rig):
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    await step(rig, "a", 0)
    await deny(parts, "a")
    assert turn_of(await workflows.front(KEY), 1) == StepDoomed(step_index=0, job_id="a", state="DENIED")
    name = await again(rig, "a")
    assert turn_of(await workflows.front(KEY), 1) == StepNotDue(step_index=0, job_id=name)
    with pytest.raises(InvalidTransition, match="done again"):
        await again(rig, "a", "another")
    await end(parts, name)
    assert turn_of(await workflows.front(KEY), 1) is None


@pytest.mark.requirement("BUS-8", "D36", "D39")
@pytest.mark.parametrize("denied", ["bad", "bad.r1"])
async def test_workflow_is_not_compensated_while_a_denied_step_is_run_again(tmp_path: Path, denied: str):
    async with fresh(tmp_path / "rig") as rig:
        parts = parts_of(rig)
        for name, index in (("done", 0), ("bad", 1), ("slow", 1)):
            await step(rig, name, index, compensation=UNDO)
        await end(parts, "done")
        if denied != "bad":
            await end(parts, "bad", Status.FAILED_RETRYABLE)
            await parts.follow_up()
        await deny(parts, denied)
        await parts.follow_up()
        name = await again(rig, denied)
        await end(parts, "slow")
        await parts.follow_up()
        assert not [one for one in await parts.jobs() if one.endswith(".c")]
        await rig.advance(1)
        await end(parts, name)
        await step(rig, "next", 2)
        await end(parts, "next", Status.FAILED)
        await parts.follow_up()
        assert f"{name}.c" in await parts.jobs(), "it has succeeded at last, and is undone like any other"


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_step_whose_retry_can_never_be_made_has_failed(tmp_path: Path):
    async with fresh(tmp_path / "rig") as rig:
        parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
        await step(rig, "a", 0)
        await step(rig, "b", 1)
        *before, last = derived_ids("a", ".r1")
        for taken in before:
            await rig.put(JobRequest.checked({"job_id": taken, "topic": TOPIC, "parent_job_id": "a"}))
        await end(parts, "a", Status.FAILED_RETRYABLE)
        assert isinstance(turn_of(await workflows.front(KEY), 1), StepNotDue), "one of its ids is free"
        await rig.put(JobRequest.checked({"job_id": last, "topic": TOPIC}))
        assert isinstance(turn_of(await workflows.front(KEY), 1), StepDoomed), "all are other jobs"
        await parts.follow_up()
        assert await rig.state("b") == "CANCELLED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8", "BUS-11")
async def test_a_step_under_the_id_of_one_that_was_removed_is_waited_for(rig: Rig):
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    await step(rig, "a", 3)
    await end(parts, "a")
    assert turn_of(await workflows.front(KEY), 4) is None
    await removed(rig, "a")
    await step(rig, "a", 0)
    assert turn_of(await workflows.front(KEY), 1) == StepNotDue(step_index=0, job_id="a")


@pytest.mark.requirement("BUS-8")
async def test_a_step_that_failed_and_was_removed_ends_nobody_any_more(rig: Rig):
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    for index in range(3):
        await step(rig, f"s{index}", index)
    await parts.cancel("s0")
    await end(parts, "s1", Status.FAILED)
    await parts.follow_up()
    await step(rig, "other", 2)
    assert isinstance(turn_of(await workflows.front(KEY), 2), StepDoomed)
    await removed(rig, "s0", "s1")
    assert turn_of(await workflows.front(KEY), 2) is None
    await step(rig, "first", 0)
    await end(parts, "first")
    await parts.follow_up()
    assert await rig.state("other") == "PENDING"


async def test_steps_that_succeeded_and_were_removed_do_not_have_the_others_read_again(rig: Rig):
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    for index in range(6):
        await step(rig, f"s{index}", index, compensation=UNDO)
    await end(parts, "s0")
    await end(parts, "s1")
    await workflows.front(KEY)
    await removed(rig, "s0", "s1")
    read = watched(rig.ledger)
    assert turn_of(await workflows.front(KEY), 3) == StepNotDue(step_index=2, job_id="s2")
    assert read["job"] == 1, "the lowest that has not ended"
    assert await workflows.to_undo(await workflows.workflow(KEY)) == []


async def test_a_removal_that_is_only_half_seen_is_seen_the_next_time(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.bus.outcomes.workflows.PAGE", 2)
    parts, workflows = parts_of(rig), WorkflowReader(tree=rig.scheduler._tree)
    for index in range(5):
        await step(rig, f"s{index}", index)
    await parts.cancel("s0")
    assert isinstance(turn_of(await workflows.front(KEY), 1), StepDoomed)
    await removed(rig, "s0")
    ask, pages = rig.ledger.children, Counter[str]()

    async def away(parent_id: JobId, *, since: str | None, limit: int) -> Any:
        pages[parent_id] += 1
        if pages[parent_id] == 2:
            raise LedgerUnavailable(reason="it is away")
        return await ask(parent_id, since=since, limit=limit)

    rig.ledger.children = away
    with pytest.raises(LedgerUnavailable):
        await workflows.front(KEY)
    assert turn_of(await workflows.front(KEY), 1) is None


async def test_removed_workflow_step_blocks_no_other_step(rig: Rig):
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)
    workflows = WorkflowReader(tree=tree)
    await step(rig, "a", 0)
    assert isinstance(turn_of(await workflows.front(KEY), 1), StepNotDue)
    read = rig.ledger.job

    async def gone(job_id: JobId) -> Job | None:
        return None if job_id == "a" else await read(job_id)

    rig.ledger.job = gone
    assert await workflows.front(KEY) == WorkflowFrontier()


async def test_workflow_read_interrupted_by_a_ledger_error_misses_no_step(rig: Rig):
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)
    workflows = WorkflowReader(tree=tree)
    for number in range(40):
        await step(rig, f"s{number:02d}", number + 1)
    read, asked = rig.ledger.job, Counter[str]()

    async def away(job_id: JobId) -> Job | None:
        asked[job_id] += 1
        if job_id == "s20" and asked[job_id] == 1:
            raise LedgerUnavailable(reason="it is away")
        return await read(job_id)

    rig.ledger.job = away
    with pytest.raises(LedgerUnavailable):
        await workflows.front(KEY)
    assert isinstance(turn_of(await workflows.front(KEY), 2), StepNotDue)
    workflow = tree.remembered.get(KEY)
    assert workflow is not None
    assert [one.index for one in workflow.unsettled] == list(range(1, 41)), "each once"


async def test_children_beyond_the_bound_are_not_looked_at(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.bus.outcomes.workflows.CHILDREN_MAX", 4)
    monkeypatch.setattr("trellis.bus.outcomes.workflows.PAGE", 2)
    for number in range(6):
        await step(rig, f"s{number}", number)
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)
    workflow = await WorkflowReader(tree=tree).workflow(KEY)
    assert [one.index for one in workflow.unsettled] == [0, 1, 2, 3]
    read = watched(rig.ledger)
    assert await WorkflowReader(tree=tree).workflow(KEY) is workflow
    assert read == {"children": 2}, "it is only asked whether one was removed"


async def test_children_that_were_removed_make_room_for_others(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.bus.outcomes.workflows.CHILDREN_MAX", 4)
    monkeypatch.setattr("trellis.bus.outcomes.workflows.PAGE", 2)
    parts, workflows = parts_of(rig), WorkflowReader(tree=JobTree(ledger=rig.ledger, topics=rig.topics))
    for number in range(6):
        await step(rig, f"s{number}", number)
    for number in range(4):
        await parts.cancel(f"s{number}")
    await workflows.workflow(KEY)
    await removed(rig, "s0", "s1", "s2", "s3")
    await step(rig, "s6", 6)
    assert [one.index for one in (await workflows.workflow(KEY)).unsettled] == [4, 5, 6]


def test_cache_of_workflows_is_bounded_and_drops_the_least_recently_used():
    remembered = WorkflowCache(steps_max=10)

    def fill(parent: str, number: int) -> ChildJobs:
        family = remembered.of(parent)
        family.known |= {one: JobId(f"{parent}{one}") for one in range(number)}
        family.workflows["wf", "", "gateway"] = Workflow()
        remembered.measured(parent, family)
        return family

    def known() -> set[str]:
        return {parent for parent in "abc" if remembered.get((parent, "wf", "", "gateway")) is not None}

    fill("a", 3)
    fill("b", 3)
    assert known() == {"a", "b"}
    fill("a", 3)
    fill("c", 3)
    assert known() == {"a", "c"}
    large = fill("b", 50)
    assert known() == {"b"}, "one may be larger than all together"
    assert remembered.of("b") is large
    remembered.drop("b")
    fill("a", 3)
    fill("c", 3)
    assert known() == {"a", "c"}
    remembered.clear()
    assert known() == set()


# --- against whoever remembers nothing -------------------------------------------------------------------------------

SEEDS = range(3)
ACTS = 30


class Story:
    """The same things happen in the same order, whoever looks at them."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.parts, self.rng = rig, parts_of(rig), random.Random(seed)
        self.acts = 0

    async def act(self) -> None:
        self.acts += 1
        kind = self.rng.choices(["step", "rest", "end", "cancel", "deny", "again"], [4, 3, 8, 1, 1, 3])[0]
        await getattr(self, kind)()
        await self.rig.advance(1)

    async def step(self) -> None:
        fields = {"compensation": UNDO} if self.rng.random() < 0.7 else {}
        await step(self.rig, f"s{self.acts}", self.rng.randrange(4), **fields)

    async def rest(self) -> None:
        for job in await self._those("PENDING", "SCHEDULED"):
            if job.state == "PENDING":
                await self.parts.schedule(job.job_id)
                data = b'{"hold": "order"}'
                await self.parts.move(job.job_id, "SCHEDULED", Role.SCHEDULER, delay_s=600.0, data=data)

    async def end(self) -> None:
        found = await self._those("PENDING", "SCHEDULED")
        if found:
            statuses = [Status.SUCCEEDED, Status.FAILED, Status.FAILED_RETRYABLE]
            await end(self.parts, self.rng.choice(found).job_id, self.rng.choices(statuses, [6, 2, 2])[0])

    async def cancel(self) -> None:
        found = await self._those("PENDING", "SCHEDULED")
        if found:
            await self.parts.cancel(self.rng.choice(found).job_id)

    async def deny(self) -> None:
        found = await self._those("PENDING", "SCHEDULED")
        if found:
            await deny(self.parts, self.rng.choice(found).job_id)

    async def again(self) -> None:
        found = await self._those(*RETRYABLE_ENDS)
        if found:
            with suppress(InvalidTransition):  # it may be done again already
                await again(self.rig, self.rng.choice(found).job_id, f"r{self.acts}")

    async def _those(self, *states: str) -> list[Job]:
        return [
            await self.rig.job(name) for name, state in sorted((await self.parts.jobs()).items()) if state in states
        ]


async def _turns(tree: JobTree, indexes: range) -> list[object]:
    """Whose turn it is, from every child of the parent as it stands: what a look must come to."""
    found: list[tuple[int, EffectiveJob]] = []
    for job in await tree.children("p"):
        request = await tree.request(job.job_id)
        if request is not None and not request.is_retry and COMPENSATES not in request.labels:
            found.append((request.step_index, await tree.effective_step(job, request, step_of="p")))
    return [
        StepDoomed
        if any(standing.failed and one < index for one, standing in found)
        else StepNotDue
        if any(standing.open and one < index for one, standing in found)
        else None
        for index in indexes
    ]


@pytest.mark.requirement("BUS-8", "D39")
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_scheduler_that_remembers_lets_go_the_same_steps_as_one_that_reads_all(rig: Rig, seed: int):
    story, workflows = Story(rig, seed), WorkflowReader(tree=rig.scheduler._tree)
    indexes = range(5)
    for _ in range(ACTS):
        await story.act()
        front = await workflows.front(KEY)
        told = [turn_of(front, index) for index in indexes]
        expected = await _turns(JobTree(ledger=rig.ledger, topics=rig.topics), indexes)
        assert [turn is None for turn in told] == [turn is None for turn in expected]
        assert all(
            isinstance(turn, StepNotDue) or wanted in {None, type(turn)}
            for turn, wanted in zip(told, expected, strict=True)
        )
        if story.rng.random() < 0.5:
            await story.parts.follow_up()


async def _told(folder: Path, seed: int, *, remembers: bool) -> dict[str, list[str]]:
    async with fresh(folder) as rig:
        story = Story(rig, seed)
        for _ in range(ACTS):
            await story.act()
            if story.rng.random() < 0.5:
                if not remembers:
                    story.parts.reconciler._tree.remembered.clear()
                await story.parts.follow_up()
        if not remembers:
            story.parts.reconciler._tree.remembered.clear()
        await story.parts.follow_up()
        return await story.parts.fingerprint()


@pytest.mark.requirement("BUS-8", "D36", "D39")
@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(3, 60))])
async def test_an_aftermath_that_remembers_does_the_same_as_one_that_forgets(tmp_path: Path, seed: int):
    remembered = await _told(tmp_path / "remembers", seed, remembers=True)
    assert remembered == await _told(tmp_path / "forgets", seed, remembers=False)

"""What follows from a job's end: its retry as a linked job, its children's cancellation, its siblings' turn."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Held, Parts, parts_of
from tests.bus.rig import TOPIC, Rig
from trellis.bus.messages import Status
from trellis.bus.outcomes.job_tree import JobTree, requeue_as_new_job
from trellis.bus.outcomes.linked_jobs import derived_ids, retry_of
from trellis.bus.requests import JobRequest
from trellis.engine.jobs import Actor, CancelMode, JobId, RequestId
from trellis.engine.records import JobPlace
from trellis.lifecycles import Role

SHORT = {TOPIC: {"lease_s": 3, "max_attempts": 3, "backoff_s": 2}}


async def _request(rig: Rig, job_id: str) -> JobRequest:
    return JobRequest.read((await rig.job(job_id)).payload or b"")


async def _step(parts: Parts, job_id: str, index: int, parent: str = "p", **fields: Any) -> str:
    return await parts.rig.submit(job_id=job_id, parent_job_id=parent, workflow_id="wf", step_index=index, **fields)


async def _go(parts: Parts, job_id: str, worker_id: str = "w1") -> Held:
    """The job handed out, whether it was scheduled before or not."""
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    return await parts.dispatch(job_id, worker_id)


async def _defer(parts: Parts, job_id: str, hold: str = "order") -> None:
    if await parts.rig.state(job_id) == "PENDING":
        await parts.schedule(job_id)
    await parts.move(job_id, "SCHEDULED", Role.SCHEDULER, delay_s=600.0, data=b'{"hold": "%s"}' % hold.encode())


# --- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "D30")
async def test_a_job_that_never_started_ends_and_a_linked_one_is_made(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await parts.dispatched(
            job_id="a",
            context_ptr="redis://ctx",
            labels={"team": "x"},
            priority="critical",
            meta={"idempotency_key": "once", "tenant_id": "acme"},
        )
        await parts.pass_time(4)
        await parts.follow_up()
        assert await rig.state("a") == "TIMEOUT"
        retry, job = await _request(rig, "a.r1"), await rig.job("a.r1")
        assert retry.parent_job_id == "a"
        assert retry.labels == {"team": "x", "retry_of": "a", "trellis.retry_attempt": "1"}
        assert (retry.context_ptr, retry.priority, retry.tenant) == ("redis://ctx", "critical", "acme")
        assert (job.parent_id, job.correlation_id) == ("a", (await rig.job("a")).correlation_id)
        assert (job.state, job.place) == ("SCHEDULED", JobPlace.SCHEDULED)
        await rig.advance(2.1)
        assert (await rig.job("a.r1")).place is JobPlace.READY


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-10", "D30")
async def test_workers_cut_off_for_long_cost_their_jobs_one_attempt_and_jobs_after_them_none(rig: Rig):
    """A host that was cut off leaves its subscriptions behind, so that the bus takes jobs for it and nobody hears them."""
    parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
    await worker.shake(TOPIC)
    await worker.beat(max_parallel_jobs=9)
    await rig.submit(job_id="a")
    await rig.run()
    assert worker.jobs == ["a"]
    await rig.submit(job_id="b")
    for _ in range(20):
        await parts.pass_time(15.1, step_s=5.0)
        await parts.follow_up()
        await rig.run()
    assert await parts.jobs() == {"a": "TIMEOUT", "a.r1": "SCHEDULED", "b": "SCHEDULED"}
    await worker.beat(max_parallel_jobs=9)
    await rig.run()
    assert worker.jobs == ["a", "b", "a.r1"]


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-13")
async def test_attempts_are_bounded_over_the_links(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a")
        for number in (1, 2):
            await parts.result(held, "w1", Status.FAILED_RETRYABLE)
            await parts.follow_up()
            held = await _go(parts, f"a.r{number}")
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert await parts.jobs() == {"a": "FAILED", "a.r1": "FAILED", "a.r2": "FAILED"}
        assert (await _request(rig, "a.r2")).parent_job_id == "a.r1"
        assert (await _request(rig, "a.r2")).labels["retry_of"] == "a.r1"


@pytest.mark.requirement("BUS-13")
async def test_a_failure_that_nobody_calls_retryable_has_no_retry(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"retry": ["BUSY"]}}) as rig:
        parts = parts_of(rig)
        await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED, error_code="OTHER")
        await parts.result(await parts.dispatched(job_id="b"), "w1", Status.FAILED_FATAL, error_code="BUSY")
        await parts.result(await parts.dispatched(job_id="c"), "w1", Status.FAILED, error_code="BUSY")
        await parts.follow_up()
        assert set(await parts.jobs()) == {"a", "b", "c", "c.r1"}


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "D30")
async def test_a_job_of_an_idempotent_topic_keeps_its_id_and_has_no_linked_retry(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "lease_s": 3, "max_attempts": 2}}) as rig:
        parts = parts_of(rig)
        await parts.dispatched(job_id="a")
        await parts.pass_time(4)
        assert (await parts.last("a")).type == "job_lease_expired"
        await parts.start(await parts.dispatch("a", "w1"), "w1")
        await parts.pass_time(4)
        await parts.follow_up()
        assert await parts.jobs() == {"a": "TIMEOUT"}


@pytest.mark.requirement("BUS-5", "D30")
@pytest.mark.parametrize("state", ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"])
async def test_a_passed_deadline_ends_the_job_wherever_it_is_and_nothing_follows(rig_of: Opens, state: str):
    async with rig_of(topics={TOPIC: {"lease_s": 60}}) as rig:
        parts = parts_of(rig)
        await rig.submit(job_id="a", budget={"deadline_ms": 5_000})
        if state != "PENDING":
            await parts.schedule("a")
        if state in {"DISPATCHED", "RUNNING"}:
            held = await parts.dispatch("a")
            if state == "RUNNING":
                await parts.start(held, "w1")
        assert await rig.state("a") == state
        await parts.pass_time(6)
        await parts.settle()
        assert await parts.jobs() == {"a": "TIMEOUT"}
        assert [result.status for result in parts.told] == [Status.TIMEOUT]


@pytest.mark.requirement("BUS-7")
async def test_a_retry_has_only_the_time_that_is_left(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await parts.dispatched(job_id="said", budget={"deadline_ms": 60_000})
        await parts.dispatched(job_id="unsaid")
        await parts.pass_time(4)
        await parts.follow_up()
        for name in ("said", "unsaid"):
            first, second = await rig.job(name), await rig.job(f"{name}.r1")
            assert first.deadline_at is not None
            assert second.deadline_at is not None
            assert timedelta(0) <= second.deadline_at - first.deadline_at <= timedelta(seconds=2)
        budget = (await _request(rig, "said.r1")).budget
        assert budget is not None
        assert 50_000 < budget.deadline_ms < 60_000
        assert (await _request(rig, "unsaid.r1")).budget is None


@pytest.mark.requirement("BUS-7")
async def test_a_retry_whose_id_is_taken_or_too_long_gets_another_id(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        long = "l" * 160
        taken = {"job_id": "a.r1", "topic": TOPIC, "context_ptr": "redis://other"}
        await rig.put(JobRequest.checked(taken))  # as it was stored when such ids were not reserved yet
        held = [await parts.dispatched(job_id="a"), await parts.dispatched(job_id=long)]
        for one in held:
            await parts.result(one, "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        found = set(await parts.jobs()) - {"a", "a.r1", long}
        assert {(await _request(rig, one)).labels["retry_of"] for one in found} == {"a", long}
        for one in found:
            await parts.result(await _go(parts, one), "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert len(await parts.jobs()) == 7


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7")
async def test_a_retry_is_made_though_older_jobs_have_both_of_its_first_ids(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts, taken = parts_of(rig), derived_ids("a", ".r1")[:2]
        for job_id in taken:
            await rig.put(JobRequest.checked({"job_id": job_id, "topic": TOPIC, "context_ptr": "redis://other"}))
        await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        (retry,) = set(await parts.jobs()) - {"a", *taken}
        assert (await _request(rig, retry)).labels["retry_of"] == "a"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7")
async def test_a_job_with_the_fingerprint_of_a_retry_does_not_pass_for_it(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="a")
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        job, ended = await rig.job("a"), (await rig.events("a"))[-1]
        retry = retry_of(job, await _request(rig, "a"), ended, rig.topics)[0]
        forged = replace(retry, payload=JobRequest.checked({"job_id": "a.r1", "topic": TOPIC}).body, parent_id=None)
        await rig.ledger.submit(Actor(role=Role.RECONCILER, name="older"), [forged])
        await parts.follow_up()
        (made,) = set(await parts.jobs()) - {"a", "a.r1"}
        assert (await _request(rig, made)).labels["retry_of"] == "a"


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_step_whose_retry_cannot_be_made_does_not_keep_the_others_waiting(rig: Rig):
    parts = parts_of(rig)
    full = {f"label-{number}": "" for number in range(999)}  # those that say that it is a retry do not fit any more
    await _step(parts, "a", 1, labels=full)
    await _step(parts, "b", 2)
    await parts.result(await _go(parts, "a"), "w1", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    assert await parts.jobs() == {"a": "FAILED", "b": "CANCELLED"}


def test_a_derived_job_id_is_short_enough_for_its_wire_id():
    for base, number in (("a", 4), ("l" * 160, 4), ("l" * 178, 3), ("l" * 200, 3)):
        ids = derived_ids(base, ".r1")
        assert len(ids) == len(set(ids)) == number
        assert all(len(f"{job_id}@{10**18 - 1}") <= 200 and job_id.endswith(".r1") for job_id in ids)


# --- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8")
async def test_a_cancel_reaches_children_and_grandchildren_in_every_state(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 600}}) as rig:
        parts = parts_of(rig)
        await parts.dispatched(job_id="p")
        await rig.submit(job_id="pending", parent_job_id="p")
        await parts.dispatched(job_id="running", parent_job_id="p", worker_id="w1")
        await parts.result(await parts.dispatched(job_id="done", parent_job_id="p"), "w1")
        await rig.submit(job_id="grandchild", parent_job_id="running")
        await rig.submit(job_id="of-done", parent_job_id="done")
        await rig.submit(job_id="stranger")
        await parts.cancel("p")
        await parts.settle()
        states = await parts.jobs()
        assert {name for name, state in states.items() if state == "CANCELLED"} == {
            "p",
            "pending",
            "running",
            "grandchild",
            "of-done",
        }
        assert (states["done"], states["stranger"]) == ("SUCCEEDED", "PENDING")
        last = await parts.last("grandchild")
        assert last.role is Role.RECONCILER
        assert (last.cause or "").endswith("was cancelled")
        assert sum(result.status == Status.CANCELLED for result in parts.told) == 5


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_cancel_reaches_the_retries_of_children(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await rig.submit(job_id="p")
        held = await parts.dispatched(job_id="c", parent_job_id="p")
        for number in (1, 2):
            await parts.result(held, "w1", Status.FAILED_RETRYABLE)
            await parts.follow_up()
            held = await _go(parts, f"c.r{number}")
        assert (await _request(rig, "c.r2")).labels["trellis.parent"] == "p"
        await parts.cancel("p")
        await parts.follow_up()
        assert await parts.jobs() == {"p": "CANCELLED", "c": "FAILED", "c.r1": "FAILED", "c.r2": "CANCELLED"}


@pytest.mark.requirement("BUS-8")
async def test_a_cancelled_retry_takes_the_children_of_the_job_before_it_along(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(job_id="p")
        await rig.submit(job_id="c", parent_job_id="p")
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert await rig.state("c") == "PENDING"
        await parts.cancel("p.r1")
        await parts.follow_up()
        assert await rig.state("c") == "CANCELLED"


@pytest.mark.requirement("BUS-8", "D39")
async def test_a_job_that_is_run_again_right_after_its_retry_was_cancelled_is_not_cancelled_with_it(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts, operator = parts_of(rig), Actor(role=Role.GATEWAY, name="olha")
        await parts.result(await parts.dispatched(job_id="p"), "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        await rig.submit(job_id="c", parent_job_id="p")
        await parts.cancel("p.r1")
        again = await requeue_as_new_job(rig.ledger, operator, await rig.job("p"), rig.topics, RequestId("again"))
        await parts.follow_up()
        assert (await rig.state(again.job_id), await rig.state("c")) == ("PENDING", "CANCELLED")


@pytest.mark.requirement("BUS-8")
async def test_a_child_that_comes_after_its_parent_was_cancelled_is_cancelled(rig: Rig):
    parts = parts_of(rig)
    await rig.submit(job_id="p")
    await parts.cancel("p")
    await parts.follow_up()
    await rig.submit(job_id="c", parent_job_id="p")
    await parts.follow_up()
    assert await rig.state("c") == "CANCELLED"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_child_that_comes_after_a_retry_of_its_parent_was_cancelled_is_cancelled(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await parts.result(await parts.dispatched(job_id="p"), "w1", Status.FAILED_RETRYABLE)
        await rig.submit(job_id="early", parent_job_id="p")
        await parts.follow_up()
        await rig.submit(job_id="meanwhile", parent_job_id="p")
        await parts.follow_up()
        assert await rig.state("meanwhile") == "PENDING"
        await parts.cancel("p.r1")
        await parts.follow_up()
        await rig.submit(job_id="late", parent_job_id="p")
        await parts.follow_up()
        states = await parts.jobs()
        assert {states[name] for name in ("early", "meanwhile", "late")} == {"CANCELLED"}
        assert (await parts.last("late")).cause == "p.r1 was cancelled"
        again = Actor(role=Role.GATEWAY, name="olha")
        await requeue_as_new_job(rig.ledger, again, await rig.job("p"), rig.topics, RequestId("again"))
        await rig.submit(job_id="later", parent_job_id="p")
        await parts.follow_up()
        assert await rig.state("later") == "PENDING", "its parent is done again"


@pytest.mark.requirement("BUS-8", "D36")
async def test_new_child_below_an_ended_child_of_a_cancelled_job_is_cancelled_but_no_compensation_is(rig: Rig):
    parts = parts_of(rig)
    await rig.submit(job_id="p")
    await _step(parts, "done", 0, compensation={"topic": "job.undo"})
    await parts.result(await _go(parts, "done"), "w1")
    await _step(parts, "failed", 1)
    await parts.cancel("p")
    await parts.follow_up()
    assert await rig.state("done.c") == "PENDING"
    await rig.submit(job_id="late", parent_job_id="done")
    await rig.submit(job_id="of-undoing", parent_job_id="done.c")
    await parts.follow_up()
    await parts.result(await _go(parts, "done.c"), "w1", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    await rig.submit(job_id="of-undoing-later", parent_job_id="done.c")
    await parts.follow_up()
    states = await parts.jobs()
    assert states["late"] == "CANCELLED"
    assert [states[name] for name in ("done.c.r1", "of-undoing", "of-undoing-later")] == [
        "SCHEDULED",
        "PENDING",
        "PENDING",
    ]


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_new_child_of_a_job_whose_retry_was_cancelled_is_cancelled(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await rig.submit(job_id="g")
        held = await parts.dispatched(job_id="p", parent_job_id="g")
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        await parts.cancel("g")
        await parts.follow_up()
        await rig.submit(job_id="late", parent_job_id="p")
        await parts.follow_up()
        assert await parts.jobs() == {"g": "CANCELLED", "p": "FAILED", "late": "CANCELLED"}


@pytest.mark.requirement("BUS-8")
async def test_jobs_that_are_each_others_parents_are_cancelled_once(rig: Rig):
    parts = parts_of(rig)
    for name, parent in (("a", "b"), ("b", "a"), ("own", "own")):
        await rig.submit(job_id=name, parent_job_id=parent)
    await parts.cancel("a")
    await parts.cancel("own")
    await parts.follow_up()
    assert await parts.jobs() == {"a": "CANCELLED", "b": "CANCELLED", "own": "CANCELLED"}
    await parts.result(await parts.dispatched(job_id="x", parent_job_id="y"), "w1")
    await parts.result(await parts.dispatched(job_id="y", parent_job_id="x"), "w1")
    await rig.submit(job_id="z", parent_job_id="y")
    await parts.follow_up()
    assert await rig.state("z") == "PENDING"


@pytest.mark.requirement("BUS-5")
async def test_reconciler_that_reads_a_page_slowly_keeps_its_subscription(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts, job = parts_of(rig), rig.ledger.job
    other = parts_of(rig, name="process-2", ledger=await rig.bench.open_another())
    for name in await rig.submit_many(12):
        await parts.cancel(name)
    await parts.reconciler.page()
    parts.reconciler._tree.learn = lambda *_: None  # type: ignore[method-assign]

    async def slow(job_id: JobId) -> Any:
        rig.clock.advance(1.0)
        await rig.bench.advance(1.0)
        assert await other.reconciler.page() is None
        return await job(job_id)

    monkeypatch.setattr(rig.ledger, "job", slow)
    assert (await parts.reconciler.run_once()).following


async def test_to_look_for_the_retries_of_a_job_its_other_children_are_not_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    parts, job, read = parts_of(rig), rig.ledger.job, list[str]()
    await rig.submit(job_id="p")
    await _step(parts, "s", 0)
    await parts.result(await _go(parts, "s"), "w1", Status.FAILED_RETRYABLE)
    await rig.submit_many(50, parent_job_id="s")
    await rig.submit_many(50, topic="job.other", parent_job_id="s")
    await parts.follow_up()
    tree = JobTree(ledger=rig.ledger, topics=rig.topics)
    step = await rig.job("s")

    async def noting(job_id: JobId) -> Any:
        read.append(job_id)
        return await job(job_id)

    monkeypatch.setattr(rig.ledger, "job", noting)
    standing = await tree.effective_job(step)
    assert standing is not None
    assert standing.job.job_id == "s.r1"
    assert sorted(read) == ["s", "s.r1"]


@pytest.mark.requirement("BUS-5", "BUS-8")
async def test_reconciler_that_cancels_many_children_keeps_its_subscription(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts, cancel = parts_of(rig), rig.ledger.cancel
    other = parts_of(rig, name="process-2", ledger=await rig.bench.open_another())
    await rig.submit(job_id="p")
    await rig.submit_many(20, parent_job_id="p")
    await parts.follow_up()
    await parts.cancel("p")

    async def slow(*what: Any, **how: Any) -> Any:
        rig.clock.advance(1.0)
        await rig.bench.advance(1.0)
        assert await other.reconciler.page() is None
        return await cancel(*what, **how)

    monkeypatch.setattr(rig.ledger, "cancel", slow)
    report = await parts.reconciler.run_once()
    assert (report.following, report.made) == (True, 20)


async def test_to_cancel_the_retry_of_a_job_the_children_of_that_job_are_not_read(
    rig_of: Opens, monkeypatch: pytest.MonkeyPatch
):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await parts.result(await parts.dispatched(job_id="p"), "w1", Status.FAILED_RETRYABLE)
        for number in range(20):
            await parts.cancel(await rig.submit(job_id=f"c{number}", parent_job_id="p"))
        await parts.follow_up()
        await parts.cancel("p.r1")
        await parts.reconciler.release()
        parts, job, read = parts_of(rig, name="process-2"), rig.ledger.job, list[str]()

        async def noting(job_id: JobId) -> Any:
            read.append(job_id)
            return await job(job_id)

        monkeypatch.setattr(rig.ledger, "job", noting)
        assert (await parts.reconciler.run_once()).events
        assert set(read) == {"p", "p.r1"}


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_child_that_failed_while_its_parent_was_cancelled_is_not_done_again(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await rig.submit(job_id="p")
        held = await parts.dispatched(job_id="c", parent_job_id="p")
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        await parts.cancel("p")
        await parts.follow_up()
        assert await parts.jobs() == {"p": "CANCELLED", "c": "FAILED"}


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8")
async def test_a_workflow_step_is_released_when_the_step_before_it_ends(rig: Rig):
    parts = parts_of(rig)
    for index in (1, 2, 3):
        await _step(parts, f"s{index}", index)
    await _defer(parts, "s2")
    await _defer(parts, "s3")
    await parts.result(await _go(parts, "s1"), "w1")
    await parts.follow_up()
    assert [(await rig.job(name)).place for name in ("s2", "s3")] == [JobPlace.READY, JobPlace.SCHEDULED]
    assert (await parts.last("s2")).type == "job_deferred"
    await parts.follow_up()
    path = await rig.path("s2")
    await parts.result(await _go(parts, "s2"), "w1")
    await parts.follow_up()
    assert (await rig.job("s3")).place is JobPlace.READY
    assert len(path) == 4


@pytest.mark.parametrize("hold", ["throttle", "human"])
async def test_a_step_that_waits_for_something_else_goes_on_waiting(rig: Rig, hold: str):
    parts = parts_of(rig)
    await _step(parts, "s1", 1)
    await _step(parts, "s2", 2)
    if hold == "human":
        await parts.schedule("s2")
        await parts.move("s2", "SCHEDULED", Role.SAFETY_KERNEL, delay_s=600.0, data=b'{"hold": "human"}')
    else:
        await _defer(parts, "s2", hold)
    await parts.result(await _go(parts, "s1"), "w1")
    await parts.follow_up()
    assert (await rig.job("s2")).place is JobPlace.SCHEDULED


@pytest.mark.requirement("BUS-7", "BUS-8")
async def test_a_step_waits_for_the_retry_of_the_one_before_it(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        await _step(parts, "s1", 1)
        await _step(parts, "s2", 2)
        await _defer(parts, "s2")
        await parts.result(await _go(parts, "s1"), "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert (await rig.job("s2")).place is JobPlace.SCHEDULED
        await parts.result(await _go(parts, "s1.r1"), "w1")
        await parts.follow_up()
        assert (await rig.job("s2")).place is JobPlace.READY


@pytest.mark.on_both
@pytest.mark.requirement("BUS-8")
async def test_steps_after_one_that_ended_badly_are_cancelled(rig: Rig):
    parts = parts_of(rig)
    for name, index in (("s1", 1), ("beside", 1), ("s2", 2), ("s3", 3)):
        await _step(parts, name, index)
    await rig.submit(job_id="other-workflow", parent_job_id="p", workflow_id="wf2", step_index=3)
    await _defer(parts, "s2")
    await parts.result(await _go(parts, "s1"), "w1", Status.FAILED)
    await parts.follow_up()
    states = await parts.jobs()
    assert states == {
        "s1": "FAILED",
        "beside": "PENDING",
        "s2": "CANCELLED",
        "s3": "CANCELLED",
        "other-workflow": "PENDING",
    }
    assert (await parts.last("s2")).cause == "step 1 did not succeed"


# --- following -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-5")
async def test_one_reconciler_follows_the_feed_and_another_takes_over_at_its_position(rig: Rig):
    parts, other = parts_of(rig), parts_of(rig, name="process-2")
    report = await parts.reconciler.run_once()
    assert report.following
    waiting = await other.reconciler.run_once()
    assert not waiting.following
    assert other.reconciler.pause_s(waiting) > 0
    await parts.reconciler.release()
    assert (await other.reconciler.run_once()).following
    await rig.advance(6)
    await parts.reconciler.run_once()
    await rig.submit()
    assert not (await other.reconciler.run_once()).following


async def test_the_place_moves_on_over_what_belongs_to_others(rig: Rig):
    parts = parts_of(rig)
    await parts.follow_up()
    await rig.bench.submit(5)
    await parts.follow_up()
    await rig.advance(2)
    await parts.reconciler.run_once()
    await parts.reconciler.release()
    following = await rig.ledger.subscribe(parts.reconciler.actor, "bus-aftermath", lease_s=5)
    assert following is not None
    page = await rig.ledger.feed(following.position, limit=10)
    assert not page.events


async def test_the_scheduler_is_woken_when_something_may_go(rig_of: Opens):
    async with rig_of(topics=SHORT) as rig:
        parts = parts_of(rig)
        woken: list[int] = []
        parts.reconciler.wake = lambda: woken.append(1)
        held = await parts.dispatched()
        await parts.follow_up()
        assert not woken
        await parts.result(held, "w1", Status.FAILED_RETRYABLE)
        await parts.follow_up()
        assert woken


async def test_a_request_that_cannot_be_read_is_passed_over(rig: Rig):
    parts = parts_of(rig)
    await rig.bench.submit_one(lifecycle="bus-job", type=TOPIC, job_id=JobId("odd"), payload=b"[]")
    await parts.cancel("odd", CancelMode.HARD)
    assert await parts.follow_up() == 0

"""Why an operator had a job run again is kept with the job that does it, and is nobody else's business."""

from dataclasses import replace
from functools import partial

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import parts_of
from tests.bus.rig import TOPIC, Rig
from tests.dying_ledger import Died, DiesAfter
from trellis.bus.documents import requeue_cause
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.messages import Status
from trellis.bus.outcomes.job_tree import find_successor, requeue_as_new_job
from trellis.bus.requests import REQUEUE_CAUSE, RETRY_OF, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.errors import IdempotencyMismatch, InvalidTransition
from trellis.engine.jobs import Actor, RequestId, RequestKey
from trellis.lifecycles import Role

OPERATOR = Actor(role=Role.GATEWAY, name="olha")


async def requeued(rig: Rig, job_id: str, cause: str | None, request: str = "r") -> str:
    job = await rig.job(job_id)
    return (await requeue_as_new_job(rig.ledger, OPERATOR, job, rig.topics, RequestId(request), cause=cause)).job_id


async def labels(rig: Rig, job_id: str) -> dict[str, str]:
    return JobRequest.read((await rig.job(job_id)).payload or b"").labels


@pytest.mark.on_both
@pytest.mark.requirement("D39")
async def test_the_cause_of_a_requeue_is_kept_with_the_new_job(rig: Rig):
    parts = parts_of(rig)
    await parts.result(await parts.dispatched(job_id="a", labels={"team": "blue"}), "w1", Status.FAILED)
    first = await requeued(rig, "a", "the disk\x00 has room" + "." * 5_000)
    assert first == await requeued(rig, "a", "the disk\x00 has room" + "." * 5_000), "the same request is one job"
    kept = requeue_cause(await rig.job(first)) or ""
    assert kept.startswith("the disk")
    assert "\x00" not in kept
    assert len(kept) <= 2_000
    assert await labels(rig, first) == {"team": "blue", RETRY_OF: "a", REQUEUE_CAUSE: kept}
    assert requeue_cause(await rig.job("a")) is None


@pytest.mark.requirement("D39", "BUS-7")
async def test_the_cause_does_not_go_to_the_worker_nor_to_what_follows(rig: Rig):
    parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
    await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED)
    again = await requeued(rig, "a", "the customer complained")
    await rig.run()
    (order,) = worker.orders
    assert order.request.labels == {RETRY_OF: "a"}
    await parts.result(order.request.job_id, "w1", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    (retry,) = [job_id for job_id in await parts.jobs() if job_id not in {"a", again}]
    assert REQUEUE_CAUSE not in await labels(rig, retry)


@pytest.mark.requirement("D39")
async def test_the_next_requeue_has_a_cause_of_its_own_or_none(rig: Rig):
    parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
    await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED)
    first = await requeued(rig, "a", "try once more")
    await rig.run()
    await parts.result(worker.orders[-1].request.job_id, "w1", Status.FAILED)
    last = await requeued(rig, first, None, "other")
    assert requeue_cause(await rig.job(first)) == "try once more"
    assert requeue_cause(await rig.job(last)) is None


@pytest.mark.on_both
@pytest.mark.requirement("D39", "BUS-7")
async def test_a_job_that_failed_under_fewer_attempts_can_be_run_again_after_the_number_was_raised(rig: Rig):
    parts, generous = parts_of(rig), Topics.model_validate({"topics": {TOPIC: {"max_attempts": 5}}})
    await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED_RETRYABLE)
    for name in ("a.r1", "a.r2"):
        await parts.follow_up()
        await rig.advance(60)
        if await rig.state(name) == "PENDING":
            await parts.schedule(name)
        await parts.result(await parts.dispatch(name), "w1", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    last = await rig.job("a.r2")
    assert last.state == "FAILED"
    assert await find_successor(rig.ledger, last, rig.topics) is None
    assert await find_successor(rig.ledger, last, generous) is None, (
        "how often it may be done was settled when it ended"
    )
    made = await requeue_as_new_job(rig.ledger, OPERATOR, last, generous, RequestId("r"), cause="more attempts now")
    assert made.created
    with pytest.raises(InvalidTransition, match=rf"as {made.job_id}, which is PENDING"):
        await requeue_as_new_job(rig.ledger, OPERATOR, await rig.job("a"), generous, RequestId("other"))


@pytest.mark.on_both
@pytest.mark.parametrize("retryable", [False, True], ids=["new job", "retry that was due"])
@pytest.mark.requirement("D27", "D39")
async def test_requeue_whose_process_died_after_the_submit_is_answered_with_the_job_it_made(rig: Rig, retryable: bool):
    parts, status = parts_of(rig), Status.FAILED_RETRYABLE if retryable else Status.FAILED
    await parts.result(await parts.dispatched(job_id="a"), "w1", status)
    key = RequestKey(scope="s", key="k", fingerprint=b"f", about="a", given="press")
    again = partial(requeue_as_new_job, topics=rig.topics, request_id=RequestId("r"), key=key)
    dies = DiesAfter(rig.ledger, "submit")
    with pytest.raises(Died):
        await again(dies.ledger, OPERATOR, await rig.job("a"))
    stored = await rig.ledger.find_request(key)
    assert stored is not None, "the key is stored with the new job"
    made = await again(rig.ledger, OPERATOR, await rig.job("a"))
    assert (made.created, sorted(await parts.jobs())) == (False, ["a", made.job_id])
    with pytest.raises(IdempotencyMismatch):
        await requeue_as_new_job(
            rig.ledger, OPERATOR, await rig.job("a"), rig.topics, RequestId("o"), key=replace(key, fingerprint=b"o")
        )


async def test_a_requeue_is_refused_when_the_labels_of_the_job_leave_no_space_for_ours(rig: Rig):
    parts = parts_of(rig)
    full = {f"n{n}": "x" for n in range(1_000)}
    await parts.result(await parts.dispatched(job_id="a", labels=full), "w1", Status.FAILED)
    with pytest.raises(BusRequestInvalid, match="labels"):
        await requeued(rig, "a", "try once more")
    assert list(await parts.jobs()) == ["a"]


@pytest.mark.requirement("D30", "D38")
async def test_maximum_attempts_of_a_bus_job_are_fixed_at_dispatch(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"max_attempts": 1, "lease_s": 3}}) as rig:
        parts, worker = parts_of(rig), await rig.worker("w1", TOPIC)
        for name in ("failed", "lost"):
            await rig.submit(job_id=name)
        await rig.run()
        (order,) = (one for one in worker.orders if one.request.env["job_id"] == "failed")
        await parts.result(order.request.job_id, "w1", Status.FAILED_RETRYABLE)
        await parts.pass_time(4)
        assert await parts.jobs() == {"failed": "FAILED", "lost": "TIMEOUT"}
        generous = Topics.model_validate({"topics": {TOPIC: {"max_attempts": 5}}})
        for name in ("failed", "lost"):
            assert await find_successor(rig.ledger, await rig.job(name), generous) is None


@pytest.mark.on_both
@pytest.mark.requirement("D39", "BUS-7")
async def test_a_retry_that_an_operator_asks_for_before_it_is_made_is_made_once(rig: Rig):
    parts = parts_of(rig)
    await parts.result(await parts.dispatched(job_id="a"), "w1", Status.FAILED_RETRYABLE)
    assert await requeued(rig, "a", "quick") == "a.r1"
    await parts.follow_up()
    assert sorted(await parts.jobs()) == ["a", "a.r1"]

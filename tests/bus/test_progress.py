"""Signs of life of single jobs, and the question of our own workers whether they may begin."""

import asyncio
import json
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Held, Parts, parts_of
from tests.bus.rig import TOPIC, Rig
from trellis.bus.messages import PROGRESS, Dispatch, JobProgress, JobResult, Status
from trellis.engine.jobs import CancelMode, JobId
from trellis.lifecycles import Role

BEFORE = ["job_accepted", "job_scheduled", "job_dispatched"]


async def _left_s(parts: Parts, held: Held) -> float:
    (hold,) = await parts.ledger.holds([JobId(held.job_id)])
    return hold.left_s


async def _signs(parts: Parts, held: Held) -> list[Any]:
    signals = await parts.ledger.signals(JobId(held.job_id), limit=100)
    return [json.loads(one.data or b"{}") for one in signals if one.type == "job_heartbeat"]


# --- beginning -------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "D29")
async def test_progress_is_the_evidence_that_a_job_runs(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.progress(held, "w1", percent=10)
    assert (answer.status, answer.message) == (Status.RUNNING, "accepted")
    started = await parts.last(held.job_id)
    assert (started.type, started.role, started.actor) == ("job_started", Role.WORKER, "w1")
    await parts.progress(held, "w1", percent=20)
    await parts.result(held, "w1")
    assert await rig.path(held.job_id) == [*BEFORE, "job_started", "job_succeeded"]


async def test_an_intermediate_result_is_a_sign_of_life(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.hear("w1", JobResult(job_id=held.wire_id, status=Status.RUNNING, worker_id="w1"))
    assert await rig.path(held.job_id) == [*BEFORE, "job_started"]


async def test_a_progress_packet_that_reports_waiting_does_not_start_the_job(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    answer = await parts.progress(held, "w1", status=Status.DISPATCHED)
    assert (answer.status, answer.message) == (Status.DISPATCHED, "accepted")
    assert await rig.path(held.job_id) == BEFORE


@pytest.mark.on_both
@pytest.mark.requirement("D29")
async def test_one_start_request_is_granted_and_may_be_repeated(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    assert (await parts.start(held, "w1", "a")).message == "accepted"
    assert (await parts.start(held, "w1", "a")).message == "accepted"
    assert (await parts.start(held, "w1", "b")).message == "refused: started already"
    assert (await parts.start(held, "w2", "a")).message == "refused: foreign"
    assert await rig.path(held.job_id) == [*BEFORE, "job_started"]
    assert (await rig.said(held.job_id, "job_started"))["token"] == "a"


@pytest.mark.on_both
@pytest.mark.requirement("D29")
async def test_concurrent_start_requests_in_several_processes_grant_one(rig: Rig):
    processes = [parts_of(rig, name=f"p{n}", ledger=await rig.bench.open_another()) for n in range(3)]
    held = await processes[0].dispatched()
    asked = [(processes[number % 3], f"w{number % 2}", f"token-{number}") for number in range(12)]
    answers = await asyncio.gather(*(parts.start(held, worker, token) for parts, worker, token in asked))
    accepted = [token for (_, _, token), answer in zip(asked, answers, strict=True) if answer.message == "accepted"]
    assert accepted == [(await rig.said(held.job_id, "job_started"))["token"]]
    assert await rig.path(held.job_id) == [*BEFORE, "job_started"]


async def test_start_request_for_a_job_that_already_runs_is_refused(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.progress(held, "w1")
    assert (await parts.start(held, "w1", "a")).message == "refused: started already"


@pytest.mark.on_both
async def test_a_job_that_is_to_stop_does_not_begin(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.cancel(held.job_id, CancelMode.SOFT)
    answer = await parts.start(held, "w1")
    assert (answer.status, answer.message) == (Status.CANCELLED, "refused: late")
    assert await rig.path(held.job_id) == [*BEFORE, "job_cancelled"]


@pytest.mark.on_both
async def test_a_cancel_request_after_the_dispatch_is_answered_at_the_start_request(rig: Rig):
    """The ledger keeps the request with the lease: the worker learns of it when it asks, not from a timer."""
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.cancel(held.job_id, CancelMode.SOFT)
    assert await rig.path(held.job_id) == BEFORE
    assert parts.stops == []
    answer = await parts.start(held, "w1")
    assert (answer.status, answer.message) == (Status.CANCELLED, "refused: late")
    assert [stop.job_id for stop in parts.stops] == [held.wire_id]
    assert await rig.path(held.job_id) == [*BEFORE, "job_cancelled"]
    again = await parts.start(held, "w1")
    assert (again.status, again.message) == (Status.CANCELLED, "refused: late")


@pytest.mark.requirement("BUS-6")
async def test_progress_of_what_is_not_under_way_changes_nothing(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"idempotent": True, "lease_s": 3}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched(worker_id="w1")
        other = await parts.progress(held, "w2")
        assert other.message == "refused: foreign"
        echoed = await parts.progress(held, "w1", dispatch=Dispatch(dispatch_id="another"))
        assert echoed.message == "refused: stale"
        await parts.pass_time(4)
        assert (await parts.start(held, "w1")).message == "refused: stale"
        again = await parts.dispatch(held.job_id, "w1")
        assert (await parts.progress(held, "w1")).message == "refused: stale"
        await parts.result(again, "w1")
        path = await rig.path(held.job_id)
        assert (await parts.progress(again, "w1")).message == "refused: late"
        assert (await parts.hear("w1", JobProgress(job_id="unknown@1"))).message.startswith("refused: there is no")
        assert (await parts.hear("w1", JobProgress(job_id="unknown"))).message.startswith("refused: there is no")
        assert await rig.path(held.job_id) == path
        assert not await parts.remarks(held.job_id)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("D30")
async def test_progress_keeps_a_job_alive_and_is_shown(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 9}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched()
        await parts.start(held, "w1")
        for percent in range(5):
            await parts.pass_time(6)
            answer = await parts.progress(held, "w1", percent=percent, step_id="copy", message="so far")
            assert answer.message == "accepted"
        assert await rig.state(held.job_id) == "RUNNING"
        told = (await _signs(parts, held))[-1]
        assert (told["percent"], told["step_id"], told["message"]) == (4, "copy", "so far")


async def test_signs_that_come_often_are_not_all_written(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.start(held, "w1")
    for _ in range(20):
        assert (await parts.progress(held, "w1", percent=1, message="m")).message == "accepted"
    assert len(await _signs(parts, held)) == 1
    await rig.advance(2.5)
    await parts.progress(held, "w1", percent=2)
    assert [one["percent"] for one in await _signs(parts, held)] == [1, 2]


@pytest.mark.on_both
async def test_progress_report_is_answered_with_the_cancel_request_once(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(worker_id="w1")
    await parts.start(held, "w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    for _ in range(3):
        answer = await parts.progress(held, "w1")
        assert (answer.status, answer.message) == (Status.RUNNING, "cancel")
        await rig.advance(1)
    (stop,) = parts.stops
    assert (stop.job_id, stop.dispatch) == (
        held.wire_id,
        Dispatch(dispatch_id=held.dispatch_id, attempt=0, worker_id="w1"),
    )


async def test_cancel_request_is_sent_after_a_bus_outage(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched(worker_id="w1")
    await parts.start(held, "w1")
    await parts.cancel(held.job_id, CancelMode.SOFT)
    rig.bus.down = True
    assert (await parts.progress(held, "w1")).message == "cancel"
    rig.bus.down = False
    await parts.progress(held, "w1")
    assert [stop.job_id for stop in parts.stops] == [held.wire_id]


@pytest.mark.requirement("D29", "D30")
async def test_a_hung_handler_is_not_kept_alive_for_ever(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 9, "running_s": 30}}) as rig:
        parts = parts_of(rig)
        held = await parts.dispatched()
        await parts.start(held, "w1")
        messages: list[str] = []
        for _ in range(10):
            await parts.pass_time(5)
            messages.append((await parts.progress(held, "w1", message="at it")).message)
        assert messages[:6] == ["accepted"] * 6
        assert messages[6] == "refused: an attempt may take 30 s"
        assert await rig.state(held.job_id) == "TIMEOUT"


async def test_over_the_bus_a_question_is_answered(rig: Rig):
    parts = parts_of(rig)
    await parts.results.start()
    held = await parts.dispatched()
    question = JobProgress(job_id=held.wire_id, step_id="start", message="token")
    answer = (await rig.sender("w1").ask(PROGRESS, question, trace_id="t", timeout_s=10)).body
    assert isinstance(answer, JobProgress)
    assert (answer.status, answer.message) == (Status.RUNNING, "accepted")
    await parts.results.stop()


async def test_a_lease_runs_on_from_the_sign_of_life(rig: Rig):
    parts = parts_of(rig)
    held = await parts.dispatched()
    await parts.start(held, "w1")
    await parts.pass_time(10, step_s=5)
    before = await _left_s(parts, held)
    await parts.progress(held, "w1")
    assert await _left_s(parts, held) > before

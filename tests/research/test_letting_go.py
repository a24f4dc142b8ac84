"""A holder that lets go: what it gives back, and what it tells the backend; seen through the gateway, on a clock that is set."""

import asyncio
from typing import Any

import pytest

from tests.research.holding import STAGES, held_in
from tests.research.rig import Nlm, Rig, accept_only, failing, saying
from tests.research.test_nlm_answers import EXECUTION, http
from trellis.engine.errors import LedgerUnavailable
from trellis.research.backend_client import ExecutionRequest, ExecutionUnderWay, NlmBackend
from trellis.research.errors import BackendUnavailable, RateLimited, StageError


async def _drained(rig: Rig) -> None:
    await rig.orchestrator.drain()
    rig.orchestrator.claiming = True


@pytest.mark.requirement("D38")
async def test_a_job_whose_holder_is_stopped_can_be_taken_up_at_once_and_keeps_its_attempts(rig: Rig):
    job_id = await rig.submit()
    for drains, stage in enumerate((*STAGES, "NOTEBOOKLM_CALL"), 1):
        async with held_in(rig, job_id, stage):
            await _drained(rig)
        job = await rig.job(job_id)
        assert (job["status"], job["error"].partition(":")[0]) == ("RETRY_BACKOFF", "LET_GO")
        await rig.leap(0.001)
        back = await rig.job(job_id)
        assert (back["status"], back["attempt"], back["max_attempts"]) == ("QUEUED", drains, 3 + drains)
    assert (await rig.work(job_id, "COMPLETE"))["error"] is None


@pytest.mark.requirement("JQ-8", "D38")
async def test_attempts_that_really_fail_are_four_whatever_was_given_back_in_between(rig: Rig):
    job_id, failed = await rig.submit(), 0
    while await rig.status(job_id) != "FAILED":
        async with held_in(rig, job_id, "NOTEBOOKLM_CALL"):
            await _drained(rig)
        await rig.leap(0.001)
        rig.nlm.answer = failing(RateLimited(detail="429"))
        job = await rig.work(job_id, "RETRY_BACKOFF", "FAILED")
        failed += 1
        rig.nlm.answer = None
        if job["status"] == "RETRY_BACKOFF":
            await rig.leap(60.0)
    assert (failed, (await rig.job(job_id))["error"]) == (4, "RATE_LIMIT: 429")


@pytest.mark.requirement("JQ-9")
async def test_a_job_that_cannot_be_given_back_in_time_is_left_to_its_lease(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    hangs = asyncio.Event()

    async def turn(_: object) -> None:
        hangs.set()
        await asyncio.Event().wait()

    async def unavailable(_: object) -> None:
        raise LedgerUnavailable(reason="gone")

    for silent in (turn, unavailable):
        job_id = await rig.submit()
        async with held_in(rig, job_id, "NOTEBOOKLM_CALL"):
            with monkeypatch.context() as patched:
                patched.setattr(rig.instance.ledger, "turn", silent)
                draining = asyncio.create_task(rig.orchestrator.drain())
                if silent is turn:
                    await hangs.wait()
                    rig.clock.advance(2.0)
                await draining
        rig.orchestrator.claiming = True
        assert await rig.status(job_id) == "NOTEBOOKLM_CALL"
        await rig.lose_leases()
        assert (await rig.work(job_id, "COMPLETE"))["attempt"] == 1, "that cost an attempt"


@pytest.mark.requirement("D60")
async def test_a_queue_job_that_ends_without_a_result_cancels_its_execution_at_the_backend(rig: Rig):
    for number, ends in enumerate((_cancelled_hard, _cancelled_softly, _too_late, _stopped_holder), 1):
        job_id = await rig.submit()
        async with held_in(rig, job_id, "NOTEBOOKLM_CALL"):
            await rig.until(lambda number=number: len(rig.nlm.asked) == number)
            await ends(rig, job_id)
        await rig.until(lambda: rig.nlm.stopped == rig.nlm.asked)
        await rig.cancel(job_id)


async def _cancelled_hard(rig: Rig, job_id: str) -> None:
    assert (await rig.cancel(job_id)).json()["status"] == "FAILED"
    await rig.orchestrator.renew()


async def _cancelled_softly(rig: Rig, job_id: str) -> None:
    await rig.cancel(job_id, mode="soft")
    await rig.orchestrator.renew()
    await rig.work(job_id, "FAILED")


async def _too_late(rig: Rig, job_id: str) -> None:
    await rig.pass_time(600.0)
    await rig.work(job_id, "RETRY_BACKOFF")


async def _stopped_holder(rig: Rig, _: str) -> None:
    await _drained(rig)


@pytest.mark.requirement("D60")
async def test_an_execution_that_has_ended_or_never_began_is_not_cancelled_at_the_backend(rig: Rig):
    for answer in (None, saying("RATE_LIMIT"), saying("VALIDATION_ERROR"), failing(RateLimited(detail="429"))):
        rig.nlm.answer = answer
        job_id = await rig.submit()
        await rig.work(job_id, "COMPLETE", "RETRY_BACKOFF", "FAILED")
        await rig.cancel(job_id)
    assert (len(rig.nlm.asked), rig.nlm.stopped) == (4, [])


@pytest.mark.requirement("D60")
async def test_a_backend_that_cannot_be_reached_changes_nothing_for_the_queue_job(rig: Rig):
    async def broken(_: ExecutionRequest) -> None:
        raise BackendUnavailable(detail="down")

    async def silent(_: ExecutionRequest) -> None:
        await asyncio.Event().wait()

    async def lost(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        raise BackendUnavailable(detail="the answer was lost")

    rig.nlm.answer = lost
    for stops, told in ((broken, 1), (silent, 2)):
        rig.nlm.stops = stops
        job_id = await rig.submit()
        job = await rig.work(job_id, "RETRY_BACKOFF")
        assert job["error"] == "NLM_UNAVAILABLE: the answer was lost"
        await rig.until(lambda told=told: len(rig.nlm.stopped) == told)
        await rig.cancel(job_id)
    rig.clock.advance(2.0)
    await rig.until(lambda: not rig.orchestrator._driving)
    rig.nlm.stops, rig.nlm.answer = None, accept_only
    await rig.work(await rig.submit(), "NOTEBOOKLM_CALL")


@pytest.mark.requirement("D60")
@pytest.mark.parametrize(
    "status, wrong", [("202 Accepted", None), ("404 Not Found", None), ("503 Busy", BackendUnavailable)]
)
async def test_stopping_is_a_delete_of_the_execution(status: str, wrong: type[StageError] | None):
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(http(status))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    backend = NlmBackend(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", lambda: "a-token")
    try:
        if wrong is None:
            await backend.stop(EXECUTION)
        else:
            with pytest.raises(wrong):
                await backend.stop(EXECUTION)
    finally:
        await backend.close()
        listening.close()
    expected: Any = f"DELETE /jobs/{EXECUTION.job_id}/executions/{EXECUTION.epoch} HTTP/1.1"
    assert heard[0].decode().splitlines()[0] == expected
    assert "bearer a-token" in heard[0].decode().lower()


async def test_a_job_that_was_only_just_claimed_is_given_back_too(rig: Rig):
    job_id = await rig.submit()
    await rig.orchestrator.run_once()
    await _drained(rig)
    assert (await rig.path(job_id))[-2:] == ["CONTEXT_ASSEMBLY", "RETRY_BACKOFF"]

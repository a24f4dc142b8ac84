"""Backoffs, the end of attempts, the operator window: seen through the gateway, on a clock that is set."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.research.holding import Unreadable, held_in
from tests.research.rig import Rig, accept_only, failing, moment, saying, seconds_to_due
from trellis.engine.errors import LedgerUnavailable
from trellis.research import orchestrator
from trellis.research import orchestrator as driving
from trellis.research.errors import (
    ArtifactMismatch,
    BackendUnavailable,
    CallbackMissing,
    ContextTimeout,
    DeadlinePassed,
    RateLimited,
    StageError,
    StageHopeless,
)
from trellis.research.retry_policy import (
    BACKOFF_S,
    EXECUTIONS,
    FINAL_REST_S_MIN,
    FailForGood,
    RetryLater,
    on_stage_error,
)

DOWN = failing(BackendUnavailable(detail="the NLM backend answered 503"))


@pytest.mark.requirement("JQ-8", "D7", "D8", "D38")
@pytest.mark.parametrize("draw", [0.0, 0.999])
async def test_a_job_backs_off_three_times_then_fails_then_is_dead(rig: Rig, draw: float):
    rig.draw, rig.nlm.answer = draw, DOWN
    job_id = await rig.submit()
    for attempt, floor_s in enumerate((15.0, 30.0, 60.0)):
        job = await rig.work(job_id, "RETRY_BACKOFF")
        assert (job["attempt"], job["error"]) == (attempt, "NLM_UNAVAILABLE: the NLM backend answered 503")
        wait_s = seconds_to_due(job)
        assert floor_s <= wait_s <= floor_s * 1.2, "never sooner, and at most a fifth later"
        assert (wait_s > floor_s) == (draw > 0.0)
        await rig.leap(wait_s - 0.5)
        assert await rig.status(job_id) == "RETRY_BACKOFF"
        await rig.leap(0.501)
        back = await rig.job(job_id)
        assert (back["status"], back["attempt"], back["error"]) == ("QUEUED", attempt + 1, None)
    failed = await rig.work(job_id, "FAILED")
    assert (failed["attempt"], failed["error"]) == (3, "NLM_UNAVAILABLE: the NLM backend answered 503")
    assert [one["payload"]["to"] for one in (await rig.events(job_id))[-2:]] == ["RETRY_BACKOFF", "FAILED"]
    assert len(rig.nlm.asked) == EXECUTIONS == 4
    assert seconds_to_due(failed) == 900.0, "a person has a quarter of an hour"
    await rig.leap(899.0)
    assert await rig.status(job_id) == "FAILED"
    await rig.leap(1.0)
    dead = await rig.job(job_id)
    assert (dead["status"], dead["error"]) == ("DEAD", failed["error"])
    await rig.leap(1_000_000.0)
    assert await rig.status(job_id) == "DEAD", "nothing leaves DEAD by itself"


@pytest.mark.requirement("JQ-4", "D39", "D9", "JQ-3")
async def test_a_person_with_the_right_requeues_from_failed_and_from_dead_with_fresh_attempts(rig: Rig):
    rig.nlm.answer = saying("VALIDATION_ERROR", "the query says nothing")
    job_id = await rig.submit()
    failed = await rig.work(job_id, "FAILED")
    assert failed["error"] == "VALIDATION_ERROR: the query says nothing"
    refused = await rig.owner.post(f"/jobs/{job_id}/requeue", json={})
    assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    assert await rig.status(job_id) == "FAILED"
    assert (await rig.requeue(job_id)).json()["status"] == "QUEUED"
    again = await rig.job(job_id)
    assert (again["generation"], again["attempt"], again["error"]) == (1, 0, None)
    await rig.work(job_id, "FAILED")
    await rig.leap(900.0)
    assert await rig.status(job_id) == "DEAD"
    rig.nlm.answer = DOWN
    assert (await rig.requeue(job_id)).status_code == 200
    assert seconds_to_due(await rig.work(job_id, "RETRY_BACKOFF")) == 15.0, "its backoffs begin anew"
    rig.nlm.answer = None
    await rig.leap(15.0)
    done = await rig.work(job_id, "COMPLETE")
    assert (done["generation"], done["attempt"]) == (2, 1)
    late = await rig.requeue(job_id)
    assert (late.status_code, late.json()["code"]) == (409, "INVALID_TRANSITION")


@pytest.mark.requirement("D8", "D7")
async def test_a_permanent_error_fails_at_once_with_attempts_left(rig: Rig):
    rig.nlm.answer = failing(StageHopeless(detail="the NLM backend answered 422"))
    job_id = await rig.submit()
    failed = await rig.work(job_id, "FAILED")
    assert (failed["attempt"], failed["error"]) == (0, "VALIDATION_ERROR: the NLM backend answered 422")
    assert len(rig.nlm.asked) == 1


@pytest.mark.requirement("D8")
async def test_an_orchestrator_that_dies_before_failed_gives_a_permanent_error_no_other_attempt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def dies(*_: object, **__: object) -> str:
        raise LedgerUnavailable(reason="the process is gone")

    monkeypatch.setattr(driving, "fail_for_good", dies)
    rig.nlm.answer = failing(StageHopeless(detail="no good"))
    job_id = await rig.submit()
    async with rig.ending_nothing():
        await rig.work(job_id, "RETRY_BACKOFF")
    for _ in range(3):
        await rig.leap(30 * 24 * 3600.0)
        assert await rig.status(job_id) == "RETRY_BACKOFF", "no timer makes another attempt of it"
    monkeypatch.undo()
    failed = await rig.work(job_id, "FAILED")
    assert (failed["error"], len(rig.nlm.asked)) == ("VALIDATION_ERROR: no good", 1)
    assert seconds_to_due(failed) == 900.0


@pytest.mark.requirement("D8")
async def test_jobs_left_by_a_dead_orchestrator_are_searched_in_bounded_parts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def dies(*_: object, **__: object) -> str:
        raise LedgerUnavailable(reason="the process is gone")

    monkeypatch.setattr(orchestrator, "LOOK_PAGE", 1)
    monkeypatch.setattr(orchestrator, "LOOK_PAGES_MAX", 2)
    rig.nlm.answer = failing(StageHopeless(detail="no good"))
    jobs = [await rig.submit() for _ in range(3)]
    async with rig.ending_nothing():
        with monkeypatch.context() as dead:
            dead.setattr(driving, "fail_for_good", dies)
            for job_id in jobs:
                await rig.work(job_id, "RETRY_BACKOFF")
    found: list[list[str]] = []
    for _ in range(3):
        await rig.orchestrator.run_once()
        await rig.orchestrator.run_once()
        found.append([await rig.status(job_id) for job_id in jobs])
        await rig.leap(orchestrator.LOOK_EVERY_S)
    left = "RETRY_BACKOFF"
    assert found[0] == ["FAILED", "FAILED", left], "the second pass was too soon for another look"
    assert found[1] == ["FAILED", "FAILED", "FAILED"]
    assert rig.orchestrator._looked_to is None, "the next look begins anew"


@pytest.mark.requirement("D41", "D7")
async def test_an_execution_is_given_up_and_cancelled_at_the_backend_after_600_seconds(rig: Rig):
    rig.nlm.answer = accept_only
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 1)
    began = moment((await rig.job(job_id))["updated_at"])
    assert rig.nlm.asked[0].deadline - began == timedelta(seconds=600)
    await rig.pass_time(595.0)
    assert await rig.status(job_id) == "NOTEBOOKLM_CALL"
    await rig.pass_time(5.0)
    job = await rig.work(job_id, "RETRY_BACKOFF")
    assert job["error"].startswith("MISSING_CALLBACK: NOTEBOOKLM_CALL was not over"), "worth another attempt"
    assert job["attempt"] == 0


@pytest.mark.requirement("JQ-9", "D8")
async def test_a_memory_that_hangs_is_a_context_timeout_and_worth_another_attempt(rig: Rig):
    job_id = await rig.submit()
    async with held_in(rig, job_id, "CONTEXT_ASSEMBLY"):
        await rig.pass_time(25.0)
        assert await rig.status(job_id) == "CONTEXT_ASSEMBLY"
        await rig.pass_time(5.0)
        job = await rig.work(job_id, "RETRY_BACKOFF")
    assert job["error"] == "CONTEXT_TIMEOUT: CONTEXT_ASSEMBLY took more than 30 s"
    await rig.leap(15.0)
    assert (await rig.work(job_id, "COMPLETE"))["attempt"] == 1


@pytest.mark.requirement("JQ-9", "D8")
async def test_a_store_that_fails_while_the_artifact_is_written_is_worth_another_attempt(rig: Rig):
    driver = rig.orchestrator.driver
    artifacts, job_id = driver.artifacts, await rig.submit()
    driver.artifacts = replace(artifacts, objects=Unreadable(artifacts.objects, "projects/"))  # type: ignore[arg-type]
    job = await rig.work(job_id, "RETRY_BACKOFF")
    assert (await rig.events(job_id))[-1]["payload"]["from"] == "ARTIFACT_WRITE"
    assert (job["error"].partition(":")[0], job["artifact_id"]) == ("ARTIFACT_WRITE_FAILED", None)
    driver.artifacts = artifacts
    await rig.leap(18.0)
    assert (await rig.work(job_id, "COMPLETE"))["attempt"] == 1


@pytest.mark.requirement("D7", "D8")
async def test_the_jobs_own_deadline_is_passed_down_and_ends_it(rig: Rig):
    rig.nlm.answer = accept_only
    job_id = await rig.submit(deadline_s=40.0)
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 1)
    assert rig.nlm.asked[0].deadline - moment((await rig.job(job_id))["created_at"]) == timedelta(seconds=40)
    await rig.pass_time(40.0)
    job = await rig.work(job_id, "FAILED")
    assert (job["attempt"], job["error"].partition(":")[0]) == (0, "DEADLINE_PASSED")


TRANSIENT = [RateLimited, BackendUnavailable, CallbackMissing, ContextTimeout, ArtifactMismatch, StageError]


@pytest.mark.requirement("JQ-8", "D8", "D38")
@pytest.mark.parametrize("kind", TRANSIENT)
@pytest.mark.parametrize("attempt", range(4))
def test_the_policy_waits_at_least_the_floor_and_at_most_a_fifth_more(kind: type, attempt: int):
    verdicts = [on_stage_error(kind(detail="x"), attempt, EXECUTIONS, draw) for draw in (0.0, 0.5, 0.999_999)]
    if attempt == 3:
        assert verdicts == [FailForGood(0.0)] * 3
        return
    floor_s = BACKOFF_S[attempt]
    waits = [verdict.delay_s for verdict in verdicts if isinstance(verdict, RetryLater)]
    assert waits[0] == floor_s
    assert floor_s < waits[1] < waits[2] < floor_s * 1.2 + 1e-9


@pytest.mark.requirement("JQ-8", "D38")
def test_an_attempt_that_was_given_back_is_made_up_for_at_the_end_with_the_longest_backoff():
    assert on_stage_error(StageError(detail="x"), 3, EXECUTIONS + 1, 0.0) == RetryLater(60.0)
    assert on_stage_error(StageError(detail="x"), 4, EXECUTIONS + 1, 0.0) == FailForGood(0.0)


@pytest.mark.requirement("D8")
@pytest.mark.parametrize("kind", [StageHopeless, DeadlinePassed])
@pytest.mark.parametrize("attempt", range(4))
def test_permanent_error_never_waits_for_another_attempt(kind: type, attempt: int):
    verdict = on_stage_error(kind(detail="x"), attempt, EXECUTIONS, 0.5)
    assert isinstance(verdict, FailForGood)
    assert verdict.rest_s > FINAL_REST_S_MIN > 72.0

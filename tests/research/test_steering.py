"""Cancel and requeue of queue jobs: who may, what becomes of the holder, and which run a requeued job belongs to."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN
from tests.research.holding import STAGES, held_in
from tests.research.rig import Rig, accept_only, saying
from trellis.documents import run_documents
from trellis.documents.run_documents import RunFacts, RunRequest
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.lifecycles import Role
from trellis.runs.orchestration import TriggerKind


@pytest.mark.requirement("D43")
async def test_only_an_operator_cancels_a_queue_job(rig: Rig):
    asked = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": {"query": "Who?"}}
    job_id = (await rig.client(Role.SUBMITTER, name="somebody").post("/jobs", json=asked)).json()["job_id"]
    for role in (Role.OWNER, Role.SUBMITTER, Role.FRONTEND, Role.NLM_BACKEND, Role.WORKER):
        answer = await rig.client(role, name="somebody").post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})
        assert (role, answer.status_code, answer.json()["code"]) == (role, 403, "FORBIDDEN"), answer.text
    assert await rig.status(job_id) == "PENDING"


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_reaches_the_driver_by_its_heartbeat_and_ends_the_job(rig: Rig):
    made: list[str] = []
    for stage in STAGES:
        job_id = await rig.submit()
        made.append(job_id)
        async with held_in(rig, job_id, stage):
            asked = await rig.cancel(job_id, mode="soft", reason="the question has changed")
            assert asked.json()["status"] == stage, "its holder is asked first"
            assert (await rig.job(job_id))["cancel_requested"] is True
            await rig.orchestrator.renew()
            job = await rig.work(job_id, "FAILED")
        assert job["error"] == "CANCELLED: the question has changed"
        assert (await rig.events(job_id))[-1]["payload"]["from"] == stage
    await rig.leap(1_000_000.0)
    assert {await rig.status(job_id) for job_id in made} == {"FAILED"}, "they rest there"


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_becomes_hard_when_the_holder_does_not_stop(rig: Rig):
    job_id = await rig.submit()
    async with held_in(rig, job_id, "NOTEBOOKLM_CALL"):
        await rig.cancel(job_id, mode="soft")
        rig.orchestrator.driver.cancel_requests.clear()
        await rig.leap(30.0)
        assert await rig.status(job_id) == "FAILED"
    assert (await rig.job(job_id))["error"].startswith("CANCELLED: ")


@pytest.mark.requirement("D19", "JQ-3", "JQ-2")
async def test_the_first_of_cancel_and_complete_wins(rig: Rig):
    done, cancelled = await rig.submit(), await rig.submit()
    await rig.work(done, "COMPLETE")
    late = await rig.cancel(done)
    assert (late.status_code, late.json()["code"]) == (409, "INVALID_TRANSITION")
    assert f"Job {done} has ended already: it is COMPLETE since " in late.json()["detail"]
    assert await rig.status(done) == "COMPLETE"
    async with held_in(rig, cancelled, "ARTIFACT_WRITE") as gate:
        assert (await rig.cancel(cancelled)).status_code == 200
        gate.open.set()
        for _ in range(5):
            await rig.orchestrator.run_once()
    job = await rig.job(cancelled)
    assert (job["status"], job["artifact_id"]) == ("FAILED", None), "what its holder still wrote was refused"
    assert (await rig.owner.get(f"/artifacts?job_id={cancelled}")).json()["items"] == []


# --- the run of a requeued job -----------------------------------------------------------------------------------------


async def _ended_run(rig: Rig) -> str:
    layer = rig.instance.layer
    run = (await layer.trigger(VIOLIN, {"topic": "bows"}, kind=TriggerKind.MANUAL)).job_id
    state = await layer.cancel(run, mode=CancelMode.HARD, request_id=RequestId(f"end {run}"), cause="over")
    assert state == "failed"
    return run


async def _manifest(rig: Rig, run: str) -> dict[str, Any]:
    """What a run publishes when it has ended; it is ended for that."""
    await rig.instance.layer.cancel(JobId(run), mode=CancelMode.HARD, request_id=RequestId(f"end {run}"), cause="over")
    job, events = await rig.instance.ledger.job(JobId(run)), await rig.recorded(run)
    assert job is not None
    return json.loads(run_documents.manifest(RunFacts(run, RunRequest.read(job.payload or b""), tuple(events))))


async def _failed_job(rig: Rig, **about: str) -> str:
    rig.nlm.answer = saying("VALIDATION_ERROR")
    job_id = await rig.submit(**about)
    await rig.work(job_id, "FAILED")
    return job_id


@pytest.mark.requirement("D20")
async def test_a_requeued_job_of_an_ended_run_belongs_to_a_new_run_that_says_what_it_repeats(rig: Rig):
    old = await _ended_run(rig)
    job_id = await _failed_job(rig, run_id=old)
    before = [event["payload"]["data"] for event in await rig.events(job_id)]
    folder = [info.key for info in (await rig.instance.objects.list(f"agents/{VIOLIN}/runs/{old}/")).items]
    rig.nlm.answer = saying("RATE_LIMIT")
    assert (await rig.requeue(job_id)).status_code == 200
    again = await rig.work(job_id, "RETRY_BACKOFF")
    new = again["run_id"]
    assert (again["job_id"], new != old) == (job_id, True)
    rig.nlm.answer = None
    await rig.leap(18.0)
    done = await rig.work(job_id, "COMPLETE")
    assert (done["run_id"], done["attempt"]) == (new, 1), "one run for all attempts of a generation"
    artifact = (await rig.owner.get(f"/artifacts/{done['artifact_id']}")).json()
    assert (artifact["run_id"], artifact["job_id"]) == (new, job_id)
    run = await rig.instance.ledger.job(JobId(new))
    assert run is not None
    asked = RunRequest.read(run.payload or b"")
    assert (asked.params, asked.agent_slug) == ({"topic": "bows"}, VIOLIN)
    assert (await _manifest(rig, new))["retry_of"] == old
    assert "retry_of" not in await _manifest(rig, old)
    events = await rig.events(job_id)
    assert [event["payload"]["data"] for event in events[: len(before)]] == before, (
        "what was recorded keeps the old run"
    )
    assert [info.key for info in (await rig.instance.objects.list(f"agents/{VIOLIN}/runs/{old}/")).items] == folder
    runs = (await rig.owner.get("/runs")).json()["items"]
    assert sorted(one["run_id"] for one in runs) == sorted([old, new])


@pytest.mark.requirement("D20")
async def test_a_requeued_job_of_no_run_keeps_the_run_id_that_was_made_for_it(rig: Rig):
    job_id = await _failed_job(rig)
    made = (await rig.job(job_id))["run_id"]
    rig.nlm.answer = None
    await rig.requeue(job_id)
    assert (await rig.work(job_id, "COMPLETE"))["run_id"] == made
    assert (await rig.owner.get("/runs")).json()["items"] == []


@pytest.mark.requirement("D20")
async def test_a_requeued_job_of_a_run_that_goes_on_stays_with_it(rig: Rig):
    run = (await rig.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    job_id = await _failed_job(rig, run_id=run)
    rig.nlm.answer = None
    await rig.requeue(job_id)
    assert (await rig.work(job_id, "COMPLETE"))["run_id"] == run
    assert len((await rig.owner.get("/runs")).json()["items"]) == 1


@pytest.mark.requirement("JQ-6")
async def test_only_the_orchestration_layer_moves_a_queue_job_between_stages(rig: Rig):
    rig.nlm.answer = accept_only
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    for role in (Role.NLM_BACKEND, Role.AGENT_RUNTIME, Role.OWNER):
        answer = await rig.client(role, job_id=job_id).post(f"/jobs/{job_id}/result", json={})
        assert answer.status_code == 401, "a token is no signature"
    moved = [event for event in await rig.events(job_id) if event["payload"]["from"] is not None]
    assert {event["payload"]["role"] for event in moved} == {"orchestrator"}

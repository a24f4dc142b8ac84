"""Runs over HTTP: what they published outlives their row, a run that ended is archived, and a manifest names its artifacts."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.artifacts.desk import BACKEND, ORCHESTRATOR, call_again, complete, draft
from tests.gateway.conftest import VIOLIN, Gateway
from trellis.api.runs import READ
from trellis.artifacts.content import JobType
from trellis.auth import matrices, ownership
from trellis.auth.matrices import RULES, Grant
from trellis.documents import ids
from trellis.documents.audit_chain import AuditSealer
from trellis.documents.lookup import find_published
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import Actor, JobId, Move, RequestId
from trellis.engine.records import RetentionOptions
from trellis.lifecycles import Role
from trellis.runs.orchestrator import Orchestrator, RunDriver, RunDriverOptions
from trellis.runs.projector import Projector

DAY_S = 24 * 3600.0


async def publish(gateway: Gateway) -> None:
    """Publish and seal everything there is."""
    actor, ledger, clock = Actor(role=Role.PROJECTOR, name="projector@test"), gateway.instance.ledger, gateway.clock
    objects = gateway.instance.objects
    sealer = AuditSealer(ledger=ledger, actor=actor, objects=objects, clock=clock)
    publisher = DocumentPublisher(objects)
    projector = Projector(ledger=ledger, actor=actor, publisher=publisher, sealer=sealer, clock=clock)
    while (await projector.run_once()).events:
        pass
    await projector.release()


async def begun(gateway: Gateway, agent: str = VIOLIN) -> str:
    return (await gateway.client("owner").post("/agents/run", json={"agent_slug": agent})).json()["run_id"]


async def ended(gateway: Gateway, agent: str = VIOLIN) -> str:
    """A run that somebody cancelled, and its documents."""
    run_id = await begun(gateway, agent)
    answer = await gateway.client("owner").post(f"/runs/{run_id}/cancel", json={"mode": "hard", "reason": "enough"})
    assert answer.json()["status"] == "failed"
    await publish(gateway)
    return run_id


async def retain(gateway: Gateway) -> None:
    """Let retention remove what ended more than a month ago."""
    gateway.clock.advance(31 * DAY_S)
    while (await gateway.instance.ledger.retain(RetentionOptions())).more:
        pass


@pytest.mark.requirement("PIPE-1", "D12", "D13")
async def test_permitted_caller_starts_a_run_and_its_status_is_readable_at_once(gateway: Gateway):
    owner, body = gateway.client("owner"), {"agent_slug": VIOLIN, "params": {"topic": "bows"}}
    for stranger, status in ((gateway.anonymous(), 401), (gateway.client("worker"), 403)):
        assert (await stranger.post("/agents/run", json=body)).status_code == status
    assert (await owner.get("/runs")).json()["items"] == []
    answer = await owner.post("/agents/run", json=body)
    run_id = answer.json()["run_id"]
    assert (answer.status_code, bool(ids.RUN_ID.fullmatch(run_id))) == (202, True)
    stored = await gateway.instance.objects.get(ids.status_key(VIOLIN, run_id))
    assert stored is not None
    assert json.loads(stored.body)["status"] == "requested"
    day, _, digits = run_id.removeprefix("run_").split("_")
    assert (await owner.get(f"/runs/run_{day}_{digits}/status")).json()["run_id"] == run_id


@pytest.mark.requirement("RUN-10", "D61", "RUN-2")
async def test_published_run_documents_are_readable_after_retention(gateway: Gateway):
    run_id = await ended(gateway)
    client, places = (
        gateway.client("frontend"),
        [f"/runs/{run_id}{part}" for part in ("", "/status", "/manifest", "/steps")],
    )
    before = [(await client.get(place)).json() for place in places]
    assert (before[0]["status"], before[0]["error"]) == ("failed", "CANCELLED: enough")
    await retain(gateway)
    assert await gateway.instance.ledger.job(JobId(run_id)) is None
    assert (await client.get("/runs")).json()["items"] == []
    gateway.app.state.slugs.drop(run_id)  # as in a process that never saw it
    answers = [await client.get(place) for place in places]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json() for answer in answers] == before
    unchanged = await client.get(places[1], headers={"If-None-Match": answers[1].headers["etag"]})
    assert unchanged.status_code == 304


@pytest.mark.requirement("D61", "D62")
async def test_a_run_that_is_gone_is_shown_to_those_alone_who_could_read_it_before(gateway: Gateway):
    run_id = await ended(gateway)
    await retain(gateway)
    gateway.app.state.slugs.drop(run_id)
    place = f"/runs/{run_id}/status"
    for who in ({"tenant": "acme"}, {"agent": "architect-guardian"}, {"agent": VIOLIN}):
        assert (await gateway.client("owner", **who).get(place)).status_code == 403, who
    for role in ("worker", "submitter", "nlm-backend", "agent-runtime"):
        assert (await gateway.client(role).get(place)).status_code == 403, role
    published = await find_published(gateway.instance.objects, run_id)
    assert published is not None
    assert (published.agent_slug, published.submitter) == (VIOLIN, "owner")


@pytest.mark.requirement("D61", "D62")
async def test_caller_with_own_runs_only_is_refused_a_foreign_run(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """No role has such a right today; the cache of agents must not be the reason why one would reach all runs."""
    limited = replace(RULES[READ], grants={**RULES[READ].grants, Role.SUBMITTER: Grant.OWN})
    for module in (matrices, ownership):
        monkeypatch.setattr(module, "RULES", {**RULES, READ: limited})
    run_id = await ended(gateway)
    place, owner, stranger = f"/runs/{run_id}/status", gateway.client("owner"), gateway.client("submitter", name="eve")
    for removed in (False, True):
        if removed:
            await retain(gateway)
        assert (await owner.get(place)).status_code == 200
        assert (await stranger.get(place)).status_code == 403


@pytest.mark.requirement("D61")
@pytest.mark.parametrize("body", [None, b"{}", b"no json", b'{"event_id": "x", "job_id": "another"}'])
async def test_a_run_that_is_gone_and_whose_record_cannot_be_read_is_not_found(gateway: Gateway, body: bytes | None):
    run_id = await ended(gateway)
    objects = gateway.instance.objects
    record = f"audit/20260101/{run_id}-1.json"
    assert await objects.delete(record)
    if body is not None:
        await objects.put(record, body)
    await retain(gateway)
    gateway.app.state.slugs.drop(run_id)
    answer = await gateway.client("owner").get(f"/runs/{run_id}/status")
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


async def test_a_run_that_never_was_is_not_found_in_what_was_published(gateway: Gateway):
    answer = await gateway.client("owner").get("/runs/run_2026-01-01_000000_aaaaaa/status")
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.requirement("RUN-2", "RUN-4")
async def test_a_run_that_ended_is_archived_and_nothing_of_it_changes_any_more(gateway: Gateway):
    done, open_ = await ended(gateway), await begun(gateway)
    await publish(gateway)
    client = gateway.client("owner")
    listed = {run["run_id"]: run["archived"] for run in (await client.get("/runs")).json()["items"]}
    assert listed == {done: True, open_: False}
    only = (await client.get("/runs", params={"archived": True})).json()["items"]
    assert [run["run_id"] for run in only] == [done]
    status, polled = await client.get(f"/runs/{done}/status"), await client.get(f"/runs/{open_}/status")
    assert ("retry-after" in status.headers, polled.headers["retry-after"]) == (False, "5")
    again = await client.post(f"/runs/{done}/cancel", json={"mode": "hard"})
    assert (again.status_code, again.json()["code"]) == (409, "INVALID_TRANSITION")
    await publish(gateway)
    assert (await client.get(f"/runs/{done}/status")).content == status.content


# --- artifacts of a run --------------------------------------------------------------------------------------------------


async def artifact_for(gateway: Gateway, run_id: str | None) -> str:
    """What a job makes that was submitted for this run, or for none."""
    instance = gateway.instance
    asked: dict[str, Any] = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": {"query": "Who made it?"}}
    answer = await gateway.client("owner").post("/jobs", json=asked | ({"run_id": run_id} if run_id else {}))
    job_id = JobId(answer.json()["job_id"])
    await instance.ledger.move(ORCHESTRATOR, Move(job_id=job_id, target="QUEUED", request_id=RequestId(job_id)))
    lease = await call_again(instance.ledger, job_id, "RESEARCH")
    job = await instance.ledger.job(job_id)
    assert job is not None
    staged = await instance.artifacts.stage(BACKEND, draft(JobType.RESEARCH), job=job)
    assert await complete(instance.ledger, instance.artifacts, lease, staged.artifact_id)
    return staged.artifact_id


async def work_on(gateway: Gateway, run_id: str, options: RunDriverOptions | None = None) -> dict[str, Any]:
    """Let the instance's own orchestrator and projector take the run to its end; its manifest."""
    services = gateway.instance.services()
    (orchestrator,) = (one for one in services if isinstance(one, Orchestrator))
    (projector,) = (one for one in services if isinstance(one, Projector))
    driver = orchestrator.driver
    assert isinstance(driver, RunDriver)
    driver.options = options or RunDriverOptions()
    async with asyncio.timeout(60):
        while (job := await gateway.instance.ledger.job(JobId(run_id))) is not None and job.state != "completed":
            await orchestrator.run_once()
            await projector.run_once()
            if job.state == "failed":
                break
    while (await projector.run_once()).events:
        pass
    await projector.release()
    return (await gateway.client("owner").get(f"/runs/{run_id}/manifest")).json()


@pytest.mark.requirement("PIPE-15")
async def test_a_manifest_lists_the_artifacts_that_jobs_of_the_run_made_and_no_others(gateway: Gateway):
    run_id = await begun(gateway)
    made = [await artifact_for(gateway, run_id), await artifact_for(gateway, run_id)]
    await artifact_for(gateway, None)
    manifest = await work_on(gateway, run_id)
    assert (manifest["status"], manifest["artifacts"]) == ("completed", made)


@pytest.mark.requirement("PIPE-15", "RUN-6")
async def test_the_manifest_of_a_failed_run_lists_them_too(gateway: Gateway):
    run_id = await begun(gateway)
    made = await artifact_for(gateway, run_id)
    manifest = await work_on(gateway, run_id, RunDriverOptions(run_timeout_s=0.0))
    assert (manifest["status"], manifest["artifacts"]) == ("failed", [made])
    assert manifest["error"].startswith("AGENT_TIMEOUT: ")

"""What the gateway takes as a queue job: everything else is 422 and stores nothing; only the orchestration layer accepts (JQ-11)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN
from tests.research.holding import Unreadable
from tests.research.rig import OTHER, QUESTION, Rig, accept_only
from trellis.agents.definition import AgentStatus
from trellis.app.wiring import new_id
from trellis.engine.jobs import Actor, JobId
from trellis.engine.records import Event, JobFilter
from trellis.lifecycles import Role
from trellis.research import orchestrator
from trellis.research.queue_job import checked_request, new_queue_job
from trellis.runs.orchestration import TriggerKind

GOOD: dict[str, Any] = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": QUESTION}
RUN = "run_2026-01-01_080000_abc123"
GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")
BRIEF = {"vision_text": "A calm piece", "entity_refs": []}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown agent": ({"agent_slug": "nobody"}, "no agent 'nobody'"),
    "no agent": ({"agent_slug": None}, "name it as agent_slug"),
    "a slug that is none": ({"agent_slug": "../violin"}, "no agent slug"),
    "unknown job_type": ({"job_type": "POEM"}, "choose one of RESEARCH, BRIEF, PROPOSAL_PREPROCESS"),
    "no payload": ({"payload": None}, "must be an object"),
    "a payload that is text": ({"payload": "who?"}, "must be an object"),
    "a missing field": ({"payload": {}}, "query"),
    "an unknown field": ({"payload": {**QUESTION, "model": "x"}}, "model"),
    "another type's payload": ({"job_type": "BRIEF"}, "vision_text"),
    "a query without a word": ({"payload": {"query": " ? "}}, "at least one word"),
    "a URL for a source": (
        {"payload": {**QUESTION, "sources": ["http://169.254.169.254/"]}},
        "name files of the agent",
    ),
    "a source that is not there": ({"payload": {**QUESTION, "sources": ["zzz"]}}, "has no such source (it has "),
    "a misspelt source": (
        {"payload": {**QUESTION, "sources": ["sources/05-provenanc.md"]}},
        "did you mean sources/05-provenance.md?",
    ),
    "a misspelt agent": ({"agent_slug": "archivist-violn"}, "did you mean archivist-violin?"),
    "a bad callback URL": ({"callback": "file:///etc/passwd"}, "callback"),
    "a draft that is empty": ({"job_type": "PROPOSAL_PREPROCESS", "payload": {"proposal_draft": {}}}, "proposal_draft"),
    "attempts": ({"max_attempts": 9}, "'max_attempts' cannot be set"),
    "a concurrency key": ({"concurrency_key": "mine"}, "'concurrency_key' cannot be set"),
    "a start": ({"delay_s": 5}, "'delay_s' cannot be set"),
    "a run that is none": ({"run_id": "run_2026-01-01_000000_abcdef"}, "names no run"),
    "an id that is no run's": ({"run_id": "../x"}, "names no run"),
    "two names": ({"type": "work"}, "exactly one of"),
    "too many entities": ({"entity_refs": ["e"] * 51}, "entity_refs"),
    "an entity without a name": ({"entity_refs": [""]}, "entity ref"),
    "queue fields of a leased job": ({"job_type": None, "type": "work"}, "belongs to jobs named by 'job_type'"),
}


@pytest.mark.requirement("JQ-11", "D34", "D10")
async def test_invalid_queue_job_is_refused_with_a_reason_and_stores_no_row(rig: Rig):
    async def stored() -> tuple[int, list[str]]:
        jobs = await rig.instance.ledger.jobs(JobFilter(), limit=100)
        return len(jobs.jobs), [info.key for info in (await rig.instance.objects.list("")).items]

    near = await rig.owner.get("/jobs", params={"status": "queud"})
    assert (near.status_code, "did you mean queued?" in near.json()["detail"]) == (422, True), near.text
    before = await stored()
    for named, (changed, says) in BAD.items():
        body = {name: value for name, value in (GOOD | changed).items() if value is not None}
        answer = await rig.owner.post("/jobs", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED"), (named, answer.text)
        assert says in json.dumps(answer.json(), ensure_ascii=False), (named, answer.text)
    assert await stored() == before
    await rig.instance.catalog.index()
    await rig.instance.objects.put("agents/archivist-viol/_agent.md", b"not in the index yet")
    answer = await rig.owner.post("/jobs", json={**GOOD, "agent_slug": "archivist-viola"})
    assert "did you mean archivist-violin?" in answer.text, "agents are suggested from the index, not from all files"


@pytest.mark.requirement("JQ-11", "JQ-6", "D10")
async def test_only_the_orchestration_layer_accepts_and_with_an_event_of_its_own(rig: Rig):
    job_id = await rig.submit()
    (first,) = await rig.events(job_id)
    assert (first["type"], first["payload"]["role"], first["actor"]) == ("job_accepted", "gateway", "iryna")
    rig.orchestrator.claiming = False
    await rig.work(job_id, "QUEUED")
    second = (await rig.events(job_id))[-1]
    assert (second["type"], second["payload"]["role"]) == ("job_queued", "orchestrator")
    assert (second["payload"]["from"], second["payload"]["to"]) == ("PENDING", "QUEUED")


@pytest.mark.requirement("D10")
async def test_a_job_whose_agent_cannot_run_any_more_fails_where_the_agent_is_read_and_says_why(rig: Rig):
    job_id, other = await rig.submit(), await rig.submit()
    catalog, keyed = rig.instance.catalog, {"Idempotency-Key": "press"}
    asked = await rig.owner.post("/jobs", json=GOOD, headers=keyed)
    await rig.owner.patch(f"/agents/{VIOLIN}/status", json={"status": "paused", "reason": "spring"})
    refused = await rig.owner.post("/jobs", json=GOOD)
    assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
    assert f"it is paused; only an active agent runs; `trellis agents activate {VIOLIN}`" in refused.json()["detail"]
    again = await rig.owner.post("/jobs", json=GOOD, headers=keyed)
    assert (again.status_code, again.json()["job_id"]) == (202, asked.json()["job_id"]), "a repetition is replayed"
    job = await rig.work(job_id, "FAILED")
    assert await rig.path(job_id) == ["PENDING", "QUEUED", "CONTEXT_ASSEMBLY", "RETRY_BACKOFF", "FAILED"]
    assert job["error"] == f"VALIDATION_ERROR: agent {VIOLIN} is paused; only an active agent runs"
    explained = (await rig.owner.get(f"/jobs/{job_id}/explanation")).json()
    assert any(one.startswith(f"Agent {VIOLIN} is paused") and one.endswith(": spring.") for one in explained["why"])
    await rig.work(other, "FAILED")
    await rig.work(asked.json()["job_id"], "FAILED")  # a claim under way would come too late after the leap
    await rig.leap(899.0)
    assert await rig.status(job_id) == "FAILED", "a person has the operator window"
    await rig.leap(1.0)
    assert {await rig.status(job_id), await rig.status(other)} == {"DEAD"}, "nothing rests in FAILED for good"
    await catalog.change_status(VIOLIN, AgentStatus.ACTIVE, at=await rig.instance.ledger.now())
    assert (await rig.requeue(job_id)).status_code == 200, "a person can have it tried once it can run"
    await rig.work(job_id, "COMPLETE")


@pytest.mark.requirement("D10", "D8")
async def test_queue_job_that_breaks_after_acceptance_fails_in_context_assembly(rig: Rig):
    job_id = await rig.submit()
    rig.orchestrator.claiming = False
    await rig.work(job_id, "QUEUED")
    await rig.instance.objects.delete(f"agents/{VIOLIN}/_agent.md")
    rig.orchestrator.claiming = True
    job = await rig.work(job_id, "FAILED")
    assert await rig.path(job_id) == ["PENDING", "QUEUED", "CONTEXT_ASSEMBLY", "RETRY_BACKOFF", "FAILED"]
    assert job["error"].startswith(f"VALIDATION_ERROR: agent {VIOLIN} cannot run")


@pytest.mark.requirement("D10")
async def test_an_agent_whose_file_cannot_be_read_keeps_no_other_agents_job_from_being_accepted(rig: Rig):
    driver = rig.orchestrator.driver
    driver.assembly = replace(driver.assembly, objects=Unreadable(driver.assembly.objects, f"agents/{OTHER}/"))
    bad = [await rig.submit(agent_slug=OTHER) for _ in range(3)]
    good = await rig.submit()
    await rig.work(good, "COMPLETE")
    job = await rig.work(bad[0], "RETRY_BACKOFF")
    assert job["error"].startswith("UPSTREAM_UNAVAILABLE: "), "it is tried again, and the request is not blamed"


@pytest.mark.requirement("D10")
async def test_only_an_unreadable_queue_job_is_not_accepted(rig: Rig):
    asked = new_queue_job(checked_request(run_id=RUN, job_type="RESEARCH", agent_slug=VIOLIN, payload=QUESTION), new_id)
    await rig.instance.ledger.submit(GATEWAY, [replace(asked, payload=b'{"job_type": "RESEARCH"}')])
    (event,) = await _until_refused(rig, asked.job_id)
    assert (event.source, event.target) == ("PENDING", "FAILED")
    assert (event.cause or "").startswith("not accepted: The stored request of job")


async def _until_refused(rig: Rig, job_id: JobId) -> list[Event]:
    await rig.orchestrator.run_once()
    return (await rig.instance.ledger.events(job_id))[1:]


async def test_the_oldest_are_accepted_first_however_many_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(orchestrator, "ACCEPT_BATCH_MAX", 2)
    rig.orchestrator.claiming = False
    jobs = [await rig.submit() for _ in range(5)]
    accepted, states = [], list[str]()
    for _ in range(3):
        report = await rig.orchestrator.run_once()
        accepted.append((report.accepted, rig.orchestrator.pause_s(report) == 0.0))
        states = [await rig.status(job_id) for job_id in jobs]
        assert states == sorted(states, reverse=True), "QUEUED are the oldest"
    assert accepted == [(2, True), (2, True), (1, False)]
    assert set(states) == {"QUEUED"}


@pytest.mark.requirement("JQ-7", "D41")
async def test_one_queue_job_of_an_agent_is_leased_at_a_time_and_other_agents_do_not_wait(rig: Rig):
    rig.nlm.answer = accept_only
    first, second = await rig.submit(), await rig.submit()
    other = await rig.submit(agent_slug=OTHER)
    run = (await rig.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    await rig.work(first, "NOTEBOOKLM_CALL")
    await rig.work(other, "NOTEBOOKLM_CALL")
    for _ in range(3):
        await rig.orchestrator.run_once()
    assert await rig.status(second) == "QUEUED"
    assert (await rig.instance.layer.run_state(run)).position == 0, "a run of the agent has a key of its own"
    assert (await rig.cancel(first)).status_code == 200
    await rig.work(second, "NOTEBOOKLM_CALL")


@pytest.mark.requirement("DJ-5")
async def test_the_same_request_under_one_key_is_one_job(rig: Rig):
    answers = [await rig.owner.post("/jobs", json=GOOD, headers={"Idempotency-Key": "once"}) for _ in range(2)]
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    other = await rig.owner.post("/jobs", json={**GOOD, "entity_refs": ["bow"]}, headers={"Idempotency-Key": "once"})
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")


async def test_a_job_can_name_a_run_of_its_agent_and_of_no_other(rig: Rig):
    run = (await rig.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    mine = await rig.owner.post("/jobs", json={**GOOD, "run_id": run})
    assert (mine.status_code, (await rig.job(mine.json()["job_id"]))["run_id"]) == (202, run)
    foreign = await rig.owner.post("/jobs", json={**GOOD, "agent_slug": OTHER, "run_id": run})
    assert (foreign.status_code, foreign.json()["code"]) == (422, "VALIDATION_FAILED")


@pytest.mark.requirement("AUTH-2")
async def test_caller_who_may_not_create_jobs_learns_no_detail_of_the_request(rig: Rig):
    for role in (Role.FRONTEND, Role.NLM_BACKEND, Role.AGENT_RUNTIME, Role.CONTROL_PLANE):
        answer = await rig.client(role).post("/jobs", json={**GOOD, "agent_slug": "nobody"})
        assert (role, answer.status_code) == (role, 403)


@pytest.mark.requirement("JQ-12", "D51")
async def test_an_entry_that_asks_for_a_job_makes_one_pending_job_linked_to_it(rig: Rig):
    entry = {
        "id": "inbox_2026-01-01_abcdefabcdef",
        "source": {"type": "api"},
        "intent": {"action": "job", "target": "RESEARCH", "payload": GOOD},
    }
    answers = [await rig.owner.post("/inbox/submit", json=entry) for _ in range(2)]
    assert {answer.status_code for answer in answers} <= {200, 202}, answers[0].text
    made = {answer.json()["job_id"] for answer in answers}
    assert len(made) == 1
    job = await rig.job(made.pop())
    assert (job["status"], job["parent_id"], job["payload"]) == ("PENDING", entry["id"], QUESTION)
    listed = await rig.instance.ledger.jobs(JobFilter(lifecycle="queue-job"), limit=10)
    assert len(listed.jobs) == 1
    bad = replace_intent(entry, {**GOOD, "agent_slug": "nobody"})
    refused = (await rig.owner.post("/inbox/submit", json=bad)).json()
    assert (refused["status"], refused["rejection"]["code"]) == ("rejected", "VALIDATION_FAILED")
    stats = (await rig.owner.get("/inbox/stats")).json()
    assert (stats["processed_today"], stats["rejected_today"], stats["pending"]) == (1, 1, 0)


def replace_intent(entry: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "id": "inbox_2026-01-01_bbbbbbbbbbbb", "intent": {**entry["intent"], "payload": payload}}

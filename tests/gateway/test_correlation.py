"""The caller's correlation id is kept: from a header or a body to the run, its proposals, events and stream (OBS-6)."""

import pytest

from tests.gateway.conftest import Gateway
from trellis.engine.jobs import JobId
from trellis.lifecycles import Role

VIOLIN = "archivist-violin"
BODY = {"agent_slug": VIOLIN, "params": {}}


@pytest.mark.requirement("OBS-6")
@pytest.mark.parametrize(
    "headers, body, kept",
    [
        ({"X-Correlation-ID": "press-7"}, {}, "press-7"),
        ({"X-Correlation-ID": "press-7"}, {"correlation_id": "desk:1"}, "desk:1"),
        ({}, {"correlation_id": "desk:1"}, "desk:1"),
        ({"X-Correlation-ID": "not one"}, {}, None),
        ({}, {}, None),
    ],
)
async def test_a_run_keeps_the_callers_correlation_id(
    gateway: Gateway, headers: dict[str, str], body: dict[str, str], kept: str | None
):
    answer = await gateway.client(Role.OWNER).post("/agents/run", json={**BODY, **body}, headers=headers)
    run_id = answer.json()["run_id"]
    assert answer.status_code == 202
    ledger = gateway.instance.ledger
    assert {event.correlation_id for event in await ledger.events(JobId(run_id))} == {kept or run_id}


@pytest.mark.requirement("OBS-6")
async def test_a_job_for_a_run_has_the_runs_correlation_id_unless_its_caller_gives_one(gateway: Gateway):
    client = gateway.client(Role.OWNER)
    run = (await client.post("/agents/run", json={**BODY, "correlation_id": "press-7"})).json()["run_id"]
    asked = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": {"query": "What is known?"}, "run_id": run}

    async def kept(headers: dict[str, str], **more: str) -> str:
        answer = await client.post("/jobs", json={**asked, **more}, headers=headers)
        job = await gateway.instance.ledger.job(JobId(answer.json()["job_id"]))
        assert job is not None
        return job.correlation_id

    assert await kept({}) == "press-7"
    assert await kept({"X-Correlation-ID": "desk:1"}) == "desk:1"
    assert await kept({"X-Correlation-ID": "desk:1"}, correlation_id="mine") == "mine"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 101])
async def test_a_correlation_id_that_is_none_is_refused_and_nothing_stored(gateway: Gateway, bad: str):
    answer = await gateway.client(Role.OWNER).post("/agents/run", json={**BODY, "correlation_id": bad})
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED")
    assert (await gateway.client(Role.OWNER).get("/runs")).json()["items"] == []


@pytest.mark.requirement("OBS-1", "D35")
async def test_a_status_that_is_changed_through_the_gateway_leaves_one_act(gateway: Gateway):
    client = gateway.client(Role.OWNER)
    for _ in range(2):
        answer = await client.patch(
            f"/agents/{VIOLIN}/status",
            json={"status": "paused", "reason": "spring"},
            headers={"X-Correlation-ID": "press-7"},
        )
        assert answer.status_code == 200
    (act,) = [act for act in await gateway.instance.ledger.acts() if act.event != "agent.created"]
    assert (act.event, act.subject, act.source, act.target) == ("agent.status.changed", VIOLIN, "active", "paused")
    assert (act.actor, act.cause, act.correlation_id, bool(act.node)) == ("owner", "spring", "press-7", True)


@pytest.mark.requirement("D42")
async def test_nlm_backend_outage_is_502_for_its_jobs_only(gateway: Gateway):
    client = gateway.client(Role.OWNER)
    for path in ("/jobs?lifecycle=nlm-job", "/jobs/some@1", "/jobs/some@1/events"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (502, "NLM_UNAVAILABLE"), path
    assert (await client.get("/jobs")).status_code == 200
    assert (await client.get("/jobs/some")).status_code == 404

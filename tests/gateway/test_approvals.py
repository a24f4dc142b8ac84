"""Held jobs over HTTP: their own route, and the inbox of proposals, decide about one thing by one code; and what the policy says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.bus.safety.holding import PEOPLE, held, hold, scheduled
from tests.bus.safety.policies import policy, rule
from tests.gateway.conftest import Gateway
from tests.gateway.world import proposal
from trellis.bus.safety.kernel import FileKernel
from trellis.engine.jobs import JobId
from trellis.gateway.routes.safety import POLICY_EXAMPLE
from trellis.http.shapes import REPLAYED
from trellis.testing import FakeClock

WHY = "these files are still needed"
OTHER = policy(rule("other", "require_human"))


async def kinds(gateway: Gateway, job_id: str) -> list[str]:
    return [event.type for event in await gateway.instance.ledger.events(JobId(job_id))]


@pytest.mark.requirement("D45", "BUS-4")
@pytest.mark.parametrize("role", ["owner", "control-plane"])
async def test_a_job_held_for_approval_is_approved_or_denied_by_its_own_route(gateway: Gateway, role: str):
    client, ledger = gateway.client(role, name="iryna"), gateway.instance.ledger
    yes, no = await held(ledger), await held(ledger)
    let_go = await client.post(f"/jobs/{yes}/approval", json={"decision": "approve", "policy_hash": PEOPLE.hash})
    assert (let_go.status_code, let_go.json()["status"]) == (200, "SCHEDULED")
    short = await client.post(f"/jobs/{no}/approval", json={"decision": "reject", "note": "no"})
    assert (short.status_code, short.json()["code"]) == (422, "VALIDATION_FAILED")
    denied = await client.post(f"/jobs/{no}/approval", json={"decision": "reject", "note": WHY})
    assert (denied.status_code, denied.json()["status"]) == (200, "DENIED")
    assert ((await kinds(gateway, yes))[-1], (await kinds(gateway, no))[-1]) == ("job_approved", "job_denied")


@pytest.mark.requirement("D45")
async def test_approval_of_a_job_not_waiting_or_under_another_policy_is_409(gateway: Gateway):
    client, ledger = gateway.client("owner"), gateway.instance.ledger
    free, kept = await scheduled(ledger), await held(ledger)
    answer = await client.post(f"/jobs/{free}/approval", json={"decision": "approve"})
    assert (answer.status_code, "does not wait for a person" in answer.json()["detail"]) == (409, True)
    answer = await client.post(f"/jobs/{kept}/approval", json={"decision": "approve", "policy_hash": OTHER.hash})
    assert (answer.status_code, "look at it again" in answer.json()["detail"]) == (409, True)
    assert (await kinds(gateway, kept))[-1] == "job_held"
    assert (await client.post("/jobs/nobody/approval", json={"decision": "approve"})).status_code == 404
    assert (await client.post(f"/jobs/{kept}/approval", json={"decision": "maybe"})).status_code == 422
    await client.post(f"/jobs/{kept}/approval", json={"decision": "approve"})
    again = await client.post(f"/jobs/{kept}/approval", json={"decision": "approve"})
    assert (again.status_code, "owner has approved it" in again.json()["detail"]) == (409, True)


@pytest.mark.requirement("D45", "D27")
async def test_the_same_key_is_one_decision(gateway: Gateway):
    client, ledger = gateway.client("owner"), gateway.instance.ledger
    job_id, headers = await held(ledger), {"Idempotency-Key": "approve-1"}
    asked = [client.post(f"/jobs/{job_id}/approval", json={"decision": "approve"}, headers=headers) for _ in range(4)]
    answers = await asyncio.gather(*asked)
    assert {(one.status_code, one.json()["version"]) for one in answers} == {(200, 4)}
    assert (await kinds(gateway, job_id)).count("job_approved") == 1
    other = await client.post(f"/jobs/{job_id}/approval", json={"decision": "reject", "note": WHY}, headers=headers)
    assert other.status_code == 422


@pytest.mark.requirement("D45", "RUN-4")
async def test_the_inbox_of_proposals_shows_held_jobs_first_and_page_by_page(gateway: Gateway):
    owner, ledger = gateway.client("owner"), gateway.instance.ledger
    proposals = [await proposal(gateway, text=f"note {number}") for number in range(3)]
    jobs = [await held(ledger, job_id=f"held-{number}") for number in range(3)]
    wanted = [f"approval-{job}" for job in reversed(jobs)] + list(reversed(proposals))
    for path in ("/proposals/pending", "/proposals", "/proposals?status=pending"):
        for limit in (1, 2, 3, 4, 50):
            seen, params = list[str](), {"limit": limit}
            for _ in range(10):
                page = (await owner.get(path, params=params)).json()
                seen += [one["id"] for one in page["items"]]
                if page["next_cursor"] is None:
                    break
                params = {"limit": limit, "cursor": page["next_cursor"]}
            assert sorted(seen) == sorted(wanted), (path, limit)
            assert seen[:3] == wanted[:3]
    assert [one["id"] for one in (await owner.get("/proposals?status=approved")).json()["items"]] == []


@pytest.mark.requirement("D45")
async def test_a_held_job_is_decided_in_the_inbox_by_the_version_that_was_seen(gateway: Gateway):
    owner, ledger = gateway.client("owner", name="iryna"), gateway.instance.ledger
    job_id = await held(ledger, job_id="delete-1", tenant_id="acme")
    path = "/proposals/approval-delete-1"
    seen = await owner.get(path)
    assert (seen.json()["status"], seen.json()["content"]["tenant"]) == ("pending", "acme")
    assert (await owner.get(path, headers={"If-None-Match": seen.headers["ETag"]})).status_code == 304
    await hold(ledger, job_id, under=OTHER)
    match = {"If-Match": seen.headers["ETag"]}
    stale = await owner.patch(path, json={"decision": "approve"}, headers=match)
    assert (stale.status_code, stale.json()["code"]) == (412, "PRECONDITION_FAILED")
    match = {"If-Match": stale.headers["ETag"], "Idempotency-Key": "k"}
    for replayed in (None, "true"):
        decided = await owner.patch(path, json={"decision": "approve", "note": "it is fine"}, headers=match)
        assert (decided.status_code, decided.json()["status"]) == (200, "approved")
        assert decided.headers.get(REPLAYED) == replayed
    told = decided.json()["approval"]
    assert (told["decided_by"], told["decision_note"]) == ("iryna", "it is fine")
    assert (await owner.post(f"{path}/apply")).json()["status"] == "approved"
    assert (await owner.get("/proposals/pending")).json()["items"] == []
    assert (await kinds(gateway, job_id))[-1] == "job_approved"


@pytest.mark.requirement("D45")
async def test_approver_sees_the_input_of_the_worker(gateway: Gateway):
    told = {
        "workflow_id": "flow",
        "adapter_id": "shell",
        "context_ptr": "objects://ctx/x",
        "env": {"PATH_TO_DELETE": "/srv/old"},
        "labels": {"worker.region": "eu"},
    }
    await held(gateway.instance.ledger, job_id="delete-1", **told)
    seen = (await gateway.client("owner").get("/proposals/approval-delete-1")).json()["content"]
    assert {name: seen[name] for name in told} == told


@pytest.mark.requirement("D45")
async def test_job_never_held_for_approval_is_not_in_the_inbox(gateway: Gateway):
    owner, free = gateway.client("owner"), await scheduled(gateway.instance.ledger)
    for job_id in (free, "nobody", "x" * 200):
        path = f"/proposals/approval-{job_id}"
        assert (await owner.get(path)).status_code == 404
        assert (await owner.patch(path, json={"decision": "approve"})).status_code == 404
    pending = await held(gateway.instance.ledger)
    assert (await owner.post(f"/proposals/approval-{pending}/apply")).status_code == 409


# --- explain and simulate ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-4")
async def test_decision_of_the_policy_is_explained(gateway: Gateway):
    owner = gateway.client("owner")
    told = (await owner.post("/safety/explain", json={"request": {"topic": "job.x"}})).json()
    assert (told["decision"], told["looked"][-1]["fits"]) == ("allow", True)
    asked: dict[str, Any] = {"request": {"topic": "job.mail"}, "policy": POLICY_EXAMPLE}
    told = (await owner.post("/safety/explain", json=asked)).json()
    assert (told["decision"], told["rule"]) == ("deny", "default")
    assert told["looked"] == [
        {"rule": "code", "decision": "allow", "fits": False, "why": "topics: job.mail matches none of job.code.>"}
    ]
    for bad in ({"request": {}}, {"request": {"topic": "job.x"}, "policy": "rules = []"}, {"request": {"topic": ""}}):
        assert (await owner.post("/safety/explain", json=bad)).status_code == 422


@pytest.mark.requirement("BUS-4")
async def test_simulation_of_another_policy_reports_differences_and_changes_no_job(gateway: Gateway):
    owner, ledger = gateway.client("owner"), gateway.instance.ledger
    code, mail = await held(ledger, topic="job.code.x"), await scheduled(ledger, topic="job.mail")
    told = (await owner.post("/safety/simulate", json={"policy": POLICY_EXAMPLE, "last": 10})).json()
    found = {one["job_id"]: (one["before"], one["after"], one["changes"]) for one in told["items"]}
    assert found == {code: ("require_human", "allow", True), mail: (None, "deny", False)}
    assert told["changed"] == 1
    asked = {"policy": POLICY_EXAMPLE, "requests": [{"topic": "job.code.x"}, {"topic": "job.mail"}]}
    told = (await owner.post("/safety/simulate", json=asked)).json()
    assert [(one["before"], one["after"]) for one in told["items"]] == [("allow", "allow"), ("allow", "deny")]
    assert ((await kinds(gateway, code))[-1], (await kinds(gateway, mail))[-1]) == ("job_held", "job_scheduled")


@pytest.mark.requirement("BUS-4")
async def test_unavailable_kernel_is_reported_with_the_reason(gateway: Gateway, tmp_path: Path):
    vars(gateway.instance)["kernel"] = FileKernel(tmp_path / "none.toml", monotonic=FakeClock().monotonic)
    asked: dict[str, Any] = {"request": {"topic": "job.x"}}
    answer = await gateway.client("owner").post("/safety/explain", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (502, "UPSTREAM_UNAVAILABLE")
    assert "none.toml does not fit: it cannot be read" in answer.json()["detail"]

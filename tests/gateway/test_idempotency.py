"""A key makes asking twice the same as asking once: one effect, one answer, also at the same moment."""

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN, Client, Gateway
from tests.gateway.world import dead_job, everything, job, proposal
from trellis.engine.jobs import Actor, Claim, ClaimId, JobId, Turn, TypeClaim
from trellis.engine.records import JobFilter, RetentionOptions
from trellis.gateway.idempotency import HEADER
from trellis.lifecycles import Role
from trellis.runs.orchestration import TriggerKind
from trellis.runs.orchestrator import TYPE, accept

AT_ONCE = 100
FEWER = 30
"""For what takes long to make; the whole number is proven apart."""
UPDATE = {"file": "facts.md", "operation": "append", "content": "- one more fact"}
LIFECYCLE_OF = {
    "/agents/run": "run",
    "/jobs": "leased-job",
    "/inbox/submit": "inbox-entry",
    f"/memory/{VIOLIN}/propose": "proposal",
}
BODIES: dict[str, dict[str, Any]] = {
    "/agents/run": {"agent_slug": VIOLIN, "params": {"topic": "bows"}},
    "/jobs": {"type": "work", "payload": {"n": 1}},
    "/inbox/submit": {"intent": {"action": "job", "target": "work", "payload": {"type": "work"}}},
    f"/memory/{VIOLIN}/propose": {"summary": "one more", "updates": [UPDATE]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/agents/run": {"agent_slug": VIOLIN, "params": {"topic": "strings"}},
    "/jobs": {"type": "work", "payload": {"n": 1}, "max_attempts": 2},
    "/inbox/submit": {"intent": {"action": "job", "target": "other", "payload": {"type": "other"}}},
    f"/memory/{VIOLIN}/propose": {"summary": "another one", "updates": [UPDATE]},
}

every_route = pytest.mark.parametrize("path", BODIES)


def caller(gateway: Gateway, path: str, name: str = "iryna") -> Client:
    return gateway.client("orchestrator" if "propose" in path else "owner", name=name)


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def count(gateway: Gateway, path: str) -> int:
    found = await gateway.instance.ledger.jobs(JobFilter(lifecycle=LIFECYCLE_OF[path]), limit=500)
    return len(found.jobs)


async def press(gateway: Gateway, path: str, times: int) -> None:
    """All at once; one of them makes it, and every answer is its."""
    client = caller(gateway, path)
    answers = await asyncio.gather(
        *(client.post(path, json=BODIES[path], headers=keyed("press")) for _ in range(times))
    )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert sum(HEADER not in answer.headers for answer in answers) == 1
    assert await count(gateway, path) == 1


@pytest.mark.requirement("DJ-5", "D27", "JQ-12")
@every_route
async def test_concurrent_requests_with_one_key_have_one_effect_and_one_answer(gateway: Gateway, path: str):
    await press(gateway, path, AT_ONCE if path in {"/jobs", "/inbox/submit"} else FEWER)


@pytest.mark.prove
@pytest.mark.requirement("DJ-5", "D27", "JQ-12")
@every_route
async def test_a_hundred_at_once_with_one_key_have_one_effect_and_one_answer(gateway: Gateway, path: str):
    await press(gateway, path, AT_ONCE)


@pytest.mark.requirement("DJ-5", "D27")
@every_route
async def test_a_replay_says_so_and_gives_the_first_answer(gateway: Gateway, path: str):
    client = caller(gateway, path)
    first = await client.post(path, json=BODIES[path], headers=keyed("press"))
    before = await everything(gateway)
    # The same in other words: another order and other white space mean nothing, and a key may stand in quotes.
    again = await client.post(path, json=dict(reversed(BODIES[path].items())), headers=keyed('"press"'))
    assert (first.status_code, first.headers.get(HEADER)) == (202, None)
    assert (again.status_code, again.headers.get(HEADER)) == (202, "true")
    assert again.content == first.content
    assert again.headers.get("Location") == first.headers.get("Location")
    assert await everything(gateway) == before


@pytest.mark.requirement("DJ-5", "D27")
@every_route
async def test_a_key_with_another_body_is_refused_and_changes_nothing(gateway: Gateway, path: str):
    client = caller(gateway, path)
    await client.post(path, json=BODIES[path], headers=keyed("press"))
    before = await everything(gateway)
    refused = await client.post(path, json=OTHERS[path], headers=keyed("press"))
    assert (refused.status_code, refused.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert await everything(gateway) == before


@pytest.mark.requirement("D27")
@every_route
async def test_a_key_is_one_callers_own(gateway: Gateway, path: str):
    for name in ("iryna", "olena"):
        answer = await caller(gateway, path, name).post(path, json=BODIES[path], headers=keyed("press"))
        assert (answer.status_code, answer.headers.get(HEADER)) == (202, None)
    assert await count(gateway, path) == 2


@pytest.mark.requirement("D27")
async def test_a_key_is_one_routes_own(gateway: Gateway):
    client = gateway.client("owner")
    answers = [await client.post(path, json=BODIES[path], headers=keyed("press")) for path in ("/jobs", "/agents/run")]
    assert [answer.headers.get(HEADER) for answer in answers] == [None, None]


@pytest.mark.requirement("D27")
async def test_a_run_is_replayed_also_when_its_agent_could_not_begin_another(gateway: Gateway):
    client = gateway.client("owner")
    first = await client.post("/agents/run", json={"agent_slug": VIOLIN}, headers=keyed("press"))
    await client.patch(f"/agents/{VIOLIN}/status", json={"status": "paused"})
    again = await client.post("/agents/run", json={"agent_slug": VIOLIN}, headers=keyed("press"))
    other = await client.post("/agents/run", json={"agent_slug": VIOLIN}, headers=keyed("other"))
    assert (again.status_code, again.content) == (202, first.content)
    assert other.status_code == 409


@pytest.mark.requirement("D27", "RUN-9")
async def test_a_run_of_a_schedule_under_a_key_is_made_once_and_of_no_other_schedule(gateway: Gateway):
    client = gateway.client("control-plane")
    for name in ("one", "two"):
        added = await client.post("/schedules", json={"name": name, "cron": "0 3 * * *", "type": "t", "paused": True})
        assert added.status_code == 200, added.text
    first = await client.post("/schedules/one/run", headers=keyed("press"))
    before = await everything(gateway)
    for path, body in (("/schedules/two/run", None), ("/schedules/one/run", {"reason": "another"})):
        refused = await client.post(path, json=body, headers=keyed("press"))
        assert (refused.status_code, refused.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert await everything(gateway) == before
    await client.delete("/schedules/one")
    again = await client.post("/schedules/one/run", headers=keyed("press"))
    assert (first.headers.get(HEADER), again.headers.get(HEADER), again.json()) == (None, "true", first.json())


@pytest.mark.requirement("D27", "DJ-21")
@pytest.mark.parametrize("act", ["cancel", "requeue"])
async def test_an_act_under_a_key_is_done_once_and_answered_as_the_first_time(gateway: Gateway, act: str):
    client = gateway.client("control-plane")
    job_id = await (job(gateway) if act == "cancel" else dead_job(gateway))
    body = {"reason": "because"}
    first = await client.post(f"/jobs/{job_id}/{act}", json=body, headers=keyed("press"))
    again = await client.post(f"/jobs/{job_id}/{act}", json=body, headers=keyed("press"))
    other = await client.post(f"/jobs/{job_id}/{act}", json={"reason": "another"}, headers=keyed("press"))
    assert (first.status_code, again.status_code, again.headers.get(HEADER)) == (200, 200, "true")
    assert again.json() == first.json()
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert len(await gateway.instance.ledger.events(JobId(job_id))) == first.json()["version"]


@pytest.mark.requirement("D27", "D19", "D43")
async def test_run_is_cancelled_once_per_key_and_a_second_cancel_is_409(gateway: Gateway):
    client = gateway.client("owner")
    run_id = (await client.post("/agents/run", json={"agent_slug": VIOLIN})).json()["run_id"]
    first = await client.post(f"/runs/{run_id}/cancel", json={"mode": "hard"}, headers=keyed("press"))
    again = await client.post(f"/runs/{run_id}/cancel", json={"mode": "hard"}, headers=keyed("press"))
    assert (first.status_code, again.status_code, again.content) == (200, 200, first.content)
    assert again.headers.get(HEADER) == "true"
    for headers in ({}, keyed("other")):
        late = await client.post(f"/runs/{run_id}/cancel", json={"mode": "hard"}, headers=headers)
        assert (late.status_code, late.json()["status_now"]) == (409, "failed")


@pytest.mark.requirement("D27", "DJ-21")
@pytest.mark.parametrize("kind", ["jobs", "runs"])
async def test_a_wish_to_cancel_under_a_key_is_answered_as_the_first_time_also_after_the_grace(
    gateway: Gateway, kind: str
):
    client, path = gateway.client("control-plane", "owner", name="iryna"), f"/{kind}/{await held(gateway, kind)}/cancel"
    first = await client.post(path, json={"mode": "soft"}, headers=keyed("press"))
    assert (first.status_code, first.json()["status"]) == (200, "running")
    other = await client.post(path, json={"mode": "soft", "reason": "another"}, headers=keyed("press"))
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    gateway.clock.advance(600)
    await gateway.sweep()
    again = await client.post(path, json={"mode": "soft"}, headers=keyed("press"))
    assert (again.status_code, again.content, again.headers.get(HEADER)) == (200, first.content, "true")
    assert (await client.post(path, json={"mode": "soft"}, headers=keyed("other"))).status_code == 409


async def test_answers_to_wishes_are_kept_for_a_day_and_do_not_gather(gateway: Gateway):
    client, path = gateway.client("control-plane"), f"/jobs/{await held(gateway, 'jobs', lease_s=1e6)}/cancel"
    for day in range(4):
        await client.post(path, headers=keyed(f"press {day}"))
        gateway.clock.advance(24 * 3_600 - 1)
        assert (await gateway.instance.ledger.retain(RetentionOptions())).keys == 0
        assert (await client.post(path, headers=keyed(f"press {day}"))).headers.get(HEADER) == "true"
        gateway.clock.advance(1)
        assert (await gateway.instance.ledger.retain(RetentionOptions())).keys == 1
    assert not (await gateway.instance.objects.list("requests/")).items


async def held(gateway: Gateway, kind: str, lease_s: float = 900.0) -> str:
    """A job or a run that somebody holds."""
    ledger = gateway.instance.ledger
    if kind == "jobs":
        job_id, role, type_, lifecycle = await job(gateway), Role.WORKER, "work", "leased-job"
    else:
        job_id, role, type_, lifecycle = await a_run(gateway), Role.ORCHESTRATOR, TYPE, "run"
    terms = TypeClaim(type=type_, lease_s=lease_s)
    claim = Claim(claim_id=ClaimId("c-1"), types=(terms,), lifecycle=lifecycle)
    turn = await ledger.turn(Turn(actor=Actor(role=role, name="holder"), claim=claim))
    assert [one.lease.job_id for one in turn.claimed] == [job_id]
    return job_id


async def a_run(gateway: Gateway) -> JobId:
    run_id = (await gateway.instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id
    await accept(gateway.instance.ledger, Actor(role=Role.ORCHESTRATOR, name="holder"), run_id)
    return run_id


@pytest.mark.requirement("D27", "DJ-12", "DJ-21")
async def test_a_bulk_requeue_under_a_key_means_the_same_jobs_again(gateway: Gateway):
    client, wish = gateway.client("control-plane"), {"filter": {}, "limit": 1}
    jobs = [await dead_job(gateway), await dead_job(gateway)]
    first = await client.post("/dlq/requeue", json=wish, headers=keyed("press"))
    again = await client.post("/dlq/requeue", json=wish, headers=keyed("press"))
    assert first.json() == again.json()
    assert [item["job_id"] for item in first.json()["items"]] == jobs[:1]
    assert len((await client.get("/dlq")).json()["items"]) == 1


@pytest.mark.requirement("D27")
async def test_a_decision_under_a_key_is_replayed(gateway: Gateway):
    client, id_ = gateway.client("owner"), await proposal(gateway)
    headers = {**keyed("press"), "If-Match": '"1"'}
    answers = [await client.patch(f"/proposals/{id_}", json={"decision": "approve"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].headers.get(HEADER) == "true"
    other = await client.patch(f"/proposals/{id_}", json={"decision": "reject", "note": "x" * 10}, headers=headers)
    assert other.status_code == 422


@pytest.mark.requirement("D27")
async def test_a_decision_under_a_key_is_answered_as_the_first_time_also_when_it_was_applied_since(gateway: Gateway):
    client, id_ = gateway.client("owner"), await proposal(gateway)
    decision = {"decision": "approve", "note": "yes"}
    first = await client.patch(f"/proposals/{id_}", json=decision, headers=keyed("press"))
    assert (await client.post(f"/proposals/{id_}/apply")).json()["status"] == "applied"
    again = await client.patch(f"/proposals/{id_}", json=decision, headers=keyed("press"))
    assert (first.json()["status"], again.content) == ("approved", first.content)
    assert (again.headers["ETag"], again.headers[HEADER]) == (first.headers["ETag"], "true")


@pytest.mark.requirement("D27")
async def test_apply_under_a_key_begins_once_and_the_key_is_stored_with_that_step(gateway: Gateway):
    client, proposals = gateway.client("owner"), [await proposal(gateway, approved=True) for _ in range(2)]
    first = await client.post(f"/proposals/{proposals[0]}/apply", headers=keyed("press"))
    again = await client.post(f"/proposals/{proposals[0]}/apply", headers=keyed("press"))
    assert (first.json()["status"], first.headers.get(HEADER)) == ("applied", None)
    assert (again.json(), again.headers.get(HEADER)) == (first.json(), "true")
    other = await client.post(f"/proposals/{proposals[1]}/apply", headers=keyed("press"))
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    events = await gateway.instance.ledger.events(JobId(proposals[0]))
    assert [event.type for event in events].count("proposal.applying") == 1


async def test_a_key_that_is_none_is_refused(gateway: Gateway):
    client = gateway.client("owner")
    for key in ("", "x" * 201, "ключ", "a\tb"):
        answer = await client.post("/jobs", json={"type": "work"}, headers={b"Idempotency-Key": key.encode()})
        assert (key, answer.status_code, answer.json()["code"]) == (key, 422, "VALIDATION_FAILED")

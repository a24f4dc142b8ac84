"""Jobs and dead letters over HTTP."""

import re
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.world import SOMEBODY, dead_job, dead_queue_job, everything, job, proposal
from trellis.app.wiring import new_id
from trellis.engine.event_data import ArtifactPointer, artifacts_data
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    ClaimId,
    JobId,
    Lease,
    Moved,
    NewJob,
    Priority,
    ReasonCode,
    RequestId,
    Turn,
    TypeClaim,
    TypeOptions,
)
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role
from trellis.operations.dead_letters import requeue_dead

WORKER = Actor(role=Role.WORKER, name="worker@test")


async def claimed(gateway: Gateway, type_: str = "work") -> Lease:
    claim = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type=type_),))
    (found,) = (await gateway.instance.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    return found.lease


async def test_a_job_is_submitted_with_every_option_of_the_request(gateway: Gateway):
    wish = {
        "type": "index.document",
        "payload": {"id": 7, "ü": [1.5, None]},
        "priority": "interactive",
        "run_at": "2026-01-01T01:00:00+00:00",
        "deadline_s": 7200,
        "max_attempts": 3,
        "concurrency_key": "doc-7",
        "correlation_id": "order-1",
    }
    answer = await gateway.client("submitter", name="ada").post("/jobs", json=wish)
    made = answer.json()
    assert (answer.status_code, made["lifecycle"], made["status"]) == (202, "leased-job", "queued")
    assert answer.headers["Location"] == f"/jobs/{made['job_id']}"
    found = (await gateway.client("submitter", name="ada").get(f"/jobs/{made['job_id']}")).json()
    told = {name: found[name] for name in ("type", "payload", "priority", "max_attempts", "correlation_id")}
    assert told == {name: wish[name] for name in told}
    assert (found["due_at"], found["deadline_at"]) == ("2026-01-01T01:00:00.000Z", "2026-01-01T02:00:00.000Z")
    (event,) = await gateway.instance.ledger.events(made["job_id"])
    assert (event.role, event.actor) == (Role.SUBMITTER, "ada")


async def test_an_owner_submits_through_the_gateway_and_by_its_own_name(gateway: Gateway):
    answer = await gateway.client("owner", name="iryna").post(
        "/jobs", json={"type": "work"}, headers={"X-Correlation-ID": "press-1"}
    )
    (event,) = await gateway.instance.ledger.events(answer.json()["job_id"])
    assert (event.role, event.actor, event.correlation_id) == (Role.GATEWAY, "iryna", "press-1")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of 'type', 'job_type', 'topic'; found none"),
    ({"type": "a", "topic": "b"}, "found 'type' and 'topic'"),
    ({"job_type": "RESEARCH"}, "name it as agent_slug"),
    ({"topic": "mail..out"}, "topic: up to 16 words"),
    ({"type": "a", "context_ptr": "objects://ctx/1"}, "'context_ptr' belongs to jobs named by 'topic'"),
    ({"type": "no good"}, "no good"),
    ({"type": "a", "run_at": "2026-01-01T00:00:00"}, "timezone"),
    ({"type": "a", "run_at": "9999-12-31T23:59:59-12:00"}, "run_at"),
    ({"type": "a", "run_at": "0001-01-01T00:00:00+12:00"}, "run_at"),
    ({"type": "a", "priority": "soon"}, "priority"),
    ({"type": "a", "max_attempts": 0}, "max_attempts"),
    ({"type": "a", "surprise": 1}, "surprise"),
    ({"type": "a", "concurrency_key": "a\x00b"}, "cannot be stored"),
]


@pytest.mark.requirement("JQ-11")
async def test_invalid_job_is_refused_and_stores_no_row(gateway: Gateway):
    before, client = await everything(gateway), gateway.client("owner")
    for wish, told in REFUSED:
        answer = await client.post("/jobs", json=wish)
        assert (wish, answer.status_code, answer.json()["code"]) == (wish, 422, "VALIDATION_FAILED")
        assert told in answer.json()["detail"]
    assert await everything(gateway) == before


async def test_jobs_are_listed_by_what_they_are_and_page_by_page(gateway: Gateway):
    client = gateway.client("owner")
    jobs = [await job(gateway, type_=type_) for type_ in ("a", "b", "a", "b", "a")]
    dead = await dead_job(gateway, type_="b")
    await client.post("/agents/run", json={"agent_slug": "archivist-violin"})
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = (await client.get("/jobs", params=params)).json()
        seen += [item["job_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [dead, *reversed(jobs)]
    listed = {
        name: [item["job_id"] for item in (await client.get(f"/jobs?{name}")).json()["items"]]
        for name in ("type=a", "status=dead_lettered", "lifecycle=queue-job", "type=b&status=queued")
    }
    assert listed == {
        "type=a": [jobs[4], jobs[2], jobs[0]],
        "status=dead_lettered": [dead],
        "lifecycle=queue-job": [],
        "type=b&status=queued": [jobs[3], jobs[1]],
    }
    assert (await client.get("/jobs?status=lost")).status_code == 422


async def test_runs_and_proposals_are_no_jobs_of_this_collection(gateway: Gateway):
    run_id = (await gateway.client("owner").post("/agents/run", json={"agent_slug": "archivist-violin"})).json()[
        "run_id"
    ]
    client = gateway.client("worker")
    assert (await client.get(f"/jobs/{run_id}")).status_code == 404
    assert (await client.get("/jobs?status=queued")).json()["items"] == []


@pytest.mark.requirement("DJ-13", "DJ-15")
async def test_events_have_the_nine_fields_oldest_first_page_by_page(gateway: Gateway):
    job_id = await job(gateway)
    lease = await claimed(gateway)
    done = Advance(lease, "running", "complete", result=b'{"ok":true}')
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(done,)))
    client = gateway.client("owner")
    first = (await client.get(f"/jobs/{job_id}/events", params={"limit": 2})).json()
    rest = (await client.get(f"/jobs/{job_id}/events", params={"cursor": first["next_cursor"]})).json()
    events = first["items"] + rest["items"]
    fields = {"id", "job_id", "type", "ts", "actor", "correlation_id", "cause", "payload", "version"}
    assert {frozenset(event) for event in events} == {frozenset(fields)}
    assert [(event["type"], event["payload"]["from"], event["payload"]["to"]) for event in events] == [
        ("job_queued", None, "queued"),
        ("job_claimed", "queued", "assigned"),
        ("job_started", "assigned", "running"),
        ("job_succeeded", "running", "succeeded"),
    ]
    assert rest["next_cursor"] is None
    assert (await client.get(f"/jobs/{job_id}")).json()["result"] == {"ok": True}


@pytest.mark.requirement("DJ-11", "D19", "D43")
async def test_a_soft_cancel_asks_the_holder_and_a_hard_one_ends_the_job(gateway: Gateway):
    operator = gateway.client("control-plane")
    job_id = await job(gateway)
    await claimed(gateway)
    soft = await operator.post(f"/jobs/{job_id}/cancel", json={"mode": "soft"})
    assert (soft.status_code, soft.json()["status"]) == (200, "running")
    assert (await operator.get(f"/jobs/{job_id}")).json()["cancel_requested"] is True
    hard = await operator.post(f"/jobs/{job_id}/cancel", json={"mode": "hard", "reason": "not wanted"})
    assert (hard.status_code, hard.json()["status"]) == (200, "cancelled")
    late = await operator.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})
    assert (late.status_code, late.json()["code"]) == (409, "INVALID_TRANSITION")
    assert "cancelled" in late.json()["detail"]


@pytest.mark.requirement("D43", "D62")
async def test_an_owner_cancels_what_it_submitted_and_nothing_else(gateway: Gateway):
    mine, other = gateway.client("owner", name="ada"), gateway.client("owner", name="grace")
    job_id = (await mine.post("/jobs", json={"type": "a"})).json()["job_id"]
    refused = await other.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})
    assert (refused.status_code, refused.json()["rule"]) == (403, "jobs.cancel")
    assert "rule jobs.cancel gives it for its own only" in refused.json()["detail"]
    assert not re.search(r"\bD\d+\b|document 000", refused.json()["detail"]), "no word that only we know"
    ended = await mine.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})
    assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
    asked = {"job_type": "RESEARCH", "agent_slug": "archivist-violin", "payload": {"query": "Who?"}}
    queued = (await mine.post("/jobs", json=asked)).json()["job_id"]
    answer = await mine.post(f"/jobs/{queued}/cancel", json={"mode": "hard"})
    assert (answer.status_code, "an operator cancels that" in answer.json()["detail"]) == (403, True)


@pytest.mark.requirement("DJ-12", "D9")
async def test_dead_letters_are_listed_looked_at_and_requeued(gateway: Gateway):
    jobs = [await dead_job(gateway, type_=type_) for type_ in ("a", "b", "a")]
    operator = gateway.client("control-plane")
    first = (await operator.get("/dlq", params={"limit": 2})).json()
    rest = (await operator.get("/dlq", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [item["job_id"] for item in first["items"] + rest["items"]] == jobs[::-1]
    letter = (await operator.get(f"/dlq/{jobs[1]}")).json()
    assert (letter["reason_code"], letter["stage"], letter["last_error"]) == ("policy_violation", "input", "no good")
    assert (letter["last_owner"], letter["last_lease_expires_at"], letter["type"]) == (None, None, "b")
    answer = (await operator.post("/dlq/requeue", json={"filter": {"type": "a"}, "reason": "repaired"})).json()
    assert [(item["job_id"], item["requeued"], item["status"]) for item in answer["items"]] == [
        (jobs[0], True, "queued"),
        (jobs[2], True, "queued"),
    ]
    named = (await operator.post("/dlq/requeue", json={"job_ids": [jobs[0], jobs[1]]})).json()
    assert [item["requeued"] for item in named["items"]] == [False, True]
    assert (await operator.get("/dlq")).json()["items"] == []
    assert (await operator.get(f"/dlq/{jobs[1]}")).status_code == 404


@pytest.mark.requirement("DJ-12")
async def test_dead_letters_of_every_lifecycle_are_in_one_list_page_by_page(gateway: Gateway):
    operator, made = gateway.client("control-plane"), list[str]()
    for make in (dead_job, dead_queue_job, dead_queue_job, dead_job, dead_job, dead_queue_job):
        gateway.clock.advance(1.0)
        made.append(await make(gateway))
    whole = (await operator.get("/dlq")).json()
    assert ([item["job_id"] for item in whole["items"]], whole["next_cursor"]) == (made[::-1], None)
    for limit in (1, 2, 4, 5, 6):
        pages, cursor = list[Any](), None
        while True:
            asked = {"limit": limit} | ({"cursor": cursor} if cursor else {})
            page = (await operator.get("/dlq", params=asked)).json()
            pages += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert pages == whole["items"], limit
    for lifecycle, places in (("leased-job", (4, 3, 0)), ("queue-job", (5, 2, 1))):
        only = (await operator.get("/dlq", params={"lifecycle": lifecycle})).json()["items"]
        assert [item["job_id"] for item in only] == [made[place] for place in places]
        assert {item["lifecycle"] for item in only} == {lifecycle}
    for wrong in ({"lifecycle": "run"}, {"cursor": "nothing"}, {"cursor": "x~"}):
        assert (await operator.get("/dlq", params=wrong)).status_code == 422, wrong


@pytest.mark.requirement("DJ-12")
@pytest.mark.parametrize(
    "code, stage, reason, told",
    [
        ("NLM_UNAVAILABLE", "NOTEBOOKLM_CALL", "dependency_unavailable", "exec"),
        ("VALIDATION_ERROR", "NOTEBOOKLM_CALL", "validation_failed", "exec"),
        ("DEADLINE_PASSED", "ARTIFACT_WRITE", "timeout", "commit"),
        ("INTERNAL_ERROR", "ARTIFACT_WRITE", "infrastructure_failure", "commit"),
    ],
)
async def test_dead_letter_of_a_queue_job_has_its_reason_and_stage(
    gateway: Gateway, code: str, stage: str, reason: str, told: str
):
    operator, job_id = gateway.client("control-plane"), await dead_queue_job(gateway, code, stage=stage)
    letter = (await operator.get(f"/dlq/{job_id}")).json()
    expected = {
        "job_id": job_id,
        "type": "BRIEF",
        "lifecycle": "queue-job",
        "status": "DEAD",
        "reason_code": reason,
        "stage": told,
        "last_error": f"{code}: no good",
        "attempts": 1,
        "last_owner": "orchestrator@test",
        "last_lease_expires_at": None,
        "correlation_id": job_id,
    }
    assert {name: letter[name] for name in expected} == expected
    assert (await operator.get("/dlq", params={"reason_code": reason})).json()["items"] == [letter]
    assert (await operator.get("/dlq", params={"reason_code": "policy_violation"})).json()["items"] == []


@pytest.mark.requirement("DJ-12", "JQ-4", "D9")
async def test_dead_queue_jobs_are_requeued_in_bulk_by_lifecycle_and_by_reason(gateway: Gateway):
    operator, leased = gateway.client("control-plane"), await dead_job(gateway)
    down, bad = await dead_queue_job(gateway), await dead_queue_job(gateway, "VALIDATION_ERROR")
    for wanted, moved in (
        ({"reason_code": "validation_failed"}, [(bad, "QUEUED")]),
        ({"lifecycle": "queue-job"}, [(down, "QUEUED")]),
        ({}, [(leased, "queued")]),
    ):
        answer = (await operator.post("/dlq/requeue", json={"filter": wanted})).json()
        assert [(item["job_id"], item["status"]) for item in answer["items"]] == moved, wanted
    assert (await operator.get("/dlq")).json()["items"] == []
    assert (await operator.get(f"/dlq/{down}")).status_code == 404


@pytest.mark.requirement("DJ-12", "DJ-21")
async def test_a_bulk_requeue_by_reason_keeps_its_limit_and_asked_again_takes_no_more(gateway: Gateway):
    operator = gateway.client("control-plane")
    dead = [await dead_queue_job(gateway, "VALIDATION_ERROR") for _ in range(3)]
    ledger, where = gateway.instance.ledger, JobFilter(lifecycle="queue-job", reason_code=ReasonCode.VALIDATION_FAILED)
    asked = (ledger, Actor(role=Role.CONTROL_PLANE, name="anna"), where, RequestId("once"))
    first = await requeue_dead(*asked, limit=2, cause=None)
    assert [type(answer) for answer in first] == [Moved, Moved]
    again = await requeue_dead(*asked, limit=2, cause=None)
    assert {answer.job_id for answer in again} == {answer.job_id for answer in first}
    left = (await operator.get("/dlq")).json()["items"]
    assert {letter["job_id"] for letter in left} == set(dead) - {answer.job_id for answer in first}


async def test_a_requeue_that_is_not_clear_or_too_large_is_refused(gateway: Gateway):
    unclear: list[dict[str, Any]] = [{}, {"job_ids": []}, {"job_ids": ["a"], "filter": {}}]
    too_large: list[dict[str, Any]] = [{"filter": {}, "limit": 201}, {"job_ids": ["a"] * 201}]
    client = gateway.client("control-plane")
    for wish in (*unclear, *too_large):
        answer = await client.post("/dlq/requeue", json=wish)
        assert (wish, answer.status_code, answer.json()["code"]) == (wish, 422, "VALIDATION_FAILED")


@pytest.mark.requirement("D39")
async def test_job_that_did_not_fail_is_not_requeued(gateway: Gateway):
    operator, owner = gateway.client("control-plane"), gateway.client("owner")
    cancelled, succeeded = await job(gateway, type_="stopped"), await job(gateway)
    assert (await operator.post(f"/jobs/{cancelled}/cancel", json={"mode": "hard"})).status_code == 200
    done = Advance(lease=await claimed(gateway), source="running", trigger="complete", result=b"1")
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(done,)))
    run = (await owner.post("/agents/run", json={"agent_slug": "archivist-violin"})).json()["run_id"]
    assert (await owner.post(f"/runs/{run}/cancel", json={"mode": "hard"})).status_code == 200
    waiting = await proposal(gateway)
    before = await everything(gateway)
    for job_id in (cancelled, succeeded, run, waiting):
        answer = await operator.post(f"/jobs/{job_id}/requeue")
        assert (job_id, answer.status_code, answer.json()["code"]) == (job_id, 409, "INVALID_TRANSITION")
    assert await everything(gateway) == before


@pytest.mark.requirement("D48")
async def test_a_job_is_known_by_its_external_id_alone(gateway: Gateway):
    owner, job_id = gateway.client("owner"), await job(gateway)
    lease = await claimed(gateway)
    assert (await owner.get(f"/jobs/{lease.key}")).status_code == 404
    documents = [(await owner.get(f"/jobs/{job_id}")).json(), *(await owner.get("/jobs")).json()["items"]]
    events = (await owner.get(f"/jobs/{job_id}/events")).json()["items"]
    assert {one["job_id"] for one in (*documents, *events)} == {job_id}
    assert not {"key", "id", "no"} & set().union(*documents)
    assert [one["id"] for one in events] == [f"{job_id}-{version}" for version in (1, 2, 3)]


@pytest.mark.requirement("D43")
async def test_a_cancel_of_an_unknown_job_is_not_found_for_whoever_reads_all_jobs_and_refused_for_others(
    gateway: Gateway,
):
    for role, status, code in (("owner", 404, "NOT_FOUND"), ("submitter", 403, "FORBIDDEN")):
        answers = [await gateway.client(role).get("/jobs/nope"), await gateway.client(role).post("/jobs/nope/cancel")]
        assert [(one.status_code, one.json()["code"]) for one in answers] == [(status, code)] * 2
    foreign = await gateway.client("owner", name="another").post("/jobs", json={"type": "work"})
    refused = await gateway.client("owner").post(f"/jobs/{foreign.json()['job_id']}/cancel")
    assert (refused.status_code, "for its own only" in refused.json()["detail"]) == (403, True)


async def test_a_requeue_of_an_unknown_job_requeues_none(gateway: Gateway):
    dead = await dead_job(gateway)
    before = await everything(gateway)
    answer = await gateway.client("control-plane").post("/dlq/requeue", json={"job_ids": [dead, "nobody"]})
    assert answer.status_code == 404
    assert await everything(gateway) == before


async def test_workers_are_shown_with_what_they_hold(gateway: Gateway):
    await gateway.instance.ledger.heartbeat_worker(WORKER, b'{"types":["work"]}')
    await job(gateway, by=SOMEBODY)
    await claimed(gateway)
    (worker,) = (await gateway.client("owner").get("/workers")).json()["items"]
    assert (worker["name"], worker["held"], worker["info"]) == ("worker@test", 1, {"types": ["work"]})


def entry_for(type_: str, wish: dict[str, Any]) -> dict[str, Any]:
    """An entry of the inbox that asks for this job."""
    return {"intent": {"action": "job", "target": type_, "payload": wish}, "source": {"type": "ui"}}


@pytest.mark.requirement("D66")
async def test_a_submit_over_http_takes_what_the_type_declares(gateway: Gateway):
    ledger, client = gateway.instance.ledger, gateway.client("owner", name="ada")
    await ledger.declare_types(
        WORKER,
        [
            TypeOptions(type="http.fetch", max_attempts=4, priority=Priority.CRITICAL, deadline_s=60.0),
            TypeOptions(type="k", keyed=True),
        ],
    )
    for entrance, job_of in (
        ("/jobs", lambda wish: wish),
        ("/inbox/submit", lambda wish: entry_for("http.fetch", wish)),
    ):
        for asked, attempts in (({"type": "http.fetch"}, 4), ({"type": "http.fetch", "max_attempts": 2}, 2)):
            made = (await client.post(entrance, json=job_of(asked))).json()["job_id"]
            told = (await client.get(f"/jobs/{made}")).json()
            assert (told["max_attempts"], told["priority"]) == (attempts, "critical")
            assert told["deadline_at"] == "2026-01-01T00:01:00.000Z"
    before = await everything(gateway)
    answer = await client.post("/jobs", json={"type": "k"})
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED")
    assert "concurrency_key" in answer.json()["detail"]
    misspelt = await client.post("/jobs", json={"type": "http.fetch", "max_atempts": 77})
    assert (misspelt.status_code, misspelt.json()["code"]) == (422, "VALIDATION_FAILED")
    assert "max_atempts: there is no such field (did you mean max_attempts?)" in misspelt.json()["detail"]
    assert await everything(gateway) == before


@pytest.mark.requirement("D66")
async def test_a_unique_job_over_http_is_returned_replaced_or_refused(gateway: Gateway):
    client, asked = gateway.client("submitter", name="ada"), {"type": "work", "payload": {"n": 1}, "unique": "args"}
    made, again = [await client.post("/jobs", json=asked) for _ in range(2)]
    first = made.json()
    assert (made.headers["Submit-Outcome"], again.headers["Submit-Outcome"]) == ("created", "returned")
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (first, "true")
    refused = await client.post("/jobs", json={**asked, "on_conflict": "raise"})
    assert (refused.status_code, refused.json()["code"]) == (409, "CONFLICT")
    assert first["job_id"] in refused.json()["detail"]
    replaced = await client.post("/jobs", json={**asked, "on_conflict": "replace"})
    assert (replaced.headers["Submit-Outcome"], replaced.headers["Replaced-Job"]) == ("replaced", first["job_id"])
    other = replaced.json()
    for wrong in (
        {"window_s": 0},
        {"while_": "later"},
        {"on_conflict": "replace", "window_s": 5},
        {"debounce_max_s": 5},
    ):
        assert (await client.post("/jobs", json={**asked, **wrong})).status_code == 422
    admin = gateway.client("control-plane", name="olga")
    death = {"reason_code": "policy_violation", "reason": "it had to end"}
    await admin.post(f"/jobs/{other['job_id']}/dead-letter", json=death)
    third = (await client.post("/jobs", json=asked)).json()
    taken = await admin.post(f"/jobs/{other['job_id']}/requeue", json={})
    assert taken.status_code == 409
    assert f"job {third['job_id']} holds its unique key now" in taken.json()["detail"]


@pytest.mark.requirement("DJ-18", "DJ-12")
async def test_only_an_operator_may_dead_letter_a_job(gateway: Gateway):
    job_id = await job(gateway)
    asked = {"reason_code": "policy_violation", "reason": "it mails people who opted out"}
    for role in ("owner", "orchestrator", "worker"):
        assert (await gateway.client(role).post(f"/jobs/{job_id}/dead-letter", json=asked)).status_code == 403
    admin = gateway.client("control-plane", name="olga")
    odd = await admin.post(f"/jobs/{job_id}/dead-letter", json={**asked, "reason_code": "exhausted_retries"})
    assert (odd.status_code, "policy_violation" in odd.json()["detail"]) == (422, True)
    key = {"Idempotency-Key": "once"}
    for replayed in (None, "true"):
        answer = await admin.post(f"/jobs/{job_id}/dead-letter", json=asked, headers=key)
        assert (answer.status_code, answer.json()["status"]) == (200, "dead_lettered")
        assert answer.headers.get("Idempotency-Replayed") == replayed
    letter = (await admin.get(f"/dlq/{job_id}")).json()
    told = {name: letter[name] for name in ("reason_code", "stage", "last_error", "last_owner")}
    assert told == {
        "reason_code": "policy_violation",
        "stage": "fetch",
        "last_error": asked["reason"],
        "last_owner": None,
    }


@pytest.mark.requirement("D38")
async def test_a_job_tells_how_many_attempts_it_made_also_when_it_ended_while_it_waited_for_the_next(gateway: Gateway):
    admin, job_id = gateway.client("control-plane"), await job(gateway)

    async def counted() -> set[tuple[int, int]]:
        (listed,) = (await admin.get("/jobs")).json()["items"]
        shown = (await admin.get(f"/jobs/{job_id}")).json()
        return {(one["attempt"], one["attempts_made"]) for one in (listed, shown)}

    again = Advance(lease=await claimed(gateway), source="running", trigger="retry")
    assert await counted() == {(0, 1)}
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(again,)))
    assert await counted() == {(1, 2)}, "as it waits for its second attempt"
    await admin.post(f"/jobs/{job_id}/cancel", json={"mode": "hard"})
    assert await counted() == {(1, 1)}
    never = await job(gateway, type_="other")
    await admin.post(f"/jobs/{never}/cancel", json={"mode": "hard"})
    assert (await admin.get(f"/jobs/{never}")).json()["attempts_made"] == 0


@pytest.mark.requirement("D38")
async def test_attempts_allowed_counts_attempts_of_every_job_though_a_queue_job_counts_retries(gateway: Gateway):
    owner = gateway.client("owner")
    asked = {"job_type": "RESEARCH", "agent_slug": VIOLIN, "payload": {"query": "Who made it?"}}
    queued = (await owner.post("/jobs", json=asked)).json()["job_id"]
    leased = (await owner.post("/jobs", json={"type": "t", "max_attempts": 2})).json()["job_id"]
    listed = {one["job_id"]: one for one in (await owner.get("/jobs")).json()["items"]}
    for job_id, allowed, of_document in ((queued, 4, 3), (leased, 2, 2)):
        for one in (listed[job_id], (await owner.get(f"/jobs/{job_id}")).json()):
            assert (one["attempts_made"], one["attempts_allowed"], one["max_attempts"]) == (1, allowed, of_document)
        told = (await owner.get(f"/jobs/{job_id}/explanation")).json()["where"]
        assert any(f"attempt 1 of {allowed}" in sentence for sentence in told)


@pytest.mark.requirement("DJ-15", "D19")
async def test_job_that_succeeded_despite_a_cancel_request_names_the_requester(gateway: Gateway):
    job_id = await job(gateway)
    lease, admin = await claimed(gateway), gateway.client("control-plane", name="olga")
    await admin.post(f"/jobs/{job_id}/cancel", json={"reason": "wrong customer"})
    held = (await admin.get(f"/jobs/{job_id}")).json()
    done = Advance(lease=lease, source="running", trigger="complete")
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(done,)))
    ended = (await admin.get(f"/jobs/{job_id}")).json()
    names = ("cancel_asked_by", "cancel_asked_at", "cancel_cause")
    assert [ended[name] for name in names] == [held[name] for name in names]
    assert (ended["status"], ended["cancel_requested"], ended["cancel_cause"]) == ("succeeded", False, "wrong customer")
    assert "olga" in ended["cancel_asked_by"]
    last = (await admin.get(f"/jobs/{job_id}/events")).json()["items"][-1]
    told = last["payload"]["data"]["cancel_requested"]
    assert (told["actor"], told["cause"]) == (ended["cancel_asked_by"], "wrong customer")


@pytest.mark.requirement("DJ-20", "DJ-15")
async def test_a_job_shows_the_cause_of_its_cancel_request_and_its_artifacts(gateway: Gateway):
    job_id = await job(gateway)
    lease, admin = await claimed(gateway), gateway.client("control-plane", name="olga")
    await admin.post(f"/jobs/{job_id}/cancel", json={"reason": "wrong customer"})
    assert (await admin.get(f"/jobs/{job_id}")).json()["cancel_cause"] == "wrong customer"
    stop = Advance(lease=lease, source="running", trigger="stop", cause="the handler stopped")
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(stop,)))
    last = (await admin.get(f"/jobs/{job_id}/events")).json()["items"][-1]
    assert last["cause"] == "the handler stopped (asked by olga: wrong customer)"
    made = await job(gateway, type_="other")
    step = Advance(
        lease=await claimed(gateway, "other"),
        source="running",
        trigger="complete",
        data=artifacts_data([ArtifactPointer(pointer="s3://bucket/a", size=3)]),
    )
    await gateway.instance.ledger.turn(Turn(actor=WORKER, advances=(step,)))
    artifacts = (await admin.get(f"/jobs/{made}")).json()["artifacts"]
    assert artifacts == [{"pointer": "s3://bucket/a", "name": None, "sha256": None, "size": 3}]


@pytest.mark.requirement("AUTH-2")
async def test_jobs_of_an_nlm_backend_on_the_same_ledger_are_read_by_those_alone_who_may_read_them(gateway: Gateway):
    job_id = JobId("0b9f3c1e@1")
    backend = Actor(role=Role.NLM_BACKEND, name="nlm@test")
    await gateway.instance.ledger.submit(backend, [NewJob(job_id=job_id, type="nlm", lifecycle="nlm-job")])
    other = await job(gateway)
    paths = [f"/jobs/{job_id}", f"/jobs/{job_id}/events", f"/jobs/{job_id}/result", "/jobs?lifecycle=nlm-job"]
    for role, codes in (("control-plane", [200, 200, 404, 200]), ("frontend", [403] * 4)):
        client = gateway.client(role)
        answers = [await client.get(path) for path in paths]
        assert [answer.status_code for answer in answers] == codes, role
        listed = {one["job_id"] for one in (await client.get("/jobs")).json()["items"]}
        assert listed == ({other} if role == "frontend" else {other, job_id})
        followed = await client.get("/events/stream?lifecycle=nlm-job&for_s=0")
        assert followed.status_code == codes[0]

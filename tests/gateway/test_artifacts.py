"""Artifacts over HTTP: staged once by the NLM backend, read when final, changed by nobody, removed by an operator's cleanup."""

import asyncio
import hashlib
import json
from typing import Any

import pytest

from tests.artifacts.desk import BACKEND, CONTENTS, DAY_S, SOURCES, call_nlm, complete, draft, queue_job
from tests.gateway.conftest import Client, Gateway
from tests.gateway.world import artifact, everything, job, refusals, staged_artifact
from trellis.app.wiring import new_id
from trellis.artifacts.content import JobType
from trellis.artifacts.rows import make_artifact_id
from trellis.engine.jobs import Lease
from trellis.http_server.bodies import LARGE_BODY_BYTES_MAX
from trellis.lifecycles import Role

METHODS = ("PUT", "PATCH", "DELETE")
MISSING = make_artifact_id("00000000-0000-4000-8000-000000000000")


async def waiting(gateway: Gateway, job_type: JobType = JobType.RESEARCH) -> Lease:
    return await call_nlm(gateway.instance.ledger, queue_job(new_id(), job_type))


def body(lease: Lease, job_type: JobType = JobType.RESEARCH, **changed: Any) -> dict[str, Any]:
    return {"job_id": lease.job_id, "epoch": lease.epoch, **draft(job_type).model_dump(mode="json"), **changed}


def backend(gateway: Gateway, lease: Lease | None = None) -> Client:
    return gateway.client("nlm-backend", job_id=None if lease is None else lease.job_id)


@pytest.mark.requirement("ART-4", "ART-7", "D15")
async def test_an_artifact_is_staged_once_then_final_with_its_job_and_then_read_as_the_schema_says(gateway: Gateway):
    lease = await waiting(gateway)
    client, reader = backend(gateway, lease), gateway.client("frontend")
    answer = await client.post("/artifacts", json=body(lease))
    staged = answer.json()
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/artifacts/{staged['artifact_id']}"
    assert {name: staged[name] for name in ("job_id", "finalized", "finalized_at", "version", "url")} == {
        "job_id": lease.job_id,
        "finalized": False,
        "finalized_at": None,
        "version": None,
        "url": None,
    }
    stored = await gateway.instance.artifacts.staged_bytes(staged["artifact_id"])
    assert stored is not None
    assert len(stored) == staged["size"]
    again = await client.post("/artifacts", json=body(lease))
    assert (again.status_code, again.json(), again.headers["idempotency-replayed"]) == (200, staged, "true")
    for role in ("nlm-backend", "owner", "control-plane", "orchestrator", "frontend"):
        one = gateway.client(role)
        assert (await one.get(f"/artifacts/{staged['artifact_id']}")).status_code == 404
        assert (await one.get(f"/artifacts/{staged['artifact_id']}/content")).status_code == 404
        assert (await one.get("/artifacts")).json()["items"] == []
        assert (await one.get(f"/jobs/{staged['artifact_id']}")).status_code in {403, 404}
    artifacts = gateway.instance.artifacts
    assert await complete(gateway.instance.ledger, artifacts, lease, staged["artifact_id"])
    document = (await reader.get(f"/artifacts/{staged['artifact_id']}")).json()
    assert document == await artifacts.read(staged["artifact_id"])
    assert (document["finalized"], document["version"]) == (True, 1)
    assert (document["content"], document["sources"]) == (CONTENTS[JobType.RESEARCH][1], SOURCES)
    content = await reader.get(f"/artifacts/{staged['artifact_id']}/content")
    assert content.content == stored, "the bytes whose hash the job's result names"
    assert (hashlib.sha256(content.content).hexdigest(), len(content.content)) == (staged["sha256"], staged["size"])
    (listed,) = (await reader.get("/artifacts", params={"job_id": lease.job_id})).json()["items"]
    assert listed == {name: value for name, value in document.items() if name not in {"content", "sources"}}
    later = await client.post("/artifacts", json=body(lease))
    assert (later.status_code, later.json()["url"]) == (200, document["url"])


@pytest.mark.requirement("ART-4")
async def test_ten_equal_posts_at_once_make_one_artifact(gateway: Gateway):
    lease = await waiting(gateway)
    client = backend(gateway, lease)
    answers = await asyncio.gather(*(client.post("/artifacts", json=body(lease)) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [201]
    assert len({answer.content for answer in answers}) == 1
    assert len(await gateway.instance.artifacts.of_job(lease.job_id)) == 1


@pytest.mark.requirement("ART-4", "ART-3")
async def test_other_content_for_a_known_job_changes_nothing_and_is_refused_once_the_artifact_is_final(
    gateway: Gateway,
):
    lease = await waiting(gateway)
    client = backend(gateway, lease)
    other = body(lease, content=CONTENTS[JobType.RESEARCH][1] | {"title": "Another"})
    staged = (await client.post("/artifacts", json=body(lease))).json()
    before = await everything(gateway)
    for sent in (other, body(lease), other | {"epoch": None}):
        answer = await client.post("/artifacts", json=sent)
        assert (answer.status_code, answer.json()) == (200, staged)
    assert await everything(gateway) == before
    assert await complete(gateway.instance.ledger, gateway.instance.artifacts, lease, staged["artifact_id"])
    before = await everything(gateway)
    answer = await client.post("/artifacts", json=other)
    assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")
    same = await client.post("/artifacts", json=body(lease))
    assert (same.status_code, same.json()["sha256"]) == (200, staged["sha256"])
    assert await everything(gateway) == before


async def test_a_key_means_one_request(gateway: Gateway):
    lease = await waiting(gateway)
    client, key = backend(gateway, lease), {"Idempotency-Key": "k"}
    first = await client.post("/artifacts", json=body(lease), headers=key)
    again = await client.post("/artifacts", json=body(lease), headers=key)
    assert (first.status_code, again.status_code, again.content) == (201, 200, first.content)
    refused = await client.post("/artifacts", json=body(lease, tags=["another"]), headers=key)
    assert (refused.status_code, refused.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")


@pytest.mark.requirement("AUTH-3", "ART-8")
async def test_a_token_for_one_job_stages_for_that_job_alone_and_one_for_all_for_none(gateway: Gateway):
    mine, other = await waiting(gateway), await waiting(gateway)
    before = await everything(gateway)
    client, for_all = backend(gateway, mine), backend(gateway)
    for one, foreign in ((client, body(other)), (client, body(mine, job_id=new_id())), (for_all, body(mine))):
        answer = await one.post("/artifacts", json=foreign)
        assert (answer.status_code, answer.json()["rule"]) == (403, "artifacts.write")
    assert await everything(gateway) == before
    assert len(await refusals(gateway)) == 3
    assert (await client.post("/artifacts", json=body(mine))).status_code == 201


@pytest.mark.requirement("JQ-13", "ART-2", "D15")
async def test_artifact_that_no_job_waits_for_is_refused_and_changes_no_state(gateway: Gateway):
    lease, leased = await waiting(gateway), await job(gateway)
    brief = draft(JobType.BRIEF).model_dump(mode="json")
    wrong = CONTENTS[JobType.RESEARCH][1]
    unknown_ref = {"heading": "h", "body": "b", "sources": ["nowhere.md"]}
    before = await everything(gateway)
    cases: list[tuple[dict[str, Any], int, str]] = [
        (body(lease, job_id=new_id()), 404, "NOT_FOUND"),
        (body(lease, job_id=leased), 409, "INVALID_TRANSITION"),
        (body(lease, epoch=lease.epoch + 1), 409, "LEASE_LOST"),
        (body(lease, epoch=0), 409, "LEASE_LOST"),
        (body(lease, **brief), 422, "VALIDATION_FAILED"),
        (body(lease, content=wrong | {"summary": ""}), 422, "VALIDATION_FAILED"),
        (body(lease, content=wrong | {"more": 1}), 422, "VALIDATION_FAILED"),
        (body(lease, content=wrong | {"sections": [unknown_ref]}), 422, "VALIDATION_FAILED"),
        (body(lease, finalized=True), 422, "VALIDATION_FAILED"),
        (body(lease, artifact_id=MISSING), 422, "VALIDATION_FAILED"),
        (body(lease, epoch=-1), 422, "VALIDATION_FAILED"),
        (body(lease, job_id="../../x"), 422, "VALIDATION_FAILED"),
    ]
    for sent, status, code in cases:
        client = gateway.client("nlm-backend", job_id=lease.job_id if "/" in sent["job_id"] else sent["job_id"])
        answer = await client.post("/artifacts", json=sent)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert await everything(gateway) == before


@pytest.mark.requirement("D25")
async def test_an_artifact_of_nearly_ten_mebibytes_is_taken_and_one_byte_more_than_that_is_not(gateway: Gateway):
    lease = await waiting(gateway)
    content = CONTENTS[JobType.RESEARCH][1]
    sections = [{"heading": f"h{n}", "body": "x" * 199_000, "sources": []} for n in range(52)]
    large = json.dumps(body(lease, content=content | {"sections": sections}), separators=(",", ":"))
    filled = large.replace('"h0"', '"h0' + "y" * 400 + '"')
    filled += " " * (LARGE_BODY_BYTES_MAX - len(filled.encode()))
    headers = {"Content-Type": "application/json"}
    refused = await backend(gateway, lease).post("/artifacts", content=filled + " ", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
    answer = await backend(gateway, lease).post("/artifacts", content=filled, headers=headers)
    assert answer.status_code == 201, answer.text
    staged = answer.json()
    assert await complete(gateway.instance.ledger, gateway.instance.artifacts, lease, staged["artifact_id"])
    answer = await gateway.client("owner").get(f"/artifacts/{staged['artifact_id']}")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["content"]["sections"]) == 52


async def test_the_brief_with_the_most_values_that_a_model_allows_passes_the_bounds_of_a_body(gateway: Gateway):
    lease = await waiting(gateway)
    sources = [{"ref": f"r{n}", "excerpt": "e"} for n in range(200)]
    refs = [source["ref"] for source in sources]
    content = {
        **CONTENTS[JobType.RESEARCH][1],
        "sections": [{"heading": "h", "body": "b", "sources": refs}] * 200,
        "conclusions": ["c"] * 200,
        "open_questions": ["o"] * 200,
    }
    sent = body(lease, content=content, sources=sources, entity_refs=refs, tags=[f"t{n}" for n in range(50)])
    answer = await backend(gateway, lease).post("/artifacts", json=sent)
    assert answer.status_code == 201, answer.text


@pytest.mark.requirement("ART-3", "ART-5")
async def test_no_role_can_change_or_delete_an_artifact(gateway: Gateway):
    made = await artifact(gateway)
    before = await everything(gateway)
    for role in Role:
        client = gateway.client(role)
        for method, path in [(one, path) for one in METHODS for path in ("/artifacts", f"/artifacts/{made}")]:
            answer = await client.request(method, path, json={"content": {}})
            assert (answer.status_code, answer.json()["code"]) == (405, "METHOD_NOT_ALLOWED")
        assert (await client.post(f"/artifacts/{made}", json={"content": {}})).status_code == 405
    assert await everything(gateway) == before


@pytest.mark.requirement("ART-5", "OBS-1")
async def test_a_cleanup_is_an_operators_and_takes_only_what_is_old_enough(gateway: Gateway):
    old = await artifact(gateway)
    gateway.clock.advance(91 * DAY_S)
    young = await artifact(gateway)
    operator, owner = gateway.client("control-plane"), gateway.client("owner")
    assert (await owner.post("/artifacts/cleanup")).status_code == 403
    refused = await operator.post("/artifacts/cleanup", json={"older_than_days": 1})
    assert (refused.status_code, "kept for 90 days" in refused.json()["detail"]) == (422, True)
    would = (await operator.post("/artifacts/cleanup", json={"dry_run": True})).json()
    assert ([one["artifact_id"] for one in would["items"]], would["dry_run"]) == ([old], True)
    assert (await owner.get(f"/artifacts/{old}")).status_code == 200
    key = {"Idempotency-Key": "clean"}
    done = await operator.post("/artifacts/cleanup", headers=key)
    assert ([one["artifact_id"] for one in done.json()["items"]], done.json()["older_than_days"]) == ([old], 90)
    again = await operator.post("/artifacts/cleanup", headers=key)
    assert (again.json(), again.headers["idempotency-replayed"]) == (done.json(), "true")
    assert (await operator.post("/artifacts/cleanup")).json()["items"] == []
    assert (await owner.get(f"/artifacts/{old}")).status_code == 404
    assert (await owner.get(f"/artifacts/{young}")).status_code == 200
    events = await gateway.instance.ledger.events(old)
    assert [event.type for event in events] == ["artifact.staged", "artifact.finalized", "artifact.removed"]
    assert (events[-1].role, events[-1].actor) == (Role.CONTROL_PLANE, "control-plane")


async def test_listings_have_pages_and_types(gateway: Gateway):
    made = [await artifact(gateway, job_type=kind) for kind in (*JobType, JobType.BRIEF)]
    client = gateway.client("memory")
    found, cursor = list[str](), None
    while True:
        page = (await client.get("/artifacts", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        found += [one["artifact_id"] for one in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == made[::-1]
    briefs = (await client.get("/artifacts", params={"type": "BRIEF"})).json()["items"]
    assert [one["artifact_id"] for one in briefs] == [made[3], made[1]]
    assert (await client.get("/artifacts", params={"type": "NOVEL"})).status_code == 422


async def test_a_hostile_id_is_not_found(gateway: Gateway):
    hostile = ("..%2F..%2Faudit", "art-..%2f..%2fetc%2fpasswd", "art-%2e%2e", f"{MISSING}%0a", f"{MISSING}.json")
    for id_ in (*hostile, "art-" + "9" * 150, MISSING):
        answer = await gateway.client("owner").get(f"/artifacts/{id_}")
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.requirement("ART-8", "OBS-1")
async def test_an_operator_discards_what_no_job_waits_for_and_changes_no_content(gateway: Gateway):
    operator, artifacts = gateway.client("control-plane", name="olena"), gateway.instance.artifacts
    staged = await staged_artifact(gateway)
    stored = await artifacts.staged_bytes(staged)
    answer = await operator.post(f"/artifacts/{staged}/discard", json={"reason": "its job is gone"})
    assert (answer.status_code, answer.json()["artifact_id"], answer.json()["finalized"]) == (200, staged, False)
    last = (await gateway.instance.ledger.events(staged))[-1]
    assert (last.type, last.target, last.actor, last.role) == (
        *("artifact.discarded", "discarded", "olena"),
        Role.CONTROL_PLANE,
    )
    assert last.cause == "its job is gone"
    assert await artifacts.staged_bytes(staged) == stored
    before = await everything(gateway)
    again = await operator.post(f"/artifacts/{staged}/discard")
    assert (again.status_code, again.json()) == (200, answer.json())
    assert await everything(gateway) == before


@pytest.mark.requirement("ART-8", "ART-3")
async def test_artifact_that_is_final_or_awaited_cannot_be_discarded(gateway: Gateway):
    operator, lease = gateway.client("control-plane"), await waiting(gateway)
    staged = (await backend(gateway, lease).post("/artifacts", json=body(lease))).json()["artifact_id"]
    final = await artifact(gateway)
    before = await everything(gateway)
    for id_, status, reason in (
        (staged, 409, "waits for it"),
        (final, 409, "it is final"),
        (MISSING, 404, "no artifact"),
    ):
        answer = await operator.post(f"/artifacts/{id_}/discard")
        assert (answer.status_code, reason in answer.json()["detail"]) == (status, True), answer.text
    assert await everything(gateway) == before


@pytest.mark.requirement("ART-7", "AUTH-3")
async def test_backend_gets_404_for_its_staged_artifact_and_403_for_a_foreign_one(gateway: Gateway):
    lease = await waiting(gateway)
    client = backend(gateway, lease)
    staged = (await client.post("/artifacts", json=body(lease))).json()["artifact_id"]
    answers = [await client.get(f"/artifacts/{id_}") for id_ in (staged, MISSING)]
    assert [(one.status_code, one.json()["code"]) for one in answers] == [(404, "NOT_FOUND"), (403, "FORBIDDEN")]


async def test_an_artifact_whose_bytes_are_lost_is_reported_as_such(gateway: Gateway):
    instance = gateway.instance
    lease = await waiting(gateway)
    current = await instance.ledger.job(lease.job_id)
    assert current is not None
    staged = await instance.artifacts.stage(BACKEND, draft(), job=current)
    await instance.objects.put(staged.row.staged_key, b"{}")
    assert await complete(instance.ledger, instance.artifacts, lease, staged.artifact_id)
    answer = await gateway.client("owner").get(f"/artifacts/{staged.artifact_id}")
    assert (answer.status_code, answer.json()["code"]) == (502, "UPSTREAM_UNAVAILABLE")
    assert staged.row.key in answer.json()["detail"]

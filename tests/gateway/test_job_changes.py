"""Changes of many jobs over HTTP: batches, dry runs, keys, and whose jobs they reach (decision 0041)."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.test_two_tenants import of
from tests.gateway.world import dead_job
from trellis.engine.jobs import JobId
from trellis.http.shapes import REPLAYED
from trellis.lifecycles import Role


async def submitted(client: Any, n: int = 1, **options: Any) -> list[str]:
    return [(await client.post("/jobs", json={"type": "work", **options})).json()["job_id"] for _ in range(n)]


async def states(gateway: Gateway, jobs: list[str]) -> list[str]:
    found = [await gateway.instance.ledger.job(JobId(job_id)) for job_id in jobs]
    return ["" if job is None else job.state for job in found]


async def test_a_filter_is_counted_then_changed_in_batches_that_say_where_the_next_begins(gateway: Gateway):
    operator = gateway.client("control-plane")
    jobs = await submitted(gateway.client("submitter", name="ada"), 5, correlation_id="order-7")
    where = {"filter": {"correlation_id": "order-7", "status": "queued"}}
    seen = (await operator.post("/jobs/cancel", json={**where, "dry_run": True})).json()
    assert (seen["matched"], seen["more"], [one["job_id"] for one in seen["examples"]]) == (5, False, jobs)
    assert await states(gateway, jobs) == ["queued"] * 5
    first = (await operator.post("/jobs/cancel", json={**where, "limit": 3, "reason": "a mistake"})).json()
    assert (first["changed"], first["skipped"], [one["job_id"] for one in first["items"]]) == (3, 0, jobs[:3])
    rest = (await operator.post("/jobs/cancel", json={**where, "cursor": first["next_cursor"]})).json()
    assert (rest["changed"], rest["next_cursor"]) == (2, None)
    assert await states(gateway, jobs) == ["cancelled"] * 5
    assert [act.event for act in await gateway.instance.ledger.acts()].count("jobs.changed") == 2


async def test_a_repeated_request_with_a_key_gets_its_answer_and_changes_nothing_more(gateway: Gateway):
    operator = gateway.client("control-plane")
    jobs = await submitted(gateway.client("submitter", name="ada"), 4)
    body = {"filter": {"type": "work"}, "limit": 2}
    answers = [await operator.post("/jobs/cancel", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, "true"]
    assert await states(gateway, jobs) == ["cancelled", "cancelled", "queued", "queued"]
    other = await operator.post("/jobs/cancel", json={**body, "limit": 1}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 422


@pytest.mark.requirement("D62")
async def test_a_filter_reaches_the_jobs_of_its_caller_alone(gateway: Gateway):
    acme, globex, manager = (
        of(gateway, "acme"),
        of(gateway, "globex"),
        of(gateway, "acme", Role.CONTROL_PLANE, name="m"),
    )
    own, others = await submitted(acme, 2, concurrency_key="db"), await submitted(globex, 2, concurrency_key="db")
    mixed = await submitted(of(gateway, "acme", name="olha"))
    where = {"filter": {"concurrency_key": "db"}}
    assert (await acme.post("/jobs/cancel", json={**where, "dry_run": True})).json()["matched"] == 2
    assert (await acme.post("/jobs/cancel", json={"filter": {"all": True}})).json()["changed"] == 2
    assert await states(gateway, own + others + mixed) == ["cancelled"] * 2 + ["queued"] * 3
    assert (await acme.post("/jobs/cancel", json={"job_ids": others})).status_code == 403
    assert (await manager.post("/jobs/cancel", json={"filter": {"all": True}})).json()["changed"] == 1, "of its tenant"
    assert await states(gateway, others) == ["queued", "queued"]
    assert (await manager.post("/jobs/run-now", json={"filter": {"all": True}})).status_code == 403


async def test_operators_discard_hurry_and_reprioritize_and_others_do_not(gateway: Gateway):
    operator, submitter = gateway.client("control-plane"), gateway.client("submitter", name="ada")
    (delayed,) = await submitted(submitter, delay_s=600)
    dead = await dead_job(gateway)
    requests = {
        "/jobs/run-now": {"job_ids": [delayed]},
        "/jobs/prioritize": {"filter": {"type": "work"}, "priority": "critical"},
        "/jobs/discard": {"filter": {"status": "dead_lettered"}},
    }
    for path, body in requests.items():
        assert (await submitter.post(path, json=body)).status_code == 403, path
        done = (await operator.post(path, json=body)).json()
        assert (done["changed"], done["skipped"]) == (1, 0), path
    assert await states(gateway, [dead]) == ["discarded"]
    shown = (await operator.get(f"/jobs/{delayed}")).json()
    assert (shown["priority"], shown["due_at"]) == ("critical", None)
    assert (await operator.get("/dlq")).json()["items"] == []


@pytest.mark.parametrize(
    "path, body, told",
    [
        ("/jobs/cancel", {"filter": {}}, "A filter that names nothing would cancel every job: add a type"),
        ("/jobs/cancel", {}, "give either job_ids or filter"),
        ("/jobs/cancel", {"filter": {"type": "x"}, "job_ids": ["a"]}, "give either job_ids or filter"),
        ("/jobs/cancel", {"filter": {"status": "cancelled"}}, "queued, running, suspended"),
        ("/jobs/discard", {"filter": {"lifecycle": "bus-job"}}, "control-plane cannot discard one"),
        (
            "/jobs/discard",
            {"filter": {"reason_code": "timeout", "lifecycle": "queue-job"}},
            "with lifecycle leased-job",
        ),
        ("/jobs/prioritize", {"filter": {"type": "x"}}, "priority"),
        ("/jobs/cancel", {"filter": {"type": "x"}, "limit": 501}, "500"),
        ("/jobs/cancel", {"filter": {"type": "x"}, "cursor": "zz"}, "the cursor of an earlier page"),
        ("/jobs/cancel", {"filter": {"type": "x", "submitted_before": "2026-01-01T00:00:00"}}, "timezone"),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_what_to_change(
    gateway: Gateway, path: str, body: dict[str, Any], told: str
):
    answer = await gateway.client("control-plane").post(path, json=body)
    assert answer.status_code == 422
    assert told in answer.text

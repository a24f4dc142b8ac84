"""Batches over HTTP."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from trellis.engine.job_batches import BATCH_MAX
from trellis.engine.jobs import JobId

WISH: dict[str, Any] = {
    "jobs": [{"type": "page", "payload": n, "priority": "interactive"} for n in range(3)],
    "on_complete": {"type": "report", "payload": {"day": 7}},
}


async def test_a_batch_is_submitted_once_for_a_key(gateway: Gateway):
    client, key = gateway.client("submitter", name="ada"), {"Idempotency-Key": "day 7"}
    answer = await client.post("/batches", json=WISH, headers=key)
    batch = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/jobs/{batch['job_id']}")
    again = await client.post("/batches", json=WISH, headers=key)
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (batch, "true")
    other = await client.post("/batches", json={**WISH, "jobs": []}, headers=key)
    assert (other.status_code, "day 7" in other.text) == (422, True)
    listed = (await client.get("/jobs", params={"parent_id": batch["job_id"]})).json()["items"]
    assert sorted(job["job_id"] for job in listed) == sorted(batch["jobs"])
    completion = (await client.get(f"/jobs/{batch['job_id']}")).json()
    assert (completion["status"], completion["type"]) == ("suspended", "report")
    (queued, *_) = await gateway.instance.ledger.events(JobId(batch["jobs"][0]))
    assert queued.actor == "ada"


@pytest.mark.parametrize(
    "change",
    [
        {"jobs": [{"type": "page"}] * (BATCH_MAX + 1)},
        {"jobs": [{"topic": "job.echo"}]},
        {"on_complete": {"type": "report", "delay_s": 5}},
        {"on_complete": None},
    ],
    ids=["too-many", "topic", "delay", "no-completion"],
)
async def test_what_is_no_batch_is_refused_and_nothing_is_submitted(gateway: Gateway, change: dict[str, Any]):
    client = gateway.client("submitter", name="ada")
    answer = await client.post("/batches", json={**WISH, **change})
    assert answer.status_code in {400, 422}, answer.text
    assert (await client.get("/jobs")).json()["items"] == []

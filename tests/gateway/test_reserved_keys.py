"""Keys of what moves jobs that are there: one request has a key, also at the same moment and though a gateway dies on the way."""

import asyncio
from typing import Any

import httpx2
import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.test_idempotency import held, keyed
from tests.gateway.world import OPERATOR, dead_job, job, proposal
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    DeadLetterReason,
    JobId,
    Move,
    Moved,
    ReasonCode,
    RequestId,
    Stage,
)
from trellis.engine.records import Job
from trellis.gateway.idempotency import HEADER
from trellis.lifecycles import Role

DEATH = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="no good")


@pytest.mark.requirement("D27", "DJ-5")
async def test_a_bulk_requeue_under_a_key_is_refused_with_another_body_also_at_the_same_moment(gateway: Gateway):
    client, jobs = gateway.client("control-plane"), [await dead_job(gateway) for _ in range(4)]
    wishes = [{"job_ids": [job_id]} for job_id in jobs]
    answers = await asyncio.gather(
        *(client.post("/dlq/requeue", json=wish, headers=keyed("press")) for wish in wishes * 3)
    )
    done = [answer for answer in answers if answer.status_code == 200]
    assert {answer.json()["code"] for answer in answers if answer not in done} == {"IDEMPOTENCY_MISMATCH"}
    assert len({answer.content for answer in done}) == 1
    assert len((await client.get("/dlq")).json()["items"]) == len(jobs) - 1


@pytest.mark.requirement("D27", "DJ-5")
async def test_a_repeated_bulk_requeue_takes_no_job_that_could_not_be_requeued_the_first_time(gateway: Gateway):
    client, dead, queued = gateway.client("control-plane"), await dead_job(gateway), await job(gateway)
    wish = {"job_ids": [dead, queued]}
    first = await client.post("/dlq/requeue", json=wish, headers=keyed("press"))
    assert [item["requeued"] for item in first.json()["items"]] == [True, False]
    move = Move(job_id=queued, target="dead_lettered", request_id=RequestId("later"), death=DEATH)
    await gateway.instance.ledger.move(OPERATOR, move)
    again = await client.post("/dlq/requeue", json=wish, headers=keyed("press"))
    assert (again.content, again.headers.get(HEADER)) == (first.content, "true")
    assert len((await client.get("/dlq")).json()["items"]) == 1


@pytest.mark.requirement("D27", "DJ-5")
@pytest.mark.parametrize("act", ["cancel", "requeue", "decide"])
async def test_a_key_of_one_act_is_refused_for_another_job_also_at_the_same_moment(gateway: Gateway, act: str):
    client = gateway.client("control-plane", "owner", name="iryna")
    makers = {"cancel": job, "requeue": dead_job, "decide": proposal}
    things = [await makers[act](gateway) for _ in range(4)]

    async def ask(id_: str) -> httpx2.Response:
        if act == "decide":
            return await client.patch(f"/proposals/{id_}", json={"decision": "approve"}, headers=keyed("press"))
        return await client.post(f"/jobs/{id_}/{act}", json={}, headers=keyed("press"))

    answers = await asyncio.gather(*(ask(id_) for id_ in things))
    assert sorted(answer.status_code for answer in answers) == [200, 422, 422, 422]
    versions = [len(await gateway.instance.ledger.events(JobId(id_))) for id_ in things]
    assert sum(versions) == len(things) * min(versions) + 1


@pytest.mark.requirement("D27", "DJ-5")
@pytest.mark.parametrize("kind", ["jobs", "runs"])
@pytest.mark.parametrize("ends", ["cancelled", "otherwise"])
async def test_cancel_request_repeated_after_a_gateway_crash_gets_the_same_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, kind: str, ends: str
):
    """It dies right after the ledger took the request, or before: then nothing was asked, and the repeated request is the first.

    The job ends before the request comes again.
    """
    client, ledger = gateway.client("control-plane", "owner", name="iryna"), gateway.instance.ledger
    id_ = await held(gateway, kind)
    path, cancel = f"/{kind}/{id_}/cancel", ledger.cancel

    async def dies(*args: Any, **kwargs: Any) -> Any:
        if ends == "cancelled":
            await cancel(*args, **kwargs)
        raise LedgerUnavailable(reason="this gateway died")

    monkeypatch.setattr(ledger, "cancel", dies)
    lost = await client.post(path, json={"mode": "soft"}, headers=keyed("press"))
    assert lost.status_code >= 500
    monkeypatch.setattr(ledger, "cancel", cancel)
    gateway.clock.advance(600)
    await gateway.sweep()
    if ends != "cancelled":
        role = Role.ORCHESTRATOR if kind == "runs" else Role.CONTROL_PLANE
        somebody, request = Actor(role=role, name="somebody"), RequestId("another")
        await cancel(somebody, JobId(id_), CancelMode.HARD, request, grace_s=0.0, cause=None)
    again = await client.post(path, json={"mode": "soft"}, headers=keyed("press"))
    if ends == "cancelled":
        assert (again.status_code, again.json()["status"], again.headers.get(HEADER)) == (200, "running", "true")
    else:
        assert (again.status_code, again.json()["code"]) == (409, "INVALID_TRANSITION")
    other = await client.post(path, json={"mode": "hard"}, headers=keyed("press"))
    assert other.json()["code"] == "IDEMPOTENCY_MISMATCH"


@pytest.mark.requirement("D27", "DJ-21")
async def test_cancel_request_lost_with_its_gateway_takes_effect_when_repeated(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    client, ledger = gateway.client("control-plane"), gateway.instance.ledger
    id_, cancel = await held(gateway, "jobs"), ledger.cancel

    async def dies(*args: Any, **kwargs: Any) -> Any:
        raise LedgerUnavailable(reason="this gateway died")

    monkeypatch.setattr(ledger, "cancel", dies)
    await client.post(f"/jobs/{id_}/cancel", headers=keyed("press"))
    monkeypatch.setattr(ledger, "cancel", cancel)
    assert not (await job_of(gateway, id_)).cancel_requested
    assert (await client.post(f"/jobs/{id_}/cancel", headers=keyed("press"))).status_code == 200
    assert (await job_of(gateway, id_)).cancel_requested


async def job_of(gateway: Gateway, id_: str) -> Job:
    found = await gateway.instance.ledger.job(JobId(id_))
    assert found is not None
    return found


@pytest.mark.requirement("D27", "DJ-5")
async def test_repeated_cancel_request_does_not_affect_the_requeued_job(gateway: Gateway):
    client, ledger = gateway.client("control-plane"), gateway.instance.ledger
    id_ = await held(gateway, "jobs")
    first = await client.post(f"/jobs/{id_}/cancel", json={"mode": "soft"}, headers=keyed("press"))
    move = Move(job_id=JobId(id_), target="dead_lettered", request_id=RequestId("later"), death=DEATH)
    assert isinstance(await ledger.move(OPERATOR, move), Moved)
    assert (await client.post(f"/jobs/{id_}/requeue")).json()["status"] == "queued"
    again = await client.post(f"/jobs/{id_}/cancel", json={"mode": "soft"}, headers=keyed("press"))
    assert (again.content, again.headers.get(HEADER)) == (first.content, "true")
    assert (await job_of(gateway, id_)).state == "queued"

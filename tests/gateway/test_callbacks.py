"""Callbacks of the NLM backend: forged, stale, replayed and foreign ones have no effect and leave one record each."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.door import Door, opened, token
from trellis.documents.audit_log import ActRecorder
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, Move, Moved, NewJob, RequestId, Turn, TypeClaim
from trellis.http_server.limits import REFUSALS_PER_MINUTE_MAX, UNAUTHENTICATED_PER_MINUTE_MAX, RefusalBounds
from trellis.lifecycles import Role
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.net.signatures import job_key, signed_headers

SECRET, OLD = b"s" * 32, b"o" * 32
NOW = 1_771_056_000.0
TYPE = "RESEARCH"
ORCHESTRATOR = Actor(role=Role.ORCHESTRATOR, name="orchestrator@test")
JOB = "7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"
OTHER = "0a1b2c3d-8a54-4b0e-9d2e-3c5d1a2b3c4d"


@dataclass
class Callbacks:
    """The gateway, and a job that waits for its callback."""

    door: Door
    epoch: int
    now: list[float]

    def body(self, **changed: Any) -> bytes:
        made = {
            "job_id": JOB,
            "epoch": self.epoch,
            "status": "COMPLETE",
            "artifact_id": "art_1",
            "sha256": "0" * 64,
            "size": 10,
        }
        return json.dumps(made | changed).encode()

    async def send(
        self,
        body: bytes,
        *,
        id_: str = "msg_1",
        at: float = NOW,
        to: str = JOB,
        key_of: str = JOB,
        secret: bytes = SECRET,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        made = signed_headers(job_key(secret, "nlm-backend", key_of), id_=id_, timestamp=int(at), body=body)
        given = {"content-type": "application/json", **(made if headers is None else headers)}
        return await self.door("POST", f"/jobs/{to}/result", headers=given, content=body)

    async def kept(self) -> list[str]:
        """What was taken."""
        return [info.key for info in (await self.door.instance.objects.list("callbacks/")).items]

    async def records(self) -> list[dict[str, Any]]:
        """The audit records about callbacks."""
        instance = self.door.instance
        objects = instance.objects
        await ActRecorder(instance.ledger, instance.actor(Role.PROJECTOR), DocumentPublisher(objects)).publish_new()
        found = [await objects.get(info.key) for info in (await objects.list("audit/2")).items]
        made = [json.loads(one.body) for one in found if one is not None]
        return [one for one in made if one["event"].startswith("callback.")]


@pytest.fixture
async def callbacks(tmp_path: Path) -> AsyncIterator[Callbacks]:
    now = [NOW]
    async with opened(tmp_path, now=lambda: now[0], secrets=(SECRET, OLD)) as door:
        epoch = await _waiting_for_nlm(door, JOB)
        yield Callbacks(door, epoch, now)


async def _waiting_for_nlm(door: Door, job_id: str) -> int:
    """A queue-job in NOTEBOOKLM_CALL; its epoch."""
    ledger = door.instance.ledger
    await ledger.submit(ORCHESTRATOR, [NewJob(job_id=JobId(job_id), type=TYPE, lifecycle=QUEUE_JOB.name)])
    queued = await ledger.move(
        ORCHESTRATOR, Move(job_id=JobId(job_id), target="QUEUED", request_id=RequestId(f"queue {job_id}"))
    )
    assert isinstance(queued, Moved)
    claim = Claim(claim_id=ClaimId(f"claim {job_id}"), types=(TypeClaim(type=TYPE),), lifecycle=QUEUE_JOB.name)
    (claimed,) = (await ledger.turn(Turn(actor=ORCHESTRATOR, claim=claim))).claimed
    called = Advance(lease=claimed.lease, trigger="snapshot_ready", source="CONTEXT_ASSEMBLY")
    await ledger.turn(Turn(actor=ORCHESTRATOR, advances=(called,)))
    job = await ledger.job(JobId(job_id))
    assert job is not None
    assert job.state == "NOTEBOOKLM_CALL"
    return job.epoch


@pytest.mark.requirement("D26")
async def test_a_signed_callback_is_kept_once_and_repeated_with_the_same_answer(callbacks: Callbacks):
    body = callbacks.body()
    first = await callbacks.send(body)
    assert (first.status_code, first.json()) == (202, {"job_id": JOB, "id": "msg_1", "status": "taken"}), first.text
    callbacks.now[0] += 60
    again = await callbacks.send(body, at=callbacks.now[0])
    assert (again.status_code, again.content) == (202, first.content)
    assert (again.headers["idempotency-replayed"], "idempotency-replayed" in first.headers) == ("true", False)
    assert await callbacks.kept() == [f"callbacks/{JOB}/msg_1.json"]
    (kept,) = [await callbacks.door.instance.objects.get(key) for key in await callbacks.kept()]
    assert kept is not None
    assert json.loads(kept.body)["callback"]["artifact_id"] == "art_1"
    assert [one["event"] for one in await callbacks.records()] == ["callback.repeated"]


@pytest.mark.requirement("D26")
async def test_a_hundred_at_once_have_one_effect(callbacks: Callbacks):
    answers = await asyncio.gather(*(callbacks.send(callbacks.body()) for _ in range(100)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(await callbacks.kept()) == 1


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    "changed, status",
    [
        ({"secret": b"x" * 32}, 401),  # forged
        ({"headers": {}}, 401),
        ({"headers": {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": "v1,"}}, 401),
        ({"at": NOW - 301}, 401),  # stale
        ({"at": NOW + 301}, 401),
        ({"key_of": OTHER}, 401),  # foreign: signed for another job
        ({"to": OTHER}, 401),
        ({"to": OTHER, "key_of": OTHER}, 422),  # the body is about another job
    ],
    ids=["forged", "no headers", "empty signature", "stale", "from the future", "other key", "other job", "other body"],
)
async def test_callback_without_a_valid_signature_has_no_effect_and_leaves_one_record(
    callbacks: Callbacks, changed: dict[str, Any], status: int
):
    answer = await callbacks.send(callbacks.body(), **changed)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert await callbacks.kept() == []
    (record,) = await callbacks.records()
    assert (record["event"], record["job_id"]) == ("callback.refused", changed.get("to", JOB))
    assert (await callbacks.send(callbacks.body())).status_code == 202


@pytest.mark.requirement("D26")
async def test_callback_with_a_used_id_and_another_body_is_refused(callbacks: Callbacks):
    assert (await callbacks.send(callbacks.body())).status_code == 202
    other = await callbacks.send(callbacks.body(artifact_id="art_2"))
    assert (other.status_code, other.json()["code"]) == (409, "DUPLICATE_ENTRY")
    assert len(await callbacks.kept()) == 1


@pytest.mark.requirement("D26")
async def test_an_attempt_that_lost_its_lease_changes_nothing(callbacks: Callbacks):
    for epoch in (callbacks.epoch - 1, callbacks.epoch + 1):
        answer = await callbacks.send(callbacks.body(epoch=epoch), id_=f"msg_{epoch}")
        assert (answer.status_code, answer.json()["code"]) == (409, "LEASE_LOST")
    assert await callbacks.kept() == []


async def test_callback_for_a_job_that_expects_none_returns_the_job_status(callbacks: Callbacks):
    missing = await callbacks.send(callbacks.body(job_id=OTHER), to=OTHER, key_of=OTHER)
    assert (missing.status_code, missing.json()["code"]) == (404, "NOT_FOUND")
    ledger = callbacks.door.instance.ledger
    submitter = Actor(role=Role.SUBMITTER, name="shop")
    await ledger.submit(submitter, [NewJob(job_id=JobId("leased"), type="t")])
    other = await callbacks.send(callbacks.body(job_id="leased"), to="leased", key_of="leased")
    assert (other.status_code, other.json()["code"]) == (409, "INVALID_TRANSITION")
    await ledger.submit(ORCHESTRATOR, [NewJob(job_id=JobId(OTHER), type=TYPE, lifecycle=QUEUE_JOB.name)])
    early = await callbacks.send(callbacks.body(job_id=OTHER, epoch=0), to=OTHER, key_of=OTHER)
    assert (early.status_code, early.json()["status_now"]) == (409, "PENDING")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b"NaN", b'{"a": 1, "a": 2}', b"{}"],
    ids=["empty", "half", "list", "not UTF-8", "NaN", "twice", "nothing in it"],
)
async def test_a_body_that_does_not_fit_is_refused_though_it_is_signed(callbacks: Callbacks, body: bytes):
    answer = await callbacks.send(body)
    assert answer.status_code == 422, answer.text
    assert await callbacks.kept() == []
    assert len(await callbacks.records()) == 1


async def test_complete_comes_with_an_artifact_and_failed_with_a_reason(callbacks: Callbacks):
    for changed in ({"artifact_id": None}, {"sha256": "x"}, {"status": "FAILED"}, {"status": "DONE"}, {"more": 1}):
        assert (await callbacks.send(callbacks.body(**changed))).status_code == 422
    failed = callbacks.body(status="FAILED", error={"code": "RATE_LIMIT", "message": "later"}, artifact_id=None)
    assert (await callbacks.send(failed)).status_code == 202


async def test_an_old_secret_verifies_while_it_is_kept_and_a_token_does_not_help(callbacks: Callbacks):
    unsigned = await callbacks.door(
        "POST",
        f"/jobs/{JOB}/result",
        token(Role.NLM_BACKEND),
        content=callbacks.body(),
        headers={"content-type": "application/json"},
    )
    assert unsigned.status_code == 401
    assert (await callbacks.send(callbacks.body(), secret=OLD)).status_code == 202


async def test_records_of_one_sender_are_bounded(callbacks: Callbacks):
    for _ in range(30):
        assert (await callbacks.send(callbacks.body(), secret=b"x" * 32)).status_code == 401
    assert len(await callbacks.records()) == 10


async def test_without_a_secret_no_callback_is_taken(tmp_path: Path):
    async with opened(tmp_path) as door:
        epoch = await _waiting_for_nlm(door, JOB)
        made = Callbacks(door, epoch, [NOW])
        assert (await made.send(made.body(), secret=b"")).status_code == 401


@pytest.mark.requirement("D26")
async def test_senders_without_a_signature_add_one_actor_and_a_bounded_number_of_acts(callbacks: Callbacks):
    door = callbacks.door
    for number in range(UNAUTHENTICATED_PER_MINUTE_MAX + 5):
        transport = httpx2.ASGITransport(app=door.app, client=(f"10.0.0.{number}", 40_000))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post(f"/jobs/{JOB}/result", content=b"{}")).status_code == 401
    acts = [act for act in await door.instance.ledger.acts() if act.event == "callback.refused"]
    assert {act.actor for act in acts} == {"callback"}
    senders = [f"10.0.0.{number}" for number in range(UNAUTHENTICATED_PER_MINUTE_MAX)]
    assert [act.facts["sender"] for act in acts] == senders


def test_refusals_of_unauthenticated_senders_are_limited_each_and_together():
    now = [0.0]
    bounds = RefusalBounds(lambda: now[0])
    one = [bounds.take("one", authenticated=False) for _ in range(REFUSALS_PER_MINUTE_MAX + 2)]
    assert one == [0] * REFUSALS_PER_MINUTE_MAX + [None, None]
    rest = UNAUTHENTICATED_PER_MINUTE_MAX - REFUSALS_PER_MINUTE_MAX
    assert [bounds.take(f"{number}", authenticated=False) for number in range(rest + 3)] == [0] * rest + [None] * 3
    assert bounds.take("known") == 0
    now[0] = 60.0
    assert [bounds.take("one", authenticated=False), bounds.take("other", authenticated=False)] == [5, 0]

"""Who may give jobs, what is taken, and that the same job is executed once however often and to whomever it is given (NLM-5)."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.net.listening import make_certificates
from tests.nlm_backend.conftest import KEY, TLS, Stand, Working, provider_calls, standing, until
from tests.nlm_backend.gatewaying import LOOPBACK, FakeGateway, gateway_on_loopback
from tests.nlm_backend.test_stages import WAY
from trellis.app.settings import Settings
from trellis.app.wiring import outgoing_tls
from trellis.artifacts.content import JobType
from trellis.auth.tokens import issue, symmetric_key
from trellis.engine.jobs import TYPE_PATTERN
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.nlm_backend.errors import ExecutionsSpent, StaleEpoch
from trellis.nlm_backend.intake import EXECUTIONS_MAX, KnownExecution, decide_intake
from trellis.nlm_backend.orders import ProcessRequest, execution_id, read_execution_id, type_of
from trellis.research.backend_client import (
    ExecutionRequest,
    JobFailedAnswer,
    JobFinished,
    NlmBackend,
    error_of_refusal,
)
from trellis.research.errors import BackendUnavailable, ExecutionForgotten
from trellis.research.queue_job import QueueRequest

# -- who and what ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("NLM-1", "AUTH-2")
async def test_only_the_orchestration_layer_and_the_control_plane_give_jobs(stand: Stand):
    working, order = stand.backend(), stand.order()
    allowed = {Role.ORCHESTRATOR, Role.CONTROL_PLANE}
    for role in Role:
        answer = await working.client(role).post("/jobs/process", json=order)
        assert answer.status_code == (202 if role in allowed else 403), role
        if role not in allowed:
            assert answer.json()["rule"] == "nlm.process"
    assert await stand.executions() == 1


async def test_request_without_a_valid_token_is_401_and_its_body_is_not_read(stand: Stand):
    working = stand.backend()
    other = symmetric_key(b"another key, which nobody here trusts at all", issuer="trellis")
    for client in (working.client(), working.client(Role.ORCHESTRATOR, key=other)):
        for path in ("/jobs/process", "/query"):
            answer = await client.post(path, content=b"{ no json", headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["code"]) == (401, "AUTH_REQUIRED")
            assert answer.headers["www-authenticate"].startswith("Bearer")
    assert await stand.executions() == 0


@pytest.mark.requirement("NLM-9")
async def test_a_missing_or_unknown_field_is_refused_and_nothing_is_stored(stand: Stand):
    working, order = stand.backend(), stand.order()
    wrong: list[dict[str, Any]] = [{name: value for name, value in order.items() if name != left} for left in order]
    wrong += [
        order | {"priority": 1},
        order | {"epoch": -1},
        order | {"epoch": "1"},
        order | {"job_type": "POEM"},
        order | {"job_id": "a b"},
        order | {"job_id": "x" * 151},
        order | {"payload": {"query": ""}},
        order | {"payload": {"query": "x", "colour": "red"}},
        order | {"payload": []},
        order | {"deadline": "2026-01-01T00:00:00"},
        order | {"deadline": stand.in_s(10 * 86_400.0)},
    ]
    for body in wrong:
        answer = await working.post(body)
        assert answer.status_code == 422, (body, answer.text)
        assert answer.json()["detail"]
    assert await stand.executions() == 0


async def test_a_deadline_that_is_over_by_the_clock_here_may_come_again_with_a_later_one(stand: Stand):
    working, order = stand.backend(), stand.order()
    answer = await working.post(order | {"deadline": stand.in_s(-1.0)})
    assert (answer.status_code, answer.json()["code"]) == (409, "DEADLINE_OVER")
    assert error_of_refusal(answer.status_code, answer.content).retries, "for the orchestration layer that is no end"
    assert await stand.executions() == 0
    assert (await working.post(order)).status_code == 202


@pytest.mark.parametrize("body", [b"{", b"[" * 100, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff"])
async def test_unreadable_job_request_is_a_bad_request(stand: Stand, body: bytes):
    answer = (
        await stand.backend()
        .client(Role.ORCHESTRATOR)
        .post("/jobs/process", content=body, headers={"content-type": "application/json"})
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "BAD_REQUEST")


async def test_full_nlm_queue_is_429_with_retry_after(stand: Stand):
    working = stand.backend()
    object.__setattr__(working.backend.parts.intake, "waiting_max", 2)
    assert [(await working.post(stand.order())).status_code for _ in range(3)] == [202, 202, 503]
    answer = await working.post(stand.order())
    assert answer.json()["code"] == "OVERLOADED"
    assert int(answer.headers["retry-after"]) >= 1
    assert await stand.executions() == 2


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("NLM-5")
async def test_concurrent_requests_through_two_backends_are_one_execution(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'nlm.db'}"
    async with standing(url) as stand:
        also = await open_ledger(url, clock=stand.clock)
        first, second = stand.backend(), stand.backend(ledger=also)
        order = stand.order("job-m")
        answers = await asyncio.gather(*((first, second)[number % 2].post(order) for number in range(20)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.text for answer in answers}) == 1
        await asyncio.gather(first.work(), second.work())
        assert await stand.executions() == 1
        assert provider_calls(first.backend) + provider_calls(second.backend) == 1
        assert len(stand.gateway.of("job-m")) == 1
        await also.close()


@pytest.mark.requirement("NLM-5")
async def test_a_finished_job_is_answered_with_its_artifact_and_not_executed_again(stand: Stand):
    working, order = stand.backend(), stand.order("job-f", epoch=2)
    await working.post(order)
    await working.work()
    (callback,) = stand.gateway.of("job-f")
    for _ in range(2):
        answer = await stand.backend().post(order | {"deadline": stand.in_s(-1.0)})
        assert answer.status_code == 200
        assert answer.json() == callback
    await working.work()
    assert await stand.executions() == 1
    assert provider_calls(working.backend) == 1


@pytest.mark.requirement("NLM-5")
async def test_in_flight_the_same_request_gets_the_same_answer_wherever_the_job_is(stand: Stand):
    working, order = stand.backend(), stand.order("job-i")
    first = await working.post(order)
    for kind in ("snapshot", "artifact"):
        hold = stand.gateway.hold(kind)
        if not working.driving:
            await working.begin()
        await hold.arrived.wait()
        again = await stand.backend().post(order)
        assert (again.status_code, again.json()) == (first.status_code, first.json())
        hold.go.set()
    await working.finish()
    assert await stand.states("job-i@1") == WAY
    assert await stand.executions() == 1


@pytest.mark.requirement("NLM-5")
async def test_after_an_error_it_is_executed_again_once(stand: Stand):
    working, order = stand.backend({"status": 503}, {"extractive": True}), stand.order("job-r")
    await working.post(order)
    await working.work()
    answers = await asyncio.gather(*(working.post(order) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {202}
    await working.work()
    assert (await stand.states("job-r@1"))[-1] == "ERROR"
    assert await stand.states("job-r@1.2") == WAY
    assert await stand.executions() == 2
    assert [callback["status"] for callback in stand.gateway.of("job-r")] == ["FAILED", "COMPLETE"]


@pytest.mark.requirement("NLM-5", "D60")
async def test_repeated_job_request_returns_the_status_and_begins_no_job(stand: Stand):
    working, order = stand.backend({"status": 503}, {"extractive": True}), stand.order("job-l")
    orchestrator, path = working.client(Role.ORCHESTRATOR), "/jobs/job-l/executions/1"
    assert (await orchestrator.get(path)).status_code == 404
    taken = await working.post(order)
    looked = await orchestrator.get(path)
    assert (looked.status_code, looked.json()) == (202, taken.json())
    for _ in range(2):
        await working.work()
        told = await orchestrator.get(path)
        assert (told.status_code, told.json()) == (200, stand.gateway.of("job-l")[0])
    assert await stand.executions() == 1
    await working.post(order)
    await working.work()
    assert (await orchestrator.get(path)).json() == stand.gateway.of("job-l")[1]
    assert (await working.client(Role.OWNER).get(path)).status_code == 403


@pytest.mark.requirement("NLM-5", "D60")
async def test_staged_artifact_is_in_the_status_while_its_callback_cannot_be_delivered(stand: Stand):
    working, order = stand.backend(), stand.order("job-c", deadline=stand.in_s(100.0))
    stand.gateway.fail("callback", *[503] * 100)
    await working.post(order)
    await working.begin()
    await until(lambda: stand.gateway.count("callback") > 0)
    assert (await stand.states("job-c@1"))[-1] == "CALLBACK"
    (staged,) = stand.gateway.staged.values()
    async with asked(working) as backend:
        for _ in range(2):  # while it is tried, and after that was given up
            found = await backend.look(execution("job-c"))
            assert isinstance(found, JobFinished)
            assert (found.artifact_id, found.sha256) == (staged["artifact_id"], staged["sha256"])
            again = await working.post(order)
            assert (again.status_code, again.json()) == (200, found.model_dump())
            await working.finish()
    assert (await stand.states("job-c@1"))[-1] == "ERROR"
    assert await stand.executions() == 1
    other = await working.post(order | {"payload": {"query": "Another?"}})
    assert other.json()["code"] == "IDEMPOTENCY_MISMATCH"


@pytest.mark.requirement("D60")
async def test_status_shows_the_error_while_the_callback_is_undeliverable(stand: Stand):
    working, order = stand.backend({"status": 503}), stand.order("job-c")
    stand.gateway.fail("callback", *[503] * 100)
    await working.post(order)
    await working.begin()
    await until(lambda: stand.gateway.count("callback") > 0)
    async with asked(working) as backend:
        found = await backend.look(execution("job-c"))
    assert isinstance(found, JobFailedAnswer)
    assert found.error.code == "NLM_UNAVAILABLE"
    again = await working.post(order)
    assert (again.status_code, again.json()) == (200, found.model_dump())
    await working.die()


async def test_a_backend_with_a_certificate_of_a_private_authority_is_reached(stand: Stand, tmp_path: Path):
    certificates = make_certificates(tmp_path, "localhost", "127.0.0.1")
    served = replace(LOOPBACK, tls_cert_file=certificates.chain, tls_key_file=certificates.key)
    trusting = outgoing_tls(Settings.model_validate({"gateway_ca_file": certificates.authority}))
    async with asked(stand.backend(), served, trusting) as backend:
        with pytest.raises(ExecutionForgotten):
            await backend.look(execution("job-nobody"))
    async with asked(stand.backend(), served) as stranger:
        with pytest.raises(BackendUnavailable):
            await stranger.look(execution("job-nobody"))


@asynccontextmanager
async def asked(
    working: Working, options: ServerOptions = LOOPBACK, tls: ssl.SSLContext | None = TLS
) -> AsyncGenerator[NlmBackend]:
    """The orchestration layer's own client of this backend, over a socket."""
    place, ready, stop = listen(options, key_configured=True), asyncio.Event(), asyncio.Event()
    app = working.backend.app([KEY])
    serving = asyncio.ensure_future(serve_gateway(app, place, options, stop, ready=ready.set))
    await ready.wait()
    now = working.stand.clock()
    token = issue(KEY, name="orchestrator", roles=[Role.ORCHESTRATOR], ttl_s=3_600.0, now=now)
    backend = NlmBackend(place.url, lambda: token, tls)
    try:
        yield backend
    finally:
        await backend.close()
        stop.set()
        await serving


def execution(job_id: str, epoch: int = 1) -> ExecutionRequest:
    """As much of it as a look needs."""
    request = QueueRequest(run_id="r", job_type=JobType.RESEARCH, agent_slug="a", payload={}, entity_refs=())
    return ExecutionRequest(
        job_id=job_id,
        epoch=epoch,
        request=request,
        context_snapshot_url="",
        callback_url="",
        deadline=datetime(2030, 1, 1, tzinfo=UTC),
        correlation_id="c",
    )


# -- stopped -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D60")
async def test_job_that_is_no_longer_wanted_is_stopped_on_request(stand: Stand):
    working = stand.backend()
    client, path = working.client(Role.ORCHESTRATOR), "/jobs/job-s/executions/1"
    assert (await working.client(Role.OWNER).delete(path)).status_code == 403
    assert (await client.delete(path)).json()["execution"] == "unknown"
    await working.post(stand.order("job-s"))
    hold = stand.gateway.hold("snapshot")
    await working.begin()
    await hold.arrived.wait()
    for epoch, status in ((1, 202), (1, 202), (2, 404)):
        assert (await client.delete(f"/jobs/job-s/executions/{epoch}")).status_code == status
    assert (await stand.states("job-s@1"))[-1] == "FETCHING_CONTEXT", "it is asked first"
    await working.backend.holder.renew()
    await working.finish()
    assert (await stand.states("job-s@1"))[-1] == "ERROR"
    assert stand.gateway.of("job-s")[0]["error"]["code"] == "CANCELLED"
    assert (await client.delete(path)).json() == {"job_id": "job-s", "epoch": 1, "executions": 0}


async def test_job_that_ignores_a_soft_cancel_is_ended_after_its_grace(stand: Stand):
    working = stand.backend()
    await working.post(stand.order("job-s"))
    hold = stand.gateway.hold("snapshot")
    await working.begin()
    await hold.arrived.wait()
    await working.client(Role.ORCHESTRATOR).delete("/jobs/job-s/executions/1")
    await working.die()
    for _ in range(40):
        stand.clock.advance(1.0)
        await stand.sweep()
    assert (await stand.states("job-s@1"))[-1] == "ERROR"


# -- one ledger, several gateways --------------------------------------------------------------------------------------


async def test_backends_of_different_gateways_on_one_ledger_leave_each_others_work_alone(stand: Stand):
    async with gateway_on_loopback(FakeGateway(KEY, stand.clock)) as other:
        there = replace(stand, gateway=other)
        ours, theirs = stand.backend(), there.backend()
        await ours.post(stand.order("job-1"))
        await theirs.post(there.order("job-2"))
        health = (await ours.client().get("/health")).json()
        assert (health["waiting"], health["under_way"]) == (2, 0)
        assert "trellis_nlm_queue_waiting 2.0" in (await theirs.client().get("/metrics")).text
        await theirs.work()
        assert await stand.states("job-1@1") == ["ACCEPTED"]
        await ours.work()
        for job_id, gateway in (("job-1", stand.gateway), ("job-2", other)):
            assert await stand.states(f"{job_id}@1") == WAY
            assert [callback["status"] for callback in gateway.of(job_id)] == ["COMPLETE"]
        assert (await ours.post(there.order("job-3"))).status_code == 422


@pytest.mark.parametrize(
    "origin,type_",
    [
        ("http://127.0.0.1:18430", "nlm:http:127.0.0.1:18430"),
        ("https://[::1]:443", "nlm:https:::1:443"),
        ("https://gateway.example:443", "nlm:https:gateway.example:443"),
    ],
)
def test_a_type_names_the_origin_of_a_gateway(origin: str, type_: str):
    assert type_of(origin) == type_
    assert re.fullmatch(TYPE_PATTERN, type_)
    assert re.fullmatch(TYPE_PATTERN, type_of(f"https://{'a.' * 126}b:443"))


@pytest.mark.requirement("NLM-5")
async def test_different_nlm_request_for_the_same_job_and_epoch_is_refused(stand: Stand):
    working, order = stand.backend(), stand.order("job-x")
    await working.post(order)
    for changed in (
        {"payload": {"query": "Another?"}},
        {"job_type": "BRIEF"},
        {"callback_url": f"{stand.gateway.url}/y"},
    ):
        answer = await working.post(order | changed)
        assert (answer.status_code, answer.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
    assert (await working.post(order | {"deadline": stand.in_s(500.0)})).status_code == 202
    assert await stand.executions() == 1


@pytest.mark.requirement("NLM-5")
async def test_an_older_epoch_is_refused_also_when_both_come_at_once(stand: Stand):
    working = stand.backend()
    await working.post(stand.order("job-o", epoch=5))
    answer = await working.post(stand.order("job-o", epoch=4))
    assert (answer.status_code, answer.json()["code"]) == (409, "LEASE_LOST")
    orders = [stand.order("job-p", epoch=epoch) for epoch in range(1, 9)]
    await asyncio.gather(*((working, stand.backend())[order["epoch"] % 2].post(order) for order in orders))
    opened = {
        order["epoch"]
        for order in orders
        if (states := await stand.states(f"job-p@{order['epoch']}")) and states[-1] != "ERROR"
    }
    assert opened == {8}
    await working.work()
    assert [callback["epoch"] for callback in stand.gateway.of("job-p")] == [8]


@pytest.mark.requirement("NLM-5")
async def test_a_zombie_that_finishes_after_a_newer_epoch_began_is_refused_everywhere(stand: Stand):
    """The newer epoch comes to another backend with another ledger: this one knows nothing, and the gateway refuses it."""
    zombie = stand.backend()
    hold = stand.gateway.hold("artifact")
    await zombie.post(stand.order("job-z", epoch=1))
    await zombie.begin()
    await hold.arrived.wait()
    stand.gateway.epochs["job-z"] = 2
    hold.go.set()
    await zombie.finish()
    assert (await stand.states("job-z@1"))[-1] == "ERROR"
    assert stand.gateway.refused == [("artifact", 1)]
    late = stand.backend()
    hold = stand.gateway.hold("callback")
    await late.post(stand.order("job-y", epoch=1))
    await late.begin()
    await hold.arrived.wait()
    stand.gateway.epochs["job-y"] = 2
    hold.go.set()
    await late.finish()
    assert (await stand.states("job-y@1"))[-2:] == ["CALLBACK", "ERROR"]
    assert stand.gateway.refused[-1] == ("callback", 1)
    assert not stand.gateway.of("job-y")


@pytest.mark.requirement("NLM-5")
async def test_older_execution_does_not_run_beside_a_newer_epoch(stand: Stand):
    """As when a backend died between taking the newer one in and cancelling the older one."""
    working = stand.backend()
    hold = stand.gateway.hold("snapshot")
    await working.post(stand.order("job-k", epoch=1))
    await working.begin()
    await hold.arrived.wait()
    order = ProcessRequest.model_validate(stand.order("job-k", epoch=2))
    intake = working.backend.parts.intake
    object.__setattr__(intake, "_cancel_older", _nothing)
    await intake.take(order, correlation_id="c")
    await working.begin()
    assert await stand.states("job-k@2") == ["ACCEPTED"]
    assert len(working.driving) == 1
    hold.go.set()
    await until(lambda: not working.driving)


async def _nothing(_: object) -> None:
    return None


# -- the decision ------------------------------------------------------------------------------------------------------


def _request(epoch: int) -> ProcessRequest:
    return ProcessRequest.model_validate(
        {
            "job_id": "j",
            "job_type": "RESEARCH",
            "agent_slug": "a",
            "payload": {},
            "context_snapshot_url": "http://g/s",
            "callback_url": "http://g/c",
            "deadline": "2026-01-01T00:00:00Z",
            "epoch": epoch,
        }
    )


def _known(epoch: int, execution: int, state: str) -> KnownExecution:
    return KnownExecution(execution_id("j", epoch, execution), epoch, execution, state)


def test_stored_executions_decide_about_a_repeated_request():
    assert decide_intake([], _request(3)) == 1
    assert decide_intake([_known(2, 1, "DONE")], _request(3)) == 1
    assert decide_intake([_known(3, 1, "ERROR"), _known(3, 2, "ERROR")], _request(3)) == 3
    for state in ("ACCEPTED", "NLM_QUERY", "DONE"):
        assert decide_intake([_known(3, 2, state), _known(3, 1, "ERROR")], _request(3)) == _known(3, 2, state)
    with pytest.raises(StaleEpoch):
        decide_intake([_known(4, 1, "ERROR")], _request(3))
    with pytest.raises(ExecutionsSpent):
        decide_intake([_known(3, EXECUTIONS_MAX, "ERROR")], _request(3))


@pytest.mark.parametrize("job_id", ["j", "a@1", "a@1.2", "x.y:z-1"])
@pytest.mark.parametrize("epoch,execution", [(0, 1), (7, 2), (2**53 - 1, 20)])
def test_the_id_of_an_execution_names_job_epoch_and_number(job_id: str, epoch: int, execution: int):
    assert read_execution_id(execution_id(job_id, epoch, execution)) == (job_id, epoch, execution)


async def test_correlation_id_reaches_the_callback(stand: Stand):
    working = stand.backend()
    await working.post(stand.order("job-q"), headers={"x-correlation-id": "corr-17"})
    await working.work()
    assert {headers["x-correlation-id"] for _, headers in stand.gateway.requests} == {"corr-17"}
    assert {event.correlation_id for event in await stand.ledger.events("job-q@1")} == {"corr-17"}  # type: ignore[arg-type]
    assert json.loads((await stand.ledger.events("job-q@1"))[-1].data or b"")["status"] == "COMPLETE"  # type: ignore[arg-type]

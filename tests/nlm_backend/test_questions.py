"""Questions of the agent's tool, and what anybody may see of a backend: health and metrics, never a secret."""

import asyncio
import logging

import pytest

from tests.nlm_backend.conftest import KEY, Stand, until
from tests.nlm_backend.gatewaying import SECRET
from trellis.lifecycles import Role
from trellis.nlm.provider import PASSAGES_MAX, Language
from trellis.nlm_backend.app import QUERY_S

TEXT = "The violin was made by Anna Koval in Lviv in 1887."
ASKED = {"question": "Who made the violin?", "sources": [{"ref": "label.md", "text": TEXT}]}


@pytest.mark.requirement("NLM-7", "NLM-8")
async def test_question_is_answered_with_verified_citations(stand: Stand):
    answer = await stand.backend().client(Role.AGENT_RUNTIME).post("/query", json=ASKED)
    assert answer.status_code == 200
    said = answer.json()
    assert "Anna Koval" in said["answer"]
    assert said["confident"] is True
    (cited,) = said["citations"]
    assert TEXT[cited["start"] : cited["end"]] == cited["excerpt"]


@pytest.mark.requirement("NLM-7")
async def test_question_reaches_the_provider_in_the_language_and_with_the_passages_that_were_asked_for(stand: Stand):
    working = stand.backend({"extractive": True})
    client = working.client(Role.OWNER)
    answer = await client.post("/query", json={**ASKED, "language": "uk", "max_passages": 2})
    assert answer.status_code == 200
    (question,) = working.provider.asked
    assert (question.language, question.max_passages) == (Language.UKRAINIAN, 2)
    refused = await client.post("/query", json={**ASKED, "max_passages": PASSAGES_MAX + 1})
    assert (refused.status_code, refused.json()["code"]) == (422, "VALIDATION_FAILED")


@pytest.mark.requirement("NLM-7")
async def test_answer_not_grounded_in_the_sources_is_flagged_and_loses_its_citations(stand: Stand):
    reply = {
        "answer": "It was Stradivari.",
        "citations": [{"ref": "label.md", "excerpt": "made by Antonio Stradivari"}],
    }
    answer = await stand.backend({"answer": reply}).client(Role.OWNER).post("/query", json=ASKED)
    said = answer.json()
    assert (said["citations"], said["confident"]) == ([], False)
    assert "ungrounded" in said["flags"]


@pytest.mark.requirement("NLM-7", "D7")
async def test_a_question_is_tried_again_and_then_the_provider_is_unavailable(stand: Stand):
    working = stand.backend({"status": 503}, {"extractive": True})
    asking = working.client(Role.OWNER).post("/query", json=ASKED)
    task = asyncio.ensure_future(asking)
    await until(lambda: len(working.provider.asked) == 1)
    await until(lambda: stand.clock.sleeping == 2)  # the limit of it all, and the pause before the next try
    stand.clock.advance(1.0)
    assert (await task).status_code == 200
    refused = await stand.backend({"status": 400}).client(Role.OWNER).post("/query", json=ASKED)
    assert (refused.status_code, refused.json()["code"]) == (502, "NLM_UNAVAILABLE")


@pytest.mark.requirement("RUN-7", "NLM-7")
async def test_a_provider_that_takes_too_long_is_504_and_one_that_fails_is_502(stand: Stand):
    working = stand.backend({"after_s": 600.0, "extractive": True})
    task = asyncio.ensure_future(working.client(Role.OWNER).post("/query", json=ASKED))
    await until(lambda: len(working.provider.asked) == 1 and stand.clock.sleeping)
    stand.clock.advance(QUERY_S)
    late = await task
    assert (late.status_code, late.json()["code"], late.headers["retry-after"]) == (504, "AGENT_TIMEOUT", "1")
    assert "did not answer in time" in late.json()["detail"]
    refused = await stand.backend({"status": 400}).client(Role.OWNER).post("/query", json=ASKED)
    assert (refused.status_code, refused.json()["code"]) == (502, "NLM_UNAVAILABLE")


@pytest.mark.requirement("NLM-7", "AUTH-2")
async def test_questions_require_a_role_that_acts_for_agents(stand: Stand):
    working = stand.backend()
    for role in Role:
        answer = await working.client(role).post("/query", json=ASKED)
        allowed = role in {Role.AGENT_RUNTIME, Role.ORCHESTRATOR, Role.OWNER}
        assert answer.status_code == (200 if allowed else 403), role


async def test_a_question_that_cannot_be_asked_is_refused(stand: Stand):
    client = stand.backend().client(Role.OWNER)
    twice = [{"ref": "a", "text": "x"}, {"ref": "a", "text": "y"}]
    for body in (
        {},
        ASKED | {"x": 1},
        ASKED | {"question": " "},
        ASKED | {"sources": twice},
        ASKED | {"sources": [{}]},
    ):
        assert (await client.post("/query", json=body)).status_code == 422


async def test_metrics_count_jobs_calls_and_callbacks(stand: Stand):
    working = stand.backend({"extractive": True}, {"status": 503})
    stand.gateway.fail("callback", 500)
    for name in ("job-1", "job-2"):
        await working.post(stand.order(name))
        await working.work()
    await working.post(stand.order("job-3"))
    answer = await working.client().get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    for line in (
        'trellis_nlm_jobs_total{outcome="DONE"} 1.0',
        'trellis_nlm_jobs_total{outcome="NLM_UNAVAILABLE"} 1.0',
        'trellis_nlm_provider_calls_total{result="answered"} 1.0',
        'trellis_nlm_provider_calls_total{result="unavailable"} 1.0',
        'trellis_nlm_callbacks_total{result="2xx"} 2.0',
        'trellis_nlm_callbacks_total{result="5xx"} 1.0',
        'trellis_nlm_provider_seconds_bucket{le="+Inf"} 2.0',
        "trellis_nlm_provider_seconds_count 2.0",
        'trellis_nlm_stage_seconds_count{stage="STRUCTURING"} 1.0',
        "trellis_nlm_queue_waiting 1.0",
        "trellis_nlm_queue_held 0.0",
        "trellis_nlm_circuit_open 0.0",
    ):
        assert line in lines, line
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    told = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names} <= told
    assert (await working.client().get("/health")).json() == {
        "status": "ok",
        "circuit": "closed",
        "waiting": 1,
        "under_way": 0,
    }


async def test_no_secret_is_in_logs_health_metrics_or_problems(stand: Stand, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    working = stand.backend({"status": 503}, {"extractive": True})
    stand.gateway.fail("callback", 500)
    stand.gateway.fail("artifact", 403)
    query = "?token=do-not-tell-anybody"
    order = stand.order("job-1")
    told = [
        await working.post(order),
        await working.post(stand.order("job-u", context_snapshot_url=f"ftp://x/{query}")),
    ]
    await working.work()
    await working.post(stand.order("job-2") | {"context_snapshot_url": order["context_snapshot_url"] + query})
    await working.work()
    told += [await working.client().get(path) for path in ("/health", "/metrics", "/openapi.json")]
    told.append(await working.client(Role.WORKER).post("/query", json=ASKED))
    secrets = {SECRET.decode(), SECRET.hex(), KEY.key.raw_value.decode(), "do-not-tell-anybody"}  # type: ignore[union-attr]
    secrets |= {
        token.removeprefix("Bearer ")
        for kind in ("snapshot", "artifact")
        for token in stand.gateway.tokens(kind)
        if token
    }
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("trellis")]
    assert ours
    seen = "".join(ours) + "".join(answer.text for answer in told)
    assert len(secrets) > 5
    assert [secret for secret in secrets if secret in seen] == []

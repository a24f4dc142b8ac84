"""Whatever the NLM backend answers, a job takes the path of its lifecycle and no other; no more is asked than attempts allow."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from tests.research.holding import STAGES
from tests.research.rig import Looks, Nlm, Rig, accept_only, draft, finish, saying, seconds_to_due, under_way
from trellis.artifacts.content import JobType
from trellis.research.backend_client import (
    ExecutionRequest,
    ExecutionUnderWay,
    JobFailedAnswer,
    JobFailure,
    JobFinished,
    NlmBackend,
)
from trellis.research.errors import BackendUnavailable, ExecutionForgotten, NlmAnswerInvalid, StageError, StageHopeless
from trellis.research.queue_job import QueueRequest

EXECUTION = ExecutionRequest(
    job_id="j",
    epoch=3,
    request=QueueRequest(run_id="r", job_type=JobType.RESEARCH, agent_slug="a", payload={}, entity_refs=()),
    context_snapshot_url="",
    callback_url="",
    deadline=datetime.fromtimestamp(0, UTC),
    correlation_id="c",
)
RETRIED = ["PENDING", "QUEUED", "CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "RETRY_BACKOFF"]


@asynccontextmanager
async def server(answers: list[bytes]) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """A server that gives these bytes, one after the other, and hangs up each time."""
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        if head.startswith(b"DELETE"):
            writer.write(http("404 Not Found"))
        else:
            heard.append(head + await reader.readexactly(length))
            writer.write(answers[len(heard) - 1])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", heard
    finally:
        listening.close()
        await listening.wait_closed()


def http(status: str, body: Any = "", **headers: str) -> bytes:
    told = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(told)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + told


ANSWERS = {
    "429": (http("429 Too Many Requests", Retry_After="120"), "RATE_LIMIT", False),
    "503": (http("503 Service Unavailable", {"detail": "full"}), "NLM_UNAVAILABLE", False),
    "500": (http("500 Oops", "<html>"), "NLM_UNAVAILABLE", False),
    "garbage": (http("202 Accepted", "garbage"), "NLM_UNAVAILABLE", False),
    "about another job": (http("202 Accepted", {"accepted": True, "job_id": "another"}), "NLM_UNAVAILABLE", False),
    "half a result": (http("200 OK", {"job_id": "another", "status": "COMPLETE"}), "NLM_UNAVAILABLE", False),
    "a redirect": (http("302 Found", Location="http://127.0.0.1:1/"), "NLM_UNAVAILABLE", False),
    "too much": (http("202 Accepted", b" " * 100_000), "NLM_UNAVAILABLE", False),
    "half an answer": (b"HTTP/1.1 202 Accepted\r\nContent-Length: 500\r\n\r\n{", "NLM_UNAVAILABLE", False),
    "no HTTP": (b"\x00\x01 this is not HTTP\r\n\r\n", "NLM_UNAVAILABLE", False),
    "nothing": (b"", "NLM_UNAVAILABLE", False),
    "409": (http("409 Conflict", {"detail": "a newer epoch"}), "NLM_UNAVAILABLE", False),
    "400": (http("400 Bad Request", {"detail": "malformed"}), "VALIDATION_ERROR", True),
    "422": (http("422 Unprocessable", {"detail": "unknown field"}), "VALIDATION_ERROR", True),
    "401": (http("401 Unauthorized", {"detail": "not valid yet"}), "NLM_REFUSED", False),
    "403": (http("403 Forbidden"), "NLM_REFUSED", False),
}
FIELDS = "job_id job_type agent_slug payload context_snapshot_url callback_url deadline epoch"


@pytest.mark.requirement("JQ-9", "D8", "D7", "D59")
async def test_an_answer_that_is_no_result_takes_the_path_of_the_table(rig: Rig):
    async with server([answer for answer, _, _ in ANSWERS.values()]) as (url, heard):
        rig.orchestrator.driver.backend = NlmBackend(url, lambda: "a-token")
        for number, (named, (_, code, final)) in enumerate(ANSWERS.items(), 1):
            job_id = await rig.submit()
            await rig.work(job_id, "FAILED" if final else "RETRY_BACKOFF")
            await _took_its_path(rig, named, job_id, code, final=final)
            assert len(heard) == number, f"{named}: nothing is asked twice inside an attempt"
            head, _, body = heard[-1].partition(b"\r\n\r\n")
            assert head.startswith(b"POST /jobs/process HTTP/1.1")
            assert b"bearer a-token" in head.lower()
            assert sorted(json.loads(body)) == sorted(FIELDS.split())


async def _took_its_path(rig: Rig, named: str, job_id: str, code: str, *, final: bool) -> None:
    job = await rig.job(job_id)
    assert await rig.path(job_id) == [*RETRIED, *(["FAILED"] if final else [])], named
    assert job["error"].startswith(f"{code}: "), (named, job["error"])
    if not final:
        assert seconds_to_due(job) == 15.0, f"{named}: no other wait than the table's"
        await rig.cancel(job_id)


@pytest.mark.requirement("JQ-9")
async def test_absent_nlm_backend_is_worth_another_attempt(rig: Rig):
    async with server([]) as (url, _):
        pass
    rig.orchestrator.driver.backend = NlmBackend(url, lambda: "a-token")
    job = await rig.work(await rig.submit(), "RETRY_BACKOFF")
    assert job["error"].startswith("NLM_UNAVAILABLE: ")


@pytest.mark.requirement("D8", "D26", "JQ-6")
async def test_a_failed_callback_is_retried_unless_it_is_permanent(rig: Rig):
    for code in ("RATE_LIMIT", "CONTEXT_TIMEOUT", "INTERRUPTED", "VALIDATION_ERROR"):
        final = code == "VALIDATION_ERROR"
        rig.nlm.answer = saying(code, "as it says")
        job_id = await rig.submit()
        await rig.work(job_id, "FAILED" if final else "RETRY_BACKOFF")
        assert (await rig.job(job_id))["error"] == f"{code}: as it says"
        await _took_its_path(rig, code, job_id, code, final=final)


@pytest.mark.requirement("NLM-6", "D8", "D60")
async def test_missed_callback_is_replaced_by_a_status_request_and_no_second_question(rig: Rig):
    stands = iter([accept_only, _down, _with_result])

    async def look(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay | JobFinished:
        return await next(stands)(nlm, execution)

    rig.nlm.answer, rig.nlm.stands = accept_only, look
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: len(rig.nlm.asked) == 1)
    began = rig.clock()
    await rig.pass_until(lambda: len(rig.nlm.looked) == 3)
    assert rig.clock() - began >= 30.0, "every ten seconds, and not before"
    done = await rig.work(job_id, "COMPLETE")
    assert (len(rig.nlm.asked), done["attempt"]) == (1, 0)
    assert await rig.path(job_id) == ["PENDING", "QUEUED", *STAGES, "COMPLETE"]


@pytest.mark.requirement("NLM-6", "D8")
async def test_a_job_that_its_backend_forgot_or_failed_takes_the_path_of_the_table(rig: Rig):
    async def forgot(_: Nlm, __: ExecutionRequest) -> ExecutionUnderWay:
        raise ExecutionForgotten(detail="lost")

    def failed(code: str) -> Looks:
        async def look(_: Nlm, one: ExecutionRequest) -> JobFailedAnswer:
            error = JobFailure(code=code, message="as it says")
            return JobFailedAnswer(job_id=one.job_id, epoch=one.epoch, status="FAILED", error=error)

        return look

    rig.nlm.answer = accept_only
    cases = [
        (forgot, "NLM_UNAVAILABLE"),
        (failed("RATE_LIMIT"), "RATE_LIMIT"),
        (failed("VALIDATION_ERROR"), "VALIDATION_ERROR"),
    ]
    for looked, code in cases:
        rig.nlm.stands = looked
        final, job_id, before = code == "VALIDATION_ERROR", await rig.submit(), len(rig.nlm.asked)
        await rig.work(job_id, "NOTEBOOKLM_CALL")
        rig.nlm.looked.clear()
        await rig.pass_until(lambda: bool(rig.nlm.looked))
        await rig.work(job_id, "FAILED" if final else "RETRY_BACKOFF")
        await _took_its_path(rig, code, job_id, code, final=final)
        assert len(rig.nlm.asked) == before + 1


LOOKS = {
    "at it": (http("202 Accepted", {"accepted": True, "job_id": "j"}), ExecutionUnderWay),
    "done": (
        http(
            "200 OK",
            {"job_id": "j", "epoch": 3, "status": "COMPLETE", "artifact_id": "a", "sha256": "0" * 64, "size": 1},
        ),
        JobFinished,
    ),
    "failed": (
        http("200 OK", {"job_id": "j", "epoch": 3, "status": "FAILED", "error": {"code": "X", "message": ""}}),
        JobFailedAnswer,
    ),
    "forgotten": (http("404 Not Found", {"code": "NOT_FOUND", "execution": "unknown"}), ExecutionForgotten),
    "no such address": (http("404 Not Found", {"code": "NOT_FOUND"}), StageHopeless),
    "another epoch": (
        http("200 OK", {"job_id": "j", "epoch": 2, "status": "FAILED", "error": {"code": "X", "message": ""}}),
        NlmAnswerInvalid,
    ),
}


@pytest.mark.requirement("NLM-6", "D60")
async def test_status_poll_returns_the_state_of_an_execution(rig: Rig):
    async with server([answer for answer, _ in LOOKS.values()]) as (url, heard):
        backend = NlmBackend(url, lambda: "a-token")
        for named, (_, expected) in LOOKS.items():
            try:
                found: object = await backend.look(EXECUTION)
            except StageError as error:
                found = error
            assert type(found) is expected, named
            assert heard[-1].startswith(b"GET /jobs/j/executions/3 HTTP/1.1")
        await backend.close()


async def _down(_: Nlm, __: ExecutionRequest) -> ExecutionUnderWay:
    raise BackendUnavailable(detail="503")


async def _with_result(nlm: Nlm, execution: ExecutionRequest) -> JobFinished:
    told = (await nlm.stage(execution)).json()
    facts = {name: told[name] for name in ("artifact_id", "sha256", "size")}
    return JobFinished(job_id=execution.job_id, epoch=execution.epoch, status="COMPLETE", **facts)


@pytest.mark.requirement("ART-4")
async def test_a_backend_that_answers_twice_has_one_effect(rig: Rig):
    async def twice(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        staged, again = await nlm.stage(execution), await nlm.stage(execution)
        assert (staged.status_code, again.status_code) == (201, 200)
        assert again.json()["artifact_id"] == staged.json()["artifact_id"]
        first = await nlm.complete(execution, staged)
        nlm.rig.clock.advance(1.0)
        second = await nlm.call_back(
            execution, id_="other", status="FAILED", error={"code": "RATE_LIMIT", "message": ""}
        )
        assert (first.status_code, second.status_code) == (202, 202)
        return under_way(execution)

    rig.nlm.answer = twice
    job_id = await rig.submit()
    done = await rig.work(job_id, "COMPLETE", "RETRY_BACKOFF")
    assert done["status"] == "COMPLETE", "the first callback counts"
    listed = (await rig.owner.get(f"/artifacts?job_id={job_id}")).json()["items"]
    assert [one["artifact_id"] for one in listed] == [done["artifact_id"]]


MISMATCHES: list[dict[str, Any]] = [
    {"sha256": "0" * 64},
    {"size": 1},
    {"artifact_id": "art-00000000-0000-4000-8000-000000000000"},
]


@pytest.mark.requirement("JQ-13", "JQ-9", "D8", "D15")
async def test_staged_artifact_must_match_the_announced_one(rig: Rig):
    announced = iter(MISMATCHES)

    async def answer(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        changed = next(announced, {})
        assert (await nlm.complete(execution, await nlm.stage(execution), **changed)).status_code == 202
        return under_way(execution)

    rig.nlm.answer = answer
    job_id = await rig.submit()
    for backoff_s in (15.0, 30.0, 60.0):
        job = await rig.work(job_id, "RETRY_BACKOFF")
        assert (job["error"].partition(":")[0], job["artifact_id"]) == ("HASH_MISMATCH", None)
        assert (await rig.owner.get(f"/artifacts?job_id={job_id}")).json()["items"] == []
        await rig.leap(backoff_s)
    done = await rig.work(job_id, "COMPLETE")
    assert done["attempt"] == 3, "the last attempt may succeed"
    assert done["artifact_id"] is not None


@pytest.mark.requirement("NLM-5", "D2")
async def test_an_artifact_that_an_older_execution_staged_is_not_taken(rig: Rig):
    """The callback is of this execution and signed; the artifact it names was made for an epoch that lost its lease."""
    staged: list[httpx2.Response] = []
    seen = asyncio.Event()

    async def answer(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        if not staged:
            staged.append(await nlm.stage(execution))
        else:
            await seen.wait()
            assert (await nlm.complete(execution, staged[0])).status_code == 202
        return under_way(execution)

    rig.nlm.answer = answer
    job_id = await rig.submit()
    await rig.work(job_id, "NOTEBOOKLM_CALL")
    await rig.until(lambda: bool(staged))
    await rig.lose_leases()
    assert (await rig.work(job_id, "NOTEBOOKLM_CALL"))["attempt"] == 1
    seen.set()
    job = await rig.work(job_id, "RETRY_BACKOFF", "COMPLETE")
    assert (job["status"], job["artifact_id"], job["error"].partition(":")[0]) == (
        "RETRY_BACKOFF",
        None,
        "HASH_MISMATCH",
    )
    assert "is of job" in job["error"]


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "RESEARCH": ({"query": "Who made it?"}, "RESEARCH_BRIEF"),
    "BRIEF": ({"vision_text": "A calm piece", "entity_refs": ["bow"]}, "BRIEF"),
    "PROPOSAL_PREPROCESS": ({"proposal_draft": {"target": "notes/a.md"}}, "PREPROCESSED_PROPOSAL"),
}


@pytest.mark.requirement("JQ-13")
async def test_each_type_of_job_yields_its_type_of_artifact_and_no_other(rig: Rig):
    refused: list[int] = []

    async def answer(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
        mine = draft(execution)
        other = "BRIEF" if mine["type"] != "BRIEF" else "RESEARCH_BRIEF"
        refused.append((await nlm.stage(execution, type=other)).status_code)
        return await finish(nlm, execution)

    rig.nlm.answer = answer
    for job_type, (payload, yields) in KINDS.items():
        done = await rig.work(await rig.submit(job_type=job_type, payload=payload), "COMPLETE")
        assert (await rig.owner.get(f"/artifacts/{done['artifact_id']}")).json()["type"] == yields
    assert refused == [422, 422, 422]

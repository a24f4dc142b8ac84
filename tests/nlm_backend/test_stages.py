"""Every transition of an nlm-job, reached over HTTP: the way to DONE, and every way into ERROR (NLM-1 to NLM-4, NLM-9)."""

import json

import pytest

from tests.nlm_backend.conftest import AGENT, Stand, provider_calls, until
from trellis.lifecycles.nlm_job import HELD

WAY = ["ACCEPTED", *HELD, "DONE"]


@pytest.mark.requirement("NLM-1", "NLM-2", "NLM-4", "NLM-9")
async def test_a_job_goes_through_every_stage_and_its_artifact_is_staged_and_called_back(stand: Stand):
    working, order = stand.backend(), stand.order("job-a", epoch=3)
    answer = await working.post(order)
    assert answer.status_code == 202
    assert answer.json() == {"accepted": True, "job_id": "job-a", "estimated_seconds": 5}
    assert await stand.states("job-a@3") == ["ACCEPTED"]
    await working.work()
    assert await stand.states("job-a@3") == WAY
    staged = stand.gateway.staged["job-a", 3]
    (callback,) = stand.gateway.of("job-a")
    assert callback == {
        "job_id": "job-a",
        "epoch": 3,
        "status": "COMPLETE",
        "artifact_id": staged["artifact_id"],
        "artifact_url": f"{stand.gateway.url}/artifacts/{staged['artifact_id']}",
        "sha256": staged["sha256"],
        "size": staged["size"],
    }
    content = staged["asked"]
    assert (content["type"], content["epoch"]) == ("RESEARCH_BRIEF", 3)
    assert "Anna Koval" in json.dumps(content["content"])
    assert {source["ref"] for source in content["sources"]} <= {"label.md", "letters.md"}
    assert provider_calls(working.backend) == 1


@pytest.mark.requirement("NLM-9", "NLM-2")
async def test_the_prompt_is_made_of_the_snapshot_and_the_query(stand: Stand):
    working = stand.backend()
    await working.post(stand.order(payload={"query": "When was the violin sold?"}))
    await working.work()
    (question,) = working.provider.asked
    assert "When was the violin sold?" in question.text
    assert {source.ref for source in question.sources} == {"label.md", "letters.md"}


@pytest.mark.requirement("NLM-3")
@pytest.mark.parametrize(
    "step,code",
    [
        ({"status": 429}, "RATE_LIMIT"),
        ({"status": 429, "retry_after_s": 7}, "RATE_LIMIT"),
        ({"status": 503, "retry_after_s": 7}, "RATE_LIMIT"),
        ({"status": 503}, "NLM_UNAVAILABLE"),
        ({"status": 400}, "VALIDATION_ERROR"),
        ({"raw": "<html>garbage</html>"}, "GARBAGE"),
        ({"answer": {"answer": "Anna Koval", "citations": []}, "shape": "half"}, "GARBAGE"),
        ({"raw": ""}, "GARBAGE"),
    ],
)
async def test_provider_error_is_reported_by_a_failed_callback_and_asked_once(
    stand: Stand, step: dict[str, object], code: str
):
    working, order = stand.backend(step), stand.order("job-b")
    await working.post(order)
    await working.work()
    assert await stand.states("job-b@1") == ["ACCEPTED", *HELD[:3], "ERROR"]
    (callback,) = stand.gateway.of("job-b")
    assert (callback["status"], callback["error"]["code"]) == ("FAILED", code)
    assert callback["error"]["message"]
    assert provider_calls(working.backend) == 1
    assert not stand.gateway.staged


async def test_an_answer_given_twice_in_one_reply_counts_once(stand: Stand):
    reply = {
        "answer": "Anna Koval made it.",
        "citations": [{"ref": "label.md", "excerpt": "The violin was made by Anna Koval in Lviv in 1887."}],
    }
    working = stand.backend({"answer": reply, "shape": "twice"})
    await working.post(stand.order("job-t"))
    await working.work()
    assert await stand.states("job-t@1") == WAY
    assert len(stand.gateway.of("job-t")) == 1


@pytest.mark.requirement("NLM-3")
async def test_provider_call_times_out(stand: Stand):
    working = stand.backend({"after_s": 3_600, "answer": {"answer": "late"}})
    await working.post(stand.order("job-s"))
    await working.begin()
    await until(lambda: working.provider.asked)
    await working.pass_time(121.0)
    await working.finish()
    (callback,) = stand.gateway.of("job-s")
    assert callback["error"]["code"] == "NLM_UNAVAILABLE"
    assert (await stand.states("job-s@1"))[-1] == "ERROR"


@pytest.mark.requirement("NLM-3")
async def test_a_job_that_runs_out_of_time_says_so_before_its_deadline(stand: Stand):
    working = stand.backend({"after_s": 3_600, "answer": {"answer": "late"}})
    await working.post(stand.order("job-d", deadline=stand.in_s(40.0)))
    await working.begin()
    await until(lambda: working.provider.asked)
    await working.pass_time(35.5)
    await working.finish()
    (callback,) = stand.gateway.of("job-d")
    assert callback["error"]["code"] == "DEADLINE"


@pytest.mark.requirement("NLM-3")
@pytest.mark.parametrize("state", ["ACCEPTED", *HELD])
async def test_from_every_state_a_passed_deadline_is_an_error(stand: Stand, state: str):
    working = stand.backend({"after_s": 86_000, "answer": {"answer": "late"}})
    kind = {"FETCHING_CONTEXT": "snapshot", "STRUCTURING": "artifact", "CALLBACK": "callback"}.get(state)
    if state not in {"ACCEPTED", "NLM_QUERY"}:
        working = stand.backend(ledger=_StoppingIn(stand.ledger, state))  # type: ignore[arg-type]
    hold = None if kind is None else stand.gateway.hold(kind)
    await working.post(stand.order("job-e", deadline=stand.in_s(10_000.0)))
    if state != "ACCEPTED":
        await working.begin()
        await until(lambda: hold.arrived.is_set() if hold else working.provider.asked or state == "BUILDING_PROMPT")
        if state == "BUILDING_PROMPT":
            await until(lambda: working.backend.ledger.stopped)  # type: ignore[attr-defined]
    stand.clock.advance(10_001.0)
    await stand.sweep()
    assert (await stand.states("job-e@1"))[-2:] == [state, "ERROR"]
    if hold is not None:
        hold.go.set()
    await working.die()


class _StoppingIn:
    """The ledger, for a driver that stands still in one stage: what it makes there is never kept."""

    def __init__(self, ledger, state: str) -> None:
        self._ledger, self._entry = ledger, {"BUILDING_PROMPT": "prompt"}.get(state)
        self.stopped = False

    def __getattr__(self, name: str):
        return getattr(self._ledger, name)

    async def journal(self, lease, entry: str, body: bytes):
        if entry == self._entry:
            self.stopped = True
            await until(lambda: False)
        return await self._ledger.journal(lease, entry, body)


@pytest.mark.requirement("NLM-3", "NLM-5")
@pytest.mark.parametrize("kind,state", [("snapshot", HELD[0]), ("artifact", HELD[3]), ("callback", HELD[4])])
async def test_a_newer_epoch_ends_the_older_execution_wherever_it_is(stand: Stand, kind: str, state: str):
    working = stand.backend()
    hold = stand.gateway.hold(kind)
    await working.post(stand.order("job-n", epoch=1))
    await working.begin()
    await hold.arrived.wait()
    await working.post(stand.order("job-n", epoch=2))
    assert (await stand.states("job-n@1"))[-2:] == [state, "ERROR"]
    hold.go.set()
    await working.finish()
    await working.work()
    assert await stand.states("job-n@2") == WAY
    assert [callback["epoch"] for callback in stand.gateway.of("job-n")] == [2]
    assert set(stand.gateway.staged) == {("job-n", 2)} | ({("job-n", 1)} if kind == "callback" else set())


# -- the context -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("NLM-3", "NLM-9")
@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'{"job_id": "job-c"}', b"\xff\xfe", b'{"job_id":' * 50],
)
async def test_a_snapshot_that_cannot_be_read_is_invalid_context(stand: Stand, body: bytes):
    working, order = stand.backend(), stand.order("job-c")
    stand.gateway.snapshots["job-c", 1] = body
    await working.post(order)
    await working.work()
    (callback,) = stand.gateway.of("job-c")
    assert callback["error"]["code"] == "CONTEXT_INVALID"
    assert await stand.states("job-c@1") == ["ACCEPTED", HELD[0], "ERROR"]
    assert provider_calls(working.backend) == 0


@pytest.mark.requirement("NLM-9")
async def test_a_snapshot_of_another_job_is_refused(stand: Stand):
    working, order = stand.backend(), stand.order("job-c")
    stand.order("job-other")
    stand.gateway.snapshots["job-c", 1] = stand.gateway.snapshots["job-other", 1]
    await working.post(order)
    await working.work()
    (callback,) = stand.gateway.of("job-c")
    assert callback["error"]["code"] == "CONTEXT_INVALID"
    assert "job-other" in callback["error"]["message"]


@pytest.mark.requirement("NLM-3")
async def test_slow_snapshot_is_a_context_timeout(stand: Stand):
    working, order = stand.backend(), stand.order("job-c")
    stand.gateway.fail("snapshot", *[503] * 50)
    await working.post(order)
    await working.work()
    (callback,) = stand.gateway.of("job-c")
    assert callback["error"]["code"] == "CONTEXT_TIMEOUT"
    assert 4 <= stand.gateway.count("snapshot") <= 6  # 1, 2, 4, 8 and no more fit into 30 s


async def test_a_snapshot_that_comes_at_last_is_used(stand: Stand):
    working, order = stand.backend(), stand.order("job-c")
    stand.gateway.fail("snapshot", 500, 429, 502)
    await working.post(order)
    await working.work()
    assert await stand.states("job-c@1") == WAY


async def test_snapshot_from_a_forbidden_address_is_not_fetched(stand: Stand):
    working = stand.backend()
    refused = (
        "http://127.0.0.1:1/context",
        "https://127.0.0.1/context",
        "https://169.254.169.254/latest/meta-data",
        "https://10.0.0.8/context",
        "file:///etc/passwd",
        "http://example.com/context",
        f"{stand.gateway.url}@evil.example/context",
    )
    for url in refused:
        answer = await working.post(stand.order("job-h", context_snapshot_url=url))
        assert answer.status_code == 422, url
    assert await stand.executions() == 0


async def test_a_callback_anywhere_but_at_a_trusted_gateway_is_refused(stand: Stand):
    working = stand.backend()
    for url in ("https://evil.example/jobs/job-h/result", "http://127.0.0.1:9/jobs/job-h/result", "ftp://x/y"):
        answer = await working.post(stand.order("job-h", callback_url=url))
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED"), url
    assert await stand.executions() == 0


@pytest.mark.requirement("AUTH-3")
async def test_a_token_of_ours_is_for_one_job_and_goes_only_to_the_gateway(stand: Stand):
    working = stand.backend()
    for name in ("job-1", "job-2"):
        await working.post(stand.order(name))
    await working.work()
    seen = [token for kind in ("snapshot", "artifact") for token in stand.gateway.tokens(kind)]
    assert len(seen) == 4
    assert all(token is not None for token in seen)
    assert stand.gateway.tokens("callback") == [None, None]
    assert {AGENT} == {staged["asked"].get("agent_slug", AGENT) for staged in stand.gateway.staged.values()}
    # the double lets a token in only for the job that it names: both were staged and answered
    assert set(stand.gateway.staged) == {("job-1", 1), ("job-2", 1)}

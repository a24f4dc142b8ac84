"""`trellis submit RESEARCH …` and what the other commands say of a queue job, on the ledger itself."""

import asyncio
import re

import pytest

from tests.artifacts.desk import ORCHESTRATOR, advance, call_again
from tests.cli.conftest import Terminal
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.cli import job_end
from trellis.engine.jobs import JobId, Move, Moved, RequestId
from trellis.ledgers import open_ledger
from trellis.lifecycles import Trigger
from trellis.research.orchestrator import fail_for_good

VIOLIN = "archivist-violin"
QUESTION = '{"query": "Who made the violin?"}'
RESEARCH = ("RESEARCH", QUESTION, "--agent", VIOLIN)


@pytest.fixture
def planted(local: Terminal) -> Terminal:
    assert local("migrate").code == 0

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    return local


@pytest.mark.requirement("D38", "D41")
def test_a_research_job_is_submitted_listed_and_shown(planted: Terminal):
    job_id = planted.submit(*RESEARCH, "--entity", "violin", "--entity", "bow", "--priority", "interactive")
    shown = planted("job", "show", job_id, "--json").record
    assert (shown["lifecycle"], shown["status"], shown["type"]) == ("queue-job", "PENDING", "RESEARCH")
    asked = shown["payload"]
    assert (asked["agent_slug"], asked["entity_refs"]) == (VIOLIN, ["violin", "bow"])
    assert (asked["payload"], asked["run_id"][:4]) == ({"query": "Who made the violin?"}, "run_")
    assert (shown["attempt"], shown["max_attempts"]) == (1, 4), "people count executions"
    listed = planted("jobs", "--lifecycle", "queue-job", "--state", "PENDING", "--json").records
    assert [one["job_id"] for one in listed] == [job_id]
    assert "1/4" in planted("jobs").out


@pytest.mark.requirement("DJ-5")
def test_the_same_key_is_the_same_queue_job(planted: Terminal):
    first = planted.submit(*RESEARCH, "--key", "once")
    again = planted("submit", *RESEARCH, "--key", "once", "--json")
    assert (again.record["job_id"], again.record["created"]) == (first, False)
    other = planted("submit", "RESEARCH", '{"query": "Who else?"}', "--agent", VIOLIN, "--key", "once")
    assert (other.code, first in other.err) == (1, True)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("RESEARCH", QUESTION), "--agent SLUG"),
    (("RESEARCH", QUESTION, "--agent", "nobody"), "no agent 'nobody'"),
    (("RESEARCH", "{}", "--agent", VIOLIN), 'trellis submit RESEARCH \'{"query"'),
    (
        ("RESEARCH", '{"querry": "Who?"}', "--agent", VIOLIN),
        "querry: there is no such field (did you mean query?)",
    ),
    (
        ("RESEARCH", '{"query": "Who?", "constraints": {"max_section": 3}}', "--agent", VIOLIN),
        "constraints/max_section: there is no such field (did you mean max_sections?)",
    ),
    (
        (
            "PROPOSAL_PREPROCESS",
            '{"proposal_draft": {"a": 1}, "validation_rules": [{"feild": "a", "rule": "required"}]}',
            "--agent",
            VIOLIN,
        ),
        "feild: there is no such field (did you mean field?)",
    ),
    (("BRIEF", "{}", "--agent", VIOLIN), 'trellis submit BRIEF \'{"vision_text"'),
    ((*RESEARCH, "--max-attempts", "9"), "--max-attempts is 9"),
    ((*RESEARCH, "--delay", "3s"), "--delay is 3"),
    ((*RESEARCH, "--id", "mine"), "--id is 'mine': the job queue makes the ids of its jobs; give --key"),
    (("index.document", "1", "--agent", VIOLIN), "--agent"),
]


@pytest.mark.requirement("JQ-11")
def test_invalid_queue_job_is_refused_with_the_reason(planted: Terminal):
    for arguments, told in REFUSED:
        answer = planted("submit", *arguments)
        assert (answer.code, told in answer.err) == (2, True), (arguments, answer.err)
    assert planted("jobs", "--json").records == []


def test_submit_takes_a_leased_job_of_the_same_type_name_when_the_lifecycle_is_given(planted: Terminal):
    job_id = planted.submit("RESEARCH", QUESTION, "--lifecycle", "leased-job")
    assert planted("job", "show", job_id, "--json").record["lifecycle"] == "leased-job"


@pytest.mark.requirement("D43", "D19")
def test_a_queue_job_is_explained_cancelled_and_requeued(planted: Terminal):
    job_id = planted.submit(*RESEARCH)
    told = planted("job", "explain", job_id).out
    assert "validate by orchestrator moves it to QUEUED" in told
    assert planted("job", "cancel", job_id, "--cause", "not needed").out.strip() == f"{job_id} is FAILED"
    assert "It was cancelled by" in planted("job", "explain", job_id).out
    assert "not needed" in planted("job", "explain", job_id).out
    assert planted("job", "requeue", job_id).out.strip() == f"{job_id} is QUEUED again"
    ready = planted("job", "explain", job_id).out
    assert "ready: the orchestrator may take it now" in ready
    assert "trellis worker" not in ready


def move(terminal: Terminal, job_id: str, *, due_s: float) -> None:
    """Claim a queue job and have it fail, so that it pauses for so long."""

    async def fail() -> None:
        ledger = await open_ledger(terminal.url)
        await ledger.move(ORCHESTRATOR, Move(job_id=JobId(job_id), target="QUEUED", request_id=RequestId(job_id)))
        lease = await call_again(ledger, JobId(job_id), "RESEARCH")
        error = b'{"error": {"code": "NLM_UNAVAILABLE", "message": "no answer"}}'
        assert await advance(ledger, lease, "NOTEBOOKLM_CALL", Trigger.RETRY, delay_s=due_s, data=error)
        await ledger.close()

    asyncio.run(fail())


def test_requeue_of_a_retrying_queue_job_is_refused_with_the_retry_time(planted: Terminal):
    job_id = planted.submit(*RESEARCH)
    assert planted("jobs").out.splitlines()[1].endswith("orchestrator")
    move(planted, job_id, due_s=600)
    refused = planted("job", "requeue", job_id)
    assert (refused.code, "stays RETRY_BACKOFF: it goes to QUEUED by itself in " in refused.err) == (1, True)
    assert "attempt 2 begins by itself" in planted("job", "explain", job_id).out
    assert "1 RETRY_BACKOFF" in planted("doctor").out


def test_explain_of_a_job_of_a_paused_agent_names_who_paused_it_why_and_the_remedy(planted: Terminal):
    job_id = planted.submit(*RESEARCH)
    assert f"Agent {VIOLIN}" not in planted("job", "explain", job_id).out
    assert planted("agents", "pause", VIOLIN, "--reason", "its notes are being sorted").code == 0
    refused = planted("submit", *RESEARCH)
    assert (refused.code, f"agents activate {VIOLIN}" in refused.err) == (1, True), refused.err
    told = planted("job", "explain", job_id, "--json").record
    assert told["why"][-1].startswith(f"Agent {VIOLIN} is paused, and only an active agent runs: ")
    assert told["why"][-1].endswith(" ago): its notes are being sorted.")
    assert told["you_can"][0] == f"trellis agents resume {VIOLIN}\tlet the agent run again"
    assert planted("agents", "resume", VIOLIN).out == f"{VIOLIN} is active (it was paused)\n"
    assert f"agents resume {VIOLIN}" not in planted("job", "explain", job_id).out


def test_failed_queue_jobs_are_listed_beside_the_dead_letters(planted: Terminal):
    failed, cancelled = planted.submit(*RESEARCH), planted.submit("RESEARCH", QUESTION, "--agent", "architect-guardian")
    assert planted("job", "cancel", cancelled).code == 0
    assert planted("dlq").err == "No dead letters.\n"
    move(planted, failed, due_s=600)

    async def give_up() -> None:
        ledger = await open_ledger(planted.url)
        job = await ledger.job(JobId(failed))
        assert job is not None
        facts = {"error": {"code": "NLM_UNAVAILABLE", "message": "no answer"}}
        assert await fail_for_good(ledger, ORCHESTRATOR, job.job_id, job.version, facts, window_s=900) == "FAILED"
        await ledger.close()

    asyncio.run(give_up())
    told = planted("dlq").err
    assert "1 queue-job is FAILED, without a dead letter: `trellis jobs --lifecycle queue-job --status FAILED" in told
    assert re.search(r"a person, for 1[45] min", planted("jobs").out)
    assert "NLM_UNAVAILABLE: no answer" in planted("job", "explain", failed).out
    planted("agents", "pause", VIOLIN)
    (again,) = [one for one in planted("job", "explain", failed, "--json").record["you_can"] if "requeue" in one]
    assert again.endswith("run it again with fresh attempts, once the agent is active")


@pytest.mark.requirement("DJ-12", "JQ-4")
def test_a_dead_queue_job_is_a_dead_letter_that_is_listed_shown_and_requeued(planted: Terminal):
    job_id = planted.submit(*RESEARCH)
    move(planted, job_id, due_s=600)

    async def die() -> None:
        ledger = await open_ledger(planted.url)
        for target in ("FAILED", "DEAD"):
            wish = Move(job_id=JobId(job_id), target=target, request_id=RequestId(f"{target} {job_id}"))
            assert isinstance(await ledger.move(ORCHESTRATOR, wish), Moved)
        await ledger.close()

    asyncio.run(die())
    (letter,) = planted("dlq", "--json").records
    assert (letter["job_id"], letter["lifecycle"], letter["status"]) == (job_id, "queue-job", "DEAD")
    assert (letter["last_error"], letter["reason_code"]) == ("NLM_UNAVAILABLE: no answer", "dependency_unavailable")
    assert planted("dlq", "--lifecycle", "leased-job", "--json").records == []
    assert "dependency_unavailable" in planted("dlq", "show", job_id).out
    assert planted("dlq", "--lifecycle", "run").code == 2
    assert planted("dlq", "requeue", "--lifecycle", "queue-job", "--yes").code == 0
    assert planted("dlq", "--json").records == []


def test_waiting_for_a_queue_job_without_an_orchestrator_warns_early(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_end, "SERVICE_SLOW_S", 0.05)
    answer = planted("submit", *RESEARCH, "--wait", "0.1s")
    assert answer.code == 1
    assert f"`trellis up --ledger {planted.url}` drives queue jobs" in answer.err
    assert "has not ended after 0.1 s" in answer.err

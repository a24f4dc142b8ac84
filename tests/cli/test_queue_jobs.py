"""`trellis submit RESEARCH …` and what the other commands say of a queue job, on the ledger itself."""

import asyncio

import pytest

from tests.cli.conftest import Terminal
from trellis.instance import open_instance
from trellis.settings import Settings

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


@pytest.mark.requirement("JQ-11", "D38", "D41")
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
    (("RESEARCH", QUESTION), "agent_slug"),
    (("RESEARCH", QUESTION, "--agent", "nobody"), "no agent 'nobody'"),
    (("RESEARCH", "{}", "--agent", VIOLIN), "query"),
    ((*RESEARCH, "--max-attempts", "9"), "'max_attempts' cannot be set"),
    ((*RESEARCH, "--id", "mine"), "--id"),
    (("index.document", "1", "--agent", VIOLIN), "--agent"),
]


@pytest.mark.requirement("JQ-11")
def test_what_is_no_queue_job_is_refused_with_the_reason(planted: Terminal):
    for arguments, told in REFUSED:
        answer = planted("submit", *arguments)
        assert (answer.code, told in answer.err) == (2, True), (arguments, answer.err)
    assert planted("jobs", "--json").records == []


def test_a_leased_job_may_have_the_same_name_when_it_is_said(planted: Terminal):
    job_id = planted.submit("RESEARCH", QUESTION, "--lifecycle", "leased-job")
    assert planted("job", "show", job_id, "--json").record["lifecycle"] == "leased-job"


@pytest.mark.requirement("D43", "D19")
def test_a_queue_job_is_explained_cancelled_and_requeued(planted: Terminal):
    job_id = planted.submit(*RESEARCH)
    told = planted("job", "explain", job_id).out
    assert "validate by orchestrator moves it to QUEUED" in told
    assert planted("job", "cancel", job_id, "--cause", "not needed").out.strip() == f"{job_id} is FAILED"
    assert "not needed" in planted("job", "explain", job_id).out
    assert planted("job", "requeue", job_id).out.strip() == f"{job_id} is QUEUED again"
    ready = planted("job", "explain", job_id).out
    assert "ready: the orchestrator may take it now" in ready
    assert "trellis worker" not in ready

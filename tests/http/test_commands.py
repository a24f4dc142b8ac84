"""The command line through a gateway: the same commands, by TRELLIS_GATEWAY or --gateway."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.http.conftest import Place, Shell
from trellis.cli import agents, jobs, over_http, proposals, runs
from trellis.lifecycles import Role

AGENT = "archivist-violin"


def test_agents_are_listed_paused_and_let_run(shell: Shell):
    assert AGENT in shell("agents")
    assert {one["slug"]: one["status"] for one in shell.records("agents")}[AGENT] == "active"
    assert shell("agents", "pause", AGENT, "--reason", "a rest").strip() == f"{AGENT} is paused"
    assert "paused" in shell("run", AGENT, code=1)
    assert shell.records("agents", "activate", AGENT) == [{"slug": AGENT, "status": "active"}]
    run_id = shell("run", AGENT).strip()
    assert shell("runs", "cancel", run_id, "--hard", "--reason", "enough").strip() == f"{run_id} is failed"


def test_jobs_are_submitted_listed_shown_and_ended(shell: Shell):
    job_id = shell("submit", "echo", '{"n": 1}', "--key", "k", "--priority", "critical").strip()
    assert shell("submit", "echo", '{"n": 1}', "--key", "k", "--priority", "critical").strip() == job_id
    assert [one["job_id"] for one in shell.records("jobs", "--type", "echo")] == [job_id]
    assert job_id in shell("jobs", "--state", "queued")
    assert '"n": 1' in shell("job", "show", job_id)
    assert shell.records("job", "show", job_id)[0]["events"][0]["version"] == 1
    assert "has not ended" in shell("submit", "echo", "--wait", "0.1s", code=1)
    assert shell("job", "cancel", job_id, "--hard").strip() == f"{job_id} is cancelled"
    assert "cancelled" in shell("job", "requeue", job_id, code=1)
    for option in (["--id", "x"], ["--app", "a:b"], ["--lifecycle", "leased-job"]):
        assert option[0] in shell("submit", "echo", *option, code=2)
    assert "--concurrency-key" in shell("jobs", "--concurrency-key", "x", code=2)


def test_a_named_ledger_is_meant_and_both_are_refused(shell: Shell, place: Place, address: str):
    assert shell.records("agents", "--ledger", place.ledger)[0]["tools"]
    assert "not both" in shell("agents", "--ledger", place.ledger, "--gateway", address, code=2)


def test_what_is_wrong_with_the_gateway_is_said_with_a_way_out(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, place: Place
):
    assert "no address of a gateway" in shell("agents", "--gateway", "nonsense", code=2)
    monkeypatch.setenv("TRELLIS_TOKEN", "nonsense")
    assert "trellis token issue" in shell("agents", code=1)
    monkeypatch.setenv("TRELLIS_TOKEN", place.token(Role.FRONTEND))
    assert "agents.status" in shell("agents", "pause", AGENT, code=1)


@pytest.mark.parametrize(
    "local, remote",
    [
        (agents.list_agents, over_http.list_agents),
        (agents.activate, over_http.activate),
        (agents.pause, over_http.pause),
        (runs.run, over_http.run),
        (runs.list_runs, over_http.list_runs),
        (runs.show_run, over_http.show_run),
        (runs.cancel, over_http.cancel_run),
        (proposals.list_proposals, over_http.list_proposals),
        (proposals.show_proposal, over_http.show_proposal),
        (proposals.approve, over_http.approve),
        (proposals.reject, over_http.reject),
        (jobs.submit, over_http.submit),
        (jobs.list_jobs, over_http.list_jobs),
        (jobs.show, over_http.show_job),
        (jobs.cancel, over_http.cancel_job),
        (jobs.requeue, over_http.requeue_job),
    ],
)
def test_both_ways_take_the_same_options(local: Callable[..., Any], remote: Callable[..., Any]):
    assert list(inspect.signature(local).parameters) == list(inspect.signature(remote).parameters)

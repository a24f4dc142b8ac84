"""`trellis agents`, `run`, `runs`, `proposals`, `schedules`: a real agent from trigger to reviewed proposal, from the command line."""

import asyncio
import getpass
import json
import os
import re
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Terminal
from tests.nlm.endpoint import running_endpoint
from trellis.api.runs import ReadableRun, published_states, while_executing
from trellis.app.instance import Instance, open_instance, storage_locations
from trellis.app.settings import Settings
from trellis.cli.run_output import refusals, run_facts
from trellis.cli.values import params_of
from trellis.engine.admin_acts import this_node
from trellis.engine.errors import SettingsInvalid
from trellis.engine.jobs import Actor, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.records import JobFilter, JobPlace
from trellis.ledgers import migrate
from trellis.lifecycles import Role
from trellis.runs.orchestration import TriggerKind
from trellis.runs.orchestrator import TYPE
from trellis.runs.timetable import HandledInstant, Timetable

VIOLIN = "archivist-violin"


@pytest.fixture
def planted(local: Terminal) -> Terminal:
    assert local("migrate").code == 0

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()
            await instance.plant()

    asyncio.run(plant())
    return local


def test_agents_are_listed_with_their_status(planted: Terminal):
    found = {record["slug"]: record["status"] for record in planted("agents", "--json").records}
    assert found == {"architect-guardian": "active", VIOLIN: "active"}
    assert planted("agents", "--limit", "1").out.count("active") == 1


def test_an_agent_whose_file_looks_wrong_runs_and_is_listed_with_a_warning(planted: Terminal):
    file = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    file.write_text(re.sub(r"updated_at: .*", "updated_at: 2001-01-01T00:00:00Z", file.read_text()))
    found = {record["slug"]: record for record in planted("agents", "--json").records}
    assert (found[VIOLIN]["status"], found[VIOLIN]["problems"]) == ("active", [])
    (warning,) = found[VIOLIN]["warnings"]
    assert "it lies before created_at" in warning
    assert f"; warning: {warning}" in planted("agents").out
    assert found["architect-guardian"]["warnings"] == []


def test_a_malformed_agent_says_what_to_correct_and_stops_only_itself(planted: Terminal):
    file = Path(planted.url.removeprefix("sqlite:///")).parent / "objects" / "agents" / VIOLIN / "_agent.md"
    file.write_text(file.read_text().replace("status: active", "status: activ"))
    found = {record["slug"]: record for record in planted("agents", "--json").records}
    assert found[VIOLIN]["status"] == "malformed"
    assert "did you mean 'active'" in found[VIOLIN]["problems"][0]
    assert found["architect-guardian"]["status"] == "active"
    answer = planted("run", VIOLIN)
    assert answer.code != 0
    assert "did you mean 'active'" in answer.err


def test_watching_where_memory_is_at_the_gateway_starts_no_run_that_nobody_executes(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRELLIS_MEMORY", "gateway")
    answer = planted("run", VIOLIN, "--watch")
    assert answer.code == 2
    assert "TRELLIS_MEMORY" in answer.err
    assert "cannot execute a run by itself" in answer.err
    assert planted("runs", "list", "--json").records == []


@pytest.mark.requirement("PIPE-7", "D22", "OBS-1", "OBS-3", "OBS-6")
def test_a_watched_run_ends_with_proposals_that_a_person_decides_about(planted: Terminal):
    status = planted("run", VIOLIN, "--watch", "--correlation", "press-7", "--json").record
    assert (status["status"], status["steps_completed"]) == ("completed", 4)
    (run,) = planted("runs", "--json").records
    assert (run["run_id"], run["status"]) == (status["run_id"], "completed")
    calls = {step["name"]: {call["kind"] for call in step["calls"]} for step in shown_steps(planted, run["run_id"])}
    assert calls["load-context"] == {"store", "memory"}
    assert calls["execute-agent"] == {"model", "nlm", "tool", "memory"}
    slo = {one["name"]: one for one in planted("slo", "--json").records}
    assert {name for name, one in slo.items() if (one["status"], one["partial"]) == ("met", False)} == {*slo} - {
        "dead_rate"
    }
    assert {name: one["samples"] for name, one in slo.items() if name != "nlm_call_p95"} == {
        **dict.fromkeys(("completion_rate", "end_to_end_p95", "context_assembly_p95", "artifact_write_p95"), 1),
        "dead_rate": 0,
    }
    assert "no data" in planted("slo").out
    told = planted("events", "--correlation", "press-7", "--limit", "500", "--json").records
    assert {event["job_id"] for event in told} == {status["run_id"], *status["proposals_created"]}
    records = [json.loads(path.read_bytes()) for path in (folder_of(planted) / "audit").glob("2*/*.json")]
    assert {event["id"] for event in told} <= {one["event_id"] for one in records if one["correlation_id"] == "press-7"}
    assert all(record["node"] for record in records)
    refused = planted("run", VIOLIN, "--correlation", "a b")
    assert (refused.code, "correlation_id" in refused.err) == (2, True)
    waiting = [record["job_id"] for record in planted("proposals", "--state", "pending", "--json").records]
    assert set(waiting) < set(status["proposals_created"])
    chosen, other = waiting[:2]
    shown = planted("proposals", "show", chosen, "--json").record
    assert shown["content"]["citations"]
    assert shown["requiresHumanReview"] is False
    assert (shown["job_id"], shown["id"]) == (chosen, chosen)
    change = shown["content"]["change"]
    assert shown["diff"].startswith("--- ")
    assert all(f"\n+{line}\n" in shown["diff"] for line in change["text"].splitlines())
    told = planted("proposals", "show", chosen).out
    assert chosen in told
    assert shown["diff"] in told
    assert planted("proposals", "approve", chosen, "--json").record == {
        "job_id": chosen,
        "id": chosen,
        "proposal": chosen,
        "status": "applied",
        "decided": True,
    }
    assert planted("proposals", "show", chosen, "--json").record["diff"] is None, "it is applied"
    refused = planted("proposals", "reject", other, "--note", "short")
    assert (refused.code, "at least 10 characters" in refused.err) == (1, True)
    assert planted("proposals", "reject", other, "--note", "the source is right").code == 0
    again = planted("proposals", "approve", other)
    approval = planted("proposals", "show", other, "--json").record["approval"]
    decided = f"is rejected already, decided by {approval['decided_by']} at {approval['decided_at']};"
    assert (again.code, decided in again.err) == (1, True)
    assert approval["decided_by"] == f"{getpass.getuser()}@{this_node()}", "a person, not a process"


def shown_steps(terminal: Terminal, run_id: str) -> list[dict[str, Any]]:
    return terminal("runs", "show", run_id, "--json").record["steps"]


def folder_of(terminal: Terminal) -> Path:
    return Path(terminal.url.removeprefix("sqlite:///")).parent / "objects"


def short(run_id: str) -> str:
    """The form without the time of day."""
    start, day, _, end = run_id.split("_")
    return f"{start}_{day}_{end}"


@pytest.mark.requirement("D12")
def test_run_is_shown_with_its_steps_proposals_and_folder(planted: Terminal):
    run_id = planted("run", VIOLIN, "--param", "topic=bows", "--watch", "--json").record["run_id"]
    shown = planted("runs", "show", run_id, "--json").record
    assert shown == planted("runs", "show", short(run_id), "--json").record
    folder = folder_of(planted) / "agents" / VIOLIN / "runs" / run_id
    published = json.loads((folder / "status.json").read_text())
    assert {name: shown[name] for name in published} == published
    assert (shown["folder"], shown["params"], shown["position"]) == (str(folder), {"topic": "bows"}, None)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [{name: step[name] for name in manifest["steps"][0]} for step in shown["steps"]] == manifest["steps"]
    for_people = planted("runs", "show", run_id).out
    proposed = shown["proposals"][0]
    for text in (
        run_id,
        VIOLIN,
        shown["summary"].splitlines()[0],
        f"{proposed['id']}  {proposed['action']} {proposed['target']}\n",
        "completed",
        "4 of 4",
        "02-execute-agent.json",
        *shown["proposals_created"],
        str(folder),
    ):
        assert text in for_people


def test_a_run_that_waits_is_shown_with_its_place_and_listed_by_agent_and_state(planted: Terminal):
    first, second, other = (planted("run", slug).out.strip() for slug in (VIOLIN, VIOLIN, "architect-guardian"))
    assert planted("runs", "show", second, "--json").record["position"] == 1
    assert "1 runs of this agent before it" in planted("runs", "show", second).out
    assert "it is next" in planted("runs", "show", first).out
    listed = [record["run_id"] for record in planted("runs", "--agent", VIOLIN, "--json").records]
    assert listed == [second, first]
    assert [record["run_id"] for record in planted("runs", "list", "--limit", "1", "--json").records] == [other]
    assert planted("runs", "--state", "completed", "--json").records == []
    assert "perhaps you mean queued" in planted("runs", "--state", "qeued").err


@pytest.mark.requirement("PIPE-11")
def test_a_second_run_says_what_it_did_not_propose_again(planted: Terminal):
    file = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    file.write_text(file.read_text().replace(", memory-update]", "]"))  # else it remembers what it said
    first = planted("run", VIOLIN, "--watch", "--json").record
    answer = planted("run", VIOLIN, "--watch")
    told = answer.out
    second = told.split()[0]
    assert "execute-agent (1 of 4 steps done)" in answer.err
    summary = planted("runs", "show", second, "--json").record["summary"]
    assert " ".join(summary.split()) in " ".join(told.split()), "what the agent found"
    shown = planted("runs", "show", second, "--json").record
    equal = shown["already_proposed"][0]
    assert {one["id"] for one in shown["already_proposed"]} < set(first["proposals_created"])
    line = f"{equal['id']} (pending): {equal['action']} {equal['target']} was not proposed again"
    assert line in told
    assert line in planted("runs", "show", second).out
    assert planted("runs", "--ids").out.split() == [second, first["run_id"]]
    newest, oldest = planted("runs", "--json").records
    assert (newest["already_proposed"], oldest["already_proposed"]) == (len(shown["already_proposed"]), 0)
    header, row, _ = planted("runs").out.splitlines()
    assert header.split() == ["RUN", "AGENT", "STATUS", "AGE", "PROPOSALS", "REPEATED", "REFUSED"]
    assert str(newest["already_proposed"]) in row.split()


def test_a_run_is_shown_with_what_was_refused_to_its_model():
    refusal = {
        "tool": "create-proposal",
        "code": "action_not_allowed",
        "detail": "not listed",
        "action": "logic-update",
    }
    told = dict.fromkeys(("started_at", "finished_at", "error", "trigger"), "")
    record = {
        **told,
        "run_id": "run",
        "agent_slug": VIOLIN,
        "status": "completed",
        "steps_completed": 4,
        "steps_total": 4,
    }
    refused = refusals([{"result": {}}, {"result": {"refused": [refusal]}}])
    made = {"id": "p", "action": "memory-update", "target": "facts.md", "status": "auto_applied"}
    facts = run_facts({**record, "proposals_created": ["p"], "proposals": [made], "refused": refused})
    assert ("proposal", "p  memory-update facts.md (applied)") in facts, "as in `trellis proposals`"
    (text,) = [str(fact) for name, fact in facts if name == "refused"]
    assert text.startswith("create-proposal logic-update: not listed → add the action to `safe_outputs` in its file")


@pytest.mark.requirement("PIPE-14")
def test_a_failed_run_says_which_calls_were_refused_why_and_what_to_change(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch
):
    file = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    file.write_text(
        re.sub(r"max_steps: \d+", "max_steps: 2", file.read_text()).replace("model: offline", "model: openai:m")
    )
    tag = {"action": "logic-update", "target": "_agent.md", "summary": "s", "text": "t"}
    with running_endpoint() as endpoint:
        for name, args in (("delete-file", {"path": "x"}), ("create-proposal", tag)):
            endpoint.calls((name, args))
        monkeypatch.setenv("TRELLIS_MODEL_BASE_URL", endpoint.base_url)
        monkeypatch.setenv("TRELLIS_MODEL_KEY", "none")
        watched = planted("run", VIOLIN, "--watch")
    assert (watched.code, "run_failed" in watched.err) == (1, False), "its error is printed once"
    (run,) = planted("runs", "--json").records
    assert run["refused_actions"] == 2
    shown = " ".join(planted("runs", "show", run["run_id"]).out.split())
    why = " ".join(planted("job", "explain", run["run_id"]).out.split())
    for told in (" ".join(watched.out.split()), shown, why):
        assert "delete-file: the agent's file does not list it; it lists read-context" in told
        assert "create-proposal logic-update _agent.md: 'logic-update' is not among the agent's safe_outputs" in told
        assert "add the tool to `tools` in its file" in told
        assert "add the action to `safe_outputs` in its file" in told
        assert "raise max_steps" not in told, "more steps would be refused alike"
    record = planted("runs", "show", run["run_id"], "--json").record
    assert [one["code"] for one in record["refused"]] == ["tool_not_listed", "action_not_allowed"]
    status = folder_of(planted) / "agents" / VIOLIN / "runs" / run["run_id"] / "status.json"
    assert json.loads(status.read_text())["refused"][1]["action"] == "logic-update", "as a gateway tells it"


@pytest.mark.requirement("D19", "D12")
def test_a_run_is_cancelled_by_its_short_form_with_the_reason(planted: Terminal):
    run_id = planted("run", VIOLIN).out.strip()
    answer = planted("runs", "cancel", short(run_id), "--reason", "wrong topic", "--json").record
    assert answer == {"run_id": run_id, "status": "failed", "requested": False}
    assert planted("runs", "show", run_id, "--json").record["error"] == "CANCELLED: wrong topic"
    assert "CANCELLED: wrong topic" in planted("runs", "show", run_id).out
    again = planted("runs", "cancel", run_id, "--hard")
    assert (again.code, "has ended already: it is failed" in again.err) == (1, True)
    waiting = planted("run", VIOLIN).out.strip()
    archived = {record["run_id"]: record["archived"] for record in planted("runs", "--json").records}
    assert archived == {run_id: True, waiting: False}
    assert [record["run_id"] for record in planted("runs", "--archived", "--json").records] == [run_id]


@pytest.mark.requirement("D19")
def test_a_running_run_is_asked_to_stop_or_ended_now(planted: Terminal):
    run_id = planted("run", VIOLIN).out.strip()

    async def claim() -> None:
        async with open_instance(Settings.model_validate({}), planted.url) as instance:
            terms = TypeClaim(type=TYPE, lease_s=60.0, heartbeat_s=20.0)
            claim = Claim(claim_id=ClaimId("c"), types=(terms,), lifecycle="run")
            await instance.ledger.turn(Turn(actor=instance.actor(Role.ORCHESTRATOR), claim=claim))

    asyncio.run(claim())
    answer = planted("runs", "cancel", run_id)
    assert f"{run_id} was asked to stop; it is ended in 30 s" in answer.out, answer.err
    shown = planted("runs", "show", run_id, "--json").record
    assert (shown["status"], shown["cancel_requested"]) == ("running", True)
    assert "asked to stop" in planted("runs", "show", run_id).out
    assert planted("runs", "cancel", run_id, "--hard").out == f"{run_id} is failed\n"


def test_an_unknown_run_id_is_reported(planted: Terminal):
    for id_, wrong in (
        ("run_2026-02-14_080000_abc123", "There is no run run_2026-02-14_080000_abc123; `trellis runs"),
        ("run_2026-02-14_abc123", "A queue job that no run submitted has a run id of its own."),
        ("abc123", "'abc123' is no run id: it looks like run_"),
        ("run_2026-02-30_abc123", "'run_2026-02-30_abc123' is no run id"),
    ):
        for verb in ("show", "cancel"):
            answer = planted("runs", verb, id_)
            assert (answer.code, wrong in answer.err) == (1, True), answer.err


def test_an_agent_is_paused_and_activated_again_with_a_record_of_each(planted: Terminal):
    file = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    before = file.read_text()
    paused = planted("agents", "pause", VIOLIN, "--reason", "holidays", "--json").record
    assert paused == {"slug": VIOLIN, "status": "paused", "previous": "active", "changed": True}
    refused = planted("run", VIOLIN)
    assert (refused.code, f"`trellis agents activate {VIOLIN} --ledger" in refused.err) == (1, True)
    assert planted("agents", "pause", VIOLIN).out == f"{VIOLIN} is paused already\n"
    assert planted("agents", "activate", VIOLIN).out == f"{VIOLIN} is active (it was paused)\n"
    changed = [line for line in file.read_text().splitlines() if line not in before.splitlines()]
    assert [line.partition(":")[0] for line in changed] == ["updated_at"]
    assert planted("rebuild", "--from", "ledger").code == 0, "nothing else publishes here"
    records = [json.loads(found.read_text()) for found in folder_of(planted).glob("audit/*/act-*.json")]
    changes = [record for record in records if record["event"] == "agent.status.changed"]
    assert {(record["from"], record["to"], record["cause"]) for record in changes} == {
        ("active", "paused", "holidays"),
        ("paused", "active", "no reason given"),
    }
    assert planted("run", VIOLIN).code == 0


def test_an_agent_that_is_malformed_missing_or_final_is_left_alone(planted: Terminal):
    file = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    assert "There is no agent nobody" in planted("agents", "activate", "nobody").err
    file.write_text(file.read_text().replace("status: active", "status: archived"))
    assert "from archived it may go to nothing" in planted("agents", "activate", VIOLIN).err
    broken = file.read_text().replace("status: archived", "status: activ")
    file.write_text(broken)
    answer = planted("agents", "activate", VIOLIN)
    assert (answer.code, "did you mean 'active'" in answer.err) == (1, True)
    assert file.read_text() == broken
    assert list(folder_of(planted).glob("audit/*/*-agent.json")) == []


@pytest.mark.requirement("D24")
def test_an_agent_whose_third_watched_run_failed_is_stopped_at_once_and_listed_with_its_error(planted: Terminal):
    agent = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    agent.write_text(agent.read_text().replace("model: offline", "model: nobody-knows-it"))
    runs = [planted("run", VIOLIN, "--watch", "--json").record for _ in range(3)]
    assert [run["status"] for run in runs] == ["failed"] * 3
    refused = planted("run", VIOLIN)
    assert f"it is error; only an active agent runs; its last run {runs[-1]['run_id']} ended with" in refused.err
    found = {record["slug"]: record for record in planted("agents", "--json").records}[VIOLIN]
    assert (found["status"], found["last_error"]) == ("error", runs[0]["error"])
    assert f"{runs[-1]['run_id']}: INTERNAL_ERROR" in planted("agents").out
    assert planted("agents", "activate", VIOLIN, "--json").record["previous"] == "error"
    found = {record["slug"]: record for record in planted("agents", "--json").records}[VIOLIN]
    assert (found["status"], "'nobody-knows-it' is no model" in found["problems"][0]) == ("active", True)


@pytest.mark.requirement("AUTH-5", "D24")
def test_a_token_begins_runs_and_reads_their_errors_on_a_ledger_as_through_the_gateway(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch
):
    def told(*issued: str) -> str | None:
        token = planted("token", "issue", *issued).out.strip()
        with monkeypatch.context() as patch:
            patch.setenv("TRELLIS_TOKEN", token)
            refused = planted("run", VIOLIN)
            assert (refused.code, "runs.trigger" in refused.err) == (1, True), refused.err
            listed = {record["slug"]: record for record in planted("agents", "--json").records}
            return listed[VIOLIN]["last_error"] if listed else None

    agent = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    agent.write_text(agent.read_text().replace("model: offline", "model: nobody-knows-it"))
    error = planted("run", VIOLIN, "--watch", "--json").record["error"]
    agent.write_text(agent.read_text().replace("status: active", "status: error"))
    assert told("--role", "control-plane") == error
    assert told("--role", "agent-runtime", "--agent", "architect-guardian") is None


def test_schedules_are_listed_with_their_next_and_their_last_time(planted: Terminal):
    empty = planted("schedules")
    assert (empty.out, "triggers.cron" in empty.err) == ("", True)

    async def register() -> str:
        async with open_instance(Settings.model_validate({}), planted.url) as instance:
            at = datetime(2026, 1, 1, 5, 59, tzinfo=UTC)
            table = Timetable(objects=instance.objects)
            await table.register(VIOLIN, "0 6 * * *", at=at)
            await table.register("architect-guardian", "0 7 29 2 *", at=at)
            run_id = (await instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.CRON)).job_id
            guardian, violin = await table.all()
            await table.handled(violin, HandledInstant(instant=at, run_id=run_id))
            await table.handled(guardian, HandledInstant(instant=at, skipped="it is paused"))
            return run_id

    run_id = asyncio.run(register())
    guardian, violin = planted("schedules", "--json").records
    assert (violin["agent"], violin["cron"], violin["last_run"]) == (VIOLIN, "0 6 * * *", run_id)
    assert violin["next_at"].endswith("T06:00:00Z")
    assert (guardian["last_run"], guardian["skipped"]) == (None, "it is paused")
    for_people = planted("schedules").out
    assert run_id in for_people
    assert "skipped: it is paused" in for_people
    assert len(planted("schedules", "--limit", "1", "--json").records) == 1


def test_run_wait_without_an_executor_ends_after_the_given_time(planted: Terminal):
    answer = planted("run", VIOLIN, "--wait", "0.2s")
    (run,) = planted("runs", "--json").records
    assert (answer.code, f"Run {run['run_id']} has not ended in" in answer.err) == (1, True), answer.err
    assert "start `trellis up --ledger" in answer.err
    both = planted("run", VIOLIN, "--wait", "1s", "--watch")
    assert (both.code, "not both" in both.err) == (2, True)


def test_a_watched_run_is_left_to_a_process_that_executes_runs_until_it_ends(planted: Terminal):
    """Of two processes that execute runs, either could claim it, and then use the settings of the wrong one."""

    async def hold() -> datetime:
        async with open_instance(Settings.model_validate({}), planted.url) as instance:
            there = Actor(role=Role.PROJECTOR, name="up@there")
            assert await instance.ledger.subscribe(there, "projector", lease_s=0.6, reads=False)
            return next(seen.until for seen in await instance.ledger.followers() if seen.name == "projector")

    agent = folder_of(planted) / "agents" / VIOLIN / "_agent.md"
    agent.write_text(agent.read_text().replace("model: offline", "model: openai:m"))
    until = asyncio.run(hold())
    answer = planted("run", VIOLIN, "--watch")
    said = "up@there executes the runs of this ledger: its settings and keys are used"
    assert (answer.code, answer.err.count(said)) == (1, 1), answer.err
    assert f":{os.getpid()}, which executes the run" in answer.out, "it says whose settings are missing"
    (begun,) = planted("events", "--type", "run.started", "--json").records
    assert datetime.fromisoformat(begun["ts"]) > until - timedelta(milliseconds=1), "documents tell milliseconds"


def test_a_watched_run_is_the_only_one_that_the_command_executes(planted: Terminal):
    """Runs that wait are left to `trellis up`; those of the same agent are overtaken, and do not hold it up."""
    waiting = [planted("run", slug).out.strip() for slug in (VIOLIN, "architect-guardian", VIOLIN)]
    own = planted("run", VIOLIN, "--watch", "--json").record
    assert (own["status"], own["run_id"] in waiting) == ("completed", False)
    states = {one["run_id"]: one["status"] for one in planted("runs", "--json").records}
    assert states == dict.fromkeys(waiting, "queued") | {own["run_id"]: "completed"}
    assert planted("jobs", "--status", "running", "--ids").out == "", "no lease is left"
    assert planted("verify").code == 0


async def test_two_watchers_of_different_agents_execute_their_own_runs_at_once(tmp_path: Path):
    url, settings = f"sqlite:///{tmp_path / 'ledger.db'}", Settings.model_validate({})
    await migrate(url)
    async with open_instance(settings, url, name="one") as one, open_instance(settings, url, name="two") as two:
        await one.plant()
        both = {one: "architect-guardian", two: VIOLIN}
        runs = {at: (await at.layer.trigger(slug, {}, kind=TriggerKind.MANUAL)).job_id for at, slug in both.items()}

        async def watched(instance: Instance) -> str:
            states = published_states(instance, ReadableRun(runs[instance], both[instance]))
            return [state.status async for state in states][-1]

        ended = await asyncio.gather(*(while_executing(at, runs[at], watched(at)) for at in both))
        assert ended == ["completed", "completed"]
        for at in both:
            started = next(event for event in await one.ledger.events(runs[at]) if event.type == "run.started")
            assert started.actor == f"run-watch:{at.name}"
        assert (await one.ledger.jobs(JobFilter(place=JobPlace.LEASED), limit=10)).jobs == ()


def test_a_run_without_a_watcher_waits_for_a_service(planted: Terminal):
    first, second = (planted("run", VIOLIN, "--param", "topic=bows", "--json").record for _ in range(2))
    assert [(run["status"], run["position"]) for run in (first, second)] == [("queued", 0), ("queued", 1)]


def test_unknown_agent_or_proposal_is_reported_as_not_found(planted: Terminal):
    missing = planted("run", "nobody").err
    assert "there is no agents/nobody/_agent.md" in missing
    assert "trellis agents" in missing
    unknown = planted("proposals", "--state", "pendng")
    assert unknown.code != 0
    assert "perhaps you mean pending" in unknown.err
    assert "no proposal prop_x" in planted("proposals", "show", "prop_x").err
    assert "no proposal prop_x" in planted("proposals", "approve", "prop_x").err


def test_user_who_cannot_read_the_key_begins_no_run_and_decides_no_proposal(planted: Terminal):
    Path(planted.url.removeprefix("sqlite:///") + ".key").unlink()
    for command in (
        ("run", VIOLIN),
        ("proposals", "approve", "prop_x"),
        ("runs", "cancel", "run_2026-02-14_abc123"),
        ("agents", "pause", VIOLIN),
    ):
        answer = planted(*command)
        assert (answer.code, "may not" in answer.err or "cannot" in answer.err) == (1, True), answer.err


def test_parameters_are_json_where_they_can_be():
    assert params_of(["n=3", "text=a=b", 'list=["x"]']) == {"n": 3, "text": "a=b", "list": ["x"]}
    with pytest.raises(SettingsInvalid, match="no name=value"):
        params_of(["nothing"])


def test_places_lie_beside_an_sqlite_file_and_must_be_set_elsewhere(tmp_path: Path):
    found = storage_locations(Settings.model_validate({}), f"sqlite:///{tmp_path}/trellis.db")
    assert (found.objects, found.memory) == (f"file://{tmp_path}/objects", tmp_path / "memory.git")
    with pytest.raises(SettingsInvalid, match="TRELLIS_OBJECTS"):
        storage_locations(Settings.model_validate({}), "postgresql://somewhere/db")
    chosen = Settings.model_validate({"objects": "s3://bucket", "memory": tmp_path})
    assert storage_locations(chosen, "postgresql://somewhere/db").objects == "s3://bucket"


def test_secrets_of_models_are_shown_nowhere(planted: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_MODEL_KEY", "sk-secret-1")
    monkeypatch.setenv("TRELLIS_NLM_KEY", "sk-secret-2")
    answer = planted("doctor", "--settings", "--json")
    assert "sk-secret" not in answer.out + answer.err
    assert json.dumps(answer.records)


def test_the_demo_runs_an_agent_and_approves_nothing(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / "my demo"
    answer = local.bare("demo", "--data", str(folder))
    assert answer.code == 0, answer.err
    assert "What waits for you" in answer.out
    (line,) = [line for line in answer.out.splitlines() if " proposals show " in line]
    shown = subprocess.run(shlex.split(line), capture_output=True, text=True, env={"PATH": ""}, check=True)
    assert "What it would change now" in shown.stdout, "the command works as it is printed, whatever the PATH is"
    assert "“" in answer.out, "a proposal without a quotation is not worth reading"
    states = [record["status"] for record in local.bare("proposals", "--data", str(folder), "--json").records]
    assert set(states) <= {"pending", "applied"}
    assert "pending" in states
    assert list(folder.glob(f"objects/agents/{VIOLIN}/runs/run_*/manifest.json"))


def test_the_demo_knows_its_agents(local: Terminal):
    answer = local.bare("demo", "--agent", "nobody")
    assert answer.code != 0
    assert "archivist-violin" in answer.err

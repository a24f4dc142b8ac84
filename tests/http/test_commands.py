"""The command line through a gateway: the same commands, by TRELLIS_GATEWAY or --gateway."""

import asyncio
import json
import re
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.http.conftest import Place, Shell
from trellis import App, Context, connect_sync
from trellis.cli import main
from trellis.engine.alerts import Alert, AlertChangeKind, AlertObservation, AlertRound, AlertScope
from trellis.engine.jobs import Actor
from trellis.http.calls import TIMEOUT_S_DEFAULT
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.operations.alert_reports import report_document
from trellis.operations.alerts import ALERTS
from trellis.operations.runbooks import runbook_names
from trellis.testing import run_until_idle

AGENT = "archivist-violin"
ROOT = Path(__file__).resolve().parents[2]


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
    assert "has not ended" in shell("job", "wait", job_id, "--for", "0.1s", code=1)
    assert shell("job", "cancel", job_id, "--hard").strip() == f"{job_id} is cancelled"
    assert "cancelled" in shell("job", "requeue", job_id, code=1)
    for option in (["--id", "x"], ["--app", "a:b"], ["--lifecycle", "leased-job"]):
        assert option[0] in shell("submit", "echo", *option, code=2)
    assert "--concurrency-key" in shell("jobs", "--concurrency-key", "x", code=2)


def test_many_jobs_are_changed_through_a_gateway(shell: Shell):
    jobs = [shell("submit", "mail", "--delay", "1h", "--concurrency-key", "smtp").strip() for _ in range(3)]
    (seen,) = shell.records("jobs", "run-now", "--concurrency-key", "smtp", "--dry-run")
    assert (seen["matched"], [one["job_id"] for one in seen["examples"]]) == (3, jobs)
    assert shell("jobs", "run-now", "--type", "mail", "--submitted-after", "1h", "--yes").strip() == "3 jobs made ready"
    assert (
        shell("job", "prioritize", jobs[0], "critical").strip() == f"{jobs[0]} was given another priority; it is queued"
    )
    assert "--type" in shell("jobs", "cancel", code=2)
    (done,) = shell.records("jobs", "cancel", "--type", "mail", "--yes")
    assert (done["changed"], done["skipped"], done["next_cursor"]) == (3, 0, None)
    assert shell.records("jobs", "--type", "mail", "--status", "queued") == []


@pytest.mark.requirement("D38")
def test_a_queue_job_is_submitted_shown_and_ended_through_a_gateway(shell: Shell):
    asked = ("RESEARCH", '{"query": "Who made it?"}', "--agent", AGENT, "--entity", "violin", "--key", "q")
    job_id = shell("submit", *asked).strip()
    assert shell("submit", *asked).strip() == job_id
    (shown,) = shell.records("job", "show", job_id)
    assert (shown["job_type"], shown["agent_slug"], shown["status"]) == ("RESEARCH", AGENT, "PENDING")
    assert (shown["attempt"], shown["max_attempts"], shown["context"]["entity_refs"]) == (1, 4, ["violin"])
    assert "1/4" in shell("jobs", "--lifecycle", "queue-job")
    assert "nobody" in shell("submit", "RESEARCH", '{"query": "Who?"}', "--agent", "nobody", code=2)
    assert shell("job", "cancel", job_id, "--hard").strip() == f"{job_id} is FAILED"
    assert shell("job", "requeue", job_id).strip() == f"{job_id} is QUEUED again"


def both(shell: Shell, place: Place, *arguments: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The records of a command through the gateway, each with the one from the ledger itself."""
    pairs = zip(shell.records(*arguments), shell.records(*arguments, "--ledger", place.ledger), strict=True)
    return list(pairs)


async def work(url: str, app: App) -> None:
    ledger = await open_ledger(url)
    try:
        await ledger.heartbeat_worker(Actor(role=Role.WORKER, name="kiln-1"), b'{"types": ["kiln"], "concurrency": 2}')
        await run_until_idle(app, ledger)
    finally:
        await ledger.close()


def test_a_key_that_belongs_to_another_request_is_refused_through_a_gateway_without_a_traceback(shell: Shell):
    shell("submit", "keyed", "1", "--key", "k7")
    told = shell("submit", "keyed", "2", "--key", "k7", code=1)
    assert told.startswith("error: ")
    assert "k7" in told
    assert "Traceback" not in told


def test_a_failed_job_says_why_with_traceback_and_log_lines_through_a_gateway_as_on_a_ledger(
    shell: Shell, place: Place
):
    app = App(testing=True)

    @app.job("oven")
    async def bake(ctx: Context) -> None:
        ctx.logger.info("baking", loaves=3)
        raise ValueError("the oven is cold")

    asked = ("submit", "oven", "--key", "o", "--max-attempts", "1")
    job_id = shell(*asked).strip()
    asyncio.run(work(place.ledger, app))
    shown = shell("dlq", "show", job_id)
    assert "Last failure\nTraceback" in shown
    assert "ValueError: the oven is cold" in shown
    assert "info     baking loaves=3" in shown
    ((remote, local),) = both(shell, place, "dlq", "show", job_id)
    assert remote == local
    assert "the oven is cold" in remote["traceback"]
    ((remote, local),) = both(shell, place, "job", "show", job_id)
    assert [one["data"]["event"] for one in remote["signals"]] == ["baking"]
    assert "the oven is cold" in remote["traceback"]
    ((remote, local),) = both(shell, place, "job", "explain", job_id)
    assert SINCE.sub("?", json.dumps(remote)) == SINCE.sub("?", json.dumps(local))
    assert "ValueError: the oven is cold" in remote["traceback"]
    assert "the oven is cold" in shell("job", "wait", job_id, "--for", "5s", code=1)
    told = shell(*asked, "--wait", "5s", code=1)
    assert f"job {job_id} ended as dead_lettered: " in told
    assert "the oven is cold" in told


def test_a_signal_says_what_its_job_waits_for(shell: Shell, place: Place):
    """Through a gateway as on a ledger. A name that the job does not wait for is stored, and told apart."""
    app = App(testing=True)

    @app.job("flow")
    async def flow(ctx: Context) -> str:
        return await ctx.wait_signal("approved")

    job_id = shell("submit", "flow").strip()
    asyncio.run(work(place.ledger, app))
    assert "its handler waits for the signal 'approved'" in shell("job", "explain", job_id)
    refused = shell("job", "signal", job_id, "approved", "--payload", '{"by": }', code=2)
    assert "--payload is '{\"by\": }': JSON as text, @file or -" in refused
    assert "trellis submit" not in refused
    assert "it goes on waiting for the signal 'approved'" in shell("job", "signal", job_id, "aproved")
    sent = shell("job", "signal", job_id, "approved", "--payload", '"ada"')
    assert f"signal approved is sent to {job_id}, which was suspended" in sent
    assert "goes on waiting" not in sent
    asyncio.run(work(place.ledger, app))
    assert "ada" in shell("job", "show", job_id)
    assert "it ended as succeeded" in shell("job", "signal", job_id, "approved", code=1)


SINCE = re.compile(r"\b[0-9.]+ ?(ms|min|s|m|h|d)\b")
LISTINGS = (
    *(("jobs",), ("events", "--type", "job_queued"), ("queues",), ("dlq",)),
    *(("workers",), ("runs",), ("proposals",)),
)


def lines(text: str) -> list[str]:
    """What was printed, without ages and the widths that they need, and without folders, which only this machine has."""
    words = [" ".join(SINCE.sub("AGE", line).split()) for line in text.splitlines()]
    return [line for line in words if not line.startswith("folder ")]


def test_every_listing_has_the_same_columns_and_rows_through_a_gateway_and_on_a_ledger(shell: Shell, place: Place):
    app = App(testing=True)

    @app.job("kiln")
    async def fire(ctx: Context) -> dict[str, int]:
        ctx.logger.info("firing", cups=2)
        if ctx.attempt == 1:
            raise ValueError("the kiln is cold")
        return {"cups": 2}

    shell("queues", "pause", "shelf", "--force")
    of_jobs = [
        shell("submit", "kiln", '{"n": 1}', "--max-attempts", attempts, "--concurrency-key", "k").strip()
        for attempts in ("1", "2")
    ]
    of_jobs.append(shell("submit", "shelf", "--delay", "1h", "--correlation", "cups").strip())
    asyncio.run(work(place.ledger, app))
    shell("job", "cancel", of_jobs[-1], "--cause", "no cups")
    of_jobs.append(shell("submit", "shelf", "--correlation", "cups").strip())
    shell("run", AGENT, "--watch", "--ledger", place.ledger)
    run_id = shell("runs", "--ids", "--limit", "1").strip()
    singly = (("events", of_jobs[1]), ("runs", "show", run_id), *(("job", "show", job) for job in of_jobs))
    for asked in (*LISTINGS, *singly):
        there, here = lines(shell(*asked)), lines(shell(*asked, "--ledger", place.ledger))
        assert there == here, asked
        assert len(here) > 1, asked
    assert " AGE " in shell("jobs").splitlines()[0]
    assert "--lifecycle is 'run': it is not for a gateway" in shell("jobs", "--lifecycle", "run", code=2)
    assert "--status is 'completed': it is not for a gateway" in shell("jobs", "--status", "completed", code=2)
    run = lines(shell("jobs", "--lifecycle", "run", "--ledger", place.ledger))[1]
    assert run.split() == [run_id, "agent-run", "completed", "AGE"], "it has no attempts"
    shown = shell("job", "show", of_jobs[0])
    assert "dead letter" in shown
    assert "# AFTER EVENT TRY BY NOTE" in lines(shown)
    assert "JOB AFTER EVENT TRY BY NOTE" in lines(shell("events"))


AGO = re.compile(r"[0-9.]+ (ms|s|min) ago")
TIMES = frozenset({"ts", "created_at", "updated_at", "due_at", "deadline_at", "lease_expires_at", "events", "payload"})
"""The ledger tells times to the microsecond, and is asked for the rest apart."""


def same(remote: dict[str, Any], local: dict[str, Any], but: frozenset[str] = TIMES) -> None:
    """The ledger may know more; what the gateway says, it says in the same words and means the same."""
    known = set(remote) - but
    assert set(remote) <= set(local)
    assert {name: remote[name] for name in known} == {name: local[name] for name in known}


def test_a_job_is_printed_alike_through_a_gateway_and_from_a_ledger(shell: Shell, place: Place):
    (made,) = shell.records("submit", "words", "--key", "w")
    job_id = made["job_id"]
    assert made == {"job_id": job_id, "lifecycle": "leased-job", "status": "queued", "created": True}
    assert shell.records("submit", "words", "--key", "w") == [{**made, "created": False}]
    later = shell("submit", "words", "--delay", "1h").strip()
    (waits, ready) = both(shell, place, "jobs", "--type", "words")
    for remote, local in (waits, ready):
        same(remote, local)
    assert [one["waits_for"][:13] for one in waits] == ["its time, in "] * 2
    assert "WAITS FOR" in shell("jobs", "--type", "words")
    shell("job", "cancel", later)
    assert "0/5" in shell("jobs", "--type", "words")
    remote, local = ready
    assert (local["job_id"], local["lifecycle"], local["status"]) == (job_id, "leased-job", "queued")
    ((remote, local),) = both(shell, place, "job", "show", job_id)
    same(remote, local)
    for told, known in zip(remote["events"], local["events"], strict=True):
        same(told, known)
        same(told["payload"], known["payload"])
    answers = [
        shell.records("job", "cancel", one, "--hard", *where)[0]
        for one, where in ((job_id, ()), (shell("submit", "words").strip(), ("--ledger", place.ledger)))
    ]
    assert [set(answer) for answer in answers] == [{"job_id", "lifecycle", "status", "requested"}] * 2
    assert [(answer["status"], answer["requested"]) for answer in answers] == [("cancelled", False)] * 2


async def raise_and_resolve(url: str) -> None:
    """Two alerts: one is resolved, one stays open."""
    ledger = await open_ledger(url)
    try:
        seen = [
            AlertObservation(id=f"alert-{name}", name=name, subject=subject, value=3.0, text=f"{name} is so.")
            for name, subject in (("artifact-writes", ""), ("jobs-wait", "mail"))
        ]
        by, scopes = Actor(role=Role.CONTROL_PLANE, name="up"), tuple(AlertScope(name=one.name) for one in seen)
        for observed in (seen, seen[1:]):
            await ledger.observe_alerts(
                by, AlertRound(mark=(await ledger.alert_mark()).mark, scopes=scopes, observed=tuple(observed))
            )
    finally:
        await ledger.close()


@pytest.mark.requirement("OBS-4")
def test_alerts_are_listed_through_a_gateway_as_on_a_ledger_and_counted(shell: Shell, place: Place):
    asyncio.run(raise_and_resolve(place.ledger))
    pairs = both(shell, place, "alerts")
    assert [(remote["name"], remote["state"]) for remote, local in pairs if remote == local] == [
        ("jobs-wait", "open"),
        ("artifact-writes", "resolved"),
    ]
    (opened, _), _ = pairs
    assert (opened["subject"], opened["text"], opened["resolved_at"]) == ("mail", "jobs-wait is so.", None)
    assert (opened["runbook"], "worker" in opened["action"]) == ("trellis alerts runbook jobs-wait", True)
    assert [one["name"] for one in shell.records("alerts", "--open")] == ["jobs-wait"]
    assert "jobs-wait is so." in shell("alerts")
    counted = shell("metrics")
    assert 'trellis_alerts{name="jobs-wait"} 1.0' in counted
    assert 'trellis_alerts{name="artifact-writes"} 0.0' in counted


@pytest.mark.requirement("OBS-4")
def test_the_link_in_the_report_of_an_alert_opens_and_the_command_prints_the_same_page(
    shell: Shell, place: Place, address: str
):
    reader = {"Authorization": f"Bearer {place.token(Role.OWNER)}"}
    now = datetime.now(UTC)
    with httpx2.Client() as client:
        for name, declared in ALERTS.items():
            alert = Alert(id=name, name=name, subject="", value=1.0, text="", raised_at=now, last_seen_at=now)
            link, command = (
                report_document(alert, AlertChangeKind.RAISED, gateway)["runbook"] for gateway in (address, None)
            )
            page = client.get(link, headers=reader)
            source = (ROOT / "docs/runbooks" / declared.runbook).read_text()
            assert (page.status_code, page.text) == (200, source)
            assert page.headers["content-type"].startswith("text/markdown")
            assert shell(*command.split()[1:]) == source
            by_alert = client.get(f"{address}/runbooks/{name}", headers=reader)
            assert (by_alert.status_code, by_alert.text) == (200, source), "an alert's name finds its page"
        for unknown in ("jobs-wait.txt", "..%2Fglossary"):
            assert client.get(f"{address}/runbooks/{unknown}", headers=reader).status_code == 404
        assert client.get(f"{address}/runbooks/jobs-wait").status_code == 401
    assert "did you mean jobs-wait?" in shell("alerts", "runbook", "jobs-wai", code=1)
    assert shell("alerts", "runbook", "dead-jobs") == shell("alerts", "runbook", "dead-letters")
    assert [one["name"] for one in shell.records("alerts", "runbook")] == runbook_names()


@pytest.mark.requirement("DJ-12", "D9")
def test_dead_letters_are_listed_shown_and_requeued_through_a_gateway_as_on_a_ledger(shell: Shell, place: Place):
    dead = [shell("submit", "letters", "--correlation", name).strip() for name in ("one", "two", "three")]
    for job_id in dead:
        shell("job", "dead-letter", job_id, "--cause", "it must not run")
    pairs = both(shell, place, "dlq", "--type", "letters")
    assert [remote["job_id"] for remote, _ in pairs] == dead[::-1]
    assert all(remote == local for remote, local in pairs)
    assert shell("dlq", "--correlation", "two", "--ids") == f"{dead[1]}\n"
    ((remote, local),) = both(shell, place, "dlq", "show", dead[0])
    assert remote == local
    assert "policy_violation" in shell("dlq", "show", dead[0])
    chosen = ("dlq", "requeue", "--type", "letters")
    assert shell(*chosen, "--dry-run") == "3 jobs would be requeued\n"
    assert "--yes" in shell(*chosen, code=2)
    assert shell(*chosen, "--limit", "2", "--yes").endswith("2 of 2 requeued\n")
    assert shell.records("dlq", "requeue", dead[0]) == [
        {"job_id": dead[0], "status": "queued", "requeued": True, "reason": ""}
    ]
    assert f"{dead[0]} stays queued" in shell("dlq", "requeue", dead[0], code=1)
    assert "has no dead letter" in shell("dlq", "show", dead[0], code=1)
    assert "no job 'nobody'" in shell("dlq", "show", "nobody", code=1)


def test_runs_and_proposals_are_printed_alike_through_a_gateway_and_from_a_ledger(
    shell: Shell, place: Place, address: str
):
    run_id = shell("run", AGENT).strip()
    update = {"file": "facts.md", "operation": "append", "content": "- one more fact"}
    with connect_sync(address, token=place.token(Role.ORCHESTRATOR)) as client:
        proposal_id = client.memory.propose(AGENT, "one more", [update], priority="high").proposalId
    for what, name, id_ in (("runs", "run_id", run_id), ("proposals", "id", proposal_id)):
        pairs = both(shell, place, what, "--limit", "1")
        for remote, local in pairs:
            assert remote == local
            assert (remote[name], "status" in remote) == (id_, True)
    ((remote, local),) = both(shell, place, "proposals", "show", proposal_id)
    assert remote == local
    assert (remote["job_id"], remote["diff"].splitlines()[-1]) == (proposal_id, "+- one more fact")
    page = shell("proposals", "show", proposal_id, "--ledger", place.ledger)
    assert shell("proposals", "show", proposal_id) == page.replace(f" --ledger {place.ledger}", "")
    of_agents = (("agents", "show", AGENT), ("agents", "sources", AGENT), ("memory", "diff", AGENT, "0"))
    for words in (("memory",), ("memory", "read", AGENT, "--wide"), ("memory", "history", AGENT), *of_agents):
        assert [remote for remote, _ in both(shell, place, *words)] == [
            local for _, local in both(shell, place, *words)
        ]
    (remote,) = shell.records("runs", "cancel", run_id, "--hard")
    assert remote == {"run_id": run_id, "status": "failed", "requested": False}
    ((remote, local),) = both(shell, place, "runs", "show", run_id)
    only_local = {"version", "params", "cancel_requested", "folder", "status", "error", "finished_at", "position"}
    assert {name for name in local if remote[name] != local[name]} <= only_local, "status.json may be a moment behind"


def test_a_schedule_of_jobs_is_administered_through_a_gateway_and_shown_as_on_a_ledger(shell: Shell, place: Place):
    options = ("--cron", "0 3 * * *", "--tz", "Europe/Kyiv", "--type", "report", "--payload", '{"n": 1}')
    (made,) = shell.records("schedules", "add", "nightly", *options, "--overlap", "queue", "--jitter", "60")
    assert (made["payload"], made["overlap"], made["jitter_s"], len(made["next"])) == ({"n": 1}, "queue", 60.0, 5)
    assert "another schedule named 'nightly'" in shell("schedules", "add", "nightly", *options, code=1)
    assert "tz database" in shell("schedules", "add", "x", "--cron", "0 3 * * *", "--tz", "Mars", "--type", "t", code=2)
    assert "'skip', 'once' or 'all'" in shell("schedules", "add", "x", *options, "--misfire", "never", code=2)
    assert "did you mean nightly?" in shell("schedules", "pause", "nightli", code=1)
    assert shell("schedules", "pause", "nightly", "--reason", "a rest").strip() == "nightly is paused"
    for words in (("schedules", "list"), ("schedules", "show", "nightly")):
        for remote, local in both(shell, place, *words):
            assert remote == local, words
    assert "nightly" in shell("schedules")
    (ran,) = shell.records("schedules", "run", "nightly")
    (job,) = shell.records("job", "show", ran["job_id"])
    assert job["type"] == "report"
    assert shell("schedules", "resume", "nightly").startswith("nightly fires next at ")
    assert shell("schedules", "remove", "nightly").strip() == "nightly is removed"
    assert [one for one in shell.records("schedules") if one["name"] == "nightly"] == []


@pytest.mark.requirement("OBS-5", "DJ-13", "D35")
def test_queues_workers_schedules_events_and_explanations_are_printed_through_a_gateway_as_from_a_ledger(
    shell: Shell, place: Place
):
    job_id = shell("submit", "watched", "--correlation", "press-9").strip()
    assert shell("queues", "pause", "watched", "--reason", "a rest").strip() == "watched is paused"
    assert "did you mean watched?" in shell("queues", "pause", "wotched", code=1)
    assert shell.records("queues", "pause", "wotched", "--force") == [{"type": "wotched", "paused": True}]
    depths = [one for one in both(shell, place, "queues") if one[0]["type"] == "watched"]
    assert [(remote["paused"], remote["ready"], local["ready"]) for remote, local in depths] == [(True, 1, 1)]
    shown = 'trellis_queue_ready{lifecycle="leased-job",type="watched"} 1.0\n'
    assert shown in shell("metrics")
    assert shown in shell("metrics", "--ledger", place.ledger)
    assert "trellis_http_request_seconds_count" in shell("metrics"), "what the gateway counted"
    for words in (("job", "explain", job_id), ("schedules",), ("slo",)):
        for remote, local in both(shell, place, *words):
            assert AGO.sub("ago", str(remote)) == AGO.sub("ago", str(local)), words
    assert "trellis queues resume watched" in shell("job", "explain", job_id)
    assert shell("queues", "resume", "watched").strip() == "watched is handed out again"

    async def seen() -> None:
        ledger = await open_ledger(place.ledger)
        await ledger.heartbeat_worker(Actor(role=Role.WORKER, name="w-1"), b'{"types": ["watched"], "concurrency": 2}')
        await ledger.close()

    asyncio.run(seen())
    for told in both(shell, place, "workers")[0]:
        assert (told["name"], told["state"], told["info"]["types"]) == ("w-1", "alive", ["watched"])
    assert "watched" in shell("workers")
    lists = (job_id,), ("--correlation", "press-9"), ("--type", "job_queued", "--lifecycle", "leased-job"), ()
    for words in lists:
        pairs = both(shell, place, "events", *words, "--limit", "1000")
        assert job_id in {remote["job_id"] for remote, _ in pairs}, words
        for remote, local in pairs:
            same(remote, local)
            same(remote["payload"], local["payload"])
    assert shell("events", job_id) == shell("events", job_id, "--ledger", place.ledger)
    assert "no job 'nobody'" in shell("events", "nobody", code=1)


@pytest.mark.requirement("D38")
def test_attempts_are_numbered_from_0_over_http_and_from_1_on_the_command_line(
    shell: Shell, place: Place, address: str
):
    job_id = shell("submit", "counted").strip()
    with connect_sync(address, token=place.token(Role.OWNER)) as client:
        assert client.jobs.get(job_id).attempt == 0
        assert client.jobs.events(job_id).items[0].payload["attempt"] == 0
    for told in both(shell, place, "job", "show", job_id)[0]:
        assert (told["attempt"], told["events"][0]["payload"]["attempt"]) == (1, 1)
    for told in both(shell, place, "jobs", "--type", "counted")[0]:
        assert told["attempt"] == 1
    for where in ((), ("--ledger", place.ledger)):
        assert "1/5" in shell("jobs", "--type", "counted", *where)


def test_a_named_ledger_is_meant_and_both_are_refused(shell: Shell, place: Place, address: str):
    assert shell.records("agents", "--ledger", place.ledger)[0]["tools"]
    assert "not both" in shell("agents", "--ledger", place.ledger, "--gateway", address, code=2)


def test_commands_report_a_gateway_error_with_a_remedy(shell: Shell, monkeypatch: pytest.MonkeyPatch, place: Place):
    assert "no address of a gateway" in shell("agents", "--gateway", "nonsense", code=2)
    monkeypatch.setenv("TRELLIS_TOKEN", "nonsense")
    assert "trellis token issue" in shell("agents", code=1)
    monkeypatch.setenv("TRELLIS_TOKEN", place.token(Role.FRONTEND))
    assert "agents.status" in shell("agents", "pause", AGENT, code=1)


@pytest.mark.requirement("AUTH-5")
def test_the_doctor_of_a_client_machine_asks_the_gateway_about_itself_and_the_token(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
):
    """No ledger is there, and none is needed."""
    found = {one["check"]: one for one in shell.records("doctor")}
    assert {one["severity"] for one in found.values()} == {"ok"}, found
    assert f"its version is {version('trellis-engine')}" in found["gateway"]["detail"]
    assert "accepts it" in found["token"]["detail"]
    for token in (None, "nonsense"):
        monkeypatch.setenv("TRELLIS_TOKEN", token) if token else monkeypatch.delenv("TRELLIS_TOKEN")
        assert main(["doctor", "--json"]) == 1
        wrong = [
            one for line in shell.capsys.readouterr().out.splitlines() if (one := json.loads(line))["severity"] != "ok"
        ]
        assert [(one["check"], "TRELLIS_TOKEN" in one["remedy"]) for one in wrong] == [("token", True)]


def test_a_command_says_at_once_that_no_gateway_listens(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    """Nothing was sent, so nothing needs a second try; a gateway that has answered before may be restarting."""
    monkeypatch.setenv("TRELLIS_GATEWAY", "http://127.0.0.1:9")
    began = time.monotonic()
    told = " ".join(shell("submit", "echo", code=1).split())
    assert "No gateway listens at http://127.0.0.1:9 (the connection was refused), so POST /jobs was not sent." in told
    assert time.monotonic() - began < TIMEOUT_S_DEFAULT / 3


def test_a_refusal_of_the_gateway_says_what_the_caller_can_do_there(
    shell: Shell, place: Place, monkeypatch: pytest.MonkeyPatch
):
    shell("submit", "--topic", "job.echo", '{"n": 1}', "--id", "mine")
    taken = shell("submit", "--topic", "job.echo", '{"n": 2}', "--id", "mine", code=1)
    assert "Job mine was submitted before with another request; choose another --id" in taken
    shell("submit", "echo", '{"n": 1}', "--key", "my-key")
    assert "Key 'my-key' was used before" in shell("submit", "echo", '{"n": 2}', "--key", "my-key", code=1)
    assert "give --key, which lets you repeat" in shell("submit", "echo", "--id", "x", code=2)
    monkeypatch.setenv("TRELLIS_TOKEN", place.token(Role.WORKER))
    refused = shell("queues", "pause", "echo", code=1)
    assert "trellis token issue --role control-plane` on its machine" in refused
    assert "trellis migrate" not in refused
    refused = shell("queues", code=1)
    assert "gives it to owner or gateway or control-plane" in refused
    assert "trellis token issue --role ROLE` on its machine" in refused
    monkeypatch.setenv("TRELLIS_TOKEN", "no.token.here")
    assert "Whoever administers the gateway makes a token" in shell("queues", "pause", "echo", code=1)

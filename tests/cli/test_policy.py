"""`trellis policy`, and deciding about held jobs at the command line."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.bus.safety.holding import PEOPLE, SCHEDULER, held, moved, scheduled
from tests.cli.conftest import Terminal
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger

POLICY = """
[[rules]]
id = "no-production"
decision = "deny"
reason = "nothing goes to production at night"
match = { topics = ["job.code.>"], labels = { env = "prod" } }

[[rules]]
id = "code"
decision = "allow_with_constraints"
match = { topics = ["job.code.>"] }
constraints = { max_runtime_ms = 60000 }
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "policy.toml").write_text(POLICY)
    return str(tmp_path / "policy.toml")


def on_ledger(local: Terminal, work: Callable[[Ledger], Coroutine[Any, Any, Any]]) -> Any:
    async def act() -> Any:
        ledger = await open_ledger(local.url)
        try:
            return await work(ledger)
        finally:
            await ledger.close()

    return asyncio.run(act())


@pytest.mark.requirement("BUS-4")
def test_a_policy_is_checked_and_its_rules_are_shown_in_order(local: Terminal, file: str, tmp_path: Path):
    answer = local("policy", "check", file)
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == ["RULE", "no-production", "code"]
    assert "topics job.code.>; label env=prod" in answer.out
    assert [rule["id"] for rule in local("policy", "check", file, "--json").record["rules"]] == [
        "no-production",
        "code",
    ]
    (tmp_path / "bad.toml").write_text(POLICY.replace('"deny"', '"denied"'))
    bad = local("policy", "check", str(tmp_path / "bad.toml"))
    assert (bad.code, "rules.0.decision" in bad.err) == (2, True)
    assert local("policy", "check", str(tmp_path / "missing.toml")).code == 2


@pytest.mark.requirement("BUS-4")
def test_a_decision_is_explained_rule_by_rule(local: Terminal, file: str):
    answer = local("policy", "explain", "--topic", "job.code.x", "--label", "env=dev", "--policy", file)
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "allow_with_constraints by code: rule code",
        "  no  no-production (deny): labels: env is 'dev' and should be like 'prod'",
        "  fits  code (allow_with_constraints): topics fit",
        "  max_runtime_ms = 60000",
    ]
    told = local("policy", "explain", "--topic", "job.code.x", "--label", "env=prod", "--policy", file, "--json").record
    assert (told["decision"], told["rule"], told["not_looked"]) == ("deny", "no-production", ["code"])
    assert local("policy", "explain", "--topic", "job.x", "--policy", file, "--json").record["rule"] == "default"


def test_without_a_file_the_policy_in_force_is_asked(local: Terminal, file: str, monkeypatch: pytest.MonkeyPatch):
    assert local("policy", "explain", "--topic", "job.x", "--json").record["decision"] == "allow"
    monkeypatch.setenv("TRELLIS_POLICY", file)
    assert local("policy", "explain", "--topic", "job.x", "--json").record["decision"] == "deny"
    monkeypatch.setenv("TRELLIS_POLICY", f"{file}.gone")
    gone = local("policy", "explain", "--topic", "job.x")
    assert (gone.code, "does not answer" in gone.err) == (1, True)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "give a --topic, or a --job"),
        (["--topic", "job.x", "--job", "y"], "give a --topic, or a --job"),
        (["--topic", "job x"], "topic"),
        (["--topic", "job.x", "--label", "env"], "write NAME=TEXT"),
        (["--topic", "job.x", "--actor-type", "robot"], "actor_type"),
    ],
)
def test_invalid_policy_explain_arguments_are_refused(local: Terminal, arguments: list[str], says: str):
    answer = local("policy", "explain", *arguments)
    assert (answer.code, says in answer.err) == (2, True)


@pytest.mark.requirement("BUS-4")
def test_a_policy_is_tried_on_the_last_jobs(local: Terminal, file: str):
    async def jobs(ledger: Ledger) -> None:
        await held(ledger, topic="job.code.x", job_id="held-1")
        await scheduled(ledger, topic="job.mail", job_id="new-1")

    on_ledger(local, jobs)
    answer = local("policy", "simulate", file)
    assert answer.code == 0
    assert [line.split() for line in answer.out.splitlines()[1:]] == [
        ["new-1", "job.mail", "not", "decided", "deny", "default", "no"],
        ["held-1", "job.code.x", "require_human", "allow_with_constraints", "code", "yes"],
    ]
    assert [one["job_id"] for one in local("policy", "simulate", file, "--last", "1", "--json").records] == ["new-1"]
    assert local("policy", "simulate", file, "--last", "0").code == 2
    told = local("policy", "explain", "--job", "held-1", "--policy", file, "--json").record
    assert told["rule"] == "code"


@pytest.mark.requirement("D45")
def test_a_held_job_is_decided_about_as_a_job_and_as_a_proposal(local: Terminal):
    async def jobs(ledger: Ledger) -> None:
        for number in range(4):
            await held(ledger, job_id=f"held-{number}")

    on_ledger(local, jobs)
    listed = [line.split()[0] for line in local("proposals").out.splitlines()[1:]]
    assert listed == [f"approval-held-{number}" for number in (3, 2, 1, 0)]
    shown = local("proposals", "show", "approval-held-0", "--json").record
    assert (shown["status"], shown["content"]["policy_hash"]) == ("pending", PEOPLE.hash)
    assert local("job", "approve", "held-0", "--note", "it is fine").out == (
        "held-0 may go; the scheduler hands it out\n"
    )
    assert local("job", "deny", "held-1", "--note", "no").code == 1
    assert local("job", "deny", "held-1", "--note", "these are still needed").out == "held-1 is DENIED\n"
    assert local("proposals", "approve", "approval-held-2").out == "approval-held-2 is approved\n"
    rejected = local("proposals", "reject", "approval-held-3", "--note", "these are still needed", "--json").record
    names = dict.fromkeys(("job_id", "id", "proposal"), "approval-held-3")
    assert rejected == {**names, "status": "rejected", "decided": True}
    assert local("proposals", "--state", "pending").err == "No proposals.\n"
    again = local("job", "approve", "approval-held-0")
    assert (again.code, "does not wait for a person" in again.err) == (1, True)
    assert local("job", "approve", "nobody").code == 1
    assert local("proposals", "show", "approval-nobody").code == 1


@pytest.mark.requirement("D45")
def test_a_job_is_called_by_its_own_id_before_the_inboxes_name_for_another(local: Terminal):
    async def jobs(ledger: Ledger) -> None:
        await held(ledger, job_id="one")
        await held(ledger, job_id="approval-one")

    on_ledger(local, jobs)
    assert local("job", "deny", "approval-one", "--note", "these are still needed").out == "approval-one is DENIED\n"
    assert local("job", "approve", "one").code == 0


@pytest.mark.requirement("D45")
def test_the_inbox_shows_a_held_job_behind_many_that_rest(local: Terminal):
    async def jobs(ledger: Ledger) -> None:
        await held(ledger, job_id="held-1")
        for number in range(20):
            resting = await scheduled(ledger, job_id=f"resting-{number}")
            await moved(ledger, SCHEDULER, resting, target="SCHEDULED", delay_s=60.0, data=b'{"hold":"throttle"}')

    on_ledger(local, jobs)
    assert "approval-held-1" in local("proposals", "--limit", "1").out

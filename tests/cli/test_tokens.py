"""`trellis token issue`, and every other command with a token in the environment."""

import asyncio
import getpass
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from trellis.engine.admin_acts import AdminAct, this_node
from trellis.engine.jobs import Actor
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

READ_THE_WHOLE_LEDGER = (("verify",), ("followers",), ("retention", "plan"), ("audit", "head"), ("audit", "verify"))
"""The commands that read a ledger without the application between: they answer about the jobs of everybody."""


@pytest.mark.requirement("D46")
def test_the_token_is_alone_on_standard_output_and_works(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    answer = local("token", "issue", "--role", "submitter", "--sub", "ada", "--ttl", "10m")
    assert answer.code == 0
    assert (answer.out.count("\n"), answer.out.count(".")) == (1, 2)
    assert answer.err == "ada is submitter with it for 10 min\n"
    monkeypatch.setenv("TRELLIS_TOKEN", answer.out.strip())
    job_id = local.submit("t")
    assert local("job", "show", job_id, "--json").record["events"][0]["actor"] == "ada"
    for arguments in (["queues", "pause", "t"], ["sweep"], ["job", "requeue", job_id]):
        refused = local(*arguments)
        assert refused.code == 1
        assert "the token of ada gives submitter" in refused.err


def test_a_refused_option_is_shown_as_it_was_typed(local: Terminal):
    missing = local("token", "issue", "--role", "agent-runtime")
    assert (missing.code, "--agent is missing: a token for an agent's runtime" in missing.err) == (2, True)
    long = local("token", "issue", "--role", "owner", "--ttl", "48h")
    assert (long.code, "--ttl is '48h': it must be from 1 to 86400 seconds (24 h)" in long.err) == (2, True)


def test_the_token_of_a_data_folder_is_of_its_ledger(local: Terminal, tmp_path: Path):
    data = tmp_path / "data"
    assert local.bare("migrate", "--data", str(data)).code == 0
    assert local.bare("token", "issue", "--role", "worker", "--data", str(data)).code == 0
    missing = local.bare("token", "issue", "--role", "worker", "--data", str(tmp_path / "other"))
    assert (missing.code, "no such file" in missing.err) == (1, True)
    (data / "trellis.db.key").unlink()
    keyless = local.bare("token", "issue", "--role", "worker", "--data", str(data))
    assert (keyless.code, "trellis migrate" in keyless.err) == (1, True)


async def acts_of(url: str) -> list[AdminAct]:
    ledger = await open_ledger(url)
    try:
        return await ledger.acts()
    finally:
        await ledger.close()


@pytest.mark.requirement("OBS-1", "D35")
def test_several_roles_are_named_apart_or_together(local: Terminal):
    apart = local("token", "issue", "--role", "worker", "--role", "control-plane", "--json").record
    together = local("token", "issue", "--role", "control-plane,worker", "--json").record
    assert apart["role"] == together["role"] == ["control-plane", "worker"]
    agent = local("token", "issue", "--role", "agent-runtime", "--agent", "gardener", "--sub", "g", "--ttl", "5m")
    assert agent.code == 0
    acts = asyncio.run(acts_of(local.url))
    assert [act.event for act in acts] == ["ledger.migrated"] + ["token.issued"] * 3
    assert (acts[3].subject, acts[3].target) == ("g", "agent-runtime, agent=gardener for 5 min")
    assert agent.out.strip().split(".")[2] not in str(acts), "a record holds no token"


@pytest.mark.requirement("OBS-1", "D35")
def test_a_token_of_the_operators_own_key_is_recorded_before_it_is_shown(
    trellis: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    key = tmp_path / "own.key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    monkeypatch.setenv("TRELLIS_TOKEN_KEY_FILE", str(key))
    issued = trellis("token", "issue", "--role", "worker", "--sub", "ada", "--reason", "new machine")
    assert issued.code == 0, issued.err
    act = asyncio.run(acts_of(trellis.url))[-1]
    assert (act.event, act.subject, act.target, act.cause) == ("token.issued", "ada", "worker for 1 h", "new machine")
    assert (act.actor.partition("@")[0], act.node) == (getpass.getuser(), this_node())
    unrecorded = trellis("token", "issue", "--role", "worker", ledger=f"sqlite:///{tmp_path / 'nowhere.db'}")
    assert (unrecorded.code, unrecorded.out) == (1, ""), "what cannot be recorded is not given out"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--role", "root"], "choose one of owner"),
        (["--role", "ownr"], "did you mean owner?"),
        ([], "--role"),
        (["--role", "worker", "--ttl", "2d"], "86400"),
        (["--role", "worker", "--ttl", "soon"], "write a number of seconds"),
        (["--role", "worker", "--sub", ""], "1 to 200 characters"),
    ],
)
def test_a_token_that_cannot_be_meant_is_not_issued(local: Terminal, arguments: list[str], says: str):
    answer = local("token", "issue", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_invalid_token_is_one_clear_error_in_every_command(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_TOKEN", "nonsense")
    (Path.cwd() / "shop.py").write_text("from trellis import App\napp = App()\n@app.job('t')\nasync def t(ctx): ...\n")
    for arguments in (["submit", "t"], ["worker", "shop:app"], ["sweep"], ["queues", "pause", "t"]):
        answer = local(*arguments)
        assert answer.code == 1
        assert "The token is refused: it is not three parts" in answer.err


def test_no_command_takes_a_token_where_others_can_see_it(local: Terminal):
    answer = local("jobs", "--token", "x")
    assert (answer.code, "No such option" in answer.err) == (2, True)


def test_doctor_reports_the_rights_of_the_token_and_never_prints_it(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    token = local("token", "issue", "--role", "submitter", "--sub", "ada").out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    for arguments in (["doctor"], ["doctor", "--json"]):
        answer = local(*arguments)
        assert answer.code == 0
        assert "ada is submitter for" in answer.out
        assert token not in answer.out + answer.err
    monkeypatch.setenv("TRELLIS_TOKEN", "nonsense")
    answer = local("doctor")
    assert (answer.code, "three parts" in answer.out) == (1, True)


@pytest.mark.parametrize("command", [("jobs",), ("verify",), ("dlq",), ("agents",)])
def test_a_bad_token_is_refused_by_commands_that_only_read(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    assert local(*command).code == 0
    monkeypatch.setenv("TRELLIS_TOKEN", "garbage")
    answer = local(*command)
    assert (answer.code, answer.out) == (1, "")
    assert "token" in answer.err


def test_on_sqlite_no_other_key_than_the_ledgers_own_verifies_a_token(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Whoever could name the key could sign what they like."""
    token = local("token", "issue", "--role", "control-plane").out.strip()
    key = Path(local.url.removeprefix("sqlite:///") + ".key")
    mine = tmp_path / "mine.key"
    mine.write_text(key.read_text())
    mine.chmod(0o600)
    key.write_text("0" * 64)
    monkeypatch.setenv("TRELLIS_TOKEN_KEY_FILE", str(mine))
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    assert local("queues", "pause", "x", "--force").code == 1


def test_a_key_pair_goes_into_a_private_file_and_its_public_half_to_standard_output(local: Terminal, tmp_path: Path):
    private = tmp_path / "private.jwk"
    answer = local("token", "key", "2026-02", "--out", str(private), "--alg", "ES256")
    assert answer.code == 0
    shown, kept = answer.record, json.loads(private.read_text())
    assert (shown["kid"], shown["alg"], shown["crv"]) == ("2026-02", "ES256", "P-256")
    assert ("d" in shown, kept) == (False, {**shown, "d": kept["d"]})
    assert private.stat().st_mode & 0o077 == 0
    assert kept["d"] not in answer.out + answer.err
    again = local("token", "key", "2026-03", "--out", str(private))
    assert (again.code, "cannot be written" in again.err) == (1, True)
    assert json.loads(private.read_text()) == kept


@pytest.mark.requirement("D62")
def test_a_token_is_bound_to_a_tenant_and_to_an_agent(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    unbound = local("token", "issue", "--role", "agent-runtime")
    assert (unbound.code, "--agent" in unbound.err) == (2, True)
    bound = local("token", "issue", "--role", "agent-runtime", "--agent", "archivist-violin", "--json").record
    assert bound["agent"] == "archivist-violin"
    ours = local("token", "issue", "--role", "submitter", "--sub", "ada", "--tenant", "acme").out.strip()
    theirs = local("token", "issue", "--role", "submitter", "--sub", "ada", "--tenant", "globex").out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", ours)
    job_id = local.submit("t")
    assert local("job", "show", job_id, "--json").record["events"][0]["actor"] == "<tenant=acme>ada"
    monkeypatch.setenv("TRELLIS_TOKEN", theirs)
    refused = local("job", "cancel", job_id)
    assert (refused.code, "rule jobs.cancel" in refused.err) == (1, True)
    monkeypatch.setenv("TRELLIS_TOKEN", ours)
    assert local("job", "cancel", job_id).code == 0


@pytest.mark.requirement("D62")
def test_a_token_reads_with_commands_what_it_reads_over_http(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    """Whoever can read the file can read all of it without a token; one that is shown counts all the same."""
    named = ("ada", "--role", "submitter"), ("mallory", "--role", "submitter"), ("olha", "--role", "control-plane")
    ada, mallory, operator = [local("token", "issue", "--sub", *one).out.strip() for one in named]
    monkeypatch.setenv("TRELLIS_TOKEN", ada)
    job_id = local.submit("t")
    for token, code, listed in ((mallory, 1, 0), (ada, 0, 1), (operator, 0, 1)):
        monkeypatch.setenv("TRELLIS_TOKEN", token)
        explained = local("policy", "explain", "--job", job_id)
        assert ("gives it for its own only" in explained.err) == (token is mallory), explained.err
        for command in (("job", "show", job_id), ("events", job_id)):
            answer = local(*command, "--json")
            assert (command, answer.code) == (command, code), answer.err
            assert code == 0 or "gives it for its own only" in answer.err
        for command in (("jobs",), ("events",), ("events", "--type", "job_queued")):
            answer = local(*command, "--json")
            assert (answer.code, answer.out.count(job_id) > 0) == (0, bool(listed)), (command, answer.err)
        assert local("queues").code == (0 if token is operator else 1)
        for command in READ_THE_WHOLE_LEDGER if token is not ada else ():
            answer = local(*command)
            refused = "rule jobs.read gives it for its own jobs only" in answer.err
            assert (command, refused) == (command, token is not operator), answer.err
    monkeypatch.setenv("TRELLIS_TOKEN", mallory)
    missing = local("job", "show", "not-there")
    assert (missing.code, "rule jobs.read" in missing.err) == (1, True), "it looks like another's"


@pytest.mark.requirement("AUTH-1", "AUTH-5")
def test_a_token_without_a_right_reads_nothing_of_agents_on_a_ledger(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    worker = local("token", "issue", "--sub", "w", "--role", "worker").out.strip()
    commands = {("agents",): "agents.read", ("runs",): "runs.read", ("artifacts",): "artifacts.read"}
    commands |= {("proposals",): "proposals.read", ("proposals", "show", "prop_x"): "proposals.read"}
    assert [local(*command).code for command in commands] == [0, 0, 0, 0, 1], "whoever can open the file reads it"
    monkeypatch.setenv("TRELLIS_TOKEN", worker)
    for command, rule in commands.items():
        refused = local(*command)
        assert (refused.code, f"rule {rule}" in refused.err) == (1, True), (command, refused.err)


def test_a_submitter_that_requeues_all_dead_letters_is_told_that_it_may_not(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    token = local("token", "issue", "--role", "submitter", "--sub", "ada").out.strip()
    assert "nothing was requeued" in local("dlq", "requeue", "--all", "--yes").out
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    for options in ((), ("--json",)):
        refused = local("dlq", "requeue", "--all", "--yes", *options)
        assert (refused.code, refused.out) == (1, "")
        assert "the token of ada gives submitter" in refused.err
    assert local("dlq", "requeue", "--all", "--dry-run").code == 0


@pytest.mark.requirement("D62", "DJ-12")
def test_a_submitter_sees_the_ends_of_its_own_jobs_only(
    local: Terminal, work: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    ada, mallory = [
        local("token", "issue", "--sub", name, "--role", "submitter").out.strip() for name in ("ada", "mallory")
    ]
    jobs: dict[str, str] = {}
    for token in (ada, mallory):
        monkeypatch.setenv("TRELLIS_TOKEN", token)
        jobs[token] = local.submit("refuse")
    work(local.url)
    for token, other in ((ada, mallory), (mallory, ada)):
        monkeypatch.setenv("TRELLIS_TOKEN", token)
        for command in (("job", "show"), ("dlq", "show")):
            shown = local(*command, jobs[token])
            assert (shown.code, "no such customer" in shown.out) == (0, True), shown.err
            refused = local(*command, jobs[other])
            assert (refused.code, "rule jobs.read gives it for its own only" in refused.err) == (1, True)
        assert [letter["job_id"] for letter in local("dlq", "--json").records] == [jobs[token]]
        runs = local("runs")
        assert (runs.code, "rule runs.read" in runs.err) == (1, True), "as over HTTP"


@pytest.mark.requirement("D62")
def test_an_instance_with_another_issuer_does_not_take_over_the_names_of_the_first(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    async def served_before() -> None:
        ledger = await open_ledger(local.url)
        await ledger.set_home_issuer(Actor(role=Role.GATEWAY, name="g"), "https://tokens.example")
        await ledger.close()

    assert "none is recorded" in local("token", "issuer").out
    asyncio.run(served_before())
    monkeypatch.setenv("TRELLIS_TOKEN", local("token", "issue", "--role", "submitter", "--sub", "ada").out.strip())
    change = ("trellis", "--replaces", "https://tokens.example")

    def check_refused(*command: str) -> None:
        refused = local(*command)
        assert refused.code == 2, refused.err
        assert f"trellis token issuer {' '.join(change)}" in refused.err.replace("\n", " ")

    check_refused("submit", "t")
    check_refused("jobs")
    assert local("token", "issuer", *change).code == 1, "a submitter does not"
    monkeypatch.delenv("TRELLIS_TOKEN")
    check_refused("up", "--roles", "gateway", "--port", "0")  # last: a program that does not refuse would serve
    assert local("token", "issuer", "trellis", "--replaces", "https://other.example").code == 2
    assert local("token", "issuer", *change, "--json").record == {"issuer": "trellis"}
    assert local("token", "issuer").out == "trellis\n"
    assert local("submit", "t").code == 0

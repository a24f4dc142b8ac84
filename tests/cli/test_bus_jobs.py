"""`trellis submit --topic …`, and what the other commands say of a job on the bus."""

import asyncio
import json
from pathlib import Path
from typing import Any

import nats
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.text import Text

from tests.bus.test_signatures import private_file
from tests.cli.conftest import Terminal
from tests.servers.nats import running_nats
from trellis.app.wiring import new_id
from trellis.bus.messages import RESULT
from trellis.bus.outcomes.reconciler import OutcomeReconciler
from trellis.bus.pointers import make_pointers
from trellis.bus.topics import Topics
from trellis.bus.wire.streams import stream_of
from trellis.cli.invocation import Cli
from trellis.cli.job_end import RETRY_LOOK_S, EndedJob, last_retry
from trellis.cli.output import ListingColumn, Output
from trellis.engine.jobs import Actor, Advance, JobId, Move, Moved, RequestId, Turn
from trellis.engine.ledger import Ledger
from trellis.engine.restoration import GIVEN_BACK_PREFIX
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger
from trellis.operations import explain
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock

SCHEDULER = Actor(role=Role.SCHEDULER, name="scheduler@test")
KERNEL = Actor(role=Role.SAFETY_KERNEL, name="kernel@test")
DECISION = {
    "decision": "require_human",
    "rule": "deletes",
    "reason": "somebody looks",
    "policy_hash": "p",
    "job_hash": "j",
}


async def moved(ledger: Ledger, job_id: str, target: str, by: Actor, delay_s: float | None, **data: Any) -> Moved:
    body = json.dumps(data).encode()
    move = Move(job_id=JobId(job_id), target=target, request_id=RequestId(new_id()), delay_s=delay_s, data=body)
    answer = await ledger.move(by, move)
    assert isinstance(answer, Moved), answer
    return answer


def on_ledger(url: str, act: Any) -> None:
    async def run() -> None:
        ledger = await open_ledger(url)
        try:
            await act(ledger)
        finally:
            await ledger.close()

    asyncio.run(run())


def held(url: str, job_id: str) -> None:
    async def act(ledger: Ledger) -> None:
        await moved(ledger, job_id, "SCHEDULED", SCHEDULER, 0)
        await moved(ledger, job_id, "SCHEDULED", KERNEL, 3600, hold="human", decision=DECISION)

    on_ledger(url, act)


def failed(url: str, job_id: str, **more: Any) -> None:
    report = {"worker_id": "echo-1", "error_code": "BAD", "error_message": "no text", "execution_ms": 7, **more}
    reported(url, job_id, Trigger.FAIL, report)


def reported(url: str, job_id: str, trigger: str, report: dict[str, Any]) -> None:
    async def act(ledger: Ledger) -> None:
        await moved(ledger, job_id, "SCHEDULED", SCHEDULER, 0)
        sent = {"dispatch_id": "d", "worker_id": "echo-1", "subject": "worker.echo-1.jobs"}
        lease = (await moved(ledger, job_id, "DISPATCHED", SCHEDULER, None, **sent)).lease
        assert lease is not None
        body = json.dumps(report).encode()
        advances = (
            Advance(lease, "DISPATCHED", Trigger.START, data=b'{"worker_id":"echo-1"}'),
            Advance(lease, "RUNNING", trigger, data=body, result=body if trigger == Trigger.COMPLETE else None),
        )
        await ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="echo-1"), advances=advances))

    on_ledger(url, act)


def followed_up(url: str) -> None:
    """The reconciler draws its consequences."""

    async def act(ledger: Ledger) -> None:
        control = Actor(role=Role.CONTROL_PLANE, name="control@test")
        aftermath = OutcomeReconciler(ledger=ledger, actor=control, clock=FakeClock(), topics=Topics())
        while (await aftermath.run_once()).events:
            pass
        await aftermath.release()

    on_ledger(url, act)


@pytest.mark.requirement("BUS-2", "BUS-9")
def test_a_job_on_a_topic_is_submitted_with_its_payload_behind_a_pointer(local: Terminal, tmp_path: Path):
    more = '{"workflow_id": "flow", "step_index": 2, "meta": {"requires": ["gpu"]}, "budget": {"max_total_tokens": 9}}'
    job_id = local.submit(
        *("--topic", "job.echo", '{"n": 1}', "--label", "worker.region=eu", "--tenant", "acme"),
        *("--priority", "critical", "--deadline", "1m", "--parent", "order-7", "--request", more),
    )
    shown = local("job", "show", job_id, "--json").record
    assert (shown["lifecycle"], shown["status"], shown["type"]) == ("bus-job", "PENDING", "job.echo")
    asked = shown["payload"]
    told = {name: asked[name] for name in ("labels", "tenant_id", "priority", "workflow_id", "step_index", "meta")}
    assert told == {
        "labels": {"worker.region": "eu"},
        "tenant_id": "acme",
        "priority": "critical",
        "workflow_id": "flow",
        "step_index": 2,
        "meta": {"requires": ["gpu"]},
    }
    assert (asked["budget"], shown["parent_id"]) == ({"deadline_ms": 60_000, "max_total_tokens": 9}, "order-7")

    async def read() -> bytes:
        objects = await open_objects(f"file://{tmp_path / 'objects'}")
        try:
            return await make_pointers(objects, None).read(asked["context_ptr"])
        finally:
            await objects.close()

    assert asyncio.run(read()) == b'{"n":1}'


@pytest.mark.requirement("BUS-2", "BUS-11")
def test_fields_of_a_request_file_hold_unless_an_option_overrides_them(local: Terminal):
    more = {
        "job_id": "mine",
        "priority": "critical",
        "tenant_id": "acme",
        "parent_job_id": "order-7",
        "labels": {"a": "1", "b": "1"},
        "budget": {"deadline_ms": 5000, "max_total_tokens": 9},
        "memory_id": None,
    }
    job_id = local.submit("--topic", "job.echo", "1", "--request", json.dumps(more))
    asked = local("job", "show", job_id, "--json").record["payload"]
    assert (job_id, {name: asked.get(name) for name in more}) == ("mine", more)

    options = ("--id", "other", "--tenant", "b", "--label", "b=2", "--deadline", "1s", "--priority", "batch")
    job_id = local.submit("--topic", "job.echo", "1", "--request", json.dumps(more), *options)
    asked = local("job", "show", job_id, "--json").record["payload"]
    told = {name: asked[name] for name in ("job_id", "tenant_id", "labels", "budget", "priority")}
    assert told == {
        "job_id": "other",
        "tenant_id": "b",
        "labels": {"a": "1", "b": "2"},
        "budget": {"deadline_ms": 1000, "max_total_tokens": 9},
        "priority": "batch",
    }

    job_id = local.submit("--topic", "job.echo", "1", "--deadline", "0")
    assert local("job", "show", job_id, "--json").record["payload"]["budget"]["deadline_ms"] == 1, "at once"


@pytest.mark.requirement("BUS-11", "DJ-5")
def test_the_same_again_is_the_same_job_whichever_process_asks(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    first = local("submit", "--topic", "job.echo", "[1]", "--id", "mine", "--json").record
    keyed = local("submit", "--topic", "job.echo", "[2]", "--key", "k", "--json").record
    monkeypatch.setattr("os.getpid", lambda: 4242)
    again = local("submit", "--topic", "job.echo", "[1]", "--id", "mine", "--json").record
    assert (first["created"], again["created"], again["job_id"]) == (True, False, "mine")
    twice = local("submit", "job.echo", "[2]", "--lifecycle", "bus-job", "--key", "k", "--json").record
    assert (twice["job_id"], twice["created"]) == (keyed["job_id"], False)
    other = local("submit", "--topic", "job.echo", "[3]", "--id", "mine")
    assert (other.code, "mine" in other.err) == (1, True)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "--topic"),
    (("--topic", "two words"), "topic"),
    (("--topic", "job.echo", "{}", "{}"), "leave out"),
    (("--topic", "job.echo", "not json"), "not JSON"),
    (("--topic", "job.echo", "{}", "--context", "redis://x"), "exclude each other"),
    (("--topic", "job.echo", "--label", "plain"), "NAME=TEXT"),
    (("--topic", "job.echo", "--label", "retry_of=x"), "control plane"),
    (("--topic", "job.echo", "--delay", "3s"), "--delay"),
    (("--topic", "job.echo", "--max-attempts", "3"), "--max-attempts"),
    (("--topic", "job.echo", "--lifecycle", "leased-job"), "bus-job"),
    (("--topic", "job.echo", "--agent", "a"), "--agent"),
    (("--topic", "job.echo", "--request", "[]"), "JSON object"),
    (("--topic", "job.echo", "--request", '{"surprise": 1}'), "surprise"),
    (("--topic", "job.echo", "--request", '{"payload": 1}'), "say all else beside it"),
    (("--topic", "job.echo", "--request", '{"idempotency_key": "k"}'), "say all else beside it"),
    (("--topic", "job.echo", "--request", '{"budget": 5}', "--deadline", "1s"), "must be an object"),
    (("--topic", "job.echo", "--request", '{"labels": []}', "--label", "a=b"), "must be an object"),
    (("--topic", "job.echo", '"half \\ud800"'), "surrogate"),
    (("work", "--tenant", "acme"), "--topic TOPIC"),
    (("work", "--label", "a=b"), "--topic TOPIC"),
]


def test_invalid_bus_job_is_refused_with_the_reason(local: Terminal):
    for arguments, told in REFUSED:
        answer = local("submit", *arguments)
        assert (answer.code, told in answer.err) == (2, True), (arguments, answer.err)
    assert local("jobs", "--json").records == []


@pytest.mark.requirement("D45")
def test_a_job_that_waits_for_a_person_says_so_and_what_to_type(local: Terminal):
    job_id = local.submit("--topic", "job.files.delete")
    held(local.url, job_id)
    told = local("job", "explain", job_id).out
    assert "It waits for a person to approve it: somebody looks." in told
    assert "said require_human by rule 'deletes'" in told
    assert f"trellis job approve {job_id}" in told
    shown = local("job", "show", job_id).out
    assert "human: somebody looks" in shown
    assert "require_human by rule deletes" in shown
    assert "waiting for a person to decide: the safety kernel is asked again in" in told
    assert "moves it to" not in told, "what a service may do to a resting job is no news for a person"
    assert "a person to approve it" in local("jobs").out


def test_explain_of_an_undelivered_job_states_it_first(local: Terminal):
    job_id = local.submit("--topic", "job.ecko")

    async def act(ledger: Ledger) -> None:
        await moved(ledger, job_id, "SCHEDULED", SCHEDULER, 0)
        lease = (await moved(ledger, job_id, "DISPATCHED", SCHEDULER, None, subject="job.ecko")).lease
        assert lease is not None
        cause = f"{GIVEN_BACK_PREFIX}nobody listens at job.ecko"
        back = Advance(lease, "DISPATCHED", Trigger.RETRY, spare_attempt=True, cause=cause)
        await ledger.turn(Turn(actor=SCHEDULER, advances=(back,)))

    on_ledger(local.url, act)
    told = local("job", "explain", job_id).out
    assert told.splitlines()[0].endswith("is SCHEDULED, ready, but nobody listens at job.ecko.")
    assert "trellis workers" in told
    assert "a worker that can be reached" in local("jobs").out


@pytest.mark.requirement("D38")
def test_orders_that_reached_nobody_are_no_attempts(local: Terminal):
    job_id = local.submit("--topic", "job.ecko")

    async def act(ledger: Ledger) -> None:
        await moved(ledger, job_id, "SCHEDULED", SCHEDULER, 0)
        for _ in range(3):
            lease = (await moved(ledger, job_id, "DISPATCHED", SCHEDULER, None, subject="job.ecko")).lease
            assert lease is not None
            cause = f"{GIVEN_BACK_PREFIX}nobody listens at job.ecko"
            back = Advance(lease, "DISPATCHED", Trigger.RETRY, spare_attempt=True, cause=cause)
            await ledger.turn(Turn(actor=SCHEDULER, advances=(back,)))

    on_ledger(local.url, act)
    (line,) = (line for line in local("jobs").out.splitlines() if job_id in line)
    assert "1/1" in line.split()
    assert "attempt 1 of 1;" in local("job", "explain", job_id).out
    assert "1 of 1" in local("job", "show", job_id).out
    for told in (local("job", "show", job_id, "--json").record, local("jobs", "--json").record):
        assert (told["attempt"], told["max_attempts"], "spared" in told) == (1, 1, False)


@pytest.mark.requirement("D45")
def test_approver_of_a_job_is_shown_until_it_is_held_for_approval_again(local: Terminal):
    job_id = local.submit("--topic", "job.files.delete")
    held(local.url, job_id)
    short = local("job", "deny", job_id)
    assert (short.code, "Saying no needs a note of at least 10 characters" in short.err) == (1, True)
    assert local("job", "approve", job_id, "--note", "the backup is from today").code == 0
    assert "approved it: the backup is from today." in local("job", "explain", job_id).out
    assert "approved" in local("job", "show", job_id).out
    again = {"hold": "human", "decision": DECISION}
    on_ledger(local.url, lambda ledger: moved(ledger, job_id, "SCHEDULED", KERNEL, 3600, **again))
    assert "approved it" not in local("job", "explain", job_id).out


@pytest.mark.requirement("BUS-2")
def test_a_failed_bus_job_is_shown_with_worker_code_and_time(local: Terminal):
    job_id = local.submit("--topic", "job.echo")
    failed(local.url, job_id)
    shown = " ".join(local("job", "show", job_id).out.split())
    assert "worker echo-1" in shown
    assert "error BAD: no text" in shown
    told = local("job", "explain", job_id).out
    assert "job_failed, RUNNING → FAILED, by echo-1 (worker): BAD: no text." in told
    assert "Worker echo-1 took 7 ms over it." in told
    assert f"trellis job requeue {job_id}" in told
    again = local("job", "requeue", job_id, "--cause", "the text is there now", "--json").record
    assert "run again the text is there now" in " ".join(local("job", "show", again["job_id"]).out.split())
    assert (again["requeued"], again["status"], again["job_id"].startswith(job_id)) == (True, "PENDING", True)
    early = local("job", "requeue", again["job_id"])
    assert (early.code, "only DENIED, FAILED, TIMEOUT" in early.err) == (1, True)
    assert local("job", "result", job_id).code == 1
    waited = local("submit", "--topic", "job.echo", "--wait", "0.01")
    assert (waited.code, "has not ended" in waited.err) == (1, True)


def test_text_of_a_worker_cannot_control_the_terminal(local: Terminal):
    local.submit("--topic", "job.echo", "--id", "a")
    failed(local.url, "a", error_code="E\x1b[31m", error_message="\x1b]0;mine\x07 \x9b2J \u202e txt.exe")
    for arguments in (
        ("job", "show", "a"),
        ("job", "explain", "a"),
        ("events", "a"),
        ("submit", "--topic", "job.echo", "--id", "a", "--wait", "1s"),
    ):
        answer = local(*arguments)
        told = answer.out + answer.err
        assert "\\x1b[31m" in told, arguments
        assert not set("\x1b\x07\x9b\u202e") & set(told), arguments


def test_control_characters_are_escaped_on_a_coloured_terminal(capsys: pytest.CaptureFixture[str]):
    output, told = Output(as_json=False), Text.assemble(("no ", "red"), "\x1b]0;mine \u202e", " [x]")
    output.facts([("error", told)])
    output.listing([told], [ListingColumn[Text](title="ERROR", cell=lambda one: one)], empty="")
    assert capsys.readouterr().out.count("no \\x1b]0;mine \\u202e [x]") == 2


@pytest.mark.requirement("D45")
def test_approver_sees_everything_sent_to_the_worker_including_invisible_characters(local: Terminal):
    hidden = "\u200b\u00ad\u061c\u200f\U000e0041\u2066\u3164"
    request = {
        "memory_id": "memory-of-somebody",
        "context_hints": {"tags": ["deep"]},
        "budget": {"max_total_tokens": 9},
        "meta": {"pack_id": "pack-7", "actor_id": "bot-7", "labels": {"x": f"a{hidden}b"}},
        "compensation": {"topic": "job.files.undo", "env": {"MODE": "wipe"}},
    }
    job_id = local.submit("--topic", "job.files.delete", "--request", json.dumps(request))
    held(local.url, job_id)
    shown = local("proposals", "show", f"approval-{job_id}", "--json").record["content"]["order"]
    assert {name: shown[name] for name in request} == request
    for command in (("proposals", "show", f"approval-{job_id}"), ("job", "show", job_id)):
        told = local(*command).out
        for word in ("memory-of-somebody", "deep", "max_total_tokens", "pack-7", "bot-7", "job.files.undo", "wipe"):
            assert word in told, (command, word)
        assert not set(hidden) & set(told), command
        assert "\\u200b\\xad\\u061c\\u200f\\U000e0041\\u2066\\u3164" in told, command


@pytest.mark.requirement("D45", "BUS-9")
def test_an_approval_names_the_command_that_shows_the_input_of_the_worker(local: Terminal):
    job_id = local.submit("--topic", "job.files.delete", '{"path": "/srv/old"}')
    held(local.url, job_id)
    order = f"trellis job context {job_id}"
    assert order in local("job", "explain", job_id).out
    assert order in " ".join(local("job", "show", job_id).out.split())
    shown = local("proposals", "show", f"approval-{job_id}")
    assert order in " ".join(shown.err.split())
    assert "objects://ctx/" in shown.out
    whole = local("proposals", "show", f"approval-{job_id}", "--json").record
    assert whole["content"]["context_ptr"].startswith("objects://ctx/")
    assert local("job", "context", job_id).out == '{"path":"/srv/old"}\n'
    assert local("job", "context", job_id, "--json").record == {"job_id": job_id, "context": {"path": "/srv/old"}}
    elsewhere = local.submit("--topic", "job.echo", "--context", "objects://res/x")
    refused = local("job", "context", elsewhere)
    assert (refused.code != 0, "only what is kept as ctx" in refused.err) == (True, True)
    for arguments, told in ((("--topic", "job.echo"), "has none"), (("work",), "is a leased-job")):
        answer = local("job", "context", local.submit(*arguments))
        assert (answer.code, told in " ".join(answer.err.split())) == (1, True)


@pytest.mark.requirement("D62", "BUS-9")
def test_a_token_that_may_not_approve_reads_no_content_under_a_pointer_that_it_wrote_itself(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRELLIS_TOKEN", local("token", "issue", "--role", "submitter").out.strip())
    own, chosen = (
        local.submit("--topic", "job.echo", *more) for more in (['{"n": 1}'], ["--context", "objects://ctx/mine"])
    )
    assert local("job", "context", own).out == '{"n":1}\n'
    refused = local("job", "context", chosen)
    assert (refused.code, "jobs.approve" in refused.err) == (1, True)


@pytest.mark.requirement("BUS-7")
def test_explain_names_the_last_retry_also_when_it_failed_too(local: Terminal):
    local.submit("--topic", "job.echo", "--id", "mine")
    failed(local.url, "mine", status="FAILED_RETRYABLE")
    assert "It is about to be done again under another id" in local("job", "explain", "mine").out
    followed_up(local.url)
    told = local("job", "explain", "mine").out
    assert "It was done again as mine.r1, which is SCHEDULED." in told
    assert ("trellis job explain mine.r1" in told, "job requeue" in told) == (True, False)
    failed(local.url, "mine.r1", status="FAILED_FATAL")
    told = local("job", "explain", "mine").out
    assert "It was done again as mine.r1, which is FAILED." in told
    assert ("trellis job explain mine.r1" in told, "trellis job requeue mine" in told) == (True, True)
    over = local("job", "cancel", "mine")
    assert (over.code, "mine.r1, which is FAILED" in " ".join(over.err.split())) == (1, True)


@pytest.mark.requirement("BUS-7")
def test_waiting_for_a_retried_bus_job_waits_for_its_retry(local: Terminal):
    for name in ("good", "bad"):
        local.submit("--topic", "job.echo", "--id", name)
        failed(local.url, name, status="FAILED_RETRYABLE")
    followed_up(local.url)
    slow = local("submit", "--topic", "job.echo", "--id", "good", "--wait", "20ms")
    assert (slow.code, "good.r1 has not ended after" in " ".join(slow.err.split())) == (1, True)
    reported(local.url, "good.r1", Trigger.COMPLETE, {"worker_id": "echo-1", "result_ptr": "objects://res/x"})
    failed(local.url, "bad.r1", status="FAILED_FATAL", error_code="WORSE")
    waited = local("submit", "--topic", "job.echo", "--id", "good", "--wait", "30s", "--json")
    assert (waited.code, waited.record["job_id"]) == (0, "good.r1")
    assert waited.record["result"]["result_ptr"] == "objects://res/x"
    assert "good is FAILED (BAD: no text); it is done again as good.r1" in " ".join(waited.err.split())
    in_vain = local("submit", "--topic", "job.echo", "--id", "bad", "--wait", "30s")
    told = " ".join(in_vain.err.split())
    assert (in_vain.code, "bad is FAILED (BAD: no text)" in told) == (1, True)
    assert ("bad.r1" in told, "WORSE: no text" in told) == (True, True)


class Hurried(FakeClock):
    """Time that passes when somebody waits for it."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@pytest.mark.requirement("BUS-7")
async def test_a_retry_that_is_not_made_yet_is_waited_for_as_long_as_there_is_time(capsys: pytest.CaptureFixture[str]):
    cli = Cli(ledger=None, data=None, out=Output(as_json=False))
    asked = list[str]()

    async def look(job_id: str, left_s: float) -> EndedJob:
        asked.append(job_id)
        if job_id == "a.r1":
            return EndedJob(state="SUCCEEDED")
        return EndedJob(state="FAILED", error="E", due=len(asked) < 3, retry=None if len(asked) < 3 else "a.r1")

    job_id, left_s = await last_retry(cli, look, "a", 10.0, Hurried())
    assert (job_id, round(left_s, 3)) == ("a.r1", round(10.0 - 2 * RETRY_LOOK_S, 3))
    assert asked == ["a", "a", "a", "a.r1"]
    asked.clear()
    assert (await last_retry(cli, look, "a", 1.5 * RETRY_LOOK_S, Hurried()))[0] == "a"
    assert "a is FAILED (E); it is about to be done again" in capsys.readouterr().err


def test_doctor_looks_at_what_is_set_about_the_bus(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checks = {one["check"] for one in local("doctor", "--json").records if "check" in one}
    assert not checks & {"bus", "bus config", "policy", "redis"}
    (tmp_path / "bus.toml").write_text('[topics."job.>"]\npools = ["gone"]\n')
    (tmp_path / "policy.toml").write_text('[[rules]]\nid = "a"\ndecision = "maybe"\n')
    monkeypatch.setenv("TRELLIS_BUS", "nats://user:hush@127.0.0.1:1")
    monkeypatch.setenv("TRELLIS_POLICY", str(tmp_path / "policy.toml"))
    monkeypatch.setenv("TRELLIS_REDIS", "redis://:hush@127.0.0.1:1/0")
    answer = local("doctor", "--json")
    found = {one["check"]: one["severity"] for one in answer.records if "check" in one}
    assert {name: found[name] for name in ("bus", "bus config", "policy", "redis")} == {
        "bus": "error",
        "bus config": "error",
        "policy": "error",
        "redis": "error",
    }
    assert (answer.code, "hush" in answer.out + answer.err) == (1, False)
    (tmp_path / "bus.toml").write_text("[pools.code]\n")
    monkeypatch.delenv("TRELLIS_POLICY")
    found = {one["check"]: one["severity"] for one in local("doctor", "--json").records if "check" in one}
    assert (found["bus config"], found["policy"]) == ("ok", "warning")


def test_doctor_says_that_the_bus_refuses_the_credentials(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    with running_nats(settings="authorization { users: [ {user: ann, password: s3cret} ] }") as server:
        monkeypatch.setenv("TRELLIS_BUS", server.url.replace("//", "//ann:old@"))
        (found,) = [one for one in local("doctor", "--json").records if one.get("check") == "bus"]
    assert found["severity"] == "error"
    assert found["remedy"].startswith("correct the credentials in TRELLIS_BUS or TRELLIS_BUS_CREDS_FILE")


def test_doctor_says_that_no_stream_keeps_packets(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    def found() -> dict[str, str]:
        return next(one for one in local("doctor", "--json").records if one.get("check") == "bus")

    async def make_stream() -> None:
        client = await nats.connect(server.url)
        await stream_of(client, RESULT)
        await client.close()

    with running_nats(jetstream=True) as server:
        monkeypatch.setenv("TRELLIS_BUS", server.url)
        told = found()
        assert (told["severity"], "stream_unusable" in told["remedy"]) == ("warning", True)
        asyncio.run(make_stream())
        assert found()["severity"] == "ok"


def test_doctor_looks_at_the_keys_of_the_bus(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def found() -> tuple[str, str] | None:
        records = [one for one in local("doctor", "--json").records if one.get("check") == "bus keys"]
        return (records[0]["severity"], records[0]["detail"]) if records else None

    def written(name: str, curve: ec.EllipticCurve) -> Path:
        private = ec.generate_private_key(curve)
        plain = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
        private_file(tmp_path / name, private.private_bytes(plain[2], plain[1], plain[0]))
        public = private.public_key().public_bytes(plain[2], serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / name).with_suffix(".public").write_bytes(public)
        return tmp_path / name

    monkeypatch.setenv("TRELLIS_BUS", "nats://127.0.0.1:1")
    assert found() is None
    monkeypatch.setenv("TRELLIS_BUS_KEY_FILE", str(written("other.key", ec.SECP384R1())))
    assert "P-256" in str(found())
    (tmp_path / "keys").mkdir()
    monkeypatch.setenv("TRELLIS_BUS_KEY_FILE", str(written("own.key", ec.SECP256R1())))
    monkeypatch.setenv("TRELLIS_BUS_KEYS_DIR", str(tmp_path / "keys"))
    monkeypatch.setenv("TRELLIS_BUS_REQUIRE_SIGNATURES", "true")
    assert found() == ("error", f"0 keys of others in {tmp_path / 'keys'}: every packet is dropped")
    (tmp_path / "keys" / "w-1.pem").write_bytes((tmp_path / "own.public").read_bytes())
    assert found() == ("ok", "packets are signed, 1 key of others")


def test_settings_of_the_bus_are_checked_and_secrets_not_repeated(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    for name, value, told in (
        ("TRELLIS_BUS", "kafka://user:hush@x", "nats://127.0.0.1:4222"),
        ("TRELLIS_BUS_REQUIRE_SIGNATURES", "true", "TRELLIS_BUS_KEYS_DIR"),
        ("TRELLIS_BUS_SENDER", "two words", "TRELLIS_BUS_SENDER"),
    ):
        monkeypatch.setenv(name, value)
        answer = local("jobs")
        assert (answer.code, told in answer.err, "hush" in answer.err) == (2, True, False), answer.err
        monkeypatch.delenv(name)


def test_explain_of_a_job_on_a_topic_says_that_the_bus_cannot_be_reached(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(explain, "SERVICE_SLOW_S", -1.0)  # longer than any service takes
    job_id = local.submit("--topic", "job.echo", "{}")
    inside = local("job", "explain", job_id).out
    monkeypatch.setenv("TRELLIS_BUS", "nats://user:hush@127.0.0.1:1")
    outside = " ".join(local("job", "explain", job_id).out.split())
    assert "The bus at nats://127.0.0.1:1 does not answer" in outside
    assert "Start that server, or correct TRELLIS_BUS: until then jobs on topics wait, and none is lost." in outside
    assert "hush" not in outside
    assert "The bus at" not in inside

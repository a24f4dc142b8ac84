"""`trellis submit --topic …`, and what the other commands say of a job on the bus."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Terminal
from trellis.bus.pointers import make_pointers
from trellis.engine.jobs import Actor, Advance, JobId, Move, Moved, RequestId, Turn
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger
from trellis.storage.open import open_objects
from trellis.wiring import new_id

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


def failed(url: str, job_id: str) -> None:
    async def act(ledger: Ledger) -> None:
        await moved(ledger, job_id, "SCHEDULED", SCHEDULER, 0)
        sent = {"dispatch_id": "d", "worker_id": "echo-1", "subject": "worker.echo-1.jobs"}
        lease = (await moved(ledger, job_id, "DISPATCHED", SCHEDULER, None, **sent)).lease
        assert lease is not None
        report = {"worker_id": "echo-1", "error_code": "BAD", "error_message": "no text", "execution_ms": 7}
        advances = (
            Advance(lease, "DISPATCHED", Trigger.START, data=b'{"worker_id":"echo-1"}'),
            Advance(lease, "RUNNING", Trigger.FAIL, data=json.dumps(report).encode()),
        )
        await ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="echo-1"), advances=advances))

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
    (("work", "--tenant", "acme"), "--topic TOPIC"),
    (("work", "--label", "a=b"), "--topic TOPIC"),
]


def test_what_is_no_job_on_a_topic_is_refused_with_the_reason(local: Terminal):
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


@pytest.mark.requirement("D45")
def test_who_approved_a_job_is_told_until_it_is_held_again(local: Terminal):
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
def test_a_failure_is_told_with_worker_code_and_time(local: Terminal):
    job_id = local.submit("--topic", "job.echo")
    failed(local.url, job_id)
    shown = " ".join(local("job", "show", job_id).out.split())
    assert "worker echo-1" in shown
    assert "error BAD: no text" in shown
    told = local("job", "explain", job_id).out
    assert "job_failed, RUNNING → FAILED, by echo-1 (worker): BAD: no text." in told
    assert "Worker echo-1 took 7 ms over it." in told
    assert f"trellis job requeue {job_id}" in told
    again = local("job", "requeue", job_id, "--json").record
    assert (again["requeued"], again["status"], again["job_id"].startswith(job_id)) == (True, "PENDING", True)
    early = local("job", "requeue", again["job_id"])
    assert (early.code, "only DENIED, FAILED, TIMEOUT" in early.err) == (1, True)
    assert local("job", "result", job_id).code == 1
    waited = local("submit", "--topic", "job.echo", "--wait", "0.01")
    assert (waited.code, "has not ended" in waited.err) == (1, True)


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


def test_settings_of_the_bus_are_checked_and_secrets_not_repeated(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    for name, value, told in (
        ("TRELLIS_BUS", "kafka://user:hush@x", "nats://127.0.0.1:4222"),
        ("TRELLIS_BUS_REQUIRE_SIGNATURES", "true", "bus_keys_dir"),
        ("TRELLIS_BUS_SENDER", "two words", "TRELLIS_BUS_SENDER"),
    ):
        monkeypatch.setenv(name, value)
        answer = local("jobs")
        assert (answer.code, told in answer.err, "hush" in answer.err) == (2, True, False), answer.err
        monkeypatch.delenv(name)

"""`trellis submit`: what goes in, and everything that does not."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from trellis.engine.jobs import Actor
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

LIMIT = 1024 * 1024


def jobs(trellis: Terminal) -> list[str]:
    return [record["job_id"] for record in trellis("jobs", "--json").records]


def test_a_submitted_job_is_printed_listed_and_shown(trellis: Terminal):
    job_id = trellis.submit("index.document", '{"id": 7}', "--priority", "interactive", "--correlation", "case-1")
    assert jobs(trellis) == [job_id]
    shown = trellis("job", "show", job_id, "--json").record
    assert shown["payload"] == {"id": 7}
    assert (shown["priority"], shown["correlation_id"], shown["attempt"]) == ("interactive", "case-1", 1)
    assert [event["type"] for event in shown["events"]] == ["job_queued"]


@pytest.mark.requirement("DJ-5")
def test_the_same_key_is_the_same_job_and_another_request_under_it_is_refused(trellis: Terminal):
    first = trellis.submit("index.document", "1", "--key", "doc-7")
    again = trellis("submit", "index.document", "1", "--key", "doc-7", "--json")
    assert again.record == {"job_id": first, "lifecycle": "leased-job", "status": "queued", "created": False}
    other = trellis("submit", "index.document", "2", "--key", "doc-7")
    assert other.code == 1
    assert first in other.err
    assert jobs(trellis) == [first]


@pytest.mark.requirement("BUS-11")
@pytest.mark.parametrize("what", [("a",), ("--topic", "job.echo")], ids=["type", "topic"])
def test_an_id_that_the_engine_derives_is_refused(local: Terminal, what: tuple[str, ...]):
    refused = local("submit", *what, "--id", "theirs.c")
    assert refused.code == 2
    assert "choose another id" in refused.err
    assert jobs(local) == []


def test_delay_and_start_time_are_kept(trellis: Terminal):
    trellis.submit("a", "--delay", "2h")
    trellis.submit("a", "--run-at", "2031-01-02T03:04:05+00:00")
    later, delayed = trellis("jobs", "--json").records
    assert later["due_at"] == "2031-01-02T03:04:05.000Z"
    assert (later["place"], delayed["place"]) == ("scheduled", "scheduled")


def test_a_keyed_job_waits_behind_the_other(trellis: Terminal):
    first = trellis.submit("a", "--concurrency-key", "tenant-1")
    second = trellis.submit("a", "--concurrency-key", "tenant-1")
    places = {r["job_id"]: r["place"] for r in trellis("jobs", "--concurrency-key", "tenant-1", "--json").records}
    assert places == {first: "ready", second: "blocked"}
    told = trellis("job", "explain", second)
    assert "blocked by its concurrency key 'tenant-1'" in told.out
    text = " ".join(told.out.split())
    assert f"At most 1 job with key 'tenant-1' may be held at once, and {first} holds the slot." in text
    third, fourth, fifth = (
        trellis.submit("a", "--concurrency-key", "two", "--concurrency-limit", "2", "--id", id_) for id_ in "cde"
    )
    text = " ".join(trellis("job", "explain", fifth).out.split())
    assert re.search(
        rf"At most 2 jobs with key 'two' may be held at once, and {fourth} and {third} hold slots\.", text
    ), text


def test_submit_warns_at_a_terminal_where_only_a_worker_on_the_bus_serves_the_type(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    async def beat(name: str, info: bytes) -> None:
        ledger = await open_ledger(local.url)
        await ledger.heartbeat_worker(Actor(role=Role.WORKER, name=name), info)
        await ledger.close()

    monkeypatch.setenv("FORCE_COLOR", "1")
    asyncio.run(beat("up-1", b'{"bus": true, "types": ["job.echo"]}'))
    warned = local("submit", "job.echo", "1").err
    assert "no living worker serves job.echo: the job waits until one does" in warned
    assert "on the bus one serves the topic (`trellis submit --topic job.echo" in warned
    asyncio.run(beat("w-1", b'{"types": ["job.echo"]}'))
    assert "no living worker" not in local("submit", "job.echo", "2").err


def test_jobs_notes_the_types_that_no_living_worker_serves(trellis: Terminal):
    async def beat(name: str, info: bytes) -> None:
        ledger = await open_ledger(trellis.url)
        await ledger.heartbeat_worker(Actor(role=Role.WORKER, name=name), info)
        await ledger.close()

    trellis.submit("gret")
    trellis.submit("greet", "--id", "served")
    asyncio.run(beat("w-1", b'{"types": ["greet"]}'))
    assert trellis("jobs").err == "no living worker serves gret; perhaps you mean greet\n"
    assert trellis("jobs", "--json").err == ""
    assert trellis("jobs", "--type", "greet").err == ""
    assert trellis("job", "cancel", "--hard", "served").code == 0
    asyncio.run(beat("w-1", b'{"types": ["gret"]}'))
    assert trellis("jobs").err == ""


def test_the_payload_comes_from_a_file_or_standard_input(local: Terminal, tmp_path: Path):
    (tmp_path / "body.json").write_text('{"from": "file"}')
    by_file = local.submit("a", "@body.json")
    by_stdin = local("submit", "a", "-", stdin=b'{"from": "stdin"}').out.strip()
    payloads = [local("job", "show", job_id, "--json").record["payload"]["from"] for job_id in (by_file, by_stdin)]
    assert payloads == ["file", "stdin"]


def test_waiting_prints_the_result(local: Terminal, work):
    job_id = local.submit("double", "21", "--id", "d-1")
    work(local.url)
    waited = local("submit", "double", "21", "--id", "d-1", "--wait", "5s")
    assert (job_id, waited.code, waited.out) == ("d-1", 0, "42\n")


def test_the_end_of_a_job_that_was_submitted_before_is_waited_for(local: Terminal, work):
    for type_, job_id in (("double", "d-1"), ("refuse", "r-1"), ("nobody", "n-1")):
        local.submit(type_, "21", "--id", job_id)
    work(local.url)
    waited = {job_id: local("job", "wait", job_id, "--for", "10ms") for job_id in ("d-1", "r-1", "n-1", "x-1")}
    assert {job_id: answer.code for job_id, answer in waited.items()} == {"d-1": 0, "r-1": 1, "n-1": 1, "x-1": 1}
    assert waited["d-1"].out == "42\n"
    assert local("job", "wait", "d-1", "--json").record == {"job_id": "d-1", "result": 42}
    assert "no such customer" in waited["r-1"].err
    assert "n-1 has not ended" in waited["n-1"].err
    assert "x-1" in waited["x-1"].err


def test_waiting_says_when_time_is_over(local: Terminal):
    waited = local("submit", "double", "21", "--id", "d-1", "--wait", "10ms")
    assert waited.code == 1
    assert "d-1 has not ended" in waited.err
    assert "trellis job explain d-1" in waited.err


def test_waiting_for_a_job_that_ends_otherwise_says_why(local: Terminal, work):
    local.submit("refuse", "--id", "r-1")
    work(local.url)
    waited = local("submit", "refuse", "--id", "r-1", "--wait", "5s")
    assert waited.code == 1
    assert "no such customer" in waited.err
    assert f"trellis dlq show r-1 --ledger {local.url}" in waited.err, "a dead job has a dead letter"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["a", "{oops"], "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (["a", "NaN"], "NaN is no JSON number"),
        (["a", "1e999"], "too large"),
        (["a", "[" * 5000 + "]" * 5000], "nested too deeply"),
        (["a", "@missing.json"], "the file cannot be read"),
        (["a", "--delay", "-5"], "must not be negative"),
        (["a", "--delay", "soon"], "30s, 10m, 2h"),
        (["a", "--run-at", "tomorrow"], "ISO 8601"),
        (["a", "--run-at", "2031-01-02T03:04:05"], "time zone"),
        (["a", "--deadline", "-1s"], "must not be negative"),
        (["a", "--priority", "urgent"], "critical, interactive, batch"),
        (["a", "--max-attempts", "0"], "from 1 to"),
        (["a", "--max-attempts", "many"], "valid integer"),
        (["a", "--id", "no spaces"], "must match"),
        (["a", "--key", ""], "1 to 200 characters"),
        (["a", "--concurrency-limit", "0"], "from 1 to"),
        (["a", "--lifecycle", "leased-jobs"], "perhaps you mean leased-job"),
        (["no such type"], "must match"),
        (["a", "--colour", "red"], "No such option"),
        (["a", "1", "2"], "unexpected extra argument"),
    ],
)
def test_invalid_submit_is_refused_with_a_remedy_and_writes_no_job(local: Terminal, arguments, says):
    answer = local("submit", *arguments)
    assert answer.code == 2
    assert says in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""
    assert jobs(local) == []


@pytest.mark.parametrize("given", ["stdin", "file"])
def test_payload_one_byte_over_the_limit_is_refused_and_one_at_the_limit_is_not(
    local: Terminal, tmp_path: Path, given: str
):
    fits = json.dumps("x" * (LIMIT - 2)).encode()
    assert len(fits) == LIMIT
    for body, code in ((fits, 0), (fits[:-1] + b'x"', 2)):
        (tmp_path / "body.json").write_bytes(body)
        answer = local("submit", "a", "-" if given == "stdin" else "@body.json", stdin=body)
        assert answer.code == code, answer.err
    assert "limit is 1048576" in answer.err
    assert len(jobs(local)) == 1


APPLICATION = """
from trellis import App, Context
app = App()
@app.job("double")
async def double(ctx: Context, number: int) -> int:
    return 2 * number
"""


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["dubble", "1"], "No handler is registered for job type 'dubble'; known types: double"),
        (["double", '"one"'], "valid integer"),
    ],
)
def test_an_application_checks_type_and_payload(local: Terminal, tmp_path: Path, arguments, says):
    (tmp_path / "checked_shop.py").write_text(APPLICATION)
    answer = local("submit", *arguments, "--app", "checked_shop:app")
    assert (answer.code, jobs(local)) == (2, [])
    assert says in answer.err
    assert local("submit", "double", "1", "--app", "checked_shop:app").code == 0


def test_submitted_job_has_the_priority_of_its_handler_unless_given(local: Terminal, tmp_path: Path):
    (tmp_path / "urgent_shop.py").write_text(APPLICATION.replace('"double"', '"double", priority="critical"'))
    for option, priority in (((), "critical"), (("--priority", "interactive"), "interactive")):
        job_id = local.submit("double", "1", "--app", "urgent_shop:app", *option)
        assert local("job", "show", job_id, "--json").record["priority"] == priority
    assert local("job", "show", local.submit("other"), "--json").record["priority"] == "batch"

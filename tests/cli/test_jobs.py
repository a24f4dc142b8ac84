"""`trellis jobs` and `trellis job …`."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.cli.conftest import Terminal
from tests.cli.test_explain import NOW, job
from trellis.cli.jobs import _columns, signal_lines
from trellis.cli.output import as_record
from trellis.engine.jobs import Actor, JobId
from trellis.engine.records import Signal
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role


def test_listings_filter_and_page(trellis: Terminal, work):
    ids = [trellis.submit("double", str(number)) for number in range(3)]
    work(trellis.url)
    waiting = trellis.submit("other.type", "--correlation", "case-9", "--parent", ids[0])
    assert [r["job_id"] for r in trellis("jobs", "--json", "--state", "succeeded").records] == ids[::-1]
    assert trellis("jobs", "--ids", "--status", "succeeded").out.split() == ids[::-1]
    assert [r["job_id"] for r in trellis("jobs", "--json", "--type", "other.type").records] == [waiting]
    assert [r["job_id"] for r in trellis("jobs", "--json", "--correlation", "case-9").records] == [waiting]
    assert [r["job_id"] for r in trellis("jobs", "--json", "--parent", ids[0]).records] == [waiting]
    assert trellis("jobs", "--json", "--lifecycle", "run").records == []
    page = trellis("jobs", "--json", "--limit", "3")
    cursor = page.err.partition("--cursor ")[2].strip()
    rest = trellis("jobs", "--json", "--cursor", cursor)
    assert [r["job_id"] for r in page.records + rest.records] == [waiting, *ids[::-1]]
    assert rest.err == ""


def test_a_table_is_cut_for_a_terminal_and_complete_in_a_pipe(trellis: Terminal):
    job_id = trellis.submit("a.type.with.a.long.name." + "x" * 100)
    header, row = trellis("jobs").out.splitlines()
    assert header.split() == ["JOB", "TYPE", "STATUS", "TRY", "AGE", "WAITS", "FOR"]
    assert row.split()[:4] == [job_id, "a.type.with.a.long.name." + "x" * 100, "queued", "1/5"]
    assert "\x1b" not in row
    assert row == row.rstrip()


def test_a_ready_job_of_a_type_with_a_rate_waits_for_it(local: Terminal):
    async def limit() -> None:
        ledger = await open_ledger(local.url)
        await ledger.limit_rate(Actor(role=Role.CONTROL_PLANE, name="op"), "metered", 2.0, burst=1)
        await ledger.close()

    local.submit("metered")
    local.submit("free")
    asyncio.run(limit())
    free, metered = local("jobs").out.splitlines()[1:]
    assert metered.endswith("the rate of its type (2 a second)")
    assert "rate" not in free


def test_an_empty_list_of_jobs_is_noted_on_stderr_and_not_in_the_answer(trellis: Terminal):
    answer = trellis("jobs")
    assert (answer.code, answer.out) == (0, "")
    assert "No job" in answer.err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--state", "runing"], "--state) is 'runing': perhaps you mean running"),
        (["--state", "nonsense"], "leased-job has queued, assigned, running, succeeded"),
        (["--state", "nonsense", "--lifecycle", "run"], "run has requested, queued, running, completed, failed"),
        (["--state", "complete"], "perhaps you mean COMPLETE"),
        (["--state", "queued", "--lifecycle", "queue-job"], "perhaps you mean QUEUED"),
        (["--lifecycle", "queue_job"], "perhaps you mean queue-job"),
        (["--limit", "0"], "from 1 to"),
    ],
)
def test_a_filter_that_names_nothing_is_refused_with_the_nearest_name(local: Terminal, arguments, says):
    answer = local("jobs", *arguments)
    assert answer.code == 2
    assert says in answer.err


def test_a_cursor_that_no_page_gave_is_refused(trellis: Terminal):
    answer = trellis("jobs", "--cursor", "nonsense")
    assert (answer.code, "cursor" in answer.err) == (2, True)


def test_show_prints_the_job_its_events_and_its_result(trellis: Terminal, work):
    job_id = trellis.submit("double", "21")
    work(trellis.url)
    shown = trellis("job", "show", job_id)
    for text in (job_id, "succeeded", "21", "42", "job_claimed", "job_succeeded", "doubling"):
        assert text in shown.out
    record = trellis("job", "show", job_id, "--json").record
    assert record["result"] == 42
    assert [event["payload"]["to"] for event in record["events"]] == ["queued", "assigned", "running", "succeeded"]


def test_captured_log_lines_are_read_as_lines(trellis: Terminal, work):
    job_id = trellis.submit("double", "21")
    work(trellis.url)
    (line,) = [line for line in trellis("job", "show", job_id).out.splitlines() if "doubling" in line]
    assert re.fullmatch(r"\d\d:\d\d:\d\d info     doubling number=21", line)
    (signal,) = trellis("job", "show", job_id, "--json").record["signals"]
    assert signal["data"]["fields"] == {"number": 21}


def test_a_captured_traceback_has_lines_of_its_own():
    said = {"level": "error", "event": "it broke", "fields": {"why": "no [luck]", "traceback": "Traceback\n  boom"}}
    at = datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)
    broken = Signal(job_id=JobId("j"), type="job_log", ts=at, data=json.dumps(said).encode())
    lines = ['12:00:01 error    it broke why="no [luck]"', "    Traceback", "      boom"]
    assert list(signal_lines(broken)) == lines
    progress = Signal(job_id=JobId("j"), type="job_heartbeat", ts=at, data=b'{"page": 3}')
    assert list(signal_lines(progress)) == ['12:00:01 progress {"page": 3}']


def test_job_listing_shows_age_and_wait_reason(trellis: Terminal):
    delayed = trellis.submit("a", "--delay", "1h")
    first = trellis.submit("a", "--concurrency-key", "t1")
    parked = trellis.submit("a", "--concurrency-key", "t1")
    rows = {line.split()[0]: line for line in trellis("jobs").out.splitlines()[1:]}
    assert "its time, in " in rows[delayed]
    assert rows[parked].endswith("key t1")
    assert re.fullmatch(r"\d+s", rows[first].split()[-1])


def test_age_counts_from_the_submit():
    (column,) = [column for column in _columns(NOW, {}) if column.title == "AGE"]
    assert column.cell(as_record(replace(job(), updated_at=NOW))) == "2m"


def test_brackets_in_the_text_of_a_job_are_shown_unchanged(local: Terminal, work):
    job_id = local.submit("mutter", "--correlation", "[/red]")
    work(local.url)
    assert local("dlq", "--ids").out == f"{job_id}\n"
    for arguments in (["job", "show", job_id], ["job", "explain", job_id], ["events", job_id], ["dlq"]):
        assert "expected [bold] or [/nothing]" in local(*arguments).out
    assert "[/red]" in local("job", "show", job_id).out


@pytest.mark.parametrize("verb", ["show", "explain", "cancel", "requeue"])
def test_an_unknown_job_is_an_answer_and_no_traceback(trellis: Terminal, verb: str):
    answer = trellis("job", verb, "no-such-job")
    assert answer.code == 1
    assert "There is no job 'no-such-job'" in answer.err
    assert "trellis jobs" in answer.err


def test_cancel_ends_a_waiting_job_once(trellis: Terminal):
    job_id = trellis.submit("a")
    assert trellis("job", "cancel", job_id, "--cause", "not needed").out == f"{job_id} is cancelled\n"
    record = trellis("job", "show", job_id, "--json").record
    assert (record["status"], record["events"][-1]["cause"]) == ("cancelled", "not needed")
    assert "0/5" in trellis("jobs").out, "nobody tried it"
    assert [line.split()[3] for line in trellis("events", job_id).out.splitlines()[2:]] == ["1", "0"], "as in `jobs`"
    assert "0 of 5" in trellis("job", "show", job_id).out
    again = trellis("job", "cancel", job_id)
    assert again.code == 1
    assert f"Job {job_id} has ended already: it is cancelled since" in again.err
    assert "ago." in again.err


@pytest.mark.requirement("D38")
def test_a_job_cancelled_while_it_waits_for_its_next_attempt_shows_those_it_made(
    trellis: Terminal, held: Callable[[str], Callable[..., None]]
):
    job_id = trellis.submit("double", "{}")
    held(trellis.url)("retry", cause="the shop was closed")
    assert "2/5" in trellis("jobs").out, "it waits for its second"
    assert trellis("job", "cancel", job_id).code == 0
    assert [line.split()[3] for line in trellis("events", job_id).out.splitlines()[2:]][-1] == "1"
    assert "1/5" in trellis("jobs").out, "as in `events`"
    assert "1 of 5" in trellis("job", "show", job_id).out
    assert {trellis(*one, "--json").record["attempts_made"] for one in (("jobs",), ("job", "show", job_id))} == {1}


@pytest.mark.requirement("D39")
def test_requeue_opens_a_generation_of_failed_jobs_only(trellis: Terminal, work):
    failed, done = trellis.submit("break"), trellis.submit("double", "1")
    work(trellis.url)
    assert trellis("job", "requeue", failed, "--cause", "open again").out == f"{failed} is queued again\n"
    record = trellis("job", "show", failed, "--json").record
    assert (record["generation"], record["attempt"], record["status"]) == (1, 1, "queued")
    refused = trellis("job", "requeue", done, "--json")
    assert refused.code == 1
    assert refused.record["requeued"] is False


def test_requeue_needs_the_operators_key(local: Terminal, work, tmp_path):
    failed = local.submit("break")
    work(local.url)
    key = tmp_path / "ledger.db.key"
    key.chmod(0o644)
    readable = local("job", "requeue", failed)
    assert (readable.code, "chmod 600" in readable.err) == (1, True)
    key.unlink()
    missing = local("job", "requeue", failed)
    assert missing.code == 1
    assert "trellis migrate" in missing.err
    assert local("job", "dead-letter", failed, "--cause", "x").code == 1
    assert local("job", "cancel", local.submit("a")).code == 0, "a submitter cancels its own job without the key"
    assert local("job", "show", failed, "--json").record["status"] == "failed"
    assert local("migrate").code == 0
    assert local("job", "requeue", failed).code == 0


@pytest.mark.requirement("DJ-15")
def test_why_a_running_job_shall_stop_is_shown_until_and_after_it_stops(trellis: Terminal, held):
    job_id = trellis.submit("double", "1")
    stop = held(trellis.url)
    assert trellis("job", "cancel", job_id, "--cause", "wrong customer").code == 0
    for told in (trellis("job", "show", job_id).out, trellis("job", "explain", job_id).out):
        assert "wrong customer" in " ".join(told.split())
    record = trellis("job", "show", job_id, "--json").record
    assert record["cancel_cause"] == "wrong customer"
    why = " ".join(trellis("job", "explain", job_id).out.split())
    assert re.search(rf"{re.escape(record['cancel_asked_by'])} asked it to stop, [0-9.]+ s ago \(wrong customer\)", why)
    assert "If its handler reads `ctx.cancelled` and returns, it is cancelled" in why
    assert ("It is not retried" in why, "retryable error" in why, "for attempt 2" in why) == (True, False, False)
    assert re.search(r"When the grace period is over in (2[0-9]|30) s, the sweep makes it cancelled", why)
    assert f"trellis job cancel {job_id} --hard" in why
    asked = " ".join(trellis("events", job_id).err.split())
    assert ("asked to stop by" in asked, "wrong customer; it has not ended yet" in asked) == (True, True)
    stop()
    assert "asked to stop" not in trellis("events", job_id).err
    for command in (["job", "show"], ["job", "explain"], ["events"]):
        assert "wrong customer" in " ".join(trellis(*command, job_id).out.split()), command


def test_the_events_of_a_failed_attempt_have_the_number_of_that_attempt(trellis: Terminal, held):
    job_id = trellis.submit("double", "1")
    held(trellis.url)("retry", "RuntimeError: boom")
    events = [line.split() for line in trellis("events", job_id).out.splitlines()[2:]]
    assert [(one[2], one[3]) for one in events] == [
        ("job_queued", "1"),
        ("job_claimed", "1"),
        ("job_started", "1"),
        ("job_retry_scheduled", "1"),
    ]
    assert "2/5" in trellis("jobs").out, "the next one"
    assert trellis("job", "cancel", job_id).code == 0
    last = trellis("events", job_id).out.splitlines()[-1].split()
    assert (last[2], last[3]) == ("job_cancelled", "1"), "a job that ended while it waited was tried once"


@pytest.mark.requirement("DJ-15")
def test_a_second_soft_cancel_prints_the_time_that_is_left_of_the_first(trellis: Terminal, held):
    job_id = trellis.submit("double", "1")
    held(trellis.url)
    first = trellis("job", "cancel", job_id, "--grace", "10m")
    assert first.out == f"{job_id} was asked to stop; it is ended in 10 min if it does not\n"
    again = trellis("job", "cancel", job_id)
    assert re.search(r"it is ended in (9 min 5\d s|10 min) if it does not", again.out), again.out


@pytest.mark.requirement("DJ-15", "D19")
def test_requester_of_a_cancel_is_shown_even_if_the_job_succeeded(trellis: Terminal, held):
    job_id = trellis.submit("double", "1")
    end = held(trellis.url)
    assert trellis("job", "cancel", job_id, "--cause", "wrong customer").code == 0
    end("complete", None)
    record = trellis("job", "show", job_id, "--json").record
    assert (record["status"], record["cancel_requested"], record["cancel_cause"]) == (
        "succeeded",
        False,
        "wrong customer",
    )
    assert record["cancel_asked_at"]
    told = record["events"][-1]["payload"]["data"]["cancel_requested"]
    assert (told["actor"], told["cause"]) == (record["cancel_asked_by"], "wrong customer")
    for command, says in (("show", "(it ended before it noticed)"), ("explain", "it ended before its handler noticed")):
        shown = " ".join(trellis("job", command, job_id).out.split())
        assert record["cancel_asked_by"] in shown
        assert "wrong customer" in shown
        assert says in shown


@pytest.mark.requirement("DJ-18")
def test_a_job_is_dead_lettered_by_an_operator(trellis: Terminal, work):
    job_id = trellis.submit("double", "1")
    refused = trellis("job", "dead-letter", job_id, "--cause", "x", "--reason", "timeout")
    assert (refused.code != 0, "policy_violation" in refused.err) == (True, True)
    assert trellis("job", "dead-letter", job_id, "--cause", "it must not run").out == f"{job_id} is dead_lettered\n"
    letter = trellis("dlq", "show", job_id, "--json").record
    assert (letter["reason_code"], letter["stage"], letter["last_error"]) == (
        "policy_violation",
        "fetch",
        "it must not run",
    )
    assert trellis("job", "dead-letter", "nobody", "--cause", "x").code != 0


@pytest.mark.requirement("DJ-12")
def test_the_traceback_of_the_last_failure_is_shown(trellis: Terminal, work):
    job_id = trellis.submit("refuse")
    work(trellis.url)
    for command in (["dlq", "show"], ["job", "show"], ["job", "explain"]):
        told = trellis(*command, job_id).out
        assert "Traceback (most recent call last)" in told
        assert 'raise ValidationError("no such customer")' in told
    assert 'raise ValidationError("no such customer")' in trellis("dlq", "show", job_id, "--json").record["traceback"]

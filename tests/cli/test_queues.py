"""`trellis queues`, `trellis dlq`, `trellis events`, `trellis workers`."""

import json
from pathlib import Path
from typing import Literal

import pytest

from tests.cli.conftest import Terminal
from trellis import cli
from trellis.cli.workers import COLUMNS
from trellis.engine.admin_acts import this_node
from trellis.http.operation_shapes import WorkerShape
from trellis.operations.dashboards import RULES


def test_queues_count_what_waits(trellis: Terminal):
    trellis.submit("a")
    trellis.submit("a", "--delay", "1h")
    (queue,) = trellis("queues", "--json").records
    assert (queue["type"], queue["ready"], queue["scheduled"], queue["held"], queue["paused"]) == ("a", 1, 1, 0, False)
    header, row = trellis("queues").out.splitlines()
    assert header.split()[:3] == ["TYPE", "LIFECYCLE", "READY"]
    assert row.split()[:3] == ["a", "leased-job", "1"]


def test_metrics_print_the_ledgers_gauges_or_one_of_the_files_that_are_made_from_them(trellis: Terminal):
    trellis.submit("a")
    assert 'trellis_queue_ready{lifecycle="leased-job",type="a"} 1.0\n' in trellis("metrics").out
    assert json.loads(trellis("metrics", "--grafana").out)["title"] == "Trellis"
    assert "\ngroups:\n- name: trellis\n" in trellis("metrics", "--rules").out
    rules = trellis("metrics", "--rules", "--runbooks", "https://wiki.example/books/").out
    assert rules.count("runbook_url: https://wiki.example/books/") == len(RULES)
    assert "a path in a checkout" not in rules
    assert trellis("metrics", "--rules", "--runbooks", "books").code == 2
    assert trellis("metrics", "--reference").out.startswith("# Metrics\n")
    refused = trellis("metrics", "--rules", "--grafana")
    assert (refused.code, "only one of" in refused.err) == (2, True)


@pytest.mark.requirement("OBS-1", "D35")
def test_a_paused_type_is_not_handed_out_until_it_is_resumed(
    trellis: Terminal, work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job_id = trellis.submit("double", "1")
    assert trellis("queues", "pause", "double").code == 0
    work(trellis.url)
    assert trellis("job", "show", job_id, "--json").record["status"] == "queued"
    assert "paused" in trellis("queues").out
    assert "trellis queues resume double" in trellis("job", "explain", job_id).out
    assert trellis("queues", "resume", "double").code == 0
    work(trellis.url)
    assert trellis("job", "show", job_id, "--json").record["status"] == "succeeded"
    monkeypatch.setenv("TRELLIS_OBJECTS", f"file://{tmp_path / 'published'}")
    assert trellis("rebuild", "--from", "ledger").code == 0
    found = [json.loads(path.read_bytes()) for path in (tmp_path / "published").glob("audit/*/act-*.json")]
    records = [one for one in found if one["event"] in {"type.paused", "type.resumed"}]
    assert sorted((one["event"], one["subject"], one["from"], one["to"], one["actor"]) for one in records) == [
        ("type.paused", "double", "active", "paused", "control-plane"),
        ("type.resumed", "double", "paused", "active", "control-plane"),
    ]
    assert {one["node"] for one in records} == {this_node()}


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_type_that_nobody_uses_is_refused_with_the_nearest_name(trellis: Terminal, verb: str):
    trellis.submit("double", "1")
    answer = trellis("queues", verb, "dubble")
    assert (answer.code, answer.out) == (1, "")
    assert "did you mean double?" in answer.err
    assert "--force" in answer.err
    assert not [queue for queue in trellis("queues", "--json").records if queue["paused"]]


def test_a_type_may_be_paused_by_force_before_its_first_job(trellis: Terminal):
    assert trellis("queues", "pause", "later", "--force").code == 0
    trellis.submit("later")
    assert [(queue["type"], queue["paused"]) for queue in trellis("queues", "--json").records] == [("later", True)]


def test_a_type_all_of_whose_jobs_have_ended_is_known(trellis: Terminal, work):
    trellis.submit("double", "1")
    work(trellis.url)
    assert trellis("queues", "pause", "double").code == 0
    assert trellis("queues", "resume", "double").code == 0


def test_a_mistyped_verb_is_answered_with_the_nearest(trellis: Terminal):
    answer = trellis.bare("queues", "pasue", "a")
    assert (answer.code, "'pause'" in answer.err) == (2, True)


@pytest.mark.requirement("DJ-12")
def test_dead_letters_are_listed_shown_and_requeued_one_by_one(trellis: Terminal, work):
    job_id = trellis.submit("refuse")
    work(trellis.url)
    (letter,) = trellis("dlq", "--json").records
    assert letter["job_id"] == job_id
    assert (letter["reason_code"], letter["stage"], letter["attempts"]) == ("validation_failed", "exec", 1)
    shown = trellis("dlq", "show", job_id)
    for text in ("what was asked can never work", "no such customer", "last owner", "job_dead_lettered"):
        assert text in shown.out
    assert trellis("dlq", "requeue", job_id).code == 0
    assert trellis("dlq", "--json").records == []
    assert "has no dead letter" in trellis("dlq", "show", job_id).err


@pytest.mark.requirement("DJ-12")
def test_dead_letters_are_counted_then_requeued_by_filter(trellis: Terminal, work):
    ids = [trellis.submit("refuse") for _ in range(3)]
    failed = trellis.submit("break")
    work(trellis.url)
    assert trellis("dlq", "requeue", "--type", "refuse", "--dry-run").out == "3 jobs would be requeued\n"
    mistyped = trellis("dlq", "requeue", "--type", "refus", "--yes")
    assert mistyped.out == "No dead letter is like that: nothing was requeued. Did you mean --type refuse?\n"
    assert trellis("jobs", "--type", "brek").err == "No job is like that. Did you mean --type break?\n"
    unsure = trellis("dlq", "requeue", "--type", "refuse")
    assert (unsure.code, "--yes" in unsure.err) == (2, True)
    assert len(trellis("dlq", "--json").records) == 3
    some = trellis("dlq", "requeue", "--reason", "validation_failed", "--limit", "2", "--yes", "--json")
    assert [(r["job_id"], r["requeued"]) for r in some.records] == [(ids[1], True), (ids[2], True)]
    assert "1 of 1" not in trellis("dlq", "requeue", "--all", "--yes").out
    assert trellis("dlq", "--json").records == []
    assert trellis("job", "show", failed, "--json").record["status"] == "failed"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "Name jobs, or filter"),
        (["some-id", "--type", "a"], "not both"),
        (["--reason", "exhausted"], "perhaps you mean exhausted_retries"),
    ],
)
def test_a_requeue_that_says_too_little_or_too_much_is_refused(local: Terminal, arguments, says):
    answer = local("dlq", "requeue", *arguments)
    assert (answer.code, says in answer.err) == (2, True)


def test_a_long_dead_letter_queue_is_paged(trellis: Terminal, work):
    ids = [trellis.submit("refuse") for _ in range(3)]
    work(trellis.url)
    page = trellis("dlq", "--json", "--limit", "2")
    cursor = page.err.strip().rpartition("--cursor ")[2]
    rest = trellis("dlq", "--json", "--cursor", cursor)
    assert [r["job_id"] for r in page.records + rest.records] == ids[::-1]


@pytest.mark.requirement("DJ-13")
def test_events_of_a_job_have_the_nine_fields(trellis: Terminal, work):
    job_id = trellis.submit("double", "1")
    work(trellis.url)
    records = trellis("events", job_id, "--json").records
    names = ["id", "job_id", "type", "ts", "actor", "correlation_id", "cause", "payload", "version"]
    assert [list(record) for record in records] == [names] * 4
    assert [record["version"] for record in records] == [1, 2, 3, 4]
    assert (records[1]["payload"]["from"], records[1]["payload"]["to"]) == ("queued", "assigned")
    assert "job_succeeded" in trellis("events", job_id).out


def test_the_feed_goes_on_from_a_position(trellis: Terminal, work):
    ids = [trellis.submit("double", str(number)) for number in range(2)]
    work(trellis.url)
    first = trellis("events", "--json", "--limit", "3")
    position = first.err.partition("--after ")[2].strip()
    rest = trellis("events", "--json", "--after", position)
    seen = [record["id"] for record in first.records + rest.records]
    assert sorted(seen) == sorted(f"{job_id}-{version}" for job_id in ids for version in (1, 2, 3, 4))


def test_events_are_found_by_type_and_correlation(trellis: Terminal, work):
    trellis.submit("double", "1")
    job_id = trellis.submit("refuse", "--correlation", "case-3")
    work(trellis.url)
    by_type = trellis("events", "--type", "job_dead_lettered", "--json").records
    assert [record["job_id"] for record in by_type] == [job_id]
    assert trellis("events", "--type", "job_dead_lettered", "--lifecycle", "run", "--json").records == []
    by_case = trellis("events", "--correlation", "case-3", "--json").records
    assert {record["job_id"] for record in by_case} == {job_id}


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["--type", "job_dead"], 2, "--type is 'job_dead': perhaps you mean job_"),
        (["no-such-job"], 1, "There is no job"),
        (["some-job", "--follow"], 2, "feed is of all jobs"),
        (["--since", "2026-01-01T00:00:00Z"], 2, "goes with --type"),
    ],
)
def test_events_that_cannot_be_meant_are_refused(local: Terminal, arguments, code, says):
    answer = local("events", *arguments)
    assert answer.code == code
    assert says in answer.err


def test_worker_listing_distinguishes_alive_drained_and_silent_workers():
    def seen(state: Literal["alive", "silent", "drained"], **about: object) -> WorkerShape:
        info = {"types": ["double"], "concurrency": 4, **about}
        return WorkerShape(name="w", seen_at="2026-03-01T12:00:00.000Z", silent_s=300, state=state, held=1, info=info)

    columns = {column.title: column.cell for column in COLUMNS}
    states = [str(columns["STATUS"](one)) for one in (seen("alive"), seen("silent"), seen("drained"))]
    assert states == ["alive", "silent for 5m", "drained 5m ago"]
    assert (columns["ROOM"](seen("alive")), columns["TYPES"](seen("alive"))) == ("4", "double")
    assert columns["TYPES"](seen("alive", alone="j-1")) == "double; runs j-1 alone"


def test_a_position_that_the_feed_never_gave_is_refused(trellis: Terminal):
    answer = trellis("events", "--after", "nonsense")
    assert (answer.code, "position" in answer.err) == (2, True)


def test_every_column_of_every_table_has_a_heading():
    """A cell without one has to be guessed."""
    folder = Path(cli.__file__).parent
    assert [file.name for file in folder.rglob("*.py") if 'title=""' in file.read_text("utf-8")] == []

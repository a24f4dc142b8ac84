"""The judgements of `doctor` that a healthy test machine never shows."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.test_explain import job
from trellis.engine.records import Finding, FindingSeverity, JobPlace, QueueDepth, SubscriberRecord, WorkerRecord
from trellis.operations.doctor import (
    GIB,
    clock_finding,
    disk_finding,
    driving_findings,
    error_finding,
    follower_findings,
    has_errors,
    letters_finding,
    python_finding,
    queue_findings,
    work_findings,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def queue(*, ready: int = 0, paused: bool = False, oldest_ready_s: float | None = None) -> QueueDepth:
    return QueueDepth(
        type="a",
        lifecycle="leased-job",
        ready=ready,
        scheduled=0,
        blocked=0,
        held=0,
        paused=paused,
        oldest_ready_s=oldest_ready_s,
        rate_limit=None,
    )


def worker(*, silent_s: float) -> WorkerRecord:
    return WorkerRecord(name="w", seen_at=NOW - timedelta(seconds=silent_s), held=2, info=b'{"types": ["a"]}')


def by_check(findings: list[Finding]) -> dict[str, tuple[FindingSeverity, str]]:
    return {finding.check: (finding.severity, finding.detail) for finding in findings}


def test_an_old_python_is_an_error_with_a_remedy():
    finding = python_finding((3, 10, 14))
    assert (finding.severity, finding.remedy) == (FindingSeverity.ERROR, "install Python 3.11 or newer")
    assert python_finding((3, 11, 0)).severity is FindingSeverity.OK


def test_work_that_nobody_serves_is_noticed_and_served_work_is_not():
    silent = by_check(work_findings([queue(ready=3)], [worker(silent_s=31)], NOW))
    assert silent["workers"][0] is FindingSeverity.WARNING
    assert silent["type a"] == (FindingSeverity.WARNING, "3 jobs are ready and no living worker serves the type")
    served = by_check(work_findings([queue(ready=3, oldest_ready_s=1.0)], [worker(silent_s=5)], NOW))
    assert served == {"workers": (FindingSeverity.OK, "1 alive, 2 jobs held")}
    one = by_check(work_findings([queue(ready=1)], [], NOW))
    assert one["type a"][1] == "1 job is ready and no living worker serves the type"


def test_an_instance_without_jobs_for_workers_needs_no_worker():
    assert by_check(work_findings([queue(ready=0)], [], NOW)) == {
        "workers": (FindingSeverity.OK, "none, and no job waits for one")
    }


def test_a_served_type_whose_jobs_wait_long_needs_more_workers():
    found = by_check(work_findings([queue(ready=3, oldest_ready_s=90.0)], [worker(silent_s=5)], NOW))
    assert found["type a"] == (FindingSeverity.WARNING, "the oldest ready job has waited 1 min 30 s")


def test_a_worker_on_the_bus_serves_topics_and_no_jobs_of_the_ledger():
    on_bus = replace(worker(silent_s=5), info=b'{"bus": true, "types": ["a"]}')
    found = by_check(work_findings([queue(ready=3, oldest_ready_s=90.0)], [on_bus], NOW))
    assert found == {
        "workers": (
            FindingSeverity.WARNING,
            "none seen in the last 30 s; 1 on the bus, for jobs on topics only",
        ),
        "type a": (FindingSeverity.WARNING, "3 jobs are ready and no living worker serves the type"),
    }
    topic = replace(queue(ready=3, oldest_ready_s=90.0), lifecycle="bus-job")
    late = by_check(work_findings([topic], [on_bus], NOW))
    assert late["workers"] == (FindingSeverity.OK, "1 alive, 2 jobs held")
    assert late["type a"][1] == "the oldest ready job has waited 1 min 30 s"
    assert "type a" not in by_check(work_findings([topic], [worker(silent_s=5)], NOW))


def test_a_paused_type_is_named_once():
    found = work_findings([queue(ready=3, paused=True)], [], NOW)
    assert [finding.remedy for finding in found if finding.check == "type a"] == ["`trellis queues resume a`"]


def test_queue_jobs_that_wait_or_failed_are_counted_with_what_to_do():
    assert queue_findings({"PENDING": [], "DEAD": []}, 100, NOW) == []
    fresh = job(lifecycle="queue-job", state="PENDING", place=JobPlace.SCHEDULED, updated_at=NOW)
    (found,) = queue_findings({"PENDING": [fresh]}, 100, NOW)
    assert (found.severity, found.detail) == (FindingSeverity.OK, "1 PENDING")
    late = replace(fresh, updated_at=NOW - timedelta(minutes=1))
    failed = replace(fresh, state="FAILED", due_at=NOW)
    cancelled = replace(failed, due_at=None)
    (found,) = queue_findings({"PENDING": [late], "FAILED": [failed, cancelled]}, 100, NOW)
    assert (found.severity, found.detail) == (FindingSeverity.WARNING, "1 PENDING, 1 FAILED")
    assert "start `trellis up`" in found.remedy
    assert "--status FAILED" in found.remedy


def test_a_type_that_no_worker_takes_needs_none():
    ready = replace(queue(ready=1), lifecycle="queue-job")
    assert "type a" not in by_check(work_findings([ready], [], NOW))


def test_dead_letters_are_counted_as_far_as_they_were_read():
    assert letters_finding(0, 100).severity is FindingSeverity.OK
    assert letters_finding(1, 100).detail == "1 waits for a decision"
    assert letters_finding(7, 100).detail == "7 wait for a decision"
    assert letters_finding(100, 100).detail == "100 or more wait for a decision"


def test_doctor_fails_only_on_errors():
    warning = letters_finding(1, 100)
    assert not has_errors([warning])
    assert has_errors([warning, error_finding("ledger", "gone", "look for it")])


def follower(*, behind_s: float | None, waits: bool = True, left_s: float = -60.0) -> SubscriberRecord:
    since = None if behind_s is None else NOW - timedelta(seconds=behind_s)
    until = NOW + timedelta(seconds=left_s)
    return SubscriberRecord(name="projector", actor="up@host", until=until, waits=waits, unread_since=since)


@pytest.mark.requirement("D61")
def test_doctor_names_a_stuck_subscriber_what_is_retained_and_how_to_release_it():
    (finding,) = follower_findings([follower(behind_s=3 * 86_400)], NOW)
    assert (finding.check, finding.severity) == ("follower projector", FindingSeverity.WARNING)
    for told in (
        "since 2026-02-26 00:00 UTC",
        "(3 d ago)",
        "kept for it, 90 d beyond its time",
        "last followed by up@host",
    ):
        assert told in finding.detail
    assert "trellis followers leave-behind projector" in finding.remedy
    (followed,) = follower_findings([follower(behind_s=3 * 86_400, left_s=5)], NOW)
    assert "followed now by up@host" in followed.detail


def test_a_follower_that_has_read_enough_or_was_left_behind_is_no_trouble():
    assert follower_findings([], NOW) == []
    for fine in (follower(behind_s=None), follower(behind_s=5.0)):
        assert by_check(follower_findings([fine], NOW)) == {
            "followers": (FindingSeverity.OK, "nobody is behind: projector")
        }
    (left,) = follower_findings([follower(behind_s=9 * 86_400, waits=False)], NOW)
    assert (left.severity, left.remedy) == (FindingSeverity.OK, "")
    assert "left behind" in left.detail


def test_a_clock_that_differs_from_the_ledgers_is_named_with_its_direction():
    assert clock_finding(NOW + timedelta(seconds=5), NOW).severity is FindingSeverity.OK
    ahead, behind = (clock_finding(NOW + timedelta(seconds=skew_s), NOW) for skew_s in (90.0, -90.0))
    assert (ahead.severity, ahead.detail) == (
        FindingSeverity.WARNING,
        "this machine's clock is 1 min 30 s ahead of the ledger's",
    )
    assert "1 min 30 s behind the ledger's" in behind.detail
    assert "NTP" in behind.remedy


def test_a_disk_that_fills_up_is_a_warning_and_then_an_error():
    found = [disk_finding("/data", free=free, total=10 * GIB) for free in (GIB, GIB - 1, GIB // 10 - 1)]
    assert [one.severity for one in found] == [FindingSeverity.OK, FindingSeverity.WARNING, FindingSeverity.ERROR]
    assert found[0].detail == "/data: 1.0 of 10.0 GiB free"
    assert [bool(one.remedy) for one in found] == [False, True, True]


def test_runs_that_nobody_drives_are_noticed_with_what_to_do():
    waiting = replace(queue(ready=2, oldest_ready_s=61.0), type="agent-run", lifecycle="run")
    up = SubscriberRecord(name="projector", actor="p", until=NOW + timedelta(seconds=1), waits=True, unread_since=None)
    (alone,) = driving_findings([waiting], [replace(up, until=NOW)], NOW)
    assert alone.detail == "2 jobs are ready, the oldest for 1 min 1 s, and nobody drives them"
    assert "start `trellis up`" in alone.remedy
    (busy,) = driving_findings([waiting], [up], NOW)
    assert "look in the log" in busy.remedy
    quiet = [
        replace(waiting, oldest_ready_s=60.0),
        replace(waiting, paused=True),
        replace(waiting, lifecycle="leased-job"),
    ]
    assert driving_findings(quiet, [], NOW) == []

"""`explain`: for every place a job can be in, the sentences a tired person needs."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trellis.engine.jobs import Epoch, JobId, Priority, ReasonCode, Stage
from trellis.engine.records import DeadLetter, Event, Job, JobPlace, QueueDepth, WorkerRecord
from trellis.engine.text import duration
from trellis.lifecycles import LIFECYCLES, Phase, Role
from trellis.operations.explain import (
    REASON_PHRASES,
    JobExplanation,
    JobSurroundings,
    explain,
    timer_phrase,
    types_taken,
    waits_for,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
QUEUE = QueueDepth(
    type="mail.send",
    lifecycle="leased-job",
    ready=1,
    scheduled=0,
    blocked=0,
    held=0,
    paused=False,
    oldest_ready_s=1.0,
    rate_limit=None,
)


def job(**changes: Any) -> Job:
    made = Job(
        job_id=JobId("j-1"),
        lifecycle="leased-job",
        type="mail.send",
        state="queued",
        place=JobPlace.READY,
        priority=Priority.BATCH,
        generation=0,
        attempt=0,
        max_attempts=5,
        version=1,
        epoch=Epoch(0),
        deaths=0,
        created_at=NOW - timedelta(minutes=2),
        updated_at=NOW - timedelta(minutes=1),
        correlation_id="j-1",
    )
    return replace(made, **changes)


def held(**changes: Any) -> Job:
    lease = {"owner": "w-1", "lease_expires_at": NOW + timedelta(seconds=40), "epoch": Epoch(3)}
    return job(**{"state": "running", "place": JobPlace.LEASED, **lease, **changes})


def worker(**changes: Any) -> WorkerRecord:
    info = json.dumps({"types": ["mail.send"], "concurrency": 4}).encode()
    return replace(WorkerRecord(name="w-1", seen_at=NOW - timedelta(seconds=3), held=1, info=info), **changes)


def step(type_: str, **changes: Any) -> Event:
    made = Event(
        id="j-1-4",
        job_id=JobId("j-1"),
        lifecycle="leased-job",
        type=type_,
        ts=NOW - timedelta(seconds=1),
        role=Role.WORKER,
        actor="w-1",
        correlation_id="j-1",
        cause=None,
        source="running",
        target="queued",
        generation=0,
        attempt=1,
        epoch=Epoch(1),
        version=4,
    )
    return replace(made, **changes)


def told(explanation: JobExplanation) -> str:
    return "\n".join((*explanation.where, *explanation.why, *explanation.next, *explanation.you_can))


def story(of: Job, *events: Event, **around: Any) -> str:
    return told(explain(of, events, JobSurroundings(now=NOW, **around)))


def suspended(**wait: Any) -> Event:
    return step("job_suspended", target="suspended", data=json.dumps({"waits_for": wait}).encode())


def children(count: int) -> tuple[Job, ...]:
    return tuple(job(job_id=JobId(f"c-{n}"), type="page.fetch", state="running") for n in range(count))


def test_a_job_that_waits_for_children_names_the_first_ones_and_how_it_goes_on():
    waiting = job(state="suspended", place=JobPlace.SCHEDULED)
    explanation = explain(waiting, (suspended(children=5),), JobSurroundings(now=NOW, open_children=children(4)))
    named = "c-0 (page.fetch, running), c-1 (page.fetch, running), c-2 (page.fetch, running) and others have not ended."
    assert f"Of its children, {named}" in explanation.why
    assert explanation.next[0].startswith("When the children it waits for have ended, it goes to queued by itself")
    assert "trellis jobs --parent j-1\tsee its children and how they stand" in explanation.you_can
    one = story(waiting, suspended(children=1, signal="stop"), open_children=children(1))
    assert "Of its children, c-0 (page.fetch, running) has not ended." in one
    assert "or the signal 'stop' has come, it goes to queued" in one


def test_a_job_that_waits_for_a_signal_alone_or_goes_on_names_no_children():
    for text in (
        story(job(state="suspended", place=JobPlace.SCHEDULED), suspended(signal="stop")),
        story(job(), suspended(children=1), step("job_resumed", source="suspended"), queue=QUEUE),
    ):
        assert "--parent" not in text
        assert "children" not in text


def test_a_ready_job_without_a_worker_says_so():
    text = story(job(), queue=QUEUE)
    assert "is queued, waiting for a worker: none that serves its type is alive." in text
    assert "No worker that serves 'mail.send' has been seen" in text
    assert "trellis worker MODULE:APP" in text
    assert "ready:" not in text


def test_a_worker_that_fell_silent_does_not_count():
    text = story(job(), queue=QUEUE, workers=(worker(seen_at=NOW - timedelta(minutes=5)),))
    assert "No worker that serves" in text
    assert "trellis worker MODULE:APP" in text


def test_a_worker_that_drained_does_not_count():
    text = story(job(), queue=QUEUE, workers=(worker(info=b'{"types": ["mail.send"], "drained": true}'),))
    assert "none that serves its type is alive" in text


def test_explain_says_that_a_quarantined_job_runs_alone():
    alone = worker(info=b'{"types": ["mail.send"], "alone": "j-9"}')
    assert "held by w-1, where it runs alone." in story(held(deaths=2))
    assert "ready: a worker may take it now and will run it alone." in story(job(deaths=2), workers=(worker(),))
    once = story(job(deaths=1), workers=(worker(),))
    assert "1 worker died while running it." in once
    assert "alone" not in once
    assert "w-1 takes nothing more until job j-9 has ended" in story(job(), workers=(alone,))


@pytest.mark.parametrize(
    "event, says",
    [
        ("job_queued", "waiting for its time: it may begin in 12 s."),
        ("job_snoozed", "put off by its own handler: it may go on in 12 s."),
        ("job_retry_scheduled", "pausing after an error: attempt 1 may begin in 12 s."),
    ],
)
def test_explain_of_a_scheduled_job_names_what_it_waits_for(event: str, says: str):
    resting = job(place=JobPlace.SCHEDULED, due_at=NOW + timedelta(seconds=12))
    assert f"Job j-1 (mail.send) is queued, {says}" in story(resting, step(event))


def test_a_ready_job_with_a_worker_will_be_taken():
    text = story(job(), queue=replace(QUEUE, ready=7, rate_limit=2.5), workers=(worker(),))
    assert "ready: a worker may take it as soon as the rate of its type (2.5 a second) allows it." in text
    assert "w-1 serves this type and will take it" in text
    assert "7 jobs of this type are ready" in text
    assert "At most 2.5 jobs of this type are handed out a second" in text
    assert "A claim makes it assigned, its start running." in text


def test_a_worker_on_the_bus_takes_no_job_of_the_ledger():
    on_bus = worker(name="up-1", info=b'{"bus": true, "types": ["mail.send"]}')
    text = story(job(), queue=QUEUE, workers=(on_bus,))
    assert "is queued, waiting for a worker: none that serves its type is alive." in text
    assert "No worker that serves 'mail.send' has been seen" in text
    assert "up-1 serves it as a topic on the bus, and no job that was submitted without --topic." in text
    assert "trellis worker MODULE:APP" in text
    assert "will take it" not in text
    assert "w-1 serves this type and will take it" in story(job(), queue=QUEUE, workers=(on_bus, worker()))


def test_a_worker_of_the_ledger_takes_no_job_on_a_topic():
    on_bus = worker(info=b'{"bus": true, "types": ["job.mail"]}')
    assert types_taken(on_bus, "bus-job") == ("job.mail",)
    assert types_taken(on_bus, "leased-job") == ()
    assert types_taken(worker(), "bus-job") == ()
    assert types_taken(worker(), "leased-job") == ("mail.send",)


def test_a_paused_type_is_the_reason():
    text = story(job(), queue=replace(QUEUE, paused=True), workers=(worker(),))
    assert "is queued, but its type is paused, so nobody is handed it." in text
    assert "trellis queues resume mail.send" in text
    assert "ready:" not in text
    assert "will take it" not in text


def test_explain_of_a_delayed_job_gives_the_time_and_the_reason():
    error = b'{"error": {"message": "TransientError: connection reset"}}'
    retried = step("job_retry_scheduled", cause="short", data=error)
    text = story(job(place=JobPlace.SCHEDULED, attempt=1, due_at=NOW + timedelta(seconds=12)), retried)
    assert "pausing after an error: attempt 2 may begin in 12 s" in text
    assert "attempt 2 of 5" in text
    assert "TransientError: connection reset" in text
    assert "When its time comes in 12 s, it becomes ready." in text


def test_a_parked_job_names_who_is_before_it():
    text = story(job(place=JobPlace.BLOCKED, concurrency_key="user:t1"), key_holders=(JobId("j-0"),))
    assert "'user:t1'" in text
    assert "All slots of key 'user:t1' are taken: j-0 holds one." in text
    stopped = story(job(place=JobPlace.BLOCKED, concurrency_key="user:t1"), key_limit=0, key_name="t1")
    assert "The limit of key 't1' is 0: none of its jobs is handed out" in stopped


def test_a_job_that_waits_for_the_rate_of_its_key_says_so():
    waiting = job(place=JobPlace.BLOCKED, concurrency_key="user:acme")
    rated = replace(QUEUE, rate_per_key=2.0)
    text = story(waiting, queue=rated, key_has_room=True, key_limit=10_000, key_name="acme")
    assert "is queued, waiting for the rate of its key 'acme' (2 a second)." in text
    assert "Jobs of this type with key 'acme' are handed out 2 a second" in text
    assert "When the rate of its key allows another claim" in text
    full = story(waiting, queue=rated, key_limit=1, key_name="acme", key_holders=(JobId("j-0"),))
    assert "blocked by its concurrency key 'acme'" in full


def test_explain_of_a_held_job_names_its_holder_and_the_possible_ends():
    text = story(held(attempt=1))
    assert "held by w-1" in text
    assert "Its lease (epoch 3) holds for 40 s more" in text
    assert "When its holder is done it goes to succeeded." in text
    assert "A retryable error sends it to queued for attempt 3." in text
    assert "it goes to queued for attempt 3" in text


def test_the_last_attempt_of_a_silent_holder_ends_in_the_dead_letters():
    text = story(held(attempt=4, lease_expires_at=NOW - timedelta(seconds=3)))
    assert "ended 3.0 s ago: its holder is silent" in text
    assert "This is its last attempt" in text
    assert "The next sweep finds its lease over: it goes to dead_lettered." in text


def test_explain_shows_a_soft_cancel_and_worker_deaths():
    text = story(held(cancel_requested=True, cancel_due_at=NOW + timedelta(seconds=18), deaths=1))
    assert "Somebody asked it to stop" in text
    assert "1 worker died while running it" in text
    assert "When the grace period is over in 18 s, the sweep makes it cancelled" in text


def test_explain_shows_a_deadline():
    assert "At its deadline in 1 min 30 s" in story(job(deadline_at=NOW + timedelta(seconds=90)))


@pytest.mark.parametrize("reason", ReasonCode)
def test_a_dead_letter_is_translated_and_can_be_requeued(reason: ReasonCode):
    letter = DeadLetter(
        job_id=JobId("j-1"),
        type="mail.send",
        state="dead_lettered",
        reason_code=reason,
        stage=Stage.EXEC,
        last_error="boom",
        attempts=5,
        last_owner="w-1",
        last_lease_expires_at=NOW,
        correlation_id="j-1",
        at=NOW,
        version=9,
    )
    text = story(job(state="dead_lettered", place=JobPlace.ENDED), letter=letter)
    assert REASON_PHRASES[reason.value] in text
    assert "Last error: boom" in text
    assert "trellis job requeue j-1" in text
    assert "trellis job cancel" not in text
    rejected = step("job_dead_lettered", target="dead_lettered", cause="boom")
    assert story(job(state="dead_lettered", place=JobPlace.ENDED), rejected, letter=letter).count("boom") == 1


def test_a_succeeded_job_is_over():
    text = story(job(state="succeeded", place=JobPlace.ENDED))
    assert "Nothing more happens by itself." in text
    assert "requeue" not in text


def test_a_job_that_waits_for_a_role_says_whom():
    text = story(job(lifecycle="queue-job", state="PENDING", place=JobPlace.SCHEDULED))
    assert "is PENDING, waiting for the orchestrator to move it on." in text
    assert "None did for 1 min: no `trellis up` with role orchestrator runs on this ledger." in text
    assert "validate by orchestrator moves it to QUEUED" in text
    assert "trellis up\tstart what moves it" in text
    fresh = story(job(lifecycle="queue-job", state="PENDING", place=JobPlace.SCHEDULED, updated_at=NOW))
    assert "None did" not in fresh
    ready = story(job(lifecycle="queue-job", state="QUEUED"))
    assert "None did for 1 min: no `trellis up` with role orchestrator runs on this ledger, or all are busy." in ready


QUEUE_JOB = {"lifecycle": "queue-job", "type": "RESEARCH", "place": JobPlace.SCHEDULED, "max_attempts": 4}


def test_explain_of_a_retrying_queue_job_gives_the_retry_time_and_the_error():
    error = b'{"error": {"code": "NLM_UNAVAILABLE", "message": "it did not answer: ConnectError."}}'
    paused = job(**QUEUE_JOB, state="RETRY_BACKOFF", due_at=NOW + timedelta(seconds=12))
    failed = step("job_retry_scheduled", lifecycle="queue-job", target="RETRY_BACKOFF", data=error)
    text = story(paused, failed)
    assert "is RETRY_BACKOFF, pausing after an error: attempt 2 begins by itself in 12 s." in text
    assert "NLM_UNAVAILABLE: it did not answer: ConnectError.\n" in text
    assert timer_phrase(paused, NOW) == "goes to QUEUED by itself in 12 s"
    assert "it goes to FAILED by itself in 12 s" in story(replace(paused, attempt=3), failed)


def test_a_failed_queue_job_says_how_long_a_person_has_and_what_to_type():
    failed = job(**QUEUE_JOB, state="FAILED", due_at=NOW + timedelta(minutes=14))
    text = story(failed)
    assert "is FAILED, waiting for a person: it goes to DEAD in 14 min." in text
    assert "A person is given 15 min in all to look at it." in text
    assert "trellis job requeue j-1" in text
    assert (waits_for(failed), timer_phrase(failed, NOW)) == ("a person", None)


def test_a_cancelled_queue_job_says_by_whom_and_why():
    cancelled = step(
        "job_failed",
        lifecycle="queue-job",
        source="QUEUED",
        target="FAILED",
        role=Role.CONTROL_PLANE,
        actor="olena",
        cause="not needed",
    )
    text = story(job(**QUEUE_JOB, state="FAILED"), cancelled)
    assert "is FAILED, cancelled, and at rest: nothing more happens by itself." in text
    assert "It was cancelled by olena (control-plane): not needed." in text
    spent = replace(cancelled, source="RETRY_BACKOFF", role=Role.ORCHESTRATOR, cause="it broke")
    assert "It was cancelled" not in story(job(**QUEUE_JOB, state="FAILED", due_at=NOW), spent)


def test_a_run_that_failed_is_not_called_cancelled():
    failed = step(
        "run.failed", lifecycle="run", source="running", target="failed", role=Role.ORCHESTRATOR, cause="no answer"
    )
    assert "It was cancelled" not in story(job(lifecycle="run", state="failed", place=JobPlace.ENDED), failed)


def test_a_complete_queue_job_offers_its_artifact():
    done = step(
        "job_succeeded",
        lifecycle="queue-job",
        source="ARTIFACT_WRITE",
        target="COMPLETE",
        data=b'{"artifact_id": "art-7"}',
    )
    text = story(job(**QUEUE_JOB | {"place": JobPlace.ENDED}, state="COMPLETE"), done)
    assert "trellis artifacts show art-7\t" in text


def test_a_finalized_artifact_waits_for_nobody():
    assert waits_for(job(lifecycle="artifact", state="finalized", place=JobPlace.SCHEDULED)) is None


def test_a_timer_state_says_where_its_timer_leads():
    resting = job(
        lifecycle="queue-job", state="RETRY_BACKOFF", place=JobPlace.SCHEDULED, due_at=NOW + timedelta(seconds=30)
    )
    assert "This is attempt 1 of 5" in story(resting)
    assert "the sweep moves it to QUEUED for attempt 2." in story(resting), "attempts count from 1 in every sentence"
    assert "the sweep moves it to FAILED (its attempts are used up" in story(replace(resting, attempt=4))
    assert "attempt <" not in story(resting)


def test_a_state_that_survives_its_holder_says_so():
    text = story(held(lifecycle="run", state="running"))
    assert "it stays running and may be claimed again" in text
    assert "An error that its holder does not retry makes it failed." in text
    assert "for attempt" not in text, "a run has no second attempt"


@pytest.mark.parametrize("name", LIFECYCLES)
def test_every_state_of_every_lifecycle_is_explained(name: str):
    places = {Phase.WAITING: JobPlace.SCHEDULED, Phase.HELD: JobPlace.LEASED, Phase.ENDED: JobPlace.ENDED}
    for state in LIFECYCLES[name].states:
        made = (held if state.phase is Phase.HELD else job)(lifecycle=name, state=state.name, place=places[state.phase])
        explanation = explain(made, (), JobSurroundings(now=NOW))
        assert state.name in explanation.where[0]
        assert explanation.next
        assert explanation.you_can


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.6, "1 min"),
        (90, "1 min 30 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90_000, "1 d 1 h"),
        (-5, "5.0 s"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_ready_job_on_a_topic_says_that_its_worker_is_missing_before_it_blames_the_scheduler():
    ready = job(lifecycle="bus-job", type="job.echo", state="SCHEDULED")

    def bus_worker(name: str, *topics: str) -> WorkerRecord:
        return worker(name=name, info=json.dumps({"bus": True, "types": topics}).encode())

    assert "no worker has been heard on the bus lately, the safety kernel may not answer, no `trellis up`" in story(
        ready
    )
    down = "The bus at nats://127.0.0.1:1 does not answer: Connection refused"
    without_bus = story(ready, workers=(bus_worker("w-1", "job.echo"),), bus_problem=down)
    assert f"{down}.\nStart that server, or correct TRELLIS_BUS" in without_bus
    assert not any(word in without_bus for word in ("kernel", "no room", "None did"))
    silent = replace(bus_worker("w-1", "job.echo"), seen_at=NOW - timedelta(minutes=5))
    assert "no worker has been heard on the bus lately" in story(ready, workers=(silent, worker()))
    others = story(ready, workers=(bus_worker("w-1", "job.other"), bus_worker("w-2")))
    assert "of 2 on the bus no worker says that it serves 'job.echo'" in others
    assert "w-1 may have no room" in story(ready, workers=(bus_worker("w-1", "job.echo"),))

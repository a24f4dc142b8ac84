"""Dead letters of every lifecycle as one list, on every ledger."""

import json
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from tests.artifacts.desk import ORCHESTRATOR, advance, call_nlm, queue_job
from tests.ledgers.conformance.rig import SUBMITTER, Rig
from trellis.auth import own_reads
from trellis.auth.own_reads import OwnReads
from trellis.auth.principals import Principal
from trellis.engine.errors import NotAllowed, OptionInvalid
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    DeadLetterReason,
    JobId,
    Move,
    Moved,
    NewJob,
    NotMoved,
    ReasonCode,
    RequestId,
    RequestKey,
    Stage,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role, Trigger
from trellis.operations.dead_letters import dead_letters, requeue_dead

OPERATOR = Actor(role=Role.CONTROL_PLANE, name="operator@test")
DEATH = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="no good")


async def moved(rig: Rig, actor: Actor, job_id: str, target: str, death: DeadLetterReason | None = None) -> None:
    move = Move(job_id=JobId(job_id), target=target, request_id=RequestId(f"{target} {job_id}"), death=death)
    assert isinstance(await rig.ledger.move(actor, move), Moved)


async def dead_leased(rig: Rig, job_id: str) -> None:
    await rig.ledger.submit(SUBMITTER, [NewJob(job_id=JobId(job_id), type="work")])
    await moved(rig, OPERATOR, job_id, "dead_lettered", DEATH)


async def dead_queued(rig: Rig, job_id: str) -> None:
    lease = await call_nlm(rig.ledger, queue_job(job_id))
    data = json.dumps({"error": {"code": "NLM_UNAVAILABLE", "message": "503"}}).encode()
    assert await advance(rig.ledger, lease, "NOTEBOOKLM_CALL", "retry", delay_s=3600.0, data=data)
    for target in ("FAILED", "DEAD"):
        await moved(rig, ORCHESTRATOR, job_id, target)


async def dead_of(rig: Rig, owner: str, *job_ids: str) -> None:
    """Dead jobs of this submitter: of the job queue where the id says so, else leased ones."""
    for job_id in job_ids:
        if job_id.startswith("queue"):
            await rig.ledger.submit(replace(ORCHESTRATOR, name=owner), [queue_job(job_id)])
            await dead_queued(rig, job_id)
        else:
            await rig.ledger.submit(replace(SUBMITTER, name=owner), [NewJob(job_id=JobId(job_id), type="work")])
            await dead_leased(rig, job_id)
        await rig.advance(1.0)


def reads_of(rig: Rig, name: str) -> Ledger:
    """The ledger as the token of this submitter reads it."""
    principal = Principal(name=name, roles=frozenset({Role.SUBMITTER}), by_token=True)
    return cast("Ledger", OwnReads(ledger=rig.ledger, principal=principal))


async def paged(rig: Rig, limit: int, ledger: Ledger | None = None) -> list[str]:
    """Every letter, page by page."""
    found, cursor = list[str](), None
    while True:
        page = await dead_letters(ledger or rig.ledger, JobFilter(), limit=limit, cursor=cursor)
        found += [letter.job_id for letter in page.letters]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.requirement("DJ-12", "JQ-4")
async def test_dead_letters_of_both_lifecycles_are_paged_filtered_and_requeued_together(rig: Rig):
    for number, make in enumerate((dead_leased, dead_queued, dead_leased, dead_queued)):
        await make(rig, f"dead-{number}")
        await rig.advance(1.0)
    assert await paged(rig, 1) == ["dead-3", "dead-2", "dead-1", "dead-0"]
    only = await dead_letters(rig.ledger, JobFilter(lifecycle="queue-job"), limit=10)
    assert [(one.job_id, one.reason_code.value) for one in only.letters] == [
        ("dead-3", "dependency_unavailable"),
        ("dead-1", "dependency_unavailable"),
    ]
    answers = await requeue_dead(rig.ledger, OPERATOR, JobFilter(), RequestId("all"), limit=3, cause="mended")
    assert [(one.job_id, isinstance(one, Moved)) for one in answers] == [
        *(("dead-0", True), ("dead-2", True), ("dead-1", True))
    ]
    left = await dead_letters(rig.ledger, JobFilter(), limit=10)
    assert [one.job_id for one in left.letters] == ["dead-3"]


@pytest.mark.requirement("DJ-12", "DJ-21")
async def test_a_repeated_requeue_by_reason_returns_the_refusals_of_the_first_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """Another operator requeues one of the jobs after this request has selected it."""
    for name in ("queue-1", "queue-2"):
        await dead_queued(rig, name)
    requeue, others = rig.ledger.requeue, [JobId("queue-1")]

    async def after_another(*args: Any, **how: Any) -> list[Moved | NotMoved]:
        if others and how.get("key") is not None:
            await requeue(OPERATOR, [others.pop()], RequestId("another"), limit=1, cause=None)
        return await requeue(*args, **how)

    where = JobFilter(lifecycle="queue-job", reason_code=ReasonCode.DEPENDENCY_UNAVAILABLE)
    key = RequestKey(scope="s", key="k", fingerprint=b"f", about="all", given="k", keeps_refusals=True)
    asked = partial(requeue_dead, rig.ledger, OPERATOR, where, RequestId("bulk"), limit=10, cause=None, key=key)
    with monkeypatch.context() as patch:
        patch.setattr(rig.ledger, "requeue", after_another)
        first = await asked()
    told = {"queue-1": NotMoved, "queue-2": Moved}
    assert {one.job_id: type(one) for one in first} == told
    assert {one.job_id: type(one) for one in await asked()} == told


async def test_a_job_that_was_submitted_first_and_died_last_is_on_one_page(rig: Rig):
    new = [NewJob(job_id=JobId(name), type="work") for name in ("first", "second")]
    await rig.ledger.submit(SUBMITTER, new)
    for name in ("second", "queue-1", "first", "queue-2"):
        if name.startswith("queue"):
            await dead_queued(rig, name)
        else:
            await moved(rig, OPERATOR, name, "dead_lettered", DEATH)
        await rig.advance(1.0)
    for limit in (1, 2, 3):
        assert sorted(await paged(rig, limit)) == ["first", "queue-1", "queue-2", "second"]


@pytest.mark.requirement("DJ-12")
async def test_dead_letter_is_read_by_job_id(rig: Rig):
    for job_id in ("other", "dead", "newer"):
        await dead_leased(rig, job_id)
    waiting = await rig.submit_one()
    listed = {letter.job_id: letter for letter in await rig.ledger.dead_letters(JobFilter(), limit=10)}
    assert await rig.ledger.dead_letter(JobId("dead")) == listed[JobId("dead")]
    assert await rig.ledger.dead_letter(waiting) is None
    assert await rig.ledger.dead_letter(JobId("nobody's")) is None
    await rig.ledger.requeue(OPERATOR, [JobId("dead")], RequestId("again"), limit=1, cause=None)
    assert await rig.ledger.dead_letter(JobId("dead")) is None


@pytest.mark.requirement("DJ-12", "D62")
async def test_a_submitter_pages_through_its_own_letters_among_those_of_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own_reads, "LETTERS_PAGE", 2)
    await dead_of(rig, "ada", "ada-1", "queue-ada-1")
    await dead_of(rig, "mallory", *(f"mallory-{number}" for number in range(5)), "queue-mallory-1", "queue-mallory-2")
    await dead_of(rig, "ada", "ada-2", "queue-ada-2")
    await dead_of(rig, "mallory", "mallory-last", "queue-mallory-last")
    mine = reads_of(rig, "ada")
    for limit in (1, 2, 3, 10):
        assert sorted(await paged(rig, limit, mine)) == ["ada-1", "ada-2", "queue-ada-1", "queue-ada-2"]
    assert [one.job_id for one in await mine.dead_letters(JobFilter(), limit=2)] == ["ada-2", "ada-1"]
    assert [one.job_id for one in await mine.dead_letters(JobFilter(), limit=2, cursor="ada-2")] == ["ada-1"]
    monkeypatch.setattr(own_reads, "LETTERS_PAGES_MAX", 2)
    assert [one.job_id for one in await mine.dead_letters(JobFilter(), limit=2)] == ["ada-2"], "it looked at 4 letters"


@pytest.mark.requirement("D62")
async def test_a_submitter_reads_the_letter_events_and_payload_of_its_own_job_only(rig: Rig):
    await dead_of(rig, "ada", "ada-1")
    await dead_of(rig, "mallory", "mallory-1")
    mine, own, other = reads_of(rig, "ada"), JobId("ada-1"), JobId("mallory-1")
    assert await mine.dead_letter(own) == await rig.ledger.dead_letter(own)
    for refused in (other, JobId("nobody's")):
        with pytest.raises(NotAllowed, match="own"):
            await mine.dead_letter(refused)
    asked = [other, own, JobId("nobody's")]
    assert await mine.events_of(asked) == await rig.ledger.events_of([own])
    assert await mine.payloads(asked) == await rig.ledger.payloads([own])
    assert await mine.contents_of(asked) == await rig.ledger.contents_of([own])
    assert list(await rig.ledger.payloads([own])) == [own]


async def test_a_cursor_that_names_no_job_is_refused(rig: Rig):
    with pytest.raises(OptionInvalid, match="cursor"):
        await rig.ledger.dead_letters(JobFilter(), limit=1, cursor="nobody's")


async def test_the_payloads_and_events_of_several_jobs_are_those_of_each(rig: Rig):
    jobs = await rig.submit(2, payload=b'{"n": 1}')
    await rig.cancel(jobs[0], CancelMode.HARD)
    asked = [*jobs, JobId("nobody's")]
    events = {job_id: await rig.ledger.events(job_id) for job_id in jobs}
    assert await rig.ledger.events_of(asked) == events
    assert len(events[jobs[0]]) == 2
    assert await rig.ledger.events_of(asked, last=1) == {job_id: one[-1:] for job_id, one in events.items()}
    payloads = {job_id: (await rig.job(job_id)).payload for job_id in jobs}
    assert await rig.ledger.payloads(asked) == payloads
    assert await rig.ledger.contents_of(asked) == {job_id: (payloads[job_id], events[job_id]) for job_id in jobs}


@pytest.mark.requirement("DJ-12", "D38")
async def test_a_letter_counts_attempts_that_failed_or_were_lost_and_no_snoozes(rig: Rig):
    """Snoozed twice, given back once, lost once before it began and once while it ran, failed once, and then rejected: 3."""
    job_id = await rig.submit_one(max_attempts=9)
    for trigger in (Trigger.SNOOZE, Trigger.SNOOZE, Trigger.RELEASE):
        await rig.pull(await rig.claim_one(), trigger, spare_attempt=True)
    await rig.claim_one(start=False)
    await rig.lose_lease()
    await rig.claim_one()
    await rig.lose_lease()
    await rig.pull(await rig.claim_one(), Trigger.RETRY)
    held = await rig.claim_one()
    assert held.attempt == 6
    await rig.pull(held, "reject", death=DEATH)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.attempts) == (job_id, 3)
    assert (await rig.job(job_id)).attempts_spent == 2
    assert (await rig.verify()).ok


@pytest.mark.requirement("DJ-12")
async def test_a_letter_of_a_job_that_only_snoozed_counts_the_attempt_that_ended_it(rig: Rig):
    held = await rig.running(deadline_s=40.0)
    await rig.pull(held, Trigger.SNOOZE, spare_attempt=True, delay_s=1000.0)
    await rig.pass_time(41)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.reason_code, letter.attempts) == (held.lease.job_id, ReasonCode.TIMEOUT, 1)

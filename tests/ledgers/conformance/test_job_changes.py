"""Changes of many jobs: a filter selects a page, and one transaction changes it (decision 0041)."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER, Rig, claimed_ids
from trellis.engine import job_changes
from trellis.engine.errors import IdempotencyMismatch, OptionInvalid
from trellis.engine.job_changes import (
    ChangedJobs,
    ChangeOrder,
    JobChange,
    JobSelection,
    JobToChange,
    OwnedBy,
    SelectedJob,
    changeable_states,
    counts,
)
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    CancelRequested,
    DeadLetterReason,
    JobId,
    Moved,
    NotMoved,
    Priority,
    ReasonCode,
    RequestKey,
    Stage,
)
from trellis.engine.records import JobFilter, JobPlace, JobToRestore
from trellis.ledgers.postgres import job_selection as postgres_selection
from trellis.ledgers.sqlite import job_changes as sqlite_changes

KEY = RequestKey(scope="s", key="k", fingerprint=b"1", about="jobs", given="k")


def selection(change: JobChange, **options) -> JobSelection:
    return JobSelection(states=changeable_states(change), **options)


async def selected(rig: Rig, where: JobSelection, *, page: int = 100) -> list[SelectedJob]:
    """Every job that a selection finds, read in pages."""
    jobs, cursor = list[SelectedJob](), None
    for _ in range(1_000):
        read = await rig.ledger.select_jobs(where, limit=page, cursor=cursor)
        jobs += read.jobs
        cursor = read.cursor
        if cursor is None:
            return jobs
    raise AssertionError("the pages do not end")


async def change(
    rig: Rig, kind: JobChange, jobs: list[JobId] | list[SelectedJob], *, by: Actor = ADMIN, **options
) -> ChangedJobs:
    wanted = [
        JobToChange(one.job_id, one.version) if isinstance(one, SelectedJob) else JobToChange(one) for one in jobs
    ]
    order = ChangeOrder(change=kind, request_id=rig.request(), **options)
    return await rig.ledger.change_jobs(by, order, wanted)


async def dead(rig: Rig, n: int = 1, reason: ReasonCode = ReasonCode.TIMEOUT, **options) -> list[JobId]:
    jobs = await rig.submit(n, **options)
    death = DeadLetterReason(reason_code=reason, stage=Stage.EXEC, last_error="broken")
    for job_id in jobs:
        await rig.move(job_id, "dead_lettered", by=ADMIN, death=death)
    return jobs


# --- the four changes --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-11")
async def test_cancel_ends_waiting_jobs_and_asks_the_holder_of_a_held_one(rig: Rig):
    held = await rig.running()
    waiting, delayed = await rig.submit_one(), await rig.submit_one(delay_s=600.0)
    jobs = await selected(rig, selection(JobChange.CANCEL, not_asked_to_stop=True))
    changed = await change(rig, JobChange.CANCEL, jobs, grace_s=30.0, cause="a mistake")
    assert [type(answer) for answer in changed.answers] == [CancelRequested, Moved, Moved]
    assert counts(changed.answers) == {"changed": 2, "requested": 1, "skipped": 0}
    assert [await rig.state(job_id) for job_id in (waiting, delayed)] == ["cancelled", "cancelled"]
    event = await rig.last_event(waiting)
    assert (event.type, event.actor, event.cause) == ("job_cancelled", ADMIN.name, "a mistake")
    asked = await rig.job(held.lease.job_id)
    assert (asked.cancel_requested, asked.cancel_asked_by, asked.cancel_cause) == (True, ADMIN.name, "a mistake")
    assert await selected(rig, selection(JobChange.CANCEL, not_asked_to_stop=True)) == []
    assert len(await selected(rig, selection(JobChange.CANCEL))) == 1


async def test_a_hard_cancel_ends_a_held_job(rig: Rig):
    held = await rig.running()
    jobs = await selected(rig, selection(JobChange.CANCEL))
    (answer,) = (await change(rig, JobChange.CANCEL, jobs, mode=CancelMode.HARD)).answers
    assert isinstance(answer, Moved)
    assert await rig.state(held.lease.job_id) == "cancelled"


@pytest.mark.requirement("DJ-12", "D39")
async def test_discard_takes_dead_letters_off_the_list_and_can_be_undone(rig: Rig):
    first, second = await dead(rig, 2)
    (answer,) = (await change(rig, JobChange.DISCARD, [first])).answers
    assert isinstance(answer, Moved)
    assert (await rig.job(first)).state == "discarded"
    assert (await rig.last_event(first)).type == "job_discarded"
    assert [letter.job_id for letter in await rig.ledger.dead_letters(JobFilter(), limit=10)] == [second]
    assert await rig.ledger.dead_letter(first) is None
    assert sum(one.count for one in (await rig.ledger.figures()).dead_letters) == 1
    (again,) = await rig.ledger.requeue(ADMIN, [first], rig.request(), limit=1, cause=None)
    assert isinstance(again, Moved)
    assert (await rig.job(first)).place is JobPlace.READY
    assert (await rig.verify()).ok


async def test_failed_and_dead_queue_jobs_can_be_discarded(rig: Rig):
    ends = []
    for state in ("FAILED", "DEAD"):
        job_id = await rig.submit_one(lifecycle="queue-job")
        await rig.drive(job_id, state)
        ends.append(job_id)
    changed = await change(rig, JobChange.DISCARD, ends)
    assert counts(changed.answers)["changed"] == 2
    assert [await rig.state(job_id) for job_id in ends] == ["DISCARDED", "DISCARDED"]
    assert (await rig.verify()).ok


async def test_run_now_ends_the_delay_of_waiting_jobs_only(rig: Rig):
    ready, delayed = await rig.submit_one(), await rig.submit_one(delay_s=600.0)
    parked = [await rig.submit_one(concurrency_key="k", delay_s=delay) for delay in (0.0, 600.0)]
    jobs = await selected(rig, selection(JobChange.RUN_NOW, delayed=True))
    assert [job.job_id for job in jobs] == [delayed, parked[1]]
    changed = await change(rig, JobChange.RUN_NOW, [ready, delayed, parked[1]])
    assert [type(answer) for answer in changed.answers] == [NotMoved, Moved, Moved]
    assert (await rig.job(delayed)).place is JobPlace.READY
    assert (await rig.job(parked[1])).place is JobPlace.BLOCKED, "its key has one slot"
    assert (await rig.last_event(delayed)).type == "job_expedited"
    assert delayed in claimed_ids(await rig.claim(n=5))
    assert (await rig.verify()).ok


async def test_a_retry_that_waits_is_run_now(rig: Rig):
    held = await rig.running(max_attempts=3)
    await rig.pull(held, "retry", delay_s=3_600.0)
    await change(rig, JobChange.RUN_NOW, await selected(rig, selection(JobChange.RUN_NOW, delayed=True)))
    again = await rig.claim_one()
    assert (again.lease.job_id, again.attempt) == (held.lease.job_id, 1)


async def test_prioritize_moves_waiting_jobs_behind_those_of_the_new_priority(rig: Rig):
    urgent = await rig.submit_one(priority=Priority.CRITICAL)
    batch = await rig.submit(2, priority=Priority.BATCH)
    where = selection(JobChange.PRIORITIZE, other_priority_than=Priority.CRITICAL, priority=Priority.BATCH)
    jobs = await selected(rig, where)
    changed = await change(rig, JobChange.PRIORITIZE, jobs, priority=Priority.CRITICAL, cause="the customer waits")
    assert counts(changed.answers) == {"changed": 2, "requested": 0, "skipped": 0}
    assert await selected(rig, where) == []
    assert [(await rig.job(job_id)).priority for job_id in batch] == [Priority.CRITICAL] * 2
    event = await rig.last_event(batch[0])
    assert (event.type, event.data) == ("job_reprioritized", b'{"before": "batch", "priority": "critical"}')
    assert claimed_ids(await rig.claim(n=3)) == [urgent, *batch]
    assert (await rig.verify()).ok


async def test_a_delayed_job_keeps_its_time_when_its_priority_changes(rig: Rig):
    job_id = await rig.submit_one(delay_s=600.0)
    before = (await rig.job(job_id)).due_at
    await rig.advance(60.0)
    await change(rig, JobChange.PRIORITIZE, [job_id], priority=Priority.CRITICAL)
    job = await rig.job(job_id)
    assert (job.place, job.due_at, job.priority) == (JobPlace.SCHEDULED, before, Priority.CRITICAL)


async def test_a_parked_job_of_a_higher_priority_gets_the_slot_of_its_key(rig: Rig):
    first, second = await rig.submit(2, concurrency_key="k")
    await change(rig, JobChange.PRIORITIZE, [second], priority=Priority.CRITICAL)
    assert [(await rig.job(one)).place for one in (first, second)] == [JobPlace.BLOCKED, JobPlace.READY]


async def test_a_restored_job_has_the_priority_that_it_was_given_last(rig: Rig):
    job_id = await rig.submit_one(priority=Priority.BATCH)
    records = await rig.ledger.recorded(await rig.ledger.events(job_id))
    await change(rig, JobChange.PRIORITIZE, [job_id], priority=Priority.CRITICAL)
    later = await rig.ledger.recorded(await rig.ledger.events(job_id))
    ledger = await rig.lose()
    await ledger.restore(ADMIN, [JobToRestore(records=(*records, *later[1:]))])
    job = await ledger.job(job_id)
    assert job is not None
    assert job.priority is Priority.CRITICAL


# --- what is refused and skipped ---------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-11")
async def test_a_job_that_changed_after_it_was_selected_is_skipped_and_counted(rig: Rig):
    taken, left = await rig.submit(2)
    jobs = await selected(rig, selection(JobChange.CANCEL))
    assert (await rig.claim_one()).lease.job_id == taken
    changed = await change(rig, JobChange.CANCEL, jobs, selected_by="type=work")
    assert counts(changed.answers) == {"changed": 1, "requested": 0, "skipped": 1}
    skipped = changed.answers[0]
    assert isinstance(skipped, NotMoved)
    assert skipped.reason == "the job has version 3, not 1"
    assert [await rig.state(taken), await rig.state(left)] == ["running", "cancelled"]
    assert not (await rig.job(taken)).cancel_requested


@pytest.mark.parametrize("kind", [JobChange.DISCARD, JobChange.RUN_NOW, JobChange.PRIORITIZE])
async def test_a_submitter_changes_nothing_but_cancels(rig: Rig, kind: JobChange):
    (job_id,) = await dead(rig) if kind is JobChange.DISCARD else await rig.submit(1, delay_s=60.0)
    before = await rig.snapshot(job_id)
    priority = Priority.CRITICAL if kind is JobChange.PRIORITIZE else None
    (answer,) = (await change(rig, kind, [job_id], by=SUBMITTER, priority=priority, selected_by="x")).answers
    assert isinstance(answer, NotMoved)
    assert answer.reason == f"submitter may not {kind.value} it"
    assert await rig.snapshot(job_id) == before
    assert await rig.ledger.acts() == []


async def test_jobs_in_other_states_and_unknown_jobs_are_skipped(rig: Rig):
    held = await rig.running()
    changed = await change(rig, JobChange.PRIORITIZE, [held.lease.job_id, JobId("none")], priority=Priority.CRITICAL)
    assert [one.reason for one in changed.answers if isinstance(one, NotMoved)] == [
        "running declares no prioritize",
        "there is no such job",
    ]
    (same,) = (await change(rig, JobChange.PRIORITIZE, await rig.submit(1), priority=Priority.BATCH)).answers
    assert isinstance(same, NotMoved)
    assert same.reason == "it has this priority"


async def test_a_move_to_the_same_state_neither_ends_a_delay_nor_changes_a_priority(rig: Rig):
    job_id = await rig.submit_one(delay_s=600.0)
    before = await rig.snapshot(job_id)
    answer = await rig.move(job_id, "queued", by=ADMIN)
    assert isinstance(answer, Moved)
    assert answer.repeated
    assert await rig.snapshot(job_id) == before


async def test_a_change_has_bounds(rig: Rig):
    order = ChangeOrder(change=JobChange.CANCEL, request_id=rig.request())
    with pytest.raises(OptionInvalid, match="from 1 to 500"):
        await rig.ledger.change_jobs(ADMIN, order, [JobToChange(JobId(str(n))) for n in range(501)])
    with pytest.raises(OptionInvalid, match="exactly a prioritize names a priority"):
        await rig.ledger.change_jobs(ADMIN, replace(order, change=JobChange.PRIORITIZE), [JobToChange(JobId("a"))])
    with pytest.raises(OptionInvalid, match="from 1 to 500"):
        await rig.ledger.select_jobs(selection(JobChange.CANCEL), limit=501)
    with pytest.raises(OptionInvalid, match="the cursor of an earlier page"):
        await rig.ledger.select_jobs(selection(JobChange.CANCEL), limit=1, cursor="x")


# --- repeated requests and records -------------------------------------------------------------------------------------


async def test_a_repeated_request_changes_nothing_again_and_records_one_act(rig: Rig):
    await rig.submit(2)
    jobs = await selected(rig, selection(JobChange.PRIORITIZE))
    order = ChangeOrder(
        change=JobChange.PRIORITIZE,
        request_id=rig.request(),
        priority=Priority.CRITICAL,
        cause="somebody waits",
        selected_by="type=work",
    )
    wanted = [JobToChange(job.job_id, job.version) for job in jobs]
    first = await rig.ledger.change_jobs(ADMIN, order, wanted)
    second = await rig.ledger.change_jobs(ADMIN, order, wanted)
    assert counts(first.answers) == counts(second.answers) == {"changed": 2, "requested": 0, "skipped": 0}
    assert all(isinstance(answer, Moved) and answer.repeated for answer in second.answers)
    (act,) = await rig.ledger.acts()
    assert (act.event, act.subject, act.target, act.cause) == ("jobs.changed", "ledger", "prioritize", "somebody waits")
    assert act.facts == {"selected_by": "type=work", "changed": 2, "requested": 0, "skipped": 0}


async def test_the_key_of_a_request_keeps_its_answer_and_refuses_another_request(rig: Rig):
    jobs = await rig.submit(2)
    first = await change(rig, JobChange.CANCEL, jobs[:1], key=KEY, next_cursor="7")
    again = await change(rig, JobChange.CANCEL, jobs[1:], key=KEY, next_cursor="9")
    assert (again.next_cursor, again.repeated) == ("7", True)
    assert [answer.job_id for answer in again.answers] == [answer.job_id for answer in first.answers] == jobs[:1]
    assert await rig.state(jobs[1]) == "queued"
    with pytest.raises(IdempotencyMismatch):
        await change(rig, JobChange.CANCEL, jobs[1:], key=replace(KEY, fingerprint=b"2"))


async def test_two_operators_at_once_change_each_job_once(rig: Rig):
    jobs = await rig.submit(20)
    both = await asyncio.gather(*(change(rig, JobChange.CANCEL, list(jobs)) for _ in range(2)))
    assert sorted(counts(one.answers)["changed"] for one in both) in ([0, 20], [20, 0])
    assert [await rig.event_types(job_id) for job_id in jobs] == [["job_queued", "job_cancelled"]] * 20


# --- selection ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["few", "many"])
def examined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the jobs in question are few enough to be read together, or the ledger is walked in small steps."""
    if request.param == "many":
        for module in (sqlite_changes, postgres_selection):
            monkeypatch.setattr(module, "FEW_MAX", 3)
            monkeypatch.setattr(module, "WALKED_MAX", 3)
    return request.param


async def test_every_part_of_a_filter_narrows_the_selection(rig: Rig, examined: str):
    (old,) = await rig.submit(1)
    await rig.advance(3_600.0)
    moment = await rig.ledger.now()
    await rig.advance(1.0)
    plain = await rig.submit_one()
    other = await rig.submit_one(type="other")
    urgent = await rig.submit_one(priority=Priority.CRITICAL)
    keyed = await rig.submit(2, concurrency_key="k", concurrency_limit=1)
    related = await rig.submit_one(correlation_id="order-7")
    child = await rig.submit_one(parent_id=plain)
    delayed = await rig.submit_one(delay_s=60.0)
    everything = [old, plain, other, urgent, *keyed, related, child, delayed]
    expected = {
        "all": (everything, {}),
        "type": ([other], {"type": "other"}),
        "unknown type": ([], {"type": "never"}),
        "priority": ([urgent], {"priority": Priority.CRITICAL}),
        "key": (keyed, {"concurrency_key": "k"}),
        "correlation": ([related], {"correlation_id": "order-7"}),
        "own correlation": ([plain], {"correlation_id": plain}),
        "parent": ([child], {"parent_id": plain}),
        "before": ([old], {"submitted_before": moment}),
        "after": (everything[1:], {"submitted_after": moment}),
        "within": ([], {"submitted_after": moment, "submitted_before": moment + timedelta(seconds=1)}),
        "delayed": ([delayed], {"delayed": True}),
    }
    for name, (jobs, options) in expected.items():
        for page in (2, 100):
            read = await selected(rig, selection(JobChange.CANCEL, **options), page=page)
            assert [job.job_id for job in read] == jobs, (examined, name, page)


async def test_jobs_are_selected_by_their_submitter_or_its_group(rig: Rig, examined: str):
    def by(name: str) -> Actor:
        return Actor(role=SUBMITTER.role, name=name)

    names = ("<tenant=acme>ada", "<tenant=acme>bo", "<tenant=globex>ada", "ada")
    jobs = {name: (await rig.submit(1, by=by(name)))[0] for name in names}
    for owner, wanted in (
        (OwnedBy("ada"), ["ada"]),
        (OwnedBy("<tenant=acme>ada"), ["<tenant=acme>ada"]),
        (OwnedBy("<tenant=acme>ada", "<tenant=acme>"), ["<tenant=acme>ada", "<tenant=acme>bo"]),
        (OwnedBy("nobody"), []),
    ):
        read = await selected(rig, selection(JobChange.CANCEL, owned_by=owner))
        assert [job.job_id for job in read] == [jobs[name] for name in wanted], (examined, owner)


async def test_dead_letters_are_selected_by_reason_and_type(rig: Rig, examined: str):
    late = await dead(rig, 2)
    broken = await dead(rig, 2, reason=ReasonCode.PARSE_ERROR)
    elsewhere = await dead(rig, 1, type="other")
    for options, jobs in (
        ({}, [*late, *broken, *elsewhere]),
        ({"reason_code": ReasonCode.PARSE_ERROR}, broken),
        ({"type": "other"}, elsewhere),
    ):
        read = await selected(rig, selection(JobChange.DISCARD, **options))
        assert [job.job_id for job in read] == jobs, (examined, options)


async def test_a_change_that_stopped_goes_on_where_it_stopped(rig: Rig, examined: str):
    jobs = await rig.submit(7)
    where = selection(JobChange.CANCEL, type="work")
    page = await rig.ledger.select_jobs(where, limit=2)
    await change(rig, JobChange.CANCEL, list(page.jobs))
    assert examined in {"few", "many"}
    assert [job.job_id for job in await selected(rig, where, page=2)] == jobs[2:]
    rest = [job.job_id for job in (await rig.ledger.select_jobs(where, limit=100, cursor=page.cursor)).jobs]
    assert rest == jobs[2 : 2 + len(rest)]
    assert rest


async def test_a_submitters_changeable_states_leave_out_what_only_operators_cancel():
    assert {lifecycle for lifecycle, _ in changeable_states(JobChange.CANCEL, SUBMITTER.role)} == {
        "leased-job",
        "bus-job",
    }
    assert changeable_states(JobChange.DISCARD, WORKER.role) == frozenset()
    assert job_changes.RULES_OF_CHANGES.keys() == set(JobChange)


@pytest.mark.only("postgres")
async def test_a_change_locks_all_its_jobs_before_their_keys(rig: Rig):
    """A turn locks the leases that it ends and then their keys: the other order would stop both."""
    assert rig.admin_sql is not None
    (waiting,) = await rig.submit(1, concurrency_key="k", concurrency_limit=2)
    (held,) = await rig.submit(1, concurrency_key="k", concurrency_limit=2, priority=Priority.CRITICAL)
    assert (await rig.claim_one()).lease.job_id == held
    holder, other = await asyncpg.connect(rig.admin_url), await asyncpg.connect(rig.admin_url)
    try:
        async with holder.transaction():
            await holder.execute("select from trellis.lease for update")
            changing = asyncio.create_task(change(rig, JobChange.CANCEL, [waiting, held], mode=CancelMode.HARD))
            async with asyncio.timeout(20):
                while not await other.fetchval("select count(*) from pg_locks where not granted"):
                    pass
            assert await other.fetch("select id from trellis.concurrency_key for update skip locked")
        assert counts((await changing).answers) == {"changed": 2, "requested": 0, "skipped": 0}
    finally:
        await holder.close()
        await other.close()


@pytest.mark.only("postgres")
@pytest.mark.parametrize("wrong", ["null, array['job-1']", "'complete', array['job-1']", "'cancel', null::text[]"])
async def test_sql_callers_make_declared_changes_of_named_jobs_only(rig: Rig, wrong: str):
    job_id = await rig.submit_one()
    connection = await asyncpg.connect(rig.app_url)
    try:
        actor = await connection.fetchval("select trellis.register_actor('sql', $1::smallint)", ADMIN.role.code)
        more = "array[null]::int[], 'r', null, false, 0, 1::smallint, null, null"
        with pytest.raises(asyncpg.PostgresError) as refused:
            await connection.fetch(f"select * from trellis.change_jobs({actor}, {wrong}, {more})")
    finally:
        await connection.close()
    assert getattr(refused.value, "sqlstate", None) == "TR004"
    assert await rig.event_types(job_id) == ["job_queued"]

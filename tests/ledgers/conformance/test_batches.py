"""Batches: the completion job is suspended from its submit on, and starts once, with the last end of a job of its batch."""

import asyncio
import json

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER, Rig, actor
from tests.ledgers.conformance.test_restore import lost_and_restored
from tests.ledgers.conformance.test_waits import end_child, spawn, suspend
from trellis.engine.errors import IdempotencyMismatch, NotABatch, NotAllowed, OptionInvalid, UniqueConflict
from trellis.engine.job_batches import BATCH_BYTES_MAX, BATCH_MAX, BatchSubmitted, NewBatch, checked_batch
from trellis.engine.jobs import (
    BATCH_ENTRY,
    Advance,
    Claimed,
    JobId,
    NewJob,
    NotMoved,
    Submitted,
    Turn,
    Wait,
    WaitMode,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobPlace
from trellis.engine.uniqueness import OnConflict, UniqueRule
from trellis.lifecycles import Role
from trellis.lifecycles.events import Cause


def child(rig: Rig, **options) -> NewJob:
    return rig.new_job(type="child", **options)


def new_batch(rig: Rig, count: int, *, abandon: bool = False, **options) -> NewBatch:
    return checked_batch(rig.new_job(**options), [child(rig) for _ in range(count)], abandon=abandon)


async def submit(rig: Rig, batch: NewBatch) -> tuple[JobId, list[JobId]]:
    answer = await rig.ledger.submit_batch(SUBMITTER, batch)
    return answer.completion.job_id, [one.job_id for one in answer.members]


async def test_the_completion_job_starts_with_the_last_end_of_a_job_of_its_batch(rig: Rig):
    completion, members = await submit(rig, new_batch(rig, 4))
    job = await rig.job(completion)
    assert (job.state, job.place, job.due_at) == ("suspended", JobPlace.SCHEDULED, None)
    assert [(await rig.job(one)).parent_id for one in members] == [completion] * 4
    assert await rig.claim(5) == [], "nobody can claim it"
    await end_child(rig, members[1])
    await end_child(rig, members[0], "fail")
    await rig.cancel(members[2])
    assert await rig.state(completion) == "suspended"
    await rig.move(members[3], "dead_lettered", by=ADMIN, death=DEATH)
    event = await rig.last_event(completion)
    assert (event.type, event.source, event.target, event.cause) == (
        "job_resumed",
        "suspended",
        "queued",
        Cause.BATCH_ENDED,
    )
    held = await rig.claim_one()
    assert (held.lease.job_id, held.attempts_spent, held.attempts_allowed, held.spared) == (completion, 0, 5, 1)
    await rig.pull(held, "complete")
    assert await rig.event_types(completion) == [
        "job_queued",
        "job_suspended",
        "job_resumed",
        "job_claimed",
        "job_started",
        "job_succeeded",
    ]


async def test_an_empty_batch_completes_at_once(rig: Rig):
    completion, members = await submit(rig, new_batch(rig, 0))
    assert (members, await rig.state(completion)) == ([], "queued")
    assert (await rig.claim_one()).lease.job_id == completion


async def test_jobs_that_exist_are_of_the_batch_too_and_may_be_of_several(rig: Rig):
    ended, held_now, waiting, parked = [child(rig, job_id=JobId(f"there-{n}"), id_is_given=True) for n in range(4)]
    parked = child(rig, concurrency_key="k", idempotency_key="a key", fingerprint=b"f")
    blocker = child(rig, concurrency_key="k")
    for job in (blocker, ended, held_now, waiting, parked):
        await rig.ledger.submit(SUBMITTER, [job])
    await end_child(rig, ended.job_id)
    holder = await rig.claim_one(types=("child",), only=held_now.job_id)
    again = rig.new_job(
        type="child", concurrency_key="k", idempotency_key="a key", fingerprint=b"f", payload=parked.payload
    )
    batches = [
        checked_batch(rig.new_job(), [ended, held_now, waiting, again, child(rig), waiting]),
        checked_batch(rig.new_job(), [waiting, held_now]),
    ]
    answers = [await rig.ledger.submit_batch(SUBMITTER, batch) for batch in batches]
    first, second = (answer.completion.job_id for answer in answers)
    new = answers[0].members[4].job_id
    assert [one.created for one in answers[0].members] == [False, False, False, False, True, False]
    assert answers[0].members[3].job_id == parked.job_id
    assert (await rig.job(waiting.job_id)).parent_id is None
    await rig.pull(holder, "complete")
    await end_child(rig, waiting.job_id)
    assert [await rig.state(one) for one in (first, second)] == ["suspended", "queued"]
    await end_child(rig, new)
    await rig.cancel(blocker.job_id)
    assert await rig.state(first) == "suspended"
    await end_child(rig, parked.job_id)
    assert await rig.state(first) == "queued"


async def test_a_spawned_child_may_be_of_a_batch(rig: Rig):
    parent = await rig.running()
    (own,) = await spawn(rig, parent, 1)
    await suspend(rig, parent, Wait(children=(own,)))
    stored = await rig.job(own)
    assert stored.payload is not None
    twin = NewJob(job_id=own, type="child", payload=stored.payload, id_is_given=True)
    completion, members = await submit(rig, checked_batch(rig.new_job(), [twin]))
    assert members == [own]
    await end_child(rig, own)
    assert [await rig.state(one) for one in (parent.lease.job_id, completion)] == ["queued", "queued"]


async def test_a_unique_job_that_is_there_is_awaited_and_a_conflict_that_raises_submits_nothing(rig: Rig):
    def unique(on_conflict: OnConflict) -> NewJob:
        return child(rig, unique=UniqueRule(key="one", on_conflict=on_conflict))

    (there,) = await rig.ledger.submit(SUBMITTER, [unique(OnConflict.RETURN)])
    completion, members = await submit(rig, checked_batch(rig.new_job(), [unique(OnConflict.RETURN)]))
    assert members == [there.job_id]
    refused = checked_batch(rig.new_job(), [child(rig), unique(OnConflict.RAISE)])
    with pytest.raises(UniqueConflict):
        await rig.ledger.submit_batch(SUBMITTER, refused)
    assert [await rig.ledger.job(job.job_id) for job in (refused.completion, *refused.members)] == [None] * 3
    await end_child(rig, there.job_id)
    assert await rig.state(completion) == "queued"


async def test_a_completion_job_cannot_be_a_job_of_its_own_batch(rig: Rig):
    same = UniqueRule(key="one", on_conflict=OnConflict.RETURN)
    batch = checked_batch(rig.new_job(unique=same), [child(rig), rig.new_job(unique=same)])
    with pytest.raises(OptionInvalid, match="wait for itself") as refused:
        await rig.ledger.submit_batch(SUBMITTER, batch)
    assert refused.value.data["option"] == "jobs[1]"
    assert [await rig.ledger.job(job.job_id) for job in (batch.completion, *batch.members)] == [None] * 3


async def test_a_repeated_batch_is_the_first_one(rig: Rig):
    def request() -> NewBatch:
        completion = rig.new_job(idempotency_key="day 7", fingerprint=b"one", payload=b"7")
        return checked_batch(completion, [child(rig, payload=b"1"), child(rig, payload=b"2")])

    first = await rig.ledger.submit_batch(SUBMITTER, request())
    second = await rig.ledger.submit_batch(SUBMITTER, request())
    ids = [one.job_id for one in first.members]
    assert second == BatchSubmitted(
        completion=Submitted(job_id=first.completion.job_id, created=False),
        members=tuple(Submitted(job_id=job_id, created=False) for job_id in ids),
    )
    other = checked_batch(rig.new_job(idempotency_key="day 7", fingerprint=b"one", payload=b"7"), [child(rig)])
    with pytest.raises(IdempotencyMismatch):
        await rig.ledger.submit_batch(SUBMITTER, other)
    taken = child(rig, idempotency_key="day 7", fingerprint=b"another")
    with pytest.raises(IdempotencyMismatch):
        await rig.ledger.submit_batch(SUBMITTER, checked_batch(rig.new_job(), [child(rig), taken]))
    plain = rig.new_job(idempotency_key="plain", fingerprint=b"p")
    await rig.ledger.submit(SUBMITTER, [plain])
    completion = rig.new_job(idempotency_key="plain", fingerprint=b"p")
    with pytest.raises(NotABatch, match=plain.job_id):
        await rig.ledger.submit_batch(SUBMITTER, NewBatch(completion=completion, members=(child(rig),)))
    assert len(await rig.ledger.queues()) == 2
    assert sum(queue.ready for queue in await rig.ledger.queues()) == 3, "the refused batches wrote nothing"


@pytest.mark.parametrize("abandon", [False, True])
async def test_new_jobs_of_a_cancelled_batch_are_cancelled_unless_they_are_abandoned(rig: Rig, abandon: bool):
    there = child(rig, job_id=JobId("there"), id_is_given=True)
    await rig.ledger.submit(SUBMITTER, [there])
    batch = checked_batch(rig.new_job(), [there, child(rig), child(rig)], abandon=abandon)
    completion, (_, waiting, held_now) = await submit(rig, batch)
    await rig.claim_one(types=("child",), only=held_now)
    await rig.cancel(completion)
    await rig.sweep()
    assert await rig.state(waiting) == ("queued" if abandon else "cancelled")
    assert (await rig.ledger.holds([held_now]))[0].cancel is not abandon
    assert await rig.state(there.job_id) == "queued", "it is not this batch's to cancel"


async def test_a_requeued_job_is_awaited_again_if_the_completion_job_asks(rig: Rig):
    completion, (first, second) = await submit(rig, new_batch(rig, 2))
    await end_child(rig, first, "fail")
    await rig.ledger.requeue(ADMIN, [first], rig.request(), limit=1, cause=None)
    await end_child(rig, second)
    assert await rig.state(completion) == "queued", "each end of a job counts once"
    held = await rig.claim_one()
    await suspend(rig, held, Wait(mode=WaitMode.BATCH))
    assert await rig.state(completion) == "suspended"
    await end_child(rig, first)
    assert await rig.state(completion) == "queued"


async def test_a_completion_job_with_a_key_takes_no_slot_while_it_waits(rig: Rig):
    completion, (member,) = await submit(rig, new_batch(rig, 1, concurrency_key="report"))
    other = await rig.submit_one(concurrency_key="report")
    assert (await rig.claim_one()).lease.job_id == other
    await end_child(rig, member)
    assert await rig.claim(1) == [], "it waits for the slot now"
    assert (await rig.job(completion)).place is JobPlace.BLOCKED


async def test_a_completion_job_ends_by_its_deadline_and_its_jobs_go_on(rig: Rig):
    completion, (member,) = await submit(rig, new_batch(rig, 1, deadline_s=30.0))
    await rig.pass_time(40)
    assert [await rig.state(one) for one in (completion, member)] == ["dead_lettered", "queued"]
    await end_child(rig, member)
    assert await rig.state(completion) == "dead_lettered"


async def test_the_bounds_of_a_batch_are_stated(rig: Rig):
    job = child(rig)
    for completion, members, option in (
        (rig.new_job(), [job] * (BATCH_MAX + 1), "jobs"),
        (rig.new_job(), [child(rig, payload=bytes(BATCH_BYTES_MAX // 2))] * 2, "jobs"),
        (rig.new_job(delay_s=5.0), [job], "delay_s"),
        (rig.new_job(), [child(rig, lifecycle="queue-job")], "lifecycle"),
        (rig.new_job(lifecycle="queue-job"), [job], "lifecycle"),
    ):
        with pytest.raises(OptionInvalid, match=option):
            await rig.ledger.submit_batch(SUBMITTER, NewBatch(completion=completion, members=tuple(members)))
    with pytest.raises(NotAllowed):
        await rig.ledger.submit_batch(actor(Role.SWEEPER), new_batch(rig, 1))


async def test_nobody_but_the_submit_of_a_batch_suspends_a_waiting_job(rig: Rig):
    job_id = await rig.submit_one()
    for by in (SUBMITTER, WORKER):
        answer = await rig.move(job_id, "suspended", by=by)
        assert isinstance(answer, NotMoved)
        assert "submit of a batch" in answer.reason


async def test_beginning_anew_keeps_the_jobs_of_the_batch(rig: Rig):
    completion, (member,) = await submit(rig, new_batch(rig, 1))
    await end_child(rig, member)
    held = await rig.claim_one()
    await rig.ledger.journal(held.lease, "@1:step:x", b"1")
    await suspend(rig, held, Wait(restart_with=b'{"n": 1, "payload": 1, "signals": {}}'))
    journal = await rig.ledger.read_journal(completion)
    assert set(journal) == {BATCH_ENTRY, "@input"}
    assert json.loads(journal[BATCH_ENTRY]) == {"ids": [member], "types": [["child", 1]]}


async def test_a_restored_completion_job_waits_again_for_its_batch(rig: Rig):
    completion, (member,) = await submit(rig, new_batch(rig, 1))
    await lost_and_restored(rig)
    await rig.sweep()
    held = await rig.claim_one()
    assert (held.lease.job_id, held.spared) == (completion, 1), "it goes on, and its worker lets it wait"
    await suspend(rig, held, Wait(mode=WaitMode.BATCH))
    assert await rig.state(completion) == "suspended"
    await end_child(rig, member)
    assert await rig.state(completion) == "queued"


async def test_ends_that_race_with_the_submit_of_a_batch_are_not_missed(rig: Rig):
    other = await rig.open_another()
    for _ in range(15):
        there = [child(rig, job_id=JobId(f"race-{next(rig.numbers)}"), id_is_given=True) for _ in range(2)]
        await rig.ledger.submit(SUBMITTER, there)
        held = await rig.claim_one(types=("child",), only=there[0].job_id)
        batch = checked_batch(rig.new_job(), there)
        await asyncio.gather(
            rig.pull(held, "complete"),
            other.submit_batch(SUBMITTER, batch),
            rig.cancel(there[1].job_id),
        )
        await rig.sweep()
        assert await rig.state(batch.completion.job_id) == "queued"


async def test_jobs_of_a_batch_that_end_in_two_turns_at_once_start_it_once(rig: Rig):
    other = await rig.open_another()
    completion, members = await submit(rig, new_batch(rig, 40))
    held = await rig.claim(40, types=("child",))
    halves = [held[:20], held[20:]]

    async def end(ledger: Ledger, part: list[Claimed]) -> None:
        for one in part:
            await ledger.turn(Turn(actor=WORKER, advances=(Advance(one.lease, "running", "complete"),)))

    await asyncio.gather(end(rig.ledger, halves[0]), end(other, halves[1]))
    assert (await rig.event_types(completion)).count("job_resumed") == 1
    assert len(members) == 40


async def test_sql_callers_submit_the_completion_of_their_jobs(rig: Rig):
    if rig.admin_url is None:
        pytest.skip("SQL functions are PostgreSQL's")
    before = await rig.submit_one(type="child")
    await rig.submit()  # its type is known now
    connection = await asyncpg.connect(rig.app_url)
    try:
        async with connection.transaction():
            own = await connection.fetchval("select trellis.submit_job('child')")
            completion = await connection.fetchval(
                "select trellis.submit_completion($1, 'work', '{\"day\": 7}', p_idempotency_key => 'sql')",
                [own, before],
            )
        again = await connection.fetchval(
            "select trellis.submit_completion($1, 'work', '{\"day\": 7}', p_idempotency_key => 'sql')", [own]
        )
        assert again == completion
        for wrong, text in (
            ("select trellis.submit_completion(array['nobody'], 'work')", "nobody"),
            ("select trellis.submit_completion(array[null], 'work')", "null"),
            (f"select trellis.submit_completion(array_fill('{own}'::text, array[{BATCH_MAX + 1}]), 'work')", "at most"),
        ):
            with pytest.raises(asyncpg.PostgresError, match=text):
                await connection.fetchval(wrong)
    finally:
        await connection.close()
    assert await rig.state(completion) == "suspended"
    await end_child(rig, own)
    await end_child(rig, before)
    assert await rig.state(completion) == "queued"
    assert json.loads((await rig.ledger.read_journal(completion))[BATCH_ENTRY])["types"] == [["child", 1], ["child", 1]]

"""Keys of requests: stored with the change or not at all, one request each, and kept for a day."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, get_type_hints

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, Rig
from tests.ledgers.conformance.test_acts import REGISTERED
from trellis.engine import request_keys
from trellis.engine.errors import IdempotencyMismatch, JobNotFound, OptionInvalid, QueueFull
from trellis.engine.jobs import (
    CancelMode,
    CancelRequested,
    JobId,
    Mismatch,
    Move,
    Moved,
    NotMoved,
    RequestId,
    RequestKey,
    Submitted,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, RetentionOptions
from trellis.engine.request_keys import KEY_S_MIN

Change = Callable[[Ledger, JobId, RequestKey], Awaitable[Any]]


def key(fingerprint: bytes = b"f", name: str = "k", **options) -> RequestKey:
    return RequestKey(scope="s", key=name, fingerprint=fingerprint, about="job-7", given="press", **options)


def request(of: RequestKey) -> RequestId:
    return RequestId(f"{of.key}:{of.fingerprint.hex()}")


async def cancel(ledger: Ledger, job_id: JobId, of: RequestKey, mode: CancelMode = CancelMode.HARD) -> Any:
    return await ledger.cancel(ADMIN, job_id, mode, request(of), grace_s=30.0, cause=None, key=of)


async def requeue(ledger: Ledger, job_id: JobId, of: RequestKey) -> Any:
    return await ledger.requeue(ADMIN, [job_id], request(of), limit=1, cause=None, key=of)


async def move(ledger: Ledger, job_id: JobId, of: RequestKey) -> Any:
    return await ledger.move(
        ADMIN, Move(job_id=job_id, target="dead_lettered", request_id=request(of), death=DEATH, key=of)
    )


async def dead(rig: Rig) -> JobId:
    job_id = await rig.submit_one()
    await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH)
    return job_id


CHANGES: dict[str, tuple[Change, Callable[[Rig], Awaitable[JobId]]]] = {
    "cancel": (cancel, lambda rig: rig.submit_one()),
    "move": (move, lambda rig: rig.submit_one()),
    "requeue": (requeue, dead),
}


@pytest.mark.requirement("D27", "DJ-21")
@pytest.mark.parametrize("verb", CHANGES)
async def test_concurrent_different_requests_with_one_key_have_one_effect(rig: Rig, verb: str):
    change, prepare = CHANGES[verb]
    jobs = [await prepare(rig) for _ in range(6)]
    before = [(await rig.job(job_id)).version for job_id in jobs]
    ledgers = [rig.ledger, await rig.open_another()]
    answers = await asyncio.gather(
        *(change(ledgers[n % 2], job_id, key(bytes([n]))) for n, job_id in enumerate(jobs)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, IdempotencyMismatch)]
    assert len(refused) == len(jobs) - 1
    assert refused[0].data == {"key": "press", "job_id": "job-7"}
    after = [(await rig.job(job_id)).version for job_id in jobs]
    assert sum(after) == sum(before) + 1


@pytest.mark.requirement("D27", "DJ-21")
@pytest.mark.parametrize("verb", CHANGES)
async def test_the_same_request_at_the_same_moment_is_made_once(rig: Rig, verb: str):
    change, prepare = CHANGES[verb]
    job_id = await prepare(rig)
    version, ledgers = (await rig.job(job_id)).version, [rig.ledger, await rig.open_another()]
    answers = await asyncio.gather(*(change(ledgers[n % 2], job_id, key()) for n in range(4)))
    moved = [answer[0] if isinstance(answer, list) else answer for answer in answers]
    assert [(one.version, one.target) for one in moved] == [(version + 1, moved[0].target)] * 4
    assert sum(not one.repeated for one in moved) == 1
    assert (await rig.job(job_id)).version == version + 1


@pytest.mark.requirement("D27")
async def test_a_request_key_that_is_too_long_is_refused_with_its_limit_and_changes_nothing(rig: Rig):
    job_id = await rig.submit_one()
    await cancel(rig.ledger, job_id, replace(key(name="k" * 200), about="j" * 200, fingerprint=b"f" * 64))
    job_id = await rig.submit_one()
    for field, long in {"scope": "s" * 501, "key": "k" * 201, "about": "j" * 201, "fingerprint": b"f" * 65}.items():
        with pytest.raises(OptionInvalid, match=f"{field} of a request is .*: at most"):
            await cancel(rig.ledger, job_id, replace(key(), **{field: long}))
    if rig.admin_sql is not None:
        for texts in (
            ("s", "k", "66", "j" * 201, "k"),
            ("s", "k" * 201, "66", "j", "k"),
            ("s", "k", "66" * 65, "j", "k"),
        ):
            of = ", ".join(f"'{text}'" for text in texts)
            with pytest.raises(asyncpg.PostgresError, match="the key of a request has") as refused:
                await rig.admin_sql(
                    f"select trellis.cancel({REGISTERED}, '{job_id}', false, 'r', 1, null, array[{of}])"
                )
            assert getattr(refused.value, "sqlstate", "") == "TR004"
    assert (await rig.job(job_id)).state == "queued"


@pytest.mark.requirement("D27", "DJ-11")
async def test_a_cancel_that_was_requested_is_answered_alike_after_the_job_ended(rig: Rig):
    job_id = (await rig.running()).lease.job_id
    first = await cancel(rig.ledger, job_id, key(), CancelMode.SOFT)
    assert first == CancelRequested(job_id=job_id, state="running", version=(await rig.job(job_id)).version)
    await move(rig.ledger, job_id, key(name="other"))
    await requeue(rig.ledger, job_id, key(name="again"))
    assert await cancel(rig.ledger, job_id, key(), CancelMode.SOFT) == replace(first, repeated=True)
    assert (await rig.job(job_id)).state == "queued", "the next generation is not cancelled"


@pytest.mark.requirement("D27", "DJ-12")
async def test_a_requeue_of_several_jobs_is_answered_alike_also_for_those_it_refused(rig: Rig):
    jobs, of = [await dead(rig), await rig.submit_one()], key()
    first = await rig.ledger.requeue(ADMIN, jobs, request(of), limit=2, cause=None, key=of)
    assert [type(answer) for answer in first] == [Moved, NotMoved]
    await rig.move(jobs[1], "dead_lettered", by=ADMIN, death=DEATH)
    again = await rig.ledger.requeue(ADMIN, jobs, request(of), limit=2, cause=None, key=of)
    assert again == [replace(first[0], repeated=True), first[1]]
    assert (await rig.job(jobs[1])).state == "dead_lettered"


@pytest.mark.requirement("D27", "DJ-12")
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_refused_requeue_is_tried_again_unless_its_refusals_are_kept(rig: Rig, keeps: bool):
    job_id, of = await rig.submit_one(), key(keeps_refusals=keeps)
    assert isinstance((await requeue(rig.ledger, job_id, of))[0], NotMoved)
    with pytest.raises(IdempotencyMismatch):
        await requeue(rig.ledger, job_id, key(b"another"))
    await rig.move(job_id, "dead_lettered", by=ADMIN, death=DEATH)
    assert isinstance((await requeue(rig.ledger, job_id, of))[0], NotMoved if keeps else Moved)


@pytest.mark.requirement("D27")
@pytest.mark.parametrize("verb", CHANGES)
async def test_a_change_that_fails_stores_no_key(rig: Rig, verb: str):
    change, prepare = CHANGES[verb]
    with pytest.raises(JobNotFound):
        await change(rig.ledger, JobId("missing"), key(b"first"))
    assert await rig.ledger.find_request(key()) is None
    await change(rig.ledger, await prepare(rig), key(b"second"))
    assert await rig.ledger.find_request(key(b"second")) is not None


@pytest.mark.requirement("D27", "DJ-11")
async def test_death_between_change_and_answer_leaves_neither_change_nor_idempotency_key(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    job_id = (await rig.running()).lease.job_id

    def dies(_: object) -> dict[str, object]:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(request_keys, "asdict", dies)
        with pytest.raises(RuntimeError, match="killed"):
            await cancel(rig.ledger, job_id, key(), CancelMode.SOFT)
    assert not (await rig.job(job_id)).cancel_requested
    assert await rig.ledger.find_request(key(b"any")) is None
    answer = await cancel(rig.ledger, job_id, key(), CancelMode.SOFT)
    assert isinstance(answer, CancelRequested)
    assert not answer.repeated


@pytest.mark.requirement("D27", "DJ-5")
async def test_submits_with_one_request_key_create_the_jobs_of_the_first_only(rig: Rig):
    ledgers = [rig.ledger, await rig.open_another()]
    # Every try has new job ids, as that of a process has which was started after the first one died.
    answers = await asyncio.gather(
        *(ledgers[n % 2].submit(SUBMITTER, [rig.new_job(), rig.new_job()], key=key()) for n in range(4))
    )
    assert sum(answer[0].created for answer in answers if isinstance(answer[0], Submitted)) == 1
    assert len({tuple(one.job_id for one in answer) for answer in answers}) == 1
    for ask in (rig.submit_with_key, rig.ledger.find_request):
        with pytest.raises(IdempotencyMismatch) as refused:
            await ask(key(b"another"))
        assert refused.value.data == {"key": "press", "job_id": "job-7"}
    assert len((await rig.ledger.jobs(JobFilter(), limit=10)).jobs) == 2


@pytest.mark.requirement("D27", "DJ-5")
async def test_submit_that_fails_stores_neither_jobs_nor_request_key(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    full = rig.new_job(concurrency_key="host", waiting_max=0)
    with pytest.raises(QueueFull):
        await rig.ledger.submit(SUBMITTER, [rig.new_job(), full], key=key())
    with monkeypatch.context() as patched:
        patched.setattr(request_keys, "Mismatch", None)  # it dies when the jobs are written and the answer is not
        with pytest.raises(TypeError):
            await rig.submit_with_key(key())
    assert await rig.ledger.submit(SUBMITTER, [], key=key()) == []
    assert await rig.ledger.find_request(key(b"any")) is None
    assert not (await rig.ledger.jobs(JobFilter(), limit=10)).jobs
    (made,) = await rig.submit_with_key(key())
    assert isinstance(made, Submitted)
    assert made.created


@pytest.mark.requirement("D27")
async def test_submit_answered_with_mismatch_keeps_its_request_key_without_an_answer(rig: Rig):
    first, other = [rig.new_job(idempotency_key="order", fingerprint=one) for one in (b"1", b"2")]
    await rig.ledger.submit(SUBMITTER, [first])
    for _ in range(2):
        (refused,) = await rig.ledger.submit(SUBMITTER, [other], key=key())
        assert isinstance(refused, Mismatch)
    stored = await rig.ledger.find_request(key())
    assert stored is not None
    assert (stored.answer, stored.about) == (None, "job-7")


@pytest.mark.requirement("D27")
async def test_move_with_an_answer_stores_it_and_is_not_made_again_under_its_key(rig: Rig):
    jobs = await rig.submit(2)
    first = await move(rig.ledger, jobs[0], key(answer=b"both jobs"))
    assert isinstance(first, Moved)
    stored = await rig.ledger.find_request(key())
    assert stored is not None
    assert stored.answer == b"both jobs"
    again = await move(rig.ledger, jobs[1], key(answer=b"another answer"))
    assert isinstance(again, NotMoved)
    assert again.reason == "this request has an answer already"
    assert (await rig.job(jobs[1])).state == "queued"
    assert await rig.ledger.find_request(key()) == stored


@pytest.mark.requirement("D27")
def test_only_verbs_that_change_jobs_take_a_request_key():
    methods = inspect.getmembers(Ledger, inspect.isfunction)
    takes = {name for name, method in methods if "RequestKey" in str(inspect.signature(method))}
    assert takes == {"submit", "cancel", "requeue", "send_signal", "find_request"}
    assert get_type_hints(Move)["key"] == RequestKey | None, "the key of a move is part of the move"


@pytest.mark.oldest_server
@pytest.mark.requirement("D27")
async def test_keys_of_changes_are_kept_for_a_day_and_leave_in_batches(rig: Rig):
    for n in range(5):
        await rig.submit_with_key(key(name=f"k{n}"))
    options = RetentionOptions(batch=3)
    await rig.advance(KEY_S_MIN - 60)
    assert (await rig.ledger.retain(options)).keys == 0
    await rig.submit_with_key(key(name="late"))
    await rig.advance(61)
    reports = [await rig.ledger.retain(options) for _ in range(2)]
    assert [(report.keys, report.more) for report in reports] == [(3, True), (2, False)]
    assert await rig.ledger.find_request(key(b"another", "k0")) is None, "the key is free again"
    assert await rig.ledger.find_request(key(name="late")) is not None

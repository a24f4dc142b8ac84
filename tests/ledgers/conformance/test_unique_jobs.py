"""Unique jobs: of the jobs of a type with one unique key, one waits, or one is unfinished, whoever submits and where from."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, SUBMITTER, WORKER, Rig
from trellis.engine.errors import OptionInvalid, UniqueConflict
from trellis.engine.jobs import JobId, Mismatch, Moved, NewJob, NotMoved, SubmitOutcome, Submitted, TypeOptions
from trellis.engine.records import RetentionOptions
from trellis.engine.uniqueness import OnConflict, UniqueRule, WhileHeld, args_key

BY_ARGS = UniqueRule(key="args")
REPLACE = UniqueRule(key="page", on_conflict=OnConflict.REPLACE)


async def submit(rig: Rig, unique: UniqueRule | None = BY_ARGS, **options: object) -> Submitted:
    (answer,) = await rig.ledger.submit(SUBMITTER, [rig.new_job(unique=unique, **{"chosen": 0, **options})])
    assert isinstance(answer, Submitted)
    return answer


async def finish(rig: Rig, trigger: str = "complete") -> JobId:
    claimed = await rig.claim_one()
    await rig.pull(claimed, trigger, death=DEATH if trigger == "reject" else None)
    return claimed.lease.job_id


async def test_jobs_of_a_unique_type_are_unique_beside_jobs_without_keys(rig: Rig):
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="once", unique=BY_ARGS)])
    types = ("work", "work", "once", "once", "work", "work")
    jobs = [rig.new_job(type=type_, chosen=0) for type_ in types]
    jobs.append(rig.new_job(concurrency_key="key"))
    answers = await rig.ledger.submit(SUBMITTER, jobs)
    expected = [job.job_id for job in jobs]
    expected[3] = expected[2]
    assert [answer.job_id for answer in answers] == expected
    assert len(await rig.claim(10)) == 5, "all of the type that is not unique"


@pytest.mark.requirement("DJ-5")
async def test_equal_payloads_are_one_job_until_it_has_ended(rig: Rig):
    first = await submit(rig, payload=b'{"a": 1, "b": [true]}')
    again = await submit(rig, payload=b'{"b":[true],"a":1}')
    other = await submit(rig, payload=b'{"a": 2}')
    assert (first.outcome, again.outcome, other.outcome) == (
        SubmitOutcome.CREATED,
        SubmitOutcome.RETURNED,
        SubmitOutcome.CREATED,
    )
    assert again.job_id == first.job_id
    await rig.claim_one()
    assert (await submit(rig, payload=b'{"a":1,"b":[true]}')).job_id == first.job_id, "it runs"
    assert await rig.ledger.job(again.job_id) is not None


async def test_the_key_is_free_when_its_job_has_ended_also_as_a_dead_letter(rig: Rig):
    first = await submit(rig)
    assert await finish(rig, "reject") == first.job_id
    assert await rig.state(first.job_id) == "dead_lettered"
    second = await submit(rig)
    assert second.created
    assert second.job_id != first.job_id


async def test_a_key_that_is_held_while_waiting_is_free_when_the_job_runs(rig: Rig):
    rule = UniqueRule(key="page", while_=WhileHeld.WAITING)
    first = await submit(rig, rule)
    assert (await submit(rig, rule)).job_id == first.job_id
    await rig.claim_one()
    assert (await submit(rig, rule)).created


async def test_a_window_holds_the_key_after_the_end_and_no_longer(rig: Rig):
    rule = UniqueRule(key="page", window_s=100.0)
    first = await submit(rig, rule)
    await finish(rig)
    await rig.advance(99)
    assert await submit(rig, rule) == Submitted(job_id=first.job_id, created=False)
    await rig.advance(2)
    assert (await submit(rig, rule)).created


async def test_raise_refuses_the_whole_call_and_names_the_job(rig: Rig):
    first = await submit(rig, UniqueRule(key="page"))
    beside = rig.new_job()
    second = rig.new_job(unique=UniqueRule(key="page", on_conflict=OnConflict.RAISE))
    with pytest.raises(UniqueConflict) as caught:
        await rig.ledger.submit(SUBMITTER, [beside, second])
    assert caught.value.data == {"job_id": first.job_id, "type": "work", "key": "page"}
    assert await rig.ledger.job(beside.job_id) is None


async def test_replace_cancels_the_waiting_job_and_never_a_running_one(rig: Rig):
    first = await submit(rig, REPLACE, payload=b"1")
    second = await submit(rig, REPLACE, payload=b"2")
    assert (second.outcome, second.replaced) == (SubmitOutcome.REPLACED, first.job_id)
    assert await rig.state(first.job_id) == "cancelled"
    last = (await rig.ledger.events(first.job_id))[-1]
    assert last.cause == f"replaced by {second.job_id}"
    running = await rig.claim_one()
    assert running.lease.job_id == second.job_id
    third = await submit(rig, REPLACE, payload=b"3")
    assert (third.outcome, third.replaced) == (SubmitOutcome.CREATED, None)
    assert await rig.state(second.job_id) == "running"


async def test_replace_returns_a_running_job_that_holds_the_key_until_its_end(rig: Rig):
    first = await submit(rig, UniqueRule(key="page"))
    await rig.claim_one()
    assert await submit(rig, REPLACE) == Submitted(job_id=first.job_id, created=False)


async def test_jobs_of_one_call_are_unique_among_themselves(rig: Rig):
    jobs = [rig.new_job(unique=UniqueRule(key="page")) for _ in range(3)]
    answers = await rig.ledger.submit(SUBMITTER, jobs)
    assert answers == [Submitted(job_id=jobs[0].job_id, created=n == 0) for n in range(3)]
    replacing = [rig.new_job(unique=replace(REPLACE, key="other")) for _ in range(3)]
    last = (await rig.ledger.submit(SUBMITTER, replacing))[-1]
    assert last == Submitted(job_id=replacing[2].job_id, created=True, replaced=replacing[1].job_id)
    assert [await rig.state(job.job_id) for job in replacing] == ["cancelled", "cancelled", "queued"]


async def test_concurrent_submits_of_two_processes_make_one_job(rig: Rig):
    other = await rig.open_another()
    for round_ in range(10):
        rule = UniqueRule(key=f"key-{round_}")
        jobs = [rig.new_job(unique=rule) for _ in range(8)]
        ledgers = (rig.ledger, other)
        answers = await asyncio.gather(*(ledgers[n % 2].submit(SUBMITTER, [job]) for n, job in enumerate(jobs)))
        created = [one.job_id for (one,) in answers if isinstance(one, Submitted) and one.created]
        assert len(created) == 1
        assert {one.job_id for (one,) in answers} == set(created)


async def test_concurrent_replacing_submits_leave_one_waiting_job(rig: Rig):
    other = await rig.open_another()
    jobs = [rig.new_job(unique=REPLACE) for _ in range(12)]
    await asyncio.gather(*((rig.ledger, other)[n % 2].submit(SUBMITTER, [job]) for n, job in enumerate(jobs)))
    assert sorted([await rig.state(job.job_id) for job in jobs]) == ["cancelled"] * 11 + ["queued"]


@pytest.mark.requirement("D66")
async def test_what_a_type_declares_holds_for_every_submit(rig: Rig):
    declared = TypeOptions(type="work", unique=UniqueRule(key="args", on_conflict=OnConflict.REPLACE))
    await rig.ledger.declare_types(WORKER, [declared])
    assert await rig.ledger.declared_types("work") == [declared]
    first = await submit(rig, None)
    second = await submit(rig, None)
    assert second.replaced == first.job_id
    third = await submit(rig, UniqueRule(on_conflict=OnConflict.RETURN))
    assert third == Submitted(job_id=second.job_id, created=False), "a submit overrides what it names"
    beside = [rig.new_job(type="other", chosen=0), rig.new_job(chosen=0)]
    answers = await rig.ledger.submit(SUBMITTER, beside)
    assert [one.replaced for one in answers if isinstance(one, Submitted)] == [None, second.job_id]


async def test_a_changed_rule_is_an_administrative_act(rig: Rig):
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work")])
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", unique=BY_ARGS)])
    act = (await rig.ledger.acts())[-1]
    assert act.target is not None
    assert act.target.endswith('unique {"key": "args"}')


async def test_a_type_whose_application_computes_the_key_takes_no_job_without_one(rig: Rig):
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", unique=UniqueRule(computed=True))])
    with pytest.raises(OptionInvalid, match="the application of work computes it"):
        await rig.ledger.submit(SUBMITTER, [rig.new_job(chosen=0)])
    assert (await submit(rig, UniqueRule(key="7"))).created


@pytest.mark.parametrize(
    "rule, option",
    [
        (UniqueRule(on_conflict=OnConflict.RAISE), "unique is missing"),
        (UniqueRule(key="k", on_conflict=OnConflict.REPLACE, while_=WhileHeld.UNFINISHED), "while_"),
        (UniqueRule(key="k", on_conflict=OnConflict.REPLACE, window_s=1.0), "window_s"),
        (UniqueRule(key="k", on_conflict=OnConflict.RETURN, debounce_s=1.0), "on_conflict"),
        (UniqueRule(key="k", debounce_max_s=1.0), "debounce_max_s"),
        (UniqueRule(key="k", debounce_s=2.0, debounce_max_s=1.0), "debounce_max_s"),
    ],
)
async def test_rules_that_do_not_fit_together_are_refused(rig: Rig, rule: UniqueRule, option: str):
    with pytest.raises(OptionInvalid, match=f"^{option}"):
        await rig.ledger.submit(SUBMITTER, [rig.new_job(unique=rule)])


@pytest.mark.requirement("DJ-5")
async def test_an_idempotency_key_is_answered_first_and_bound_to_the_returned_job(rig: Rig):
    first = await submit(rig, idempotency_key="once", fingerprint=b"1")
    await finish(rig)
    assert await submit(rig, idempotency_key="once", fingerprint=b"1") == first._replace(created=False)
    second = await submit(rig)
    bound = await submit(rig, idempotency_key="twice", fingerprint=b"2")
    assert bound == Submitted(job_id=second.job_id, created=False)
    await finish(rig)
    again = await submit(rig, idempotency_key="twice", fingerprint=b"2")
    assert again == Submitted(job_id=second.job_id, created=False), "the key stands for that job"
    (mismatch,) = await rig.ledger.submit(
        SUBMITTER, [rig.new_job(unique=BY_ARGS, idempotency_key="twice", fingerprint=b"3")]
    )
    assert isinstance(mismatch, Mismatch)


async def test_a_chosen_id_is_not_taken_by_the_job_that_was_returned(rig: Rig):
    first = await submit(rig)
    given = rig.new_job(unique=BY_ARGS, id_is_given=True, fingerprint=b"1")
    assert await rig.ledger.submit(SUBMITTER, [given]) == [Submitted(job_id=first.job_id, created=False)]
    await finish(rig)
    assert await rig.ledger.submit(SUBMITTER, [given]) == [Submitted(job_id=given.job_id, created=True)]


@pytest.mark.requirement("DJ-13")
async def test_a_requeued_job_takes_its_key_back_or_is_refused(rig: Rig):
    first = await submit(rig)
    await finish(rig, "reject")
    second = await submit(rig)
    (refused,) = await rig.ledger.requeue(ADMIN, [first.job_id], rig.request(), limit=1, cause=None)
    assert isinstance(refused, NotMoved)
    assert f"job {second.job_id} holds its unique key now" in refused.reason
    assert (refused.state, refused.target) == ("dead_lettered", "queued")
    await rig.cancel(second.job_id)
    (moved,) = await rig.ledger.requeue(ADMIN, [first.job_id], rig.request(), limit=1, cause=None)
    assert isinstance(moved, Moved)
    assert await submit(rig) == Submitted(job_id=first.job_id, created=False), "it holds the key again"


async def test_unique_keys_of_other_types_and_scopes_are_others(rig: Rig):
    rule = UniqueRule(key="k")
    jobs = [
        rig.new_job(unique=rule),
        rig.new_job(unique=rule, type="other"),
        rig.new_job(unique=rule, unique_scope="tenant"),
    ]
    assert all(one.created for one in await rig.ledger.submit(SUBMITTER, jobs) if isinstance(one, Submitted))


async def test_a_removed_job_leaves_its_key(rig: Rig):
    rule = UniqueRule(key="page", window_s=1_000_000.0)
    await submit(rig, rule)
    await finish(rig)
    await rig.advance(100_000)
    assert (await rig.ledger.retain(RetentionOptions(ended_s=5_000.0))).jobs == 1
    assert (await submit(rig, rule)).created


@pytest.mark.requirement("DJ-5")
async def test_debounced_submits_start_one_job_with_the_newest_payload_after_the_last(rig: Rig):
    rule = UniqueRule(key="page", debounce_s=5.0)
    first = await submit(rig, rule, payload=b"1")
    await rig.advance(3)
    second = await submit(rig, rule, payload=b"2")
    assert second.replaced == first.job_id
    await rig.advance(3)
    await rig.sweep()
    assert await rig.claim(1) == [], "it is three seconds since the last submit"
    await rig.advance(3)
    await rig.sweep()
    claimed = await rig.claim_one()
    assert (claimed.lease.job_id, claimed.payload) == (second.job_id, b"2")


async def test_a_debounced_job_starts_in_bounded_time_however_often_it_is_submitted(rig: Rig):
    rule = UniqueRule(key="page", debounce_s=5.0, debounce_max_s=12.0)
    waits: list[float] = []
    for _ in range(4):
        answer = await submit(rig, rule)
        job = await rig.ledger.job(answer.job_id)
        assert job is not None
        waits.append(0.0 if job.due_at is None else (job.due_at - job.created_at).total_seconds())
        await rig.advance(4)
    assert waits == [5.0, 5.0, 4.0, 0.0], "twelve seconds after the first submit it is time"


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "payload",
    [
        {
            "b": 1,
            "a": [1.5, -0.0, 1e2, 1e-3, 10**20, True, None],
            "éé": 'ü\n\t\x1f\x7f\\"/',
            "long": {"z": {}, "y": []},
        },
        "text",
        [],
        {"nul": "\0"},
        {"half": "\ud800"},
    ],
)
async def test_both_ledgers_make_the_same_key_of_a_payload(rig: Rig, payload: object):
    assert rig.admin_sql is not None
    for body in (json.dumps(payload).encode(), json.dumps(payload, indent=1).encode()):
        ((key,),) = await rig.admin_sql("select trellis._args_key($1)", body)
        assert key == args_key(body)


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "body", [b"[1e999999999]", b"[NaN]", b'{"a": 1, "a": 2}', b"\x80", b"", b"1" * 5_000, b"[" * 100_000]
)
async def test_both_ledgers_make_the_same_key_of_odd_bytes(rig: Rig, body: bytes):
    assert rig.admin_sql is not None
    ((key,),) = await rig.admin_sql("select trellis._args_key($1)", body)
    assert key == args_key(body)


@pytest.mark.only("postgres")
async def test_a_submit_in_sql_is_unique_too(rig: Rig):
    assert rig.admin_sql is not None
    await rig.admin_sql("select trellis.type_id('work')")
    say = "select job_id, outcome, replaced from trellis.submit_unique_job('work', '{\"a\": 1}', p_unique => 'args', p_on_conflict => $1)"
    ((first, outcome, _),) = await rig.admin_sql(say, "return")
    assert outcome == "created"
    assert await rig.admin_sql(say, "return") == [(first, "returned", None)]
    assert await submit(rig, payload=b'{"a":1}') == Submitted(job_id=JobId(first), created=False)
    ((second, outcome, replaced),) = await rig.admin_sql(say, "replace")
    assert (outcome, replaced) == ("replaced", first)
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", unique=BY_ARGS)])
    assert await rig.admin_sql("select trellis.submit_job('work', '{\"a\":1}')") == [(second,)]
    for option in ("p_while => 'sometimes'", "p_on_conflict => 'panic'", "p_window_s => -1"):
        with pytest.raises(Exception, match="is not accepted"):
            await rig.admin_sql(f"select trellis.submit_unique_job('work', p_unique => 'k', {option})")


@pytest.mark.only("postgres")
async def test_a_repeated_call_with_a_lost_answer_says_the_same(rig: Rig):
    old = await submit(rig, REPLACE)
    new: NewJob = rig.new_job(unique=REPLACE)
    (answer,) = await rig.ledger.submit(SUBMITTER, [new])
    assert answer == Submitted(job_id=new.job_id, created=True, replaced=old.job_id)
    ledger: Any = rig.ledger
    calls = [(await ledger._actor(SUBMITTER), (new,))]
    again = await ledger._submit_lane.call("submit", "", lambda c, _: ledger._submit_calls(c, calls, None, repeat=True))
    assert again == [[answer]]
    assert await ledger.submit(SUBMITTER, [new]) == [Submitted(job_id=new.job_id, created=False)], "another call"

"""Rate limits of concurrency keys: never more claims than burst + rate x time, and no key in the way of another."""

import asyncio
from collections import Counter
from datetime import datetime
from itertools import combinations

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, LENGTH_S, OTHER_WORKER, WORKER, Rig, actor, claimed_ids
from trellis.engine.errors import ConcurrencyKeyMissing, OptionInvalid
from trellis.engine.jobs import Claimed, JobId, NotMoved, Priority, TypeOptions
from trellis.engine.key_rates import KeyRate, key_rate
from trellis.engine.records import JobFilter, JobPlace, JobToRestore, RetentionOptions
from trellis.lifecycles import Role, Trigger

MANY = 10_000
"""A limit of held jobs that no test reaches."""


async def declare(rig: Rig, per_second: float | None, burst: int | None = None, type_: str = "work") -> None:
    rate = key_rate(per_second, burst)
    await rig.ledger.declare_types(WORKER, [TypeOptions(type=type_, concurrency_limit=MANY, key_rate=rate)])


async def submit(rig: Rig, n: int, key: str = "acme", **options) -> list[JobId]:
    return await rig.submit(n, concurrency_key=key, concurrency_limit=MANY, **options)


async def places(rig: Rig) -> dict[JobPlace, int]:
    (queue,) = [queue for queue in await rig.ledger.queues() if queue.type == "work"]
    counts = {JobPlace.READY: queue.ready, JobPlace.BLOCKED: queue.blocked, JobPlace.LEASED: queue.held}
    return {place: count for place, count in counts.items() if count}


async def claim_times(rig: Rig, key: str) -> list[datetime]:
    jobs = (await rig.ledger.jobs(JobFilter(concurrency_key=key), limit=500)).jobs
    events = [event for job in jobs for event in await rig.ledger.events(job.job_id)]
    return sorted(event.ts for event in events if event.type == "job_claimed")


def windows_within(times: list[datetime], rate: KeyRate) -> bool:
    """Whether every window between two claims holds at most burst + rate x its length of them."""
    return all(
        last - first + 1 <= rate.burst + rate.per_second * (times[last] - times[first]).total_seconds() + 1e-9
        for first, last in combinations(range(len(times)), 2)
    )


@pytest.mark.oldest_server
async def test_a_key_gets_its_burst_and_then_its_rate(rig: Rig):
    await declare(rig, 2.0, 3)
    jobs = await submit(rig, 8)
    assert claimed_ids(await rig.claim(10)) == jobs[:3]
    assert await rig.claim(10) == []
    await rig.advance(0.4375)
    assert await rig.claim(10) == []
    await rig.advance(0.0625)
    assert claimed_ids(await rig.claim(10)) == [jobs[3]]
    await rig.advance(60)
    assert claimed_ids(await rig.claim(10)) == jobs[4:7]


async def test_an_urgent_job_passes_a_job_of_another_type_once_its_own_has_no_rate(rig: Rig):
    await declare(rig, 1.0, 1)
    other = await rig.submit_one(type="other", concurrency_key="acme")
    urgent = await rig.submit_one(concurrency_key="acme", priority=Priority.CRITICAL)
    assert (await rig.job(urgent)).place is JobPlace.BLOCKED, f"{other} has no token to give"
    await declare(rig, None)
    await rig.sweep()
    assert claimed_ids(await rig.claim(2, types=("work", "other"))) == [urgent]


async def test_keys_and_types_without_a_rate_do_not_wait_for_an_exhausted_key(rig: Rig):
    await declare(rig, 0.001, 1)
    await submit(rig, 50, "busy")
    others = [(await submit(rig, 1, f"key-{n}"))[0] for n in range(4)]
    plain = await rig.submit(2, type="plain")
    first, *rest = claimed_ids(await rig.claim(100, types=("work", "plain")))
    assert rest == [*others, *plain] or set(rest) == {*others, *plain}
    assert (await rig.job(first)).concurrency_key == "busy"
    assert await places(rig) == {JobPlace.BLOCKED: 49, JobPlace.LEASED: 5}


@pytest.mark.parametrize("how", ["claims", "sweeps"])
async def test_waiting_jobs_become_ready_with_time_alone(rig: Rig, how: str):
    """A claim gives tokens to waiting jobs, and so does the sweep, which says when it wants to come back."""
    await declare(rig, 1.0, 1)
    await submit(rig, 3)
    await rig.claim(10)
    report = await rig.sweep()
    assert (report.promoted, report.next_due_s) == (0, pytest.approx(1.0, abs=0.01))
    await rig.advance(1.0)
    if how == "sweeps":
        assert (await rig.sweep()).promoted == 1
        assert await places(rig) == {JobPlace.READY: 1, JobPlace.BLOCKED: 1, JobPlace.LEASED: 1}
    assert len(await rig.claim(10)) == 1


async def test_the_bound_holds_in_every_window_over_several_processes(rig: Rig):
    rate = KeyRate(per_second=7.0, burst=4)
    await declare(rig, rate.per_second, rate.burst)
    await submit(rig, 60)
    another, claimed = await rig.open_another(), 0
    for n in range(30):
        await rig.advance(0.03 + 0.041 * (n % 7))
        if n % 3 == 0:
            await rig.sweep()
        who = OTHER_WORKER if n % 2 else WORKER
        claimed += len(await rig.claim(1 + n % 5, by=who, ledger=another if n % 2 else None))
    times = await claim_times(rig, "acme")
    assert len(times) == claimed
    assert windows_within(times, rate)
    elapsed = (times[-1] - times[0]).total_seconds()
    assert claimed >= rate.per_second * elapsed * 0.8, "the rate is used"


async def test_a_ready_job_that_nobody_claims_keeps_its_token_and_no_more_become_ready(rig: Rig):
    await declare(rig, 1.0, 2)
    await submit(rig, 5)
    assert await places(rig) == {JobPlace.READY: 2, JobPlace.BLOCKED: 3}
    await rig.pass_time(60)
    assert await places(rig) == {JobPlace.READY: 2, JobPlace.BLOCKED: 3}
    assert len(await rig.claim(10)) == 2


async def test_the_most_urgent_job_of_a_key_gets_the_token(rig: Rig):
    await declare(rig, 0.1, 1)
    (batch,) = await submit(rig, 1)
    (critical,) = await submit(rig, 1, priority=Priority.CRITICAL)
    assert claimed_ids(await rig.claim(10)) == [critical]
    (interactive,) = await submit(rig, 1, priority=Priority.INTERACTIVE)
    await rig.advance(10)
    assert claimed_ids(await rig.claim(10)) == [interactive]
    await rig.advance(10)
    assert claimed_ids(await rig.claim(10)) == [batch]


async def test_the_limit_of_held_jobs_holds_beside_the_rate(rig: Rig):
    await declare(rig, 10.0, 10)
    await rig.submit(5, concurrency_key="k", concurrency_limit=2)
    held = await rig.claim(10)
    assert len(held) == 2
    await rig.advance(60)
    assert await rig.claim(10) == []
    await rig.pull(held[0], Trigger.COMPLETE)
    assert len(await rig.claim(10)) == 1


async def test_each_attempt_takes_a_token(rig: Rig):
    await declare(rig, 1.0, 2)
    (job,) = await submit(rig, 1)
    (held,) = await rig.claim(10)
    await rig.pull(held, Trigger.RETRY, delay_s=0.0)
    (again,) = await rig.claim(10)
    await rig.pull(again, Trigger.RETRY, delay_s=0.0)
    assert await rig.claim(10) == []
    await rig.advance(1.0)
    assert claimed_ids(await rig.claim(10)) == [job]


async def test_a_job_whose_worker_died_waits_for_a_token(rig: Rig):
    """Also one that nobody began: it keeps its state, and its next claim is a claim."""
    await declare(rig, 0.01, 1)
    (job,) = await submit(rig, 1)
    assert claimed_ids(await rig.claim(1, start=False)) == [job]
    await rig.pass_time(LENGTH_S + 1)
    assert (await rig.job(job)).place is JobPlace.BLOCKED
    assert await rig.claim(1) == []
    await rig.pass_time(100)
    assert claimed_ids(await rig.claim(1)) == [job]


async def test_a_waiting_job_can_be_cancelled_and_a_requeued_one_waits_again(rig: Rig):
    await declare(rig, 0.1, 1)
    first, second = await submit(rig, 2)
    (held,) = await rig.claim(10)
    await rig.cancel(second)
    assert (await rig.job(second)).place is JobPlace.ENDED
    await rig.pull(held, Trigger.FAIL, death=DEATH)
    await rig.ledger.requeue(ADMIN, [first], rig.request(), limit=1, cause="once more")
    assert (await rig.job(first)).place is JobPlace.BLOCKED
    assert await rig.claim(10) == []
    await rig.advance(10)
    assert claimed_ids(await rig.claim(10)) == [first]


async def test_a_deadline_ends_a_job_that_waits_for_a_token(rig: Rig):
    await declare(rig, 0.001, 1)
    await submit(rig, 1)
    (late,) = await submit(rig, 1, deadline_s=20.0)
    await rig.claim(10)
    await rig.pass_time(30)
    assert (await rig.job(late)).place is JobPlace.ENDED


async def test_a_pause_keeps_tokens_and_does_not_gather_more_than_the_burst(rig: Rig):
    await declare(rig, 1.0, 2)
    await submit(rig, 10)
    await rig.ledger.pause(ADMIN, "work", paused=True)
    await rig.pass_time(60)
    assert await rig.claim(10) == []
    await rig.ledger.pause(ADMIN, "work", paused=False)
    assert len(await rig.claim(10)) == 2


async def test_the_rate_of_the_type_holds_beside_those_of_its_keys(rig: Rig):
    await declare(rig, 1.0, 1)
    for n in range(4):
        await submit(rig, 2, f"key-{n}")
    await rig.ledger.limit_rate(ADMIN, "work", 1.0, 3)
    assert len(await rig.claim(10)) == 3


async def test_a_changed_rate_holds_for_jobs_that_wait_or_are_ready(rig: Rig):
    await declare(rig, 1.0, 5)
    await submit(rig, 8)
    await declare(rig, 1.0, 1)
    assert len(await rig.claim(10)) == 1
    await declare(rig, 100.0, 4)
    await rig.advance(0.015625)
    assert len(await rig.claim(10)) == 4
    await declare(rig, None)
    await rig.sweep()
    assert len(await rig.claim(10)) == 3


async def test_a_rate_that_is_new_holds_for_jobs_that_are_ready_already(rig: Rig):
    await rig.submit(6, concurrency_key="k", concurrency_limit=MANY)
    await declare(rig, 1.0, 2)
    assert len(await rig.claim(10)) == 2


async def test_types_that_share_a_key_each_keep_to_their_own_rate(rig: Rig):
    """And jobs of a type without a rate do not wait behind those that have one."""
    strict, lax = KeyRate(per_second=1.0, burst=1), KeyRate(per_second=4.0, burst=3)
    await declare(rig, strict.per_second, strict.burst, "strict")
    await declare(rig, lax.per_second, lax.burst, "lax")
    types = ("strict", "lax", "free")
    for n in range(12):
        for type_ in types:
            await submit(rig, 1, "shared", type=type_, priority=Priority(n % 3))
    claimed: list[Claimed] = []
    for n in range(60):
        claimed += await rig.claim(2 + n % 4, types=types)
        await rig.advance(0.13 + 0.07 * (n % 3))
    for type_, rate in (("strict", strict), ("lax", lax)):
        own = [job.lease.job_id for job in claimed if job.type == type_]
        times = [event.ts for job in own for event in await rig.ledger.events(job) if event.type == "job_claimed"]
        assert len(times) > 5
        assert windows_within(sorted(times), rate), type_
    assert sum(job.type == "free" for job in claimed) == 12


async def test_a_claim_of_a_slow_type_does_not_delay_the_tokens_of_another(rig: Rig):
    await declare(rig, 1.0, 1)
    await declare(rig, 0.0001, 1, type_="slow")
    (first, second), (slow,) = await submit(rig, 2), await submit(rig, 1, type="slow")
    assert claimed_ids(await rig.claim(1)) == [first]
    assert claimed_ids(await rig.claim(1, types=("slow",))) == [slow]
    await rig.advance(1.0)
    await rig.sweep()
    assert claimed_ids(await rig.claim(1)) == [second]


async def test_a_key_with_nothing_that_waits_is_not_looked_at_again(rig: Rig):
    await declare(rig, 1.0, 1)
    jobs = await submit(rig, 2)
    await rig.claim(1)
    await rig.advance(2.0)
    await rig.cancel(jobs[1])
    await rig.claim(5)
    await rig.sweep()
    await rig.advance(2.0)
    query = "select count(*) from {} where due_at is not null"
    if rig.admin_sql is not None:
        assert (await rig.admin_sql(query.format("trellis.concurrency_key")))[0][0] == 0


@pytest.mark.only("postgres")
async def test_a_token_that_is_freed_while_its_key_is_locked_is_given_by_a_later_sweep(rig: Rig):
    """A user's transaction has submitted a job of the key and goes on: nobody waits for it."""
    await declare(rig, 0.0001, 1)
    ready, waiting = await submit(rig, 2)
    connection = await asyncpg.connect(rig.admin_url)
    try:
        async with connection.transaction():
            await connection.execute("select from trellis.concurrency_key for update")
            await rig.cancel(ready)
    finally:
        await connection.close()
    for _ in range(60):
        await rig.sweep()
        await rig.advance(1.0)
        if (await places(rig)).get(JobPlace.READY):
            break
    assert claimed_ids(await rig.claim(1)) == [waiting]


async def test_a_claim_of_one_job_needs_a_token_too(rig: Rig):
    await declare(rig, 1.0, 1)
    first, second, third = await submit(rig, 3)
    assert claimed_ids(await rig.claim(1, only=second)) == [second]
    assert await rig.claim(1, only=third) == []
    await rig.advance(1.0)
    assert claimed_ids(await rig.claim(1, only=first)) == [first]


async def test_a_move_into_a_held_state_needs_a_token(rig: Rig):
    await declare(rig, 1.0, 1)
    first, second = await submit(rig, 2)
    assert claimed_ids(await rig.claim(10)) == [first]
    refused = await rig.move(second, "assigned", by=WORKER)
    assert isinstance(refused, NotMoved)
    await rig.advance(1.0)
    assert not isinstance(await rig.move(second, "assigned", by=WORKER), NotMoved)
    await rig.advance(0.5)
    await submit(rig, 1)
    assert await rig.claim(10) == []


async def test_claims_at_the_same_moment_share_the_tokens(rig: Rig):
    """Whoever waits for a lock takes no token that another has taken."""
    await declare(rig, 0.001, 5)
    await submit(rig, 40, "a")
    await submit(rig, 40, "b")
    ledgers = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    claims = [rig.claim(3, ledger=ledgers[n % 4], by=WORKER if n % 2 else OTHER_WORKER) for n in range(16)]
    claimed = [job for batch in await asyncio.gather(*claims) for job in batch]
    assert len(claimed) == len(set(claimed_ids(claimed)))
    left = await rig.claim(20)
    keys = Counter([(await rig.job(job.lease.job_id)).concurrency_key for job in (*claimed, *left)])
    assert keys == {"a": 5, "b": 5}


@pytest.mark.only("postgres")
async def test_jobs_submitted_in_sql_keep_to_the_rate(rig: Rig):
    assert rig.admin_sql is not None
    await rig.ledger.declare_types(
        WORKER, [TypeOptions(type="work", keyed=True, concurrency_limit=MANY, key_rate=key_rate(1.0, 2))]
    )
    with pytest.raises(Exception, match="limited by their concurrency key: give the key"):
        await rig.admin_sql("select trellis.submit_job('work')")
    for _ in range(4):
        await rig.admin_sql("select trellis.submit_job('work', p_concurrency_key => 'acme')")
    await rig.sweep()
    assert len(await rig.claim(10)) == 2


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "statement",
    [
        "update trellis.key_rate set used_until = now()",
        "delete from trellis.key_rate",
        "update trellis.type_options set rate_per_key = 1000",
        "insert into trellis.ready select * from trellis.ready",
        "select trellis._promote_by_rate(1, 1, now(), now())",
        "select trellis._take_tokens('{}', now())",
    ],
)
async def test_an_application_cannot_change_tokens_in_sql(rig: Rig, statement: str):
    connection = await asyncpg.connect(rig.app_url)
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_a_submit_without_a_key_is_refused_by_a_type_with_a_rate_per_key(rig: Rig):
    rate = key_rate(1.0, 1)
    await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", keyed=True, key_rate=rate)])
    with pytest.raises(ConcurrencyKeyMissing, match="concurrency_key"):
        await rig.submit(1, chosen=0)


@pytest.mark.parametrize(
    "rate, option",
    [
        (KeyRate(per_second=0.0, burst=1), "rate_per_key"),
        (KeyRate(per_second=float("nan"), burst=1), "rate_per_key"),
        (KeyRate(per_second=1e6, burst=1), "rate_per_key"),
        (KeyRate(per_second=1.0, burst=0), "burst_per_key"),
        (KeyRate(per_second=1.0, burst=10_001), "burst_per_key"),
    ],
)
async def test_rates_out_of_bounds_are_refused(rig: Rig, rate: KeyRate, option: str):
    with pytest.raises(OptionInvalid, match=option):
        await rig.ledger.declare_types(WORKER, [TypeOptions(type="work", key_rate=rate)])


async def test_what_is_declared_can_be_read_and_changes_are_recorded(rig: Rig):
    await declare(rig, 2.5, 4)
    await declare(rig, 0.2, None)
    assert [one.key_rate for one in await rig.ledger.declared_types()] == [KeyRate(per_second=0.2, burst=1)]
    acts = [act for act in await rig.ledger.acts() if act.subject == "work"]
    assert acts[0].target is not None
    assert acts[0].target.endswith("rate_per_key 2.5/s, burst 4")
    assert acts[1].source == acts[0].target
    assert [queue.rate_per_key for queue in await rig.ledger.queues() if queue.type == "work"] in ([0.2], [])


async def test_a_restored_ledger_puts_histories_back_and_limits_what_waits(rig: Rig):
    """The claims of the histories take no tokens again: the buckets are full."""
    await declare(rig, 0.001, 2)
    await submit(rig, 5)
    assert len(await rig.claim(10)) == 2
    before = [
        JobToRestore(records=tuple(await rig.ledger.recorded(history.events)))
        async for history in rig.ledger.histories()
    ]
    owner = await rig.lose()
    await declare(rig, 0.001, 2)
    assert await owner.restore(actor(Role.OWNER), before) == [True] * 5
    await rig.sweep()
    assert len(await rig.claim(10)) == 2


async def test_retention_removes_what_is_known_of_an_unused_key(rig: Rig):
    await declare(rig, 0.01, 1)
    await submit(rig, 1)
    (held,) = await rig.claim(1)
    await rig.pull(held, Trigger.COMPLETE)
    options = RetentionOptions(ended_s=0.0, testing=True)
    await rig.advance(1)
    await rig.ledger.retain(options)
    await rig.ledger.retain(options)
    await submit(rig, 1)
    assert await rig.claim(1) == [], "the token is still used"
    await rig.advance(100)
    (held,) = await rig.claim(1)
    await rig.pull(held, Trigger.COMPLETE)

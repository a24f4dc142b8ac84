"""Claiming: order, bounds, idempotence, pauses and rates, and what a holder is told."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import (
    ADMIN,
    LENGTH_S,
    OTHER_WORKER,
    WORKER,
    Rig,
    actor,
    answer_of,
    claimed_ids,
)
from trellis.engine.errors import Refused
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    Priority,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.records import JobPlace
from trellis.lifecycles import LIFECYCLES, Role, Trigger


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-14", "D47", "D2", "DJ-19")
async def test_a_claim_that_starts_records_both_steps(rig: Rig):
    job_id = await rig.submit_one(max_attempts=3)
    claimed = await rig.claim_one()
    assert (claimed.lease.job_id, claimed.lease.epoch, claimed.lease.lifecycle) == (job_id, 1, "leased-job")
    assert (claimed.state, claimed.attempt, claimed.generation) == ("running", 0, 0)
    assert (claimed.max_attempts, claimed.deaths, claimed.checkpoint) == (3, 0, None)
    job = await rig.job(job_id)
    assert (job.state, job.place, job.version, job.epoch, job.owner) == ("running", JobPlace.LEASED, 3, 1, WORKER.name)
    assert await rig.event_types(job_id) == ["job_queued", "job_claimed", "job_started"]
    assert [event.epoch for event in await rig.ledger.events(job_id)] == [0, 1, 1]


@pytest.mark.requirement("DJ-14", "D47", "DJ-19")
async def test_a_prefetched_job_is_only_assigned(rig: Rig):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    assert claimed.state == "assigned"
    assert (await rig.job(job_id)).state == "assigned"
    assert await rig.event_types(job_id) == ["job_queued", "job_claimed"]
    assert await rig.pull(claimed, Trigger.START, source="assigned") == StepApplied(version=3)
    assert await rig.state(job_id) == "running"


@pytest.mark.requirement("D47")
async def test_claim_starts_some_jobs_and_prefetches_the_rest(rig: Rig):
    await rig.submit(6)
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),), start=2, prefetch=3)
    claimed = (await rig.turn(claim=claim)).claimed
    assert Counter(one.state for one in claimed) == {"running": 2, "assigned": 3}
    assert len(await rig.claim(10)) == 1


@pytest.mark.requirement("D4", "D2")
@pytest.mark.parametrize(
    "lease_s, heartbeat_s, length_s", [(60.0, 15.0, 30.5), (30.0, 15.0, 30.0), (120.0, 30.0, 60.5)]
)
async def test_a_lease_ends_with_itself_or_with_two_missed_heartbeats(
    rig: Rig, lease_s: float, heartbeat_s: float, length_s: float
):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(lease_s=lease_s, heartbeat_s=heartbeat_s)
    assert (claimed.lease_s, claimed.heartbeat_s) == (length_s, heartbeat_s)
    job = await rig.job(job_id)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=length_s)


async def test_claims_come_by_priority_then_by_age(rig: Rig):
    batch = await rig.submit(2, priority=Priority.BATCH)
    interactive = await rig.submit(2, priority=Priority.INTERACTIVE)
    critical = await rig.submit(2, priority=Priority.CRITICAL)
    assert claimed_ids(await rig.claim(6)) == [*critical, *interactive, *batch]


@pytest.mark.requirement("BUS-3")
async def test_no_priority_starves(rig: Rig):
    """A flood of critical work never ends, yet a batch job is handed out in bounded time."""
    (batch,) = await rig.submit(1, priority=Priority.BATCH)
    for _ in range(200):
        await rig.submit(3, priority=Priority.CRITICAL)
        claimed = await rig.claim(2)
        if batch in claimed_ids(claimed):
            return
    pytest.fail("400 claims of critical work and the batch job still waits")


@pytest.mark.requirement("BUS-3")
async def test_the_most_urgent_work_gets_most_of_the_claims(rig: Rig):
    await rig.submit(200, priority=Priority.BATCH)
    critical = set(await rig.submit(200, priority=Priority.CRITICAL))
    claimed = [job for _ in range(100) for job in claimed_ids(await rig.claim(1))]
    assert len(critical & set(claimed)) >= 75


@pytest.mark.requirement("DJ-14")
async def test_a_claim_takes_no_more_than_it_asked(rig: Rig):
    await rig.submit(5)
    assert len(await rig.claim(3)) == 3
    assert len(await rig.claim(3)) == 2
    assert await rig.claim(3) == []


async def test_a_claim_sees_its_own_types_only(rig: Rig):
    a, b, c = [(await rig.submit(2, type=type_)) for type_ in ("a", "b", "c")]
    assert set(claimed_ids(await rig.claim(10, types=("a", "c")))) == {*a, *c}
    assert set(claimed_ids(await rig.claim(10, types=("b",)))) == set(b)


@pytest.mark.requirement("DJ-14")
async def test_a_claim_that_names_a_job_takes_no_other(rig: Rig):
    first, second, third = await rig.submit(3)
    assert claimed_ids(await rig.claim(3, only=second)) == [second]
    assert await rig.claim(3, only=second) == [], "it is held"
    assert await rig.claim(3, only=first, types=("other",)) == []
    assert await rig.claim(3, only=JobId("nobody")) == []
    await rig.ledger.pause(ADMIN, "work", paused=True)
    assert await rig.claim(3, only=first) == []
    await rig.ledger.pause(ADMIN, "work", paused=False)
    assert claimed_ids(await rig.claim(3)) == [first, third]


@pytest.mark.requirement("JQ-7", "D49")
async def test_a_claim_that_names_a_job_takes_the_slot_of_an_unclaimed_job_of_its_key(rig: Rig):
    first, second, third = await rig.submit(3, concurrency_key="k")
    held = await rig.claim(3, only=third)
    assert claimed_ids(held) == [third]
    assert await rig.claim(3, only=second) == [], "the slot is held"
    assert await rig.claim(3) == []
    await rig.lose_lease()
    (again,) = await rig.claim(3, only=third)
    assert (again.lease.job_id, again.lease.epoch > held[0].lease.epoch) == (third, True)
    await rig.pull(again, Trigger.COMPLETE)
    assert claimed_ids(await rig.claim(3)) == [first], "the others keep their order"
    assert (await rig.verify()).ok


@pytest.mark.requirement("DJ-6")
async def test_each_type_has_its_own_lease(rig: Rig):
    await rig.submit(1, type="quick")
    await rig.submit(1, type="slow")
    claim = Claim(
        claim_id=ClaimId("c"),
        types=(
            TypeClaim(type="quick", lease_s=30, heartbeat_s=10),
            TypeClaim(type="slow", lease_s=120, heartbeat_s=30),
        ),
        start=2,
    )
    claimed = (await rig.turn(claim=claim)).claimed
    assert {one.type: one.lease_s for one in claimed} == {"quick": 20.5, "slow": 60.5}


async def test_a_type_means_one_lifecycle_at_a_time(rig: Rig):
    leased = await rig.submit_one()
    await rig.submit_one(lifecycle="nlm-job")
    assert claimed_ids(await rig.claim(5)) == [leased]
    assert len(await rig.claim(5, lifecycle="nlm-job")) == 1


@pytest.mark.requirement("DJ-14", "DJ-21")
@pytest.mark.oldest_server
async def test_the_same_claim_id_returns_the_same_jobs_while_their_leases_live(rig: Rig):
    await rig.submit(5)
    first = await rig.claim(3, claim_id="mine")
    again = await rig.claim(3, claim_id="mine")
    assert sorted(claimed_ids(again)) == sorted(claimed_ids(first))
    assert {one.lease for one in again} == {one.lease for one in first}
    assert {one.payload for one in again} == {b"null"}
    assert [len(await rig.ledger.events(one.lease.job_id)) for one in first] == [3, 3, 3]


@pytest.mark.requirement("DJ-14")
async def test_repeated_claim_returns_its_jobs_in_the_order_of_submission(rig: Rig):
    batch = await rig.submit(1, priority=Priority.BATCH)
    urgent = await rig.submit(1, priority=Priority.CRITICAL)
    assert claimed_ids(await rig.claim(2, claim_id="mine")) == [*urgent, *batch]
    assert claimed_ids(await rig.claim(2, claim_id="mine")) == [*batch, *urgent]


@pytest.mark.requirement("DJ-14")
async def test_a_repeated_claim_leaves_out_what_was_settled(rig: Rig):
    await rig.submit(5)
    first = await rig.claim(3, claim_id="mine")
    await rig.pull(first[0], Trigger.COMPLETE)
    again = await rig.claim(3, claim_id="mine")
    assert sorted(claimed_ids(again)) == sorted(claimed_ids(first[1:]))


@pytest.mark.requirement("DJ-14")
async def test_another_claim_id_gets_other_jobs(rig: Rig):
    await rig.submit(4)
    first = set(claimed_ids(await rig.claim(2, claim_id="one")))
    second = set(claimed_ids(await rig.claim(2, claim_id="two")))
    assert len(first | second) == 4


@pytest.mark.requirement("DJ-14")
async def test_a_claim_id_does_not_bring_back_leases_that_ended(rig: Rig):
    """It may claim anew or find nothing; what it must not return is a lease that is lost."""
    (job_id,) = await rig.submit(1)
    first = await rig.claim_one(claim_id="mine")
    await rig.lose_lease()
    again = await rig.claim(claim_id="mine") or await rig.claim()
    assert claimed_ids(again) == [job_id]
    assert again[0].lease.epoch > first.lease.epoch


@pytest.mark.requirement("DJ-2", "DJ-14")
async def test_concurrent_repeats_of_one_claim_win_one_set(rig: Rig):
    await rig.submit(40)
    ledgers = [rig.ledger, await rig.open_another(), await rig.open_another()]
    answers = await asyncio.gather(*(rig.claim(5, claim_id="mine", ledger=ledgers[i % 3]) for i in range(12)))
    assert len({frozenset(claimed_ids(answer)) for answer in answers if answer}) == 1
    assert (await rig.ledger.queues())[0].held == 5


async def test_a_paused_type_is_not_handed_out(rig: Rig):
    paused, other = await rig.submit_one(type="a"), await rig.submit_one(type="b")
    await rig.ledger.pause(ADMIN, "a", paused=True)
    assert claimed_ids(await rig.claim(5, types=("a", "b"))) == [other]
    assert {queue.type: queue.paused for queue in await rig.ledger.queues()} == {"a": True, "b": False}
    await rig.ledger.pause(ADMIN, "a", paused=False)
    assert claimed_ids(await rig.claim(5, types=("a", "b"))) == [paused]


async def test_a_type_can_be_paused_before_its_first_job(rig: Rig):
    await rig.ledger.pause(ADMIN, "later", paused=True)
    await rig.submit_one(type="later")
    assert await rig.claim(types=("later",)) == []


async def test_pausing_leaves_what_is_held_alone(rig: Rig):
    claimed = await rig.running()
    await rig.ledger.pause(ADMIN, "work", paused=True)
    assert isinstance(await rig.pull(claimed, Trigger.COMPLETE), StepApplied)


async def test_a_rate_limit_bounds_claims_over_all_claimers(rig: Rig):
    await rig.submit(20)
    another = await rig.open_another()
    await rig.ledger.limit_rate(ADMIN, "work", 2.0, burst=3)
    got = len(await rig.claim(10)) + len(await rig.claim(10, ledger=another))
    assert got == 3
    await rig.advance(1.0)
    assert len(await rig.claim(10)) + len(await rig.claim(10, ledger=another)) == 2
    await rig.advance(60.0)
    assert len(await rig.claim(10)) == 3, "what was not used is not saved up beyond the burst"
    assert next(queue.rate_limit for queue in await rig.ledger.queues()) == 2.0


async def test_a_rate_limit_that_is_declared_again_keeps_its_used_tokens(rig: Rig):
    """Each worker declares it when it starts: a fleet that restarts must not exceed the rate."""
    await rig.submit(20)
    claimed: list[int] = []
    for _ in range(3):
        await rig.ledger.limit_rate(ADMIN, "work", 2.0, burst=3)
        claimed.append(len(await rig.claim(10)))
    assert claimed == [3, 0, 0]
    await rig.advance(1.0)
    await rig.ledger.limit_rate(ADMIN, "work", 2.0, burst=3)
    assert len(await rig.claim(10)) == 2


async def test_a_rate_limit_can_be_taken_away(rig: Rig):
    await rig.submit(10)
    await rig.ledger.limit_rate(ADMIN, "work", 1.0)
    assert len(await rig.claim(10)) == 1
    await rig.ledger.limit_rate(ADMIN, "work", None)
    assert len(await rig.claim(10)) == 9


async def test_a_rate_limit_binds_its_own_type_only(rig: Rig):
    await rig.submit(5, type="slow")
    await rig.submit(5, type="fast")
    await rig.ledger.limit_rate(ADMIN, "slow", 1.0)
    claimed = await rig.claim(10, types=("slow", "fast"))
    assert Counter(one.type for one in claimed) == {"slow": 1, "fast": 5}


async def test_jobs_of_a_repeated_claim_do_not_count_against_the_rate_limit(rig: Rig):
    await rig.submit(5)
    await rig.ledger.limit_rate(ADMIN, "work", 1.0, burst=2)
    first = await rig.claim(2, claim_id="mine")
    assert sorted(claimed_ids(await rig.claim(2, claim_id="mine"))) == sorted(claimed_ids(first))


@pytest.mark.requirement("JQ-6", "BUS-1")
@pytest.mark.parametrize(
    "lifecycle", sorted(name for name, one in LIFECYCLES.items() if any(state.claimable for state in one.states))
)
async def test_only_the_declared_role_may_claim(rig: Rig, lifecycle: str):
    claimable = next(state.name for state in LIFECYCLES[lifecycle].states if state.claimable)
    allowed = LIFECYCLES[lifecycle].by_trigger[claimable, Trigger.CLAIM].actors
    job_id = await rig.submit_one(lifecycle=lifecycle)
    await rig.drive(job_id, claimable)
    before = await rig.snapshot(job_id)
    for role in set(Role) - allowed:
        answer = await answer_of(rig.claim(lifecycle=lifecycle, by=actor(role)))
        assert answer == [] or isinstance(answer, Refused)
        assert await rig.snapshot(job_id) == before
    assert claimed_ids(await rig.claim(lifecycle=lifecycle, by=actor(next(iter(allowed))))) == [job_id]


@pytest.mark.requirement("D47")
async def test_turn_settles_starts_and_claims_jobs_together(rig: Rig):
    await rig.submit(4)
    running, waiting = await rig.claim_one(), await rig.claim_one(start=False)
    result = await rig.turn(
        Advance(lease=running.lease, source="running", trigger=Trigger.COMPLETE, result=b"1"),
        Advance(lease=waiting.lease, source="assigned", trigger=Trigger.START),
        claim=Claim(claim_id=ClaimId("next"), types=(TypeClaim(type="work"),), start=1, prefetch=1),
    )
    assert result.outcomes == [StepApplied(version=4), StepApplied(version=3)]
    assert Counter(one.state for one in result.claimed) == {"running": 1, "assigned": 1}
    assert await rig.state(running.lease.job_id) == "succeeded"
    assert await rig.state(waiting.lease.job_id) == "running"


async def test_a_turn_frees_the_slot_that_its_own_claim_takes(rig: Rig):
    first, second = await rig.submit(2, concurrency_key="k")
    running = await rig.claim_one()
    assert running.lease.job_id == first
    result = await rig.turn(
        Advance(lease=running.lease, source="running", trigger=Trigger.COMPLETE),
        claim=Claim(claim_id=ClaimId("next"), types=(TypeClaim(type="work"),)),
    )
    assert claimed_ids(result.claimed) == [second]


async def test_an_empty_turn_does_nothing(rig: Rig):
    result = await rig.ledger.turn(Turn(actor=WORKER))
    assert (result.outcomes, result.claimed) == ([], [])


async def test_the_holder_learns_how_long_until_the_deadline(rig: Rig):
    await rig.submit_one(deadline_s=100.0)
    await rig.advance(40.0)
    assert (await rig.claim_one()).deadline_s == pytest.approx(60.0)
    await rig.submit_one()
    assert (await rig.claim_one()).deadline_s is None


@pytest.mark.requirement("D2")
async def test_the_epoch_rises_at_every_claim_and_is_never_reset(rig: Rig):
    (job_id,) = await rig.submit(1, max_attempts=10)
    epochs = []
    for worker in (WORKER, OTHER_WORKER, WORKER):
        claimed = await rig.claim_one(by=worker)
        epochs.append(claimed.lease.epoch)
        await rig.pull(claimed, Trigger.RETRY, by=worker)
    claimed = await rig.claim_one()
    epochs.append(claimed.lease.epoch)
    await rig.pull(claimed, Trigger.FAIL)
    await rig.ledger.requeue(ADMIN, [job_id], rig.request(), limit=1, cause=None)
    epochs.append((await rig.claim_one()).lease.epoch)
    assert epochs == sorted(set(epochs))


@pytest.mark.requirement("D3", "DJ-2")
async def test_a_held_job_cannot_be_claimed_again(rig: Rig):
    await rig.running()
    assert await rig.claim(5, by=OTHER_WORKER) == []
    await rig.advance(LENGTH_S + 100)
    assert await rig.claim(5, by=OTHER_WORKER) == [], "only the sweep ends a lease"


@pytest.mark.requirement("DJ-14", "D19")
async def test_a_cancelled_job_is_not_handed_out(rig: Rig):
    job_id = await rig.submit_one()
    await rig.cancel(job_id, CancelMode.SOFT)
    assert await rig.claim() == []


async def test_waiting_for_work_ends_with_a_hint_or_in_time(rig: Rig):
    another = await rig.open_another()
    await rig.ledger.wait_for_work(("work",), 0.01)
    waiting = asyncio.create_task(another.wait_for_work(("work",), 30.0))
    # The waiter may still be on its way in: a hint that came too early is lost, so hints are sent until one arrives.
    while not waiting.done():
        await rig.submit_one()
        await asyncio.wait({waiting}, timeout=0.1)
    await waiting


async def test_each_job_of_a_burst_is_hinted_although_hints_are_merged(rig: Rig):
    another = await rig.open_another()
    await another.wait_for_work(("work",), 0.1)
    for _ in range(5):
        await rig.submit_one()
        claimed: list[Claimed] = []
        while not claimed:
            await asyncio.wait_for(another.wait_for_work(("work",), 60.0), 20.0)
            claimed = await rig.claim(ledger=another)


@pytest.mark.only("postgres")
@pytest.mark.requirement("D49")
async def test_jobs_come_in_the_order_of_the_claim_whatever_plan_the_server_chooses(rig: Rig):
    """With few jobs the planner may begin with their rows, which come in the order of their numbers."""
    lost, waiting = await rig.submit_one(), await rig.submit_one()
    assert (await rig.claim_one()).lease.job_id == lost
    await rig.lose_lease()
    assert rig.admin_sql is not None
    rig.used_up = True
    for (function,) in await rig.admin_sql("SELECT oid::regprocedure::text FROM pg_proc WHERE proname = '_claim'"):
        await rig.admin_sql(f"ALTER FUNCTION {function} SET enable_nestloop = off SET enable_mergejoin = on")
    assert [one.lease.job_id for one in await rig.claim(2)] == [waiting, lost]

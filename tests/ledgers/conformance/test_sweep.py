"""The sweep: what time does to jobs that nobody moves."""

import asyncio
from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import ADMIN, LENGTH_S, OTHER_WORKER, SWEEPER, WORKER, Rig, actor
from trellis.engine.jobs import CancelMode, LeaseLost, ReasonCode, Renewed, Stage
from trellis.engine.records import JobFilter, JobPlace, SweepOptions
from trellis.lifecycles import LIFECYCLES, LeaseLoss, Role, Trigger

ORCHESTRATOR = actor(Role.ORCHESTRATOR)


# --- lost leases -------------------------------------------------------------------------------------------------


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-8", "DJ-15", "D1", "D2", "D3", "D38")
@pytest.mark.parametrize("started", [True, False])
async def test_a_lost_lease_opens_the_next_attempt(rig: Rig, started: bool):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=started)
    reports = await rig.lose_lease()
    assert sum(report.expired for report in reports) == 1
    job = await rig.job(job_id)
    assert (job.state, job.place, job.attempt, job.generation) == ("queued", JobPlace.READY, 1, 0)
    assert (job.epoch, job.owner, job.lease_expires_at) == (claimed.lease.epoch + 1, None, None)
    event = await rig.last_event(job_id)
    assert (event.type, event.role, event.actor) == ("job_lease_expired", Role.SWEEPER, SWEEPER.name)
    assert event.cause == "lease expired"


@pytest.mark.requirement("DJ-8", "DJ-12", "D40")
async def test_a_lost_lease_without_attempts_left_is_dead_lettered(rig: Rig):
    job_id = await rig.submit_one(max_attempts=2, max_deaths=0, correlation_id="c-1")
    await rig.claim_one()
    await rig.lose_lease()
    await rig.claim_one(by=OTHER_WORKER)
    until = (await rig.job(job_id)).lease_expires_at
    reports = await rig.lose_lease()
    assert sum(report.exhausted for report in reports) == 1
    job = await rig.job(job_id)
    assert (job.state, job.place, job.attempt) == ("dead_lettered", JobPlace.ENDED, 1)
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=5)
    assert (letter.reason_code, letter.stage, letter.last_error) == (
        ReasonCode.EXHAUSTED_RETRIES,
        Stage.EXEC,
        "lease expired",
    )
    assert (await rig.last_event(job_id)).cause == letter.last_error
    assert (letter.attempts, letter.last_owner, letter.last_lease_expires_at, letter.correlation_id) == (
        2,
        OTHER_WORKER.name,
        until,
        "c-1",
    )


@pytest.mark.requirement("DJ-18", "DJ-12")
async def test_a_payload_that_kills_its_worker_twice_is_dead_lettered(rig: Rig):
    job_id = await rig.submit_one(max_attempts=10, max_deaths=2)
    await rig.claim_one()
    await rig.lose_lease()
    assert (await rig.job(job_id)).deaths == 1
    assert (await rig.claim_one()).deaths == 1
    await rig.lose_lease()
    assert await rig.state(job_id) == "dead_lettered"
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=5)
    assert (letter.reason_code, letter.stage) == (ReasonCode.INFRASTRUCTURE_FAILURE, Stage.EXEC)
    assert letter.last_error == "its worker died 2 times while running this job"
    assert (await rig.ledger.events(job_id))[-1].cause == letter.last_error


@pytest.mark.requirement("DJ-18", "DJ-12")
async def test_a_job_that_may_kill_no_worker_says_that_its_worker_died_once(rig: Rig):
    job_id = await rig.submit_one(max_attempts=10, max_deaths=1)
    await rig.claim_one()
    await rig.lose_lease()
    assert (await rig.ledger.events(job_id))[-1].cause == "its worker died once while running this job"


@pytest.mark.requirement("DJ-18", "D47")
async def test_a_death_before_the_start_is_not_the_payloads(rig: Rig):
    job_id = await rig.submit_one(max_attempts=10, max_deaths=2)
    for _ in range(4):
        await rig.claim_one(start=False)
        await rig.lose_lease()
    job = await rig.job(job_id)
    assert (job.state, job.deaths, job.attempt) == ("queued", 0, 4)
    for _ in range(2):
        await rig.claim_one()
        await rig.lose_lease()
    assert await rig.state(job_id) == "dead_lettered", "deaths after the start are counted"


async def test_without_a_bound_on_deaths_only_attempts_count(rig: Rig):
    job_id = await rig.submit_one(max_attempts=4, max_deaths=0)
    for _ in range(3):
        await rig.claim_one()
        await rig.lose_lease()
    assert await rig.state(job_id) == "queued"
    await rig.claim_one()
    await rig.lose_lease()
    assert await rig.state(job_id) == "dead_lettered"


@pytest.mark.requirement("DJ-8", "DJ-4")
async def test_many_expiries_each_have_one_event(rig: Rig):
    jobs = await rig.submit(30)
    await rig.claim(30)
    reports = await rig.lose_lease()
    assert sum(report.expired for report in reports) == 30
    for job_id in jobs:
        assert (await rig.event_types(job_id)).count("job_lease_expired") == 1


async def test_a_sweep_takes_a_bounded_bite(rig: Rig):
    await rig.submit(25)
    await rig.claim(25)
    await rig.pass_time(LENGTH_S - 1)
    await rig.advance(2.0)
    bites = [(await rig.sweep(batch=10)).expired for _ in range(4)]
    assert sum(bites) == 25
    assert max(bites) <= 10


STAYING = [
    (lifecycle.name, state.name)
    for lifecycle in LIFECYCLES.values()
    for state in lifecycle.states
    if state.lease_loss is LeaseLoss.STAY
]


@pytest.mark.requirement("D16", "D2")
@pytest.mark.parametrize("lifecycle, state", STAYING)
async def test_a_state_that_stays_is_taken_over_in_place(rig: Rig, lifecycle: str, state: str):
    job_id = await rig.submit_one(lifecycle=lifecycle)
    lease = await rig.drive(job_id, state)
    assert lease is not None
    before = await rig.job(job_id)
    await rig.lose_lease()
    lost = await rig.job(job_id)
    assert (lost.state, lost.place, lost.version, lost.attempt) == (state, JobPlace.READY, before.version, 0)
    assert lost.epoch == lease.epoch + 1
    again = await rig.claim_one(lifecycle=lifecycle)
    assert (again.lease.job_id, again.state, again.lease.epoch) == (job_id, state, lease.epoch + 2)
    assert len(await rig.ledger.events(job_id)) == before.version, "taking over is no transition"
    await rig.drive(job_id, "failed" if lifecycle == "run" else "ERROR", again.lease)


@pytest.mark.requirement("D16", "D49")
@pytest.mark.parametrize("key", [None, "k"])
async def test_job_whose_lease_was_lost_in_place_is_claimed_after_the_jobs_that_were_ready(rig: Rig, key: str | None):
    lost = await rig.submit_one(lifecycle="run", concurrency_key=key)
    await rig.drive(lost, "running")
    waiting = await rig.submit_one(lifecycle="run")
    await rig.drive(waiting, "queued")
    await rig.lose_lease()
    assert [one.lease.job_id for one in await rig.claim(2, lifecycle="run")] == [waiting, lost]


@pytest.mark.requirement("D16")
async def test_a_run_is_taken_over_as_often_as_it_takes(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run", max_attempts=1, max_deaths=1)
    await rig.drive(job_id, "queued")
    for _ in range(4):
        await rig.claim_one(lifecycle="run")
        await rig.lose_lease()
    assert await rig.state(job_id) == "running"


@pytest.mark.requirement("BUS-5", "D30")
@pytest.mark.parametrize("state", ["DISPATCHED", "RUNNING"])
async def test_a_stale_bus_job_goes_back_or_times_out(rig: Rig, state: str):
    job_id = await rig.submit_one(lifecycle="bus-job", max_attempts=2, max_deaths=0)
    for attempt in range(2):
        await rig.drive(job_id, state)
        assert (await rig.job(job_id)).attempt == attempt
        await rig.lose_lease()
    job = await rig.job(job_id)
    assert (job.state, job.place) == ("TIMEOUT", JobPlace.ENDED)
    events = await rig.ledger.events(job_id)
    assert [event.type for event in events].count("job_lease_expired") == 1
    assert (events[-1].type, events[-1].role) == ("job_timed_out", Role.RECONCILER)


# --- timers ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("JQ-8", "JQ-9", "D8", "D38")
async def test_a_queue_job_backs_off_and_returns_until_its_attempts_are_spent(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job", max_attempts=4)
    await rig.drive(job_id, "QUEUED")
    for attempt, backoff_s in enumerate((15.0, 30.0, 60.0)):
        claimed = await rig.claim_one(lifecycle="queue-job")
        assert claimed.attempt == attempt
        await rig.pull(claimed, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, delay_s=backoff_s)
        resting = await rig.job(job_id)
        assert (resting.state, resting.place, resting.attempt) == ("RETRY_BACKOFF", JobPlace.SCHEDULED, attempt)
        await rig.pass_time(backoff_s - 1)
        assert await rig.state(job_id) == "RETRY_BACKOFF"
        await rig.pass_time(1)
        back = await rig.job(job_id)
        assert (back.state, back.place, back.attempt) == ("QUEUED", JobPlace.READY, attempt + 1)
    claimed = await rig.claim_one(lifecycle="queue-job")
    await rig.pull(claimed, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR)
    await rig.sweep()
    assert await rig.state(job_id) == "FAILED"
    assert (await rig.last_event(job_id)).role is Role.ORCHESTRATOR
    await rig.pass_time(15 * 60 - 1, step_s=300)
    assert await rig.state(job_id) == "FAILED", "an operator has a quarter of an hour"
    await rig.pass_time(1)
    assert await rig.state(job_id) == "DEAD"


@pytest.mark.requirement("JQ-9", "D8")
@pytest.mark.parametrize("stage", ["CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"])
async def test_a_queue_job_that_lost_its_lease_waits_zero(rig: Rig, stage: str):
    job_id = await rig.submit_one(lifecycle="queue-job", max_deaths=0)
    await rig.drive(job_id, stage)
    await rig.lose_lease()
    await rig.sweep()
    job = await rig.job(job_id)
    assert (job.state, job.place, job.attempt) == ("QUEUED", JobPlace.READY, 1)
    assert (await rig.event_types(job_id))[-2:] == ["job_lease_expired", "job_queued"]


@pytest.mark.requirement("JQ-4", "D8")
async def test_a_failed_queue_job_rests_for_its_window_then_dies(rig: Rig):
    windowed = await rig.submit_one(lifecycle="queue-job", max_attempts=1)
    await rig.drive(windowed, "RETRY_BACKOFF")
    await rig.move(windowed, "FAILED", by=ORCHESTRATOR, delay_s=900.0)
    job = await rig.job(windowed)
    assert (job.place, job.due_at) == (JobPlace.SCHEDULED, await rig.ledger.now() + timedelta(seconds=900))
    await rig.pass_time(899, step_s=300)
    assert await rig.state(windowed) == "FAILED"
    await rig.pass_time(1)
    assert (await rig.job(windowed)).place is JobPlace.ENDED
    assert (await rig.event_types(windowed))[-2:] == ["job_failed", "job_dead_lettered"]
    await rig.pass_time(100_000, step_s=20_000)
    assert await rig.state(windowed) == "DEAD", "nothing leaves DEAD by itself"


@pytest.mark.requirement("D19")
async def test_a_cancelled_queue_job_rests_for_ever(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job")
    await rig.cancel(job_id)
    await rig.pass_time(1_000_000, step_s=200_000)
    assert await rig.state(job_id) == "FAILED"
    assert (await rig.job(job_id)).due_at is None


@pytest.mark.requirement("D51")
async def test_an_entry_expires_when_its_own_time_is_over(rig: Rig):
    short = await rig.submit_one(lifecycle="inbox-entry", delay_s=3_600.0)
    usual = await rig.submit_one(lifecycle="inbox-entry")
    await rig.advance(3_599)
    await rig.sweep()
    assert [await rig.state(job_id) for job_id in (short, usual)] == ["pending", "pending"]
    await rig.advance(1)
    await rig.sweep()
    assert [await rig.state(job_id) for job_id in (short, usual)] == ["expired", "pending"]
    await rig.advance(71 * 3_600)
    await rig.sweep()
    assert await rig.state(usual) == "expired"
    assert (await rig.last_event(usual)).role is Role.GATEWAY


@pytest.mark.requirement("D22")
async def test_a_proposal_nobody_decides_expires(rig: Rig):
    job_id = await rig.submit_one(lifecycle="proposal")
    kept = await rig.submit_one(lifecycle="proposal")
    await rig.move(kept, "approved", by=actor(Role.OWNER))
    await rig.pass_time(72 * 3600 - 1, step_s=50_000)
    assert await rig.state(job_id) == "pending"
    await rig.pass_time(1)
    assert await rig.state(job_id) == "expired"
    assert (await rig.last_event(job_id)).role is Role.APPLY_ENGINE
    assert await rig.state(kept) == "approved"


async def test_a_waiting_state_without_a_timer_rests_until_someone_moves_it(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run")
    await rig.pass_time(1_000_000, step_s=500_000)
    job = await rig.job(job_id)
    assert (job.state, job.place, job.due_at) == ("requested", JobPlace.SCHEDULED, None)


async def test_a_state_that_was_left_takes_its_timer_with_it(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job")
    lease = await rig.drive(job_id, "CONTEXT_ASSEMBLY")
    assert lease is not None
    await rig.pull(lease, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, delay_s=10.0)
    await rig.cancel(job_id)
    await rig.pass_time(60)
    assert await rig.state(job_id) == "FAILED"


# --- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D40", "DJ-12")
@pytest.mark.parametrize("state", ["queued", "assigned", "running"])
async def test_a_passed_deadline_dead_letters_with_timeout(rig: Rig, state: str):
    job_id = await rig.submit_one(deadline_s=20.0, max_attempts=9)
    lease = await rig.drive(job_id, state)
    await rig.pass_time(19)
    assert await rig.state(job_id) == state
    reports = await rig.pass_time(1)
    assert sum(report.deadlines for report in reports) == 1
    assert await rig.state(job_id) == "dead_lettered"
    (letter,) = await rig.ledger.dead_letters(JobFilter(), limit=5)
    assert letter.reason_code is ReasonCode.TIMEOUT
    assert (letter.last_owner is None) == (lease is None)


@pytest.mark.requirement("D40")
async def test_a_resting_job_meets_its_deadline_too(rig: Rig):
    job_id = await rig.submit_one(deadline_s=20.0, delay_s=1000.0)
    await rig.pass_time(20)
    assert await rig.state(job_id) == "dead_lettered"


@pytest.mark.requirement("D31")
async def test_deadlines_are_not_extended_by_an_outage(rig: Rig):
    held = await rig.running(deadline_s=50.0)
    await rig.sweep()
    await rig.advance(60.0)
    report = await rig.sweep()
    assert report.deadlines == 1
    assert await rig.state(held.lease.job_id) == "dead_lettered"


@pytest.mark.parametrize(
    "lifecycle, state, end",
    [
        ("run", "running", "failed"),
        ("nlm-job", "ACCEPTED", "ERROR"),
        ("nlm-job", "NLM_QUERY", "ERROR"),
        ("bus-job", "RUNNING", "TIMEOUT"),
    ],
)
@pytest.mark.requirement("NLM-3", "D30", "D16")
async def test_a_deadline_takes_the_transition_the_lifecycle_declares(rig: Rig, lifecycle: str, state: str, end: str):
    job_id = await rig.submit_one(lifecycle=lifecycle, deadline_s=20.0)
    await rig.drive(job_id, state)
    await rig.pass_time(20)
    assert await rig.state(job_id) == end
    assert (await rig.last_event(job_id)).role is LIFECYCLES[lifecycle].swept_by


async def test_deadline_is_ignored_in_a_state_that_declares_none_and_applied_later(rig: Rig):
    job_id = await rig.submit_one(lifecycle="run", deadline_s=20.0)
    await rig.pass_time(30)
    assert await rig.state(job_id) == "requested"
    await rig.drive(job_id, "queued")
    await rig.claim_one(lifecycle="run")
    await rig.sweep()
    assert await rig.state(job_id) == "failed"


@pytest.mark.requirement("D8")
async def test_a_backoff_past_the_deadline_fails_instead_of_returning(rig: Rig):
    job_id = await rig.submit_one(lifecycle="queue-job", max_attempts=9, deadline_s=20.0)
    lease = await rig.drive(job_id, "CONTEXT_ASSEMBLY")
    assert lease is not None
    await rig.pull(lease, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, delay_s=25.0)
    await rig.pass_time(25)
    assert await rig.state(job_id) == "FAILED"


@pytest.mark.requirement("D8", "D7")
@pytest.mark.parametrize("stage", ["CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"])
async def test_a_deadline_ends_a_stage_whose_holder_hangs_and_renews(rig: Rig, stage: str):
    job_id = await rig.submit_one(lifecycle="queue-job", max_attempts=9, deadline_s=50.0)
    lease = await rig.drive(job_id, stage)
    assert lease is not None
    await rig.sweep()
    for _ in range(4):
        await rig.advance(12.0)
        assert await rig.ledger.renew(ORCHESTRATOR, [lease]) == [Renewed(cancel=False)]
        await rig.sweep()
    assert await rig.state(job_id) == stage
    await rig.advance(2.0)
    report = await rig.sweep()
    assert report.deadlines == 1
    assert await rig.ledger.renew(ORCHESTRATOR, [lease]) == [LeaseLost(lease)]
    await rig.sweep()
    job, events = await rig.job(job_id), await rig.ledger.events(job_id)
    assert (job.state, job.attempt) == ("FAILED", 0), "no further attempt after the deadline"
    assert [(event.type, event.cause) for event in events[-2:-1]] == [("job_lease_expired", "deadline passed")]
    assert events[-1].type == "job_failed"
    assert {event.role for event in events[-2:]} == {Role.ORCHESTRATOR}


# --- soft cancels ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-11", "D19")
async def test_an_ignored_soft_cancel_becomes_hard_after_its_grace(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    await rig.cancel(job_id, CancelMode.SOFT, grace_s=30.0)
    await rig.sweep()
    for _ in range(2):
        await rig.advance(14.0)
        assert await rig.ledger.renew(WORKER, [held.lease]) == [Renewed(cancel=True)]
        await rig.sweep()
    assert await rig.state(job_id) == "running"
    await rig.advance(2.0)
    report = await rig.sweep()
    assert report.cancelled == 1
    job = await rig.job(job_id)
    assert (job.state, job.epoch) == ("cancelled", held.lease.epoch + 1)
    assert (await rig.last_event(job_id)).role is Role.SWEEPER


@pytest.mark.requirement("D19")
async def test_a_job_whose_worker_died_during_a_soft_cancel_ends_cancelled(rig: Rig):
    held = await rig.running(max_attempts=5)
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, grace_s=60.0)
    await rig.pass_time(70)
    assert await rig.claim() == [], "nobody is handed a job that shall end"
    assert await rig.state(held.lease.job_id) == "cancelled"


# --- outages -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D31")
@pytest.mark.oldest_server
async def test_after_an_outage_leases_are_extended_before_anything_is_reaped(rig: Rig):
    held = await rig.running()
    await rig.sweep()
    await rig.advance(600.0)
    report = await rig.sweep()
    assert (report.amnesty, report.expired) == (1, 0)
    job = await rig.job(held.lease.job_id)
    assert (job.state, job.epoch) == ("running", held.lease.epoch)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=LENGTH_S)
    assert await rig.ledger.renew(WORKER, [held.lease]) == [Renewed(cancel=False)]


@pytest.mark.requirement("D31")
async def test_amnesty_comes_once_per_outage(rig: Rig):
    held = await rig.running()
    await rig.sweep()
    await rig.advance(600.0)
    assert (await rig.sweep()).amnesty == 1
    reports = await rig.pass_time(LENGTH_S)
    assert sum(report.amnesty for report in reports) == 0
    assert await rig.state(held.lease.job_id) == "queued", "a worker that never came back loses its job after all"


@pytest.mark.requirement("D31")
async def test_a_gap_of_half_a_lease_is_no_outage(rig: Rig):
    held = await rig.running()
    await rig.sweep()
    await rig.advance(LENGTH_S / 2)
    assert (await rig.sweep()).amnesty == 0
    job = await rig.job(held.lease.job_id)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=LENGTH_S / 2)


@pytest.mark.requirement("D31")
async def test_amnesty_judges_each_lease_by_its_own_length(rig: Rig):
    await rig.submit(1, type="short")
    await rig.submit(1, type="long")
    short = await rig.claim_one(types=("short",), lease_s=30, heartbeat_s=10)
    long = await rig.claim_one(types=("long",), lease_s=120, heartbeat_s=60)
    await rig.sweep()
    before = (await rig.job(long.lease.job_id)).lease_expires_at
    await rig.advance(25.0)
    assert (await rig.sweep()).amnesty == 1
    now = await rig.ledger.now()
    assert (await rig.job(short.lease.job_id)).lease_expires_at == now + timedelta(seconds=20.5)
    assert (await rig.job(long.lease.job_id)).lease_expires_at == before


@pytest.mark.requirement("D31", "D33")
async def test_a_late_tick_of_a_busy_machine_is_no_outage(rig: Rig):
    """A lease of two seconds, a sweep every second that once comes 1.5 s late: the dead worker's job is not kept."""
    job_id = await rig.submit_one()
    await rig.claim_one(lease_s=2.0, heartbeat_s=1.0)
    await rig.sweep()
    await rig.advance(2.5)
    report = await rig.sweep(interval_s=1.0)
    assert (report.amnesty, report.expired) == (0, 1)
    assert await rig.state(job_id) == "queued"


async def test_the_first_sweep_of_a_ledger_forgives_nothing(rig: Rig):
    held = await rig.running()
    await rig.advance(LENGTH_S + 1)
    report = await rig.sweep()
    assert (report.amnesty, report.expired) == (0, 1)
    assert await rig.state(held.lease.job_id) == "queued"


# --- election and the next time ----------------------------------------------------------------------------------


@pytest.mark.requirement("D33")
async def test_one_sweeper_is_elected_in_each_interval(rig: Rig):
    await rig.submit_one()
    await rig.claim_one()
    ledgers = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    for _ in range(3):
        reports = await asyncio.gather(*(ledgers[i % 4].sweep(SWEEPER, SweepOptions()) for i in range(12)))
        assert sum(report.elected for report in reports) == 1
        await rig.advance(1.0)


@pytest.mark.requirement("D33")
async def test_sweeper_that_was_not_elected_changes_no_job(rig: Rig):
    held = await rig.running()
    await rig.advance(LENGTH_S - 0.5)
    assert (await rig.ledger.sweep(SWEEPER, SweepOptions())).elected
    await rig.advance(0.9)
    report = await rig.ledger.sweep(SWEEPER, SweepOptions())
    assert (report.elected, report.expired) == (False, 0)
    assert await rig.state(held.lease.job_id) == "running"


@pytest.mark.requirement("DJ-8", "DJ-4", "BUS-5")
async def test_sweeps_at_the_same_time_act_once(rig: Rig):
    ledgers = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    jobs = await rig.submit(40, max_deaths=0)
    await rig.claim(40)
    await rig.advance(LENGTH_S + 1)
    options = SweepOptions(elect=False)
    reports = await asyncio.gather(*(ledgers[i % 4].sweep(SWEEPER, options) for i in range(8)))
    assert sum(report.expired for report in reports) == 40
    for job_id in jobs:
        assert await rig.event_types(job_id) == ["job_queued", "job_claimed", "job_started", "job_lease_expired"]


@pytest.mark.requirement("D33")
async def test_sweep_report_has_the_next_due_time(rig: Rig):
    await rig.submit_one(delay_s=0.25)
    report = await rig.sweep()
    assert report.next_due_s is not None
    assert report.next_due_s == pytest.approx(0.25, abs=0.01)


async def test_a_sweep_of_an_empty_ledger_does_nothing(rig: Rig):
    report = await rig.sweep()
    acted = (report.amnesty, report.expired, report.exhausted, report.due, report.deadlines, report.cancelled)
    assert acted == (0, 0, 0, 0, 0, 0)


async def test_the_sweep_leaves_ended_jobs_alone(rig: Rig):
    held = await rig.running(deadline_s=10.0)
    await rig.pull(held, Trigger.COMPLETE)
    before = await rig.snapshot(held.lease.job_id)
    await rig.pass_time(3600, step_s=600)
    assert await rig.snapshot(held.lease.job_id) == before


@pytest.mark.requirement("DJ-7", "DJ-8")
async def test_a_renewal_and_a_sweep_at_the_same_time_agree(rig: Rig):
    """Whoever comes first decides: the holder is either renewed and still running, or refused and expired."""
    another = await rig.open_another()
    await rig.submit(30, max_deaths=0)
    held = await rig.claim(30)
    await rig.advance(LENGTH_S + 1)
    sweep = asyncio.create_task(rig.sweep())
    answers = await asyncio.gather(*(another.renew(WORKER, [one.lease]) for one in held))
    await sweep
    for one, (answer,) in zip(held, answers, strict=True):
        state = await rig.state(one.lease.job_id)
        assert state == ("running" if isinstance(answer, Renewed) else "queued")


@pytest.mark.requirement("D49")
async def test_jobs_that_fall_due_together_are_claimed_oldest_first_with_a_key_or_without(rig: Rig):
    keys = (None, "a", None, "b")
    jobs = [await rig.submit_one(delay_s=5.0, concurrency_key=key) for key in keys]
    await rig.advance(6.0)
    await rig.sweep()
    assert [one.lease.job_id for one in await rig.claim(4)] == jobs


@pytest.mark.requirement("D49")
async def test_job_that_fell_due_is_claimed_before_an_older_job_requeued_after_it(rig: Rig):
    requeued = await rig.submit_one()
    await rig.drive(requeued, "dead_lettered")
    delayed = await rig.submit_one(delay_s=5.0)
    await rig.advance(6.0)
    await rig.sweep()
    await rig.ledger.requeue(ADMIN, [requeued], rig.request(), limit=1, cause="again")
    assert [one.lease.job_id for one in await rig.claim(2)] == [delayed, requeued]

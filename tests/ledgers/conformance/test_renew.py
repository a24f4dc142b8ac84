"""The heartbeat: it prolongs leases, all of a worker at once, and brings back the wish to stop."""

from datetime import timedelta

import pytest

from tests.ledgers.conformance.rig import LENGTH_S, OTHER_WORKER, WORKER, Rig
from trellis.engine.jobs import Actor, Advance, CancelMode, CancelRequested, JobId, LeaseLost, Renewed, StepApplied
from trellis.engine.records import RetentionOptions, Signal
from trellis.lifecycles import Role, Trigger


@pytest.mark.oldest_server
@pytest.mark.requirement("DJ-6", "D3", "D4")
async def test_a_renewed_lease_runs_on_from_now(rig: Rig):
    held = await rig.running()
    await rig.sweep()
    for _ in range(10):
        await rig.advance(15.0)
        assert await rig.ledger.renew(WORKER, [held.lease]) == [Renewed(cancel=False)]
        await rig.sweep()
    job = await rig.job(held.lease.job_id)
    assert job.lease_expires_at == await rig.ledger.now() + timedelta(seconds=LENGTH_S)
    assert (job.state, job.epoch, job.version) == ("running", 1, 3), "a renewal is no transition"


@pytest.mark.requirement("DJ-6", "D3", "D33")
async def test_a_silent_holder_loses_its_job_after_two_intervals_and_a_second(rig: Rig):
    held = await rig.running()
    await rig.pass_time(LENGTH_S - 0.5)
    assert await rig.state(held.lease.job_id) == "running"
    await rig.pass_time(0.5)
    assert await rig.state(held.lease.job_id) == "queued"
    assert await rig.event_types(held.lease.job_id) == [
        "job_queued",
        "job_claimed",
        "job_started",
        "job_lease_expired",
    ]
    assert (await rig.claim_one(by=OTHER_WORKER)).attempt == 1


async def test_each_lease_is_renewed_for_its_own_length(rig: Rig):
    await rig.submit(1, type="quick")
    await rig.submit(1, type="slow")
    quick = await rig.claim_one(types=("quick",), lease_s=30, heartbeat_s=10)
    slow = await rig.claim_one(types=("slow",), lease_s=120, heartbeat_s=30)
    await rig.advance(5.0)
    await rig.ledger.renew(WORKER, [quick.lease, slow.lease])
    now = await rig.ledger.now()
    assert (await rig.job(quick.lease.job_id)).lease_expires_at == now + timedelta(seconds=20.5)
    assert (await rig.job(slow.lease.job_id)).lease_expires_at == now + timedelta(seconds=60.5)


async def test_renewal_answers_are_in_the_order_of_the_leases(rig: Rig):
    await rig.submit(6)
    held = await rig.claim(6)
    await rig.cancel(held[1].lease.job_id)
    await rig.cancel(held[4].lease.job_id, CancelMode.SOFT)
    await rig.pull(held[3], Trigger.COMPLETE)
    answers = await rig.ledger.renew(WORKER, [one.lease for one in reversed(held)])
    assert answers[::-1] == [
        Renewed(cancel=False),
        LeaseLost(held[1].lease),
        Renewed(cancel=False),
        LeaseLost(held[3].lease),
        Renewed(cancel=True),
        Renewed(cancel=False),
    ]


async def test_renewing_nothing_is_fine(rig: Rig):
    assert await rig.ledger.renew(WORKER, []) == []


async def test_the_same_lease_twice_in_one_call_gets_two_answers(rig: Rig):
    held = await rig.running()
    assert await rig.ledger.renew(WORKER, [held.lease, held.lease]) == [Renewed(cancel=False)] * 2


@pytest.mark.requirement("DJ-11", "D19")
async def test_renewals_return_the_cancel_request_until_the_holder_settles(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    assert await rig.cancel(job_id, CancelMode.SOFT) == CancelRequested(job_id=job_id, state="running", version=3)
    assert await rig.ledger.renew(WORKER, [held.lease]) == [Renewed(cancel=True)]
    assert await rig.ledger.renew(WORKER, [held.lease]) == [Renewed(cancel=True)]
    assert (await rig.job(job_id)).cancel_requested
    assert isinstance(await rig.ledger.save_checkpoint(held.lease, b'"so far"'), StepApplied)
    assert isinstance(await rig.pull(held, "stop"), StepApplied)
    assert await rig.state(job_id) == "cancelled"
    assert (await rig.event_types(job_id))[-1] == "job_cancelled"


@pytest.mark.requirement("DJ-6", "DJ-19")
async def test_a_start_counts_as_the_first_heartbeat(rig: Rig):
    job_id = await rig.submit_one()
    claimed = await rig.claim_one(start=False)
    await rig.advance(20.0)
    await rig.pull(claimed, Trigger.START, source="assigned")
    assert (await rig.job(job_id)).lease_expires_at == await rig.ledger.now() + timedelta(seconds=LENGTH_S)


async def test_a_thousand_leases_are_renewed_in_one_call(rig: Rig):
    await rig.submit(1_000)
    held = await rig.claim(1_000)
    assert len(held) == 1_000
    await rig.advance(10.0)
    assert await rig.ledger.renew(WORKER, [one.lease for one in held]) == [Renewed(cancel=False)] * 1_000


# --- what is kept of it ------------------------------------------------------------------------------------------


async def _renewals(rig: Rig, job_id: JobId) -> list[Signal]:
    return [signal for signal in await rig.ledger.signals(job_id, limit=100) if signal.type == "job_lease_renewed"]


@pytest.mark.oldest_server
@pytest.mark.requirement("D5")
async def test_the_last_renewal_is_kept_as_one_signal_and_outlives_the_job(rig: Rig):
    held = await rig.running()
    job_id = held.lease.job_id
    assert await _renewals(rig, job_id) == []
    for _ in range(3):
        await rig.advance(10.0)
        await rig.ledger.renew(WORKER, [held.lease])
    renewed_at = await rig.ledger.now()
    await rig.advance(1.0)
    await rig.pull(held, Trigger.COMPLETE)
    (signal,) = await _renewals(rig, job_id)
    assert (signal.job_id, signal.ts) == (job_id, renewed_at)
    assert len(await rig.ledger.events(job_id)) == 4, "a renewal is no transition"


@pytest.mark.requirement("D5")
async def test_a_renewal_is_listed_at_its_time_among_the_other_signals(rig: Rig):
    held = await rig.running()
    for body in (b"1", b"2"):
        await rig.advance(1.0)
        await rig.ledger.signal(held.lease, [("job_log", body)])
        await rig.advance(1.0)
        await rig.ledger.renew(WORKER, [held.lease])
    await rig.advance(1.0)
    await rig.ledger.signal(held.lease, [("job_log", b"3")])
    found = await rig.ledger.signals(held.lease.job_id, limit=10)
    assert [(one.type, one.data) for one in found] == [
        ("job_log", b"1"),
        ("job_log", b"2"),
        ("job_lease_renewed", None),
        ("job_log", b"3"),
    ]
    assert [one.data for one in await rig.ledger.signals(held.lease.job_id, limit=2)] == [None, b"3"]


@pytest.mark.requirement("D5", "DJ-7")
async def test_a_refused_renewal_leaves_no_signal(rig: Rig):
    held = await rig.running()
    await rig.cancel(held.lease.job_id)
    assert await rig.ledger.renew(WORKER, [held.lease]) == [LeaseLost(held.lease)]
    assert await _renewals(rig, held.lease.job_id) == []


@pytest.mark.requirement("D5", "DJ-13")
async def test_a_renewal_leaves_with_the_other_signals(rig: Rig):
    silent, busy = await rig.running(), await rig.running()
    await rig.ledger.renew(WORKER, [silent.lease, busy.lease])
    await rig.advance(3600.0)
    await rig.ledger.renew(WORKER, [busy.lease])
    report = await rig.ledger.retain(RetentionOptions(signals_s=1800.0))
    assert report.signals == 1
    assert await _renewals(rig, silent.lease.job_id) == []
    assert len(await _renewals(rig, busy.lease.job_id)) == 1


@pytest.mark.only("postgres")
async def test_heartbeats_are_heap_only_updates(rig: Rig):
    """What they write is in no index: the tables do not grow with the age of the jobs.

    Measured: 2,000 of 2,000 in three runs, and 1,000 with an index on `renewal.at`. A page that is full may move a row once.
    While another session has a snapshot of the database, as autovacuum may, pages keep their old rows and rows move to
    other pages: 1,963 if for two of the rounds, 1,523 if for all. So the best of a few measurements counts.
    """
    await rig.submit(50)
    held = [one.lease for one in await rig.claim(50)]
    await rig.ledger.renew(WORKER, held)
    shares: list[float] = []
    while not shares or (shares[-1] < 0.95 and len(shares) < 5):
        before = await _updates(rig)
        for _ in range(20):
            await rig.advance(0.5)
            await rig.ledger.renew(WORKER, held)
        updates, heap_only = (after - past for after, past in zip(await _updates(rig), before, strict=True))
        assert updates == 2 * 20 * 50
        shares.append(heap_only / updates)
    assert shares[-1] >= 0.95, shares


async def _updates(rig: Rig) -> tuple[int, int]:
    """All updates of the two tables a heartbeat writes, and those of them that touched no index."""
    assert rig.admin_sql is not None
    # A session tells its counts at its end; the ledger opens its next one by itself.
    await rig.admin_sql(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    ((updates, heap_only),) = await rig.admin_sql(
        "select sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint from pg_stat_user_tables where relname in ('lease', 'renewal')"
    )
    return updates, heap_only


async def test_renew_of_two_epochs_keeps_only_the_current_one(rig: Rig):
    old = (await rig.running()).lease
    await rig.pass_time(60.0)
    new = (await rig.claim_one()).lease
    assert new.key == old.key
    for leases in ([old, new], [new, old]):
        told = dict(zip(leases, await rig.ledger.renew(WORKER, leases), strict=True))
        assert isinstance(told[old], LeaseLost)
        assert isinstance(told[new], Renewed)
    steps = [Advance(lease, "running", Trigger.COMPLETE) for lease in (old, new)]
    lost, done = (await rig.turn(*steps)).outcomes
    assert isinstance(lost, LeaseLost)
    assert isinstance(done, StepApplied)


async def test_who_renews_a_lease_is_no_worker_by_that(rig: Rig):
    """The reconciler renews the leases of jobs on the bus: it never says that it drained, and would be missed later."""
    held = await rig.running()
    before = await rig.ledger.workers()
    reconciler = Actor(role=Role.RECONCILER, name="up@here")
    await rig.ledger.renew(reconciler, [held.lease])
    assert await rig.ledger.workers() == before

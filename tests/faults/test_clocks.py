"""Clocks that are wrong: a worker's own clock decides nothing that matters."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from tests.faults.conftest import LOGIN, SEED
from tests.faults.fleet import Fleet, Nursery, submit_work, wait_ended
from tests.faults.test_worker_deaths import HEARTBEAT_S, LEASE_S, check, kill_under_load, sweeping
from tests.faults.worker_process import Work
from tests.ledgers.conformance.rig import OTHER_WORKER, SUBMITTER, SWEEPER, WORKER
from tests.pace import Pace
from tests.servers.postgres import PostgresServer
from trellis.engine.jobs import (
    Advance,
    Claim,
    Claimed,
    ClaimId,
    Epoch,
    JobId,
    LeaseLost,
    NewJob,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, JobFilter, SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger

HOUR_S = 3600.0


@pytest.mark.quiet
@pytest.mark.requirement("D2", "DJ-8")
async def test_workers_whose_clocks_are_an_hour_off_are_as_safe_as_any(
    fault_server: PostgresServer, timed_database: str, tmp_path: Path, nursery: Nursery, figures, pace: Pace
):
    """One an hour ahead, one an hour behind, one right, with kills: the ledger's clock is the only one that counts."""
    url = fault_server.url(timed_database, LOGIN)
    ledger = await open_ledger(url)
    with Fleet(nursery, url, tmp_path, {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S}) as fleet:
        jobs = await submit_work(ledger, [Work(hold_s=0.08)] * 120, "work")
        fleet.start(1, skew_s=HOUR_S)
        fleet.start(1, skew_s=-HOUR_S)
        fleet.start(1)
        async with sweeping(ledger):
            recovery = await kill_under_load(ledger, fleet, random.Random(SEED), kills=3, skew_s=HOUR_S)
        await wait_ended(ledger, jobs, fleet)
        fates = await check(ledger, fleet, jobs)
        histories = [history.events async for history in ledger.histories()]
        lost = [lease for events in histories for lease in lost_leases(events)]
        held = {lease for events in histories for lease in never_settled(events, fleet.killed)}
        letters = len(await ledger.dead_letters(JobFilter(), limit=100))
    await ledger.close()
    figures(jobs=120, kills=3, taken=len(recovery), recovery_max_s=round(max(recovery), 2), leases_lost=len(lost))
    assert fates["succeeded"] + letters == 120
    if pace.stood_still_s < HEARTBEAT_S:
        assert {(one.holder, one.job_id, one.epoch) for one in lost} == held, (
            "lost leases are what the killed ones held"
        )
        assert len(lost) == len(held)
        early = [one for one in lost if one.at < fleet.killed[one.holder]]
        assert not early, "a lease was lost while its holder lived"


@dataclass(frozen=True, kw_only=True)
class LostLease:
    """A lease that ran out: of which holder and job, in which epoch, and when the sweep found it so."""

    holder: str
    job_id: JobId
    epoch: Epoch
    at: float


def lost_leases(events: Sequence[Event]) -> list[LostLease]:
    """Every lease of a job that ran out."""
    claims = [event for event in events if event.type == "job_claimed"]
    ends = [event for event in events if event.type in {"job_lease_expired", "job_dead_lettered"}]
    last = [(next(claim for claim in reversed(claims) if claim.version < end.version), end) for end in ends]
    return [
        LostLease(holder=claim.actor, job_id=claim.job_id, epoch=claim.epoch, at=end.ts.timestamp())
        for claim, end in last
    ]


def never_settled(events: Sequence[Event], holders: Iterable[str]) -> set[tuple[str, JobId, Epoch]]:
    """What these claimed, started or not, and neither finished nor gave back: what they hold when they are killed."""
    claimed = {(e.actor, e.job_id, e.epoch) for e in events if e.type == "job_claimed" and e.actor in holders}
    settled = {(e.actor, e.job_id, e.epoch) for e in events if e.target not in {"assigned", "running"}}
    return claimed - settled


@pytest.mark.requirement("D2")
async def test_a_sqlite_process_an_hour_ahead_takes_jobs_over_but_never_doubles_them(tmp_path: Path):
    """On one file the clock is the machine's. A process with another one is a nuisance, and still no danger."""
    url, now_s = f"sqlite:///{tmp_path / 'ledger.db'}", 1_800_000_000.0
    right = await open_ledger(url, clock=lambda: now_s)
    ahead = await open_ledger(url, clock=lambda: now_s + HOUR_S)
    await right.submit(SUBMITTER, [NewJob(job_id=JobId("one"), type="work", max_deaths=0)])
    await right.sweep(SWEEPER, SweepOptions(elect=False))
    (first,) = await claim(right, "a")
    for _ in range(9):  # the first sweep forgives what looks like an outage of an hour
        await ahead.sweep(SWEEPER, SweepOptions(elect=False))
        now_s += 5
    (second,) = await claim(ahead, "b")
    assert isinstance(await complete(right, first), LeaseLost)
    assert isinstance(await complete(ahead, second), StepApplied)
    report = await verify(right)
    for ledger in (right, ahead):
        await ledger.close()
    assert report.ok, report.violations


async def claim(ledger: Ledger, name: str) -> list[Claimed]:
    wanted = Claim(claim_id=ClaimId(name), types=(TypeClaim(type="work"),))
    return (await ledger.turn(Turn(actor=WORKER if name == "a" else OTHER_WORKER, claim=wanted))).claimed


async def complete(ledger: Ledger, held: Claimed) -> StepApplied | LeaseLost:
    done = Advance(lease=held.lease, source="running", trigger="complete")
    return (await ledger.turn(Turn(actor=WORKER, advances=(done,)))).outcomes[0]


@pytest.mark.requirement("D2")
async def test_no_function_of_the_ledger_takes_a_clients_time_but_run_at(
    fault_server: PostgresServer, timed_database: str
):
    connection = await asyncpg.connect(fault_server.url(timed_database))
    try:
        rows = await connection.fetch(
            """
            select p.proname, a.name, format_type(a.type, null) as type
              from pg_proc p, lateral unnest(p.proargnames, string_to_array(p.proargtypes::text, ' ')::oid[]) a(name, type)
             where p.pronamespace = 'trellis'::regnamespace and left(p.proname, 1) <> '_' and a.type is not null
            """
        )
    finally:
        await connection.close()
    timed = {(row["proname"], row["name"]) for row in rows if row["type"].startswith(("timestamp", "date", "time"))}
    assert len({row["proname"] for row in rows}) > 15
    # What is decided about a schedule names instants of its cron expression, computed from the time of the ledger.
    timed = {(function, name) for function, name in timed if function not in {"save_schedule", "advance_schedule"}}
    assert {name for _, name in timed} <= {"p_run_at", "p_run_ats"}, timed
    assert timed, "submit takes the wish for a time"

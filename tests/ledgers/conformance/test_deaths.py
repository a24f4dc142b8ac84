"""What the death of a worker does to the jobs it held: most run again at once; one that may kill workers runs alone, one at a time."""

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from tests.ledgers.conformance.rig import HEARTBEAT_S, LEASE_S, LENGTH_S, WORKER, Rig
from trellis.engine.jobs import Actor, Claim, Claimed, ClaimId, JobId, ReasonCode, StepApplied, TypeClaim
from trellis.engine.records import JobFilter
from trellis.engine.retry_policy import UNBEGUN_LOSSES_MAX, runs_alone
from trellis.lifecycles import Role, Trigger

TYPES = (TypeClaim(type="work", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S),)


async def isolating_claim(
    rig: Rig, start: int, *, prefetch: int = 0, by: Actor = WORKER, types: tuple[TypeClaim, ...] = TYPES
) -> list[Claimed]:
    """What a worker that can run a job alone is handed."""
    claim = Claim(claim_id=ClaimId(rig.request()), types=types, start=start, prefetch=prefetch, isolates=True)
    return (await rig.turn(by=by, claim=claim)).claimed


async def die(rig: Rig, jobs: int, times: int) -> None:
    """So many jobs are held together, and their worker dies, so many times."""
    for _ in range(times):
        assert len(await rig.claim(jobs)) == jobs
        await rig.lose_lease()


def ids(claimed: list[Claimed]) -> list[JobId]:
    return [one.lease.job_id for one in claimed]


@pytest.mark.requirement("D33", "DJ-8")
async def test_after_one_death_all_jobs_are_handed_out_again_at_once_and_started(rig: Rig):
    jobs = await rig.submit(40)
    await die(rig, 40, times=1)
    claimed = await isolating_claim(rig, 40)
    assert sorted(ids(claimed)) == sorted(jobs)
    assert {(one.state, one.deaths, one.runs_alone) for one in claimed} == {("running", 1, False)}


async def test_jobs_that_died_twice_are_handed_out_one_at_a_time_and_not_started(rig: Rig):
    jobs = await rig.submit(3)
    await die(rig, 3, times=2)
    (first,) = await isolating_claim(rig, 10)
    assert (first.lease.job_id, first.state, first.deaths, first.runs_alone) == (jobs[0], "assigned", 2, True)
    assert await isolating_claim(rig, 10, by=Actor(role=Role.WORKER, name="another")) == []
    fresh = await rig.submit(5)
    unrelated = await isolating_claim(rig, 10, by=Actor(role=Role.WORKER, name="another"))
    assert sorted(ids(unrelated)) == sorted(fresh), "what has nothing to do with the deaths goes on"
    assert {one.state for one in unrelated} == {"running"}
    await rig.pull(first, Trigger.START, source="assigned")
    assert isinstance(await rig.pull(first, Trigger.COMPLETE), StepApplied)
    (second,) = await isolating_claim(rig, 10)
    assert second.lease.job_id == jobs[1]


async def test_a_claimer_that_runs_nothing_alone_gets_such_jobs_like_any_other(rig: Rig):
    await rig.submit(3)
    await die(rig, 3, times=2)
    claimed = await rig.claim(3)
    assert {(one.state, one.deaths) for one in claimed} == {("running", 2)}
    assert len(claimed) == 3


async def test_a_claim_that_is_repeated_says_again_which_job_runs_alone(rig: Rig):
    await rig.submit(1)
    await die(rig, 1, times=2)
    claim = Claim(claim_id=ClaimId("again"), types=TYPES, start=5, isolates=True)
    first = (await rig.turn(claim=claim)).claimed
    again = (await rig.turn(claim=claim)).claimed
    assert [(one.lease, one.state, one.runs_alone) for one in first] == [
        (one.lease, one.state, one.runs_alone) for one in again
    ]
    assert first[0].runs_alone


async def test_a_paused_type_does_not_keep_back_what_must_run_alone_of_another(rig: Rig):
    await rig.submit(1, type="paused")
    await rig.submit(1)
    for _ in range(2):
        assert len(await rig.claim(2, types=("paused", "work"))) == 2
        await rig.lose_lease()
    await rig.ledger.pause(Actor(role=Role.CONTROL_PLANE, name="admin"), "paused", paused=True)
    types = (TypeClaim(type="paused", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S), *TYPES)
    (claimed,) = await isolating_claim(rig, 5, types=types)
    assert (claimed.type, claimed.runs_alone) == ("work", True)


CASES = [
    (deaths, max_deaths, attempts)
    for deaths, max_deaths, attempts in product((1, 2, 3), (0, 2, 3, 5), (2, 3, 4, 9))
    if deaths < attempts and (max_deaths == 0 or deaths < max_deaths)
]


async def test_both_ledgers_quarantine_the_same_jobs(rig: Rig):
    jobs = {
        case: await rig.submit_one(type=f"t{n}", max_deaths=case[1], max_attempts=case[2])
        for n, case in enumerate(CASES)
    }
    names = [f"t{n}" for n in range(len(CASES))]
    for died in range(3):
        dying = [name for name, case in zip(names, CASES, strict=True) if case[0] > died]
        assert len(await rig.claim(len(dying), types=dying)) == len(dying)
        await rig.lose_lease()
    claimed = {one.lease.job_id: one.runs_alone for one in await rig.claim(len(CASES), types=names, start=False)}
    expected = {
        jobs[case]: runs_alone(deaths=case[0], max_deaths=case[1], attempt=case[0], max_attempts=case[2])
        for case in CASES
    }
    assert claimed == expected
    assert set(expected.values()) == {True, False}


@pytest.mark.requirement("D38", "DJ-8")
async def test_a_job_that_was_only_claimed_loses_no_attempt_with_its_worker(rig: Rig):
    """Attempts are executions: one that stands behind a poison pill in five dying workers has not begun five times."""
    job_id = await rig.submit_one(max_attempts=2)
    for _ in range(5):
        await rig.claim_one(start=False)
        await rig.lose_lease()
    job = await rig.job(job_id)
    assert (job.state, job.deaths, job.attempts_spent, job.attempts_allowed) == ("queued", 0, 0, 2)
    for _ in range(2):
        await rig.claim_one()
        await rig.lose_lease()
    assert await rig.state(job_id) == "dead_lettered"


@pytest.mark.requirement("DJ-8")
async def test_job_claimed_again_and_again_without_a_start_ends(rig: Rig):
    job_id = await rig.submit_one(max_attempts=1)
    for _ in range(UNBEGUN_LOSSES_MAX):
        (held,) = await rig.claim(1, start=False)
        await rig.pull(held, Trigger.RELEASE, source="assigned", spare_attempt=True)
    await rig.claim_one(start=False)
    await rig.lose_lease()
    assert await rig.state(job_id) == "dead_lettered"


@pytest.mark.requirement("BUS-5")
async def test_a_lost_order_of_the_bus_costs_its_attempt(rig: Rig):
    """It may have arrived: user code may have run where nobody saw it."""
    job_id = await rig.submit_one(lifecycle="bus-job", max_attempts=1, max_deaths=1)
    await rig.drive(job_id, "DISPATCHED")
    await rig.lose_lease()
    assert (await rig.job(job_id)).place == "ended"


# --- a fleet with poison in it -----------------------------------------------------------------------------------------


@dataclass
class Process:
    """One worker: what it holds, and the rules by which it runs a job alone."""

    actor: Actor
    slots: int
    prefetch: int
    assigned: list[Claimed] = field(default_factory=list[Claimed])
    running: list[Claimed] = field(default_factory=list[Claimed])
    alone: Claimed | None = None

    @property
    def leases(self) -> list[Claimed]:
        return [*self.assigned, *self.running, *([self.alone] if self.alone else [])]

    async def look(self, rig: Rig) -> None:
        """Claim, and start what may start."""
        free = self.slots - len(self.running)
        if self.alone is None and free:
            for one in await isolating_claim(rig, free, prefetch=self.prefetch, by=self.actor):
                if one.runs_alone:
                    assert (self.alone, one.state) == (None, "assigned")
                    self.alone = one
                else:
                    (self.running if one.state == "running" else self.assigned).append(one)
        while self.assigned and len(self.running) < self.slots:
            await self.start(rig, self.assigned.pop(0))
        if self.alone is not None and not self.running and not self.assigned:
            await self.start(rig, self.alone)

    async def start(self, rig: Rig, one: Claimed) -> None:
        assert isinstance(await rig.pull(one, Trigger.START, source="assigned", by=self.actor), StepApplied)
        self.running.append(one)

    async def end(self, rig: Rig, one: Claimed) -> None:
        assert isinstance(await rig.pull(one, Trigger.COMPLETE, by=self.actor), StepApplied)
        self.running.remove(one)
        if one is self.alone:
            self.alone = None


class PoisonedFleet:
    """Workers that claim, run and end jobs in a random order, and die whenever one of them runs poison long enough."""

    def __init__(self, rig: Rig, rng: random.Random, workers: int, slots: int) -> None:
        self.rig, self.rng = rig, rng
        self.poison: dict[JobId, int] = {}
        self.innocents: list[JobId] = []
        self.killed = 0
        self.processes = [
            Process(Actor(role=Role.WORKER, name=f"w{n}"), slots, rng.choice((0, 2))) for n in range(workers)
        ]

    async def submit(self, poison: int, innocents: int) -> None:
        for deadly in self.rng.sample([True] * poison + [False] * innocents, poison + innocents):
            if deadly:
                deaths = self.rng.choice((2, 3, 3, 4))
                job_id = await self.rig.submit_one(max_deaths=deaths, max_attempts=100)
                self.poison[job_id] = deaths
            else:
                options = {"max_deaths": self.rng.choice((0, 2, 3)), "max_attempts": self.rng.choice((2, 3, 5))}
                self.innocents.append(await self.rig.submit_one(**options))

    async def run(self, steps_max: int = 5_000) -> None:
        """Until a round of all workers finds nothing more."""
        for _ in range(steps_max):
            process = self.rng.choice(self.processes)
            await process.look(self.rig)
            if process.running:
                await self.act(process, self.rng.choice(process.running))
            elif not any(one.leases for one in self.processes) and await self.all_ended():
                return
        raise AssertionError("it goes on and on")

    async def act(self, process: Process, one: Claimed) -> None:
        if one.lease.job_id not in self.poison:
            await process.end(self.rig, one)
            return
        self.killed += 1
        process.assigned, process.running, process.alone = [], [], None
        for _ in range(int(LENGTH_S // 10) + 2):
            await self.rig.advance(10.0)
            for other in self.processes:
                if other.leases:
                    await self.rig.ledger.renew(other.actor, [held.lease for held in other.leases])
            await self.rig.sweep()

    async def all_ended(self) -> bool:
        jobs = [await self.rig.job(job_id) for job_id in (*self.poison, *self.innocents)]
        return all(job.place == "ended" for job in jobs)


@pytest.mark.requirement("DJ-18", "D47", "DJ-8")
@pytest.mark.parametrize("seed, workers, slots", [(1, 3, 4), (2, 1, 1), (3, 1, 5), (4, 4, 2)])
async def test_poison_is_dead_lettered_after_its_declared_deaths_and_no_innocent_with_it(
    rig: Rig, seed: int, workers: int, slots: int
):
    fleet = PoisonedFleet(rig, random.Random(seed), workers, slots)
    await fleet.submit(poison=4, innocents=12)
    await fleet.run()
    assert {await rig.state(job_id) for job_id in fleet.innocents} == {"succeeded"}
    letters = {letter.job_id: letter for letter in await rig.ledger.dead_letters(JobFilter(), limit=100)}
    assert set(letters) == set(fleet.poison)
    for job_id, deaths in fleet.poison.items():
        assert (await rig.job(job_id)).deaths == deaths
        assert letters[job_id].reason_code is ReasonCode.INFRASTRUCTURE_FAILURE
    assert fleet.killed <= sum(fleet.poison.values())
    assert (await rig.verify()).ok


@pytest.mark.prove
@pytest.mark.requirement("DJ-18", "D47", "DJ-8")
@pytest.mark.parametrize("seed", range(40))
async def test_fleets_isolate_many_crashing_jobs(rig: Rig, seed: int):
    rng = random.Random(1_000 + seed)
    fleet = PoisonedFleet(rig, rng, workers=rng.randint(1, 5), slots=rng.randint(1, 10))
    await fleet.submit(poison=rng.randint(1, 12), innocents=rng.randint(5, 60))
    await fleet.run(50_000)
    assert {await rig.state(job_id) for job_id in fleet.innocents} == {"succeeded"}
    jobs = {job_id: await rig.job(job_id) for job_id in fleet.poison}
    assert {job_id: (job.state, job.deaths) for job_id, job in jobs.items()} == {
        job_id: ("dead_lettered", deaths) for job_id, deaths in fleet.poison.items()
    }
    assert (await rig.verify()).ok

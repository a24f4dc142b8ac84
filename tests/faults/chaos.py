"""Clients that do everything, on a network that loses everything, while workers die and clocks jump.

Several clients act at once through the proxy. Each notes what it was told. `reached` counts the rare paths, because a
chaos that never went there has proven nothing about them.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from tests.faults.conftest import Bench
from tests.faults.proxy import HARMLESS, Kind
from tests.ledgers.conformance.rig import ADMIN, HEARTBEAT_S, LEASE_S, SUBMITTER, SWEEPER, actor
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    LeaseLost,
    NewJob,
    ReasonCode,
    RequestId,
    StepApplied,
    Turn,
    TurnResult,
    TypeClaim,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace, SweepOptions
from trellis.engine.verify import verify
from trellis.lifecycles import Role

KEYS = tuple(f"chaos-key-{n}" for n in range(3))
RARE = (
    "answer lost after the commit",
    "stale completion refused",
    "amnesty granted",
    "poison dead-lettered",
    "next of a key claimed after its holder died",
)
STEP_S = 10.0
LOSS_RATE = 0.2
VERIFY_EVERY_S = 0.25


@dataclass
class Client:
    """One worker that also submits, cancels and sweeps."""

    name: str
    ledger: Ledger
    bench: Bench
    rng: random.Random
    numbers: count
    known: list[NewJob]
    """Every job anybody submitted."""
    type: str
    held: list[Claimed] = field(default_factory=list)
    ghosts: list[Claimed] = field(default_factory=list)
    """Held by an earlier life of this client, which died without a word."""
    widowed: set[str] = field(default_factory=set)
    """Keys whose holder died."""

    @property
    def me(self):
        return actor(Role.WORKER, self.name)

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < LOSS_RATE:
                self.bench.proxy.aim(self.rng.choice([kind for kind in Kind if kind is not Kind.ANSWER_SILENT]))
            weights = {self.submit: 3, self.claim: 6, self.settle: 7, self.renew: 1, self.die: 1, self.haunt: 2}
            weights |= {self.cancel: 1, self.requeue: 1, self.sweep: 4, self.leave_for_long: 0.3}
            deeds: list[Callable[[], Awaitable[None]]] = list(weights)
            (deed,) = self.rng.choices(deeds, list(weights.values()))
            await deed()

    async def submit(self) -> None:
        key = self.rng.choice((None, None, *KEYS))
        job = NewJob(
            job_id=JobId(f"chaos-{next(self.numbers)}"),
            type=self.type,
            max_attempts=50,
            max_deaths=self.rng.choice((1, 2, 0, 0)),
            concurrency_key=key,
            idempotency_key=self.rng.choice((None, f"once-{next(self.numbers)}")),
            fingerprint=b"f",
        )
        self.known.append(job)
        self.bench.told.note_submit(await self._ask(lambda: self.ledger.submit(SUBMITTER, [job])))

    async def claim(self) -> None:
        types = (TypeClaim(type=self.type, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S),)
        claim = Claim(claim_id=ClaimId(f"{self.name}-{next(self.numbers)}"), types=types, start=self.rng.randint(1, 3))
        result = await self._turn(Turn(actor=self.me, claim=claim))
        self.held += result.claimed
        keys = {job.job_id: job.concurrency_key for job in self.known}
        for claimed in result.claimed:
            key = keys[claimed.lease.job_id]
            if key in self.widowed:
                self.widowed.discard(key)
                self.bench.reached["next of a key claimed after its holder died"] += 1

    async def settle(self) -> None:
        if self.held:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            trigger = self.rng.choice(("complete", "complete", "complete", "retry", "fail", "snooze", "release"))
            await self._advance(held, trigger)

    async def haunt(self) -> None:
        """A worker thought dead comes back and finishes what it believes to hold."""
        if self.ghosts:
            outcome = await self._advance(self.ghosts.pop(self.rng.randrange(len(self.ghosts))), "complete")
            self.bench.reached["stale completion refused"] += isinstance(outcome, LeaseLost)

    async def die(self) -> None:
        keys = {job.job_id: job.concurrency_key for job in self.known}
        self.widowed |= {key for held in self.held if (key := keys[held.lease.job_id])}
        self.ghosts += self.held
        self.held = []

    async def renew(self) -> None:
        answers = await self._ask(lambda: self.ledger.renew(self.me, [held.lease for held in self.held]))
        lost = {answer.lease for answer in answers if isinstance(answer, LeaseLost)}
        self.held = [held for held in self.held if held.lease not in lost]

    async def cancel(self) -> None:
        if self.known:
            job, request = self.rng.choice(self.known), RequestId(f"{self.name}-{next(self.numbers)}")
            mode = self.rng.choice(list(CancelMode))
            if await self.bench.rig.ledger.job(job.job_id) is not None:
                await self._ask(
                    lambda: self.ledger.cancel(ADMIN, job.job_id, mode, request, grace_s=20.0, cause="chaos")
                )

    async def requeue(self) -> None:
        where, request = (
            JobFilter(lifecycle="leased-job", type=self.type, state="failed"),
            RequestId(f"r-{next(self.numbers)}"),
        )
        page = await self.bench.rig.ledger.jobs(where, limit=2)
        if page.jobs:
            ids = [job.job_id for job in page.jobs]
            await self._ask(lambda: self.ledger.requeue(ADMIN, ids, request, limit=2, cause="chaos"))

    async def sweep(self) -> None:
        await self.bench.rig.advance(STEP_S * self.rng.random())
        report = await self._ask(lambda: self.ledger.sweep(SWEEPER, SweepOptions(elect=False)))
        self.bench.reached["amnesty granted"] += bool(report.amnesty)

    async def leave_for_long(self) -> None:
        """Nobody sweeps for several leases."""
        await self.bench.rig.advance(3 * LEASE_S)

    async def _advance(self, held: Claimed, trigger: str) -> StepApplied | LeaseLost:
        spare = trigger in {"snooze", "release"}
        step = Advance(lease=held.lease, source=held.state, trigger=trigger, spare_attempt=spare)
        return (await self._turn(Turn(actor=self.me, advances=(step,)))).outcomes[0]

    async def _turn(self, turn: Turn) -> TurnResult:
        result = await self._ask(lambda: self.ledger.turn(turn))
        self.bench.told.note_turn(turn, result)
        return result

    async def _ask(self, call):
        """Ask until told: the ids are the same each time."""
        while True:
            try:
                return await call()
            except LedgerError:
                self.bench.reached["asked again by the caller"] += 1


async def run_chaos(bench: Bench, *, clients: int, steps: int, seed: int) -> Counter[str]:
    numbers, known, type_ = bench.rig.numbers, [], str(bench.rig.new_id("chaos"))
    crowd = [
        Client(f"client-{n}", await bench.open_shaky(), bench, random.Random(seed + n), numbers, known, type_)
        for n in range(clients)
    ]
    async with asyncio.TaskGroup() as living:
        lives = [living.create_task(client.live(steps)) for client in crowd]
        while (await asyncio.wait(lives, timeout=VERIFY_EVERY_S))[1]:
            report = await verify(bench.rig.ledger)
            assert report.ok, f"a ledger at work: {report.violations[:5]}"
            bench.reached["verified at work"] += 1
    bench.proxy.heal()
    await bench.proxy.deliver_late()
    await finish(bench, known, type_)
    harmful = sum(times for kind, times in bench.proxy.counts.faults.items() if kind not in HARMLESS)
    bench.reached["answer lost after the commit"] += bench.proxy.counts.faults[Kind.ANSWER_LOST]
    bench.reached["faults"] += bench.proxy.counts.faults.total()
    bench.reached["faults after which the server acted"] += harmful
    where = JobFilter(type=type_, reason_code=ReasonCode.INFRASTRUCTURE_FAILURE)
    bench.reached["poison dead-lettered"] += len(await bench.rig.ledger.dead_letters(where, limit=100))
    return bench.reached


async def finish(bench: Bench, known: list[NewJob], type_: str) -> None:
    """A healthy worker works off whatever is left: nothing may stay behind."""
    rig = bench.rig
    for _ in range(500):
        await rig.pass_time(LEASE_S)
        while claimed := await rig.claim(50, types=(type_,)):
            for held in claimed:
                await rig.pull(held, "complete")
        if not [job for job in known if (await rig.job(job.job_id)).place != JobPlace.ENDED]:
            return
    left = [await rig.job(job.job_id) for job in known]
    raise AssertionError(f"never ended: {[job for job in left if job.place != JobPlace.ENDED][:5]}")

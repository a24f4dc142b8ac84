"""Short words for tests that drive a ledger of their own."""

from collections.abc import Sequence
from itertools import count

from trellis.engine.jobs import Actor, Advance, Claim, Claimed, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.lifecycles import Role

WORKER = Actor(role=Role.WORKER, name="worker-1")
SUBMITTER = Actor(role=Role.SUBMITTER, name="submitter-1")
ADMIN = Actor(role=Role.CONTROL_PLANE, name="admin-1")
SWEEPER = Actor(role=Role.SWEEPER, name="sweeper-1")
_numbers = count(1)


def new_job(job_id: str | None = None, **options) -> NewJob:
    return NewJob(job_id=JobId(job_id or f"job-{next(_numbers)}"), type=options.pop("type", "work"), **options)


async def submit(ledger: Ledger, n: int = 1, **options) -> list[JobId]:
    jobs = [new_job(**options) for _ in range(n)]
    await ledger.submit(SUBMITTER, jobs)
    return [job.job_id for job in jobs]


async def claim(ledger: Ledger, n: int = 1, **options) -> list[Claimed]:
    asked = Claim(claim_id=ClaimId(f"claim-{next(_numbers)}"), types=(TypeClaim(type="work"),), start=n, **options)
    return (await ledger.turn(Turn(actor=WORKER, claim=asked))).claimed


async def complete(ledger: Ledger, claimed: Sequence[Claimed]) -> list:
    steps = tuple(Advance(lease=one.lease, source="running", trigger="complete") for one in claimed)
    return (await ledger.turn(Turn(actor=WORKER, advances=steps))).outcomes

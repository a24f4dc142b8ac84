"""Our ledger without the worker: one loop that settles a batch and claims the next in one turn.

The distance to `trellis` is what the worker costs; the distance to `floor` is what the ledger costs.
"""

import asyncio
import uuid
from collections.abc import Sequence

import trellis.ledgers.postgres.ledger
import trellis.ledgers.sqlite.ledger  # noqa: F401 - both are imported here, so that no import is inside a measurement
from bench.marks import Marker
from bench.subjects.trellis import TYPE
from bench.task import Task
from trellis.engine.jobs import Actor, Advance, Claim, Claimed, ClaimId, Turn, TypeClaim
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger

IDLE_S = 0.005


async def worker(task: Task) -> None:
    """Turn after turn until the process is ended."""
    ledger = await open_ledger(task.url)
    actor = Actor(role=Role.WORKER, name=f"bench-{uuid.uuid4()}")
    mark = Marker(task.folder).mark
    types = (TypeClaim(type=TYPE),)
    held: Sequence[Claimed] = ()
    while True:
        claim = Claim(claim_id=ClaimId(str(uuid.uuid4())), types=types, start=task.batch)
        done = tuple(Advance(lease=job.lease, source=job.state, trigger=Trigger.COMPLETE) for job in held)
        held = (await ledger.turn(Turn(actor=actor, advances=done, claim=claim))).claimed
        for job in held:
            mark(int(job.payload))
        if not held:
            await asyncio.sleep(IDLE_S)

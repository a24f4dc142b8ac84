"""A ledger that was closed refuses calls: it does not connect again behind its owner's back."""

from collections.abc import Awaitable, Callable

import pytest

from tests.ledgers.conformance.rig import SUBMITTER, WORKER, Rig
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.engine.ledger import Ledger

CALLS: dict[str, Callable[[Ledger], Awaitable[object]]] = {
    "read": lambda ledger: ledger.job(JobId("j")),
    "submit": lambda ledger: ledger.submit(SUBMITTER, [NewJob(job_id=JobId("late"), type="t")]),
    "turn": lambda ledger: ledger.turn(
        Turn(actor=WORKER, claim=Claim(claim_id=ClaimId("late"), types=(TypeClaim(type="t"),)))
    ),
    "read the feed": lambda ledger: ledger.feed(None, limit=1),
}


async def test_a_closed_ledger_refuses_calls_and_says_why(rig: Rig):
    ledger = await rig.open_another()
    for call in CALLS.values():
        await call(ledger)
    await ledger.close()
    for call in CALLS.values():
        with pytest.raises(LedgerUnavailable, match="this ledger was closed"):
            await call(ledger)
    await ledger.close()
    assert await rig.ledger.job(JobId("late")) is not None, "what it did before stays"


@pytest.mark.only("postgres")
async def test_a_closed_ledger_has_no_connection_and_opens_none_to_wait(rig: Rig):
    assert rig.admin_sql is not None
    connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    ledger = await rig.open_another()
    await ledger.wait_for_events(ledger.events_mark(), 0.01)
    before = (await rig.admin_sql(connections))[0][0]
    await ledger.close()
    await ledger.wait_for_events(ledger.events_mark(), 0.2)
    await ledger.wait_for_work(["t"], 0.2)
    assert (await rig.admin_sql(connections))[0][0] < before

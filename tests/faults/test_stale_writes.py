"""A holder that slept beyond its lease tries everything it could do: all of it is refused, the winner's result stays."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import open_bench
from tests.ledgers.conformance.opening import sqlite_rig
from tests.ledgers.conformance.rig import DEATH, OTHER_WORKER, WORKER, Rig
from tests.servers.postgres import PostgresServer
from trellis.engine.jobs import Claimed, LeaseLost, StepApplied
from trellis.engine.verify import verify

Write = Callable[[Rig, Claimed], Awaitable[Any]]

STEPS = {"complete": {}, "fail": {}, "retry": {}, "snooze": {}, "release": {}, "stop": {}, "reject": {"death": DEATH}}


def _pull(trigger: str, options: dict[str, Any]) -> Write:
    async def pull(rig: Rig, held: Claimed) -> Any:
        return await rig.pull(held, trigger, source=held.state, **options)

    return pull


async def _start(rig: Rig, held: Claimed) -> Any:
    return await rig.pull(held, "start", source="assigned")


async def _renew(rig: Rig, held: Claimed) -> Any:
    return (await rig.ledger.renew(WORKER, [held.lease]))[0]


WRITES: dict[str, Write] = {
    **{name: _pull(name, options) for name, options in STEPS.items()},
    "start": _start,
    "renew": _renew,
    "checkpoint": lambda rig, held: rig.ledger.save_checkpoint(held.lease, b'"stale"'),
    "journal": lambda rig, held: rig.ledger.journal(held.lease, "entry", b'"stale"'),
    "signal": lambda rig, held: rig.ledger.signal(held.lease, [("job_log", b'"stale"')]),
}


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> tuple[PostgresServer, str] | None:
    """A database on a server, or None for a file. Not async: preparing a server runs an event loop of its own."""
    if request.param == "sqlite":
        return None
    return request.getfixturevalue("fault_server"), request.getfixturevalue("clocked_database")


@pytest.fixture
async def rig(place: tuple[PostgresServer, str] | None, tmp_path: Path) -> AsyncIterator[Rig]:
    async with sqlite_rig(tmp_path / "ledger.db") if place is None else _postgres_rig(*place) as opened:
        yield opened
        report = await verify(opened.ledger)
        assert report.ok, report.violations[:10]


@asynccontextmanager
async def _postgres_rig(server: PostgresServer, name: str) -> AsyncIterator[Rig]:
    async with open_bench(server, name) as bench:
        yield bench.rig


async def refuse_everything(rig: Rig) -> int:
    """One job taken over: how many writes of its first holder were refused, before and after the winner's end."""
    type_ = str(rig.new_id("type"))
    job_id = await rig.submit_one(type=type_, max_deaths=0)
    stale = await rig.claim_one(types=(type_,), by=WORKER)
    await rig.lose_lease()
    winner = await rig.claim_one(types=(type_,), by=OTHER_WORKER)
    refused = 0
    for moment in ("while the winner works", "after the winner's end"):
        before = await rig.snapshot(job_id)
        for name, write in WRITES.items():
            answer = await write(rig, stale)
            assert isinstance(answer, LeaseLost), f"{name} {moment}: {answer}"
            refused += 1
        assert await rig.snapshot(job_id) == before, moment
        if moment == "while the winner works":
            assert isinstance(await rig.pull(winner, "complete", by=OTHER_WORKER, result=b'"winner"'), StepApplied)
    assert await rig.ledger.result(job_id) == b'"winner"'
    return refused


@pytest.mark.requirement("D2", "DJ-7")
async def test_every_write_of_a_stale_holder_is_refused(rig: Rig, figures):
    refused = sum([await refuse_everything(rig) for _ in range(5)])
    figures(stale_writes=refused, accepted=0)
    assert refused == 5 * 2 * len(WRITES)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.requirement("D2", "DJ-7")
async def test_every_write_of_a_hundred_stale_holders_is_refused(rig: Rig, figures):
    refused = sum([await refuse_everything(rig) for _ in range(100)])
    figures(stale_writes=refused, accepted=0)
    assert refused == 100 * 2 * len(WRITES)

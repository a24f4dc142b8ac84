"""Two turns in flight: where another process commits, one is committed while the other is composed."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import Stand
from tests.worker.test_suspects import suspects
from trellis.client import JobHandle
from trellis.engine.errors import Refused
from trellis.engine.jobs import Advance, JobId, Turn
from trellis.ledgers import open_ledger
from trellis.lifecycles import Trigger
from trellis.testing import FakeClock
from trellis.worker import turns
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.runners import SLICE_S
from trellis.worker.turns import SECOND_TURN_MIN

MANY = SECOND_TURN_MIN + 10
HELD = 4 * SECOND_TURN_MIN
"""So many that two turns share them."""


class Floodgate:
    """The stand's ledger, with every turn noted and held back before it is sent, until it is let through."""

    def __init__(self, stand: Stand) -> None:
        self._ledger = stand.ledger
        self.turns_at_once = 2
        self.sent: list[Turn] = []
        self.held_back: list[asyncio.Future[None]] = []
        self.open = True
        self.refuse_claims = 0
        self.hold_starts = False
        stand.faults = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def turn(self, turn: Turn) -> Any:
        self.sent.append(turn)
        if self.refuse_claims and not turn.advances:
            self.refuse_claims -= 1
            raise Refused(detail="never")
        starts = any(step.trigger == "start" for step in turn.advances)
        if not self.open or (starts and self.hold_starts):
            gate = asyncio.get_running_loop().create_future()
            self.held_back.append(gate)
            await gate
        return await self._ledger.turn(turn)

    def let_through(self) -> None:
        self.open = True
        for gate in self.held_back:
            gate.set_result(None)
        self.held_back.clear()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncGenerator[Stand]:
    """As the other tests have it, but with the bound for a second turn as it is shipped."""
    clock = FakeClock()
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock)
    yield Stand(ledger, clock)
    await ledger.close()


class Bench:
    """Jobs whose handlers end when the test says so, in the order it says."""

    def __init__(self) -> None:
        self.app = App()
        self.begun = 0
        self._ends: list[asyncio.Event] = []

        @self.app.job("t")
        async def handler(ctx: Context) -> None:
            self.begun += 1
            self._ends.append(end := asyncio.Event())
            await end.wait()

    def end(self, count: int) -> None:
        for end in self._ends[:count]:
            end.set()
        del self._ends[:count]


def settled(gate: Floodgate) -> list[int]:
    return [len(turn.advances) for turn in gate.sent if turn.advances]


async def started(stand: Stand, bench: Bench, count: int) -> list[JobHandle]:
    jobs = await stand.trellis.submit_many("t", [None] * count)
    await stand.until(lambda: bench.begun == count)
    return jobs


async def test_many_outcomes_use_a_second_concurrent_turn(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=2 * MANY):
        jobs = await started(stand, bench, MANY + 1)
        gate.open = False
        bench.end(1)
        await stand.until(lambda: settled(gate) == [1])
        bench.end(MANY)
        await stand.until(lambda: settled(gate) == [1, MANY])
        gate.let_through()
        await stand.until(lambda: len(gate.sent) > 2)
        for job in jobs:
            await stand.in_state(job, "succeeded")


async def test_few_outcomes_wait_for_the_turn_in_flight(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    few = SECOND_TURN_MIN - 1
    async with stand.running(bench.app, concurrency=2 * MANY):
        jobs = await started(stand, bench, few + 1)
        gate.open = False
        bench.end(1)
        await stand.until(lambda: settled(gate) == [1])
        bench.end(few)
        for _ in range(20):
            await stand.ledger.job(jobs[0].id)
        assert settled(gate) == [1]
        gate.let_through()
        await stand.until(lambda: settled(gate) == [1, few])
        for job in jobs:
            await stand.in_state(job, "succeeded")


async def test_while_handlers_begin_a_second_turn_waits_for_half_of_the_held_jobs(stand: Stand):
    gate, app = Floodgate(stand), App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        if not settled(gate):
            gate.open = False
        stand.clock.advance(SLICE_S)  # after each handler, the turn loops have a look

    jobs = await stand.trellis.submit_many("t", [None] * HELD)
    async with stand.running(app, concurrency=HELD):
        await stand.until(lambda: settled(gate) == [1, HELD // 2])
        gate.let_through()
        for job in jobs:
            await stand.in_state(job, "succeeded")


async def test_two_turns_share_the_jobs_that_have_finished(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=HELD, prefetch=0):
        jobs = await started(stand, bench, HELD)
        gate.open = False
        before = len(gate.sent)
        bench.end(HELD)
        await stand.until(lambda: settled(gate) == [HELD // 2, HELD // 2])
        asked = [turn.claim.start + turn.claim.prefetch for turn in gate.sent[before:] if turn.claim]
        assert asked == [HELD // 2, HELD // 2]
        gate.let_through()
        for job in jobs:
            await stand.in_state(job, "succeeded")


async def test_a_third_turn_waits_however_much_has_gathered(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=3 * MANY):
        jobs = await started(stand, bench, 2 * MANY + 1)
        gate.open = False
        bench.end(1)
        await stand.until(lambda: settled(gate) == [1])
        bench.end(MANY)
        await stand.until(lambda: settled(gate) == [1, MANY])
        bench.end(MANY)
        for _ in range(20):
            await stand.ledger.job(jobs[0].id)
        assert settled(gate) == [1, MANY]
        gate.let_through()
        await stand.until(lambda: settled(gate) == [1, MANY, MANY])


async def test_concurrent_turns_claim_free_slots_once(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=2 * MANY, prefetch=0):
        await started(stand, bench, MANY)
        gate.open = False
        before = len(gate.sent)
        bench.end(1)
        await stand.until(lambda: len(gate.sent) == before + 1)
        bench.end(MANY - 1)
        await stand.until(lambda: len(gate.sent) == before + 2)
        asked = [turn.claim.start + turn.claim.prefetch for turn in gate.sent[before:] if turn.claim]
        assert asked == [MANY + 1, MANY - 1]
        gate.let_through()


async def test_a_worker_is_not_idle_while_a_claim_is_in_flight(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    await stand.trellis.submit("t", None)
    gate.open = False
    worker = stand.worker(bench.app)
    await worker.start(listening=False)
    await stand.until(lambda: len(gate.sent) == 1)
    idling = asyncio.ensure_future(worker.until_idle())
    for _ in range(20):
        worker.held_jobs.changed.set()
        await stand.ledger.job(JobId("nobody"))
    assert not worker.turns.idle.is_set()
    assert not idling.done()
    gate.let_through()
    await stand.until(lambda: bench.begun == 1)
    bench.end(1)
    await idling
    await worker.drain()


async def test_jobs_of_a_claim_in_flight_end_before_a_quarantined_job_begins(stand: Stand, monkeypatch: Any):
    monkeypatch.setattr(turns, "SECOND_TURN_MIN", 1)
    (pill,) = await suspects(stand, 1)
    (kept,) = await stand.claim("t", start=1)
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=20, prefetch=0) as worker:
        jobs = await started(stand, bench, 4)
        gate.open = False
        bench.end(1)
        await stand.until(lambda: len(gate.held_back) == 1)
        bench.end(1)
        await stand.until(lambda: len(gate.held_back) == 2)
        assert all(turn.claim is not None for turn in gate.sent[-2:])
        step = Advance(lease=kept.lease, source=kept.state, trigger=Trigger.RELEASE, spare_attempt=True)
        await stand.ledger.turn(Turn(actor=worker.actor, advances=(step,)))
        first, second = gate.held_back
        gate.held_back.clear()
        gate.open = True
        first.set_result(None)
        await stand.until(lambda: [held.lease.job_id for held in worker.held_jobs.quarantined] == [pill.id])
        late = await stand.trellis.submit("t", None)
        second.set_result(None)
        await stand.until(lambda: bench.begun == 5)
        assert (await pill.status()).state == "assigned"
        bench.end(10)
        await stand.in_state(jobs[3], "succeeded")
        await stand.in_state(late, "succeeded")
        await stand.until(lambda: bench.begun == 6)
        bench.end(1)
        await stand.in_state(pill, "succeeded")


async def test_a_quarantined_job_starts_with_or_after_the_last_outcome_of_the_others(stand: Stand, monkeypatch: Any):
    monkeypatch.setattr(turns, "SECOND_TURN_MIN", 1)
    (pill,) = await suspects(stand, 1)
    await stand.trellis.submit_many("t", [None] * 5)
    gate, bench = Floodgate(stand), Bench()
    async with stand.running(bench.app, concurrency=20):
        await stand.until(lambda: bench.begun == 5)
        bench.end(5)
        await stand.until(lambda: bench.begun == 6)
        steps = [(n, step) for n, turn in enumerate(gate.sent) for step in turn.advances]
        started_in = next(n for n, step in steps if step.lease.job_id == pill.id and step.trigger == "start")
        outcomes = [n for n, step in steps if step.trigger == "complete"]
        assert len(outcomes) == 5
        assert max(outcomes) <= started_in
        bench.end(1)
        await stand.in_state(pill, "succeeded")


async def test_a_suspect_whose_start_is_under_way_when_the_worker_drains_keeps_its_outcome(stand: Stand):
    (pill,) = await suspects(stand, 1)
    gate, bench = Floodgate(stand), Bench()
    gate.hold_starts = True
    worker = stand.worker(bench.app, concurrency=2)
    await worker.start()
    await stand.until(lambda: len(gate.held_back) == 1)
    draining = asyncio.ensure_future(worker.drain())
    for _ in range(10):
        await stand.ledger.job(pill.id)
    gate.let_through()
    await stand.until(lambda: bench.begun == 1)
    bench.end(1)
    await draining
    status = await pill.status()
    assert (status.state, status.deaths) == ("succeeded", 2)


async def test_failure_of_one_worker_loop_does_not_stop_delivery_of_outcomes(stand: Stand):
    gate, bench = Floodgate(stand), Bench()
    worker = stand.worker(bench.app, concurrency=10)
    await worker.start()
    jobs = await started(stand, bench, 4)
    gate.refuse_claims = 1
    hint = asyncio.ensure_future(worker.turns.hint())
    with pytest.raises(Refused):
        await worker.until_stopped(asyncio.Event())
    draining = asyncio.ensure_future(worker.drain())
    await stand.ledger.job(jobs[0].id)
    bench.end(4)
    drained = await draining
    hint.cancel()
    assert (drained.cut_short, drained.unsettled) == (0, 0)
    for job in jobs:
        assert (await job.status()).state == "succeeded"

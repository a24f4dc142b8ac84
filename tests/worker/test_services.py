"""The loop of every service, and the sweeper on it."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.engine.errors import LedgerUnavailable, OptionInvalid
from trellis.engine.jobs import Actor, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import RetentionOptions, SweepOptions, SweepReport, WorkerRecord
from trellis.engine.service import PresenceBeacon, Retention, Sweeper, pause_after_failures_s, serve
from trellis.lifecycles import Role
from trellis.operations.explain import WorkerPresence as Seen
from trellis.operations.explain import worker_presence
from trellis.testing import FakeClock
from trellis.worker.app import App
from trellis.worker.context import Context

SWEEPING = Actor(role=Role.SWEEPER, name="s1")


@dataclass
class Counting:
    """A service that fails as often as it is told."""

    clock: FakeClock
    fails: list[Exception] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    name: str = "counting"

    async def run_once(self) -> int:
        self.passes.append(self.clock())
        if self.fails:
            raise self.fails.pop(0)
        return len(self.passes)

    def pause_s(self, report: int) -> float:
        return 10.0


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_service_runs_at_its_interval_and_stops_at_once():
    clock, stop = FakeClock(0.0), asyncio.Event()
    service = Counting(clock)
    serving = asyncio.ensure_future(serve(service, clock, random.Random(1), stop))
    for _ in range(60):
        await turns_of_the_loop()
        clock.advance(0.5)
    await turns_of_the_loop()
    assert service.passes == [0.0, 10.0, 20.0, 30.0]
    stop.set()
    await asyncio.wait_for(serving, 60)


async def test_a_service_outlives_bad_passes_and_backs_off():
    clock, stop = FakeClock(0.0), asyncio.Event()
    service = Counting(
        clock, fails=[LedgerUnavailable(reason="x"), RuntimeError("a bug"), LedgerUnavailable(reason="x")]
    )
    serving = asyncio.ensure_future(serve(service, clock, random.Random(1), stop))
    for _ in range(300):
        await turns_of_the_loop()
        clock.advance(0.01)
    gaps = [after - before for before, after in zip(service.passes, service.passes[1:], strict=False)]
    assert len(service.passes) == 4
    assert 0.05 <= gaps[0] <= 0.11 < gaps[2] <= 0.41
    stop.set()
    await asyncio.wait_for(serving, 60)


@dataclass
class Following(Counting):
    """A service that waits for events."""

    ledger: Ledger = field(kw_only=True)
    waits_for_events: bool = True

    def pause_s(self, report: int) -> float:
        return 0.25


@pytest.mark.requirement("D32")
async def test_a_service_that_waits_for_events_looks_once_a_second(stand: Stand):
    clock, stop = FakeClock(0.0), asyncio.Event()
    service = Following(clock, ledger=stand.ledger)
    serving = asyncio.ensure_future(serve(service, clock, random.Random(1), stop))
    for _ in range(40):
        await turns_of_the_loop()
        clock.advance(0.25)
    await turns_of_the_loop()
    assert service.passes == [float(second) for second in range(11)]
    stop.set()
    await asyncio.wait_for(serving, 60)


async def test_an_event_wakes_it_after_its_pause(stand: Stand):
    clock, stop = FakeClock(0.0), asyncio.Event()
    service = Following(clock, ledger=stand.ledger)
    serving = asyncio.ensure_future(serve(service, clock, random.Random(1), stop))
    await turns_of_the_loop()
    await stand.submit("t")
    await turns_of_the_loop()
    assert service.passes == [0.0], "no sooner than its pause"
    clock.advance(0.25)
    await turns_of_the_loop()
    assert service.passes == [0.0, 0.25]
    clock.advance(0.5)
    await stand.submit("t")
    await turns_of_the_loop()
    assert service.passes == [0.0, 0.25, 0.75], "at once when the pause is over"
    stop.set()
    await asyncio.wait_for(serving, 60)


def test_the_backoff_doubles_up_to_its_bound():
    assert [pause_after_failures_s(n, 1.0) for n in (1, 2, 3, 10, 1000)] == [0.1, 0.2, 0.4, 5.0, 5.0]
    assert pause_after_failures_s(1, 0.0) == 0.05


@pytest.mark.requirement("D33")
async def test_the_elected_sweeper_comes_back_when_the_next_lease_ends_not_an_interval_later(stand: Stand):
    await stand.submit("t")
    await stand.claim("t", lease_s=0.3, heartbeat_s=0.1)
    sweeper = Sweeper(ledger=stand.ledger, actor=SWEEPING)
    report = await sweeper.run_once()
    assert report.elected
    pause = sweeper.pause_s(report)
    assert 0.02 <= pause <= 0.31
    stand.clock.advance(pause)
    report = await sweeper.run_once()
    assert report.expired == 1


@pytest.mark.requirement("D33")
async def test_one_of_two_sweepers_is_elected(stand: Stand):
    await stand.submit("t")
    await stand.claim("t")
    one, other = (Sweeper(ledger=stand.ledger, actor=SWEEPING) for _ in range(2))
    reports = [await one.run_once(), await other.run_once()]
    assert [report.elected for report in reports] == [True, False]
    assert other.pause_s(reports[1]) == 1.0
    stand.clock.advance(1.0)
    assert (await other.run_once()).elected


def test_a_sweep_with_more_to_do_is_followed_at_once(stand: Stand):
    sweeper = Sweeper(ledger=stand.ledger, actor=SWEEPING, options=SweepOptions(interval_s=1.0))
    assert sweeper.pause_s(SweepReport(elected=True, expired=500, next_due_s=0.0)) == 0.02


@pytest.mark.requirement("D61")
@pytest.mark.parametrize(
    "kept", [{"ended_s": 60.0}, {"states_s": {("run", "failed"): 4319.0}}, {"ended_s": float("nan")}]
)
def test_retention_in_python_has_the_bounds_of_the_setting(kept: dict[str, Any]):
    with pytest.raises(OptionInvalid, match=r"days must be at least 0.05 \(72 minutes.*None keeps jobs for ever"):
        RetentionOptions(**kept)
    assert RetentionOptions(ended_s=4320.0, states_s={("run", "failed"): None}).ended_s == 4320.0


async def test_retention_removes_what_is_over_and_keeps_the_rest(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    old = await stand.submit("t")
    await stand.run_until_idle(app)
    stand.clock.advance(3_600)
    new = await stand.submit("t")
    retention = Retention(ledger=stand.ledger, options=RetentionOptions(ended_s=60.0, testing=True))
    report = await retention.run_once()
    assert (report.jobs, retention.pause_s(report)) == (1, 60.0)
    assert await stand.ledger.job(old.id) is None
    assert await stand.ledger.job(new.id) is not None


@pytest.mark.requirement("D31")
async def test_the_sweeper_warns_when_it_extends_leases_after_an_outage(stand: Stand, caplog: pytest.LogCaptureFixture):
    await stand.submit("t")
    sweeper = Sweeper(ledger=stand.ledger, actor=SWEEPING, options=SweepOptions(interval_s=1.0))
    await sweeper.run_once()
    claim = Claim(claim_id=ClaimId("c1"), types=(TypeClaim(type="t", lease_s=10.0, heartbeat_s=5.0),), start=1)
    await stand.ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="w"), claim=claim))
    warnings: list[list[str]] = []
    for pause_s in (1.0, 9.0):
        stand.clock.advance(pause_s)
        await sweeper.run_once()
        warnings.append([record.message for record in caplog.records if record.name == "trellis.service"])
    assert warnings[0] == []
    assert "leases_extended jobs=1" in warnings[1][0]


@pytest.mark.requirement("D61")
async def test_retention_says_once_for_whom_it_keeps_work_and_what_was_removed_unread(
    stand: Stand, caplog: pytest.LogCaptureFixture
):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    assert await stand.ledger.subscribe(Actor(role=Role.PROJECTOR, name="p"), "bus-publisher", lease_s=5.0) is not None
    await stand.submit("t")
    await stand.run_until_idle(app)
    retention = Retention(ledger=stand.ledger, options=RetentionOptions(ended_s=60.0, unread_s=600.0, testing=True))
    said: list[list[str]] = []
    for _ in range(4):
        caplog.clear()
        await retention.run_once()
        said.append([record.message for record in caplog.records if record.name == "trellis.service"])
        stand.clock.advance(250.0)
    assert [len(messages) for messages in said] == [0, 1, 0, 1]
    assert "kept_for_follower follower='bus-publisher' unread_since=" in said[1][0]
    assert "removed_unread jobs=1" in said[3][0]
    assert "trellis followers" in said[1][0]
    assert "trellis followers" in said[3][0]


async def test_retention_with_an_enormous_age_keeps_running(stand: Stand):
    assert await stand.ledger.subscribe(Actor(role=Role.PROJECTOR, name="p"), "projector", lease_s=5.0) is not None
    await stand.submit("t")
    retention = Retention(ledger=stand.ledger, options=RetentionOptions(ended_s=1e11, testing=True))
    assert (await retention.run_once()).jobs == 0


async def test_a_running_worker_can_be_seen(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None: ...

    async with stand.running(app):
        seen: list[WorkerRecord] = []

        async def visible() -> bool:
            seen[:] = await stand.ledger.workers()
            return bool(seen)

        await stand.until(visible)
    assert seen[0].name == "w1"
    assert b'"t"' in (seen[0].info or b"")
    assert worker_presence(seen[0], await stand.ledger.now()) is Seen.ALIVE
    (left,) = await stand.ledger.workers()
    assert worker_presence(left, await stand.ledger.now()) is Seen.DRAINED
    await PresenceBeacon(ledger=stand.ledger, actor=Actor(role=Role.WORKER, name="w2")).run_once()
    assert {worker.name for worker in await stand.ledger.workers()} == {"w1", "w2"}


@pytest.mark.requirement("DJ-8", "D33")
async def test_every_worker_sweeps_so_a_dead_workers_job_is_run_again(stand: Stand):
    app = App()
    ran: list[int] = []

    @app.job("t")
    async def handler(ctx: Context) -> None:
        ran.append(ctx.attempt)

    job = await stand.submit("t")
    await stand.claim("t", lease_s=60, heartbeat_s=15)
    claimed_at = stand.clock()
    async with stand.running(app, sweep=SweepOptions()):
        await stand.in_state(job, "succeeded", step_s=0.1)
    expired = next(event for event in await job.events() if event.type == "job_lease_expired")
    assert ran == [2]
    assert expired.ts.timestamp() - claimed_at >= 30.5

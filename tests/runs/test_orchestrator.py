"""Orchestrators: one run per agent, first come first served, and what happens when one of them is gone."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from trellis.engine.jobs import Actor, CancelMode, RequestId
from trellis.lifecycles import Role
from trellis.runs.orchestrator import ACCEPT_BATCH_MAX, TYPE, Orchestrator, OrchestratorOptions
from trellis.runs.steps import StepContext, StepResult

OPTIONS = OrchestratorOptions(concurrency=10, lease_s=30.0, heartbeat_s=10.0)


class Hold:
    """The first step waits here until the test lets its run go on."""

    def __init__(self, stand: Stand) -> None:
        self.begun: list[str] = []
        self._free: dict[str, asyncio.Event] = {}
        self._usual = stand.steps.acts["load-context"]
        stand.steps.acts["load-context"] = self

    async def __call__(self, context: StepContext, /) -> StepResult:
        self.begun.append(context.run_id)
        await self._free.setdefault(context.run_id, asyncio.Event()).wait()
        return await self._usual(context)

    def let_go(self, run_id: str) -> None:
        self._free.setdefault(run_id, asyncio.Event()).set()


def orchestrator(stand: Stand, name: str = "orchestrator@test", options: OrchestratorOptions = OPTIONS) -> Orchestrator:
    numbers = itertools.count(1)
    new_id: Callable[[], str] = lambda: f"{name}-{next(numbers)}"  # noqa: E731
    driver = stand.driver()
    driver.actor = Actor(role=Role.ORCHESTRATOR, name=name)
    return Orchestrator(
        ledger=stand.ledger, actor=driver.actor, clock=stand.clock, driver=driver, new_id=new_id, options=options
    )


async def ended(stand: Stand, *runs: str) -> None:
    async def all_over() -> bool:
        return {await stand.state(run) for run in runs} <= {"completed", "failed"}  # type: ignore[arg-type]

    await stand.until(all_over)


@pytest.mark.requirement("PIPE-3", "D41")
async def test_runs_of_one_agent_go_one_after_another_in_the_order_they_came(stand: Stand):
    hold, one, other = Hold(stand), orchestrator(stand, "one"), orchestrator(stand, "two")
    runs = [await stand.run_of() for _ in range(3)]
    for run in runs:
        for each in (one, other, one):
            await each.run_once()
        await stand.until(lambda run=run: hold.begun[-1:] == [run])
        others = [await stand.state(later) for later in runs[runs.index(run) + 1 :]]
        assert set(others) <= {"queued"}
        hold.let_go(run)
        await ended(stand, run)
    assert hold.begun == runs


@pytest.mark.requirement("PIPE-3", "D25")
async def test_no_more_runs_than_the_global_limit_are_driven(stand: Stand):
    hold = Hold(stand)
    await stand.ledger.limit_held(ORCHESTRATOR, TYPE, 2)
    runs = [await stand.run_of(f"agent-{n}") for n in range(4)]
    one, other = orchestrator(stand, "one"), orchestrator(stand, "two")
    await asyncio.gather(one.run_once(), other.run_once())
    await stand.until(lambda: len(hold.begun) == 2)
    await asyncio.gather(one.run_once(), other.run_once())
    assert sorted([await stand.state(run) for run in runs]) == ["queued", "queued", "running", "running"]
    hold.let_go(hold.begun[0])
    await ended(stand, hold.begun[0])
    await one.run_once()
    await stand.until(lambda: len(hold.begun) == 3)
    for run in runs:
        hold.let_go(run)
    for each in (one, other):
        await each.run_once()
    await ended(stand, *hold.begun)
    await one.run_once()
    await ended(stand, *runs)


@pytest.mark.requirement("D13", "D17")
async def test_a_run_that_was_only_requested_is_taken_up(stand: Stand):
    run = await stand.run_of(queued=False)
    one = orchestrator(stand)
    assert (await one.run_once()).accepted == 1
    await ended(stand, run)
    assert [event.type for event in await stand.events(run)][:3] == ["run.requested", "run.queued", "run.started"]


@pytest.mark.requirement("D16", "D33")
async def test_a_run_whose_orchestrator_is_gone_is_taken_up_by_another(stand: Stand):
    hold, one, other = Hold(stand), orchestrator(stand, "one"), orchestrator(stand, "two")
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    await one.drain()
    assert await stand.state(run) == "running"
    assert (await other.run_once()).claimed == 0
    await stand.lose_leases()
    assert (await other.run_once()).claimed == 1
    hold.let_go(run)
    await ended(stand, run)
    assert await stand.state(run) == "completed"


@pytest.mark.requirement("PIPE-3")
async def test_of_more_requests_than_one_pass_takes_in_the_oldest_come_first(stand: Stand):
    runs = [await stand.run_of(queued=False) for _ in range(ACCEPT_BATCH_MAX + 30)]
    one = orchestrator(stand)
    one.claiming = False
    assert (await one.run_once()).accepted == ACCEPT_BATCH_MAX
    assert [await stand.state(run) for run in runs] == ["queued"] * ACCEPT_BATCH_MAX + ["requested"] * 30


@pytest.mark.requirement("D4", "D16")
async def test_renewed_runs_stay_and_lost_ones_are_let_go(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    for _ in range(4):
        stand.clock.advance(10.0)
        assert await one.renew() == 1
    driving = next(iter(one._driving.values()))
    await stand.lose_leases()
    await one.renew()
    await asyncio.gather(driving.task, return_exceptions=True)
    assert driving.task.cancelled()
    assert not one._driving
    assert await stand.state(run) == "running"


@pytest.mark.requirement("D4")
async def test_a_run_that_cannot_be_renewed_is_stopped_before_another_may_have_it(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    driving = next(iter(one._driving.values()))
    job = await stand.ledger.job(run)
    assert job is not None
    assert job.lease_expires_at is not None
    assert driving.fence <= job.lease_expires_at.timestamp()
    stand.clock.advance(driving.fence - stand.clock())
    one._fence_off()
    await asyncio.gather(driving.task, return_exceptions=True)
    assert driving.task.cancelled()


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_reaches_the_driver_with_the_heartbeat(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, RequestId("c"), grace_s=30.0, cause="enough")
    await one.renew()
    await ended(stand, run)
    assert (await stand.events(run))[-1].cause == "CANCELLED: stopped on request"


@pytest.mark.requirement("D19")
async def test_a_hard_cancel_ends_the_run_and_its_driver_notices(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.HARD, RequestId("c"), grace_s=0.0, cause="now")
    assert await stand.state(run) == "failed"
    before = await stand.events(run)
    hold.let_go(run)
    await stand.until(lambda: not one._driving)
    assert await stand.events(run) == before

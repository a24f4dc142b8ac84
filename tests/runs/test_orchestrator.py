"""Orchestrators: one run per agent, first come first served, and what happens when one of them is gone."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.stopped_tasks import stopped
from trellis.engine.jobs import Actor, Advance, CancelMode, LeaseLost, RequestId, StepApplied, lease_length_s
from trellis.engine.lease_runner import ProcessReport
from trellis.lifecycles import Role
from trellis.operations.explain import WorkerPresence, is_alive, worker_presence
from trellis.runs.orchestrator import ACCEPT_BATCH_MAX, TYPE, Orchestrator, OrchestratorOptions, StepContext, StepResult

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

    def release(self, run_id: str) -> None:
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


@pytest.mark.requirement("PIPE-3")
async def test_runs_of_one_agent_go_one_after_another_in_the_order_they_came(stand: Stand):
    hold, one, other = Hold(stand), orchestrator(stand, "one"), orchestrator(stand, "two")
    runs = [await stand.run_of() for _ in range(3)]
    for run in runs:
        for each in (one, other, one):
            await each.run_once()
        await stand.until(lambda run=run: hold.begun[-1:] == [run])
        others = [await stand.state(later) for later in runs[runs.index(run) + 1 :]]
        assert set(others) <= {"queued"}
        hold.release(run)
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
    hold.release(hold.begun[0])
    await ended(stand, hold.begun[0])
    await one.run_once()
    await stand.until(lambda: len(hold.begun) == 3)
    for run in runs:
        hold.release(run)
    for each in (one, other):
        await each.run_once()
    await ended(stand, *hold.begun)
    await one.run_once()
    await ended(stand, *runs)


@pytest.mark.requirement("D17")
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
    hold.release(run)
    await ended(stand, run)
    assert await stand.state(run) == "completed"


@pytest.mark.requirement("PIPE-3")
async def test_orchestrator_accepts_the_oldest_requests_first(stand: Stand):
    runs = [await stand.run_of(queued=False) for _ in range(ACCEPT_BATCH_MAX + 30)]
    one = orchestrator(stand)
    one.claiming = False
    assert (await one.run_once()).accepted == ACCEPT_BATCH_MAX
    assert [await stand.state(run) for run in runs] == ["queued"] * ACCEPT_BATCH_MAX + ["requested"] * 30


@pytest.mark.requirement("D4", "D16")
async def test_renewal_keeps_held_runs_and_drops_lost_ones(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    for _ in range(4):
        stand.clock.advance(10.0)
        assert await one.renew() == 1
    driving = next(iter(one._driving.values()))
    one.claiming = False  # else it takes the run up again
    driving.fence += 60.0  # the ledger says so first
    await stand.lose_leases()
    await one.renew()
    await stopped(driving.task)
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
    await stopped(driving.task)
    assert driving.task.cancelled()


class Hanging:
    """A ledger that does not answer what it is told not to answer."""

    def __init__(self, stand: Stand, *verbs: str) -> None:
        self._ledger, self._verbs = stand.ledger, verbs

    def __getattr__(self, name: str) -> object:
        return self._never if name in self._verbs else getattr(self._ledger, name)

    async def _never(self, *_: object) -> object:
        return await asyncio.get_running_loop().create_future()


@pytest.mark.requirement("D4", "D16")
async def test_a_drive_is_cut_at_its_fence_while_a_renewal_hangs(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    one.ledger = Hanging(stand, "renew")  # type: ignore[assignment]
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    driving = next(iter(one._driving.values()))
    one.claiming = False
    stand.clock.advance(10.0)
    renewal = asyncio.ensure_future(one.renew())
    await stand.until(
        lambda: stand.clock.sleeping == 3
    )  # the look at the fences, the limits of the drive and of the renewal
    assert not driving.task.done()
    stand.clock.advance(driving.fence - stand.clock())
    await stand.until(driving.task.done)
    assert driving.task.cancelled()
    job = await stand.ledger.job(run)
    assert job is not None
    assert job.lease_expires_at is not None
    assert stand.clock() <= job.lease_expires_at.timestamp()
    assert await renewal == 0  # and the next heartbeat is not kept waiting either


@pytest.mark.requirement("D4", "D16")
async def test_a_drive_is_cut_at_its_fence_without_any_heartbeat(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    await stand.run_of()
    await one.run_once()
    await stand.until(lambda: len(hold.begun) == 1)
    driving = next(iter(one._driving.values()))
    one.claiming = False
    stand.clock.advance(driving.fence - stand.clock())
    await stand.until(driving.task.done)
    assert driving.task.cancelled()
    await stand.until(lambda: stand.clock.sleeping == 0)  # nobody watches where nothing is driven


@pytest.mark.requirement("D4", "D16")
async def test_a_claim_that_was_answered_after_its_lease_is_not_taken_up(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    one, turn = orchestrator(stand), stand.ledger.turn
    run = await stand.run_of()

    async def late(*args: object) -> object:
        answer = await turn(*args)  # type: ignore[arg-type]
        stand.clock.advance(35.0)
        return answer

    monkeypatch.setattr(stand.ledger, "turn", late)
    assert (await one.run_once()).driving == 0
    assert await stand.state(run) == "running"  # until its lease is over and somebody else has it
    assert stand.steps.done["load-context"] == 0


@pytest.mark.requirement("D2", "D4")
@pytest.mark.parametrize("verb", ["turn", "renew"])
async def test_a_drive_is_fenced_from_when_its_lease_was_asked_for_and_not_from_the_answer(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, verb: str
):
    hold, one, call = Hold(stand), orchestrator(stand), getattr(stand.ledger, verb)
    run, sent_at = await stand.run_of(), list[float]()

    async def slow(*args: object) -> object:
        sent_at.append(stand.clock())
        answer = await call(*args)
        stand.clock.advance(5.0)
        return answer

    monkeypatch.setattr(stand.ledger, verb, slow)
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    if verb == "renew":
        stand.clock.advance(10.0)
        await one.renew()
    driving = next(iter(one._driving.values()))
    length_s = lease_length_s(one.options.lease_s, one.options.heartbeat_s)
    assert driving.fence - length_s in sent_at
    one.claiming = False
    hold.release(run)
    await stopped(driving.task)


@pytest.mark.requirement("D4")
async def test_cancel_request_does_not_keep_a_fenced_driver_running(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    driving = next(iter(one._driving.values()))
    one.claiming = False
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, RequestId("c"), grace_s=30.0, cause="enough")
    await one.renew()
    driving.fence = stand.clock()
    one._fence_off()
    await stopped(driving.task)
    assert driving.task.cancelled()
    assert await stand.state(run) == "running"


async def test_an_orchestrator_that_drives_nothing_is_no_lost_worker(stand: Stand):
    one = orchestrator(stand)
    report = ProcessReport(holder=one, name="run-report")
    for _ in range(3):
        await report.run_once()
        (listed,) = await stand.ledger.workers()
        assert worker_presence(listed, await stand.ledger.now()) is WorkerPresence.ALIVE
        assert not is_alive(listed, await stand.ledger.now()), "no worker of jobs: it is not counted among them"
        stand.clock.advance(60.0)
    await one.drain()
    (listed,) = await stand.ledger.workers()
    assert worker_presence(listed, await stand.ledger.now()) is WorkerPresence.DRAINED


class LastStep:
    """A run's last transition waits here."""

    def __init__(self, one: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self._advance = asyncio.Event(), asyncio.Event(), one.driver.advance
        monkeypatch.setattr(one.driver, "advance", self)

    async def __call__(self, advance: Advance) -> StepApplied | LeaseLost:
        if advance.trigger in ("complete", "fail"):
            self.begun.set()
            await self.go_on.wait()
        return await self._advance(advance)


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_that_comes_while_the_run_completes_is_too_late(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
):
    one = orchestrator(stand)
    last, run = LastStep(one, monkeypatch), await stand.run_of()
    await one.run_once()
    await last.begun.wait()
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, RequestId("c"), grace_s=30.0, cause="enough")
    assert await one.renew() == 1
    await stand.until(lambda: not one.driver.cancel_requests)
    last.go_on.set()
    await stand.until(lambda: not one._driving)
    assert await stand.state(run) == "completed"


@pytest.mark.requirement("D16")
async def test_a_drive_is_cut_also_while_it_completes(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    one = orchestrator(stand)
    last, run = LastStep(one, monkeypatch), await stand.run_of()
    await one.run_once()
    await last.begun.wait()
    await one.drain()
    last.go_on.set()
    assert not one._driving
    assert await stand.state(run) == "running"


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_that_comes_while_the_run_is_loaded_ends_it(stand: Stand):
    one = orchestrator(stand)
    one.driver.ledger = Hanging(stand, "events")  # type: ignore[assignment]
    run = await stand.run_of()
    await one.run_once()
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, RequestId("c"), grace_s=30.0, cause="enough")
    await one.renew()
    await ended(stand, run)
    assert (await stand.events(run))[-1].cause == "CANCELLED: enough"


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_reaches_the_driver_with_the_heartbeat(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.SOFT, RequestId("c"), grace_s=30.0, cause="enough")
    await one.renew()
    await ended(stand, run)
    assert (await stand.events(run))[-1].cause == "CANCELLED: enough"


@pytest.mark.requirement("D19")
async def test_a_hard_cancel_ends_the_run_and_its_driver_notices(stand: Stand):
    hold, one = Hold(stand), orchestrator(stand)
    run = await stand.run_of()
    await one.run_once()
    await stand.until(lambda: hold.begun == [run])
    await stand.ledger.cancel(ORCHESTRATOR, run, CancelMode.HARD, RequestId("c"), grace_s=0.0, cause="now")
    assert await stand.state(run) == "failed"
    before = await stand.events(run)
    hold.release(run)
    await stand.until(lambda: not one._driving)
    assert await stand.events(run) == before

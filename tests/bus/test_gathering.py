"""When the scheduler looks for ready jobs: at once for a job that comes alone, and once for jobs that come together."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.rig import PATIENCE_S, TOPIC, Rig, ScriptedWorker, quiet
from trellis.bus.scheduling import scheduler
from trellis.bus.scheduling.dispatch_policy import GROUPS_S, JobGroups
from trellis.bus.scheduling.placement import StaysReady, WaitReason
from trellis.bus.trigger import CoalescedTrigger
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import JobId
from trellis.testing import FakeClock

LONG_S = 3600.0


@dataclass
class Passes:
    """Counts passes."""

    count: int = 0
    _first: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        self.count += 1
        self._first.set()

    async def first(self) -> None:
        """Wait for the first one."""
        async with asyncio.timeout(PATIENCE_S):
            await self._first.wait()


# --- jobs that come together -----------------------------------------------------------------------------------------


def test_a_group_is_complete_with_half_of_the_jobs_that_recent_passes_had():
    clock = FakeClock()
    groups = JobGroups(clock=clock, largest=32)
    assert groups.is_complete_with_next(), "there was no group"
    groups.pass_began()
    groups.were_dispatched(8)
    assert [groups.is_complete_with_next() for _ in range(5)] == [False, False, False, True, True]
    groups.pass_began()
    groups.were_dispatched(0)
    assert not groups.is_complete_with_next(), "a pass that dispatched nothing says nothing about groups"
    clock.advance(GROUPS_S + 0.1)
    assert groups.is_complete_with_next(), "the last group is long ago"


def test_a_group_fades_while_jobs_come_alone_and_is_bounded():
    groups = JobGroups(clock=FakeClock(), largest=32)
    groups.were_dispatched(1_000)
    alone = 0
    while not groups.is_complete_with_next():
        alone += 1
        groups.pass_began()
        groups.were_dispatched(1)
    assert alone == 8


@pytest.mark.on_both
async def test_a_job_that_comes_alone_is_dispatched_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "GATHER_S", LONG_S)
    worker = await rig.worker("w1", TOPIC)
    for number in range(1, 4):
        await _comes(rig)
        await worker.has(number)


async def test_a_job_waits_for_others_while_jobs_come_in_groups(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "GATHER_S", LONG_S)
    worker, passes = await _after_a_group(rig, monkeypatch)
    await _comes(rig)
    await quiet()
    assert (len(worker.orders), passes.count) == (4, 0)
    await _comes(rig)
    await worker.has(6)
    assert passes.count == 1


async def test_a_job_does_not_wait_long_for_its_group(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "GATHER_S", 0.001)
    worker, passes = await _after_a_group(rig, monkeypatch)
    await _comes(rig)
    await worker.has(5)
    assert passes.count == 1


async def test_any_pass_takes_the_job_that_waits_for_its_group(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "GATHER_S", LONG_S)
    worker, _ = await _after_a_group(rig, monkeypatch)
    await _comes(rig)
    report = await rig.scheduler.run_once()
    await quiet()
    assert (report.dispatched, len(worker.orders)) == (1, 5)


# --- room at workers -------------------------------------------------------------------------------------------------


async def test_room_alone_asks_for_no_pass_at_once_while_no_job_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "ROOM_S", LONG_S)
    _, passes = await _after_a_group(rig, monkeypatch)
    rig.scheduler.has_room()
    await quiet()
    assert passes.count == 0
    monkeypatch.setattr(scheduler, "ROOM_S", 0.001)
    rig.scheduler.has_room()
    await passes.first()


@pytest.mark.on_both
async def test_room_is_used_at_once_for_a_job_that_waits_for_it(rig_of: Opens, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "ROOM_S", LONG_S)
    async with rig_of(topics={"job.>": {"pools": ["p"]}}, pools={"p": {}}) as rig:
        rig.workers.appeared = rig.scheduler.has_room
        worker = await rig.worker("w1", beats={"pool": "p", "max_parallel_jobs": 1})
        jobs = [await rig.submit() for _ in range(2)]
        await rig.run()
        await worker.has(1)
        assert sorted([await rig.state(job) for job in jobs]) == ["DISPATCHED", "SCHEDULED"]
        await worker.finish(worker.orders[0])
        await worker.has(2)


async def test_room_that_comes_during_a_pass_that_leaves_jobs_is_used_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "ROOM_S", LONG_S)
    worker = await rig.worker("w1", TOPIC)
    await rig.run()
    place = rig.scheduler._place

    def full_at_first(ready: Any) -> Any:
        monkeypatch.setattr(rig.scheduler, "_place", place)
        rig.scheduler.has_room()
        return StaysReady(why=WaitReason.FULL, all_do=True)

    monkeypatch.setattr(rig.scheduler, "_place", full_at_first)
    await _comes(rig)
    await worker.has(1)


async def test_the_end_of_a_job_is_followed_at_once_by_a_pass_where_tenants_are_limited(
    rig_of: Opens, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "ROOM_S", LONG_S)
    async with rig_of(tenant_default={"held_max": 1}) as rig:
        worker = await rig.worker("w1", TOPIC)
        for _ in range(2):
            await rig.submit(tenant_id="acme")
        await rig.run()
        assert len(worker.orders) == 1
        passes = _passes(rig, monkeypatch)
        rig.scheduler.has_room()
        await passes.first()


# --- the trigger -----------------------------------------------------------------------------------------------------


async def test_the_earliest_of_requests_for_a_later_pass_counts_and_one_pass_serves_all():
    trigger, passes = _counting_trigger()
    trigger.wake_within(LONG_S)
    trigger.wake_within(0.001)
    trigger.wake_within(LONG_S)
    await passes.first()
    trigger.wake_within(0.001)
    await trigger.once()
    assert passes.count == 2
    assert trigger._late is None, "the pass served the request"
    await trigger.drain()


async def test_a_pass_that_failed_while_another_was_requested_hides_no_request_for_a_later_pass():
    later = Passes()

    async def fails() -> int:
        trigger.wake()
        raise LedgerUnavailable(reason="it is away")

    async def run() -> int:
        later.note()
        return later.count

    trigger = CoalescedTrigger(run=fails, more=lambda _: False)
    trigger.wake()
    await quiet()
    trigger.run = run
    trigger.wake_within(0.001)
    await later.first()
    assert later.count == 1
    await trigger.drain()


async def test_a_drained_trigger_runs_no_pass_that_was_asked_for_later():
    trigger, passes = _counting_trigger()
    trigger.wake_within(LONG_S)
    await trigger.drain()
    trigger.wake_within(0.0)
    await quiet()
    assert passes.count == 0


def _counting_trigger() -> tuple[CoalescedTrigger[int], Passes]:
    passes = Passes()

    async def run() -> int:
        passes.note()
        return passes.count

    return CoalescedTrigger(run=run, more=lambda _: False), passes


# --- what they share -------------------------------------------------------------------------------------------------


async def _comes(rig: Rig) -> str:
    """A job that this process takes in over the bus."""
    job_id = await rig.submit()
    await rig.scheduler.validate_new(JobId(job_id))
    return job_id


async def _after_a_group(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptedWorker, Passes]:
    """A worker that has got four jobs of one pass, and the number of passes since then."""
    worker = await rig.worker("w1", TOPIC)
    await rig.submit()
    await rig.run()  # one goes first, to see whether somebody listens
    for _ in range(3):
        await rig.submit()
    report = await rig.scheduler.run_once()
    await quiet()
    assert (report.dispatched, len(worker.orders)) == (3, 4)
    await rig.run()
    return worker, _passes(rig, monkeypatch)


def _passes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """How often ready jobs are looked for from now on."""
    peek, passes = rig.ledger.peek_ready, Passes()

    async def counted(lifecycle: str, *, each: int) -> Any:
        passes.note()
        return await peek(lifecycle, each=each)

    monkeypatch.setattr(rig.ledger, "peek_ready", counted)
    return passes

"""Many reconcilers, and reconcilers that die anywhere: everything that follows from an end happens, and happens once."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Parts, parts_of
from tests.bus.rig import TOPIC, Rig, rigged
from trellis.bus.messages import Status
from trellis.bus.outcomes.publisher import SUBSCRIBER_NAME as TELLS_CLIENTS
from trellis.bus.topics import Topics
from trellis.documents.publisher import DocumentPublisher as Documents
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.service import Sweeper
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.projector import Projector
from trellis.runs.rebuild import rebuild_ledger
from trellis.storage.objects.open import open_objects

UNDO = {"topic": "job.undo"}
TOPICS = {TOPIC: {"lease_s": 3, "max_attempts": 2, "backoff_s": 1}, "job.undo": {"max_attempts": 2}}
CALLS_MAX = 300


class Crash(Exception):
    """The process ends here."""


class Fragile:
    """A ledger behind which the process ends at its nth call, before the call is made or when its answer is on its way."""

    def __init__(self, ledger: Ledger, at: int, *, after: bool) -> None:
        self._ledger, self._left, self._after = ledger, at, after
        self.crashed = False

    def __getattr__(self, name: str) -> Any:
        real: Callable[..., Awaitable[Any]] = getattr(self._ledger, name)
        if isinstance(real, str):
            return real  # a fact about the ledger, and no call

        async def call(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self.crashed or (self._left < 0 and not self._after):
                self.crashed = True
                raise Crash
            answer = await real(*given, **named)
            if self._left < 0:
                self.crashed = True
                raise Crash
            return answer

        return call


async def _story(parts: Parts, follow_up: Callable[[], Awaitable[None]]) -> None:
    """A workflow with an ordered step, a retry, a cascade and an undoing, with a follow-up wherever there is something to do."""
    rig = parts.rig
    await rig.submit(job_id="p")
    for name, index in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        await rig.submit(job_id=name, parent_job_id="p", workflow_id="wf", step_index=index, compensation=UNDO)
        await parts.schedule(name)
    await rig.submit(job_id="child-of-d", parent_job_id="d")
    for name in ("b", "c", "d"):
        await parts.move(name, "SCHEDULED", Role.SCHEDULER, delay_s=900.0, data=b'{"hold": "order"}')
    await follow_up()
    await parts.result(await parts.dispatch("a", "w1"), "w1")
    await follow_up()
    await parts.result(await parts.dispatch("b", "w1"), "w1", Status.FAILED_RETRYABLE)
    await follow_up()
    await parts.pass_time(2)
    await parts.result(await parts.dispatch("b.r1", "w1"), "w1")
    await follow_up()
    await parts.result(await parts.dispatch("c", "w1"), "w1", Status.FAILED_FATAL)
    await follow_up()
    for name in ("b.r1.c", "a.c"):
        await parts.schedule(name)
        await parts.result(await parts.dispatch(name, "w1"), "w1")
        await follow_up()


RAN = ["job_dispatched", "job_started"]
WAITED = ["job_accepted", "job_scheduled", "job_deferred", "job_deferred"]
EXPECTED = {
    "p": ["job_accepted"],
    "a": ["job_accepted", "job_scheduled", *RAN, "job_succeeded", "job_compensated"],
    "b": [*WAITED, *RAN, "job_failed"],
    "b.r1": ["job_accepted", "job_scheduled", *RAN, "job_succeeded", "job_compensated"],
    "c": [*WAITED, *RAN, "job_failed"],
    "d": ["job_accepted", "job_scheduled", "job_deferred", "job_cancelled"],
    "child-of-d": ["job_accepted", "job_cancelled"],
    "b.r1.c": ["job_accepted", "job_scheduled", *RAN, "job_succeeded"],
    "a.c": ["job_accepted", "job_scheduled", *RAN, "job_succeeded"],
}
"""Every event of the story: one for each step, however often it was tried."""


async def _dies(rig: Rig, at: int, *, after: bool) -> bool:
    """The story, with a reconciler that dies at its nth call and another that goes on; whether it died."""
    parts = parts_of(rig)
    dying = parts_of(rig, name="dying", ledger=Fragile(rig.ledger, at, after=after))  # type: ignore[arg-type]
    died = False

    async def follow_up() -> None:
        nonlocal died
        if not died:
            try:
                await dying.follow_up()
            except Crash:
                died = True
                await rig.advance(6)  # its place in the feed becomes free
        if died:
            await parts.follow_up()

    await _story(parts, follow_up)
    assert await parts.fingerprint() == EXPECTED
    return died


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "BUS-8", "D36")
@pytest.mark.parametrize("at, after", [(23, False), (57, True), (CALLS_MAX, False)])
async def test_a_reconciler_may_die_and_everything_happens_once(rig_of: Opens, at: int, after: bool):
    async with rig_of(topics=TOPICS) as rig:
        assert await _dies(rig, at, after=after) == (at < CALLS_MAX)


@pytest.mark.prove
@pytest.mark.requirement("BUS-5", "BUS-7", "BUS-8", "D36")
async def test_a_reconciler_may_die_at_every_single_call(tmp_path: Path):
    for after in (False, True):
        for at in range(CALLS_MAX):
            folder = tmp_path / f"{at}-{after}"
            folder.mkdir()
            async with rigged(Topics.model_validate({"topics": TOPICS}), folder) as rig:
                died = await _dies(rig, at, after=after)
            if not died:
                assert at > 60
                break
        else:
            raise AssertionError(f"the story takes more than {CALLS_MAX} calls")


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "BUS-12")
async def test_three_reconcilers_at_once_act_once(rig_of: Opens):
    """Each sweeps, follows up and publishes as it can; all of it is about the same jobs."""
    async with rig_of(topics=TOPICS) as rig:
        parts = parts_of(rig)
        jobs = [(await parts.dispatched(job_id=f"j{number}", worker_id="w1")).job_id for number in range(20)]
        processes = [parts_of(rig, name=f"r{n}", ledger=await rig.bench.open_another()) for n in range(3)]
        await rig.sweep()
        for _ in range(8):
            await rig.bench.advance(1)
            rig.clock.advance(1)
            await asyncio.gather(*(_all_duties(one) for one in processes))
        await asyncio.gather(*(one.tell() for one in processes))
        states = await parts.jobs()
        assert states == dict.fromkeys(jobs, "TIMEOUT") | {f"{name}.r1": "SCHEDULED" for name in jobs}
        for name in jobs:
            assert await rig.path(name) == ["job_accepted", "job_scheduled", "job_dispatched", "job_timed_out"]
            assert await rig.path(f"{name}.r1") == ["job_accepted", "job_scheduled"]
        assert sorted(result.job_id for result in parts.told) == sorted(jobs)
        assert len(parts.stops) == len(jobs)


async def _all_duties(parts: Parts) -> None:
    sweeper = Sweeper(ledger=parts.ledger, actor=Actor(role=Role.SWEEPER, name="s"), options=SweepOptions(elect=False))
    await asyncio.gather(
        sweeper.run_once(), parts.reconciler.run_once(), parts.publisher.run_once(), parts.renewals.run_once()
    )


@pytest.mark.on_both
@pytest.mark.requirement("BUS-5", "BUS-7", "D36")
async def test_concurrent_reconcilers_submit_the_same_jobs(rig_of: Opens):
    async with rig_of(topics=TOPICS) as rig:
        parts, ledgers = parts_of(rig), [await rig.bench.open_another() for _ in range(2)]

        async def follow_up() -> None:
            both = [parts_of(rig, name=f"r{n}", ledger=ledger).reconciler for n, ledger in enumerate(ledgers)]
            for one in both:
                await one.page()
                await rig.advance(6)  # it still believes that it follows
            for _ in range(CALLS_MAX):
                if not any(report.events for report in await asyncio.gather(*(one.run_once() for one in both))):
                    break
            for one in both:
                await one.release()

        await _story(parts, follow_up)
        assert await parts.fingerprint() == EXPECTED


# --- after a loss ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-12", "D14", "D36")
async def test_rebuild_publishes_and_retries_nothing_again(rig_of: Opens, tmp_path: Path):
    async with rig_of(topics=TOPICS) as rig:
        parts = parts_of(rig)
        await _story(parts, parts.settle)
        told = len(parts.told)
        assert told == 8
        objects = await open_objects(f"file://{tmp_path / 'objects'}")
        by = Actor(role=Role.PROJECTOR, name="projector")
        projector = Projector(ledger=rig.ledger, actor=by, publisher=Documents(objects), clock=rig.clock)
        while (await projector.run_once()).events:
            pass
        await projector.release()
        ledger = await open_ledger(f"sqlite:///{tmp_path / 'another.db'}", clock=rig.clock)
        operator = Actor(role=Role.CONTROL_PLANE, name="operator")
        done = await rebuild_ledger(ledger, objects, operator, tellers=(TELLS_CLIENTS,))
        assert (done.jobs, done.refused) == (len(EXPECTED), 0)
        again = parts_of(rig, name="process-2", ledger=ledger)
        assert await again.follow_up() == 0
        assert {name: [one.type for one in await ledger.events(JobId(name))] for name in EXPECTED} == EXPECTED
        await again.tell()
        assert len(parts.told) == told
        await again.cancel("p")  # what ends from now on is told
        await again.tell()
        assert [result.job_id for result in parts.told[told:]] == ["p"]
        await objects.close()
        await ledger.close()


# --- with the scheduler ----------------------------------------------------------------------------------------------


@pytest.mark.on_both
@pytest.mark.requirement("BUS-7", "BUS-8", "BUS-12", "D36")
async def test_a_workflow_goes_by_its_order_and_is_undone_without_waiting_for_any_clock(rig_of: Opens):
    """Scheduler, worker and reconciler together; time stands still, so every step is let go by the end of the one before it."""
    topics = {TOPIC: {"max_attempts": 2, "backoff_s": 0}, "job.undo": {}}
    async with rig_of(topics=topics) as rig:
        parts, worker = parts_of(rig), await rig.worker("w1", TOPIC, "job.undo", direct=False)
        for index in range(1, 6):
            said = {"workflow_id": "wf", "step_index": index, "parent_job_id": "p", "compensation": UNDO}
            await rig.submit(job_id=f"s{index}", **said)
        ends = {"s2": [Status.FAILED_RETRYABLE], "s4": [Status.FAILED_FATAL]}
        done: list[str] = []
        for _ in range(CALLS_MAX):
            await rig.run()
            orders, worker.orders = worker.orders, []
            for order in orders:
                name = order.request.env["job_id"]
                done.append(name)
                status = ends[name].pop() if ends.get(name) else Status.SUCCEEDED
                await parts.result(order.request.job_id, "w1", status)
            if not await parts.follow_up() and not orders:
                break
        assert done == ["s1", "s2", "s2.r1", "s3", "s4", "s3.c", "s2.r1.c", "s1.c"]
        await parts.settle()
        told = {result.job_id: result.status for result in parts.told}
        assert len(told) == len(parts.told) == 9
        assert (told["s4"], told["s5"], told["s1.c"]) == (Status.FAILED_FATAL, Status.CANCELLED, Status.SUCCEEDED)

"""Our worker under our own control plane: what the ledger says is what runs, once, and what ran is what the ledger has."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from tests.bus.rig import SENDER, Rig, quiet
from tests.worker.on_bus_rig import Kept, Line
from trellis.bus.messages import Status, direct_subject
from trellis.bus.outcomes.attempts import AttemptCache, StopNotifier
from trellis.bus.outcomes.result_listener import ResultListener
from trellis.engine.errors import TransientError
from trellis.engine.jobs import Actor, CancelMode, JobId, RequestId
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.on_bus.context import BusContext
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

TOPIC = "job.test"
PATIENCE_S = 30.0
WHOLE_WAY = ["job_accepted", "job_scheduled", "job_dispatched", "job_started", "job_succeeded"]
IDEMPOTENT = {TOPIC: {"idempotent": True, "lease_s": 6, "backoff_s": 1}}


class Held:
    """A handler that waits for the test."""

    def __init__(self) -> None:
        self.begun: list[BusContext] = []
        self.go = asyncio.Event()
        self.app = App()

        @self.app.job(TOPIC)
        async def handler(ctx: BusContext) -> str:
            self.begun.append(ctx)
            await self.go.wait()
            return ctx.worker_id


@asynccontextmanager
async def control_plane(rig: Rig) -> AsyncGenerator[ResultListener]:
    """What hears of results, beside the rig's scheduler."""
    results = ResultListener(
        ledger=rig.ledger,
        bus=rig.bus,
        topics=rig.topics,
        workers=rig.workers,
        clock=rig.clock,
        name="results-1",
        attempts=AttemptCache(rig.ledger),
        stopping=StopNotifier(rig.bus),
    )
    await results.start()
    yield results
    await results.stop()


class Worker:
    """Our worker on the rig's bus, behind a line that can be cut."""

    def __init__(self, rig: Rig, app: App, name: str) -> None:
        self._rig = rig
        self.kept, self.line = Kept(), Line(rig.sender(name))
        ids = count(1)
        self.worker = BusWorker(
            app,
            self.line,
            BusWorkerOptions(ask_s=60, drain_s=0, settle_s=1, cancel_grace_s=0),
            clock=rig.clock,
            new_id=lambda: f"{name}-{next(ids)}",
            resolver=self.kept,
        )


@asynccontextmanager
async def working(rig: Rig, app: App, name: str = "w-1") -> AsyncGenerator[Worker]:
    made = Worker(rig, app, name)
    await made.worker.start()
    await quiet()
    yield made
    draining = asyncio.ensure_future(made.worker.drain())
    await until(rig, draining.done, step_s=0.5)
    await draining


async def until(rig: Rig, holds: Callable[[], Any], *, step_s: float = 0.0) -> None:
    """Wait for the thing itself; each look is a trip to the ledger, and moves the worker's clock by `step_s`."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            if step_s:
                rig.clock.advance(step_s)
            await rig.ledger.job(JobId("nobody"))
            await quiet()


async def state_is(rig: Rig, job_id: str, state: str, *, step_s: float = 0.0) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await rig.state(job_id) != state:
            if step_s:
                rig.clock.advance(step_s)
            await quiet()


async def outlives(rig: Rig, job_id: str, time: timedelta) -> None:
    """Wait until the lease of a running job is longer than that: its worker's reports are on their way."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            job = await rig.ledger.job(JobId(job_id))
            assert job is not None
            assert job.lease_expires_at is not None, job.state
            if job.lease_expires_at > await rig.ledger.now() + time:
                return
            await quiet()


@pytest.mark.requirement("BUS-1", "BUS-2")
async def test_a_job_runs_on_our_worker_and_the_ledger_has_its_report(rig: Rig):
    app = App()

    @app.job(TOPIC)
    async def handler(ctx: Context) -> int:
        return 7

    async with control_plane(rig), working(rig, app) as worker:
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await state_is(rig, job_id, "SUCCEEDED")
        report = await rig.said(job_id, "job_succeeded")
        assert await rig.path(job_id) == WHOLE_WAY
        assert (report["worker_id"], report["status"]) == ("w-1", Status.SUCCEEDED.name)
        assert worker.kept.value(report["result_ptr"]) == 7
        started = [event for event in await rig.events(job_id) if event.type == "job_started"]
        assert [(event.actor, bool(json.loads(event.data or b"{}")["token"])) for event in started] == [("w-1", True)]


@pytest.mark.requirement("BUS-6")
async def test_an_order_that_reaches_two_workers_runs_on_one(rig: Rig):
    held = Held()
    async with control_plane(rig):
        scripted = await rig.worker("silent", TOPIC, direct=False)
        job_id = await rig.submit(TOPIC)
        await rig.run()
        (order,) = scripted.orders
        await scripted.leave()
        async with working(rig, held.app, "w-1"), working(rig, held.app, "w-2"):
            for name in ("w-1", "w-2", "w-1"):
                await rig.bus.publish(direct_subject(name), order, trace_id="t")
            await until(rig, lambda: bool(held.begun))
            held.go.set()
            await state_is(rig, job_id, "SUCCEEDED")
            assert await rig.path(job_id) == WHOLE_WAY
            assert (await rig.said(job_id, "job_succeeded"))["worker_id"] == held.begun[0].worker_id
    assert len(held.begun) == 1


@pytest.mark.requirement("BUS-7", "BUS-13")
async def test_a_transient_error_on_an_idempotent_topic_is_another_attempt_of_the_same_job(
    rig_of: Callable[..., AbstractAsyncContextManager[Rig]],
):
    app, seen = App(), []

    @app.job(TOPIC)
    async def handler(ctx: Context) -> str:
        seen.append((ctx.job_id, ctx.attempt))
        if ctx.attempt == 1:
            raise TransientError("busy")
        return "done"

    async with rig_of(topics=IDEMPOTENT) as rig, control_plane(rig), working(rig, app):
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await state_is(rig, job_id, "SCHEDULED")
        await rig.advance(2)
        await rig.run()
        await state_is(rig, job_id, "SUCCEEDED")
    assert seen == [(job_id, 1), (job_id, 2)]


async def test_a_handler_that_takes_longer_than_its_lease_keeps_its_job(
    rig_of: Callable[..., AbstractAsyncContextManager[Rig]],
):
    held = Held()
    async with rig_of(topics=IDEMPOTENT) as rig, control_plane(rig), working(rig, held.app):
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await until(rig, lambda: bool(held.begun))
        for _ in range(20):
            await rig.advance(1)
            await outlives(rig, job_id, timedelta(seconds=1))
        assert await rig.state(job_id) == "RUNNING"
        held.go.set()
        await state_is(rig, job_id, "SUCCEEDED")
        assert await rig.path(job_id) == WHOLE_WAY


@pytest.mark.requirement("BUS-5", "BUS-6")
async def test_a_worker_that_was_cut_off_learns_that_its_attempt_is_gone(
    rig_of: Callable[..., AbstractAsyncContextManager[Rig]],
):
    held = Held()
    async with rig_of(topics=IDEMPOTENT) as rig, control_plane(rig), working(rig, held.app) as worker:
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await until(rig, lambda: bool(held.begun))
        worker.line.down = True
        await rig.advance(7)
        assert await rig.state(job_id) == "SCHEDULED"
        worker.line.down = False
        await until(rig, lambda: not worker.worker.attempts, step_s=0.5)
        assert not held.begun[0].lease_valid
        held.go.set()
        await rig.advance(2)
        await rig.run()
        await state_is(rig, job_id, "SUCCEEDED")
        assert [ctx.attempt for ctx in held.begun] == [1, 2]
        assert (await rig.path(job_id)).count("job_succeeded") == 1


@pytest.mark.requirement("BUS-6")
async def test_a_result_whose_answer_was_lost_is_one_result(rig: Rig):
    held = Held()
    async with control_plane(rig), working(rig, held.app) as worker:
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await until(rig, lambda: bool(held.begun))
        worker.line.lost_answers = 2
        held.go.set()
        await state_is(rig, job_id, "SUCCEEDED")
        await until(rig, lambda: not worker.worker.attempts, step_s=0.5)
        assert worker.line.lost_answers == 0
        assert await rig.path(job_id) == WHOLE_WAY


@pytest.mark.requirement("BUS-1")
async def test_a_soft_cancel_stops_the_handler_and_then_the_job(rig: Rig):
    held = Held()
    async with control_plane(rig), working(rig, held.app):
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await until(rig, lambda: bool(held.begun))
        asker = Actor(role=Role.SUBMITTER, name="somebody")
        wish = RequestId("stop-it")
        await rig.ledger.cancel(asker, JobId(job_id), CancelMode.SOFT, wish, grace_s=60, cause="not wanted")
        await state_is(rig, job_id, "CANCELLED", step_s=0.5)
        assert (await rig.path(job_id))[-1] == "job_cancelled"


@pytest.mark.requirement("BUS-3")
async def test_control_plane_registers_the_handshake_of_our_worker(rig: Rig):
    held = Held()
    async with control_plane(rig), working(rig, held.app):
        job_id = await rig.submit(TOPIC)
        await rig.run()
        await until(rig, lambda: bool(held.begun))
        assert (await rig.said(job_id, "job_dispatched"))["subject"] == direct_subject("w-1")
        assert rig.bus.sender_id == SENDER
        held.go.set()
        await state_is(rig, job_id, "SUCCEEDED")

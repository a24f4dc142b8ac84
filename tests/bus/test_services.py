"""The parts of the bus joined as `trellis up` joins them: one job all the way, by roles in one process and in two."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trellis import App, Context, PermanentError
from trellis.app.wiring import SystemClock, connect, new_id
from trellis.auth.principals import Principal
from trellis.bus.messages import RESULT, SUBMIT, JobResult, Status
from trellis.bus.pointers import make_pointers
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import JobRequest
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.services import BusDependencies, BusRole, BusServices
from trellis.bus.submitter import BacklogLimit, BusSubmitter
from trellis.bus.topics import Topics
from trellis.bus.wire.local import LocalBus
from trellis.client import Trellis
from trellis.engine.errors import JobFailed, PayloadInvalid
from trellis.engine.ledger import Ledger
from trellis.engine.service import serve
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.storage.objects.open import open_objects
from trellis.worker.on_bus.worker import BusWorker
from trellis.worker.options import BusWorkerOptions

PATIENCE_S = 30.0


def shop() -> App:
    app = App(testing=True)

    @app.job("job.echo")
    async def echo(ctx: Context, text: str) -> str:
        return text

    @app.job("job.broken")
    async def broken(ctx: Context) -> None:
        raise PermanentError("closed")

    return app


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRELLIS_OBJECTS", f"file://{tmp_path / 'objects'}")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    made: Callable[..., str] = request.getfixturevalue("new_postgres_database")
    return made(template=request.getfixturevalue("postgres_template"))


@asynccontextmanager
async def served(ledger: Ledger, bus: LocalBus, roles: frozenset[BusRole], name: str) -> AsyncGenerator[BusServices]:
    clock, stop = SystemClock(), asyncio.Event()
    parts = BusDependencies(
        ledger=ledger, bus=bus, topics=Topics(), kernel=PolicyKernel(), clock=clock, new_id=new_id, name=name
    )
    services = BusServices(parts, roles)
    await services.start()
    tasks = [asyncio.create_task(serve(one, clock, random.Random(1), stop)) for one in services.services]
    try:
        yield services
    finally:
        stop.set()
        await asyncio.gather(*tasks)
        await services.stop()


@asynccontextmanager
async def fleet(
    url: str, objects: Path, *split: frozenset[BusRole], app: App | None = None
) -> AsyncGenerator[tuple[Trellis, LocalBus]]:
    """Processes with these roles on one bus, and a worker of this application, by default of the shop."""
    async with AsyncExitStack() as stack:
        bus = LocalBus("trellis", clock=SystemClock(), now=lambda: datetime.now(UTC))
        for number, roles in enumerate(split):
            ledger = await open_ledger(url)
            stack.push_async_callback(ledger.close)
            sender = bus if number == 0 else bus.sibling("trellis")
            await stack.enter_async_context(served(ledger, sender, roles, f"up@test:{number}"))
        store = await open_objects(f"file://{objects}")
        stack.push_async_callback(store.close)
        worker = BusWorker(
            app or shop(),
            bus.sibling("shop-1"),
            BusWorkerOptions(),
            clock=SystemClock(),
            new_id=new_id,
            resolver=make_pointers(store, None),
        )
        await stack.enter_async_context(worker)
        yield await stack.enter_async_context(connect(url)), bus


BOTH = frozenset(BusRole)
SPLITS = [(BOTH,), (frozenset({BusRole.SCHEDULER}), frozenset({BusRole.RECONCILER}))]


@pytest.mark.requirement("BUS-1", "BUS-2", "BUS-12")
@pytest.mark.parametrize("split", SPLITS, ids=["together", "apart"])
async def test_jobs_go_all_the_way_and_clients_hear_how_they_ended(
    url: str, tmp_path: Path, split: tuple[frozenset[BusRole], ...]
):
    async with fleet(url, tmp_path / "objects", *split) as (trellis, bus):
        heard: asyncio.Queue[JobResult] = asyncio.Queue()

        async def on_result(received: ReceivedPacket) -> None:
            if isinstance(received.packet.body, JobResult) and received.packet.sender_id == "trellis":
                heard.put_nowait(received.packet.body)

        client = bus.sibling("client")
        await client.listen(RESULT, on_result)
        good = await trellis.submit_topic("job.echo", "hello", tenant_id="acme", correlation_id="press-1")
        report = await good.result(timeout_s=PATIENCE_S)
        assert (report["status"], report["worker_id"]) == ("SUCCEEDED", "shop-1")
        bad = await trellis.submit_topic("job.broken", returns=dict)
        with pytest.raises(JobFailed, match="closed"):
            await bad.result(timeout_s=PATIENCE_S)
        request = JobRequest.checked({"job_id": "over-the-bus", "topic": "job.broken", "principal_id": "client"})
        await client.publish(SUBMIT, request, trace_id="t-1")
        told = {(one.job_id, one.status) for one in [await asyncio.wait_for(heard.get(), PATIENCE_S) for _ in range(3)]}
        failed = {(bad.id, Status.FAILED), ("over-the-bus", Status.FAILED)}
        assert {(job_id, min(status, Status.FAILED)) for job_id, status in told} == {
            (good.id, Status.SUCCEEDED),
            *failed,
        }
        assert [event.correlation_id for event in await good.events()] == ["press-1"] * 5
        assert (await verify(trellis.ledger)).ok


@pytest.mark.requirement("BUS-2", "BUS-12")
async def test_a_job_that_runs_while_the_only_scheduler_is_stopped_ends_with_its_result(url: str, tmp_path: Path):
    """The process of the reconciler records what the worker reports; nobody takes the job back."""
    began, may_end = asyncio.Event(), asyncio.Event()
    app = App(testing=True)

    @app.job("job.slow")
    async def slow(ctx: Context) -> str:
        began.set()
        await may_end.wait()
        return "done"

    async with (
        AsyncExitStack() as scheduler,
        fleet(url, tmp_path / "objects", frozenset({BusRole.RECONCILER}), app=app) as (trellis, bus),
    ):
        sender = bus.sibling("trellis")
        await scheduler.enter_async_context(
            served(trellis.ledger, sender, frozenset({BusRole.SCHEDULER}), "scheduler@test")
        )
        job = await trellis.submit_topic("job.slow")
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        await scheduler.aclose()
        may_end.set()
        assert (await job.result(timeout_s=PATIENCE_S))["status"] == "SUCCEEDED"
        assert (await verify(trellis.ledger)).ok


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("payload", [{1, 2}, b"x", float("nan"), "half \ud800", {"a": object()}, {(1, 2): 3}])
async def test_a_payload_that_json_cannot_hold_is_refused_and_nothing_is_stored(tmp_path: Path, payload: Any):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    ledger = await open_ledger(":memory:")
    room = BacklogLimit(ledger=ledger, clock=SystemClock())
    asking = BusSubmitter(topics=Topics(), pointers=make_pointers(objects, None), room=room, new_id=new_id)
    try:
        with pytest.raises(PayloadInvalid, match=r"job\.echo"):
            await asking.job({"topic": "job.echo"}, payload=payload, principal=Principal(name="me", roles=frozenset()))
        assert not (await objects.list("bus/")).items
    finally:
        await ledger.close()
        await objects.close()


async def test_submit_in_the_same_process_wakes_the_scheduler(tmp_path: Path):
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    ledger, woken = await open_ledger(":memory:"), list[str]()

    @asynccontextmanager
    async def asking() -> AsyncGenerator[BusSubmitter]:
        room = BacklogLimit(ledger=ledger, clock=SystemClock())
        yield BusSubmitter(topics=Topics(), pointers=make_pointers(objects, None), room=room, new_id=new_id)

    principal = Principal(name="here", roles=frozenset({Role.SUBMITTER}))
    trellis = Trellis(
        ledger,
        principal,
        clock=SystemClock(),
        new_id=new_id,
        asking=asking,
        accepted=lambda: woken.append("now"),
    )
    try:
        for _ in range(2):
            await trellis.submit_topic("job.echo", "hello", job_id="mine")
        assert woken == ["now"], "what was there already is nothing new"
    finally:
        await ledger.close()
        await objects.close()

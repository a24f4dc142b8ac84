"""The same code on PostgreSQL, in real time: driver, projector and orchestrators beside each other."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from tests.runs.conftest import GATEWAY, Steps
from trellis.app.wiring import SystemClock
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.documents.run_documents import RunRequest
from trellis.engine.admin_acts import MIGRATED
from trellis.engine.extras import program_version
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.lease_runner import LeaseHeartbeat, ProcessReport
from trellis.engine.ledger import Ledger
from trellis.engine.service import serve
from trellis.engine.verify import verify
from trellis.ledgers import migrate, open_ledger
from trellis.lifecycles import Role
from trellis.operations.explain import WorkerPresence, worker_presence
from trellis.runs.orchestrator import TYPE, Orchestrator, OrchestratorOptions, RunDriver, RunDriverOptions
from trellis.runs.projector import Projector
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

AGENTS = 3
RUNS_EACH = 4


@pytest.fixture
async def ledger(new_postgres_database: Callable[..., str]) -> AsyncGenerator[Ledger]:
    url = new_postgres_database()
    await migrate(url)
    opened = await open_ledger(url)
    yield opened
    report = await verify(opened)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await opened.close()


def services(ledger: Ledger, objects: ObjectStore, steps: Steps, name: str) -> list[object]:
    """An orchestrator process: it drives, renews, and stands by as a projector."""
    clock, numbers = SystemClock(), itertools.count()
    actor = Actor(role=Role.ORCHESTRATOR, name=name)
    driver = RunDriver(
        ledger=ledger,
        actor=actor,
        clock=clock,
        steps=steps.mapping(),
        published=PublishedRuns(objects, clock).reached,
        options=RunDriverOptions(),
    )
    orchestrator = Orchestrator(
        ledger=ledger,
        actor=actor,
        clock=clock,
        driver=driver,
        new_id=lambda: f"{name}-{next(numbers)}",
        options=OrchestratorOptions(poll_s=0.05),
    )
    projector = Projector(
        ledger=ledger,
        actor=Actor(role=Role.PROJECTOR, name=f"projector-{name}"),
        publisher=DocumentPublisher(objects),
        clock=clock,
    )
    return [orchestrator, LeaseHeartbeat(holder=orchestrator, name="run-heartbeat"), projector]


@pytest.mark.requirement("PIPE-3", "OBS-1", "D14")
async def test_two_orchestrators_finish_the_runs_of_several_agents(ledger: Ledger, tmp_path: Path):
    objects, steps = await open_objects(f"file://{tmp_path / 'objects'}"), Steps()
    held: dict[str, int] = {}
    most = 0

    async def alone(context, /):
        nonlocal most
        slug = context.request.agent_slug
        held[slug] = held.get(slug, 0) + 1
        most = max(most, held[slug])
        await asyncio.sleep(0)
        held[slug] -= 1
        return await usual(context)

    usual, steps.acts["execute-agent"] = steps.acts["execute-agent"], alone
    runs = [
        (f"agent-{agent}", JobId(f"run_2026-02-14_08000{agent}_{number:06}"))
        for number in range(RUNS_EACH)
        for agent in range(AGENTS)
    ]
    await ledger.submit(
        GATEWAY,
        [
            NewJob(
                job_id=run_id,
                type=TYPE,
                lifecycle="run",
                payload=RunRequest(slug, "manual", {}).to_bytes(),
                concurrency_key=f"run:{slug}",
            )
            for slug, run_id in runs
        ],
    )
    stop = asyncio.Event()
    everything = [*services(ledger, objects, steps, "one"), *services(ledger, objects, steps, "two")]
    serving = [
        asyncio.ensure_future(serve(service, SystemClock(), random.Random(1), stop))  # type: ignore[arg-type]
        for service in everything
    ]
    published = PublishedRuns(objects, SystemClock())
    try:
        async with asyncio.timeout(60):
            for slug, run_id in runs:
                await published.reached(slug, run_id, 8)
    finally:
        stop.set()
        await asyncio.gather(*serving)
    assert most == 1, "two runs of one agent at a time"
    assert set(steps.done.values()) == {len(runs)}
    for slug, run_id in runs:
        status = await published.status(slug, run_id)
        assert status is not None
        assert (status["status"], status["steps_completed"]) == ("completed", 4)
        manifest = await objects.get(ids.manifest_key(slug, run_id))
        assert manifest is not None
        assert json.loads(manifest.body)["status"] == "completed"
    events, acts = (await ledger.feed(None, limit=500)).events, await ledger.acts()
    assert (len(events), [act.event for act in acts]) == (8 * len(runs), [MIGRATED])
    keys = [info.key for info in (await objects.list("audit/")).items]
    moments = [*((event.ts, event.id) for event in events), *((act.at, act.id) for act in acts)]
    assert sorted(keys) == sorted(ids.audit_key(*one) for one in moments)
    await objects.close()


async def test_an_orchestrator_that_stops_in_order_is_no_lost_worker(ledger: Ledger, tmp_path: Path):
    """Its heartbeats put it into the list of workers, which alerts about lost workers read."""
    objects, steps, may_end = await open_objects(f"file://{tmp_path / 'objects'}"), Steps(), asyncio.Event()

    async def waits(context, /):
        await may_end.wait()
        return await usual(context)

    usual, steps.acts["execute-agent"] = steps.acts["execute-agent"], waits
    payload = RunRequest("violin", "manual", {}).to_bytes()
    run = NewJob(job_id=JobId("run_2026-02-14_080000_000000"), type=TYPE, lifecycle="run", payload=payload)
    await ledger.submit(GATEWAY, [run])
    made = services(ledger, objects, steps, "one")
    orchestrator = made[0]
    assert isinstance(orchestrator, Orchestrator)
    while orchestrator.is_idle:
        await orchestrator.run_once()
    assert await orchestrator.renew() == 1
    await ProcessReport(holder=orchestrator, name="run-report").run_once()
    (worker,) = await ledger.workers()
    assert json.loads(worker.info or b"") == {"version": program_version(), "drives": True}
    await orchestrator.drain()
    (worker,) = await ledger.workers()
    assert worker_presence(worker, await ledger.now()) is WorkerPresence.DRAINED
    await objects.close()

"""Agent runs of four steps without work of their own: the orchestrator and the driver as the platform runs them.

With a folder for objects the projector publishes beside them, and every step waits until readers can see it; without
one a run is durable in the ledger and nobody publishes it.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import trellis.ledgers.postgres.ledger
import trellis.ledgers.sqlite.ledger
import trellis.storage.objects.local  # noqa: F401 - as above
from bench.marks import Marker
from bench.task import Task
from trellis.app.wiring import SystemClock, new_id, process_name
from trellis.cli.long_running import tune_server
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.documents.run_documents import RunRequest
from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.lease_runner import LeaseHeartbeat
from trellis.engine.ledger import Ledger
from trellis.engine.service import serve
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.lifecycles.run import RUN
from trellis.runs.orchestrator import (
    TYPE,
    Orchestrator,
    OrchestratorOptions,
    RunDriver,
    RunDriverOptions,
    RunStep,
    StepContext,
    StepResult,
    accept,
)
from trellis.runs.projector import Projector
from trellis.storage.objects.open import open_objects

AGENTS = 200
"""One run of an agent at a time: twice as many agents as two processes have runs in flight, so that there is always one to take."""
ACCEPTED_AT_ONCE = 50
Wait = Callable[[str, str, int], Coroutine[Any, Any, None]]
OUTPUT = b'{"proposals": [], "summary": null}\n'


def names(runs: int) -> list[tuple[str, JobId]]:
    """The agent and the id of every run."""
    return [(f"agent-{n % AGENTS}", JobId(f"run_2026-02-14_080000_{n:06}")) for n in range(runs)]


async def bulk(task: Task) -> None:
    """Write the runs down and have them queued."""
    ledger = await open_ledger(task.url)
    gateway = Actor(role=Role.GATEWAY, name=process_name("bench"))
    orchestrator = Actor(role=Role.ORCHESTRATOR, name=process_name("bench"))
    try:
        for first in range(0, task.jobs, task.batch):
            some = names(task.jobs)[first : first + task.batch]
            await ledger.submit(gateway, [_new(slug, run_id) for slug, run_id in some])
            for at in range(0, len(some), ACCEPTED_AT_ONCE):
                together = some[at : at + ACCEPTED_AT_ONCE]
                await asyncio.gather(*(accept(ledger, orchestrator, run_id) for _, run_id in together))
    finally:
        await ledger.close()


def _new(slug: str, run_id: JobId) -> NewJob:
    payload = RunRequest(slug, "manual", {}).to_bytes()
    return NewJob(job_id=run_id, type=TYPE, lifecycle=RUN.name, payload=payload, concurrency_key=f"run:{slug}")


async def worker(task: Task) -> None:
    """One process of the platform, until it is ended."""
    tune_server()
    ledger, clock = await open_ledger(task.url), SystemClock()
    objects = await open_objects(Path(task.objects).as_uri()) if task.objects else None
    published, services = at_once, []
    if objects is not None:
        publisher, actor = DocumentPublisher(objects), Actor(role=Role.PROJECTOR, name=process_name("bench"))
        published = PublishedRuns(objects, clock, publisher).reached
        services.append(Projector(ledger=ledger, actor=actor, publisher=publisher, clock=clock))
    orchestrator = _orchestrator(ledger, published, clock, task)
    services += (orchestrator, LeaseHeartbeat(holder=orchestrator, name="run-heartbeat"))
    rng, never = random.Random(1), asyncio.Event()
    await asyncio.gather(*(serve(service, clock, rng, never) for service in services))


def _orchestrator(ledger: Ledger, published: Wait, clock: Clock, task: Task) -> Orchestrator:
    actor = Actor(role=Role.ORCHESTRATOR, name=process_name("bench"))
    driver = RunDriver(
        ledger=ledger,
        actor=actor,
        clock=clock,
        steps=_steps(task),
        published=published,
        options=RunDriverOptions(),
    )
    options = OrchestratorOptions(concurrency=task.concurrency)
    return Orchestrator(ledger=ledger, actor=actor, clock=clock, driver=driver, new_id=new_id, options=options)


async def at_once(slug: str, run_id: str, version: int) -> None:
    """Nobody publishes, so nothing is waited for."""


def _steps(task: Task) -> dict[str, RunStep]:
    """The first marks that a run began; the third leaves an output, because every run has one."""
    mark = Marker(task.folder).mark

    async def load(context: StepContext, /) -> StepResult:  # noqa: ARG001 - the shape of a step
        mark(0)
        return StepResult(result={})

    async def execute(context: StepContext, /) -> StepResult:  # noqa: ARG001 - as above
        return StepResult(result={"summary": None})

    async def persist(context: StepContext, /) -> StepResult:  # noqa: ARG001 - as above
        return StepResult(result={}, output=OUTPUT)

    async def finalize(context: StepContext, /) -> StepResult:  # noqa: ARG001 - as above
        return StepResult(result={})

    return dict(zip(ids.STEPS, (load, execute, persist, finalize), strict=True))

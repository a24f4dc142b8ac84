"""The same on PostgreSQL: its database is dropped and comes back from the object store; the store is wiped and comes back from it."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Steps
from tests.runs.test_audit_segments import SUBMITTER, WORKER
from tests.runs.test_rebuild import ADMIN, SWEEPER, bucket, without_cuts
from tests.servers.postgres import PostgresServer
from tests.stopped_tasks import stopped
from trellis.app.wiring import SystemClock
from trellis.documents import audit, ids
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.documents.run_documents import RunRequest
from trellis.engine.admin_acts import MIGRATED
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    LeaseLost,
    NewJob,
    Turn,
    TypeClaim,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import migrate, open_ledger
from trellis.lifecycles import Role
from trellis.runs.orchestrator import TYPE, RunDriver, RunDriverOptions, accept
from trellis.runs.projector import Projector
from trellis.runs.rebuild import rebuild_ledger, rebuild_objects
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

SLUG = "archivist-violin"
EVERYTHING = ("",)
numbers = itertools.count(1)


@pytest.fixture
async def ledgers(postgres_server: PostgresServer) -> AsyncGenerator[tuple[Ledger, Ledger]]:
    """A ledger that will be lost, and one to take its place."""
    opened: list[Ledger] = []
    for name in ("lost", "found"):
        url = postgres_server.create_database(f"rebuild_{name}")
        await migrate(url)
        opened.append(await open_ledger(url))
    yield opened[0], opened[1]
    for ledger in opened:
        await ledger.close()


async def claim(ledger: Ledger, by: Actor, type_: str, lifecycle: str = "leased-job") -> Claimed:
    asked = Claim(claim_id=ClaimId(f"c{next(numbers)}"), types=(TypeClaim(type=type_),), lifecycle=lifecycle)
    (held,) = (await ledger.turn(Turn(actor=by, claim=asked))).claimed
    return held


async def complete(ledger: Ledger, held: Claimed, by: Actor = WORKER) -> object:
    return (await ledger.turn(Turn(actor=by, advances=(Advance(held.lease, "running", "complete"),)))).outcomes[0]


def driver(ledger: Ledger, objects: ObjectStore, steps: Steps) -> RunDriver:
    return RunDriver(
        ledger=ledger,
        actor=ORCHESTRATOR,
        clock=SystemClock(),
        steps=steps.mapping(),
        published=PublishedRuns(objects, SystemClock()).reached,
        options=RunDriverOptions(),
    )


async def drive(ledger: Ledger, objects: ObjectStore, steps: Steps, *, until_version: int | None = None) -> None:
    """Drive what was claimed with a projector beside it; leave it at a version, or end it."""
    projector = Projector(
        ledger=ledger,
        actor=Actor(role=Role.PROJECTOR, name=f"p{next(numbers)}"),
        publisher=DocumentPublisher(objects),
        clock=SystemClock(),
    )
    claimed = await claim(ledger, ORCHESTRATOR, TYPE, "run")
    driving = asyncio.ensure_future(driver(ledger, objects, steps).drive(claimed))
    async with asyncio.timeout(60):
        while not driving.done():
            await projector.run_once()
            job = await ledger.job(claimed.lease.job_id)
            if until_version is not None and job is not None and job.version >= until_version:
                driving.cancel()
                await stopped(driving)
        while (await projector.run_once()).events:
            pass
    await projector.release()


@pytest.mark.requirement("D14", "D35", "OBS-1", "PIPE-8")
async def test_a_dropped_database_comes_back_and_then_a_wiped_store(ledgers: tuple[Ledger, Ledger], tmp_path: Path):
    lost, found = ledgers
    objects, steps = await open_objects(f"file://{tmp_path / 'objects'}"), Steps()
    runs = [JobId(f"run_2026-02-14_080000_{number:06}") for number in range(2)]
    for run_id in runs:
        payload = RunRequest(SLUG, "manual", {}).to_bytes()
        run = NewJob(job_id=run_id, type=TYPE, lifecycle="run", payload=payload, concurrency_key=f"run:{SLUG}")
        await lost.submit(GATEWAY, [run])
        await accept(lost, ORCHESTRATOR, run_id)
    await lost.submit(SUBMITTER, [NewJob(job_id=JobId(f"job-{n}"), type="work") for n in range(20)])
    await complete(lost, await claim(lost, WORKER, "work"))
    held = await claim(lost, WORKER, "work")
    await drive(lost, objects, steps)
    await drive(lost, objects, steps, until_version=5)
    before = await bucket(objects, EVERYTHING)
    (made,) = await found.acts()
    assert made.event == MIGRATED

    done = await rebuild_ledger(found, objects, ADMIN)
    assert (done.jobs, done.refused) == (22, 0)
    report = await verify(found)
    assert report.ok, report.violations
    own = {ids.audit_key(made.at, made.id): audit.act_to_bytes(made)}
    assert await bucket(objects, EVERYTHING) == before | own, "only the act that made the new database is added"
    assert await complete(found, held) == LeaseLost(held.lease)
    await found.sweep(SWEEPER, SweepOptions(elect=False))
    counted = steps.done["load-context"]
    await drive(found, objects, steps)
    assert steps.done["load-context"] == counted, "a counted step was done again"
    again = await found.job(runs[1])
    assert again is not None
    assert again.state == "completed"
    for _ in range(19):
        one = await claim(found, WORKER, "work")
        assert one.attempt == int(one.lease.job_id == held.lease.job_id)
        await complete(found, one)

    await publish(found, objects)
    wiped = await bucket(objects, EVERYTHING)
    for key in wiped:
        await objects.delete(key)
    await rebuild_objects(found, objects, ADMIN)
    assert without_cuts(await bucket(objects, EVERYTHING)) == without_cuts(wiped)
    assert (await verify(found)).ok
    await objects.close()


async def publish(ledger: Ledger, objects: ObjectStore) -> None:
    """Publish what there is."""
    actor = Actor(role=Role.PROJECTOR, name=f"p{next(numbers)}")
    projector = Projector(ledger=ledger, actor=actor, publisher=DocumentPublisher(objects), clock=SystemClock())
    while (await projector.run_once()).events:
        pass
    await projector.release()

"""The rig of the built-in layer: real services on a real SQLite ledger, in one process, on a clock that only the test moves."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import asyncpg

from tests.layers.rig import GRACE_S, RUNS_AT_ONCE, WAITING_MAX, Rig
from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Steps
from tests.stopped_tasks import stopped
from trellis.agents.catalog import Catalog
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.orchestration import BuiltinLayer
from trellis.runs.orchestrator import TYPE, Orchestrator, OrchestratorOptions, RunDriver, RunDriverOptions
from trellis.runs.projector import Projector
from trellis.runs.schedules import ScheduleFirer, ScheduleOptions
from trellis.runs.timetable import Timetable
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

ROUNDS = 3
"""In one round a run is taken up, in the next its last event is published; the third finds nothing to do."""
SWEEPER = Actor(role=Role.SWEEPER, name="sweeper@test")


@dataclass(frozen=True)
class Process:
    """What one orchestrator process runs."""

    orchestrator: Orchestrator
    schedules: ScheduleFirer


class BuiltinRig(Rig):
    def __init__(self, ledger: Ledger, objects: ObjectStore, clock: FakeClock) -> None:
        self.ledger, self.objects, self.clock = ledger, objects, clock
        self.steps = Steps()
        self._numbers = itertools.count(1)
        self._processes: list[Process] = []
        self._published = asyncio.Event()
        self.layer = self._layer()
        self.restart_projector()

    def restart_projector(self) -> None:
        """A projector that begins where the ledger says that the one before it came to."""
        self._projector = Projector(
            ledger=self.ledger,
            actor=Actor(role=Role.PROJECTOR, name="projector@test"),
            publisher=DocumentPublisher(self.objects),
            clock=self.clock,
        )

    def _layer(self) -> BuiltinLayer:
        return BuiltinLayer(
            ledger=self.ledger,
            gateway=GATEWAY,
            orchestrator=ORCHESTRATOR,
            catalog=Catalog(self.objects),
            publisher=DocumentPublisher(self.objects),
            timetable=Timetable(objects=self.objects),
            # Falling, so that no order rests on the order of names.
            random_text=lambda: f"{0xFFFFFF - next(self._numbers):06x}",
            waiting_max=WAITING_MAX,
        )

    async def start(self) -> None:
        orchestrator = await self._orchestrator(f"orchestrator-{next(self._numbers)}@test")
        layer = self._layer()
        schedules = ScheduleFirer(
            ledger=self.ledger, layer=layer, timetable=layer.timetable, options=ScheduleOptions(grace_s=GRACE_S)
        )
        self._processes.append(Process(orchestrator, schedules))
        await self.settle()

    async def _orchestrator(self, name: str) -> Orchestrator:
        """The orchestrator of a new process."""
        actor = Actor(role=Role.ORCHESTRATOR, name=name)
        driver = RunDriver(
            ledger=self.ledger,
            actor=actor,
            clock=self.clock,
            steps=self.steps.mapping(),
            published=self._reached,
            options=RunDriverOptions(),
        )
        return Orchestrator(
            ledger=self.ledger,
            actor=actor,
            clock=self.clock,
            driver=driver,
            new_id=lambda: f"{name}-{next(self._numbers)}",
            options=OrchestratorOptions(),
        )

    async def kill(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.orchestrator.claiming = False
            drives = [driving.task for driving in process.orchestrator._driving.values()]
            for drive in drives:
                drive.cancel()
            await stopped(*drives)

    async def pass_time(self, seconds: float) -> None:
        # Second by second while something is held: a jump would look like an outage to the sweeper, and be forgiven.
        held = any(queue.held for queue in await self.ledger.queues())
        for step_s in itertools.repeat(1.0, int(seconds)) if held else (seconds,):
            await self._advance(step_s)
            await self._round()
        await self.settle()

    async def _advance(self, seconds: float) -> None:
        """Move the ledger's clock and the processes' clock, which here are one."""
        self.clock.advance(seconds)

    async def settle(self) -> None:
        for _ in range(ROUNDS):
            await self._round()

    async def _round(self) -> None:
        for process in self._processes:
            await process.orchestrator.renew()
            await process.orchestrator.run_once()
        await asyncio.gather(*(process.schedules.run_once() for process in self._processes))
        await self.ledger.sweep(SWEEPER, SweepOptions(elect=False))
        await self._projector.run_once()
        told, self._published = self._published, asyncio.Event()
        told.set()

    async def _reached(self, slug: str, run_id: str, version: int) -> None:
        """Waits for the projector itself: time stands still while it works, however slow the machine is."""
        published = PublishedRuns(self.objects, self.clock)
        while (await published.status(slug, run_id) or {"version": 0})["version"] < version:
            await self._published.wait()


class PostgresRig(BuiltinRig):
    """The built-in layer on PostgreSQL, whose clock the test moves as well."""

    def __init__(self, ledger: Ledger, objects: ObjectStore, clock: FakeClock, admin: Any) -> None:
        super().__init__(ledger, objects, clock)
        self._admin = admin

    async def _advance(self, seconds: float) -> None:
        await self._admin.execute("UPDATE trellis.test_clock SET at = at + make_interval(secs => $1)", seconds)
        await super()._advance(seconds)


@asynccontextmanager
async def on_sqlite(
    folder: Path, new_rig: Callable[[Ledger, ObjectStore, FakeClock], BuiltinRig]
) -> AsyncGenerator[Rig]:
    """A layer on an SQLite ledger."""
    clock = FakeClock()
    ledger = await open_ledger(f"sqlite:///{folder / 'ledger.db'}", clock=clock)
    async with _opened(folder, ledger, lambda objects: new_rig(ledger, objects, clock)) as rig:
        yield rig


@asynccontextmanager
async def on_postgres(folder: Path, url: str) -> AsyncGenerator[Rig]:
    """The built-in layer on a PostgreSQL ledger."""
    admin: Any = await asyncpg.connect(url)  # type: ignore[reportUnknownMemberType]  # it has no types
    try:
        await admin.execute((files("trellis.ledgers.postgres") / "scripts" / "test_clock.sql").read_text())
        await admin.execute("GRANT SELECT ON trellis.test_clock TO PUBLIC")
        ledger = await open_ledger(url)
        async with _opened(folder, ledger, lambda objects: PostgresRig(ledger, objects, FakeClock(), admin)) as rig:
            yield rig
    finally:
        await admin.close()


@asynccontextmanager
async def _opened(
    folder: Path, ledger: Ledger, new_rig: Callable[[ObjectStore], BuiltinRig]
) -> AsyncGenerator[BuiltinRig]:
    """A rig on this ledger, which must be clean in the end."""
    objects = await open_objects(f"file://{folder / 'objects'}")
    await ledger.limit_held(ORCHESTRATOR, TYPE, RUNS_AT_ONCE)
    rig = new_rig(objects)
    try:
        yield rig
        report = await verify(ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
    finally:
        await rig.kill()
        await objects.close()
        await ledger.close()

"""The rig of the Temporal layer: the built-in rig's ledger and clock, with a real Temporal server between the steps."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.worker._workflow_instance import _WorkflowLogicFlag

from tests.layers.builtin import BuiltinRig, on_sqlite
from tests.servers.temporal import TemporalServer
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.lifecycles import Role
from trellis.runs.orchestrator import Orchestrator, OrchestratorOptions, RunDriverOptions
from trellis.runs.temporal.connection import connect
from trellis.runs.temporal.driver import TemporalRunDriver
from trellis.runs.temporal.layer import TemporalLayer
from trellis.runs.temporal.options import TemporalOptions
from trellis.runs.temporal.worker import TemporalOrchestrator, TemporalWorker
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

ANSWER_S = 0.02
"""How long one look at the world waits for the server, which works in its own time."""
KILLS_MAX = 3
"""How often the server is killed in one test, at most."""
KILL_EVERY = 20
"""How often the processes settle between two kills of the server."""
BATCH = _WorkflowLogicFlag.PROCESS_WORKFLOW_ACTIVATION_JOBS_AS_SINGLE_BATCH
_numbers = itertools.count(1)


class TemporalRig(BuiltinRig):
    def __init__(self, ledger: Ledger, objects: ObjectStore, clock: FakeClock, server: TemporalServer) -> None:
        self.options = TemporalOptions(
            address=server.address, queue=f"runs-{next(_numbers)}", heartbeat_s=1.0, silence_s=3.0
        )
        super().__init__(ledger, objects, clock)
        self.folder = Path()
        """Where the ledger's file is, and the objects beside it."""
        self.driver_options = RunDriverOptions()
        self.polls = True
        """Whether a new process polls the server. Without it, the process claims runs and executes nothing."""
        self._workers: list[TemporalWorker] = []
        self._happened = asyncio.Event()

    def _layer(self) -> TemporalLayer:
        usual = super()._layer()
        return TemporalLayer(**{part.name: getattr(usual, part.name) for part in fields(usual)}, temporal=self.options)

    async def _orchestrator(self, name: str) -> Orchestrator:
        driver = TemporalRunDriver(
            ledger=self.ledger,
            actor=Actor(role=Role.ORCHESTRATOR, name=name),
            clock=self.clock,
            steps=self.steps.mapping(),
            published=self._reached,
            options=self.driver_options,
            temporal=self.options,
            queue=f"{self.options.queue}/{name}",
        )
        worker = TemporalWorker(driver=driver, clock=self.clock)
        self._workers.append(worker)
        if self.polls:
            await worker.run_once()
        else:
            driver.client, worker.is_connected = await connect(self.options), True
        return TemporalOrchestrator(
            ledger=self.ledger,
            actor=driver.actor,
            clock=self.clock,
            driver=driver,
            worker=worker,
            new_id=lambda: f"{name}-{next(self._numbers)}",
            options=OrchestratorOptions(),
        )

    def workflow(self, run_id: JobId) -> WorkflowHandle[Any, Any]:
        """The run's workflow, as the server has it."""
        client = next(worker.driver.client for worker in self._workers)
        assert client is not None
        return client.get_workflow_handle(self.options.workflow_id(run_id))

    async def poll(self) -> None:
        """Let every process poll the server. Signals and results that a workflow gets together are one batch for it.

        The SDK announces that this becomes its default. Until then it delivers the signals first.
        """
        for worker in self._workers:
            await worker._begin()
            worker._workers[0]._set_default_workflow_logic_flag(BATCH, enabled=True)

    async def hang_before_failing(self) -> None:
        """Let no process continue a workflow from now on, nor write to the ledger that a run failed."""

        async def hangs(*_: str) -> Any:
            return await asyncio.get_running_loop().create_future()

        for worker in self._workers:
            await worker._workers[0].shutdown()
            worker.driver.artifacts = hangs

    async def kill(self) -> None:
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.drain() for worker in workers))
        await super().kill()

    async def settle(self) -> None:
        for worker in self._workers:
            if not worker.is_connected:
                await worker.run_once()
        await super().settle()
        self._happened.clear()
        await asyncio.wait({asyncio.ensure_future(self._happened.wait())}, timeout=ANSWER_S)


class KilledServerRig(TemporalRig):
    """The Temporal layer whose server is killed, and started again with its data, while processes hold runs."""

    def __init__(self, ledger: Ledger, objects: ObjectStore, clock: FakeClock, server: TemporalServer) -> None:
        super().__init__(ledger, objects, clock, server)
        self._server, self._kills, self._settled = server, 0, KILL_EVERY

    async def settle(self) -> None:
        self._settled += 1
        if self._kills < KILLS_MAX and self._settled > KILL_EVERY and any(one.driver.held for one in self._workers):
            self._kills, self._settled = self._kills + 1, 0
            await asyncio.to_thread(self._server.kill)
            await super().settle()  # with nothing at its address
            await asyncio.to_thread(self._server.start)
        await super().settle()


@asynccontextmanager
async def on_temporal(
    folder: Path, server: TemporalServer, kind: type[TemporalRig] = TemporalRig
) -> AsyncGenerator[TemporalRig]:
    """The layer on this server, with an SQLite ledger and with nothing in it."""
    async with on_sqlite(folder, lambda ledger, objects, clock: kind(ledger, objects, clock, server)) as rig:
        assert isinstance(rig, TemporalRig)
        rig.folder = folder
        yield rig

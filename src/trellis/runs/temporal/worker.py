"""The workers with which one orchestrator process polls its Temporal server."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from trellis.documents.errors import TemporalAway
from trellis.engine.clock import Clock
from trellis.engine.errors import SettingsInvalid
from trellis.engine.logs import log_of
from trellis.engine.outage_log import Failures
from trellis.engine.service import Service
from trellis.runs.orchestrator import Orchestrator
from trellis.runs.temporal.connection import check_health, connect
from trellis.runs.temporal.driver import TemporalRunDriver
from trellis.runs.temporal.workflow import RunWorkflow

CHECK_S = 5.0
RETRY_S = 1.0
RECONNECT_S = 30.0
"""After so long without an answer the connection is made anew, with the certificates that the files hold then."""
STICKY_S = 5.0
"""How long the server waits for the process that has a workflow in its memory, before any other may continue it."""

_log = log_of("trellis.temporal")


@dataclass(kw_only=True)
class TemporalWorker:
    """Keeps the connection of one process, and executes workflows and the steps of the runs that the process holds.

    `driver` gets the connection. While there is none, the orchestrator of this process claims no run.
    """

    driver: TemporalRunDriver
    clock: Clock
    name: str = "temporal-worker"
    concurrency: int = 10
    workflows_in_memory: int = 200
    _workers: list[Worker] = field(default_factory=list[Worker])
    _polling: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])
    _outages: Failures = field(default_factory=lambda: Failures("temporal", _log))
    is_connected: bool = False
    _away_since: float | None = None
    """Since when the open connection gets no answer, by the clock's monotonic time."""

    async def run_once(self) -> bool:
        """Connect if necessary, and check that the server answers. Returns whether it does."""
        try:
            if self.driver.client is None or self._is_dead() or any(polling.done() for polling in self._polling):
                await self._begin()
            assert self.driver.client is not None
            await check_health(self.driver.client, self.driver.temporal)
            self.is_connected, self._away_since = True, None
        except (TemporalAway, SettingsInvalid) as error:  # files may change while this process lives
            self.is_connected, now = False, self.clock.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            self._outages.failed(error, now=now)
        else:
            self._outages.succeeded(now=self.clock.monotonic())
        return self.is_connected

    def pause_s(self, report: bool) -> float:  # noqa: FBT001 - the shape of a service
        """Sooner while the server does not answer."""
        return CHECK_S if report else RETRY_S

    def _is_dead(self) -> bool:
        """Whether the connection has got no answer for so long that its certificates may be outdated."""
        return self._away_since is not None and self.clock.monotonic() - self._away_since >= RECONNECT_S

    async def _begin(self) -> None:
        await self._end()
        self._away_since = None
        client = await connect(self.driver.temporal, identity=self.driver.actor.name)
        self._workers = [
            Worker(
                client,
                task_queue=self.driver.temporal.queue,
                workflows=[RunWorkflow],
                activities=[self.driver.has_ended],
                workflow_runner=UnsandboxedWorkflowRunner(),  # one workflow, without imports that matter
                max_cached_workflows=self.workflows_in_memory,
                sticky_queue_schedule_to_start_timeout=timedelta(seconds=STICKY_S),
            ),
            Worker(
                client,
                task_queue=self.driver.queue,
                activities=[self.driver.step],
                max_concurrent_activities=self.concurrency + 1,
            ),
        ]
        self._polling = [asyncio.ensure_future(worker.run()) for worker in self._workers]
        self.driver.client = client

    async def drain(self) -> None:
        """Stop polling. Steps that are being executed are given back before, by the orchestrator."""
        self.is_connected = False
        await self._end()

    async def _end(self) -> None:
        """Stop polling. However that fails, the next call finds nothing left to stop."""
        self.driver.client = None
        workers, polling = self._workers, self._polling
        self._workers, self._polling = [], []
        ends = [worker.shutdown() for worker, task in zip(workers, polling, strict=True) if not task.done()]
        for error in await asyncio.gather(*ends, *polling, return_exceptions=True):
            if isinstance(error, BaseException):
                _log.warning("polling_ended", error=f"{type(error).__name__}: {error}")


@dataclass(kw_only=True)
class TemporalOrchestrator(Orchestrator):
    """Claims runs while the Temporal server answers. Otherwise runs stay queued in the ledger."""

    worker: TemporalWorker
    name: str = "orchestrator"

    def helpers(self) -> list[Service[Any]]:
        """The service that keeps the connection to the server."""
        return [self.worker]

    async def _claim(self) -> int:
        return await super()._claim() if self.worker.is_connected else 0

    async def drain(self) -> None:
        """Give the runs back, then stop polling the server."""
        await super().drain()
        await self.worker.drain()

"""Presence of a worker on the bus: a handshake that names its topics, then heartbeats.

The handshake is repeated after a bus outage and every `HANDSHAKE_S`, for a control plane that started after the worker.
A draining worker reports that it is full, so that it gets no new orders but does not count as lost.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from trellis.bus.errors import BusError
from trellis.bus.messages import HANDSHAKE, HEARTBEAT, Handshake, WorkerHeartbeat
from trellis.bus.port import Bus
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.logs import log_of
from trellis.worker.on_bus.options import BusWorkerOptions

HANDSHAKE_S = 30.0
STANDSTILL_S = 2.0
"""If a heartbeat is late by this much, log that the event loop was blocked."""
JOBS_SHOWN = 5
WORKER_TYPE = "trellis"
DISTRIBUTION = "trellis-engine"
CAPABILITIES = ("progress", "cancel", "error_codes", "heartbeats")

_log = log_of("trellis.worker")


@dataclass(kw_only=True)
class BusPresence:
    """Sends a heartbeat every `heartbeat_s`, and at once when `changed` is set."""

    bus: Bus
    clock: Clock
    options: BusWorkerOptions
    new_id: Callable[[], str]
    topics: tuple[str, ...]
    active: Callable[[], int]
    cpu_load: Callable[[], float]
    held: Callable[[], Sequence[str]]
    """Returns the wire ids of the jobs that this worker runs."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _met_at: float | None = None
    """When the last handshake was sent; None when one is due."""
    _silent: bool = False

    async def run(self) -> None:
        """Sends heartbeats until cancelled."""
        while True:
            self.changed.clear()
            await self.run_once()
            rested_at = self.clock.monotonic()
            await sleep_or_stop(self.clock, self.changed, self.options.heartbeat_s)
            self._note_standstill(self.clock.monotonic() - rested_at - self.options.heartbeat_s)

    async def run_once(self) -> bool:
        """Sends one heartbeat, and a handshake if due. Returns False if the bus is unavailable."""
        now = self.clock.monotonic()
        try:
            if self._met_at is None or now - self._met_at >= HANDSHAKE_S:
                await self.bus.publish(HANDSHAKE, self.handshake(), trace_id=self.new_id())
                self._met_at = now
            await self.bus.publish(HEARTBEAT, self.heartbeat(), trace_id=self.new_id())
        except BusError as error:
            if not self._silent:
                _log.warning("heartbeat_not_sent", error=str(error))
            self._silent, self._met_at = True, None
            return False
        self._silent = False
        return True

    def _note_standstill(self, late_s: float) -> None:
        """Logs that the event loop was blocked.

        A worker that cannot send heartbeats counts as lost, and its jobs run again. The log must show why.
        """
        if late_s >= STANDSTILL_S:
            held = self.held()
            why = "an async handler must not block; as a plain def it gets a thread"
            _log.warning("event_loop_stood_still", for_s=round(late_s, 1), jobs=list(held[:JOBS_SHOWN]), remedy=why)

    def handshake(self) -> Handshake:
        """Builds the handshake: what this worker can do."""
        return Handshake(
            component_id=self.bus.sender_id,
            capabilities=dict.fromkeys(CAPABILITIES, True),
            sdk_version=f"{WORKER_TYPE} {_version()}",
            ready_topics=self.topics,
        )

    def heartbeat(self) -> WorkerHeartbeat:
        """Builds the heartbeat: the worker's current load."""
        options = self.options
        return WorkerHeartbeat(
            worker_id=self.bus.sender_id,
            pool=options.pool,
            region=options.region,
            type=WORKER_TYPE,
            cpu_load=min(100.0, max(0.0, self.cpu_load())),
            active_jobs=self.active(),
            max_parallel_jobs=options.max_parallel_jobs,
            capabilities=options.capabilities,
            labels=dict(options.labels),
        )


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unpacked"

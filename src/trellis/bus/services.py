"""The services of the bus in one process, and the scheduler's handshake.

There are two roles, each in any number of processes. The scheduler takes requests in, dispatches jobs and receives
their results. The reconciler renews the leases of live workers, starts retries, next steps and compensations of ended
jobs, and publishes outcomes to clients. In one process both roles share one worker registry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trellis.bus.errors import BusError
from trellis.bus.messages import HANDSHAKE, Handshake, sdk_version
from trellis.bus.outcomes.attempts import AttemptCache, LeaseRenewals, StopNotifier
from trellis.bus.outcomes.publisher import BusPublisher
from trellis.bus.outcomes.reconciler import OutcomeReconciler
from trellis.bus.outcomes.result_listener import ResultListener
from trellis.bus.port import Bus
from trellis.bus.safety.policy import DecisionKernel
from trellis.bus.scheduling.intake import BusIntake
from trellis.bus.scheduling.registry import WorkerRegistry
from trellis.bus.scheduling.scheduler import Scheduler
from trellis.bus.submitter import BacklogLimit
from trellis.bus.topics import Topics
from trellis.engine.clock import Clock
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.service import Service
from trellis.lifecycles import Role

# The scheduler's handshake: CAP expects every component to announce itself on `sys.handshake`.

HANDSHAKE_INTERVAL_S = 30.0
"""Interval between handshakes, for components that start later. After a failed one, a tenth of it."""
CAPABILITIES = ("cancel", "compensation", "error_codes", "progress", "workflows")
"""CAP's names for what this control plane supports."""

_log = log_of("trellis.bus.scheduling")


@dataclass(kw_only=True)
class SchedulerHandshake:
    """Service that publishes one handshake per pass."""

    bus: Bus
    new_id: Callable[[], str]
    name: str = "bus-introduction"

    async def run_once(self) -> bool:
        """Publish the handshake; False when the bus does not take it."""
        try:
            await self.bus.publish(HANDSHAKE, self.handshake(), trace_id=self.new_id())
        except BusError as error:
            _log.debug("handshake_not_sent", error=str(error))
            return False
        return True

    def pause_s(self, report: bool) -> float:  # noqa: FBT001 - the shape of every service: what a pass said
        return HANDSHAKE_INTERVAL_S if report else HANDSHAKE_INTERVAL_S / 10

    def handshake(self) -> Handshake:
        return Handshake(
            component_id=self.bus.sender_id,
            role="scheduler",
            capabilities=dict.fromkeys(CAPABILITIES, True),
            sdk_version=sdk_version(),
        )


class BusRole(StrEnum):
    SCHEDULER = "scheduler"
    RECONCILER = "reconciler"


@dataclass(frozen=True, kw_only=True, slots=True)
class BusDependencies:
    """What the services depend on."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    kernel: DecisionKernel
    clock: Clock
    new_id: Callable[[], str]
    name: str
    """Name of the process, used in the events it records."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long after a soft cancel a job that still runs is ended, in seconds."""

    def actor(self, role: Role) -> Actor:
        return Actor(role=role, name=self.name)


class BusServices:
    """The bus services of one process. Call `start`, run `services`, then call `stop`."""

    def __init__(self, parts: BusDependencies, roles: frozenset[BusRole] = frozenset(BusRole)) -> None:
        self.parts, self.roles = parts, roles
        self.workers = WorkerRegistry(clock=parts.clock, ledger=parts.ledger, appeared=self._has_room)
        attempts, stopping = AttemptCache(parts.ledger), StopNotifier(parts.bus)
        self.scheduler = Scheduler(
            ledger=parts.ledger,
            actor=parts.actor(Role.SCHEDULER),
            bus=parts.bus,
            workers=self.workers,
            topics=parts.topics,
            kernel=parts.kernel,
            clock=parts.clock,
            new_id=parts.new_id,
            attempts=attempts,
        )
        control = parts.actor(Role.CONTROL_PLANE)
        self.publisher = BusPublisher(
            ledger=parts.ledger, actor=control, clock=parts.clock, bus=parts.bus, topics=parts.topics
        )
        self.introduction = SchedulerHandshake(bus=parts.bus, new_id=parts.new_id)
        self.results = ResultListener(
            ledger=parts.ledger,
            bus=parts.bus,
            topics=parts.topics,
            workers=self.workers,
            clock=parts.clock,
            name=parts.name,
            attempts=attempts,
            stopping=stopping,
            wake=self.scheduler.wake_dispatch if self._schedules else None,
            has_room=self._has_room,
            publisher=self.publisher,
        )
        self.intake = BusIntake(
            ledger=parts.ledger,
            bus=parts.bus,
            topics=parts.topics,
            room=BacklogLimit(ledger=parts.ledger, clock=parts.clock),
            clock=parts.clock,
            accepted=self.scheduler.validate_new,
            works_on=self.results.works_on,
            cancel_grace_s=parts.cancel_grace_s,
        )
        self.renewals = LeaseRenewals(
            ledger=parts.ledger,
            topics=parts.topics,
            workers=self.workers,
            actor=parts.actor(Role.WORKER),
            clock=parts.clock,
            attempts=attempts,
            stopping=stopping,
            bus=parts.bus,
        )
        self.reconciler = OutcomeReconciler(
            ledger=parts.ledger,
            actor=control,
            clock=parts.clock,
            topics=parts.topics,
            wake=self.scheduler.wake if self._schedules else None,
        )

    @property
    def services(self) -> list[Service[Any]]:
        """The services to run for the roles of this process."""
        services: list[Service[Any]] = [self.scheduler, self.introduction] if self._schedules else []
        return [*services, self.renewals, self.reconciler, self.publisher] if self._reconciles else services

    async def start(self) -> None:
        """Subscribe to the bus. Subscriptions take effect as soon as the bus is reachable.

        Both roles listen to what workers report. So while the only scheduler is restarted, running jobs keep their
        leases and ended ones are recorded. Otherwise they would be taken back after a lease, and done twice.
        """
        await self.workers.listen(self.parts.bus)
        await self.results.start()
        if self._schedules:
            await self.intake.start()

    async def stop(self) -> None:
        """Unsubscribe and finish work in progress, so that another process can take over at once."""
        await self.intake.stop()
        await self.results.stop()
        await self.workers.stop()
        await self.scheduler.drain()
        await self.publisher.release()
        await self.reconciler.release()

    @property
    def _schedules(self) -> bool:
        return BusRole.SCHEDULER in self.roles

    @property
    def _reconciles(self) -> bool:
        return BusRole.RECONCILER in self.roles

    def _has_room(self) -> None:
        if self._schedules:
            self.scheduler.has_room()

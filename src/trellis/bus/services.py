"""The parts of the bus in one process, joined: who hears, who hands out, who looks after what was handed out.

Two roles, in as many processes as one likes. The scheduler takes requests in, hands jobs out and hears what comes of them; the reconciler
keeps leases of living workers alive, starts retries, next steps and compensations of ended jobs, and tells clients. Both share one picture of the workers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trellis.bus.ends.aftermath import SUBSCRIBER_NAME, OutcomeReconciler
from trellis.bus.ends.following import FeedSubscriber
from trellis.bus.ends.publisher import SUBSCRIBER_NAME as PUBLISHES_AS
from trellis.bus.ends.publisher import BusPublisher
from trellis.bus.port import Bus
from trellis.bus.reporting.attempts import AttemptCache, StopNotifier
from trellis.bus.reporting.renewals import LeaseRenewals
from trellis.bus.reporting.results import ResultListener
from trellis.bus.room import BacklogLimit
from trellis.bus.safety.decisions import DecisionKernel
from trellis.bus.scheduling.intake import BusIntake
from trellis.bus.scheduling.introduction import SchedulerHandshake
from trellis.bus.scheduling.registry import WorkerRegistry
from trellis.bus.scheduling.scheduler import Scheduler
from trellis.bus.topics import Topics
from trellis.engine.clock import Clock
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, Actor
from trellis.engine.ledger import Ledger
from trellis.engine.service import Service
from trellis.lifecycles import Role


class BusRole(StrEnum):
    """What a process does on the bus."""

    SCHEDULER = "scheduler"
    RECONCILER = "reconciler"


@dataclass(frozen=True, kw_only=True, slots=True)
class BusDependencies:
    """What the services work with."""

    ledger: Ledger
    bus: Bus
    topics: Topics
    kernel: DecisionKernel
    clock: Clock
    new_id: Callable[[], str]
    name: str
    """Of the process, for the events it makes."""
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    """How long after a soft cancel a job that goes on is ended."""

    def actor(self, role: Role) -> Actor:
        """This process in a role."""
        return Actor(role=role, name=self.name)


class BusServices:
    """`start`, then serve `services` until told to stop, then `stop`."""

    def __init__(self, parts: BusDependencies, roles: frozenset[BusRole] = frozenset(BusRole)) -> None:
        self.parts, self.roles = parts, roles
        self.workers = WorkerRegistry(clock=parts.clock, ledger=parts.ledger, appeared=self._wake)
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
            wake=self._ended,
        )
        self.intake = BusIntake(
            ledger=parts.ledger,
            bus=parts.bus,
            topics=parts.topics,
            room=BacklogLimit(ledger=parts.ledger, clock=parts.clock),
            clock=parts.clock,
            accepted=self._wake,
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
        self.publisher = BusPublisher(
            ledger=parts.ledger, bus=parts.bus, topics=parts.topics, follower=self._follower(PUBLISHES_AS)
        )
        self.aftermath = OutcomeReconciler(
            ledger=parts.ledger, topics=parts.topics, follower=self._follower(SUBSCRIBER_NAME), wake=self._wake
        )

    @property
    def services(self) -> list[Service[Any]]:
        """What runs again and again, for these roles."""
        found: list[Service[Any]] = [self.scheduler, self.introduction] if self._schedules else []
        return [*found, self.renewals, self.aftermath, self.publisher] if self._reconciles else found

    async def start(self) -> None:
        """Hear what the bus says. A bus that does not answer yet is heard from the first moment on."""
        await self.workers.listen(self.parts.bus)
        if self._schedules:
            await self.results.start()
            await self.intake.start()

    async def stop(self) -> None:
        """Hear no more and finish what is under way, so that another process goes on at once."""
        await self.intake.stop()
        await self.results.stop()
        await self.workers.stop()
        await self.scheduler.drain()
        await self.publisher.release()
        await self.aftermath.release()

    @property
    def _schedules(self) -> bool:
        return BusRole.SCHEDULER in self.roles

    @property
    def _reconciles(self) -> bool:
        return BusRole.RECONCILER in self.roles

    def _wake(self) -> None:
        if self._schedules:
            self.scheduler.wake()

    def _ended(self) -> None:
        self._wake()
        self.publisher.wake()

    def _follower(self, name: str) -> FeedSubscriber:
        actor = self.parts.actor(Role.CONTROL_PLANE)
        return FeedSubscriber(ledger=self.parts.ledger, actor=actor, clock=self.parts.clock, follows_as=name)

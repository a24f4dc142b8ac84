"""The services of the bus in one process, and the handshake with which they say who they are."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trellis.bus.backlog import BacklogLimit
from trellis.bus.errors import BusError
from trellis.bus.messages import HANDSHAKE, Handshake
from trellis.bus.outcomes.publisher import SUBSCRIBER_NAME as PUBLISHES_AS
from trellis.bus.outcomes.publisher import BusPublisher
from trellis.bus.outcomes.reconciler import SUBSCRIBER_NAME, OutcomeReconciler
from trellis.bus.outcomes.subscription import FeedSubscriber
from trellis.bus.port import Bus
from trellis.bus.results.attempts import AttemptCache, LeaseRenewals, StopNotifier
from trellis.bus.results.result_listener import ResultListener
from trellis.bus.safety.decisions import DecisionKernel
from trellis.bus.scheduling.intake import BusIntake
from trellis.bus.scheduling.registry import WorkerRegistry
from trellis.bus.scheduling.scheduler import Scheduler
from trellis.bus.topics import Topics
from trellis.engine.clock import Clock
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.service import Service
from trellis.lifecycles import Role

# The scheduler's own handshake: CAP wants every component to say on `sys.handshake` who it is and what it speaks.

HANDSHAKE_INTERVAL_S = 30.0
"""How often it is said again, for those that began later; and how soon after an outage of the bus."""
CAPABILITIES = ("cancel", "compensation", "error_codes", "progress", "workflows")
"""CAP's names for what this control plane does."""
DISTRIBUTION = "trellis-engine"

_log = log_of("trellis.bus.scheduling")


@dataclass(kw_only=True)
class SchedulerHandshake:
    """The service: one handshake in a pass."""

    bus: Bus
    new_id: Callable[[], str]
    name: str = "bus-introduction"

    async def run_once(self) -> bool:
        """Say it; False while the bus does not take it."""
        try:
            await self.bus.publish(HANDSHAKE, self.handshake(), trace_id=self.new_id())
        except BusError as error:
            _log.debug("handshake_not_sent", error=str(error))
            return False
        return True

    def pause_s(self, report: bool) -> float:  # noqa: FBT001 - the shape of every service: what a pass said
        """Until the next time."""
        return HANDSHAKE_INTERVAL_S if report else HANDSHAKE_INTERVAL_S / 10

    def handshake(self) -> Handshake:
        """Who we are."""
        return Handshake(
            component_id=self.bus.sender_id,
            role="scheduler",
            capabilities=dict.fromkeys(CAPABILITIES, True),
            sdk_version=f"trellis {_version()}",
        )


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unpacked"


# The parts of the bus in one process, joined: who hears, who hands out, who looks after what was handed out.
#
# Two roles, in as many processes as one likes. The scheduler takes requests in, hands jobs out and hears what comes of them; the reconciler
# keeps leases of living workers alive, starts retries, next steps and compensations of ended jobs, and tells clients. Both share one picture of the workers.


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

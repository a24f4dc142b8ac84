"""The attempts that are under way, as this process sees them: who has each, since when, and whether it was asked to stop."""

from dataclasses import replace
from typing import Protocol

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import CANCEL, JobCancel
from trellis.bus.port import Bus
from trellis.bus.reporting.reports import DispatchedAttempt, attempt_in
from trellis.bus.topics import Topic
from trellis.bus.wire_ids import wire_id
from trellis.engine.jobs import Epoch, HeldLease, JobKey
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent import LruCache
from trellis.lifecycles.bus_job import BUS_JOB

REMEMBERED_MAX = 20_000
CANCEL_REQUESTED_REASON = "somebody asked for it to stop"

_log = log_of("trellis.bus.reporting.attempts")


class WorkerSign(Protocol):
    """What is known of a worker that is not lost."""

    @property
    def heard_at(self) -> float | None:
        """This process's clock when its last heartbeat came; None before the first."""
        ...

    @property
    def active_jobs(self) -> int:
        """How many jobs it had then, as it says."""
        ...


class WorkerLiveness(Protocol):
    """The workers on the bus, as this process has heard of them."""

    def alive(self, worker_id: str) -> WorkerSign | None:
        """A worker that is not lost; None for every other."""
        ...

    def serves(self, worker_id: str, topic: str, settings: Topic, /) -> bool:
        """Whether it is a live worker of this topic that speaks our version of the protocol."""
        ...

    def settled(self, wire_id: str) -> None:
        """An attempt has ended: its worker has room again."""
        ...


def attempt_key(hold: HeldLease) -> tuple[JobKey, Epoch]:
    """What no other attempt ever has: a wire id comes again when a job was removed and another has its id."""
    return hold.lease.key, hold.lease.epoch


class AttemptCache:
    """Reads attempts and remembers them; an attempt changes once, when it is started."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: LruCache[tuple[JobKey, Epoch], DispatchedAttempt] = LruCache(REMEMBERED_MAX)

    async def of(self, hold: HeldLease) -> DispatchedAttempt | None:
        """The attempt that holds a job now; None when its events do not tell of one."""
        if hold.lease.lifecycle != BUS_JOB.name:
            return None
        known = self._known.get(attempt_key(hold))
        if known is not None and (known.starter is not None or hold.state == "DISPATCHED"):
            return known
        return await self.read(hold)

    async def read(self, hold: HeldLease) -> DispatchedAttempt | None:
        """As it is in the ledger now."""
        found = attempt_in(await self._ledger.events(hold.lease.job_id), hold.lease.epoch)
        if found is not None:
            self._known[attempt_key(hold)] = found
        return found

    def began(self, hold: HeldLease, attempt: DispatchedAttempt, worker_id: str, token: str) -> DispatchedAttempt:
        """The same attempt, now that this worker has started it."""
        started = replace(attempt, starter=worker_id, token=token)
        self._known[attempt_key(hold)] = started
        return started


class StopNotifier:
    """Tells workers over the bus that nobody wants what they do any more, once for each attempt."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told: LruCache[tuple[JobKey, Epoch], bool] = LruCache(REMEMBERED_MAX)

    async def tell(self, hold: HeldLease, attempt: DispatchedAttempt) -> None:
        """Ask the holder to stop; while the bus is down a later call does it."""
        named, key = wire_id(hold.lease.job_id, hold.lease.epoch), attempt_key(hold)
        if self._told.get(key):
            return
        self._told[key] = True
        cancel = JobCancel(
            job_id=named, reason=CANCEL_REQUESTED_REASON, requested_by=self._bus.sender_id, dispatch=attempt.dispatch
        )
        try:
            await self._bus.publish(CANCEL, cancel, trace_id=hold.correlation_id, message_id=f"stop:{named}")
        except BusUnavailable as error:
            self._told.drop(key)
            _log.info("stop_not_told", job_id=hold.lease.job_id, error=str(error))

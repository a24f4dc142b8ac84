"""Running attempts: which worker has each, and lease renewal for workers that are alive.

`LeaseRenewals` keeps the attempts of live workers alive, for as long as one attempt may take. Any number of processes
may run it.

A heartbeat names no jobs, only their number. A job that the heartbeat may include is renewed. A running job must not be
lost because another one is, nor a job that is queued inside its worker, which heartbeats do not count. So a job that
its worker never received lives until the jobs known to run account for the whole number, or two heartbeats in a row
report no jobs. It never lives beyond its topic's `running_s`, which also ends hung jobs. Our own workers, which ask
before they start, report each job themselves (`result_listener`): their heartbeats renew nothing that they started.

While this process is disconnected from the bus it receives no heartbeats, which says nothing about any worker. All held
leases are renewed then, and for a while after, so that an outage of the bus causes no job to run twice. That time is
bounded too.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import CANCEL, JobCancel
from trellis.bus.port import Bus
from trellis.bus.requests import wire_id
from trellis.bus.results.reports import DispatchedAttempt, attempt_in
from trellis.bus.topics import LEASE_S_DEFAULT, Topic, Topics
from trellis.engine.clock import Clock
from trellis.engine.jobs import CLAIM_MAX, Actor, Epoch, HeldLease, JobKey, Renewed
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.lifecycles.bus_job import BUS_JOB

REMEMBERED_MAX = 20_000
CANCEL_REQUESTED_REASON = "somebody asked for it to stop"

_log = log_of("trellis.bus.results.attempts")


class WorkerSign(Protocol):
    """What is known of a live worker."""

    @property
    def heard_at(self) -> float | None:
        """This process's clock at the last heartbeat; None before the first."""
        ...

    @property
    def active_jobs(self) -> int:
        """The number of jobs in the last heartbeat."""
        ...


class WorkerLiveness(Protocol):
    """Liveness of the workers on the bus, as this process sees it."""

    def alive(self, worker_id: str) -> WorkerSign | None:
        """The worker, if it is alive; None otherwise."""
        ...

    def serves(self, worker_id: str, topic: str, settings: Topic, /) -> bool:
        """Whether it is a live worker of this topic that speaks our protocol version."""
        ...

    def settled(self, wire_id: str) -> None:
        """Record the end of an attempt: its worker has room again."""
        ...


def attempt_key(hold: HeldLease) -> tuple[JobKey, Epoch]:
    """A key unique to the attempt. A wire id is not: it can recur when a job is removed and another takes its id."""
    return hold.lease.key, hold.lease.epoch


class AttemptCache:
    """Reads and caches attempts. An attempt changes only once, when it starts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: LruCache[tuple[JobKey, Epoch], DispatchedAttempt] = LruCache(REMEMBERED_MAX)

    async def of(self, hold: HeldLease) -> DispatchedAttempt | None:
        """The current attempt of a held job; None if its events contain none."""
        if hold.lease.lifecycle != BUS_JOB.name:
            return None
        known = self._known.get(attempt_key(hold))
        if known is not None and (known.starter is not None or hold.state == "DISPATCHED"):
            return known
        return await self.read(hold)

    async def read(self, hold: HeldLease) -> DispatchedAttempt | None:
        """The attempt as it is in the ledger now."""
        found = attempt_in(await self._ledger.events(hold.lease.job_id), hold.lease.epoch)
        if found is not None:
            self._known[attempt_key(hold)] = found
        return found

    def began(self, hold: HeldLease, attempt: DispatchedAttempt, worker_id: str, token: str) -> DispatchedAttempt:
        """Cache and return the attempt, now started by this worker."""
        started = replace(attempt, starter=worker_id, token=token)
        self._known[attempt_key(hold)] = started
        return started


class StopNotifier:
    """Asks workers over the bus to stop cancelled attempts, once per attempt."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told: LruCache[tuple[JobKey, Epoch], bool] = LruCache(REMEMBERED_MAX)

    async def tell(self, hold: HeldLease, attempt: DispatchedAttempt) -> None:
        """Ask the worker to stop. While the bus is down, a later call does it."""
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


# Lease renewal.

PASSES_PER_LEASE = 6
PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 5.0
MORE_PAUSE_S = 0.02
CONCURRENCY = 16
"""Attempts read concurrently when this process first sees them."""
AMNESTY_S_MAX = 300.0
"""How long one outage of the bus renews everything, in seconds."""
RECONNECT_GRACE_S = 15.0
"""How long workers have after an outage to be heard again, in seconds.

They reconnect, then send a heartbeat every few seconds.
"""
RENEW_BELOW_SHARE = 2 / 3
"""A lease is renewed only when less than this share of its length is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalReport:
    """Result of one pass."""

    held: int = 0
    renewed: int = 0
    more: bool = False


@dataclass(kw_only=True)
class LeaseRenewals:
    """The service that renews leases."""

    ledger: Ledger
    topics: Topics
    workers: WorkerLiveness
    actor: Actor
    clock: Clock
    attempts: AttemptCache
    stopping: StopNotifier
    bus: Bus
    name: str = "bus-renewals"
    _seen: LruCache[tuple[JobKey, Epoch], float] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: this process's clock when it first saw the attempt."""
    _idle: LruCache[tuple[JobKey, Epoch], float] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: when its worker first reported no jobs since then.

    One such heartbeat may cross with the order, or fall between two jobs.
    """
    _denied: LruCache[tuple[JobKey, Epoch], bool] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: its worker reported no jobs in two heartbeats."""
    _cut_off_at: float | None = None
    """When this process lost the bus; reset once workers have had time to be heard again."""
    _cut_off_to: float = 0.0

    async def run_once(self) -> RenewalReport:
        """Read the held leases and renew those of live attempts."""
        holds = await self.ledger.expiring(BUS_JOB.name, within_s=max(self._leases_s()), limit=CLAIM_MAX)
        by_worker: dict[str, list[tuple[HeldLease, DispatchedAttempt]]] = {}
        deaf = self._deaf()
        for hold, attempt in zip(holds, await self._attempts(holds), strict=True):
            if attempt is None:
                continue
            if hold.cancel:
                await self.stopping.tell(hold, attempt)
            self._see(hold)
            by_worker.setdefault(attempt.worker, []).append((hold, attempt))
        living = [
            one for worker_id, has in by_worker.items() for one in (has if deaf else self._living(worker_id, has))
        ]
        renewed = await self._renew(living)
        return RenewalReport(held=len(holds), renewed=renewed, more=len(holds) == CLAIM_MAX and renewed > 0)

    def pause_s(self, report: RenewalReport) -> float:
        """Several passes per lease, so that no heartbeat is missed."""
        return (
            MORE_PAUSE_S
            if report.more
            else min(PAUSE_S_MAX, max(PAUSE_S_MIN, min(self._leases_s()) / PASSES_PER_LEASE))
        )

    def _deaf(self) -> bool:
        """Whether missing heartbeats mean nothing now, because of an outage of the bus."""
        now = self.clock.monotonic()
        if not self.bus.connected:
            self._cut_off_at = now if self._cut_off_at is None else self._cut_off_at
            self._cut_off_to = now
        if self._cut_off_at is None:
            return False
        if now > min(self._cut_off_to + RECONNECT_GRACE_S, self._cut_off_at + AMNESTY_S_MAX):
            self._cut_off_at = None if self.bus.connected else self._cut_off_at
            return False
        return True

    async def _attempts(self, holds: Sequence[HeldLease]) -> list[DispatchedAttempt | None]:
        found: list[DispatchedAttempt | None] = []
        for start in range(0, len(holds), CONCURRENCY):
            found += await asyncio.gather(*map(self.attempts.of, holds[start : start + CONCURRENCY]))
        return found

    def _leases_s(self) -> list[float]:
        return [LEASE_S_DEFAULT, *(topic.lease_s for topic in self.topics.topics.values())]

    def _see(self, hold: HeldLease) -> None:
        if self._seen.get(attempt_key(hold)) is None:
            self._seen[attempt_key(hold)] = self.clock.monotonic()

    def _living(
        self, worker_id: str, has: Sequence[tuple[HeldLease, DispatchedAttempt]]
    ) -> Iterable[tuple[HeldLease, DispatchedAttempt]]:
        """The worker's attempts that its last heartbeat may include."""
        sign = self.workers.alive(worker_id) if worker_id else None
        heard_at = None if sign is None else sign.heard_at
        if sign is None or heard_at is None:
            return ()
        counted = [one for one in has if heard_at > self._first_seen(one[0])]
        for hold, _ in counted:
            self._note(attempt_key(hold), heard_at, idle=sign.active_jobs <= 0)
        if sign.active_jobs <= 0:
            return ()
        meant = [one for one in counted if not self._denied.get(attempt_key(one[0]))]
        running = [one for one in meant if one[0].state == "RUNNING"]
        spoken_for = meant if sign.active_jobs > len(running) else running
        return [one for one in spoken_for if not one[1].token]

    def _note(self, key: tuple[JobKey, Epoch], heard_at: float, *, idle: bool) -> None:
        if not idle:
            self._idle.drop(key)
        elif (before := self._idle.get(key)) is None:
            self._idle[key] = heard_at
        elif heard_at > before:
            self._denied[key] = True

    def _first_seen(self, hold: HeldLease) -> float:
        seen_at = self._seen.get(attempt_key(hold))
        return self.clock.monotonic() if seen_at is None else seen_at

    async def _renew(self, living: Sequence[tuple[HeldLease, DispatchedAttempt]]) -> int:
        ending = [one for one in living if one[0].left_s < RENEW_BELOW_SHARE * self.topics.of(one[0].type).lease_s]
        if not ending:
            return 0
        now = await self.ledger.now()
        leases = [hold.lease for hold, attempt in ending if not self._hangs(hold, attempt, now)]
        answers = await self.ledger.renew(self.actor, leases) if leases else []
        return sum(isinstance(answer, Renewed) for answer in answers)

    def _hangs(self, hold: HeldLease, attempt: DispatchedAttempt, now: datetime) -> bool:
        return (now - attempt.dispatched_at).total_seconds() > attempt.may_take_s(self.topics.of(hold.type))

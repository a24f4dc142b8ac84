"""Background services, the loop that runs them, and waiting for a ledger that is not reachable yet.

A service has frozen options and `run_once() -> report`; `pause_s(report)` says when it wants to run again. `serve` is
the loop. It waits, backs off while the ledger does not answer, survives a failed pass, and stops only between passes. A
service that has work only when the ledger has new events (`EventDriven`) waits longer while there are none.
"""

import asyncio
import math
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor
from trellis.engine.ledger import RETENTION, Ledger
from trellis.engine.logs import log_of
from trellis.engine.metrics import PASSES, process_metrics
from trellis.engine.outage_log import SUMMARY_S, Failures
from trellis.engine.records import RetentionOptions, RetentionReport, SweepOptions, SweepReport

BACKOFF_S_FIRST = 0.1
BACKOFF_S_MAX = 5.0
SWEEP_DEFAULT = SweepOptions()
SWEEP_PAUSE_S_MIN = 0.02
RETENTION_DEFAULT = RetentionOptions(cause="the settings of retention")
RETENTION_INTERVAL_S_DEFAULT = 60.0
RETENTION_PAUSE_S_MIN = 0.05
PRESENCE_INTERVAL_S_DEFAULT = 10.0
POLL_S_IDLE = 1.0
"""How long new work may stay unnoticed by a poller when no hint arrives (D32)."""
LOOK_AT_FOLLOWERS = "trellis followers"

_log = log_of("trellis.service")

ReportT = TypeVar("ReportT")


class Service(Protocol[ReportT]):
    """One background task that runs in passes."""

    @property
    def name(self) -> str:
        """The name in logs."""
        ...

    async def run_once(self) -> ReportT:
        """Run one pass. The report says what it did."""
        ...

    def pause_s(self, report: ReportT) -> float:
        """Seconds to wait after a pass with this report."""
        ...


@runtime_checkable
class EventDriven(Protocol):
    """A service that has work only when its ledger has new events.

    Its pause is the shortest time between two passes. After the pause it waits for a hint of new events, at most
    `POLL_S_IDLE` in all.
    """

    waits_for_events: bool

    @property
    def ledger(self) -> Ledger:
        """The ledger whose events it waits for."""
        ...


def pause_after_failures_s(failures: int, draw: float) -> float:
    """Seconds to wait after the nth failure in a row (from 1). Half of it is random."""
    nominal = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2.0 ** min(failures - 1, 16))
    return nominal * (0.5 + 0.5 * draw)


async def serve(service: Service[Any], clock: Clock, rng: random.Random, stop: asyncio.Event) -> None:
    """Run a service until `stop` is set. A pass in progress is finished first."""
    failures = Failures(service.name, _log)
    hinted = service if isinstance(service, EventDriven) else None
    while not stop.is_set():
        pause = 0.0
        mark = hinted.ledger.events_mark() if hinted else 0
        try:
            pause = service.pause_s(await service.run_once())
        except Exception as error:  # noqa: BLE001 - a service outlives one bad pass, and tries again ever more slowly
            failures.failed(error, now=clock.monotonic())
            process_metrics.count(PASSES, 1, service.name, "failed")
        else:
            failures.succeeded(now=clock.monotonic())
            process_metrics.count(PASSES, 1, service.name, "done")
        if failures.count:
            pause = pause_after_failures_s(failures.count, rng.random())
        elif hinted is not None and 0 < pause < POLL_S_IDLE:
            began = clock.monotonic()
            # Wait until the next whole second: all idle services of a process then poll at the same time, and it wakes
            # once.
            idle = POLL_S_IDLE - began % POLL_S_IDLE
            await sleep_or_stop(clock, stop, idle, sooner=hinted.ledger.wait_for_events(mark, idle))
            pause -= clock.monotonic() - began
        await sleep_or_stop(clock, stop, pause)
    failures.left()


@dataclass(kw_only=True)
class Sweeper:
    """Handles leases, backoffs, deadlines and windows as they fall due.

    One sweeper is elected per interval. The elected one returns when the next item falls due, without another election.
    Otherwise whatever expires within the interval would wait until its end.
    """

    ledger: Ledger
    actor: Actor
    options: SweepOptions = SWEEP_DEFAULT
    name: str = "sweeper"
    _elected: bool = False

    async def run_once(self) -> SweepReport:
        """Run one sweep. Warns when it extended leases, because their jobs stay longer with a worker that has died."""
        options = replace(self.options, elect=self.options.elect and not self._elected)
        self._elected = False
        report = await self.ledger.sweep(self.actor, options)
        if report.amnesty:
            _log.warning("leases_extended", jobs=report.amnesty, reason="no sweep had run for more than half a lease")
        return report

    def pause_s(self, report: SweepReport) -> float:
        """Until the next item is due, or until the next election."""
        interval = self.options.interval_s
        if not report.elected or report.next_due_s is None or report.next_due_s >= interval:
            return interval
        self._elected = True
        return max(report.next_due_s, SWEEP_PAUSE_S_MIN)


@dataclass(kw_only=True)
class Retention:
    """Removes ended jobs past their retention, in small batches.

    Warns once about each subscriber that delays removal.
    """

    ledger: Ledger
    actor: Actor = RETENTION
    options: RetentionOptions = RETENTION_DEFAULT
    interval_s: float = RETENTION_INTERVAL_S_DEFAULT
    name: str = "retention"
    _behind: frozenset[str] = frozenset()

    async def run_once(self) -> RetentionReport:
        """Remove one batch."""
        report = await self.ledger.retain(self.options, by=self.actor)
        if report.unread:
            _log.error("removed_unread", jobs=report.unread, kept_for_s=self.options.unread_s, remedy=LOOK_AT_FOLLOWERS)
        if not report.more:
            await self._tell_who_is_behind()
        return report

    def pause_s(self, report: RetentionReport) -> float:
        """Short while there is more to remove."""
        return RETENTION_PAUSE_S_MIN if report.more else self.interval_s

    async def _tell_who_is_behind(self) -> None:
        """Warn about subscribers that have not read events whose jobs would be removed by now."""
        kept = [age.keep_s for age in self.options.ages().values() if age.keep_s is not None]
        now, ended_s = await self.ledger.now(), min(kept, default=math.inf)
        waiting = [(seen.name, seen.unread_since) for seen in await self.ledger.followers() if seen.waits]
        behind = {name: since for name, since in waiting if since and (now - since).total_seconds() > ended_s}
        for name in sorted(behind.keys() - self._behind):
            _log.warning("kept_for_follower", follower=name, unread_since=str(behind[name]), remedy=LOOK_AT_FOLLOWERS)
        self._behind = frozenset(behind)


@dataclass(frozen=True, kw_only=True)
class PresenceBeacon:
    """Records in the ledger that this process is alive, for operators."""

    ledger: Ledger
    actor: Actor
    about: Callable[[], bytes | None] | None = None
    """Returns what the process reports about itself, as JSON."""
    interval_s: float = PRESENCE_INTERVAL_S_DEFAULT
    name: str = "presence"

    async def run_once(self) -> None:
        """Record one heartbeat of the process."""
        await self.ledger.heartbeat_worker(self.actor, self.about() if self.about else None)

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        """The fixed interval."""
        return self.interval_s


# Waiting for a ledger: a process may start before its database does.

OpenLedger = Callable[[], Awaitable[Ledger]]


async def wait_for_ledger(
    open_ledger: OpenLedger, clock: Clock, rng: random.Random, stop: asyncio.Event
) -> Ledger | None:
    """The ledger as soon as it answers; None when `stop` is set first.

    Only a ledger that does not answer is waited for. A wrong ledger (address, password, schema) stays wrong: its error
    is raised at once, and so is that of an unknown host name.
    """
    log, began, failures, logged, last = log_of("trellis.service"), clock.monotonic(), 0, 0.0, ""
    while not stop.is_set():
        try:
            ledger = await _opened_unless_stopped(open_ledger, stop)
        except LedgerUnavailable as error:
            if _names_no_host(error):
                raise
            failures += 1
            pause = pause_after_failures_s(failures, rng.random())
            waited = round(clock.monotonic() - began, 1)
            if str(error) != last or clock.monotonic() - logged >= SUMMARY_S:
                logged, last = clock.monotonic(), str(error)
                log.warning("waiting_for_ledger", error=last, waited_s=waited, next_try_s=round(pause, 1))
            await sleep_or_stop(clock, stop, pause)
        else:
            if failures and ledger is not None:
                log.info("ledger_answers", waited_s=round(clock.monotonic() - began, 1), tries=failures + 1)
            return ledger
    return None


async def _opened_unless_stopped(open_ledger: OpenLedger, stop: asyncio.Event) -> Ledger | None:
    """Open the ledger, or return None once `stop` is set.

    A server that accepts the connection and then stays silent must not keep a process from stopping.
    """
    opening, stopping = asyncio.ensure_future(open_ledger()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return None
        ledger = await opening
        if not stop.is_set():
            return ledger
        await ledger.close()
    finally:
        for task in (opening, stopping):
            task.cancel()
        await asyncio.gather(opening, stopping, return_exceptions=True)
    return None


def _names_no_host(error: BaseException) -> bool:
    """Whether the error's chain holds a name resolution failure for an unknown host."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, socket.gaierror):
            return cause.errno == socket.EAI_NONAME
        cause = cause.__context__
    return False

"""The heartbeat: every lease that is due, renewed in one call; the answer brings lost leases and cancel requests.

A lease is renewed every heartbeat interval, so a job shorter than that is never renewed. After a failed renewal the
next try comes at half of what is left of the shortest lease, no sooner than `RETRY_S_MIN`.
"""

from dataclasses import dataclass, field

from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor, LeaseLost, Renewed
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.outages import Failures
from trellis.worker.held import HeldJob, HeldJobs, StopCause

RETRY_S_MIN = 0.5

_log = log_of("trellis.worker")


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What one heartbeat did. `failed` when the ledger did not answer."""

    renewed: int = 0
    lost: int = 0
    cancels: int = 0
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerLeaseHeartbeat:
    """Renews what is due."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    holdings: HeldJobs
    tick_s: float
    name: str = "heartbeat"
    failures: Failures = field(default_factory=lambda: Failures("heartbeat"), compare=False)

    async def run_once(self) -> HeartbeatReport:
        """One renewal of everything that is due."""
        sent_at = self.clock.monotonic()
        due = [held for held in self.holdings.jobs.values() if self._is_due(held, sent_at)]
        if not due:
            return HeartbeatReport()
        try:
            answers = await self.ledger.renew(self.actor, [held.lease for held in due])
        except LedgerError as error:
            self.failures.failed(error, now=sent_at)
            return HeartbeatReport(failed=True)
        self.failures.succeeded(now=sent_at)
        return self._apply(due, answers, sent_at)

    def pause_s(self, report: HeartbeatReport) -> float:
        """Until the next lease is due; leases due close together go out together, once a tick."""
        now = self.clock.monotonic()
        if report.failed:
            left = min((held.fence for held in self.holdings.jobs.values()), default=now) - now
            return max(left / 2, min(RETRY_S_MIN, self.tick_s))
        return self.tick_s

    def _is_due(self, held: HeldJob, now: float) -> bool:
        if held.fate is StopCause.LOST:
            return False
        return held.renewed_at + held.claimed.heartbeat_s <= now + self.tick_s / 2 or held.fence <= now

    def _apply(self, due: list[HeldJob], answers: list[Renewed | LeaseLost], sent_at: float) -> HeartbeatReport:
        lost = cancels = 0
        for held, answer in zip(due, answers, strict=True):
            if isinstance(answer, LeaseLost):
                # A settled job has no lease any more: its turn was under way while this renewal was.
                lost += not held.finished
                self._lose(held)
            else:
                held.renewed(sent_at)
                if answer.cancel and not held.cancel_requested:
                    cancels += 1
                    held.request_cancel()
        return HeartbeatReport(renewed=len(due) - lost, lost=lost, cancels=cancels)

    def _lose(self, held: HeldJob) -> None:
        if held.finished:
            return
        _log.warning("lease_lost", job_id=held.lease.job_id, epoch=held.lease.epoch, type=held.claimed.type)
        if held.began_at is None:
            self.holdings.take_back({held})
            self.holdings.forget(held)
        else:
            held.interrupt(StopCause.LOST)

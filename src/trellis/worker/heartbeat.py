"""Services of a worker that watch its held jobs: lease renewal, and local checks for timeouts and doubtful leases."""

from dataclasses import dataclass, field

from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor, LeaseLost, Renewed
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.outage_log import Failures
from trellis.worker.held import HeldJob, HeldJobs, StopCause
from trellis.worker.options import OnLeaseDoubt
from trellis.worker.outcomes import release_advance

# Lease renewal: one call renews every lease that is due. The answer reports lost leases and cancel requests.
#
# A lease is renewed once per heartbeat interval, so a job shorter than that is never renewed. After a failed renewal,
# the next try comes after half of the time left on the shortest lease, but no sooner than `RETRY_S_MIN`.

RETRY_S_MIN = 0.5

_log = log_of("trellis.worker")


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What one heartbeat did. `failed` is True when the ledger did not answer."""

    renewed: int = 0
    lost: int = 0
    cancels: int = 0
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerLeaseHeartbeat:
    """Renews the leases that are due."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    held_jobs: HeldJobs
    tick_s: float
    name: str = "heartbeat"
    failures: Failures = field(default_factory=lambda: Failures("heartbeat"), compare=False)

    async def run_once(self) -> HeartbeatReport:
        """Renews every lease that is due, in one call to the ledger."""
        sent_at = self.clock.monotonic()
        due = [held for held in self.held_jobs.jobs.values() if self._is_due(held, sent_at)]
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
        """Seconds until the next heartbeat: one tick. After a failure: half of the time left on the shortest lease."""
        now = self.clock.monotonic()
        if report.failed:
            left = min((held.fence for held in self.held_jobs.jobs.values()), default=now) - now
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
                # A settled job has no lease any more: its settling turn was in flight together with this renewal.
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
            self.held_jobs.take_back({held})
            self.held_jobs.forget(held)
        else:
            held.interrupt(StopCause.LOST)


# Local checks, by the worker's own clock: timeouts, leases in doubt, and jobs held too long without a start.


@dataclass(frozen=True, kw_only=True)
class HeldJobWatch:
    """Checks every held job once per tick."""

    clock: Clock
    held_jobs: HeldJobs
    tick_s: float
    name: str = "watch"

    async def run_once(self) -> None:
        """Interrupts handlers that timed out or must stop on a doubtful lease, and releases jobs held too long."""
        now = self.clock.monotonic()
        running = [held for held in self.held_jobs.jobs.values() if held.began_at is not None and not held.finished]
        for held in (held for held in running if held.fate is None and _is_over(held, now)):
            _log.warning("handler_timed_out", job_id=held.lease.job_id, timeout_s=held.spec.options.timeout_s)
            held.interrupt(StopCause.TIMED_OUT)
        for held in (held for held in running if held.fate is None and _must_stop(held, now)):
            _log.warning("lease_in_doubt", job_id=held.lease.job_id, epoch=held.lease.epoch)
            held.interrupt(StopCause.DOUBTED)
        self._give_back(now)

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        return self.tick_s

    def _give_back(self, now: float) -> None:
        """Releases jobs that did not start within half a heartbeat interval, so that an idle worker can claim them."""
        stale = [h for h in self.held_jobs.waiting() if not h.finished and now - h.taken_at > h.claimed.heartbeat_s / 2]
        if stale:
            self.held_jobs.take_back(set(stale))
            for held in stale:
                self.held_jobs.settle(held, release_advance(held, "not begun within half a heartbeat"))


def _is_over(held: HeldJob, now: float) -> bool:
    timeout_s = held.spec.options.timeout_s
    return timeout_s is not None and held.began_at is not None and now - held.began_at >= timeout_s


def _must_stop(held: HeldJob, now: float) -> bool:
    return held.spec.options.on_lease_doubt is OnLeaseDoubt.STOP and held.fence <= now

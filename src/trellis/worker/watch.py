"""What this worker watches on its own clock: timeouts, leases in doubt, and jobs it holds without getting to them."""

from dataclasses import dataclass

from trellis.engine.clock import Clock
from trellis.engine.logs import log_of
from trellis.worker.held import HeldJob, HeldJobs, StopCause
from trellis.worker.options import OnLeaseDoubt
from trellis.worker.outcomes import release_advance

_log = log_of("trellis.worker")


@dataclass(frozen=True, slots=True)
class WatchReport:
    """What one look changed."""

    timed_out: int = 0
    doubted: int = 0
    given_back: int = 0


@dataclass(frozen=True, kw_only=True)
class HeldJobWatch:
    """Looks at every held job, once a tick."""

    clock: Clock
    holdings: HeldJobs
    tick_s: float
    name: str = "watch"

    async def run_once(self) -> WatchReport:
        """One look."""
        now = self.clock.monotonic()
        running = [held for held in self.holdings.jobs.values() if held.began_at is not None and not held.finished]
        timed_out = [held for held in running if held.fate is None and _is_over(held, now)]
        for held in timed_out:
            _log.warning("handler_timed_out", job_id=held.lease.job_id, timeout_s=held.spec.options.timeout_s)
            held.interrupt(StopCause.TIMED_OUT)
        doubted = [held for held in running if held.fate is None and _must_stop(held, now)]
        for held in doubted:
            _log.warning("lease_in_doubt", job_id=held.lease.job_id, epoch=held.lease.epoch)
            held.interrupt(StopCause.DOUBTED)
        return WatchReport(len(timed_out), len(doubted), self._give_back(now))

    def pause_s(self, report: WatchReport) -> float:  # noqa: ARG002 - the shape of every service
        """Always the same."""
        return self.tick_s

    def _give_back(self, now: float) -> int:
        """Jobs not begun within half a heartbeat go to whoever is free; holding on would only keep others idle."""
        stale = [h for h in self.holdings.waiting() if not h.finished and now - h.taken_at > h.claimed.heartbeat_s / 2]
        if stale:
            self.holdings.take_back(set(stale))
            for held in stale:
                self.holdings.settle(held, release_advance(held, "not begun within half a heartbeat"))
        return len(stale)


def _is_over(held: HeldJob, now: float) -> bool:
    timeout_s = held.spec.options.timeout_s
    return timeout_s is not None and held.began_at is not None and now - held.began_at >= timeout_s


def _must_stop(held: HeldJob, now: float) -> bool:
    return held.spec.options.on_lease_doubt is OnLeaseDoubt.STOP and held.fence <= now

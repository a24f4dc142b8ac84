"""Progress and log lines of held jobs, on their way to the ledger: no transitions, so a lost one loses nothing else."""

from dataclasses import dataclass

from trellis.engine.jobs import LeaseLost, StepApplied
from trellis.engine.ledger import Ledger
from trellis.worker.held import HeldJob, HeldJobs

SIGNAL_PROGRESS = "job_heartbeat"


async def flush(ledger: Ledger, held: HeldJob, *, last: bool) -> StepApplied | LeaseLost | None:
    """Write what a job has to say, if it has anything."""
    signals = held.logs.take(last=last) if held.logs is not None else []
    if held.progress is not None:
        signals.append((SIGNAL_PROGRESS, held.progress))
        held.progress = None
    return await ledger.signal(held.lease, signals) if signals else None


@dataclass(frozen=True, kw_only=True)
class SignalWriter:
    """Tells the ledger about running jobs every so often."""

    ledger: Ledger
    holdings: HeldJobs
    interval_s: float
    name: str = "signals"

    async def run_once(self) -> int:
        """Write what has gathered; how many jobs had something."""
        telling = [h for h in self.holdings.jobs.values() if h.progress is not None or h.logs is not None]
        told = 0
        for held in telling:
            if not held.finished and await flush(self.ledger, held, last=False) is not None:
                told += 1
        return told

    def pause_s(self, report: int) -> float:  # noqa: ARG002 - the shape of every service
        """Always the same."""
        return self.interval_s

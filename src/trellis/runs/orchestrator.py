"""The built-in orchestration layer: takes up runs and drives them, as many processes of it as one likes (PIPE-2, PIPE-3, D16).

One run per agent is kept by the ledger (the concurrency key `run:<slug>`), and so is who drives a run (its lease).
"""

from dataclasses import dataclass

from trellis.engine.holding import LeaseRunner, LeaseRunnerOptions
from trellis.engine.jobs import Actor, JobId, Move, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.runs.driver import RunDriver

TYPE = "agent-run"
ACCEPT_BATCH_MAX = 100

OrchestratorOptions = LeaseRunnerOptions


@dataclass(kw_only=True)
class Orchestrator(LeaseRunner[RunDriver]):
    """Claims runs and drives them. One pass accepts what was requested, then claims for the free room."""

    type: str = TYPE
    lifecycle: str = "run"
    name: str = "orchestrator"

    async def accept(self) -> int:
        """Take in what was only requested, oldest first: whoever triggers a run does that too, but may die in between."""
        where = JobFilter(lifecycle="run", state="requested")
        found = (await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, oldest_first=True)).jobs
        for run in found:
            await accept(self.ledger, self.actor, run.job_id)
        return len(found)


async def accept(ledger: Ledger, actor: Actor, run_id: JobId) -> None:
    """The orchestration layer has the run now. Doing it twice is doing it once."""
    await ledger.move(actor, Move(job_id=run_id, target="queued", request_id=RequestId(f"accept:{run_id}")))

"""The built-in orchestration layer: takes up runs and drives them, as many processes of it as one likes (PIPE-2, PIPE-3, D16).

One run per agent is kept by the ledger (the concurrency key `run:<slug>`), and so is who drives a run (its lease).
"""

from dataclasses import dataclass

from trellis.engine.holding import Holder, HolderOptions
from trellis.engine.jobs import Actor, JobId, Move, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.runs.driver import Driver

TYPE = "agent-run"
ACCEPT_BATCH_MAX = 100
ACCEPT_PAGES_MAX = 100

OrchestratorOptions = HolderOptions


@dataclass(kw_only=True)
class Orchestrator(Holder[Driver]):
    """Claims runs and drives them. One pass accepts what was requested, then claims for the free room."""

    type: str = TYPE
    lifecycle: str = "run"
    name: str = "orchestrator"

    async def accept(self) -> int:
        """Take in what was only requested, oldest first: whoever triggers a run does that too, but may die in between."""
        found = await self._requested()
        for run_id in found:
            await accept(self.ledger, self.actor, run_id)
        return len(found)

    async def _requested(self) -> list[JobId]:
        """The oldest of those only requested. Listings begin with the newest, so that all pages are read; mostly there is none."""
        where, found, cursor = JobFilter(lifecycle="run", state="requested"), list[JobId](), None
        for _ in range(ACCEPT_PAGES_MAX):
            page = await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, cursor=cursor)
            found += [job.job_id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        return found[: -ACCEPT_BATCH_MAX - 1 : -1]


async def accept(ledger: Ledger, actor: Actor, run_id: JobId) -> None:
    """The orchestration layer has the run now. Doing it twice is doing it once."""
    await ledger.move(actor, Move(job_id=run_id, target="queued", request_id=RequestId(f"accept:{run_id}")))

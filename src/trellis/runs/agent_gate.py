"""Reopens the concurrency key of an agent's runs once a stopped agent may run again (D24).

Runs of a stopped agent stay queued until the agent is active again or the runs are cancelled. The ledger's claim
decides which run starts, but the agent's status is in its file. So the first driver that finds the agent stopped sets
the limit of the agent's concurrency key to 0. From then on no run of that agent is claimed, and none takes a slot that
other agents need.

This service restores the limit when the file says that the agent may run. It also does so when the file is gone or
unreadable: the runs are then claimed and fail with that error.
"""

from dataclasses import dataclass

from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles.run import RUN

PAGE = 200
KEY = "run:"
RUNS_AT_ONCE = 1

_log = log_of("trellis.gate")


def run_key(slug: str) -> str:
    """The concurrency key of an agent's runs."""
    return f"{KEY}{slug}"


PAGE_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """Result of one pass: the agents whose runs may start again."""

    agents: tuple[str, ...] = ()


@dataclass(kw_only=True)
class AgentGate:
    """The service.

    Each pass checks one page of the runs that are blocked by their concurrency key, all pages in turn.
    """

    ledger: Ledger
    actor: Actor
    catalog: Catalog
    poll_s: float = 5.0
    name: str = "agent-gate"
    _cursor: str | None = None

    async def run_once(self) -> GateReport:
        """Restore the limit of keys whose agent may run again."""
        where = JobFilter(lifecycle=RUN.name, place=JobPlace.BLOCKED)
        page = await self.ledger.jobs(where, limit=PAGE, cursor=self._cursor)
        self._cursor = page.cursor
        keys = {job.concurrency_key for job in page.jobs if job.concurrency_key is not None}
        opened = [key.removeprefix(KEY) for key in sorted(keys) if await self._is_to_open(key)]
        for slug in opened:
            await self.ledger.limit_key(self.actor, run_key(slug), RUNS_AT_ONCE, cause="its agent may run again")
            _log.info("agent_goes_on", agent=slug)
        return GateReport(agents=tuple(opened))

    def pause_s(self, report: GateReport) -> float:  # noqa: ARG002 - the shape of every service
        """A short pause while there are more pages to check, else `poll_s`."""
        return self.poll_s if self._cursor is None else PAGE_PAUSE_S

    async def _is_to_open(self, key: str) -> bool:
        """Whether no run of this key is leased or ready although its agent may run.

        Otherwise its runs only wait for each other.

        Only the agent's status decides. To hold back an agent's runs, pause the agent, not the key.
        """
        for place in (JobPlace.LEASED, JobPlace.READY):
            where = JobFilter(lifecycle=RUN.name, concurrency_key=key, place=place)
            if (await self.ledger.jobs(where, limit=1)).jobs:
                return False
        agent = await self.catalog.load(key.removeprefix(KEY))
        return not isinstance(agent, AgentDefinition) or agent.may_run

"""Runs of an agent that was stopped stay queued until it is active again, or somebody cancels them (D24).

Which run may begin is decided by the ledger's claim, and that an agent is stopped stands in its file. So the first
driver that finds an agent stopped takes the limit of its concurrency key away: no run of it is handed out any more, and
none takes the place of another agent's. This service gives the limit back once the file says that the agent may run, or
is gone or unreadable: then its runs end, and say so.
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
    """What one pass did."""

    agents: tuple[str, ...] = ()


@dataclass(kw_only=True)
class AgentGate:
    """The service. A pass looks at a page of the runs that wait for their key, the whole of them in turn."""

    ledger: Ledger
    actor: Actor
    catalog: Catalog
    poll_s: float = 5.0
    name: str = "agent-gate"
    _cursor: str | None = None

    async def run_once(self) -> GateReport:
        """Let the runs of agents go on that may run again."""
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
        """Soon while there are more pages to look at."""
        return self.poll_s if self._cursor is None else PAGE_PAUSE_S

    async def _is_to_open(self, key: str) -> bool:
        """Whether nobody has a place of this key although its agent may run. Else its runs only wait for each other.

        The status of the agent alone decides: whoever wants its runs to wait pauses the agent, not the key.
        """
        for place in (JobPlace.LEASED, JobPlace.READY):
            where = JobFilter(lifecycle=RUN.name, concurrency_key=key, place=place)
            if (await self.ledger.jobs(where, limit=1)).jobs:
                return False
        agent = await self.catalog.load(key.removeprefix(KEY))
        return not isinstance(agent, AgentDefinition) or agent.may_run

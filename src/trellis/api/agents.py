"""Agents: list and read them, let one run, or let no further run of it begin (D24)."""

from trellis.agents.catalog import Agent, AgentMissing
from trellis.agents.definition import AgentMalformed, AgentStatus
from trellis.agents.errors import AgentNotFound
from trellis.agents.models import model_problem
from trellis.api.context import LIMIT_DEFAULT, ApiContext
from trellis.auth.ownership import sees_all
from trellis.http.shapes import AgentChanged, AgentShape, Page
from trellis.runs.agent_status import last_failure, set_status


class LocalAgents:
    """Agents on a ledger and its stores, with the calls of `client.agents`."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def list(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[AgentShape]:
        """The agents, by name."""
        self._context.check_read("agents.read")
        catalog = (await self._context.instance()).catalog
        listed = [one for one in (await catalog.list()).agents if cursor is None or (one.slug or "") > cursor]
        after = listed[limit - 1].slug if len(listed) > limit else None
        return Page[AgentShape](items=[await self._shape(one) for one in listed[:limit]], next_cursor=after)

    async def get(self, agent: str) -> AgentShape:
        """One agent; raises AgentNotFound."""
        self._context.check_read("agents.read")
        agent_file = await (await self._context.instance()).catalog.load(agent)
        if isinstance(agent_file, AgentMissing):
            raise AgentNotFound(slug=agent)
        return await self._shape(agent_file)

    async def activate(self, agent: str, *, reason: str | None = None) -> AgentChanged:
        """Let an agent run."""
        return await self.change(agent, AgentStatus.ACTIVE, reason=reason)

    async def pause(self, agent: str, *, reason: str | None = None) -> AgentChanged:
        """Let no further run of it begin."""
        return await self.change(agent, AgentStatus.PAUSED, reason=reason)

    async def change(
        self, agent: str, status: AgentStatus, *, reason: str | None, correlation_id: str | None = None
    ) -> AgentChanged:
        """Give an agent a status, as an administrative act. Giving it the status that it has changes nothing."""
        actor, instance = self._context.permit("agents.status"), await self._context.instance()
        changed = await set_status(
            instance.catalog, instance.ledger, actor, agent, status, reason=reason, correlation_id=correlation_id
        )
        shape = await self._shape(changed.agent)
        return AgentChanged(**shape.model_dump(), previous=changed.previous.value)

    async def _shape(self, agent: Agent) -> AgentShape:
        if isinstance(agent, AgentMalformed):
            problems = [str(problem) for problem in agent.problems]
            return AgentShape(slug=agent.slug, status="malformed", problems=problems)
        shows_problem = agent.status is AgentStatus.ERROR and sees_all(self._context.reader, "runs.read")
        failure = await last_failure(self._context.ledger, agent.slug) if shows_problem else None
        return AgentShape(
            slug=agent.slug,
            status=agent.status.value,
            name=agent.name,
            version=agent.version,
            description=agent.description,
            tools=[tool.value for tool in agent.tools],
            cron=agent.triggers.cron,
            problems=[problem] if (problem := model_problem(agent.model)) else [],
            warnings=[str(warning) for warning in agent.warnings],
            last_run=None if failure is None else failure.run_id,
            last_error=None if failure is None else failure.error,
        )

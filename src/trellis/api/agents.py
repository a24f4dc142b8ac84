"""Agents: list and read them, let one run, or let no further run of it begin (D24)."""

from trellis.agents.catalog import Agent, AgentFile, AgentMissing
from trellis.agents.definition import AgentMalformed, AgentStatus
from trellis.agents.errors import AgentNotFound, DefinitionMalformed
from trellis.agents.models import model_problem
from trellis.agents.sources import SOURCES_TOKENS_MAX
from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.auth.ownership import sees_all
from trellis.engine.cron import next_instants
from trellis.http.agent_shapes import AgentDetail, AgentSourceShape, AgentSourcesShape, SourceLeftOut
from trellis.http.shapes import AgentChanged, AgentShape, Page
from trellis.runs.agent_status import FAILURES_MAX, failed_in_a_row, last_failure, set_status

READ = "agents.read"
SHOWN_INSTANTS = 5


class LocalAgents(ApiPart):
    """Agents on a ledger and its stores, with the calls of `client.agents`."""

    async def list(self, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[AgentShape]:
        self._context.check_read(READ)
        catalog = (await self._context.instance()).catalog
        listed = [one for one in (await catalog.list()).agents if cursor is None or (one.slug or "") > cursor]
        after = listed[limit - 1].slug if len(listed) > limit else None
        return Page[AgentShape](items=[await self._shape(one) for one in listed[:limit]], next_cursor=after)

    async def get(self, agent: str) -> AgentDetail:
        """One agent with its whole definition; raises AgentNotFound."""
        file = await self._load(agent)
        agent_file, shape = file.agent, (await self._shape(file.agent)).model_dump()
        if isinstance(agent_file, AgentMalformed):
            return AgentDetail(**shape)
        counted = sees_all(self._context.reader, "runs.read")
        cron = agent_file.triggers.cron if agent_file.may_run else None
        return AgentDetail(
            **shape,
            model=agent_file.model,
            safe_outputs=[one.value for one in agent_file.safe_outputs],
            temperature=agent_file.temperature,
            max_steps=agent_file.max_steps,
            manual=agent_file.triggers.manual,
            events=[str(one) for one in agent_file.triggers.events],
            next=[] if cron is None else next_instants(cron, await self._context.now(), SHOWN_INSTANTS),
            folder=agent_file.context.folder,
            max_sources=agent_file.context.max_sources,
            memory_mode=agent_file.context.mode.value,
            created_at=agent_file.created_at,
            created_by=agent_file.created_by,
            updated_at=agent_file.updated_at,
            failed_in_a_row=await failed_in_a_row(self._context.ledger, agent, file) if counted else None,
            failed_in_a_row_max=FAILURES_MAX,
            instructions=agent_file.instructions,
            sha256=agent_file.sha256,
        )

    async def sources(self, agent: str) -> AgentSourcesShape:
        """What an agent would read if it ran now. Raises AgentNotFound, DefinitionMalformed."""
        definition = (await self._load(agent)).agent
        if isinstance(definition, AgentMalformed):
            raise DefinitionMalformed(problems=definition)
        read = await (await self._context.instance()).catalog.sources(agent, definition)
        return AgentSourcesShape(
            agent=agent,
            items=[AgentSourceShape(ref=one.ref, sha256=one.sha256, text=one.text) for one in read.items],
            left_out=[SourceLeftOut(ref=one.ref, reason=one.reason.value, detail=one.detail) for one in read.left_out],
            tokens=read.tokens,
            tokens_max=SOURCES_TOKENS_MAX,
            complete=read.complete,
        )

    async def activate(self, agent: str, *, reason: str | None = None) -> AgentChanged:
        return await self.change(agent, AgentStatus.ACTIVE, reason=reason)

    async def pause(self, agent: str, *, reason: str | None = None) -> AgentChanged:
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

    async def _load(self, agent: str) -> AgentFile:
        """The file of the agent, if the caller may read agents; raises AgentNotFound, NotAllowed."""
        self._context.check_read(READ)
        file = await (await self._context.instance()).catalog.file(agent)
        if isinstance(file, AgentMissing):
            raise AgentNotFound(slug=agent)
        return file

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

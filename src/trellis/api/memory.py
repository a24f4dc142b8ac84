"""Agents' memory, to read: layer 1 and its history (AUTH-4, D44, D62). Layer 2 has a rule and a route of its own."""

import asyncio
from dataclasses import asdict
from typing import Literal

from trellis.agents.catalog import AgentMissing
from trellis.agents.definition import AgentMalformed
from trellis.agents.errors import AgentNotFound, DefinitionMalformed
from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.http.agent_shapes import MemoryDiff
from trellis.http.pages import read_pages
from trellis.http.shapes import MemoryChange, MemoryRead, Page
from trellis.runs.memory_access import check_reach, only_agent
from trellis.storage.memory.layout import CommitId, HistoryEntry, MemoryView, ReadMode
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.objects.canonical_json import timestamp

READ = "memory.read"


class LocalMemory(ApiPart):
    """Agents' memory in its repository, with the calls of `client.memory`. Every call raises NotAllowed."""

    async def list(self, *, limit: int = LIMIT_DEFAULT) -> Page[MemoryRead]:
        """The memories of the agents that the caller reaches, by name, each with its facts."""
        self._context.permit(READ)
        instance = await self._context.instance()
        only = await only_agent(instance.ledger, self._context.reader, READ)
        agents = (await instance.catalog.list()).agents
        slugs = [agent.slug for agent in agents if not isinstance(agent, AgentMalformed) and only in {None, agent.slug}]
        views = [await asyncio.to_thread(instance.memory.read, slug, ReadMode.WIDE) for slug in slugs[:limit]]
        return Page[MemoryRead](items=[_read(view) for view in views], next_cursor=None)

    async def read(self, agent: str, *, mode: Literal["basic", "wide"] = "basic") -> MemoryRead:
        """Layer 1 of one memory. Raises SlugInvalid, AgentNotFound, DefinitionMalformed, MemoryOverLimit."""
        memory = await self._memory_of(agent)
        return _read(await asyncio.to_thread(memory.read, agent, ReadMode(mode)))

    async def history(self, agent: str, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[MemoryChange]:
        """The changes of one memory, newest first. Raises as `read` does."""
        return await read_pages(lambda size, after: self.history_page(agent, limit=size, cursor=after), limit, cursor)

    async def history_page(self, agent: str, *, limit: int, cursor: str | None) -> Page[MemoryChange]:
        """One page of them, which may be empty and still have a next one."""
        memory = await self._memory_of(agent)
        start = None if cursor is None else CommitId(cursor)
        commits = await asyncio.to_thread(memory.history, agent, limit=limit, before=start)
        return Page[MemoryChange](items=[_change(entry) for entry in commits.entries], next_cursor=commits.more)

    async def diff(self, agent: str, from_version: int, to_version: int | None = None) -> MemoryDiff:
        """What changed from one version to another, or to the newest. Raises as `read`, and MemoryVersionNotFound."""
        memory = await self._memory_of(agent)
        newest = (await asyncio.to_thread(memory.read, agent)).version if to_version is None else to_version
        text = await asyncio.to_thread(memory.diff, agent, from_version, newest)
        return MemoryDiff(agent_id=agent, from_version=from_version, to_version=newest, diff=text)

    async def _memory_of(self, agent: str) -> MemoryRepository:
        """The repository, if the caller may read this agent's memory and the agent exists."""
        self._context.permit(READ)
        instance = await self._context.instance()
        await check_reach(instance.ledger, self._context.reader, READ, agent)
        agent_file = await instance.catalog.load(agent)
        if isinstance(agent_file, AgentMissing):
            raise AgentNotFound(slug=agent)
        if isinstance(agent_file, AgentMalformed):
            raise DefinitionMalformed(problems=agent_file)
        return instance.memory


def _read(view: MemoryView) -> MemoryRead:
    return MemoryRead(
        agent_id=view.agent_id,
        mode=view.mode.value,
        version=view.version,
        commit=view.commit,
        files=dict(view.content),
        token_count=view.token_count,
        last_update=None if view.last_update is None else timestamp(view.last_update),
        last_run_id=view.last_run_id,
    )


def _change(entry: HistoryEntry) -> MemoryChange:
    return MemoryChange.model_validate({**asdict(entry), "at": timestamp(entry.at)})

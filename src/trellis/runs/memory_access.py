"""Reading what agents remember, for every entrance: who may is asked here (AUTH-4, D44, D62), and so is whether there is such an agent.

Layer 1 and the history of a memory go by the rule `memory.read`. The answers are documents as the gateway gives them.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentMalformed
from trellis.agents.errors import AgentNotFound, DefinitionMalformed
from trellis.engine.authority import Principal
from trellis.engine.ledger import Ledger
from trellis.engine.matrices import permit
from trellis.runs.agent_reach import check_reach, only_agent
from trellis.runs.documents import timestamp
from trellis.storage.memory import HistoryEntry, MemoryRepository, MemoryView, ReadMode
from trellis.storage.memory.layout import CommitId

READ = "memory.read"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccess:
    """The memories of one instance, for whoever may read them. Every verb raises NotAllowed."""

    ledger: Ledger
    catalog: Catalog
    memory: MemoryRepository

    async def summaries(self, principal: Principal) -> list[dict[str, Any]]:
        """The agents within reach, each with the version and the size of its memory."""
        permit(principal, READ)
        only = await only_agent(self.ledger, principal, READ)
        slugs = [agent.slug for agent in (await self.catalog.list()).agents if not isinstance(agent, AgentMalformed)]
        wanted = [slug for slug in slugs if only is None or slug == only]
        return [_short(await asyncio.to_thread(self.memory.read, slug, ReadMode.WIDE)) for slug in wanted]

    async def read(self, principal: Principal, agent: str, mode: ReadMode) -> dict[str, Any]:
        """Layer 1 of one memory. Raises SlugInvalid, AgentNotFound, DefinitionMalformed, MemoryOverLimit."""
        await self._check(principal, agent)
        view = await asyncio.to_thread(self.memory.read, agent, mode)
        return {**_short(view), "mode": view.mode.value, "files": dict(view.content)}

    async def history(
        self, principal: Principal, agent: str, *, limit: int, before: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The changes of one memory, newest first, and where the next page begins. Raises as `read` does."""
        await self._check(principal, agent)
        start = None if before is None else CommitId(before)
        found = await asyncio.to_thread(self.memory.history, agent, limit=limit, before=start)
        return [_change(entry) for entry in found.entries], found.more

    async def _check(self, principal: Principal, agent: str) -> None:
        permit(principal, READ)
        await check_reach(self.ledger, principal, READ, agent)
        found = await self.catalog.load(agent)
        if isinstance(found, AgentMissing):
            raise AgentNotFound(slug=agent)
        if isinstance(found, AgentMalformed):
            raise DefinitionMalformed(problems=found)


def _short(view: MemoryView) -> dict[str, Any]:
    return {
        "agent_id": view.agent_id,
        "version": view.version,
        "commit": view.commit,
        "token_count": view.token_count,
        "last_update": None if view.last_update is None else timestamp(view.last_update),
        "last_run_id": view.last_run_id,
    }


def _change(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "commit": entry.commit,
        "at": timestamp(entry.at),
        "author": entry.author,
        "version": entry.version,
        "proposal_id": entry.proposal_id,
        "run_id": entry.run_id,
        "auto_approved": entry.auto_approved,
        "reason": entry.reason,
        "files": [
            {"file": change.file, "kind": change.kind.value, "added": change.added, "removed": change.removed}
            for change in entry.files
        ],
    }

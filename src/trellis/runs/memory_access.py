"""Access control for agents and their memory: which agent a principal may reach, and reading an agent's memory."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentMalformed
from trellis.agents.errors import AgentNotFound, DefinitionMalformed
from trellis.auth.matrices import permit
from trellis.auth.ownership import bound_agent, not_allowed_within, within_agent
from trellis.auth.principals import Principal
from trellis.documents.run_documents import timestamp
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.storage.memory import HistoryEntry, MemoryRepository, MemoryView, ReadMode
from trellis.storage.memory.layout import CommitId

# Which agent a principal may reach: the one its token is bound to, or the one whose job the token is for (D62, AUTH-3).
#
# The HTTP gateway and the command line both check here.


async def agent_of(ledger: Ledger, job_id: str) -> str | None:
    """The agent that a job of the job queue works for; None for any other job."""
    job = await ledger.job(JobId(job_id))
    if job is None or job.lifecycle != QUEUE_JOB.name:
        return None
    try:
        stored: Any = json.loads(job.payload or b"{}")
        return str(stored["agent_slug"])
    except (KeyError, ValueError, TypeError):
        return None


async def only_agent(ledger: Ledger, principal: Principal, rule: str) -> str | None:
    """The one agent that this rule lets the principal reach; None for all. Raises NotAllowed if it may reach none."""
    if principal.job_id is None:
        return bound_agent(principal, rule)
    agent = await agent_of(ledger, principal.job_id)
    if agent is None:
        raise not_allowed_within(principal, rule, "for the agent of its token's job only")
    within_agent(principal, rule, agent)
    return agent


async def check_reach(ledger: Ledger, principal: Principal, rule: str, agent: str | None) -> None:
    """Raise NotAllowed unless the principal may reach this agent. `agent` is None if the object does not exist."""
    only = await only_agent(ledger, principal, rule)
    if only is not None and only != agent:
        raise not_allowed_within(principal, rule, f"for agent {only} only")


# Reading agent memories, for the gateway and the command line. Checks permission (AUTH-4, D44, D62) and that the agent
# exists.
#
# Layer 1 and the history of a memory require the rule `memory.read`. Results have the form of the gateway's documents.

READ = "memory.read"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccess:
    """Reads the memories of one instance. Every method raises NotAllowed."""

    ledger: Ledger
    catalog: Catalog
    memory: MemoryRepository

    async def summaries(self, principal: Principal) -> list[dict[str, Any]]:
        """The agents that the principal may reach, each with the version and size of its memory."""
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
        """The commits of one memory, newest first, and the cursor of the next page. Raises as `read` does."""
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

"""Assembles the context of one execution: the agent's memory, sources and entities at this moment.

The snapshot is written once per epoch and never changes, so every execution of this attempt reads the same. Layer 2 is
never read (AUTH-4). A text is included whole or not at all. A source requested by name that is unavailable fails the
job.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentDefinition, AgentMalformed
from trellis.agents.errors import AgentError
from trellis.agents.sources import AgentSource, AgentSources
from trellis.artifacts.content import TITLE_CHARS_MAX, JobType
from trellis.artifacts.payloads import (
    ENTITIES_MAX,
    NAME_CHARS_MAX,
    BriefPayload,
    Snapshot,
    read_payload,
)
from trellis.artifacts.rows import PROJECTS
from trellis.engine.errors import InputError, Refused
from trellis.research.errors import ContextUnavailable, StageHopeless
from trellis.research.queue_job import QueueRequest, requested_sources
from trellis.runs.memory_readers import MemoryReader
from trellis.storage.memory.errors import RepositoryError
from trellis.storage.memory.layout import ReadMode, TokenCounter, count_tokens
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, StoreError

MEMORY_FOLDER = "memory"
HEADING = "# "


def snapshot_key(cid: str, job_id: str, epoch: int) -> str:
    return object_key(PROJECTS, cid, "snapshots", job_id, f"{epoch}.json")


@dataclass(frozen=True, kw_only=True)
class ContextAssembler:
    """Builds snapshots from the agents' files and memories."""

    objects: ObjectStore
    memory: MemoryReader
    cid: str
    counter: TokenCounter = count_tokens
    """Counts the tokens of sources (D50)."""

    async def assemble(self, request: QueueRequest, job_id: str, epoch: int) -> str:
        """Writes the snapshot of this attempt and returns its sha256. Raises a StageError."""
        try:
            return await self._stored(
                snapshot_key(self.cid, job_id, epoch), await self._snapshot(request, job_id, epoch)
            )
        except StoreError as error:
            raise ContextUnavailable(detail=str(error)) from error
        except (InputError, Refused, AgentError) as error:
            raise StageHopeless(detail=str(error)) from error

    async def check(self, request: QueueRequest) -> AgentDefinition:
        """Returns the agent if it exists and may run. Raises StageHopeless, StoreError."""
        agent = await Catalog(self.objects).load(request.agent_slug)
        if isinstance(agent, AgentMissing | AgentMalformed):
            raise StageHopeless(detail=f"agent {request.agent_slug} cannot run: {agent}")
        if not agent.may_run:
            detail = f"agent {request.agent_slug} is {agent.status.value}; only an active agent runs"
            raise StageHopeless(detail=detail)
        return agent

    async def _snapshot(self, request: QueueRequest, job_id: str, epoch: int) -> bytes:
        """Builds the snapshot in a thread: it is CPU-bound, and the event loop must renew leases."""
        agent = await self.check(request)
        read = await Catalog(self.objects, counter=self.counter).sources(request.agent_slug, agent)
        memory = await self._memory(request.agent_slug)
        return await asyncio.to_thread(_snapshot, request, job_id, epoch, memory, read)

    async def _memory(self, slug: str) -> dict[str, Any]:
        """Reads layer 1, basic: the memory that every execution gets."""
        try:
            view = await self.memory.read(slug, ReadMode.BASIC)
        except RepositoryError as error:
            raise ContextUnavailable(detail=str(error)) from error
        files = [{"ref": f"{MEMORY_FOLDER}/{name}", "text": text} for name, text in view.content.items() if text]
        return {"version": str(view.version) if view.version else None, "files": files}

    async def _stored(self, key: str, body: bytes) -> str:
        """Stores the snapshot. An existing one of this epoch is from an earlier write whose answer was lost."""
        if isinstance(await self.objects.put(key, body, when=CREATE), PutStored):
            return sha256(body)
        stored = await self.objects.get(key)
        if stored is None:
            raise ContextUnavailable(detail=f"the snapshot {key} was there and is gone")
        return sha256(stored.body)


def _snapshot(request: QueueRequest, job_id: str, epoch: int, memory: dict[str, Any], read: AgentSources) -> bytes:
    payload = read_payload(request.job_type, request.payload)
    meant = (*request.entity_refs, *(payload.entity_refs if isinstance(payload, BriefPayload) else ()))
    return Snapshot.of(
        job_id=job_id,
        epoch=epoch,
        agent_slug=request.agent_slug,
        memory=memory,
        entities=_entities(meant, read.items, also_known=request.job_type is JobType.PROPOSAL_PREPROCESS),
        sources=[
            {"ref": one.ref, "text": one.text, "title": title_of(one.text)} for one in requested_sources(request, read)
        ],
    ).to_bytes()


def _entities(meant: Sequence[str], sources: Sequence[AgentSource], *, also_known: bool) -> list[dict[str, Any]]:
    """Builds the entities. A source whose file name is the entity's slug describes it; its heading is the name.

    A draft may name any entity that the agent knows, so `also_known` includes all of them.
    """
    about: dict[str, AgentSource] = {}
    for one in sources:
        about.setdefault(PurePosixPath(one.ref).stem, one)
    slugs = list(dict.fromkeys((*meant, *(about if also_known else ()))))[:ENTITIES_MAX]
    return [_entity(slug, about.get(slug)) for slug in slugs]


def _entity(slug: str, source: AgentSource | None) -> dict[str, Any]:
    if source is None:
        return {"slug": slug, "name": slug}
    title, spelt = title_of(source.text), " ".join(re.split(r"[-_]+", slug)).strip()
    name = (title or spelt or slug)[:NAME_CHARS_MAX]
    aliases = [spelt] if spelt and spelt.casefold() != name.casefold() else []
    return {"slug": slug, "name": name, "aliases": aliases, "ref": source.ref}


def title_of(text: str) -> str | None:
    """Returns the first non-empty heading of a Markdown text."""
    for line in text.splitlines():
        if line.startswith(HEADING) and (title := line[len(HEADING) :].strip().rstrip("#").rstrip()):
            return title[:TITLE_CHARS_MAX]
    return None

"""The catalog of agents: lists and loads agents from the object store, and keeps an index for listings."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from trellis.agents.definition import (
    SLUG,
    SLUG_EXPECTED,
    AgentDefinition,
    AgentMalformed,
    AgentStatus,
    checked_slug,
    read_definition,
    with_status,
)
from trellis.agents.errors import DefinitionContended
from trellis.agents.frontmatter import FILE_BYTES_MAX, FrontMatterProblem, quoted_for_message
from trellis.agents.sources import AgentSources, read_sources
from trellis.storage.memory.layout import TokenCounter, count_tokens
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, ObjectInfo, ObjectStore, PutStored, if_match

# `agents/index.json`: a cache of the `_agent.md` files, for listings.
#
# It is never authoritative. Its bytes follow from the files alone, so concurrent rebuilds write the same bytes. It is
# fresh while it lists exactly the existing files with their etags. A missing, truncated or outdated index is rebuilt.

INDEX_KEY = "agents/index.json"
INDEX_BYTES_MAX = 4 * 1024 * 1024
INDEX_PROBLEMS_MAX = 5
"""Problems kept in the index for a malformed agent; `problem_count` has the number of all."""
INDEX_VERSION = 2
"""Increases with the form of an entry and with the validation rules."""


class IndexEntry(BaseModel):
    """Summary of one agent. A malformed one has problems instead of a name and a status."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slug: str
    etag: str
    sha256: str | None
    name: str | None = None
    status: AgentStatus | None = None
    version: str | None = None
    description: str | None = None
    model: str | None = None
    updated_at: AwareDatetime | None = None
    problems: tuple[str, ...] = ()
    problem_count: int = 0


class AgentIndex(BaseModel):
    """Summaries of all agents, by slug."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = INDEX_VERSION
    updated_at: AwareDatetime | None
    agents: tuple[IndexEntry, ...]

    def fits(self, etags: Mapping[str, str]) -> bool:
        """Whether the index lists exactly these files."""
        return {entry.slug: entry.etag for entry in self.agents} == etags

    def to_bytes(self) -> bytes:
        """The object's bytes. The same index always gives the same bytes."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def build_index(agents: Iterable[tuple[AgentDefinition | AgentMalformed, str]]) -> AgentIndex:
    """The index of these agents, each with the etag of its file."""
    entries = sorted((_entry(agent, etag) for agent, etag in agents), key=lambda entry: entry.slug)
    moments: list[datetime] = [entry.updated_at for entry in entries if entry.updated_at is not None]
    return AgentIndex(updated_at=max(moments, default=None), agents=tuple(entries))


def read_index(body: bytes) -> AgentIndex | None:
    """Parse the index; None if the bytes are not a valid index."""
    if len(body) > INDEX_BYTES_MAX:
        return None
    try:
        return AgentIndex.model_validate_json(body)
    except ValidationError:
        return None


def _entry(agent: AgentDefinition | AgentMalformed, etag: str) -> IndexEntry:
    if isinstance(agent, AgentMalformed):
        return IndexEntry(
            slug=agent.slug or "",
            etag=etag,
            sha256=agent.sha256,
            problems=tuple(str(problem) for problem in agent.problems[:INDEX_PROBLEMS_MAX]),
            problem_count=len(agent.problems),
        )
    return IndexEntry(
        slug=agent.slug,
        etag=etag,
        sha256=agent.sha256,
        name=agent.name,
        status=agent.status,
        version=agent.version,
        description=agent.description,
        model=agent.model,
        updated_at=agent.updated_at,
    )


# Agents in the object store. Invariants:
# - `agents/{slug}/_agent.md` is the agent; a folder without it is none.
# - A malformed file affects only its own agent: it is listed, with everything to correct in it.
# - A status change is written by compare-and-set over the bytes it was decided on, so no edit of the owner is lost.
# - Finding the agents costs at most two requests each, however many runs they have published.

AGENT_FILE = "_agent.md"
FOLDERS_MAX = 1_000
READS_AT_ONCE = 8
WRITE_TRIES_MAX = 5

_ROOT = "agents/"
_AFTER_SLASH = "0"
"""The character after `/`. A folder name followed by it sorts after everything in the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMissing:
    """There is no agent with this slug."""

    slug: str

    def __str__(self) -> str:
        return f"there is no {_ROOT}{self.slug}/{AGENT_FILE}"


Agent = AgentDefinition | AgentMalformed


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentFile:
    """An agent, and when the store last modified its file."""

    agent: Agent
    modified_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentList:
    """The agents by slug. `complete` is False if there are more than FOLDERS_MAX folders."""

    agents: tuple[Agent, ...]
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusChanged:
    """The agent as it is now, and its previous status. If they are equal, nothing was written."""

    agent: AgentDefinition
    previous: AgentStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class _AgentFileScan:
    """The agents' files, by folder."""

    files: dict[str, ObjectInfo]
    complete: bool


class Catalog:
    """The agents of one object store. Keeps nothing between calls. Every method may raise the store's errors."""

    def __init__(self, objects: ObjectStore, *, counter: TokenCounter = count_tokens) -> None:
        self._objects = objects
        self._counter = counter

    async def load(self, slug: str) -> Agent | AgentMissing:
        """One agent; raises SlugInvalid."""
        agent_file = await self.file(slug)
        return agent_file if isinstance(agent_file, AgentMissing) else agent_file.agent

    async def file(self, slug: str) -> AgentFile | AgentMissing:
        """One agent, with its file's modification time; raises SlugInvalid."""
        stored = await self._objects.get(agent_key(slug))
        if stored is None:
            return AgentMissing(slug=slug)
        return AgentFile(agent=read_definition(stored.body, slug=slug), modified_at=stored.modified_at)

    async def list(self) -> AgentList:
        """Every agent, read from its file."""
        scan = await self._scan()
        return AgentList(agents=tuple(agent for agent, _ in await self._read(scan)), complete=scan.complete)

    async def sources(self, slug: str, definition: AgentDefinition) -> AgentSources:
        """The agent's sources; raises SlugInvalid."""
        return await read_sources(self._objects, slug, definition.context, counter=self._counter)

    async def change_status(
        self, slug: str, status: AgentStatus, *, at: datetime, seen: str | None = None
    ) -> StatusChanged | AgentMissing | AgentMalformed:
        """Set another status in the agent's file; raises SlugInvalid, StatusChangeRefused and DefinitionContended.

        `seen` is the sha256 of the file on which the change was decided. If the owner has changed the file since, it
        stays.
        """
        key = agent_key(slug)
        for _ in range(WRITE_TRIES_MAX):
            stored = await self._objects.get(key)
            if stored is None:
                return AgentMissing(slug=slug)
            before = read_definition(stored.body, slug=slug)
            if isinstance(before, AgentMalformed):
                return before
            if seen is not None and before.sha256 != seen:
                return StatusChanged(agent=before, previous=before.status)
            body = with_status(stored.body, status, at=at)
            if body == stored.body:
                return StatusChanged(agent=before, previous=before.status)
            if isinstance(await self._objects.put(key, body, when=if_match(stored.etag)), PutStored):
                after = read_definition(body, slug=slug)
                assert isinstance(after, AgentDefinition), after
                return StatusChanged(agent=after, previous=before.status)
        raise DefinitionContended(slug=slug, tries=WRITE_TRIES_MAX)

    async def index(self) -> AgentIndex:
        """Summaries of all agents: the cached index if it is fresh, otherwise rebuilt from the files and stored."""
        for _ in range(WRITE_TRIES_MAX):
            cached = await self._objects.get(INDEX_KEY)
            scan = await self._scan()
            known = read_index(cached.body) if cached else None
            if known is not None and known.fits({folder: info.etag for folder, info in scan.files.items()}):
                return known
            agent_index = build_index(await self._read(scan))
            when = if_match(cached.etag) if cached else CREATE
            if isinstance(await self._objects.put(INDEX_KEY, agent_index.to_bytes(), when=when), PutStored):
                return agent_index
        # Other processes keep writing it. If the index is not stored, the next reader rebuilds it.
        return build_index(await self._read(await self._scan()))

    async def indexed(self, status: AgentStatus) -> Sequence[str]:
        """The agents that the stored index lists with this status, by slug. One read, which rebuilds nothing.

        Whoever changes a status refreshes the index. A file edited by hand is seen after the next refresh.
        """
        known = await self._stored_index()
        return [] if known is None else [entry.slug for entry in known.agents if entry.status is status]

    async def indexed_slugs(self) -> Sequence[str]:
        """The slugs of the agents in the stored index: one read. Without an index, their folders; no file is read."""
        known = await self._stored_index()
        return sorted((await self._scan()).files) if known is None else [entry.slug for entry in known.agents]

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _stored_index(self) -> AgentIndex | None:
        """The index as it was stored last, fresh or not."""
        stored = await self._objects.get(INDEX_KEY)
        return None if stored is None else read_index(stored.body)

    async def _scan(self) -> _AgentFileScan:
        """Find the agents' files by jumping from folder to folder, past everything else in them."""
        files: dict[str, ObjectInfo] = {}
        after: str | None = None
        for _ in range(FOLDERS_MAX):
            page = await self._objects.list(_ROOT, after=after, limit=1)
            if not page.items:
                return _AgentFileScan(files=files, complete=True)
            first = page.items[0]
            folder, slash, _ = first.key.removeprefix(_ROOT).partition("/")
            if not slash:
                after = first.key
                continue
            after = f"{_ROOT}{folder}{_AFTER_SLASH}"
            wanted = object_key("agents", folder, AGENT_FILE)
            info = first if first.key == wanted else await self._objects.head(wanted)
            if info is not None:
                files[folder] = info
        return _AgentFileScan(files=files, complete=False)

    async def _read(self, scan: _AgentFileScan) -> tuple[tuple[Agent, str], ...]:
        """The agents with the etags of the files read, by folder. Files removed meanwhile are left out."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def read(folder: str, info: ObjectInfo) -> tuple[Agent, str] | None:
            if not SLUG.fullmatch(folder):
                wrong = f"the folder is called {quoted_for_message(folder)}"
                return _unread(folder, "slug", wrong, SLUG_EXPECTED), info.etag
            if info.size > FILE_BYTES_MAX:
                wrong, most = f"the file has {info.size} bytes", f"at most {FILE_BYTES_MAX}"
                return _unread(folder, None, wrong, most), info.etag
            async with gate:
                stored = await self._objects.get(info.key)
            return None if stored is None else (read_definition(stored.body, slug=folder), stored.etag)

        tasks = [asyncio.create_task(read(*file)) for file in sorted(scan.files.items())]
        try:
            return tuple(stored for stored in await asyncio.gather(*tasks) if stored is not None)
        finally:
            for task in tasks:
                task.cancel()


def agent_key(slug: str) -> str:
    """The key of an agent's file; raises SlugInvalid."""
    return object_key("agents", checked_slug(slug), AGENT_FILE)


def _unread(folder: str, field: str | None, wrong: str, expected: str) -> AgentMalformed:
    """An agent whose file was not read."""
    problem = FrontMatterProblem(line=1, field=field, wrong=wrong, expected=expected)
    return AgentMalformed(slug=folder, problems=(problem,), sha256=None)

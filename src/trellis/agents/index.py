"""`agents/index.json`: a cache of what the `_agent.md` files say, for listings.

It never decides anything. Its bytes follow from the files alone, so whoever rebuilds it writes the same; it is fresh while
it names exactly the files that are there, each with its etag, and anything else about it (absent, cut off, of another
version, from another store) only means that it is made again.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from trellis.agents.definition import AgentDefinition, AgentMalformed, AgentStatus

INDEX_KEY = "agents/index.json"
INDEX_BYTES_MAX = 4 * 1024 * 1024
INDEX_PROBLEMS_MAX = 5
"""Of a malformed agent so many problems are kept here, and the number of all of them."""
INDEX_VERSION = 1
"""Rises with the shape of an entry and with the rules by which files are judged."""


class IndexEntry(BaseModel):
    """One agent in short. A malformed one has problems instead of a name and a status."""

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
    """All agents in short, by slug."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = INDEX_VERSION
    updated_at: AwareDatetime | None
    agents: tuple[IndexEntry, ...]

    def fits(self, etags: Mapping[str, str]) -> bool:
        """Whether it names exactly these files."""
        return {entry.slug: entry.etag for entry in self.agents} == etags

    def to_bytes(self) -> bytes:
        """The object's bytes: the same index always gives the same ones."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def build_index(agents: Iterable[tuple[AgentDefinition | AgentMalformed, str]]) -> AgentIndex:
    """The index of agents, each given with its folder's file and etag."""
    entries = sorted((_entry(agent, etag) for agent, etag in agents), key=lambda entry: entry.slug)
    moments: list[datetime] = [entry.updated_at for entry in entries if entry.updated_at is not None]
    return AgentIndex(updated_at=max(moments, default=None), agents=tuple(entries))


def read_index(body: bytes) -> AgentIndex | None:
    """The index, or None if these bytes are none."""
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

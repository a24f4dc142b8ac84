"""Documents about one agent in full: its definition, its sources, and what changed in its memory."""

from datetime import datetime

import pydantic

from trellis.http.shapes import AgentShape


class AgentDetail(AgentShape):
    """An agent with its whole definition. A malformed one has none: its `problems` say what to correct."""

    model: str | None = None
    safe_outputs: list[str] = pydantic.Field(default_factory=list[str])
    """The actions that it may propose."""
    temperature: float | None = None
    max_steps: int | None = None
    manual: bool | None = None
    """Whether a person may start it."""
    events: list[str] = pydantic.Field(default_factory=list[str])
    """The events that start a run of it, as its file names them."""
    next: list[datetime] = pydantic.Field(default_factory=list[datetime])
    """Its next five instants; none for an agent without `cron`, or one that is not active."""
    folder: str | None = None
    """Where its sources are, below its own folder."""
    max_sources: int | None = None
    memory_mode: str | None = None
    """How much of its memory it reads before it begins: `basic` or `wide`."""
    created_at: datetime | None = None
    created_by: str | None = None
    updated_at: datetime | None = None
    failed_in_a_row: int | None = None
    """For callers that may read every run: how many runs of it failed one after the other."""
    failed_in_a_row_max: int | None = None
    """With so many failed runs in a row it is stopped."""
    instructions: str | None = None
    """What its file tells it to do, in Markdown."""
    sha256: str | None = None
    """Of its file."""


class AgentSourceShape(pydantic.BaseModel):
    """A text that an agent reads and may cite."""

    ref: str
    sha256: str
    text: str


class SourceLeftOut(pydantic.BaseModel):
    """A file among an agent's sources that it does not read, and why."""

    ref: str
    reason: str
    detail: str


class AgentSourcesShape(pydantic.BaseModel):
    """What an agent would read if it ran now. `complete` is false if it has more files than were looked at."""

    agent: str
    items: list[AgentSourceShape]
    left_out: list[SourceLeftOut]
    tokens: int
    tokens_max: int
    complete: bool


class MemoryDiff(pydantic.BaseModel):
    """What changed in layer 1 of a memory from one version to another, as a unified diff; empty if nothing did."""

    agent_id: str
    from_version: int
    to_version: int
    diff: str

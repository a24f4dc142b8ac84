"""Agents: list and read them, activate and pause them (D24)."""

from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Path

from trellis.agents.definition import AgentStatus
from trellis.gateway.callers import Caller, requires
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page
from trellis.http.agent_shapes import AgentDetail, AgentSourcesShape
from trellis.http.shapes import AgentShape
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS

router = APIRouter(tags=["agents"], route_class=StrictRoute)

Slug = Annotated[str, Path(max_length=100, examples=["archivist-violin"])]


class StatusChange(pydantic.BaseModel):
    """The new status: `active` lets the agent run, `paused` lets no further run of it begin."""

    # The agent of the demo is already active, so trying the example changes nothing.
    model_config = body_config({"status": "active", "reason": "its sources were checked"})

    status: Literal["active", "paused"]
    reason: str | None = pydantic.Field(None, max_length=500)


@router.get("/agents", responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires("agents.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[AgentShape]:
    """List the agents, by name."""
    return await caller.api.agents.list(limit=limit, cursor=cursor)


@router.get("/agents/{slug}", responses=PROBLEMS)
async def one(slug: Slug, caller: Annotated[Caller, requires("agents.read")]) -> AgentDetail:
    """Get an agent with its whole definition, and the next instants of its schedule."""
    return await caller.api.agents.get(slug)


@router.get("/agents/{slug}/sources", responses=PROBLEMS)
async def sources(slug: Slug, caller: Annotated[Caller, requires("agents.read")]) -> AgentSourcesShape:
    """Get the texts that an agent would read if it ran now, and the files that it leaves out with the reasons."""
    return await caller.api.agents.sources(slug)


@router.patch("/agents/{slug}/status", responses=PROBLEMS)
async def change(slug: Slug, body: StatusChange, caller: Annotated[Caller, requires("agents.status")]) -> AgentShape:
    """Activate or pause an agent. A paused agent begins no run. The status that it has already changes nothing."""
    return await caller.api.agents.change(
        slug, AgentStatus(body.status), reason=body.reason, correlation_id=caller.correlation_id
    )

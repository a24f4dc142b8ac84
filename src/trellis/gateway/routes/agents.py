"""Agents: list and read them, activate and pause them (D24)."""

from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Path

from trellis.agents.catalog import Agent, AgentMissing
from trellis.agents.definition import AgentMalformed, AgentStatus
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, page_document
from trellis.http.shapes import AgentShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.runs.agent_acts import set_status

router = APIRouter(tags=["agents"], route_class=StrictRoute)

Slug = Annotated[str, Path(max_length=100, examples=["archivist-violin"])]


class StatusChange(pydantic.BaseModel):
    """Let it run (`active`), or let no further run of it begin (`paused`)."""

    # The agent of the demo is already active, so trying the example changes nothing.
    model_config = pydantic.ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"status": "active", "reason": "its sources were checked"}]}
    )

    status: Literal["active", "paused"]
    reason: str | None = pydantic.Field(None, max_length=500)


@router.get("/agents", response_model=Page[AgentShape], responses=PROBLEMS)
async def listing(
    instance: InstanceOf,
    _: Annotated[Caller, requires("agents.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """The agents, by name."""
    found = [one for one in (await instance.catalog.list()).agents if cursor is None or (one.slug or "") > cursor]
    more = len(found) > limit
    return page_document([_shape(one) for one in found[:limit]], found[limit - 1].slug if more else None)


@router.get("/agents/{slug}", response_model=AgentShape, responses=PROBLEMS)
async def one(slug: Slug, instance: InstanceOf, _: Annotated[Caller, requires("agents.read")]) -> dict[str, Any]:
    """One agent."""
    found = await instance.catalog.load(slug)
    if isinstance(found, AgentMissing):
        raise Problem("NOT_FOUND", f"There is no agent {slug!r}; GET /agents lists them.")
    return _shape(found)


@router.patch("/agents/{slug}/status", response_model=AgentShape, responses=PROBLEMS)
async def change(
    slug: Slug, body: StatusChange, instance: InstanceOf, caller: Annotated[Caller, requires("agents.status")]
) -> dict[str, Any]:
    """Let an agent run, or no further run begin. Giving it the status that it has changes nothing."""
    changed = await set_status(
        instance.catalog,
        instance.ledger,
        caller.actor,
        slug,
        AgentStatus(body.status),
        reason=body.reason,
        correlation_id=caller.correlation_id,
    )
    return _shape(changed.agent)


def _shape(agent: Agent) -> dict[str, Any]:
    if isinstance(agent, AgentMalformed):
        return {"slug": agent.slug, "status": "malformed", "problems": [str(problem) for problem in agent.problems]}
    return {
        "slug": agent.slug,
        "status": agent.status.value,
        "name": agent.name,
        "version": agent.version,
        "description": agent.description,
        "tools": [tool.value for tool in agent.tools],
        "cron": agent.triggers.cron,
    }

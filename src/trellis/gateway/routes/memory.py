"""Agents' memory, and proposals to change memory and logic (AUTH-4, AUTH-6, D22, D25, D44).

These routes change nothing: a proposal is stored, and the apply engine carries out what was approved. Layer 2 has its
own route and rule.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Path, Query, Response

from trellis.engine.jobs import Actor
from trellis.gateway.callers import Caller, requires, within_reach
from trellis.gateway.idempotency import IdempotentRequest, IdempotentRequestOf
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, page_document
from trellis.http.agent_shapes import MemoryDiff
from trellis.http.shapes import LogicProposed, MemoryChange, MemoryProposed, MemoryRead
from trellis.http_server.bodies import LargeBodyRoute, body_config
from trellis.http_server.problems import PROBLEMS
from trellis.lifecycles import Role
from trellis.proposals.proposal import (
    LOGIC_FILE,
    LOGIC_UPDATE,
    MEMORY_UPDATE,
    TEXT_BYTES_MAX,
    ProposalContent,
    ProposalSource,
    version_needed,
)
from trellis.proposals.service import OfferedProposal, ProposalOffer, ProposalService
from trellis.storage.memory.layout import DeepPart, ReadMode
from trellis.storage.memory.updates import (
    CONTENT_BYTES_MAX,
    RESOLUTION_CHARS_MAX,
    SECTION_CHARS_MAX,
    UPDATES_MAX,
    Operation,
)

DEEP_LIMIT_DEFAULT = 5
DEEP_LIMIT_MAX = 100
SUMMARY_CHARS_MAX = 1_000
VERSION_MAX = 2**31
REASONING_CHARS_MAX = 10_000

router = APIRouter(tags=["memory"], route_class=LargeBodyRoute)

AgentId = Annotated[str, Path(max_length=100, examples=["archivist-violin"])]


class DeepPiece(pydantic.BaseModel):
    """A decision, a day or a run."""

    name: str
    text: str
    token_count: int


class MemoryUpdate(pydantic.BaseModel):
    """One change of one file of the memory."""

    model_config = pydantic.ConfigDict(extra="forbid")

    file: str = pydantic.Field(min_length=1, max_length=200)
    operation: Operation
    content: str = pydantic.Field("", max_length=CONTENT_BYTES_MAX)
    section: str | None = pydantic.Field(None, max_length=SECTION_CHARS_MAX)
    loop_id: str | None = pydantic.Field(None, max_length=100)
    resolution: str | None = pydantic.Field(None, max_length=RESOLUTION_CHARS_MAX)


class MemoryProposal(pydantic.BaseModel):
    """Changes of an agent's memory.

    With normal priority they are approved automatically, with high priority a person decides.
    """

    model_config = body_config(
        {
            "type": "memory-update",
            "summary": "The bow was rehaired in March",
            "updates": [{"file": "facts.md", "operation": "append", "content": "- rehaired in March"}],
        }
    )

    type: Literal["memory-update"] = MEMORY_UPDATE
    summary: str | None = pydantic.Field(
        None,
        min_length=1,
        max_length=SUMMARY_CHARS_MAX,
        description="What it is about, for whoever reads it; without one the files and operations are named.",
    )
    updates: list[MemoryUpdate] = pydantic.Field(min_length=1, max_length=UPDATES_MAX)
    expected_version: int | None = pydantic.Field(
        None,
        ge=0,
        description="The version it was made for: of another one nothing is changed. Else it is the newest, or any "
        "if the updates have normal priority and replace nothing.",
    )
    run_id: str | None = pydantic.Field(None, max_length=100)
    reasoning: str = pydantic.Field("", max_length=REASONING_CHARS_MAX)
    priority: Literal["normal", "high"] = "normal"


class LogicProposal(pydantic.BaseModel):
    """A new text of the agent's logic. A person always decides."""

    model_config = body_config({"summary": "Ask before tagging", "text": "1. Ask.\n2. Tag.\n"})

    type: Literal["logic-update"] = LOGIC_UPDATE
    summary: str = pydantic.Field(min_length=1, max_length=SUMMARY_CHARS_MAX)
    text: str = pydantic.Field(min_length=1, max_length=TEXT_BYTES_MAX)
    change: Literal["replace", "append"] = "replace"
    run_id: str | None = pydantic.Field(None, max_length=100)
    reasoning: str = pydantic.Field("", max_length=REASONING_CHARS_MAX)
    priority: Literal["normal", "high"] = "normal"


@router.get("/memory/{agent_id}/read", responses=PROBLEMS)
async def read(
    agent_id: AgentId,
    caller: Annotated[Caller, requires("memory.read")],
    mode: ReadMode = ReadMode.BASIC,
) -> MemoryRead:
    """Get Layer 1 of a memory: snapshot and open loops; wide adds the facts. Layer 2 is never part of it."""
    return await caller.api.memory.read(agent_id, mode=mode.value)


@router.get("/memory/{agent_id}/deep", response_model=Page[DeepPiece], responses=PROBLEMS)
async def deep(
    agent_id: AgentId,
    part: DeepPart,
    caller: Annotated[Caller, requires("memory.read-deep")],
    limit: Annotated[int, Query(ge=1, le=DEEP_LIMIT_MAX)] = DEEP_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Get one part of Layer 2 of a memory: whole entries, newest first."""
    await within_reach(caller, "memory.read-deep", agent_id)
    await caller.instance.proposal_service(_gateway(caller)).agent(agent_id)  # which exists, or it raises
    view = await asyncio.to_thread(caller.instance.memory.read_deep, agent_id, part, before=cursor, limit=limit)
    items = [{"name": item.name, "text": item.text, "token_count": item.token_count} for item in view.items]
    return page_document(items, view.more)


@router.get("/memory/{agent_id}/history", responses=PROBLEMS)
async def history(
    agent_id: AgentId,
    caller: Annotated[Caller, requires("memory.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[MemoryChange]:
    """List the changes of a memory, newest first. A page may be empty and have a next one."""
    return await caller.api.memory.history_page(agent_id, limit=limit, cursor=cursor)


@router.get("/memory/{agent_id}/diff", responses=PROBLEMS)
async def diff(
    agent_id: AgentId,
    caller: Annotated[Caller, requires("memory.read")],
    from_version: Annotated[int, Query(ge=0, le=VERSION_MAX, examples=[0])],
    to_version: Annotated[int | None, Query(ge=0, le=VERSION_MAX, description="Without one, the newest.")] = None,
) -> MemoryDiff:
    """Get what changed in layer 1 of a memory between two versions, as a unified diff. Version 0 is the empty memory."""
    return await caller.api.memory.diff(agent_id, from_version, to_version)


@router.post(
    "/memory/{agent_id}/propose",
    status_code=202,
    response_model=MemoryProposed,
    response_model_exclude_none=True,
    responses=PROBLEMS,
)
async def propose(
    agent_id: AgentId,
    body: MemoryProposal,
    caller: Annotated[Caller, requires("memory.propose")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Propose a change of memory. With normal priority it is approved at once and applied before the answer is sent."""
    await within_reach(caller, "memory.propose", agent_id)
    offering = caller.instance.proposal_service(_gateway(caller))
    proposal = await _proposal_made_once(
        offering, request_key, response, lambda: _memory_offer(caller, request_key, agent_id, body)
    )
    return {"proposalId": proposal.id, "status": proposal.status, "error": proposal.error}


@router.post("/logic/{agent_id}/propose", status_code=202, response_model=LogicProposed, responses=PROBLEMS)
async def propose_logic(
    agent_id: AgentId,
    body: LogicProposal,
    caller: Annotated[Caller, requires("memory.propose")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Propose a new logic of the agent. A person decides, whatever the priority."""
    await within_reach(caller, "memory.propose", agent_id)
    offering = caller.instance.proposal_service(_gateway(caller))
    proposal = await _proposal_made_once(
        offering, request_key, response, lambda: _logic_offer(offering, caller, request_key, agent_id, body)
    )
    return {"proposalId": proposal.id, "status": proposal.status, "requiresHumanReview": True}


# --- inside ----------------------------------------------------------------------------------------------------------


def _gateway(caller: Caller) -> Actor:
    return Actor(role=Role.GATEWAY, name=caller.principal.name)


async def _proposal_made_once(
    offering: ProposalService,
    request_key: IdempotentRequest,
    response: Response,
    offer: Callable[[], Awaitable[ProposalOffer]],
) -> OfferedProposal:
    """The proposal that this request made, now or earlier. `offer` is called only to make a new one."""
    earlier = await request_key.earlier(offering.ledger)
    proposal = await offering.make(await offer()) if earlier is None else await offering.again(earlier)
    request_key.note(replayed=not proposal.created)
    response.headers["Location"] = f"/proposals/{proposal.id}"
    return proposal


async def _memory_offer(
    caller: Caller, request_key: IdempotentRequest, agent_id: str, body: MemoryProposal
) -> ProposalOffer:
    version = body.expected_version
    if version is None:
        seen = (await asyncio.to_thread(caller.instance.memory.read, agent_id)).version
        version = version_needed([update.operation for update in body.updates], priority=body.priority, seen=seen)
    content: dict[str, Any] = {
        "summary": body.summary or _summary(body.updates),
        "updates": [update.model_dump(mode="json") for update in body.updates],
        "expected_version": version,
        "grounds": [_grounds(body.reasoning)],
    }
    files = "+".join(sorted({update.file for update in body.updates}))
    draft = ProposalContent(action=MEMORY_UPDATE, target=files, content=content)
    return _offer(caller, request_key, agent_id, draft, body)


def _summary(updates: Sequence[MemoryUpdate]) -> str:
    """A default summary of a proposal: `append in facts.md; close in open_loops.md`."""
    parts = dict.fromkeys(f"{update.operation.value} in {update.file}" for update in updates)
    return "; ".join(parts)[:SUMMARY_CHARS_MAX]


async def _logic_offer(
    offering: ProposalService, caller: Caller, request_key: IdempotentRequest, agent_id: str, body: LogicProposal
) -> ProposalOffer:
    await offering.agent(agent_id)
    change = {"type": body.change, "text": body.text}
    content: dict[str, Any] = {"summary": body.summary, "change": change, **_grounds(body.reasoning)}
    draft = await offering.about_file(agent_id, LOGIC_UPDATE, LOGIC_FILE, content)
    return _offer(caller, request_key, agent_id, draft, body)


def _grounds(reasoning: str) -> dict[str, Any]:
    return {"reasoning": reasoning, "citations": [], "flags": []}


def _offer(
    caller: Caller,
    request_key: IdempotentRequest,
    agent_id: str,
    draft: ProposalContent,
    body: MemoryProposal | LogicProposal,
) -> ProposalOffer:
    return ProposalOffer(
        agent_slug=agent_id,
        draft=draft,
        source=ProposalSource(type=caller.actor.role.value, identity=caller.principal.name, run_id=body.run_id),
        priority=body.priority,
        key=request_key.key,
        correlation_id=caller.correlation_id,
    )

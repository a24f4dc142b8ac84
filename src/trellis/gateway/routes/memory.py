"""What agents remember, and proposing changes of memory and logic (AUTH-4, AUTH-6, D22, D25, D44).

Nothing is changed here: a proposal is stored, and the apply engine changes what was approved. Layer 2 has a route and a rule of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Path, Query, Response

from trellis.engine.jobs import Actor
from trellis.gateway.agent_scope import within_reach
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.gateway.idempotency import Asked, Once, mark
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, page
from trellis.http.shapes import LogicProposed, MemoryChange, MemoryProposed, MemoryRead
from trellis.instance import Instance
from trellis.lifecycles import Role
from trellis.runs.documents import timestamp
from trellis.runs.offering import Offer, Offered, Offering
from trellis.runs.proposals import LOGIC_UPDATE, MEMORY_UPDATE, Draft, Source
from trellis.runs.targets import LOGIC_FILE, TEXT_BYTES_MAX
from trellis.storage.memory import DeepPart, HistoryEntry, Operation, ReadMode
from trellis.storage.memory.layout import CommitId
from trellis.storage.memory.updates import CONTENT_BYTES_MAX, RESOLUTION_CHARS_MAX, SECTION_CHARS_MAX, UPDATES_MAX
from trellis.web.bodies import LargeBodyRoute
from trellis.web.shapes import PROBLEMS

DEEP_LIMIT_DEFAULT = 5
DEEP_LIMIT_MAX = 100
SUMMARY_CHARS_MAX = 1_000
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
    """Changes of a memory that belong together. Of normal priority they approve themselves, of high a person decides."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "type": "memory-update",
                    "summary": "The bow was rehaired in March",
                    "updates": [{"file": "facts.md", "operation": "append", "content": "- rehaired in March"}],
                }
            ]
        },
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
        None, ge=0, description="The version it was made for; else the newest."
    )
    run_id: str | None = pydantic.Field(None, max_length=100)
    reasoning: str = pydantic.Field("", max_length=REASONING_CHARS_MAX)
    priority: Literal["normal", "high"] = "normal"


class LogicProposal(pydantic.BaseModel):
    """Another text of the agent's logic. A person decides, always."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"summary": "Ask before tagging", "text": "1. Ask.\n2. Tag.\n"}]},
    )

    type: Literal["logic-update"] = LOGIC_UPDATE
    summary: str = pydantic.Field(min_length=1, max_length=SUMMARY_CHARS_MAX)
    text: str = pydantic.Field(min_length=1, max_length=TEXT_BYTES_MAX)
    change: Literal["replace", "append"] = "replace"
    run_id: str | None = pydantic.Field(None, max_length=100)
    reasoning: str = pydantic.Field("", max_length=REASONING_CHARS_MAX)
    priority: Literal["normal", "high"] = "normal"


@router.get("/memory/{agent_id}/read", response_model=MemoryRead, responses=PROBLEMS)
async def read(
    agent_id: AgentId,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("memory.read")],
    mode: ReadMode = ReadMode.BASIC,
) -> dict[str, Any]:
    """Layer 1: snapshot and open loops; wide adds the facts. Layer 2 is never part of it."""
    await within_reach(instance, caller, "memory.read", agent_id)
    await _there(instance, caller, agent_id)
    view = await asyncio.to_thread(instance.memory.read, agent_id, mode)
    return {
        "agent_id": view.agent_id,
        "mode": view.mode.value,
        "version": view.version,
        "commit": view.commit,
        "files": dict(view.content),
        "token_count": view.token_count,
        "last_update": None if view.last_update is None else timestamp(view.last_update),
        "last_run_id": view.last_run_id,
    }


@router.get("/memory/{agent_id}/deep", response_model=Page[DeepPiece], responses=PROBLEMS)
async def deep(
    agent_id: AgentId,
    part: DeepPart,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("memory.read-deep")],
    limit: Annotated[int, Query(ge=1, le=DEEP_LIMIT_MAX)] = DEEP_LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """One part of Layer 2, newest first, whole pieces."""
    await within_reach(instance, caller, "memory.read-deep", agent_id)
    await _there(instance, caller, agent_id)
    view = await asyncio.to_thread(instance.memory.read_deep, agent_id, part, before=cursor, limit=limit)
    items = [{"name": item.name, "text": item.text, "token_count": item.token_count} for item in view.items]
    return page(items, view.more)


@router.get("/memory/{agent_id}/history", response_model=Page[MemoryChange], responses=PROBLEMS)
async def history(
    agent_id: AgentId,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("memory.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """The changes of a memory, newest first; a page may be empty and still have a next one."""
    await within_reach(instance, caller, "memory.read", agent_id)
    await _there(instance, caller, agent_id)
    before = None if cursor is None else CommitId(cursor)
    found = await asyncio.to_thread(instance.memory.history, agent_id, limit=limit, before=before)
    return page([_commit(entry) for entry in found.entries], found.more)


@router.post("/memory/{agent_id}/propose", status_code=202, response_model=MemoryProposed, responses=PROBLEMS)
async def propose(
    agent_id: AgentId,
    body: MemoryProposal,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("memory.propose")],
    asked: Once,
    response: Response,
) -> dict[str, Any]:
    """Propose a change of memory. Of normal priority it is approved at once and applied before this answers."""
    await within_reach(instance, caller, "memory.propose", agent_id)
    offering = instance.offering(_gateway(caller))
    made = await _made(offering, asked, response, lambda: _memory_offer(instance, caller, asked, agent_id, body))
    return {"proposalId": made.id, "status": made.status}


@router.post("/logic/{agent_id}/propose", status_code=202, response_model=LogicProposed, responses=PROBLEMS)
async def propose_logic(
    agent_id: AgentId,
    body: LogicProposal,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("memory.propose")],
    asked: Once,
    response: Response,
) -> dict[str, Any]:
    """Propose another logic of the agent; it waits for a person, whatever its priority."""
    await within_reach(instance, caller, "memory.propose", agent_id)
    offering = instance.offering(_gateway(caller))
    made = await _made(offering, asked, response, lambda: _logic_offer(offering, caller, asked, agent_id, body))
    return {"proposalId": made.id, "status": made.status, "requiresHumanReview": True}


# --- inside ----------------------------------------------------------------------------------------------------------


def _gateway(caller: Caller) -> Actor:
    return Actor(role=Role.GATEWAY, name=caller.principal.name)


async def _there(instance: Instance, caller: Caller, agent_id: str) -> None:
    """Nothing, when there is such an agent; raises SlugInvalid, AgentNotFound, DefinitionMalformed."""
    await instance.offering(_gateway(caller)).agent(agent_id)


async def _made(offering: Offering, asked: Asked, response: Response, offer: Callable[[], Awaitable[Offer]]) -> Offered:
    """The proposal that this request made, now or before; `offer` is asked for only when it makes one."""
    earlier = await asked.earlier(offering.ledger)
    made = await offering.make(await offer()) if earlier is None else await offering.again(earlier)
    mark(response, replayed=not made.created)
    response.headers["Location"] = f"/proposals/{made.id}"
    return made


async def _memory_offer(instance: Instance, caller: Caller, asked: Asked, agent_id: str, body: MemoryProposal) -> Offer:
    version = body.expected_version
    if version is None:
        version = (await asyncio.to_thread(instance.memory.read, agent_id)).version
    content: dict[str, Any] = {
        "summary": body.summary or _summary(body.updates),
        "updates": [update.model_dump(mode="json") for update in body.updates],
        "expected_version": version,
        "grounds": [_grounds(body.reasoning)],
    }
    files = "+".join(sorted({update.file for update in body.updates}))
    draft = Draft(action=MEMORY_UPDATE, target=files, content=content)
    return _offer(caller, asked, agent_id, draft, body)


def _summary(updates: Sequence[MemoryUpdate]) -> str:
    """What a proposal without a summary is about: `append in facts.md; close in open_loops.md`."""
    told = dict.fromkeys(f"{update.operation.value} in {update.file}" for update in updates)
    return "; ".join(told)[:SUMMARY_CHARS_MAX]


async def _logic_offer(offering: Offering, caller: Caller, asked: Asked, agent_id: str, body: LogicProposal) -> Offer:
    await offering.agent(agent_id)
    change = {"type": body.change, "text": body.text}
    content: dict[str, Any] = {"summary": body.summary, "change": change, **_grounds(body.reasoning)}
    draft = await offering.about_file(agent_id, LOGIC_UPDATE, LOGIC_FILE, content)
    return _offer(caller, asked, agent_id, draft, body)


def _grounds(reasoning: str) -> dict[str, Any]:
    return {"reasoning": reasoning, "citations": [], "flags": []}


def _offer(caller: Caller, asked: Asked, agent_id: str, draft: Draft, body: MemoryProposal | LogicProposal) -> Offer:
    return Offer(
        agent_slug=agent_id,
        draft=draft,
        source=Source(type=caller.actor.role.value, identity=caller.principal.name, run_id=body.run_id),
        priority=body.priority,
        key=asked.key,
        correlation_id=caller.correlation_id,
    )


def _commit(entry: HistoryEntry) -> dict[str, Any]:
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

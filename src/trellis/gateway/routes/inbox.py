"""The inbox: requests from outside, which the gate accepts or rejects (D51, JQ-12, RUN-4).

A caller without permission gets 403 and one over its rate limit gets 429; neither request is stored. An entry that the
gate rejects for its content is stored as rejected, with the reason. The answer and the entry say the same.
"""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Query, Request

from trellis.app.system import new_id
from trellis.auth.ownership import within_agent
from trellis.documents import ids
from trellis.engine.jobs import CORRELATION_PATTERN, Actor, JobId
from trellis.engine.records import JobFilter
from trellis.gateway.callers import Caller, gateway_of, requires
from trellis.gateway.idempotency import IdempotentRequestOf, fingerprint_of
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, page_document
from trellis.http.shapes import InboxEntry, InboxStats, InboxTaken
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS
from trellis.inbox import RULES, InboxEntryState, NewInboxEntry
from trellis.lifecycles import Role
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.storage.objects.canonical_json import timestamp

TTL_HOURS_DEFAULT = 72.0
TTL_HOURS_MAX = 24.0 * 30
ID_PATTERN = r"^inbox_[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

router = APIRouter(tags=["inbox"], route_class=StrictRoute)

Action = Literal[
    "run",
    "job",
    "propose-edit",
    "propose-summary",
    "propose-tag",
    "propose-artifact",
    "propose-note",
    "propose-comment",
]


class EntrySource(pydantic.BaseModel):
    """Where the entry comes from. The sender is known from the token.

    `cron`, `webhook` and `agent` count as what began a run only in entries of tokens that also have the role of a component which passes
    such things on (`gateway`; for `cron` and `agent` also `orchestrator`); from anybody else the run is begun by hand.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    type: Literal["ui", "telegram", "webhook", "agent", "cron", "api"] = "api"


class EntryIntent(pydantic.BaseModel):
    """What the entry asks for.

    A run of the agent `target` with the parameters `payload`; a job of type `target`, as POST /jobs takes it; or a
    change of the text `target` (`agent/notes/file.md`) with `payload` {summary, change {type, text}}.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    action: Action
    target: str = pydantic.Field(min_length=1, max_length=500)
    payload: dict[str, Any] = pydantic.Field(default_factory=dict)


class EntryMetadata(pydantic.BaseModel):
    """Metadata of the entry, and how long it may wait."""

    model_config = pydantic.ConfigDict(extra="forbid")

    correlation_id: str | None = pydantic.Field(None, pattern=f"^{CORRELATION_PATTERN}$")
    priority: Literal["normal", "high"] = "normal"
    ttl_hours: float = pydantic.Field(TTL_HOURS_DEFAULT, gt=0, le=TTL_HOURS_MAX)


class EntryAsked(pydantic.BaseModel):
    """An inbox entry. With an `id` that the sender chose, it needs no Idempotency-Key: the same id is the same entry."""

    model_config = body_config(
        {
            "source": {"type": "ui"},
            "intent": {"action": "run", "target": "archivist-violin", "payload": {"topic": "bows"}},
            "metadata": {"priority": "normal", "ttl_hours": 72},
        }
    )

    id: str | None = pydantic.Field(None, pattern=ID_PATTERN)
    source: EntrySource = pydantic.Field(default_factory=EntrySource)
    intent: EntryIntent
    metadata: EntryMetadata = pydantic.Field(default_factory=lambda: EntryMetadata.model_validate({}))


@router.post("/inbox/submit", status_code=202, response_model=InboxTaken, responses=PROBLEMS)
async def submit(
    body: EntryAsked,
    request: Request,
    caller: Annotated[Caller, requires("inbox.submit")],
    request_key: IdempotentRequestOf,
) -> dict[str, Any]:
    """Submit an inbox entry. It is checked at once, and its run, job or proposal is created once.

    Asked again it tells how the entry stands: one that was `pending` may have been processed, or have expired, since.
    """
    if body.intent.action in RULES:
        caller.permit(RULES[body.intent.action])
    within_agent(caller.principal, "inbox.submit", _agent(body.intent))
    inbox = caller.instance.inbox(_gateway(caller))
    earlier = await request_key.earlier(caller.instance.ledger)
    if earlier is not None:
        request_key.note(replayed=True)
        return _inbox_answer(await inbox.settle(earlier))
    gateway_of(request).inbox_limits.take(request, caller.principal)
    entry = _entry(body, caller, await caller.instance.ledger.now())
    key = request_key.key  # an id is a key, too
    fingerprint = await fingerprint_of(request, caller.principal) if key is None else key.fingerprint
    stored = await inbox.submit(entry, key=key, fingerprint=fingerprint, given=body.id is not None)
    request_key.note(replayed=not stored.created)
    settled = await inbox.settle(stored.job_id)
    if body.intent.action == "job":
        caller.instance.wake_bus()
    return _inbox_answer(settled)


@router.get("/inbox/stats", response_model=InboxStats, responses=PROBLEMS)
async def stats(caller: Annotated[Caller, requires("inbox.read")]) -> dict[str, Any]:
    """Count the entries that wait, and today's entries by outcome."""
    return asdict(await caller.instance.inbox(_gateway(caller)).stats())


@router.get("/inbox/entries", response_model=Page[InboxEntry], responses=PROBLEMS)
async def entries(
    caller: Annotated[Caller, requires("inbox.read")],
    status: Annotated[Literal["pending", "processed", "rejected", "expired"] | None, Query()] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """List entries, newest first."""
    where = JobFilter(lifecycle=INBOX_ENTRY.name, state=status)
    jobs = await caller.instance.ledger.jobs(where, limit=limit, cursor=cursor)
    inbox = caller.instance.inbox(_gateway(caller))
    return page_document([_document(one) for one in await inbox.entry_states(jobs.jobs)], jobs.cursor)


# --- inside ----------------------------------------------------------------------------------------------------------


def _agent(intent: EntryIntent) -> str:
    """The agent that an entry is about; empty for a job without an agent."""
    return str(intent.payload.get("agent_slug", "")) if intent.action == "job" else intent.target.partition("/")[0]


def _gateway(caller: Caller) -> Actor:
    return Actor(role=Role.GATEWAY, name=caller.principal.name)


def _entry(body: EntryAsked, caller: Caller, at: datetime) -> NewInboxEntry:
    return NewInboxEntry(
        id=JobId(body.id) if body.id is not None else ids.make_entry_id(at, new_id()),
        source_type=body.source.type,
        identity=caller.principal.name,
        at=at,
        action=body.intent.action,
        target=body.intent.target,
        payload=body.intent.payload,
        correlation_id=body.metadata.correlation_id or caller.correlation_id,
        priority=body.metadata.priority,
        ttl_hours=body.metadata.ttl_hours,
        roles=caller.principal.roles,
    )


def _inbox_answer(standing: InboxEntryState) -> dict[str, Any]:
    outcome = standing.made or {}
    return {
        "id": standing.entry["id"],
        "status": standing.status,
        "correlation_id": standing.entry["metadata"]["correlation_id"],
        "run_id": outcome.get("run_id"),
        "job_id": outcome.get("job_id"),
        "proposal_id": outcome.get("proposal_id"),
        "rejection": standing.rejection,
    }


def _document(standing: InboxEntryState) -> dict[str, Any]:
    return {
        **_inbox_answer(standing),
        "source": standing.entry["source"],
        "intent": standing.entry["intent"],
        "metadata": standing.entry["metadata"],
        "created_at": timestamp(standing.created_at),
        "updated_at": timestamp(standing.updated_at),
        "version": standing.version,
    }

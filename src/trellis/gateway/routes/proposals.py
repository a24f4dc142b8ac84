"""Proposals: list and read them, decide about them, and apply them (RUN-4, D22, AUTH-6)."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from trellis.app.instance import Instance
from trellis.app.wiring import SystemClock
from trellis.bus import approvals
from trellis.documents.errors import ProposalNotFound
from trellis.engine.errors import InvalidTransition
from trellis.engine.jobs import JobId, Moved, NotMoved
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.gateway.idempotency import IdempotentRequest, IdempotentRequestOf, mark_replayed
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, etag, expected, is_known, page_document
from trellis.http.shapes import ProposalDiff, ProposalShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import APPLYING, FAILED, apply_until_settled
from trellis.proposals.preview import conflict_of, conflicts_of, diff_of
from trellis.proposals.proposal import NOTE_CHARS_MAX

APPLY_PATIENCE_S = 5.0
"""How long a request waits for the apply, in seconds. Shorter than any client's timeout; clients may ask again."""
APPLY_RETRY_S = 1
HELD_FIRST, PROPOSALS_NEXT = "held:", "proposals:"
"""Cursor prefixes: among held jobs, or at the first proposal. A cursor without a prefix is one of proposals."""
OPEN = frozenset({"approved", "auto_approved", APPLYING})

router = APIRouter(tags=["proposals"], route_class=StrictRoute)

ProposalId = Annotated[str, Path(max_length=250, examples=["prop_2026-02-14_0123456789ab"])]
State = Literal["pending", "approved", "auto_approved", "applying", "failed", "applied", "rejected", "expired"]


class ProposalDecision(pydantic.BaseModel):
    """What a person decides; rejecting says why, in ten characters or more."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"decision": "reject", "note": "the source says otherwise"}]},
    )

    decision: Literal["approve", "reject"]
    note: str | None = pydantic.Field(None, max_length=NOTE_CHARS_MAX)


@router.get("/proposals", response_model=Page[ProposalShape], responses=PROBLEMS)
async def listing(
    instance: InstanceOf,
    _: Annotated[Caller, requires("proposals.read")],
    status: Annotated[State | None, Query()] = None,
    conflicts: Annotated[bool, Query(description="Say of each that can no longer be applied why.")] = False,  # noqa: FBT002 - of the address
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Proposals, newest first; before them the jobs that wait for a person, unless another status is meant."""
    found = await _page(instance.ledger, status, limit, cursor)
    if conflicts:
        told = await conflicts_of(found["items"], objects=instance.objects)
        found["items"] = [{**one, "conflict": told.get(one["id"])} for one in found["items"]]
    return found


@router.get("/proposals/pending", response_model=Page[ProposalShape], responses=PROBLEMS)
async def pending(
    instance: InstanceOf,
    _: Annotated[Caller, requires("proposals.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """What waits for a person: jobs that the safety kernel held, then proposals, each newest first."""
    return await _page(instance.ledger, "pending", limit, cursor)


@router.get(
    "/proposals/{proposal_id}",
    response_model=ProposalShape,
    responses={**PROBLEMS, 304: {"description": "Nothing has changed since the ETag that was sent."}},
)
async def one(
    proposal_id: ProposalId,
    instance: InstanceOf,
    _: Annotated[Caller, requires("proposals.read")],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """One proposal with its text, its citations and what became of it."""
    document = await _document(instance.ledger, proposal_id)
    headers = {"ETag": etag(document["version"]), "Cache-Control": "no-cache"}
    if is_known(if_none_match, document["version"]):
        return Response(status_code=304, headers=headers)
    return JSONResponse(document, headers=headers)


@router.get("/proposals/{proposal_id}/diff", response_model=ProposalDiff, responses=PROBLEMS)
async def difference(
    proposal_id: ProposalId, instance: InstanceOf, _: Annotated[Caller, requires("proposals.decide")]
) -> dict[str, Any]:
    """What applying it would change now, as a unified diff. It shows what is there, so it is for those who decide."""
    document = await _document(instance.ledger, proposal_id)
    now = await instance.ledger.now()
    diff = await diff_of(document, objects=instance.objects, memory=instance.memory, now=now)
    conflict = await conflict_of(document, objects=instance.objects)
    return {"id": document["id"], "version": document["version"], "diff": diff, "conflict": conflict}


@router.patch(
    "/proposals/{proposal_id}",
    response_model=ProposalShape,
    responses={**PROBLEMS, 412: {**PROBLEMS[409], "description": "It is not the version that was seen any more."}},
)
async def decide(
    proposal_id: ProposalId,
    body: ProposalDecision,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("proposals.decide")],
    asked: IdempotentRequestOf,
    response: Response,
    if_match: Annotated[str | None, Header(description="Decide only about this version.")] = None,
) -> dict[str, Any]:
    """Approve or reject a proposal, or a held job. With If-Match it is about what was seen, or refused.

    The answer is the proposal right after this decision, also when the decision comes again and it has been applied since.
    """
    version, held = expected(if_match), approvals.job_id_of_inbox_id(proposal_id)
    if held is not None:
        decided = await _decide_held(instance, caller, held, body, asked, version)
        instance.wake_bus()
        mark_replayed(response, replayed=decided.repeated)
        response.headers["ETag"] = etag(decided.version)
        return await _document(instance.ledger, proposal_id, version=decided.version)
    proposal = (await proposals.get_proposal_job(instance.ledger, proposal_id)).job_id
    await asked.changed_before(instance.ledger)
    replayed = asked.key is not None and await asked.moved(instance.ledger, proposal)
    answer = await proposals.decide_proposal(
        instance.ledger,
        caller.actor,
        proposal,
        approve=body.decision == "approve",
        note=body.note,
        request_id=asked.request_id,
        version=version,
        key=asked.change(proposal),
    )
    if isinstance(answer, NotMoved):
        document = await _document(instance.ledger, proposal_id)
        if version is not None and document["version"] != version:
            raise _other_version(document, version)
        raise _refused(answer, caller)
    mark_replayed(response, replayed=replayed)
    response.headers["ETag"] = etag(answer.version)
    return await _document(instance.ledger, proposal_id, version=answer.version)


@router.post(
    "/proposals/{proposal_id}/apply",
    response_model=ProposalShape,
    responses={**PROBLEMS, 200: {"description": "As it stands; with `Retry-After` while it is not applied yet."}},
)
async def apply(
    proposal_id: ProposalId,
    instance: InstanceOf,
    _: Annotated[Caller, requires("proposals.apply")],
    asked: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Have an approved proposal applied now, or once more if it failed; it is applied once, however often this is asked. An approved job
    goes by itself: there the answer is its current status.

    The answer is its current status. If somebody else is at it for longer than a few seconds, that is `applying`: ask again after `Retry-After`.
    """
    state, proposal = (await _document(instance.ledger, proposal_id))["status"], JobId(proposal_id)
    if approvals.job_id_of_inbox_id(proposal_id) is not None and state == "approved":
        return await _document(instance.ledger, proposal_id)
    # The step that begins to apply a failed proposal again stores the key. Otherwise the engine's own steps follow.
    await (asked.changed_before(instance.ledger) if state == FAILED else asked.take(instance.ledger, proposal))
    replayed = asked.key is not None and await asked.moved(instance.ledger, proposal)
    engine = instance.apply_engine()
    if state == FAILED and not replayed:
        await engine.apply_again(proposal, asked.request_id, key=asked.change(proposal))
    elif state in OPEN:
        await apply_until_settled(engine, SystemClock(), proposal, APPLY_PATIENCE_S)
    elif state != "applied" and not replayed:
        detail = f"{proposal_id} is {state}; only an approved proposal is applied."
        raise Problem("INVALID_TRANSITION", detail, status_now=state)
    document = await _document(instance.ledger, proposal_id)
    mark_replayed(response, replayed=replayed)
    response.headers["ETag"] = etag(document["version"])
    if document["status"] in OPEN:
        response.headers["Retry-After"] = str(APPLY_RETRY_S)
    return document


# --- inside ----------------------------------------------------------------------------------------------------------


async def _page(ledger: Ledger, state: str | None, limit: int, cursor: str | None) -> dict[str, Any]:
    """A page of held jobs, then proposals: work waits for held jobs. The cursor says which list continues."""
    items = list[dict[str, Any]]()
    if state in {None, "pending"} and (cursor is None or cursor.startswith(HELD_FIRST)):
        after = cursor.removeprefix(HELD_FIRST) if cursor else None
        held = await approvals.list_waiting(ledger, limit=limit, cursor=after)
        items = [document for job, events in held.items if (document := approvals.inbox_document(job, events))]
        cursor = None
        if held.cursor is not None:
            return page_document(items, f"{HELD_FIRST}{held.cursor}")
        if len(items) == limit:
            return page_document(items, PROPOSALS_NEXT)
    where = JobFilter(lifecycle=PROPOSAL.name, state=state)
    after = None if cursor == PROPOSALS_NEXT else cursor
    found = await ledger.jobs(where, limit=limit - len(items), cursor=after)
    return page_document([*items, *await _documents(ledger, [job.job_id for job in found.jobs])], found.cursor)


async def _documents(ledger: Ledger, proposal_ids: Sequence[JobId]) -> list[dict[str, Any]]:
    """Several proposals as they are now, with two queries in total. Proposals deleted meanwhile are left out."""
    payloads, events = await ledger.payloads(proposal_ids), await ledger.events_of(proposal_ids)
    there = [one for one in proposal_ids if one in payloads and one in events]
    return [json.loads(proposals.document(payloads[one], events[one])) for one in there]


async def _document(ledger: Ledger, proposal_id: str, *, version: int | None = None) -> dict[str, Any]:
    """The proposal as it is now, or was at this version; raises ProposalNotFound."""
    if (held := approvals.job_id_of_inbox_id(proposal_id)) is not None:
        return await _held_document(ledger, held, version=version)
    job = await proposals.get_proposal_job(ledger, proposal_id)
    events = [event for event in await ledger.events(job.job_id) if version is None or event.version <= version]
    return json.loads(proposals.document(job.payload or b"", events))


async def _held_document(ledger: Ledger, job_id: JobId, *, version: int | None = None) -> dict[str, Any]:
    """A job that was held at least once; raises ProposalNotFound."""
    job = await ledger.job(job_id)
    events = [event for event in await ledger.events(job_id) if version is None or event.version <= version]
    is_of_bus = job is not None and job.lifecycle == BUS_JOB.name
    document = approvals.inbox_document(job, events) if job is not None and is_of_bus else None
    if document is None:
        raise ProposalNotFound(proposal=approvals.inbox_id(job_id))
    return document


async def _decide_held(
    instance: Instance,
    caller: Caller,
    job_id: JobId,
    body: ProposalDecision,
    asked: IdempotentRequest,
    version: int | None,
) -> Moved:
    """Decide about a held job; raises Problem, NotHeld, NoteTooShort."""
    document = await _held_document(instance.ledger, job_id)
    await asked.changed_before(instance.ledger)
    if version is not None and document["version"] != version and not await asked.moved(instance.ledger, job_id):
        raise _other_version(document, version)
    return await approvals.decide(
        instance.ledger,
        caller.permit("jobs.approve"),
        job_id,
        approve=body.decision == "approve",
        note=body.note,
        request_id=asked.request_id,
        version=version,
        key=asked.change(job_id),
    )


def _other_version(document: dict[str, Any], version: int) -> Problem:
    detail = f"{document['id']} has version {document['version']} and not {version}: look at it again."
    return Problem("PRECONDITION_FAILED", detail, headers={"ETag": etag(document["version"])})


def _refused(answer: NotMoved, caller: Caller) -> InvalidTransition:
    return InvalidTransition(
        job_id=answer.job_id,
        source=answer.state,
        target=answer.target,
        actor=caller.actor.role.value,
        reason=answer.reason,
    )

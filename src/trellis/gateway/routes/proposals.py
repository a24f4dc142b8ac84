"""Proposals: list and read them, decide about them, and apply them (RUN-4, D22, AUTH-6)."""

from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from trellis.api.proposals import APPLY_PATIENCE_S, OPEN, proposal_document, refused_decision
from trellis.app.instance import Instance
from trellis.app.wiring import SystemClock
from trellis.bus import approvals
from trellis.engine.jobs import JobId, Moved, NotMoved
from trellis.gateway.callers import Caller, InstanceOf, api_for, requires
from trellis.gateway.idempotency import IdempotentRequest, IdempotentRequestOf, mark_replayed
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, etag, expected, is_known
from trellis.http.shapes import ProposalDiff, ProposalShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import FAILED, apply_until_settled
from trellis.proposals.proposal import NOTE_CHARS_MAX

APPLY_RETRY_S = 1

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


@router.get("/proposals", responses=PROBLEMS)
async def listing(
    instance: InstanceOf,
    caller: Annotated[Caller, requires("proposals.read")],
    status: Annotated[State | None, Query()] = None,
    conflicts: Annotated[bool, Query(description="Say of each that can no longer be applied why.")] = False,  # noqa: FBT002 - of the address
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[ProposalShape]:
    """Proposals, newest first; before them the jobs that wait for a person, unless another status is meant."""
    return await api_for(instance, caller).proposals.page(
        status=status, limit=limit, cursor=cursor, conflicts=conflicts
    )


@router.get("/proposals/pending", responses=PROBLEMS)
async def pending(
    instance: InstanceOf,
    caller: Annotated[Caller, requires("proposals.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[ProposalShape]:
    """What waits for a person: jobs that the safety kernel held, then proposals, each newest first."""
    return await api_for(instance, caller).proposals.page(status="pending", limit=limit, cursor=cursor)


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
    document = await proposal_document(instance.ledger, proposal_id)
    headers = {"ETag": etag(document["version"]), "Cache-Control": "no-cache"}
    if is_known(if_none_match, document["version"]):
        return Response(status_code=304, headers=headers)
    return JSONResponse(document, headers=headers)


@router.get("/proposals/{proposal_id}/diff", responses=PROBLEMS)
async def difference(
    proposal_id: ProposalId, instance: InstanceOf, caller: Annotated[Caller, requires("proposals.decide")]
) -> ProposalDiff:
    """What applying it would change now, as a unified diff. It shows what is there, so it is for those who decide."""
    return await api_for(instance, caller).proposals.diff(proposal_id)


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
        return await proposal_document(instance.ledger, proposal_id, version=decided.version)
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
        document = await proposal_document(instance.ledger, proposal_id)
        if version is not None and document["version"] != version:
            raise _other_version(document, version)
        raise refused_decision(answer, caller.actor, document)
    mark_replayed(response, replayed=replayed)
    response.headers["ETag"] = etag(answer.version)
    return await proposal_document(instance.ledger, proposal_id, version=answer.version)


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
    state, proposal = (await proposal_document(instance.ledger, proposal_id))["status"], JobId(proposal_id)
    if approvals.job_id_of_inbox_id(proposal_id) is not None and state == "approved":
        return await proposal_document(instance.ledger, proposal_id)
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
    document = await proposal_document(instance.ledger, proposal_id)
    mark_replayed(response, replayed=replayed)
    response.headers["ETag"] = etag(document["version"])
    if document["status"] in OPEN:
        response.headers["Retry-After"] = str(APPLY_RETRY_S)
    return document


# --- inside ----------------------------------------------------------------------------------------------------------


async def _decide_held(
    instance: Instance,
    caller: Caller,
    job_id: JobId,
    body: ProposalDecision,
    asked: IdempotentRequest,
    version: int | None,
) -> Moved:
    """Decide about a held job; raises Problem, NotHeld, NoteTooShort."""
    document = await proposal_document(instance.ledger, approvals.inbox_id(job_id))
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

"""Proposals: list and read them, decide about them, and apply them (RUN-4, D22, AUTH-6)."""

from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from trellis.api.proposals import OPEN, ProposalHasOtherVersion, proposal_document
from trellis.bus.topics import HELD_ACTION
from trellis.gateway.callers import Caller, requires
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, etag, expected, is_known
from trellis.http.shapes import ProposalDiff, ProposalShape
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.proposals.proposal import NOTE_CHARS_MAX

APPLY_RETRY_S = 1

router = APIRouter(tags=["proposals"], route_class=StrictRoute)

ProposalId = Annotated[str, Path(max_length=250, examples=["prop_2026-02-14_0123456789ab"])]
State = Literal["pending", "approved", "auto_approved", "applying", "failed", "applied", "rejected", "expired"]


class ProposalDecision(pydantic.BaseModel):
    """What a person decides; rejecting says why, in ten characters or more."""

    model_config = body_config({"decision": "reject", "note": "the source says otherwise"})

    decision: Literal["approve", "reject"]
    note: str | None = pydantic.Field(None, max_length=NOTE_CHARS_MAX)


@router.get("/proposals", responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires("proposals.read")],
    status: Annotated[State | None, Query()] = None,
    conflicts: Annotated[bool, Query(description="Say of each that can no longer be applied why.")] = False,  # noqa: FBT002 - of the address
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[ProposalShape]:
    """List proposals, newest first.

    Held jobs that wait for a person come before them, unless `status` asks for another status.
    """
    return await caller.api.proposals.page(status=status, limit=limit, cursor=cursor, conflicts=conflicts)


@router.get("/proposals/pending", responses=PROBLEMS)
async def pending(
    caller: Annotated[Caller, requires("proposals.read")],
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[ProposalShape]:
    """List what waits for a person: jobs that the safety kernel held, then proposals, each newest first."""
    return await caller.api.proposals.page(status="pending", limit=limit, cursor=cursor)


@router.get(
    "/proposals/{proposal_id}",
    response_model=ProposalShape,
    responses={**PROBLEMS, 304: {"description": "Nothing has changed since the ETag that was sent."}},
)
async def one(
    proposal_id: ProposalId,
    caller: Annotated[Caller, requires("proposals.read")],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Get a proposal with its text, its citations and its outcome."""
    document = await proposal_document(caller.instance.ledger, proposal_id)
    headers = {"ETag": etag(document["version"]), "Cache-Control": "no-cache"}
    if is_known(if_none_match, document["version"]):
        return Response(status_code=304, headers=headers)
    return JSONResponse(document, headers=headers)


@router.get("/proposals/{proposal_id}/diff", responses=PROBLEMS)
async def difference(proposal_id: ProposalId, caller: Annotated[Caller, requires("proposals.read")]) -> ProposalDiff:
    """Show as a unified diff what applying the proposal would change now.

    The diff of a change of memory contains the present memory: it also needs the rule `memory.read`, else 403.
    """
    return await caller.api.proposals.diff(proposal_id)


@router.patch(
    "/proposals/{proposal_id}",
    responses={**PROBLEMS, 412: {**PROBLEMS[409], "description": "It is not the version that was seen any more."}},
)
async def decide(
    proposal_id: ProposalId,
    body: ProposalDecision,
    caller: Annotated[Caller, requires("proposals.decide")],
    request_key: IdempotentRequestOf,
    response: Response,
    if_match: Annotated[str | None, Header(description="Decide only about this version.")] = None,
) -> ProposalShape:
    """Approve or reject a proposal, or a held job. With If-Match only the version that the caller has seen, else 412.

    The answer is the proposal right after this decision, also when the request is repeated after it has been applied.
    """
    proposals, version = caller.api_for(request_key).proposals, expected(if_match)
    try:
        if body.decision == "approve":
            done = await proposals.approve(proposal_id, body.note, version=version)
        else:
            done = await proposals.reject(proposal_id, body.note or "", version=version)
    except ProposalHasOtherVersion as error:
        raise Problem(error.code, str(error), headers={"ETag": etag(int(str(error.data["version"])))}) from error
    caller.instance.wake_bus()
    response.headers["ETag"] = etag(done.version)
    return done


@router.post(
    "/proposals/{proposal_id}/apply",
    responses={**PROBLEMS, 200: {"description": "As it stands; with `Retry-After` while it is not applied yet."}},
)
async def apply(
    proposal_id: ProposalId,
    caller: Annotated[Caller, requires("proposals.apply")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> ProposalShape:
    """Apply an approved proposal now, or retry a failed one. It is applied once, however often the request is repeated.

    The answer is its current status. While another process applies it for longer than a few seconds, that is
    `applying`: ask again after `Retry-After`. An approved job goes by itself: there the answer is its current status.
    """
    proposal = await caller.api_for(request_key).proposals.apply(proposal_id)
    response.headers["ETag"] = etag(proposal.version)
    if proposal.status in OPEN and proposal.action != HELD_ACTION:
        response.headers["Retry-After"] = str(APPLY_RETRY_S)
    return proposal

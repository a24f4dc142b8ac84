"""Runs: start one, read its status and published documents, cancel it (PIPE-1, RUN-4, RUN-10, D12, D19, D43).

Published documents are read from the object store as they were published. So the answer is correct with every
orchestrator stopped, and stays correct after retention has removed the run from the ledger.
"""

from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Depends, Header, Path, Query, Response

from trellis.api.runs import ENDED, READ, ReadableRun, manifest_file, step_files
from trellis.auth.ownership import sees_all
from trellis.documents.publisher import PublishedRuns
from trellis.engine.jobs import CORRELATION_PATTERN, CancelMode, JobId
from trellis.engine.recent_entries import LruCache
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page, etag, is_known, page_document
from trellis.http.operation_shapes import RunRequestShape
from trellis.http.shapes import (
    EXAMPLE_RUN,
    Begun,
    RunListed,
    RunManifest,
    RunStatus,
    StepFile,
    Stopped,
)
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.http_server.request_plan import FromState

POLL_S = 5

router = APIRouter(tags=["runs"], route_class=StrictRoute)

RunId = Annotated[str, Path(max_length=100, examples=[EXAMPLE_RUN], description="The run's id, long or short.")]


class RunStartRequest(pydantic.BaseModel):
    """The agent to run and its parameters."""

    model_config = body_config({"agent_slug": "archivist-violin", "params": {"topic": "bows"}})

    agent_slug: str = pydantic.Field(min_length=1, max_length=100)
    params: dict[str, Any] = pydantic.Field(default_factory=dict)
    correlation_id: str | None = pydantic.Field(None, pattern=f"^{CORRELATION_PATTERN}$")
    """The caller's own; before the one in the header `X-Correlation-ID`. Without either it is the run's id."""


class RunCancelRequest(pydantic.BaseModel):
    """How to cancel the run."""

    model_config = body_config({"mode": "soft"})

    mode: CancelMode = CancelMode.SOFT
    reason: str | None = pydantic.Field(None, max_length=500)


@router.post("/agents/run", status_code=202, responses=PROBLEMS)
async def begin(
    body: RunStartRequest,
    caller: Annotated[Caller, requires("runs.trigger")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> Begun:
    """Start a run of an agent. The run is stored before the answer is sent. Read its status at `Location`."""
    begun = await caller.api.runs.start(
        body.agent_slug,
        body.params,
        idempotency_key=None if request_key.key is None else f"http:{request_key.key.key}",
        correlation_id=body.correlation_id or caller.given_correlation_id,
    )
    request_key.note(replayed=not begun.created)
    response.headers["Location"] = f"/runs/{begun.run_id}/status"
    response.headers["Retry-After"] = str(POLL_S)
    return begun


@router.get("/runs", responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires(READ)],
    status: Literal["requested", "queued", "running", "completed", "failed"] | None = None,
    agent: Annotated[str | None, pydantic.Field(max_length=100)] = None,
    archived: Annotated[bool, Query(description="Only runs that have ended.")] = False,  # noqa: FBT002 - of the address
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[RunListed]:
    """List runs, newest first."""
    return await caller.api.runs.list(agent=agent, status=status, archived=archived, limit=limit, cursor=cursor)


async def _readable_run(
    run_id: RunId,
    slugs: Annotated[LruCache[JobId, str], Depends(FromState("slugs"))],
    caller: Annotated[Caller, requires(READ)],
) -> ReadableRun:
    """The run, if the caller may read it.

    The agent of a run never changes, and the rest is published, so a poll by a caller that may read every run asks the
    ledger once. Whoever may read only some runs is checked every time.
    """
    known = JobId(run_id)
    if known in slugs and sees_all(caller.principal, READ):
        return ReadableRun(known, slugs[known])
    run = await caller.api.runs.find(run_id)
    slugs[run.run_id] = run.agent_slug
    return run


@router.get("/runs/{run_id}", response_model=RunStatus, responses=PROBLEMS)
@router.get(
    "/runs/{run_id}/status",
    response_model=RunStatus,
    responses={**PROBLEMS, 304: {"description": "Nothing has changed since the ETag that was sent."}},
)
async def status(
    run: Annotated[ReadableRun, Depends(_readable_run)],
    runs: Annotated[PublishedRuns, Depends(FromState("published"))],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Get status.json as last published. Its ETag is the run's version; `Retry-After` says when to poll again."""
    published = await runs.polled_status(run.agent_slug, run.run_id)
    if published is None:
        raise Problem(
            "NOT_FOUND", f"{run.run_id} is written down and not published yet; ask again.", headers={"Retry-After": "1"}
        )
    headers = {"ETag": etag(published.version), "Cache-Control": "no-cache"}
    if published.status not in ENDED:
        headers["Retry-After"] = str(POLL_S)
    if is_known(if_none_match, published.version):
        return Response(status_code=304, headers=headers)
    return Response(published.body, headers=headers, media_type="application/json")


@router.get("/runs/{run_id}/steps", response_model=Page[StepFile], responses=PROBLEMS)
async def steps(run: Annotated[ReadableRun, Depends(_readable_run)], instance: InstanceOf) -> dict[str, Any]:
    """List the step files of a run, in order."""
    return page_document(await step_files(instance, run), None)


@router.get("/runs/{run_id}/request", responses=PROBLEMS)
async def request_of(run_id: RunId, caller: Annotated[Caller, requires(READ)]) -> RunRequestShape:
    """Get what a run was started with: the agent, its parameters and the trigger. 404 once it has left the ledger."""
    return await caller.api.runs.request(run_id)


@router.get("/runs/{run_id}/manifest", response_model=RunManifest, responses=PROBLEMS)
async def manifest(run: Annotated[ReadableRun, Depends(_readable_run)], instance: InstanceOf) -> dict[str, Any]:
    """Get manifest.json of a run that has ended."""
    return await manifest_file(instance, run)


@router.post("/runs/{run_id}/cancel", responses=PROBLEMS)
async def cancel(
    run_id: RunId,
    caller: Annotated[Caller, requires("runs.cancel")],
    request_key: IdempotentRequestOf,
    body: RunCancelRequest | None = None,
) -> Stopped:
    """Cancel a run: soft asks it to stop, hard ends it now. A run that has ended is 409 with its status."""
    stop = body or RunCancelRequest(mode=CancelMode.SOFT, reason=None)
    return await caller.api_for(request_key).runs.cancel(run_id, mode=stop.mode, reason=stop.reason)

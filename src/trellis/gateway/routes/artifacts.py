"""Artifacts: staged by the NLM backend, read by permitted callers, removed by an operator's cleanup.

Implements ART-1 to ART-8, D15, D25. No route changes or deletes an artifact. An operator may discard a staged one that
no job waits for. Only the caller that finalizes a staged artifact can see it; for readers it is not found.
"""

import asyncio
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Path, Query, Response

from trellis.artifacts.content import ArtifactDraft, ArtifactType
from trellis.artifacts.registry import CLEANUP_MAX
from trellis.auth.ownership import within_scope
from trellis.engine.errors import JobNotFound
from trellis.engine.jobs import JOB_ID_PATTERN, JobId
from trellis.gateway.callers import Caller, requires, within_job_agent
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.gateway.pages import LIMIT_DEFAULT, Cursor, Limit, Page
from trellis.http.shapes import EXAMPLE_ARTIFACT, Artifact, ArtifactListed, ArtifactStaged, CleanedUpShape
from trellis.http_server.bodies import LargeBodyRoute, body_config
from trellis.http_server.problems import PROBLEMS
from trellis.storage.objects.canonical_json import encode

DAYS_MAX = 36_500
CLEANUP_DEFAULT = 200
WRITE = "artifacts.write"

router = APIRouter(tags=["artifacts"], route_class=LargeBodyRoute)


class ArtifactAsked(ArtifactDraft):
    """An artifact for a job that waits for one. Without an epoch it is for the job's present attempt."""

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "job_id": "0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77",
                    "epoch": 1,
                    "type": "BRIEF",
                    "entity_refs": ["bow"],
                    "tags": ["brief"],
                    "content": {"title": "Bows", "body": "Hair.", "entity_map": {"bow": "Bow"}, "word_count": 1},
                    "sources": [{"ref": "sources/bows.md", "excerpt": "Hair."}],
                }
            ]
        }
    )

    job_id: str = pydantic.Field(pattern=JOB_ID_PATTERN)
    epoch: int | None = pydantic.Field(None, ge=0, lt=2**53)


class DiscardAsked(pydantic.BaseModel):
    """Why an operator discards a staged artifact."""

    model_config = body_config({"reason": "its job was lost"})

    reason: str | None = pydantic.Field(None, max_length=500)


class CleanupAsked(pydantic.BaseModel):
    """Which artifacts to remove. Artifacts younger than the setting `artifact_days` are never removed."""

    model_config = body_config({"older_than_days": 90, "dry_run": True})

    older_than_days: int | None = pydantic.Field(None, ge=1, le=DAYS_MAX)
    dry_run: bool = False
    limit: int = pydantic.Field(CLEANUP_DEFAULT, ge=1, le=CLEANUP_MAX)


@router.post(
    "/artifacts",
    status_code=201,
    response_model=ArtifactStaged,
    responses={**PROBLEMS, 200: {"model": ArtifactStaged, "description": "The job, or this attempt of it, has one."}},
)
async def stage(
    body: ArtifactAsked,
    caller: Annotated[Caller, requires(WRITE)],
    request_key: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Stage the artifact of a job that waits for one. If the job already has an artifact, that artifact is returned."""
    within_scope(caller.principal, WRITE, body.job_id)
    await within_job_agent(caller, WRITE, body.job_id)
    job = await caller.instance.ledger.job(JobId(body.job_id))
    if job is None:
        raise JobNotFound(job_id=body.job_id)
    await request_key.changed_before(caller.instance.ledger)
    key = request_key.change(body.job_id)
    staged = await caller.instance.artifacts.stage(caller.actor, body, job=job, epoch=body.epoch, request=key)
    response.status_code = 201 if staged.created else 200
    response.headers["Location"] = f"/artifacts/{staged.artifact_id}"
    request_key.note(replayed=not staged.created)
    return {**caller.instance.artifacts.fields(staged.row), "sha256": staged.sha256, "size": staged.size}


@router.get("/artifacts", responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires("artifacts.read")],
    type: Annotated[ArtifactType | None, Query()] = None,  # noqa: A002 - the word of the interface
    job_id: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[ArtifactListed]:
    """List finalized artifacts, newest first, without content.

    A token for one agent or one job lists those of its agent.
    """
    kind = None if type is None else type.value
    return await caller.api.artifacts.page(type_=kind, job_id=job_id, limit=limit, cursor=cursor)


@router.get("/artifacts/{artifact_id}", response_model=Artifact, responses=PROBLEMS)
async def one(
    artifact_id: Annotated[str, Path(max_length=200, examples=[EXAMPLE_ARTIFACT])],
    caller: Annotated[Caller, requires("artifacts.read")],
) -> Response:
    """Get a finalized artifact.

    An artifact that is not final is 404. One outside the reach of the token is 403, also if it does not exist.
    """
    document = await caller.api.artifacts.document(artifact_id)
    # It was validated when it was staged and never changes, so it is returned as stored, and encoded in a thread.
    return Response(await asyncio.to_thread(encode, document), media_type="application/json")


@router.get("/artifacts/{artifact_id}/content", responses={200: {"content": {"application/json": {}}}, **PROBLEMS})
async def content(
    artifact_id: Annotated[str, Path(max_length=200, examples=[EXAMPLE_ARTIFACT])],
    caller: Annotated[Caller, requires("artifacts.read")],
) -> Response:
    """Get the stored bytes of a finalized artifact, unchanged. Their SHA-256 and size are in the result of its job."""
    body = await caller.api.artifacts.content(artifact_id)
    return Response(body, media_type="application/json", headers={"X-Content-Type-Options": "nosniff"})


@router.post("/artifacts/{artifact_id}/discard", responses=PROBLEMS)
async def discard(
    artifact_id: Annotated[str, Path(max_length=200, examples=[EXAMPLE_ARTIFACT])],
    caller: Annotated[Caller, requires("artifacts.registry")],
    body: DiscardAsked | None = None,
) -> ArtifactListed:
    """Discard a staged artifact that no job waits for.

    Only an operator may. The act is audited, and no content changes.

    A final one is 409, and so is one that its job may still complete with. Asked again it answers the same.
    """
    reason = None if body is None else body.reason
    return await caller.api.artifacts.discard(artifact_id, reason=reason)


@router.post("/artifacts/cleanup", responses=PROBLEMS)
async def cleanup(
    caller: Annotated[Caller, requires("artifacts.cleanup")],
    request_key: IdempotentRequestOf,
    body: CleanupAsked | None = None,
) -> CleanedUpShape:
    """Remove old artifacts, oldest first. Only an operator may. Each removal has an audit record.

    Nobody can read them from then on. Their bytes are deleted right after that record is written, and not before.
    """
    wish = body or CleanupAsked(older_than_days=None, limit=CLEANUP_DEFAULT)
    return await caller.api_for(request_key).artifacts.cleanup(
        older_than_days=wish.older_than_days, dry_run=wish.dry_run, limit=wish.limit
    )

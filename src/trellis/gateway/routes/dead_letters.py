"""Dead letters: list and read them, and requeue their jobs, one or many at once (DJ-12, D9)."""

from typing import Annotated, Literal, Self

import pydantic
from fastapi import APIRouter, Path, Query

from trellis.engine.jobs import ReasonCode
from trellis.engine.records import JobFilter
from trellis.gateway.callers import Caller, requires
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.gateway.pages import LIMIT_DEFAULT, LIMIT_MAX, Cursor, Limit, Page
from trellis.http.shapes import DeadLetterShape, Requeued
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS

WithLetters = Literal["leased-job", "queue-job"]
"""The lifecycles whose jobs can become dead letters."""
REQUEUE_MAX = LIMIT_MAX

router = APIRouter(tags=["dead letters"], route_class=StrictRoute)


class DeadLetterFilter(pydantic.BaseModel):
    """A filter of dead letters. A field that is left out matches all."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: str | None = pydantic.Field(None, max_length=200)
    lifecycle: WithLetters | None = None
    reason_code: ReasonCode | None = None
    correlation_id: str | None = pydantic.Field(None, max_length=200)

    def to_filter(self) -> JobFilter:
        """As the ledger is asked."""
        return JobFilter(**dict(self))


class DeadLetterRequeue(pydantic.BaseModel):
    """Which jobs to requeue: their ids, or a filter (oldest first). Not both."""

    model_config = body_config({"filter": {"reason_code": "dependency_unavailable"}, "limit": 50})

    job_ids: list[Annotated[str, pydantic.Field(max_length=200)]] | None = pydantic.Field(
        None, min_length=1, max_length=REQUEUE_MAX
    )
    filter: DeadLetterFilter | None = None
    limit: int = pydantic.Field(REQUEUE_MAX, ge=1, le=REQUEUE_MAX)
    reason: str | None = pydantic.Field(None, max_length=500)

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.job_ids is None) is (self.filter is None):
            raise ValueError("give either job_ids or filter; an empty filter means every dead letter")
        return self


@router.get("/dlq", responses=PROBLEMS)
async def listing(
    caller: Annotated[Caller, requires("dead-letters.read")],
    type: Annotated[str | None, Query(max_length=200)] = None,  # noqa: A002 - the word of the interface
    lifecycle: Annotated[WithLetters | None, Query(description="Only jobs of this lifecycle.")] = None,
    reason_code: ReasonCode | None = None,
    correlation_id: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> Page[DeadLetterShape]:
    """List dead letters that were not requeued, newest first: of dead-lettered leased-jobs and of DEAD queue-jobs."""
    where = JobFilter(lifecycle=lifecycle, type=type, reason_code=reason_code, correlation_id=correlation_id)
    return await caller.api.dead_letters.page(where, limit=limit, cursor=cursor)


@router.get("/dlq/{job_id}", responses=PROBLEMS)
async def one(
    job_id: Annotated[str, Path(max_length=200)],
    caller: Annotated[Caller, requires("dead-letters.read")],
) -> DeadLetterShape:
    """Get the dead letter of a job."""
    return await caller.api.dead_letters.get(job_id)


@router.post("/dlq/requeue", responses=PROBLEMS)
async def requeue(
    body: DeadLetterRequeue,
    caller: Annotated[Caller, requires("jobs.requeue")],
    request_key: IdempotentRequestOf,
) -> Requeued:
    """Requeue dead-lettered jobs. Only an operator may. Each job has its own answer.

    The jobs of one lifecycle are requeued in one transaction.
    """
    return await caller.api.dead_letters.requeue_once(
        request_key,
        job_ids=body.job_ids or (),
        where=None if body.filter is None else body.filter.to_filter(),
        limit=body.limit,
        reason=body.reason,
    )

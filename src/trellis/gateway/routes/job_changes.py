"""Changes of many jobs at once: cancel, discard, run now, prioritize (decision 0041).

Each request is one batch of at most 500 jobs in one transaction. The answer says where the next batch begins.
"""

from typing import Annotated, Any, Literal, Self

import pydantic
from fastapi import APIRouter

from trellis.engine.job_changes import CHANGED_MAX, JobChange
from trellis.engine.jobs import CancelMode, ReasonCode
from trellis.gateway.callers import Caller, requires
from trellis.gateway.idempotency import IdempotentRequest, IdempotentRequestOf
from trellis.http.jobs import JobChangeFilter
from trellis.http.operation_shapes import JobsChanged, JobsPreview
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS

PriorityName = Literal["critical", "interactive", "batch"]

router = APIRouter(tags=["jobs"], route_class=StrictRoute)


class JobsFilter(pydantic.BaseModel):
    """A filter of jobs. A field that is left out matches all. A filter that names nothing needs `all`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: str | None = pydantic.Field(None, max_length=200)
    lifecycle: Literal["leased-job", "queue-job", "bus-job"] | None = None
    status: str | None = pydantic.Field(None, max_length=50)
    correlation_id: str | None = pydantic.Field(None, max_length=200)
    concurrency_key: str | None = pydantic.Field(None, max_length=500)
    parent_id: str | None = pydantic.Field(None, max_length=200)
    reason_code: ReasonCode | None = None
    priority: PriorityName | None = None
    submitted_before: pydantic.AwareDatetime | None = None
    submitted_after: pydantic.AwareDatetime | None = None
    all: bool = False

    def to_options(self) -> JobChangeFilter:
        """As the application is asked."""
        fields: dict[str, Any] = dict(self)
        return JobChangeFilter(type_=fields.pop("type"), everything=fields.pop("all"), **fields)


class JobsChangeRequest(pydantic.BaseModel):
    """Which jobs to change: their ids, or a filter (oldest first). Not both. `dry_run` counts and changes nothing."""

    model_config = body_config({"filter": {"type": "report", "status": "queued"}, "dry_run": True})

    job_ids: list[Annotated[str, pydantic.Field(max_length=200)]] | None = pydantic.Field(
        None, min_length=1, max_length=CHANGED_MAX
    )
    filter: JobsFilter | None = None
    limit: int = pydantic.Field(CHANGED_MAX, ge=1, le=CHANGED_MAX)
    cursor: str | None = pydantic.Field(None, max_length=200)
    dry_run: bool = False
    reason: str | None = pydantic.Field(None, max_length=500)

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.job_ids is None) is (self.filter is None):
            raise ValueError('give either job_ids or filter; {"all": true} as filter means every job')
        if self.dry_run and self.filter is None:
            raise ValueError("dry_run counts what a filter finds; leave job_ids out")
        return self


class JobsCancelRequest(JobsChangeRequest):
    """Which jobs to cancel, and how: soft asks holders to stop, hard ends the jobs now."""

    mode: CancelMode = CancelMode.SOFT


class JobsPrioritizeRequest(JobsChangeRequest):
    """Which jobs to give another priority, and which one."""

    model_config = body_config({"filter": {"correlation_id": "order-7"}, "priority": "critical"})

    priority: PriorityName


@router.post("/jobs/cancel", responses=PROBLEMS)
async def cancel_many(
    body: JobsCancelRequest,
    caller: Annotated[Caller, requires("jobs.cancel")],
    request_key: IdempotentRequestOf,
) -> JobsChanged | JobsPreview:
    """Cancel the jobs that a filter names, or named ones: at most 500 in one transaction.

    Repeat the request with the answer's `next_cursor` until that is null. A caller that may cancel only its own jobs
    cancels those. A job that changed meanwhile is skipped.
    """
    return await _change(JobChange.CANCEL, body, caller, request_key, mode=body.mode)


@router.post("/jobs/discard", responses=PROBLEMS)
async def discard_many(
    body: JobsChangeRequest,
    caller: Annotated[Caller, requires("jobs.discard")],
    request_key: IdempotentRequestOf,
) -> JobsChanged | JobsPreview:
    """Discard failed and dead-lettered jobs: their dead letters are no longer listed. Only an operator may."""
    return await _change(JobChange.DISCARD, body, caller, request_key)


@router.post("/jobs/run-now", responses=PROBLEMS)
async def run_now_many(
    body: JobsChangeRequest,
    caller: Annotated[Caller, requires("jobs.run-now")],
    request_key: IdempotentRequestOf,
) -> JobsChanged | JobsPreview:
    """End the delay of leased-jobs that wait for their time, or for their next attempt. Only an operator may."""
    return await _change(JobChange.RUN_NOW, body, caller, request_key)


@router.post("/jobs/prioritize", responses=PROBLEMS)
async def prioritize_many(
    body: JobsPrioritizeRequest,
    caller: Annotated[Caller, requires("jobs.prioritize")],
    request_key: IdempotentRequestOf,
) -> JobsChanged | JobsPreview:
    """Give waiting leased-jobs another priority. Among jobs of that priority they come last. Only an operator may."""
    return await _change(JobChange.PRIORITIZE, body, caller, request_key, to_priority=body.priority)


async def _change(
    change: JobChange,
    body: JobsChangeRequest,
    caller: Caller,
    request_key: IdempotentRequest,
    *,
    mode: str = CancelMode.SOFT,
    to_priority: str | None = None,
) -> JobsChanged | JobsPreview:
    jobs, where = (
        caller.api_for(request_key).jobs,
        JobChangeFilter() if body.filter is None else body.filter.to_options(),
    )
    if body.dry_run:
        return await jobs.preview(change, mode=mode, to_priority=to_priority, **where)
    return await jobs.change(
        change,
        job_ids=body.job_ids or (),
        limit=body.limit,
        cursor=body.cursor,
        mode=mode,
        to_priority=to_priority,
        reason=body.reason,
        **where,
    )

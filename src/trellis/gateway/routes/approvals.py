"""Approve or deny a job that the safety kernel held (D45). The routes of proposals do the same with the same code."""

from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Response

from trellis.gateway.callers import Caller, InstanceOf, api_for, requires
from trellis.gateway.idempotency import IdempotentRequestOf, mark_replayed
from trellis.gateway.routes.jobs import JobIdPath
from trellis.http.shapes import JobShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS
from trellis.proposals.proposal import NOTE_CHARS_MAX

router = APIRouter(tags=["jobs"], route_class=StrictRoute)


class Approval(pydantic.BaseModel):
    """What a person decides; rejecting says why, in ten characters or more. With `policy_hash` only about a hold under that policy."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"decision": "approve", "note": "the backup is from today"}]},
    )

    decision: Literal["approve", "reject"]
    note: str | None = pydantic.Field(None, max_length=NOTE_CHARS_MAX)
    policy_hash: str | None = pydantic.Field(None, min_length=1, max_length=200)


@router.post("/jobs/{job_id}/approval", responses=PROBLEMS)
async def approval(
    job_id: JobIdPath,
    body: Approval,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("jobs.approve")],
    asked: IdempotentRequestOf,
    response: Response,
) -> JobShape:
    """Let a held job go, or deny it. 409 when it does not wait for a person, or is held under another policy.

    An approval is good for this job under the policy that held it: when the policy has changed before the job goes, it is held again.
    """
    jobs = api_for(instance, caller).jobs
    job = await jobs.held_job(job_id)
    await asked.changed_before(instance.ledger)
    decided, repeated = await jobs.decide(
        job.job_id,
        body.note,
        body.policy_hash,
        asked.request_id,
        approve=body.decision == "approve",
        request_key=asked.change(job.job_id),
    )
    instance.wake_bus()
    mark_replayed(response, replayed=repeated)
    return decided

"""Approve or deny a job that the safety kernel held (D45). The routes of proposals do the same with the same code."""

from typing import Annotated, Literal

import pydantic
from fastapi import APIRouter, Response

from trellis.bus import approvals
from trellis.engine.jobs import JobId
from trellis.gateway.callers import Caller, InstanceOf, requires
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
    job = await approvals.get_bus_job(instance.ledger, JobId(job_id))
    await asked.changed_before(instance.ledger)
    answer = await approvals.decide(
        instance.ledger,
        caller.actor,
        job.job_id,
        approve=body.decision == "approve",
        note=body.note,
        request_id=asked.request_id,
        policy_hash=body.policy_hash,
        key=asked.change(job.job_id),
    )
    instance.wake_bus()
    mark_replayed(response, replayed=answer.repeated)
    return {
        "job_id": job.job_id,
        "lifecycle": job.lifecycle,
        "status": answer.target,
        "type": job.type,
        "version": answer.version,
    }

"""Batches of jobs: submit them together with the job that starts when all of them have ended."""

from dataclasses import replace
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Response

from trellis.auth.ownership import acting_or_gateway
from trellis.engine import tracing
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.job_batches import BATCH_MAX, checked_batch
from trellis.gateway.callers import Caller, requires
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.http.operation_shapes import BatchShape
from trellis.http_server.bodies import LargeBodyRoute, body_config
from trellis.http_server.problems import PROBLEMS
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.worker.kinds import JobRequestBody, make_job

router = APIRouter(tags=["jobs"], route_class=LargeBodyRoute)


class BatchRequest(pydantic.BaseModel):
    """Jobs to submit together, each as `POST /jobs` takes one with a `type`, and the job that completes them."""

    model_config = body_config(
        {
            "jobs": [{"type": "page.fetch", "payload": "a.html"}, {"type": "page.fetch", "payload": "b.html"}],
            "on_complete": {"type": "report", "payload": {"day": "2026-11-18"}},
        }
    )

    jobs: list[JobRequestBody] = pydantic.Field(max_length=BATCH_MAX)
    on_complete: JobRequestBody = pydantic.Field(description="The job that starts when all of them have ended.")
    abandon: bool = pydantic.Field(False, description="The jobs go on when `on_complete` is cancelled.")


@router.post("/batches", status_code=202, response_model=BatchShape, responses=PROBLEMS)
async def submit_batch(
    body: BatchRequest,
    caller: Annotated[Caller, requires("jobs.create")],
    request_key: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Submit a batch of jobs, and the job that starts once all of them have ended, however they ended.

    All are stored in one transaction before the answer is sent, or none. The handler of `on_complete` learns from
    `ctx.batch` how each has ended. When it is cancelled, the jobs that this request created are cancelled too.
    """
    about = {"trellis.type": body.on_complete.type or "", "trellis.jobs": len(body.jobs)}
    with tracing.span("job.submit_batch", about, kind=tracing.PRODUCER) as span:
        factory = caller.instance.job_factory(caller.principal, correlation_id=caller.given_correlation_id)
        trace = tracing.here()
        first, *members = [
            replace(job, trace=trace or job.trace)
            for job in [await make_job(one, factory) for one in (body.on_complete, *body.jobs)]
        ]
        batch = checked_batch(
            replace(first, correlation_id=first.correlation_id or caller.correlation_id), members, abandon=body.abandon
        )
        if (key := request_key.key) is not None:
            completion = replace(
                batch.completion, idempotency_key=key.key, idempotency_scope=key.scope, fingerprint=key.fingerprint
            )
            batch = replace(batch, completion=completion)
        try:
            answer = await caller.instance.ledger.submit_batch(acting_or_gateway(caller.actor, LEASED_JOB.name), batch)
        except IdempotencyMismatch as error:
            by_key = key is not None and error.data.get("key") == key.key
            raise IdempotencyMismatch(**{**error.data, **({"key": request_key.given} if by_key else {})}) from error
        span.note({"trellis.job_id": answer.completion.job_id})
    request_key.note(replayed=not answer.completion.created)
    response.headers["Location"] = f"/jobs/{answer.completion.job_id}"
    return {"job_id": answer.completion.job_id, "type": first.type, "jobs": [one.job_id for one in answer.members]}

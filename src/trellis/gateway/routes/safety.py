"""Explain and simulate the safety policy for a job (BUS-4). These routes change nothing."""

import asyncio
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter

from trellis.bus.requests import JobRequest
from trellis.bus.safety import evaluation
from trellis.bus.safety.evaluation import JOBS_MAX
from trellis.bus.safety.policy import FILE_BYTES_MAX, SafetyPolicy, read_policy
from trellis.engine.jobs import JOB_ID_PATTERN
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.http.shapes import ExplanationShape, SimulationShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS

REQUESTS_MAX = 200
LAST_DEFAULT = 100
POLICY_EXAMPLE = '[[rules]]\nid = "code"\ndecision = "allow"\nmatch = { topics = ["job.code.>"] }\n'

router = APIRouter(tags=["safety"], route_class=StrictRoute)

PolicyText = Annotated[
    str, pydantic.Field(max_length=FILE_BYTES_MAX, description="A policy, as its file has it (TOML).")
]


class RequestAsked(JobRequest):
    """A job request as it would be submitted; its id does not matter."""

    job_id: str = pydantic.Field("asked", pattern=JOB_ID_PATTERN)


class ExplainAsked(pydantic.BaseModel):
    """The request that is asked about, and perhaps another policy than the one in force."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"request": {"topic": "job.code.lint", "tenant_id": "acme"}}]},
    )

    request: RequestAsked
    policy: PolicyText | None = None


class SimulateAsked(pydantic.BaseModel):
    """The policy that is tried, and what it is tried on: requests, or the last jobs of the bus."""

    model_config = pydantic.ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"policy": POLICY_EXAMPLE, "last": 20}]}
    )

    policy: PolicyText
    requests: list[RequestAsked] | None = pydantic.Field(None, min_length=1, max_length=REQUESTS_MAX)
    last: int = pydantic.Field(LAST_DEFAULT, ge=1, le=JOBS_MAX)


@router.post("/safety/explain", response_model=ExplanationShape, responses=PROBLEMS)
async def explain(
    body: ExplainAsked, instance: InstanceOf, _: Annotated[Caller, requires("safety.explain")]
) -> dict[str, Any]:
    """The decision about a request: which rules were looked at, why each did not fit, and which decided."""
    if body.policy is not None:
        policy = await _read(body.policy)
        found = await asyncio.to_thread(evaluation.explain, policy, body.request)
    else:
        found = await instance.kernel.explain(body.request)
    return found.to_dict()


@router.post("/safety/simulate", response_model=SimulationShape, responses=PROBLEMS)
async def simulate(
    body: SimulateAsked, instance: InstanceOf, _: Annotated[Caller, requires("safety.simulate")]
) -> dict[str, Any]:
    """What a policy would say, beside what the one in force says about these requests, or said about the last jobs."""
    policy = await _read(body.policy)
    if body.requests is None:
        found = await evaluation.simulate_jobs(policy, instance.ledger, last=body.last)
    else:
        found = await evaluation.simulate_requests(policy, body.requests, instance.kernel)
    return {
        "policy_hash": policy.hash,
        "items": [one.to_dict() for one in found],
        "changed": sum(one.changes for one in found),
    }


async def _read(text: str) -> SafetyPolicy:
    """Parse the policy in a body in a thread, because a large one takes a while. Raises PolicyInvalid."""
    return await asyncio.to_thread(read_policy, text, source="in the body")

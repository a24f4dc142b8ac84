"""Explain and simulate the safety policy for a job (BUS-4). These routes change nothing."""

from typing import Annotated, Any

import pydantic
from fastapi import APIRouter

from trellis.bus.requests import JobRequest
from trellis.bus.safety.evaluation import JOBS_MAX
from trellis.bus.safety.policy import FILE_BYTES_MAX
from trellis.engine.jobs import JOB_ID_PATTERN
from trellis.gateway.callers import Caller, requires
from trellis.http.policy_shapes import ExplanationShape, SimulationShape
from trellis.http_server.bodies import StrictRoute, body_config
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

    model_config = body_config({"request": {"topic": "job.code.lint", "tenant_id": "acme"}})

    request: RequestAsked
    policy: PolicyText | None = None


class SimulateAsked(pydantic.BaseModel):
    """The policy to simulate, and the requests, or the number of last bus jobs, to simulate it on."""

    model_config = body_config({"policy": POLICY_EXAMPLE, "last": 20})

    policy: PolicyText
    requests: list[RequestAsked] | None = pydantic.Field(None, min_length=1, max_length=REQUESTS_MAX)
    last: int = pydantic.Field(LAST_DEFAULT, ge=1, le=JOBS_MAX)


@router.post("/safety/explain", responses=PROBLEMS)
async def explain(body: ExplainAsked, caller: Annotated[Caller, requires("safety.explain")]) -> ExplanationShape:
    """Explain the decision about a request: which rules were evaluated, why each did not match, and which decided."""
    return await caller.api.safety.explain(_plain(body.request), policy=body.policy)


@router.post("/safety/simulate", responses=PROBLEMS)
async def simulate(body: SimulateAsked, caller: Annotated[Caller, requires("safety.simulate")]) -> SimulationShape:
    """Compare the decisions of a policy with those of the policy in force, for given requests or for the last jobs."""
    requests = None if body.requests is None else [_plain(one) for one in body.requests]
    return await caller.api.safety.simulate(body.policy, requests=requests, last=body.last)


def _plain(request: RequestAsked) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_unset=True)

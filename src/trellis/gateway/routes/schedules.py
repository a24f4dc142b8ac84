"""Schedules: when agents run and jobs are submitted by themselves (RUN-9)."""

from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Path, Query

from trellis.engine.schedules import JITTER_S_MAX
from trellis.gateway.callers import Caller, requires
from trellis.gateway.idempotency import IdempotentRequestOf
from trellis.gateway.pages import Page
from trellis.http.operation_shapes import ScheduleDetail, ScheduleRemoved, ScheduleRun, ScheduleShape
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.problems import PROBLEMS

router = APIRouter(tags=["schedules"], route_class=StrictRoute)

Name = Annotated[str, Path(max_length=100, examples=["nightly-report"])]
Text = Annotated[str, pydantic.Field(max_length=200)]
MisfireWord = Literal["skip", "once", "all"]
OverlapWord = Literal["allow", "skip", "queue"]
Jitter = Annotated[float, pydantic.Field(ge=0, le=JITTER_S_MAX)]
Reason = Annotated[str | None, pydantic.Field(max_length=500)]


class NewSchedule(pydantic.BaseModel):
    """A schedule to add: a cron expression in a time zone, and the `type` or the `topic` of the jobs to submit."""

    model_config = body_config(
        {"name": "nightly-report", "cron": "0 3 * * *", "tz": "Europe/Kyiv", "type": "report", "paused": True}
    )

    name: Text
    cron: Text
    tz: Text = "UTC"
    type: Text | None = None
    topic: Text | None = None
    payload: Any = None
    concurrency_key: Text | None = None
    misfire: MisfireWord = "once"
    overlap: OverlapWord = "allow"
    jitter_s: Jitter = 0.0
    paused: bool = False
    reason: Reason = None


class ScheduleChange(pydantic.BaseModel):
    """Fields of a schedule to change. A field that is left out stays as it is."""

    model_config = body_config({"paused": True})

    cron: Text | None = None
    tz: Text | None = None
    payload: Any = None
    misfire: MisfireWord | None = None
    overlap: OverlapWord | None = None
    jitter_s: Jitter | None = None
    paused: bool | None = None
    reason: Reason = None


@router.get("/schedules", responses=PROBLEMS)
async def listing(caller: Annotated[Caller, requires("schedules.read")]) -> Page[ScheduleShape]:
    """All schedules, those of agents first, each by name, with the next and the last time."""
    return await caller.api.schedules.list()


@router.post("/schedules", responses=PROBLEMS)
async def add(body: NewSchedule, caller: Annotated[Caller, requires("schedules.manage")]) -> ScheduleDetail:
    """Add a schedule of jobs. Adding the same again changes nothing; 409 if another one has the name."""
    fields = body.model_dump(exclude={"type"})
    return await caller.api.schedules.add(**fields, type_=body.type)


@router.get("/schedules/{name}", responses=PROBLEMS)
async def one(name: Name, caller: Annotated[Caller, requires("schedules.read")]) -> ScheduleDetail:
    """One schedule of jobs, and when its next five instants fire."""
    return await caller.api.schedules.get(name)


@router.patch("/schedules/{name}", responses=PROBLEMS)
async def change(
    name: Name, body: ScheduleChange, caller: Annotated[Caller, requires("schedules.manage")]
) -> ScheduleDetail:
    """Change a schedule of jobs, or pause or resume it. Instants before the change are not fired later."""
    changes = body.model_dump(exclude_unset=True, exclude={"paused", "reason"})
    return await caller.api.schedules.change(name, changes, paused=body.paused, reason=body.reason)


@router.delete("/schedules/{name}", responses=PROBLEMS)
async def remove(
    name: Name,
    caller: Annotated[Caller, requires("schedules.manage")],
    reason: Annotated[str | None, Query(max_length=500, description="Why, for the audit record.")] = None,
) -> ScheduleRemoved:
    """Remove a schedule of jobs. The jobs that it submitted stay."""
    return await caller.api.schedules.remove(name, reason=reason)


@router.post("/schedules/{name}/run", responses=PROBLEMS)
async def run(
    name: Name,
    caller: Annotated[Caller, requires("schedules.manage")],
    request: IdempotentRequestOf,
) -> ScheduleRun:
    """Submit the job of a schedule now, whether it is paused or not."""
    return await caller.api_for(request).schedules.run(name)

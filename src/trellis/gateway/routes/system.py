"""What an instance does: liveness and health, which need no token, and its metrics, queues, workers and events."""

from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse

from trellis.engine.alerts import ALERTS_MAX
from trellis.engine.metrics import MEDIA_TYPE
from trellis.gateway.callers import Caller, requires
from trellis.gateway.pages import LIMIT_DEFAULT, Page
from trellis.http.operation_shapes import (
    AlertPage,
    EventListed,
    EventPage,
    Health,
    Live,
    QueuePaused,
    QueueShape,
    SloShape,
    WorkerShape,
)
from trellis.http.pages import EVENTS_MAX
from trellis.http_server.bodies import StrictRoute, body_config
from trellis.http_server.health import INSTANCE_HEADER, ProcessHealth
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.lifecycles import LIFECYCLES
from trellis.operations.alerts import runbook_of
from trellis.operations.job_documents import event_document

router = APIRouter(tags=["system"], route_class=StrictRoute)

MARKDOWN = "text/markdown"


@router.get("/system/live", response_model=Live)
async def live() -> dict[str, Any]:
    """Liveness: this process answers. No dependency is checked, so that a store that is down causes no restart."""
    return {"status": "ok"}


@router.get(
    "/system/ready",
    response_model=Health,
    responses={503: {"model": Health, "description": "Something that is needed does not answer."}},
)
async def ready(request: Request, response: Response) -> dict[str, Any]:
    """Readiness: whether requests can be served, with the result of each dependency, in under a second."""
    return await _readiness(request, response)


@router.get(
    "/system/health",
    response_model=Health,
    responses={503: {"model": Health, "description": "Something behind does not answer."}},
)
async def health(request: Request, response: Response) -> dict[str, Any]:
    """The same as `/system/ready`, under the name it had first."""
    return await _readiness(request, response)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}, **PROBLEMS},
)
async def metrics(request: Request, _: Annotated[Caller, requires("system.read")]) -> Response:
    """Get the metrics of this gateway, and of the ledger behind it, in Prometheus' text format."""
    health: ProcessHealth = request.app.state.health
    return Response(await health.metrics(), media_type=MEDIA_TYPE)


async def _readiness(request: Request, response: Response) -> dict[str, Any]:
    health: ProcessHealth = request.app.state.health
    readiness = await health.ready()
    response.headers[INSTANCE_HEADER] = request.app.state.instance_name
    response.status_code = 200 if readiness.is_ready else 503
    status = "ok" if readiness.is_ready else "degraded"
    return {"status": status, "checks": dict(readiness.checks), "version": request.app.version}


# --- queues and workers ------------------------------------------------------------------------------------------------


class QueueChange(pydantic.BaseModel):
    """Whether jobs of the type may be claimed. `force` also accepts a type that was never seen."""

    # Resuming a type that is not paused changes nothing, so the example can be tried.
    model_config = body_config({"paused": False})

    paused: bool
    reason: str | None = pydantic.Field(None, max_length=500)
    force: bool = False


@router.get("/queues", responses=PROBLEMS)
async def queues(caller: Annotated[Caller, requires("system.read")]) -> Page[QueueShape]:
    """Count the jobs of each type that are ready, scheduled for later, blocked by a concurrency key, and held by workers."""
    return await caller.api.system.queues()


@router.patch("/queues/{type}", responses=PROBLEMS)
async def change_queue(
    type: Annotated[str, Path(max_length=200, examples=["index.document"])],  # noqa: A002 - the word of the interface
    body: QueueChange,
    caller: Annotated[Caller, requires("queues.pause")],
) -> QueuePaused:
    """Pause a job type, so that no more of its jobs are claimed, or resume it. Held jobs continue.

    Only an operator may. 409 for a type of which nothing was submitted and that no worker serves, unless `force` is true.
    """
    system = caller.api.system
    set_ = system.pause if body.paused else system.resume
    return await set_(type, reason=body.reason, force=body.force)


@router.get("/workers", responses=PROBLEMS)
async def workers(caller: Annotated[Caller, requires("system.read")]) -> Page[WorkerShape]:
    """List worker processes that were seen lately, the last one first, and how many jobs each holds."""
    return await caller.api.system.workers()


@router.get("/alerts", responses=PROBLEMS)
async def alerts(
    caller: Annotated[Caller, requires("system.read")],
    *,
    open: Annotated[bool, Query(description="Only alerts that are open.")] = False,  # noqa: A002 - the word of the interface
    limit: Annotated[int, Query(ge=1, le=ALERTS_MAX, description="How many alerts at most.")] = LIMIT_DEFAULT,
) -> AlertPage:
    """What needs an operator: open alerts first, then those that were resolved lately, each newest first."""
    return await caller.api.system.alerts(only_open=open, limit=limit)


@router.get(
    "/runbooks/{name}",
    response_class=PlainTextResponse,
    responses={200: {"content": {MARKDOWN: {}}, "description": "The page, as Markdown."}, **PROBLEMS},
)
async def read_runbook(
    name: Annotated[str, Path(max_length=100, examples=["jobs-wait"])], _: Annotated[Caller, requires("system.read")]
) -> Response:
    """The page of an alert or of an alerting rule, with the commands that help. 404 for a name without a page."""
    return Response(runbook_of(name)[1], media_type=MARKDOWN)


@router.get("/slo", responses=PROBLEMS)
async def slo(caller: Annotated[Caller, requires("system.read")]) -> Page[SloShape]:
    """The service level objectives: value, window, sample size, target, whether it is met, and the error budget left.

    Measured from what the ledger has stored, so every gateway of an instance gives the same answer.
    """
    return await caller.api.system.slo()


@router.get("/events", responses=PROBLEMS)
async def events(
    caller: Annotated[Caller, requires("events.read")],
    *,
    job_id: Annotated[str | None, Query(max_length=200, description="Only events of this job.")] = None,
    type: Annotated[str | None, Query(max_length=100, description="Only this event type.")] = None,  # noqa: A002 - as above
    correlation_id: Annotated[str | None, Query(max_length=200)] = None,
    since: Annotated[pydantic.AwareDatetime | None, Query(description="Only with `type` or `correlation_id`.")] = None,
    lifecycle: Annotated[str | None, Query(max_length=50, description="Only jobs of this lifecycle.")] = None,
    after: Annotated[
        str | None, Query(max_length=200, description="The `position` of the page before; `latest` is the present end.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=EVENTS_MAX, description="How many events at most.")] = LIMIT_DEFAULT,
) -> EventPage:
    """List events, oldest first. With `job_id`, `type` or `correlation_id` they are looked up; otherwise the feed is read.

    The feed has every event once, in order: go on with `after`. A caller gets events of what it may read: whoever may
    read only its own jobs gets the events of those. `GET /events/stream` sends events as they happen.
    """
    if lifecycle is not None and lifecycle not in LIFECYCLES:
        known = ", ".join(LIFECYCLES)
        raise Problem("VALIDATION_FAILED", f"There is no lifecycle {lifecycle!r}; choose one of {known}.")
    feed = caller.api.feed
    if job_id is None and type is None and correlation_id is None:
        if since is not None:
            raise Problem("VALIDATION_FAILED", "since goes with type or correlation_id; the feed goes on with after.")
        event_page = await feed.page(after, lifecycle=lifecycle, limit=limit)
    else:
        if after is not None:
            raise Problem(
                "VALIDATION_FAILED", "after is a position of the feed; leave job_id, type and correlation_id out."
            )
        event_page = await feed.find(
            job_id=job_id, type_=type, correlation_id=correlation_id, since=since, lifecycle=lifecycle, limit=limit
        )
    items = [EventListed(**event_document(one, None), lifecycle=one.lifecycle) for one in event_page.items]
    return EventPage(items=items, position=event_page.position)

"""Liveness and health of this gateway, for load balancers, without a token; and its metrics, with one."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from trellis.engine.metrics import MEDIA_TYPE
from trellis.gateway.callers import Caller, requires
from trellis.http.shapes import Health, Live
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.health import INSTANCE_HEADER, ProcessHealth
from trellis.http_server.problems import PROBLEMS

router = APIRouter(tags=["system"], route_class=StrictRoute)


@router.get("/system/live", response_model=Live)
async def live() -> dict[str, Any]:
    """Whether this process answers; it looks at nothing else, so that a store that is down restarts nobody."""
    return {"status": "ok"}


@router.get(
    "/system/ready",
    response_model=Health,
    responses={503: {"model": Health, "description": "Something that is needed does not answer."}},
)
async def ready(request: Request, response: Response) -> dict[str, Any]:
    """Whether requests can be served: each dependency with its own result, in under a second."""
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
    """The metrics of this gateway, and of the ledger behind it, in Prometheus' text format."""
    asked: ProcessHealth = request.app.state.health
    return Response(await asked.metrics(), media_type=MEDIA_TYPE)


async def _readiness(request: Request, response: Response) -> dict[str, Any]:
    asked: ProcessHealth = request.app.state.health
    found = await asked.ready()
    response.headers[INSTANCE_HEADER] = request.app.state.instance_name
    response.status_code = 200 if found.is_ready else 503
    return {"status": "ok" if found.is_ready else "degraded", "checks": dict(found.checks)}

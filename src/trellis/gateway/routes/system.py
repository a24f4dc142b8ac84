"""Whether this gateway answers and what is behind it. The health of a process is for load balancers and needs no token."""

from typing import Any

from fastapi import APIRouter, Response

from trellis.engine.errors import TrellisError
from trellis.gateway.callers import InstanceOf
from trellis.http.shapes import Health
from trellis.storage.objects import StoreUnavailable
from trellis.web.bodies import StrictRoute

router = APIRouter(tags=["system"], route_class=StrictRoute)

PROBE_KEY = "agents/index.json"


@router.get(
    "/system/health",
    response_model=Health,
    responses={503: {"model": Health, "description": "Something behind does not answer."}},
)
async def health(instance: InstanceOf, response: Response) -> dict[str, Any]:
    """Whether the ledger and the object store answer."""
    checks: dict[str, str] = {}
    try:
        await instance.ledger.now()
        checks["ledger"] = "ok"
    except TrellisError as error:
        checks["ledger"] = error.code
    try:
        await instance.objects.head(PROBE_KEY)
        checks["objects"] = "ok"
    except StoreUnavailable:
        checks["objects"] = "UPSTREAM_UNAVAILABLE"
    well = set(checks.values()) == {"ok"}
    response.status_code = 200 if well else 503
    return {"status": "ok" if well else "degraded", "checks": checks}

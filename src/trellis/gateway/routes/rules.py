"""The lifecycles and the authority table, readable with any token."""

from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Path

from trellis.gateway.callers import Caller, requires
from trellis.gateway.pages import Page, page_document
from trellis.http.operation_shapes import RuleShape
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.lifecycles import LIFECYCLES, Lifecycle

router = APIRouter(tags=["rules"], route_class=StrictRoute)


class TransitionShape(pydantic.BaseModel):
    """One allowed step between states."""

    source: str | None
    target: str
    trigger: str
    actors: list[str]
    event: str


class LifecycleShape(pydantic.BaseModel):
    """A lifecycle as data."""

    name: str
    states: list[str]
    transitions: list[TransitionShape]


@router.get("/lifecycles", response_model=Page[LifecycleShape], responses=PROBLEMS)
async def lifecycles(_: Annotated[Caller, requires("rules.read")]) -> dict[str, Any]:
    """List every lifecycle."""
    return page_document([_lifecycle(one) for one in LIFECYCLES.values()], None)


@router.get("/lifecycles/{name}", response_model=LifecycleShape, responses=PROBLEMS)
async def lifecycle(
    name: Annotated[str, Path(max_length=50, examples=["run"])], _: Annotated[Caller, requires("rules.read")]
) -> dict[str, Any]:
    """Get a lifecycle."""
    known = LIFECYCLES.get(name)
    if known is None:
        raise Problem("NOT_FOUND", f"There is no lifecycle {name!r}; choose one of {', '.join(LIFECYCLES)}.")
    return _lifecycle(known)


def _lifecycle(one: Lifecycle) -> dict[str, Any]:
    return {
        "name": one.name,
        "states": [state.name for state in one.states],
        "transitions": [
            {
                "source": step.source,
                "target": step.target,
                "trigger": str(step.trigger),
                "actors": sorted(role.value for role in step.actors),
                "event": step.event,
            }
            for step in one.transitions
        ],
    }


@router.get("/authority", responses=PROBLEMS)
async def authority(caller: Annotated[Caller, requires("rules.read")]) -> Page[RuleShape]:
    """The authority matrices: which role may do what."""
    return await caller.api.system.authority()

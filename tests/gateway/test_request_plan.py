"""A route with a plan responds as FastAPI alone would (`http_server/request_plan.py`)."""

from collections.abc import Callable
from typing import Annotated, Any

import httpx2
import pydantic
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.routing import APIRoute

from trellis.gateway.app import ROUTES
from trellis.http_server.bodies import BodiesUnderWay, StrictRoute
from trellis.http_server.problems import install
from trellis.http_server.request_plan import request_plan

WITHOUT_PLAN = {"/events/stream", "/metrics", "/runbooks/{name}"}
"""Routes that FastAPI calls itself: they declare another class of response."""

Calls = list[str]


class Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    count: int
    note: str | None = None


class Answer(pydantic.BaseModel):
    text: str
    rest: str | None = None


def _router(calls: Calls, route_class: type[APIRoute]) -> APIRouter:
    """Routes that use all that a plan knows. Each call adds its name."""
    router = APIRouter(route_class=route_class)

    async def deepest(request: Request) -> str:
        calls.append("deepest")
        return request.headers.get("x-who", "nobody")

    async def checked(who: Annotated[str, Depends(deepest)], response: Response) -> str:
        calls.append("checked")
        response.headers["X-Checked"] = who
        if who == "refused":
            raise ValueError(who)
        return who.upper()

    @router.post("/things/{name}", status_code=201)
    async def make(
        name: Annotated[str, Path(max_length=5)],
        body: Body,
        who: Annotated[str, Depends(checked)],
        again: Annotated[str, Depends(deepest)],
        response: Response,
        x_mode: Annotated[str | None, Header(max_length=3)] = None,
    ) -> Answer:
        calls.append("make")
        response.headers["Location"] = f"/things/{name}"
        if x_mode == "200":
            response.status_code = 200
        return Answer(text=f"{name} {body.count} {body.note} {who} {again} {x_mode}")

    @router.get("/things/{number}", response_model_exclude_none=True)
    async def show(
        number: int,
        limit: Annotated[int, Query(ge=1)] = 10,
        names: Annotated[list[str] | None, Query()] = None,
        many: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
    ) -> Answer:
        many.append("changed")
        return Answer(text=f"{number} {limit} {names} {many}")

    @router.get("/wrong")
    async def wrong() -> Answer:
        wrong: Any = {"no": "answer"}
        return wrong

    @router.get("/own")
    async def own(who: Annotated[str, Depends(deepest)]) -> Response:
        return Response(who, status_code=203, headers={"X-Own": "yes"})

    return router


def _app(calls: Calls, route_class: type[APIRoute]) -> FastAPI:
    app = FastAPI()
    install(app)
    app.state.bodies = BodiesUnderWay()
    app.include_router(_router(calls, route_class))
    return app


async def _seen(app: FastAPI, calls: Calls, request: dict[str, Any]) -> tuple[Any, ...]:
    calls.clear()
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.request(**request)
    own = {name: value for name, value in response.headers.items() if name != "x-correlation-id"}
    return response.status_code, response.content, own, list(calls)


GOOD = {"method": "POST", "url": "/things/one", "json": {"count": 3}}
REQUESTS: dict[str, dict[str, Any]] = {
    "a body": GOOD,
    "a header": {**GOOD, "headers": {"X-Mode": "abc", "X-Who": "me"}},
    "a header twice": {**GOOD, "headers": [("X-Mode", "a"), ("X-Mode", "b")]},
    "another status": {**GOOD, "headers": {"X-Mode": "200"}},
    "a header that is too long": {**GOOD, "headers": {"X-Mode": "long"}},
    "a path that is too long": {**GOOD, "url": "/things/longer"},
    "a body that does not fit": {**GOOD, "json": {"count": "many", "more": 1}},
    "no body": {"method": "POST", "url": "/things/one"},
    "an error in a dependency": {**GOOD, "headers": {"X-Who": "refused"}},
    "an error in a dependency, and a value that does not fit": {
        **GOOD,
        "json": {},
        "headers": {"X-Who": "refused"},
    },
    "no query": {"method": "GET", "url": "/things/1"},
    "a query": {"method": "GET", "url": "/things/1", "params": {"limit": "5", "names": ["a", "b"]}},
    "a query that does not fit": {"method": "GET", "url": "/things/1", "params": {"limit": "0"}},
    "a number in the path that is none": {"method": "GET", "url": "/things/x"},
    "a response of its own": {"method": "GET", "url": "/own"},
    "a value that is no answer": {"method": "GET", "url": "/wrong"},
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_planned_route_responds_as_fastapi_does(name: str):
    planned: Calls = []
    plain: Calls = []
    request = REQUESTS[name]

    ours = [await _seen(app, planned, request) for app in [_app(planned, StrictRoute)] for _ in range(2)]
    theirs = await _seen(_app(plain, APIRoute), plain, request)

    # The second request would show a default that the first one had changed.
    assert ours == [theirs, theirs]


async def test_nothing_is_called_twice_when_fastapi_takes_over():
    calls: Calls = []

    status, *_, called = await _seen(_app(calls, StrictRoute), calls, REQUESTS["a header that is too long"])

    assert (status, called) == (422, ["deepest", "checked"])


async def test_a_replaced_dependency_is_called_instead():
    calls: Calls = []
    app = _app(calls, StrictRoute)
    dependency: Callable[..., Any] = _dependency(app, "own")

    async def other() -> str:
        return "another"

    app.dependency_overrides[dependency] = other

    assert (await _seen(app, calls, REQUESTS["a response of its own"]))[1] == b"another"


def _dependency(app: FastAPI, endpoint: str) -> Callable[..., Any]:
    routers: list[Any] = [getattr(one, "original_router", None) for one in app.router.routes]
    (route,) = [route for one in routers if one for route in one.routes if route.name == endpoint]
    call = route.dependant.dependencies[0].call
    assert call is not None
    return call


def test_every_route_of_the_gateway_has_a_plan_but_those_of_another_response_class():
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]

    assert {route.path for route in routes if request_plan(route) is None} == WITHOUT_PLAN

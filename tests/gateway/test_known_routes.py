"""What the tests of the gateway share: routes are made ready once, and each application still answers for itself."""

from typing import Annotated, Any

import httpx2
from fastapi import APIRouter, Depends, FastAPI, Request

from tests.known_routes import prepared_once


def who(request: Request) -> str:
    return request.app.state.name


def an_app(router: APIRouter, name: str) -> FastAPI:
    app = FastAPI()
    app.state.name = name
    app.include_router(router)
    return app


def a_router() -> APIRouter:
    router = APIRouter()

    @router.get("/name")
    def name(mine: Annotated[str, Depends(who)]) -> str:
        return mine

    return router


async def told(app: FastAPI) -> Any:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        return (await client.get("/name")).json()


def made_ready(app: FastAPI) -> Any:
    """What the library keeps for the one route that was included."""
    (included,) = [route for route in app.router.routes if hasattr(route, "include_context")]
    (route,) = included.original_router.routes  # type: ignore[attr-defined]
    return prepared_once(original_route=route, include_context=included.include_context)  # type: ignore[attr-defined]


async def test_two_applications_with_the_same_route_answer_separately():
    router = a_router()
    one, two = an_app(router, "one"), an_app(router, "two")
    assert [await told(one), await told(two)] == ["one", "two"]
    assert made_ready(one) is made_ready(two)


async def test_an_application_that_replaces_a_dependency_shares_nothing():
    router = a_router()
    one, other = an_app(router, "one"), an_app(router, "other")
    other.dependency_overrides[who] = lambda: "replaced"
    assert [await told(one), await told(other)] == ["one", "replaced"]
    assert made_ready(one) is not made_ready(other)

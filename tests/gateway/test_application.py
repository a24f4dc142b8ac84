"""An application that looks routes up calls the same one as the router of FastAPI (`http_server/application.py`)."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trellis.http_server.application import HttpApplication
from trellis.http_server.bodies import BodiesUnderWay, StrictRoute
from trellis.http_server.joined_response import SERVERS_SEND, WRITE_PART, WRITE_WHOLE
from trellis.http_server.middleware import RequestMiddleware
from trellis.http_server.problems import install


def _endpoint(name: str) -> Any:
    async def endpoint(request: Request) -> Response:
        return _Stream() if name == "stream" else PlainTextResponse(f"{name} {request.path_params}")

    return endpoint


def _strict(path: str, name: str, *methods: str) -> list[Any]:
    router = APIRouter(route_class=StrictRoute)
    router.add_api_route(path, _endpoint(name), methods=[*methods] or ["GET"])
    return router.routes


class _Stream(Response):
    """Its part goes past the layers if that is possible, as those of event streams do."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        write_part = scope.get(WRITE_PART)
        if write_part is None or not write_part(b"part"):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _with_routes(app: FastAPI) -> FastAPI:
    """Routes of which several match one address, in an order that matters."""

    async def crashing() -> Response:
        raise LookupError("not for the caller")

    app.router.routes.clear()
    crash = APIRouter(route_class=StrictRoute)
    crash.add_api_route("/crash", crashing)
    app.router.routes += [
        *_strict("/things", "all"),
        *_strict("/things/first", "first"),
        *_strict("/things/{name}", "one"),
        *_strict("/things/last", "never"),
        *_strict("/things/{name}", "changed", "POST", "PATCH"),
        *_strict("/things/{name}/parts/{part}", "part"),
        Route("/files/{path:path}", _endpoint("any file")),
        *_strict("/files/list", "hidden by the route before it"),
        *_strict("/folders/{path:path}", "folder"),
        *_strict("/folders/list", "hidden, too"),
        *crash.routes,
        *_strict("/stream", "stream"),
        Route("/{any}", _endpoint("any")),
        *_strict("/late", "hidden by the one for any address"),
        *_strict("/late/but/deeper", "deeper"),
    ]
    install(app)
    app.state.bodies = BodiesUnderWay()
    return app


@pytest.mark.parametrize(
    "method, path",
    [
        *(
            ("GET", f"/things{rest}")
            for rest in ("", "/", "/first", "/other", "/last", "/a%2Fb", "/a%0A", "/a/parts/b")
        ),
        *(("GET", f"/{rest}") for rest in ("files/list", "files/a/b", "folders/list", "late", "late/but/deeper", "")),
        *((method, "/things/one") for method in ("POST", "PATCH", "DELETE", "HEAD", "OPTIONS")),
        ("GET", "/nothing/is/here"),
        ("GET", "/things/first?unknown=1"),
        ("GET", "/crash"),
    ],
)
async def test_an_address_reaches_the_route_that_the_router_would_call(method: str, path: str):
    answers: list[Any] = []
    for app in (FastAPI(redirect_slashes=False), HttpApplication(title="t", version="1", description="")):
        transport = httpx2.ASGITransport(app=_with_routes(app), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
            response = await client.request(method, path)
            answers.append((response.status_code, response.headers, response.content))
    assert answers[0] == answers[1]


async def test_a_route_of_the_table_is_called_without_asking_the_router(monkeypatch: pytest.MonkeyPatch):
    app = _with_routes(HttpApplication(title="t", version="1", description=""))
    monkeypatch.setattr(app.router, "app", None)
    monkeypatch.setattr(StrictRoute, "matches", None)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://gateway") as client:
        assert (await client.get("/things/a/parts/b")).text == "part {'name': 'a', 'part': 'b'}"


class Marking:
    """A layer that an application may add: it marks every response."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-mark", b"seen")]
            await send(message)

        await self._app(scope, receive, marked)


@pytest.mark.parametrize("is_outer", [True, False])
@pytest.mark.parametrize("path", ["/things/first", "/nothing/is/here", "/things/first?unknown=1", "/stream"])
async def test_a_layer_that_is_added_has_every_response(is_outer: bool, path: str):
    """Also those that the server could write at once."""
    app = _with_routes(HttpApplication(title="t", version="1", description=""))
    layers: list[Any] = [(RequestMiddleware, {"new_id": lambda: "one"}), (Marking, {})]
    for layer, options in layers if is_outer else reversed(layers):
        app.add_middleware(layer, **options)
    written: list[bytes] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        scope[WRITE_WHOLE] = lambda status, headers, fixed, body: written.append(body) or True
        scope[WRITE_PART] = lambda body: written.append(body) or True
        scope[SERVERS_SEND] = send
        await app(scope, receive, send)

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=serve), base_url="http://gateway") as client:
        assert (await client.get(path)).headers["x-mark"] == "seen"
    assert written == []


async def test_the_handlers_of_the_start_and_the_end_of_the_server_are_called():
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncGenerator[None]:
        steps.append("started")
        yield
        steps.append("ended")

    app = HttpApplication(title="t", version="1", description="d")
    app.router.lifespan_context = lifespan
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        steps.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert steps == ["started", "lifespan.startup.complete", "ended", "lifespan.shutdown.complete"]

"""The HTTP application of the gateway and of the NLM backend: FastAPI with a short way from the server to a route.

FastAPI puts layers around every request that serve nothing here (its own telemetry, stacks for files and for
dependencies that clean up), and tries one route after another. Together they cost more than a small request itself.
`HttpApplication` leaves the layers out and looks a route up; what it does not find, the router of FastAPI handles.

Invariants:
- the first route in the order of the application that matches is called, as by the router;
- every error is answered by the handlers of the application, as by FastAPI: the layer that calls them is put around
  whatever may still fail in a way that has a handler, which a whole response in memory does not;
- every layer has every message of every response. Only `RequestMiddleware` lets whole responses and parts of streams
  past, so they are written past the layers only where it is alone and nothing is wrapped around the application.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.convertors import StringConvertor
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from trellis.http_server.bodies import StrictRoute
from trellis.http_server.joined_response import WRITE_WHOLE, is_wrapped, send_in_messages
from trellis.http_server.middleware import RESPOND, RequestMiddleware

NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""Turns off the framework's own telemetry: `RequestMiddleware` opens the spans, and `/metrics` has the counts.

Its spans would record the query, which may hold a ticket, and an error in the tracing library could fail the request.
"""

RouteKey = tuple[str, str, int]
"""Method, first segment and number of segments of an address."""


class HttpApplication(FastAPI):
    """An application whose routes are looked up, with the documentation pages of FastAPI turned off."""

    def __init__(self, *, title: str, version: str, description: str) -> None:
        super().__init__(
            title=title,
            version=version,
            description=description,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            telemetry=NO_TELEMETRY,
        )
        self._has_other_layers = False
        """Whether there are layers besides `RequestMiddleware`. Known when the first request has come."""
        self.state: Any = SimpleNamespace()  # the framework's class raises an error inside at every look at it

    def build_middleware_stack(self) -> ASGIApp:
        """The layers of a request, from the outermost: crashes, the application's middleware, errors, the routes."""
        handlers = dict(self.exception_handlers)
        crash: Any = handlers.pop(Exception, None)
        self._has_other_layers = [layer for layer, _, _ in self.user_middleware] != [RequestMiddleware]
        app: ASGIApp = _RouteTable(self, handlers)
        for layer, args, options in reversed(self.user_middleware):
            app = layer(app, *args, **options)
        return ServerErrorMiddleware(app, handler=crash)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the start and the end of the server."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        if self._has_other_layers or is_wrapped(scope, send):
            send_in_messages(scope)
        await self.middleware_stack(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A route that may match an address, and how its path is read."""

    route: StrictRoute
    match: Callable[[str], Any]


class _RouteTable:
    """Calls the route of a request, and hands every request that is not in the table to the router."""

    def __init__(self, app: FastAPI, handlers: Mapping[Any, Any]) -> None:
        self._router, self._handlers = app.router, handlers
        self._otherwise = AsyncExitStackMiddleware(app.router)
        self._candidates = _candidates(app.router.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._found(scope) if scope["type"] == "http" else None  # else the start and the end of the server
        if route is None:
            await self._guarded(self._otherwise)(scope, receive, send)
            return
        try:
            answer = await route.answer(scope, receive)
        except Exception as error:  # noqa: BLE001 - the handlers of the application say which errors have an answer
            answer = _raising(error)
        if WRITE_WHOLE in scope and isinstance(answer, Response) and _is_whole(answer):
            await scope[RESPOND](answer)
        else:
            await self._guarded(answer)(scope, receive, send)

    def _found(self, scope: Scope) -> StrictRoute | None:
        """The route of this request, noted in its scope as the router does; None if only the router knows it."""
        if scope.get("root_path"):
            return None
        path: str = scope["path"]
        for one in self._candidates.get((scope["method"], path[1:].partition("/")[0], path.count("/")), ()):
            match = one.match(path)
            if match is not None:
                scope["router"], scope["route"], scope["endpoint"] = self._router, one.route, one.route.endpoint
                scope["path_params"] = match.groupdict()
                return one.route
        return None

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """An application whose errors the handlers answer."""
        return ExceptionMiddleware(app, handlers=self._handlers)


def _is_whole(response: Response) -> bool:
    """Whether a response is its status, its headers and its body, and nothing has to be done to send it."""
    return type(response).__call__ is Response.__call__ and response.background is None


def _raising(error: Exception) -> ASGIApp:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - the form of an application
        raise error

    return fail


def _candidates(routes: Sequence[BaseRoute]) -> Mapping[RouteKey, tuple[_Candidate, ...]]:
    """The routes that an address may have, by its key and in their order.

    A route that only the router knows to match keeps all later routes with its first segment out of the table.
    """
    table: dict[RouteKey, tuple[_Candidate, ...]] = {}
    left_out: set[str] = set()
    for route in routes:
        path = getattr(route, "path", "/{any}")
        first = path[1:].partition("/")[0]
        if "{" in first:
            break  # it may match every address
        if not isinstance(route, StrictRoute) or not _has_plain_names(route):
            left_out.add(first)
        elif first not in left_out:
            for method in route.methods or ():
                key = (method, first, path.count("/"))
                table[key] = (*table.get(key, ()), _Candidate(route, route.path_regex.match))
    return table


def _has_plain_names(route: APIRoute) -> bool:
    """Whether each name in the path stands for one segment, as it is."""
    return all(isinstance(one, StringConvertor) for one in route.param_convertors.values())

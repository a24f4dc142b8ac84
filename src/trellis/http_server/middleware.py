"""Middleware around every request: correlation id, tracing span, and the deadline of reads."""

import asyncio
import re
import time
from collections.abc import Callable

from fastapi import Request
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine import tracing
from trellis.engine.jobs import CORRELATION_PATTERN
from trellis.engine.logs import log_of
from trellis.engine.metrics import HTTP_SECONDS, process_metrics
from trellis.http_server.problems import Problem, correlation_of, problem_response
from trellis.http_server.security_headers import SECURITY_HEADERS

# Correlation id of a request and its response, and headers that routes add to the response.

HEADER = "X-Correlation-ID"
_FORM = re.compile(CORRELATION_PATTERN)


class CorrelationMiddleware:
    """Keeps the caller's correlation id if it is well formed, and assigns a new one otherwise."""

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str]) -> None:
        self._app, self._new_id = app, new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        is_given = _FORM.fullmatch(given) is not None
        correlation_id = given if is_given else self._new_id()
        scope["trellis.correlation_id"] = correlation_id
        scope["trellis.correlation_given"] = is_given

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = correlation_id
                headers.setdefault("Cache-Control", "no-store")
                for name, value in (*scope.get("trellis.headers", {}).items(), *SECURITY_HEADERS.items()):
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


# The span of a request, in the caller's trace or in a new one (OBS-6).

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "HTTP"
"""Span name for unknown methods, so that the number of span names stays small."""
PATH_CHARS_MAX = 200
NO_SPANS: TelemetryConfig = {"tracing": False}
"""Turns off the framework's own spans.

They would record the query, which may hold a ticket, and an error in the tracing library could fail the request.
"""
_HEADER = tracing.HEADER.encode()


class TracingMiddleware:
    """Opens a span per request. Must run inside `CorrelationMiddleware`, whose id each span records."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else OTHER
        began = time.perf_counter()
        with tracing.carried(_given_traceparent(scope), method, kind=tracing.SERVER) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    process_metrics.observe(HTTP_SECONDS, time.perf_counter() - began, method, str(message["status"]))
                    span.note({"http.response.status_code": message["status"]})
                    if message["status"] >= 500:
                        span.fail(f"answered {message['status']}")
                await send(message)

            try:
                await self._app(scope, receive, send_and_note)
            finally:
                _describe_span(span, scope, method)


def _given_traceparent(scope: Scope) -> str | None:
    """The caller's traceparent header; None if it is missing or sent more than once."""
    values = [value for name, value in scope["headers"] if name == _HEADER]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _describe_span(span: tracing.Span, scope: Scope, method: str) -> None:
    """Add what is known after routing. The query is left out, because it may hold a ticket."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.rename(f"{method} {route}")
        span.note({"http.route": route})
    span.note(
        {
            "http.request.method": method,
            "url.path": scope["path"][:PATH_CHARS_MAX],
            "trellis.correlation_id": scope.get("trellis.correlation_id", ""),
        }
    )


# The deadline of reads: a read is answered within a few seconds, or with a problem that names the cause.
# A caller that waits for an unavailable store gains nothing by waiting longer, and holds a connection meanwhile. Writes
# have no deadline: a write may have taken effect, and its idempotency key lets the caller find out.

READS = frozenset({"GET", "HEAD"})

_log = log_of("trellis.gateway")


class ReadDeadlineMiddleware:
    """Ends a GET or HEAD whose response has not started after `seconds`.

    A started response, such as a stream, goes on.
    """

    def __init__(self, app: ASGIApp, *, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] not in READS:
            await self._app(scope, receive, send)
            return
        deadline = asyncio.timeout(self._seconds)

        async def send_in_time(message: Message) -> None:
            deadline.reschedule(None)
            await send(message)

        try:
            async with deadline:
                await self._app(scope, receive, send_in_time)
        except TimeoutError:
            if not deadline.expired():
                raise
            request = Request(scope)
            late = f"What this needs did not answer within {self._seconds:g} s; GET /system/ready says what is down."
            _log.warning("read_timed_out", path=scope["path"], correlation_id=correlation_of(request))
            problem = Problem("UPSTREAM_UNAVAILABLE", late, headers={"Retry-After": "1"})
            await problem_response(request, problem)(scope, receive, send)

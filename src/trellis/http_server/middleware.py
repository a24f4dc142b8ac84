"""What is done around every request: correlation id, span, and the deadline of reads."""

import asyncio
import re
from collections.abc import Callable

from fastapi import Request
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine import tracing
from trellis.engine.jobs import CORRELATION_PATTERN
from trellis.engine.logs import log_of
from trellis.http_server.problems import Problem, correlation_of, problem_response

# Around every request: its correlation id, in and out, and headers that routes leave for the answer.

HEADER = "X-Correlation-ID"
_FORM = re.compile(CORRELATION_PATTERN)


class CorrelationMiddleware:
    """A caller's own id is kept if it is plain; any other request gets a new one."""

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str]) -> None:
        self._app, self._new_id = app, new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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
                headers["X-Content-Type-Options"] = "nosniff"
                for name, value in scope.get("trellis.headers", {}).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


# Around every request: its span, in the trace that the caller names or in a new one (OBS-6).

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "HTTP"
"""How spans are named whose method is none that we know: names of spans are few."""
PATH_CHARS_MAX = 200
NO_SPANS: TelemetryConfig = {"tracing": False}
"""For the framework, whose own spans would tell the query, with the tickets in it, and let a failing library fail the request."""
_HEADER = tracing.HEADER.encode()


class TracingMiddleware:
    """Inside of `Correlation`, whose id each span tells."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else OTHER
        with tracing.carried(_given_traceparent(scope), method, kind=tracing.SERVER) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.note({"http.response.status_code": message["status"]})
                    if message["status"] >= 500:
                        span.fail(f"answered {message['status']}")
                await send(message)

            try:
                await self._app(scope, receive, send_and_note)
            finally:
                _describe_span(span, scope, method)


def _given_traceparent(scope: Scope) -> str | None:
    """What the caller names, unless it names two."""
    found = [value for name, value in scope["headers"] if name == _HEADER]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _describe_span(span: tracing.Span, scope: Scope, method: str) -> None:
    """What is known when the request was routed. The query stays out: it may hold a ticket."""
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


# A read is answered in a few seconds, or with a problem that says what does not answer.
#
# A caller who waits on a store that is down learns nothing by waiting longer, and holds a connection meanwhile. A write goes on: it
# may have happened, and its own idempotency key finds that out.

READS = frozenset({"GET", "HEAD"})

_log = log_of("trellis.gateway")


class ReadDeadlineMiddleware:
    """Ends a GET that has not begun to answer after `seconds`. An answer that has begun, such as a stream, is left alone."""

    def __init__(self, app: ASGIApp, *, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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

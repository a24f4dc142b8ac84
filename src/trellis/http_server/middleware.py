"""Middleware around every request: correlation id, response headers, tracing span, and the deadline of reads."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine import tracing
from trellis.engine.jobs import CORRELATION_PATTERN
from trellis.engine.logs import log_of
from trellis.engine.metrics import HTTP_SECONDS, process_metrics
from trellis.http_server.deadlines import SharedDeadline, SharedDeadlines
from trellis.http_server.problems import Problem, correlation_of, problem_response
from trellis.http_server.security_headers import SECURITY_HEADERS

HEADER = "X-Correlation-ID"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
READS = frozenset({"GET", "HEAD"})
OTHER = "HTTP"
"""Span name for unknown methods, so that the number of span names stays small."""
PATH_CHARS_MAX = 200

Headers = list[tuple[bytes, bytes]]

_FORM = re.compile(CORRELATION_PATTERN)
_HEADER = HEADER.lower().encode()
_TRACE = tracing.HEADER.encode()
_DEFAULTS: Headers = [
    (name.lower().encode(), value.encode("latin-1"))
    for name, value in {"Cache-Control": "no-store", **SECURITY_HEADERS}.items()
]
_log = log_of("trellis.gateway")


class RequestMiddleware:
    """What every request has. One layer does it all, because each layer costs as much as what it does.

    - Its correlation id is the caller's if that is well formed, and a new one otherwise. The response has it, too.
    - Its span is in the caller's trace or in a new one (OBS-6). The query is left out, because it may hold a ticket.
    - Its response has the headers that routes leave in `trellis.headers`, and defaults for `Cache-Control` and security.
    - A GET or HEAD whose response has not started after `read_s` seconds ends with a problem that names the cause. A
      caller that waits for an unavailable store gains nothing by waiting longer, and holds a connection meanwhile. A
      started response, such as a stream, goes on. Writes have no deadline: a write may have taken effect, and its
      idempotency key lets the caller find out.
    """

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str], read_s: float | None = None) -> None:
        self._app, self._new_id, self._read_s = app, new_id, read_s
        self._deadlines = None if read_s is None else SharedDeadlines(read_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, trace = _given(scope["headers"])
        is_given = _FORM.fullmatch(given) is not None
        correlation_id = given if is_given else self._new_id()
        scope["trellis.correlation_id"] = correlation_id
        scope["trellis.correlation_given"] = is_given
        method = scope["method"] if scope["method"] in METHODS else OTHER
        began = time.perf_counter()
        deadline = self._deadlines.begin() if self._deadlines is not None and method in READS else None

        async def send_complete(message: Message) -> None:
            if message["type"] == "http.response.start":
                if deadline is not None:
                    deadline.stop()
                status: int = message["status"]
                process_metrics.observe(HTTP_SECONDS, time.perf_counter() - began, method, str(status))
                span.note({"http.response.status_code": status})
                if status >= 500:
                    span.fail(f"answered {status}")
                message["headers"] = _completed(message.get("headers", ()), correlation_id, scope)
            await send(message)

        with tracing.carried(trace, method, kind=tracing.SERVER) as span:
            try:
                if deadline is None:
                    await self._app(scope, receive, send_complete)
                else:
                    await self._read(deadline, scope, receive, send_complete)
            finally:
                if span.is_recorded:
                    _describe_span(span, scope, method)

    async def _read(self, deadline: SharedDeadline, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a read until its deadline, and answer with a problem after it."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not deadline.close():
                raise
            await self._answer_late(scope, receive, send)
        finally:
            deadline.close()

    async def _answer_late(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a read that is over its deadline."""
        request = Request(scope)
        late = f"What this needs did not answer within {self._read_s:g} s; GET /system/ready says what is down."
        _log.warning("read_timed_out", path=scope["path"], correlation_id=correlation_of(request))
        problem = Problem("UPSTREAM_UNAVAILABLE", late, headers={"Retry-After": "1"})
        await problem_response(request, problem)(scope, receive, send)


def _given(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str | None]:
    """The first correlation id that the caller sent, and its traceparent if it sent exactly one."""
    given, traces = None, [b""]
    for name, value in headers:
        if name == _HEADER and given is None:
            given = value
        elif name == _TRACE:
            traces.append(value)
    return (given or b"").decode("latin-1"), traces[1].decode("latin-1") if len(traces) == 2 else None


def _completed(headers: Iterable[tuple[bytes, bytes]], correlation_id: str, scope: Scope) -> Headers:
    """The headers of the response with the correlation id, and with those that it does not have yet."""
    complete = [one for one in headers if one[0] != _HEADER]
    names = {name for name, _ in complete}
    complete.append((_HEADER, correlation_id.encode("latin-1")))
    added: Headers = scope.get("trellis.headers", [])
    complete += [one for one in added if one[0] not in names]
    complete += [one for one in _DEFAULTS if one[0] not in names]
    return complete


def _describe_span(span: tracing.Span, scope: Scope, method: str) -> None:
    """Add what is known after routing."""
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

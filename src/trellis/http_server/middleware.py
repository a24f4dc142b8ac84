"""Middleware around every request: correlation id, response headers, tracing span, and the deadline of reads."""

import asyncio
import functools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine import tracing
from trellis.engine.jobs import CORRELATION_PATTERN
from trellis.engine.logs import log_of
from trellis.engine.metrics import HTTP_SECONDS, process_metrics
from trellis.http_server.deadlines import SharedDeadline, SharedDeadlines
from trellis.http_server.joined_response import WRITE_WHOLE, FixedHeaders, Headers
from trellis.http_server.problems import Problem, correlation_of, problem_response
from trellis.http_server.security_headers import SECURITY_HEADERS

HEADER = "X-Correlation-ID"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
READS = frozenset({"GET", "HEAD"})
OTHER = "HTTP"
"""Span name for unknown methods, so that the number of span names stays small."""
PATH_CHARS_MAX = 200

_FORM = re.compile(CORRELATION_PATTERN)
_HEADER = HEADER.lower().encode()
_TRACE = tracing.HEADER.encode()
_DEFAULTS: Headers = [
    (name.lower().encode(), value.encode("latin-1"))
    for name, value in {"Cache-Control": "no-store", **SECURITY_HEADERS}.items()
]
_DEFAULT_NAMES = frozenset(name for name, _ in _DEFAULTS)
RESPOND = "trellis.respond"
"""Where the scope of a request has what answers it with a whole response, if it has `WRITE_WHOLE`, too."""
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
        with tracing.carried(trace, method, kind=tracing.SERVER) as span:
            answer = _Answer(scope, send, method, began, deadline, span)
            scope[RESPOND] = answer.respond
            try:
                await self._app(scope, receive, answer.send_complete)
            except asyncio.CancelledError:
                if deadline is None or not deadline.close():
                    raise
                await self._answer_late(scope, receive, answer.send_complete)
            finally:
                if deadline is not None:
                    deadline.close()
                if span.is_recorded:
                    _describe_span(span, scope, method)

    async def _answer_late(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a read that is over its deadline."""
        request = Request(scope)
        late = f"What this needs did not answer within {self._read_s:g} s; GET /system/ready says what is down."
        _log.warning("read_timed_out", path=scope["path"], correlation_id=correlation_of(request))
        problem = Problem("UPSTREAM_UNAVAILABLE", late, headers={"Retry-After": "1"})
        await problem_response(request, problem)(scope, receive, send)


@dataclass(slots=True)
class _Answer:
    """How one request is answered: what its response begins with is the same, in messages or whole."""

    scope: Scope
    send: Send
    method: str
    began: float
    deadline: SharedDeadline | None
    span: tracing.Span

    async def send_complete(self, message: Message) -> None:
        """Send a message of the response, the first with all headers."""
        if message["type"] == "http.response.start":
            own, defaults = self._begin(message["status"], message.get("headers", ()))
            message["headers"] = own + defaults.headers
        await self.send(message)

    async def respond(self, response: Response) -> None:
        """Send a response that is only its status, its headers and its body: at once, unless it has to be sent."""
        own, defaults = self._begin(response.status_code, response.raw_headers)
        if not self.scope[WRITE_WHOLE](response.status_code, own, defaults.lines, response.body):
            headers = own + defaults.headers
            await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            await self.send({"type": "http.response.body", "body": response.body})

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, FixedHeaders]:
        """Note that the response begins; its own headers and the defaults that they leave."""
        if self.deadline is not None:
            self.deadline.stop()
        process_metrics.observe(HTTP_SECONDS, time.perf_counter() - self.began, self.method, str(status))
        if self.span.is_recorded:
            self.span.note({"http.response.status_code": status})
            if status >= 500:
                self.span.fail(f"answered {status}")
        return _completed(headers, self.scope)


def _given(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str | None]:
    """The first correlation id that the caller sent, and its traceparent if it sent exactly one."""
    given, traces = None, [b""]
    for name, value in headers:
        if name == _HEADER and given is None:
            given = value
        elif name == _TRACE:
            traces.append(value)
    return (given or b"").decode("latin-1"), traces[1].decode("latin-1") if len(traces) == 2 else None


def _completed(headers: Iterable[tuple[bytes, bytes]], scope: Scope) -> tuple[Headers, FixedHeaders]:
    """The headers of the response with the correlation id and those that routes left; and the defaults it lacks."""
    complete = [one for one in headers if one[0] != _HEADER]
    names = {name for name, _ in complete}
    complete.append((_HEADER, scope["trellis.correlation_id"].encode("latin-1")))
    added: Headers = scope.get("trellis.headers", [])
    complete += [one for one in added if one[0] not in names]
    return complete, _defaults_beside(_DEFAULT_NAMES.intersection(names))


@functools.cache
def _defaults_beside(names: frozenset[bytes]) -> FixedHeaders:
    """The defaults of a response that has these of their names itself."""
    return FixedHeaders.of(one for one in _DEFAULTS if one[0] not in names)


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

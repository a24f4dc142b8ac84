"""Around every request: its span, in the trace that the caller names or in a new one (OBS-6)."""

from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine import tracing

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

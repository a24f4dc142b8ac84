"""Around every request: its correlation id, in and out, and headers that routes leave for the answer."""

import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine.jobs import CORRELATION_PATTERN

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

"""A read is answered in a few seconds, or with a problem that says what does not answer.

A caller who waits on a store that is down learns nothing by waiting longer, and holds a connection meanwhile. A write goes on: it
may have happened, and its own idempotency key finds that out.
"""

import asyncio

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trellis.engine.logs import log_of
from trellis.web.problems import Problem, correlation_of, problem_response

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

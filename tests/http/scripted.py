"""A server that answers by a script, and a client on a clock that moves only when everybody waits for it."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import httpx2

from trellis.http.calls import CallOptions
from trellis.http.client import GatewayClient, open_client
from trellis.testing import FakeClock

T = TypeVar("T")
Reply = httpx2.Response | Exception | Callable[[httpx2.Request], httpx2.Response]
TURNS = 40
"""Of the event loop, after which everything that waits for no clock has happened: nothing here waits for a socket."""


class Script(httpx2.AsyncBaseTransport):
    """Replies in order, the last one for ever; keeps the requests."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = list(replies)
        self.requests: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, Exception):
            raise reply
        made = reply(request) if callable(reply) else reply
        # As from a socket: not read yet, however often the script gives it.
        stream = Pieces([made.content]) if made.is_stream_consumed else made.stream
        return httpx2.Response(made.status_code, headers=made.headers, stream=stream)

    def header(self, name: str) -> list[str | None]:
        return [request.headers.get(name) for request in self.requests]


class Silent(httpx2.AsyncBaseTransport):
    """Takes requests and never answers."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.Event().wait()
        raise AssertionError


class Draws(random.Random):
    """Always the same share."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self._share = share

    def random(self) -> float:
        return self._share


class Pieces(httpx2.AsyncByteStream):
    """A body in pieces, which may end in an error."""

    def __init__(self, pieces: Sequence[bytes], error: Exception | None = None) -> None:
        self._pieces, self._error = pieces, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error


def problem(status: int, code: str, detail: str = "because", **headers: str) -> httpx2.Response:
    return httpx2.Response(
        status,
        headers={"Content-Type": "application/problem+json", "X-Correlation-ID": "c-1", **headers},
        json={"status": status, "code": code, "detail": detail, "correlation_id": "c-1"},
    )


def client_on(
    transport: httpx2.AsyncBaseTransport,
    clock: FakeClock,
    *,
    draw: float = 0.5,
    token: Callable[[], str | None] = lambda: "a-token",
    options: CallOptions | None = None,
    url: str = "https://gateway",
) -> AbstractAsyncContextManager[GatewayClient]:
    numbers = itertools.count(1)
    return open_client(
        url,
        token=token,
        clock=clock,
        rng=Draws(draw),
        new_id=lambda: f"id-{next(numbers)}",
        options=options,
        transport=transport,
    )


async def settled() -> None:
    """Let everything happen that waits for no clock."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def in_time(clock: FakeClock, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, with the clock moved to the next moment somebody waits for, as often as needed."""
    task = asyncio.ensure_future(work)
    await settled()
    while not task.done():
        assert clock.sleeping, "nobody waits for the clock, and yet it is not done"
        clock.advance(min(due for due, _, woken in clock._sleepers if not woken.done()) - clock.monotonic())
        await settled()
    return await task

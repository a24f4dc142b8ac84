"""Events over connections that break anywhere: each once, in order."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.scripted import Pieces, Script, client_on, in_time, problem
from trellis.http.calls import CallOptions
from trellis.http.errors import AnswerInvalid, GatewayUnavailable, TokenIsOver
from trellis.http.shapes import LiveEvent
from trellis.testing import EPOCH_S, FakeClock

STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
CUT = httpx2.RemoteProtocolError("peer closed connection without sending complete message body")


def frame(number: int) -> bytes:
    data = json.dumps({"type": "run.status.changed", "runId": "run_1", "status": "ünning", "version": number})
    return f"id: {number:04}\ndata: {data}\n\n".encode()


def stream(*pieces: bytes, error: Exception | None = None) -> httpx2.Response:
    return httpx2.Response(200, headers=STREAM, stream=Pieces(pieces, error))


async def take(events: AsyncGenerator[LiveEvent], count: int) -> list[LiveEvent]:
    taken: list[LiveEvent] = []
    async with aclosing(events):
        async for event in events:
            taken.append(event)
            if len(taken) == count:
                break
    return taken


class Feed:
    """Serves events 1 to `last` after the Last-Event-ID, each connection cut after so many bytes."""

    def __init__(self, last: int, cuts: list[int]) -> None:
        self._last, self._cuts, self.asked = last, cuts, list[str | None]()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        after = request.headers.get("Last-Event-ID")
        self.asked.append(after)
        first = int(after or 0)
        body = b"retry: 0\nid: %04d\n\n" % first
        body += b"".join(b": still here\n\n" + frame(number) for number in range(first + 1, self._last + 1))
        cut = self._cuts.pop(0) if self._cuts else len(body)
        return stream(body[:cut], error=CUT if cut < len(body) else None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=12), st.sampled_from([None, "0003"]))
def test_wherever_the_stream_is_cut_each_event_comes_once(cuts: list[int], after: str | None):
    async def story() -> list[int | None]:
        clock = FakeClock()
        async with client_on(Script(Feed(8, cuts)), clock) as client:
            first = int(after or 0)
            return [one.version for one in await in_time(clock, take(client.events(after=after), 8 - first))]

    assert asyncio.run(story()) == list(range(int(after or 0) + 1, 9))


async def test_a_stream_that_broke_before_its_first_event_goes_on_where_it_began():
    feed = Script(stream(b"retry: 1500\nid: 0041\n\n", error=CUT), stream(frame(42)))
    clock = FakeClock()
    async with client_on(feed, clock) as client:
        (event,) = await in_time(clock, take(client.events(), 1))
    assert feed.header("Last-Event-ID") == [None, "0041"]
    assert event.id == "0042"
    assert clock.monotonic() - EPOCH_S == pytest.approx(1.5 + 0.05)


async def test_repeated_event_of_a_stream_is_delivered_once():
    feed = Script(stream(frame(1), frame(2), frame(1), frame(2), frame(3)))
    clock = FakeClock()
    async with client_on(feed, clock) as client:
        assert [one.id for one in await in_time(clock, take(client.events(), 3))] == ["0001", "0002", "0003"]


async def test_a_filter_is_asked_for_at_the_gateway():
    script, clock = Script(stream(frame(1))), FakeClock()
    async with client_on(script, clock) as client:
        await in_time(clock, take(client.events(run="r", agent="a", types=["x", "y"], lifecycle="run"), 1))
    assert str(script.requests[0].url.query, "ascii") == "run=r&agent=a&type=x&type=y&lifecycle=run"


async def test_a_busy_gateway_is_tried_again_and_an_expired_token_is_not():
    script = Script(
        problem(503, "UPSTREAM_UNAVAILABLE", **{"Retry-After": "2"}),
        httpx2.ConnectError("refused"),
        stream(frame(1)),
        problem(401, "TOKEN_EXPIRED", "it is over"),
    )
    clock = FakeClock()
    async with client_on(script, clock) as client:
        events = client.events()
        assert (await in_time(clock, anext(events))).id == "0001"
        with pytest.raises(TokenIsOver, match="it is over"):
            await in_time(clock, anext(events))
    assert clock.monotonic() - EPOCH_S >= 2.0
    assert len(script.requests) == 4


@pytest.mark.parametrize("reply", [httpx2.ConnectError("refused"), lambda _: stream(b": nothing\n\n")])
async def test_a_stream_raises_gateway_unavailable_after_its_patience(reply: Callable[..., Any]):
    clock = FakeClock()
    async with client_on(Script(reply), clock, options=CallOptions(patience_s=20.0)) as client:
        with pytest.raises(GatewayUnavailable):
            await in_time(clock, anext(client.events()))
    assert 20.0 < clock.monotonic() - EPOCH_S < 30.0


@pytest.mark.parametrize(
    "reply",
    [
        lambda _: stream(b"id: 1\ndata: [1]\n\n"),
        lambda _: stream(b"id: 1\ndata: {\n\n"),
        lambda _: stream(b'id: 1\ndata: {"no": "type"}\n\n'),
    ],
)
async def test_an_event_that_cannot_be_read_is_an_error_and_is_not_skipped(reply: Callable[..., Any]):
    clock = FakeClock()
    async with client_on(Script(reply), clock) as client:
        with pytest.raises(AnswerInvalid):
            await in_time(clock, anext(client.events()))

"""How responses leave the server: as uvicorn sends them, but in one write if the length is known; and deadlines."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import APIRouter, Request
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.gateway.test_server import PATIENCE_S, serving
from trellis.http_server.application import HttpApplication
from trellis.http_server.bodies import BodiesUnderWay, StrictRoute
from trellis.http_server.deadlines import SharedDeadlines
from trellis.http_server.joined_response import WRITE_PART, WRITE_WHOLE, JoinedResponse
from trellis.http_server.middleware import RequestMiddleware

LENGTH = (b"content-length", b"2")
PLAIN = (b"content-type", b"text/plain")
LATE_S = 0.01
LONG_S = 600.0


@dataclass
class Recorder(asyncio.Transport):
    """Keeps what is written."""

    writes: list[bytes] = field(default_factory=list[bytes])
    is_closed: bool = False

    def write(self, data: Any) -> None:
        if data:
            self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes = b"hi", *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def response_cycle(
    transport: Recorder,
    flow: FlowControl,
    *,
    method: str = "GET",
    keep_alive: bool = True,
    on_response: Callable[[], None] = lambda: None,
) -> RequestResponseCycle:
    """What uvicorn has for one request."""
    return RequestResponseCycle(
        scope={"type": "http", "method": method, "headers": [], "path": "/", "query_string": b""},  # type: ignore[typeddict-item] - what a response needs of it
        transport=transport,  # type: ignore[arg-type] - what it needs of a transport
        flow=flow,
        logger=logging.getLogger("uvicorn"),
        access_logger=logging.getLogger("uvicorn"),
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=on_response,
    )


async def sent(
    messages: list[dict[str, Any]], *, joined: bool, method: str = "GET", keep_alive: bool = True, fails: bool = False
) -> tuple[Any, ...]:
    """What uvicorn writes for these messages, with or without `JoinedResponse`, and the state that it leaves."""
    transport, ended = Recorder(), list[None]()
    cycle = response_cycle(
        transport, FlowControl(transport), method=method, keep_alive=keep_alive, on_response=lambda: ended.append(None)
    )  # type: ignore[arg-type]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if fails:
            raise RuntimeError("the application fails")

    await cycle.run_asgi(JoinedResponse(app, cycle) if joined else app)  # type: ignore[arg-type]
    state = (cycle.response_complete, cycle.message_event.is_set(), len(ended), transport.is_closed)
    return transport.writes, state


class PartWriter:
    """An application that writes one part past its layers, and notes which parts it may not write."""

    def __init__(self, *headers: tuple[bytes, bytes], method: str = "GET") -> None:
        self.transport, self.headers, self.answers = Recorder(), headers, list[bool]()
        self.flow = FlowControl(self.transport)  # type: ignore[arg-type] - what it needs of a transport
        self.cycle = response_cycle(self.transport, self.flow, method=method)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        write_part = scope[WRITE_PART]
        self.answers.append(write_part(b"too early"))
        await send(start(*self.headers))
        await send(part(b"h", more=True))
        self.answers.append(write_part(b"i" * 20))
        self.flow.write_paused = True
        self.answers.append(write_part(b"the client does not read"))
        self.flow.write_paused = False
        await send(part(b""))
        self.answers.append(write_part(b"too late"))


async def test_part_of_a_stream_is_written_past_the_layers_only_while_it_can_be_sent():
    app = PartWriter()
    await app.cycle.run_asgi(JoinedResponse(app, app.cycle))  # type: ignore[arg-type]
    assert app.answers == [False, True, False, False]
    plain, _ = await sent([start(), part(b"h", more=True), part(b"i" * 20, more=True), part(b"")], joined=False)
    assert app.transport.writes == plain


@pytest.mark.parametrize("headers, method", [(((b"content-length", b"1"),), "GET"), ((), "HEAD")])
async def test_no_part_is_written_past_the_layers_of_a_response_without_chunks(
    headers: tuple[tuple[bytes, bytes], ...], method: str
):
    app = PartWriter(*headers, method=method)
    await app.cycle.run_asgi(JoinedResponse(app, app.cycle))  # type: ignore[arg-type]
    assert app.answers == [False] * 4


CASES = {
    "a body": ([start(LENGTH, PLAIN), part()], "GET", True),
    "nothing new": ([start((b"etag", b'"1"'), status=304), part(b"")], "GET", True),
    "no content": ([start(status=204), part(b"")], "DELETE", True),
    "an empty body": ([start((b"content-length", b"0")), part(b"")], "GET", True),
    "names in capitals": ([start((b"Content-Length", b"2"), PLAIN), part()], "GET", True),
    "one name in capitals": ([start(LENGTH, (b"X-A", b"b")), part()], "GET", True),
    "two cookies": ([start(LENGTH, (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")), part()], "GET", True),
    "an unknown status": ([start(LENGTH, status=299), part()], "GET", True),
    "HEAD": ([start(LENGTH), part(b"")], "HEAD", True),
    "the last response of a connection": ([start(LENGTH), part()], "GET", False),
    "a response that ends the connection": ([start(LENGTH, (b"connection", b"close")), part()], "GET", True),
    "parts of known length": ([start(LENGTH), part(b"h", more=True), part(b"i")], "GET", True),
    "parts of unknown length": ([start(), part(b"h", more=True), part(b"i")], "GET", True),
    "chunks beside a length": ([start(LENGTH, (b"transfer-encoding", b"chunked")), part()], "GET", True),
}
JOINED = {"a body", "nothing new", "no content", "an empty body", "two cookies", "an unknown status"}


@pytest.mark.parametrize("name", CASES)
async def test_response_has_the_bytes_of_uvicorn_in_one_write_if_its_length_is_known(name: str):
    messages, method, keep_alive = CASES[name]
    plain, plain_state = await sent(messages, joined=False, method=method, keep_alive=keep_alive)
    writes, state = await sent(messages, joined=True, method=method, keep_alive=keep_alive)
    assert (b"".join(writes), state) == (b"".join(plain), plain_state)
    assert writes == ([b"".join(plain)] if name in JOINED else plain)


@pytest.mark.parametrize(
    "messages",
    [
        [start(LENGTH, (b"x-a", b"1\r\nx-b: 2")), part()],
        [start(LENGTH, (b"x-a\r\nx-b", b"2")), part()],
        [start(LENGTH, (b"x a", b"1")), part()],
        [start((b"content-length", b"1")), part()],
        [start((b"content-length", b"3")), part()],
        [start(LENGTH, status=304), part(b"")],
    ],
)
async def test_response_that_uvicorn_refuses_is_refused(messages: list[dict[str, Any]]):
    plain, _ = await sent(messages, joined=False)
    writes, (is_complete, *_, is_closed) = await sent(messages, joined=True)
    assert (writes, is_complete, is_closed) == (plain, False, True)


async def test_application_that_fails_before_the_body_is_answered_500():
    writes, _ = await sent([start(LENGTH)], joined=True, fails=True)
    assert b"".join(writes).startswith(b"HTTP/1.1 500 ")


async def test_head_of_a_stream_leaves_before_its_first_part():
    go_on = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send(start())
            await go_on.wait()
            await send(part())

    async with serving(stream) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        go_on.set()
        writer.close()
    assert b"transfer-encoding: chunked" in head


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_nothing_is_written_past_a_wrapper_around_the_application(is_wrapped: bool):
    """A wrapper of the server's user, for example one that compresses, has every message."""
    app = HttpApplication(title="t", version="1", description="")
    app.state.bodies = BodiesUnderWay()
    app.add_middleware(RequestMiddleware, new_id=lambda: "one")
    router = APIRouter(route_class=StrictRoute)
    ways, passed, transport = list[bool](), list[str](), Recorder()

    async def answer(request: Request) -> Response:
        ways.extend(one in request.scope for one in (WRITE_PART, WRITE_WHOLE))
        return Response("hi")

    router.add_api_route("/", answer)
    app.router.routes[:] = router.routes

    async def wrapper(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            passed.append(message["type"])
            await send(message)

        await app(scope, receive, noted)

    cycle = response_cycle(transport, FlowControl(transport))  # type: ignore[arg-type] - what it needs of a transport
    joined = JoinedResponse(wrapper if is_wrapped else app, cycle)  # type: ignore[arg-type]
    await cycle.run_asgi(joined)  # type: ignore[arg-type]
    assert ways == [not is_wrapped] * 2
    assert passed == (["http.response.start", "http.response.body"] if is_wrapped else [])
    (written,) = transport.writes
    assert written.endswith(b"\r\n\r\nhi")
    assert b"x-correlation-id: one" in written.lower()


# --- deadlines -----------------------------------------------------------------------------------------------------


async def waits(deadlines: SharedDeadlines, *, stopped: bool = False, going: asyncio.Event | None = None) -> str:
    """Wait for `going` under a deadline, which is stopped at once or not; how that ended."""
    deadline = deadlines.begin()
    if stopped:
        deadline.stop()
    try:
        await (going or asyncio.Event()).wait()
    except asyncio.CancelledError:
        return "late" if deadline.close() else "cancelled"
    finally:
        deadline.close()
    return "done"


async def test_each_task_over_its_deadline_is_cancelled_and_no_other():
    deadlines, going = SharedDeadlines(LATE_S), asyncio.Event()
    stopped = asyncio.create_task(waits(deadlines, stopped=True, going=going))
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(waits(deadlines), waits(deadlines)) == ["late", "late"]
        assert await waits(deadlines) == "late"  # one that begins after the timer of the others
    assert not stopped.done()
    going.set()
    assert await stopped == "done"


async def test_cancellation_from_elsewhere_is_not_the_deadlines():
    task = asyncio.create_task(waits(SharedDeadlines(LONG_S)))
    await asyncio.wait({task}, timeout=0)
    task.cancel()
    assert await task == "cancelled"


async def test_late_task_goes_on_uncancelled():
    assert await waits(SharedDeadlines(LATE_S)) == "late"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_inner_deadline_does_not_hide_the_outer_one():
    deadlines = SharedDeadlines(LATE_S)
    outer = deadlines.begin()
    inner = SharedDeadlines(LONG_S).begin()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    assert (inner.close(), outer.close()) == (False, True)


def test_deadlines_work_in_the_event_loop_after_the_first():
    deadlines = SharedDeadlines(LATE_S)
    assert [asyncio.run(asyncio.wait_for(waits(deadlines), PATIENCE_S)) for _ in range(2)] == ["late", "late"]

"""The server: who is let in on which address, what one connection may cost, and how it ends."""

import asyncio
import json
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.net.listening import make_certificates
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.http_server.server import BoundSockets, ListenRefused, ServerOptions, listen, serve_gateway

PATIENCE_S = 60.0
LOOPBACK = ServerOptions(host="127.0.0.1", port=0)
Application = Callable[[Any, Any, Any], Awaitable[None]]


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything at once and reads no body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})


@dataclass
class Held:
    """Answers when it is told to."""

    begun: asyncio.Event
    go_on: asyncio.Event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.begun.set()
            await self.go_on.wait()
            await hello(scope, receive, send)


@dataclass
class Running:
    place: BoundSockets
    stop: asyncio.Event
    task: "asyncio.Task[None]"

    @property
    def port(self) -> int:
        return int(self.place.url.rpartition(":")[2])

    async def ask(self, request: bytes, tls: ssl.SSLContext | None = None) -> tuple[bytes, bytes]:
        """Head and body of all that comes back until the server closes the connection."""
        name = "localhost" if tls else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return head, body


@asynccontextmanager
async def serving(app: Application, options: ServerOptions = LOOPBACK, **given: Any) -> AsyncIterator[Running]:
    place, stop, ready = listen(options, key_configured=False), asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve_gateway(app, place, options, stop, ready=ready.set, **given))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
            yield Running(place, stop, task)
    finally:
        stop.set()
        await task


GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def problem(answer: tuple[bytes, bytes]) -> dict[str, Any]:
    head, body = answer
    assert b"content-type: application/problem+json" in head
    assert head.split(b" ", 2)[1] == str(json.loads(body)["status"]).encode()
    return json.loads(body)


# --- the address -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("AUTH-5")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_reach_needs_a_configured_key(host: str):
    with pytest.raises(KeyUnusable, match="TRELLIS_TOKEN_JWKS_FILE"):
        listen(replace(LOOPBACK, host=host), key_configured=False)


def test_with_a_configured_key_every_address_can_be_served():
    place = listen(replace(LOOPBACK, host="0.0.0.0"), key_configured=True)
    assert not place.is_local
    place.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_address_is_served_without_a_token_key(host: str):
    place = listen(replace(LOOPBACK, host=host), key_configured=False)
    assert place.is_local
    assert place.url.startswith(f"http://{host}:")
    place.close()


def test_an_address_that_cannot_be_had_says_why():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenRefused, match=f"127.0.0.1:{port}: another process listens there.*--port"):
            listen(replace(LOOPBACK, port=port), key_configured=False)
    with pytest.raises(ListenRefused, match="no such address"):
        listen(replace(LOOPBACK, host="192.0.2.1"), key_configured=True)
    with pytest.raises(ListenRefused, match="no such host"):
        listen(replace(LOOPBACK, host="no-such-host.invalid"), key_configured=True)


async def test_the_gateway_serves_tls_with_the_configured_certificate(tmp_path: Path):
    certificates = make_certificates(tmp_path, "localhost")
    options = replace(LOOPBACK, tls_cert_file=certificates.chain, tls_key_file=certificates.key)
    async with serving(hello, options) as running:
        assert running.place.url.startswith("https://")
        head, body = await running.ask(GET, certificates.client())
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"hi")
        old = certificates.client()
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        assert (await running.ask(GET, old))[1] == b"hi"


def test_a_certificate_that_is_none_is_found_at_the_start(tmp_path: Path):
    (tmp_path / "x.pem").write_text("nothing")
    for file in (tmp_path / "x.pem", tmp_path / "missing.pem"):
        with pytest.raises(SettingsInvalid, match="no certificate with its key"):
            listen(replace(LOOPBACK, tls_cert_file=file, tls_key_file=file), key_configured=False)


# --- one connection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 400_000,  # never ends
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
    ],
    ids=["long header", "endless header", "long address", "many headers"],
)
async def test_a_huge_head_is_refused_before_anything_is_done(request_: bytes):
    asked: list[Any] = []

    async def remembering(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["type"])
        await hello(scope, receive, send)

    async with serving(remembering) as running:
        told = problem(await running.ask(request_))
        assert (told["status"], told["code"]) == (431, "HEADERS_TOO_LARGE")
        assert "send fewer" in told["detail"]
        assert "http" not in asked
        assert (await running.ask(GET))[1] == b"hi"


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS where none is spoken
    ],
)
async def test_malformed_http_request_gets_only_a_problem(request_: bytes):
    async with serving(hello) as running:
        told = problem(await running.ask(request_))
        assert (told["status"], told["code"]) == (400, "BAD_REQUEST")
        assert (await running.ask(GET))[1] == b"hi"


async def test_a_head_that_comes_too_slowly_is_ended():
    async with serving(hello, replace(LOOPBACK, head_s=0.05)) as running:
        told = problem(await running.ask(b"GET / HTTP/1.1\r\nHost:"))
        assert (told["status"], told["code"]) == (408, "REQUEST_TIMEOUT")


async def test_large_bodies_and_several_requests_in_one_piece_are_no_huge_head():
    async def counting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        told = str(len(body)).encode()
        length = (b"content-length", str(len(told)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": told})

    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000
    async with serving(counting) as running:
        head, rest = await running.ask(post + post + GET)
        assert (head + rest).count(b"200000") == 2
        assert rest.endswith(b"0")


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_stopping_server_finishes_open_requests_and_accepts_no_new_ones():
    held = Held(asyncio.Event(), asyncio.Event())
    async with serving(held) as running:
        asking = asyncio.create_task(running.ask(GET))
        await held.begun.wait()
        running.stop.set()
        await _until_refused(running.port)
        assert not running.task.done()
        held.go_on.set()
        assert (await asking)[1] == b"hi"
        await running.task


async def _until_refused(port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return
            writer.close()


async def test_streams_are_ended_when_it_stops():
    """What never ends by itself is asked to; the process does not wait for its clients."""
    ended, begun = asyncio.Event(), asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            begun.set()
            await ended.wait()
            await send({"type": "http.response.body", "body": b"bye"})

    async def end_streams() -> None:
        ended.set()

    async with serving(stream, end_streams=end_streams) as running:
        asking = asyncio.create_task(running.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
        await begun.wait()
        running.stop.set()
        await running.task
        assert b"bye" in (await asking)[1]


async def test_idle_connections_do_not_hold_it_up_and_signals_stay_the_processs_own():
    before = signal.getsignal(signal.SIGTERM)
    async with serving(hello) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hi")
        assert signal.getsignal(signal.SIGTERM) is before
        running.stop.set()
        await running.task
        assert await reader.read() == b""
        writer.close()

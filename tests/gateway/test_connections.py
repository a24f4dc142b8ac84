"""Connections: which one gives way when there are too many; strangers use up no descriptors and fill no log."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_bodies import RESULT
from tests.gateway.test_server import GET, LOOPBACK, PATIENCE_S, Held, Running, hello, problem, serving
from tests.net.listening import make_certificates
from tests.servers.ready_python import ready_python
from trellis.engine.logs import log_of
from trellis.http_server import connections
from trellis.http_server.connections import ConnectionPool
from trellis.http_server.limits import LogLimit

KEPT = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ONE = replace(LOOPBACK, connections_max=1)


@asynccontextmanager
async def connected(running: Running, first: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(first)
    try:
        yield reader
    finally:
        writer.close()


# --- who gives way ---------------------------------------------------------------------------------------------------


async def test_an_idle_connection_gives_way_to_a_new_one():
    async with serving(hello, ONE) as running, connected(running) as silent:
        assert (await running.ask(GET))[1] == b"hi"
        assert await silent.read() == b""


async def test_a_connection_between_two_requests_gives_way_too():
    async with serving(hello, ONE) as running, connected(running, KEPT) as kept:
        assert (await kept.readuntil(b"hi")).endswith(b"hi")
        assert (await running.ask(GET))[1] == b"hi"
        assert await kept.read() == b""


async def test_connection_with_slow_headers_gives_way_to_complete_requests():
    async with serving(hello, ONE) as running, connected(running, GET[:10]) as slow:
        async with asyncio.timeout(PATIENCE_S):
            while b"hi" not in b"".join(await running.ask(GET)):
                pass
            answer = await slow.read()
        assert b"503 Service Unavailable" in answer or answer == b""


async def test_new_connection_is_refused_while_all_others_are_busy():
    held = Held(asyncio.Event(), asyncio.Event())
    async with serving(held, ONE) as running:
        asking = asyncio.create_task(running.ask(GET))
        await held.begun.wait()
        told = problem(await running.ask(b""))
        assert (told["status"], told["code"]) == (503, "OVERLOADED")
        held.go_on.set()
        assert (await asking)[1] == b"hi"
        assert (await running.ask(GET))[1] == b"hi"


async def test_a_handshake_that_never_ends_gives_way_too(tmp_path: Path):
    """Before TLS is agreed on there is no connection that HTTP knows; its descriptor is used all the same."""
    certificates = make_certificates(tmp_path, "localhost")
    options = replace(ONE, tls_cert_file=certificates.chain, tls_key_file=certificates.key)
    async with serving(hello, options) as running, connected(running) as silent:
        assert (await running.ask(GET, certificates.client()))[1] == b"hi"
        async with asyncio.timeout(PATIENCE_S):
            assert await silent.read() == b""


async def test_a_client_that_does_not_read_is_ended():
    async def much(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1_000):
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            ended.set()

    ended = asyncio.Event()
    async with serving(much, replace(LOOPBACK, unread_s=0.05)) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as deaf:
            deaf.sendall(KEPT)
            async with asyncio.timeout(PATIENCE_S):
                await ended.wait()


class _Waits:
    """A connection that says when it gave way."""

    def __init__(self, name: str, left: list[str]) -> None:
        self.name, self.left = name, left

    def give_way(self) -> None:
        self.left.append(self.name)


def test_idle_connection_is_closed_first_then_the_longest_waiting_one():
    left: list[str] = []
    open_here = ConnectionPool(4)
    a, b, c, d = (_Waits(name, left) for name in "abcd")
    for one in (a, b, c, d):
        open_here.opened(one, 3)
        open_here.wait(one)
    open_here.work(b)
    open_here.wait(d, first=True)
    assert [open_here.make_room(3) for _ in range(1)] == [True]
    for name in "efgh":
        open_here.opened(name, 3)
        open_here.make_room(3)
    assert left == ["d", "a", "c"]
    assert not open_here.make_room(3)
    for name in "efgh":
        open_here.closed(name)
    assert open_here.make_room(3)
    assert not open_here.make_room(sys.maxsize), "no descriptor is left, and nobody waits"


# --- what is not believed --------------------------------------------------------------------------------------------


async def test_headers_after_a_body_are_not_believed():
    seen: list[list[bytes]] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive())["more_body"]:
                pass
            seen.append([name for name, _ in scope["headers"]])
            await hello(scope, receive, send)

    chunked = (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    async with serving(noting) as running:
        head, _ = await running.ask(chunked + b"Authorization: Bearer x\r\n\r\n" + GET)
        assert head.startswith(b"HTTP/1.1 200")
    assert seen == [[b"host", b"transfer-encoding", b"trailer"], [b"host", b"connection"]]


async def test_endless_headers_after_a_body_are_refused():
    async def reading(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass

    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "
    async with serving(reading) as running:
        told = problem(await running.ask(chunked + b"x" * 1_000_000))
        assert (told["status"], told["code"]) == (431, "HEADERS_TOO_LARGE")


# --- the log ---------------------------------------------------------------------------------------------------------


async def test_unreadable_requests_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture):
    async with serving(hello) as running:
        for _ in range(20):
            problem(await running.ask(b"nonsense\r\n\r\n"))
        upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: x\r\nConnection: upgrade, close\r\n\r\n"
        assert (await running.ask(upgrade))[1] == b"hi"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        "request_refused code='BAD_REQUEST' address='127.0.0.1'",
        "request_refused_again code='BAD_REQUEST' count=19 within_s=60.0",
    ]


def test_a_limited_log_says_the_first_and_how_many_followed(caplog: pytest.LogCaptureFixture):
    later: list[tuple[float, Any]] = []
    limit = LogLimit(log_of("t"), lambda after_s, call, *given: later.append((after_s, lambda: call(*given))))
    for number in range(1_000):
        limit.warning("odd", code="A", number=number)
    limit.warning("odd", code="B")
    for _ in range(2):
        waiting, later[:] = list(later), []
        for _, call in waiting:
            call()
    assert not later, "silence ends it"
    limit.warning("odd", code="A", number=1)
    assert [record.getMessage() for record in caplog.records] == [
        "odd code='A' number=0",
        "odd code='B'",
        "odd_again code='A' count=999 within_s=60.0",
        "odd code='A' number=1",
    ]


# --- descriptors -----------------------------------------------------------------------------------------------------


@contextmanager
def many(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that send this and no more; what the server closes meanwhile is left closed."""
    made: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(first)
        yield made


def _ask(port: int, request: bytes) -> bytes:
    """All that comes back on one connection until the server closes it."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as one:
        one.sendall(request)
        return b"".join(iter(lambda: one.recv(65_536), b""))


@contextmanager
def limited(limit: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [ready_python(), "-m", "tests.gateway.limited", str(limit)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_more_idle_connections_than_descriptors_keep_nobody_out():
    with limited(128) as (process, port):
        with many(port, 150), many(port, 150, GET[:10]):
            assert _ask(port, GET).endswith(b"hi")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert out.strip() == "[]", "accepting never failed"
    assert err == ""


async def test_server_refuses_clients_and_logs_once_when_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Somebody else took them all: who comes is closed at once, or accepted later, and the log has one line."""
    accept, failures = socket.socket.accept, iter(range(1))

    def failing(self: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(connections, "RETRY_S", 0.0)
    async with serving(hello) as running:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert problem(await running.ask(b""))["code"] == "OVERLOADED"
        failures = iter(range(2))  # the one in reserve was not enough
        assert (await running.ask(GET))[1] == b"hi"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.partition(" ")[0] for line in lines] == ["accept_failed", "accept_failed_again"]


HEAD = (
    f"POST {RESULT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nwebhook-id: m\r\n"
    "webhook-signature: v1,x\r\nContent-Length: 60000\r\n"
)


@pytest.mark.prove
def test_an_owner_is_answered_among_stalled_bodies_and_idle_connections(tmp_path: Path):
    """A whole gateway that may have 1,024 files open, 135 bodies that stall one byte short, 2,000 idle connections."""
    program = f"ulimit -n 1024; exec {sys.executable} -m trellis up --roles gateway --port 0"
    log = tmp_path / "up.log"
    with log.open("w") as out, subprocess.Popen(["sh", "-c", program], cwd=tmp_path, stdout=out, stderr=out) as process:
        try:
            while "stops" not in log.read_text():
                assert process.poll() is None, log.read_text()
            address = next(line.split()[1] for line in log.read_text().splitlines() if line.startswith("gateway"))
            port = int(address.rpartition(":")[2])
            command = [sys.executable, "-m", "trellis", "token", "issue", "--role", "owner", "--role", "submitter"]
            issued = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
            stalled = f"{HEAD}webhook-timestamp: {int(time.time())}\r\n\r\n".encode() + b"x" * 59_999
            body = b'{"type": "a", "payload": "' + b"x" * 5_000 + b'"}'
            head = (
                f"POST /jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {issued.stdout.strip()}\r\n"
                f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            with many(port, 135, stalled), many(port, 2_000):
                for _ in range(10):
                    assert _ask(port, head.encode() + body).startswith(b"HTTP/1.1 202")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
    assert len(log.read_text().splitlines()) < 30

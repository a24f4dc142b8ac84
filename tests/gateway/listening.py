"""Listeners for tests: one that calls the application itself, and one that speaks HTTP over a socket."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

PATIENCE_S = 60.0
"""How long a test waits for what must come; a machine may be slow, and only a failure waits so long."""


@dataclass
class Heard:
    """A stream of events, read as an EventSource reads it."""

    last_id: str | None = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Position and data."""
    comments: list[str] = field(default_factory=list)
    retry_ms: int | None = None
    _rest: bytes = b""

    def take(self, body: bytes) -> None:
        """Whole frames count; half of one waits for its other half, or is lost with the connection."""
        *frames, self._rest = (self._rest + body).split(b"\n\n")
        for frame in frames:
            self._frame(frame.decode())

    def connect(self) -> None:
        """A new connection: what was half received is gone."""
        self._rest = b""

    def _frame(self, frame: str) -> None:
        data: str | None = None
        for line in filter(None, frame.split("\n")):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match name:
                case "":
                    self.comments.append(value)
                case "id":
                    self.last_id = value
                case "retry":
                    self.retry_ms = int(value)
                case "data":
                    assert data is None, "data in two lines"
                    data = value
                case _:
                    raise AssertionError(f"what is {line!r}?")
        if data is not None:
            assert self.last_id is not None
            self.event(self.last_id, data)

    def event(self, position: str, data: str) -> None:
        self.events.append((position, json.loads(data)))

    @property
    def types(self) -> list[str]:
        return [data["type"] for _, data in self.events]


@dataclass
class HeardIds(Heard):
    """For very many events: only their ids and the last position are kept."""

    event_ids: list[str] = field(default_factory=list)
    last_position: str = ""

    def event(self, position: str, data: str) -> None:
        self.event_ids.append(sys.intern(data.partition('"eventId":"')[2].partition('"')[0]))
        self.last_position = position


class Listening:
    """One request for a stream, given to the application without a server between."""

    def __init__(self, app: FastAPI, query: str, headers: Mapping[str, str]) -> None:
        self.heard = Heard()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.over = False
        self._changed = asyncio.Event()
        self._leave = asyncio.Event()
        self._asked = False
        self.blocked: asyncio.Event | None = None
        """Set to an event, the listener takes nothing more until it is set."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/events/stream",
            "raw_path": b"/events/stream",
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self.blocked is not None:
            await self.blocked.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            if self.status == 200:
                self.heard.take(message["body"])
            self.over = not message.get("more_body", False)
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Come back when it is so; fails when the stream ends before."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                assert not self.task.done() or self.task.result() is not None, f"it ended: {self.heard}"
                self._changed.clear()
                await self._changed.wait()

    async def until_events(self, count: int) -> list[dict[str, Any]]:
        """The data of so many events, and no more came with them."""
        await self.until(lambda: len(self.heard.events) >= count)
        assert len(self.heard.events) == count, self.heard.events
        return [data for _, data in self.heard.events]

    async def ended(self) -> Heard:
        """What it heard until the application was done with it."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({self.task})
        self.task.result()
        return self.heard

    async def leave(self) -> None:
        """Go away, as a closed tab does."""
        self._leave.set()
        await self.ended()


@asynccontextmanager
async def listening(app: FastAPI, query: str = "", **headers: str) -> AsyncIterator[Listening]:
    """Listen for a while; header names with `_` for `-`."""
    listener = Listening(app, query, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        await listener.until(lambda: bool(listener.status))
        yield listener
    finally:
        if not listener.task.done():
            await listener.leave()


class Socket:
    """A connection to a real server that asks for a stream; it can be cut off at any byte."""

    def __init__(self, heard: Heard, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard = heard
        self._reader, self._writer = reader, writer
        self._raw, self._left = b"", 0
        self.status, self.over = 0, False

    @classmethod
    async def connect(cls, port: int, token: str, heard: Heard, *, receive_buffer: int | None = None) -> "Socket":
        """Ask for what comes after the last id that was heard."""
        heard.connect()
        made = socket.socket()
        made.setblocking(False)
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=made)
        stream = cls(heard, reader, writer)
        last = "" if heard.last_id is None else f"Last-Event-ID: {heard.last_id}\r\n"
        writer.write(
            f"GET /events/stream HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {token}\r\n{last}\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        stream.status = int(head.split(b" ", 2)[1])
        return stream

    async def read(self, bytes_max: int = 65_536) -> bool:
        """What comes next, wherever that ends; False at the end of the answer."""
        data = await self._reader.read(bytes_max)
        self._raw += data
        while self._raw and not self.over:
            if not self._left:
                head, found, rest = self._raw.partition(b"\r\n")
                if not found:
                    break
                self._left, self._raw = int(head, 16) + len(b"\r\n"), rest
                self.over = self._left == len(b"\r\n")
            piece, self._raw = self._raw[: self._left], self._raw[self._left :]
            self.heard.take(piece[: max(0, self._left - len(b"\r\n"))])
            self._left -= len(piece)
        return bool(data) and not self.over

    def pause(self) -> None:
        """Take nothing more from the socket."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def cut(self) -> None:
        """Gone, without a word."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

"""A pooler in front of PostgreSQL that does what pgbouncer does in transaction mode, and does it to everybody.

- Of the parameters with which a client begins it takes those that pgbouncer takes, and refuses any other in pgbouncer's words.
- It lets clients in under a number of its own.
- After every transaction the client gets another session of the server, round and round: whatever was set for a session, or
  prepared in it, is not there any more. A real pgbouncer often gives the same one back, and hides a fault.

What it leaves out: passwords, TLS, and the cancelling of statements, whose requests it ignores.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from tests.stopped_tasks import stopped

TAKEN = frozenset(
    {
        "user",
        "database",
        "client_encoding",
        "datestyle",
        "timezone",
        "standard_conforming_strings",
        "application_name",
        "replication",
    }
)
SSL_REQUEST, CANCEL_REQUEST = 80_877_103, 80_877_102
SESSIONS = 3
NUMBER = -7
"""What the pooler says its process is called."""

Mode = Literal["transaction", "session", "statement"]


class Gone(Exception):
    """One side has hung up."""


@dataclass
class Wire:
    """One side of a conversation."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def message(self) -> tuple[bytes, bytes]:
        """The kind of a message and all of its bytes."""
        try:
            head = await self.reader.readexactly(5)
            return head[:1], head + await self.reader.readexactly(struct.unpack(">i", head[1:])[0] - 4)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Gone from error

    async def opening(self) -> bytes:
        """What a client begins with: no kind, a length and a body."""
        try:
            size = struct.unpack(">i", await self.reader.readexactly(4))[0]
            return await self.reader.readexactly(size - 4)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Gone from error

    def send(self, data: bytes) -> None:
        self.writer.write(data)


@dataclass
class Pooler:
    """The pooler; `refused` are the parameters it has refused, `ignored` those it takes and forgets."""

    host: str
    port: int
    mode: Mode = "transaction"
    ignored: frozenset[str] = frozenset()
    refused: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """What clients called themselves."""
    _free: dict[tuple[bytes, bytes], asyncio.Queue[Wire]] = field(default_factory=dict)
    _opened: list[Wire] = field(default_factory=list)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _greeting: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, until it hangs up."""
        client, task = Wire(reader, writer), asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        with contextlib.suppress(Gone, ConnectionError, asyncio.CancelledError):
            asked = await self._opened_by(client)
            if asked is not None:
                await self._pass_on(client, (asked[b"user"], asked[b"database"]))
        writer.close()

    async def close(self) -> None:
        """End the conversations and the sessions of the server."""
        for task in self._serving:
            task.cancel()
        await stopped(*self._serving, but=(OSError, EOFError, Gone))
        for wire in self._opened:
            wire.writer.close()

    async def _opened_by(self, client: Wire) -> dict[bytes, bytes] | None:
        """What the client asks for, None when it is refused."""
        body = await client.opening()
        if _code(body) == SSL_REQUEST:
            client.send(b"N")
            body = await client.opening()
        if _code(body) == CANCEL_REQUEST:
            return None
        parts = body[4:].rstrip(b"\0").split(b"\0")
        asked = dict(zip(parts[::2], parts[1::2], strict=True))
        for name in asked:
            if name.decode().lower() not in TAKEN | self.ignored:
                self.refused.append(name.decode())
                client.send(_error(f"unsupported startup parameter: {name.decode()}"))
                return None
        self.names.append(asked.get(b"application_name", b"").decode())
        return asked

    async def _pass_on(self, client: Wire, place: tuple[bytes, bytes]) -> None:
        if place not in self._free:
            free = self._free[place] = asyncio.Queue()
            for _ in range(SESSIONS):
                free.put_nowait(await self._session(place))
        own = await self._session(place) if self.mode == "session" else None
        client.send(self._greeting[place])
        while True:
            kind, message = await client.message()
            if kind == b"X":
                return
            if own is not None:
                await self._transaction(client, own, message)
                continue
            session = await self._free[place].get()
            try:
                await self._transaction(client, session, message)
            except Gone:
                session.writer.close()
                session = await self._session(place)
                raise
            finally:
                self._free[place].put_nowait(session)

    async def _transaction(self, client: Wire, session: Wire, message: bytes) -> None:
        """Both ways until the server is idle again; raises Gone when somebody hangs up before that."""
        session.send(message)
        sending = asyncio.ensure_future(self._send_on(client, session))
        answering = asyncio.ensure_future(self._answer(client, session))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise Gone
            await answering
        finally:
            for task in (sending, answering):
                task.cancel()
            await stopped(sending, answering, but=(OSError, EOFError, Gone))

    async def _answer(self, client: Wire, session: Wire) -> None:
        while True:
            kind, answer = await session.message()
            if kind == b"Z" and answer[5:] == b"T" and self.mode == "statement":
                client.send(_error("transaction blocks not allowed in statement pooling mode"))
                raise Gone
            client.send(answer)
            if kind == b"Z" and answer[5:] == b"I":
                return

    async def _send_on(self, client: Wire, session: Wire) -> None:
        while True:
            session.send((await client.message())[1])

    async def _session(self, place: tuple[bytes, bytes]) -> Wire:
        """A session of the server, and what it says of itself at the beginning."""
        session = Wire(*await asyncio.open_connection(self.host, self.port))
        self._opened.append(session)
        body = struct.pack(">i", 196_608) + b"user\0" + place[0] + b"\0database\0" + place[1] + b"\0\0"
        session.send(struct.pack(">i", len(body) + 4) + body)
        greeting = b""
        while True:
            kind, message = await session.message()
            greeting += b"K" + struct.pack(">iii", 12, NUMBER, 1) if kind == b"K" else message
            if kind == b"Z":
                self._greeting[place] = greeting
                return session


def _code(body: bytes) -> int:
    return struct.unpack(">i", body[:4])[0]


def _error(text: str) -> bytes:
    body = b"SFATAL\0VFATAL\0C08P01\0M" + text.encode() + b"\0\0"
    return b"E" + struct.pack(">i", len(body) + 4) + body


@contextlib.asynccontextmanager
async def pooling(
    url: str, mode: Mode = "transaction", *, ignored: frozenset[str] = frozenset()
) -> AsyncIterator[tuple[Pooler, str]]:
    """A pooler in front of the server of `url`, and the address with the pooler in it."""
    parts = urlsplit(url)
    pooler = Pooler(parts.hostname or "127.0.0.1", parts.port or 5432, mode, ignored)
    server = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    netloc = parts.netloc.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{port}")
    try:
        yield pooler, urlunsplit(parts._replace(netloc=netloc))
    finally:
        server.close()
        await pooler.close()

"""A TCP proxy on loopback that makes a network misbehave on purpose, between a PostgreSQL client and its server.

It reads the framing of the protocol, so that a fault can be aimed at the exchange that runs one function and an answer
can be cut at any of its bytes after the server has committed. With `aimed=False` it only passes bytes, for load.

What it can do: pass through and count; delay every chunk; black-hole both directions and let go again, when requests
held back arrive late even though their client has given up; reset every connection; and, aimed, each `Kind`.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self
from urllib.parse import urlsplit

from tests.stopped_tasks import stopped

CHUNK = 256 * 1024
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing sends RST instead of FIN."""
ENDS_REQUEST = frozenset(b"SQXHF")


class Kind(StrEnum):
    """What happens to one exchange."""

    REQUEST_LOST = "the request never reaches the server"
    REQUEST_CUT = "the server gets a part of the request"
    REQUEST_LATE = "the server gets the request after the client has asked again"
    ANSWER_RACED = "the client is cut off while the server works"
    ANSWER_LOST = "the server answers, the client gets a part of it and a reset"
    ANSWER_SILENT = "the server answers, the client gets a part of it and never hears more"


HARMLESS = frozenset({Kind.REQUEST_LOST, Kind.REQUEST_CUT})
"""Kinds after which the first try certainly had no effect."""


@dataclass(kw_only=True)
class Aim:
    """A fault waiting for its exchange: the first `times` requests that run a statement with `sql` in it."""

    kind: Kind
    sql: str
    times: int = 1
    skip: int = 0
    """How many such requests pass before the first fault."""
    then: Callable[[], None] | None = None
    """Called at the moment of the fault: before a request is lost, after the commit whose answer is lost."""
    hits: int = 0

    def takes(self, request: "Request") -> bool:
        if self.hits >= self.times or not request.runs or self.sql not in request.sql:
            return False
        if self.skip:
            self.skip -= 1
            return False
        return True

    def happen(self) -> None:
        if self.then is not None:
            self.then()


@dataclass
class Request:
    """Frames up to the one that makes the server answer."""

    data: bytes = b""
    sql: str = ""
    runs: bool = False


class Frames:
    """Cuts a stream of messages (one type byte, a length, a body) into whole ones."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        buffer, found, at = self.rest + data, [], 0
        while len(buffer) - at >= 5:
            end = at + 1 + struct.unpack_from("!I", buffer, at + 1)[0]
            if end > len(buffer):
                break
            found.append(buffer[at:end])
            at = end
        self.rest = buffer[at:]
        return found


class Requests:
    """The client's side of one connection: which statement each request runs."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._statements: dict[bytes, str] = {}
        self._open = Request()
        self._started = False

    def feed(self, data: bytes) -> list[Request]:
        if not self._started:  # the start-up packet has no type byte; URLs here say sslmode=disable
            self._started = True
            length = struct.unpack_from("!I", data)[0]
            head, data = data[:length], data[length:]
            return [Request(data=head), *self.feed(data)]
        whole = []
        for frame in self._frames.feed(data):
            self._open.data += frame
            self._note(frame)
            if frame[0] in ENDS_REQUEST:
                whole.append(self._open)
                self._open = Request()
        return whole

    def _note(self, frame: bytes) -> None:
        body = frame[5:]
        if frame[:1] == b"P":
            name, sql, _ = body.split(b"\0", 2)
            self._statements[name] = sql.decode()
        elif frame[:1] == b"B":
            self._open.sql += self._statements.get(body.split(b"\0", 2)[1], "")
        elif frame[:1] == b"Q":
            self._open.sql += body.decode()
            self._open.runs = True
        elif frame[:1] == b"E":
            self._open.runs = True


@dataclass
class Counts:
    """What went through."""

    connections: int = 0
    requests: int = 0
    runs: int = 0
    """Requests that execute something."""
    to_server: int = 0
    to_client: int = 0
    faults: Counter[Kind] = field(default_factory=Counter)


class Proxy:
    """Listens on a loopback port and passes to `target`. Use as an async context manager."""

    def __init__(self, target: tuple[str, int], *, rng: random.Random, aimed: bool = True) -> None:
        self.target = target
        self.rng = rng
        self.aimed = aimed
        self.latency_s = 0.0
        self.counts = Counts()
        self.port = 0
        self.aims: list[Aim] = []
        self.late: list[tuple[Link, Request]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._links: set[Link] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self.heal()
        self._server.close()
        for link in list(self._links):
            await link.end()

    # --- what a test says --------------------------------------------------------------------------------------------

    def aim(
        self, kind: Kind, sql: str = "", *, times: int = 1, skip: int = 0, then: Callable[[], None] | None = None
    ) -> Aim:
        aim = Aim(kind=kind, sql=sql, times=times, skip=skip, then=then)
        self.aims.append(aim)
        return aim

    def black_hole(self) -> None:
        """From now on nothing gets through, in either direction, and nobody is told."""
        self.gate.clear()

    def heal(self) -> None:
        """Let everything through again, what was held back first; no fault is aimed any more."""
        self.aims.clear()
        self.gate.set()

    def reset_all(self) -> None:
        for link in list(self._links):
            link.reset_client()
            link.close_server()

    async def deliver_late(self) -> int:
        """Hand the server the requests whose clients have long gone, and wait for its answers."""
        late, self.late = self.late, []
        for link, request in late:
            await link.finish_late(request)
        return len(late)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        link = Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    def aimed_at(self, request: Request) -> Aim | None:
        self.counts.runs += request.runs
        for aim in self.aims:
            if aim.takes(request):
                aim.hits += 1
                self.counts.faults[aim.kind] += 1
                return aim
        return None


class Link:
    """One client connection and its server connection."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client_in, self.client_out = reader, writer
        self.server_in: asyncio.StreamReader | None = None
        self.server_out: asyncio.StreamWriter | None = None
        self.capture: Frames | None = None
        self.captured = b""
        self.answered = asyncio.Event()
        self.silent = False
        self.kept = False
        """Its server connection outlives the client: a late request is still to go."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        await self.proxy.gate.wait()
        try:
            self.server_in, self.server_out = await asyncio.open_connection(*self.proxy.target, limit=CHUNK)
        except OSError:
            self.reset_client()
            return
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._from_client()), loop.create_task(self._from_server())]
        await asyncio.wait(self._tasks)
        await self.end()

    async def end(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await stopped(*self._tasks, but=(OSError, EOFError))
        for writer in (self.client_out, self.server_out):
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def reset_client(self) -> None:
        with contextlib.suppress(OSError):
            self.client_out.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.client_out.transport.abort()

    def close_server(self) -> None:
        if self.server_out is not None:
            self.server_out.close()

    async def _from_client(self) -> None:
        requests = Requests()
        with contextlib.suppress(OSError):
            while data := await self.client_in.read(CHUNK):
                await self._hold()
                self.proxy.counts.to_server += len(data)
                if not self.proxy.aimed:
                    await self._to_server(data)
                    continue
                for request in requests.feed(data):
                    self.proxy.counts.requests += 1
                    await self._pass(request)
        if not self.kept:
            self.close_server()

    async def _from_server(self) -> None:
        assert self.server_in is not None
        with contextlib.suppress(OSError):
            while data := await self.server_in.read(CHUNK):
                await self._hold()
                if self.capture is not None:
                    self._captured(data)
                    continue
                self.proxy.counts.to_client += len(data)
                self.client_out.write(data)
                await self.client_out.drain()
        self.answered.set()
        if not self.silent:
            self.client_out.close()

    async def _hold(self) -> None:
        await self.proxy.gate.wait()
        if self.proxy.latency_s:
            await asyncio.sleep(self.proxy.latency_s)

    async def _to_server(self, data: bytes) -> None:
        assert self.server_out is not None
        self.server_out.write(data)
        await self.server_out.drain()

    def _captured(self, data: bytes) -> None:
        assert self.capture is not None
        self.captured += data
        if any(frame[:1] == b"Z" for frame in self.capture.feed(data)):
            self.answered.set()

    async def _pass(self, request: Request) -> None:
        aim = self.proxy.aimed_at(request)
        kind = aim.kind if aim else None
        if aim is None:
            await self._to_server(request.data)
        elif kind is Kind.REQUEST_LOST:
            aim.happen()
            self.close_server()
            self.reset_client()
        elif kind is Kind.REQUEST_CUT:
            await self._to_server(request.data[: self.proxy.rng.randrange(1, len(request.data))])
            self.close_server()
            self.reset_client()
        elif kind is Kind.REQUEST_LATE:
            self.kept, self.capture = True, Frames()
            self.proxy.late.append((self, request))
            self.reset_client()
        elif kind is Kind.ANSWER_RACED:
            self.kept, self.capture = True, Frames()
            await self._to_server(request.data)
            self.reset_client()
            await self.answered.wait()
            self.close_server()
        else:
            await self._lose_answer(request, aim)

    async def _lose_answer(self, request: Request, aim: Aim) -> None:
        """ReadyForQuery comes after the commit, so what is cut off here has happened."""
        self.capture, self.silent = Frames(), aim.kind is Kind.ANSWER_SILENT
        await self._to_server(request.data)
        await self.answered.wait()
        aim.happen()
        self.client_out.write(self.captured[: self.proxy.rng.randrange(len(self.captured))])
        with contextlib.suppress(OSError):
            await self.client_out.drain()
        self.close_server()
        if not self.silent:
            self.reset_client()

    async def finish_late(self, request: Request) -> None:
        await self._to_server(request.data)
        await self.answered.wait()
        self.close_server()


@contextlib.asynccontextmanager
async def proxied(url: str, *, seed: int, aimed: bool = True) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy in front of the server of `url`, and the same URL through it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    async with Proxy((parts.hostname, parts.port), rng=random.Random(seed), aimed=aimed) as proxy:
        user = f"{parts.username}@" if parts.username else ""
        yield proxy, f"postgresql://{user}127.0.0.1:{proxy.port}{parts.path}?sslmode=disable"

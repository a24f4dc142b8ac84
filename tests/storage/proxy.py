"""A small HTTP proxy in front of an S3 server, where answers get lost, late or wrong.

Each fault is aimed at one kind of request and happens a counted number of times. Requests pass through byte for byte, so
that their signatures stay valid.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HEAD_MAX = 64 * 1024


class Kind(Enum):
    """What happens to a request, or to its answer."""

    ANSWER = auto()
    """The server never sees it; the fault's status is answered."""
    STORED_ANSWER = auto()
    """The server does it; the fault's status is answered instead of its answer."""
    SILENT = auto()
    """The server never sees it, and nothing is answered."""
    STORED_SILENT = auto()
    """The server does it, and nothing is answered."""
    STORED_RESET = auto()
    """The server does it, and the connection breaks."""
    CUT = auto()
    """Half of the answer's body comes."""
    LATE = auto()
    """Nothing is answered, and the server sees it when `Proxy.deliver` is called."""


@dataclass
class Fault:
    """Aimed at a method, and at paths that end in `path`."""

    kind: Kind
    method: str
    path: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    happened: int = 0

    def hits(self, method: str, path: str) -> bool:
        return self.happened < self.times and self.method == method and path.endswith(self.path)


@dataclass
class Proxy:
    """Listens on a port of its own; `requests` counts what came, by method and path."""

    target: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ordered_keys: Callable[[], list[str]] | None = None
    """When set, listings are answered from these keys in byte order, as AWS does."""
    held: list[bytes] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, method: str) -> int:
        return sum(made == method for made, _ in self.requests)

    async def deliver(self) -> None:
        """Let the late requests arrive."""
        for request in self.held:
            await self._ask(request)
        self.held.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                request = await _message(reader)
                method, target, _ = request.split(b" ", 2)
                path = unquote(urlsplit(target.decode()).path)
                self.requests.append((method.decode(), path))
                fault = next((fault for fault in self.faults if fault.hits(method.decode(), path)), None)
                if fault is not None:
                    fault.happened += 1
                    if not await self._fail(fault, request, reader, writer):
                        break
                    continue
                writer.write(await self._answer(method, target.decode(), request))
                await writer.drain()
        writer.close()

    async def _answer(self, method: bytes, target: str, request: bytes) -> bytes:
        query = parse_qs(urlsplit(target).query)
        if self.ordered_keys is not None and method == b"GET" and "list-type" in query:
            return _listing(self.ordered_keys(), query)
        return await self._ask(request)

    async def _fail(
        self, fault: Fault, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection goes on."""
        if fault.kind is Kind.LATE:
            self.held.append(request)
        answer = b""
        if fault.kind in {Kind.STORED_ANSWER, Kind.STORED_SILENT, Kind.STORED_RESET, Kind.CUT}:
            answer = await self._ask(request)
        if fault.kind in {Kind.ANSWER, Kind.STORED_ANSWER}:
            writer.write(_problem(fault))
            await writer.drain()
            return True
        if fault.kind is Kind.CUT:
            head, _, body = answer.partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n" + body[: len(body) // 2])
            await writer.drain()
        elif fault.kind is not Kind.STORED_RESET:
            await reader.read()  # until the client gives up
        return False

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self.target, limit=HEAD_MAX)
        try:
            writer.write(request)
            await writer.drain()
            return await _message(reader, to_head=request.startswith(b"HEAD "))
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def proxied(endpoint: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server at `endpoint`."""
    parts = urlsplit(endpoint)
    proxy = Proxy((parts.hostname or "", parts.port or 0))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=HEAD_MAX)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


async def _message(reader: asyncio.StreamReader, *, to_head: bool = False) -> bytes:
    """A request or an answer with its body, which has a length or comes in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in lines}
    if to_head:
        return head
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return head + await _chunks(reader)
    return head + await reader.readexactly(int(headers.get(b"content-length", b"0")))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = await reader.readline()
        body += size + await reader.readexactly(int(size.split(b";")[0], 16) + 2)
        if body.endswith(b"0\r\n\r\n"):
            return body


def _problem(fault: Fault) -> bytes:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{fault.code}</Code></Error>".encode()
    return b"HTTP/1.1 %d Problem\r\nContent-Length: %d\r\n\r\n%b" % (fault.status, len(body), body)


def _listing(keys: list[str], query: dict[str, list[str]]) -> bytes:
    """ListObjectsV2 in pages of two, in byte order, going on after any key."""
    prefix = query.get("prefix", [""])[0]
    after = query.get("continuation-token", query.get("start-after", [""]))[0]
    found = sorted((key for key in keys if key.startswith(prefix) and key > after), key=str.encode)
    page, more = found[:2], len(found) > 2
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><ETag>&quot;e&quot;</ETag><Size>1</Size>"
        "<LastModified>2026-11-15T07:00:00.000Z</LastModified></Contents>"
        for key in page
    )
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    body = (
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>".encode()
    )
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

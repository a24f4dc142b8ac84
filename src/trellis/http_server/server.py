"""Serves the gateway inside this process's event loop, and decides which addresses it may listen on.

Invariants:
- an address that other machines can reach is served only with a key that the operator configured;
- each connection has limits on the bytes and the arrival time of request heads, and on how long its client may leave a
  response unread. `connections` limits how many are open;
- headers after a body (trailers) are dropped: none of them is a credential;
- unreadable requests are logged once and then counted;
- the server installs no signal handlers. Once `stop` is set it accepts no new connections, ends streams, and finishes
  requests under way within a bounded time.
"""

import asyncio
import contextlib
import errno
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trellis.engine.errors import KeyUnusable, SettingsInvalid, TrellisError
from trellis.engine.logs import log_of
from trellis.http_server.connections import Acceptor, ConnectionPool
from trellis.http_server.joined_response import JoinedResponse
from trellis.http_server.limits import LogLimit
from trellis.http_server.problems import MEDIA_TYPE, Problem, problem_document
from trellis.http_server.security_headers import SECURITY_HEADERS

ADDRESSES_MAX = 8
BACKLOG = 2_048
DATE_HEADER_S = 1.0
LINGER_S = 2.0
"""How long the unread rest of a request may keep arriving, in seconds, so that the client can read the answer."""


class ListenRefused(TrellisError):
    """The {service} does not listen on {address}: {reason}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Where the gateway or the NLM backend listens, and the limits of one connection."""

    host: str
    port: int
    service: str = "gateway"
    """Who listens, for messages."""
    host_setting: str = "--host"
    port_setting: str = "--port"
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    head_bytes_max: int = 32 * 1024
    headers_max: int = 100
    head_s: float = 10.0
    keep_alive_s: int = 30
    unread_s: float = 30.0
    """How long a client may leave a response unread, in seconds."""
    connections_max: int = 10_000
    """Upper bound; lower if the system allows this process fewer open files."""
    drain_s: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundSockets:
    """Bound listening sockets that do not serve requests yet."""

    sockets: list[socket.socket]
    url: str
    tls: ssl.SSLContext | None
    is_local: bool
    """Whether only this machine can reach the sockets."""

    def close(self) -> None:
        """Release the address."""
        for one in self.sockets:
            one.close()


def listen(options: ServerOptions, *, key_configured: bool) -> BoundSockets:
    """Bind the address.

    No request is answered before `serve_gateway`. Raises ListenRefused, KeyUnusable, SettingsInvalid.
    """
    tls = _tls(options)
    addresses = _addresses(options)
    is_local = all(ip_address(address).is_loopback for _, address in addresses)
    if not is_local and not key_configured:
        reason = (
            f"others can reach {options.host}, and the development key is for this machine alone; set "
            "TRELLIS_TOKEN_JWKS_FILE with TRELLIS_TOKEN_ISSUER, or TRELLIS_TOKEN_KEY_FILE, or listen on 127.0.0.1"
        )
        raise KeyUnusable(reason=reason)
    sockets: list[socket.socket] = []
    port = options.port
    try:
        for family, address in addresses:
            sockets.append(_socket(family, address, port))
            port = int(sockets[-1].getsockname()[1])
    except OSError as error:
        for one in sockets:
            one.close()
        raise _refused(options, error) from error
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{'http' if tls is None else 'https'}://{host}:{port}"
    return BoundSockets(sockets=sockets, url=url, tls=tls, is_local=is_local)


async def serve_gateway(
    app: ASGIApp,
    listening: BoundSockets,
    options: ServerOptions,
    stop: asyncio.Event,
    *,
    end_streams: Callable[[], Awaitable[None]] | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve until `stop` is set, then drain. `end_streams` ends responses that would never end by themselves."""
    tls = listening.tls
    connections = ConnectionPool(options.connections_max)
    log = LogLimit(log_of("trellis.http"), asyncio.get_running_loop().call_later)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type] - the same callable, under two libraries' names for it
        http=_protocol(options, connections, log),
        ws="none",
        log_config=None,
        access_log=False,  # a URL may hold a ticket; the gateway logs what is needed
        proxy_headers=False,  # no header is trusted for where a request comes from
        server_header=False,
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=options.drain_s,
    )
    server = _Server(config, connections, log, tls)

    async def watch() -> None:
        await stop.wait()
        for one in server.servers:
            one.close()
        if end_streams is not None:
            await end_streams()
        server.should_exit = True
        server.leaving.set()

    serving = asyncio.ensure_future(server.serve(sockets=listening.sockets))
    await asyncio.wait([serving, asyncio.ensure_future(server.is_up.wait())], return_when=asyncio.FIRST_COMPLETED)
    if ready is not None and not serving.done():
        ready()
    watching = asyncio.ensure_future(watch())
    try:
        await serving
    finally:
        serving.cancel()
        watching.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)
        server.is_up.set()
        listening.close()
        log.flush()


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, accepts connections itself, and sleeps while idle.

    Setting `leaving` wakes it to shut down.
    """

    def __init__(
        self, config: uvicorn.Config, connections: ConnectionPool, log: LogLimit, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._connections, self._log, self._tls = connections, log, tls
        self.servers = []
        self.is_up = asyncio.Event()
        self.leaving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        refusal = _answer(Problem("OVERLOADED", "Too many connections are open here; try again in a while."))
        for one in sockets or ():
            acceptor = Acceptor(one, self._protocol, self._connections, self._log, tls=self._tls, refusal=refusal)
            self.servers.append(acceptor)  # type: ignore[arg-type] - what is asked of a server here, it has
        self.is_up.set()

    def _protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def main_loop(self) -> None:
        """Wait for `leaving` instead of polling ten times a second, as uvicorn's own loop does."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_HEADER_S):
                    await self.leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


# --- listening address ---------------------------------------------------------------------------------------------


def _addresses(options: ServerOptions) -> list[tuple[socket.AddressFamily, str]]:
    """Resolve the host once, so that the addresses that were checked are the ones that are bound."""
    try:
        addresses = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = f"there is no such host ({error})"
        address = f"{options.host}:{options.port}"
        raise ListenRefused(service=options.service, address=address, reason=reason) from error
    places = {(family, str(place[0]).partition("%")[0]): None for family, *_, place in addresses}
    return list(places)[:ADDRESSES_MAX]


def _socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)  # here, because two sockets may bind and only one may listen
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _refused(options: ServerOptions, error: OSError) -> ListenRefused:
    address, port = f"{options.host}:{options.port}", options.port_setting
    match error.errno:
        case errno.EADDRINUSE:
            reason = f"another process listens there; stop it, or choose another port with {port} (0 takes a free one)"
        case errno.EACCES:
            reason = f"this user may not; choose a port from 1024 on with {port}"
        case errno.EADDRNOTAVAIL:
            reason = f"this machine has no such address; {options.host_setting} names one of its own"
        case _:
            reason = error.strerror or str(error)
    return ListenRefused(service=options.service, address=address, reason=reason)


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_cert_file is None or options.tls_key_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.tls_cert_file, options.tls_key_file, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or type(error).__name__
        detail = f"{options.tls_cert_file} and {options.tls_key_file} are no certificate with its key: {reason}"
        raise SettingsInvalid(source="TRELLIS_TLS_CERT_FILE, TRELLIS_TLS_KEY_FILE", detail=detail) from error
    return context


# --- one connection ------------------------------------------------------------------------------------------------


class _RequestRefused(Exception):
    """Aborts the parsing of a request."""


def _protocol(options: ServerOptions, all_connections: ConnectionPool, limited: LogLimit) -> type[asyncio.Protocol]:
    """The protocol class of one connection, with these limits."""

    class Bounded(_BoundedHttpProtocol):
        bounds = options
        among = all_connections
        log = limited

    return Bounded


class _BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the request head, which uvicorn does not have."""

    bounds: ServerOptions
    among: ConnectionPool
    log: LogLimit

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = logging.getLogger("trellis.http")
        self._in_head, self._begun_now, self._head_bytes = True, True, 0
        self._in_trailers = False
        self._refused = False
        self._refusal = Problem("BAD_REQUEST", "This is no HTTP request that can be read; send HTTP/1.1.")
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.among.opened(self, transport.get_extra_info("socket").fileno())
        self.among.wait(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.among.closed(self)
        self._head_arrived()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close the connection at once, even if the client has not read everything."""
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self._in_head and not self._begun_now and self.scheme == "http":
            self.transport.write(_answer(Problem("OVERLOADED", "Too many connections are open here; try again.")))
        if self.scheme == "https" or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        was_in_trailers = self._in_trailers
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self._refuse(self._refusal)
        if (self._in_head or (was_in_trailers and self._in_trailers)) and not self._refused:
            # The chunk in which a request begins may also hold bytes of the one before, so it is not counted.
            self._head_bytes += 0 if self._begun_now else len(data)
            self._begun_now = False
            if self._in_head and self._head_timer is None:
                self._await_head()
            if self._head_bytes > self.bounds.head_bytes_max:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_arrived()  # the timer is for the head before; `data_received` sets one if this head is incomplete
        self._in_head, self._begun_now, self._head_bytes = True, True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the request head. Trailers are dropped, because the request was authorized without them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self._head_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.bounds.head_bytes_max or len(self.headers) > self.bounds.headers_max:
            self._refusal = self._too_large()
            raise _RequestRefused
        self.among.work(self)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, JoinedResponse(app, cycle))  # type: ignore[arg-type] - an application, too

    def on_chunk_header(self) -> None:
        """A chunk begins. After the last one, which is empty, trailers may follow."""
        self._in_trailers = True

    def on_body(self, body: bytes) -> None:
        self._in_trailers = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_trailers = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:
            return  # another request has arrived in the meantime
        lingers = self.cycle.more_body and not self.transport.is_closing()
        self.among.wait(self, first=lingers)
        if lingers:
            self.loop.call_later(LINGER_S, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """The client does not read: the connection may be closed to make room, and is closed after `unread_s`."""
        super().pause_writing()
        self.among.wait(self)
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(self.bounds.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()
        if self.cycle and not self.cycle.response_complete:
            self.among.work(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that waited too long, even if its client leaves the response unread."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an upgrade to another protocol, as HTTP allows, without the two log lines of uvicorn."""

    def _too_large(self) -> Problem:
        bounds = self.bounds
        limits = f"{bounds.head_bytes_max} bytes and {bounds.headers_max} headers"
        return Problem("HEADERS_TOO_LARGE", f"Address and headers of a request may have {limits}; send fewer.")

    def _await_head(self) -> None:
        self._head_arrived()
        self._in_head = True
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._head_is_late)

    def _head_arrived(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _head_is_late(self) -> None:
        late = f"The headers did not arrive within {self.bounds.head_s:g} s; send them at once."
        self._refuse(Problem("REQUEST_TIMEOUT", late))

    def _refuse(self, problem: Problem) -> None:
        """Answer with the problem and close the connection.

        Data that still arrives is discarded for a moment: closing at once could make the client lose the answer.
        """
        self._head_arrived()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.log.warning("request_refused", code=problem.code, address=self.client and self.client[0])
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.among.wait(self, first=True)
        self.transport.write(_answer(problem))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.timeout_keep_alive_handler)


def _answer(problem: Problem) -> bytes:
    """The complete response to a request that never reached the application."""
    document = problem_document(problem, None)
    body = json.dumps(document).encode()
    protected = "".join(f"{name.lower()}: {value}\r\n" for name, value in SECURITY_HEADERS.items())
    head = (
        f"HTTP/1.1 {document['status']} {document['title']}\r\ncontent-type: {MEDIA_TYPE}\r\n{protected}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body

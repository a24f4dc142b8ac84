"""Accepts connections without letting clients exhaust the file descriptors of this process.

Invariants:
- a share of the descriptors that the system allows stays free for the ledger, files and outgoing calls;
- when no more connections may be open, the one that has waited longest for its client is closed: it lingers after its
  response, is idle, sends its headers slowly, or does not read. A new connection is refused only when every open one is
  serving a request;
- closing or refusing takes one step. No connection lingers beyond the limit, and accepting never fails in a loop. If
  descriptors still run out, a reserved descriptor is freed just long enough to accept and close the new connection.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ClassVar, Protocol

from trellis.http_server.limits import LogLimit

ACCEPTS_AT_ONCE = 8
"""Connections accepted per event-loop step. Descriptors closed in one step are free before the next."""
DESCRIPTORS_FREE = 256
"""Descriptors that connections leave free: this many, or a quarter of the limit if that is fewer."""
RAISE_REFUSED = 10_240
"""A soft limit that macOS grants even when it refuses a higher one (`OPEN_MAX`)."""
RETRY_S = 0.5
"""Pause in accepting, in seconds, after an error that closing a connection does not fix."""
HANDSHAKE_S = 10.0
_GONE = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
"""Errors that mean the client or its network failed between connecting and being accepted."""


class HttpConnection(Protocol):
    """One accepted connection, as implemented by the HTTP protocol."""

    def give_way(self) -> None:
        """Close the connection at once."""
        ...


def descriptor_limit(wanted: int) -> int:
    """Raise the soft limit on open files towards `wanted`, and return how many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    for limit in (target, min(target, RAISE_REFUSED)):
        if limit > soft:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return soft


class ConnectionPool:
    """The connections of one server: limits how many may be open, and picks which one to close for a new one."""

    _beyond: ClassVar[set[Hashable]] = set()
    """Connections, of all servers in this process, that use a descriptor from the reserved range."""

    def __init__(self, connections_max: int) -> None:
        self._max = connections_max
        limit = descriptor_limit(connections_max + 2 * DESCRIPTORS_FREE)
        self._descriptor_max = limit - min(DESCRIPTORS_FREE, limit // 4)
        self._open: set[Hashable] = set()
        self._waiting: OrderedDict[HttpConnection, None] = OrderedDict()

    def opened(self, connection: Hashable, descriptor: int) -> None:
        """Count a connection, from the moment it is accepted."""
        self._open.add(connection)
        if descriptor >= self._descriptor_max:
            self._beyond.add(connection)

    def closed(self, connection: Hashable) -> None:
        """Stop counting a connection."""
        self._open.discard(connection)
        self._beyond.discard(connection)
        self._waiting.pop(connection, None)  # type: ignore[call-overload] - one that never waited is not there

    def wait(self, connection: HttpConnection, *, first: bool = False) -> None:
        """Mark a connection as waiting for its client.

        It is closed after those already waiting, or with `first` before them.
        """
        if connection in self._open:
            self._waiting[connection] = None
            self._waiting.move_to_end(connection, last=not first)

    def work(self, connection: HttpConnection) -> None:
        """Mark a connection as serving a request. It is not closed to make room."""
        self._waiting.pop(connection, None)

    def make_room(self, descriptor: int) -> bool:
        """Whether a new connection with this descriptor may stay; closes a waiting connection if that is needed.

        The system hands out the lowest free descriptor, so a high one means that all lower ones are in use by this
        process. Until the connections with high descriptors are closed, every new connection replaces another one, even
        if it got a low descriptor that became free.
        """
        if len(self._open) < self._max and descriptor < self._descriptor_max and not self._beyond:
            return True
        return self.give_back(1) == 1

    def give_back(self, count: int) -> int:
        """Close up to `count` waiting connections, longest-waiting first, and return how many were closed."""
        leaving = [self._waiting.popitem(last=False)[0] for _ in range(min(count, len(self._waiting)))]
        for connection in leaving:
            self.closed(connection)
            connection.give_way()
        return len(leaving)


class _HandshakingConnection:
    """A connection during its TLS handshake, before the HTTP protocol knows it."""

    task: "asyncio.Task[None]"

    def give_way(self) -> None:
        """Close the connection at once."""
        self.task.cancel()


class Acceptor:
    """Accepts connections on one listening socket. Replaces `asyncio.Server`, which logs a line per failed accept."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: ConnectionPool,
        log: LogLimit,
        *,
        tls: ssl.SSLContext | None,
        refusal: bytes,
    ) -> None:
        self._listening, self._make, self._connections, self._log = listening, make, connections, log
        self._tls, self._refusal = tls, refusal
        self._loop = asyncio.get_running_loop()
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    async def wait_closed(self) -> None:
        """Return at once: the open connections belong to the server, not to the acceptor."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                self._failed(error)
                return
            self._admit(accepted, str(address[0]))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if not self._connections.make_room(accepted.fileno()):
            self._log.warning("connection_refused", code="OVERLOADED", address=address)
            self._turn_away(accepted)
            return
        accepted.setblocking(False)
        arriving = _HandshakingConnection()
        self._connections.opened(arriving, accepted.fileno())
        self._connections.wait(arriving)
        arriving.task = task = self._loop.create_task(self._connect(accepted, arriving))
        self._connecting.add(task)
        task.add_done_callback(lambda done: self._connected(done, accepted, arriving))

    async def _connect(self, accepted: socket.socket, arriving: "_HandshakingConnection") -> None:
        """Hand the socket to the HTTP protocol, after the TLS handshake if there is one."""

        def make() -> asyncio.Protocol:
            connection = self._make()
            if self._tls is None:  # without TLS the protocol gets its connection at once
                self._connections.closed(arriving)
                self._connections.opened(connection, accepted.fileno())
            return connection

        timeout_s = None if self._tls is None else HANDSHAKE_S
        try:
            _, connection = await self._loop.connect_accepted_socket(
                make, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            accepted.close()  # the handshake failed: not one of our clients
            return
        if self._is_closed:
            connection.shutdown()  # type: ignore[attr-defined] - the protocol of HTTP has it

    def _connected(
        self, task: "asyncio.Task[None]", accepted: socket.socket, arriving: "_HandshakingConnection"
    ) -> None:
        self._connecting.discard(task)
        self._connections.closed(arriving)
        if task.cancelled():
            accepted.close()

    def _turn_away(self, accepted: socket.socket) -> None:
        """Send the reason if that needs no waiting, and close the socket."""
        with contextlib.suppress(OSError):
            if self._tls is None:
                accepted.setblocking(False)
                accepted.send(self._refusal)
                accepted.shutdown(socket.SHUT_WR)
        accepted.close()

    def _failed(self, error: OSError) -> None:
        """Handle a lack of descriptors or memory: close waiting connections, otherwise the new one."""
        code = errno.errorcode.get(error.errno or 0, "UNKNOWN")
        self._log.warning("accept_failed", code=code, error=error.strerror)
        if self._connections.give_back(ACCEPTS_AT_ONCE):
            return  # the next step has free descriptors
        if error.errno in {errno.EMFILE, errno.ENFILE} and self._turned_away_with_reserve():
            return
        self._loop.remove_reader(self._listening)
        self._retry = self._loop.call_later(RETRY_S, self._resume)

    def _turned_away_with_reserve(self) -> bool:
        if self._reserve is None:
            return False
        os.close(self._reserve)
        self._reserve = None
        try:
            self._turn_away(self._listening.accept()[0])
        except OSError:
            return False
        finally:
            self._restore_reserve()
        return True

    def _restore_reserve(self) -> None:
        if self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _resume(self) -> None:
        if not self._is_closed:
            self._restore_reserve()
            self._loop.add_reader(self._listening, self._accept)

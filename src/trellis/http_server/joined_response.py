"""Sends a response with one write to the socket, where uvicorn makes two: one for the head, one for the body.

A write to a socket is the most expensive step of a small response. So the head waits for the body if the length of the
body is known. A response of unknown length, such as a stream of events, is sent by uvicorn: its head leaves at once.

Invariants:
- a part of a response that has begun can be written without the layers in between, which change no such part, and so
  can a whole response, to which its layer has done everything before. An application with further layers, or with a
  wrapper around it, sends every response in messages (`application.py`);
- what is unusual goes to uvicorn unchanged: a response in parts, one to HEAD, one that ends the connection, one whose
  head or length does not fit, and everything while the client does not read. So every check of uvicorn holds;
- an application that fails between head and body has sent nothing, and uvicorn answers 500.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

NO_BODY = frozenset({204, 304})
WRITE_PART = "trellis.write_part"
"""Where the scope of a request has its `JoinedResponse.write_part`. Another server's scope has none."""
WRITE_WHOLE = "trellis.write_whole"
"""Where the scope of a request has its `JoinedResponse.write_whole`. Another server's scope has none."""
SERVERS_SEND = "trellis.servers_send"
"""Where the scope of a request has the `send` with which the server called the application."""
_BYTES = [bytes([number]) for number in range(256)]
_NOT_IN_NAMES = b"".join(filter(HEADER_RE.search, _BYTES)) + b"".join(one for one in _BYTES if one != one.lower())
_NOT_IN_VALUES = b"".join(filter(HEADER_VALUE_RE.search, _BYTES))

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class FixedHeaders:
    """Headers that many responses have alike, with their lines in a response, which are made once.

    None of them says how the response is sent.
    """

    headers: Headers
    lines: bytes

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> "FixedHeaders":
        """These headers."""
        own = list(headers)
        return cls(own, _lines(own))


@dataclass(slots=True)
class JoinedResponse:
    """The application of one request, whose response leaves in one write if that is possible."""

    app: ASGIApp
    cycle: RequestResponseCycle
    _start: Message | None = None
    """The message that starts the response, until the next one arrives."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - `cycle.send`
        """Handle the request."""
        scope[WRITE_PART], scope[WRITE_WHOLE], scope[SERVERS_SEND] = self.write_part, self.write_whole, self._send
        await self.app(scope, receive, self._send)

    def write_part(self, body: bytes) -> bool:
        """Write a part of the body at once, for an application that sends the same to many.

        Returns False, and writes nothing, if the part has to be sent: while the client does not read, and of a response
        that has not begun, has ended, or is not sent in chunks.
        """
        cycle = self.cycle
        under_way = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        if not under_way or cycle.flow.write_paused or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def write_whole(self, status: int, headers: Headers, fixed: bytes, body: bytes | memoryview) -> bool:
        """Write a response at once; `fixed` are the lines of further headers.

        Returns False, and writes nothing, if it has to be sent: what is unusual, and everything while the client does
        not read.
        """
        cycle = self.cycle
        is_usual = (
            cycle.keep_alive
            and not cycle.response_started
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and cycle.scope["method"] != "HEAD"
        )
        head = _head(cycle, status, headers, len(body)) if is_usual and self._start is None else None
        if head is None:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"".join((head, fixed, b"\r\n", body)))
        cycle.message_event.set()
        cycle.on_response()
        return True

    async def _send(self, message: Any) -> None:
        start, self._start = self._start, None
        if start is None:
            if message["type"] == "http.response.start" and not self.cycle.response_started and _has_length(message):
                self._start = message
            else:
                await self.cycle.send(message)
            return
        is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        headers, body = list(start.get("headers", ())), message.get("body", b"")
        if not is_whole or not self.write_whole(start["status"], headers, b"", body):
            await self.cycle.send(start)  # type: ignore[arg-type] - the same message, under another library's name
            await self.cycle.send(message)


def is_wrapped(scope: Scope, send: Send) -> bool:
    """Whether something between the server and this application, for example a wrapper, sends its messages on."""
    return scope.get(SERVERS_SEND) != send


def send_in_messages(scope: Scope) -> None:
    """Have the response of this request sent in messages, of which every layer has every one."""
    scope.pop(WRITE_PART, None)
    scope.pop(WRITE_WHOLE, None)


def _has_length(start: Message) -> bool:
    """Whether the length of the body is known, so that its head may wait for it."""
    return start["status"] in NO_BODY or any(name == b"content-length" for name, _ in start.get("headers", ()))


def _head(cycle: RequestResponseCycle, status: int, headers: Headers, length: int) -> bytes | None:
    """The head of a response with a body of this length; None if uvicorn has to send it."""
    line, fields = STATUS_LINE.get(status), dict(headers)
    announced = fields.get(b"content-length")
    fits = not length and status in NO_BODY if announced is None else announced == b"%d" % length
    if line is None or not fits or b"connection" in fields or b"transfer-encoding" in fields:
        return None
    names, values = b"".join([name for name, _ in headers]), b"".join([value for _, value in headers])
    if len(names.translate(None, _NOT_IN_NAMES)) != len(names):
        return None
    if len(values.translate(None, _NOT_IN_VALUES)) != len(values):
        return None
    return b"".join((line, _lines(cycle.default_headers), _lines(headers)))


def _lines(headers: Headers) -> bytes:
    """The lines of these headers in the head of a response."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])

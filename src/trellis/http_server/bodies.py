"""Reads request bodies strictly.

A body has a limit on its bytes, arrival time, nesting depth and number of values. It must be UTF-8 JSON without NaN,
and no object may repeat a name.

Invariants:
- JSON that two parsers could read differently is refused before any handler sees it;
- the body of a caller without permission is not read at all;
- a large body is parsed in a thread, and all bodies of a process share one byte limit, so no request blocks the others;
- a body that must be read before its sender is authenticated (a signed callback, for example) has smaller limits of its
  own. Unauthenticated senders never use up the capacity of authenticated ones.
"""

import asyncio
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import pydantic
from fastapi import Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute, request_response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from trellis.engine.text import is_storable
from trellis.http_server.deadlines import SharedDeadline, SharedDeadlines
from trellis.http_server.problems import Problem
from trellis.http_server.query_parameters import declared_names, unknown_parameters
from trellis.http_server.request_plan import request_plan
from trellis.net.targets import one_sender

BODY_BYTES_MAX = 1024 * 1024
LARGE_BODY_BYTES_MAX = 10 * 1024 * 1024
BODY_S = 30.0
"""How long a body may take to arrive, in seconds."""
DEPTH_MAX = 32
PIECES_MAX = 50_000
"""Limit on commas and opening brackets outside of strings, which approximates the number of values."""
NUMBER_CHARS_MAX = 100
INLINE_BYTES_MAX = 64 * 1024
"""A body up to this size is parsed in the event loop, a larger one in a thread."""
ERRORS_TOLD_MAX = 1_000
"""A large body with more validation errors than this gets only their number, not the list."""
UNDER_WAY_BYTES_MAX = 128 * 1024 * 1024
"""Limit on the bytes of all request bodies that one process holds at the same time."""
UNAUTHENTICATED_BYTES_MAX = 64 * 1024
"""Limit on the bytes of one body whose sender is not authenticated yet."""
UNAUTHENTICATED_S = 5.0
"""How long the body of an unauthenticated sender may take to arrive, in seconds."""
UNAUTHENTICATED_MAX = 64
"""How many bodies of unauthenticated senders may be arriving at the same time."""
UNAUTHENTICATED_OF_ADDRESS_MAX = 16
"""How many of those may come from one IPv4 address, or from one IPv6 /64."""

Made = TypeVar("Made")

# An unterminated string matches up to the end of the body, so every character is scanned once, even in malformed JSON.
_PIECE = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{\]}]', re.DOTALL)


@runtime_checkable
class AdmissionCheck(Protocol):
    """A route dependency that can refuse a request before its body is read."""

    async def admit(self, request: Request) -> None:
        """Raise the error that calling the dependency would raise."""
        ...


class UnauthenticatedBodies:
    """Limits how many bodies of unauthenticated senders may be arriving, in total and per sender (`sender_of`)."""

    def __init__(self) -> None:
        self._arriving: Counter[str] = Counter()

    @contextmanager
    def arriving(self, address: str) -> Generator[None]:
        """Count one body until its last byte has arrived; raises Problem 503."""
        if self._arriving.total() >= UNAUTHENTICATED_MAX or self._arriving[address] >= UNAUTHENTICATED_OF_ADDRESS_MAX:
            detail = "Too many bodies without a token are arriving; send it again in a while, and all of it at once."
            raise Problem("OVERLOADED", detail, headers={"Retry-After": "1"})
        self._arriving[address] += 1
        try:
            yield
        finally:
            self._arriving[address] -= 1
            if not self._arriving[address]:
                del self._arriving[address]


class BodiesUnderWay:
    """Counts the bytes of request bodies held now. Kept in the app's state."""

    def __init__(self, bytes_max: int = UNDER_WAY_BYTES_MAX) -> None:
        self.bytes, self.bytes_max = 0, bytes_max
        self.unauthenticated = UnauthenticatedBodies()
        self._deadlines: dict[float, SharedDeadlines] = {}

    def deadline(self, seconds: float) -> SharedDeadline:
        """The deadline of a body that begins to arrive now. Routes have two or three different times."""
        return self._deadlines.setdefault(seconds, SharedDeadlines(seconds)).begin()

    def take(self, count: int) -> None:
        """Reserve `count` more bytes; raises Problem 503."""
        if self.bytes + count > self.bytes_max:
            detail = (
                f"The bodies of the requests that are being read have {self.bytes_max} bytes; send it again in a while."
            )
            raise Problem("OVERLOADED", detail, headers={"Retry-After": "1"})
        self.bytes += count

    def give_back(self, count: int) -> None:
        """Release `count` bytes."""
        self.bytes -= count


def sender_of(request: Request) -> str:
    """The address by which unauthenticated senders are told apart."""
    return one_sender(request.client.host) if request.client else "unknown"


class StrictRequest(Request):
    """A request with a bounded body and unambiguous JSON.

    `authenticated` says that the sender is known before the body is read.
    """

    def __init__(
        self, scope: Scope, receive: Receive, bytes_max: int, body_s: float = BODY_S, *, authenticated: bool
    ) -> None:
        super().__init__(scope, receive)
        self._bytes_max = bytes_max if authenticated else min(bytes_max, UNAUTHENTICATED_BYTES_MAX)
        self._body_s = body_s if authenticated else min(body_s, UNAUTHENTICATED_S)
        self._authenticated = authenticated
        self._under_way: BodiesUnderWay = scope["app"].state.bodies
        self._held = 0

    async def body(self) -> bytes:
        """The whole body; raises Problem 408, 413, 415, 503, ClientDisconnect."""
        if not hasattr(self, "_body"):
            media = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            announced = self.headers.get("content-length", "")
            if announced.isdigit() and int(announced) > self._bytes_max:
                raise too_large(self._bytes_max)
            body = await self._bounded()
            if body and media != "application/json" and not media.endswith("+json"):
                sent = f"The content type is {media[:100]}" if media else "The body has no content type"
                raise Problem("UNSUPPORTED_MEDIA_TYPE", f"{sent}; send application/json.")
            self._body = body
        return self._body

    async def _bounded(self) -> bytes:
        first, rest = b"", bytearray()
        is_more = True
        arriving = nullcontext() if self._authenticated else self._under_way.unauthenticated.arriving(sender_of(self))
        deadline = self._under_way.deadline(self._body_s)
        try:
            with arriving:
                while is_more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    is_more = message.get("more_body", False)
                    if len(first) + len(rest) + len(part) > self._bytes_max:
                        raise too_large(self._bytes_max)
                    self._hold(len(part))
                    if first:
                        rest += part
                    else:
                        first = part
        except asyncio.CancelledError:
            if not deadline.close():
                raise
            detail = f"The body did not arrive within {self._body_s:g} s; send it at once."
            raise Problem("REQUEST_TIMEOUT", detail) from None
        finally:
            deadline.close()
        return first + rest if rest else first

    def _hold(self, count: int) -> None:
        if self._authenticated:
            self._under_way.take(count)
            self._held += count

    async def json(self) -> Any:
        """The parsed body; raises Problem 422."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await in_thread_if_large(len(body), parse, body)
        return self._json

    def release(self) -> None:
        """Stop counting the body, because the request has been answered."""
        self._under_way.give_back(self._held)
        self._held = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """The longest bodies that an application accepts.

    Stored in its state as `body_limits` when they differ from the defaults.
    """

    bytes_max: int = BODY_BYTES_MAX
    large_bytes_max: int = LARGE_BODY_BYTES_MAX


LIMITS_DEFAULT = BodyLimits()


PROBES = frozenset({"/system/live", "/system/ready", "/system/health", "/metrics", "/health"})
"""Routes that machines ask, which may add a query of their own. They have no filter that could be misspelt."""


class StrictRoute(APIRoute):
    """A route that reads its body strictly, and refuses query parameters that it does not declare."""

    is_large = False
    """Whether the route accepts large bodies (D25)."""
    body_s = BODY_S

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.app = self._respond

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, given a `StrictRequest`. For a router that is included in another."""
        self._prepare()

        async def strictly(request: Request) -> Response:
            strict = self._strict(request.scope, request.receive)
            try:
                return await self.planned(strict) or await self.by_fastapi(strict)
            finally:
                strict.release()

        return strictly

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that the router of FastAPI hands over."""
        answer = await self.answer(scope, receive)
        await answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """What sends the answer to a request: the response by the plan of the route, or FastAPI.

        What FastAPI needs around a handler is set up only where FastAPI calls it.
        """
        strict, is_left = self._strict(scope, receive), False
        try:
            response = await self.planned(strict)
            is_left = response is None
        finally:
            if not is_left:
                strict.release()
        return self._left_to_fastapi(strict) if response is None else response

    def _left_to_fastapi(self, strict: "StrictRequest") -> ASGIApp:
        async def handled(_request: Request) -> Response:
            try:
                return await self.by_fastapi(strict)
            finally:
                strict.release()

        return AsyncExitStackMiddleware(request_response(handled))

    def _prepare(self) -> None:
        """Work out what is the same for every request."""
        self._handle, self._takes_body = super().get_route_handler(), self.body_field is not None
        self._plan = functools.cache(functools.partial(request_plan, self))  # made at the first request
        self._rules = [one.call for one in self.dependant.dependencies if isinstance(one.call, AdmissionCheck)]
        self._parameters = frozenset(declared_names(self.dependant))

    def _strict(self, scope: Scope, receive: Receive) -> "StrictRequest":
        limits: BodyLimits = getattr(scope["app"].state, "body_limits", LIMITS_DEFAULT)
        bytes_max = limits.large_bytes_max if self.is_large else limits.bytes_max
        return StrictRequest(scope, receive, bytes_max, self.body_s, authenticated=bool(self._rules))

    async def by_fastapi(self, strict: "StrictRequest") -> Response:
        """Let FastAPI call the handler of the route, or say what is wrong with the request."""
        return await self._handle(strict)

    async def planned(self, strict: "StrictRequest") -> Response | None:
        """Check the request and respond by the plan of the route; None if FastAPI must call the handler."""
        _check_address(strict)
        problem = None if self.path in PROBES else unknown_parameters(strict, self._parameters)
        if self._takes_body or problem is not None:
            for rule in self._rules:
                await rule.admit(strict)
        if problem is not None:
            raise problem
        value: Any = None
        body = await strict.body() if self._takes_body else b""
        if body:
            value = await strict.json()  # parsed here, because FastAPI would hide what is wrong with it
            if len(body) > INLINE_BYTES_MAX:
                await asyncio.to_thread(self._check_errors, value)
        plan = self._plan() if self._takes_body is bool(body) else None
        return None if plan is None else await plan.respond(strict, value)

    def _check_errors(self, value: Any) -> None:
        """Raise Problem when the errors are too many to list quickly. FastAPI reports fewer errors itself."""
        assert self.body_field is not None
        form: Any = self.body_field.field_info.annotation
        try:
            pydantic.TypeAdapter[Any](form).validate_python(value)
        except pydantic.ValidationError as error:
            if error.error_count() > ERRORS_TOLD_MAX:
                detail = f"The body does not fit in {error.error_count()} places; GET /openapi.json says what fits."
                raise Problem("VALIDATION_FAILED", detail) from None


class LargeBodyRoute(StrictRoute):
    """A route that accepts large bodies: artifacts, and proposals of memory and logic (D25)."""

    is_large = True


def body_config(example: dict[str, Any]) -> pydantic.ConfigDict:
    """The configuration of a body: unknown fields are refused, and the description of the route shows this example."""
    return pydantic.ConfigDict(extra="forbid", json_schema_extra={"examples": [example]})


def too_large(bytes_max: int) -> Problem:
    """The problem for a body over the limit."""
    return Problem(
        "PAYLOAD_TOO_LARGE", f"The body has more than {bytes_max} bytes; store the data elsewhere and refer to it."
    )


async def in_thread_if_large(size: int, make: Callable[..., Made], *given: Any) -> Made:
    """Call `make` directly for a small body, in a thread for a large one."""
    return make(*given) if size <= INLINE_BYTES_MAX else await asyncio.to_thread(make, *given)


def parse(body: bytes) -> Any:
    """The JSON value of the body; raises Problem, which names the place of the error."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem("VALIDATION_FAILED", f"The body is not UTF-8 (byte {error.start}).") from None
    _check_pieces(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Problem("VALIDATION_FAILED", f"The body is no JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise _too_deep() from None
    if "\\u" in text or text.count("[") + text.count("{") > DEPTH_MAX:  # else every text is storable, and none is deep
        _check_tree(value)
    return value


def _check_address(request: Request) -> None:
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise Problem("VALIDATION_FAILED", "The address holds a zero character (%00), which no name here has.")


def _check_pieces(text: str) -> None:
    """Refuse a body with too many values before any of them is created."""
    if sum(map(text.count, ",[{")) <= PIECES_MAX:
        return
    pieces = depth = 0
    for piece in _PIECE.finditer(text):
        match text[piece.start()]:
            case "]" | "}":
                depth -= 1
            case "[" | "{":
                pieces, depth = pieces + 1, depth + 1
            case ",":
                pieces += 1
            case _:
                continue
        if depth > DEPTH_MAX:
            raise _too_deep()
        if pieces > PIECES_MAX:
            many = f"The body has more than {PIECES_MAX} commas and opening brackets outside of its texts"
            raise Problem("VALIDATION_FAILED", f"{many}; send fewer values, or refer to them.")
        if depth < 0:
            return  # not JSON; the parser reports it right away


def _check_tree(value: Any) -> None:
    """Check depth and strings level by level, without recursion that a body could exhaust."""
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX + 1):
        for one in level:
            _check_texts(one)
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise _too_deep()


def _check_texts(one: Any) -> None:
    texts: Iterable[Any] = (
        (one,) if isinstance(one, str) else cast("dict[str, Any]", one) if isinstance(one, dict) else ()
    )
    for text in texts:
        if not is_storable(text):
            detail = f"The text {text[:50]!r} holds a character that cannot be stored: U+0000 or half of a pair."
            raise Problem("VALIDATION_FAILED", detail)


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return cast("dict[str, Any]", one).values()
    return cast("list[Any]", one) if isinstance(one, list) else ()


def _too_deep() -> Problem:
    return Problem("VALIDATION_FAILED", f"The body is nested deeper than {DEPTH_MAX} levels.")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise Problem("VALIDATION_FAILED", f"The name {twice[:100]!r} comes twice in one object.")
    return members


def _refuse_constant(text: str) -> NoReturn:
    raise Problem("VALIDATION_FAILED", f"{text} is no JSON number.")


def _finite(text: str) -> float:
    number = float(text) if len(text) <= NUMBER_CHARS_MAX else math.inf
    if not math.isfinite(number):
        raise Problem("VALIDATION_FAILED", f"The number {text[:NUMBER_CHARS_MAX]} is too large or too long.")
    return number


def _whole(text: str) -> int:
    if len(text) > NUMBER_CHARS_MAX:
        raise Problem("VALIDATION_FAILED", f"A number has {len(text)} digits; the limit is {NUMBER_CHARS_MAX}.")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_names, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_finite
)

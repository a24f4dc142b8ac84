"""Calls to the gateway: one request with its retries, and listings fetched page by page."""

import json
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast
from urllib.parse import quote

import httpx2
import pydantic

from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.errors import OptionInvalid, TokenRefused
from trellis.engine.retry_policy import RetryPolicy
from trellis.http.address import is_readable_on_the_way
from trellis.http.errors import (
    AnswerInvalid,
    GatewayNotThere,
    GatewayRefused,
    GatewayUnavailable,
    GatewayUntrusted,
    TokenUnprotected,
    refusal,
)
from trellis.http.pages import read_pages
from trellis.http.shapes import Page

# One request to the gateway, retried until it is answered or its timeout is over.
#
# Retrying is safe: a request that changes something carries the same Idempotency-Key in all attempts. A request is
# retried if there is no response, or on 429, 502, 503 and 504, and never before `Retry-After` is over. Any other
# response is final. The token is sent to the gateway's own address only: no redirect is followed, and no proxy is taken
# from the environment.

TIMEOUT_S_DEFAULT = 30.0
ATTEMPT_S_DEFAULT = 10.0
PATIENCE_S_DEFAULT = 300.0
SILENCE_S_DEFAULT = 45.0
RETRY_DEFAULT = RetryPolicy(base_s=0.1, max_s=5.0)
ANSWER_BYTES_MAX = 32 * 1024 * 1024
PROBLEM_BYTES_MAX = 64 * 1024
KEY_CHARS_MAX = 200
ALLOW_PLAIN_HTTP = "TRELLIS_GATEWAY_PLAIN_HTTP=1, or CallOptions(plain_http=True),"
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_UNAVAILABLE = frozenset({502, 503, 504})

ShapeT = TypeVar("ShapeT", bound=pydantic.BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """How long the client tries, and what it takes care of."""

    timeout_s: float = TIMEOUT_S_DEFAULT
    """For one call with all its attempts."""
    attempt_s: float = ATTEMPT_S_DEFAULT
    """For one attempt: a gateway that is silent so long is asked again."""
    retry: RetryPolicy = RETRY_DEFAULT
    """How the waits between attempts grow."""
    patience_s: float = PATIENCE_S_DEFAULT
    """How long a stream of events tries to come back."""
    silence_s: float = SILENCE_S_DEFAULT
    """A stream that says nothing so long, not even that it lives, is opened anew."""
    plain_http: bool = False
    """Whether a token may go unencrypted (`http://`) to another machine."""
    needs_listener: bool = False
    """Whether a call fails at once if the first connection of the client is refused: nothing listens at the address.

    A program that may start before its gateway, or while it restarts, goes on trying.
    """
    on_retry: Callable[[str], None] | None = None
    """Called with a sentence when the first attempt of a call fails and the call goes on trying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayRequest:
    """One request to the gateway."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    body: Any = None
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    takes: frozenset[int] = frozenset()
    """Statuses that are not errors for this request, in addition to 2xx."""
    timeout_s: float | None = None
    """Timeout of all attempts together, instead of the client's."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayResponse:
    """A response of the gateway."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _RequestAttempts:
    """The state of one request over its attempts."""

    began: float
    timeout_s: float
    attempts: int = 0
    reason: str = "no attempt was over"
    refused: GatewayRefused | None = None


def _sent_at(headers: Mapping[str, str]) -> datetime | None:
    """The time in the header `Date`; None without one, or if it cannot be read."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).astimezone(UTC)
    except ValueError:
        return None


def path_of(*parts: str) -> str:
    """A path on the gateway; raises OptionInvalid for a part that would lead elsewhere."""
    for part in parts:
        if part in {"", ".", ".."}:
            raise OptionInvalid(option="id", value=part, expected="it must name something")
    return "/" + "/".join(quote(part, safe="") for part in parts)


class GatewayCalls:
    """Sends requests to one gateway with one token."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        *,
        token: Callable[[], str | None],
        clock: Clock,
        rng: random.Random,
        new_id: Callable[[], str],
        options: CallOptions,
    ) -> None:
        self._http, self._token, self._rng, self._new_id = http, token, rng, new_id
        self.clock, self.options = clock, options
        self.url = str(http.base_url)
        self._has_answered = False
        self.responded_at: datetime | None = None
        """When the last response was sent, by the clock of the gateway; None if it did not say."""

    async def get(self, shape: type[ShapeT], path: str, **params: Any) -> ShapeT:
        """GET a typed value."""
        return await self.asked(shape, GatewayRequest(method="GET", path=path, params=params))

    async def post(self, shape: type[ShapeT], path: str, body: Any = None, *, key: str | None = None) -> ShapeT:
        """POST a request with an idempotency key, so that it takes effect once."""
        return await self.asked(shape, GatewayRequest(method="POST", path=path, body=body, key=self.key(key)))

    async def asked(self, shape: type[ShapeT], ask: GatewayRequest) -> ShapeT:
        """Send the request and parse the response."""
        return read_shape(shape, await self.ask(ask), ask)

    def key(self, given: str | None) -> str:
        """The caller's idempotency key, or a new one; raises OptionInvalid."""
        if given is None:
            return self._new_id()
        if not 1 <= len(given) <= KEY_CHARS_MAX or not given.isascii() or not given.isprintable():
            expected = f"it must be 1 to {KEY_CHARS_MAX} printable ASCII characters"
            raise OptionInvalid(option="idempotency_key", value=given[:40], expected=expected)
        return given

    async def ask(self, ask: GatewayRequest) -> GatewayResponse:
        """Send the request and return the response.

        Raises GatewayRefused or a subclass, and GatewayUnavailable when the timeout is over.
        """
        timeout_s = self.options.timeout_s if ask.timeout_s is None else ask.timeout_s
        tries = _RequestAttempts(self.clock.monotonic(), timeout_s)
        try:
            return await within(self.clock, timeout_s, self._until_answered(ask, tries))
        except TimeoutError:
            raise self._given_up(ask, tries, timeout_s) from None

    @asynccontextmanager
    async def stream(self, ask: GatewayRequest) -> AsyncGenerator[httpx2.EventSource]:
        """Open one connection to an event stream; raises what `ask` raises. Does not retry."""
        headers = self._headers(ask) | {"Accept": "text/event-stream"}
        timeout = httpx2.Timeout(self.options.attempt_s, read=self.options.silence_s)
        async with self._sent(ask, None, headers, timeout) as response:
            if response.status_code >= 300:
                raise _refused(ask, response, await _read_body(response, PROBLEM_BYTES_MAX))
            yield httpx2.EventSource(response)

    def pause_s(self, failures: int, after_s: float | None) -> float:
        """Seconds before the next attempt: what the gateway asks for, plus a random backoff."""
        return max(0.0, after_s or 0.0) + self.options.retry.delay_s(failures, self._rng.random())

    async def _until_answered(self, ask: GatewayRequest, tries: _RequestAttempts) -> GatewayResponse:
        content = None if ask.body is None else json.dumps(ask.body, allow_nan=False).encode()
        headers = self._headers(ask)
        while True:
            after_s: float | None = None
            try:
                answer = await self._attempt(ask, content, headers)
            except httpx2.TransportError as error:
                refuse_untrusted(error, self.url)
                tries.reason, tries.refused = _error_text(error), None
                if self.options.needs_listener and not (self._has_answered or tries.attempts) and _is_refused(error):
                    raise GatewayNotThere(url=self.url, request=str(ask), reason="the connection was refused") from None
            else:
                self._has_answered = True
                self.responded_at = _sent_at(answer.headers)
                if answer.status < 300 or answer.status in ask.takes:
                    return answer
                tries.refused = _refused(ask, answer, answer.body)
                tries.reason = str(tries.refused)
                if answer.status not in RETRIED_STATUSES:
                    raise tries.refused
                after_s = tries.refused.retry_after_s
            pause_s = self.pause_s(tries.attempts, after_s)
            tries.attempts += 1
            if self.clock.monotonic() + pause_s - tries.began >= tries.timeout_s:
                raise self._given_up(ask, tries, self.clock.monotonic() - tries.began)
            if tries.attempts == 1 and self.options.on_retry is not None:
                reason = f"the gateway at {self.url} does not answer ({tries.reason})"
                self.options.on_retry(f"{reason}; trying for {tries.timeout_s:g} s")
            await self.clock.sleep(pause_s)

    async def _attempt(self, ask: GatewayRequest, content: bytes | None, headers: Mapping[str, str]) -> GatewayResponse:
        async with self._sent(ask, content, headers, httpx2.Timeout(self.options.attempt_s)) as response:
            body = await _read_body(response, ANSWER_BYTES_MAX)
            return GatewayResponse(status=response.status_code, headers=response.headers, body=body)

    def _sent(
        self, ask: GatewayRequest, content: bytes | None, headers: Mapping[str, str], timeout: httpx2.Timeout
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        params = {name: value for name, value in ask.params.items() if value is not None}
        return self._http.stream(
            ask.method, ask.path.lstrip("/"), params=params, content=content, headers=dict(headers), timeout=timeout
        )

    def _headers(self, ask: GatewayRequest) -> dict[str, str]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        token = self._token()
        if token is not None:
            if is_readable_on_the_way(self.url) and not self.options.plain_http:
                raise TokenUnprotected(url=self.url, allow=ALLOW_PLAIN_HTTP)
            headers["Authorization"] = f"Bearer {_sendable(token)}"
        if ask.body is not None:
            headers["Content-Type"] = "application/json"
        if ask.key is not None:
            headers["Idempotency-Key"] = ask.key
        return headers | tracing.headers() | dict(ask.headers)

    def _given_up(
        self, ask: GatewayRequest, tries: _RequestAttempts, waited_s: float
    ) -> GatewayRefused | GatewayUnavailable:
        if tries.refused is not None and tries.refused.status not in _UNAVAILABLE:
            return tries.refused
        then = "" if ask.key is None else f"; ask again with idempotency_key={ask.key!r} to learn what happened"
        return GatewayUnavailable(
            url=self.url,
            request=str(ask),
            timeout_s=waited_s,
            attempts=tries.attempts,
            reason=tries.reason,
            then=then,
            idempotency_key=ask.key,
        )


class GatewayResource:
    """One part of the gateway's interface, such as `client.runs`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls


def read_shape(shape: type[ShapeT], answer: GatewayResponse, ask: GatewayRequest) -> ShapeT:
    """The body as a typed value; raises AnswerInvalid."""
    try:
        return shape.model_validate_json(answer.body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AnswerInvalid(request=str(ask), reason=f"{where or 'the body'}: {first['msg']}") from None


async def _read_body(response: httpx2.Response, bytes_max: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > bytes_max:
            path = response.request.url.path
            raise AnswerInvalid(request=path, reason=f"it has more than {bytes_max} bytes")
    return bytes(body)


def _refused(ask: GatewayRequest, answer: GatewayResponse | httpx2.Response, body: bytes) -> GatewayRefused:
    status = answer.status if isinstance(answer, GatewayResponse) else answer.status_code
    if status < 400:
        raise AnswerInvalid(request=str(ask), reason=f"its status is {status}")
    problem: dict[str, Any] = {}
    if answer.headers.get("Content-Type", "").startswith("application/problem+json"):
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        problem = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
    return refusal(status, problem, answer.headers)


def refuse_untrusted(error: BaseException, url: str) -> None:
    """Raise GatewayUntrusted for a certificate error, because retrying cannot help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise GatewayUntrusted(url=url, reason=cause.verify_message) from error
        cause = cause.__cause__ or cause.__context__


def _is_refused(error: BaseException | None) -> bool:
    """Whether the connection was refused: nothing listens at the address."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_refused(one) for one in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refused(error.__cause__ or error.__context__)


def _error_text(error: httpx2.TransportError) -> str:
    return str(error) or type(error).__name__


def _sendable(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise TokenRefused(problem="it is not one line of printable ASCII", remedy="give it as it was issued")
    return token


# Listings of any length, fetched in the gateway's pages.

LIMIT_DEFAULT = 50
LIMIT_MAX = 1_000_000

ItemT = TypeVar("ItemT", bound=pydantic.BaseModel)


async def listed(
    calls: GatewayCalls, item: type[ItemT], path: str, limit: int, cursor: str | None = None, /, **filters: Any
) -> Page[ItemT]:
    """At most `limit` items, and the cursor of the next ones."""
    if not 1 <= limit <= LIMIT_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"it must be from 1 to {LIMIT_MAX}")

    async def read(size: int, after: str | None) -> Page[ItemT]:
        page = await calls.get(Page[item], path, limit=size, cursor=after, **filters)
        if page.next_cursor is not None and page.next_cursor == after:
            raise AnswerInvalid(request=f"GET {path}", reason="its next_cursor leads back to itself")
        return page

    return await read_pages(read, limit, cursor)

"""Streams of events: what a stream sends and when it ends, and the tickets that open one without a header."""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trellis.auth.tokens import Identity, TrustedKey, is_trusted, verify
from trellis.engine.errors import LedgerError, Refused, TokenRefused
from trellis.engine.logs import log_of
from trellis.gateway.events import StreamView, closing_frame, first_frame, keep_alive_frame
from trellis.gateway.hub import EventBatch, EventHub, StreamListener
from trellis.http_server.joined_response import WRITE_PART
from trellis.lifecycles import Role
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, if_match

# Tickets: let a browser's EventSource, which cannot send headers, authenticate without a token in the URL.
#
# A ticket is random text, valid for one stream and for 30 seconds. Its identity is stored in the object store under the
# ticket's digest, so any replica can redeem it. Of several that try at once exactly one succeeds, because the store
# replaces an etag only once. No signing key is needed, and reading the store or a log reveals no usable ticket. A
# ticket grants no more than the token that obtained it: once the token's key is no longer trusted, neither is the
# ticket.

FOLDER = "tickets"
TTL_S = 30
KEPT_S = 60
"""How many more seconds the object is kept, so that a ticket in use is not removed."""
REMOVED_AT_ONCE = 20
TICKET_CHARS_MAX = 100

_FORM = re.compile(r"(\d{10})\.[0-9a-f]{64}")


class TicketRefused(Refused):
    """The ticket is refused: {problem}; get another one with POST /events/tickets."""

    code = "AUTH_REQUIRED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tickets:
    """Issues tickets and redeems them."""

    objects: ObjectStore
    keys: Sequence[TrustedKey]
    now: Callable[[], float]
    new_id: Callable[[], str]

    async def issue(self, identity: Identity) -> str:
        """Issue a ticket for the token's identity. Also removes a few expired tickets, so that they do not pile up."""
        await self.clean()
        expires_at = math.floor(self.now()) + TTL_S
        ticket = f"{expires_at:010d}.{(self.new_id() + self.new_id()).replace('-', '')[:64]}"
        body = asdict(identity) | {"roles": sorted(identity.roles)}
        answer = await self.objects.put(_key(ticket), json.dumps(body).encode(), when=CREATE)
        assert isinstance(answer, PutStored), "random text came twice"
        return ticket

    async def take(self, ticket: str) -> Identity:
        """Redeem a ticket once, and return its identity; raises TicketRefused."""
        if len(ticket) > TICKET_CHARS_MAX or (form := _FORM.fullmatch(ticket)) is None:
            raise TicketRefused(problem="it does not look like one")
        if int(form.group(1)) <= self.now():
            raise TicketRefused(problem=f"it was good for {TTL_S} s")
        there = await self.objects.get(_key(ticket))
        if there is None:
            raise TicketRefused(problem="nobody gave it out here")
        ticket_fields = json.loads(there.body)
        if not ticket_fields or not isinstance(
            await self.objects.put(there.key, b"{}", when=if_match(there.etag)), PutStored
        ):
            raise TicketRefused(problem="it has been used")
        identity = _identity(ticket_fields)
        if not is_trusted(identity, self.keys):
            raise TicketRefused(problem="the key of the token that got it is not trusted any more")
        return identity

    async def clean(self) -> int:
        """Remove some expired tickets, oldest first, and return how many."""
        listing = await self.objects.list(f"{FOLDER}/", limit=REMOVED_AT_ONCE)
        over = [info.key for info in listing.items if _ends(info.key) + KEPT_S <= self.now()]
        for key in over:
            await self.objects.delete(key)
        return len(over)


def _identity(claims: dict[str, Any]) -> Identity:
    rest = {name: value for name, value in claims.items() if name != "roles"}
    return Identity(roles=frozenset(Role(role) for role in claims["roles"]), **rest)


def _key(ticket: str) -> str:
    """The object key. It begins with the second of expiry, so that the oldest tickets are listed first."""
    digest = hashlib.sha256(ticket.encode()).hexdigest()
    return f"{FOLDER}/{ticket.partition('.')[0]}-{digest}"


def _ends(key: str) -> int:
    return int(key.removeprefix(f"{FOLDER}/").partition("-")[0])


# One open stream of events.
#
# A stream ends when its listener is gone or reads nothing for too long, when the token expires or is no longer trusted,
# when the server stops, when the ledger does not answer, and when the requested duration is over. In every case the
# listener can resume after the last `id`.

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
EXPIRED = "the token has expired; connect again with a new one"
UNTRUSTED = "the token is not trusted any more; connect again with a new one"
STOPPING = "the server stops; connect again"
OUTAGE = "the ledger does not answer; connect again"
TIME_OVER = "the time that was asked for is over"

_log = log_of("trellis.gateway")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamServices:
    """What the live-event routes work with. Kept in the app's state."""

    hub: EventHub
    tickets: Tickets
    now: Callable[[], float]
    """Seconds since 1970, compared with token expiry."""


async def streams_of(request: Request) -> StreamServices:
    """The stream services of this app."""
    return request.app.state.streams


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenPermit:
    """What entitles a listener to its stream: a token, verified again meanwhile, or the identity behind a ticket."""

    identity: Identity
    keys: Sequence[TrustedKey]
    token: str | None = None

    def problem(self, now: float, *, again: bool) -> str | None:
        """Why the permit is no longer valid; None while it is.

        With `again` also checks that its key is still trusted.
        """
        if self.identity.expires_at <= now:
            return EXPIRED
        if not again:
            return None
        if self.token is None:
            return None if is_trusted(self.identity, self.keys) else UNTRUSTED
        try:
            verify(self.token, self.keys, now=now)
        except TokenRefused:
            return UNTRUSTED
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPlan:
    """What a stream sends, from which position, and for how long."""

    view: StreamView
    begins: str
    first: EventBatch
    """The first events after `begins`, read before the response starts, so that an error can still set its status."""
    allowed: ListenPermit
    for_s: float | None = None
    """Maximum duration in seconds; 0 sends the events there are and ends."""


class EventStream(Response):
    """The streaming response. Each listener has only two tasks: its own, and one that detects its disconnect."""

    media_type = MEDIA_TYPE
    charset = "utf-8"

    def __init__(self, streams: StreamServices, plan: StreamPlan) -> None:
        self._streams, self._hub, self._course = streams, streams.hub, plan
        self._last, self._sign_at, self._check_at = plan.first, 0.0, 0.0
        self._write_part: Callable[[bytes], bool] | None = None
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the stream ends; raises TooManyListeners before anything is sent."""
        self._write_part = scope.get(WRITE_PART)
        with self._hub.joined(self._course.allowed.identity.name) as listener:
            leaving = asyncio.create_task(_until_gone(receive, listener))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._give(send, listener)
            except TimeoutError:
                # The rest of the response cannot be sent; the server closes the connection.
                _log.info("listener_too_slow", caller=listener.name)
            finally:
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)

    @property
    def view(self) -> StreamView:
        """What its listener gets."""
        return self._course.view

    @property
    def position(self) -> str:
        """The position of the last batch."""
        return self._last.position

    def write(self, batch: EventBatch) -> bool:
        """Write the next batch without the task of this stream, which waits; False if the task has to send it."""
        now, expires_at = self._hub.clock.monotonic(), self._course.allowed.identity.expires_at
        if now >= self._check_at or expires_at <= self._streams.now():
            return False
        if batch.body:
            if self._write_part is None or not self._write_part(batch.body):
                return False
            self._sign_at = now + self._hub.options.keep_alive_s
        self._last = batch
        return True

    async def _give(self, send: Send, listener: StreamListener) -> None:
        course, hub, clock = self._course, self._hub, self._hub.clock
        ends_at = None if course.for_s is None else clock.monotonic() + course.for_s
        # Token checks have their own timer: on a busy stream a keep-alive is never due.
        self._sign_at = self._check_at = clock.monotonic() + hub.options.keep_alive_s
        body = first_frame(course.begins, hub.rng.randint(*hub.options.retry_ms)) + self._last.body
        while not listener.gone:
            now, batch = clock.monotonic(), self._last
            due, again = now >= self._sign_at, now >= self._check_at
            why = STOPPING if hub.closed else course.allowed.problem(self._streams.now(), again=again)
            if again:
                self._check_at = now + hub.options.keep_alive_s
            if why is None and (body or due):
                await self._send(send, body + keep_alive_frame(batch.position) if due else body)
                self._sign_at = clock.monotonic() + hub.options.keep_alive_s
            is_all = batch.caught_up or batch.is_held
            if why is None and is_all and ends_at is not None and clock.monotonic() >= ends_at:
                why = TIME_OVER
            if why is None:
                why = await self._next(listener, self._wake_at(min(self._sign_at, self._check_at), ends_at))
            if why is not None:
                await self._send(send, closing_frame(why), more=False)
                return
            body = self._last.body

    async def _next(self, listener: StreamListener, wake_at: float) -> str | None:
        """Read the next batch, when there is one or at `wake_at`; or return the reason why the stream ends."""
        batch = self._last
        if batch.is_held:
            await self._hub.wait_until_shown(listener, batch, wake_at)
        elif batch.caught_up:
            await self._hub.wait(listener, self, wake_at)
        else:
            await asyncio.sleep(0)  # a long catch-up must not block other listeners
        if listener.gone or self._hub.closed:
            self._last = replace(self._last, body=b"")
            return None
        try:
            self._last = await self._hub.read(self._course.view, self._last.position)
        except LedgerError as error:
            _log.warning("stream_ended", caller=listener.name, error=str(error))
            return OUTAGE
        return None

    def _wake_at(self, due_at: float, ends_at: float | None) -> float:
        now = self._hub.clock.monotonic()
        expires_at = now + self._course.allowed.identity.expires_at - self._streams.now()
        return min(due_at, expires_at, due_at if ends_at is None else ends_at)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Send one chunk. At most one is buffered per listener.

        Raises TimeoutError when the listener reads nothing for too long.
        """
        deadline = self._hub.send_deadlines.begin()
        try:
            await send({"type": "http.response.body", "body": body, "more_body": more})
        except asyncio.CancelledError:
            if not deadline.close():
                raise
            raise TimeoutError from None
        finally:
            deadline.close()


async def _until_gone(receive: Receive, listener: StreamListener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.gone = True
    listener.wake()

"""Event streams, and watching a job or run until it has ended."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import httpx2
import pydantic

from trellis.engine.clock import Clock, sleep_or_stop, within
from trellis.http.calls import RETRIED_STATUSES, GatewayCalls, GatewayRequest, refuse_untrusted
from trellis.http.errors import AnswerInvalid, GatewayError, GatewayRefused, GatewayUnavailable
from trellis.http.shapes import LiveEvent

# Follows events, each delivered exactly once: a broken stream resumes after the last event that was received.

PATH = "/events/stream"
MEDIA_TYPE = "text/event-stream"
_DATA = pydantic.TypeAdapter(dict[str, Any])


async def follow(calls: GatewayCalls, params: Mapping[str, Any], after: str | None) -> AsyncGenerator[LiveEvent]:
    """Every event after a position, without end; without a position from now on.

    Raises what the gateway refuses, and GatewayUnavailable if it could not be reached again for `patience_s`.
    """
    last, failures, lost_at = after, 0, calls.clock.monotonic()
    while True:
        after_s, reason = None, "the stream ended"
        received = False
        headers = {} if last is None else {"Last-Event-ID": last}
        try:
            async with calls.stream(GatewayRequest(method="GET", path=PATH, params=params, headers=headers)) as source:
                async for sent in source:
                    received, after_s = True, after_s if sent.retry is None else sent.retry / 1000
                    # Positions sort like the feed: an event that is not after the last one was already received.
                    if not sent.id or (last is not None and sent.id <= last):
                        continue
                    last = sent.id
                    if sent.data:
                        yield _event(sent)
        except GatewayRefused as error:
            if error.status not in RETRIED_STATUSES:
                raise
            after_s, reason = error.retry_after_s, str(error)
        except httpx2.TransportError as error:
            refuse_untrusted(error, calls.url)
            reason = str(error) or type(error).__name__
        if received:
            failures, lost_at = 0, calls.clock.monotonic()
        waited_s = calls.clock.monotonic() - lost_at
        if waited_s > calls.options.patience_s:
            raise GatewayUnavailable(
                url=calls.url, request=f"GET {PATH}", timeout_s=waited_s, attempts=failures, reason=reason, then=""
            )
        await calls.clock.sleep(calls.pause_s(failures, after_s))
        failures += 1


async def position(calls: GatewayCalls) -> str:
    """The present end of the feed; raises what a request raises."""
    ask = GatewayRequest(method="GET", path=PATH, params={"for_s": 0}, headers={"Accept": MEDIA_TYPE})
    for line in (await calls.ask(ask)).body.decode("utf-8", "replace").splitlines():
        if line.startswith("id:"):
            return line.removeprefix("id:").strip()
    raise AnswerInvalid(request=str(ask), reason="it names no position")


def _event(sent: httpx2.ServerSentEvent) -> LiveEvent:
    try:
        return LiveEvent.model_validate({**_DATA.validate_json(sent.data), "id": sent.id})
    except pydantic.ValidationError as error:
        raise AnswerInvalid(request=PATH, reason=f"event {sent.id}: {error.errors()[0]['msg']}") from None


# Watches a document by polling. The polled document is authoritative; the event stream only triggers the next poll.
# If the stream is unavailable, watching is only slower: the document is polled every `POLL_S`.

POLL_S = 5.0
SOON_S = 0.05
"""Delay after an event, in seconds, because the document may be published a moment later."""


class Versioned(Protocol):
    """A document with a version."""

    @property
    def version(self) -> int:
        """Increases with every change."""
        ...


SeenT = TypeVar("SeenT", bound=Versioned)


async def changes(
    look: Callable[[SeenT | None], Awaitable[SeenT | None]],
    hints: AsyncIterator[LiveEvent],
    *,
    ended: Callable[[SeenT], bool],
    clock: Clock,
) -> AsyncGenerator[SeenT]:
    """Each newer state of a document, up to the final one. `look(last)` returns None if nothing has changed since."""
    ear = _StreamHints()
    listening = asyncio.ensure_future(ear.listen(hints))
    try:
        last, pause_s = None, SOON_S  # short pauses at first: the stream may not be open yet
        while True:
            seen = await look(last)
            if seen is not None and (last is None or seen.version > last.version):
                last = seen
                yield seen
                if ended(seen):
                    return
            if last is not None and last.version >= ear.version > 0:
                pause_s = POLL_S
            if await sleep_or_stop(clock, ear.heard, pause_s):
                ear.heard.clear()
                pause_s = SOON_S
            else:
                pause_s = min(POLL_S, 2 * pause_s)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


class _StreamHints:
    """Collects what the stream announced since the last poll."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.version = 0

    async def listen(self, hints: AsyncIterator[LiveEvent]) -> None:
        with contextlib.suppress(GatewayError):  # polling meets the same error, or works
            async for event in hints:
                self.version = max(self.version, event.version or 0)
                self.heard.set()


async def wait_for_last(states: AsyncGenerator[SeenT], clock: Clock, timeout_s: float | None, about: str) -> SeenT:
    """The final state; raises TimeoutError, whose message tells the last known status."""
    seen: list[SeenT] = []

    async def drain() -> None:
        async with contextlib.aclosing(states):
            async for state in states:
                seen[:] = [state]

    try:
        await (drain() if timeout_s is None else within(clock, timeout_s, drain()))
    except TimeoutError:
        stands = f"is {getattr(seen[0], 'status', 'there')}" if seen else "has not been seen"
        raise TimeoutError(f"{about} {stands} after {timeout_s:g} s") from None
    return seen[0]

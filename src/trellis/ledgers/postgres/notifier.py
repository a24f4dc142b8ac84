"""Hints that work may be available or events were appended. A hint may be lost or late; only polling is reliable.

NOTIFY is sent after the commit, on its own connection and at most one at a time: if every writing transaction sent it,
every commit of the server would wait for every other one. A submit carries the hint itself where no other submit of the
database carries one at that moment: a worker is woken one round trip sooner, and no submit waits for another. New work
also appends events, so a hint of work is one of events too. Hints of work are sent at most every `WORK_GAP_S`, hints of
events alone at most every `EVENTS_GAP_S`: a hint costs half as much as a submit, and the claim that follows it finds
all work of that time.

A process that listens holds an advisory lock in shared mode, and one that listens to events a second one, until its
connection ends. While nobody holds the lock, hints are sent less often: of work every `UNHEARD_GAP_S`, so that submits
without a worker do not pay for them, and of events every `UNHEARD_EVENTS_GAP_S`, so that workers without a gateway do
not. A hint is sent all the same: programs of earlier versions listen without the locks, and a listener may begin in the
gap. A login that may not look at the locks sends hints as if somebody listened.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, LiteralString, Self

from trellis.engine.errors import LoginNotAllowed, TrellisError
from trellis.ledgers.postgres.connection import (
    CONNECTION_LOST_ERRORS,
    InsufficientPrivilege,
    PostgresConnection,
    connect,
    listens,
)
from trellis.ledgers.postgres.lanes import LaneOptions, PostgresLane

CHANNEL = "trellis_work"
EVENTS_CHANNEL = "trellis_events"
WORK_GAP_S = 0.002
EVENTS_GAP_S = 0.05
UNHEARD_GAP_S = 0.05
UNHEARD_EVENTS_GAP_S = 0.25
NOTIFIER_CONNECTIONS = 2
"""One to send hints, one to receive them."""

LISTENERS_LOCK: LiteralString = "hashtextextended('trellis.listeners', 0)"
EVENT_LISTENERS_LOCK: LiteralString = "hashtextextended('trellis.event_listeners', 0)"


def _is_held(lock: LiteralString) -> LiteralString:
    """Whether somebody else holds a lock of listeners. A login that takes it for itself only makes hints frequent."""
    return f"case when pg_try_advisory_lock({lock}) then not pg_advisory_unlock({lock}) else true end"


IS_HEARD = _is_held(LISTENERS_LOCK)
_TO_EVENTS: LiteralString = f"pg_notify('{EVENTS_CHANNEL}', '')"
_TO_BOTH: LiteralString = f"pg_notify('{CHANNEL}', ''), {_TO_EVENTS}"
NOTIFY_WORK: LiteralString = f"select {IS_HEARD}, {_TO_BOTH}"
NOTIFY_EVENTS: LiteralString = f"select {_is_held(EVENT_LISTENERS_LOCK)}, {_TO_EVENTS}"
WITHOUT_LOOKING: dict[LiteralString, LiteralString] = {
    NOTIFY_WORK: f"select true, {_TO_BOTH}",
    NOTIFY_EVENTS: f"select true, {_TO_EVENTS}",
}
"""The same hints, sent by a login that may not look whether somebody listens."""
LOCKS: dict[str, tuple[LiteralString, ...]] = {
    CHANNEL: (LISTENERS_LOCK,),
    EVENTS_CHANNEL: (LISTENERS_LOCK, EVENT_LISTENERS_LOCK),
}
"""What a listener to each channel holds."""
CARRIED_HINT: LiteralString = (
    "case when pg_notification_queue_usage() < 0.5"
    " and pg_try_advisory_xact_lock(hashtextextended('trellis.carried_hint', 0))"
    f" then num_nulls(pg_notify('{CHANNEL}', ''), pg_notify('{EVENTS_CHANNEL}', '')) = 0 and {IS_HEARD} end"
)
"""Sends the hint of work with the transaction, and says whether somebody listens. Sends nothing, and is null, if another
transaction carries a hint, because this commit would wait for that one, and if the server's queue fills up, because a
commit fails when it is full."""


class HintSender:
    """Sends hints of one kind: one at a time, and after each none for `gap_s`. Hints in that time are merged into one.

    `send` returns whether anybody listens. If nobody does, the gap is `unheard_gap_s`. A timer ends the gap, not a task that sleeps: a task with a time-out costs the sender as much as the hint itself.
    """

    def __init__(
        self, send: Callable[[], Coroutine[Any, Any, bool]], gap_s: float, unheard_gap_s: float | None = None
    ) -> None:
        self._send = send
        self._gap_s = gap_s
        self._unheard_gap_s = gap_s if unheard_gap_s is None else unheard_gap_s
        self._sending: asyncio.Task[bool] | None = None
        self._gap: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        """Ends the wait of a hint for the transaction that carries one."""
        self._is_held = False
        self._again = False

    def hint(self) -> None:
        """Send a hint now, or when the gap after the last one has ended.

        It waits for a transaction that carries one, but no longer than a gap: that may wait for another transaction.
        """
        if self._may_send():
            self._begin()
            return
        self._again = True
        if self._is_held and self._is_free() and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._gap_s, self._send_beside)

    def hold(self) -> bool:
        """Whether a transaction may carry a hint now. If so, another one waits for `release`, or for a gap."""
        if not self._may_send():
            return False
        self._is_held, self._again = True, False
        return True

    def release(self, *, is_heard: bool | None) -> None:
        """Go on when that transaction has ended: `is_heard` is what `send` returns, None if it carried no hint."""
        self._is_held = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if is_heard is not None and self._is_free():
            self._gap_after(asyncio.get_running_loop(), is_heard=is_heard)
        elif self._again:
            self.hint()

    def _is_free(self) -> bool:
        return self._sending is None and self._gap is None

    def _may_send(self) -> bool:
        return self._is_free() and not self._is_held

    def _begin(self) -> None:
        self._sending = asyncio.create_task(self._send_one())
        self._sending.add_done_callback(self._begin_gap)

    def _send_beside(self) -> None:
        """Send a hint that has waited long enough for the transaction."""
        self._patience = None
        if self._again and self._is_free():
            self._begin()

    async def _send_one(self) -> bool:
        self._again = False  # this hint tells of all that was committed before it
        return await self._send()

    def _begin_gap(self, sending: "asyncio.Task[bool]") -> None:
        """Begin the gap after a hint, also after one whose task was cancelled before it began."""
        self._again = self._again or sending.cancelled()
        self._sending = None
        self._gap_after(sending.get_loop(), is_heard=sending.cancelled() or sending.result())

    def _gap_after(self, loop: asyncio.AbstractEventLoop, *, is_heard: bool) -> None:
        self._gap = loop.call_later(self._gap_s if is_heard else self._unheard_gap_s, self._end_gap)

    def _end_gap(self) -> None:
        self._gap = None
        if self._again:
            self.hint()

    async def close(self) -> None:
        """Send the hints that wait, without a gap."""
        while self._sending is not None or self._gap is not None:
            if self._sending is not None:
                await asyncio.wait([self._sending])
            if self._gap is not None:
                self._gap.cancel()
                self._end_gap()


@dataclass(slots=True)
class CarriedHint:
    """Whether the transaction of a `with` block is to carry the hint of its work, and what came of it."""

    is_wanted: bool
    end: "Callable[[CarriedHint, bool], None]"
    """Called when the block has ended, with whether it ended without an error."""
    is_heard: bool | None = None
    """Whether somebody listens; None if the transaction carried no hint."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.end(self, error is None)


class PostgresNotifier:
    """Sends and receives hints."""

    def __init__(self, url: str, options: LaneOptions, *, on: bool) -> None:
        self._url = url
        self._options = options
        self._on = on
        self._listens = on
        """Whether hints can be received. Through a pooler only polling finds work."""
        self._lane = PostgresLane(url, options)
        self._heard = asyncio.Event()
        self._listener: PostgresConnection | None = None
        self._listens_to: set[str] = set()
        self._locks: set[str] = set()
        """The locks that the listening connection holds, or may not take. Those that are missing are tried for again."""
        self._may_look = True
        """Whether this login may look whether somebody listens."""
        self._connecting = asyncio.Lock()
        self._attempts: dict[str, asyncio.Task[None]] = {}
        """The latest attempt to listen, by channel."""
        self._work_hints = HintSender(partial(self._send, NOTIFY_WORK), WORK_GAP_S, UNHEARD_GAP_S)
        self._event_hints = HintSender(partial(self._send, NOTIFY_EVENTS), EVENTS_GAP_S, UNHEARD_EVENTS_GAP_S)
        self._events = 0
        self._next_event: asyncio.Event | None = None
        """Made by the first that waits for it: a submit nobody waits for makes none."""

    @property
    def events(self) -> int:
        """How many hints of events there were."""
        return self._events

    def notify(self) -> None:
        """Notify waiters for work or events. Calls that follow soon are merged into one more notification."""
        self._heard.set()
        self._hear_events()
        if self._on:
            self._work_hints.hint()

    def work(self) -> CarriedHint:
        """Notify as `notify` does when the block ends without an error, unless its transaction has carried the hint."""
        return CarriedHint(self._on and self._work_hints.hold(), self._end_work)

    def _end_work(self, hint: CarriedHint, is_done: bool) -> None:  # noqa: FBT001 - called for every submit
        if hint.is_wanted:
            self._work_hints.release(is_heard=hint.is_heard)
        if is_done and hint.is_heard is None:
            self.notify()
        elif is_done:
            self._heard.set()
            self._hear_events()

    def notify_events(self) -> None:
        """Notify waiters for events only. Calls that follow soon are merged into one more notification."""
        self._hear_events()
        if self._on:
            self._event_hints.hint()

    async def _send(self, ring: LiteralString) -> bool:
        """Send a hint. Returns false if it is known that nobody listens."""
        with contextlib.suppress(TrellisError):
            try:
                return await self._ring(ring if self._may_look else WITHOUT_LOOKING[ring])
            except LoginNotAllowed:
                self._may_look = False
            return await self._ring(WITHOUT_LOOKING[ring])
        return True

    async def _ring(self, ring: LiteralString) -> bool:
        return await self._lane.call("ring", "", lambda c, _: c.fetchval(ring), window_s=0)

    def skip_next_notify(self) -> None:
        """Discard received hints: the claim that follows will see the work they announced."""
        self._heard.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next hint since `skip_next_notify`, or after the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._listening(CHANNEL, self._heard.set)
                await self._heard.wait()

    async def wait_for_events(self, mark: int, timeout_s: float) -> None:
        """Return when there are more than `mark` hints, or after the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._listening(EVENTS_CHANNEL, self._hear_events)
                if self._events == mark:
                    self._next_event = self._next_event or asyncio.Event()
                    await self._next_event.wait()

    def _hear_events(self) -> None:
        self._events += 1
        if self._next_event is not None:
            self._next_event.set()
            self._next_event = None

    async def _listening(self, channel: str, hear: Callable[[], None]) -> None:
        """Return once the channel is listened to, or cannot be now. A caller's time-out does not stop the attempt.

        A lock that the listener did not get is tried for again.
        """
        if not self._listens:
            return
        attempt = self._attempts.get(channel)
        if attempt is None or attempt.done():
            if self._is_connected() and channel in self._listens_to and self._locks.issuperset(LOCKS[channel]):
                return
            attempt = self._attempts[channel] = asyncio.create_task(self._listen(channel, hear))
        await asyncio.shield(attempt)

    async def _listen(self, channel: str, hear: Callable[[], None]) -> None:
        """Listen to a channel. Earlier hints were missed, so the start counts as a hint."""
        async with self._connecting:
            try:
                if not self._is_connected():
                    self._listens_to.clear()
                    self._locks.clear()
                    self._listener = await connect(
                        self._url,
                        timeout_s=self._options.connect_timeout_s,
                        application_name=self._options.application_name,
                    )
                assert self._listener is not None
                self._listens = self._listens and listens(self._listener)
                if self._listens:
                    for lock in LOCKS[channel]:
                        await self._hold(self._listener, lock)
                    if channel not in self._listens_to:
                        await self._listener.add_listener(channel, lambda *_: hear())
                        self._listens_to.add(channel)
                        hear()
                else:
                    self._hang_up()
            except (TrellisError, *CONNECTION_LOST_ERRORS):
                self._hang_up()

    async def _hold(self, listener: PostgresConnection, lock: LiteralString) -> None:
        """Tell the senders of hints, as long as the connection lasts, that somebody listens.

        A sender that looks has the lock for an instant, and some login may keep it. Senders believe meanwhile that
        somebody listens, and the next wait tries again.
        """
        if lock in self._locks:
            return
        try:
            is_busy = not await listener.fetchval(f"select pg_try_advisory_lock_shared({lock})")
        except InsufficientPrivilege:
            is_busy = False  # this login may not take it: hints stay rarer
        if not is_busy:
            self._locks.add(lock)

    def _is_connected(self) -> bool:
        return self._listener is not None and not self._listener.is_closed()

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.terminate()
            self._listener = None

    async def close(self) -> None:
        """Finish notifications in progress and close the connections. Later waits hear no hints."""
        self._listens = False
        await self._work_hints.close()
        await self._event_hints.close()
        for attempt in self._attempts.values():
            attempt.cancel()
        await asyncio.gather(*self._attempts.values(), return_exceptions=True)
        await self._lane.close()
        self._hang_up()

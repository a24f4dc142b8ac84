"""Reads the feed once for all listeners of this process, and serves each one from its position (RUN-5, RUN-10).

Invariants:
- a listener's only state is its position. Every event up to it was sent and none after it, so the listener can resume
  in any process;
- the ring holds every event between its floor and its head. A listener inside that range is served from memory. Any
  other is served from the ledger, page by page, until it is inside;
- an event of a run is sent once its status.json shows it (D58), or `visibility.HOLD_S` after it happened. A listener
  waits at the first event that is not shown yet; a listener without events of runs never waits. Reading the feed never
  waits for the object store;
- no queue per listener, however slow it is: memory is bounded by the ring and by the number of listeners;
- the hub writes to a listener only while its task waits for events, and leaves to the task whatever may have to wait;
- without listeners nothing is read.
"""

import asyncio
import json
import math
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

from trellis.api.feed import rule_of
from trellis.auth.ownership import owns, submitter_of
from trellis.documents.run_documents import has_ended, proposals_created
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import OptionInvalid, TrellisError
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.metrics import LISTENERS, Sample
from trellis.engine.positions import is_of_sqlite, to_postgres
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, FeedPage
from trellis.engine.service import serve
from trellis.gateway.events import OF_AGENTS, StreamedEvent, StreamView, to_streamed_event
from trellis.gateway.visibility import PublishedVersions, RunDocument, Visibility
from trellis.http_server.deadlines import SharedDeadlines
from trellis.lifecycles import Role
from trellis.lifecycles.run import RUN

PAGE = 500
READ_MAX = 200
"""Events per chunk of a stream. Bounds, with the server's own buffer, what waits to be sent to a slow listener."""
CATCHING_UP_MAX = 8
"""How many listeners may read from the ledger at the same time; the others wait for their turn."""
PAUSE_S = 0.05
"""The shortest time from one read of the feed to the next. All events of that time are sent together, so that busy
writers wake each listener at most 20 times a second."""
PAUSE_S_MIN = 0.005
"""The pause after a pass that took longer than PAUSE_S: a slow ledger is not read without pause."""
WATCH_S = 0.5
SHARED_MAX = 256
POSITION_CHARS_MAX = 100

AgentAndRun = tuple[str | None, str | None]

_DIGIT = re.compile(r"[0-9]")
"""Positions of one feed sort as text and have one form: they differ only in their digits."""


class TooManyListeners(TrellisError):
    """{who} has {count} streams open and {limit} is the limit; close one, or connect again in a while."""

    code = "RATE_LIMITED"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """Limits and timings of live event streams."""

    ring: int = 10_000
    """Minimum number of events kept in memory; the maximum is twice that."""
    listeners_max: int = 5_000
    """Maximum number of streams in this process."""
    listeners_per_principal_max: int = 100
    keep_alive_s: float = 15.0
    send_timeout_s: float = 30.0
    """How long a listener may read nothing before its stream ends, in seconds."""
    retry_ms: tuple[int, int] = (1_000, 3_000)
    """Range of the reconnect delay sent to listeners.

    It is drawn at random, so that they do not reconnect all at once.
    """


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events from one position up to another. `caught_up` means that there were no more, held ones included."""

    body: bytes
    position: str
    caught_up: bool
    looks: int | None = None
    """Set if the batch ends before an event that readers cannot see yet: the hub's count of lookups at that time."""
    held: RunDocument | None = None
    """The document that will show the held event."""
    held_until: float = math.inf
    """When the held event is sent even if readers cannot see it, by the process's clock."""

    @property
    def is_held(self) -> bool:
        """Whether the next event waits for its document."""
        return self.looks is not None


class EventRing:
    """The most recent events. Holds every event between `floor` and `head`, both positions of the feed."""

    def __init__(self, begins: str, size: int) -> None:
        self.floor = self.head = begins
        self._size = size
        self._positions: list[str] = []
        self._told: list[StreamedEvent] = []

    def add(self, events: Sequence[StreamedEvent], position: str) -> None:
        """Append a page of the feed that ends at `position`."""
        self._told += events
        self._positions += [one.position for one in events]
        self.head = position
        if len(self._told) > 2 * self._size:
            cut = len(self._told) - self._size
            self.floor = self._positions[cut - 1]
            del self._told[:cut], self._positions[:cut]

    def holds(self, position: str) -> bool:
        """Whether an event with this position is in the ring."""
        at = bisect_right(self._positions, position)
        return at > 0 and self._positions[at - 1] == position

    def after(self, position: str) -> tuple[Sequence[StreamedEvent], str]:
        """The next events, and the position they reach. `position` must not be below the floor."""
        first = bisect_right(self._positions, position)
        events = self._told[first : first + READ_MAX]
        ends = first + len(events) == len(self._told)
        return events, max(position, self.head) if ends else events[-1].position


class WaitingStream(Protocol):
    """A stream that has sent everything up to `position`, and waits for what follows."""

    @property
    def view(self) -> StreamView:
        """What its listener gets."""
        ...

    @property
    def position(self) -> str:
        """The position of its last batch."""
        ...

    def write(self, batch: EventBatch) -> bool:
        """Write the next batch at once; False if the stream's task has to send it."""
        ...


@dataclass(eq=False, slots=True)
class StreamListener:
    """One open stream."""

    name: str
    wake_at: float = 0.0
    """When to wake it at the latest, by the process's clock."""
    gone: bool = False
    """Whether the client has disconnected."""
    waiting: WaitingStream | None = None
    """Its stream, while that waits for events and the hub may write to it."""
    _woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the task that waits in `woken`."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def woken(self) -> None:
        """Return when `wake` is called."""
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None


@dataclass(kw_only=True)
class EventHub:
    """Reads the feed into the ring, one page per pass, and wakes the listeners. Runs only while there are listeners.

    A hint of new events begins a pass. Without hints the feed is read once a second.
    """

    waits_for_events = True

    ledger: Ledger
    published: PublishedVersions
    clock: Clock
    rng: random.Random
    options: StreamOptions = field(default_factory=StreamOptions)
    name: str = "hub"
    closed: bool = False
    _ring: EventRing | None = None
    _listeners: dict[StreamListener, None] = field(default_factory=dict[StreamListener, None])
    _of_principal: Counter[str] = field(default_factory=Counter[str])
    _stop: asyncio.Event | None = None
    _called: asyncio.Event | None = None
    """Set when a listener starts to wait for a document."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _began: float = 0.0
    """When the last pass began, by the process's clock."""
    _looks: int = 0
    """How many lookups found something for waiting listeners."""
    _agents: LruCache[JobId, AgentAndRun] = field(default_factory=LruCache[JobId, AgentAndRun])
    _submitters: LruCache[JobId, str] = field(default_factory=LruCache[JobId, str])
    _shared: dict[tuple[StreamView, str], EventBatch] = field(default_factory=dict[tuple[StreamView, str], EventBatch])
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CATCHING_UP_MAX))

    @cached_property
    def send_deadlines(self) -> SharedDeadlines:
        """Until when a listener must have read what is sent to it."""
        return SharedDeadlines(self.options.send_timeout_s)

    # --- listeners -------------------------------------------------------------------------------------------------

    @property
    def listeners(self) -> int:
        """How many streams are open."""
        return len(self._listeners)

    @contextmanager
    def joined(self, name: str) -> Generator[StreamListener]:
        """Register a listener for the duration of the context; raises TooManyListeners."""
        self._make_room(name)
        listener = StreamListener(name)
        self._listeners[listener] = None
        self._of_principal[name] += 1
        self._run()
        try:
            yield listener
        finally:
            del self._listeners[listener]
            self._of_principal[name] -= 1
            if not self._of_principal[name]:
                del self._of_principal[name]
            if not self._listeners:
                self._rest()

    def _make_room(self, name: str) -> None:
        limits = self.options
        if self.closed:
            raise TooManyListeners(who="This server stops; it", count=self.listeners, limit=0)
        if self.listeners >= limits.listeners_max:
            raise TooManyListeners(who="This server", count=self.listeners, limit=limits.listeners_max)
        if self._of_principal[name] >= limits.listeners_per_principal_max:
            count = self._of_principal[name]
            raise TooManyListeners(who=name, count=count, limit=limits.listeners_per_principal_max)

    async def begin(self, position: str | None) -> str:
        """The start position of a stream: `position`, or the end of the feed.

        Raises OptionInvalid if `position` is not one of this feed.
        """
        if position is None:
            return await self.ledger.feed_end()
        if self._ring is not None and self._ring.holds(position):
            return position
        end = await self.ledger.feed_end()
        if is_of_sqlite(position) and not is_of_sqlite(end):
            await self.ledger.feed(position, limit=1)  # which refuses it unless this ledger was moved from SQLite
            return to_postgres(position)
        if _DIGIT.sub("0", position[:POSITION_CHARS_MAX]) != _DIGIT.sub("0", end) or position > end:
            raise _invalid_position(position)
        return position

    async def read(self, view: StreamView, position: str) -> EventBatch:
        """The next batch for a listener with this view. Raises LedgerError."""
        ring = self._ring
        if ring is None or position < ring.floor:
            return await self._read_ledger(view, position)
        key = (view, position)
        batch = self._shared.get(key)
        if batch is None or batch.held_until <= self.clock.monotonic():
            events, reached = ring.after(position)
            batch = await self._batch(view, events, EventBatch(b"", reached, reached >= ring.head), position)
            if len(self._shared) < SHARED_MAX:
                self._shared[key] = batch
        return batch

    async def _read_ledger(self, view: StreamView, position: str) -> EventBatch:
        floor = self._ring.floor if self._ring is not None else ""
        async with self._turns:
            page = await self.ledger.feed(position, limit=READ_MAX, lifecycle=view.only)
            events = await self._to_streamed_events(page)
        # Only this listener's events of runs, and outside the semaphore: no other listener waits for the object store.
        documents = [event.document for event in events if event.document is not None and view.shows(event, own=True)]
        if documents and self.published.needs_time:
            self.published.set_time(await self.ledger.now())
        await self.published.look(documents)
        # Everything up to the floor was in the ledger before this read, so an empty page covers it.
        reached = page.position if page.events else max(page.position, floor)
        return await self._batch(view, events, EventBatch(b"", reached, not page.events), position)

    async def _batch(
        self, view: StreamView, events: Sequence[StreamedEvent], whole: EventBatch, position: str
    ) -> EventBatch:
        """The visible part of these events, up to the first one that readers cannot see yet."""
        frames, held, held_at, held_until = list[bytes](), None, None, math.inf
        for event in events:
            if not view.shows(event, own=bool(view.own) and await self._is_own(view, event)):
                continue
            seen = Visibility.SHOWN if event.document is None else self.published.visibility(event.document)
            if seen is Visibility.NOT_YET and held_at is None and event.document is not None:
                held, held_at = event.document, event.position
                held_until = self.published.held_until(held)
                self._call_for_look()
            if seen is Visibility.SHOWN and held_at is None:
                frames.append(event.frame)
        body = b"".join(frames)
        if held_at is None:
            return replace(whole, body=body)
        before = [event.position for event in events if event.position < held_at]
        return EventBatch(
            body, before[-1] if before else position, False, looks=self._looks, held=held, held_until=held_until
        )

    async def _is_own(self, view: StreamView, event: StreamedEvent) -> bool:
        if event.lifecycle not in view.own or view.principal is None:
            return False
        return owns(view.principal, rule_of(event.lifecycle), event.job_id, await self._submitter(event.job_id))

    async def wait(self, listener: StreamListener, stream: WaitingStream, wake_at: float) -> None:
        """Return when its task has something to send, at `wake_at`, or when the stream ends.

        Meanwhile the hub writes to the stream, so that its position moves on.
        """
        if self.closed or listener.gone or (self._ring is not None and self._ring.head > stream.position):
            return
        listener.wake_at, listener.waiting = wake_at, stream
        try:
            await listener.woken()
        finally:
            listener.waiting = None

    async def wait_until_shown(self, listener: StreamListener, batch: EventBatch, wake_at: float) -> None:
        """Return when a document was published since this batch, at `wake_at`, or when the stream or the wait ends."""
        if self.closed or listener.gone or batch.looks != self._looks:
            return
        # Register the document again: the list was cleared if the last other listener left.
        if batch.held is not None and self.published.visibility(batch.held) is not Visibility.NOT_YET:
            return
        self._call_for_look()
        listener.wake_at = min(wake_at, batch.held_until)
        await listener.woken()

    # --- the service -----------------------------------------------------------------------------------------------

    async def run_once(self) -> int:
        """Read one page of the feed, and return its number of events."""
        self._began = self.clock.monotonic()
        if self.published.needs_time:
            self.published.set_time(await self.ledger.now())
        if self._ring is None:
            stop, begins = self._stop, await self.ledger.feed_end()
            if self._stop is stop is not None:
                self._ring = EventRing(begins, self.options.ring)
                self._wake_all()
            return 0
        ring = self._ring
        page = await self.ledger.feed(ring.head, limit=PAGE)
        events = await self._to_streamed_events(page)
        self._shared.clear()
        ring.add(events, page.position)
        if events:
            await self._deliver(ring)
        return len(events)

    async def _deliver(self, ring: EventRing) -> None:
        """Write the new events to the streams that wait for them; wake the tasks of the others.

        Waking a task costs more than writing does, and most streams get the same bytes. Nothing here waits: whose jobs
        belong to a listener may have to be looked up, so listeners that get only their own are woken.
        """
        for listener in tuple(self._listeners):
            stream = listener.waiting
            if stream is None or stream.view.own or stream.position < ring.floor or self._ring is not ring:
                listener.wake()
                continue
            batch = await self.read(stream.view, stream.position)
            if not batch.caught_up or not stream.write(batch):
                listener.wake()

    def pause_s(self, report: int) -> float:
        """No pause after a full page; otherwise what is left of PAUSE_S since this pass began."""
        took_s = self.clock.monotonic() - self._began
        return 0.0 if report >= PAGE else max(PAUSE_S - took_s, PAUSE_S_MIN)

    async def gauges(self) -> list[Sample]:
        """How many listeners there are, for the metrics of this process."""
        return [Sample(LISTENERS, (), len(self._listeners))]

    def watch(self) -> None:
        """Wake the listeners whose `wake_at` has come: to send a keep-alive, or because their token expires."""
        now = self.clock.monotonic()
        for listener in self._listeners:
            if listener.wake_at <= now:
                listener.wake()

    async def look(self) -> None:
        """Look up the documents that listeners wait for, and wake the listeners if one was published."""
        if await self.published.look_again():
            self._looks += 1
            self._shared.clear()
            self._wake_all()

    async def close(self) -> None:
        """End every stream, and return when the background tasks have ended."""
        self.closed = True
        self._wake_all()
        self._rest()
        await asyncio.gather(*self._tasks)

    def _call_for_look(self) -> None:
        if self._called is not None:
            self._called.set()

    def _wake_all(self) -> None:
        for listener in self._listeners:
            listener.wake()

    def _run(self) -> None:
        if self._stop is not None:
            return
        self._stop, self._called = asyncio.Event(), asyncio.Event()
        for service in (self, _ListenerTimer(self), _DocumentLookups(self, self._called)):
            task = asyncio.create_task(serve(service, self.clock, self.rng, self._stop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _rest(self) -> None:
        if self._stop is not None:
            self._stop.set()
        self._call_for_look()  # ends the waiting pass of `_DocumentLookups`
        self.published.forget_awaited()
        self._stop = self._called = self._ring = None
        self._shared.clear()

    # --- from feed pages to streamed events ------------------------------------------------------------------------

    async def _to_streamed_events(self, page: FeedPage) -> list[StreamedEvent]:
        await self._learn([event for event in page.events if event.version == 1])
        return [
            to_streamed_event(
                event, position, *await self._agent_and_run(event), proposals=await self._proposals_of(event)
            )
            for event, position in zip(page.events, page.positions, strict=True)
        ]

    async def _learn(self, first: Sequence[Event]) -> None:
        """Remember submitter, agent and run from the first events of jobs, with one query per page."""
        for event in first:
            if event.role is not Role.RECONCILER:  # its jobs belong to the submitter of the job before
                self._submitters[event.job_id] = event.actor
        unknown = [event for event in first if event.lifecycle in OF_AGENTS and event.job_id not in self._agents]
        for record in await self.ledger.recorded(unknown) if unknown else ():
            if record.submission is not None:
                self._agents[record.event.job_id] = _agent_and_run(record.submission.payload)

    async def _agent_and_run(self, event: Event) -> AgentAndRun:
        if event.lifecycle not in OF_AGENTS:
            return None, None
        if event.job_id not in self._agents:
            job = await self.ledger.job(event.job_id)
            self._agents[event.job_id] = _agent_and_run(None if job is None else job.payload)
        return self._agents[event.job_id]

    async def _proposals_of(self, event: Event) -> list[str] | None:
        """The proposals that a run created, for its last event (PIPE-9); None for every other event."""
        if event.lifecycle != RUN.name or not has_ended(event):
            return None
        return proposals_created(await self.ledger.events(event.job_id))

    async def _submitter(self, job_id: JobId) -> str:
        if job_id not in self._submitters:
            job = await self.ledger.job(job_id)
            self._submitters[job_id] = "" if job is None else await submitter_of(self.ledger, job)
        return self._submitters[job_id]


@dataclass(frozen=True, slots=True)
class _ListenerTimer:
    """Wakes listeners on time, even while the ledger does not answer."""

    hub: EventHub
    name: str = "hub-watch"

    async def run_once(self) -> None:
        self.hub.watch()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        return WATCH_S


@dataclass(frozen=True, slots=True)
class _DocumentLookups:
    """Looks up awaited documents apart from the feed, so that a slow object store delays only events of runs."""

    hub: EventHub
    called: asyncio.Event
    name: str = "hub-looks"

    async def run_once(self) -> None:
        """Wait until a lookup is due or another document is awaited, then look."""
        due_s = self.hub.published.look_in_s()
        if due_s is None:
            await self.called.wait()
        elif due_s > 0:
            await sleep_or_stop(self.hub.clock, self.called, due_s)
        self.called.clear()
        await self.hub.look()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        return 0.0


def _agent_and_run(payload: bytes | None) -> AgentAndRun:
    """The agent of a run or proposal, and the run that made the proposal."""
    fields: Any = None if payload is None else json.loads(payload)
    return _text(fields, "agent_slug"), _text(_value(fields, "source"), "run_id")


def _value(document: Any, name: str) -> Any:
    return cast("dict[str, Any]", document).get(name) if isinstance(document, dict) else None


def _text(document: Any, name: str) -> str | None:
    value = _value(document, name)
    return value if isinstance(value, str) else None


def _invalid_position(text: str) -> OptionInvalid:
    expected = "it must be an `id` that this stream gave; leave it out to begin now"
    return OptionInvalid(option="Last-Event-ID", value=text[:POSITION_CHARS_MAX], expected=expected)

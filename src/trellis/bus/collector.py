"""Garbage collection of stored payloads and results (`bus/ctx/…`, `bus/res/…` in the object store).

Invariants: an object is not removed while any job in the ledger names it, in its request or in any of its events. That
may be the first job, its retry, its compensation, or a later step that uses the result. An object written within
`keep_s` is not removed either: submitters write the payload before the job, and writing the same bytes again renews the
object's age.

A round lists old objects, reads the whole feed of bus jobs for names, and sets unnamed objects aside (`bus-aside/…`).
An object set aside is still found through its pointer. It is moved back when a later round finds its name, and removed
after `aside_s`. So a round may miss a job that is being submitted, or see a ledger that is being rebuilt, without
losing data. Concurrent rounds of two processes are harmless; one process at a time is elected, because reading the feed
is expensive.

Only object names made by `Pointers.put` are considered. Other objects in these folders are left alone.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from trellis.bus.pointers import (
    ASIDE_FOLDER,
    BYTES_MAX,
    DIGEST_CHARS,
    FOLDER,
    PointerPart,
    aside_key_of,
    is_name,
    object_key_of,
)
from trellis.engine.jobs import Actor, Subscription
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.storage.objects.store import CREATE, ObjectStore

SUBSCRIBER_NAME = "bus-collector"
KEEP_S_DEFAULT = 30 * 24 * 3600.0
PAUSE_S_MIN = 0.05
FOLDERS = tuple(
    (f"{folder}/{part}/", folder == ASIDE_FOLDER) for folder in (ASIDE_FOLDER, FOLDER) for part in PointerPart
)
DIGEST_IN_BODY = re.compile(rb"(?=([0-9a-f]{%d}))" % DIGEST_CHARS)
"""Finds object names in a request or an event: the bare digest, however the pointer around it is written or escaped."""
LOOK_BYTES = 16_384
"""Number of bytes searched before other tasks get a turn."""

_log = log_of("trellis.bus.collecting")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectOptions:
    """Retention times, and the work limits of one pass."""

    keep_s: float = KEEP_S_DEFAULT
    """Minimum age of a removable object, in seconds. Younger objects stay, named or not."""
    aside_s: float = 7 * 24 * 3600.0
    """How long an unnamed object stays aside before it is removed, in seconds."""
    interval_s: float = 6 * 3600.0
    """Pause between two rounds, in seconds."""
    objects: int = 1_000
    """Objects listed per pass."""
    events: int = 500
    """Events read per pass."""
    removals: int = 100
    """Objects set aside, moved back or removed per pass."""
    names_max: int = 100_000
    """Names searched for per round, for old objects and for objects set aside each.

    The next round continues after them.
    """


class CollectionPhase(StrEnum):
    LISTING = "listing"
    READING = "reading"
    REMOVING = "removing"


@dataclass(frozen=True, kw_only=True, slots=True)
class BusCollectionReport:
    """Result of one pass. `phase` None means that no round is in progress."""

    phase: CollectionPhase | None = None
    set_aside: int = 0
    brought_back: int = 0
    removed: int = 0


@dataclass(kw_only=True)
class _CollectionRound:
    """State of a round.

    `old` and `laid` shrink as names are found; `wanted` holds objects set aside whose names were found.
    """

    phase: CollectionPhase = CollectionPhase.LISTING
    old: set[str] = field(default_factory=set[str])
    laid: set[str] = field(default_factory=set[str])
    wanted: set[str] = field(default_factory=set[str])
    folders: list[tuple[str, bool]] = field(default_factory=lambda: list(FOLDERS))
    """Folders still to list, and whether each holds objects set aside."""
    after: str | None = None
    """The last key listed in the first of these folders."""
    position: str | None = None
    end: str = ""

    async def find(self, bodies: Iterable[bytes | None]) -> None:
        """Mark the names found in these bodies as used.

        Yields to other tasks, since searching a long body takes time.
        """
        for body in bodies:
            for start in range(0, len(body or b""), LOOK_BYTES):
                self._found(names_in((body or b"")[start : start + LOOK_BYTES + DIGEST_CHARS - 1]))
                await asyncio.sleep(0)

    def _found(self, names: Iterable[str]) -> None:
        for name in names:
            self.old.discard(name)
            if name in self.laid:
                self.laid.discard(name)
                self.wanted.add(name)


@dataclass(kw_only=True)
class BusCollector:
    """The service. A round is split into many short passes, so that a stopping process need not wait for it."""

    ledger: Ledger
    actor: Actor
    objects: ObjectStore
    options: CollectOptions = field(default_factory=CollectOptions)
    name: str = "bus-collector"
    _following: Subscription | None = None
    _round: _CollectionRound | None = None
    _resume: dict[bool, str | None] = field(default_factory=dict[bool, str | None])
    """Where the next round continues, by kind (set aside or not).

    The value is the key to continue after; None where everything was listed.
    """

    async def run_once(self) -> BusCollectionReport:
        """Run part of a round; does nothing while another process collects."""
        if (self._round is None or self._round.phase is CollectionPhase.REMOVING) and not await self._is_ours():
            return BusCollectionReport()
        now = self._round = self._round or _CollectionRound(
            folders=[one for one in FOLDERS if self._resume.get(one[1], "") is not None]
        )
        match now.phase:
            case CollectionPhase.LISTING:
                done = await self._list(now)
            case CollectionPhase.READING:
                done = await self._read(now)
            case CollectionPhase.REMOVING:
                done = await self._remove(now)
        if done.phase is None:
            self._round = None
        return done

    def pause_s(self, report: BusCollectionReport) -> float:
        """A short pause while a round is in progress, else the interval between rounds."""
        return self.options.interval_s if report.phase is None and not self._resume else PAUSE_S_MIN

    async def release(self) -> None:
        """Let another process take over at once; it starts a new round."""
        following, self._following, self._round = self._following, None, None
        if following is not None:
            await self.ledger.unsubscribe(following)

    async def _is_ours(self) -> bool:
        """Whether this process collects.

        It keeps the role over the pause; another process takes over after two silent intervals.
        """
        lease_s = 2 * self.options.interval_s
        if self._following is not None and await self.ledger.ack(self._following, None, lease_s=lease_s):
            return True
        self._round = None
        self._resume.clear()
        self._following = await self.ledger.subscribe(self.actor, SUBSCRIBER_NAME, lease_s=lease_s, reads=False)
        return self._following is not None

    async def _list(self, now: _CollectionRound) -> BusCollectionReport:
        """List a page of objects set aside, or of old objects."""
        (prefix, is_aside), after = now.folders[0], now.after
        behind = self._resume.get(is_aside) or ""
        after = after or (behind if behind > prefix else None)
        page = await self.objects.list(prefix, after=after, limit=self.options.objects)
        before = await self._ago(self.options.keep_s)
        for stored in page.items:
            name = stored.key.partition("/")[2]
            if not is_name(name) or stored.size > BYTES_MAX:
                continue
            if is_aside:
                now.laid.add(name)
            elif stored.modified_at <= before:
                now.old.add(name)
        now.after = page.items[-1].key if page.more else None
        if not page.more:
            now.folders.pop(0)
        self._go_on(now, page.items[-1].key if page.items else prefix, is_aside=is_aside)
        if now.folders:
            return BusCollectionReport(phase=CollectionPhase.LISTING)
        if not any(self._resume.values()):
            self._resume.clear()
        if not now.old and not now.laid:
            return BusCollectionReport()
        now.phase = CollectionPhase.READING
        return BusCollectionReport(phase=now.phase)

    def _go_on(self, now: _CollectionRound, last: str, *, is_aside: bool) -> None:
        """Ends the listing of one kind at its own limit, so that objects set aside cannot crowd out old objects."""
        left = any(kind is is_aside for _, kind in now.folders)
        if left and len(now.laid if is_aside else now.old) < self.options.names_max:
            return
        self._resume[is_aside] = last if left else None
        if left:
            now.folders, now.after = [one for one in now.folders if one[1] is not is_aside], None

    async def _read(self, now: _CollectionRound) -> BusCollectionReport:
        """Read a page of the feed and search it for names."""
        now.end = now.end or await self.ledger.feed_end()
        page = await self.ledger.feed(now.position, limit=self.options.events, lifecycle=BUS_JOB.name)
        await now.find(event.data for event in page.events)
        first = [event for event in page.events if event.source is None]
        if first:
            submissions = [one.submission for one in await self.ledger.recorded(first)]
            await now.find(one.payload for one in submissions if one is not None)
        now.position = page.position
        if page.position >= now.end or not page.events:
            now.phase = CollectionPhase.REMOVING
        return BusCollectionReport(phase=now.phase)

    async def _remove(self, now: _CollectionRound) -> BusCollectionReport:
        """Move or remove a batch of objects."""
        set_aside = brought_back = removed = 0
        written, laid = await self._ago(self.options.keep_s), await self._ago(self.options.aside_s)
        for _ in range(self.options.removals):
            if now.wanted:
                brought_back += await self._bring_back(now.wanted.pop())
            elif now.old:
                set_aside += await self._set_aside(now.old.pop(), written)
            elif now.laid:
                removed += await self._forget(now.laid.pop(), laid)
        left = bool(now.wanted or now.old or now.laid)
        done = BusCollectionReport(
            phase=CollectionPhase.REMOVING if left else None,
            set_aside=set_aside,
            brought_back=brought_back,
            removed=removed,
        )
        if set_aside or brought_back or removed:
            _log.info("collected", set_aside=set_aside, brought_back=brought_back, removed=removed)
        return done

    async def _set_aside(self, name: str, before: datetime) -> bool:
        """Move an object aside; its pointer still resolves. The copy is written before the original is deleted."""
        known = await self.objects.head(object_key_of(name))
        if known is None or known.modified_at > before:
            return False
        kept = await self.objects.get(object_key_of(name))
        if kept is None:
            return False
        await self.objects.put(aside_key_of(name), kept.body)
        gone = await self.objects.delete(object_key_of(name))
        await self._unless_kept(aside_key_of(name), name, kept.body)
        return gone

    async def _bring_back(self, name: str) -> bool:
        kept = await self.objects.get(aside_key_of(name))
        if kept is None:
            return False
        await self.objects.put(object_key_of(name), kept.body, when=CREATE)
        gone = await self.objects.delete(aside_key_of(name))
        await self._unless_kept(object_key_of(name), name, kept.body)
        return gone

    async def _unless_kept(self, place: str, name: str, body: bytes) -> None:
        """Write the object again if it is gone from `place` too.

        Then another process moved it the other way, and this one deleted last.
        """
        if await self.objects.head(place) is None:
            await self.objects.put(object_key_of(name), body, when=CREATE)

    async def _forget(self, name: str, before: datetime) -> bool:
        known = await self.objects.head(aside_key_of(name))
        if known is None or known.modified_at > before:
            return False
        return await self.objects.delete(aside_key_of(name))

    async def _ago(self, ago_s: float) -> datetime:
        return await self.ledger.now() - timedelta(seconds=ago_s)


def names_in(body: bytes) -> Iterator[str]:
    """Every object name that may occur in the bytes."""
    for match in DIGEST_IN_BODY.finditer(body):
        yield from (f"{part}/{match[1].decode()}" for part in PointerPart)

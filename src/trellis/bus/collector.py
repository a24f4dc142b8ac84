"""Collects what is kept behind pointers of jobs that nobody remembers any more (`bus/ctx/…`, `bus/res/…` in the object store).

What holds: nothing is removed that a job in the ledger names, in its request or in any of its events, whoever named it first: a job, its
retry, its compensation, a step that goes on with what another one made. And nothing that was written within `keep_s`: who submits writes
first, and writing the same bytes again makes them young.

A round looks at what is old, reads the whole feed of jobs on topics for names, and sets aside what was not named (`bus-aside_key_of/…`). What
lies aside is still found by everybody who follows its pointer, comes back when a later round sees it named, and is removed after `aside_s`.
So a round may be wrong about a job that was on its way, or about a ledger that is just being rebuilt, and nothing is lost by it. Rounds of
two processes do each other no harm; one at a time is elected, because reading the feed is work.

Only names that `Pointers.put` gives are looked at. What others keep in these folders under names of their own is theirs.
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
"""What is called a name in a request or an event: the digest alone, however the pointer around it is written or escaped."""
LOOK_BYTES = 16_384
"""Looked through at once."""

_log = log_of("trellis.bus.collecting")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectOptions:
    """How long things are kept, and how much one pass takes on."""

    keep_s: float = KEEP_S_DEFAULT
    """What was written within so long stays, named or not."""
    aside_s: float = 7 * 24 * 3600.0
    """How long what nobody names lies aside before it is gone."""
    interval_s: float = 6 * 3600.0
    """Between two rounds."""
    objects: int = 1_000
    """Listed in one pass."""
    events: int = 500
    """Read in one pass."""
    removals: int = 100
    """Set aside, brought back or removed in one pass."""
    names_max: int = 100_000
    """Looked for in one round, of what is old and of what lies aside; the next one goes on behind them."""


class CollectionPhase(StrEnum):
    """What a round is at."""

    LISTING = "listing"
    READING = "reading"
    REMOVING = "removing"


@dataclass(frozen=True, kw_only=True, slots=True)
class BusCollectionReport:
    """What one pass did. `phase` None: no round is under way now."""

    phase: CollectionPhase | None = None
    set_aside: int = 0
    brought_back: int = 0
    removed: int = 0


@dataclass(kw_only=True)
class _CollectionRound:
    """What is known so far. `old` and `laid` shrink as names are found; `wanted` is what lies aside and is named."""

    phase: CollectionPhase = CollectionPhase.LISTING
    old: set[str] = field(default_factory=set[str])
    laid: set[str] = field(default_factory=set[str])
    wanted: set[str] = field(default_factory=set[str])
    folders: list[tuple[str, bool]] = field(default_factory=lambda: list(FOLDERS))
    """Still to be listed, and whether what is there lies aside."""
    after: str | None = None
    """The last key that was listed in the first of them."""
    position: str | None = None
    end: str = ""

    async def find(self, bodies: Iterable[bytes | None]) -> None:
        """Somebody needs what these name. A long text is much work: others have their turn in between."""
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
    """The service. A round is many short passes, so that a process that stops does not wait for it."""

    ledger: Ledger
    actor: Actor
    objects: ObjectStore
    options: CollectOptions = field(default_factory=CollectOptions)
    name: str = "bus-collector"
    _following: Subscription | None = None
    _round: _CollectionRound | None = None
    _resume: dict[bool, str | None] = field(default_factory=dict[bool, str | None])
    """Of what lies aside and of what does not, while more rounds have to follow: behind which key they go on; None where all was seen."""

    async def run_once(self) -> BusCollectionReport:
        """A part of a round; nothing while another process is at it."""
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
        """Short while the round is not finished."""
        return self.options.interval_s if report.phase is None and not self._resume else PAUSE_S_MIN

    async def release(self) -> None:
        """Let another process go on at once; it begins anew."""
        following, self._following, self._round = self._following, None, None
        if following is not None:
            await self.ledger.unsubscribe(following)

    async def _is_ours(self) -> bool:
        """Whether this process collects, over the pause too: another one takes over when it has been silent for two."""
        lease_s = 2 * self.options.interval_s
        if self._following is not None and await self.ledger.ack(self._following, None, lease_s=lease_s):
            return True
        self._round = None
        self._resume.clear()
        self._following = await self.ledger.subscribe(self.actor, SUBSCRIBER_NAME, lease_s=lease_s, reads=False)
        return self._following is not None

    async def _list(self, now: _CollectionRound) -> BusCollectionReport:
        """A page of what lies aside, or of what is old."""
        (prefix, is_aside), after = now.folders[0], now.after
        behind = self._resume.get(is_aside) or ""
        after = after or (behind if behind > prefix else None)
        page = await self.objects.list(prefix, after=after, limit=self.options.objects)
        before = await self._ago(self.options.keep_s)
        for one in page.items:
            name = one.key.partition("/")[2]
            if not is_name(name) or one.size > BYTES_MAX:
                continue
            if is_aside:
                now.laid.add(name)
            elif one.modified_at <= before:
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
        """Each kind has a bound of its own, or what lies aside would keep what is old from being seen."""
        left = any(kind is is_aside for _, kind in now.folders)
        if left and len(now.laid if is_aside else now.old) < self.options.names_max:
            return
        self._resume[is_aside] = last if left else None
        if left:
            now.folders, now.after = [one for one in now.folders if one[1] is not is_aside], None

    async def _read(self, now: _CollectionRound) -> BusCollectionReport:
        """A page of what jobs name."""
        now.end = now.end or await self.ledger.feed_end()
        page = await self.ledger.feed(now.position, limit=self.options.events, lifecycle=BUS_JOB.name)
        await now.find(event.data for event in page.events)
        first = [event for event in page.events if event.source is None]
        if first:
            asked = [one.submission for one in await self.ledger.recorded(first)]
            await now.find(one.payload for one in asked if one is not None)
        now.position = page.position
        if page.position >= now.end or not page.events:
            now.phase = CollectionPhase.REMOVING
        return BusCollectionReport(phase=now.phase)

    async def _remove(self, now: _CollectionRound) -> BusCollectionReport:
        """Some of what nobody named."""
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
        """Still found by its pointer; written there before it is gone here."""
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
        """Write it once more when it is gone there too: another process moved it the other way, and this one was the last to delete."""
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
    """Every name that may be meant in this, wherever it stands."""
    for found in DIGEST_IN_BODY.finditer(body):
        yield from (f"{part}/{found[1].decode()}" for part in PointerPart)

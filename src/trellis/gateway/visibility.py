"""Which events of runs readers can already see (D58).

Readers get a run's status from its published status.json, so its events wait for that document. An event of a run is
announced once status.json shows its version or a later one. If the projector has set a run aside, because the object
store holds something else in its place, the event is never announced: no reader could read it. No event waits longer
than `HOLD_S`. A lost document or an unavailable store delays a stream but never stops it; the log reports it once per
run.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from operator import attrgetter

from trellis.documents import ids
from trellis.documents.publisher import published_version
from trellis.engine.clock import Clock, within
from trellis.engine.jobs import JobId
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.storage.objects.store import ObjectStore, StoreError

HOLD_S = 30.0
"""How long after it happened an event waits for its document, in seconds. Then it is announced without it."""
AWAITED_MAX = 1_000
"""Limit on awaited documents.

An event whose document exceeds the limit waits for a free place, or until `HOLD_S` is over.
"""
LOOK_S_FIRST = 0.05
LOOK_S_MAX = 5.0
"""Bounds of the pause between lookups of one document, in seconds. The pause doubles each time."""
LOOK_BATCH_MAX = 64
LOOK_WITHIN_S = 5.0
"""Timeout of one round of lookups, in seconds. Documents not read by then are looked up again."""
LOOKS_AT_ONCE = 16
TIME_KEPT_S = 600.0
"""How long the offset between the clocks of process and ledger is used before it is measured again, in seconds."""

_log = log_of("trellis.gateway")


class Visibility(Enum):
    """What readers can see of an event."""

    SHOWN = "shown"
    NOT_YET = "not yet"
    NEVER = "never"
    """The run is set aside; `trellis doctor` reports it."""


@dataclass(frozen=True, slots=True)
class RunDocument:
    """The published document that shows an event of a run, the version that shows it, and the time of the event."""

    job_id: JobId
    key: str
    version: int
    at: datetime


@dataclass(frozen=True, slots=True)
class _AwaitedDocument:
    """The earliest version of a document that a listener waits for, and when to look it up, by this process's clock."""

    document: RunDocument
    look_at: float
    pause_s: float = LOOK_S_FIRST


@dataclass(kw_only=True)
class PublishedVersions:
    """Caches which version of each status.json is published, and tracks which ones listeners wait for."""

    objects: ObjectStore
    clock: Clock
    _known: LruCache[str, int] = field(default_factory=LruCache[str, int])
    _aside: LruCache[str, None] = field(default_factory=LruCache[str, None])
    _overdue: LruCache[JobId, None] = field(default_factory=LruCache[JobId, None])
    _awaited: dict[str, _AwaitedDocument] = field(default_factory=dict[str, _AwaitedDocument])
    _time: tuple[float, float] | None = None
    """The ledger's time (seconds since 1970) and this process's monotonic time, at the same moment."""

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def needs_time(self) -> bool:
        """Whether the ledger should be queried for its time."""
        return self._time is None or self.clock.monotonic() - self._time[1] >= TIME_KEPT_S

    def set_time(self, now: datetime) -> None:
        """Set the ledger's present time."""
        self._time = (now.timestamp(), self.clock.monotonic())

    def held_until(self, document: RunDocument) -> float:
        """The latest time at which the document's event is announced, by this process's clock."""
        now = self.clock.monotonic()
        ledger, here = self._time or (document.at.timestamp(), now)
        return document.at.timestamp() - ledger + here + HOLD_S

    # --- known versions ----------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> int:
        """How many documents listeners wait for."""
        return len(self._awaited)

    def visibility(self, document: RunDocument) -> Visibility:
        """What is known now. A document that is not shown yet is looked up from then on."""
        if self._shows(document):
            return Visibility.SHOWN
        if document.key in self._aside:
            return Visibility.NEVER
        if self.held_until(document) <= self.clock.monotonic():
            self._log_overdue(document)
            return Visibility.SHOWN
        self._await(document)
        return Visibility.NOT_YET

    def forget_awaited(self) -> None:
        """Stop looking up documents, because there are no listeners."""
        self._awaited.clear()

    def look_in_s(self) -> float | None:
        """Seconds until the next lookup; None if no document is awaited."""
        first = min((one.look_at for one in self._awaited.values()), default=None)
        return None if first is None else max(0.0, first - self.clock.monotonic())

    def _shows(self, document: RunDocument) -> bool:
        return (self._known.get(document.key) or 0) >= document.version

    def _await(self, document: RunDocument) -> None:
        waiting = self._awaited.get(document.key)
        if waiting is not None and document.version < waiting.document.version:
            self._awaited[document.key] = replace(waiting, document=document)
        elif waiting is None and len(self._awaited) < AWAITED_MAX:
            self._awaited[document.key] = _AwaitedDocument(document, self.clock.monotonic())

    def _log_overdue(self, document: RunDocument) -> None:
        if document.job_id not in self._overdue:
            self._overdue[document.job_id] = None
            _log.warning(
                "announced_unpublished",
                run_id=document.job_id,
                key=document.key,
                version=document.version,
                waited_s=HOLD_S,
                remedy="trellis doctor",
            )

    # --- lookups -----------------------------------------------------------------------------------------------------

    async def look(self, documents: Iterable[RunDocument]) -> None:
        """Look up those of the documents that are not known to be shown, for at most `LOOK_WITHIN_S`."""
        wanted: dict[str, RunDocument] = {}
        for one in documents:
            if not self._shows(one) and (one.key not in wanted or one.version > wanted[one.key].version):
                wanted[one.key] = one
        if not wanted:
            return
        room = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def look_at(document: RunDocument) -> None:
            async with room:
                await self._look(document)

        async def look_at_all() -> None:
            await asyncio.gather(*map(look_at, wanted.values()))

        try:
            await within(self.clock, LOOK_WITHIN_S, look_at_all())
        except TimeoutError:
            _log.info("documents_not_read", documents=len(wanted), within_s=LOOK_WITHIN_S)

    async def look_again(self) -> bool:
        """Look up the awaited documents that are due; returns whether the wait for any of them has ended."""
        now = self.clock.monotonic()
        due = [one for one in self._awaited.values() if one.look_at <= now]
        due = sorted(due, key=attrgetter("look_at"))[:LOOK_BATCH_MAX]
        await self.look([one.document for one in due])
        is_freed = False
        for key in [one.document.key for one in due if one.document.key in self._awaited]:
            waiting, now = self._awaited[key], self.clock.monotonic()
            if self._is_over(waiting.document):
                del self._awaited[key]
                is_freed = True
            else:
                pause = min(2 * waiting.pause_s, LOOK_S_MAX)
                self._awaited[key] = replace(waiting, look_at=now + waiting.pause_s, pause_s=pause)
        return is_freed

    def _is_over(self, document: RunDocument) -> bool:
        """Whether the wait for this document has ended."""
        is_late = self.held_until(document) <= self.clock.monotonic()
        return is_late or document.key in self._aside or self._shows(document)

    async def _look(self, document: RunDocument) -> None:
        """Read the published version.

        An unavailable store or a foreign object counts as not shown, and is tried again.
        """
        try:
            stored = await self.objects.get(document.key)
            shown = 0 if stored is None else published_version(stored.body)
        except (StoreError, ValueError, KeyError, TypeError):
            shown = 0
        if shown:
            self._known[document.key] = shown
        if shown >= document.version:
            self._aside.drop(document.key)
        elif await self._is_set_aside(document.job_id):
            self._aside[document.key] = None

    async def _is_set_aside(self, job_id: JobId) -> bool:
        try:
            return await self.objects.head(ids.alert_key(job_id)) is not None
        except StoreError:
            return False

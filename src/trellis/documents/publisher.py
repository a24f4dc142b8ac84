"""Published documents: writing, reading and waiting for them. No document goes back to an older version."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trellis.documents import ids
from trellis.documents.errors import DocumentDiffers
from trellis.documents.run_documents import Publication
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.recent_entries import LruCache
from trellis.storage.objects.store import (
    CREATE,
    ObjectPut,
    ObjectStore,
    PutAnswer,
    PutCondition,
    PutStored,
    StoreError,
    StoreUnavailable,
    if_match,
)

# Writing: readers never see a document go back to an older version (RUN-3, D14).
#
# A document without a version is written create-only. A document with a version is replaced only by a higher version,
# with compare-and-set. So the same facts may be published any number of times, by any number of writers.

CONFLICTS_MAX = 20
CACHE_MAX = 10_000
FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class _PublishedVersion:
    etag: str
    version: int


@dataclass(frozen=True, slots=True)
class _PlannedPut(ObjectPut):
    """A put that publishes a document of a sequence."""

    version: int | None
    place: int
    """The document's index in what is left of the sequence."""


@dataclass(slots=True)
class SequenceResult:
    """How far a sequence of documents was published."""

    left: Sequence[Publication]
    """The documents that are not published."""
    written: int = 0
    """How many documents were new."""
    absent: str | None = None
    """The key of the next document, if the store was found to have nothing there: then it is created."""
    differs: bool = False
    """Whether the store has something else where the next document belongs."""
    error: StoreError | None = None
    """Why the store could not answer; None if it did."""
    tries: int = 0
    """How often the next document was tried in vain."""

    @property
    def goes_on(self) -> bool:
        """Whether the next document can be tried."""
        return bool(self.left) and not self.differs and self.error is None and self.tries < CONFLICTS_MAX


class DocumentPublisher:
    """Publishes into one object store. Remembers etags, so that the next version of a document costs one request.

    `on_write` is called with the key of every object written.
    """

    def __init__(self, objects: ObjectStore, on_write: Callable[[str], None] | None = None) -> None:
        self.objects = objects
        self._on_write = on_write
        self._seen: dict[str, _PublishedVersion] = {}
        self._listening: dict[str, list[asyncio.Event]] = {}

    def shown(self, key: str) -> int | None:
        """The version of a document that this publisher wrote last.

        None if it wrote none, or has dropped the document from its cache.
        """
        seen = self._seen.get(key)
        return None if seen is None else seen.version

    @contextlib.contextmanager
    def news_of(self, key: str) -> Generator[asyncio.Event]:
        """An event that is set whenever this publisher writes the document. Writes by other processes do not set it."""
        news = asyncio.Event()
        self._listening.setdefault(key, []).append(news)
        try:
            yield news
        finally:
            self._listening[key].remove(news)
            if not self._listening[key]:
                del self._listening[key]

    async def publish(self, publications: Sequence[Publication]) -> int:
        """Write the documents in this order. Returns how many were new. Raises StoreError, DocumentDiffers."""
        (result,) = await self.publish_all([publications])
        if result.error is not None:
            raise result.error
        if result.left:
            raise DocumentDiffers(key=result.left[0].key)
        return result.written

    async def publish_all(self, sequences: Sequence[Sequence[Publication]]) -> list["SequenceResult"]:
        """Write sequences of documents, each in its order, with few calls of the store for all of them.

        A sequence ends where the store has something else under a key. Raises no StoreError.
        """
        results = [SequenceResult(sequence) for sequence in sequences]
        while unfinished := [result for result in results if result.goes_on]:
            before = [len(result.left) for result in unfinished]
            planned = [self._plan(result) for result in unfinished]
            answers = await self.objects.put_many(planned)
            for result, puts, given in zip(unfinished, planned, answers, strict=True):
                self._take(result, puts, given)
            await asyncio.gather(*(self._look_at_next(result) for result in unfinished if result.goes_on))
            for result, count in zip(unfinished, before, strict=True):
                result.tries = result.tries + 1 if len(result.left) == count else 0
        return results

    def _plan(self, result: "SequenceResult") -> list["_PlannedPut"]:
        """The puts that publish what is left, up to the first document that must be read before."""
        puts, planned = list[_PlannedPut](), dict[str, int]()
        for place, one in enumerate(result.left):
            seen = self._seen.get(one.key)
            known = planned.get(one.key) or (None if seen is None else seen.version)
            if one.version is not None and known is not None and known >= one.version:
                continue
            when: PutCondition | None = CREATE
            if one.version is not None and known is not None:
                when = if_match(seen.etag) if seen is not None and one.key not in planned else None
            elif one.first_version > FIRST_VERSION and one.key != result.absent:
                break
            puts.append(_PlannedPut(one.key, one.body, when, one.version, place))
            if one.version is not None:
                planned[one.key] = one.version
        return puts

    def _take(self, result: "SequenceResult", puts: Sequence["_PlannedPut"], answers: Sequence[PutAnswer]) -> None:
        """Note what the store answered."""
        left = result.left
        for put, answer in zip(puts, answers, strict=False):
            if isinstance(answer, PutStored):
                result.written += 1
                self._wrote(put.key)
                if put.version is not None:
                    self._remember(put.key, _PublishedVersion(answer.etag, put.version))
                result.left = left[put.place + 1 :]
                continue
            if isinstance(answer, StoreError):
                result.error = answer
            else:
                self._seen.pop(put.key, None)
                result.left = left[put.place :]
            return
        while result.left and (version := result.left[0].version) is not None:
            if (self.shown(result.left[0].key) or 0) < version:
                break
            result.left = result.left[1:]

    async def _look_at_next(self, result: "SequenceResult") -> None:
        """Read what the store has in place of the next document. If it is no conflict, the sequence goes on."""
        one = result.left[0]
        try:
            if one.version is None:
                there = await self.objects.get(one.key)
                result.differs = there is not None and there.body != one.body
                if there is not None and not result.differs:
                    result.left = result.left[1:]
            else:
                seen = await self._look(one.key)
                if seen is not None:
                    self._remember(one.key, seen)
                else:
                    result.absent = one.key
        except StoreError as error:
            result.error = error
        except DocumentDiffers:
            result.differs = True

    async def create(self, key: str, body: bytes) -> bytes:
        """Write the object if it does not exist.

        Returns what is stored now: these bytes, or those of an earlier writer.
        """
        if isinstance(await self.objects.put(key, body, when=CREATE), PutStored):
            self._wrote(key)
            return body
        there = await self.objects.get(key)
        if there is None:
            raise DocumentDiffers(key=key)
        return there.body

    async def _look(self, key: str) -> _PublishedVersion | None:
        there = await self.objects.get(key)
        if there is None:
            return None
        try:
            return _PublishedVersion(there.etag, published_version(there.body))
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentDiffers(key=key) from error

    def _wrote(self, key: str) -> None:
        if self._on_write is not None:
            self._on_write(key)

    def _remember(self, key: str, seen: _PublishedVersion) -> None:
        if len(self._seen) >= CACHE_MAX:
            self._seen.clear()
        self._seen[key] = seen
        for news in self._listening.get(key, ()):
            news.set()


def published_version(body: bytes) -> int:
    return int(json.loads(body)["version"])


# Reading published documents, and waiting for them.
#
# The object store is authoritative. A publisher in the same process reports its own writes sooner, which is safe
# because an acknowledged put is visible to every reader. Writes by other processes are found by polling the store.

WAIT_S_FIRST = 0.01
WAIT_S_MAX = 0.25
WAIT_S_USUAL_MAX = 0.5
"""A longer wait is an outage, and says nothing about the next one."""
WAIT_S_HEARING = 1.0
"""Polling interval for a run that this process publishes: another process may have taken over."""


POLLED_MAX = 2_048
"""How many runs that were polled lately are kept with their status."""


class PublishedStatus(NamedTuple):
    """status.json of a run: the object's etag, the run's version and status, and the whole document as JSON."""

    etag: str
    version: int
    status: str
    body: bytes


class PublishedRuns:
    """The documents of runs, as readers see them."""

    def __init__(self, objects: ObjectStore, clock: Clock, publisher: DocumentPublisher | None = None) -> None:
        self._objects = objects
        self._clock = clock
        self._publisher = publisher or DocumentPublisher(objects)
        self._polled = LruCache[str, PublishedStatus](POLLED_MAX)
        self._usual_s = WAIT_S_FIRST
        """How long another process took lately to publish what was waited for."""

    async def status(self, slug: str, run_id: str) -> dict[str, Any] | None:
        """The run's status.json; None if it does not exist yet."""
        stored = await self._objects.get(ids.status_key(slug, run_id))
        return None if stored is None else json.loads(stored.body)

    async def polled_status(self, slug: str, run_id: str) -> "PublishedStatus | None":
        """The run's status.json for whoever polls it; None if it does not exist yet. It is parsed once per version."""
        stored = await self._objects.get(ids.status_key(slug, run_id))
        if stored is None:
            return None
        known = self._polled.get(stored.key)
        if known is None or known.etag != stored.etag:
            document = json.loads(stored.body)
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
            known = PublishedStatus(stored.etag, document["version"], document["status"], body)
            self._polled[stored.key] = known
        return known

    async def reached(self, slug: str, run_id: str, version: int) -> None:
        """Return when status.json has this version or a later one. Has no time limit of its own."""
        key, began, pauses = ids.status_key(slug, run_id), self._clock.monotonic(), 0
        notified, pause_s = True, 0.0
        with self._publisher.news_of(key) as news:
            while True:
                news.clear()
                known = self._publisher.shown(key)
                if known is not None and known >= version:
                    return
                if (known is None or not notified) and await self._shows(key, version):
                    if known is None and pauses:
                        self._learn(self._clock.monotonic() - began, pauses)
                    return
                pause_s = self._next_pause_s(pause_s, pauses)
                notified = await sleep_or_stop(self._clock, news, pause_s if known is None else WAIT_S_HEARING)
                pauses += 1

    def _next_pause_s(self, last_s: float, pauses: int) -> float:
        """How long to wait until the store is read again: first for most of the usual time, then a little, then longer.

        So a publication by another process costs two or three reads, whether it takes 10 ms or, under load, 300 ms.
        """
        if pauses == 0:
            pause_s = self._usual_s * 0.75
        elif pauses == 1:
            pause_s = self._usual_s / 4
        else:
            pause_s = last_s * 2
        return min(max(pause_s, WAIT_S_FIRST), WAIT_S_MAX)

    def _learn(self, waited_s: float, pauses: int) -> None:
        """Note how long a publication took. One that was there at the first read after a pause may have been faster."""
        if pauses == 1:
            self._usual_s = max(WAIT_S_FIRST, self._usual_s * 0.8)
        elif waited_s <= WAIT_S_USUAL_MAX:
            self._usual_s += (waited_s - self._usual_s) / 4

    async def _shows(self, key: str, version: int) -> bool:
        try:
            stored = await self._objects.get(key)
        except StoreUnavailable:
            return False
        return stored is not None and published_version(stored.body) >= version

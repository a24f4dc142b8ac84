"""Published documents: writing them so that none goes back, reading them, and waiting for them."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.documents import ids
from trellis.documents.errors import DocumentDiffers
from trellis.documents.run_documents import Publication
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, StoreUnavailable, if_match

# Puts documents into the object store so that readers never see one go back (RUN-3, D14).
#
# A document that is made once is put create-only. One with a version is replaced only by a higher version, by compare-and-set
# on what is there. So it does not matter how often, or by how many writers, the same facts are published.

CONFLICTS_MAX = 20
CACHE_MAX = 10_000
FIRST_VERSION = 1


@dataclass(frozen=True, slots=True)
class _PublishedVersion:
    etag: str
    version: int


class DocumentPublisher:
    """Publishes into one store; remembers what it put last, so that a rising document costs one request.

    `on_write` is told the key of every object that was put.
    """

    def __init__(self, objects: ObjectStore, on_write: Callable[[str], None] | None = None) -> None:
        self._objects = objects
        self._on_write = on_write
        self._seen: dict[str, _PublishedVersion] = {}
        self._listening: dict[str, list[asyncio.Event]] = {}

    @property
    def objects(self) -> ObjectStore:
        """Where it publishes."""
        return self._objects

    def shown(self, key: str) -> int | None:
        """The version under which this publisher knows a document to be in the store; None when it knows nothing of it."""
        seen = self._seen.get(key)
        return None if seen is None else seen.version

    @contextlib.contextmanager
    def news_of(self, key: str) -> Generator[asyncio.Event]:
        """Set whenever this publisher has put the document. What another process puts is not heard here."""
        news = asyncio.Event()
        self._listening.setdefault(key, []).append(news)
        try:
            yield news
        finally:
            self._listening[key].remove(news)
            if not self._listening[key]:
                del self._listening[key]

    async def publish(self, publications: Sequence[Publication]) -> int:
        """Put them in this order; how many were not there yet. Raises StoreUnavailable, DocumentDiffers."""
        written = 0
        for publication in publications:
            if publication.version is None:
                written += await self._once(publication)
            else:
                written += await self._rising(publication, publication.version)
        return written

    async def create(self, key: str, body: bytes) -> bytes:
        """Put it where nothing is; what is there now: these bytes, or those of whoever came first."""
        if isinstance(await self._objects.put(key, body, when=CREATE), PutStored):
            self._wrote(key)
            return body
        there = await self._objects.get(key)
        if there is None:
            raise DocumentDiffers(key=key)
        return there.body

    async def _once(self, publication: Publication) -> bool:
        there = await self.create(publication.key, publication.body)
        if there != publication.body:
            raise DocumentDiffers(key=publication.key)
        return there is publication.body

    async def _rising(self, publication: Publication, version: int) -> bool:
        for tried in range(CONFLICTS_MAX):
            seen = self._seen.get(publication.key)
            expected = tried or version > FIRST_VERSION  # before its first version there is nothing to look at
            if seen is None and expected:
                seen = await self._look(publication.key)
            if seen is not None and seen.version >= version:
                return False
            when = CREATE if seen is None else if_match(seen.etag)
            answer = await self._objects.put(publication.key, publication.body, when=when)
            if isinstance(answer, PutStored):
                self._wrote(publication.key)
                self._remember(publication.key, _PublishedVersion(answer.etag, version))
                return True
            self._seen.pop(publication.key, None)
        raise DocumentDiffers(key=publication.key)

    async def _look(self, key: str) -> _PublishedVersion | None:
        there = await self._objects.get(key)
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
    """The version a published document carries."""
    return int(json.loads(body)["version"])


# Reading what was published, and waiting for it.
#
# What the object store shows is the truth. A publisher of this process can say sooner that it has put something there, and is believed,
# because a put that was answered is what every reader sees; what another process publishes is found by asking the store.

WAIT_S_FIRST = 0.01
WAIT_S_MAX = 0.25
WAIT_S_HEARING = 1.0
"""Between questions about a run that is published by this very process, and so is heard of: another may have taken over."""


class PublishedRuns:
    """The documents of runs, as readers see them."""

    def __init__(self, objects: ObjectStore, clock: Clock, publisher: DocumentPublisher | None = None) -> None:
        self._objects = objects
        self._clock = clock
        self._publisher = publisher or DocumentPublisher(objects)

    async def status(self, slug: str, run_id: str) -> dict[str, Any] | None:
        """The run's status.json, or None before there is one."""
        found = await self._objects.get(ids.status_key(slug, run_id))
        return None if found is None else json.loads(found.body)

    async def reached(self, slug: str, run_id: str, version: int) -> None:
        """Come back when status.json has this version or a later one. The caller bounds the time."""
        key, pause_s, heard = ids.status_key(slug, run_id), WAIT_S_FIRST, True
        with self._publisher.news_of(key) as news:
            while True:
                news.clear()
                known = self._publisher.shown(key)
                if known is not None and known >= version:
                    return
                if (known is None or not heard) and await self._shows(key, version):
                    return
                heard = await sleep_or_stop(self._clock, news, pause_s if known is None else WAIT_S_HEARING)
                pause_s = min(pause_s * 2, WAIT_S_MAX)

    async def _shows(self, key: str, version: int) -> bool:
        try:
            found = await self._objects.get(key)
        except StoreUnavailable:
            return False
        return found is not None and published_version(found.body) >= version

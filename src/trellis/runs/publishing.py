"""Puts documents into the object store so that readers never see one go back (RUN-3, D14).

A document that is made once is put create-only. One with a version is replaced only by a higher version, by compare-and-set
on what is there. So it does not matter how often, or by how many writers, the same facts are published.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from trellis.runs.documents import Publication
from trellis.runs.errors import DocumentDiffers
from trellis.storage.objects import CREATE, ObjectStore, Stored, if_match

CONFLICTS_MAX = 20
CACHE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Seen:
    etag: str
    version: int


class Publisher:
    """Publishes into one store; remembers what it put last, so that a rising document costs one request."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._seen: dict[str, _Seen] = {}

    async def publish(self, publications: Sequence[Publication]) -> int:
        """Put them in this order; how many were not there yet. Raises StoreUnavailable, DocumentDiffers."""
        written = 0
        for publication in publications:
            if publication.version is None:
                written += await self._once(publication)
            else:
                written += await self._rising(publication, publication.version)
        return written

    async def _once(self, publication: Publication) -> bool:
        if isinstance(await self._objects.put(publication.key, publication.body, when=CREATE), Stored):
            return True
        there = await self._objects.get(publication.key)
        if there is None or there.body != publication.body:
            raise DocumentDiffers(key=publication.key)
        return False

    async def _rising(self, publication: Publication, version: int) -> bool:
        for _ in range(CONFLICTS_MAX):
            seen = self._seen.get(publication.key) or await self._look(publication.key)
            if seen is not None and seen.version >= version:
                return False
            when = CREATE if seen is None else if_match(seen.etag)
            answer = await self._objects.put(publication.key, publication.body, when=when)
            if isinstance(answer, Stored):
                self._remember(publication.key, _Seen(answer.etag, version))
                return True
            self._seen.pop(publication.key, None)
        raise DocumentDiffers(key=publication.key)

    async def _look(self, key: str) -> _Seen | None:
        there = await self._objects.get(key)
        return None if there is None else _Seen(there.etag, published_version(there.body))

    def _remember(self, key: str, seen: _Seen) -> None:
        if len(self._seen) >= CACHE_MAX:
            self._seen.clear()
        self._seen[key] = seen


def published_version(body: bytes) -> int:
    """The version a published document carries."""
    return int(json.loads(body)["version"])

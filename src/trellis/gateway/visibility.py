"""Which events of runs readers can already see: a run's status is read from its published status.json, so its events wait for it (D58).

What holds: an event of a run is announced only when status.json shows the event's version or a later one. What a projector has set aside,
because the object store holds something else in its place, is never announced: nobody could read it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from trellis.engine.jobs import JobId
from trellis.engine.recent import Recent
from trellis.runs import ids
from trellis.runs.publishing import published_version
from trellis.storage.objects import ObjectStore, StoreError

LOOKS_AT_ONCE = 16


class Visibility(Enum):
    """What readers can see of an event."""

    SHOWN = "shown"
    NOT_YET = "not yet"
    NEVER = "never"
    """Its run is set aside; `trellis doctor` says so."""


@dataclass(frozen=True, slots=True)
class Document:
    """The published document that shows an event of a run, and the version it has then."""

    job_id: JobId
    key: str
    version: int


@dataclass(kw_only=True)
class PublishedVersions:
    """Remembers which version of each status.json is in the store; looks again only when it is asked to."""

    objects: ObjectStore
    _known: Recent[str, int] = field(default_factory=Recent[str, int])
    _aside: Recent[str, None] = field(default_factory=Recent[str, None])
    _awaited: dict[str, Document] = field(default_factory=dict[str, Document])

    @property
    def is_awaiting(self) -> bool:
        """Whether a listener waits for a document."""
        return bool(self._awaited)

    def visibility(self, document: Document) -> Visibility:
        """What is known now; a document that is not shown yet is looked for from then on."""
        if (self._known.get(document.key) or 0) >= document.version:
            return Visibility.SHOWN
        if document.key in self._aside:
            return Visibility.NEVER
        self._awaited[document.key] = document
        return Visibility.NOT_YET

    async def look(self, documents: Iterable[Document]) -> None:
        """Look at those of these that are not known to be shown."""
        wanted = {one.key: one for one in documents if (self._known.get(one.key) or 0) < one.version}
        room = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def one(document: Document) -> None:
            async with room:
                await self._look(document)

        await asyncio.gather(*map(one, wanted.values()))

    async def look_again(self) -> bool:
        """Look at what listeners wait for; whether any of it is to be seen now, or never will be."""
        awaited, self._awaited = self._awaited, {}
        await self.look(awaited.values())
        waiting = {key: one for key, one in awaited.items() if self.visibility(one) is Visibility.NOT_YET}
        return len(waiting) < len(awaited)

    async def _look(self, document: Document) -> None:
        """A store that does not answer, or holds something else there, shows nothing; the next look may find it."""
        try:
            found = await self.objects.get(document.key)
            shown = 0 if found is None else published_version(found.body)
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

"""Reading what was published, and waiting for it.

What the object store shows is the truth. A publisher of this process can say sooner that it has put something there, and is believed,
because a put that was answered is what every reader sees; what another process publishes is found by asking the store.
"""

import json
from typing import Any

from trellis.engine.clock import Clock, sleep_or_stop
from trellis.runs import ids
from trellis.runs.publishing import DocumentPublisher, published_version
from trellis.storage.objects import ObjectStore, StoreUnavailable

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

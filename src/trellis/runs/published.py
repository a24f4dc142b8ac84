"""Reading what was published, and waiting for it."""

import json
from typing import Any

from trellis.engine.clock import Clock
from trellis.runs import ids
from trellis.runs.publishing import published_version
from trellis.storage.objects import ObjectStore, StoreUnavailable

WAIT_S_FIRST = 0.01
WAIT_S_MAX = 0.25


class Published:
    """The documents of runs, as readers see them."""

    def __init__(self, objects: ObjectStore, clock: Clock) -> None:
        self._objects = objects
        self._clock = clock

    async def status(self, slug: str, run_id: str) -> dict[str, Any] | None:
        """The run's status.json, or None before there is one."""
        found = await self._objects.get(ids.status_key(slug, run_id))
        return None if found is None else json.loads(found.body)

    async def reached(self, slug: str, run_id: str, version: int) -> None:
        """Come back when status.json has this version or a later one. The caller bounds the time."""
        key, pause_s = ids.status_key(slug, run_id), WAIT_S_FIRST
        while True:
            try:
                found = await self._objects.get(key)
            except StoreUnavailable:
                found = None
            if found is not None and published_version(found.body) >= version:
                return
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 2, WAIT_S_MAX)

"""Removes packs of the memory in the object store that no change needs: those of writers that were killed.

A writer stores its pack and then moves the head to it. A pack is removed if all of this holds:

- The history has come as far as the pack's number, and has another commit there. So no head can name the pack any more:
  a head moves from one number to the next, and only from the version that its writer read.
- It was stored a day ago or earlier.

A pack that the head has named is part of the history and stays, also when a larger one replaced it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from trellis.engine.logs import log_of
from trellis.storage.memory.errors import MemoryBusy
from trellis.storage.memory.shared_repository import SharedRepository, StoredPack
from trellis.storage.objects.store import ObjectInfo, ObjectStore

KEEP_S = 24 * 3600.0
INTERVAL_S = 6 * 3600.0
PAUSE_S_MIN = 0.1
BATCH = 500

_log = log_of("trellis.storage.memory.collector")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCollectionReport:
    """Result of one pass."""

    looked_at: int = 0
    removed: int = 0
    more: bool = False
    """Whether the round goes on."""


@dataclass(kw_only=True)
class _PackRound:
    """One look at all packs that were not checked before."""

    commits: dict[int, str]
    """The commit of each change, by number, as the history was when the round began."""
    after: str | None
    """The key behind which the listing goes on."""
    first_left: int
    """The lowest number of a pack that a later round must look at again."""


@dataclass(kw_only=True)
class MemoryPackCollector:
    """The service. A pass looks at one page of packs; any number of processes may run it."""

    objects: ObjectStore
    repository: SharedRepository
    now: Callable[[], Awaitable[datetime]]
    keep_s: float = KEEP_S
    batch: int = BATCH
    name: str = "memory-collector"
    _round: _PackRound | None = field(default=None, init=False)
    _checked: int = field(default=0, init=False)
    """Packs up to this number need no second look of this process: their history does not change any more."""

    async def run_once(self) -> PackCollectionReport:
        """Look at one page of packs. During an import nothing is removed. Raises RepositoryError and StoreError."""
        if self._round is None:
            try:
                number, commits = await asyncio.to_thread(self.repository.numbered_commits, self._checked)
            except MemoryBusy:
                return PackCollectionReport()
            after = self.repository.store.first_pack_key(self._checked + 1)
            self._round = _PackRound(commits=commits, after=after, first_left=number + 1)
        now = self._round
        folder = self.repository.store.packs_folder
        page = await self.objects.list(folder, after=now.after, limit=self.batch)
        before = await self.now() - timedelta(seconds=self.keep_s)
        removed = sum([await self._check(now, info, before) for info in page.items])
        if removed:
            _log.info("packs_removed", packs=removed)
        now.after = page.items[-1].key if page.items else now.after
        if not page.more:
            self._checked, self._round = max(self._checked, now.first_left - 1), None
        return PackCollectionReport(looked_at=len(page.items), removed=removed, more=page.more)

    def pause_s(self, report: PackCollectionReport) -> float:
        """Short while a round goes on."""
        return PAUSE_S_MIN if report.more else INTERVAL_S

    async def _check(self, now: _PackRound, info: ObjectInfo, before: datetime) -> bool:
        """Remove the pack if nobody can need it. Returns whether it was removed."""
        pack = StoredPack.of_name(info.key.rpartition("/")[2])
        if pack is None or pack.last not in now.commits or now.commits[pack.last] == pack.commit:
            return False
        if info.modified_at > before:
            now.first_left = min(now.first_left, pack.last)
            return False
        return await self.objects.delete(info.key)

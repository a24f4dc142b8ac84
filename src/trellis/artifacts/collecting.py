"""Collects staged blobs of artifacts that nobody needs any more.

What holds: nothing is deleted without a look at its row, and nothing because of its age. A blob goes when its row is discarded, which is
for good; of a finalized or removed artifact only when that is recorded in the object store, and of a finalized one only when the
published object has the recorded bytes. So a ledger that is lost at any moment is made again from what is there. A blob of which no
row is known is left alone: it may be another ledger's, or of a row that is on its way back.

The bytes of an artifact that has ended go with the record of its end, once, by whoever records it (`runs.finalizing`). What comes here
after that is a blob that was still under way.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trellis.artifacts import keys
from trellis.artifacts.registry import ArtifactRegistry
from trellis.artifacts.rows import DISCARDED, FINALIZED, STAGED, ArtifactRow
from trellis.engine.records import Event

BATCH = 100
INTERVAL_S = 60.0
PAUSE_S_MIN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactCollectionReport:
    """What one pass did. `unknown`: blobs without a row, which stay."""

    looked_at: int = 0
    taken: int = 0
    unknown: int = 0
    more: bool = False


@dataclass(kw_only=True)
class ArtifactCollector:
    """The service: goes round the staged blobs, a page at a time."""

    artifacts: ArtifactRegistry
    is_recorded: Callable[[Event], Awaitable[bool]]
    """Whether the object store has the audit record of an event."""
    batch: int = BATCH
    interval_s: float = INTERVAL_S
    name: str = "artifact-collector"
    _after: str | None = None

    async def run_once(self) -> ArtifactCollectionReport:
        """A page."""
        taken, unknown = 0, 0
        blobs = await self.artifacts.objects.list(
            f"{keys.staged_folder(self.artifacts.cid)}/", after=self._after, limit=self.batch
        )
        for blob in blobs.items:
            artifact_id = keys.staged_id(blob.key)
            row = None if artifact_id is None else await self.artifacts.row(artifact_id)
            unknown += row is None
            if row is not None and blob.key == row.staged_key and await self._is_done(row):
                taken += await self.artifacts.objects.delete(blob.key)
        self._after = blobs.items[-1].key if blobs.more else None
        return ArtifactCollectionReport(looked_at=len(blobs.items), taken=taken, unknown=unknown, more=blobs.more)

    def pause_s(self, report: ArtifactCollectionReport) -> float:
        """Short while the round is not finished."""
        return PAUSE_S_MIN if report.more else self.interval_s

    async def _is_done(self, row: ArtifactRow) -> bool:
        """Whether nobody will ever ask for the staged blob of this artifact again, also not after the ledger was lost."""
        if row.state in {STAGED, DISCARDED}:
            return row.state == DISCARDED
        last = (await self.artifacts.ledger.events(row.artifact_id))[-1:]
        if [event.target for event in last] != [row.state] or not await self.is_recorded(last[0]):
            return False
        if row.state != FINALIZED:
            return True
        published = await self.artifacts.objects.get(row.key)
        return published is not None and row.is_of(published.body)

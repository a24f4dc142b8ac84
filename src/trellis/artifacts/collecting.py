"""Collects what nobody needs any more of artifacts: staged blobs that were discarded or published, and the bytes of removed artifacts.

What holds: nothing is deleted without a look at its row, and nothing because of its age. A blob goes only when its row has ended, which
is for good, or when its row is finalized and the published object has the recorded bytes. A blob of which no row is known is left
alone: it may be another ledger's, or of a row that is on its way back.
"""

from dataclasses import dataclass

from trellis.artifacts import keys
from trellis.artifacts.registry import Artifacts
from trellis.artifacts.rows import DISCARDED, FINALIZED, REMOVED, Row
from trellis.engine.records import JobFilter
from trellis.lifecycles.artifact import ARTIFACT

BATCH = 100
INTERVAL_S = 60.0
PAUSE_S_MIN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What one pass did. `unknown`: blobs without a row, which stay."""

    looked_at: int = 0
    taken: int = 0
    unknown: int = 0
    more: bool = False


@dataclass(kw_only=True)
class ArtifactCollector:
    """The service: goes round the staged blobs and the removed artifacts, a page of each at a time."""

    artifacts: Artifacts
    batch: int = BATCH
    interval_s: float = INTERVAL_S
    name: str = "artifact-collector"
    _after: str | None = None
    _cursor: str | None = None

    async def run_once(self) -> Collected:
        """A page of each."""
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
        where = JobFilter(lifecycle=ARTIFACT.name, state=REMOVED)
        removed = await self.artifacts.ledger.jobs(where, limit=self.batch, cursor=self._cursor)
        for job in removed.jobs:
            row = await self.artifacts.row(job.job_id)
            if row is not None and row.state == REMOVED:
                taken += await self.artifacts.take_away(row)
        self._cursor = removed.cursor
        return Collected(
            looked_at=len(blobs.items) + len(removed.jobs),
            taken=taken,
            unknown=unknown,
            more=self._after is not None or self._cursor is not None,
        )

    def pause_s(self, report: Collected) -> float:
        """Short while the round is not finished."""
        return PAUSE_S_MIN if report.more else self.interval_s

    async def _is_done(self, row: Row) -> bool:
        """Whether nobody will ever ask for the staged blob of this artifact again."""
        if row.state != FINALIZED:
            return row.state in {DISCARDED, REMOVED}
        published = await self.artifacts.objects.get(row.key)
        return published is not None and row.is_of(published.body)

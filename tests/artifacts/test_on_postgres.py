"""The same registry on PostgreSQL: one artifact for an attempt, final with its job, published, and brought back."""

import asyncio
from pathlib import Path

import pytest

from tests.artifacts.desk import OPERATOR, complete, desk_in, draft
from trellis.artifacts.rows import ArtifactFinal, TooYoung
from trellis.engine.errors import LeaseConflictError
from trellis.engine.jobs import Epoch
from trellis.runs.rebuild import rebuild_objects


@pytest.mark.requirement("ART-4", "ART-7", "D15", "ART-3")
async def test_on_postgresql_artifacts_are_staged_once_finalized_with_their_job_and_rebuilt(
    tmp_path: Path, postgres_url: str
):
    async with desk_in(tmp_path, ledger_url=postgres_url) as desk:
        lease = await desk.waiting()
        answers = await asyncio.gather(*(desk.stage(lease) for _ in range(10)))
        assert sum(answer.created for answer in answers) == 1
        (row,) = await desk.artifacts.of_job(lease.job_id)
        with pytest.raises(LeaseConflictError):
            await desk.stage(lease, epoch=Epoch(lease.epoch + 1))
        assert await desk.artifacts.read(row.artifact_id) is None
        assert await complete(desk.ledger, desk.artifacts, lease, row.artifact_id)
        with pytest.raises(ArtifactFinal):
            await desk.stage(lease, draft(title="Another"))
        assert (await desk.stage(lease)).artifact_id == row.artifact_id
        await desk.publish()
        await desk.collector().run_once()
        assert await desk.keys() == [row.key]
        body = await desk.body(row.key)
        await desk.objects.delete(row.key)
        assert (await rebuild_objects(desk.ledger, desk.objects, OPERATOR)).written == 1
        assert await desk.body(row.key) == body
        with pytest.raises(TooYoung):
            await desk.artifacts.cleanup(OPERATOR, older_than_days=1)
        assert (await desk.artifacts.cleanup(OPERATOR)).rows == ()
        assert [one.artifact_id for one in (await desk.artifacts.page(limit=5)).rows] == [row.artifact_id]

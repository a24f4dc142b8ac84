"""The registry on PostgreSQL, and requests to it whose process dies, on both ledgers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.artifacts.desk import BACKEND, OPERATOR, complete, desk_in, draft
from tests.dying_ledger import Died, DiesAfter
from trellis.artifacts.rows import ArtifactFinal, TooYoung
from trellis.engine.errors import IdempotencyMismatch, LeaseConflictError
from trellis.engine.jobs import Epoch, RequestKey
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


KEY = RequestKey(scope="s", key="k", fingerprint=b"f", about="artifacts", given="press")


@pytest.mark.requirement("D27", "ART-5")
@pytest.mark.parametrize("ledger", ["sqlite", "postgres"])
@pytest.mark.parametrize("removed", [1, 2])
async def test_cleanup_whose_process_died_removes_what_it_chose_and_nothing_more(
    tmp_path: Path, request: pytest.FixtureRequest, ledger: str, removed: int
):
    url = request.getfixturevalue("postgres_url") if ledger == "postgres" else None
    async with desk_in(tmp_path, ledger_url=url) as desk:
        desk.keep_days = 0
        made = [(await desk.finalized()).artifact_id for _ in range(4)]
        desk.clock.advance(1)
        dying = replace(desk.artifacts, ledger=DiesAfter(desk.ledger, "move", removed).ledger)
        with pytest.raises(Died):
            await dying.cleanup(OPERATOR, limit=2, key=KEY)
        stored = await desk.ledger.find_request(KEY)
        assert stored is not None, "the key is stored with the first removal"
        for _ in range(2):
            again = await desk.artifacts.cleanup(OPERATOR, limit=2, key=KEY)
            assert ([row.artifact_id for row in again.rows], again.more, again.replayed) == (made[:2], True, True)
        with pytest.raises(IdempotencyMismatch):
            await desk.artifacts.cleanup(OPERATOR, key=replace(KEY, fingerprint=b"another"))
        left = (await desk.artifacts.page(limit=5)).rows
        assert [row.artifact_id for row in left] == made[:1:-1]


@pytest.mark.requirement("D27", "ART-4")
@pytest.mark.parametrize("ledger", ["sqlite", "postgres"])
async def test_staging_whose_process_died_after_the_submit_is_completed_under_its_key(
    tmp_path: Path, request: pytest.FixtureRequest, ledger: str
):
    url = request.getfixturevalue("postgres_url") if ledger == "postgres" else None
    async with desk_in(tmp_path, ledger_url=url) as desk:
        lease = await desk.waiting()
        job = await desk.job(lease.job_id)
        dying = replace(desk.artifacts, ledger=DiesAfter(desk.ledger, "submit").ledger)
        with pytest.raises(Died):
            await dying.stage(BACKEND, draft(), job=job, request=KEY)
        assert await desk.ledger.find_request(KEY) is not None, "the key is stored with the artifact's row"
        staged = await desk.artifacts.stage(BACKEND, draft(), job=job, request=KEY)
        assert await desk.artifacts.staged_bytes(staged.artifact_id) is not None
        assert [row.artifact_id for row in await desk.artifacts.of_job(lease.job_id)] == [staged.artifact_id]

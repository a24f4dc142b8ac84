"""A completion that is killed at any point leaves the end, the result and the artifacts of a job, or none of them (DJ-20)."""

import asyncio
import shutil
from itertools import zip_longest
from pathlib import Path

import asyncpg
import pytest

from tests.ledgers.conformance.rig import WORKER, Rig
from trellis.engine.event_data import ArtifactPointer, artifacts_data, artifacts_of
from trellis.engine.jobs import Advance, JobId, Lease, LeaseLost, StepApplied, Turn
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Trigger

MADE = (
    ArtifactPointer(pointer="s3://bucket/report.pdf", name="report", sha256="0" * 64, size=12),
    ArtifactPointer(pointer="file:///tmp/log.txt"),
)
RESULT = b'{"pages": 3}'
FRAME_BYTES = 24 + 4096
"""A page in SQLite's write-ahead log, with its header."""


KILL_WHO_WAITS = """
do $$
declare waiting int;
begin
  for n in 1 .. 5000 loop
    select l.pid into waiting from pg_locks l join pg_database d on d.oid = l.database
     where not l.granted and d.datname = current_database();
    exit when found;
    perform pg_sleep(0.002);
  end loop;
  perform pg_terminate_backend(waiting, 5000);
end $$
"""
SUCCEEDED = """
select count(*) from trellis.event e join trellis.event_type t on t.type = e.type where t.name = 'job_succeeded'
"""


def completion(lease: Lease) -> Turn:
    step = Advance(lease=lease, source="running", trigger=Trigger.COMPLETE, result=RESULT, data=artifacts_data(MADE))
    return Turn(actor=WORKER, advances=(step,))


async def is_complete(ledger: Ledger, job_id: JobId) -> bool:
    """Whether the job is complete with all that belongs to it; fails where it has a part."""
    job, events = await ledger.job(job_id), await ledger.events(job_id)
    assert job is not None
    parts = {
        "state": job.state == "succeeded",
        "event": events[-1].type == "job_succeeded",
        "result": await ledger.result(job_id) == RESULT,
        "artifacts": artifacts_of(events) == MADE,
    }
    assert len(set(parts.values())) == 1, f"only a part was kept: {parts}"
    return parts["state"]


@pytest.mark.requirement("DJ-20", "DJ-21")
async def test_a_completion_keeps_its_artifacts_once_and_its_loser_keeps_nothing(rig: Rig):
    first = await rig.running()
    await rig.lose_lease()
    second = await rig.claim_one()
    (lost,) = (await rig.ledger.turn(completion(first.lease))).outcomes
    assert isinstance(lost, LeaseLost)
    assert not await is_complete(rig.ledger, first.lease.job_id)
    (made,) = (await rig.ledger.turn(completion(second.lease))).outcomes
    (again,) = (await rig.ledger.turn(completion(second.lease))).outcomes
    assert isinstance(made, StepApplied)
    assert again == made._replace(repeated=True)
    assert await is_complete(rig.ledger, first.lease.job_id)


@pytest.mark.only("sqlite")
@pytest.mark.requirement("DJ-20")
async def test_a_process_killed_while_it_writes_a_completion_leaves_all_or_nothing(rig: Rig, tmp_path: Path):
    """What a killed process has written of a transaction is a beginning of what it adds to the log."""
    job_id = (claimed := await rig.running()).lease.job_id
    path = tmp_path / "ledger.db"
    before, database = path.with_name("ledger.db-wal").read_bytes(), path.read_bytes()
    assert isinstance((await rig.ledger.turn(completion(claimed.lease))).outcomes[0], StepApplied)
    log = path.with_name("ledger.db-wal").read_bytes()
    assert path.read_bytes() == database, "the log was folded back meanwhile: there is nothing to cut"
    written = [at for at, (old, new) in enumerate(zip_longest(before, log)) if old != new]
    told: list[bool] = []
    for length in (*range(written[0], written[-1], FRAME_BYTES // 2), written[-1], written[-1] + 1):
        folder = tmp_path / f"killed-{length}"
        folder.mkdir()
        shutil.copy(path, folder / "ledger.db")
        (folder / "ledger.db-wal").write_bytes(log[:length] + before[length:])
        left = await open_ledger(f"sqlite:///{folder / 'ledger.db'}")
        told.append(await is_complete(left, job_id))
        await left.close()
    assert told == [False] * (len(told) - 1) + [True], "the last frame is what commits"
    assert len(told) > 5


@pytest.mark.only("postgres")
@pytest.mark.requirement("DJ-20")
@pytest.mark.parametrize("table", ["lease", "event", "result", "ended", "batch"])
async def test_a_session_killed_while_it_writes_a_completion_leaves_all_or_nothing(rig: Rig, table: str):
    """The completion stops where it first needs the table, and its session is ended there."""
    lease = (await rig.running()).lease
    assert rig.admin_url is not None
    admin = await asyncpg.connect(rig.admin_url)
    try:
        blocking = admin.transaction()
        await blocking.start()
        await admin.execute(f"lock table trellis.{table} in access exclusive mode")
        completing = asyncio.ensure_future(rig.ledger.turn(completion(lease)))
        await admin.execute(KILL_WHO_WAITS)
        assert await admin.fetchval(SUCCEEDED) == 0
        assert await admin.fetchval("select count(*) from trellis.result") == 0
        assert await admin.fetchval("select count(*) from trellis.lease") == 1
        await blocking.rollback()
        (outcome,) = (await completing).outcomes  # asked again by the ledger itself, because the answer was lost
        assert isinstance(outcome, StepApplied)
    finally:
        await admin.close()
    assert await is_complete(rig.ledger, lease.job_id)

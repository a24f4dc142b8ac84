"""What a promotion passed over, the sweep promotes: it looks at some keys each time, in turn, so that each is looked at."""

import apsw
import pytest

from tests.ledgers.conformance.rig import SUBMITTER, Rig
from trellis.engine.jobs import JobId
from trellis.engine.records import JobPlace

KEYS_A_SWEEP = 1_000
"""How many keys one sweep looks at on PostgreSQL; on SQLite it is the sweep's batch."""


async def _place(rig: Rig, job_id: JobId) -> JobPlace:
    return (await rig.job(job_id)).place


@pytest.mark.only("postgres")
@pytest.mark.requirement("D49")
async def test_a_thousand_full_keys_do_not_hide_a_free_one_behind_them_on_postgresql(rig: Rig):
    assert rig.admin_sql is not None
    # The key that comes last: a job submitted inside a transaction waits there for the next sweep.
    ((last, highest),) = await rig.admin_sql(
        "select n::text, trellis._key_hash('user:' || n) from generate_series(1, 30000) n order by 2 desc limit 1"
    )
    names = await rig.admin_sql(
        "select 'full:' || n from generate_series(1, 30000) n where trellis._key_hash('full:' || n) < $1 limit $2",
        highest,
        KEYS_A_SWEEP,
    )
    for _ in range(2):  # one job of each key is ready and one is parked behind it
        jobs = [rig.new_job(concurrency_key=name) for (name,) in names]
        await rig.ledger.submit(SUBMITTER, jobs)
    ((job_id,),) = await rig.admin_sql("select trellis.submit_job('work', p_concurrency_key => $1)", last)
    first = await rig.sweep()
    assert (first.promoted, await _place(rig, job_id)) == (0, JobPlace.BLOCKED), "as many keys as one sweep looks at"
    second = await rig.sweep()
    assert (second.promoted, await _place(rig, job_id)) == (1, JobPlace.READY)
    assert (await rig.sweep()).promoted == 0, "it begins again with the first key"


@pytest.mark.only("sqlite")
@pytest.mark.requirement("D49")
async def test_full_keys_do_not_hide_a_free_one_behind_them_on_sqlite(rig: Rig):
    for number in range(5):
        await rig.submit(2, concurrency_key=f"full:{number}")
    job_id = await rig.submit_one(concurrency_key="last")
    _take_its_slot(rig, job_id)
    assert await _place(rig, job_id) == JobPlace.BLOCKED
    promoted = [(await rig.sweep(batch=5)).promoted for _ in range(3)]
    assert promoted == [0, 1, 0]
    assert await _place(rig, job_id) == JobPlace.READY


def _take_its_slot(rig: Rig, job_id: JobId) -> None:
    """No verb leaves a slot idle here; somebody with a shell can."""
    shell = apsw.Connection(rig.ledger.url.removeprefix("sqlite:///"))
    shell.execute(
        "UPDATE trellis_job SET place = 3, slot = NULL WHERE id = (SELECT id FROM trellis_submission WHERE job_id = ?)",
        (job_id,),
    )
    shell.close()

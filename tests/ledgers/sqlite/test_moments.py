"""A stored moment that no calendar has is read as the first or last one: one row never keeps the others from being read."""

from datetime import UTC, datetime

import pytest

from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.verify import verify
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.lifecycles import Role

SOMEBODY = Actor(role=Role.SUBMITTER, name="somebody")


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"])
async def test_a_job_due_beyond_all_time_is_read_like_any_other(ledger: SqliteLedger, text: str):
    await ledger.submit(SOMEBODY, [NewJob(job_id=JobId("far"), type="t", run_at=datetime.fromisoformat(text))])
    job = await ledger.job(JobId("far"))
    assert job is not None
    assert job.due_at in {None, datetime.max.replace(tzinfo=UTC)}
    assert (await verify(ledger)).ok


def test_datetimes_round_trip_over_the_whole_range():
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    for at in (first, datetime(2026, 2, 14, 8, 0, 0, 1, tzinfo=UTC), last):
        assert rows.moment(rows.microseconds(at)) == at
    assert (rows.moment(-(2**63)), rows.moment(2**63 - 1)) == (first, last)

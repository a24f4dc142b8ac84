"""A worker declares the schedules of its application and fires what is due (RUN-9)."""

from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.engine.records import JobFilter
from trellis.worker.app import App
from trellis.worker.context import Context


@pytest.mark.requirement("RUN-9")
async def test_a_worker_alone_declares_fires_and_runs_the_periodic_jobs_of_its_application(stand: Stand):
    app, ran = App(testing=True), list[Any]()

    @app.periodic("* * * * *", payload={"n": 1})
    @app.job("hourly")
    async def hourly(ctx: Context, payload: dict[str, int]) -> None:
        ran.append(payload)

    for _ in range(2):  # the second start changes nothing
        async with stand.running(app):
            pass
    (known,) = await stand.trellis.schedules.list()
    assert (known.name, known.owner, known.version, known.last_at) == ("hourly", "w1", 1, None)

    async def fired() -> bool:
        (record,) = await stand.trellis.schedules.list()
        return record.last_at is not None

    async with stand.running(app):
        await stand.until(fired, step_s=15.0)
        await stand.until(lambda: len(ran) == 1, step_s=0.1)  # the next instant must not come meanwhile
    (known,) = await stand.trellis.schedules.list()
    (job,) = (await stand.ledger.jobs(JobFilter(type="hourly"), limit=10)).jobs
    assert (ran, known.last_job) == ([{"n": 1}], job.job_id)

"""The example application runs."""

import pytest

from examples.demo_app import Document, Indexed, Payment, app
from trellis.engine.jobs import CancelMode
from trellis.testing import sandbox


async def test_demo_application_runs_as_documented():
    async with sandbox(app) as box:
        assert await box.run("index.document", Document("trellis", pages=2)) == Indexed(title="trellis", words=200)
        assert await box.run("call.flaky", 2) == "answered at attempt 3"
        assert await box.run("count.words", "one two three") == 3
        charge = await box.submit("charge.account", Payment("alice", 500))
        await box.run_until_idle()
        assert "500 cents" in await charge.result()
        (refund,) = await box.trellis.compensate(charge.id)
        await box.run_until_idle()
        assert await refund.result() == "refunded 500 cents to alice"


@pytest.mark.parametrize("type_", ["crash.once", "index.document"])
async def test_every_job_of_the_demo_can_be_cancelled_before_it_runs(type_: str):
    async with sandbox(app) as box:
        job = await box.submit(type_, Document("x") if type_ == "index.document" else None)
        assert (await job.cancel(CancelMode.HARD)).state == "cancelled"

"""The alerts about queue jobs, brought about by what goes wrong in an instance, and shown by its gateway."""

from dataclasses import replace
from typing import Any

import pytest

from tests.research.holding import Unreadable, held_in
from tests.research.rig import Rig
from trellis.app.alerts import alert_services


async def evaluate(rig: Rig) -> dict[str, str]:
    """What a process with the role `alerts` does in one round; then what an operator is shown."""
    evaluator, *_ = alert_services(rig.instance.settings, rig.instance.ledger, name="alerts@test", clock=rig.clock)
    await evaluator.run_once()
    listed: list[dict[str, Any]] = (await rig.admin.get("/alerts")).json()["items"]
    return {one["name"]: one["state"] for one in listed}


@pytest.mark.requirement("OBS-4")
async def test_three_context_timeouts_in_a_row_raise_an_alert_until_a_context_is_assembled(rig: Rig):
    job_id = await rig.submit()
    for wait_s in (15.0, 30.0, 0.0):
        assert await evaluate(rig) == {}
        async with held_in(rig, job_id, "CONTEXT_ASSEMBLY"):
            await rig.pass_time(30.0)
            await rig.work(job_id, "RETRY_BACKOFF")
        await rig.leap(wait_s)
    assert await evaluate(rig) == {"context-timeouts": "open"}
    await rig.leap(60.0)
    await rig.work(job_id, "COMPLETE")
    assert await evaluate(rig) == {"context-timeouts": "resolved"}


@pytest.mark.requirement("OBS-4")
async def test_an_object_store_that_refuses_three_artifacts_in_a_row_raises_an_alert_until_it_takes_one(rig: Rig):
    driver = rig.orchestrator.driver
    artifacts, job_id = driver.artifacts, await rig.submit()
    driver.artifacts = replace(artifacts, objects=Unreadable(artifacts.objects, "projects/"))  # type: ignore[arg-type]
    for wait_s in (15.0, 30.0, 60.0):
        assert await evaluate(rig) == {}
        await rig.work(job_id, "RETRY_BACKOFF")
        await rig.leap(wait_s)
    assert await evaluate(rig) == {"artifact-writes": "open"}
    driver.artifacts = artifacts
    await rig.work(job_id, "COMPLETE")
    assert await evaluate(rig) == {"artifact-writes": "resolved"}

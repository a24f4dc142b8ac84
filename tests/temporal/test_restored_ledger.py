"""A ledger that is restored from a backup while the workflows of its runs go on: the ledger is the record."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.layers.temporal import TemporalRig
from tests.temporal.restoring import copy, take_over
from trellis.engine.jobs import JobId
from trellis.runs.temporal.driver import NO_STEP
from trellis.runs.waits import read_waits


async def counted(rig: TemporalRig, run_id: JobId) -> int:
    return [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed")


@pytest.mark.requirement("PIPE-2", "PIPE-11", "D16")
@pytest.mark.parametrize(
    "began, claims",
    [
        pytest.param(True, 1, id="to a later epoch"),
        pytest.param(False, 1, id="to the same epoch"),
        pytest.param(False, 2, id="to a lower epoch", marks=pytest.mark.prove),
    ],
)
async def test_a_run_goes_on_from_a_restored_ledger_that_is_behind_its_workflow(
    rig: TemporalRig, tmp_path: Path, began: bool, claims: int
):
    rig.options = replace(rig.options, pickup_s=1.0)
    backup = tmp_path / "backup"
    backup.mkdir()
    second, third = rig.hold("execute-agent"), rig.hold("persist-results")
    run_id = await rig.trigger(await rig.agent("gardener"))
    if not began:
        await copy(tmp_path, backup)
    await rig.start()
    await rig.until(lambda: second.begun == [run_id])
    if began:
        await copy(tmp_path, backup)
    second.release()
    await rig.until(lambda: third.begun == [run_id])
    for _ in range(1, claims):
        await take_over(rig)
        await rig.until(lambda: len(third.begun) == claims)
    workflow = (await rig.workflow(run_id).describe()).run_id
    await rig.kill()
    await copy(backup, tmp_path)
    rig.restart_projector()
    third.release()
    await take_over(rig)
    await rig.shows(run_id, "completed")
    assert await counted(rig, run_id) == 4
    assert len(second.begun) == 2  # the second step was lost with the ledger, and is executed again
    is_same = (await rig.workflow(run_id).describe()).run_id == workflow
    assert is_same is (claims == 1)  # a new workflow replaces one that knows of a later epoch


@pytest.mark.requirement("PIPE-2", "RUN-7")
async def test_a_run_whose_workflow_hands_over_no_step_waits_and_fails_at_the_limit_of_waits(rig: TemporalRig):
    rig.options, rig.polls = replace(rig.options, pickup_s=0.05), False
    rig.driver_options = replace(rig.driver_options, upstream_wait_s=5.0)
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()

    async def waits() -> bool:
        return [wait.reason for wait in read_waits(await rig.ledger.read_journal(run_id))] == [NO_STEP]

    await rig.until(waits)
    await rig.pass_time(6.0)
    status = await rig.shows(run_id, "failed")
    assert status["error"] == f"UPSTREAM_UNAVAILABLE: {NO_STEP} (the run waited 5s, which is its limit)"

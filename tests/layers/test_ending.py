"""How runs end other than well: cancelled in every state, failed, or with their driver killed."""

import asyncio

import pytest

from tests.layers.rig import Rig
from trellis.documents import ids
from trellis.documents.errors import StepHopeless
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, CancelMode, JobId, RequestId
from trellis.runs.orchestrator import StepContext, StepResult

MODES = pytest.mark.parametrize("mode", list(CancelMode))


async def cancelled(rig: Rig, run_id: JobId, mode: CancelMode, name: str = "stop-1") -> str:
    return await rig.layer.cancel(run_id, mode=mode, request_id=RequestId(name), cause="no longer wanted")


@MODES
@pytest.mark.requirement("D19", "RUN-7")
async def test_a_run_that_waits_is_cancelled_at_once_and_never_begins(rig: Rig, mode: CancelMode):
    slug = await rig.agent("gardener")
    run_id, second = await rig.trigger(slug), await rig.trigger(slug)
    assert await cancelled(rig, run_id, mode) == "failed"
    assert (await rig.layer.run_state(second)).position == 0
    await rig.start()
    status = await rig.shows(run_id, "failed")
    assert status["error"] == "CANCELLED: no longer wanted"
    await rig.shows(second, "completed")
    assert rig.steps.done["load-context"] == 1


@pytest.mark.requirement("D19", "RUN-7")
async def test_soft_cancelled_run_stops_and_the_next_run_starts(rig: Rig):
    hold, slug = rig.hold("execute-agent"), await rig.agent("gardener")
    left = rig.statuses_after("execute-agent")
    run_id, second = await rig.trigger(slug), await rig.trigger(slug)
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    assert await cancelled(rig, run_id, CancelMode.SOFT) == "running"
    status = await rig.shows(run_id, "failed")
    assert status["error"].startswith("CANCELLED: ")
    assert (status["current_step"], status["steps_completed"]) == ("execute-agent", 1)
    assert left == ["running"]  # the step ends before the run does
    hold.release()
    await rig.shows(second, "completed")


@pytest.mark.requirement("D19")
async def test_a_soft_cancel_becomes_a_hard_one_when_nobody_drives_the_run_any_more(rig: Rig):
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.kill()
    assert await cancelled(rig, run_id, CancelMode.SOFT) == "running"
    await rig.pass_time(CANCEL_GRACE_S_DEFAULT + 2.0)
    assert (await rig.shows(run_id, "failed"))["error"].startswith("CANCELLED: ")


@pytest.mark.requirement("D19", "RUN-2")
async def test_a_running_run_is_ended_at_once_and_what_its_driver_still_does_changes_nothing(rig: Rig):
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    assert await cancelled(rig, run_id, CancelMode.HARD) == "failed"
    before = await rig.shows(run_id, "failed")
    assert before["error"] == "CANCELLED: no longer wanted"
    events = await rig.ledger.events(run_id)
    hold.release()
    await rig.settle()
    assert await rig.status(run_id) == before
    assert await rig.ledger.events(run_id) == events
    assert rig.steps.done["persist-results"] == 0


@MODES
@pytest.mark.requirement("D19", "RUN-2")
async def test_first_of_complete_and_cancel_wins(rig: Rig, mode: CancelMode):
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    before = await rig.shows(run_id, "completed")
    assert await cancelled(rig, run_id, mode) == "completed"
    await rig.settle()
    assert await rig.status(run_id) == before


@MODES
@pytest.mark.requirement("D19")
async def test_a_cancel_asked_for_again_is_answered_as_the_first(rig: Rig, mode: CancelMode):
    run_id = await rig.trigger(await rig.agent("gardener"))
    assert await cancelled(rig, run_id, mode) == "failed"
    assert await cancelled(rig, run_id, mode) == "failed"
    assert await cancelled(rig, run_id, mode, "stop-2") == "failed"
    assert [event.type for event in await rig.ledger.events(run_id)].count("run.failed") == 1


@pytest.mark.requirement("RUN-7", "RUN-8", "PIPE-2")
async def test_a_failed_run_says_why_and_is_not_tried_again(rig: Rig):
    slug = await rig.agent("gardener")

    async def breaks(context: StepContext, /) -> StepResult:
        raise StepHopeless(detail="nothing can be done")

    rig.steps.acts["execute-agent"] = breaks
    run_id = await rig.trigger(slug)
    await rig.start()
    status = await rig.shows(run_id, "failed")
    assert status["error"] == "INTERNAL_ERROR: nothing can be done"
    await rig.pass_time(700.0)
    assert await rig.status(run_id) == status
    assert [run.job_id for run in await rig.runs(slug)] == [run_id]
    assert rig.steps.done["execute-agent"] == 1


@pytest.mark.requirement("PIPE-11", "PIPE-12", "D16", "D33")
@pytest.mark.parametrize("step", ids.STEPS)
async def test_a_run_whose_driver_was_killed_goes_on_after_its_last_counted_step(rig: Rig, step: str):
    hold = rig.hold(step)
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.kill()
    await rig.start()
    assert await rig.stands(run_id) == ["running"]
    hold.release()
    await rig.pass_time(40.0)
    status = await rig.shows(run_id, "completed")
    assert status["steps_completed"] == 4
    assert rig.steps.done == {**dict.fromkeys(ids.STEPS, 1), step: 2}
    assert [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed") == 4


@pytest.mark.requirement("RUN-6", "RUN-7")
async def test_a_run_has_ten_minutes_however_often_its_driver_is_killed(rig: Rig):
    async def hangs(context: StepContext, /) -> StepResult:
        return await asyncio.get_running_loop().create_future()

    rig.steps.acts["execute-agent"] = hangs
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: rig.steps.done["execute-agent"] == 1)
    await rig.kill()
    await rig.pass_time(600.0)
    await rig.start()
    status = await rig.shows(run_id, "failed")
    assert status["error"] == "AGENT_TIMEOUT: execution exceeded 600s limit"

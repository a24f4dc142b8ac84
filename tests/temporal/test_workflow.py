"""A run as a workflow: the same record as with the built-in layer, retries and cancels by Temporal, and what operators do there."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError

from tests.layers.builtin import BuiltinRig, on_sqlite
from tests.layers.rig import Rig
from tests.layers.temporal import TemporalRig
from tests.temporal.record import replaced
from trellis.documents.errors import StepError, StepHopeless
from trellis.engine import tracing
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import CancelMode, JobId, RequestId, Turn, TurnResult
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Trigger
from trellis.runs.orchestrator import StepContext, StepResult

TIMES = {"started_at", "finished_at", "sha256"}
"""What differs between two runs of the same agent: when, and the digest of the file that says when."""
TRACE = f"00-{7:032x}-{7:016x}-01"


async def names_its_trace(context: StepContext, /) -> StepResult:
    """A step that puts the trace in which it would create a job into the event that counts it."""
    return StepResult(result={}, event_data={"trace": tracing.trace_id(tracing.here())}, output=b"{}\n")


async def record(rig: Rig) -> list[tuple[Any, ...]]:
    """Trigger a run in a trace, let it end, and return what the ledger recorded of it, and the trace of a step."""
    rig.steps.acts["persist-results"] = names_its_trace
    with tracing.carried(TRACE, "request"):
        run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.shows(run_id, "completed")
    events = await rig.ledger.events(run_id)
    return [
        (
            event.type,
            event.version,
            event.epoch,
            event.cause,
            {k: v for k, v in _data(event.data).items() if k not in TIMES},
        )
        for event in events
    ]


def _data(data: bytes | None) -> dict[str, Any]:
    return {} if data is None else json.loads(data)


async def closed_as(rig: TemporalRig, run_id: JobId, status: WorkflowExecutionStatus) -> None:
    """Until Temporal shows this end of the run's workflow."""

    async def is_closed() -> bool:
        return (await rig.workflow(run_id).describe()).status is status

    await rig.until(is_closed)


@pytest.mark.requirement("PIPE-2", "RUN-1", "D18")
async def test_the_record_of_a_run_equals_that_of_the_builtin_layer(rig: TemporalRig, tmp_path: Path):
    (tmp_path / "builtin").mkdir()
    async with on_sqlite(tmp_path / "builtin", BuiltinRig) as builtin:
        expected = await record(builtin)
    assert tracing.trace_id(TRACE) in [data.get("trace") for *_, data in expected]
    assert await record(rig) == expected
    (run,) = await rig.runs("gardener")
    await closed_as(rig, run.job_id, WorkflowExecutionStatus.COMPLETED)
    history = await rig.workflow(run.job_id).fetch_history()
    kinds = [event.event_type for event in history.events]
    assert kinds.count(EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED) == 4


@pytest.mark.requirement("RUN-6", "RUN-7", "PIPE-12")
async def test_temporal_retries_a_step_as_often_as_the_builtin_layer_does(rig: TemporalRig):
    rig.driver_options = replace(rig.driver_options, retry_delays_s=(0.01, 0.02, 0.04))
    attempts: list[str] = []

    async def breaks(context: StepContext, /) -> StepResult:
        attempts.append(context.name)
        raise StepError(detail=f"try {len(attempts)} failed")

    rig.steps.acts["execute-agent"] = breaks
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    assert (await rig.shows(run_id, "failed"))["error"] == "INTERNAL_ERROR: try 4 failed"
    assert rig.steps.done["execute-agent"] == 4
    await closed_as(rig, run_id, WorkflowExecutionStatus.FAILED)
    history = (await rig.workflow(run_id).fetch_history()).to_json()
    assert "INTERNAL_ERROR in step execute-agent" in history
    assert "try 4" not in history  # the server gets nothing of a step


async def test_a_process_whose_polling_was_cut_off_polls_again(rig: TemporalRig):
    run_id = await rig.trigger(await rig.agent("gardener"))
    rig.polls = False
    await rig.start()
    (worker,) = rig._workers
    await worker._begin()
    for polling in worker._polling:
        polling.cancel()
    await asyncio.wait(worker._polling)
    assert await worker.run_once()
    await rig.shows(run_id, "completed")


async def test_the_server_gets_no_more_than_the_code_of_a_ledger_error(rig: TemporalRig, tmp_path: Path):
    await rig.start()
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'other.db'}")
    await ledger.close()
    driver = replace(rig._workers[0].driver, ledger=ledger)
    with pytest.raises(ApplicationError) as refused:
        await driver.has_ended("run")
    assert (refused.value.message, refused.value.__cause__) == ("UPSTREAM_UNAVAILABLE", None)


@pytest.mark.requirement("D19")
@pytest.mark.parametrize(
    "mode, end",
    [(CancelMode.SOFT, WorkflowExecutionStatus.CANCELED), (CancelMode.HARD, WorkflowExecutionStatus.COMPLETED)],
)
async def test_the_workflow_of_a_cancelled_run_ends(rig: TemporalRig, mode: CancelMode, end: WorkflowExecutionStatus):
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.layer.cancel(run_id, mode=mode, request_id=RequestId("stop"), cause="no longer wanted")
    await rig.shows(run_id, "failed")
    await closed_as(rig, run_id, end)


@pytest.mark.requirement("PIPE-2", "RUN-7")
@pytest.mark.parametrize(
    "act, error",
    [
        ("terminate", "INTERNAL_ERROR: the run's workflow was terminated in Temporal: enough"),
        ("cancel", "CANCELLED: The run's workflow was cancelled in Temporal."),
    ],
)
async def test_a_run_whose_workflow_an_operator_ends_in_temporal_fails_and_says_so(
    rig: TemporalRig, act: str, error: str
):
    hold, slug = rig.hold("execute-agent"), await rig.agent("gardener")
    left = rig.statuses_after("execute-agent")
    run_id, second = await rig.trigger(slug), await rig.trigger(slug)
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    workflow = rig.workflow(run_id)
    await (workflow.terminate(reason="enough") if act == "terminate" else workflow.cancel())
    assert (await rig.shows(run_id, "failed"))["error"] == error
    assert left == ["running"]  # the step ends before the run does
    hold.release()
    await rig.shows(second, "completed")


@pytest.mark.prove
@pytest.mark.requirement("PIPE-2", "PIPE-11", "RUN-7")
@pytest.mark.parametrize("heartbeat_s", [3_600.0, 2.0], ids=["the process is not told", "its activity is cancelled"])
@pytest.mark.parametrize("ends", ["completed", "failed"])
async def test_a_step_whose_process_the_server_takes_for_dead_is_not_executed_twice(
    rig: TemporalRig, heartbeat_s: float, ends: str
):
    rig.options = replace(rig.options, heartbeat_s=heartbeat_s, silence_s=1.0)
    usual = rig.steps.acts["execute-agent"]

    async def ends_late(context: StepContext, /) -> StepResult:
        if ends == "failed":
            raise StepHopeless(detail="must not be retried")
        return await usual(context)

    rig.steps.acts["execute-agent"] = ends_late
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])

    async def was_given_up_twice() -> bool:
        pending = (await rig.workflow(run_id).describe()).raw_description.pending_activities
        return any(one.attempt > 2 for one in pending)

    await rig.until(was_given_up_twice)
    hold.release()
    status = await rig.shows(run_id, ends)
    assert status["error"] == (None if ends == "completed" else "INTERNAL_ERROR: must not be retried")
    await rig.settle()
    assert hold.begun == [run_id]


@pytest.mark.requirement("PIPE-2", "PIPE-11")
async def test_the_failure_of_a_process_that_was_replaced_does_not_end_the_workflow(rig: TemporalRig):
    run_id = await replaced(rig)
    assert [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed") == 4
    await closed_as(rig, run_id, WorkflowExecutionStatus.COMPLETED)


class EndLost:
    """A ledger that does not answer whoever writes that a run is completed: never, or as if it were away."""

    def __init__(self, inner: Ledger, *, hangs: bool) -> None:
        self._inner, self._hangs = inner, hangs
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def turn(self, turn: Turn) -> TurnResult:
        if any(advance.trigger == Trigger.COMPLETE for advance in turn.advances):
            self.lost += 1
            if self._hangs:
                await asyncio.get_running_loop().create_future()
            raise LedgerUnavailable(reason="it is away")
        return await self._inner.turn(turn)


@pytest.mark.requirement("PIPE-2", "PIPE-11", "PIPE-12")
@pytest.mark.parametrize("hangs", [True, False], ids=["the process dies", "the ledger is away"])
async def test_a_run_whose_workflow_is_completed_and_whose_end_is_not_written_still_ends(rig: TemporalRig, hangs: bool):
    run_id = await rig.trigger(await rig.agent("gardener"))
    ending = EndLost(rig.ledger, hangs=hangs)
    usual, rig.ledger = rig.ledger, cast("Ledger", ending)
    await rig.start()
    await rig.until(lambda: ending.lost > 0)
    await closed_as(rig, run_id, WorkflowExecutionStatus.COMPLETED)
    assert await rig.stands(run_id) == ["running"]
    rig.ledger = usual
    if hangs:
        await rig.kill()
        await rig.start()
    else:
        rig._workers[0].driver.ledger = usual
    await rig.pass_time(40.0)
    await rig.shows(run_id, "completed")
    assert [event.type for event in await rig.ledger.events(run_id)].count("run.step.completed") == 4
    assert set(rig.steps.done.values()) == {1}

"""The workflow replays the histories that earlier versions of it wrote."""

from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from tests.temporal.record import HISTORIES, STORIES
from trellis.runs.temporal.workflow import ENDED_ACTIVITY, RUN_WORKFLOW, RunInput, RunWorkflow

STORED = sorted(HISTORIES.glob("*.json"))


def stored(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json("a run", path.read_text())


def replayer(code: type) -> Replayer:
    return Replayer(workflows=[code], workflow_runner=UnsandboxedWorkflowRunner())


@pytest.mark.requirement("PIPE-2")
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
async def test_a_stored_history_replays(path: Path):
    await replayer(RunWorkflow).replay_workflow(stored(path))


@workflow.defn(name=RUN_WORKFLOW)
class ChangedWorkflow:
    """What a careless change would be: it asks for the end of the run before the first step."""

    @workflow.run
    async def run(self, run: RunInput) -> int:
        await workflow.execute_activity(ENDED_ACTIVITY, run.run_id, start_to_close_timeout=timedelta(seconds=1))
        return run.steps


async def test_a_change_that_breaks_old_histories_is_noticed():
    with pytest.raises(workflow.NondeterminismError):
        await replayer(ChangedWorkflow).replay_workflow(stored(STORED[0]))


async def test_every_kind_of_history_is_stored():
    assert {path.stem.rpartition("-")[0] for path in STORED} == set(STORIES)

"""The workflow replays the histories that earlier versions of it wrote."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from tests.temporal.record import HISTORIES, STORIES
from trellis.runs.temporal.workflow import (
    ENDED_ACTIVITY,
    RUN_WORKFLOW,
    SAME_EPOCH,
    TAKEN_UP,
    RunHolder,
    RunInput,
    RunWorkflow,
)

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


@workflow.defn(name=RUN_WORKFLOW)
class UnpatchedWorkflow(RunWorkflow):
    """The workflow as it was before an announcement with the known epoch counted."""

    @workflow.signal(name=TAKEN_UP)
    def taken_up(self, holder: RunHolder) -> None:
        if self._holder is None or holder.epoch > self._holder.epoch:
            self._holder = holder

    @workflow.run
    async def run(self, run: RunInput) -> int:
        return await super().run(run)


async def test_histories_with_and_without_the_patch_of_the_same_epoch_are_stored_and_the_patch_is_needed():
    patched = [path for path in STORED if _marker(path) == {"id": SAME_EPOCH, "deprecated": False}]
    assert [path.stem for path in patched] == ["restored-1"]
    for path in patched:
        with pytest.raises(workflow.NondeterminismError):
            await replayer(UnpatchedWorkflow).replay_workflow(stored(path))


def _marker(path: Path) -> dict[str, Any] | None:
    """The patch that a history records; None without one."""
    for event in stored(path).events:
        if event.event_type == EventType.EVENT_TYPE_MARKER_RECORDED:
            (payload,) = event.marker_recorded_event_attributes.details["patch-data"].payloads
            return json.loads(payload.data)
    return None


async def test_every_kind_of_history_is_stored():
    assert {path.stem.rpartition("-")[0] for path in STORED} == set(STORIES)

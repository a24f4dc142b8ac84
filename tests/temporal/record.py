"""Writes the histories that `test_replay.py` replays: `python -m tests.temporal.record VERSION [STORY …]`.

A stored history stays as it is. After a change of the workflow, record new ones under new names.
"""

import asyncio
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from temporalio.api.enums.v1 import EventType

from tests.layers.temporal import TemporalRig, on_temporal
from tests.servers.temporal import TemporalServer, running_temporal
from tests.temporal.restoring import copy, take_over
from trellis.documents.errors import StepError, StepHopeless
from trellis.engine.jobs import JobId
from trellis.runs.orchestrator import StepContext, StepResult

HISTORIES = Path(__file__).parent / "histories"


async def plain(rig: TemporalRig) -> JobId:
    """A run whose step fails once and is retried."""
    usual, tries = rig.steps.acts["execute-agent"], list[str]()

    async def fails_once(context: StepContext, /) -> StepResult:
        tries.append(context.run_id)
        if len(tries) == 1:
            raise StepError(detail="not yet")
        return await usual(context)

    rig.steps.acts["execute-agent"] = fails_once
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.shows(run_id, "completed")
    return run_id


async def taken_over(rig: TemporalRig) -> JobId:
    """A run that a second process takes over in the middle of a step."""
    hold = rig.hold("persist-results")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.kill()
    await rig.start()
    hold.release()
    await rig.pass_time(40.0)
    await rig.shows(run_id, "completed")
    return run_id


async def replaced(rig: TemporalRig) -> JobId:
    """A run whose first process fails a step and dies before it writes the failure to the ledger.

    The workflow learns of the failure and of the next process at the same moment.
    """
    usual = rig.steps.acts["execute-agent"]

    async def fails_first(context: StepContext, /) -> StepResult:
        if len(hold.begun) == 1:
            raise StepHopeless(detail="the failure of a process that holds the run no more")
        return await usual(context)

    rig.steps.acts["execute-agent"] = fails_first
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.hang_before_failing()
    hold.release()
    await rig.until(lambda: _has(rig, run_id, EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED, 1))
    await rig.kill()
    await rig.pass_time(40.0)
    rig.polls = False
    await rig.start()
    await rig.until(lambda: _has(rig, run_id, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED, 2))
    await rig.poll()
    await rig.shows(run_id, "completed")
    return run_id


async def restored(rig: TemporalRig) -> JobId:
    """A run whose ledger is restored to before its claim. The next process has the epoch of the first, and another queue."""
    rig.options = replace(rig.options, pickup_s=1.0)
    backup = rig.folder / "backup"
    backup.mkdir()
    hold = rig.hold("execute-agent")
    run_id = await rig.trigger(await rig.agent("gardener"))
    await copy(rig.folder, backup)
    await rig.start()
    await rig.until(lambda: hold.begun == [run_id])
    await rig.kill()
    await copy(backup, rig.folder)
    rig.restart_projector()
    hold.release()
    await take_over(rig)
    await rig.shows(run_id, "completed")
    return run_id


async def _has(rig: TemporalRig, run_id: JobId, kind: "EventType.ValueType", count: int) -> bool:
    history = await rig.workflow(run_id).fetch_history()
    return [event.event_type for event in history.events].count(kind) == count


STORIES = {story.__name__.replace("_", "-"): story for story in (plain, taken_over, replaced, restored)}


async def record(server: TemporalServer, version: str, names: list[str]) -> None:
    for name in names or STORIES:
        with tempfile.TemporaryDirectory() as folder:
            async with on_temporal(Path(folder), server) as rig:
                workflow = rig.workflow(await STORIES[name](rig))
                await workflow.result()
                history = await workflow.fetch_history()
                text = re.sub(r'"stackTrace": "(\\.|[^"\\])*"', '"stackTrace": ""', history.to_json())
                await asyncio.to_thread((HISTORIES / f"{name}-{version}.json").write_text, text + "\n")


if __name__ == "__main__":
    with running_temporal() as running:
        asyncio.run(record(running, sys.argv[1], sys.argv[2:]))

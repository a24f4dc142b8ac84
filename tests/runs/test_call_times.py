"""The file of a step lists the calls that it made, and the event that counts the step has the times of the NLM (OBS-3)."""

import asyncio
import json
from typing import Any

import pytest

from tests.runs.conftest import Stand
from trellis.documents.errors import StepError
from trellis.documents.run_documents import STEP_ENTRY
from trellis.engine.call_times import CALLS_MAX, CallKind
from trellis.engine.metrics import STEP_CALL_SECONDS, process_metrics
from trellis.operations.slo import measure_objectives
from trellis.runs.orchestrator import StepContext, StepResult

pytestmark = pytest.mark.requirement("OBS-3")


async def driven(stand: Stand) -> list[dict[str, Any]]:
    """The files of a run's steps."""
    run_id, claimed = await stand.run_of(), await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await stand.until(drive.done, step_s=0.5)
    assert drive.result().state == "completed"
    kept = await stand.ledger.read_journal(run_id)
    return [json.loads(kept[STEP_ENTRY.format(number=number)]) for number in range(1, 5)]


async def test_calls_of_the_try_that_succeeded_are_in_the_file_of_the_step(stand: Stand):
    async def act(context: StepContext, /) -> StepResult:
        is_first = stand.steps.done["execute-agent"] == 1
        with context.calls.timed("notebooklm-query", CallKind.NLM):
            stand.clock.advance(0.25 if is_first else 1.5)
            if is_first:
                raise StepError(detail="the NLM is away")
        with context.calls.timed("memory.read", CallKind.MEMORY):
            stand.clock.advance(0.1)
        return StepResult(result={"summary": "s"})

    failed = ("nlm", "notebooklm-query", "failed")
    before = process_metrics.value(STEP_CALL_SECONDS, *failed)
    stand.steps.acts["execute-agent"] = act
    first, second, *_ = await driven(stand)
    assert first["calls"] == []
    assert second["calls"] == [
        {"name": "notebooklm-query", "kind": "nlm", "duration_ms": 1500, "outcome": "ok"},
        {"name": "memory.read", "kind": "memory", "duration_ms": 100, "outcome": "ok"},
    ]
    assert process_metrics.value(STEP_CALL_SECONDS, *failed) == before + 1, "metrics count those of every try"
    nlm = next(one for one in await measure_objectives(stand.ledger) if one.objective.name == "nlm_call_p95")
    assert (nlm.value, nlm.samples) == (1.5, 1), "an answered call is a sample, a failed one is not"


async def test_the_list_of_calls_is_bounded(stand: Stand):
    async def act(context: StepContext, /) -> StepResult:
        for _ in range(CALLS_MAX + 7):
            with context.calls.timed("x" * 200, CallKind.TOOL):
                pass
        return StepResult(result={})

    stand.steps.acts["load-context"] = act
    first, *_ = await driven(stand)
    assert (len(first["calls"]), first["calls_left_out"]) == (CALLS_MAX, 7)
    assert {len(one["name"]) for one in first["calls"]} == {100}

"""The service level objectives, measured on both ledgers: which job counts, as what, and until when (OBS-3)."""

import json

import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig, actor
from trellis.engine.jobs import CancelMode, Claimed, JobId, StepApplied
from trellis.lifecycles import Role, Trigger
from trellis.operations.slo import DAY_S, WEEK_S, SloMeasurement, SloStatus, measure_objectives

pytestmark = pytest.mark.requirement("OBS-3")

ORCHESTRATOR = actor(Role.ORCHESTRATOR)
BEGAN = "2026-01-01T00:00:00.000Z"


def step(name: str, ended: str = BEGAN, **more: object) -> bytes:
    return json.dumps({"name": name, "started_at": BEGAN, "finished_at": ended, **more}).encode()


async def run_at_work(rig: Rig) -> Claimed:
    run = await rig.submit_one(lifecycle="run", type="agent-run")
    await rig.move(run, "queued", by=ORCHESTRATOR)
    return await rig.claim_one(types=("agent-run",), lifecycle="run")


async def completed_run(rig: Rig, *steps: bytes, after_s: float = 0.0) -> None:
    run = await run_at_work(rig)
    for data in steps:
        await rig.pull(run, "step", by=ORCHESTRATOR, data=data)
    await rig.advance(after_s)
    await rig.pull(run, Trigger.COMPLETE, by=ORCHESTRATOR, data=b"{}")


async def completed_job(rig: Rig) -> None:
    lease = await rig.writing()
    assert isinstance(await rig.complete(lease, await rig.artifact_of(lease.job_id)), StepApplied)


async def failed_job(rig: Rig) -> JobId:
    job = await rig.submit_one(lifecycle="queue-job")
    await rig.drive(job, "RETRY_BACKOFF")
    await rig.move(job, "FAILED", by=ORCHESTRATOR)
    return job


async def measured(rig: Rig) -> dict[str, SloMeasurement]:
    return {one.objective.name: one for one in await measure_objectives(rig.ledger)}


async def test_an_empty_ledger_has_no_data(rig: Rig):
    await rig.pull(await rig.running(), Trigger.FAIL)  # plain jobs are not measured
    found = await measured(rig)
    assert {(one.status, one.value, one.samples) for one in found.values()} == {(SloStatus.NO_DATA, None, 0)}
    assert len(found) == 6


async def test_runs_and_queue_jobs_that_fail_count_and_cancelled_ones_do_not(rig: Rig):
    await completed_run(rig)
    await completed_job(rig)
    await failed_job(rig)
    broken = await run_at_work(rig)
    await rig.pull(broken, Trigger.FAIL, by=ORCHESTRATOR, data=b'{"error_text":"AGENT_TIMEOUT: slow"}', cause="slow")
    for lifecycle in ("run", "queue-job"):
        job = await rig.submit_one(lifecycle=lifecycle)
        await rig.cancel(job, CancelMode.HARD, by=ORCHESTRATOR if lifecycle == "run" else ADMIN)
    stopped = await run_at_work(rig)
    await rig.pull(stopped, Trigger.FAIL, by=ORCHESTRATOR, data=b'{"error_text":"CANCELLED: stopped on request"}')
    found = (await measured(rig))["completion_rate"]
    assert (found.value, found.samples, found.bad, found.status) == (0.5, 4, 2, SloStatus.MISSED)


async def test_a_requeued_job_counts_once_as_failed_and_once_as_completed(rig: Rig):
    job = await failed_job(rig)
    await rig.ledger.requeue(ADMIN, [job], rig.request(), limit=1, cause=None)
    lease = await rig.drive(job, "ARTIFACT_WRITE")
    assert lease is not None
    await rig.complete(lease, await rig.artifact_of(job))
    found = (await measured(rig))["completion_rate"]
    assert (found.samples, found.bad) == (2, 1)


async def test_dead_jobs_are_those_of_seven_days_and_failed_ones_are_not_dead_yet(rig: Rig):
    for _ in range(3):
        await completed_job(rig)
    await rig.move(await failed_job(rig), "DEAD", by=ORCHESTRATOR)
    await failed_job(rig)
    found = (await measured(rig))["dead_rate"]
    assert (found.value, found.samples, found.status) == (0.25, 4, SloStatus.MISSED)
    await rig.advance(WEEK_S - 1.0)
    await completed_job(rig)
    assert (await measured(rig))["dead_rate"].value == pytest.approx(0.2)
    await rig.advance(1.001)
    found = (await measured(rig))["dead_rate"]
    assert (found.value, found.samples, found.status, found.error_budget_left) == (0.0, 1, SloStatus.MET, 1.0)


async def test_times_come_from_the_stored_steps_and_events_of_the_last_day(rig: Rig):
    slow = "2026-01-01T00:00:06.500Z"
    await completed_run(
        rig,
        step("load-context", slow),
        step("execute-agent", slow, nlm_ms=[61_000, 250]),
        step("persist-results", "2026-01-01T00:00:01.999Z"),
        step("finalize", slow),
        after_s=119.0,
    )
    found = await measured(rig)
    assert {name: (one.value, one.samples, one.status.value) for name, one in found.items() if "p95" in name} == {
        "end_to_end_p95": (119.0, 1, "met"),
        "context_assembly_p95": (6.5, 1, "missed"),
        "nlm_call_p95": (61.0, 2, "missed"),
        "artifact_write_p95": (1.999, 1, "met"),
    }
    await rig.advance(DAY_S - 119.0)
    assert (await measured(rig))["context_assembly_p95"].samples == 1, "the first moment of the window counts"
    await rig.advance(0.001)
    found = await measured(rig)
    assert (found["context_assembly_p95"].samples, found["end_to_end_p95"].samples) == (0, 1)
    await rig.advance(119.0)
    assert {one.status for one in (await measured(rig)).values()} == {SloStatus.NO_DATA}


async def test_times_are_those_of_the_newest_runs_and_rates_count_every_job(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.operations.slo.RUNS_MAX", 2)
    cancelled = await rig.submit_one(lifecycle="run")
    await rig.cancel(cancelled, CancelMode.HARD, by=ORCHESTRATOR)
    for after_s in (300.0, 1.0, 2.0):
        await completed_run(rig, step("load-context"), after_s=after_s)
    found = await measured(rig)
    end_to_end, context = found["end_to_end_p95"], found["context_assembly_p95"]
    assert (end_to_end.value, end_to_end.samples, end_to_end.is_partial) == (2.0, 2, True)
    assert (context.samples, context.is_partial) == (3, False), "of each run four steps may be looked at"
    assert (found["completion_rate"].samples, found["completion_rate"].bad) == (3, 0)
    for _ in range(2):
        broken = await run_at_work(rig)
        await rig.pull(broken, Trigger.FAIL, by=ORCHESTRATOR, data=b'{"error_text":"AGENT_TIMEOUT: slow"}')
    # Beyond the newest two ends without success, what was cancelled is not told apart from what failed.
    rate = (await measured(rig))["completion_rate"]
    assert (rate.samples, rate.bad) == (6, 3)

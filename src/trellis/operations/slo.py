"""Service level objectives: what an instance promises, and what its ledger says about it (OBS-3).

`OBJECTIVES` declares them once. Everything is measured from stored events, so every process gives the same answer and a
restart changes none. What counts as a sample stands in `Objective.counts` and in docs/how-to/monitor.md.

- A percentile is the nearest rank: of n samples in ascending order, P95 is the one at position ceil(0.95 * n).
- The error budget is how many bad samples the objective allows in its window: 5 % of the samples for a P95 and for a
  rate above 95 %, 1 % for a rate below 1 %. `error_budget_left` is the unspent part: 1 is all of it, 0 none, below 0 is
  overspent.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from trellis.documents import ids, run_documents
from trellis.engine.event_data import data_of
from trellis.engine.ledger import Ledger
from trellis.engine.records import SampledEvent
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.research import queue_job

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
RUNS_MAX = 5_000
"""Most runs, newest first, whose times one measurement looks at. The failures that it looks at are bounded the same."""
P95_PERCENT = 95

COMPLETE_EVENT = "artifact.finalized"
"""Stands for the completion of a queue job: the ledger writes both in one transaction, one for one. Unlike the event
`job_succeeded`, no other lifecycle has it, so an index alone counts it."""
DEAD_EVENT = "job_dead_lettered"


class SloUnit(StrEnum):
    """What the value of an objective is: a share from 0 to 1, or seconds."""

    RATIO = "ratio"
    SECONDS = "seconds"


class SloStatus(StrEnum):
    """Whether an objective is met over its window."""

    MET = "met"
    MISSED = "missed"
    NO_DATA = "no data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One objective. It is met while its value is above the target, or below it, as `is_above` says."""

    name: str
    title: str
    unit: SloUnit
    target: float
    is_above: bool = False
    """Whether the value must be above the target; otherwise below."""
    window_s: float = DAY_S
    bad_percent: int = 100 - P95_PERCENT
    """The error budget: how many of 100 samples may be bad."""
    counts: str
    """What one sample is."""


COMPLETION_RATE = Objective(
    name="completion_rate",
    title="Job completion rate",
    unit=SloUnit.RATIO,
    target=0.95,
    is_above=True,
    counts="runs and queue jobs that completed or failed; cancelled ones do not count",
)
END_TO_END = Objective(
    name="end_to_end_p95",
    title="P95 end-to-end run time",
    unit=SloUnit.SECONDS,
    target=120.0,
    counts="completed runs, from the request to the end",
)
CONTEXT_ASSEMBLY = Objective(
    name="context_assembly_p95",
    title="P95 context assembly",
    unit=SloUnit.SECONDS,
    target=5.0,
    counts=f"files of finished steps: {ids.step_file(1)}",
)
NLM_CALL = Objective(
    name="nlm_call_p95",
    title="P95 NLM call",
    unit=SloUnit.SECONDS,
    target=60.0,
    counts=f"answered calls of the NLM in files of finished steps: {ids.step_file(2)}",
)
ARTIFACT_WRITE = Objective(
    name="artifact_write_p95",
    title="P95 artifact write",
    unit=SloUnit.SECONDS,
    target=2.0,
    counts=f"files of finished steps: {ids.step_file(3)}",
)
DEAD_RATE = Objective(
    name="dead_rate",
    title="Dead job rate",
    unit=SloUnit.RATIO,
    target=0.01,
    window_s=WEEK_S,
    bad_percent=1,
    counts="queue jobs that completed or became DEAD",
)
OBJECTIVES = (COMPLETION_RATE, END_TO_END, CONTEXT_ASSEMBLY, NLM_CALL, ARTIFACT_WRITE, DEAD_RATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SloMeasurement:
    """One objective as measured over its window. `value` and `error_budget_left` are None without samples."""

    objective: Objective
    status: SloStatus
    value: float | None
    samples: int
    bad: int
    """Samples that spend the error budget: failed or dead jobs, or times that are not below the target."""
    error_budget_left: float | None
    is_partial: bool = False
    """Whether the window has more samples than one measurement looks at; then these are the newest."""


def window_text(window_s: float) -> str:
    """A window as the documentation writes it: a day is 24 h, a week 7 d."""
    return f"{window_s / 3600:g} h" if window_s <= DAY_S else f"{window_s / DAY_S:g} d"


def measure_rate(objective: Objective, *, good: int, bad: int) -> SloMeasurement:
    """The share of good samples if the value must be above the target, else the share of bad ones."""
    samples = good + bad
    if not samples:
        return _without_data(objective)
    is_met = bad * 100 < objective.bad_percent * samples
    return SloMeasurement(
        objective=objective,
        status=SloStatus.MET if is_met else SloStatus.MISSED,
        value=(good if objective.is_above else bad) / samples,
        samples=samples,
        bad=bad,
        error_budget_left=_budget_left(objective, samples, bad),
    )


def measure_p95(objective: Objective, times_s: Sequence[float], *, is_partial: bool = False) -> SloMeasurement:
    """The P95 of these times."""
    if not times_s:
        return _without_data(objective)
    value, bad = nearest_rank(times_s, P95_PERCENT), sum(one >= objective.target for one in times_s)
    return SloMeasurement(
        objective=objective,
        status=SloStatus.MET if value < objective.target else SloStatus.MISSED,
        value=value,
        samples=len(times_s),
        bad=bad,
        error_budget_left=_budget_left(objective, len(times_s), bad),
        is_partial=is_partial,
    )


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """The percentile by nearest rank: the smallest value that is not below `percent` % of all values."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def _without_data(objective: Objective) -> SloMeasurement:
    return SloMeasurement(
        objective=objective, status=SloStatus.NO_DATA, value=None, samples=0, bad=0, error_budget_left=None
    )


def _budget_left(objective: Objective, samples: int, bad: int) -> float:
    return 1 - bad * 100 / (objective.bad_percent * samples)


# --- measured on a ledger --------------------------------------------------------------------------------------------


async def measure_objectives(ledger: Ledger) -> list[SloMeasurement]:
    """Every objective over its window up to now, in the order of `OBJECTIVES`."""
    since = await ledger.now() - timedelta(seconds=DAY_S)
    runs_max, steps_max = RUNS_MAX, RUNS_MAX * len(ids.STEPS)
    ended = await ledger.sample_events(RUN.name, [run_documents.COMPLETED], since=since, limit=runs_max + 1)
    steps = await ledger.sample_events(RUN.name, [run_documents.STEP_DONE], since=since, limit=steps_max + 1)
    times = await asyncio.to_thread(StepTimes.of, steps[:steps_max])
    is_partial = len(steps) > steps_max
    return [
        await measure_completion_rate(ledger),
        measure_p95(
            END_TO_END,
            [(event.ts - event.submitted_at).total_seconds() for event in ended[:runs_max]],
            is_partial=len(ended) > runs_max,
        ),
        measure_p95(CONTEXT_ASSEMBLY, times.context_s, is_partial=is_partial),
        measure_p95(NLM_CALL, times.nlm_calls_s, is_partial=is_partial),
        measure_p95(ARTIFACT_WRITE, times.persist_s, is_partial=is_partial),
        await measure_dead_rate(ledger),
    ]


async def measure_completion_rate(ledger: Ledger) -> SloMeasurement:
    """How many of the runs and queue jobs that ended in the window completed.

    A job that failed, was requeued and then completed counts once as failed and once as completed.
    """
    since = await ledger.now() - timedelta(seconds=COMPLETION_RATE.window_s)
    runs = await ledger.count_events([run_documents.COMPLETED], since=since, lifecycle=RUN.name)
    jobs = await ledger.count_events([COMPLETE_EVENT], since=since, lifecycle=ARTIFACT.name)
    bad = await _failed(ledger, RUN.name, run_documents.FAILED, since)
    bad += await _failed(ledger, QUEUE_JOB.name, queue_job.FAILED_EVENT, since)
    return measure_rate(COMPLETION_RATE, good=sum(runs.values()) + sum(jobs.values()), bad=bad)


async def _failed(ledger: Ledger, lifecycle: str, type_: str, since: datetime) -> int:
    """How many failed without having been cancelled. Beyond the newest RUNS_MAX, all count as failed."""
    failures = await ledger.sample_events(lifecycle, [type_], since=since, limit=RUNS_MAX)
    is_cancel = run_documents.was_cancelled if lifecycle == RUN.name else queue_job.is_cancel
    cancelled = sum(map(is_cancel, failures))
    if len(failures) < RUNS_MAX:
        return len(failures) - cancelled
    return (await ledger.count_events([type_], since=since, lifecycle=lifecycle))[type_] - cancelled


async def measure_dead_rate(ledger: Ledger, *, window_s: float = DEAD_RATE.window_s) -> SloMeasurement:
    """How many of the queue jobs that completed or became DEAD in the window became DEAD."""
    since = await ledger.now() - timedelta(seconds=window_s)
    complete = await ledger.count_events([COMPLETE_EVENT], since=since, lifecycle=ARTIFACT.name)
    dead = await ledger.count_events([DEAD_EVENT], since=since, lifecycle=QUEUE_JOB.name)
    return measure_rate(DEAD_RATE, good=complete[COMPLETE_EVENT], bad=dead[DEAD_EVENT])


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times that the events of counted steps carry, in seconds."""

    context_s: list[float]
    nlm_calls_s: list[float]
    persist_s: list[float]

    @classmethod
    def of(cls, steps: Sequence[SampledEvent]) -> "StepTimes":
        times = cls([], [], [])
        for data in map(data_of, steps):
            match data.get("name"):
                case "load-context":
                    times.context_s.append(_lasted_s(data))
                case "execute-agent":
                    times.nlm_calls_s.extend(ms / 1000 for ms in data.get(run_documents.NLM_MS, ()))
                case "persist-results":
                    times.persist_s.append(_lasted_s(data))
                case _:
                    pass
        return times


def _lasted_s(step: dict[str, Any]) -> float:
    began, ended = (datetime.fromisoformat(step[name]) for name in ("started_at", "finished_at"))
    return (ended - began).total_seconds()

"""When an objective is met, at its borders: exactly the target is missed, and the error budget says the same."""

from pathlib import Path

import pytest

from trellis.operations.slo import (
    COMPLETION_RATE,
    CONTEXT_ASSEMBLY,
    DEAD_RATE,
    OBJECTIVES,
    Objective,
    SloStatus,
    measure_p95,
    measure_rate,
    nearest_rank,
    window_text,
)

MET, MISSED, NO_DATA = SloStatus.MET, SloStatus.MISSED, SloStatus.NO_DATA


def test_windows_are_written_as_the_guide_writes_them():
    guide = (Path(__file__).parents[2] / "docs/how-to/monitor.md").read_text()
    for one in OBJECTIVES:
        (row,) = [line for line in guide.splitlines() if line.startswith(f"| {one.title} |")]
        assert row.split("|")[3].strip() == window_text(one.window_s)


@pytest.mark.requirement("OBS-3")
def test_the_six_objectives_have_the_targets_and_windows_of_the_specification():
    declared = {one.name: (one.is_above, one.target, one.window_s / 3600) for one in OBJECTIVES}
    assert declared == {
        "completion_rate": (True, 0.95, 24),
        "end_to_end_p95": (False, 120, 24),
        "context_assembly_p95": (False, 5, 24),
        "nlm_call_p95": (False, 60, 24),
        "artifact_write_p95": (False, 2, 24),
        "dead_rate": (False, 0.01, 7 * 24),
    }


@pytest.mark.requirement("OBS-3")
@pytest.mark.parametrize(
    "objective, good, bad, value, status, left",
    [
        (COMPLETION_RATE, 0, 0, None, NO_DATA, None),
        (COMPLETION_RATE, 1, 0, 1.0, MET, 1.0),
        (COMPLETION_RATE, 0, 1, 0.0, MISSED, -19.0),
        (COMPLETION_RATE, 96, 4, 0.96, MET, 0.2),
        (COMPLETION_RATE, 95, 5, 0.95, MISSED, 0.0),
        (COMPLETION_RATE, 94, 6, 0.94, MISSED, -0.2),
        (DEAD_RATE, 0, 0, None, NO_DATA, None),
        (DEAD_RATE, 200, 0, 0.0, MET, 1.0),
        (DEAD_RATE, 199, 1, 0.005, MET, 0.5),
        (DEAD_RATE, 99, 1, 0.01, MISSED, 0.0),
        (DEAD_RATE, 98, 2, 0.02, MISSED, -1.0),
    ],
)
def test_a_rate_is_met_while_error_budget_is_left(
    objective: Objective, good: int, bad: int, value: float | None, status: SloStatus, left: float | None
):
    found = measure_rate(objective, good=good, bad=bad)
    assert (found.value, found.status, found.samples, found.bad) == (value, status, good + bad, bad)
    assert found.error_budget_left == (None if left is None else pytest.approx(left))


@pytest.mark.requirement("OBS-3")
@pytest.mark.parametrize(
    "times_s, value, status, left",
    [
        ([], None, NO_DATA, None),
        ([4.9], 4.9, MET, 1.0),
        ([5.0], 5.0, MISSED, -19.0),
        ([1.0] * 19 + [9.0], 1.0, MET, 0.0),
        ([1.0] * 18 + [9.0] * 2, 9.0, MISSED, -1.0),
        ([1.0] * 20 + [9.0], 1.0, MET, 1 - 100 / 105),
        ([1.0] * 95 + [9.0] * 5, 1.0, MET, 0.0),
        ([9.0] * 6 + [1.0] * 94, 9.0, MISSED, -0.2),
    ],
)
def test_a_p95_is_met_while_no_more_than_five_percent_are_too_slow(
    times_s: list[float], value: float | None, status: SloStatus, left: float | None
):
    found = measure_p95(CONTEXT_ASSEMBLY, times_s)
    assert (found.value, found.status, found.samples) == (value, status, len(times_s))
    assert found.error_budget_left == (None if left is None else pytest.approx(left))


def test_a_percentile_is_the_nearest_rank():
    values = [float(one) for one in range(1, 101)]
    assert [nearest_rank(values[::-1], percent) for percent in (1, 50, 95, 100)] == [1, 50, 95, 100]
    assert [nearest_rank(values[:n], 95) for n in (1, 19, 20, 21, 40)] == [1, 19, 19, 20, 38]

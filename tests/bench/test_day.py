"""The simulated day: what it says follows from the costs it was given."""

import pytest

from bench.day import KEPT_BYTES, SECONDS, simulate


def test_day_that_fits_leaves_nothing_waiting_and_costs_what_its_jobs_cost():
    day = simulate(10_000, cores=2, workers=2)
    assert (day.waiting_max, day.behind_s) == (0, 0)
    assert 0.0001 < day.busy_mean < 0.0003, "1.6 ms of processor time a job, alone in its turn"
    assert day.kept_gb == pytest.approx(10_000 * KEPT_BYTES / 1e9)


def test_busier_day_takes_more_jobs_in_a_turn_and_less_time_for_each():
    quiet, busy = (simulate(n, cores=8, workers=8) for n in (1_000_000, 100_000_000))
    assert busy.busy_mean / quiet.busy_mean < 100 * 0.95
    assert busy.behind_s < SECONDS / 100


def test_day_beyond_the_processor_is_never_caught_up():
    day = simulate(1_000_000_000, cores=2, workers=2)
    assert day.behind_s > SECONDS / 2
    assert day.busy_mean <= 1.4

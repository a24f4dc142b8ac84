"""How long a job rests that cannot go now: soon looked at again at first, and in the end written about some thousand times and no more."""

from collections.abc import Callable

import pytest

from trellis.bus.scheduling import dispatch_policy

WEEK_S = 7 * 86_400


@pytest.mark.parametrize(
    "rest_s, first_s, longest_s",
    [
        (dispatch_policy.order_delay_s, 30.0, 600.0),
        (dispatch_policy.placement_delay_s, 5.0, 300.0),
        (dispatch_policy.kernel_doubt_delay_s, 30.0, 600.0),
        (lambda age_s: dispatch_policy.throttle_delay_s(age_s, 0.01), 0.1, 300.0),
    ],
)
def test_a_job_that_waits_for_a_week_is_written_about_some_thousand_times(
    rest_s: Callable[[float], float], first_s: float, longest_s: float
):
    assert rest_s(0.0) == first_s
    assert rest_s(WEEK_S) == longest_s
    age_s, rests = 0.0, 0
    while age_s < WEEK_S:
        age_s, rests = age_s + rest_s(age_s), rests + 1
    assert rests < 3_000


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("asked_s, rests_s", [(None, 5.0), (10.0, 10.0), (float("inf"), 86_400.0), (float("nan"), 0.1)])
def test_throttled_job_is_delayed_as_the_policy_states_within_bounds(asked_s: float | None, rests_s: float):
    assert dispatch_policy.throttle_delay_s(1.0, asked_s) == rests_s

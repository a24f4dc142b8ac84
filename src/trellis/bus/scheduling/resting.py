"""How long a job rests that cannot go now. Pure.

Every rest is an event, so whatever a job waits for, it rests longer the longer it has waited: a job that waits for a week is written
about some thousand times, and not some hundred thousand.
"""

ORDER_S_MIN, ORDER_S_MAX = 30.0, 600.0
PLACEMENT_S_MIN, PLACEMENT_S_MAX = 5.0, 30.0
LASTING_AFTER_S, LASTING_S_MAX = 600.0, 300.0
"""A wait that has lasted so long lasts: it is looked at more seldom still."""
THROTTLE_S_DEFAULT = 5.0
THROTTLE_S_MIN, THROTTLE_S_MAX = 0.1, 24 * 3600.0
THROTTLE_AGE_DIVISOR = 100
REFUSED_S_MIN, REFUSED_S_MAX = 30.0, 600.0


def order_delay_s(age_s: float) -> float:
    """A step that is not in turn; the end of the step before lets it go earlier."""
    return min(ORDER_S_MAX, max(ORDER_S_MIN, age_s / 4))


def placement_delay_s(age_s: float) -> float:
    """One that none of the workers may have."""
    longest = LASTING_S_MAX if age_s >= LASTING_AFTER_S else PLACEMENT_S_MAX
    return min(longest, max(PLACEMENT_S_MIN, age_s / 4))


def throttle_delay_s(age_s: float, asked_s: float | None) -> float:
    """One that the policy throttles: as long as it says, and at least for a small part of the job's age."""
    at_least = max(THROTTLE_S_MIN, min(LASTING_S_MAX, age_s / THROTTLE_AGE_DIVISOR))
    return min(THROTTLE_S_MAX, max(at_least, asked_s or THROTTLE_S_DEFAULT))


def kernel_doubt_delay_s(age_s: float) -> float:
    """One about which the kernel cannot decide."""
    return min(REFUSED_S_MAX, max(REFUSED_S_MIN, age_s / 4))

"""The rate limit of concurrency keys: how often jobs of one key are claimed, which a job type declares.

A token bucket, kept as one time for each key: `used_until`. A claim takes one token and moves that time on by the length
of a token, from now or from where it was. A claim is allowed while it does not get further than `burst` tokens ahead of
now. So in any time t at most burst + rate x t jobs of a key are claimed. Both ledgers count in whole microseconds and
round the length of a token up.
"""

import math
from dataclasses import dataclass

from trellis.engine.errors import OptionInvalid
from trellis.engine.option_values import CLAIMS_A_SECOND, check_whole, check_within

KEY_RATE_MIN, KEY_RATE_MAX = 1e-6, 100_000.0
KEY_BURST_MAX = 10_000
KEY_TOKEN_WAIT_S_MIN = 0.1
"""A sweep comes back for the next token of a key after this long at the earliest. A claim looks for tokens too."""
UNCLAIMED_WAIT_S = 1.0
"""How long after a look at a key whose tokens are all set aside for ready jobs the next look is, while nobody claims them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRate:
    """How many jobs of one concurrency key may be claimed in a second, and how many at once after a pause."""

    per_second: float
    burst: int

    @property
    def phrase(self) -> str:
        """The rate in words."""
        return f"{self.per_second:g} a second"


def key_rate(per_second: float | None, burst: int | None) -> KeyRate | None:
    """The rate that these options declare; None without one. Raises OptionInvalid.

    Without `burst`, what the rate gives in a second may be claimed at once, and at least one job.
    """
    if per_second is None:
        if burst is not None:
            raise OptionInvalid(
                option="burst_per_key", value=burst, expected="give rate_per_key too: it bounds that rate"
            )
        return None
    check_within("rate_per_key", per_second, KEY_RATE_MIN, KEY_RATE_MAX, of=CLAIMS_A_SECOND)
    burst = min(KEY_BURST_MAX, math.ceil(per_second)) if burst is None else burst
    check_whole("burst_per_key", burst, 1, KEY_BURST_MAX)
    return KeyRate(per_second=float(per_second), burst=burst)


def check_key_rate(rate: KeyRate | None) -> None:
    """Check a rate that was made without `key_rate`. Raises OptionInvalid."""
    if rate is not None:
        key_rate(rate.per_second, rate.burst)

"""How many jobs wait, at a cost that does not grow with them: short queues are counted, long ones from time to time."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from trellis.engine.records import QueueDepth

COUNTED_MAX = 200
"""The longest queue that every reader counts."""
COUNT_ALL = 2**62
RECOUNT_S_MIN = 1.0
RECOUNT_COST_FACTOR = 50
"""Long queues are counted again after 50 times the time that it took, and not sooner than RECOUNT_S_MIN."""
PLACES = ("ready", "scheduled", "blocked", "held")

CountQueues = Callable[[int], Awaitable[list[QueueDepth]]]
"""Counts the jobs of each type and place, at most so many of each queue: one type that is ready, one lifecycle that is
scheduled, all blocked or all held jobs."""
_Queue = tuple[str, str, str]


class QueueCounts:
    """The counts of one ledger as this process last read them.

    A queue of at most COUNTED_MAX jobs is always counted, so that an empty one is seen at once. A longer one has the
    number that the last full count found.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: list[QueueDepth] = []
        self._good_until: float | None = None

    async def read(self, count: CountQueues, *, exact: bool) -> list[QueueDepth]:
        """The depth of each queue, by type and lifecycle. `exact` counts all jobs anew."""
        if exact:
            return await self._count_all(count)
        depths = await count(COUNTED_MAX + 1)
        long = _long_queues(depths)
        if not long:
            return depths
        if self._good_until is None or self._clock() >= self._good_until:
            await self._count_all(count)
        return _merged(depths, self._last, long)

    async def _count_all(self, count: CountQueues) -> list[QueueDepth]:
        began = self._clock()
        self._last = await count(COUNT_ALL)
        now = self._clock()
        self._good_until = now + max(RECOUNT_S_MIN, RECOUNT_COST_FACTOR * (now - began))
        return self._last


def _queue(depth: QueueDepth, place: str) -> _Queue:
    """What is counted together."""
    if place == "ready":
        return place, depth.lifecycle, depth.type
    return place, depth.lifecycle if place == "scheduled" else "", ""


def _long_queues(depths: Iterable[QueueDepth]) -> set[_Queue]:
    counted: Counter[_Queue] = Counter()
    for depth in depths:
        for place in PLACES:
            counted[_queue(depth, place)] += getattr(depth, place)
    return {queue for queue, number in counted.items() if number > COUNTED_MAX}


def _merged(short: Sequence[QueueDepth], whole: Sequence[QueueDepth], long: set[_Queue]) -> list[QueueDepth]:
    """The depths of `short`, but those of long queues as `whole` has them."""
    counted = {(depth.type, depth.lifecycle): depth for depth in whole}
    known = {(depth.type, depth.lifecycle) for depth in short}
    depths = list(short) + [
        replace(depth, ready=0, scheduled=0, blocked=0, held=0, oldest_ready_s=None)
        for key, depth in counted.items()
        if key not in known and any(getattr(depth, place) and _queue(depth, place) in long for place in PLACES)
    ]
    return sorted(
        (_with_long(depth, counted.get((depth.type, depth.lifecycle)), long) for depth in depths),
        key=lambda depth: (depth.type, depth.lifecycle),
    )


def _with_long(depth: QueueDepth, counted: QueueDepth | None, long: set[_Queue]) -> QueueDepth:
    numbers: dict[str, int] = {}
    for place in PLACES:
        if _queue(depth, place) in long:
            number = 0 if counted is None else getattr(counted, place)
            # The type's first jobs were counted just now: a full count from before cannot make them fewer.
            numbers[place] = max(number, getattr(depth, place))
    return replace(depth, **numbers) if numbers else depth

"""Short queues are counted at every call, long ones from time to time."""

from trellis.engine.records import QueueDepth
from trellis.ledgers.queue_counts import COUNTED_MAX, RECOUNT_COST_FACTOR, RECOUNT_S_MIN, QueueCounts


def depth(type_: str, ready: int = 0, scheduled: int = 0) -> QueueDepth:
    return QueueDepth(
        type=type_,
        lifecycle="leased-job",
        ready=ready,
        scheduled=scheduled,
        blocked=0,
        held=0,
        paused=False,
        oldest_ready_s=None,
        rate_limit=None,
    )


class Queues:
    """Queues that count themselves, and what they were asked for."""

    def __init__(self, **numbers: int) -> None:
        self.ready = numbers
        self.scheduled: dict[str, int] = {}
        self.limits: list[int] = []
        self.now = 0.0
        self.took_s = 0.0
        self.counts = QueueCounts(clock=lambda: self.now)

    async def count(self, most: int) -> list[QueueDepth]:
        self.limits.append(most)
        self.now += self.took_s if most > COUNTED_MAX + 1 else 0.0
        depths: list[QueueDepth] = []
        left = most
        for type_ in sorted({*self.ready, *self.scheduled}):
            scheduled = min(left, self.scheduled.get(type_, 0))
            left -= scheduled
            ready = min(most, self.ready.get(type_, 0))
            if scheduled or type_ in self.ready:
                depths.append(depth(type_, ready, scheduled))
        return depths

    async def read(self, *, exact: bool = False) -> dict[str, tuple[int, int]]:
        depths = await self.counts.read(self.count, exact=exact)
        return {one.type: (one.ready, one.scheduled) for one in depths}


async def test_short_queues_are_counted_at_every_call_and_never_further():
    queues = Queues(a=COUNTED_MAX, b=1)
    assert await queues.read() == {"a": (COUNTED_MAX, 0), "b": (1, 0)}
    queues.ready["a"] = 0
    assert await queues.read() == {"a": (0, 0), "b": (1, 0)}
    assert queues.limits == [COUNTED_MAX + 1] * 2


async def test_a_long_queue_is_counted_again_after_a_multiple_of_what_the_count_took():
    queues = Queues(a=100_000, b=1)
    queues.took_s = RECOUNT_S_MIN / 10
    assert await queues.read() == {"a": (100_000, 0), "b": (1, 0)}
    queues.ready.update(a=90_000, b=2)
    queues.now += RECOUNT_COST_FACTOR * queues.took_s - 0.1
    assert await queues.read() == {"a": (100_000, 0), "b": (2, 0)}, "the short one is counted now"
    queues.now += 0.2
    assert (await queues.read())["a"] == (90_000, 0)


async def test_a_long_queue_that_was_drained_is_seen_at_once():
    queues = Queues(a=100_000)
    await queues.read()
    queues.ready["a"] = 3
    assert await queues.read() == {"a": (3, 0)}


async def test_types_that_a_bounded_count_did_not_reach_are_in_the_long_queue():
    """Scheduled jobs of all types are one queue: the first of them may all have one type."""
    queues = Queues()
    queues.scheduled = {"a": 10_000, "b": 5}
    assert await queues.read() == {"a": (0, 10_000), "b": (0, 5)}


async def test_an_exact_count_is_made_anew():
    queues = Queues(a=100_000)
    await queues.read()
    queues.ready["a"] = 99_999
    assert await queues.read(exact=True) == {"a": (99_999, 0)}
    assert await queues.read() == {"a": (99_999, 0)}, "and the others have it too"

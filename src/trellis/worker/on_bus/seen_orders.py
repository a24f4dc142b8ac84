"""Which orders a worker has seen, so that none is executed twice and none that is out of date is executed at all.

Our own control plane gives every handing-out a wire id of its own. Other schedulers send the job's id with a dispatch: the same dispatch
and attempt again is a copy, the next attempt of a dispatch is a new order, and any other attempt of it is not executed. One that jumps
forward may follow attempts at other workers: it is given back, so that its scheduler goes on, and the attempt after it is a new order here.
"""

from collections import OrderedDict
from enum import StrEnum

from trellis.bus.messages import JobResult
from trellis.engine.recent import LruCache
from trellis.worker.on_bus.attempt import OrderAttempt

SEEN_MAX = 10_000
"""How many orders are remembered."""


class OrderKind(StrEnum):
    """What an order is beside those that came before it."""

    NEW = "new"
    COPY = "copy"
    STALE = "stale attempt"
    """A lower attempt than the last one of its dispatch."""
    FUTURE = "future attempt"
    """An attempt that does not follow the last one of its dispatch here."""


class SeenOrders:
    """The orders of one worker."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, JobResult | None] = OrderedDict()
        self._last_attempts: LruCache[tuple[str, str], int] = LruCache(SEEN_MAX)

    def note(self, attempt: OrderAttempt) -> OrderKind:
        """What kind of order this is; it is remembered unless it is out of date."""
        kind = OrderKind.NEW
        if attempt.identity in self._results:
            return OrderKind.COPY
        dispatch = attempt.order.dispatch
        if not attempt.asks and dispatch.dispatch_id and dispatch.attempt:
            key = (attempt.wire_id, dispatch.dispatch_id)
            last = self._last_attempts.get(key)
            if last is not None and dispatch.attempt <= last:
                return OrderKind.STALE
            if last is not None and dispatch.attempt > last + 1:
                kind = OrderKind.FUTURE
            self._last_attempts[key] = dispatch.attempt
        self._results[attempt.identity] = None
        while len(self._results) > SEEN_MAX:
            self._results.popitem(last=False)
        return kind

    def settle(self, attempt: OrderAttempt, result: JobResult) -> None:
        """Remember what was reported of an order."""
        self._results[attempt.identity] = result

    def result(self, attempt: OrderAttempt) -> JobResult | None:
        """What was reported of this order; None while nothing was."""
        return self._results.get(attempt.identity)

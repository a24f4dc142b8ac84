"""Orders on a bus worker: the ones it holds (`OrderAttempt`) and the ones it has seen (`SeenOrders`)."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, cast

from trellis.bus.messages import (
    ASK_FIRST,
    JOB_ID_IN_ENV,
    LEASE_IN_ENV,
    OWN_JOB_ID_IN_ENV,
    START_STEP,
    Dispatch,
    JobOrder,
    JobProgress,
    JobResult,
    Status,
)
from trellis.bus.requests import RETRY_ATTEMPT, JobRequest, read_wire_id
from trellis.engine import tracing
from trellis.engine.event_data import ArtifactPointer
from trellis.engine.jobs import Epoch, JobId
from trellis.engine.recent_entries import LruCache
from trellis.worker.held import StopCause

# One held order: what was sent, how far it is, and whether it should stop.
#
# An order waits for a slot, asks for its start, runs, and reports its result, in this sequence. It is mutable and
# belongs to the event loop. A handler thread only reads its flags and stores its progress.

LEASE_S_DEFAULT = 30.0
LEASE_S_MAX = 86_400.0
BEAT_S_MIN = 0.2
MESSAGE_CHARS_MAX = 2_000


class OrderAttempt:
    """One execution of an order, identified by the id of its request on the wire."""

    def __init__(self, order: JobOrder, trace_id: str, sender_id: str) -> None:
        self.order = order
        self.trace_id = trace_id
        self.sender_id = sender_id
        """The sender of the order. Only answers from this sender count."""
        self.asks = order.request.env.get(ASK_FIRST) == "ask"
        """Whether our own control plane sent the order. Other schedulers do not answer questions."""
        self.begun_at: float | None = None
        self.heard_at: float | None = None
        """When the control plane last confirmed that this worker holds the job."""
        self.waiting = True
        """Whether the order waits for a slot: it has neither asked for its start nor begun."""
        self.ended = False
        """Whether the handler has ended or will never start. It can no longer be stopped."""
        self.keeping = False
        """Whether the handler has returned and its result is being stored."""
        self.timeout_s: float | None = None
        """How long the handler may run."""
        self.settled = asyncio.Event()
        """Set when the result was acknowledged or need not be sent."""
        self.stop_event = asyncio.Event()
        self.on_stop: Callable[[], None] | None = None
        """Called when the handler is told to stop."""
        self.artifacts: list[ArtifactPointer] = []
        """Artifacts the handler has named so far."""
        self.cancel_requested = False
        """Whether the job was cancelled."""
        self.reason = ""
        self.lease_over = self.heard = False
        self.fate: StopCause | None = None
        self.called = False
        """Whether the handler was called. Errors raised after that belong to the application."""
        self.in_thread = False
        self.handling: asyncio.Task[Any] | None = None
        self.progress: JobProgress | None = None
        """Progress not yet sent."""

    @property
    def request(self) -> JobRequest:
        return self.order.request

    @property
    def wire_id(self) -> str:
        """The job id on the wire, used in reports."""
        return self.request.job_id

    @property
    def dispatch(self) -> Dispatch | None:
        """The dispatch to echo in reports; None if the order has none."""
        return self.order.dispatch if self.order.dispatch.dispatch_id else None

    @property
    def identity(self) -> str:
        """The key that identifies duplicates of this order.

        Wire ids of our own control plane differ per attempt. For other schedulers the key includes dispatch and
        attempt.
        """
        dispatch = self.order.dispatch
        return self.wire_id if self.asks else f"{self.wire_id} {dispatch.dispatch_id} {dispatch.attempt}"

    def is_meant(self, dispatch: Dispatch | None, worker_id: str) -> bool:
        """Whether a message for this job refers to this dispatch: every dispatch field that it sets must match."""
        ours, named = self.order.dispatch, dispatch or Dispatch()
        return (
            named.dispatch_id in {"", ours.dispatch_id}
            and named.attempt in {0, ours.attempt}
            and named.worker_id in {"", worker_id}
        )

    @property
    def job_id(self) -> JobId:
        """The job's own id, without the attempt."""
        known = read_wire_id(self.wire_id) if self.asks else None
        env_id = self.request.env.get(OWN_JOB_ID_IN_ENV) or self.request.env.get(JOB_ID_IN_ENV)
        return known[0] if known else JobId(env_id or self.wire_id)

    @property
    def epoch(self) -> Epoch:
        """The fencing token from the wire id; 0 if another scheduler sent the order."""
        known = read_wire_id(self.wire_id) if self.asks else None
        return known[1] if known else Epoch(0)

    @property
    def number(self) -> int:
        """The attempt number, from 1. Linked retries count too."""
        again = self.request.labels.get(RETRY_ATTEMPT, "")
        first = max(1, self.order.dispatch.attempt)
        return first + (int(again) if again.isdecimal() and len(again) < 6 else 0)

    @property
    def trace(self) -> str | None:
        return tracing.readable(self.request.env.get(tracing.IN_ENV))

    @property
    def lease_s(self) -> float:
        """How long the control plane waits for a heartbeat of this job."""
        lease_s = _number(self.request.env, LEASE_IN_ENV)
        return LEASE_S_DEFAULT if lease_s is None else min(lease_s, LEASE_S_MAX)

    @property
    def beat_s(self) -> float:
        """The heartbeat interval of this job: a third of the lease, so that one heartbeat may get lost."""
        return max(BEAT_S_MIN, self.lease_s / 3)

    @property
    def deadline_s(self) -> float | None:
        """The job's deadline in seconds. It counts from the submission, so it also bounds every attempt."""
        deadline_ms = self.request.budget.deadline_ms if self.request.budget else 0
        return deadline_ms / 1000 if deadline_ms else None

    @property
    def busy(self) -> bool:
        """Whether the order occupies a slot."""
        return not self.waiting and (not self.ended or self.keeping)

    @property
    def fence(self) -> float:
        """Until when this worker certainly holds the job, by its own clock.

        It counts from when the worker last asked, and is infinite if the scheduler does not confirm leases.
        """
        return math.inf if self.heard_at is None else self.heard_at + self.lease_s

    @property
    def should_stop(self) -> bool:
        return self.stop_event.is_set() or self.fate is not None

    def tell(self, reason: str) -> None:
        """Records a cancel request and tells the handler to stop."""
        if not self.cancel_requested:
            self.cancel_requested, self.reason = True, reason
            self._tell_handler()

    def cut(self, fate: StopCause | None) -> None:
        """Stops the handler. An async handler is cancelled; a thread is only told, unless the worker is stopping.

        Storing of a returned result goes on, unless the job now belongs to another worker.
        """
        stores_for_nobody = self.keeping and fate is StopCause.LOST
        if self.fate is not None or (self.ended and not stores_for_nobody):
            return
        self.fate = fate
        self._tell_handler()
        if self.handling is not None and (not self.in_thread or stores_for_nobody or fate is StopCause.GIVEN_BACK):
            self.heard = True
            self.handling.cancel()

    def _tell_handler(self) -> None:
        self.stop_event.set()
        if self.on_stop is not None:
            self.on_stop()

    def stop_keeping(self) -> None:
        """Stops storing the result, because the worker stops."""
        if self.keeping and self.handling is not None:
            self.handling.cancel()

    def sign_of_life(self) -> JobProgress:
        """Returns the next heartbeat: the handler's newest progress, or only that the job runs."""
        progress, self.progress = self.progress, None
        return progress or JobProgress(job_id=self.wire_id, dispatch=self.dispatch)

    def note_progress(self, value: Any, text: str) -> None:
        """Stores progress reported by the handler. `text` is `value` as JSON."""
        fields = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"percent": value}
        percent, step, message = fields.get("percent"), fields.get("step"), fields.get("message")
        plain = isinstance(value, Mapping) and set(fields) <= {"percent", "step", "message"}
        self.progress = JobProgress(
            job_id=self.wire_id,
            status=Status.RUNNING,
            step_id=step[:200] if isinstance(step, str) and step != START_STEP else "",
            percent=_percent(percent),
            message=(message if plain and isinstance(message, str) else text)[:MESSAGE_CHARS_MAX],
            dispatch=self.dispatch,
        )


def _percent(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return int(min(100, max(0, value)))


def _number(env: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(env.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


# Seen orders: no order is executed twice, and no outdated order is executed at all.
#
# Our own control plane gives every dispatch its own wire id. Other schedulers send the job id with a dispatch. The same
# dispatch and attempt again is a copy. The next attempt of a dispatch is a new order. Any other attempt is not
# executed. An attempt that jumps forward may follow attempts at other workers. It is given back so that its scheduler
# continues; the attempt after it is a new order here.

SEEN_MAX = 10_000
"""How many orders are remembered."""


class OrderKind(StrEnum):
    """How an order relates to the orders seen before it."""

    NEW = "new"
    COPY = "copy"
    STALE = "stale attempt"
    """An attempt lower than the last one of its dispatch."""
    FUTURE = "future attempt"
    """An attempt that skips at least one after the last seen attempt of its dispatch."""


class SeenOrders:
    """The orders that one worker has seen, up to `SEEN_MAX`."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, JobResult | None] = OrderedDict()
        self._last_attempts: LruCache[tuple[str, str], int] = LruCache(SEEN_MAX)

    def note(self, attempt: OrderAttempt) -> OrderKind:
        """Classifies an order and remembers it, unless it is stale."""
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
        self._results[attempt.identity] = result

    def result(self, attempt: OrderAttempt) -> JobResult | None:
        """Returns the reported result of an order; None if there is none yet."""
        return self._results.get(attempt.identity)

"""Attempts of a worker on the bus: one order that it holds, and the orders that it has seen."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping
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

# One order that this worker holds: what it was sent, how far it is, and whether it should stop.
#
# An order is in turn waiting for a slot, asking for its start, running, and reporting its result. It is mutable and belongs
# to the event loop; a handler's thread only reads its flags and leaves its progress here.

LEASE_S_DEFAULT = 30.0
LEASE_S_MAX = 86_400.0
BEAT_S_MIN = 0.2
MESSAGE_CHARS_MAX = 2_000


class OrderAttempt:
    """One execution, known by the id that its request carries on the wire."""

    def __init__(self, order: JobOrder, trace_id: str, sender_id: str) -> None:
        self.order = order
        self.trace_id = trace_id
        self.sender_id = sender_id
        """Who sent the order: nobody else's answers count."""
        self.asks = order.request.env.get(ASK_FIRST) == "ask"
        """Our own control plane sent it: it answers questions. Any other scheduler does not."""
        self.begun_at: float | None = None
        self.heard_at: float | None = None
        """When the control plane last said that the job is this worker's."""
        self.waiting = True
        """It has neither asked for its start nor begun."""
        self.ended = False
        """Its handler is over, or will never begin: it cannot be stopped any more."""
        self.keeping = False
        """Its handler has returned, and what it returned is being stored."""
        self.timeout_s: float | None = None
        """How long its handler may run."""
        self.settled = asyncio.Event()
        """Its result was answered, or is not worth sending."""
        self.told = asyncio.Event()
        """Its handler should stop."""
        self.artifacts: list[ArtifactPointer] = []
        """What its handler named so far."""
        self.cancel_requested = False
        """Because nobody wants the job any more."""
        self.reason = ""
        self.lease_over = False
        """The handler was told that its lease is over by this worker's clock: whatever it does from then on may be done twice."""
        self.heard = False
        """The handler knows that it should stop: it looked, waited for it, or was cut."""
        self.fate: StopCause | None = None
        self.called = False
        """Its handler was called: what is raised from then on is the application's."""
        self.in_thread = False
        self.handling: asyncio.Task[Any] | None = None
        self.progress: JobProgress | None = None
        """Progress not yet told."""

    @property
    def request(self) -> JobRequest:
        """What is wanted."""
        return self.order.request

    @property
    def wire_id(self) -> str:
        """The id to report with."""
        return self.request.job_id

    @property
    def dispatch(self) -> Dispatch | None:
        """Which handing-out this is, to be echoed; None when the order did not say."""
        return self.order.dispatch if self.order.dispatch.dispatch_id else None

    @property
    def identity(self) -> str:
        """What makes an order the same order. Only the wire ids of our own control plane differ from attempt to attempt."""
        dispatch = self.order.dispatch
        return self.wire_id if self.asks else f"{self.wire_id} {dispatch.dispatch_id} {dispatch.attempt}"

    def is_meant(self, dispatch: Dispatch | None, worker_id: str) -> bool:
        """Whether a message that names this job means this handing-out of it: whatever it says of a dispatch must be so."""
        ours, said = self.order.dispatch, dispatch or Dispatch()
        return (
            said.dispatch_id in {"", ours.dispatch_id}
            and said.attempt in {0, ours.attempt}
            and said.worker_id in {"", worker_id}
        )

    @property
    def job_id(self) -> JobId:
        """The job's own id."""
        known = read_wire_id(self.wire_id) if self.asks else None
        said = self.request.env.get(OWN_JOB_ID_IN_ENV) or self.request.env.get(JOB_ID_IN_ENV)
        return known[0] if known else JobId(said or self.wire_id)

    @property
    def epoch(self) -> Epoch:
        """The fencing token in the wire id; 0 when a foreign scheduler sent it."""
        known = read_wire_id(self.wire_id) if self.asks else None
        return known[1] if known else Epoch(0)

    @property
    def number(self) -> int:
        """Which attempt this is, from 1, over linked retries too."""
        again = self.request.labels.get(RETRY_ATTEMPT, "")
        first = max(1, self.order.dispatch.attempt)
        return first + (int(again) if again.isdecimal() and len(again) < 6 else 0)

    @property
    def trace(self) -> str | None:
        """The trace of whoever submitted the job."""
        return tracing.readable(self.request.env.get(tracing.IN_ENV))

    @property
    def lease_s(self) -> float:
        """How long the control plane waits for a sign of life."""
        said = _number(self.request.env, LEASE_IN_ENV)
        return LEASE_S_DEFAULT if said is None else min(said, LEASE_S_MAX)

    @property
    def beat_s(self) -> float:
        """How often a sign of life is due; one may get lost."""
        return max(BEAT_S_MIN, self.lease_s / 3)

    @property
    def deadline_s(self) -> float | None:
        """How long the job may take. It counts from the submission, so no attempt may run longer than it."""
        deadline_ms = self.request.budget.deadline_ms if self.request.budget else 0
        return deadline_ms / 1000 if deadline_ms else None

    @property
    def busy(self) -> bool:
        """Whether it takes a slot."""
        return not self.waiting and (not self.ended or self.keeping)

    @property
    def fence(self) -> float:
        """Until when the job is this worker's for certain, counted from when it asked; for ever where nobody is asked."""
        return math.inf if self.heard_at is None else self.heard_at + self.lease_s

    @property
    def should_stop(self) -> bool:
        """Whether the handler's work is not wanted any more."""
        return self.told.is_set() or self.fate is not None

    def tell(self, reason: str) -> None:
        """Say that nobody wants it any more."""
        if not self.cancel_requested:
            self.cancel_requested, self.reason = True, reason
            self.told.set()

    def cut(self, fate: StopCause | None) -> None:
        """Stop the handler from outside: what awaits is cancelled, a thread is only told, unless nobody waits for it any more.

        What it returned is stored on, unless the job is another's by now.
        """
        stores_for_nobody = self.keeping and fate is StopCause.LOST
        if self.fate is not None or (self.ended and not stores_for_nobody):
            return
        self.fate = fate
        self.told.set()
        if self.handling is not None and (not self.in_thread or stores_for_nobody or fate is StopCause.GIVEN_BACK):
            self.heard = True
            self.handling.cancel()

    def stop_keeping(self) -> None:
        """The worker stops, and has no more time to store what was returned."""
        if self.keeping and self.handling is not None:
            self.handling.cancel()

    def sign_of_life(self) -> JobProgress:
        """What to say now: the handler's newest progress, else only that it runs."""
        told, self.progress = self.progress, None
        return told or JobProgress(job_id=self.wire_id, dispatch=self.dispatch)

    def note_progress(self, value: Any, text: str) -> None:
        """Keep what a handler says about how far it is; `text` is the same as JSON."""
        said = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"percent": value}
        percent, step, message = said.get("percent"), said.get("step"), said.get("message")
        plain = isinstance(value, Mapping) and set(said) <= {"percent", "step", "message"}
        self.progress = JobProgress(
            job_id=self.wire_id,
            status=Status.RUNNING,
            step_id=step[:200] if isinstance(step, str) and step != START_STEP else "",
            percent=_percent(percent),
            message=(message if plain and isinstance(message, str) else text)[:MESSAGE_CHARS_MAX],
            dispatch=self.dispatch,
        )


def _percent(said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        return 0
    return int(min(100, max(0, said)))


def _number(env: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(env.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


# Which orders a worker has seen, so that none is executed twice and none that is out of date is executed at all.
#
# Our own control plane gives every handing-out a wire id of its own. Other schedulers send the job's id with a dispatch: the same dispatch
# and attempt again is a copy, the next attempt of a dispatch is a new order, and any other attempt of it is not executed. One that jumps
# forward may follow attempts at other workers: it is given back, so that its scheduler goes on, and the attempt after it is a new order here.

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

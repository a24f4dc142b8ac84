"""Runners, which call handlers (sync ones on threads), and the writing of progress and log lines of running jobs."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from trellis.engine import tracing
from trellis.engine.errors import LedgerError, PermanentError
from trellis.engine.jobs import Advance, LeaseLost, StepApplied
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import error_text
from trellis.worker.app import HandlerKind
from trellis.worker.context import Context, Item, SyncContext, WorkerServices
from trellis.worker.durable import Suspended, error_of_step
from trellis.worker.handlers import Handlers
from trellis.worker.held import HeldJob, HeldJobs, StopCause
from trellis.worker.outcomes import (
    LEASE_DOUBT_CAUSE,
    Snooze,
    advance_on_error,
    cancel_advance,
    complete_advance,
    failure_of,
    may_suspend,
    reject_unreadable,
    release_advance,
    suspend_advance,
)
from trellis.worker.payloads import UnreadablePayload
from trellis.worker.threads import is_closed

# Progress and log lines of held jobs. They are no transitions: losing one affects nothing else.

SIGNAL_PROGRESS = "job_heartbeat"


async def flush(ledger: Ledger, held: HeldJob, *, last: bool) -> StepApplied | LeaseLost | None:
    """Writes the pending progress and log lines of a job, if any."""
    signals = held.logs.take(last=last) if held.logs is not None else []
    if held.progress is not None:
        signals.append((SIGNAL_PROGRESS, held.progress))
        held.progress = None
    return await ledger.signal(held.lease, signals) if signals else None


@dataclass(frozen=True, kw_only=True)
class SignalWriter:
    """Writes progress and log lines of running jobs every `interval_s`."""

    ledger: Ledger
    held_jobs: HeldJobs
    interval_s: float
    name: str = "signals"

    async def run_once(self) -> int:
        """Writes what is pending. Returns how many jobs had something to write."""
        telling = [h for h in self.held_jobs.jobs.values() if h.progress is not None or h.logs is not None]
        written = 0
        for held in telling:
            if not held.finished and await flush(self.ledger, held, last=False) is not None:
                written += 1
        return written

    def pause_s(self, report: int) -> float:  # noqa: ARG002 - the shape of every service
        return self.interval_s


# Runners: long-lived coroutines that take started jobs and await their handlers in place.
#
# No task is created per job. A handler that never suspends costs no trip through the event loop. A time slice of
# `SLICE_S`, shared by all runners, keeps such handlers from starving heartbeats and turns.

SLICE_S = 0.005

_log = log_of("trellis.worker")


class Runners:
    """Runs up to `size` handlers at the same time."""

    def __init__(
        self, *, held_jobs: HeldJobs, worker: WorkerServices, size: int, handlers: Handlers, draw: Callable[[], float]
    ) -> None:
        self._held_jobs = held_jobs
        self._worker = worker
        self._size = size
        self._handlers = handlers
        self._threads = handlers.threads
        self._draw = draw
        self._clock = worker.clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._waking = False
        self._context = copy_context()
        self._slice_end: float | None = None
        self._closing = False

    def wake(self) -> None:
        """Wakes or creates one runner because a job is ready. A runner that takes a job wakes the next one."""
        if self._waking or self._closing:
            return
        if self._idle:
            self._waking = True
            self._idle.pop().set_result(None)
        elif len(self._tasks) < self._size:
            self._waking = True
            task = self._worker.loop.create_task(self._run(), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Ends every runner and cancels running handlers."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("runner_failed", error=repr(error), exc_info=error)
        if self._held_jobs.ready:
            self.wake()

    async def _run(self) -> None:
        ready, clean, task = self._held_jobs.ready, copy_context(), asyncio.current_task()
        self._waking = False
        while not self._closing:
            if not ready:
                await self._rest()
                continue
            now = self._clock.monotonic()
            if self._slice_is_over(now):
                await self._rest()  # the next slice wakes one runner, not all of them
                continue
            held = ready.popleft()
            if ready:
                self.wake()
            if self._settled_unbegun(held, now):
                continue
            if held.spec.kind is HandlerKind.BATCH:
                await self._run_batch(held, now, task)
            elif self._readable(held):
                await self._run_one(held, now, task)
            if copy_context() != clean:
                # A handler set a context variable that the next job must not see. End this runner; another takes over.
                return

    async def _rest(self) -> None:
        waiting = self._worker.loop.create_future()
        self._idle.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            # A handler cancelled its own task and did not wait afterwards. This runner ends, and another takes over.
            if waiting in self._idle:
                self._idle.remove(waiting)
            else:
                self._waking = False
            raise
        self._waking = False

    def _slice_is_over(self, now: float) -> bool:
        """Whether the runners have used up their slice in this round of the event loop."""
        if self._slice_end is None:
            self._slice_end = now + SLICE_S
            self._worker.loop.call_soon(self._open_slice)
        return now >= self._slice_end

    def _open_slice(self) -> None:
        self._slice_end = None
        if self._held_jobs.ready:
            self.wake()

    def _settled_unbegun(self, held: HeldJob, now: float) -> bool:
        """Settles a job whose handler must not begin: its lease is over, or it has a cancel request."""
        if held.fence <= now:
            # Self-fencing: a worker starts nothing once the lease has expired by its own clock. If the lease is still
            # valid, another worker gets the job; if not, the ledger refuses the release.
            self._held_jobs.settle(held, release_advance(held, LEASE_DOUBT_CAUSE))
            return True
        if held.cancel_requested:
            self._held_jobs.settle(held, cancel_advance(held, "soft cancel before the handler began"))
            return True
        return False

    def _readable(self, held: HeldJob) -> bool:
        if held.payload is not None:
            return True
        payload = held.spec.codec.read_payload(held.claimed.payload)
        if isinstance(payload, UnreadablePayload):
            self._held_jobs.settle(held, reject_unreadable(held, payload))
            return False
        held.payload = payload
        return True

    async def _run_one(self, held: HeldJob, now: float, task: asyncio.Task[None] | None) -> None:
        self._held_jobs.running += 1
        held.began_at = now
        context = Context(held, self._worker)
        value, error = None, None
        with tracing.attempt_span(held.claimed, f"job.handle {held.claimed.type}") as span:
            try:
                if held.claimed.spared:  # it may have been suspended
                    await self._replay(held, context)
                if not held.spec.is_plain:
                    held.task = task
                    value = await self._handlers.call(held.spec, context, held, held.payload)
                elif held.spec.kind is HandlerKind.SYNC:
                    value = await self._threads.run(self._sync_call(held, context))
                else:
                    held.task = task
                    handler = held.spec.handler
                    value = await (handler(context, held.payload) if held.spec.takes_payload else handler(context))
                if context.calls is not None or context.durable is not None:
                    await context.finish()
            # Whatever ends a handler is the outcome of the job, not of the worker. `sys.exit()` too ends only the
            # handler.
            except BaseException as problem:
                if isinstance(problem, GeneratorExit) and is_closed(task):
                    raise
                error = error_of_step(problem)
                _describe_failure(span, error)
        self._handler_ended(held, error)
        if held.progress is not None or held.logs is not None:
            await self._flush(held)
        if context.durable is not None:
            held.wait = context.durable.suspension
        if held.spec.on_error:
            await self._end_reported(held, context, value, error)
        else:
            self._end(held, value, error)

    async def _replay(self, held: HeldJob, context: Context) -> None:
        """Read the journal before the handler begins again, and the payload with which it began anew.

        The completion job of a batch waits until the jobs of the batch have ended.
        """
        await context.durable_calls().await_batch()
        body = await context.durable_calls().restarted_payload()
        if body is not None:
            anew = held.spec.codec.read_payload(body)
            if isinstance(anew, UnreadablePayload):
                raise PermanentError(f"the input with which this job began anew cannot be read: {anew.detail}")
            held.payload = anew

    async def _run_batch(self, first: HeldJob, now: float, task: asyncio.Task[None] | None) -> None:
        batch = [held for held in (first, *self._mates(first)) if self._readable(held)]
        if not batch:
            return
        items = [Item(Context(held, self._worker), held.payload) for held in batch]
        self._held_jobs.running += len(batch)
        for held in batch:
            held.began_at = now
            held.task = task
            held.shares_handler = len(batch) > 1
        error, others = None, tuple(held.claimed.trace for held in batch[1:])
        with tracing.attempt_span(batch[0].claimed, f"job.handle {first.claimed.type}", besides=others) as span:
            span.note({"trellis.jobs": len(batch)})
            try:
                await (
                    first.spec.handler(items) if first.spec.is_plain else self._handlers.call_batch(first.spec, items)
                )
            # Whatever ends a handler is the outcome of the job, not of the worker. `sys.exit()` too ends only the
            # handler.
            except BaseException as problem:
                if isinstance(problem, GeneratorExit) and is_closed(task):
                    raise
                error = problem
                _describe_failure(span, problem)
        for held in batch:  # of all, before the first wait: a time-out of one must not cancel what ends the others
            self._handler_ended(held, error)
        for held, item in zip(batch, items, strict=True):
            await self._flush(held)
            if item.marked:
                held.heard = item.heard
            await self._end_reported(held, item.ctx, item.value, item.error if item.marked else error)

    def _mates(self, first: HeldJob) -> list[HeldJob]:
        """Takes other ready jobs of the same batch type, up to the batch size."""
        mates = [held for held in self._held_jobs.ready if held.spec is first.spec and not held.cancel_requested]
        mates = mates[: first.spec.options.batch - 1]
        if mates:
            self._held_jobs.take_back(set(mates))
        return mates

    def _sync_call(self, held: HeldJob, context: Context) -> Callable[[], Any]:
        sync = SyncContext(context, self._worker.loop)
        arguments = (sync, held.payload) if held.spec.takes_payload else (sync,)
        return partial(held.spec.handler, *arguments)

    def _handler_ended(self, held: HeldJob, error: BaseException | None) -> None:
        """Clears a cancellation that was meant for this handler, so that the runner continues."""
        task, held.task = held.task, None
        if self._closing and isinstance(error, asyncio.CancelledError):
            raise error
        while task is not None and task.cancelling():
            task.uncancel()

    async def _flush(self, held: HeldJob) -> None:
        """Writes logs and progress before the settlement, which ends the lease."""
        if held.fate is StopCause.LOST:
            return
        try:
            if isinstance(await flush(self._worker.ledger, held, last=True), LeaseLost):
                held.fate = StopCause.LOST
        except LedgerError as error:
            _log.warning("signals_dropped", job_id=held.lease.job_id, error=str(error))

    def _end(self, held: HeldJob, value: Any, error: BaseException | None) -> None:
        step = self._step(held, value, error)
        if step is not None:
            self._held_jobs.settle(held, step)

    async def _end_reported(self, held: HeldJob, context: Context, value: Any, error: BaseException | None) -> None:
        """As `_end`, for a type with error hooks: calls them first, so that a draining worker waits for them."""
        step = self._step(held, value, error)
        if step is None:
            return
        try:
            if held.spec.on_error and (failure := failure_of(held, error, step)) is not None:
                await self._handlers.report_error(held.spec, context, failure)
                await self._flush(held)
        finally:  # also for a hook that cancelled its own task
            if not held.finished:  # else released meanwhile, by a drain that could not wait
                self._held_jobs.settle(held, step)

    def _step(self, held: HeldJob, value: Any, error: BaseException | None) -> Advance | None:
        """The next transition of a job whose handler ended; None if this worker has no say in it any more."""
        self._held_jobs.running -= 1
        if held.finished or held.fate is StopCause.LOST:
            held.finished = True
            self._held_jobs.forget(held)
            reason = held.fate.value if held.fate else "settled before"
            _log.warning("outcome_dropped", job_id=held.lease.job_id, epoch=held.lease.epoch, reason=reason)
            self._held_jobs.changed.set()
            return None
        if held.wait is not None and may_suspend(held):
            # Whatever the handler has made of it: it begins again when what it waits for has happened.
            return suspend_advance(held, held.wait)
        if held.wait is not None and error is None:
            error = Suspended()  # it returned all the same: that is no result
        if error is None:
            return complete_advance(held, value)
        step = advance_on_error(held, error, self._draw)
        if isinstance(error, Exception) and not isinstance(error, Snooze):
            _note_failure(held, step.trigger, error)
        return step


def _describe_failure(span: tracing.Span, problem: BaseException) -> None:
    """Records on the span how a handler failed or was interrupted."""
    if isinstance(problem, Snooze | Suspended | asyncio.CancelledError):
        span.note({"trellis.outcome": type(problem).__name__})
    else:
        span.note({"error.type": type(problem).__name__})
        span.fail(error_text(problem))


def _note_failure(held: HeldJob, then: str, error: Exception) -> None:
    """Writes the traceback to the worker log. The ledger stores only a bounded one."""
    job, attempt = held.claimed, held.claimed.attempts_spent + 1
    _log.warning(
        "attempt_failed",
        job_id=held.lease.job_id,
        type=job.type,
        attempt=attempt,
        then=then,
        error=error_text(error),
        exc_info=error,
    )

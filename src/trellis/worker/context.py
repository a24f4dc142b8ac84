"""The `ctx` object through which a handler sees and controls its job.

Every write through `ctx` carries the job's epoch. Once the lease is lost, every such call raises `LeaseConflictError`:
another worker holds the job, and the ledger ignores whatever this attempt still does.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from functools import partial, wraps
from inspect import CORO_CREATED, getcoroutinestate, isawaitable, signature
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, Unpack

from trellis.engine import tracing
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import LeaseConflictError, PermanentError
from trellis.engine.event_data import ArtifactPointer, add_artifact
from trellis.engine.jobs import Epoch, JobId, LeaseLost, accepted
from trellis.worker.app import HandlerKind
from trellis.worker.batches import BatchOutcome
from trellis.worker.durable import ChildHandle, DurableCalls, DurableServices, FirstChild, Suspended
from trellis.worker.held import AttemptState, HeldJob, JobLogger, LogBuffer, StopCause
from trellis.worker.payloads import state_json_bytes, step_result_bytes
from trellis.worker.requests import SubmitSettings, check_moment

PayloadT = TypeVar("PayloadT")
ArgumentsT = ParamSpec("ArgumentsT")
AnswerT = TypeVar("AnswerT")

UNAWAITED_LOOK = 32
"""After so many calls of a handler, those that were awaited are forgotten."""


class WorkerServices(DurableServices, Protocol):
    """The parts of a worker that a `Context` uses."""

    clock: Clock
    loop: asyncio.AbstractEventLoop

    @property
    def stopping(self) -> bool:
        """Whether the worker is draining."""
        ...


class AttemptContext:
    """What a handler can ask about its attempt, on a ledger and on the bus alike."""

    __slots__ = ("_clock", "_logger", "_state")

    def __init__(self, state: AttemptState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._logger: JobLogger | None = None

    @property
    def cancelled(self) -> bool:
        """Whether this handler should stop.

        The reasons are a soft cancel, a timeout, and a lease that is lost or has expired by this worker's clock. If the
        handler returns after it saw True, it counts as stopped. After a soft cancel, the job is cancelled. After an
        expired lease, the job is released, because another worker may have it: the handler's return value is not its
        result.
        """
        state = self._state
        if state.should_stop:
            state.heard = True
        elif state.lease_over or self._clock.monotonic() >= state.fence:
            state.lease_over = state.heard = True
        else:
            return False
        return True

    @property
    def heard(self) -> bool:
        """Whether `cancelled` was True when this handler last read it. Returning after that counts as stopping."""
        return self._state.heard

    @property
    def lease_valid(self) -> bool:
        """Whether the lease is certainly valid, by this worker's own clock."""
        return self._state.fate is not StopCause.LOST and self._clock.monotonic() < self._state.fence

    async def cancel_requested(self) -> None:
        """Wait until this handler should stop. Returning after that counts as stopping."""
        stop = self._state.stop_event
        # Each heartbeat moves the fence forward, so check the fence again whenever the old one is reached.
        while not self.cancelled:
            left_s = self._state.fence - self._clock.monotonic()
            await (stop.wait() if left_s == math.inf else sleep_or_stop(self._clock, stop, left_s))

    def _new_logger(self, buffer: LogBuffer, **about: Any) -> JobLogger:
        began, monotonic = self._clock.monotonic(), self._clock.monotonic
        return JobLogger(buffer, lambda: monotonic() - began, **about)


def _awaited_call(
    method: Callable[Concatenate["Context", ArgumentsT], Coroutine[Any, Any, AnswerT]],
) -> Callable[Concatenate["Context", ArgumentsT], Coroutine[Any, Any, AnswerT]]:
    """A call of the context that does nothing until it is awaited. One without `await` fails the attempt."""

    @wraps(method)
    def call(self: "Context", *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs) -> Coroutine[Any, Any, AnswerT]:
        coroutine = method(self, *args, **kwargs)
        if self.calls is None:
            self.calls = []
        elif len(self.calls) >= UNAWAITED_LOOK:
            self.calls = _unawaited(self.calls)
        self.calls.append(coroutine)
        return coroutine

    return call


def _unawaited(calls: list[Coroutine[Any, Any, Any]]) -> list[Coroutine[Any, Any, Any]]:
    return [call for call in calls if getcoroutinestate(call) == CORO_CREATED]


class Context(AttemptContext):
    """One attempt of one job, for an async handler."""

    __slots__ = ("_checkpoint", "_held", "_journal", "_steps", "_worker", "calls", "durable")

    def __init__(self, held: HeldJob, worker: WorkerServices) -> None:
        # As `AttemptContext.__init__`, written out: one is made for every attempt of every job.
        self._state = self._held = held
        self._clock = worker.clock
        self._logger: JobLogger | None = None
        self._worker = worker
        self._checkpoint: bytes | None = held.claimed.checkpoint
        self._journal: dict[str, bytes] | None = None
        self._steps: set[str] | None = None
        """The names that this attempt has journaled; None before the first."""
        self.durable: DurableCalls | None = None
        """Made by the first durable call; for the runner."""
        self.calls: list[Coroutine[Any, Any, Any]] | None = None
        """Calls that may not have been awaited; None before the first. For the runner."""

    @property
    def job_id(self) -> JobId:
        """The job's id."""
        return self._held.lease.job_id

    @property
    def type(self) -> str:
        """The job's type."""
        return self._held.claimed.type

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Attempts that ended in a snooze or were released do not count."""
        return self._held.claimed.attempts_spent + 1

    @property
    def max_attempts(self) -> int:
        """The maximum number of attempts of the job."""
        return self._held.claimed.attempts_allowed

    @property
    def epoch(self) -> Epoch:
        """The fencing token: pass it to a store that can refuse a lower one."""
        return self._held.lease.epoch

    @property
    def idempotency_key(self) -> str:
        """The job id, equal for all attempts: pass it to whatever this handler calls."""
        return self._held.lease.job_id

    @property
    def correlation_id(self) -> str:
        """The correlation id: what this job belongs to."""
        return self._held.claimed.correlation_id

    @property
    def trace(self) -> str | None:
        """The submitter's trace context."""
        return self._held.claimed.trace

    @property
    def parent_id(self) -> JobId | None:
        """The job that submitted this one."""
        return self._held.claimed.parent_id

    @property
    def stopping(self) -> bool:
        """Whether the worker is draining. A long handler may checkpoint and raise `Snooze(0)`."""
        return self._worker.stopping

    @property
    def last_checkpoint(self) -> Any:
        """The last value stored by `checkpoint`, in this attempt or an earlier one; None if there is none."""
        return None if self._checkpoint is None else json.loads(self._checkpoint)

    @property
    def logger(self) -> JobLogger:
        """Log lines written here are stored with the job."""
        if self._logger is None:
            self._held.logs = LogBuffer()
            about: dict[str, Any] = {"job_id": self.job_id, "type": self.type, "attempt": self.attempt}
            if self.correlation_id != self.job_id:
                about["correlation_id"] = self.correlation_id
            self._logger = self._new_logger(self._held.logs, **about)
        return self._logger

    @_awaited_call
    async def checkpoint(self, value: Any) -> None:
        """Store a value for later attempts. It is durable when this returns, and replaces the last one."""
        body = state_json_bytes(value, f"the checkpoint of {self.type}")
        self._fenced(await self._worker.ledger.save_checkpoint(self._held.lease, body))
        self._checkpoint = body

    def progress(self, value: Any) -> None:
        """Report the job's progress. Does not block; written to the ledger about once a second."""
        self._refuse_if_lost()
        self._held.progress = state_json_bytes(value, f"the progress of {self.type}")

    def artifact(
        self, pointer: str, *, name: str | None = None, sha256: str | None = None, size: int | None = None
    ) -> None:
        """Name something that this job produced: its address, and how to verify it.

        Only the attempt that succeeds keeps the artifacts it named; they are stored with the result. Store the bytes
        first, under a separate name for every attempt.
        """
        self._refuse_if_lost()
        add_artifact(self._held.artifacts, ArtifactPointer(pointer=pointer, name=name, sha256=sha256, size=size))

    @_awaited_call
    async def journal(self, name: str, call: Callable[[], Awaitable[Any] | Any]) -> Any:
        """Run `call` once and store its result as JSON. A later attempt gets the stored result without calling again.

        Each step needs its own name: in a loop, put the item into the name. Raises PermanentError for a name that this
        attempt has journaled already. `call` takes no arguments and may be async. The JSON value comes back, in the
        first attempt too: a dict for a dataclass, text for a datetime. A call that raises stores nothing.
        """
        if self._steps is None:
            self._steps = set()
        if name.startswith("@"):
            raise PermanentError(
                f"ctx.journal cannot have a step {name!r}: names that begin with @ are those of durable calls"
            )
        if name in self._steps:
            raise PermanentError(
                f"ctx.journal has the step {name!r} twice in one attempt: give each step its own name, such as {name}-2"
            )
        self._steps.add(name)
        stored = False
        try:
            body = await self._journaled(name, call)
            stored = True
        finally:
            if not stored:
                self._steps.discard(name)
        # The first caller also gets the stored value, so that a replaying attempt sees the same one.
        return json.loads(body)

    async def _journaled(self, name: str, call: Callable[[], Awaitable[Any] | Any]) -> bytes:
        """The stored result of a step; runs the step if there is none."""
        if self._journal is None:
            # The first holder of a job knows that nobody has written a journal before.
            self._journal = {} if self.epoch == 1 else await self._worker.ledger.read_journal(self.job_id)
        if name not in self._journal:
            value = call()
            body = step_result_bytes(await value if isawaitable(value) else value, name)
            self._journal[name] = self._fenced(await self._worker.ledger.journal(self._held.lease, name, body))
        return self._journal[name]

    @_awaited_call
    async def submit(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> JobId:
        """Submit a child job. It inherits parent, correlation id and trace.

        A repeated attempt submits again. To submit once, use `ctx.spawn`, or give an `idempotency_key` derived from
        `ctx.idempotency_key`.
        """
        self._refuse_if_lost()
        job = self._worker.request(type_, payload, {**self._family(), **settings})
        (answer,) = await self._worker.ledger.submit(self._worker.actor, [job])
        return accepted(answer).job_id

    # --- durable functions: `trellis.worker.durable` --------------------------------------------------------------

    @_awaited_call
    async def step(self, name: str, call: Callable[..., Awaitable[Any] | Any], *args: Any, **kwargs: Any) -> Any:
        """Run `call(*args, **kwargs)` once and store its result as JSON. Later attempts get the stored result.

        `call` may be async. The JSON value comes back, in the first attempt too: a dict for a dataclass, text for a
        datetime. A call that raises makes this raise DurableStepFailed. Uncaught, the attempt fails with the error itself, and
        the next one makes the call again. Caught, the failure is the outcome of the step, for every repetition. Raises
        ReplayMismatch if the handler made another durable call at this place before, or one with other arguments.
        """
        arguments = [args, kwargs] if args or kwargs else None
        return await self.durable_calls().step(name, lambda: call(*args, **kwargs), arguments)

    @_awaited_call
    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds without a slot or a lease. The job is suspended, and the handler begins again then."""
        await self.durable_calls().sleep(seconds, None)

    @_awaited_call
    async def sleep_until(self, moment: datetime) -> None:
        """Wait until a time without a slot or a lease. The time must have a time zone."""
        check_moment("moment", moment)
        await self.durable_calls().sleep(None, moment)

    def spawn(
        self, type_: str, payload: Any = None, *, abandon: bool = False, **settings: Unpack[SubmitSettings]
    ) -> ChildHandle[Any]:
        """Submit a child job once, however often this handler is repeated. Await the handle for its result.

        The child is submitted with the next durable call, or when the handler returns. It is cancelled when this job is
        cancelled, unless `abandon` is true.
        """
        return self.durable_calls().spawn(type_, payload, settings, abandon=abandon)

    @_awaited_call
    async def gather(self, *handles: ChildHandle[Any], return_exceptions: bool = False) -> list[Any]:
        """The results of children, in the order of the handles. The job is suspended until they have ended.

        If a child ends without success, raises ChildFailed at once; with `return_exceptions`, waits for all children
        and returns the ChildFailed in its place.
        """
        return await self.durable_calls().gather(handles, return_exceptions=return_exceptions)

    @_awaited_call
    async def first(self, *handles: ChildHandle[Any]) -> FirstChild:
        """The child that ended first, with its result. Raises ChildFailed if it ended without success."""
        return await self.durable_calls().first(handles)

    @_awaited_call
    async def batch(self) -> BatchOutcome:
        """How the jobs of the batch have ended that this job completes (`submit_batch`), in the order of their submit.

        The outcome is stored: later attempts see the same. After a requeue of this job, failures are read again.
        """
        return await self.durable_calls().batch()

    @_awaited_call
    async def batch_results(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """The results of the jobs of the batch, with the types of their handlers, after `ctx.batch`.

        A job that ended without success has a MemberFailed in its place. `start` and `stop` choose some of the jobs, as
        in a slice: one call returns at most 64 MiB.
        """
        return await self.durable_calls().batch_results(start, stop)

    @_awaited_call
    async def wait_signal(self, name: str, *, timeout_s: float | None = None) -> Any:
        """The next signal of this name that was sent to the job. The job is suspended until it arrives.

        Each signal is returned once, in the order of arrival. Raises SignalTimeout.
        """
        return await self.durable_calls().wait_signal(name, timeout_s)

    @_awaited_call
    async def version(self, change: str, latest: int = 1) -> int:
        """The version of a change of this code that the job began with: `latest` for a job that comes here first.

        0 for a job that was beyond this place before the change was made. Keep the old code for those jobs.
        """
        return await self.durable_calls().version(change, latest)

    @_awaited_call
    async def continue_as_new(self, payload: Any = None) -> NoReturn:
        """Begin the handler anew with another payload and an empty journal, under the same job id.

        For handlers that never end. Raise nothing after it: it does not return.
        """
        body = self._held.spec.codec.accept(payload)[1]
        await self.durable_calls().continue_as_new(body)

    async def finish(self) -> None:
        """The handler has returned; for the runner. Raises PermanentError if it made a call without `await`.

        Submits the children that it spawned last, and checks that no durable call is missing.
        """
        if self.calls is not None and (forgotten := _unawaited(self.calls)):
            for call in forgotten:
                call.close()  # else Python warns on standard error, where nobody looks
            name = forgotten[0].__qualname__.removeprefix("Context.")
            raise PermanentError(
                f"the handler called ctx.{name}(…) without await, so nothing was done: write `await ctx.{name}(…)`"
            )
        if self.durable is not None:
            await self.durable.finish()

    def durable_calls(self) -> DurableCalls:
        """The durable calls of this attempt, for its runner. Handlers use the methods above."""
        self._refuse_if_lost()
        if self.durable is None:
            if self._held.spec.kind is HandlerKind.BATCH:
                raise PermanentError("durable calls need a handler of their own: this type is handled in batches")
            claimed = self._held.claimed
            self.durable = DurableCalls(
                claimed.lease,
                self._worker,
                self._fenced,
                self._family,
                claimed.generation,
                was_suspended=claimed.spared > 0,
            )
        return self.durable

    def _family(self) -> SubmitSettings:
        """The settings that the children of this job inherit."""
        trace = tracing.here() or self.trace
        return {"parent_id": self.job_id, "correlation_id": self.correlation_id, "trace": trace}

    def _fenced(self, answer: Any | LeaseLost) -> Any:
        if isinstance(answer, LeaseLost):
            self._held.fate = StopCause.LOST
        self._refuse_if_lost()
        return answer

    def _refuse_if_lost(self) -> None:
        if self._held.fate is StopCause.LOST:
            raise LeaseConflictError(job_id=self.job_id, epoch=self._held.lease.epoch)


def _blocking(
    method: Callable[Concatenate[Context, ArgumentsT], Coroutine[Any, Any, AnswerT]],
) -> Callable[Concatenate["SyncContext", ArgumentsT], AnswerT]:
    """The same call for a handler on a thread, on a ledger or on the bus: it returns when that of the context is done."""
    name = method.__name__

    @wraps(method)
    def call(self: "SyncContext", *args: ArgumentsT.args, **kwargs: ArgumentsT.kwargs) -> AnswerT:
        return self._wait(getattr(self._context, name)(*args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    call.__qualname__ = f"SyncContext.{name}"
    call.__signature__ = signature(method)  # type: ignore[attr-defined]
    del call.__wrapped__  # whoever unwraps it would take a call that blocks for a coroutine
    return call


class SyncContext:
    """The context for a sync handler, which runs on a thread: every call blocks until it is done."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Delegates everything that does not block to the async context."""
        return getattr(self._context, name)

    cancel_requested = _blocking(AttemptContext.cancel_requested)
    checkpoint = _blocking(Context.checkpoint)
    submit = _blocking(Context.submit)
    sleep = _blocking(Context.sleep)
    sleep_until = _blocking(Context.sleep_until)
    gather = _blocking(Context.gather)
    first = _blocking(Context.first)
    batch = _blocking(Context.batch)
    batch_results = _blocking(Context.batch_results)
    wait_signal = _blocking(Context.wait_signal)
    version = _blocking(Context.version)

    def journal(self, name: str, call: Callable[[], Any]) -> Any:
        """Run `call` on a thread once and store its result as JSON. A later attempt gets the stored result.

        Each step needs its own name: in a loop, put the item into the name. Raises PermanentError for a name that this
        attempt has journaled already. `call` takes no arguments. The JSON value comes back, in the first attempt too: a
        dict for a dataclass, text for a datetime. A call that raises stores nothing.
        """
        return self._wait(self._context.journal(name, lambda: asyncio.to_thread(call)))

    def step(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `call(*args, **kwargs)` on a thread once and store its result as JSON. Later attempts get it."""
        return self._wait(self._context.step(name, partial(asyncio.to_thread, call), *args, **kwargs))

    def continue_as_new(self, payload: Any = None) -> NoReturn:
        """Begin the handler anew with another payload and an empty journal, under the same job id."""
        self._wait(self._context.continue_as_new(payload))
        raise Suspended

    def _wait(self, call: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class Item(Generic[PayloadT]):
    """One job of a batch: its `ctx` and its `payload`.

    If it is marked neither done nor failed, it gets the outcome of the whole handler call.
    """

    __slots__ = ("ctx", "error", "heard", "marked", "payload", "value")

    def __init__(self, ctx: Context, payload: PayloadT) -> None:
        self.ctx = ctx
        self.payload = payload
        self.marked = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.heard = False
        """Whether the handler had seen the cancel request when it marked this job done; later does not matter."""

    def done(self, value: Any = None) -> None:
        """Mark this job as succeeded."""
        self.marked, self.value, self.error = True, value, None
        self.heard = self.ctx.heard

    def fail(self, error: BaseException) -> None:
        """Mark this job as failed. The error's class decides what follows; `Snooze` postpones the job."""
        self.marked, self.error = True, error

"""The `ctx` object through which a handler sees and controls its job.

Every write through `ctx` carries the job's epoch. Once the lease is lost, every such call raises `LeaseConflictError`:
another worker holds the job, and the ledger ignores whatever this attempt still does.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar, Unpack, cast

import pydantic_core

from trellis.engine import tracing
from trellis.engine.clock import Clock, sleep_or_stop
from trellis.engine.errors import IdempotencyMismatch, LeaseConflictError
from trellis.engine.event_data import ArtifactPointer, add_artifact
from trellis.engine.jobs import Actor, Epoch, JobId, LeaseLost, Mismatch, NewJob
from trellis.engine.ledger import Ledger
from trellis.worker.held import HeldJob, JobLogger, LogBuffer, StopCause
from trellis.worker.payloads import any_json_bytes, within_payload_limit
from trellis.worker.requests import SubmitSettings

PayloadT = TypeVar("PayloadT")


class WorkerServices(Protocol):
    """The parts of a worker that a `Context` uses."""

    ledger: Ledger
    clock: Clock
    actor: Actor
    loop: asyncio.AbstractEventLoop

    @property
    def stopping(self) -> bool:
        """Whether the worker is draining."""
        ...

    def request(self, type_: str, payload: Any, settings: SubmitSettings) -> NewJob:
        """Builds and checks the job that a handler submits."""
        ...


class Context:
    """One attempt of one job, for an async handler."""

    __slots__ = ("_checkpoint", "_desk", "_held", "_journal", "_logger")

    def __init__(self, held: HeldJob, desk: WorkerServices) -> None:
        self._held = held
        self._desk = desk
        self._checkpoint: bytes | None = held.claimed.checkpoint
        self._journal: dict[str, bytes] | None = None
        self._logger: JobLogger | None = None

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
        """Which attempt this is, from 1. Attempts that ended in a snooze or were given back do not count."""
        return self._held.claimed.attempts_spent + 1

    @property
    def max_attempts(self) -> int:
        """How many attempts the job has."""
        return self._held.claimed.attempts_allowed

    @property
    def epoch(self) -> Epoch:
        """The fencing token: pass it to a store that can refuse a lower one."""
        return self._held.lease.epoch

    @property
    def idempotency_key(self) -> str:
        """The same over all attempts: pass it to whatever this handler calls."""
        return self._held.lease.job_id

    @property
    def correlation_id(self) -> str:
        """What this job belongs to."""
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
    def cancelled(self) -> bool:
        """Whether this handler should stop: a soft cancel, its timeout, a lost lease, or one that is over by this worker's clock.

        A handler that has seen True here and returns has stopped. After a soft cancel the job is cancelled. After its lease
        was over the job is given back, because another worker may have it: what this handler returned is not its result.
        """
        held = self._held
        if held.cancel_requested or held.fate is not None:
            held.heard = True
        elif held.lease_over or self._desk.clock.monotonic() >= held.fence:
            held.lease_over = held.heard = True
        else:
            return False
        return True

    @property
    def heard(self) -> bool:
        """Whether `cancelled` was true when this handler last looked at it: returning then means that it stopped."""
        return self._held.heard

    @property
    def stopping(self) -> bool:
        """Whether the worker drains. A long handler may checkpoint and raise `Snooze(0)`."""
        return self._desk.stopping

    @property
    def lease_valid(self) -> bool:
        """Whether the lease holds for certain, by this worker's own clock."""
        return self._held.fate is not StopCause.LOST and self._desk.clock.monotonic() < self._held.fence

    @property
    def last_checkpoint(self) -> Any:
        """What `checkpoint` last kept, in this attempt or an earlier one; None without."""
        return None if self._checkpoint is None else json.loads(self._checkpoint)

    @property
    def logger(self) -> JobLogger:
        """Lines logged here are kept with the job."""
        if self._logger is None:
            held, clock = self._held, self._desk.clock
            held.logs = LogBuffer()
            began = clock.monotonic()
            about: dict[str, Any] = {"job_id": self.job_id, "type": self.type, "attempt": self.attempt}
            if self.correlation_id != self.job_id:
                about["correlation_id"] = self.correlation_id
            self._logger = JobLogger(held.logs, lambda: clock.monotonic() - began, **about)
        return self._logger

    async def cancel_requested(self) -> None:
        """Come back when this handler should stop; to return after that is to have stopped."""
        held = self._held
        if held.cancel_event is None:
            held.cancel_event = asyncio.Event()
        # Each heartbeat moves the fence forward, so check the fence again whenever the old one is reached.
        while not self.cancelled:
            await sleep_or_stop(self._desk.clock, held.cancel_event, held.fence - self._desk.clock.monotonic())

    async def checkpoint(self, value: Any) -> None:
        """Keep a value for later attempts; durable when this returns. The last one counts."""
        body = any_json_bytes(value, f"the checkpoint of {self.type}")
        self._fenced(await self._desk.ledger.save_checkpoint(self._held.lease, body))
        self._checkpoint = body

    def progress(self, value: Any) -> None:
        """Say how far the job is, for people who look. Does not wait; told to the ledger about once a second."""
        self._refuse_if_lost()
        self._held.progress = any_json_bytes(value, f"the progress of {self.type}")

    def artifact(
        self, pointer: str, *, name: str | None = None, sha256: str | None = None, size: int | None = None
    ) -> None:
        """Name something that this job made: its address, and how to check it. Kept with the result when the job succeeds, or not at all.

        Only the attempt that succeeds keeps what it named. Store the bytes first, under a name of their own for every attempt.
        """
        self._refuse_if_lost()
        add_artifact(self._held.artifacts, ArtifactPointer(pointer=pointer, name=name, sha256=sha256, size=size))

    async def journal(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `call`, made once: a later attempt gets the first durable result without calling again."""
        if self._journal is None:
            self._journal = await self._desk.ledger.read_journal(self.job_id)
        body = self._journal.get(name)
        if body is None:
            made = within_payload_limit(pydantic_core.to_json(await call()))
            body = self._fenced(await self._desk.ledger.journal(self._held.lease, name, made))
            self._journal[name] = body
        # The first caller also gets the stored value, so that a replaying attempt sees the same one.
        return json.loads(body)

    async def submit(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> JobId:
        """Submit a child job: parent, correlation and trace are passed on.

        An attempt that runs again submits again; give an `idempotency_key` built on `ctx.idempotency_key` to submit once.
        """
        self._refuse_if_lost()
        settings.setdefault("parent_id", self.job_id)
        settings.setdefault("correlation_id", self.correlation_id)
        settings.setdefault("trace", tracing.here() or self.trace)
        job = self._desk.request(type_, payload, settings)
        (answer,) = await self._desk.ledger.submit(self._desk.actor, [job])
        if isinstance(answer, Mismatch):
            raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
        return answer.job_id

    def _fenced(self, answer: Any | LeaseLost) -> Any:
        if isinstance(answer, LeaseLost):
            self._held.fate = StopCause.LOST
        self._refuse_if_lost()
        return answer

    def _refuse_if_lost(self) -> None:
        if self._held.fate is StopCause.LOST:
            raise LeaseConflictError(job_id=self.job_id, epoch=self._held.lease.epoch)


class SyncContext:
    """The same for a sync handler, which runs on a thread: every call blocks until it is done."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        """Delegates everything that does not block to the async context."""
        return getattr(self._context, name)

    def checkpoint(self, value: Any) -> None:
        """Keep a value for later attempts; durable when this returns."""
        self._wait(self._context.checkpoint(value))

    def journal(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of `call`, made once over all attempts; `call` runs on this thread's pool."""

        async def called() -> Any:
            return await asyncio.to_thread(call)

        return self._wait(self._context.journal(name, called))

    def submit(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> JobId:
        """Submit a child job."""
        return cast("JobId", self._wait(self._context.submit(type_, payload, **settings)))

    def _wait(self, awaited: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result()


class Item(Generic[PayloadT]):
    """One job of a batch: its `ctx` and its `payload`. Marked neither done nor failed, it shares the fate of the whole handler call."""

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
        """This job succeeded."""
        self.marked, self.value, self.error = True, value, None
        self.heard = self.ctx.heard

    def fail(self, error: BaseException) -> None:
        """This job failed; the error's class decides what follows. `Snooze` puts it off."""
        self.marked, self.error = True, error

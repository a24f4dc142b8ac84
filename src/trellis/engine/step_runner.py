"""Drives a leased job through its journalled steps to its end.

A lifecycle has two classes: a `StepRunner`, which all its drives in a process share, and a `JobDrive`, one job while
this process holds its lease. The drive has the steps (`work`), the last transition (`complete`, `stop`, `fail`) and the
table from error to verdict.

Invariants: every write is fenced by the lease, and the first journal entry of a name stays. Each drive makes at most
one last transition, and a cancel request that arrives during it is too late. A drive whose lease is lost ends without
writing. A ledger that does not answer is no failure of the job: the error is raised, and the lease expires.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor, Advance, Claimed, JobId, Lease, LeaseLost, StepApplied, Turn
from trellis.engine.ledger import Ledger
from trellis.engine.logs import Log

LEFT = "left"
"""The state noted on the span of a drive that did not end its job."""

WorkT = TypeVar("WorkT")
ErrorT = TypeVar("ErrorT", bound=Exception)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveOutcome:
    """How a drive ended. `state` is None when the job did not end here: another process has it, or it was put aside."""

    state: str | None


class DriveStopped(Exception):
    """This process no longer owns the job: its lease is lost, or the process drains."""


async def journal_once(ledger: Ledger, lease: Lease, entry: str, body: bytes) -> bytes:
    """Write a journal entry unless the job has one of this name. Returns the stored entry. Raises DriveStopped."""
    answer = await ledger.journal(lease, entry, body)
    if isinstance(answer, LeaseLost):
        raise DriveStopped
    return answer


class JobDrive(ABC, Generic[WorkT, ErrorT]):
    """One job while this process holds its lease."""

    failures: type[ErrorT]
    """Errors of the steps. `fail` decides what follows from them."""
    left: ClassVar[str]
    """The log event of a drive whose lease was lost."""

    def __init__(self, runner: "StepRunner", claimed: Claimed, log: Log) -> None:
        self.log, self._runner, self._claimed = log, runner, claimed
        self._lease: Lease = claimed.lease
        self._job_id = claimed.lease.job_id
        self._state = claimed.state
        self._journal: dict[str, bytes] = {}

    @abstractmethod
    async def work(self) -> WorkT:
        """Execute the steps that are left. Raises one of `failures`, DriveStopped or LedgerError."""

    @abstractmethod
    async def complete(self, work: WorkT, /) -> str | None:
        """End the job with what the steps made. This and the other two ends return the job's state after them."""

    @abstractmethod
    async def stop(self) -> str | None:
        """End the job because a cancel was requested."""

    @abstractmethod
    async def fail(self, error: ErrorT, /) -> str | None:
        """End the job, or put it back, because a step failed."""

    async def interrupted(self) -> None:
        """Called when the drive is cancelled without a cancel request."""

    async def close(self) -> None:
        """Called at last, however the drive ended."""

    # --- for the steps -----------------------------------------------------------------------------------------------

    async def in_time(
        self,
        span: str,
        limit_s: float,
        work: Coroutine[Any, Any, ResultT],
        *,
        late: Callable[[], ErrorT],
        unexpected: Callable[[Exception], ErrorT],
    ) -> ResultT:
        """Await the work of a step. It fails with `late()` after `limit_s` seconds.

        An error that is none of `failures` becomes what `unexpected` returns.
        """
        with tracing.span(span):
            try:
                return await within(self._runner.clock, limit_s, work)
            except TimeoutError:
                raise late() from None
            except (self.failures, DriveStopped, LedgerError):
                raise
            except Exception as error:
                raise unexpected(error) from error

    async def advance(self, trigger: str, data: Mapping[str, Any] | None, **more: Any) -> int:
        """Make one fenced transition, with further fields of `Advance`. Returns the job's version after it.

        Raises DriveStopped, and InvalidTransition if the artifact to finalize cannot be.
        """
        body = None if data is None else json.dumps(data, ensure_ascii=False).encode()
        match await self._runner.advance(Advance(self._lease, self._state, trigger, data=body, **more)):
            case StepApplied(version=version):
                return version
            case LeaseLost():
                raise DriveStopped

    async def once(self, entry: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The journal entry of this name; made and stored now if there is none."""
        if entry not in self._journal:
            self._journal[entry] = await self.keep(entry, await make())
        return self._journal[entry]

    async def keep(self, entry: str, body: bytes) -> bytes:
        """Write a journal entry unless there is one of this name. Returns the stored entry. Raises DriveStopped."""
        return await journal_once(self._runner.ledger, self._lease, entry, body)


@dataclass(kw_only=True)
class StepRunner(ABC):
    """Drives claimed jobs of one lifecycle."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    cancel_requests: set[str] = field(default_factory=set[str])
    """Ids of jobs with a cancel request. An id is added here before its drive is cancelled."""
    span: ClassVar[str]
    """The name of a drive's span."""

    @abstractmethod
    def begin(self, claimed: Claimed) -> JobDrive[Any, Any]:
        """The drive of a claimed job."""

    async def drive(self, claimed: Claimed) -> DriveOutcome:
        """Run until the job has ended or another process owns it.

        When cancelled, release the job, or end it if a cancel request exists.
        """
        with tracing.attempt_span(claimed, self.span) as span:
            outcome = DriveOutcome(state=await self._drive(claimed.lease.job_id, self.begin(claimed)))
            span.note({"trellis.state": outcome.state or LEFT})
            return outcome

    async def _drive(self, job_id: JobId, drive: JobDrive[Any, Any]) -> str | None:
        try:
            return await self._shield(job_id, await self._work(job_id, drive))
        except DriveStopped:
            drive.log.info(drive.left, reason="the lease is another's")
            return None
        except asyncio.CancelledError:
            await drive.interrupted()
            raise
        finally:
            self.cancel_requests.discard(job_id)
            await drive.close()

    async def _work(self, job_id: JobId, drive: JobDrive[Any, Exception]) -> Coroutine[Any, Any, str | None]:
        """Execute the steps. Returns the last transition, which is still to be made."""
        try:
            return drive.complete(await drive.work())
        except asyncio.CancelledError:
            if not self._consume_cancel(job_id):
                raise
            return drive.stop()
        except (DriveStopped, LedgerError):
            raise
        except drive.failures as error:
            return drive.fail(error)

    async def _shield(self, job_id: JobId, ending: Coroutine[Any, Any, str | None]) -> str | None:
        """Make the last transition.

        A cancel request that arrives now is too late: the first step wins. Any other cancellation interrupts the
        transition.
        """
        making = asyncio.ensure_future(ending)
        while True:
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                if self._consume_cancel(job_id):
                    continue
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                raise

    def _consume_cancel(self, job_id: JobId) -> bool:
        """Consume a cancel request: True if this task's cancellation came from one.

        The task is then uncancelled, so that the steps that follow are not interrupted.
        """
        if job_id not in self.cancel_requests:
            return False
        self.cancel_requests.discard(job_id)
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        return True

    async def advance(self, advance: Advance) -> StepApplied | LeaseLost:
        """Make one fenced step of one job."""
        (outcome,) = (await self.ledger.turn(Turn(actor=self.actor, advances=(advance,)))).outcomes
        return outcome

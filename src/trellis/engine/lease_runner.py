"""Claims jobs and drives them under their leases. Any number of processes may do so at once.

The ledger's lease says which process drives a job. A runner claims, drives, renews, and drops jobs whose lease it lost.
When a lease cannot be renewed in time, the drive is stopped before another process can claim the job, even while a
renewal hangs.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from trellis.engine.clock import Clock, within
from trellis.engine.errors import LedgerError, LedgerUnavailable
from trellis.engine.extras import program_version
from trellis.engine.jobs import (
    Actor,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    LeaseLost,
    Turn,
    TypeClaim,
    lease_length_s,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import correlated, log_of
from trellis.engine.outage_log import Failures
from trellis.engine.step_runner import StepRunner

RENEW_RETRY_S_MIN = 0.5
FENCE_LOOK_S_MAX = 1.0
"""The longest sleep between two checks of the fences. Timers stand still while the machine sleeps."""

_log = log_of("trellis.holding")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRunnerOptions:
    """Concurrency, lease terms and poll interval of one runner."""

    concurrency: int = 10
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRunnerReport:
    """The result of one pass."""

    accepted: int = 0
    claimed: int = 0
    driving: int = 0


StepRunnerT = TypeVar("StepRunnerT", bound=StepRunner)


@dataclass(slots=True)
class _DrivenJob:
    claimed: Claimed
    fence: float
    task: "asyncio.Task[None]"
    cancelled: bool = False
    cut: bool = False


@dataclass(kw_only=True)
class LeaseRunner(Generic[StepRunnerT]):
    """Claims jobs of one lifecycle and drives them.

    One pass accepts waiting jobs, then claims up to the free concurrency.
    """

    ledger: Ledger
    actor: Actor
    clock: Clock
    driver: StepRunnerT
    new_id: Callable[[], str]
    options: LeaseRunnerOptions
    type: str
    lifecycle: str
    name: str
    also: tuple[str, ...] = ()
    """Further job types of the same lifecycle to claim."""
    only: JobId | None = None
    """Claim and drive this job and no other."""
    claiming: bool = True
    waits_for_events = True
    _driving: dict[str, _DrivenJob] = field(default_factory=dict[str, _DrivenJob])
    _looking: "asyncio.Task[None] | None" = None
    _look_again: bool = False
    _fencing: "asyncio.Task[None] | None" = None
    _is_listed: bool = False
    """Whether the ledger lists this process among the workers."""
    _claims: Failures = field(default_factory=lambda: Failures("claims", _log))
    _renewals: Failures = field(default_factory=lambda: Failures("renewals", _log))

    async def run_once(self) -> LeaseRunnerReport:
        """Accept and claim. Raises LedgerError when the ledger does not answer."""
        accepted = await self.accept()
        claimed = await self._claim()
        return LeaseRunnerReport(accepted=accepted, claimed=claimed, driving=len(self._driving))

    def pause_s(self, report: LeaseRunnerReport) -> float:
        """Zero while the last pass claimed jobs and there is room for more."""
        return 0.0 if report.claimed and len(self._driving) < self.options.concurrency else self.options.poll_s

    @property
    def is_idle(self) -> bool:
        """Whether no job is being driven."""
        return not self._driving

    async def accept(self) -> int:
        """Make jobs claimable that wait for acceptance and return their number.

        Subclasses whose jobs need it override this.
        """
        return 0

    async def _claim(self) -> int:
        room = self.options.concurrency - len(self._driving)
        if not self.claiming or room <= 0:
            return 0
        sent_at = self.clock.monotonic()
        id_, terms = ClaimId(self.new_id()), self._terms()
        claim = Claim(claim_id=id_, types=terms, start=room, lifecycle=self.lifecycle, only=self.only)
        answer = await self.ledger.turn(Turn(actor=self.actor, claim=claim))
        if answer.claimed and self._fence(sent_at) <= self.clock.monotonic():
            _log.warning("claim_too_late", jobs=[claimed.lease.job_id for claimed in answer.claimed])
            return 0
        for claimed in answer.claimed:
            task = asyncio.get_running_loop().create_task(self._drive(claimed))
            self._driving[claimed.lease.job_id] = _DrivenJob(claimed, self._fence(sent_at), task)
        if self._driving and (self._fencing is None or self._fencing.done()):
            self._fencing = asyncio.get_running_loop().create_task(self._keep_fences())
        return len(answer.claimed)

    def _terms(self) -> tuple[TypeClaim, ...]:
        lease_s, heartbeat_s = self.options.lease_s, self.options.heartbeat_s
        return tuple(
            TypeClaim(type=type_, lease_s=lease_s, heartbeat_s=heartbeat_s) for type_ in (self.type, *self.also)
        )

    def _fence(self, sent_at: float) -> float:
        return sent_at + lease_length_s(self.options.lease_s, self.options.heartbeat_s)

    async def _drive_logged(self, claimed: Claimed) -> None:
        job_id = claimed.lease.job_id
        try:
            await self.driver.drive(claimed)
        except asyncio.CancelledError:
            _log.info("let_go", job_id=job_id, epoch=claimed.lease.epoch)
            raise
        except LedgerError as error:
            # The job stays held. When its lease ends, another process takes it up from its current state.
            _log.warning("left", job_id=job_id, error=str(error))
        except Exception:  # noqa: BLE001 - as above: the job is left, and the others go on
            _log.exception("drive_failed", job_id=job_id)

    async def _drive(self, claimed: Claimed) -> None:
        job_id = claimed.lease.job_id
        given = claimed.correlation_id if claimed.correlation_id != job_id else None
        try:
            with correlated(given):
                await self._drive_logged(claimed)
        finally:
            current = self._driving.get(job_id)
            if current is not None and current.claimed is claimed:
                del self._driving[job_id]
            if not self._driving and self._fencing is not None:
                self._fencing.cancel()
                self._fencing = None
            self._look()

    def _look(self) -> None:
        """Claim again after a drive has ended.

        There is room, and its concurrency key may have a next job. Drives that end meanwhile share one claim.
        """
        self._look_again = True
        if self.claiming and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._claim_while_any_ended())

    async def _claim_while_any_ended(self) -> None:
        while self._look_again and self.claiming:
            self._look_again = False
            try:
                await self._claim()
            except LedgerError as error:
                self._claims.failed(error, now=self.clock.monotonic())  # the next pass claims again
            else:
                self._claims.succeeded(now=self.clock.monotonic())

    async def renew(self) -> int:
        """Send one heartbeat for every driven job.

        Returns how many are still owned by this process. A drive past its fence is cut.
        """
        self._fence_off()
        driving, sent_at = self._uncut(), self.clock.monotonic()
        if not driving:
            return 0
        patience_s = min(drive.fence for drive in driving) - sent_at
        try:
            renewal = self.ledger.renew(self.actor, [drive.claimed.lease for drive in driving])
            answers = await within(self.clock, patience_s, renewal)
        except (LedgerError, TimeoutError) as error:
            late = LedgerUnavailable(reason=f"no answer to a renewal within {patience_s:g} s")
            self._renewals.failed(error if str(error) else late, now=self.clock.monotonic())
            self._fence_off()
            return 0
        self._renewals.succeeded(now=self.clock.monotonic())
        for drive, answer in zip(driving, answers, strict=True):
            if isinstance(answer, LeaseLost):
                self._cut(drive)
                continue
            drive.fence = self._fence(sent_at)
            if answer.cancel and not (drive.cancelled or drive.cut):
                drive.cancelled = True
                self.driver.cancel_requests.add(drive.claimed.lease.job_id)
                drive.task.cancel()
        self._fence_off()
        return len(self._driving)

    async def report(self, **more: bool) -> None:
        """Tell operators that this process is there, as workers do in their heartbeats, also while it drives nothing."""
        about = json.dumps({"version": program_version(), "drives": True, **more}).encode()
        try:
            await within(self.clock, self.options.heartbeat_s, self.ledger.heartbeat_worker(self.actor, about))
        except (LedgerError, TimeoutError) as error:
            _log.info("not_reported", error=str(error) or type(error).__name__)
        else:
            self._is_listed = True

    async def _keep_fences(self) -> None:
        """Cut each drive at its fence, also while a renewal or a claim is pending.

        Ends when no drive is left to cut.
        """
        while driving := self._uncut():
            next_fence = min(mine.fence for mine in driving)
            await self.clock.sleep(min(FENCE_LOOK_S_MAX, next_fence - self.clock.monotonic()))
            self._fence_off()

    def _fence_off(self) -> None:
        now = self.clock.monotonic()
        for drive in self._uncut():
            if drive.fence <= now:
                self._cut(drive)

    def _uncut(self) -> list[_DrivenJob]:
        return [mine for mine in self._driving.values() if not mine.cut]

    def _cut(self, job: _DrivenJob) -> None:
        """Stop the drive and ignore any cancel request: another process may own the job now."""
        job.cut = True
        self.driver.cancel_requests.discard(job.claimed.lease.job_id)
        job.task.cancel()

    async def drain(self) -> None:
        """Stop all drives and release their jobs. Other processes continue each job from its current state."""
        self.claiming = False
        if self._looking is not None:
            await asyncio.wait({self._looking})  # jobs it claims are released below
        await asyncio.sleep(0)  # a drive that has not begun yet could not release its job
        driving = list(self._driving.values())
        for drive in driving:
            self._cut(drive)
        await asyncio.gather(*(drive.task for drive in driving), return_exceptions=True)
        if self._is_listed:  # or it would count as a worker that died
            await self.report(drained=True)


@dataclass(frozen=True, kw_only=True)
class LeaseHeartbeat:
    """Renews the leases of one runner's jobs."""

    holder: LeaseRunner[Any]
    name: str

    async def run_once(self) -> int:
        """Send one heartbeat for all jobs of the runner."""
        return await self.holder.renew()

    def pause_s(self, report: int) -> float:
        """The heartbeat interval, also while nothing is driven. A failed heartbeat is retried soon."""
        heartbeat_s = self.holder.options.heartbeat_s
        return heartbeat_s if report or self.holder.is_idle else min(heartbeat_s, RENEW_RETRY_S_MIN)


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """Tells operators that a runner's process is there. Apart from the renewals, so that a slow report delays none."""

    holder: LeaseRunner[Any]
    name: str

    async def run_once(self) -> None:
        """Report once, for at most a heartbeat interval."""
        await self.holder.report()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of a service
        """The heartbeat interval."""
        return self.holder.options.heartbeat_s

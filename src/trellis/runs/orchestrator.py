"""The built-in orchestration layer: takes up runs and drives them, as many processes of it as one likes (PIPE-2, PIPE-3, D16).

One run per agent is kept by the ledger (the concurrency key `run:<slug>`), and so is who drives a run (its lease). This process
only claims, drives, renews, and lets go of what is no longer its own: a run whose lease it cannot renew in time is stopped here
before anybody else can have it, also while a renewal hangs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from trellis.engine.clock import Clock, within
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import (
    Actor,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    LeaseLost,
    Move,
    RequestId,
    Turn,
    TypeClaim,
    lease_length_s,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import JobFilter
from trellis.runs.driver import Driver

TYPE = "agent-run"
ACCEPT_BATCH_MAX = 100
ACCEPT_PAGES_MAX = 100
RENEW_RETRY_S_MIN = 0.5
FENCE_LOOK_S_MAX = 1.0
"""A timer stands still while the machine sleeps: fences are looked at so often."""

_log = log_of("trellis.runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class OrchestratorOptions:
    """How much this process takes on."""

    concurrency: int = 10
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one pass did."""

    accepted: int = 0
    claimed: int = 0
    driving: int = 0


@dataclass(slots=True)
class _Driving:
    claimed: Claimed
    fence: float
    task: "asyncio.Task[None]"
    cancelled: bool = False
    cut: bool = False


@dataclass(kw_only=True)
class Orchestrator:
    """Claims runs and drives them. One pass accepts what was requested, renews, and claims for the free room."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    driver: Driver
    new_id: Callable[[], str]
    options: OrchestratorOptions
    name: str = "orchestrator"
    claiming: bool = True
    _driving: dict[str, _Driving] = field(default_factory=dict[str, _Driving])
    _looking: "asyncio.Task[None] | None" = None
    _look_again: bool = False
    _fencing: "asyncio.Task[None] | None" = None

    async def run_once(self) -> Pass:
        """Accept and claim. Raises LedgerError when the ledger does not answer."""
        accepted = await self._accept()
        claimed = await self._claim()
        return Pass(accepted=accepted, claimed=claimed, driving=len(self._driving))

    def pause_s(self, report: Pass) -> float:
        """At once while there is more to take and room for it."""
        return 0.0 if report.claimed and len(self._driving) < self.options.concurrency else self.options.poll_s

    async def _accept(self) -> int:
        """Take in what was only requested, oldest first: whoever triggers a run does that too, but may die in between."""
        found = await self._requested()
        for run_id in found:
            await accept(self.ledger, self.actor, run_id)
        return len(found)

    async def _requested(self) -> list[JobId]:
        """The oldest of those only requested. Listings begin with the newest, so that all pages are read; mostly there is none."""
        where, found, cursor = JobFilter(lifecycle="run", state="requested"), list[JobId](), None
        for _ in range(ACCEPT_PAGES_MAX):
            page = await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, cursor=cursor)
            found += [job.job_id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        return found[: -ACCEPT_BATCH_MAX - 1 : -1]

    async def _claim(self) -> int:
        room = self.options.concurrency - len(self._driving)
        if not self.claiming or room <= 0:
            return 0
        sent_at = self.clock.monotonic()
        terms = TypeClaim(type=TYPE, lease_s=self.options.lease_s, heartbeat_s=self.options.heartbeat_s)
        claim = Claim(claim_id=ClaimId(self.new_id()), types=(terms,), start=room, lifecycle="run")
        answer = await self.ledger.turn(Turn(actor=self.actor, claim=claim))
        if answer.claimed and self._fence(sent_at) <= self.clock.monotonic():
            _log.warning("claim_too_late", runs=[claimed.lease.job_id for claimed in answer.claimed])
            return 0
        for claimed in answer.claimed:
            task = asyncio.get_running_loop().create_task(self._drive(claimed))
            self._driving[claimed.lease.job_id] = _Driving(claimed, self._fence(sent_at), task)
        if self._driving and (self._fencing is None or self._fencing.done()):
            self._fencing = asyncio.get_running_loop().create_task(self._keep_fences())
        return len(answer.claimed)

    def _fence(self, sent_at: float) -> float:
        return sent_at + lease_length_s(self.options.lease_s, self.options.heartbeat_s)

    async def _drive(self, claimed: Claimed) -> None:
        run_id = claimed.lease.job_id
        try:
            await self.driver.drive(claimed)
        except asyncio.CancelledError:
            _log.info("run_let_go", run_id=run_id, epoch=claimed.lease.epoch)
            raise
        except LedgerError as error:
            # The run stays `running`; when the lease is over somebody takes it up after its last counted step.
            _log.warning("run_left", run_id=run_id, error=str(error))
        except Exception:  # noqa: BLE001 - as above: the run is left, and the others go on
            _log.exception("drive_failed", run_id=run_id)
        finally:
            mine = self._driving.get(run_id)
            if mine is not None and mine.claimed is claimed:
                del self._driving[run_id]
            if not self._driving and self._fencing is not None:
                self._fencing.cancel()
                self._fencing = None
            self._look()

    def _look(self) -> None:
        """A drive has ended: there is room here, and its agent may have a next run. One claim serves all that end meanwhile."""
        self._look_again = True
        if self.claiming and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._claim_while_any_ended())

    async def _claim_while_any_ended(self) -> None:
        while self._look_again and self.claiming:
            self._look_again = False
            try:
                await self._claim()
            except LedgerError as error:
                _log.warning("claim_failed", error=str(error))  # the next pass claims

    async def renew(self) -> int:
        """One heartbeat for every run driven here; how many are still this process's. Past its fence a drive is cut."""
        self._fence_off()
        driving, sent_at = self._uncut(), self.clock.monotonic()
        if not driving:
            return 0
        patience_s = min(mine.fence for mine in driving) - sent_at
        try:
            renewal = self.ledger.renew(self.actor, [mine.claimed.lease for mine in driving])
            answers = await within(self.clock, patience_s, renewal)
        except (LedgerError, TimeoutError) as error:
            problem = str(error) or f"no answer within {patience_s:g} s"
            _log.warning("renewal_failed", runs=len(driving), error=problem)
            self._fence_off()
            return 0
        for mine, answer in zip(driving, answers, strict=True):
            if isinstance(answer, LeaseLost):
                self._cut(mine)
                continue
            mine.fence = self._fence(sent_at)
            if answer.cancel and not (mine.cancelled or mine.cut):
                mine.cancelled = True
                self.driver.wishes.add(mine.claimed.lease.job_id)
                mine.task.cancel()
        self._fence_off()
        return len(self._driving)

    async def _keep_fences(self) -> None:
        """Cut each drive at its fence, whatever a renewal or a claim is doing meanwhile; until there is none to cut."""
        while driving := self._uncut():
            next_fence = min(mine.fence for mine in driving)
            await self.clock.sleep(min(FENCE_LOOK_S_MAX, next_fence - self.clock.monotonic()))
            self._fence_off()

    def _fence_off(self) -> None:
        now = self.clock.monotonic()
        for mine in self._uncut():
            if mine.fence <= now:
                self._cut(mine)

    def _uncut(self) -> list[_Driving]:
        return [mine for mine in self._driving.values() if not mine.cut]

    def _cut(self, mine: _Driving) -> None:
        """The drive ends here, whatever somebody wished before: it may be another's now."""
        mine.cut = True
        self.driver.wishes.discard(mine.claimed.lease.job_id)
        mine.task.cancel()

    async def drain(self) -> None:
        """Let go of everything; another orchestrator goes on where each run stands."""
        self.claiming = False
        if self._looking is not None:
            await asyncio.wait({self._looking})  # what it claims is let go of below
        driving = list(self._driving.values())
        for mine in driving:
            self._cut(mine)
        await asyncio.gather(*(mine.task for mine in driving), return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class RunHeartbeat:
    """Renews the runs of one orchestrator."""

    orchestrator: Orchestrator
    name: str = "run-heartbeat"

    async def run_once(self) -> int:
        """One heartbeat."""
        return await self.orchestrator.renew()

    def pause_s(self, report: int) -> float:
        """The heartbeat interval; a failed one is tried again soon."""
        options = self.orchestrator.options
        return options.heartbeat_s if report else min(options.heartbeat_s, RENEW_RETRY_S_MIN)


async def accept(ledger: Ledger, actor: Actor, run_id: JobId) -> None:
    """The orchestration layer has the run now. Doing it twice is doing it once."""
    await ledger.move(actor, Move(job_id=run_id, target="queued", request_id=RequestId(f"accept:{run_id}")))

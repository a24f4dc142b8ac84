"""The turn loops of a worker. A turn is one ledger transaction that carries everything gathered since the last one.

A turn settles finished jobs, starts claimed jobs, and claims new jobs for the free capacity. While a turn is in flight,
further outcomes gather; when none is in flight, the first outcome is sent at once. When many have gathered, a second
turn is sent in parallel, so that the ledger and this process work at the same time. There is no timer.

A turn that settles some jobs claims as many, so the sizes of two turns in flight last. Each carries about half of the
held jobs while short handlers keep the worker busy: a turn has a price of its own, and a small one beside a large one
would come back and leave again while the large one is away.

Quarantine: a job whose workers died (`engine/retry_policy.py`) may be a poison pill, or may only have run next to one.
It runs alone: this process runs and starts nothing else. If it kills the worker again, no other job is charged with
that death. The ledger hands out one such job at a time in the whole fleet, and never as already started. Its worker
first finishes what it holds, claims nothing meanwhile, and continues as usual when the quarantined job has ended.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trellis.engine.clock import Clock
from trellis.engine.errors import InputError, LedgerError, LedgerNotMigrated, LedgerTooOld, LedgerUrlInvalid, Refused
from trellis.engine.jobs import CLAIM_MAX, Advance, Claim, Claimed, ClaimId, LeaseLost, StepApplied, Turn, TurnResult
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.outage_log import Failures
from trellis.engine.service import pause_after_failures_s
from trellis.lifecycles import Trigger
from trellis.worker.app import App
from trellis.worker.context import WorkerServices
from trellis.worker.held import RUNNING, HeldJob, HeldJobs, Settlement
from trellis.worker.outcomes import (
    LEASE_DOUBT_CAUSE,
    cancel_advance,
    reject_uncommitted,
    reject_unreadable,
    release_advance,
    start_advance,
)
from trellis.worker.payloads import UnreadablePayload
from trellis.worker.runners import Runners

# How many jobs to claim: pure arithmetic over what the worker holds and its recent pace.
#
# Free slots are always claimed for. Beyond them a worker holds only jobs it will start soon at its recent pace. Short
# jobs thus come in large batches, and a worker with long jobs takes none that another worker could start now.

AHEAD_S = 0.05
"""Jobs that will start within this time are started in the claim itself, which saves a second write of their lease."""
LOOKAHEAD_S = 0.5
"""Jobs that will start within this time are claimed but not yet started."""
TURNS_AHEAD = 2
"""Jobs that will start within so many turns are started in the claim too: their slot would wait for a later start."""
AHEAD_MAX_S = 0.1
"""At most what starts within this time is started in the claim: the death of the worker costs such a job an attempt."""
PACE_WINDOW_S = 0.002
PACE_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class ClaimSize:
    """How many jobs a claim asks for."""

    start: int
    prefetch: int

    @property
    def total(self) -> int:
        return self.start + self.prefetch


class JobPace:
    """Jobs that end per second while the worker is busy, as a moving average."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self.turn_s = 0.0
        """How long a turn takes, as a moving average."""
        self._since: float | None = None
        self._count = 0

    def note(self, settled: int, now: float, *, busy: bool) -> None:
        """Updates the average from the number of jobs settled so far. Idle time is ignored."""
        if self._since is None or not busy:
            self._since, self._count = now, settled
            return
        elapsed, ended = now - self._since, settled - self._count
        if elapsed < PACE_WINDOW_S or not ended:
            return
        self.per_s += PACE_WEIGHT * (ended / elapsed - self.per_s)
        self._since, self._count = now, settled

    def note_turn(self, seconds: float) -> None:
        """Updates how long a turn takes."""
        self.turn_s += PACE_WEIGHT * (seconds - self.turn_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchPolicy:
    """Limits how many jobs a worker holds."""

    concurrency: int
    prefetch_max: int

    def ahead(self, pace: JobPace) -> int:
        """How many jobs beyond the slots may already be started."""
        ahead_s = min(AHEAD_MAX_S, max(AHEAD_S, TURNS_AHEAD * pace.turn_s))
        return min(self.prefetch_max, int(pace.per_s * ahead_s))

    def wanted(self, pace: JobPace, *, running: int, ready: int, assigned: int) -> ClaimSize:
        reach = min(self.prefetch_max, int(pace.per_s * LOOKAHEAD_S))
        room = min(CLAIM_MAX, self.concurrency + reach - running - ready - assigned)
        if room <= 0:
            return ClaimSize(0, 0)
        start = min(room, max(0, self.concurrency + self.ahead(pace) - running - ready - assigned))
        return ClaimSize(start, room - start)

    def startable(self, pace: JobPace, *, running: int, ready: int) -> int:
        return max(0, self.concurrency + self.ahead(pace) - running - ready)


# Waiting for work. Hints only save time: a lost hint delays work by one poll interval at most.


@dataclass(frozen=True, kw_only=True)
class WorkListener:
    """Wakes the turn loop after a hint or a poll interval."""

    ledger: Ledger
    clock: Clock
    rng: random.Random
    types: tuple[str, ...]
    poll_s: float
    hints: bool
    found: Callable[[], Awaitable[None]]
    """Called when there may be work. Returns after a claim has been made."""
    name: str = "listener"

    async def run_once(self) -> None:
        """Waits for one hint or one poll interval. The interval is jittered so that workers do not poll in step."""
        wait_s = self.poll_s * (0.75 + 0.25 * self.rng.random())
        if self.hints:
            await self.ledger.wait_for_work(self.types, wait_s)
        else:
            await self.clock.sleep(wait_s)
        await self.found()

    def pause_s(self, report: None) -> float:  # noqa: ARG002 - the shape of every service
        """No pause: `run_once` itself waits."""
        return 0.0


# The turn loops.

ADVANCES_MAX = 1_000
SECOND_TURN_MIN = 64
"""Minimum number of transitions that justifies a second turn in parallel. Fewer wait for the first turn's answer."""

_log = log_of("trellis.worker")


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """One turn in flight, with the jobs its answers belong to: settlements first, then starts."""

    turn: Turn
    settlements: list[Settlement]
    starts: list[HeldJob]
    wanted: ClaimSize
    sent_at: float


class TurnLoop:
    """Sends settlements, starts and claims to the ledger."""

    def __init__(
        self,
        *,
        app: App,
        worker: WorkerServices,
        held_jobs: HeldJobs,
        room: PrefetchPolicy,
        runners: Runners,
        rng: random.Random,
        new_id: Callable[[], str],
    ) -> None:
        self._worker = worker
        self._held_jobs = held_jobs
        self._room = room
        self._runners = runners
        self._rng = rng
        self._new_id = new_id
        self._specs = {spec.type: spec for spec in app}
        self._types = tuple(spec.claim for spec in app)
        self._pace = JobPace()
        self._due = held_jobs.changed
        self._consumed = asyncio.Event()
        self._search = True
        """Whether the ledger may have work that the last claim did not return."""
        self._flying: list[PendingTurn] = []
        self.claiming = True
        self.quiet = asyncio.Event()
        """Set when no job is held and nothing waits to be settled."""
        self.idle = asyncio.Event()
        """Set when quiet and the last claim returned nothing."""

    async def hint(self) -> None:
        """Requests a claim because there may be work. Returns after the claim, so that hints cannot outrun claims."""
        self._search = True
        self._consumed.clear()
        self._due.set()
        await self._consumed.wait()

    async def run(self) -> None:
        """Sends turns until cancelled. The ledger's `turns_at_once` says how many of these loops run in parallel."""
        self._due.set()
        while True:
            await self._due.wait()
            self._due.clear()
            order = self._compose()
            if order is not None:
                self._flying.append(order)
                try:
                    answer = await self._deliver(order.turn)
                finally:
                    self._flying.remove(order)
                self._pace.note_turn(self._worker.clock.monotonic() - order.sent_at)
                self._apply(order, answer)
                self._due.set()
            self._note_quiet()

    def _compose(self) -> PendingTurn | None:
        """Builds the next turn; None if there is nothing to send."""
        held_jobs, now = self._held_jobs, self._worker.clock.monotonic()
        self._pace.note(held_jobs.settled, now, busy=bool(held_jobs.jobs))
        if not (held_jobs.finished or held_jobs.assigned or held_jobs.quarantined or self._search):
            return None  # whatever there is room for
        if self._flying and len(held_jobs.finished) + len(held_jobs.assigned) < self._second_turn_min():
            return None
        settled_max = self._settled_max()
        starts = self._to_start(settled_max)
        settlements = held_jobs.finished[:settled_max]
        wanted = self._wanted(unsettled=len(held_jobs.finished) - len(settlements))
        if not settlements and not starts and not (wanted.total and self._search):
            return None
        del held_jobs.finished[:settled_max]
        claim = self._claim(wanted) if wanted.total else None
        advances = (*(advance for _, advance in settlements), *map(start_advance, starts))
        turn = Turn(actor=self._worker.actor, advances=advances, claim=claim)
        return PendingTurn(turn, settlements, starts, wanted, now)

    def _half(self) -> int:
        return (len(self._held_jobs.jobs) + 1) // 2

    def _second_turn_min(self) -> int:
        """How many transitions justify a second turn: half of the jobs, as long as runners begin more of them."""
        held_jobs = self._held_jobs
        more_begin = held_jobs.ready and held_jobs.running < self._room.concurrency
        return max(SECOND_TURN_MIN, self._half()) if more_begin else SECOND_TURN_MIN

    def _settled_max(self) -> int:
        """How many jobs one turn settles at most: half of them if another turn can carry the other half."""
        if self._worker.ledger.turns_at_once == 1:
            return ADVANCES_MAX
        return min(ADVANCES_MAX, max(2 * SECOND_TURN_MIN, self._half()))

    def _claim(self, wanted: ClaimSize) -> Claim:
        self._search = False
        self._consumed.set()
        claim_id = ClaimId(self._new_id())
        return Claim(claim_id=claim_id, types=self._types, start=wanted.start, prefetch=wanted.prefetch, isolates=True)

    def _wanted(self, *, unsettled: int) -> ClaimSize:
        """What to claim. The room of finished jobs that this turn does not settle is left to the turn that does."""
        held_jobs = self._held_jobs
        if not self.claiming or held_jobs.quarantined:
            return ClaimSize(0, 0)
        return self._room.wanted(
            self._pace,
            running=held_jobs.running,
            ready=len(held_jobs.ready) + self._starting(),
            assigned=len(held_jobs.assigned) + unsettled + sum(order.wanted.prefetch for order in self._flying),
        )

    def _to_start(self, settled_max: int) -> list[HeldJob]:
        """Chooses the claimed jobs to start with this turn, after the checks that precede the handler."""
        held_jobs = self._held_jobs
        if not self.claiming:
            return []
        while held_jobs.quarantined and held_jobs.quarantined[0].finished:
            self._release_quarantined(held_jobs.quarantined[0])
        if held_jobs.quarantined and not held_jobs.assigned:
            return self._quarantined_to_start(settled_max)
        ready = len(held_jobs.ready) + self._starting()
        count = self._room.startable(self._pace, running=held_jobs.running, ready=ready)
        chosen = [held_jobs.assigned.popleft() for _ in range(min(count, len(held_jobs.assigned)))]
        return [held for held in chosen if self._may_start(held)]

    def in_flight(self, held: HeldJob) -> bool:
        """Whether the job's start is on its way to the ledger. Until the answer, its state is unknown."""
        return any(held in order.starts for order in self._flying)

    def _starting(self) -> int:
        """How many jobs the turns in flight may make ready."""
        return sum(order.wanted.start + len(order.starts) for order in self._flying)

    def _quarantined_to_start(self, settled_max: int) -> list[HeldJob]:
        """Returns the first quarantined job once nothing else runs. Finished jobs are settled in the same turn."""
        held_jobs = self._held_jobs
        suspect = held_jobs.quarantined[0]
        if held_jobs.running or held_jobs.ready or self._flying or len(held_jobs.finished) > settled_max:
            return []
        if suspect.began_at is not None or suspect.state == RUNNING:
            return []
        _log.warning(
            "running_alone", job_id=suspect.lease.job_id, type=suspect.claimed.type, deaths=suspect.claimed.deaths
        )
        return [suspect] if self._may_start(suspect) else []

    def _may_start(self, held: HeldJob) -> bool:
        now = self._worker.clock.monotonic()
        problem: Advance | None = None
        if held.cancel_requested:
            problem = cancel_advance(held, "soft cancel before the handler began")
        elif held.fence <= now:
            problem = release_advance(held, LEASE_DOUBT_CAUSE)
        elif isinstance(payload := held.spec.codec.read_payload(held.claimed.payload), UnreadablePayload):
            problem = reject_unreadable(held, payload)
        else:
            held.payload = payload
        if problem is not None:
            self._settle_unbegun(held, problem)
        return problem is None

    def _settle_unbegun(self, held: HeldJob, advance: Advance) -> None:
        self._release_quarantined(held)
        self._held_jobs.settle(held, advance)

    def _release_quarantined(self, held: HeldJob) -> None:
        """Ends the quarantine of a job, and claims again: the ledger may have held back other jobs meanwhile."""
        quarantined = self._held_jobs.quarantined
        if quarantined and held in quarantined:
            quarantined.remove(held)
            self._search = True

    async def _deliver(self, turn: Turn) -> TurnResult:
        """Sends a turn until the ledger answers. Its ids make repetition safe, and no outcome is ever dropped."""
        failures: Failures | None = None
        while True:
            try:
                result = await self._worker.ledger.turn(turn)
            except (LedgerTooOld, LedgerNotMigrated, LedgerUrlInvalid):
                raise
            except (Refused, InputError) as error:
                return await self._deliver_apart(turn, error)
            except LedgerError as error:
                failures = failures or Failures("worker turns")
                failures.failed(error, now=self._worker.clock.monotonic())
            else:
                if failures is not None:
                    failures.succeeded(now=self._worker.clock.monotonic())
                return result
            await self._worker.clock.sleep(pause_after_failures_s(failures.count, self._rng.random()))

    async def _deliver_apart(self, turn: Turn, error: Exception) -> TurnResult:
        """Sends each transition of a refused turn separately, because the ledger refuses one of them permanently.

        The other transitions and the claim are not affected. A refused completion dead-letters its job.
        """
        if not turn.advances:
            raise error
        if len(turn.advances) == 1 and turn.claim is None:
            step = turn.advances[0]
            _log.error("step_impossible", job_id=step.lease.job_id, trigger=step.trigger, error=str(error))
            if step.trigger == Trigger.COMPLETE:
                return await self._deliver(Turn(actor=turn.actor, advances=(reject_uncommitted(step, error),)))
            return TurnResult([LeaseLost(step.lease)], [])
        outcomes: list[StepApplied | LeaseLost] = []
        for advance in turn.advances:
            outcomes += (await self._deliver(Turn(actor=turn.actor, advances=(advance,)))).outcomes
        claimed = (await self._deliver(Turn(actor=turn.actor, claim=turn.claim))).claimed if turn.claim else []
        return TurnResult(outcomes, claimed)

    def _apply(self, order: PendingTurn, answer: TurnResult) -> None:
        outcomes = iter(answer.outcomes)
        for (held, advance), outcome in zip(order.settlements, outcomes, strict=False):
            if isinstance(outcome, LeaseLost):
                _note_refused(held, advance.trigger)
            self._drop(held)
        for held, outcome in zip(order.starts, outcomes, strict=True):
            if isinstance(outcome, LeaseLost):
                _note_refused(held, "start")
                self._drop(held)
            elif not held.finished:
                held.state = RUNNING
                self._hand_over(held)
        self._admit(answer.claimed, order)
        if self._held_jobs.ready:
            self._runners.wake()

    def _drop(self, held: HeldJob) -> None:
        self._release_quarantined(held)
        self._held_jobs.forget(held)

    def _hand_over(self, held: HeldJob) -> None:
        self._held_jobs.ready.append(held)
        self._runners.wake()

    def _admit(self, claimed: list[Claimed], order: PendingTurn) -> None:
        """Adds claimed jobs to their queues; releases them if the worker is draining."""
        held_jobs, specs, sent_at = self._held_jobs, self._specs, order.sent_at
        if order.wanted.total:
            self._search = self._search or len(claimed) >= order.wanted.total
        for job in claimed:
            held = HeldJob(job, specs[job.type], sent_at)
            held_jobs.jobs[job.lease.key] = held
            if not self.claiming:
                held_jobs.settle(held, release_advance(held, "claimed while the worker began to drain"))
            elif job.runs_alone:
                held_jobs.quarantined.append(held)
            elif job.state == RUNNING:
                held_jobs.ready.append(held)
            else:
                held_jobs.assigned.append(held)

    def _note_quiet(self) -> None:
        if self._held_jobs.jobs or self._held_jobs.finished or self._flying:
            self.quiet.clear()
            self.idle.clear()
            return
        self.quiet.set()
        if not self._search and not self._due.is_set():
            self.idle.set()


def _note_refused(held: HeldJob, trigger: str) -> None:
    _log.warning("step_refused", job_id=held.lease.job_id, epoch=held.lease.epoch, trigger=trigger, reason="lease lost")

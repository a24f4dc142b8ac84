"""The scheduler: validates jobs, asks the safety kernel about each, and dispatches jobs to workers over the bus.

Any number of processes may run it (BUS-1, BUS-3, BUS-4, BUS-8, BUS-10). The ledger decides which process dispatches a
job: only the process whose dispatch id is in the ledger publishes the order. The ledger is written first and the bus
second, so a crash in between costs one lease time and nothing else. Nothing is dispatched while the bus or the safety
kernel is unavailable.
"""

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

from trellis.bus.errors import (
    BusError,
    BusRequestInvalid,
    BusUnavailable,
    BusUncertain,
    KernelUnavailable,
    NoResponders,
)
from trellis.bus.messages import Dispatch, JobOrder
from trellis.bus.outcomes.attempts import ATTEMPT, AttemptCache
from trellis.bus.outcomes.job_tree import JobTree
from trellis.bus.outcomes.linked_jobs import ATTEMPTS, attempts_of
from trellis.bus.outcomes.workflows import StepDoomed, StepNotDue, StepOrder, gather_all
from trellis.bus.port import Bus
from trellis.bus.requests import JobRequest, request_of, wire_id
from trellis.bus.safety.policy import DecisionKernel, DecisionKind, KernelRefuses, SafetyDecision
from trellis.bus.scheduling import dispatch_policy
from trellis.bus.scheduling.dispatch_policy import (
    GATHER_S,
    HOLD_S,
    DispatchOutcome,
    DispatchTerms,
    JobGroups,
    SchedulerOptions,
    SchedulerReport,
    TenantLimits,
    age_s,
    dispatch_order,
    find_approval,
    in_lanes,
    interleave,
    order_of,
    unreached_lanes,
    urgent_first,
)
from trellis.bus.scheduling.placement import NoFittingWorker, PlacedJob, StaysReady, WaitReason, place_job
from trellis.bus.scheduling.registry import WorkerRegistry
from trellis.bus.topics import Topics
from trellis.bus.trigger import CoalescedTrigger
from trellis.bus.wire.alerts import AlertLimit, AlertSender
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import (
    HEADS_MAX,
    Actor,
    Advance,
    CancelMode,
    Epoch,
    JobId,
    Lease,
    LeaseLost,
    Move,
    Moved,
    RequestId,
    Turn,
)
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Job, JobFilter
from trellis.engine.restoration import GIVEN_BACK_PREFIX
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB

# Safety kernel checks. Without a valid answer a job is not dispatched (BUS-4).

CHECK_S_MAX = 5.0
"""Timeout of one kernel check, in seconds. Other jobs wait for it."""

_log = log_of("trellis.bus.scheduling.scheduler")


class KernelChecks:
    """One scheduler's checks with its kernel.

    Logs once when the kernel becomes unavailable, and once when it is back.
    """

    def __init__(self) -> None:
        self._away = False
        self._breaks: set[type[Exception]] = set()
        """Types of unexpected exceptions the kernel raised; each is logged once."""

    async def check(self, kernel: DecisionKernel, request: JobRequest) -> SafetyDecision:
        """The decision about this request.

        Raises KernelUnavailable, and KernelRefuses for an unexpected error or an invalid answer.
        """
        try:
            async with asyncio.timeout(CHECK_S_MAX):
                decision = await kernel.check(request)
            json.dumps(decision.to_dict())  # a decision that no event can record is not a decision
        except KernelRefuses:
            raise
        except KernelUnavailable as error:
            raise self._is_away(error) from None
        except TimeoutError:
            raise self._is_away(KernelUnavailable(detail=f"no answer within {CHECK_S_MAX:g} s")) from None
        except Exception as error:
            if type(error) not in self._breaks:
                _log.exception("kernel_broke", job_id=request.job_id)  # once: it would be the same for every job
            self._breaks.add(type(error))
            raise KernelRefuses(detail=f"it broke: {type(error).__name__}") from error
        if decision.job_hash != request.hash:
            raise KernelRefuses(detail="it answers about another job")
        return decision

    def passed(self, *, away: bool) -> None:
        """Record the end of a pass, and whether the kernel left a check unanswered."""
        if self._away and not away:
            _log.info("kernel_back")
        self._away = away

    def _is_away(self, error: KernelUnavailable) -> KernelUnavailable:
        if not self._away:
            _log.warning("kernel_unavailable", error=str(error))
            self._away = True
        return error


PENDING, SCHEDULED, DISPATCHED, DENIED = "PENDING", "SCHEDULED", "DISPATCHED", "DENIED"
FIRST_VERSION = 1
"""The version of a job that was submitted and not touched since."""
KERNEL_FAILURES_MAX = 3
"""A pass stops asking after this many unanswered checks, if no check of the same group was answered."""
BUS_OUTAGE_PAUSE_S = 1.0
ROOM_S = 0.02
"""How much later a pass may begin that is for room alone, while no ready job is known, in seconds."""
CAUSE_CHARS_MAX = 500
LANES_MAX = 10_000
_DISPATCHED_OUTCOMES = frozenset({DispatchOutcome.DISPATCHED, DispatchOutcome.UNCERTAIN})
"""Outcomes after which a worker has the job, or may have it."""


_Work: TypeAlias = Callable[[], Coroutine[Any, Any, DispatchOutcome]]


@dataclass(slots=True)
class _PassState:
    """What a pass has found so far: the order of steps, and where there is room."""

    turns: StepOrder
    crowded: bool
    """There are more topics than one read of the queue returns, so topics without workers can hide others."""
    full: set[str] = field(default_factory=set[str])
    """Topics that can dispatch nothing more in this pass."""
    stuck: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """By topic and priority: jobs that wait for particular workers, while jobs behind them could go to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReadyJob:
    job: Job
    request: JobRequest
    age_s: float

    @property
    def wire_id(self) -> str:
        """The wire id the job will have if this dispatch succeeds."""
        return wire_id(self.job.job_id, Epoch(self.job.epoch + 1))


@dataclass(kw_only=True)
class Scheduler:
    """The service. One pass validates pending jobs, then dispatches ready jobs in order, as far as there is room.

    On request, both go on side by side: new jobs are validated while others are dispatched. That is as safe as two
    processes, because every transition applies only to the version of the job that was read.
    """

    ledger: Ledger
    actor: Actor
    bus: Bus
    workers: WorkerRegistry
    topics: Topics
    kernel: DecisionKernel
    clock: Clock
    new_id: Callable[[], str]
    attempts: AttemptCache | None = None
    """Where this process remembers what it dispatched, so that it need not be read when its result arrives."""
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    name: str = "bus-scheduler"
    waits_for_events = True
    _tree: JobTree = field(init=False)
    _gone: LruCache[str, int] = field(default_factory=lambda: LruCache(LANES_MAX))
    """By lane: how many jobs were dispatched. Decides when a job goes by age."""
    _behind: frozenset[str] = frozenset()
    """Lanes that passes had no time for since all were reached. The next pass starts with them."""
    _validation: CoalescedTrigger[SchedulerReport] = field(init=False)
    _dispatching: CoalescedTrigger[SchedulerReport] = field(init=False)
    _pending_left: bool = False
    """Whether the last validation read only a part of the pending jobs."""
    _jobs_wait: bool = True
    """Whether the last pass left ready jobs, or may have."""
    _room_came: bool = False
    """Whether a worker may have got room since the last pass began."""
    _groups: JobGroups = field(init=False)
    _checks: KernelChecks = field(default_factory=KernelChecks)
    _alerts: AlertSender = field(init=False)

    def __post_init__(self) -> None:
        self._alerts = AlertSender(bus=self.bus, limit=AlertLimit(self.clock))
        self._tree = JobTree(ledger=self.ledger, topics=self.topics)
        self._kernel_actor = replace(self.actor, role=Role.SAFETY_KERNEL)
        self._reconciler = replace(self.actor, role=Role.RECONCILER)
        self._tenants = TenantLimits(ledger=self.ledger, topics=self.topics, name=self.actor.name)
        self._groups = JobGroups(clock=self.clock, largest=self.options.at_once)
        self._frees_keys = any(one.held_max for one in (self.topics.tenant_default, *self.topics.tenants.values()))
        self._dispatching = CoalescedTrigger(
            run=self._dispatch_pass,
            more=lambda report: report.again or (self._jobs_wait and self._room_came),
        )
        self._validation = CoalescedTrigger(
            run=self._validation_pass, more=lambda report: report.again, then=self.wake_dispatch
        )

    async def run_once(self) -> SchedulerReport:
        """Validate, then dispatch. Raises LedgerError when the ledger does not answer."""
        validated = await self._validation.once()
        return validated.followed_by(await self._dispatching.once())

    async def _validation_pass(self) -> SchedulerReport:
        did = Counter(await self._validate())
        return SchedulerReport(did=did, left=self._pending_left)

    async def _dispatch_pass(self) -> SchedulerReport:
        self._room_came = False
        self._groups.pass_began()
        if not self.bus.connected:
            self._jobs_wait = True
            return SchedulerReport(did=Counter(), bus_away=True)
        try:
            report = await self._dispatch_ready()
        except BaseException:
            self._jobs_wait = True
            raise
        self._jobs_wait = report.waits
        self._groups.were_dispatched(report.dispatched)
        return report

    def pause_s(self, report: SchedulerReport) -> float:
        """No pause while there may be more work."""
        return 0.0 if report.again else self.options.poll_s

    def wake(self) -> None:
        """Request a pass now, because there may be new jobs."""
        self._validation.wake()

    async def validate_new(self, job_id: JobId) -> None:
        """Validate a job that this process has just submitted from a valid request, without reading it back.

        When the ledger does not answer, the next pass validates it.
        """
        try:
            await self._schedule(job_id, FIRST_VERSION)
        except LedgerError as error:
            _log.info("validated_later", job_id=job_id, error=str(error))
            self.wake()
        else:
            if self._groups.is_complete_with_next():
                self.wake_dispatch()
            else:
                self._dispatching.wake_within(GATHER_S)

    def wake_dispatch(self) -> None:
        """Request a dispatch of ready jobs now, because a job is ready."""
        self._dispatching.wake()

    def has_room(self) -> None:
        """Request a dispatch because a worker may have room: at once if jobs may wait for it, otherwise soon.

        The end of a job makes others ready where the jobs of a tenant are limited.
        """
        self._room_came = True
        if self._jobs_wait or self._frees_keys:
            self.wake_dispatch()
        else:
            self._dispatching.wake_within(ROOM_S)

    async def drain(self) -> None:
        """Finish the requested passes and accept no more requests."""
        await self._validation.drain()
        await self._dispatching.drain()

    # --- validation -----------------------------------------------------------------------------------------------

    async def _validate(self) -> list[DispatchOutcome]:
        """PENDING → SCHEDULED, oldest first. Where many wait, urgent jobs among the newest go before the oldest."""
        where = JobFilter(lifecycle=BUS_JOB.name, state=PENDING)
        page = await self.ledger.jobs(where, limit=self.options.validate_max, oldest_first=True)
        jobs, done = self._elsewhere(page.jobs), list[DispatchOutcome]()
        self._pending_left = page.cursor is not None
        if page.cursor is not None:
            newest = (await self.ledger.jobs(where, limit=self.options.newest_max)).jobs
            jobs = urgent_first(newest, jobs, self.options.validate_max // 2)
        for group in _groups(jobs, self.options.at_once):
            payloads = await self.ledger.payloads([job.job_id for job in group])
            done += await gather_all(self._validate_one(job, payloads.get(job.job_id)) for job in group)
        return done

    async def _validate_one(self, job: Job, payload: bytes | None) -> DispatchOutcome:
        """Validate a job that was PENDING when it was listed. It is moved only if nothing has happened to it since."""
        if payload is None:
            return DispatchOutcome.LOST
        job_id = job.job_id
        try:
            request_of(replace(job, payload=payload))
        except BusRequestInvalid as error:
            return await self._end(job_id, f"not accepted: {error}", DispatchOutcome.REFUSED)
        return await self._schedule(job_id, job.version)

    async def _schedule(self, job_id: JobId, version: int) -> DispatchOutcome:
        """Make a validated job ready, if it still has this version."""
        request_id = RequestId(f"validate:{job_id}")
        move = Move(job_id=job_id, target=SCHEDULED, request_id=request_id, version=version, delay_s=0.0)
        return _outcome_of_move(await self.ledger.move(self.actor, move), DispatchOutcome.VALIDATED)

    # --- dispatch -------------------------------------------------------------------------------------------------

    async def _dispatch_ready(self) -> SchedulerReport:
        did = Counter[DispatchOutcome]()
        await self._tenants.write_limits()
        heads = await self.ledger.peek_ready(BUS_JOB.name, each=self.options.each)
        if not heads:
            self._behind = frozenset()
            self._checks.passed(away=False)
            return SchedulerReport(did=did)
        now = await self.ledger.now()
        waiting, until = self._in_order(heads, now), self.clock.monotonic() + self.options.pass_s
        kinds = Counter((job.type, job.priority) for job in heads)
        room = _PassState(StepOrder(tree=self._tree), crowded=len(kinds) >= HEADS_MAX)
        bus_away = kernel_away = False
        while waiting and not (bus_away or kernel_away) and self.clock.monotonic() < until:
            group, waiting, left = await self._next_group(waiting, room, now)
            outcomes = await gather_all(work() for work in group)
            did.update([*left, *outcomes])
            bus_away = not self.bus.connected
            kernel_away = did[DispatchOutcome.UNASKED] >= KERNEL_FAILURES_MAX and set(outcomes) == {
                DispatchOutcome.UNASKED
            }
            if outcomes.count(DispatchOutcome.LOST) * 2 > len(outcomes):
                waiting = self._elsewhere(waiting)  # another process is active: work in different places
        unseen = unreached_lanes(heads, waiting, self._lane)
        self._behind = (unseen & self._behind) or unseen
        await self._let_go(await room.turns.missed())
        self._checks.passed(away=did[DispatchOutcome.UNASKED] > 0)
        unread = room.crowded or max(kinds.values(), default=0) >= self.options.each
        return SchedulerReport(did=did, bus_away=bus_away, left=unread or bool(waiting))

    def _in_order(self, jobs: Sequence[Job], now: datetime) -> list[Job]:
        """Interleaves the lanes, each in its own order. Jobs of different lanes do not compete for the same workers."""
        lanes = in_lanes(jobs, self._lane, self._behind)
        return interleave([dispatch_order(lane, now, self._gone.get(name) or 0) for name, lane in lanes.items()])

    def _elsewhere(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs, rotated to a start position of this process's own."""
        start = zlib.crc32(self.actor.name.encode()) % len(jobs) if jobs else 0
        return [*jobs[start:], *jobs[:start]]

    def _lane(self, topic: str) -> str:
        return " ".join(sorted(self.topics.of(topic).pools)) or topic

    async def _next_group(
        self, waiting: Sequence[Job], room: _PassState, now: datetime
    ) -> tuple[list[_Work], list[Job], list[DispatchOutcome]]:
        """The next group of concurrent work, the jobs to look at afterwards, and the outcomes of jobs left waiting."""
        reserved: list[str] = []
        try:
            return await self._fill(reserved, waiting, room, now)
        except LedgerError:
            for wire in reserved:
                self.workers.released(wire)
            raise

    async def _fill(
        self, reserved: list[str], waiting: Sequence[Job], room: _PassState, now: datetime
    ) -> tuple[list[_Work], list[Job], list[DispatchOutcome]]:
        group: list[_Work] = []
        left: list[DispatchOutcome] = []
        later: list[Job] = []
        tried, behind = set[str](), set[str]()
        for number, job in enumerate(waiting):
            if len(group) >= self.options.at_once:
                return group, [*later, *waiting[number:]], left
            if job.type in room.full:
                left.append(DispatchOutcome.WAITING)
                continue
            if job.type in behind:
                later.append(job)
                continue
            ready = await self._in_turn(job, room.turns, now)
            if not isinstance(ready, _ReadyJob):
                group.append(ready)
                continue
            placed = self._place(ready)
            if isinstance(placed, PlacedJob) and not self.workers.proven(placed.subject):
                if placed.subject in tried:
                    later.append(job)  # one goes first, to see whether there is a subscriber
                    behind.add(job.type)
                    continue
                tried.add(placed.subject)
            if isinstance(placed, PlacedJob):
                self._reserve(ready, placed)
                reserved.append(ready.wire_id)
                group.append(partial(self._take_on, ready, placed))
            elif self._note_waiting(ready, placed, room):
                left.append(DispatchOutcome.WAITING)
            else:
                group.append(partial(self._hold_back, ready, placed))
        return group, later, left

    async def _in_turn(self, job: Job, turns: StepOrder, now: datetime) -> _ReadyJob | _Work:
        """The job if it is its turn, else the work that defers or ends it."""
        await asyncio.sleep(0)  # placing a job among thousands of workers takes time; let other tasks run
        whole = job if job.payload is not None else await self.ledger.job(job.job_id)
        try:
            request = request_of(whole or job)
        except BusRequestInvalid as error:
            return partial(self._end, job.job_id, f"cannot be read: {error}", DispatchOutcome.REFUSED)
        turn = await turns.of(request)
        if isinstance(turn, StepDoomed):
            return partial(self._end, job.job_id, f"step {turn.step_index} did not succeed", DispatchOutcome.CANCELLED)
        ready = _ReadyJob(job=job, request=request, age_s=age_s(job, now))
        return partial(self._wait_for, turn, ready, turns) if isinstance(turn, StepNotDue) else ready

    async def _wait_for(self, turn: StepNotDue, ready: _ReadyJob, turns: StepOrder) -> DispatchOutcome:
        reason = f"step {turn.step_index} ({turn.job_id}) has not ended"
        did = await self._defer(ready.job, "order", reason, dispatch_policy.order_delay_s(ready.age_s))
        if did is DispatchOutcome.DEFERRED:
            await turns.put_aside(ready.job, ready.request)
        return did

    def _place(self, ready: _ReadyJob) -> PlacedJob | StaysReady | NoFittingWorker:
        return place_job(
            ready.request,
            self.topics,
            self.workers.live(),
            self.workers,
            subject_max=self.options.subject_max,
            age_s=ready.age_s,
        )

    def _note_waiting(self, ready: _ReadyJob, placed: StaysReady | NoFittingWorker, room: _PassState) -> bool:
        """Whether the job stays ready. It does not if that would hide other jobs, or if no worker may get it."""
        if isinstance(placed, NoFittingWorker):
            return False
        if placed.all_do:
            room.full.add(ready.job.type)
            return placed.why is WaitReason.FULL or not room.crowded  # waiting for busy workers resolves itself
        kind = (ready.job.type, ready.job.priority)
        room.stuck[kind] += 1
        return room.stuck[kind] <= self.options.each // 2

    async def _hold_back(self, ready: _ReadyJob, placed: StaysReady | NoFittingWorker) -> DispatchOutcome:
        """Defer a job that no worker may get. An alert is sent when the workers are at fault."""
        job = ready.job
        did = await self._defer(job, "placement", placed.reason, dispatch_policy.placement_delay_s(ready.age_s))
        if did is DispatchOutcome.DEFERRED and isinstance(placed, NoFittingWorker):
            await self._alert(job, placed)
        return did

    async def _alert(self, job: Job, unfit: NoFittingWorker) -> None:
        if unfit.code is not None:
            trace_id, details = job.correlation_id or job.job_id, {"job_id": job.job_id, "topic": job.type}
            await self._alerts.send(unfit.code, unfit.reason, about=unfit.worker_id, trace_id=trace_id, details=details)

    def _reserve(self, ready: _ReadyJob, placed: PlacedJob) -> None:
        if placed.worker_id:
            self.workers.assigned(placed.worker_id, ready.wire_id)
        else:
            self.workers.sent(placed.subject, ready.wire_id, self._lease_s(ready.job))

    async def _take_on(self, ready: _ReadyJob, placed: PlacedJob) -> DispatchOutcome:
        """Ask the kernel, then dispatch. Releases the reserved room if the job is not dispatched."""
        did = DispatchOutcome.LOST
        if placed.doubt is not None:
            await self._alert(ready.job, placed.doubt)
        try:
            decision = await self._checks.check(self.kernel, ready.request)
            did = await self._decided(ready, placed, decision)
        except KernelRefuses as error:
            did = await self._defer(ready.job, "kernel", str(error), dispatch_policy.kernel_doubt_delay_s(ready.age_s))
        except KernelUnavailable:
            did = DispatchOutcome.UNASKED
        finally:
            if did not in _DISPATCHED_OUTCOMES:
                self.workers.released(ready.wire_id)
        return did

    async def _decided(self, ready: _ReadyJob, placed: PlacedJob, decision: SafetyDecision) -> DispatchOutcome:
        job = ready.job
        if decision.lets_go:
            return await self._dispatch(ready, placed, decision, None)
        if decision.kind is DecisionKind.REQUIRE_HUMAN:
            approval = find_approval(await self.ledger.events(job.job_id), ready.request, decision)
            if approval is not None:
                return await self._dispatch(ready, placed, decision, approval)
            data = {"hold": "human", "decision": decision.to_dict()}
            hold = self._move(job, SCHEDULED, "hold", decision.reason, data, delay_s=HOLD_S)
            return _outcome_of_move(await self.ledger.move(self._kernel_actor, hold), DispatchOutcome.HELD)
        if decision.kind is DecisionKind.THROTTLE:
            delay_s = dispatch_policy.throttle_delay_s(ready.age_s, decision.delay_s)
            return await self._defer(job, "throttle", decision.reason, delay_s, decision)
        denial = self._move(job, DENIED, "deny", decision.reason, {"decision": decision.to_dict()})
        return _outcome_of_move(await self.ledger.move(self.actor, denial), DispatchOutcome.DENIED)

    async def _dispatch(
        self, ready: _ReadyJob, placed: PlacedJob, decision: SafetyDecision, approval: str | None
    ) -> DispatchOutcome:
        """Record the dispatch in the ledger, then publish the order."""
        job = ready.job
        about: dict[str, tracing.Value] = {"trellis.job_id": job.job_id, "trellis.correlation_id": job.correlation_id}
        with tracing.carried(job.trace, f"job.dispatch {job.type}", about, kind=tracing.PRODUCER):
            dispatch = Dispatch(dispatch_id=self.new_id(), attempt=job.attempt + 1, worker_id=placed.worker_id)
            terms = DispatchTerms(
                lease_s=self._lease_s(job),
                trace=tracing.here(),
                constraints=decision.constraints,
                redacted=decision.redacted,
            )
            try:
                order = order_of(ready.request, dispatch, ready.wire_id, terms)
            except BusRequestInvalid as error:
                return await self._end(job.job_id, f"cannot be sent: {error}", DispatchOutcome.CANCELLED)
            moved = await self.ledger.move(self.actor, self._handing_out(job, placed, dispatch, decision, approval))
            if not isinstance(moved, Moved) or moved.lease is None:
                return DispatchOutcome.LOST
            if self.attempts is not None:
                self.attempts.dispatched(moved.lease, dispatch)
            return await self._publish(job, placed, moved.lease, order)

    def _lease_s(self, job: Job) -> float:
        return self.topics.of(job.type).lease_s

    def _handing_out(
        self, job: Job, placed: PlacedJob, dispatch: Dispatch, decision: SafetyDecision, approval: str | None
    ) -> Move:
        lease_s = self._lease_s(job)
        data: dict[str, Any] = {
            "dispatch_id": dispatch.dispatch_id,
            ATTEMPT: dispatch.attempt,
            "worker_id": placed.worker_id,
            "subject": placed.subject,
            ATTEMPTS: attempts_of(self.topics.of(job.type)),
            "decision": decision.to_dict(),
            **({"approved_by": approval} if approval else {}),
        }
        return Move(
            job_id=job.job_id,
            target=DISPATCHED,
            request_id=RequestId(f"dispatch:{dispatch.dispatch_id}"),
            version=job.version,
            lease_s=lease_s,
            heartbeat_s=lease_s,
            data=json.dumps(data).encode(),
        )

    async def _publish(self, job: Job, placed: PlacedJob, lease: Lease, order: JobOrder) -> DispatchOutcome:
        wire = order.request.job_id
        try:
            await self.bus.publish(
                placed.subject, order, trace_id=job.correlation_id, message_id=wire, needs_listener=True
            )
        except NoResponders:
            self.workers.mark_silent(placed.subject, placed.worker_id)
            return await self._give_back(lease, 0.0, f"nobody listens at {placed.subject}")
        except BusUncertain as error:
            if not self.topics.of(job.type).idempotent:
                _log.warning("dispatch_uncertain", job_id=job.job_id, subject=placed.subject, error=str(error))
                return DispatchOutcome.UNCERTAIN
            return await self._give_back(lease, BUS_OUTAGE_PAUSE_S, str(error))
        except BusUnavailable as error:
            return await self._give_back(lease, BUS_OUTAGE_PAUSE_S, str(error))
        except BusError as error:
            return await self._end(lease.job_id, f"cannot be sent: {error}", DispatchOutcome.CANCELLED)
        self.workers.mark_listening(placed.subject)
        lane = self._lane(job.type)
        self._gone[lane] = (self._gone.get(lane) or 0) + 1
        return DispatchOutcome.DISPATCHED

    # --- transitions ----------------------------------------------------------------------------------------------

    async def _give_back(self, lease: Lease, delay_s: float, cause: str) -> DispatchOutcome:
        """Return a job that no worker received; the attempt does not count.

        If a worker has started it meanwhile, it stays with that worker.
        """
        cause = _short_cause(f"{GIVEN_BACK_PREFIX}{cause}")
        advance = Advance(lease, DISPATCHED, Trigger.RETRY, delay_s=delay_s, spare_attempt=True, cause=cause)
        (outcome,) = (await self.ledger.turn(Turn(actor=self.actor, advances=(advance,)))).outcomes
        return DispatchOutcome.DISPATCHED if isinstance(outcome, LeaseLost) else DispatchOutcome.GIVEN_BACK

    async def _defer(
        self, job: Job, hold: str, reason: str, delay_s: float, decision: SafetyDecision | None = None
    ) -> DispatchOutcome:
        data = {"hold": hold, "reason": reason, **({"decision": decision.to_dict()} if decision else {})}
        move = self._move(job, SCHEDULED, "defer", reason, data, delay_s=delay_s)
        return _outcome_of_move(await self.ledger.move(self.actor, move), DispatchOutcome.DEFERRED)

    async def _let_go(self, jobs: Sequence[Job]) -> None:
        """Release steps that were deferred at the moment their turn came."""
        data = {"hold": "none", "reason": "the steps before it have ended"}
        for job in jobs:
            aside = replace(job, version=job.version + 1)
            move = self._move(aside, SCHEDULED, "turn", data["reason"], data, delay_s=0.0)
            await self.ledger.move(self.actor, move)

    async def _end(self, job_id: JobId, cause: str, did: DispatchOutcome) -> DispatchOutcome:
        """Cancel a job that cannot continue."""
        _log.warning("job_ended_by_scheduler", job_id=job_id, cause=_short_cause(cause))
        request_id = RequestId(f"cannot-go:{job_id}")
        answer = await self.ledger.cancel(
            self._reconciler, job_id, CancelMode.HARD, request_id, grace_s=0.0, cause=_short_cause(cause)
        )
        return _outcome_of_move(answer, did)

    def _move(
        self, job: Job, target: str, what: str, cause: str, data: dict[str, Any], *, delay_s: float | None = None
    ) -> Move:
        """A transition that applies only to the version of the job that was read.

        Only one of many processes succeeds.
        """
        return Move(
            job_id=job.job_id,
            target=target,
            request_id=RequestId(f"{what}:{job.job_id}:{job.version}"),
            version=job.version,
            delay_s=delay_s,
            cause=_short_cause(cause),
            data=json.dumps(data).encode(),
        )


def _outcome_of_move(answer: object, did: DispatchOutcome) -> DispatchOutcome:
    return did if isinstance(answer, Moved) and not answer.repeated else DispatchOutcome.LOST


def _short_cause(text: str) -> str:
    return text[:CAUSE_CHARS_MAX]


def _groups(jobs: Sequence[Job], size: int) -> Iterable[Sequence[Job]]:
    return (jobs[start : start + size] for start in range(0, len(jobs), size))

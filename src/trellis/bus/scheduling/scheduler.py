"""Validates jobs and hands them out over the bus, as many processes of it as one likes (BUS-1, BUS-3, BUS-4, BUS-8, BUS-10).

Who hands a job out is decided by the ledger: the one whose own dispatch id is in it publishes, and nobody else. The ledger is written
first and the bus second, so a crash in between loses a lease's time and nothing else. While the bus is away nothing is handed out; while
the safety kernel is away nothing is either.
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

from trellis.bus.ends.families import Families
from trellis.bus.ends.retrying import ATTEMPTS, attempts_of
from trellis.bus.errors import BusError, BusUnavailable, BusUncertain, KernelUnavailable, NoResponders, RequestInvalid
from trellis.bus.messages import Dispatch, Order
from trellis.bus.port import Bus
from trellis.bus.reporting.reports import ATTEMPT
from trellis.bus.requests import JobRequest, request_of
from trellis.bus.safety.decisions import Decision, Kernel, Kind
from trellis.bus.safety.errors import KernelRefuses
from trellis.bus.scheduling import resting
from trellis.bus.scheduling.approved import HOLD_S, approved
from trellis.bus.scheduling.kernel_checks import KernelChecks
from trellis.bus.scheduling.options import Did, Passed, SchedulerOptions
from trellis.bus.scheduling.ordering import Never, NotYet, Turns
from trellis.bus.scheduling.orders import Terms, order_of
from trellis.bus.scheduling.placement import Placed, Stays, Unfit, Why, place
from trellis.bus.scheduling.registry import Workers
from trellis.bus.scheduling.tenants import TenantLimits
from trellis.bus.scheduling.urgency import age_s, in_lanes, in_turn, not_reached, side_by_side, urgent_first
from trellis.bus.topics import Topics
from trellis.bus.waking import Waking
from trellis.bus.wire.alerts import AlertLimit, AlertSender
from trellis.bus.wire_ids import wire_id
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
from trellis.engine.recent import Recent
from trellis.engine.records import Job, JobFilter
from trellis.engine.restoring import GIVEN_BACK
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB

PENDING, SCHEDULED, DISPATCHED, DENIED = "PENDING", "SCHEDULED", "DISPATCHED", "DENIED"
UNASKED_MAX = 3
"""After so many questions without an answer, and none with one beside them, a pass asks no more."""
BUS_AWAY_S = 1.0
CAUSE_CHARS_MAX = 500
LANES_MAX = 10_000
_OUT = frozenset({Did.DISPATCHED, Did.UNCERTAIN})
"""A worker has the job, or may have it."""

_log = log_of("trellis.bus.scheduling.scheduler")

_Work: TypeAlias = Callable[[], Coroutine[Any, Any, Did]]


@dataclass(slots=True)
class _Room:
    """What a pass has found out: whose turn it is, and what room there is."""

    turns: Turns
    crowded: bool
    """There are more topics than one look shows: those that nobody serves hide others."""
    full: set[str] = field(default_factory=set[str])
    """Topics of which nothing more can go."""
    stuck: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """By topic and priority: jobs that wait for certain workers, while those behind them could go to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A ready job that is looked at."""

    job: Job
    request: JobRequest
    age_s: float

    @property
    def wire_id(self) -> str:
        """What it will be called toward workers when this handing-out succeeds."""
        return wire_id(self.job.job_id, Epoch(self.job.epoch + 1))


@dataclass(kw_only=True)
class Scheduler:
    """One pass validates what is pending, then hands out what is ready in its order, as far as there is room."""

    ledger: Ledger
    actor: Actor
    bus: Bus
    workers: Workers
    topics: Topics
    kernel: Kernel
    clock: Clock
    new_id: Callable[[], str]
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    name: str = "bus-scheduler"
    waits_for_events = True
    _families: Families = field(init=False)
    _gone: Recent[str, int] = field(default_factory=lambda: Recent(LANES_MAX))
    """By lane: how many were handed out, for whose turn it is."""
    _behind: frozenset[str] = frozenset()
    """Lanes that passes had no time for since all were looked at: the next one begins with them."""
    _waking: Waking[Passed] = field(init=False)
    _checks: KernelChecks = field(default_factory=KernelChecks)
    _alerts: AlertSender = field(init=False)

    def __post_init__(self) -> None:
        self._alerts = AlertSender(bus=self.bus, limit=AlertLimit(self.clock))
        self._families = Families(ledger=self.ledger, topics=self.topics)
        self._kernel_actor = replace(self.actor, role=Role.SAFETY_KERNEL)
        self._reconciler = replace(self.actor, role=Role.RECONCILER)
        self._tenants = TenantLimits(ledger=self.ledger, topics=self.topics, name=self.actor.name)
        self._waking = Waking(run=self._pass, more=lambda report: report.moved)

    async def run_once(self) -> Passed:
        """Validate, then hand out. Raises LedgerError when the ledger does not answer."""
        return await self._waking.once()

    async def _pass(self) -> Passed:
        did: Counter[Did] = Counter(await self._validate())
        if not self.bus.connected:
            return Passed(did=did, bus_away=True)
        return await self._hand_out(did)

    def pause_s(self, report: Passed) -> float:
        """At once while there may be more."""
        return 0.0 if report.moved else self.options.poll_s

    def wake(self) -> None:
        """Something has changed: look now."""
        self._waking.wake()

    async def drain(self) -> None:
        """Finish what was woken; nothing wakes it any more."""
        await self._waking.drain()

    # --- validation ------------------------------------------------------------------------------------------------

    async def _validate(self) -> list[Did]:
        """PENDING → SCHEDULED, oldest first; where many wait, the urgent ones among the newest do not stand behind them all."""
        where = JobFilter(lifecycle=BUS_JOB.name, state=PENDING)
        page = await self.ledger.jobs(where, limit=self.options.validate_max, oldest_first=True)
        jobs, done = self._elsewhere(page.jobs), list[Did]()
        if page.cursor is not None:
            newest = (await self.ledger.jobs(where, limit=self.options.newest_max)).jobs
            jobs = urgent_first(newest, jobs, self.options.validate_max // 2)
        for group in _groups(jobs, self.options.at_once):
            done += await _all(self._validate_one(job.job_id) for job in group)
        return done

    async def _validate_one(self, job_id: JobId) -> Did:
        job = await self.ledger.job(job_id)
        if job is None or job.state != PENDING:
            return Did.LOST
        try:
            request_of(job)
        except RequestInvalid as error:
            return await self._end(job_id, f"not accepted: {error}", Did.REFUSED)
        move = Move(job_id=job_id, target=SCHEDULED, request_id=RequestId(f"validate:{job_id}"), delay_s=0.0)
        return _made(await self.ledger.move(self.actor, move), Did.VALIDATED)

    # --- handing out -----------------------------------------------------------------------------------------------

    async def _hand_out(self, did: Counter[Did]) -> Passed:
        await self._tenants.say()
        now = await self.ledger.now()
        heads = await self.ledger.heads(BUS_JOB.name, each=self.options.each)
        waiting, until = self._in_order(heads, now), self.clock.monotonic() + self.options.pass_s
        kinds = len({(job.type, job.priority) for job in heads})
        room = _Room(Turns(families=self._families), crowded=kinds >= HEADS_MAX)
        bus_away = kernel_away = False
        while waiting and not (bus_away or kernel_away) and self.clock.monotonic() < until:
            group, waiting, left = await self._next_group(waiting, room, now)
            outcomes = await _all(work() for work in group)
            did.update([*left, *outcomes])
            bus_away = not self.bus.connected
            kernel_away = did[Did.UNASKED] >= UNASKED_MAX and set(outcomes) == {Did.UNASKED}
            if outcomes.count(Did.LOST) * 2 > len(outcomes):
                waiting = self._elsewhere(waiting)  # another process is here: the two go on in different places
        unseen = not_reached(heads, waiting, self._lane)
        self._behind = (unseen & self._behind) or unseen
        await self._let_go(await room.turns.missed())
        self._checks.passed(away=did[Did.UNASKED] > 0)
        return Passed(did=did, bus_away=bus_away)

    def _in_order(self, jobs: Sequence[Job], now: datetime) -> list[Job]:
        """Lanes beside each other, each in its own order: jobs of different lanes do not compete for the same workers."""
        lanes = in_lanes(jobs, self._lane, self._behind)
        return side_by_side([in_turn(lane, now, self._gone.get(name) or 0) for name, lane in lanes.items()])

    def _elsewhere(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs, beginning at a place of this process's own."""
        start = zlib.crc32(self.actor.name.encode()) % len(jobs) if jobs else 0
        return [*jobs[start:], *jobs[:start]]

    def _lane(self, topic: str) -> str:
        return " ".join(sorted(self.topics.of(topic).pools)) or topic

    async def _next_group(
        self, waiting: Sequence[Job], room: _Room, now: datetime
    ) -> tuple[list[_Work], list[Job], list[Did]]:
        """What is to be done next, all at once; the jobs to look at afterwards; and what became of the others."""
        reserved: list[str] = []
        try:
            return await self._fill(reserved, waiting, room, now)
        except LedgerError:
            for wire in reserved:
                self.workers.released(wire)
            raise

    async def _fill(
        self, reserved: list[str], waiting: Sequence[Job], room: _Room, now: datetime
    ) -> tuple[list[_Work], list[Job], list[Did]]:
        group: list[_Work] = []
        left: list[Did] = []
        later: list[Job] = []
        tried, behind = set[str](), set[str]()
        for number, job in enumerate(waiting):
            if len(group) >= self.options.at_once:
                return group, [*later, *waiting[number:]], left
            if job.type in room.full:
                left.append(Did.WAITING)
                continue
            if job.type in behind:
                later.append(job)
                continue
            ready = await self._in_turn(job, room.turns, now)
            if not isinstance(ready, _Ready):
                group.append(ready)
                continue
            placed = self._place(ready)
            if isinstance(placed, Placed) and not self.workers.proven(placed.subject):
                if placed.subject in tried:
                    later.append(job)  # one goes first, to see whether anybody listens
                    behind.add(job.type)
                    continue
                tried.add(placed.subject)
            if isinstance(placed, Placed):
                self._reserve(ready, placed)
                reserved.append(ready.wire_id)
                group.append(partial(self._take_on, ready, placed))
            elif self._stays(ready, placed, room):
                left.append(Did.WAITING)
            else:
                group.append(partial(self._hold_back, ready, placed))
        return group, later, left

    async def _in_turn(self, job: Job, turns: Turns, now: datetime) -> _Ready | _Work:
        """The job when it is its turn, or what is to become of it."""
        await asyncio.sleep(0)  # among thousands of workers a look takes its time, and others want a turn
        whole = job if job.payload is not None else await self.ledger.job(job.job_id)
        try:
            request = request_of(whole or job)
        except RequestInvalid as error:
            return partial(self._end, job.job_id, f"cannot be read: {error}", Did.REFUSED)
        turn = await turns.of(request)
        if isinstance(turn, Never):
            return partial(self._end, job.job_id, f"step {turn.step_index} did not succeed", Did.CANCELLED)
        ready = _Ready(job=job, request=request, age_s=age_s(job, now))
        return partial(self._wait_for, turn, ready, turns) if isinstance(turn, NotYet) else ready

    async def _wait_for(self, turn: NotYet, ready: _Ready, turns: Turns) -> Did:
        reason = f"step {turn.step_index} ({turn.job_id}) has not ended"
        did = await self._defer(ready.job, "order", reason, resting.order_s(ready.age_s))
        if did is Did.DEFERRED:
            await turns.put_aside(ready.job, ready.request)
        return did

    def _place(self, ready: _Ready) -> Placed | Stays | Unfit:
        live = self.workers.live()
        return place(
            ready.request,
            self.topics,
            live,
            self.workers,
            subject_max=self.options.subject_max,
            age_s=ready.age_s,
        )

    def _stays(self, ready: _Ready, placed: Stays | Unfit, room: _Room) -> bool:
        """Whether it stays ready: unless that would keep others from being seen, or nobody may have it."""
        if isinstance(placed, Unfit):
            return False
        if placed.all_do:
            room.full.add(ready.job.type)
            return placed.why is Why.FULL or not room.crowded  # what waits for busy workers goes on by itself
        kind = (ready.job.type, ready.job.priority)
        room.stuck[kind] += 1
        return room.stuck[kind] <= self.options.each // 2

    async def _hold_back(self, ready: _Ready, placed: Stays | Unfit) -> Did:
        """It rests for a while, because nobody may have it; people are alerted when that is a fault of the workers."""
        job = ready.job
        did = await self._defer(job, "placement", placed.reason, resting.placement_s(ready.age_s))
        if did is Did.DEFERRED and isinstance(placed, Unfit):
            await self._alert(job, placed)
        return did

    async def _alert(self, job: Job, unfit: Unfit) -> None:
        if unfit.code is not None:
            trace_id, details = job.correlation_id or job.job_id, {"job_id": job.job_id, "topic": job.type}
            await self._alerts.send(unfit.code, unfit.reason, about=unfit.worker_id, trace_id=trace_id, details=details)

    def _reserve(self, ready: _Ready, placed: Placed) -> None:
        if placed.worker_id:
            self.workers.assigned(placed.worker_id, ready.wire_id)
        else:
            self.workers.sent(placed.subject, ready.wire_id, self._lease_s(ready.job))

    async def _take_on(self, ready: _Ready, placed: Placed) -> Did:
        """Ask the kernel, then dispatch; whatever does not go out makes room again."""
        did = Did.LOST
        if placed.doubt is not None:
            await self._alert(ready.job, placed.doubt)
        try:
            decision = await self._checks.check(self.kernel, ready.request)
            did = await self._decided(ready, placed, decision)
        except KernelRefuses as error:
            did = await self._defer(ready.job, "kernel", str(error), resting.refused_s(ready.age_s))
        except KernelUnavailable:
            did = Did.UNASKED
        finally:
            if did not in _OUT:
                self.workers.released(ready.wire_id)
        return did

    async def _decided(self, ready: _Ready, placed: Placed, decision: Decision) -> Did:
        job = ready.job
        if decision.lets_go:
            return await self._dispatch(ready, placed, decision, None)
        if decision.kind is Kind.REQUIRE_HUMAN:
            approval = approved(await self.ledger.events(job.job_id), ready.request, decision)
            if approval is not None:
                return await self._dispatch(ready, placed, decision, approval)
            data = {"hold": "human", "decision": decision.to_dict()}
            hold = self._move(job, SCHEDULED, "hold", decision.reason, data, delay_s=HOLD_S)
            return _made(await self.ledger.move(self._kernel_actor, hold), Did.HELD)
        if decision.kind is Kind.THROTTLE:
            delay_s = resting.throttle_s(ready.age_s, decision.delay_s)
            return await self._defer(job, "throttle", decision.reason, delay_s, decision)
        denial = self._move(job, DENIED, "deny", decision.reason, {"decision": decision.to_dict()})
        return _made(await self.ledger.move(self.actor, denial), Did.DENIED)

    async def _dispatch(self, ready: _Ready, placed: Placed, decision: Decision, approval: str | None) -> Did:
        """Into the ledger first, then onto the bus."""
        job = ready.job
        about: dict[str, tracing.Value] = {"trellis.job_id": job.job_id, "trellis.correlation_id": job.correlation_id}
        with tracing.carried(job.trace, f"job.dispatch {job.type}", about, kind=tracing.PRODUCER):
            dispatch = Dispatch(dispatch_id=self.new_id(), attempt=job.attempt + 1, worker_id=placed.worker_id)
            terms = Terms(
                lease_s=self._lease_s(job),
                trace=tracing.here(),
                constraints=decision.constraints,
                redacted=decision.redacted,
            )
            try:
                order = order_of(ready.request, dispatch, ready.wire_id, terms)
            except RequestInvalid as error:
                return await self._end(job.job_id, f"cannot be sent: {error}", Did.CANCELLED)
            moved = await self.ledger.move(self.actor, self._handing_out(job, placed, dispatch, decision, approval))
            if not isinstance(moved, Moved) or moved.lease is None:
                return Did.LOST
            return await self._publish(job, placed, moved.lease, order)

    def _lease_s(self, job: Job) -> float:
        return self.topics.of(job.type).lease_s

    def _handing_out(
        self, job: Job, placed: Placed, dispatch: Dispatch, decision: Decision, approval: str | None
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

    async def _publish(self, job: Job, placed: Placed, lease: Lease, order: Order) -> Did:
        wire = order.request.job_id
        try:
            await self.bus.publish(
                placed.subject, order, trace_id=job.correlation_id, message_id=wire, needs_listener=True
            )
        except NoResponders:
            self.workers.unanswered(placed.subject, placed.worker_id)
            return await self._give_back(lease, 0.0, f"nobody listens at {placed.subject}")
        except BusUncertain as error:
            if not self.topics.of(job.type).idempotent:
                _log.warning("dispatch_uncertain", job_id=job.job_id, subject=placed.subject, error=str(error))
                return Did.UNCERTAIN
            return await self._give_back(lease, BUS_AWAY_S, str(error))
        except BusUnavailable as error:
            return await self._give_back(lease, BUS_AWAY_S, str(error))
        except BusError as error:
            return await self._end(lease.job_id, f"cannot be sent: {error}", Did.CANCELLED)
        self.workers.answered(placed.subject)
        lane = self._lane(job.type)
        self._gone[lane] = (self._gone.get(lane) or 0) + 1
        return Did.DISPATCHED

    # --- steps -----------------------------------------------------------------------------------------------------

    async def _give_back(self, lease: Lease, delay_s: float, cause: str) -> Did:
        """Nobody had it: the attempt does not count. Unless a worker has begun meanwhile: then it is its own."""
        cause = _cut(f"{GIVEN_BACK}{cause}")
        advance = Advance(lease, DISPATCHED, Trigger.RETRY, delay_s=delay_s, spare_attempt=True, cause=cause)
        (outcome,) = (await self.ledger.turn(Turn(actor=self.actor, advances=(advance,)))).outcomes
        return Did.DISPATCHED if isinstance(outcome, LeaseLost) else Did.GIVEN_BACK

    async def _defer(self, job: Job, hold: str, reason: str, delay_s: float, decision: Decision | None = None) -> Did:
        data = {"hold": hold, "reason": reason, **({"decision": decision.to_dict()} if decision else {})}
        move = self._move(job, SCHEDULED, "defer", reason, data, delay_s=delay_s)
        return _made(await self.ledger.move(self.actor, move), Did.DEFERRED)

    async def _let_go(self, jobs: Sequence[Job]) -> None:
        """Steps that were put aside just when their turn came."""
        data = {"hold": "none", "reason": "the steps before it have ended"}
        for job in jobs:
            aside = replace(job, version=job.version + 1)
            move = self._move(aside, SCHEDULED, "turn", data["reason"], data, delay_s=0.0)
            await self.ledger.move(self.actor, move)

    async def _end(self, job_id: JobId, cause: str, did: Did) -> Did:
        """The one way out that everybody may take who finds a job that cannot go on."""
        _log.warning("job_ended_by_scheduler", job_id=job_id, cause=_cut(cause))
        request_id = RequestId(f"cannot-go:{job_id}")
        answer = await self.ledger.cancel(
            self._reconciler, job_id, CancelMode.HARD, request_id, grace_s=0.0, cause=_cut(cause)
        )
        return _made(answer, did)

    def _move(
        self, job: Job, target: str, what: str, cause: str, data: dict[str, Any], *, delay_s: float | None = None
    ) -> Move:
        """A step of the job as it was seen: of many processes one makes it."""
        return Move(
            job_id=job.job_id,
            target=target,
            request_id=RequestId(f"{what}:{job.job_id}:{job.version}"),
            version=job.version,
            delay_s=delay_s,
            cause=_cut(cause),
            data=json.dumps(data).encode(),
        )


def _made(answer: object, did: Did) -> Did:
    return did if isinstance(answer, Moved) and not answer.repeated else Did.LOST


def _cut(text: str) -> str:
    return text[:CAUSE_CHARS_MAX]


def _groups(jobs: Sequence[Job], size: int) -> Iterable[Sequence[Job]]:
    return (jobs[start : start + size] for start in range(0, len(jobs), size))


async def _all(work: Iterable[Coroutine[Any, Any, Did]]) -> list[Did]:
    """Every outcome; when one raises, the others are finished first."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

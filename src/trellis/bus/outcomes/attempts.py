"""Attempts of jobs at workers: what workers report about them, which worker has each, and the renewal of their leases.

A report is fenced by its wire id: it is about one dispatch (an attempt), and counts only while that attempt is the
job's current one. Any other report is refused and recorded with the reason:

| kind | meaning |
|---|---|
| late | a late result: the job ended otherwise before the report arrived |
| stale | the attempt was revoked, or another dispatch was named; the job continues |
| duplicate | this worker reported the same about this attempt before |
| contradictory | this worker reported something else about this attempt before |
| foreign | another worker has, or had, this attempt |

`LeaseRenewals` keeps the attempts of live workers alive, for as long as one attempt may take. Any number of processes
may run it.

A heartbeat names no jobs, only their number. A job that the heartbeat may include is renewed. A running job must not be
lost because another one is, nor a job that is queued inside its worker, which heartbeats do not count. So a job that
its worker never received lives until the jobs known to run account for the whole number, or two heartbeats in a row
report no jobs. It never lives beyond its topic's `running_s`, which also ends hung jobs. Our own workers, which ask
before they start, report each job themselves (`result_listener`): their heartbeats renew nothing that they started.

While this process is disconnected from the bus it receives no heartbeats, which says nothing about any worker. All held
leases are renewed then, and for a while after, so that an outage of the bus causes no job to run twice. That time is
bounded too.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

from trellis.bus.documents import decision_of
from trellis.bus.errors import BusUnavailable
from trellis.bus.messages import CANCEL, NOT_BEGUN, Dispatch, JobCancel, JobResult, Status, error_name
from trellis.bus.port import Bus
from trellis.bus.requests import ResourceRef, wire_id
from trellis.bus.safety.policy import runtime_ms
from trellis.bus.topics import LEASE_S_DEFAULT, Topic, Topics
from trellis.engine.batches import Batcher
from trellis.engine.clock import Clock
from trellis.engine.event_data import data_of
from trellis.engine.jobs import CLAIM_MAX, ERROR_CHARS_MAX, Actor, Epoch, HeldLease, JobId, JobKey, Lease, Renewed
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event
from trellis.engine.text import storable
from trellis.lifecycles.bus_job import BUS_JOB

# Reports.

TEXT_CHARS_MAX = 2_000
POINTERS_MAX = 1_000
POINTERS_CHARS_MAX = 200_000
"""Maximum total length of all artifact pointers of a report, so that it also fits a stored result and a packet."""
PROGRESS_STATUSES = frozenset({Status.PENDING, Status.SCHEDULED, Status.DISPATCHED, Status.RUNNING})
"""Statuses that are not an end. A result with one of them is a heartbeat."""
ATTEMPT_END_EVENTS = frozenset({"job_succeeded", "job_failed", "job_retry_scheduled", "job_cancelled"})
"""Events whose data can be a report."""
GIVE_BACKS_MAX = 50
"""How often workers may return a job unstarted. After that, each return counts as an attempt."""
ATTEMPT = "attempt"
"""Key in the dispatch event: the number of the attempt, from 1, as sent to its worker."""
RETRYABLE = "retryable"
"""Key in the event of a failure: whether it was retryable under the topic's configuration at that time."""
STATUS_MISSING = "STATUS_MISSING"
CANCELLED_BY_WORKER = "CANCELLED_BY_WORKER"


T = TypeVar("T")


class ReportRefusal(StrEnum):
    """Why a report changes nothing."""

    LATE = "late"
    STALE = "stale"
    DUPLICATE = "duplicate"
    CONTRADICTORY = "contradictory"
    FOREIGN = "foreign"


class ReportVerdict(StrEnum):
    """What a report does to its job."""

    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    """Start the next attempt, under the same id."""
    GIVE_BACK = "give back"
    """Repeat the same attempt, under the same id: no worker started it."""
    CANCEL = "cancel"
    """The worker stopped on request, or failed retryably after a cancel was requested."""


REQUEUING_VERDICTS = frozenset({ReportVerdict.RETRY, ReportVerdict.GIVE_BACK})
"""Verdicts after which the job waits for dispatch again."""


_DISPATCH_FIELDS = tuple(one.name for one in fields(Dispatch))
_ALWAYS_STORED = ("status", "worker_id", "execution_ms", "error_code", "error_message", "result_ptr")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """A worker's report about one attempt, cut to what can be stored."""

    status: str
    worker_id: str
    execution_ms: int = 0
    error_code: str = ""
    error_message: str = ""
    result_ptr: str = ""
    artifact_ptrs: tuple[str, ...] = ()
    dispatch_id: str = ""
    error_code_enum: int = 0
    """CAP's number of the error, as the worker sent it."""
    result_ref: ResourceRef | None = None
    artifact_refs: tuple[ResourceRef, ...] = ()
    dispatch: Dispatch | None = field(default=None, compare=False)
    """The dispatch that the report ended, from the ledger; not part of the worker's report."""

    @property
    def body(self) -> bytes:
        """The stored form, for events and results."""
        return _json(self._stored)

    def judged(self, *, retryable: bool) -> bytes:
        """The stored form for the event of a failure."""
        return _json({**self._stored, RETRYABLE: retryable})

    @property
    def _stored(self) -> dict[str, Any]:
        optional: dict[str, Any] = {
            "dispatch_id": self.dispatch_id,
            "error_code_enum": self.error_code_enum,
            "result_ref": self.result_ref and self.result_ref.model_dump(exclude_defaults=True),
            "artifact_refs": [ref.model_dump(exclude_defaults=True) for ref in self.artifact_refs],
            "dispatch": self.dispatch and {name: getattr(self.dispatch, name) for name in _DISPATCH_FIELDS},
        }
        return {
            **{name: getattr(self, name) for name in _ALWAYS_STORED},
            "artifact_ptrs": list(self.artifact_ptrs),
            **{name: value for name, value in optional.items() if value not in (None, "", 0, [])},
        }

    @property
    def problem(self) -> str | None:
        """The error in one line; None when there is none."""
        return ": ".join(filter(None, (self.error_code, self.error_message))) or None


def _json(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, ensure_ascii=False).encode()


def report_of_result(result: JobResult, dispatch_id: str) -> WorkerReport:
    """The report in a result, cut to the stored size.

    A failure always has a code: its text, else its number, else its status.
    """
    status = result.status
    code = result.error_code or error_name(result.error_code_enum)
    if not code and status in {Status.UNSPECIFIED, Status.CANCELLED, Status.DENIED, Status.TIMEOUT}:
        code = {Status.UNSPECIFIED: STATUS_MISSING, Status.CANCELLED: CANCELLED_BY_WORKER}.get(status, status.name)
    return WorkerReport(
        status=status.name,
        worker_id=storable_text(result.worker_id),
        execution_ms=max(0, result.execution_ms),
        error_code=storable_text(code),
        error_message=storable_text(result.error_message, ERROR_CHARS_MAX),
        result_ptr=storable_text(result.result_ptr),
        artifact_ptrs=tuple(map(storable_text, _first(result.artifact_ptrs, len))),
        dispatch_id=storable_text(dispatch_id),
        error_code_enum=result.error_code_enum,
        result_ref=None if result.result_ref is None else _storable_ref(result.result_ref),
        artifact_refs=tuple(map(_storable_ref, _first(result.artifact_refs, _ref_chars))),
    )


def report_in(event: Event) -> WorkerReport | None:
    """The report stored in an event; None if it has none."""
    data = data_of(event)
    if event.type not in ATTEMPT_END_EVENTS or "status" not in data:
        return None
    texts = ("worker_id", "error_code", "error_message", "result_ptr", "dispatch_id")
    return WorkerReport(
        status=str(data["status"]),
        **{name: str(data.get(name, "")) for name in texts},
        execution_ms=int(data.get("execution_ms", 0)),
        artifact_ptrs=tuple(map(str, data.get("artifact_ptrs", ()))),
        error_code_enum=int(data.get("error_code_enum", 0)),
        result_ref=ResourceRef.model_validate(data["result_ref"]) if data.get("result_ref") else None,
        artifact_refs=tuple(map(ResourceRef.model_validate, data.get("artifact_refs", ()))),
        dispatch=Dispatch(**data["dispatch"]) if data.get("dispatch") else None,
    )


def storable_text(text: str, limit: int = TEXT_CHARS_MAX) -> str:
    """A text from outside, cut to the stored size and cleaned."""
    return storable(text[:limit]) or "" if text else ""


def _first(values: Sequence[T], size: Callable[[T], int]) -> list[T]:
    """The first values, as many as are stored."""
    totals = accumulate(map(size, values[:POINTERS_MAX]))
    return [value for value, total in zip(values, totals, strict=False) if total <= POINTERS_CHARS_MAX]


def _storable_ref(ref: ResourceRef) -> ResourceRef:
    """A reference without characters that the ledger cannot store."""
    texts = {name: storable_text(value) for name, value in ref.model_dump().items() if isinstance(value, str)}
    return ref.model_copy(update=texts)


def _ref_chars(ref: ResourceRef) -> int:
    return len(ref.model_dump_json(exclude_defaults=True))


def is_retryable(report: WorkerReport | None, topic: Topic) -> bool:
    """Whether a failure is retryable: the worker says so, or the topic's settings do (BUS-13)."""
    if report is None:
        return False
    if report.status == Status.FAILED_RETRYABLE.name:
        return True
    return report.status != Status.FAILED_FATAL.name and report.error_code in topic.retry


def give_backs(events: Sequence[Event]) -> int:
    """How often workers returned the job unstarted. Dispatches without a subscriber do not count."""
    reports = [report_in(event) for event in events if event.type == "job_retry_scheduled"]
    return sum(report is not None and report.error_code == NOT_BEGUN for report in reports)


def verdict_on(report: WorkerReport, topic: Topic, hold: HeldLease, given_back: int = 0) -> ReportVerdict:
    """What becomes of a held job after its worker's report.

    `given_back` is how often it was returned unstarted before.
    """
    if report.status == Status.SUCCEEDED.name:
        return ReportVerdict.SUCCEED
    again = is_retryable(report, topic)
    if hold.cancel and (again or report.status == Status.CANCELLED.name):
        return ReportVerdict.CANCEL
    if again and report.error_code == NOT_BEGUN and given_back < GIVE_BACKS_MAX:
        return ReportVerdict.GIVE_BACK
    attempts_left = hold.attempt + 1 < hold.max_attempts
    retries = topic.idempotent and attempts_left and again
    return ReportVerdict.RETRY if retries else ReportVerdict.FAIL


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptIdentity:
    """Which dispatch of a job it is, and which worker has it."""

    epoch: Epoch
    dispatch_id: str
    assigned: str
    """The worker it was sent to; empty when it went to the topic's own subject."""
    number: int
    """The attempt number in its order, from 1. Orders sent before this was recorded counted from 0."""
    starter: str | None = None
    token: str = ""
    """The token with which the worker asked to start; empty if it did not ask."""

    @property
    def worker(self) -> str:
        """The worker that has it; empty while unknown."""
        return self.starter or self.assigned

    @property
    def dispatch(self) -> Dispatch:
        """The dispatch as named in messages to the worker."""
        return Dispatch(dispatch_id=self.dispatch_id, attempt=self.number, worker_id=self.assigned)

    def objection(self, worker_id: str, dispatch: Dispatch | None) -> ReportRefusal | None:
        """Why this worker's report is refused; None if it is accepted.

        Any field it echoes from a dispatch must match.
        """
        echoed = dispatch or Dispatch()
        if self.worker not in {"", worker_id} or echoed.worker_id not in {"", self.assigned, worker_id}:
            return ReportRefusal.FOREIGN
        if echoed.dispatch_id not in {"", self.dispatch_id} or echoed.attempt not in {0, self.number}:
            return ReportRefusal.STALE
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchedAttempt(AttemptIdentity):
    """One dispatch of a job, from its events."""

    dispatched_at: datetime
    runtime_s: float | None = None
    """The policy's runtime limit in seconds; None without one."""

    def may_take_s(self, topic: Topic) -> float:
        """How long the attempt may run, in seconds: the shorter of the topic's and the policy's limit."""
        return topic.running_s if self.runtime_s is None else min(topic.running_s, self.runtime_s)


def attempt_in(events: Sequence[Event], epoch: Epoch) -> DispatchedAttempt | None:
    """The dispatch with this epoch; None if there was none."""
    own = _of_attempt(events, epoch)
    if not own:
        return None
    first, data = own[0], data_of(own[0])
    started = next((event for event in own if event.type == "job_started"), None)
    return DispatchedAttempt(
        epoch=epoch,
        dispatch_id=str(data.get("dispatch_id", "")),
        assigned=str(data.get("worker_id", "")),
        dispatched_at=first.ts,
        number=int(data.get(ATTEMPT, first.attempt)),
        starter=None if started is None else started.actor,
        token="" if started is None else str(data_of(started).get("token", "")),
        runtime_s=_runtime_s(first),
    )


def _runtime_s(dispatched: Event) -> float | None:
    constraints: Any = (decision_of([dispatched]) or {}).get("constraints")
    allowed_ms = runtime_ms(cast("dict[str, Any]", constraints)) if isinstance(constraints, dict) else None
    return None if allowed_ms is None else allowed_ms / 1000


def report_that_ended(events: Sequence[Event], epoch: Epoch) -> WorkerReport | None:
    """The report that ended this attempt; None if it ended otherwise or has not ended."""
    return next((report for event in _of_attempt(events, epoch) if (report := report_in(event))), None)


def refusal_of_stale(events: Sequence[Event], epoch: Epoch, report: WorkerReport, *, ended: bool) -> ReportRefusal:
    """Why a report about an attempt that is not current is refused."""
    before = report_that_ended(events, epoch)
    attempt = attempt_in(events, epoch)
    if attempt is not None and attempt.worker not in {"", report.worker_id}:
        return ReportRefusal.FOREIGN
    if before is not None and before.worker_id != report.worker_id:
        return ReportRefusal.FOREIGN
    if before is not None:
        return ReportRefusal.DUPLICATE if before.status == report.status else ReportRefusal.CONTRADICTORY
    return ReportRefusal.LATE if ended else ReportRefusal.STALE


def _of_attempt(events: Sequence[Event], epoch: Epoch) -> Sequence[Event]:
    """The events from the dispatch with this epoch up to the next one."""
    starts = [number for number, event in enumerate(events) if event.type == "job_dispatched"]
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        if events[start].epoch == epoch:
            return events[start:end]
    return ()


# Held attempts.

REMEMBERED_MAX = 20_000
READS_TOGETHER_MAX = 50
"""Jobs whose events are read in one query."""
CANCEL_REQUESTED_REASON = "somebody asked for it to stop"

_log = log_of("trellis.bus.results.attempts")


class WorkerSign(Protocol):
    """What is known of a live worker."""

    @property
    def heard_at(self) -> float | None:
        """This process's clock at the last heartbeat; None before the first."""
        ...

    @property
    def active_jobs(self) -> int:
        """The number of jobs in the last heartbeat."""
        ...


class WorkerLiveness(Protocol):
    """Liveness of the workers on the bus, as this process sees it."""

    def alive(self, worker_id: str) -> WorkerSign | None:
        """The worker, if it is alive; None otherwise."""
        ...

    def serves(self, worker_id: str, topic: str, settings: Topic, /) -> bool:
        """Whether it is a live worker of this topic that speaks our protocol version."""
        ...

    def settled(self, wire_id: str) -> None:
        """Record the end of an attempt: its worker has room again."""
        ...


def attempt_key(hold: HeldLease) -> tuple[JobKey, Epoch]:
    """A key unique to the attempt. A wire id is not: it can recur when a job is removed and another takes its id."""
    return hold.lease.key, hold.lease.epoch


class AttemptCache:
    """Reads and caches attempts. An attempt changes only once, when it starts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: LruCache[tuple[JobKey, Epoch], DispatchedAttempt] = LruCache(REMEMBERED_MAX)
        self._dispatched: LruCache[tuple[JobKey, Epoch], AttemptIdentity] = LruCache(REMEMBERED_MAX)
        """What this process dispatched itself."""
        self._reads: Batcher[JobId, list[Event]] = Batcher(self._events, lambda _: 1, READS_TOGETHER_MAX)

    async def of(self, hold: HeldLease) -> DispatchedAttempt | None:
        """The current attempt of a held job; None if its events contain none."""
        if hold.lease.lifecycle != BUS_JOB.name:
            return None
        known = self._known.get(attempt_key(hold))
        if known is not None and (known.starter is not None or hold.state == "DISPATCHED"):
            return known
        return await self.read(hold)

    async def identity(self, hold: HeldLease) -> AttemptIdentity | None:
        """As `of`. Not read if this process dispatched the attempt, and nobody or this process has recorded its start."""
        own = self._dispatched.get(attempt_key(hold))
        if own is not None and (own.starter is not None or hold.state == "DISPATCHED"):
            return own
        return await self.of(hold)

    async def read(self, hold: HeldLease) -> DispatchedAttempt | None:
        """The attempt as it is in the ledger now. Concurrent reads share a query."""
        attempt = attempt_in(await self._reads.put(hold.lease.job_id), hold.lease.epoch)
        if attempt is not None:
            self._known[attempt_key(hold)] = attempt
        return attempt

    def dispatched(self, lease: Lease, dispatch: Dispatch) -> None:
        """Remember an attempt that this process has just dispatched."""
        self._dispatched[lease.key, lease.epoch] = AttemptIdentity(
            epoch=lease.epoch,
            dispatch_id=dispatch.dispatch_id,
            assigned=dispatch.worker_id,
            number=dispatch.attempt,
        )

    async def _events(self, job_ids: Sequence[JobId]) -> list[list[Event]]:
        events = await self._ledger.events_of(list(dict.fromkeys(job_ids)))
        return [events.get(job_id, []) for job_id in job_ids]

    def began(self, hold: HeldLease, attempt: AttemptIdentity, worker_id: str, token: str) -> AttemptIdentity:
        """Cache and return the attempt, now started by this worker."""
        started = replace(attempt, starter=worker_id, token=token)
        if isinstance(started, DispatchedAttempt):
            self._known[attempt_key(hold)] = started
        else:
            self._dispatched[attempt_key(hold)] = started
        return started


class StopNotifier:
    """Asks workers over the bus to stop cancelled attempts, once per attempt."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._notified: LruCache[tuple[JobKey, Epoch], bool] = LruCache(REMEMBERED_MAX)

    async def tell(self, hold: HeldLease, attempt: AttemptIdentity) -> None:
        """Ask the worker to stop. While the bus is down, a later call does it."""
        named, key = wire_id(hold.lease.job_id, hold.lease.epoch), attempt_key(hold)
        if self._notified.get(key):
            return
        self._notified[key] = True
        cancel = JobCancel(
            job_id=named, reason=CANCEL_REQUESTED_REASON, requested_by=self._bus.sender_id, dispatch=attempt.dispatch
        )
        try:
            await self._bus.publish(CANCEL, cancel, trace_id=hold.correlation_id, message_id=f"stop:{named}")
        except BusUnavailable as error:
            self._notified.drop(key)
            _log.info("stop_not_told", job_id=hold.lease.job_id, error=str(error))


# Lease renewal.

PASSES_PER_LEASE = 6
PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 5.0
MORE_PAUSE_S = 0.02
CONCURRENCY = 16
"""Attempts read concurrently when this process first sees them."""
AMNESTY_S_MAX = 300.0
"""How long one outage of the bus renews everything, in seconds."""
RECONNECT_GRACE_S = 15.0
"""How long workers have after an outage to be heard again, in seconds.

They reconnect, then send a heartbeat every few seconds.
"""
RENEW_BELOW_SHARE = 2 / 3
"""A lease is renewed only when less than this share of its length is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalReport:
    """Result of one pass."""

    held: int = 0
    renewed: int = 0
    more: bool = False


@dataclass(kw_only=True)
class LeaseRenewals:
    """The service that renews leases."""

    ledger: Ledger
    topics: Topics
    workers: WorkerLiveness
    actor: Actor
    clock: Clock
    attempts: AttemptCache
    stopping: StopNotifier
    bus: Bus
    name: str = "bus-renewals"
    _seen: LruCache[tuple[JobKey, Epoch], float] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: this process's clock when it first saw the attempt."""
    _idle: LruCache[tuple[JobKey, Epoch], float] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: when its worker first reported no jobs since then.

    One such heartbeat may cross with the order, or fall between two jobs.
    """
    _denied: LruCache[tuple[JobKey, Epoch], bool] = field(default_factory=lambda: LruCache(REMEMBERED_MAX))
    """By job and epoch: its worker reported no jobs in two heartbeats."""
    _cut_off_at: float | None = None
    """When this process lost the bus; reset once workers have had time to be heard again."""
    _cut_off_to: float = 0.0

    async def run_once(self) -> RenewalReport:
        """Read the held leases and renew those of live attempts."""
        holds = await self.ledger.expiring(BUS_JOB.name, within_s=max(self._leases_s()), limit=CLAIM_MAX)
        by_worker: dict[str, list[tuple[HeldLease, DispatchedAttempt]]] = {}
        deaf = self._deaf()
        for hold, attempt in zip(holds, await self._attempts(holds), strict=True):
            if attempt is None:
                continue
            if hold.cancel:
                await self.stopping.tell(hold, attempt)
            self._see(hold)
            by_worker.setdefault(attempt.worker, []).append((hold, attempt))
        living = [
            one for worker_id, has in by_worker.items() for one in (has if deaf else self._living(worker_id, has))
        ]
        renewed = await self._renew(living)
        return RenewalReport(held=len(holds), renewed=renewed, more=len(holds) == CLAIM_MAX and renewed > 0)

    def pause_s(self, report: RenewalReport) -> float:
        """Several passes per lease, so that no heartbeat is missed."""
        return (
            MORE_PAUSE_S
            if report.more
            else min(PAUSE_S_MAX, max(PAUSE_S_MIN, min(self._leases_s()) / PASSES_PER_LEASE))
        )

    def _deaf(self) -> bool:
        """Whether missing heartbeats mean nothing now, because of an outage of the bus."""
        now = self.clock.monotonic()
        if not self.bus.connected:
            self._cut_off_at = now if self._cut_off_at is None else self._cut_off_at
            self._cut_off_to = now
        if self._cut_off_at is None:
            return False
        if now > min(self._cut_off_to + RECONNECT_GRACE_S, self._cut_off_at + AMNESTY_S_MAX):
            self._cut_off_at = None if self.bus.connected else self._cut_off_at
            return False
        return True

    async def _attempts(self, holds: Sequence[HeldLease]) -> list[DispatchedAttempt | None]:
        attempts: list[DispatchedAttempt | None] = []
        for start in range(0, len(holds), CONCURRENCY):
            attempts += await asyncio.gather(*map(self.attempts.of, holds[start : start + CONCURRENCY]))
        return attempts

    def _leases_s(self) -> list[float]:
        return [LEASE_S_DEFAULT, *(topic.lease_s for topic in self.topics.topics.values())]

    def _see(self, hold: HeldLease) -> None:
        if self._seen.get(attempt_key(hold)) is None:
            self._seen[attempt_key(hold)] = self.clock.monotonic()

    def _living(
        self, worker_id: str, has: Sequence[tuple[HeldLease, DispatchedAttempt]]
    ) -> Iterable[tuple[HeldLease, DispatchedAttempt]]:
        """The worker's attempts that its last heartbeat may include."""
        sign = self.workers.alive(worker_id) if worker_id else None
        heard_at = None if sign is None else sign.heard_at
        if sign is None or heard_at is None:
            return ()
        counted = [one for one in has if heard_at > self._first_seen(one[0])]
        for hold, _ in counted:
            self._note(attempt_key(hold), heard_at, idle=sign.active_jobs <= 0)
        if sign.active_jobs <= 0:
            return ()
        meant = [one for one in counted if not self._denied.get(attempt_key(one[0]))]
        running = [one for one in meant if one[0].state == "RUNNING"]
        spoken_for = meant if sign.active_jobs > len(running) else running
        return [one for one in spoken_for if not one[1].token]

    def _note(self, key: tuple[JobKey, Epoch], heard_at: float, *, idle: bool) -> None:
        if not idle:
            self._idle.drop(key)
        elif (before := self._idle.get(key)) is None:
            self._idle[key] = heard_at
        elif heard_at > before:
            self._denied[key] = True

    def _first_seen(self, hold: HeldLease) -> float:
        seen_at = self._seen.get(attempt_key(hold))
        return self.clock.monotonic() if seen_at is None else seen_at

    async def _renew(self, living: Sequence[tuple[HeldLease, DispatchedAttempt]]) -> int:
        ending = [one for one in living if one[0].left_s < RENEW_BELOW_SHARE * self.topics.of(one[0].type).lease_s]
        if not ending:
            return 0
        now = await self.ledger.now()
        leases = [hold.lease for hold, attempt in ending if not self._hangs(hold, attempt, now)]
        answers = await self.ledger.renew(self.actor, leases) if leases else []
        return sum(isinstance(answer, Renewed) for answer in answers)

    def _hangs(self, hold: HeldLease, attempt: DispatchedAttempt, now: datetime) -> bool:
        return (now - attempt.dispatched_at).total_seconds() > attempt.may_take_s(self.topics.of(hold.type))

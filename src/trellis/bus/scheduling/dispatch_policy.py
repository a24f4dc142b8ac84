"""The dispatch policy: limits of a pass, delays, tenant limits, the order of jobs, the order a worker gets, and approvals."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from trellis.bus.messages import ASK_FIRST, JOB_ID_IN_ENV, LEASE_IN_ENV, OWN_JOB_ID_IN_ENV, Dispatch, JobOrder
from trellis.bus.requests import REQUEUE_CAUSE, Budget, JobRequest, ResourceRef
from trellis.bus.safety.policy import SafetyDecision, runtime_ms
from trellis.bus.topics import HELD_MAX_MAX, TENANT_KEY, Topics
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import Refused
from trellis.engine.jobs import DELAY_S_MAX, Actor, Priority
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job
from trellis.lifecycles import Role

# Limits and report of a scheduler pass.


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """Limits of one pass."""

    poll_s: float = 0.5
    validate_max: int = 100
    newest_max: int = 500
    """How many of the newest jobs are searched for urgent ones, when more than `validate_max` wait for validation."""
    each: int = 100
    """Ready jobs read per topic and priority in a pass."""
    at_once: int = 32
    """Jobs dispatched together: their transitions share transactions."""
    pass_s: float = 2.0
    """How long a pass continues with the jobs it read at its start, in seconds: newer jobs may be more urgent."""
    subject_max: int = 1_000
    """Maximum number of attempts running through a topic's own subject, whose subscribers do not report their load."""


class DispatchOutcome(StrEnum):
    """What a pass did with one job."""

    VALIDATED = "validated"
    REFUSED = "refused"
    DISPATCHED = "dispatched"
    LOST = "lost"
    """Another process was faster, or the concurrency key is full."""
    GIVEN_BACK = "given_back"
    """No worker received it, or running it twice does no harm."""
    UNCERTAIN = "uncertain"
    """The connection broke while sending, and a worker may have a job that must not run twice. Its lease decides."""
    DENIED = "denied"
    HELD = "held"
    DEFERRED = "deferred"
    CANCELLED = "cancelled"
    UNASKED = "unasked"
    """The kernel did not answer."""
    WAITING = "waiting"
    """No worker has room, or there is none."""


_NO_PROGRESS_OUTCOMES = frozenset(
    {
        DispatchOutcome.LOST,
        DispatchOutcome.GIVEN_BACK,
        DispatchOutcome.UNCERTAIN,
        DispatchOutcome.UNASKED,
        DispatchOutcome.WAITING,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerReport:
    """Outcomes of one pass, counted by kind, and whether the bus was unavailable."""

    did: Counter[DispatchOutcome]
    bus_away: bool = False
    left: bool = False
    """Whether jobs may wait that the pass did not read, or did not reach in its time."""

    @property
    def dispatched(self) -> int:
        return self.did[DispatchOutcome.DISPATCHED]

    @property
    def kernel_away(self) -> bool:
        """Whether the kernel left a check unanswered."""
        return self.did[DispatchOutcome.UNASKED] > 0

    @property
    def moved(self) -> bool:
        """Whether the pass made progress, so that there may be more work."""
        return any(count for what, count in self.did.items() if what not in _NO_PROGRESS_OUTCOMES) and not self.bus_away

    @property
    def waits(self) -> bool:
        """Whether ready jobs may be left that wait for room, a worker or the bus."""
        return self.left or self.bus_away or any(self.did[what] for what in _NO_PROGRESS_OUTCOMES)

    @property
    def again(self) -> bool:
        """Whether another pass directly after this one may find work.

        Not if all jobs were read, and those that moved wait for nothing from a scheduler.
        """
        gone = {DispatchOutcome.VALIDATED, DispatchOutcome.DISPATCHED}
        return self.moved and (self.left or any(count for what, count in self.did.items() if what not in gone))

    def followed_by(self, later: "SchedulerReport") -> "SchedulerReport":
        """Both passes as one."""
        return SchedulerReport(did=self.did + later.did, bus_away=later.bus_away, left=self.left or later.left)


# Gathering: while jobs come in groups, a pass waits a little for a group. A pass, and every call to the ledger that
# follows from it, costs much the same for one job as for many. Without this, single jobs that once went ahead of their
# group stay ahead of it. A job that comes alone waits for nothing.

GATHER_S = 0.015
"""How long at most a validated job waits for others of its group, in seconds."""
GROUPS_S = 0.5
"""How long after a pass the size of its group is expected again, in seconds."""


@dataclass(kw_only=True)
class JobGroups:
    """How many jobs are dispatched together lately, and how many were validated since the last pass."""

    clock: Clock
    largest: int
    _size: int = 0
    """The number of jobs of recent passes. It fades while passes have fewer."""
    _at: float = -math.inf
    _validated: int = 0

    def pass_began(self) -> None:
        self._validated = 0

    def were_dispatched(self, jobs: int) -> None:
        """Record a pass."""
        if jobs:
            self._size, self._at = max(min(jobs, self.largest), self._size * 3 // 4), self.clock.monotonic()

    def is_complete_with_next(self) -> bool:
        """Count one more validated job; whether that makes half of a group, which need not wait."""
        self._validated += 1
        return 2 * self._validated >= self._size or self.clock.monotonic() > self._at + GROUPS_S


# Delays of jobs that cannot be dispatched now. Pure.
#
# Every delay is an event, so the delay grows with the job's age: a job that waits for a week is written about a
# thousand times, not hundreds of thousands.

ORDER_S_MIN, ORDER_S_MAX = 30.0, 600.0
PLACEMENT_S_MIN, PLACEMENT_S_MAX = 5.0, 30.0
LASTING_AFTER_S, LASTING_S_MAX = 600.0, 300.0
"""Jobs older than the first value, in seconds, may be delayed up to the second."""
THROTTLE_S_DEFAULT = 5.0
THROTTLE_S_MIN, THROTTLE_S_MAX = 0.1, 24 * 3600.0
THROTTLE_AGE_DIVISOR = 100
REFUSED_S_MIN, REFUSED_S_MAX = 30.0, 600.0


def order_delay_s(age_s: float) -> float:
    """Delay of a step whose turn has not come. The end of the step before releases it earlier."""
    return min(ORDER_S_MAX, max(ORDER_S_MIN, age_s / 4))


def placement_delay_s(age_s: float) -> float:
    """Delay of a job that no worker may get."""
    longest = LASTING_S_MAX if age_s >= LASTING_AFTER_S else PLACEMENT_S_MAX
    return min(longest, max(PLACEMENT_S_MIN, age_s / 4))


def throttle_delay_s(age_s: float, asked_s: float | None) -> float:
    """Delay of a throttled job: as long as the policy says, and at least a small share of the job's age."""
    at_least = max(THROTTLE_S_MIN, min(LASTING_S_MAX, age_s / THROTTLE_AGE_DIVISOR))
    return min(THROTTLE_S_MAX, max(at_least, asked_s or THROTTLE_S_DEFAULT))


def kernel_doubt_delay_s(age_s: float) -> float:
    """Delay of a job about which the kernel cannot decide."""
    return min(REFUSED_S_MAX, max(REFUSED_S_MIN, age_s / 4))


# Tenant limits.
#
# The ledger keeps the limit that came with a tenant's first job. So each scheduler process writes, once, the configured
# limits of the tenants that its configuration names. A changed limit takes effect at the next start, also for waiting
# jobs. Tenants that are not named keep their first limit, because whatever is written about a tenant stays in the
# ledger for good.

WRITES_PER_PASS = 100
"""Tenants written per pass; the others follow in later passes."""

SETTING = "held_max of this tenant in the topics file"
"""The cause recorded with the limit change."""

_log = log_of("trellis.bus.scheduling.dispatch_policy")


@dataclass(kw_only=True)
class TenantLimits:
    """Writes the configured tenant limits to the ledger, once per process."""

    ledger: Ledger
    topics: Topics
    name: str
    """Name of this process."""
    _left: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._left = list(self.topics.tenants)

    async def write_limits(self) -> None:
        """Write the next limits. Raises LedgerError; the next pass then continues there.

        A refused write is logged and skipped.
        """
        for name in self._left[-WRITES_PER_PASS:][::-1]:
            limit = self.topics.tenant(name).held_max or HELD_MAX_MAX
            by = Actor(role=Role.CONTROL_PLANE, name=self.name)
            try:
                await self.ledger.limit_key(by, f"{TENANT_KEY}{name}", limit, cause=SETTING)
            except Refused as error:
                _log.warning("tenant_limit_not_set", tenant=name, held_max=limit, error=str(error))
            self._left.pop()


# Order of ready jobs: by priority, and every fourth by age, so that no job starves (BUS-3).
#
# In the order by age, priority counts as waiting time: a batch job that has waited two minutes longer than a critical
# one goes first. Three of four jobs go by priority alone, so that a long queue of old batch jobs does not delay a new
# critical one.

AGEING_S = 60.0
"""How much longer a job of the next lower priority must wait to count the same, in seconds."""
BY_AGE_EVERY = 4
"""Every fourth job goes by age."""


def age_s(job: Job, now: datetime) -> float:
    """The time since the job was submitted, in seconds."""
    return max(0.0, (now - job.created_at).total_seconds())


def age_bonus(job: Job, now: datetime) -> float:
    """The job's age plus a bonus for its priority, in seconds."""
    return age_s(job, now) + AGEING_S * (Priority.BATCH - job.priority)


def dispatch_order(jobs: Sequence[Job], now: datetime, gone: int) -> list[Job]:
    """The dispatch order of these jobs, after `gone` jobs were dispatched before."""
    by_priority = sorted(jobs, key=lambda job: (job.priority, -age_s(job, now)))[::-1]
    by_age = sorted(jobs, key=lambda job: -age_bonus(job, now))[::-1]
    order: dict[str, Job] = {}
    while len(order) < len(jobs):
        source = by_age if (gone + len(order) + 1) % BY_AGE_EVERY == 0 else by_priority
        while source[-1].job_id in order:
            source.pop()
        job = source.pop()
        order[job.job_id] = job
    return list(order.values())


def urgent_first(newest: Sequence[Job], oldest: Sequence[Job], most: int) -> list[Job]:
    """The oldest jobs, preceded by up to `most` of the newest that are more urgent than batch, most urgent first.

    No job appears twice.
    """
    urgent = sorted((job for job in newest if job.priority < Priority.BATCH), key=lambda job: job.priority)[:most]
    return list({job.job_id: job for job in (*urgent, *oldest)}.values())


# --- lanes: jobs that compete for the same workers --------------------------------------------------------------------


def in_lanes(jobs: Sequence[Job], lane_of: Callable[[str], str], first: Collection[str]) -> dict[str, list[Job]]:
    """The jobs by lane. Lanes in `first` come first."""
    lanes: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: lane_of(job.type) not in first) if first else jobs:
        lanes.setdefault(lane_of(job.type), []).append(job)
    return lanes


def interleave(lanes: Sequence[Sequence[Job]]) -> list[Job]:
    """The first job of each lane, then the second of each, and so on."""
    longest = max(map(len, lanes), default=0)
    return [lane[number] for number in range(longest) for lane in lanes if number < len(lane)]


def unreached_lanes(jobs: Sequence[Job], waiting: Sequence[Job], lane_of: Callable[[str], str]) -> frozenset[str]:
    """Lanes of which no job has been looked at."""
    left = {job.job_id for job in waiting}
    reached = {lane_of(job.type) for job in jobs if job.job_id not in left} if left else set[str]()
    return frozenset(lane_of(job.type) for job in waiting) - reached


# The order: the request under its wire id, with the data of this dispatch (D29), limited by the policy.

CONSTRAINTS_IN_ENV = "TRELLIS_POLICY_CONSTRAINTS"
"""Key in a request's env: the policy's constraints, as JSON.

Only the policy sets it; a value from the request is removed.
"""
DEADLINE_MS_MAX = int(DELAY_S_MAX * 1000)
"""Maximum deadline of a budget; a policy that allows more is cut to it."""


OVERWRITTEN_ENV = frozenset({OWN_JOB_ID_IN_ENV, ASK_FIRST, LEASE_IN_ENV, CONSTRAINTS_IN_ENV})
"""Keys in env that only the order sets; values from the request are removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchTerms:
    lease_s: float
    trace: str | None = None
    """The trace of the job's submitter."""
    constraints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    redacted: Mapping[str, Any] = field(default_factory=dict[str, Any])


def request_within_policy(
    request: JobRequest, constraints: Mapping[str, Any], redacted: Mapping[str, Any] | None = None
) -> JobRequest:
    """The request as its worker will receive it, within the policy's constraints, without the data of one dispatch.

    With a `redacted` context, no pointer or reference of the request or of its compensation is sent.

    Orders are built from this alone, and approvals show and bind it. So no field that a worker receives can be missing
    from the approval.
    """
    env = {name: value for name, value in request.env.items() if name not in OVERWRITTEN_ENV}
    labels = {name: value for name, value in request.labels.items() if name != REQUEUE_CAUSE}
    changed: dict[str, Any] = {"env": env, "labels": labels}
    if redacted:
        ref = redacted.get("context_ref")
        changed["context_ptr"] = str(redacted.get("context_ptr", ""))
        changed["context_ref"] = None if ref is None else ResourceRef.model_validate(ref)
        if request.compensation is not None:
            changed["compensation"] = request.compensation.model_copy(update={"context_ptr": "", "context_ref": None})
    if constraints:
        env[CONSTRAINTS_IN_ENV] = json.dumps(constraints, sort_keys=True, default=str)
        changed["budget"] = _shorter_budget(request.budget, constraints)
    return request.model_copy(update=changed)


def order_of(request: JobRequest, dispatch: Dispatch, wire_id: str, terms: DispatchTerms) -> JobOrder:
    """Build the order; the stored request is not changed.

    Raises BusRequestInvalid when the result is not a valid request.
    """
    work = request_within_policy(request, terms.constraints, terms.redacted)
    ours = {OWN_JOB_ID_IN_ENV: request.job_id, ASK_FIRST: "ask", LEASE_IN_ENV: f"{terms.lease_s:g}"}
    env = {JOB_ID_IN_ENV: request.job_id, **work.env, **ours}
    if terms.trace:
        env[tracing.IN_ENV] = terms.trace
    fields = {**work.stored, "job_id": wire_id, "env": env}
    return JobOrder(request=JobRequest.valid(fields), dispatch=dispatch)


def _shorter_budget(budget: Budget | None, constraints: Mapping[str, Any]) -> Budget | None:
    """The budget with the shorter of the two times."""
    runtime = runtime_ms(constraints)
    if runtime is None:
        return budget
    requested = budget.deadline_ms if budget else 0
    shorter = min(requested or DEADLINE_MS_MAX, runtime)
    return (budget or Budget.model_validate({})).model_copy(update={"deadline_ms": shorter})


# Approvals. An approval counts only for the same request, the same order and the same policy (D45).

APPROVED = "job_approved"
HOLD_S = 72 * 3600.0
"""How long a job held for a person is delayed before the kernel is asked again, in seconds."""


def approval_bindings(request: JobRequest, decision: Mapping[str, Any]) -> dict[str, str]:
    """What an approval is bound to: the request, the policy, and everything the worker receives."""
    return {
        "job_hash": request.hash,
        "policy_hash": str(decision.get("policy_hash", "")),
        "order_hash": request_within_policy(request, decision.get("constraints") or {}, decision.get("redacted")).hash,
    }


def find_approval(events: Iterable[Event], request: JobRequest, decision: SafetyDecision) -> str | None:
    """The id of the approval event that is bound to exactly what would be sent now; None without one."""
    bound = approval_bindings(request, json.loads(json.dumps(decision.to_dict())))
    for event in events:
        if event.type != APPROVED:
            continue
        data: Any = json.loads(event.data or b"{}")
        if all(data.get(name) == value for name, value in bound.items()):
            return event.id
    return None

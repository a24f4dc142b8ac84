"""The dispatch policy: limits of a pass, delays, tenant limits, the order of jobs, and the order of workflow steps."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from trellis.bus.outcomes.job_tree import JobTree, WorkflowFrontier, WorkflowKey
from trellis.bus.outcomes.workflows import WorkflowReader
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.bus.topics import HELD_MAX_MAX, TENANT_KEY, Topics
from trellis.engine.errors import Refused
from trellis.engine.jobs import Actor, Priority
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Job
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
    at_once: int = 16
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

    @property
    def dispatched(self) -> int:
        """How many jobs were dispatched."""
        return self.did[DispatchOutcome.DISPATCHED]

    @property
    def kernel_away(self) -> bool:
        """Whether the kernel left a check unanswered."""
        return self.did[DispatchOutcome.UNASKED] > 0

    @property
    def moved(self) -> bool:
        """Whether the pass made progress, so that there may be more work."""
        return any(count for what, count in self.did.items() if what not in _NO_PROGRESS_OUTCOMES) and not self.bus_away


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


# Order of workflow steps. Steps of one parent and workflow run in the order of their index; steps of one index run
# together (BUS-8).
#
# Only steps of one owner and tenant are ordered together, so no party can block another's workflow.
#
# A step waits while a step with a lower index has not ended. A retry stands for the step that it retries, so a step
# that failed and is retried has not ended. A step that failed for good ends all later steps. Compensations are not
# steps.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNotDue:
    """An earlier step has not ended."""

    step_index: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDoomed:
    """An earlier step failed for good."""

    step_index: int
    job_id: str
    state: str


StepTurn: TypeAlias = StepNotDue | StepDoomed | None
"""None means that it is the step's turn."""


def turn_of(front: WorkflowFrontier, step_index: int) -> StepTurn:
    """Whether a step with this index may be dispatched."""
    failed, waits_for = front.failed, front.open
    if failed is not None and failed.index < step_index:
        return StepDoomed(step_index=failed.index, job_id=failed.job_id, state=failed.state)
    if waits_for is not None and waits_for.index < step_index:
        return StepNotDue(step_index=waits_for.index, job_id=waits_for.job_id)
    return None


def is_ordered_step(request: JobRequest) -> bool:
    """Whether the job is a step that may have to wait for others."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class StepOrder:
    """The order of steps as one pass sees it.

    Reads each workflow once, and once more after some steps were deferred.
    """

    families: JobTree
    _workflows: WorkflowReader = field(init=False)
    _fronts: dict[WorkflowKey, WorkflowFrontier] = field(default_factory=dict[WorkflowKey, WorkflowFrontier])
    _aside: dict[WorkflowKey, list[tuple[Job, JobRequest]]] = field(
        default_factory=dict[WorkflowKey, list[tuple[Job, JobRequest]]]
    )

    def __post_init__(self) -> None:
        self._workflows = WorkflowReader(families=self.families)

    async def of(self, request: JobRequest) -> StepTurn:
        """Whether it is this job's turn."""
        if not is_ordered_step(request):
            return None
        key = await self.families.key_of(request)
        if key not in self._fronts:
            self._fronts[key] = await self._workflows.front(key)
        return turn_of(self._fronts[key], request.step_index)

    async def put_aside(self, job: Job, request: JobRequest) -> None:
        """Record that the job was deferred because it is not its turn."""
        self._aside.setdefault(await self.families.key_of(request), []).append((job, request))

    async def missed(self) -> list[Job]:
        """The deferred jobs whose turn had come before they were deferred. The reconciler did not find them waiting."""
        found: list[Job] = []
        for key, aside in self._aside.items():
            front = await self._workflows.front(key)
            found += [job for job, request in aside if not isinstance(turn_of(front, request.step_index), StepNotDue)]
        self._aside.clear()
        return found

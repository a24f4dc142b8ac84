"""The policy of dispatch: how much one pass takes on, which job comes first, how long one waits, and limits of tenants."""

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

# What one pass of the scheduler takes on, and what it says that it did.


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How much one pass takes on."""

    poll_s: float = 0.5
    validate_max: int = 100
    newest_max: int = 500
    """Where more wait to be validated than that: how many of the newest it looks at for urgent ones."""
    each: int = 100
    """Ready jobs of each topic and priority that a pass looks at."""
    at_once: int = 16
    pass_s: float = 2.0
    """How long it goes on with what it saw at its beginning: what has come since may be more urgent."""
    subject_max: int = 1_000
    """How many attempts may be under way at a topic's own subject, where nobody says how busy it is."""


class DispatchOutcome(StrEnum):
    """What became of one job in a pass."""

    VALIDATED = "validated"
    REFUSED = "refused"
    DISPATCHED = "dispatched"
    LOST = "lost"
    """Another process was faster, or its key is full."""
    GIVEN_BACK = "given_back"
    """Nobody had it, or it does no harm if somebody has it twice."""
    UNCERTAIN = "uncertain"
    """The bus broke under it, and somebody may have it who must not have it twice: its lease decides."""
    DENIED = "denied"
    HELD = "held"
    DEFERRED = "deferred"
    CANCELLED = "cancelled"
    UNASKED = "unasked"
    """The kernel did not answer."""
    WAITING = "waiting"
    """Nobody has room, or nobody is there."""


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
    """What one pass did, by what it did; and what was away."""

    did: Counter[DispatchOutcome]
    bus_away: bool = False

    @property
    def dispatched(self) -> int:
        """How many jobs went out."""
        return self.did[DispatchOutcome.DISPATCHED]

    @property
    def kernel_away(self) -> bool:
        """Whether the kernel left a question without an answer."""
        return self.did[DispatchOutcome.UNASKED] > 0

    @property
    def moved(self) -> bool:
        """Whether it brought anything on: there may be more."""
        return any(count for what, count in self.did.items() if what not in _NO_PROGRESS_OUTCOMES) and not self.bus_away


# How long a job rests that cannot go now. Pure.
#
# Every rest is an event, so whatever a job waits for, it rests longer the longer it has waited: a job that waits for a week is written
# about some thousand times, and not some hundred thousand.

ORDER_S_MIN, ORDER_S_MAX = 30.0, 600.0
PLACEMENT_S_MIN, PLACEMENT_S_MAX = 5.0, 30.0
LASTING_AFTER_S, LASTING_S_MAX = 600.0, 300.0
"""A wait that has lasted so long lasts: it is looked at more seldom still."""
THROTTLE_S_DEFAULT = 5.0
THROTTLE_S_MIN, THROTTLE_S_MAX = 0.1, 24 * 3600.0
THROTTLE_AGE_DIVISOR = 100
REFUSED_S_MIN, REFUSED_S_MAX = 30.0, 600.0


def order_delay_s(age_s: float) -> float:
    """A step that is not in turn; the end of the step before lets it go earlier."""
    return min(ORDER_S_MAX, max(ORDER_S_MIN, age_s / 4))


def placement_delay_s(age_s: float) -> float:
    """One that none of the workers may have."""
    longest = LASTING_S_MAX if age_s >= LASTING_AFTER_S else PLACEMENT_S_MAX
    return min(longest, max(PLACEMENT_S_MIN, age_s / 4))


def throttle_delay_s(age_s: float, asked_s: float | None) -> float:
    """One that the policy throttles: as long as it says, and at least for a small part of the job's age."""
    at_least = max(THROTTLE_S_MIN, min(LASTING_S_MAX, age_s / THROTTLE_AGE_DIVISOR))
    return min(THROTTLE_S_MAX, max(at_least, asked_s or THROTTLE_S_DEFAULT))


def kernel_doubt_delay_s(age_s: float) -> float:
    """One about which the kernel cannot decide."""
    return min(REFUSED_S_MAX, max(REFUSED_S_MIN, age_s / 4))


# How much of a tenant may be under way, as the configuration says it now.
#
# The ledger keeps the limit that a tenant's first job came with. So each process of the scheduler says, once, what its configuration has for
# the tenants that it names: a number that was changed there counts from the next start on, also for jobs that wait already. Tenants that
# are not named keep the number that they began with, because whatever is said of a tenant stays in the ledger for good.

WRITES_PER_PASS = 100
"""Tenants of which a pass says it; the others come with the next ones."""

SETTING = "held_max of this tenant in the topics file"
"""Why the limit changed, as its administrative act says it."""

_log = log_of("trellis.bus.scheduling.dispatch_policy")


@dataclass(kw_only=True)
class TenantLimits:
    """What this process has still to say."""

    ledger: Ledger
    topics: Topics
    name: str
    """Of this process."""
    _left: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._left = list(self.topics.tenants)

    async def write_limits(self) -> None:
        """Have the configured limits hold, as far as this process may. Raises LedgerError, and then the next pass goes on there."""
        for name in self._left[-WRITES_PER_PASS:][::-1]:
            limit = self.topics.tenant(name).held_max or HELD_MAX_MAX
            by = Actor(role=Role.CONTROL_PLANE, name=self.name)
            try:
                await self.ledger.limit_key(by, f"{TENANT_KEY}{name}", limit, cause=SETTING)
            except Refused as error:
                _log.warning("tenant_limit_not_set", tenant=name, held_max=limit, error=str(error))
            self._left.pop()


# Which ready job comes first: by priority, and every fourth time the one that waited longest, so that none starves (BUS-3).
#
# Waiting counts like priority there: a batch job that has waited two minutes longer than a critical one is before it. Three of four go by
# priority alone, so that a long queue of old batch jobs does not stand before a critical one that has just come.

AGEING_S = 60.0
"""How much longer a job of the next lower class waits before it counts as much."""
BY_AGE_EVERY = 4
"""One of so many goes to the longest waiting."""


def age_s(job: Job, now: datetime) -> float:
    """How long it has been asked for."""
    return max(0.0, (now - job.created_at).total_seconds())


def age_bonus(job: Job, now: datetime) -> float:
    """How much it counts by its waiting."""
    return age_s(job, now) + AGEING_S * (Priority.BATCH - job.priority)


def dispatch_order(jobs: Sequence[Job], now: datetime, gone: int) -> list[Job]:
    """The order in which they go, after `gone` have gone before."""
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
    """The oldest, and before them so many of the newest that are more urgent than a batch: the most urgent first, each once."""
    urgent = sorted((job for job in newest if job.priority < Priority.BATCH), key=lambda job: job.priority)[:most]
    return list({job.job_id: job for job in (*urgent, *oldest)}.values())


# --- lanes: jobs that compete for the same workers ---------------------------------------------------------------------


def in_lanes(jobs: Sequence[Job], lane_of: Callable[[str], str], first: Collection[str]) -> dict[str, list[Job]]:
    """The jobs of each lane, by its name; these lanes first."""
    lanes: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: lane_of(job.type) not in first) if first else jobs:
        lanes.setdefault(lane_of(job.type), []).append(job)
    return lanes


def interleave(lanes: Sequence[Sequence[Job]]) -> list[Job]:
    """The first job of each lane, then the second of each, and so on."""
    longest = max(map(len, lanes), default=0)
    return [lane[number] for number in range(longest) for lane in lanes if number < len(lane)]


def unreached_lanes(jobs: Sequence[Job], waiting: Sequence[Job], lane_of: Callable[[str], str]) -> frozenset[str]:
    """Lanes of which all jobs are still waiting to be looked at."""
    left = {job.job_id for job in waiting}
    reached = {lane_of(job.type) for job in jobs if job.job_id not in left} if left else set[str]()
    return frozenset(lane_of(job.type) for job in waiting) - reached


# Whether it is a step's turn: the steps of one parent and workflow go by their number, and steps of one number together (BUS-8).
#
# Only steps of one owner or tenant are counted together: nobody holds up another's workflow.
#
# A step waits while one with a lower number has not ended. A retry stands for the step it does again, so a step that failed and is tried
# again has not ended. One that ended badly for good ends all that come after it. Compensations are no steps.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNotDue:
    """A step before it has not ended."""

    step_index: int
    job_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDoomed:
    """A step before it ended badly, for good."""

    step_index: int
    job_id: str
    state: str


StepTurn: TypeAlias = StepNotDue | StepDoomed | None
"""None: it is its turn."""


def turn_of(front: WorkflowFrontier, step_index: int) -> StepTurn:
    """Whether a step with this number may go."""
    failed, waits_for = front.failed, front.open
    if failed is not None and failed.index < step_index:
        return StepDoomed(step_index=failed.index, job_id=failed.job_id, state=failed.state)
    if waits_for is not None and waits_for.index < step_index:
        return StepNotDue(step_index=waits_for.index, job_id=waits_for.job_id)
    return None


def is_ordered_step(request: JobRequest) -> bool:
    """Whether it has a turn to wait for at all."""
    return bool(request.step_of and request.workflow_id and request.step_index and COMPENSATES not in request.labels)


@dataclass(kw_only=True)
class StepOrder:
    """Whose turn it is, as one pass sees it: a workflow is looked at once, and once more after some steps were put aside."""

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
        """The job rests now because it is not its turn."""
        self._aside.setdefault(await self.families.key_of(request), []).append((job, request))

    async def missed(self) -> list[Job]:
        """Those put aside whose turn had come before they rested: whoever lets steps go did not find them resting."""
        found: list[Job] = []
        for key, aside in self._aside.items():
            front = await self._workflows.front(key)
            found += [job for job, request in aside if not isinstance(turn_of(front, request.step_index), StepNotDue)]
        self._aside.clear()
        return found

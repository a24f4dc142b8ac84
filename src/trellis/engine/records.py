"""What readers and operators see: jobs, events and dead letters as recorded, and the reports of services."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from trellis.engine.jobs import Epoch, JobId, Priority, ReasonCode, Stage
from trellis.engine.retry_policy import runs_alone
from trellis.lifecycles import LIFECYCLES, Phase, Progress, Role, Trigger
from trellis.lifecycles.leased_job import LEASED_JOB

BEGUN_BY_TIMER = frozenset(
    one.name
    for one in LIFECYCLES.values()
    if any(t.trigger == Trigger.DUE and t.opens is Progress.ATTEMPT for t in one.transitions)
)
"""Lifecycles in which an attempt that closes leads to a pause, and the end of the pause begins the next."""


class JobPlace(StrEnum):
    """Where a job's row is: every job is in exactly one place."""

    READY = "ready"
    SCHEDULED = "resting"
    """Waiting for a time, a person or a role: not claimable now."""
    BLOCKED = "parked"
    """Claimable but for its concurrency key."""
    LEASED = "held"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as readers see it."""

    job_id: JobId
    lifecycle: str
    type: str
    state: str
    place: JobPlace
    priority: Priority
    generation: int
    attempt: int
    max_attempts: int
    version: int
    epoch: Epoch
    deaths: int
    created_at: datetime
    updated_at: datetime
    spared: int = 0
    """Attempts of this generation that closed without counting; `attempt` and `max_attempts` have each risen by as many.

    `heads` does not tell it on PostgreSQL: who takes jobs asks whether one is left.
    """
    due_at: datetime | None = None
    """Resting: when its timer falls due or it becomes ready."""
    deadline_at: datetime | None = None
    owner: str | None = None
    lease_expires_at: datetime | None = None
    cancel_requested: bool = False
    """Whether its holder has been asked to stop and holds it still."""
    cancel_asked_by: str | None = None
    """Who asked its holder to stop: while that is not carried out, and of a job that ended otherwise before it was. Told of one
    job, not in listings, like the two that follow.
    """
    cancel_asked_at: datetime | None = None
    cancel_cause: str | None = None
    concurrency_key: str | None = None
    correlation_id: str
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    payload: bytes | None = None
    progress: bytes | None = None

    @property
    def runs_alone(self) -> bool:
        """Whether it has its worker to itself, as far as a reader can tell: `max_deaths` of 2 brings that one death earlier."""
        spent = {"attempt": self.attempt, "max_attempts": self.max_attempts}
        return self.lifecycle == LEASED_JOB.name and runs_alone(deaths=self.deaths, max_deaths=0, **spent)

    @property
    def attempts_spent(self) -> int:
        """How many attempts of this generation counted before the present one."""
        return self.attempt - self._left_out

    @property
    def attempts_allowed(self) -> int:
        """How many may count, as the job was submitted."""
        return self.max_attempts - self._left_out

    @property
    def _left_out(self) -> int:
        """Of the spared ones, those that people do not see: where a timer begins the next attempt, each that began is told (D38)."""
        return 0 if self.lifecycle in BEGUN_BY_TIMER else self.spared


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One transition, as recorded. `id` is `<job_id>-<version>`."""

    id: str
    job_id: JobId
    lifecycle: str
    type: str
    ts: datetime
    role: Role
    actor: str
    correlation_id: str
    cause: str | None
    source: str | None
    target: str
    generation: int
    attempt: int
    epoch: Epoch
    version: int
    data: bytes | None = None
    node: str | None = None
    """The machine that wrote it; None for what was written before machines were recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A complete entry of the dead letter queue."""

    job_id: JobId
    type: str
    state: str
    reason_code: ReasonCode
    stage: Stage
    last_error: str
    attempts: int
    """How many attempts of this generation failed or were lost, the one that ended the job included: 1 where none had begun. What
    `Job.attempts_spent` leaves out is left out here: snoozes, jobs given back, and leases lost before anything ran.
    """
    last_owner: str | None
    last_lease_expires_at: datetime | None
    correlation_id: str
    at: datetime
    version: int
    lifecycle: str = LEASED_JOB.name


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """Which jobs a listing or a bulk requeue means; None means any."""

    lifecycle: str | None = None
    type: str | None = None
    state: str | None = None
    correlation_id: str | None = None
    concurrency_key: str | None = None
    reason_code: ReasonCode | None = None
    parent_id: JobId | None = None
    place: JobPlace | None = None

    @property
    def of_open_state(self) -> bool:
        """Whether it means jobs in one state that is no end: such a list is worked off, and can be read from its oldest."""
        named = [one for one in LIFECYCLES.values() if self.lifecycle in (None, one.name) and self.state in one.by_name]
        is_open = all(one.by_name[self.state or ""].phase is not Phase.ENDED for one in named)
        return bool(named) and is_open and self.parent_id is None and self.reason_code is None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDepth:
    """How much of one type is where."""

    type: str
    lifecycle: str
    ready: int
    resting: int
    parked: int
    held: int
    paused: bool
    oldest_ready_s: float | None
    rate_limit: float | None
    """Claims a second, None without a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """A worker process as the ledger last saw it."""

    name: str
    seen_at: datetime
    held: int
    info: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubscriberRecord:
    """Who follows the feed under a name, and how far it is behind."""

    name: str
    actor: str
    """Who followed last."""
    until: datetime
    """When its time is over, or was."""
    waits: bool
    """Whether retention keeps for it what it has not read: it has a place, and nobody has left it behind."""
    unread_since: datetime | None
    """When the first happened of what it has not read; None when there is nothing, or it has no place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHistory:
    """A job with all its events, for `verify`."""

    job: Job
    events: tuple[Event, ...]
    dead_letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyKey:
    """A name under which a job was asked for, and what "the same request" meant."""

    scope: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What was asked: all of a job that never changes."""

    type: str
    priority: Priority
    max_attempts: int
    max_deaths: int
    payload: bytes
    deadline_us: int | None = None
    """From the submit, and again from each requeue, to the deadline."""
    concurrency_key: str | None = None
    concurrency_limit: int = 1
    """What the job would have set, had it been the first of its key."""
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    keys: tuple[IdempotencyKey, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvent:
    """An event with everything that the ledger knows beside it: all events of a job in this form make the job again."""

    event: Event
    type: str
    """The job's."""
    submitted_at: datetime
    """When the job came into being, the same in all its records: an id that is used again has another one."""
    submission: Submission | None = None
    """With a job's first event."""
    due_at: datetime | None = None
    """Into a rest: when it would end."""
    request: str | None = None
    """The id of the request that asked for the step."""
    dead_letter: DeadLetter | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobToRestore:
    """A job to put back into a ledger that lost it: all its events, oldest first, and what its holders had kept."""

    records: tuple[RecordedEvent, ...]
    journal: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def job_id(self) -> JobId:
        """Which job it is."""
        return self.records[0].event.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOverLimit:
    """A concurrency key of which more jobs are held than its limit allows and a lowered limit explains."""

    key: str
    held: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedArtifact:
    """A job that ended with an artifact and has another number of finalized ones than one, or that has not and has some."""

    job_id: JobId
    complete: bool
    artifacts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedPage:
    """Events in feed order; ask on with `position`. A position is opaque text that sorts as the feed does.

    `positions` has one for each event, for those who must be able to go on after any of them.
    """

    events: tuple[Event, ...]
    positions: tuple[str, ...]
    position: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """A heartbeat with progress, a renewal or a log line: no transition, kept for a while."""

    job_id: JobId
    type: str
    ts: datetime
    data: bytes | None


SWEEP_QUIET_S = 5.0
"""How often an elected sweep signs the ledger while nothing is held or falls due; otherwise it signs every time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """What one sweep did. `next_due_s` is when the next thing falls due, at most the sweep interval away."""

    elected: bool
    amnesty: int = 0
    expired: int = 0
    exhausted: int = 0
    due: int = 0
    deadlines: int = 0
    cancelled: int = 0
    promoted: int = 0
    next_due_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """How a sweep behaves."""

    interval_s: float = 1.0
    batch: int = 500
    elect: bool = True
    """False sweeps without standing for election (tests, `trellis sweep`)."""
    windows_s: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """By lifecycle and state: how long a job that a sweep puts there rests, where the lifecycle's own timer is not meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionOptions:
    """How long ended work is kept."""

    ended_s: float = 30 * 24 * 3600.0
    signals_s: float = 24 * 3600.0
    batch: int = 500
    unread_s: float = 90 * 24 * 3600.0
    """How much longer it is kept for a follower that has not read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionReport:
    """What one retention pass removed; `more` says that another pass would find more."""

    jobs: int = 0
    events: int = 0
    results: int = 0
    signals: int = 0
    keys: int = 0
    more: bool = False
    unread: int = 0
    """Jobs among those removed that a follower had not read, and never will."""


class FindingSeverity(StrEnum):
    """How bad a finding of `doctor` is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of `doctor`: what was looked at, what was found, what to do."""

    check: str
    severity: FindingSeverity
    detail: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildPage:
    """Jobs of one parent, of any lifecycle, in the order of their numbers; `mark` asks for those that came after them."""

    job_ids: tuple[JobId, ...]
    numbers: tuple[int, ...]
    """Of each one its own; a job that is removed takes its number with it, and another one may have its id."""
    mark: str
    anew: bool = False
    """Those that the mark stood for are not the same any more: some came late or were removed. These are the first of all there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    """One page of a listing, newest first; `cursor` asks for the next, None at the end."""

    jobs: tuple[Job, ...] = field(default_factory=tuple)
    cursor: str | None = None

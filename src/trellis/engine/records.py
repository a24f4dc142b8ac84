"""What readers and operators see: jobs, events and dead letters as recorded, and the reports of services."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Epoch, JobId, Priority, ReasonCode, Stage
from trellis.engine.retry_policy import runs_alone
from trellis.lifecycles import LIFECYCLES, Phase, Progress, Role, Trigger
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.leased_job import LEASED_JOB

BEGUN_BY_TIMER = frozenset(
    one.name
    for one in LIFECYCLES.values()
    if any(t.trigger == Trigger.DUE and t.opens is Progress.ATTEMPT for t in one.transitions)
)
"""Lifecycles in which a closed attempt leads to a pause, and the end of the pause begins the next attempt."""
NOT_QUEUED = frozenset({ARTIFACT.name})
"""Lifecycles that are in no queue: nobody works on an artifact, and a finalized one waits for nothing."""


class JobPlace(StrEnum):
    """Where a job is while it waits, is held or has ended. Every job is in exactly one place."""

    READY = "ready"
    SCHEDULED = "scheduled"
    """Waiting for a time, a person or a role; not claimable now."""
    BLOCKED = "blocked"
    """Claimable as soon as its concurrency key has a free slot."""
    LEASED = "held"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as readers see it."""

    job_id: JobId
    lifecycle: str
    type: str
    state: str
    """The job's state in the words of its lifecycle. HTTP and the command line call it `status`."""
    place: JobPlace
    """`ready`, `scheduled` (until a time, or for a person or role), `blocked` (behind its key), `held` or `ended`."""
    priority: Priority
    generation: int
    """How often the job was requeued, from 0."""
    attempt: int
    """How many attempts of this generation are over, from 0, `spared` ones included.

    People are shown the number of the present attempt, `attempts_spent + 1` of `attempts_allowed`, as `ctx.attempt` is.
    """
    max_attempts: int
    """How many attempts this generation may have, the first and `spared` ones included."""
    version: int
    """The number of its events."""
    epoch: Epoch
    deaths: int
    """How many workers died while they ran it."""
    created_at: datetime
    updated_at: datetime
    spared: int = 0
    """Attempts of this generation that closed without counting.

    `attempt` and `max_attempts` have both risen by this number.

    `peek_ready` on PostgreSQL does not fill it: claimers only ask whether an attempt is left.
    """
    due_at: datetime | None = None
    """For a scheduled job: when its timer is due or it becomes ready."""
    deadline_at: datetime | None = None
    owner: str | None = None
    """The worker that holds it."""
    lease_expires_at: datetime | None = None
    cancel_requested: bool = False
    """Whether a cancel was requested of its holder, and the job is still held."""
    cancel_asked_by: str | None = None
    """Who requested the cancel.

    Set while the request is pending, and on a job that ended otherwise before it took effect. Filled when one job is
    read, not in listings; so are the next two fields.
    """
    cancel_asked_at: datetime | None = None
    cancel_cause: str | None = None
    cancel_due_at: datetime | None = None
    """While a cancel request is pending: when the sweep ends the job, if its holder has not stopped by then."""
    concurrency_key: str | None = None
    correlation_id: str
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    payload: bytes | None = None
    """The stored JSON; None in listings."""
    progress: bytes | None = None
    """The last progress that its handler reported, as JSON."""

    @property
    def runs_alone(self) -> bool:
        """Whether the job runs alone in its worker, as far as a reader can tell.

        With `max_deaths` 2 that begins one death earlier.
        """
        spent = {"attempt": self.attempt, "max_attempts": self.max_attempts}
        return self.lifecycle == LEASED_JOB.name and runs_alone(deaths=self.deaths, max_deaths=0, **spent)

    @property
    def attempts_spent(self) -> int:
        """How many attempts of this generation counted before the current one."""
        return self.attempt - self._left_out

    @property
    def attempts_allowed(self) -> int:
        """How many attempts may count, as submitted."""
        return self.max_attempts - self._left_out

    @property
    def _left_out(self) -> int:
        """Spared attempts that people do not see.

        Where a timer begins the next attempt, every attempt that began is shown (D38).
        """
        return 0 if self.lifecycle in BEGUN_BY_TIMER else self.spared


def event_id(job_id: str, version: int) -> str:
    """The id of the event that made this version of a job."""
    return f"{job_id}-{version}"


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
    """The state before; None when the job was submitted."""
    target: str
    """The state after."""
    generation: int
    attempt: int
    """How many attempts of this generation were over after this transition, from 0, as `Job.attempt`."""
    epoch: Epoch
    version: int
    data: bytes | None = None
    node: str | None = None
    """The machine that wrote the event; None for events from before machines were recorded."""


class SampledEvent(NamedTuple):
    """One event of a sample: what a measurement needs of it, and when its job was submitted."""

    type: str
    ts: datetime
    submitted_at: datetime
    role: Role
    source: str | None
    """The state before."""
    cause: str | None
    data: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A complete entry of the dead-letter queue."""

    job_id: JobId
    type: str
    state: str
    reason_code: ReasonCode
    stage: Stage
    last_error: str
    attempts: int
    """Attempts of this generation that failed or were lost, including the one that ended the job.

    1 where none had begun. Attempts that `Job.attempts_spent` leaves out are left out here: snoozes, released jobs, and
    leases lost before anything ran.
    """
    last_owner: str | None
    last_lease_expires_at: datetime | None
    correlation_id: str
    at: datetime
    version: int
    lifecycle: str = LEASED_JOB.name


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """Selects jobs for a listing or a bulk requeue. None matches any value."""

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
        """Whether it selects jobs in one state that is not an end.

        Such a listing is a work queue and can be read oldest first.
        """
        named = [one for one in LIFECYCLES.values() if self.lifecycle in (None, one.name) and self.state in one.by_name]
        is_open = all(one.by_name[self.state or ""].phase is not Phase.ENDED for one in named)
        return bool(named) and is_open and self.parent_id is None and self.reason_code is None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDepth:
    """How many jobs of one type are in each place. Artifacts are not counted (`NOT_QUEUED`)."""

    type: str
    lifecycle: str
    ready: int
    scheduled: int
    blocked: int
    held: int
    paused: bool
    oldest_ready_s: float | None
    rate_limit: float | None
    """Claims per second; None without a limit."""
    rate_per_key: float | None = None
    """Claims per second of the jobs of one concurrency key; None without a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingType:
    """How long the oldest job of a type has waited to be claimed."""

    type: str
    lifecycle: str
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """A worker process as the ledger last saw it."""

    name: str
    seen_at: datetime
    held: int
    info: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SubscriberRecord:
    """A named subscriber of the feed, and how far it is behind."""

    name: str
    actor: str
    """The actor that subscribed last."""
    until: datetime
    """When its subscription lease ends or ended."""
    waits: bool
    """Whether retention keeps its unread events: it has a position, and no operator has released it."""
    unread_since: datetime | None
    """The time of its first unread event; None when all is read or it has no position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHistory:
    """A job with all its events, for `verify`."""

    job: Job
    events: tuple[Event, ...]
    dead_letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyKey:
    """The idempotency key of a submit, with the fingerprint of its request."""

    scope: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UniqueKey:
    """The unique key of a job, and how long it holds it (`engine/uniqueness.py`)."""

    scope: str
    key: str
    unfinished: bool
    """It is held until the job has ended, not only while it waits."""
    until: datetime | None
    """It is held until then, whatever the job's state."""
    first_at: datetime
    """When the first of the jobs was submitted that were replaced one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What the submit asked for: everything about a job that never changes."""

    type: str
    priority: Priority
    max_attempts: int
    max_deaths: int
    payload: bytes
    deadline_us: int | None = None
    """Microseconds from the submit, and again from each requeue, to the deadline."""
    concurrency_key: str | None = None
    concurrency_limit: int = 1
    """The limit this job would have set, had it been the first of its key."""
    trace: str | None = None
    parent_id: JobId | None = None
    compensates: JobId | None = None
    keys: tuple[IdempotencyKey, ...] = ()
    unique: UniqueKey | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvent:
    """An event with everything the ledger stores beside it.

    All events of a job in this form suffice to restore the job.
    """

    event: Event
    type: str
    """The job's type."""
    submitted_at: datetime
    """When the job was submitted; the same in all its records. A reused job id has a different time."""
    submission: Submission | None = None
    """Set on a job's first event only."""
    due_at: datetime | None = None
    """For a step into a waiting state: when the wait would end."""
    request: str | None = None
    """The id of the request that caused the step."""
    dead_letter: DeadLetter | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobToRestore:
    """A job to restore into a ledger that lost it: all its events, oldest first, and the data its holders stored."""

    records: tuple[RecordedEvent, ...]
    journal: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def job_id(self) -> JobId:
        return self.records[0].event.job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOverLimit:
    """A concurrency key with more jobs held than its limit allows and a lowered limit explains."""

    key: str
    held: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedArtifact:
    """A job whose finalized artifacts do not match its state.

    It completed without exactly one, or has some without having completed.
    """

    job_id: JobId
    complete: bool
    artifacts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedPage:
    """Events in feed order. Pass `position` to read on. A position is opaque text that sorts in feed order."""

    events: tuple[Event, ...]
    """The events, oldest first."""
    positions: tuple[str, ...]
    """The position after each event."""
    position: str
    """The position after the last event, to read on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """A heartbeat with progress, a renewal or a log line. It is no transition and is kept for a limited time."""

    job_id: JobId
    type: str
    ts: datetime
    data: bytes | None
    """The progress or the log line, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterCount:
    """How many dead letters of one type wait for a decision."""

    type: str
    lifecycle: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFigures:
    """Figures of a whole ledger, for metrics."""

    dead_letters: tuple[DeadLetterCount, ...]
    """By type. Only the newest DEAD_LETTERS_COUNTED_MAX letters are counted."""
    swept_at: datetime | None
    """When the last sweep was recorded; None if nobody has swept yet."""


DEAD_LETTERS_COUNTED_MAX = 10_000


class ConnectionUse(NamedTuple):
    """How many calls of this process use one of its connections to the ledger, or wait for it."""

    name: str
    calls: int


SWEEP_QUIET_S = 5.0
"""How often an elected sweep records itself while nothing is held or due. Otherwise it records every sweep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """What one sweep did. `next_due_s` is when the next item is due, at most one sweep interval away."""

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
    interval_s: float = 1.0
    batch: int = 500
    elect: bool = True
    """False sweeps without an election (tests, `trellis sweep`)."""
    windows_s: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """By lifecycle and state: how long a job that a sweep puts there waits, instead of the lifecycle's own timer."""


KEPT_STATES = frozenset({("queue-job", "DEAD"), ("leased-job", "dead_lettered")})
"""States by lifecycle whose jobs retention keeps unless a setting names them. So are all jobs that ended with a dead
letter: a person decides about them."""


KEEP_DAYS_MIN = 0.05
"""At least 72 minutes, so that whoever waits for a job can read its result."""
KEEP_DAYS_MAX = 36_500.0
DAY_S = 24 * 3600.0


def keep_fault(days: float) -> str | None:
    """Why ended jobs may not be removed after this many days; None if they may."""
    if KEEP_DAYS_MIN <= days <= KEEP_DAYS_MAX:
        return None
    least = f"{KEEP_DAYS_MIN:g} (72 minutes, so that results can be read before they go)"
    return f"days must be at least {least} and at most {KEEP_DAYS_MAX:g}"


@dataclass(frozen=True, slots=True)
class StateAge:
    """How long jobs that ended in one state are kept."""

    keep_s: float | None
    """None keeps them for ever."""
    is_set: bool
    """Whether a setting names this state. Only then jobs with a dead letter are removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionOptions:
    """How long ended work is kept."""

    ended_s: float | None = 30 * 24 * 3600.0
    """How long ended jobs and published administrative acts are kept. None keeps them for ever."""
    states_s: Mapping[tuple[str, str], float | None] = field(default_factory=dict[tuple[str, str], float | None])
    """By lifecycle and state: how long such jobs are kept instead. None keeps them for ever."""
    signals_s: float = 24 * 3600.0
    batch: int = 500
    unread_s: float = 90 * 24 * 3600.0
    """How much longer ended work is kept for a subscriber that has not read it."""
    cause: str | None = None
    """Why, for the administrative act that records what was removed."""
    from_the_start: bool = False
    """Whether this pass begins again with the oldest job, also with jobs that an earlier pass kept for another day."""
    testing: bool = False
    """Lifts the bounds of `ended_s` and `states_s`, for a test that removes jobs soon after they ended."""

    def __post_init__(self) -> None:
        """Raises OptionInvalid for a time after which nobody could have read a result."""
        kept = {"ended_s": self.ended_s, **{f"states_s {'.'.join(which)}": s for which, s in self.states_s.items()}}
        for option, keep_s in kept.items():
            fault = None if keep_s is None or self.testing else keep_fault(keep_s / DAY_S)
            if fault is not None:
                raise OptionInvalid(option=option, value=keep_s, expected=f"in {fault}; None keeps jobs for ever")

    def ages(self) -> dict[tuple[str, str], StateAge]:
        """How long jobs are kept, for every state in which a job can end."""
        ended = [
            (one.name, state.name) for one in LIFECYCLES.values() for state in one.states if state.phase is Phase.ENDED
        ]
        return {
            which: StateAge(self.states_s[which], is_set=True)
            if which in self.states_s
            else StateAge(None if which in KEPT_STATES else self.ended_s, is_set=False)
            for which in ended
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRemoval:
    """What retention would do about the ended jobs of one state now."""

    lifecycle: str
    state: str
    keep_s: float | None
    """How long they are kept; None for ever."""
    ended: int
    """How many jobs ended in this state."""
    oldest: datetime | None
    """When the first of them ended."""
    removable: int
    """How many would be removed now."""
    dead_letters: int = 0
    """How many are over their time and kept because they have a dead letter."""
    keys: int = 0
    """How many are over their time and kept because their idempotency key, or the id they were given, still answers."""
    unread: int = 0
    """How many are over their time and kept because a follower has not read their last event."""
    unsealed: int = 0
    """How many are over their time and kept because the audit chain does not reach their last event yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionReport:
    """What one retention pass removed. `more` means another pass would remove more."""

    jobs: int = 0
    events: int = 0
    results: int = 0
    signals: int = 0
    keys: int = 0
    more: bool = False
    unread: int = 0
    """Removed jobs with events that a subscriber had not read and can no longer read."""
    acts: int = 0
    """Administrative acts that were removed. Their audit records stay in the object store."""


class FindingSeverity(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding of `doctor`: what was checked, what was found, what to do."""

    check: str
    severity: FindingSeverity
    detail: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditHead:
    """The newest block of the audit chain. The ledger stores one, and only the block after it can replace it."""

    number: int
    """The number of the block; 0 before the first one."""
    sha256: str
    """The SHA-256 of the block's bytes in hexadecimal. 64 zeros before the first block."""
    position: str | None
    """The feed position up to which every event of this ledger is sealed. None if no event is."""
    feed: int = 1
    """Counts the ledgers that the chain has sealed. A ledger that was rebuilt has the next number: its positions
    differ."""
    at: datetime | None = None
    """When the ledger stored it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildPage:
    """Child jobs of one parent, of any lifecycle, by ascending number.

    Pass `mark` to read the jobs that came after them.
    """

    job_ids: tuple[JobId, ...]
    numbers: tuple[int, ...]
    """The number of each job. A removed job's number is not reused, even if its id is."""
    mark: str
    anew: bool = False
    """The jobs before the mark changed: some arrived late or were removed.

    This page starts again from the first job.
    """


class JobContents(NamedTuple):
    """What a listing shows of a job beside its row: its payload, and its events, oldest first."""

    payload: bytes
    events: list[Event]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPage:
    """One page of a listing, newest first. Pass `cursor` to read the next page; None at the end."""

    jobs: tuple[Job, ...] = field(default_factory=tuple)
    cursor: str | None = None

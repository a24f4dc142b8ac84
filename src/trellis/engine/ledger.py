"""The ledger port. Implementations are in `trellis.ledgers`; one conformance suite runs on all of them.

What every implementation guarantees:

- Each call is one transaction: all of it is in the ledger when the call returns, or nothing is. Concurrent calls of one
  process may share a transaction (group commit). A refused call does not affect the others.
- Every write by a holder carries its epoch. It is refused with the value `LeaseLost` when the job has a different
  epoch. An expired lease that was not yet revoked is still valid: time decides liveness, the epoch decides safety.
- Every call may be repeated with the same ids (job id, claim id, epoch, request id) after its answer was lost. The
  second call returns what the first one did, or does it now. The ledger itself repeats a call whose answer was lost for
  a bounded time and then raises `OutcomeUnknown`.
- Time is the ledger's time. Callers pass durations, never their own clock readings (`run_at` is only a requested time).
- Everything is bounded: CLAIM_MAX, SUBMIT_MAX, page sizes, payload sizes.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.alerts import ALERTS_MAX, Alert, AlertChange, AlertMark, AlertRound
from trellis.engine.job_batches import BatchSubmitted, NewBatch
from trellis.engine.job_changes import ChangedJobs, ChangeOrder, JobSelection, JobToChange, SelectedPage
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    CancelRequested,
    HeldLease,
    JobId,
    JobOutcome,
    JobSignal,
    Lease,
    LeaseLost,
    Mismatch,
    Move,
    Moved,
    NewJob,
    NotMoved,
    Renewed,
    RequestId,
    RequestKey,
    SignalSent,
    StepApplied,
    Submitted,
    Subscription,
    Turn,
    TurnResult,
    TypeOptions,
)
from trellis.engine.records import (
    AuditHead,
    ChildPage,
    ConnectionUse,
    DeadLetter,
    Event,
    FeedPage,
    Finding,
    Job,
    JobContents,
    JobFilter,
    JobHistory,
    JobPage,
    JobToRestore,
    KeyOverLimit,
    LedgerFigures,
    PlannedRemoval,
    QueueDepth,
    RecordedEvent,
    RetentionOptions,
    RetentionReport,
    SampledEvent,
    Signal,
    SubscriberRecord,
    SweepOptions,
    SweepReport,
    UnpairedArtifact,
    WaitingType,
    WorkerRecord,
)
from trellis.engine.request_keys import StoredRequest
from trellis.engine.schedules import DueSchedules, ScheduleRecord
from trellis.lifecycles import Role

RETENTION = Actor(role=Role.SWEEPER, name="retention")
"""Who removes what is over its time, where the caller names no process or person."""


class Ledger(Protocol):
    """One open ledger, made by `trellis.ledgers.open_ledger(url)`."""

    url: str
    turns_at_once: int
    """How many concurrent turns of one worker pay off: two if another process commits, one if this process does."""
    name_prefix: str
    """The prefix that the ledger adds to actor names of this connection.

    It is `db:<login>:` for a limited PostgreSQL login, else empty.
    """

    async def close(self) -> None:
        """Finish calls in progress, then release files, threads and connections."""
        ...

    # --- write ---------------------------------------------------------------------------------------------------

    async def submit(
        self, actor: Actor, jobs: Sequence[NewJob], *, key: RequestKey | None = None
    ) -> list[Submitted | Mismatch]:
        """Create jobs in their lifecycle's first state, in one transaction. Returns one answer per job, in order.

        A delayed job is scheduled until due. A job with a concurrency key takes a free slot of its key or is parked
        behind it. A known idempotency key (or given id) is answered with the existing job, or with `Mismatch` when the
        fingerprint differs. With both, the key is checked first. A free key with a known id of the same request returns
        the existing job and binds the key to it. Raises QueueFull, also when many submits arrive at once, and
        OptionInvalid when a generated id comes twice.

        `key` is stored with the jobs, and the same request again gets the same jobs; raises IdempotencyMismatch.
        """
        ...

    async def submit_batch(self, actor: Actor, batch: NewBatch) -> BatchSubmitted:
        """Submit the jobs of a batch and its completion job, in one transaction.

        The completion job is suspended until all of them have ended, and resumed in the transaction of the last end. A
        job that exists already, by its key, id or unique key, is of the batch too. If the completion job exists,
        nothing is submitted, and the answer names the jobs of its batch. Raises NotABatch if it completes none,
        IdempotencyMismatch and what `submit` raises; then nothing is written.
        """
        ...

    async def turn(self, turn: Turn) -> TurnResult:
        """Settle and start held jobs, then claim: one transaction, one round trip.

        Claims follow priority and readiness, skip paused types, respect rate limits, and never take a job whose
        concurrency key is at its limit. Completing a compensation also records job_compensated on its original.
        Completing a job that ends with an artifact finalizes the artifact that the step names, as an event of its own
        just before. A step that names no artifact, or one that is not staged by this job, raises InvalidTransition for
        the whole turn.
        """
        ...

    async def renew(self, actor: Actor, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
        """The heartbeat: renew all leases of a worker in one statement, each for its own lease time from now."""
        ...

    async def move(self, actor: Actor, move: Move) -> Moved | NotMoved:
        """Make one declared, unfenced transition for a role that holds no lease.

        A move out of a held state revokes the lease (epoch + 1); a move into one grants a lease. Raises JobNotFound,
        and IdempotencyMismatch when the move's key belongs to another request.
        """
        ...

    async def cancel(
        self,
        actor: Actor,
        job_id: JobId,
        mode: CancelMode,
        request_id: RequestId,
        *,
        grace_s: float,
        cause: str | None,
        key: RequestKey | None = None,
    ) -> Moved | NotMoved | CancelRequested:
        """End a job that has not ended. `key` is stored with the change; raises IdempotencyMismatch.

        A soft cancel of a held job flags the lease; the holder learns of it when it renews.

        If the job ends otherwise first, the event of that end and the job's record keep who requested the cancel, when
        and why.
        """
        ...

    async def requeue(
        self,
        actor: Actor,
        jobs: Sequence[JobId] | JobFilter,
        request_id: RequestId,
        *,
        limit: int,
        cause: str | None,
        key: RequestKey | None = None,
    ) -> list[Moved | NotMoved]:
        """Start the next generation of failed and dead-lettered jobs. A filter takes at most `limit`, oldest first.

        `key` is stored with the change; raises IdempotencyMismatch.
        """
        ...

    async def change_jobs(self, actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange]) -> ChangedJobs:
        """Cancel, discard, run now or prioritize these jobs, at most CHANGED_MAX, in one transaction.

        Each job has an answer. A job that is in another state, has another version than was selected, or does not
        exist any more, is skipped. If a filter selected the jobs, one administrative act counts the answers. `order.key`
        is stored with the change; raises IdempotencyMismatch.
        """
        ...

    async def save_checkpoint(self, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
        """Store the holder's latest checkpoint. A later claim of the job gets it."""
        ...

    async def journal(self, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
        """Record a result once under a name. The first body stays and is returned, also to later attempts."""
        ...

    async def read_journal(self, job_id: JobId) -> dict[str, bytes]:
        """Every journal entry of a job."""
        ...

    async def journal_entries(self, wanted: Sequence[tuple[JobId, str]]) -> dict[tuple[JobId, str], bytes]:
        """Some journal entries of several jobs, by job and name, in one query. Missing ones are left out."""
        ...

    async def spawn(
        self,
        actor: Actor,
        lease: Lease,
        jobs: Sequence[NewJob],
        entry: str,
        body: bytes,
        *,
        abandoned: frozenset[JobId],
    ) -> bytes | LeaseLost:
        """Submit children of a held job and record them in its journal, in one transaction.

        Every job names the holder's job as its parent, and has an id that the holder derives: a repeated call submits
        nothing again. Returns the stored entry. When the parent is cancelled, its children that have not ended are
        cancelled, too, except those in `abandoned`. Raises ChildExists when another job has the id or the unique key of a
        child.
        """
        ...

    async def send_signal(
        self,
        actor: Actor,
        job_id: JobId,
        name: str,
        body: bytes,
        *,
        signal_key: str | None = None,
        key: RequestKey | None = None,
    ) -> SignalSent:
        """Store a signal for a job, and resume the job if it waits for it.

        The first signal with a `signal_key` stays, and is returned to later calls. Raises JobNotFound, and SignalRefused
        when the job has ended or has JOB_SIGNALS_MAX signals. `key` is stored with the signal; raises
        IdempotencyMismatch.
        """
        ...

    async def job_signals(self, job_id: JobId, name: str, *, after: int, limit: int) -> list[JobSignal]:
        """Signals of one name that were sent to a job after the one with this number, oldest first."""
        ...

    async def outcomes(self, job_ids: Sequence[JobId], *, with_results: bool = True) -> list[JobOutcome]:
        """How far these jobs are, with results and errors; at most CLAIM_MAX. Unknown ones are left out.

        Without results, `result` is None.
        """
        ...

    async def signal(self, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
        """Append heartbeats with progress and log lines of a held job. They are stored apart from events."""
        ...

    async def sweep(self, actor: Actor, options: SweepOptions) -> SweepReport:
        """Extend leases after a ledger outage.

        Then handle expired leases, due timers, deadlines, overdue soft cancels, parked keys.
        """
        ...

    async def retain(self, options: RetentionOptions, *, by: Actor = RETENTION) -> RetentionReport:
        """Remove ended jobs, results, signals and keys past their retention, in one small batch.

        Events that a subscriber with a position has not read are kept for at most `unread_s` more. Events that the audit
        chain of this ledger has not sealed are kept. An administrative act records who removed which jobs, how many of
        each lifecycle and state, and up to which time.
        """
        ...

    async def plan_retention(self, options: RetentionOptions) -> list[PlannedRemoval]:
        """What `retain` would remove now, and what holds the rest back, for every state that has ended jobs."""
        ...

    async def pause(self, actor: Actor, type_: str, *, paused: bool, cause: str | None = None) -> None:
        """Pause or resume claims of a type. The administrative act records `cause`."""
        ...

    async def limit_rate(
        self, actor: Actor, type_: str, per_second: float | None, burst: int = 1, *, cause: str | None = None
    ) -> None:
        """Limit claims per second of a type, over all claimers. None removes the limit."""
        ...

    async def declare_types(self, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool = False) -> None:
        """Store what an application declares about its job types, as defaults for submits.

        The last declaration of a type wins. With `only_new`, a type that is already declared keeps its options. At most
        DECLARED_MAX.
        """
        ...

    async def save_schedule(self, actor: Actor, record: ScheduleRecord, *, cause: str | None = None) -> bool:
        """Store a schedule of jobs, new (version 0) or in place of the version that was read.

        False if the stored version is another, also if a new one exists already. A schedule that is stored as it is
        asked for is not written again: True. At most SCHEDULES_MAX; raises InputError beyond.
        """
        ...

    async def remove_schedule(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        """Remove a schedule. False if there is none. Jobs that it has submitted stay."""
        ...

    async def advance_schedule(self, actor: Actor, record: ScheduleRecord) -> bool:
        """Store what was decided about the instants of a schedule. False if the stored version is another."""
        ...

    async def limit_key(self, actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
        """Limit how many jobs of a concurrency key may be held at once.

        With 0 none is handed out until the limit is raised.
        """
        ...

    async def limit_held(self, actor: Actor, type_: str, limit: int | None, *, cause: str | None = None) -> None:
        """Limit how many jobs of a type may be held at once, over all claimers. None removes the limit."""
        ...

    async def subscribe(
        self, actor: Actor, name: str, *, lease_s: float, reads: bool = True, first: str | None = None
    ) -> Subscription | None:
        """Become the only subscriber of the feed under this name, from the last acknowledged position.

        None while another holds it.

        From the first subscription on, retention keeps what was not read under this name. `reads` False only elects a
        holder of the name: nothing is kept for it.

        If nobody has acknowledged a position under this name, `first` is stored as the position, with the subscription;
        without it the feed is read from its start.
        """
        ...

    async def ack(self, following: Subscription, position: str | None, *, lease_s: float) -> bool:
        """Extend the subscription by `lease_s`, and store the position if one is given.

        False when another process has taken over.
        """
        ...

    async def unsubscribe(self, following: Subscription) -> None:
        """End the subscription, so that another process can take it at once."""
        ...

    async def release_retention(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        """Let retention ignore this subscriber until it reads again. False when nothing is kept for it."""
        ...

    async def set_home_issuer(
        self, actor: Actor, issuer: str, *, replaces: str | None = None, cause: str | None = None
    ) -> str:
        """Record the issuer whose subjects have plain names in this ledger.

        Writes only if none is recorded yet, or if `replaces` is the recorded one. Returns the issuer recorded now.

        A replacement is an operator's act: the new issuer's subjects get the jobs of the old issuer's subjects of the
        same name.
        """
        ...

    async def record_act(self, actor: Actor, act: NewAct) -> str:
        """Record an act on something outside the ledger and return its id. Acts on the ledger record themselves.

        An act with an id that is already recorded changes nothing.
        """
        ...

    async def acts(
        self, *, after: int = 0, limit: int = ACTS_MAX, unpublished: bool = False, unsealed: bool = False
    ) -> list[AdminAct]:
        """Administrative acts after this number, at most ACTS_MAX.

        `unpublished` selects those without a published audit record, `unsealed` those with one that no block of the
        audit chain has yet.
        """
        ...

    async def restore_acts(self, actor: Actor, lost: Sequence[AdminAct]) -> None:
        """Restore acts that this ledger lost, from their audit records. Existing acts stay. Each gets a new `no`."""
        ...

    async def acts_published(self, actor: Actor, published: Sequence[AdminAct]) -> None:
        """Mark the audit records of these acts as stored in the object store."""
        ...

    async def observe_alerts(self, actor: Actor, checked: AlertRound) -> list[AlertChange]:
        """Store what a round of an evaluator observed, at most ALERTS_MAX alerts.

        Returns the alerts that this call raised or resolved. The jobs that report them are submitted in the same
        transaction. Several evaluators may do this at once: `engine/alerts.py` has the rules.
        """
        ...

    async def extend_audit_chain(
        self, actor: Actor, head: AuditHead, *, after: AuditHead | None, acts: Sequence[AdminAct] = ()
    ) -> bool:
        """Make `head` the newest block of the audit chain, if `after` still is, and mark these acts as sealed.

        `after` is None for a ledger that has no chain yet. False when another process extended the chain first; the
        chain can therefore not fork. From the first call on, retention removes only what is sealed.
        """
        ...

    async def audit_head(self) -> AuditHead | None:
        """The newest block of the audit chain. None if nothing seals this ledger."""
        ...

    async def heartbeat_worker(self, actor: Actor, info: bytes | None) -> None:
        """Record that this worker process is alive, for operators."""
        ...

    async def restore(self, actor: Actor, jobs: Sequence[JobToRestore]) -> list[bool]:
        """Restore jobs that this ledger lost, at most RESTORE_MAX.

        Returns for each whether it was restored; False if it exists.

        Every event is checked as when it was made. If a lifecycle does not declare it, the call is refused and nothing
        is written. A held job comes back with an ended lease, and every epoch is far above any recorded one, so that no
        holder of the lost ledger can write. Raises HistoryBroken, NotAllowed.
        """
        ...

    async def annotate(self, actor: Actor, job_id: JobId, type_: str, body: bytes) -> bool:
        """Store a remark about a job beside its signals. The job itself does not change; it may have ended.

        At most REMARKS_MAX are kept per job. False when that many exist, or the job is unknown.
        """
        ...

    # --- wait ----------------------------------------------------------------------------------------------------

    async def wait_for_work(self, types: Sequence[str], timeout_s: float) -> None:
        """Return when a hint says that work may be available, or after `timeout_s`.

        Hints may be lost; only polling is reliable.
        """
        ...

    def events_mark(self) -> int:
        """A mark for `wait_for_events`. Take it before reading, so that no hint between reading and waiting is lost."""
        ...

    async def wait_for_events(self, mark: int, timeout_s: float) -> None:
        """Return when a hint since `mark` says that events were appended, or after `timeout_s`. Hints may be lost."""
        ...

    # --- read ----------------------------------------------------------------------------------------------------

    async def job(self, job_id: JobId) -> Job | None:
        """One job with its payload."""
        ...

    async def jobs(
        self, where: JobFilter, *, limit: int, cursor: str | None = None, oldest_first: bool = False
    ) -> JobPage:
        """Jobs, newest first, without payloads. `oldest_first` requires a filter that is `of_open_state`."""
        ...

    async def select_jobs(self, where: JobSelection, *, limit: int, cursor: str | None = None) -> SelectedPage:
        """A page of the jobs to change, oldest first, at most CHANGED_MAX.

        What a page costs does not depend on how many jobs the ledger has: see FEW_MAX and WALKED_MAX.
        A page may be short, even empty, and still have a next one.
        """
        ...

    async def children(self, parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
        """Jobs of this parent that came after a mark, at most `limit`; None starts from the first.

        No job is missed: when one appears below the mark, because its transaction took long, the listing starts again
        from the first.
        """
        ...

    async def peek_ready(self, lifecycle: str, *, each: int) -> list[Job]:
        """Ready jobs: the first `each` of every type and priority, longest ready first. Paused types are left out.

        Jobs carry their payloads, except those larger than HEAD_PAYLOAD_BYTES_MAX; `job` returns those.
        """
        ...

    async def holds(self, job_ids: Sequence[JobId]) -> list[HeldLease]:
        """Which of these jobs are held now, in any order; at most CLAIM_MAX."""
        ...

    async def expiring(self, lifecycle: str, *, within_s: float, limit: int) -> list[HeldLease]:
        """Held jobs whose lease ends within `within_s` or has ended, soonest first."""
        ...

    async def events(self, job_id: JobId) -> list[Event]:
        """Every event of a job, oldest first."""
        ...

    async def events_of(self, job_ids: Sequence[JobId], *, last: int | None = None) -> dict[JobId, list[Event]]:
        """All events of several jobs, or the `last` ones of each, oldest first per job, in one query.

        Unknown and removed jobs are left out.
        """
        ...

    async def payloads(self, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        """The payloads of several jobs, in one query. Unknown and removed jobs are left out."""
        ...

    async def contents_of(self, job_ids: Sequence[JobId]) -> dict[JobId, JobContents]:
        """The payloads and all events of several jobs, in one query. Unknown and removed jobs are left out."""
        ...

    async def signals(self, job_id: JobId, *, limit: int) -> list[Signal]:
        """The last signals of a job, oldest first."""
        ...

    async def find_events(
        self, *, type_: str | None, correlation_id: str | None, since: datetime | None, limit: int
    ) -> list[Event]:
        """Events by type or correlation, oldest first, through an index."""
        ...

    async def count_events(
        self, types: Sequence[str], *, since: datetime, lifecycle: str | None = None
    ) -> dict[str, int]:
        """How many events of each of these types were recorded since a moment, of one lifecycle or of all.

        Counted by the database. Every type has an entry.
        """
        ...

    async def sample_events(
        self, lifecycle: str, types: Sequence[str], *, since: datetime, limit: int
    ) -> list[SampledEvent]:
        """The newest events of each of these types since a moment, at most `limit` of each type, newest first per type.

        Through an index: jobs of other lifecycles cost nothing. Refused for leased-job and bus-job, which have too many
        events to look at one by one.
        """
        ...

    async def feed(
        self,
        position: str | None,
        *,
        limit: int,
        lifecycle: str | frozenset[str] | None = None,
        types: frozenset[str] | None = None,
    ) -> FeedPage:
        """Every event once, in an order that no late commit can change. `position` None is the beginning.

        `lifecycle` selects one or several lifecycles, `types` event types. A page's position is then after all events
        it skipped.
        """
        ...

    async def recorded(self, events: Sequence[Event]) -> list[RecordedEvent]:
        """Events that this ledger returned, with the data stored beside them, in the same order.

        Events of removed jobs are left out.
        """
        ...

    async def feed_end(self) -> str:
        """The position after the last event that the feed would return now."""
        ...

    async def result(self, job_id: JobId) -> bytes | None:
        """The stored result of a succeeded job, while it is kept."""
        ...

    async def dead_letters(self, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
        """Dead letters that were not requeued, newest first. `cursor` is the job id of the last one read."""
        ...

    async def dead_letter(self, job_id: JobId) -> DeadLetter | None:
        """The dead letter of a job that ended with one and was not requeued."""
        ...

    async def queues(self, *, exact: bool = False) -> list[QueueDepth]:
        """How many jobs of each type wait and are held; artifacts are in no queue and are left out.

        Of a queue with more than 500 jobs the number may be a few seconds old. `exact` counts all of them now, which
        takes longer the more there are.
        """
        ...

    async def waiting_types(self, *, limit: int) -> list[WaitingType]:
        """How long the oldest claimable job of each type has waited, longest first. Reads one job of each priority.

        Of queue jobs also those count that wait for the slot of their agent.
        """
        ...

    async def stage_steps(self, *, each: int) -> list[Event]:
        """How queue jobs left their stages: the last `each` steps of each of STAGE_STEP_TYPES, in any order."""
        ...

    async def alerts(self, *, limit: int = ALERTS_MAX, only_open: bool = False) -> list[Alert]:
        """Open alerts, then resolved ones while they are kept, each newest first; at most ALERTS_MAX."""
        ...

    async def alert_mark(self) -> AlertMark:
        """Where a round of an evaluator begins. Take it before the first condition is read."""
        ...

    async def alert(self, alert_id: str) -> Alert | None:
        """One alert, while it is kept."""
        ...

    async def figures(self) -> LedgerFigures:
        """Dead letters by type and the time of the last sweep. Its cost does not depend on how many jobs have ended."""
        ...

    def connections(self) -> list[ConnectionUse]:
        """How busy each connection of this process to the ledger is now."""
        ...

    async def declared_types(self, type_: str | None = None) -> list[TypeOptions]:
        """The declared options of job types, by name, at most DECLARED_MAX. `type_` selects one."""
        ...

    async def schedules(self, name: str | None = None) -> list[ScheduleRecord]:
        """The schedules of jobs, by name, at most SCHEDULES_MAX. `name` selects one."""
        ...

    async def due_schedules(self, *, topics: bool) -> DueSchedules:
        """The schedules that are due now, at most DUE_MAX, in one statement. `topics` includes those of topics."""
        ...

    async def home_issuer(self) -> str | None:
        """The issuer whose subjects have plain names in this ledger; None before the first gateway has started."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """Worker processes with a recent heartbeat."""
        ...

    async def followers(self) -> list[SubscriberRecord]:
        """Subscribers of the feed, by name, at most 1,000."""
        ...

    async def find_by_idempotency_key(self, scope: str, key: str, fingerprint: bytes) -> Submitted | Mismatch | None:
        """The answer of an earlier submit to a submit with this idempotency key; None when the key is free."""
        ...

    async def find_request(self, key: RequestKey) -> StoredRequest | None:
        """What is stored under the key of a change; None when the key is free. Raises IdempotencyMismatch."""
        ...

    async def ping(self) -> None:
        """Return when the ledger answers, without queueing behind other calls.

        Raises LedgerError after about a second.
        """
        ...

    async def now(self) -> datetime:
        """The ledger's clock."""
        ...

    def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        """Every job with all its events, for `verify`."""
        ...

    async def key_limit(self, key: str) -> int | None:
        """How many jobs with this concurrency key may be held at once; None for an unknown key."""
        ...

    async def keys_over(self) -> list[KeyOverLimit]:
        """Concurrency keys held beyond their limit, as of one moment; for `verify`.

        Jobs that hold slots above a limit that was lowered later may continue, and do not count.
        """
        ...

    async def unpaired(self) -> list[UnpairedArtifact]:
        """Jobs whose completion and finalized artifacts do not match, as of one moment, at most 1,000; for `verify`.

        Artifacts whose job was removed by retention are not included.
        """
        ...

    async def inspect(self) -> list[Finding]:
        """Findings about this ledger for `doctor`."""
        ...

"""The ledger port: what happens. Implementations are in `trellis.ledgers`; one conformance suite runs on all of them.

What every implementation promises:

- Each call is one transaction: all of it is in the ledger when the call returns, or nothing is. Concurrent calls of one
  process may share a transaction (group commit); a call that is refused takes nothing of the others with it.
- Every write by a holder carries its epoch and is refused with `LeaseLost`, a value, when the job has another one. An
  expired lease that nobody has revoked yet is still good: time decides liveness, the epoch decides safety.
- Every call may be made again with the same ids (job id, claim id, epoch, request id) after its answer was lost: the
  second call returns what the first one did, or does it now. A call whose answer was lost is repeated by the ledger
  itself for a bounded time and then raises `OutcomeUnknown`.
- Time is the ledger's time. Durations go in, never a caller's clock readings (`run_at` is a wish about the future).
- Everything has a bound: CLAIM_MAX, SUBMIT_MAX, page sizes, payload sizes.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    CancelRequested,
    HeldLease,
    JobId,
    Lease,
    LeaseLost,
    Mismatch,
    Move,
    Moved,
    NewJob,
    NotMoved,
    Renewed,
    RequestId,
    StepApplied,
    Submitted,
    Subscription,
    Turn,
    TurnResult,
    TypeOptions,
)
from trellis.engine.records import (
    ChildPage,
    DeadLetter,
    Event,
    FeedPage,
    Finding,
    Job,
    JobFilter,
    JobHistory,
    JobPage,
    JobToRestore,
    KeyOverLimit,
    QueueDepth,
    RecordedEvent,
    RetentionOptions,
    RetentionReport,
    Signal,
    SubscriberRecord,
    SweepOptions,
    SweepReport,
    UnpairedArtifact,
    WorkerRecord,
)


class Ledger(Protocol):
    """One ledger, open. Made by `trellis.ledgers.open_ledger(url)`."""

    url: str
    turns_at_once: int
    """How many turns of one worker it is worth to have under way: two where another process commits, one in this process."""
    name_prefix: str
    """What the ledger records in front of the names that this connection gives: `db:<login>:` of a limited PostgreSQL login, else nothing."""

    async def close(self) -> None:
        """Let go of files, threads and connections; calls under way are finished first."""
        ...

    # --- write ---------------------------------------------------------------------------------------------------

    async def submit(self, actor: Actor, jobs: Sequence[NewJob]) -> list[Submitted | Mismatch]:
        """Put jobs into their lifecycle's first state, all in one transaction, an answer for each in order.

        A delayed job rests until due; a keyed one takes a free slot of its key or is parked behind it. An idempotency
        key (or a given id) seen before answers with the existing job, or `Mismatch` when the fingerprint differs. With both, the
        key is asked first; a free key and a known id of the same request are the existing job, and the key means it from then on.
        Raises QueueFull, also when many come at once.
        """
        ...

    async def turn(self, turn: Turn) -> TurnResult:
        """Settle and start held jobs, then claim: one transaction, one round trip.

        Claims come in order of priority and readiness, skip paused types and rate limits, and never take a job whose
        concurrency key is at its limit. Completing a compensation also records job_compensated on its original.
        Completing a job that ends with an artifact finalizes the one the step names, in its own name and just before it; a step
        that names none, or one that is not the job's own and staged, raises InvalidTransition for the whole turn.
        """
        ...

    async def renew(self, actor: Actor, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
        """The heartbeat: every lease of a worker in one statement, each for its own lease time from now."""
        ...

    async def move(self, actor: Actor, move: Move) -> Moved | NotMoved:
        """Make one declared, unfenced transition in the name of a role that holds no lease.

        Out of a held state it revokes the lease (epoch + 1); into one it grants a lease. Raises JobNotFound.
        """
        ...

    async def cancel(
        self, actor: Actor, job_id: JobId, mode: CancelMode, request_id: RequestId, *, grace_s: float, cause: str | None
    ) -> Moved | NotMoved | CancelRequested:
        """End a job that has not ended. Soft on a held job flags the lease; the holder learns it when it renews.

        A job that ends otherwise before it stops keeps who asked, when and why in the event of that end and in its record.
        """
        ...

    async def requeue(
        self, actor: Actor, jobs: Sequence[JobId] | JobFilter, request_id: RequestId, *, limit: int, cause: str | None
    ) -> list[Moved | NotMoved]:
        """Open the next generation of failed and dead-lettered jobs; a filter takes at most `limit`, oldest first."""
        ...

    async def save_checkpoint(self, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
        """Keep the holder's last checkpoint; a later claim of the job gets it."""
        ...

    async def journal(self, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
        """Record a result once under a name: the first body stays and is returned, also to later attempts."""
        ...

    async def read_journal(self, job_id: JobId) -> dict[str, bytes]:
        """Every journal entry of a job."""
        ...

    async def signal(self, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
        """Append heartbeats with progress and log lines of a held job; they are kept apart from events."""
        ...

    async def sweep(self, actor: Actor, options: SweepOptions) -> SweepReport:
        """Amnesty after an outage, then expired leases, due timers, deadlines, overdue soft cancels, parked keys."""
        ...

    async def retain(self, options: RetentionOptions) -> RetentionReport:
        """Remove ended work, results, signals and keys whose time is over, one small batch.

        What a follower with a place has not read stays, for `unread_s` more at most.
        """
        ...

    async def pause(self, actor: Actor, type_: str, *, paused: bool, cause: str | None = None) -> None:
        """Stop or go on handing out a type; `cause` is why, for the act that records it."""
        ...

    async def limit_rate(
        self, actor: Actor, type_: str, per_second: float | None, burst: int = 1, *, cause: str | None = None
    ) -> None:
        """At most this many claims a second of a type, over all claimers; None takes the limit away."""
        ...

    async def declare_types(self, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool = False) -> None:
        """Keep what an application declares about its job types, for every submit that does not choose an option by name.

        The last declaration of a type holds; with `only_new` a type that is declared already keeps its options. At most
        DECLARED_MAX.
        """
        ...

    async def limit_key(self, actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
        """How many jobs of a concurrency key may be held at once; with 0 none is handed out until the key has a limit again."""
        ...

    async def limit_held(self, actor: Actor, type_: str, limit: int | None, *, cause: str | None = None) -> None:
        """At most this many jobs of a type held at once, over all claimers; None takes the limit away."""
        ...

    async def subscribe(self, actor: Actor, name: str, *, lease_s: float, reads: bool = True) -> Subscription | None:
        """Become the one who follows the feed under this name, where the last one stopped; None while another does.

        From the first time on retention keeps what is not read under this name. `reads` False only elects: nothing is kept for it.
        """
        ...

    async def ack(self, following: Subscription, position: str | None, *, lease_s: float) -> bool:
        """Go on for `lease_s` more, and remember the position if one is given; False when another has taken over."""
        ...

    async def unsubscribe(self, following: Subscription) -> None:
        """Let another have it at once."""
        ...

    async def release_retention(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        """Let retention go on without whoever follows under this name, until it reads on; False when nothing is kept for it."""
        ...

    async def set_home_issuer(
        self, actor: Actor, issuer: str, *, replaces: str | None = None, cause: str | None = None
    ) -> str:
        """Record whose subjects the plain names of this ledger are, if nobody is recorded yet or `replaces` is; who is recorded now.

        A replacement is an operator's act: the new issuer's subjects get the jobs that those of the same name had.
        """
        ...

    async def record_act(self, actor: Actor, act: NewAct) -> str:
        """Record an act on something that is not in the ledger; its id. Acts on the ledger record themselves.

        One that brings an id that is there already changes nothing.
        """
        ...

    async def acts(self, *, after: int = 0, limit: int = ACTS_MAX, unpublished: bool = False) -> list[AdminAct]:
        """Administrative acts after the one with this number, at most ACTS_MAX; with `unpublished` those without an audit record."""
        ...

    async def restore_acts(self, actor: Actor, lost: Sequence[AdminAct]) -> None:
        """Put back acts that this ledger lost and whose records were read; those that are there stay. `no` is given anew."""
        ...

    async def acts_published(self, actor: Actor, published: Sequence[AdminAct]) -> None:
        """Say that the audit records of these acts are in the object store."""
        ...

    async def heartbeat_worker(self, actor: Actor, info: bytes | None) -> None:
        """Say that this worker process is alive, for people who look."""
        ...

    async def restore(self, actor: Actor, jobs: Sequence[JobToRestore]) -> list[bool]:
        """Put back jobs that this ledger lost, at most RESTORE_MAX; for each whether it was put back or is there already.

        Every event is judged as it was when it was made: what no lifecycle declares is refused, and then nothing is written. A held
        job comes back with a lease that is over, and every epoch far above any recorded one, so that no holder of the lost ledger
        can write. Raises HistoryBroken, NotAllowed.
        """
        ...

    async def annotate(self, actor: Actor, job_id: JobId, type_: str, body: bytes) -> bool:
        """Keep something that was said about a job beside its signals; nothing of the job changes, also when it has ended.

        At most REMARKS_MAX are kept of one job: False when there are so many already, or the job is unknown.
        """
        ...

    # --- wait ----------------------------------------------------------------------------------------------------

    async def wait_for_work(self, types: Sequence[str], timeout_s: float) -> None:
        """Return when a hint says that work may be there, or after `timeout_s`. Hints may be lost; polling is the truth."""
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
        """Jobs, newest first, without payloads. `oldest_first` is for a filter `of_open_state`: the head of what waits there."""
        ...

    async def children(self, parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
        """Jobs with this parent that came since a mark, at most `limit`; None means from the first.

        A job is never missed: when one has come below the mark, because its transaction took long, they are given anew from the first.
        """
        ...

    async def peek_ready(self, lifecycle: str, *, each: int) -> list[Job]:
        """Ready jobs: the first `each` of every type and priority, longest ready first. Paused types are left out.

        They come with their payloads, except one of more than HEAD_PAYLOAD_BYTES_MAX: `job` has it.
        """
        ...

    async def holds(self, job_ids: Sequence[JobId]) -> list[HeldLease]:
        """Those of these jobs that are held now, in any order; at most CLAIM_MAX."""
        ...

    async def expiring(self, lifecycle: str, *, within_s: float, limit: int) -> list[HeldLease]:
        """Held jobs whose lease ends within so long or is over, soonest first."""
        ...

    async def events(self, job_id: JobId) -> list[Event]:
        """Every event of a job, oldest first."""
        ...

    async def events_of(self, job_ids: Sequence[JobId]) -> dict[JobId, list[Event]]:
        """Every event of several jobs, of each the oldest first, in one query. Jobs that are unknown or gone are left out."""
        ...

    async def payloads(self, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        """The payloads of several jobs, in one query. Jobs that are unknown or gone are left out."""
        ...

    async def signals(self, job_id: JobId, *, limit: int) -> list[Signal]:
        """The last signals of a job, oldest first."""
        ...

    async def find_events(
        self, *, type_: str | None, correlation_id: str | None, since: datetime | None, limit: int
    ) -> list[Event]:
        """Events by type or correlation, oldest first, through an index."""
        ...

    async def count_events(self, types: Sequence[str], *, since: datetime) -> dict[str, int]:
        """How many events of each of these types were recorded since a moment, counted where they are stored; every type is answered."""
        ...

    async def feed(
        self, position: str | None, *, limit: int, lifecycle: str | frozenset[str] | None = None
    ) -> FeedPage:
        """Every event once, in an order that no late commit can break; `position` None is the beginning.

        `lifecycle` narrows it to one, or to several. A narrowed page goes on after everything that it passed over.
        """
        ...

    async def recorded(self, events: Sequence[Event]) -> list[RecordedEvent]:
        """Events that this ledger gave, with what it knows beside them, in the same order; those of a job that is gone are left out."""
        ...

    async def feed_end(self) -> str:
        """The position after everything the feed would yield now."""
        ...

    async def result(self, job_id: JobId) -> bytes | None:
        """The stored result of a succeeded job, while it is kept."""
        ...

    async def dead_letters(self, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
        """Dead letters that nobody requeued, newest first; `cursor` is the job id of the last one seen."""
        ...

    async def dead_letter(self, job_id: JobId) -> DeadLetter | None:
        """The dead letter of a job that ended with one and was not requeued."""
        ...

    async def queues(self) -> list[QueueDepth]:
        """How much of each type waits and is held."""
        ...

    async def declared_types(self, type_: str | None = None) -> list[TypeOptions]:
        """What applications declared about their job types, by name, at most DECLARED_MAX; `type_` narrows it to one."""
        ...

    async def home_issuer(self) -> str | None:
        """Whose subjects the plain names of this ledger are; None before the first gateway has begun."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """Worker processes seen lately."""
        ...

    async def followers(self) -> list[SubscriberRecord]:
        """Who follows the feed, by name, at most 1,000."""
        ...

    async def find_by_idempotency_key(self, scope: str, key: str, fingerprint: bytes) -> Submitted | Mismatch | None:
        """What a submit under this idempotency key would be answered because of an earlier one; None when the key is free."""
        ...

    async def ping(self) -> None:
        """Come back when the ledger answers now, behind no other call; raises LedgerError when it does not, in about a second."""
        ...

    async def now(self) -> datetime:
        """The ledger's clock."""
        ...

    def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        """Every job with all its events, for `verify`."""
        ...

    async def keys_over(self) -> list[KeyOverLimit]:
        """Concurrency keys held beyond their limit, as of one moment; for `verify`.

        Jobs that hold slots above a limit that was lowered meanwhile may go on, and do not count.
        """
        ...

    async def unpaired(self) -> list[UnpairedArtifact]:
        """Jobs whose end and whose artifacts do not belong together, as of one moment and at most 1,000; for `verify`.

        An artifact whose job was removed by retention is not meant.
        """
        ...

    async def inspect(self) -> list[Finding]:
        """What `doctor` should know about this ledger."""
        ...

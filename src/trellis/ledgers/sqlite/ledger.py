"""The ledger port on one SQLite file. Verbs are functions over a transaction; this class sends each to its lane."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from shutil import disk_usage

from trellis.auth.principals import check_held_limit, require, require_home_issuer
from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct, checked_act, this_node
from trellis.engine.errors import LedgerError, LedgerFull, LedgerUnavailable
from trellis.engine.jobs import (
    LEAST_URGENT_FIRST_EVERY,
    PAYLOAD_BYTES_MAX,
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
    RequestKey,
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
from trellis.engine.request_keys import CANCEL_ANSWERS, REQUEUE_ANSWERS, StoredRequest
from trellis.engine.schedules import DueSchedules, ScheduleRecord
from trellis.ledgers.measures import measured
from trellis.ledgers.refusals import (
    check_annotation,
    check_children,
    check_declared,
    check_expiring,
    check_ids,
    check_peek_limit,
)
from trellis.ledgers.sqlite import control, moves, reads, request_keys, restore, rows, schedules, schema, submit, sweep
from trellis.ledgers.sqlite import control as acts
from trellis.ledgers.sqlite import reads as recorded
from trellis.ledgers.sqlite import retention as retain
from trellis.ledgers.sqlite import submit as type_options
from trellis.ledgers.sqlite import turn as holder
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S, SqliteTarget, connect, parse_url
from trellis.ledgers.sqlite.lanes import SharedCall, SqliteLane, Transaction, WriterQueue
from trellis.ledgers.sqlite.notifier import CommitWatch, WorkNotifier
from trellis.ledgers.sqlite.schema import prepare
from trellis.ledgers.sqlite.submit import OuterConnection, submit_on
from trellis.ledgers.sqlite.turn import turn as take_turn

ROOM_BYTES_MIN = 2 * PAYLOAD_BYTES_MAX
"""The ledger counts as full with less free disk space than this.

The longest payload is written to the log and then to the file.
"""


@measured
class SqliteLedger:
    """One open ledger, made by `open`. Safe to use from several event loops and threads."""

    turns_at_once = 1
    name_prefix = ""

    def __init__(self, target: SqliteTarget, clock: Callable[[], float], node: str | None = None) -> None:
        self.url = target.url
        self._target = target
        self._notifier = WorkNotifier()
        self._commits = WorkNotifier()
        self._commits_seen = 0
        self._events = WorkNotifier()
        self._claims = count(1)
        node = node or this_node()
        self._found_nothing_at = 0
        connection = connect(target)
        try:
            prepare(connection, target.url)
            reading = None if target.path is None else connect(target)
        except BaseException:
            connection.close()
            raise
        self._writer = SqliteLane(
            connection,
            url=self.url,
            name="trellis-writer",
            clock=clock,
            node=node,
            writes=True,
            room=None if target.path is None else WriterQueue(target.path, BUSY_TIMEOUT_S),
            on_wake=self._notifier.notify,
            on_events=self._events.notify,
        )
        # A database in memory exists only in its one connection: reads use the writer's lane.
        self._reader = (
            self._writer
            if reading is None
            else SqliteLane(reading, url=self.url, name="trellis-reader", clock=clock, node=node, writes=False)
        )
        self._watch = None if target.path is None else self._watch_of(target.path)

    @classmethod
    async def open(cls, url: str, *, clock: Callable[[], float], node: str | None = None) -> "SqliteLedger":
        """Open a ledger and create or upgrade its file as needed. `node` defaults to this machine."""
        return await asyncio.get_running_loop().run_in_executor(None, cls, parse_url(url), clock, node)

    def _watch_of(self, path: Path) -> CommitWatch:
        """A watch for commits of other processes."""
        log = path.with_name(f"{path.name}-wal")
        return CommitWatch(
            lambda: connect(self._target), log, on_commit=self._commits.notify, on_events=self._events.notify
        )

    async def close(self) -> None:
        await self._writer.close()
        if self._reader is not self._writer:
            await self._reader.close()
        if self._watch is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._watch.close)

    # --- write ---------------------------------------------------------------------------------------------------

    async def submit(self, actor: Actor, jobs: Sequence[NewJob]) -> list[Submitted | Mismatch]:
        return await self._writer.share(
            SharedCall(actor, jobs, lambda tx, all_jobs: submit.submit(tx, actor, all_jobs))
        )

    async def turn(self, turn: Turn) -> TurnResult:
        least_urgent = turn.claim is not None and next(self._claims) % LEAST_URGENT_FIRST_EVERY == 0

        def work(tx: Transaction) -> TurnResult:
            rung = self._notifier.notifications
            result = take_turn(tx, turn, least_urgent_first=least_urgent)
            if turn.claim is not None and not result.claimed:
                self._found_nothing_at = rung
            return result

        return await self._writer.run(work)

    async def renew(self, actor: Actor, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:  # noqa: ARG002 - the epoch decides, not the name
        return await self._writer.run(lambda tx: holder.renew(tx, leases))

    async def move(self, actor: Actor, move: Move) -> Moved | NotMoved:
        return await self._writer.run(lambda tx: moves.move(tx, actor, move))

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
        def work(tx: Transaction) -> Moved | NotMoved | CancelRequested:
            change = partial(moves.cancel, tx, actor, job_id, mode, request_id, grace_s=grace_s, cause=cause)
            return request_keys.answer_once(tx, key, CANCEL_ANSWERS, change)

        return await self._writer.run(work)

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
        def work(tx: Transaction) -> list[Moved | NotMoved]:
            change = partial(moves.requeue, tx, actor, jobs, request_id, limit=limit, cause=cause)
            return request_keys.answer_once(tx, key, REQUEUE_ANSWERS, change)

        return await self._writer.run(work)

    async def take_request_key(self, key: RequestKey) -> StoredRequest | None:
        return await self._writer.run(lambda tx: request_keys.take(tx, key))

    async def store_request_answer(self, key: RequestKey, answer: bytes) -> None:
        await self._writer.run(lambda tx: request_keys.store_answer(tx, key, answer))

    async def save_checkpoint(self, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
        return await self._writer.run(lambda tx: holder.save_checkpoint(tx, lease, body))

    async def journal(self, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
        return await self._writer.run(lambda tx: holder.journal(tx, lease, entry, body))

    async def read_journal(self, job_id: JobId) -> dict[str, bytes]:
        return await self._reader.run(lambda tx: reads.read_journal(tx, job_id))

    async def signal(self, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
        return await self._writer.run(lambda tx: holder.signal(tx, lease, signals))

    async def sweep(self, actor: Actor, options: SweepOptions) -> SweepReport:
        require(actor, "sweep")
        return await self._writer.run(lambda tx: sweep.sweep(tx, actor, options))

    async def retain(self, options: RetentionOptions) -> RetentionReport:
        return await self._writer.run(lambda tx: retain.retain(tx, options))

    async def pause(self, actor: Actor, type_: str, *, paused: bool, cause: str | None = None) -> None:
        require(actor, "pause")
        await self._writer.run(lambda tx: control.pause(tx, actor, type_, paused=paused, cause=cause))

    async def limit_rate(
        self, actor: Actor, type_: str, per_second: float | None, burst: int = 1, *, cause: str | None = None
    ) -> None:
        require(actor, "limit_rate")
        await self._writer.run(lambda tx: control.limit_rate(tx, actor, type_, per_second, burst, cause=cause))

    async def declare_types(self, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool = False) -> None:
        require(actor, "declare_types")
        check_declared(types)
        await self._writer.run(lambda tx: type_options.declare(tx, actor, types, only_new=only_new))

    async def save_schedule(self, actor: Actor, record: ScheduleRecord, *, cause: str | None = None) -> bool:
        require(actor, "save_schedule")
        return await self._writer.run(lambda tx: schedules.save(tx, actor, record, cause))

    async def remove_schedule(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        require(actor, "remove_schedule")
        return await self._writer.run(lambda tx: schedules.remove(tx, actor, name, cause))

    async def advance_schedule(self, actor: Actor, record: ScheduleRecord) -> bool:
        require(actor, "advance_schedule")
        return await self._writer.run(lambda tx: schedules.advance(tx, record))

    async def limit_key(self, actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
        require(actor, "limit_key")
        await self._writer.run(lambda tx: control.limit_key(tx, actor, key, limit, cause=cause))

    async def limit_held(self, actor: Actor, type_: str, limit: int | None, *, cause: str | None = None) -> None:
        require(actor, "limit_held")
        check_held_limit(limit)
        await self._writer.run(lambda tx: control.limit_held(tx, actor, type_, limit, cause=cause))

    async def subscribe(self, actor: Actor, name: str, *, lease_s: float, reads: bool = True) -> Subscription | None:
        require(actor, "follow")
        return await self._writer.run(lambda tx: control.subscribe(tx, actor, name, lease_s, reads=reads))

    async def ack(self, following: Subscription, position: str | None, *, lease_s: float) -> bool:
        return await self._writer.run(lambda tx: control.ack(tx, following, position, lease_s))

    async def release_retention(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        require(actor, "leave_behind")
        return await self._writer.run(lambda tx: control.release_retention(tx, actor, name, cause=cause))

    async def set_home_issuer(
        self, actor: Actor, issuer: str, *, replaces: str | None = None, cause: str | None = None
    ) -> str:
        require_home_issuer(actor, issuer, replaces)
        return await self._writer.run(lambda tx: control.set_home_issuer(tx, actor, issuer, replaces, cause))

    async def record_act(self, actor: Actor, act: NewAct) -> str:
        require(actor, "record_act")
        recorded_act = checked_act(act)
        return await self._writer.run(lambda tx: acts.record(tx, actor, recorded_act))

    async def acts(self, *, after: int = 0, limit: int = ACTS_MAX, unpublished: bool = False) -> list[AdminAct]:
        return await self._reader.run(lambda tx: acts.read(tx, after, min(limit, ACTS_MAX), unpublished=unpublished))

    async def restore_acts(self, actor: Actor, lost: Sequence[AdminAct]) -> None:
        require(actor, "restore")
        await self._writer.run(lambda tx: acts.put_back(tx, lost))

    async def acts_published(self, actor: Actor, published: Sequence[AdminAct]) -> None:
        require(actor, "publish_acts")
        await self._writer.run(lambda tx: acts.mark_published(tx, [one.no for one in published]))

    async def unsubscribe(self, following: Subscription) -> None:
        await self.ack(following, None, lease_s=0.0)

    async def restore(self, actor: Actor, jobs: Sequence[JobToRestore]) -> list[bool]:
        require(actor, "restore")
        return await self._writer.run(lambda tx: restore.restore(tx, jobs))

    async def heartbeat_worker(self, actor: Actor, info: bytes | None) -> None:
        await self._writer.run(lambda tx: control.heartbeat_worker(tx, actor, info))

    async def annotate(self, actor: Actor, job_id: JobId, type_: str, body: bytes) -> bool:
        require(actor, "remark")
        check_annotation(type_, body)
        return await self._writer.run(lambda tx: holder.annotate(tx, job_id, type_, body))

    def submit_on(
        self, connection: OuterConnection, actor: Actor, jobs: Sequence[NewJob]
    ) -> list[Submitted | Mismatch]:
        """Submit inside the caller's own open transaction, on a connection to this ledger's file."""
        return submit_on(connection, actor, jobs, self._writer.now())

    # --- wait ----------------------------------------------------------------------------------------------------

    async def wait_for_work(self, types: Sequence[str], timeout_s: float) -> None:
        rung = self._notifier.wait(self._found_nothing_at)
        if rung.done():
            self._found_nothing_at = self._notifier.notifications
            return
        elsewhere = asyncio.ensure_future(self._ready_elsewhere(types))
        try:
            await asyncio.wait({rung, elsewhere}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._found_nothing_at = self._notifier.notifications
            self._notifier.leave(rung)
            elsewhere.cancel()

    async def _ready_elsewhere(self, types: Sequence[str]) -> None:
        """Return when another process has committed and a job of these types can be claimed."""
        with nullcontext() if self._watch is None else self._watch.attend():
            while True:
                committed = self._commits.wait(self._commits_seen)
                try:
                    await committed
                finally:
                    self._commits.leave(committed)
                self._commits_seen = self._commits.notifications
                with suppress(LedgerError):  # only a hint is lost: the caller's own polling reports what is wrong
                    if await self._any_ready(types):
                        return

    def events_mark(self) -> int:
        return self._events.notifications

    async def wait_for_events(self, mark: int, timeout_s: float) -> None:
        rung = self._events.wait(mark)
        try:
            with nullcontext() if self._watch is None else self._watch.attend():
                await asyncio.wait({rung}, timeout=timeout_s)
        finally:
            self._events.leave(rung)

    async def _any_ready(self, types: Sequence[str]) -> bool:
        return await self._reader.run(lambda tx: reads.any_ready(tx, list(types)))

    # --- read ----------------------------------------------------------------------------------------------------

    async def job(self, job_id: JobId) -> Job | None:
        return await self._reader.run(lambda tx: reads.job(tx, job_id))

    async def jobs(
        self, where: JobFilter, *, limit: int, cursor: str | None = None, oldest_first: bool = False
    ) -> JobPage:
        read = reads.oldest_jobs if oldest_first else reads.jobs
        return await self._reader.run(lambda tx: read(tx, where, limit=limit, cursor=cursor))

    async def children(self, parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
        check_children(limit)
        return await self._reader.run(lambda tx: reads.children(tx, parent_id, since=since, limit=limit))

    async def peek_ready(self, lifecycle: str, *, each: int) -> list[Job]:
        check_peek_limit(each)
        return await self._reader.run(lambda tx: reads.peek_ready(tx, lifecycle, each=each))

    async def holds(self, job_ids: Sequence[JobId]) -> list[HeldLease]:
        check_ids(job_ids)
        return await self._reader.run(lambda tx: reads.holds(tx, job_ids))

    async def expiring(self, lifecycle: str, *, within_s: float, limit: int) -> list[HeldLease]:
        check_expiring(within_s, limit)
        return await self._reader.run(lambda tx: reads.expiring(tx, lifecycle, within_s=within_s, limit=limit))

    async def events(self, job_id: JobId) -> list[Event]:
        return await self._reader.run(lambda tx: reads.events(tx, job_id))

    async def events_of(self, job_ids: Sequence[JobId]) -> dict[JobId, list[Event]]:
        return await self._reader.run(lambda tx: reads.events_of(tx, job_ids))

    async def payloads(self, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        return await self._reader.run(lambda tx: reads.payloads(tx, job_ids))

    async def signals(self, job_id: JobId, *, limit: int) -> list[Signal]:
        return await self._reader.run(lambda tx: reads.signals(tx, job_id, limit=limit))

    async def find_events(
        self, *, type_: str | None, correlation_id: str | None, since: datetime | None, limit: int
    ) -> list[Event]:
        return await self._reader.run(
            lambda tx: reads.find_events(tx, type_=type_, correlation_id=correlation_id, since=since, limit=limit)
        )

    async def count_events(self, types: Sequence[str], *, since: datetime) -> dict[str, int]:
        return await self._reader.run(lambda tx: reads.count_events(tx, types, since=since))

    async def feed(
        self, position: str | None, *, limit: int, lifecycle: str | frozenset[str] | None = None
    ) -> FeedPage:
        return await self._reader.run(lambda tx: reads.feed(tx, position, limit=limit, lifecycle=lifecycle))

    async def recorded(self, events: Sequence[Event]) -> list[RecordedEvent]:
        return await self._reader.run(lambda tx: recorded.recorded(tx, events)) if events else []

    async def feed_end(self) -> str:
        return await self._reader.run(reads.feed_end)

    async def result(self, job_id: JobId) -> bytes | None:
        return await self._reader.run(lambda tx: reads.result(tx, job_id))

    async def dead_letters(self, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
        return await self._reader.run(lambda tx: reads.dead_letters(tx, where, limit=limit, cursor=cursor))

    async def dead_letter(self, job_id: JobId) -> DeadLetter | None:
        return await self._reader.run(lambda tx: reads.dead_letter(tx, job_id))

    async def queues(self) -> list[QueueDepth]:
        return await self._reader.run(reads.queues)

    async def declared_types(self, type_: str | None = None) -> list[TypeOptions]:
        return await self._reader.run(lambda tx: type_options.every_declared(tx, type_))

    async def schedules(self, name: str | None = None) -> list[ScheduleRecord]:
        return await self._reader.run(lambda tx: schedules.find(tx, name))

    async def due_schedules(self, *, topics: bool) -> DueSchedules:
        return await self._reader.run(lambda tx: schedules.due(tx, topics=topics))

    async def home_issuer(self) -> str | None:
        return await self._reader.run(control.home_issuer)

    async def workers(self) -> list[WorkerRecord]:
        return await self._reader.run(reads.workers)

    async def followers(self) -> list[SubscriberRecord]:
        return await self._reader.run(reads.followers)

    async def find_by_idempotency_key(self, scope: str, key: str, fingerprint: bytes) -> Submitted | Mismatch | None:
        return await self._reader.run(lambda tx: submit.find_by_idempotency_key(tx, scope, key, fingerprint))

    async def find_request(self, key: RequestKey) -> StoredRequest | None:
        return await self._reader.run(lambda tx: request_keys.find(tx, key))

    async def ping(self) -> None:
        path = self._target.path
        if path is None:
            return
        if not path.exists():
            raise LedgerUnavailable(reason=f"there is no file {path} any more")
        if disk_usage(path).free < ROOM_BYTES_MIN:
            raise LedgerFull

    async def now(self) -> datetime:
        return rows.moment(self._writer.now())

    async def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        after = 0
        while True:
            found, after = await self._reader.run(partial(reads.histories, after=after, limit=batch))
            if not found:
                return
            for history in found:
                yield history

    async def keys_over(self) -> list[KeyOverLimit]:
        return await self._reader.run(reads.keys_over)

    async def unpaired(self) -> list[UnpairedArtifact]:
        return await self._reader.run(reads.unpaired)

    async def inspect(self) -> list[Finding]:
        return await self._reader.run(lambda tx: schema.inspect(tx, self._target))

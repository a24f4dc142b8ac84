"""The ledger port on one SQLite file. Verbs are functions over a transaction; this class sends each to its lane."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial, wraps
from itertools import count
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from trellis.auth.principals import Verb, require
from trellis.engine.admin_acts import NewAct, checked_act, this_node
from trellis.engine.disk_room import has_room
from trellis.engine.errors import LedgerDamaged, LedgerError, LedgerFull
from trellis.engine.jobs import (
    LEAST_URGENT_FIRST_EVERY,
    Actor,
    Advance,
    Mismatch,
    NewJob,
    RequestKey,
    Submitted,
    Subscription,
    Turn,
    TurnResult,
    check_own_ids,
    payloads_of,
)
from trellis.engine.ledger import RETENTION
from trellis.engine.records import (
    ConnectionUse,
    Finding,
    JobHistory,
    QueueDepth,
    RetentionOptions,
    RetentionReport,
)
from trellis.engine.request_keys import SUBMIT_ANSWERS
from trellis.ledgers.measures import measured
from trellis.ledgers.queue_counts import QueueCounts
from trellis.ledgers.refusals import check_retention
from trellis.ledgers.sqlite import alerts as alert_rows
from trellis.ledgers.sqlite import (
    control,
    job_changes,
    lists,
    moves,
    reads,
    request_keys,
    retention,
    rows,
    schema,
    waits,
)
from trellis.ledgers.sqlite import restore as restores
from trellis.ledgers.sqlite import schedules as schedule_rows
from trellis.ledgers.sqlite import submit as submits
from trellis.ledgers.sqlite import sweep as sweeps
from trellis.ledgers.sqlite import turn as turns
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S, SqliteTarget, connect, parse_url
from trellis.ledgers.sqlite.lanes import IN_PLACE_ITEMS_MAX, SharedCall, SqliteLane, Transaction
from trellis.ledgers.sqlite.ledger_file import LedgerFile
from trellis.ledgers.sqlite.notifier import CommitWatch, SeenMarks, WorkNotifier
from trellis.ledgers.sqlite.schema import prepare
from trellis.ledgers.sqlite.submit import OuterConnection, submit_on
from trellis.ledgers.sqlite.writer_queue import WriterQueue

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    SqliteMethod: TypeAlias = Callable[Concatenate["SqliteLedger", P], CoroutineType[Any, Any, R]]


Size: TypeAlias = Callable[..., int | None]
"""The number of jobs, leases or entries that a call is about, from its arguments; None if that cannot be told.

Long bodies count as more: what a call takes depends on its bytes, too.
"""
ITEM_BYTES = 4096
"""So many bytes of a call's bodies count as one more item."""
LONG_ITEM = 8
"""As how many items one counts whose stored body is read, which may be as long as PAYLOAD_BYTES_MAX."""
CLAIM_IN_PLACE_MAX = 128
"""A claim of more jobs is as large as it may be. A smaller one is as large as the last claim was."""


def _unknown(*_args: object, **_options: object) -> int | None:
    return None


def _one(*_args: object, **_options: object) -> int | None:
    return 1


def _each(*args: Any, **_options: object) -> int | None:
    """As many as its last positional argument has."""
    last = args[-1] if args else None
    return len(cast("Sequence[object]", last)) if isinstance(last, list | tuple) else None


def _each_with_body(*args: Any, **_options: object) -> int | None:
    """As many as its last positional argument has, of which each is read with a body."""
    number = _each(*args)
    return None if number is None else LONG_ITEM * number


def _with_body(*args: Any, **_options: object) -> int | None:
    """One, whose body is the last positional argument."""
    last = args[-1] if args else None
    return 1 + len(last) // ITEM_BYTES if isinstance(last, bytes) else None


def _size_of_jobs(jobs: Sequence[NewJob]) -> int:
    number = len(jobs)
    return number if number > IN_PLACE_ITEMS_MAX else number + sum(map(len, payloads_of(jobs))) // ITEM_BYTES


def _size_of_step(step: Advance) -> int:
    return 1 + (len(step.data or b"") + len(step.result or b"")) // ITEM_BYTES


def _reading(work: Callable[Concatenate[Transaction, P], R], size: Size = _unknown) -> "SqliteMethod[P, R]":
    """A method that runs this function in a transaction that reads."""

    @wraps(work)
    async def call(ledger: "SqliteLedger", *args: P.args, **kwargs: P.kwargs) -> R:
        return await ledger.reader.run(lambda tx: work(tx, *args, **kwargs), size=size(*args, **kwargs))

    return call


def _writing(work: Callable[Concatenate[Transaction, P], R], size: Size = _unknown) -> "SqliteMethod[P, R]":
    """A method that runs this function in a transaction that writes."""

    @wraps(work)
    async def call(ledger: "SqliteLedger", *args: P.args, **kwargs: P.kwargs) -> R:
        return await ledger.writer.run(lambda tx: work(tx, *args, **kwargs), size=size(*args, **kwargs))

    return call


def _administering(verb: Verb, work: Callable[Concatenate[Transaction, P], R]) -> "SqliteMethod[P, R]":
    """A method like that of `_writing`, for the roles that may use the verb. Its first argument is the actor."""

    @wraps(work)
    async def call(ledger: "SqliteLedger", *args: P.args, **kwargs: P.kwargs) -> R:
        require(cast("Actor", args[0] if args else kwargs["actor"]), verb)
        return await ledger.writer.run(lambda tx: work(tx, *args, **kwargs))

    return call


@measured
class SqliteLedger:
    """One open ledger, made by `open`. Safe to use from several event loops and threads."""

    turns_at_once = 1
    name_prefix = ""

    def __init__(self, target: SqliteTarget, clock: Callable[[], float], node: str | None = None) -> None:
        self.url = target.url
        self._target = target
        self._queue_counts = QueueCounts()
        self._notifier = WorkNotifier()
        self._commits_seen = SeenMarks()
        self._events = WorkNotifier()
        self._claims = count(1)
        self._claimed_last = 0
        node = node or this_node()
        self._found_nothing_at = SeenMarks()
        connection = connect(target)
        try:
            prepare(connection, target.url)
            reading = None if target.path is None else connect(target)
        except BaseException:
            connection.close()
            raise
        self._file = None if target.path is None else LedgerFile(target.path)
        self.writer = SqliteLane(
            connection,
            url=self.url,
            name="trellis-writer",
            clock=clock,
            node=node,
            writes=True,
            room=None if target.path is None else WriterQueue(target.path, BUSY_TIMEOUT_S),
            on_wake=self._notifier.notify,
            on_events=self._events.notify,
            file=self._file,
        )
        # A database in memory exists only in its one connection: reads use the writer's lane.
        self.reader = (
            self.writer
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
        return CommitWatch(lambda: connect(self._target), log, any_ready=reads.any_ready, on_events=self._events.notify)

    async def close(self) -> None:
        await self.writer.close()
        if self.reader is not self.writer:
            await self.reader.close()
        if self._watch is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._watch.close)

    # --- verbs that are one function, in the module of their subject ---------------------------------------------

    job = _reading(reads.job, _one)
    jobs = _reading(lists.jobs)
    select_jobs = _reading(job_changes.select_jobs)
    children = _reading(reads.children)
    peek_ready = _reading(reads.peek_ready)
    holds = _reading(reads.holds, _each)
    expiring = _reading(reads.expiring)
    events = _reading(reads.events, _one)
    events_of = _reading(reads.events_of, _each)
    payloads = _reading(reads.payloads, _each_with_body)
    contents_of = _reading(reads.contents_of, _each_with_body)
    signals = _reading(reads.signals)
    find_events = _reading(reads.find_events)
    count_events = _reading(reads.count_events)
    sample_events = _reading(reads.sample_events)
    feed = _reading(reads.feed)
    recorded = _reading(reads.recorded)
    feed_end = _reading(reads.feed_end, _one)
    result = _reading(reads.result, _one)
    read_journal = _reading(reads.read_journal)
    journal_entries = _reading(reads.journal_entries, _each_with_body)
    job_signals = _reading(reads.job_signals, _one)
    outcomes = _reading(reads.outcomes, _each_with_body)
    dead_letters = _reading(lists.dead_letters)
    dead_letter = _reading(reads.dead_letter, _one)
    _count_queues = _reading(reads.queues)
    figures = _reading(reads.figures)
    alert = _reading(alert_rows.alert)
    alerts = _reading(alert_rows.alerts)
    alert_mark = _reading(alert_rows.mark)
    waiting_types = _reading(alert_rows.waiting_types)
    stage_steps = _reading(alert_rows.stage_steps)
    plan_retention = _reading(retention.plan)
    audit_head = _reading(control.audit_head)
    schedules = _reading(schedule_rows.find)
    due_schedules = _reading(schedule_rows.due)
    declared_types = _reading(submits.every_declared)
    home_issuer = _reading(control.home_issuer)
    workers = _reading(reads.workers)
    followers = _reading(reads.followers)
    find_by_idempotency_key = _reading(submits.find_by_idempotency_key, _one)
    find_request = _reading(request_keys.find, _one)
    key_limit = _reading(reads.key_limit, _one)
    keys_over = _reading(reads.keys_over)
    unpaired = _reading(reads.unpaired)
    acts = _reading(control.read)
    renew = _writing(turns.renew, _each)
    save_checkpoint = _writing(turns.save_checkpoint, _with_body)
    journal = _writing(turns.journal, _with_body)
    signal = _writing(turns.signal, _one)
    spawn = _writing(turns.spawn)
    submit_batch = _writing(waits.submit_batch)
    move = _writing(moves.move, _one)
    cancel = _writing(moves.cancel, _one)
    requeue = _writing(moves.requeue)
    change_jobs = _writing(job_changes.change_jobs)
    ack = _writing(control.ack, _one)
    heartbeat_worker = _writing(control.heartbeat_worker, _one)
    set_home_issuer = _writing(control.set_home_issuer)
    sweep = _administering("sweep", sweeps.sweep)
    pause = _administering("pause", control.pause)
    limit_rate = _administering("limit_rate", control.limit_rate)
    declare_types = _administering("declare_types", submits.declare)
    limit_key = _administering("limit_key", control.limit_key)
    limit_held = _administering("limit_held", control.limit_held)
    subscribe = _administering("follow", control.subscribe)
    release_retention = _administering("leave_behind", control.release_retention)
    restore_acts = _administering("restore", control.put_back)
    acts_published = _administering("publish_acts", control.mark_published)
    restore = _administering("restore", restores.restore)
    observe_alerts = _administering("observe_alerts", alert_rows.observe)
    extend_audit_chain = _administering("seal", control.extend_audit_chain)
    annotate = _administering("remark", turns.annotate)
    send_signal = _administering("send_signal", waits.send_signal)
    save_schedule = _administering("save_schedule", schedule_rows.save)
    remove_schedule = _administering("remove_schedule", schedule_rows.remove)
    advance_schedule = _administering("advance_schedule", schedule_rows.advance)

    # --- write ---------------------------------------------------------------------------------------------------

    async def submit(
        self, actor: Actor, jobs: Sequence[NewJob], *, key: RequestKey | None = None
    ) -> list[Submitted | Mismatch]:
        check_own_ids(jobs)
        if key is not None and jobs:
            return await self.writer.run(
                lambda tx: request_keys.answer_once(tx, key, SUBMIT_ANSWERS, lambda: submits.submit(tx, actor, jobs)),
                size=_size_of_jobs(jobs),
            )

        def work(tx: Transaction, calls: Sequence[Sequence[NewJob]]) -> list[Submitted | Mismatch]:
            return submits.submit_calls(tx, actor, calls)

        return await self.writer.share(SharedCall(actor, jobs, work), size=_size_of_jobs(jobs))

    async def turn(self, turn: Turn) -> TurnResult:
        least_urgent = turn.claim is not None and next(self._claims) % LEAST_URGENT_FIRST_EVERY == 0

        def work(tx: Transaction) -> TurnResult:
            rung, commits = self._notifier.notifications, self._watch.commits if self._watch else 0
            result = turns.turn(tx, turn, least_urgent_first=least_urgent)
            if turn.claim is not None and turn.claim.only is None:
                self._claimed_last = len(result.claimed)
                types = [one.type for one in turn.claim.types]
                if not result.claimed:
                    self._found_nothing_at.note(types, rung)
                if tx.took_all:
                    self._commits_seen.note(types, commits)
            return result

        return await self.writer.run(work, size=self._size_of(turn))

    def _size_of(self, turn: Turn) -> int:
        """The steps of a turn, and as many jobs as the last claim of this process got if it claims a few."""
        claimed = 0 if turn.claim is None else turn.claim.start + turn.claim.prefetch
        if claimed <= CLAIM_IN_PLACE_MAX:
            claimed = min(claimed, self._claimed_last)
        return claimed + sum(map(_size_of_step, turn.advances))

    async def retain(self, options: RetentionOptions, *, by: Actor = RETENTION) -> RetentionReport:
        require(by, "retain")
        check_retention(options)
        return await self.writer.run(lambda tx: retention.retain(tx, options, by))

    async def record_act(self, actor: Actor, act: NewAct) -> str:
        require(actor, "record_act")
        recorded_act = checked_act(act)
        return await self.writer.run(lambda tx: control.record(tx, actor, recorded_act))

    async def unsubscribe(self, following: Subscription) -> None:
        await self.ack(following, None, lease_s=0.0)

    def submit_on(
        self, connection: OuterConnection, actor: Actor, jobs: Sequence[NewJob]
    ) -> list[Submitted | Mismatch]:
        """Submit inside the caller's own open transaction, on a connection to this ledger's file."""
        check_own_ids(jobs)
        return submit_on(connection, actor, jobs, self.writer.now())

    # --- wait ----------------------------------------------------------------------------------------------------

    async def wait_for_work(self, types: Sequence[str], timeout_s: float) -> None:
        rung = self._notifier.wait(self._found_nothing_at.of(types))
        if rung.done():
            self._found_nothing_at.note(types, self._notifier.notifications)
            return
        hints = {rung}
        try:
            with nullcontext() if self._watch is None else self._watch.attend(types) as ready:
                if ready is not None:
                    hints.add(self._committed_elsewhere(types, ready.wait(0)))
                await asyncio.wait(hints, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._found_nothing_at.note(types, self._notifier.notifications)
            self._notifier.leave(rung)
            for hint in hints:
                hint.cancel()

    def _committed_elsewhere(self, types: Sequence[str], woken: asyncio.Future[None]) -> asyncio.Future[None]:
        """A future that completes when another process has committed and a job of these types can be claimed."""
        commits = 0 if self._watch is None else self._watch.commits
        if self._commits_seen.of(types) == commits:
            return woken
        self._commits_seen.note(types, commits)  # nobody waited for these types when they were noticed
        return asyncio.ensure_future(self._ready_or(types, woken))

    async def _ready_or(self, types: Sequence[str], woken: asyncio.Future[None]) -> None:
        """Return when a job of these types can be claimed now, or else when the future completes."""
        with suppress(LedgerError):  # only a hint is lost: the caller's own polling reports what is wrong
            if await self.reader.run(lambda tx: reads.any_ready(tx.db, types), size=len(types)):
                return
        await woken

    def events_mark(self) -> int:
        return self._events.notifications

    async def wait_for_events(self, mark: int, timeout_s: float) -> None:
        rung = self._events.wait(mark)
        try:
            with nullcontext() if self._watch is None else self._watch.attend():
                await asyncio.wait({rung}, timeout=timeout_s)
        finally:
            self._events.leave(rung)

    # --- read ----------------------------------------------------------------------------------------------------

    async def queues(self, *, exact: bool = False) -> list[QueueDepth]:
        return await self._queue_counts.read(self._count_queues, exact=exact)

    def connections(self) -> list[ConnectionUse]:
        lanes = {"read": self.reader} if self.reader is not self.writer else {}
        return [ConnectionUse(name, lane.waiting) for name, lane in {"write": self.writer, **lanes}.items()]

    async def ping(self) -> None:
        path = self._target.path
        if self._file is None or path is None:
            return
        self._file.check()
        if not has_room(path):
            raise LedgerFull(ledger=path)
        damage = self.reader.damage or self.writer.damage
        if damage is not None:  # its pages may be in memory, also after the file was restored
            raise LedgerDamaged(reason=f"{damage.data['reason']}; restart this process when the ledger is restored")

    async def now(self) -> datetime:
        return rows.moment(self.writer.now())

    async def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        after = 0
        while True:
            page, after = await self.reader.run(partial(reads.histories, after=after, limit=batch))
            if not page:
                return
            for history in page:
                yield history

    async def inspect(self) -> list[Finding]:
        return await self.reader.run(lambda tx: schema.inspect(tx, self._target))

"""The PostgreSQL ledger: the port, implemented by the functions in `functions/`.

Calls of one kind go through one lane; concurrent submits share a transaction. The functions check the actor against the
connection's database role, so that the database grants roles, not this program.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from trellis.auth.principals import check_held_limit, require, require_home_issuer
from trellis.engine.admin_acts import AdminAct, NewAct, checked_act, reason, this_node
from trellis.engine.alerts import AlertChange, AlertRound
from trellis.engine.batches import Batcher, SingleFlight
from trellis.engine.errors import (
    LedgerUnavailable,
    OptionInvalid,
    OutcomeUnknown,
)
from trellis.engine.job_batches import BatchSubmitted, NewBatch, check_batch_jobs
from trellis.engine.job_changes import ChangedJobs, ChangeOrder, JobToChange, check_order
from trellis.engine.jobs import (
    REMARKS_MAX,
    RESTORE_MAX,
    SUBMIT_MAX,
    Actor,
    AlikeJobs,
    CancelMode,
    CancelRequested,
    Epoch,
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
    SignalSent,
    StepApplied,
    Submitted,
    Subscription,
    Turn,
    TurnResult,
    TypeOptions,
    all_created,
    check_own_ids,
    different_ones,
    ids_of,
)
from trellis.engine.ledger import RETENTION
from trellis.engine.outage_log import Failures
from trellis.engine.records import (
    AuditHead,
    ConnectionUse,
    JobFilter,
    JobToRestore,
    PlannedRemoval,
    RetentionOptions,
    RetentionReport,
    SweepOptions,
    SweepReport,
)
from trellis.engine.request_keys import CANCEL_ANSWERS, REQUEUE_ANSWERS, SIGNAL_ANSWERS, SUBMIT_ANSWERS
from trellis.engine.schedules import ScheduleRecord
from trellis.engine.text import storable
from trellis.ledgers.measures import measured
from trellis.ledgers.postgres import alerts as alert_rows
from trellis.ledgers.postgres import job_changes, moves, request_keys, restore, rows, submit
from trellis.ledgers.postgres import turn as turns
from trellis.ledgers.postgres.connection import (
    APPLICATION_NAME,
    PostgresConnection,
    PostgresError,
    PostgresRow,
    UniqueViolation,
    check_url,
)
from trellis.ledgers.postgres.event_summaries import EventSummaries
from trellis.ledgers.postgres.lanes import CONNECTIONS_MAX, LaneOptions, PostgresLane
from trellis.ledgers.postgres.migrate import check_version
from trellis.ledgers.postgres.notifier import NOTIFIER_CONNECTIONS, CarriedHint, PostgresNotifier
from trellis.ledgers.postgres.reads import PostgresReads
from trellis.ledgers.postgres.rows import ages_json, stored_windows
from trellis.ledgers.postgres.submit import SubmitCall, SubmitCalls, SubmitPart
from trellis.ledgers.queue_counts import QueueCounts
from trellis.ledgers.refusals import (
    check_alerts,
    check_annotation,
    check_children_of,
    check_declared,
    check_job_signal,
    check_may,
    check_next_head,
    check_retention,
    check_signals,
)
from trellis.ledgers.retention_plan import PlannedGroup, planned_removals, stored_ages
from trellis.lifecycles import SIGNAL_TYPES, Trigger

HOLDER_TIMEOUT_S = 5.0
"""A renewal that takes longer is repeated on a new connection: a silent connection must not outlast a lease."""
PING = """do $$ begin
  if current_setting('transaction_read_only') = 'on' then
    raise sqlstate '25006' using message = 'the server takes no writes from this login';
  end if;
end $$"""
PING_S = 1.0
"""The time-out of `ping`."""
JOURNAL_BATCH_MAX = 500
ACTORS_CACHED_MAX = 10_000
BATCH_MAX = 500
"""The most concurrent moves, or steps, that share a transaction; fewer if they carry much data."""
CARRIED_BYTES = 65_536
"""Data of this size counts as one more move."""
AnswerT = TypeVar("AnswerT")


@measured
class PostgresLedger(PostgresReads):
    turns_at_once = 2
    name_prefix = ""

    def __init__(self, url: str, options: LaneOptions, *, hints: bool) -> None:
        self.url = url
        self._failures = failures = Failures("connections")
        self._submit_lane = PostgresLane(url, options, failures)
        marks = turns.LowWaterMarks()
        self._turners = [
            turns.TurnCaller(PostgresLane(url, options, failures), marks) for _ in range(self.turns_at_once)
        ]
        self._holder_lane = PostgresLane(
            url, replace(options, call_timeout_s=min(options.call_timeout_s, HOLDER_TIMEOUT_S)), failures
        )
        self._note_lane = PostgresLane(url, options, failures)
        self._admin_lane = PostgresLane(url, options, failures)
        self._move_lane = PostgresLane(url, options, failures)
        self._steps_lane = PostgresLane(url, options, failures)
        self._read_lane = PostgresLane(url, options, failures)
        self._queue_counts = QueueCounts()
        self._summaries = EventSummaries()
        self._ping_lane = PostgresLane(url, replace(options, call_timeout_s=PING_S, connect_timeout_s=PING_S), failures)
        self._notifier = PostgresNotifier(url, options, on=hints)
        assert len(self._lanes()) + NOTIFIER_CONNECTIONS == CONNECTIONS_MAX, "the number that operators plan with"
        self._actors: dict[tuple[str, str], int] = {}
        self._node = options.node or this_node()
        self._new_actors: SingleFlight[Actor, int] = SingleFlight(self._register_actor)
        self._new_types: SingleFlight[str, int] = SingleFlight(self._register_type)
        self._types: dict[str, int] = {}
        self._type_names: dict[int, str] = {}
        self._unique_types: set[str] = set()
        """Types that declare unique jobs, as far as this process was told. Their jobs are submitted one by one."""
        self._submits: Batcher[SubmitCall, list[Submitted | Mismatch]] = Batcher(
            self._submit_batch, lambda item: len(item[1]), SUBMIT_MAX, alone=True
        )
        self._journals: Batcher[tuple[Lease, str, bytes], bytes | LeaseLost] = Batcher(
            self._journal_batch, lambda _: 1, JOURNAL_BATCH_MAX
        )
        self._moves: Batcher[tuple[Move, tuple[object, ...]], PostgresRow] = Batcher(
            self._move_batch, lambda item: 1 + len(item[0].data or b"") // CARRIED_BYTES, BATCH_MAX
        )
        self._steps: Batcher[turns.StepsCall, list[PostgresRow]] = Batcher(
            self._steps_batch, lambda call: call.steps + len(call.told) // CARRIED_BYTES, BATCH_MAX
        )

    @classmethod
    async def open(
        cls, url: str, *, hints: bool = True, options: LaneOptions | None = None, part: str | None = None
    ) -> Self:
        """Open a migrated database. Raises if it cannot be used."""
        check_url(url)
        chosen = options or LaneOptions()
        if part is not None:
            chosen = replace(chosen, application_name=f"{APPLICATION_NAME}-{part}")
        ledger = cls(url, chosen, hints=hints)
        try:
            ledger.name_prefix = await ledger._admin_lane.call("open", "", lambda c, _: _check(c, url), window_s=0)
        except OutcomeUnknown as error:
            await ledger.close()
            raise LedgerUnavailable(reason="the connection was lost while it was opened") from error
        except BaseException:
            await ledger.close()
            raise
        for _, lane in ledger._lanes():
            lane.was_let_in = True
        return ledger

    async def close(self) -> None:
        """Finish calls in progress and close all connections."""
        await self._submits.close()
        await self._journals.close()
        await self._moves.close()
        await self._steps.close()
        await self._new_actors.close()
        await self._new_types.close()
        await self._notifier.close()
        await asyncio.gather(*(lane.close() for _, lane in self._lanes()))
        self._failures.left()

    def _lanes(self) -> list[tuple[str, PostgresLane]]:
        """The connections of this process, by what they are for."""
        return [
            ("submit", self._submit_lane),
            *(("turn", turner.lane) for turner in self._turners),
            ("holder", self._holder_lane),
            ("note", self._note_lane),
            ("admin", self._admin_lane),
            ("move", self._move_lane),
            ("steps", self._steps_lane),
            ("read", self._read_lane),
            ("ping", self._ping_lane),
        ]

    def connections(self) -> list[ConnectionUse]:
        calls: dict[str, int] = {}
        for name, lane in self._lanes():
            calls[name] = calls.get(name, 0) + lane.waiting
        return [ConnectionUse(*one) for one in calls.items()]

    async def ping(self) -> None:
        """Raise if the server does not answer, or takes no writes."""
        await self._ping_lane.call("ping", "", lambda c, _: c.execute(PING), window_s=0)

    # --- names -----------------------------------------------------------------------------------------------------

    async def _actor(self, actor: Actor) -> int:
        known = self._actors.get((actor.role, actor.name))
        return await self._new_actors.call(actor) if known is None else known

    async def _register_actor(self, actor: Actor) -> int:
        named = (actor.name, actor.role.code, self._node)
        number: int = await self._admin("register_actor", "select register_actor($1, $2, $3)", *named)
        if len(self._actors) >= ACTORS_CACHED_MAX:
            self._actors.clear()
        self._actors[actor.role, actor.name] = number
        return number

    async def _type(self, name: str) -> int:
        known = self._types.get(name)
        return await self._new_types.call(name) if known is None else known

    async def _register_type(self, name: str) -> int:
        number: int = await self._admin("type_id", "select type_id($1)", name)
        self._types[name] = number
        self._type_names[number] = name
        return number

    async def _admin(self, verb: str, sql: str, *args: object) -> Any:
        return await self._admin_lane.call(verb, "", lambda c, _: c.fetchval(sql, *args))

    # --- write -----------------------------------------------------------------------------------------------------

    async def submit(
        self, actor: Actor, jobs: Sequence[NewJob], *, key: RequestKey | None = None
    ) -> list[Submitted | Mismatch]:
        if len(jobs) > SUBMIT_MAX:
            raise OptionInvalid(option="jobs", value=len(jobs), expected=f"at most {SUBMIT_MAX} in one call")
        check_own_ids(jobs)
        number = await self._submitter(actor, jobs)
        if key is not None and jobs:
            answers = await self._submit_lane.call(
                "submit", key.given, lambda c, repeat: self._submit_with_key(c, number, jobs, key, repeat=repeat)
            )
            self._notifier.notify()
            return answers
        return await self._submits.put((number, jobs if isinstance(jobs, AlikeJobs) else tuple(jobs)))

    async def _submitter(self, actor: Actor, jobs: Sequence[NewJob]) -> int:
        """The number of an actor that may submit these jobs, whose types are registered. Raises NotAllowed."""
        kinds = different_ones(jobs)
        for lifecycle in {job.lifecycle for job in kinds}:
            check_may(actor.role, Trigger.SUBMIT, lifecycle)
        for type_ in {job.type for job in kinds}:
            if type_ not in self._types:
                await self._type(type_)
        return await self._actor(actor)

    async def submit_batch(self, actor: Actor, batch: NewBatch) -> BatchSubmitted:
        check_batch_jobs(batch.completion, batch.members)
        number = await self._submitter(actor, (batch.completion, *batch.members))

        async def work(connection: PostgresConnection, repeat: bool) -> BatchSubmitted:  # noqa: FBT001 - a lane's call
            part = self._part_of(connection, number, repeat=repeat)
            return await self._learning(lambda: submit.submit_batch(connection, number, batch, part))

        submitted = await self._submit_lane.call("submit_batch", batch.completion.job_id, work)
        self._notifier.notify()
        return submitted

    def _part_of(self, connection: PostgresConnection, actor: int, *, repeat: bool) -> SubmitPart:
        """Submits some jobs in the transaction that is open on the connection."""

        async def submit_part(jobs: Sequence[NewJob]) -> list[Submitted | Mismatch]:
            calls = [(actor, tuple(jobs))]
            return (await self._submit_calls_once(connection, calls, None, repeat=repeat, compare=False))[0]

        return submit_part

    async def _submit_with_key(
        self, connection: PostgresConnection, actor: int, jobs: Sequence[NewJob], key: RequestKey, *, repeat: bool
    ) -> list[Submitted | Mismatch]:
        """Submit in the transaction that stores the request's key."""
        change = partial(submit.submit_keyed, connection, actor, jobs, self._types, repeat=repeat, key=key)
        answers = await request_keys.answer_once(connection, key, SUBMIT_ANSWERS, change)
        if not repeat:
            return answers
        own = {job.job_id for job in jobs}  # with these ids, it was an earlier try of this call that made the jobs
        return [a._replace(created=True) if isinstance(a, Submitted) and a.job_id in own else a for a in answers]

    async def _submit_batch(self, calls: Sequence[SubmitCall]) -> list[list[Submitted | Mismatch]]:
        with self._notifier.work() as hint:
            return await self._submit_lane.call(
                "submit", f"{len(calls)} calls", lambda c, repeat: self._submit_calls(c, calls, hint, repeat=repeat)
            )

    async def _submit_calls(
        self, connection: PostgresConnection, calls: SubmitCalls, hint: CarriedHint | None, *, repeat: bool
    ) -> list[list[Submitted | Mismatch]]:
        """One transaction for calls of many callers. If an id exists, each job is compared with the one that has it."""
        once = partial(self._submit_calls_once, connection, calls, hint, repeat=repeat, compare=False)
        try:
            return await self._learning(once)
        except UniqueViolation:
            return await self._learning(partial(once, compare=True))

    async def _learning(self, transaction: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Make a transaction of submits. The types whose jobs are unique are learned from its refusals."""
        while True:
            try:
                return await transaction()
            except PostgresError as error:
                unique = submit.type_to_submit_with_keys(error)
                if unique is None or unique in self._unique_types:
                    raise
                self._unique_types.add(unique)

    async def _submit_calls_once(
        self, c: PostgresConnection, calls: SubmitCalls, hint: CarriedHint | None, *, repeat: bool, compare: bool
    ) -> list[list[Submitted | Mismatch]]:
        """Submit each actor's calls of plain jobs set-wise, and calls with a key, or to `compare`, one by one, in order."""
        compare = compare or repeat
        actor, jobs = calls[0]
        alike = None if compare else submit.joined(calls)
        is_plain = alike is not None and different_ones(alike)[0].type not in self._unique_types
        if alike is not None and is_plain and await submit.submit_alike(c, actor, alike, self._types, hint):
            return [all_created(ids_of(jobs)) for _, jobs in calls]
        if len(calls) == 1 and len(jobs) == 1:
            return [[await submit.submit_one(c, actor, jobs[0], self._types, hint, repeat=repeat)]]
        plain, keyed = submit.grouped(calls, self._unique_types, compare=compare)
        if len(plain) + len(keyed) == 1:
            by_number = await submit.submit_groups(c, plain, keyed, self._types, repeat=repeat)
        else:
            async with c.transaction():
                await submit.lock_waiting(c, [job for jobs in keyed.values() for job in jobs])
                by_number = await submit.submit_groups(c, plain, keyed, self._types, repeat=repeat)
        return [
            [by_number.get(id(job)) or Submitted(job_id=job.job_id, created=True) for job in jobs] for _, jobs in calls
        ]

    async def turn(self, turn: Turn) -> TurnResult:
        steps = turns.sort_steps(turn.advances, turn.claim, turn.actor.role)
        actor = await self._actor(turn.actor)
        claim = turn.claim
        types = [await self._type(t.type) for t in claim.types] if claim else []
        if claim is not None:
            check_may(turn.actor.role, Trigger.CLAIM, claim.lifecycle)
            self._notifier.skip_next_notify()
        if claim is None and steps.one_by_one:
            rows = await self._steps.put(turns.steps_call(actor, steps))
        else:
            turner = min(self._turners, key=lambda turner: turner.lane.waiting)
            rows = await turner.turn(actor, steps, claim, types)
        if rows:
            self._notifier.notify_events()
        if any(row["kind"] == turns.RESUMED for row in rows):
            self._notifier.notify()
        return turns.turn_answers(turn.advances, steps, rows, self._type_names, claim)

    async def _steps_batch(self, calls: Sequence[turns.StepsCall]) -> list[list[PostgresRow]]:
        return await self._steps_lane.call("turn", f"{len(calls)} turns", lambda c, _: turns.run_turns(c, calls))

    async def renew(self, actor: Actor, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
        # If a caller has two epochs of a job, only the newest counts: the older lease is lost.
        ordered = sorted({lease.key: lease for lease in sorted(leases)}.values())
        number = await self._actor(actor)
        keys, epochs = [lease.key for lease in ordered], [lease.epoch for lease in ordered]
        rows = await self._holder_lane.call(
            "renew", "", lambda c, _: c.fetch("select * from renew($1, $2, $3)", number, keys, epochs)
        )
        renewed = {(row["id"], row["epoch"]): Renewed(cancel=row["cancel"]) for row in rows}
        return [renewed.get((lease.key, lease.epoch)) or LeaseLost(lease) for lease in leases]

    async def _note(self, verb: str, sql: str, *args: object) -> list[PostgresRow]:
        """A holder's writes besides steps, and that a process is there. They use their own lane, so that heartbeats never wait behind them."""
        return await self._note_lane.call(verb, "", lambda c, _: c.fetch(sql, *args))

    async def save_checkpoint(self, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
        rows = await self._note("save_checkpoint", "select save_checkpoint($1, $2, $3)", lease.key, lease.epoch, body)
        return LeaseLost(lease) if rows[0][0] is None else StepApplied(rows[0][0])

    async def journal(self, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
        return await self._journals.put((lease, entry, body))

    async def _journal_batch(self, entries: Sequence[tuple[Lease, str, bytes]]) -> list[bytes | LeaseLost]:
        rows = await self._note(
            "journal",
            "select * from journal_entries($1, $2, $3, $4)",
            [lease.key for lease, _, _ in entries],
            [lease.epoch for lease, _, _ in entries],
            [entry for _, entry, _ in entries],
            [body for _, _, body in entries],
        )
        kept = {row["n"]: row["body"] for row in rows}
        return [kept[n] if n in kept else LeaseLost(lease) for n, (lease, _, _) in enumerate(entries, start=1)]

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
        check_children_of(lease, jobs)
        for job in jobs:
            await self._type(job.type)
        number = await self._actor(actor)
        cancelled = [job.job_id not in abandoned for job in jobs]

        async def work(connection: PostgresConnection, _: bool) -> bytes | LeaseLost:  # noqa: FBT001 - a lane's call
            part = self._part_of(connection, number, repeat=False)
            return await self._learning(
                lambda: submit.spawn(connection, lease, jobs, (entry, body), part, cancelled=cancelled)
            )

        stored = await self._submit_lane.call("spawn", lease.job_id, work)
        self._notifier.notify()
        return stored

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
        require(actor, "send_signal")
        check_job_signal(name, body, signal_key)
        number = await self._actor(actor)
        arguments = (number, job_id, name, body, signal_key, request_keys.key_argument(key))

        async def send(connection: PostgresConnection, *, repeat: bool) -> SignalSent | None:
            sql = "select * from send_signal($1, $2, $3, $4, $5, $6, $7)"
            return moves.signal_sent(job_id, name, await connection.fetch(sql, *arguments, repeat))

        sent = await self._note_lane.call(
            "send_signal",
            job_id,
            lambda c, repeat: request_keys.answer_once(c, key, SIGNAL_ANSWERS, lambda: send(c, repeat=repeat)),
        )
        self._notifier.notify()
        return sent

    async def annotate(self, actor: Actor, job_id: JobId, type_: str, body: bytes) -> bool:
        require(actor, "remark")
        check_annotation(type_, body)
        arguments = (await self._actor(actor), job_id, SIGNAL_TYPES.index(type_) + 1, body, REMARKS_MAX)
        return await self._note_lane.call(
            "remark", job_id, lambda c, repeat: c.fetchval("select remark($1, $2, $3, $4, $5, $6)", *arguments, repeat)
        )

    async def signal(self, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
        check_signals(signals)
        rows = await self._note(
            "signal",
            "select add_signals($1, $2, $3, $4)",
            lease.key,
            lease.epoch,
            [SIGNAL_TYPES.index(type_) + 1 for type_, _ in signals],
            [data for _, data in signals],
        )
        return LeaseLost(lease) if rows[0][0] is None else StepApplied(rows[0][0])

    async def move(self, actor: Actor, move: Move) -> Moved | NotMoved:
        arguments = moves.move_arguments(await self._actor(actor), move)
        if move.key is not None:
            answer = await self._move_lane.call(
                "move", move.request_id, lambda c, _: moves.move_with_key(c, move, arguments, actor.role)
            )
            self._notifier.notify()
            return answer
        try:
            row = await self._moves.put((move, arguments))
        except OutcomeUnknown as error:  # unknown for the whole batch; this caller repeats its own call
            raise OutcomeUnknown(verb="move", request=move.request_id) from error
        answer = moves.move_answer(move, row, actor.role)
        if isinstance(answer, Moved) and answer.lease is not None:
            self._notifier.notify_events()  # the job is held now: there is no new work
        else:
            self._notifier.notify()
        return answer

    async def _move_batch(self, moved: Sequence[tuple[Move, tuple[object, ...]]]) -> list[PostgresRow]:
        calls = [arguments for _, arguments in moved]
        return await self._move_lane.call("move", f"{len(calls)} moves", lambda c, _: moves.run_moves(c, calls))

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
        arguments = (await self._actor(actor), job_id, mode is CancelMode.SOFT, request_id, grace_s, storable(cause))
        answer = await self._admin_lane.call(
            "cancel",
            request_id,
            lambda c, _: request_keys.answer_once(
                c, key, CANCEL_ANSWERS, lambda: moves.cancel(c, job_id, arguments, actor.role, key)
            ),
        )
        if not isinstance(answer, CancelRequested):
            self._notifier.notify_events()
        return answer

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
        arguments = (await self._actor(actor), request_id, storable(cause))
        answers = await self._admin_lane.call(
            "requeue",
            request_id,
            lambda c, _: request_keys.answer_once(
                c, key, REQUEUE_ANSWERS, lambda: moves.requeue(c, arguments, jobs, actor.role, limit=limit, key=key)
            ),
        )
        self._notifier.notify()
        return answers

    async def change_jobs(self, actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange]) -> ChangedJobs:
        check_order(order, jobs)
        number = await self._actor(actor)
        changed = await self._admin_lane.call(
            "change_jobs", order.request_id, lambda c, _: job_changes.change_jobs(c, number, actor, order, jobs)
        )
        self._notifier.notify()
        return changed

    async def sweep(self, actor: Actor, options: SweepOptions) -> SweepReport:
        require(actor, "sweep")
        number, windows = await self._actor(actor), stored_windows(options)
        rows = await self._admin_lane.call(
            "sweep",
            "",
            lambda c, _: c.fetch(
                "select * from sweep($1, $2, $3, $4, $5)",
                number,
                options.elect,
                options.interval_s,
                options.batch,
                windows,
            ),
        )
        report = SweepReport(**dict(rows[0]))
        if report.due or report.expired or report.promoted:
            self._notifier.notify()
        elif report.exhausted or report.deadlines or report.cancelled:
            self._notifier.notify_events()
        return report

    async def retain(self, options: RetentionOptions, *, by: Actor = RETENTION) -> RetentionReport:
        require(by, "retain")
        check_retention(options)
        times = (options.ended_s, options.signals_s, options.unread_s, options.batch)
        arguments = (
            await self._actor(by),
            ages_json(options),
            *times,
            reason(options.cause),
            options.from_the_start,
        )
        rows = await self._admin_lane.call(
            "retain",
            "",
            lambda c, _: c.fetch("select * from retain($1, $2, $3, $4, $5, $6, $7, $8)", *arguments),
        )
        return RetentionReport(**dict(rows[0]))

    async def plan_retention(self, options: RetentionOptions) -> list[PlannedRemoval]:
        check_retention(options)
        groups = await self.fetch("select * from retention_plan($1, $2)", ages_json(options), options.unread_s)
        keep_s = {code: age.keep_s for code, age in stored_ages(options).items()}
        return planned_removals([PlannedGroup(**dict(row)) for row in groups], keep_s, lambda at: at)

    async def pause(self, actor: Actor, type_: str, *, paused: bool, cause: str | None = None) -> None:
        require(actor, "pause")
        arguments = (await self._actor(actor), type_, paused, reason(cause))
        await self._admin("pause", "select set_paused($1, $2, $3, $4)", *arguments)
        self._notifier.notify()

    async def limit_rate(
        self, actor: Actor, type_: str, per_second: float | None, burst: int = 1, *, cause: str | None = None
    ) -> None:
        require(actor, "limit_rate")
        if per_second is not None and per_second <= 0:
            raise OptionInvalid(option="per_second", value=per_second, expected="above 0, or None for no limit")
        arguments = (await self._actor(actor), type_, per_second, burst, reason(cause))
        await self._admin("limit_rate", "select set_rate($1, $2, $3, $4, $5)", *arguments)
        self._notifier.notify_events()

    async def declare_types(self, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool = False) -> None:
        require(actor, "declare_types")
        check_declared(types)
        await self._admin(*submit.declaring(await self._actor(actor), types, only_new=only_new))

    async def save_schedule(self, actor: Actor, record: ScheduleRecord, *, cause: str | None = None) -> bool:
        require(actor, "save_schedule")
        target = (record.name, record.version, record.spec.to_json(), record.spec.topic is not None, record.paused)
        times = (record.since, record.next_at)
        arguments = (await self._actor(actor), *target, record.owner, *times, reason(cause))
        sql = "select save_schedule($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
        saved = await self._admin_lane.call("save_schedule", record.name, lambda c, _: c.fetchval(sql, *arguments))
        self._notifier.notify_events()
        return saved

    async def remove_schedule(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        require(actor, "remove_schedule")
        arguments = (await self._actor(actor), name, reason(cause))
        removed = await self._admin("remove_schedule", "select remove_schedule($1, $2, $3)", *arguments)
        self._notifier.notify_events()
        return removed

    async def advance_schedule(self, actor: Actor, record: ScheduleRecord) -> bool:
        require(actor, "advance_schedule")
        times = (record.since, record.next_at, record.firing, record.last_at)
        arguments = (await self._actor(actor), record.name, record.version, *times, record.last_job, record.skipped)
        sql = "select advance_schedule($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        return await self._admin("advance_schedule", sql, *arguments)

    async def limit_key(self, actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
        require(actor, "limit_key")
        if limit < 0:
            raise OptionInvalid(option="limit", value=limit, expected="0 or more; 0 hands out nothing")
        arguments = (await self._actor(actor), key, limit, reason(cause))
        await self._admin("limit_key", "select set_key_limit($1, $2, $3, $4)", *arguments)
        self._notifier.notify()

    async def limit_held(self, actor: Actor, type_: str, limit: int | None, *, cause: str | None = None) -> None:
        require(actor, "limit_held")
        check_held_limit(limit)
        arguments = (await self._actor(actor), type_, limit, reason(cause))
        await self._admin("limit_held", "select set_held_max($1, $2, $3, $4)", *arguments)
        self._notifier.notify()

    async def subscribe(
        self, actor: Actor, name: str, *, lease_s: float, reads: bool = True, first: str | None = None
    ) -> Subscription | None:
        require(actor, "follow")
        number = await self._actor(actor)
        arguments = (number, name, lease_s, reads, first)
        rows = await self._admin_lane.call(
            "follow", name, lambda c, _: c.fetch("select * from follow($1, $2, $3, $4, $5)", *arguments)
        )
        return Subscription(name=name, epoch=Epoch(rows[0]["epoch"]), position=rows[0]["place"]) if rows else None

    async def ack(self, following: Subscription, position: str | None, *, lease_s: float) -> bool:
        arguments = (following.name, following.epoch, position, lease_s)
        return await self._admin("followed", "select followed($1, $2, $3, $4)", *arguments)

    async def release_retention(self, actor: Actor, name: str, *, cause: str | None = None) -> bool:
        require(actor, "leave_behind")
        arguments = (await self._actor(actor), name, reason(cause))
        done = await self._admin("leave_behind", "select leave_behind($1, $2, $3)", *arguments)
        self._notifier.notify_events()
        return done

    async def set_home_issuer(
        self, actor: Actor, issuer: str, *, replaces: str | None = None, cause: str | None = None
    ) -> str:
        require_home_issuer(actor, issuer, replaces)
        named = (await self._actor(actor), issuer, replaces, reason(cause))
        recorded = await self._admin("set_home_issuer", "select set_home_issuer($1, $2, $3, $4)", *named)
        self._notifier.notify_events()
        return recorded

    async def record_act(self, actor: Actor, act: NewAct) -> str:
        require(actor, "record_act")
        arguments = rows.act_arguments(await self._actor(actor), checked_act(act))
        act_id = await self._admin(
            "record_act", "select record_act($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)", *arguments
        )
        self._notifier.notify_events()
        return act_id

    async def restore_acts(self, actor: Actor, lost: Sequence[AdminAct]) -> None:
        require(actor, "restore")
        await self._admin("restore_acts", "select restore_acts($1, $2)", await self._actor(actor), rows.acts_json(lost))

    async def acts_published(self, actor: Actor, published: Sequence[AdminAct]) -> None:
        require(actor, "publish_acts")
        numbers = [one.no for one in published]
        await self._admin("acts_published", "select acts_published($1, $2)", await self._actor(actor), numbers)

    async def observe_alerts(self, actor: Actor, checked: AlertRound) -> list[AlertChange]:
        require(actor, "observe_alerts")
        check_alerts(checked)
        for type_ in checked.report_types:
            await self._type(type_)
        number = await self._actor(actor)

        async def work(connection: PostgresConnection, repeat: bool) -> list[AlertChange]:  # noqa: FBT001 - a lane's call
            async def submit_reports(same: PostgresConnection, reports: list[NewJob]) -> None:
                await submit.submit_keyed(same, number, reports, self._types, repeat=repeat)

            return await alert_rows.observe(connection, number, checked, submit_reports)

        changes = await self._admin_lane.call("observe_alerts", "", work)
        if checked.report_types:  # it may have reported what another evaluator changed
            self._notifier.notify()
        return changes

    async def extend_audit_chain(
        self, actor: Actor, head: AuditHead, *, after: AuditHead | None, acts: Sequence[AdminAct] = ()
    ) -> bool:
        require(actor, "seal")
        check_next_head(head, after)
        now, before = rows.head_arguments(head), rows.head_arguments(after)
        arguments = (await self._actor(actor), *now, *before, [act.no for act in acts])
        statement = "select extend_audit_chain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
        return await self._admin("extend_audit_chain", statement, *arguments)

    async def unsubscribe(self, following: Subscription) -> None:
        await self.ack(following, None, lease_s=0.0)

    async def restore(self, actor: Actor, jobs: Sequence[JobToRestore]) -> list[bool]:
        require(actor, "restore")
        if len(jobs) > RESTORE_MAX:
            raise OptionInvalid(option="jobs", value=len(jobs), expected=f"at most {RESTORE_MAX} in one call")
        batch, number = restore.RestoreBatch(await self.now()), await self._actor(actor)
        for job in jobs:
            batch.add(job)
        put_back = await self._admin_lane.call("restore", "", lambda c, _: batch.put_back(c, number))
        self._notifier.notify()
        return [job.job_id in put_back for job in jobs]

    async def heartbeat_worker(self, actor: Actor, info: bytes | None) -> None:
        await self._note("beat", "select beat($1, $2)", await self._actor(actor), info)

    async def wait_for_work(self, types: Sequence[str], timeout_s: float) -> None:  # noqa: ARG002 one bell for all types
        await self._notifier.wait(timeout_s)

    def events_mark(self) -> int:
        return self._notifier.events

    async def wait_for_events(self, mark: int, timeout_s: float) -> None:
        await self._notifier.wait_for_events(mark, timeout_s)


async def _check(connection: PostgresConnection, url: str) -> str:
    """The prefix that the database adds to names of this login. Raises LedgerNotMigrated."""
    await check_version(connection, url)
    return await connection.fetchval("select trellis.name_prefix()")

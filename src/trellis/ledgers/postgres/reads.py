"""Reads on PostgreSQL: jobs, events and dead letters."""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import LiteralString

from trellis.engine.admin_acts import ACTS_MAX, AdminAct
from trellis.engine.alerts import ALERTS_MAX, STAGE_STEP_TYPES, Alert, AlertMark
from trellis.engine.errors import OptionInvalid
from trellis.engine.job_changes import JobSelection, SelectedPage
from trellis.engine.jobs import (
    DECLARED_MAX,
    HEADS_MAX,
    JOB_SIGNALS_MAX,
    HeldLease,
    JobId,
    JobOutcome,
    JobSignal,
    Mismatch,
    RequestKey,
    Submitted,
    TypeOptions,
)
from trellis.engine.positions import KEY_MAX, is_of_sqlite, of_postgres, to_postgres
from trellis.engine.records import (
    DEAD_LETTERS_COUNTED_MAX,
    NOT_QUEUED,
    AuditHead,
    ChildPage,
    DeadLetter,
    Event,
    FeedPage,
    Finding,
    FindingSeverity,
    Job,
    JobContents,
    JobFilter,
    JobHistory,
    JobPage,
    JobPlace,
    KeyOverLimit,
    LedgerFigures,
    QueueDepth,
    RecordedEvent,
    SampledEvent,
    Signal,
    SubscriberRecord,
    UnpairedArtifact,
    WaitingType,
    WorkerRecord,
)
from trellis.engine.request_keys import StoredRequest
from trellis.engine.restoration import may_have_letter
from trellis.engine.schedules import DUE_MAX, SCHEDULES_MAX, DueSchedules, ScheduleRecord
from trellis.ledgers.children import ChildMark, children_after
from trellis.ledgers.postgres import alerts as alert_rows
from trellis.ledgers.postgres import job_selection, request_keys, restore, rows
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow, is_pooled
from trellis.ledgers.postgres.event_summaries import EventSummaries
from trellis.ledgers.postgres.findings import findings
from trellis.ledgers.postgres.lanes import PostgresLane
from trellis.ledgers.postgres.submit import CALLER_SCOPE
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.queue_counts import COUNTED_MAX, QueueCounts
from trellis.ledgers.refusals import (
    check_children,
    check_expiring,
    check_ids,
    check_peek_limit,
    check_sample,
    check_selected,
    event_codes,
    known_event_code,
    lifecycle_named,
    state_pairs,
)
from trellis.ledgers.selections import position_in
from trellis.lifecycles import BY_CODE, LIFECYCLES, Lifecycle, Phase, Trigger, event_code
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.contract import completed_states, final_states
from trellis.lifecycles.leased_job import LEASED_JOB

VERSION_MAX = 2**31 - 1
FEED_BATCHES = 64
FEED_BATCHES_NARROWED = 2_000
"""Feed positions per query when the lifecycles of FREQUENT are left out: few events match, and an index finds them."""
FREQUENT = frozenset({LEASED_JOB.code, BUS_JOB.code})
"""Lifecycles that the index `event_infrequent` leaves out, so that their events do not pay for it."""
FREQUENT_TYPES = frozenset(
    event_code(transition.event)
    for lifecycle, triggers in (
        (LEASED_JOB, {"submit", "claim", "start", "complete"}),
        (BUS_JOB, {"submit", "validate", "claim", "start", "complete"}),
    )
    for transition in lifecycle.transitions
    if transition.trigger in triggers
)
"""Event types of nearly every leased-job and bus-job, which the index `event_rare_type` leaves out."""
EVENTS_WINDOW = timedelta(milliseconds=5)
"""The first window of time in which events of a frequent type are looked for, unless the oldest events tell a better one."""
EVENTS_WINDOW_MIN = timedelta(milliseconds=1)
FEED_EMPTY_BATCHES_MAX = 2_048
"""The most feed positions per query after positions without matching events."""
BY_INDEX = "set local enable_seqscan = off"
"""Before a count of recent events. Without fresh statistics the planner would read all events instead of those that the
index on their time names."""
BEGINNING = (0, 0, 0)
OPEN_ONLY = "a filter by a state that is no end, without parent and reason"
QUEUED_LIFECYCLES = [one.code for one in LIFECYCLES.values() if one.name not in NOT_QUEUED]
OTHER_LIFECYCLES = [LIFECYCLES[name].code for name in NOT_QUEUED]
COMPLETED = completed_states()
FINAL = final_states()


READ_QUERIES = NamedQueries("trellis.ledgers.postgres:read.sql")


class PostgresReads:
    """The reading half of the ledger. PostgresLedger adds the writing half."""

    url: str
    name_prefix: str
    _read_lane: PostgresLane
    _queue_counts: QueueCounts
    _summaries: EventSummaries
    _events_a_place: float = 1
    """How many events a position of the feed had in the page that was read last."""

    async def fetch(self, sql: LiteralString, *args: object) -> list[PostgresRow]:
        """The rows of a read, repeated when the connection is lost."""
        return await self._read_lane.call("read", "", lambda connection, _: connection.fetch(sql, *args))

    async def _fetch_by_index(self, sql: LiteralString, *args: object) -> list[PostgresRow]:
        """The rows of a read that must not scan a whole table, whatever the planner knows about it."""
        await self._summaries.keep(self.fetch)

        async def read(connection: PostgresConnection, _: object) -> list[PostgresRow]:
            async with connection.transaction(readonly=True):
                await connection.execute(BY_INDEX)
                return await connection.fetch(sql, *args)

        return await self._read_lane.call("read", "", read)

    async def job(self, job_id: JobId) -> Job | None:
        stored = await self.fetch(READ_QUERIES.job, job_id)
        return rows.job(stored[0]) if stored else None

    async def jobs(
        self, where: JobFilter, *, limit: int, cursor: str | None = None, oldest_first: bool = False
    ) -> JobPage:
        if oldest_first:
            return await self._oldest_jobs(where, limit, cursor)
        before, pairs = _cursor(cursor), state_pairs(where)
        if where.parent_id is not None or where.correlation_id is not None or where.concurrency_key is not None:
            listed = await self._related_jobs(where, pairs, before, limit)
        elif pairs is None and not (where.reason_code or where.place or where.lifecycle or where.type):
            listed = await self.fetch(READ_QUERIES.jobs_any, before, limit)
        else:
            listed = await self._jobs_in(_states_by_place(where) if pairs is None else pairs, before, limit, where)
        return _page(listed, limit)

    async def _oldest_jobs(self, where: JobFilter, limit: int, cursor: str | None) -> JobPage:
        pairs = state_pairs(where)
        if pairs is None or not where.of_open_state:
            raise OptionInvalid(option="oldest_first", value=True, expected=OPEN_ONLY)
        listed = await self.fetch(
            READ_QUERIES.jobs_oldest,
            0 if cursor is None else _cursor(cursor),
            limit,
            _codes(pairs),
            where.type,
            _move(pairs),
            rows.STORED_PLACES[where.place],
            where.correlation_id,
            where.concurrency_key,
        )
        return _page(listed, limit)

    async def _related_jobs(
        self, where: JobFilter, pairs: list[tuple[Lifecycle, int]] | None, before: int, limit: int
    ) -> list[PostgresRow]:
        """Jobs of a parent, a correlation id or a concurrency key. Each has an index, so no other job is read."""
        lifecycle = lifecycle_named(where.lifecycle).code if where.lifecycle else None
        codes = None if pairs is None else _codes(pairs)
        rest = (codes, where.reason_code, rows.STORED_PLACES[where.place])
        of_type = (lifecycle, where.type)
        if where.parent_id is None and where.correlation_id is None:
            of_key = (where.concurrency_key, *of_type, *rest)
            return await self.fetch(READ_QUERIES.jobs_of_key, before, limit, *of_key)
        also = (where.correlation_id, where.concurrency_key)
        return await self.fetch(READ_QUERIES.jobs_related, before, limit, where.parent_id, *of_type, *also, *rest)

    async def _jobs_in(
        self, pairs: list[tuple[Lifecycle, int]], before: int, limit: int, where: JobFilter
    ) -> list[PostgresRow]:
        """Jobs in certain states, of a type or with a dead letter. Ended and unfinished jobs are in different tables."""
        wants_ended = where.place in {None, JobPlace.ENDED}
        ended = [pair for pair in pairs if _is_end(*pair)] if wants_ended else []
        if where.reason_code is not None:
            args = (_codes(ended), where.type, where.reason_code, _narrows(where))
            return await self.fetch(READ_QUERIES.jobs_buried, before, limit, *args)
        unfinished = [pair for pair in pairs if not _is_end(*pair)] if where.place is not JobPlace.ENDED else []
        return await self.fetch(
            READ_QUERIES.jobs_in,
            before,
            limit,
            _codes(unfinished),
            where.type,
            _move(unfinished),
            _codes(ended),
            rows.STORED_PLACES[where.place],
        )

    async def _type_of(self, where: JobSelection) -> int | None:
        """The number of the selection's type; None for any, 0 for an unknown type."""
        if where.type is None:
            return None
        stored = await self.fetch(READ_QUERIES.type_by_name, where.type)
        return stored[0]["id"] if stored else 0

    async def select_jobs(self, where: JobSelection, *, limit: int, cursor: str | None = None) -> SelectedPage:
        check_selected(limit)
        position, type_id = position_in(cursor), await self._type_of(where)
        return await job_selection.select_jobs(self._fetch_by_index, where, type_id, limit, position, self.name_prefix)

    async def children(self, parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
        check_children(limit)
        before = ChildMark.read(since)
        stored = await self.fetch(READ_QUERIES.children, parent_id, before.last, limit)
        anew = not before.stands(stored[0]["many"], int(stored[0]["total"]))
        if anew:
            stored = await self.fetch(READ_QUERIES.children, parent_id, 0, limit)
        new = [(row["id"], JobId(row["job_id"])) for row in stored if row["id"] is not None]
        return children_after(before, new, anew=anew)

    async def peek_ready(self, lifecycle: str, *, each: int) -> list[Job]:
        check_peek_limit(each)
        stored = await self.fetch(READ_QUERIES.heads, lifecycle_named(lifecycle).code, each, HEADS_MAX)
        return [rows.job(row) for row in stored]

    async def holds(self, job_ids: Sequence[JobId]) -> list[HeldLease]:
        check_ids(job_ids)
        return [rows.hold(row) for row in await self.fetch(READ_QUERIES.holds, list(job_ids))]

    async def expiring(self, lifecycle: str, *, within_s: float, limit: int) -> list[HeldLease]:
        check_expiring(within_s, limit)
        stored = await self.fetch(READ_QUERIES.expiring, lifecycle_named(lifecycle).code, within_s, limit)
        return [rows.hold(row) for row in stored]

    async def events(self, job_id: JobId) -> list[Event]:
        return [rows.event(row) for row in await self.fetch(READ_QUERIES.events, job_id)]

    async def events_of(self, job_ids: Sequence[JobId], *, last: int | None = None) -> dict[JobId, list[Event]]:
        by_job: dict[JobId, list[Event]] = {}
        for row in await self.fetch(READ_QUERIES.events_of_jobs, list(job_ids), last):
            by_job.setdefault(JobId(row["job_id"]), []).append(rows.event(row))
        return by_job

    async def payloads(self, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        return {JobId(row["job_id"]): row["payload"] for row in await self.fetch(READ_QUERIES.payloads, list(job_ids))}

    async def contents_of(self, job_ids: Sequence[JobId]) -> dict[JobId, JobContents]:
        contents: dict[JobId, JobContents] = {}
        for row in await self.fetch(READ_QUERIES.contents_of_jobs, list(job_ids)):
            job_id = JobId(row["job_id"])
            if job_id not in contents:
                contents[job_id] = JobContents(row["payload"], [])
            contents[job_id].events.append(rows.event(row))
        return contents

    async def acts(
        self, *, after: int = 0, limit: int = ACTS_MAX, unpublished: bool = False, unsealed: bool = False
    ) -> list[AdminAct]:
        query = READ_QUERIES.acts_unpublished if unpublished else READ_QUERIES.acts
        query = READ_QUERIES.acts_unsealed if unsealed else query
        return [rows.act(row) for row in await self.fetch(query, after, min(limit, ACTS_MAX))]

    async def signals(self, job_id: JobId, *, limit: int) -> list[Signal]:
        return [rows.signal(row) for row in await self.fetch(READ_QUERIES.signals, job_id, limit)]

    async def find_events(
        self, *, type_: str | None, correlation_id: str | None, since: datetime | None, limit: int
    ) -> list[Event]:
        code = known_event_code(type_) if type_ else None
        if correlation_id is not None:
            stored = await self.fetch(READ_QUERIES.events_by_correlation, correlation_id, since, limit, code)
        elif code is None:
            raise OptionInvalid(option="type_", value=None, expected="a type or a correlation id")
        elif code in FREQUENT_TYPES:
            stored = await self._frequent_events(code, since, limit)
        else:
            stored = await self.fetch(READ_QUERIES.events_by_rare_type, code, since, limit)
        return [rows.event(row) for row in stored]

    async def _frequent_events(self, code: int, since: datetime | None, limit: int) -> list[PostgresRow]:
        """The oldest events of a type that no index names, looked for in a window of time that grows."""
        (times,) = await self.fetch(READ_QUERIES.event_times, limit)
        begin, width = max(times["first"], since or times["first"]), EVENTS_WINDOW
        if begin == times["first"] and times["early"]:
            # About as long as the submits of a page took: a longer window may read very many events of a busy time.
            width = EVENTS_WINDOW_MIN + max(times["early"] - begin, timedelta(0)) * 1.25
        while True:
            until = begin + width if width < times["now"] - begin else None
            stored = await self._fetch_by_index(READ_QUERIES.events_by_frequent_type, code, since, limit, until)
            if until is None or len(stored) >= limit:
                return stored
            width *= 4

    async def count_events(
        self, types: Sequence[str], *, since: datetime, lifecycle: str | None = None
    ) -> dict[str, int]:
        codes = {known_event_code(type_): type_ for type_ in types}
        if lifecycle is None:
            counts = await self._fetch_by_index(READ_QUERIES.count_events, list(codes), since)
        elif (code := lifecycle_named(lifecycle).code) in FREQUENT:
            counts = await self._fetch_by_index(READ_QUERIES.count_frequent_events, list(codes), since, code)
        else:
            counts = await self.fetch(READ_QUERIES.count_infrequent_events, list(codes), since, code)
        counted = {row["type"]: row["many"] for row in counts}
        return {type_: counted.get(code, 0) for code, type_ in codes.items()}

    async def sample_events(
        self, lifecycle: str, types: Sequence[str], *, since: datetime, limit: int
    ) -> list[SampledEvent]:
        check_sample(lifecycle, limit)
        of, codes = LIFECYCLES[lifecycle], [known_event_code(type_) for type_ in dict.fromkeys(types)]
        sampled = await self.fetch(READ_QUERIES.sample_events, codes, since, of.code, limit)
        return [rows.sampled_event(row, of) for row in sampled]

    async def feed(
        self,
        position: str | None,
        *,
        limit: int,
        lifecycle: str | frozenset[str] | None = None,
        types: frozenset[str] | None = None,
    ) -> FeedPage:
        type_codes = event_codes(types)
        after = _position(await self._position_here(position))
        names = frozenset({lifecycle}) if isinstance(lifecycle, str) else lifecycle
        codes = None if names is None else sorted(lifecycle_named(name).code for name in names)
        is_narrowed = codes is not None and FREQUENT.isdisjoint(codes)
        query, at_once = (
            (READ_QUERIES.feed_infrequent_events, FEED_BATCHES_NARROWED)
            if is_narrowed
            else (READ_QUERIES.feed_events, FEED_BATCHES)
        )
        is_inside = after > BEGINNING and after[1] < KEY_MAX  # a rest of the first position may be all that it has
        places = at_once if is_narrowed else min(at_once, math.ceil(limit / self._events_a_place) + is_inside)
        events: list[Event] = []
        positions: list[str] = []
        while len(events) < limit:
            # A position that was read to its end is not read again.
            read_to_end = after[1] == KEY_MAX
            batches = await self.fetch(READ_QUERIES.feed_batches, after[0] + read_to_end, places)
            if not batches:
                break
            await self._summaries.keep(self.fetch)
            numbers, last = [row["batch"] for row in batches], batches[-1]["pos"]
            feed_rows = await self.fetch(
                query,
                min(numbers),
                max(numbers),
                batches[0]["pos"],
                last,
                *after,
                codes,
                limit - len(events),
                numbers,
                type_codes,
            )
            if feed_rows and not is_narrowed:
                # A short page of long batches then reads no more of them than it needs.
                self._events_a_place = len(feed_rows) / len({row["pos"] for row in feed_rows})
            events.extend(rows.event(row) for row in feed_rows)
            positions.extend(of_postgres(row["pos"], row["id"], row["version"]) for row in feed_rows)
            if len(events) >= limit:
                after = (feed_rows[-1]["pos"], feed_rows[-1]["id"], feed_rows[-1]["version"])
            elif len(batches) < places:
                after = (last, KEY_MAX, 0)
                break
            else:
                # Never beyond `feed_end`, so that a reader can tell a stored position from one of another ledger.
                after = (last, KEY_MAX, 0)
                places = _next_places(places, at_once, len(feed_rows), limit - len(events))
        return FeedPage(events=tuple(events), positions=tuple(positions), position=of_postgres(*after))

    async def _position_here(self, position: str | None) -> str | None:
        """A position that the SQLite ledger gave from which this one was moved, as one of this feed."""
        if position is None or not is_of_sqlite(position):
            return position
        stored = await self.fetch(READ_QUERIES.moved_feed_end)
        feed_end = stored[0]["feed_end"] if stored else None
        is_known = feed_end is not None and int(position) <= feed_end
        return to_postgres(position) if is_known else position

    async def recorded(self, events: Sequence[Event]) -> list[RecordedEvent]:
        if not events:
            return []
        pairs = ([event.job_id for event in events], [event.version for event in events])
        new = [event.job_id for event in events if event.version == 1]
        ended = [event for event in events if may_have_letter(event)]
        at = ([event.job_id for event in ended], [event.version for event in ended])
        return restore.recorded(
            events,
            await self.fetch(READ_QUERIES.beside, *pairs),
            await self.fetch(READ_QUERIES.submissions, new) if new else [],
            await self.fetch(READ_QUERIES.idempotency_keys, new) if new else [],
            await self.fetch(READ_QUERIES.dead_letters_at, *at) if ended else [],
        )

    async def feed_end(self) -> str:
        await self.fetch("select sequence_feed()")
        return of_postgres((await self.fetch(READ_QUERIES.feed_end))[0][0], KEY_MAX, 0)

    async def result(self, job_id: JobId) -> bytes | None:
        stored = await self.fetch(READ_QUERIES.result, job_id)
        return stored[0]["body"] if stored else None

    async def find_by_idempotency_key(self, scope: str, key: str, fingerprint: bytes) -> Submitted | Mismatch | None:
        stored = await self.fetch(READ_QUERIES.key_used, CALLER_SCOPE + scope, key)
        if not stored:
            return None
        job_id = JobId(stored[0]["job_id"])
        same = stored[0]["fingerprint"] == fingerprint
        return Submitted(job_id=job_id, created=False) if same else Mismatch(key=key, job_id=job_id)

    async def find_request(self, key: RequestKey) -> StoredRequest | None:
        return request_keys.stored_request(key, await self.fetch(request_keys.FIND, key.scope, key.key))

    async def read_journal(self, job_id: JobId) -> dict[str, bytes]:
        return {row["entry"]: row["body"] for row in await self.fetch(READ_QUERIES.journal, job_id)}

    async def journal_entries(self, wanted: Sequence[tuple[JobId, str]]) -> dict[tuple[JobId, str], bytes]:
        jobs, entries = [job_id for job_id, _ in wanted], [entry for _, entry in wanted]
        stored = await self.fetch(READ_QUERIES.journal_entries, jobs, entries)
        return {(JobId(row["job_id"]), row["entry"]): row["body"] for row in stored}

    async def job_signals(self, job_id: JobId, name: str, *, after: int, limit: int) -> list[JobSignal]:
        stored = await self.fetch(READ_QUERIES.job_signals, job_id, name, after, min(limit, JOB_SIGNALS_MAX))
        return [JobSignal(row["no"], row["name"], row["body"]) for row in stored]

    async def outcomes(self, job_ids: Sequence[JobId], *, with_results: bool = True) -> list[JobOutcome]:
        check_ids(job_ids)
        stored = await self.fetch(READ_QUERIES.outcomes, list(job_ids), with_results)
        return [
            JobOutcome(
                row["job_id"],
                row["type_name"],
                BY_CODE[row["lifecycle"]].state_of(row["state"]).name,
                row["has_ended"],
                row["success"],
                row["body"],
                row["error"],
            )
            for row in stored
        ]

    async def dead_letters(self, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
        if where.place not in {None, JobPlace.ENDED}:
            return []
        before = KEY_MAX
        if cursor is not None:
            letter_rows = await self.fetch("select id from job where job_id = $1", cursor)
            if not letter_rows:
                raise OptionInvalid(option="cursor", value=cursor, expected="the id of a job of this ledger")
            before = letter_rows[0]["id"]
        pairs = state_pairs(where) or _states_by_place(replace(where, place=JobPlace.ENDED))
        args = (before, limit, _codes([pair for pair in pairs if _is_end(*pair)]), where.type, where.reason_code)
        related = (where.parent_id, where.correlation_id, where.concurrency_key)
        if related == (None, None, None):
            letter_rows = await self.fetch(READ_QUERIES.dead_letters, *args, _narrows(where))
        else:
            letter_rows = await self.fetch(READ_QUERIES.dead_letters_related, *args, *related)
        return [rows.dead_letter(row) for row in letter_rows]

    async def dead_letter(self, job_id: JobId) -> DeadLetter | None:
        stored = await self.fetch(READ_QUERIES.dead_letter, job_id)
        return rows.dead_letter(stored[0]) if stored else None

    async def figures(self) -> LedgerFigures:
        return rows.figures(await self.fetch(READ_QUERIES.figures, DEAD_LETTERS_COUNTED_MAX))

    async def queues(self, *, exact: bool = False) -> list[QueueDepth]:
        return await self._queue_counts.read(self._count_queues, exact=exact)

    async def _count_queues(self, most: int) -> list[QueueDepth]:
        stored = await self.fetch(READ_QUERIES.queues, most, COUNTED_MAX, QUEUED_LIFECYCLES, OTHER_LIFECYCLES)
        depths = [rows.queue_depth(row) for row in stored]
        return [depth for depth in depths if depth.lifecycle not in NOT_QUEUED]

    async def declared_types(self, type_: str | None = None) -> list[TypeOptions]:
        return [rows.type_options(row) for row in await self.fetch(READ_QUERIES.declared_types, type_, DECLARED_MAX)]

    async def schedules(self, name: str | None = None) -> list[ScheduleRecord]:
        return [rows.schedule(row) for row in await self.fetch(READ_QUERIES.schedules, name, SCHEDULES_MAX)]

    async def due_schedules(self, *, topics: bool) -> DueSchedules:
        stored = await self.fetch(READ_QUERIES.due_schedules, topics, DUE_MAX)
        due = tuple(rows.schedule(row) for row in stored if row["name"] is not None)
        return DueSchedules(now=stored[0]["now"], due=due, next_at=stored[0]["later"])

    async def home_issuer(self) -> str | None:
        stored = await self.fetch(READ_QUERIES.home_issuer)
        return stored[0]["value"] if stored else None

    async def audit_head(self) -> AuditHead | None:
        stored = await self.fetch(READ_QUERIES.audit_head)
        return AuditHead(**dict(stored[0])) if stored else None

    async def workers(self) -> list[WorkerRecord]:
        return [
            WorkerRecord(name=row["name"], seen_at=row["seen_at"], held=row["held"], info=row["info"])
            for row in await self.fetch(READ_QUERIES.workers)
        ]

    async def waiting_types(self, *, limit: int) -> list[WaitingType]:
        stored = await self.fetch(READ_QUERIES.waiting_types, min(limit, ALERTS_MAX))
        return [
            WaitingType(
                type=row["name"], lifecycle=BY_CODE[row["lifecycle"]].name, waited_s=max(0.0, row["waited_s"] or 0.0)
            )
            for row in stored
        ]

    async def stage_steps(self, *, each: int) -> list[Event]:
        types = [event_code(type_) for type_ in STAGE_STEP_TYPES]
        stored = await self.fetch(READ_QUERIES.stage_steps, types, min(each, ALERTS_MAX))
        return [rows.event(row) for row in stored]

    async def alerts(self, *, limit: int = ALERTS_MAX, only_open: bool = False) -> list[Alert]:
        stored = await self.fetch(READ_QUERIES.alerts, min(limit, ALERTS_MAX), not only_open)
        return [alert_rows.alert(row) for row in stored]

    async def alert_mark(self) -> AlertMark:
        (stored,) = await self.fetch(READ_QUERIES.alert_mark)
        return AlertMark(
            mark=stored["mark"],
            has_open=stored["has_open"],
            unreported=frozenset(stored["unreported"]),
            evaluated_at=stored["evaluated_at"],
            stale_at=stored["stale_at"],
        )

    async def alert(self, alert_id: str) -> Alert | None:
        stored = await self.fetch(READ_QUERIES.alert, alert_id)
        return alert_rows.alert(stored[0]) if stored else None

    async def followers(self) -> list[SubscriberRecord]:
        return [SubscriberRecord(**dict(row)) for row in await self.fetch(READ_QUERIES.followers)]

    async def now(self) -> datetime:
        return (await self.fetch("select trellis.now()"))[0][0]

    async def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        after = 0
        while True:
            job_rows, past, dead = await self._read_lane.call(
                "histories", "", lambda connection, _, after=after: _snapshot(connection, after, batch)
            )
            if not job_rows:
                return
            after = job_rows[-1]["id"]
            events: dict[str, list[Event]] = {}
            for row in past:
                events.setdefault(row["job_id"], []).append(rows.event(row))
            letters: dict[str, list[DeadLetter]] = {}
            for row in dead:
                state = state_at(events[row["job_id"]], row["version"])
                letters.setdefault(row["job_id"], []).append(rows.dead_letter(row, state))
            for row in job_rows:
                job = rows.job(row)
                yield JobHistory(
                    job=job,
                    events=tuple(events.get(job.job_id, ())),
                    dead_letters=tuple(letters.get(job.job_id, ())),
                )

    async def key_limit(self, key: str) -> int | None:
        stored = await self.fetch(READ_QUERIES.key_limit, key)
        return stored[0]["cap"] if stored else None

    async def keys_over(self) -> list[KeyOverLimit]:
        return [KeyOverLimit(**dict(row)) for row in await self.fetch(READ_QUERIES.keys_over)]

    async def unpaired(self) -> list[UnpairedArtifact]:
        pairs = [list(column) for states in (COMPLETED, FINAL) for column in zip(*states, strict=True)]
        stored = await self.fetch(READ_QUERIES.unpaired, *pairs)
        return [UnpairedArtifact(**dict(row)) for row in stored]

    async def inspect(self) -> list[Finding]:
        figures = await self.fetch(READ_QUERIES.inspect)
        return (
            findings(figures[0], is_pooled=is_pooled(self.url))
            if figures
            else [Finding(check="ledger", severity=FindingSeverity.ERROR, detail="the ledger does not answer")]
        )


async def _snapshot(
    connection: PostgresConnection, after: int, limit: int
) -> tuple[list[PostgresRow], list[PostgresRow], list[PostgresRow]]:
    """Jobs, their events and their dead letters as of one moment, so that `verify` is reliable on a busy ledger."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        jobs = await connection.fetch(READ_QUERIES.histories, after, limit)
        keys = [row["id"] for row in jobs]
        return (
            jobs,
            await connection.fetch(READ_QUERIES.events_of, keys),
            await connection.fetch(READ_QUERIES.dead_letters_of, keys),
        )


def state_at(events: list[Event], version: int) -> str:
    """The state that the event of this version led to."""
    return next(event.target for event in events if event.version == version)


def _states_by_place(where: JobFilter) -> list[tuple[Lifecycle, int]]:
    """The states that a filter without a state name selects.

    Those are end states for ended jobs and dead letters, the others for another place, and all for any place.
    """
    ended = where.reason_code is not None or where.place is JobPlace.ENDED
    is_any = where.reason_code is None and where.place is None
    among = [lifecycle_named(where.lifecycle)] if where.lifecycle else list(LIFECYCLES.values())
    return [
        (lc, lc.code_of(state.name))
        for lc in among
        for state in lc.states
        if is_any or (state.phase is Phase.ENDED) is ended
    ]


def _narrows(where: JobFilter) -> bool:
    """Whether it selects by the type or the state of jobs, which may be rare among those with a dead letter."""
    return any(one is not None for one in (where.type, where.lifecycle, where.state))


def _is_end(lifecycle: Lifecycle, code: int) -> bool:
    return lifecycle.state_of(code).phase is Phase.ENDED


def _codes(pairs: list[tuple[Lifecycle, int]]) -> list[int]:
    """The states as the queries take them, in one number each."""
    return [lifecycle.code * 16 + code for lifecycle, code in pairs]


def requeueable_codes(where: JobFilter) -> list[int]:
    """The states that a filter selects and that declare a requeue."""
    pairs = state_pairs(where)
    if pairs is None:
        pairs = _states_by_place(JobFilter(lifecycle=where.lifecycle))
    return _codes([(lc, code) for lc, code in pairs if lc.pull(lc.state_of(code).name, Trigger.REQUEUE) is not None])


def _move(pairs: list[tuple[Lifecycle, int]]) -> bool:
    """Whether jobs in one of these states may be in another place than `resting`."""
    return any(lc.state_of(code).claimable or lc.state_of(code).phase is Phase.HELD for lc, code in pairs)


def _page(page_rows: list[PostgresRow], limit: int) -> JobPage:
    return JobPage(
        jobs=tuple(rows.job(row) for row in page_rows),
        cursor=str(page_rows[-1]["id"]) if len(page_rows) == limit else None,
    )


def _cursor(cursor: str | None) -> int:
    if cursor is None:
        return KEY_MAX
    if not cursor.isdigit():
        raise OptionInvalid(option="cursor", value=cursor, expected="the cursor of an earlier page")
    return int(cursor)


def _next_places(places: int, at_once: int, events: int, wanted: int) -> int:
    """How many feed positions the next query reads, after one that read `places` of them with so many events.

    More if they had few: a feed of single submits, or one that was moved from SQLite, has one event at each.
    """
    if not events:
        return min(4 * places, FEED_EMPTY_BATCHES_MAX)
    return at_once if events > places else min(4 * places, max(at_once, wanted), FEED_EMPTY_BATCHES_MAX)


def _position(text: str | None) -> tuple[int, int, int]:
    if text is None:
        return BEGINNING
    parts = [int(part) for part in text.split(".") if part.isascii() and part.isdigit()]
    if text.count(".") != 2 or len(parts) != 3 or max(parts[:2]) > KEY_MAX or parts[2] > VERSION_MAX:
        raise OptionInvalid(option="position", value=text, expected="a position the feed gave")
    return parts[0], parts[1], parts[2]

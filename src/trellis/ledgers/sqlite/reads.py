"""Reads on SQLite: jobs, events and dead letters, and events with all data needed to restore their jobs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from trellis.engine.errors import OptionInvalid
from trellis.engine.event_data import cancel_request_in, with_cancel_request_of
from trellis.engine.jobs import HEADS_MAX, JOB_SIGNALS_MAX, HeldLease, JobId, JobOutcome, JobSignal, Priority
from trellis.engine.positions import SQLITE_DIGITS, of_sqlite
from trellis.engine.records import (
    DEAD_LETTERS_COUNTED_MAX,
    NOT_QUEUED,
    ChildPage,
    DeadLetter,
    DeadLetterCount,
    Event,
    FeedPage,
    IdempotencyKey,
    Job,
    JobContents,
    JobHistory,
    JobPlace,
    KeyOverLimit,
    LedgerFigures,
    QueueDepth,
    RecordedEvent,
    SampledEvent,
    Signal,
    Submission,
    SubscriberRecord,
    UniqueKey,
    UnpairedArtifact,
    WorkerRecord,
    event_id,
)
from trellis.engine.restoration import may_have_letter
from trellis.ledgers.children import ChildMark, children_after
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import (
    check_children,
    check_expiring,
    check_ids,
    check_peek_limit,
    check_sample,
    event_codes,
    known_event_code,
)
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.connection import Database
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    HELD,
    PARKED,
    RESTING,
    STATE_NAMES,
    US,
    lifecycle_bits,
    lifecycle_code,
)
from trellis.lifecycles import BY_CODE, LIFECYCLES
from trellis.lifecycles.contract import completed_states, final_states
from trellis.lifecycles.queue_job import QUEUE_JOB

# Reads: short transactions on the reader's own connection.

PAGE_MAX = 10_000
QUEUED_LIFECYCLES = json.dumps([one.code for one in LIFECYCLES.values() if one.name not in NOT_QUEUED])
COMPLETED = json.dumps([lifecycle * 16 + state for lifecycle, state in completed_states()])
FINAL = json.dumps([lifecycle * 16 + state for lifecycle, state in final_states()])
QUEUE_JOB_FAILURES = frozenset({"job_failed", "job_dead_lettered"})
"""Events of queue jobs that have an index of their own: other lifecycles have events of the same types, and many more."""


_READ_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/read.sql")


def job(tx: Transaction, job_id: JobId) -> Job | None:
    stored = tx.db.execute(_READ_QUERIES.job, (job_id,)).fetchall()
    if not stored:
        return None
    one = rows.job(stored[0])
    if one.place is JobPlace.ENDED:
        ends = tx.db.execute(_READ_QUERIES.ended_though_asked_to_stop, (job_id,)).fetchall()
        return with_cancel_request_of(one, cancel_request_in(ends[0][0])) if ends else one
    cancel_requests = tx.db.execute(_READ_QUERIES.asked_to_stop, (job_id,)).fetchall() if one.cancel_requested else []
    if not cancel_requests:
        return one
    by, at, why = cancel_requests[0]
    return replace(one, cancel_asked_by=by, cancel_asked_at=rows.moment_or_none(at), cancel_cause=why)


def children(tx: Transaction, parent_id: JobId, *, since: str | None, limit: int) -> ChildPage:
    check_children(limit)
    before = ChildMark.read(since)
    anew = not before.stands(*tx.db.execute(_READ_QUERIES.children_below, (parent_id, before.last)).fetchall()[0])
    stored = tx.db.execute(_READ_QUERIES.children_above, (parent_id, 0 if anew else before.last, limit)).fetchall()
    return children_after(before, stored, anew=anew)


def peek_ready(tx: Transaction, lifecycle: str, *, each: int) -> list[Job]:
    check_peek_limit(each)
    values = {"lifecycle": lifecycle_code(lifecycle), "each": each, "limit": HEADS_MAX}
    return [rows.job(row) for row in tx.db.execute(_READ_QUERIES.heads, values)]


def holds(tx: Transaction, job_ids: Sequence[JobId]) -> list[HeldLease]:
    check_ids(job_ids)
    wanted = json.dumps(sorted(set(job_ids)))
    return [rows.hold(row, tx.now) for row in tx.db.execute(_READ_QUERIES.holds, (wanted,))]


def expiring(tx: Transaction, lifecycle: str, *, within_s: float, limit: int) -> list[HeldLease]:
    check_expiring(within_s, limit)
    values = (lifecycle_code(lifecycle), tx.now + int(within_s * US), limit)
    return [rows.hold(row, tx.now) for row in tx.db.execute(_READ_QUERIES.expiring, values)]


def events(tx: Transaction, job_id: JobId) -> list[Event]:
    key = key_of(tx, job_id)
    return [] if key is None else [rows.event(row) for row in tx.db.execute(_READ_QUERIES.events, (key,))]


def events_of(tx: Transaction, job_ids: Sequence[JobId], *, last: int | None = None) -> dict[JobId, list[Event]]:
    by_job: dict[JobId, list[Event]] = {}
    for row in tx.db.execute(_READ_QUERIES.events_of, {"jobs": json.dumps(job_ids), "last": last}):
        event = rows.event(row)
        by_job.setdefault(event.job_id, []).append(event)
    return by_job


def payloads(tx: Transaction, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
    return dict(tx.db.execute(_READ_QUERIES.payloads, (json.dumps(job_ids),)).fetchall())


def contents_of(tx: Transaction, job_ids: Sequence[JobId]) -> dict[JobId, JobContents]:
    stored, events = payloads(tx, job_ids), events_of(tx, job_ids)
    return {job_id: JobContents(payload, events[job_id]) for job_id, payload in stored.items() if job_id in events}


def feed(
    tx: Transaction,
    position: str | None,
    *,
    limit: int,
    lifecycle: str | frozenset[str] | None = None,
    types: frozenset[str] | None = None,
) -> FeedPage:
    """A page of the feed.

    With a filter its position is after all events it examined, so that rare lifecycles advance.
    """
    after, codes = _position(position), event_codes(types)
    end: int = tx.db.execute(_READ_QUERIES.feed_end).fetchall()[0][0]
    if end <= after:
        return FeedPage(events=(), positions=(), position=of_sqlite(after))
    values: dict[str, str | int | None] = {
        "after": after,
        "end": end,
        "lifecycles": lifecycle_bits(lifecycle),
        "types": None if codes is None else json.dumps(codes),
        "limit": page_size(limit),
    }
    stored = tx.db.execute(_READ_QUERIES.feed, values).fetchall()
    reached = stored[-1][15] if len(stored) == limit else max(end, after)
    positions = tuple(of_sqlite(row[15]) for row in stored)
    return FeedPage(events=tuple(map(rows.event, stored)), positions=positions, position=of_sqlite(reached))


def feed_end(tx: Transaction) -> str:
    return of_sqlite(tx.db.execute(_READ_QUERIES.feed_end).fetchall()[0][0])


def find_events(
    tx: Transaction, *, type_: str | None, correlation_id: str | None, since: datetime | None, limit: int
) -> list[Event]:
    values = {
        "type": None if type_ is None else known_event_code(type_),
        "correlation": correlation_id,
        "since": 0 if since is None else rows.microseconds(since),
        "limit": page_size(limit),
    }
    if correlation_id is not None:
        return [rows.event(row) for row in tx.db.execute(_READ_QUERIES.events_by_correlation, values)]
    if type_ is None:
        raise OptionInvalid(option="type", value=None, expected="a type or a correlation id")
    del values["correlation"]
    return [rows.event(row) for row in tx.db.execute(_READ_QUERIES.events_by_type, values)]


def count_events(
    tx: Transaction, types: Sequence[str], *, since: datetime, lifecycle: str | None = None
) -> dict[str, int]:
    codes = {known_event_code(type_): type_ for type_ in types}
    values: dict[str, str | int | None] = {"types": json.dumps(list(codes)), "since": rows.microseconds(since)}
    if lifecycle is None or _is_sole_user(lifecycle, types):
        counted = dict(tx.db.execute(_READ_QUERIES.count_events, values).fetchall())
    elif lifecycle == QUEUE_JOB.name and QUEUE_JOB_FAILURES.issuperset(types):
        counted = dict(tx.db.execute(_READ_QUERIES.count_failed_queue_jobs, values).fetchall())
    else:
        values["lifecycle"] = lifecycle_code(lifecycle)
        counted = dict(tx.db.execute(_READ_QUERIES.count_events_of_lifecycle, values).fetchall())
    return {type_: counted.get(code, 0) for code, type_ in codes.items()}


def _is_sole_user(lifecycle: str, types: Sequence[str]) -> bool:
    """Whether no other lifecycle has events of these types, so that the index alone can count them."""
    code = lifecycle_code(lifecycle)
    others = {t.event for one in BY_CODE.values() if one.code != code for t in one.transitions}
    return others.isdisjoint(types)


def sample_events(
    tx: Transaction, lifecycle: str, types: Sequence[str], *, since: datetime, limit: int
) -> list[SampledEvent]:
    check_sample(lifecycle, limit)
    of, sampled = LIFECYCLES[lifecycle], list[SampledEvent]()
    for type_ in dict.fromkeys(types):
        values = {"type": known_event_code(type_), "since": rows.microseconds(since), "limit": limit}
        query = _READ_QUERIES.sample_failed_queue_jobs
        if lifecycle != QUEUE_JOB.name or type_ not in QUEUE_JOB_FAILURES:
            query, values["lifecycle"] = _READ_QUERIES.sample_events, of.code
        sampled += [rows.sampled_event(row, of) for row in tx.db.execute(query, values)]
    return sampled


def signals(tx: Transaction, job_id: JobId, *, limit: int) -> list[Signal]:
    key = key_of(tx, job_id)
    stored = [] if key is None else tx.db.execute(_READ_QUERIES.signals, (key, page_size(limit))).fetchall()
    return [Signal(job_id=job_id, type=type_, ts=rows.moment(at), data=data) for type_, at, data in stored]


def keys_over(tx: Transaction) -> list[KeyOverLimit]:
    stored = tx.db.execute(_READ_QUERIES.keys_over).fetchall()
    return [KeyOverLimit(key=key, held=held, limit=limit) for key, held, limit in stored]


def unpaired(tx: Transaction) -> list[UnpairedArtifact]:
    values = {"completed": COMPLETED, "final": FINAL}
    stored = tx.db.execute(_READ_QUERIES.unpaired, values).fetchall()
    return [UnpairedArtifact(job_id=job_id, complete=bool(done), artifacts=count) for job_id, done, count in stored]


def result(tx: Transaction, job_id: JobId) -> bytes | None:
    key = key_of(tx, job_id)
    stored = [] if key is None else tx.db.execute(_READ_QUERIES.result, (key, tx.now)).fetchall()
    return stored[0][0] if stored else None


def read_journal(tx: Transaction, job_id: JobId) -> dict[str, bytes]:
    key = key_of(tx, job_id)
    return {} if key is None else dict(tx.db.execute(_READ_QUERIES.journal, (key,)).fetchall())


def journal_entries(tx: Transaction, wanted: Sequence[tuple[JobId, str]]) -> dict[tuple[JobId, str], bytes]:
    stored = tx.db.execute(_READ_QUERIES.journal_entries, (json.dumps(wanted),))
    return {(JobId(job_id), entry): body for job_id, entry, body in stored}


def job_signals(tx: Transaction, job_id: JobId, name: str, *, after: int, limit: int) -> list[JobSignal]:
    key = key_of(tx, job_id)
    values = (key, name, after, min(limit, JOB_SIGNALS_MAX))
    return [] if key is None else [JobSignal(*row) for row in tx.db.execute(_READ_QUERIES.job_signals, values)]


def outcomes(tx: Transaction, job_ids: Sequence[JobId], *, with_results: bool = True) -> list[JobOutcome]:
    check_ids(job_ids)
    values = (int(with_results), tx.now, json.dumps(job_ids))
    stored = tx.db.execute(_READ_QUERIES.outcomes, values).fetchall()
    return [
        JobOutcome(job_id, type_, STATE_NAMES[lifecycle, state], bool(ended), bool(success), body, error)
        for job_id, type_, lifecycle, state, ended, success, body, error in stored
    ]


def dead_letter(tx: Transaction, job_id: JobId) -> DeadLetter | None:
    stored = tx.db.execute(_READ_QUERIES.dead_letter, (job_id,)).fetchall()
    return rows.dead_letter(stored[0]) if stored else None


def queues(tx: Transaction, most: int) -> list[QueueDepth]:
    """How many jobs of each type are in each place, counted up to `most` as `queue_counts.CountQueues` says."""
    values = {"most": most, "lifecycles": QUEUED_LIFECYCLES}
    counted = {(type_, place): count for type_, place, count in tx.db.execute(_READ_QUERIES.depths, values)}
    return [
        QueueDepth(
            type=name,
            lifecycle=BY_CODE[lifecycle].name,
            ready=ready,
            scheduled=counted.get((type_, RESTING), 0),
            blocked=counted.get((type_, PARKED), 0),
            held=counted.get((type_, HELD), 0),
            paused=bool(paused),
            oldest_ready_s=None if oldest is None else max(0.0, (tx.now - oldest) / US),
            rate_limit=rate,
            rate_per_key=per_key,
        )
        for type_, lifecycle, name, paused, rate, per_key, oldest, ready in tx.db.execute(_READ_QUERIES.types, values)
    ]


def figures(tx: Transaction) -> LedgerFigures:
    counted = tx.db.execute(_READ_QUERIES.dead_letter_counts, {"limit": DEAD_LETTERS_COUNTED_MAX}).fetchall()
    swept = tx.db.execute(_READ_QUERIES.swept_at).fetchall()
    return LedgerFigures(
        dead_letters=tuple(
            DeadLetterCount(type=name, lifecycle=BY_CODE[lifecycle].name, count=count)
            for name, lifecycle, count in counted
        ),
        swept_at=rows.moment(swept[0][0]) if swept else None,
    )


def key_limit(tx: Transaction, key: str) -> int | None:
    return tx.names.key_limit(key)


def workers(tx: Transaction) -> list[WorkerRecord]:
    stored = tx.db.execute(_READ_QUERIES.workers).fetchall()
    return [WorkerRecord(name=name, seen_at=rows.moment(at), held=held, info=info) for name, at, held, info in stored]


def followers(tx: Transaction) -> list[SubscriberRecord]:
    return [
        SubscriberRecord(
            name=name,
            actor=who,
            until=rows.moment(until),
            waits=bool(waits),
            unread_since=None if since is None else rows.moment(since),
        )
        for name, who, until, waits, since in tx.db.execute(_READ_QUERIES.followers)
    ]


def histories(tx: Transaction, after: int, limit: int) -> tuple[list[JobHistory], int]:
    """A batch of jobs with all their events, and the key to continue after."""
    page = tx.db.execute(_READ_QUERIES.job_keys, (after, limit)).fetchall()
    histories_read: list[JobHistory] = []
    for key, job_id in page:
        one = job(tx, job_id)
        if one is not None:
            past = tuple(rows.event(row) for row in tx.db.execute(_READ_QUERIES.events, (key,)))
            letters = tuple(rows.dead_letter(row) for row in tx.db.execute(_READ_QUERIES.dead_letters_of, (key,)))
            histories_read.append(JobHistory(job=one, events=past, dead_letters=letters))
    return histories_read, page[-1][0] if page else after


def any_ready(db: Database, types: Sequence[str]) -> bool:
    return bool(db.execute(_READ_QUERIES.any_ready, (json.dumps(list(types)),)).fetchall())


# --- callers' filters ------------------------------------------------------------------------------------------------


def page_size(limit: int) -> int:
    if not 1 <= limit <= PAGE_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {PAGE_MAX}")
    return limit


def key_of(tx: Transaction, job_id: JobId) -> int | None:
    """The number of a job in this file."""
    stored = tx.db.execute(_READ_QUERIES.key_of, (job_id,)).fetchall()
    return stored[0][0] if stored else None


def _position(text: str | None) -> int:
    if text is None:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > SQLITE_DIGITS:
        raise OptionInvalid(option="position", value=text, expected="a position this feed gave out")
    return int(text)


# Events with all data stored beside them: a few statements per page of events.


_RECORD_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/recorded.sql")


def recorded(tx: Transaction, events: Sequence[Event]) -> list[RecordedEvent]:
    """The records, in the order of the events. Removed jobs are left out."""
    if not events:
        return []
    wanted = _pairs(events)
    beside = {(job_id, version): rest for job_id, version, *rest in tx.db.execute(_RECORD_QUERIES.beside, (wanted,))}
    submissions = _submissions(tx, [event.job_id for event in events if event.version == 1])
    letters = _dead_letters(tx, [event for event in events if may_have_letter(event)])
    return [
        RecordedEvent(
            event=event,
            type=beside[event.job_id, event.version][0],
            submitted_at=rows.moment(beside[event.job_id, event.version][3]),
            submission=submissions.get(event.job_id) if event.version == 1 else None,
            due_at=rows.moment_or_none(beside[event.job_id, event.version][1]),
            request=beside[event.job_id, event.version][2],
            dead_letter=letters.get(event.id),
        )
        for event in events
        if (event.job_id, event.version) in beside
    ]


def _pairs(events: Sequence[Event]) -> str:
    return json.dumps([(event.job_id, event.version) for event in events])


def _submissions(tx: Transaction, job_ids: list[JobId]) -> dict[str, Submission]:
    if not job_ids:
        return {}
    wanted = json.dumps(job_ids)
    keys: dict[str, list[IdempotencyKey]] = {}
    for job_id, scope, key, fingerprint in tx.db.execute(_RECORD_QUERIES.idempotency_keys, (wanted,)):
        keys.setdefault(job_id, []).append(IdempotencyKey(scope=scope, key=key, fingerprint=fingerprint))
    return {
        row[0]: _submission(row, keys.get(row[0], [])) for row in tx.db.execute(_RECORD_QUERIES.submissions, (wanted,))
    }


def _submission(row: rows.SqliteRow, keys: list[IdempotencyKey]) -> Submission:
    (_, type_, prio, max_attempts, max_deaths, payload, deadline, key, key_limit, trace, parent, compensates) = row[:12]
    return Submission(
        type=type_,
        priority=Priority(prio),
        max_attempts=max_attempts,
        max_deaths=max_deaths,
        payload=payload,
        deadline_us=deadline,
        concurrency_key=key,
        concurrency_limit=key_limit,
        trace=trace,
        parent_id=parent,
        compensates=compensates,
        keys=tuple(keys),
        unique=_unique_key(*row[12:]),
    )


def _unique_key(
    scope: str | None, key: str | None, unfinished: int | None, until: int | None, first_at: int | None
) -> UniqueKey | None:
    if scope is None or key is None or first_at is None:
        return None
    ends, began = rows.moment_or_none(until), rows.moment(first_at)
    return UniqueKey(scope=scope, key=key, unfinished=bool(unfinished), until=ends, first_at=began)


def _dead_letters(tx: Transaction, events: Sequence[Event]) -> dict[str, DeadLetter]:
    if not events:
        return {}
    letters = map(rows.dead_letter, tx.db.execute(_RECORD_QUERIES.dead_letters_at, (_pairs(events),)))
    return {event_id(letter.job_id, letter.version): letter for letter in letters}

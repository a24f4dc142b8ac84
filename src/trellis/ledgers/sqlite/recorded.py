"""Events with everything that is known beside them: a few statements for a whole page of events."""

import json
from collections.abc import Sequence
from typing import LiteralString

from trellis.engine.jobs import JobId, Priority
from trellis.engine.records import DeadLetter, Event, IdempotencyKey, RecordedEvent, Submission
from trellis.engine.restoring import may_have_letter
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction


class _RecordQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/recorded.sql"):
    beside: LiteralString
    submissions: LiteralString
    idempotency_keys: LiteralString
    dead_letters_at: LiteralString


def recorded(tx: Transaction, events: Sequence[Event]) -> list[RecordedEvent]:
    """In the order of the events; a job that was removed meanwhile is left out."""
    if not events:
        return []
    wanted = _pairs(events)
    beside = {(job_id, version): rest for job_id, version, *rest in tx.db.execute(_RecordQueries.beside, (wanted,))}
    asked = _submissions(tx, [event.job_id for event in events if event.version == 1])
    letters = _dead_letters(tx, [event for event in events if may_have_letter(event)])
    return [
        RecordedEvent(
            event=event,
            type=beside[event.job_id, event.version][0],
            submitted_at=rows.moment(beside[event.job_id, event.version][3]),
            submission=asked.get(event.job_id) if event.version == 1 else None,
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
    for job_id, scope, key, fingerprint in tx.db.execute(_RecordQueries.idempotency_keys, (wanted,)):
        keys.setdefault(job_id, []).append(IdempotencyKey(scope=scope, key=key, fingerprint=fingerprint))
    return {
        row[0]: _submission(row, keys.get(row[0], [])) for row in tx.db.execute(_RecordQueries.submissions, (wanted,))
    }


def _submission(row: rows.SqliteRow, keys: list[IdempotencyKey]) -> Submission:
    (_, type_, prio, max_attempts, max_deaths, payload, deadline, key, key_limit, trace, parent, compensates) = row
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
    )


def _dead_letters(tx: Transaction, events: Sequence[Event]) -> dict[str, DeadLetter]:
    if not events:
        return {}
    found = map(rows.dead_letter, tx.db.execute(_RecordQueries.dead_letters_at, (_pairs(events),)))
    return {f"{letter.job_id}-{letter.version}": letter for letter in found}

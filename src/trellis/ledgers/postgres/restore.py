"""Restores lost jobs through the function `restore`, and assembles recorded events from reads."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from trellis.engine.event_data import DISCARDED
from trellis.engine.jobs import JobId, Priority
from trellis.engine.records import DeadLetter, Event, IdempotencyKey, JobToRestore, RecordedEvent, Submission, UniqueKey
from trellis.engine.restoration import check_restorable, restored_place, restored_priority
from trellis.ledgers.postgres import rows
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow
from trellis.lifecycles import LIFECYCLES, event_code

RESTORE = "select job_id from restore($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"


class RestoreBatch:
    """Jobs as `restore` takes them: JSON, with bytes in separate arrays, indexed from 1."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._jobs: list[dict[str, Any]] = []
        self._payloads: list[bytes] = []
        self._events: list[dict[str, Any]] = []
        self._data: list[bytes | None] = []
        self._letters: list[dict[str, Any]] = []
        self._keys: list[dict[str, Any]] = []
        self._fingerprints: list[bytes] = []
        self._journal: list[dict[str, Any]] = []
        self._bodies: list[bytes] = []

    def add(self, job: JobToRestore) -> None:
        """Add a job. Raises HistoryBroken."""
        lifecycle = check_restorable(job)
        submission = job.records[0].submission
        assert submission is not None, "a checked job says what was asked"
        self._payloads.append(submission.payload)
        self._jobs.append(
            {
                "n": len(self._payloads),
                "lifecycle": lifecycle.code,
                **_submission_json(job, submission),
                **self._standing(job),
            }
        )
        for one in job.records:
            self._add_event(job, one)
        for key in submission.keys:
            self._fingerprints.append(key.fingerprint)
            named = {"job_id": job.job_id, "scope": key.scope, "key": key.key}
            self._keys.append({"n": len(self._fingerprints), **named})
        last = job.records[-1].event
        for entry, body in job.journal.items():
            self._bodies.append(body)
            kept = {"job_id": job.job_id, "entry": entry, "at": _iso(last.ts), "epoch": last.epoch}
            self._journal.append({"n": len(self._bodies), **kept})

    async def put_back(self, connection: PostgresConnection, actor: int) -> set[str]:
        """Restore the batch. Returns the ids of the restored jobs."""
        known_rows = await connection.fetch(
            RESTORE,
            actor,
            json.dumps(self._jobs),
            self._payloads,
            json.dumps(self._events),
            self._data,
            json.dumps(self._letters),
            json.dumps(self._keys),
            self._fingerprints,
            json.dumps(self._journal),
            self._bodies,
        )
        return {row["job_id"] for row in known_rows}

    def _standing(self, job: JobToRestore) -> dict[str, Any]:
        now, last = restored_place(job, self._now), job.records[-1].event
        holder = now.held_by
        return {
            "version": last.version,
            "epoch": now.epoch,
            "generation": last.generation,
            "attempt": last.attempt,
            "max_attempts": now.max_attempts,
            "deaths": now.deaths,
            "state": LIFECYCLES[last.lifecycle].code_of(last.target),
            "place": rows.STORED_PLACES[now.place],
            "due_at": _iso(now.due_at),
            "deadline_at": _iso(now.deadline_at),
            "updated_at": _iso(last.ts),
            "owner_name": None if holder is None else holder.actor,
            "owner_role": None if holder is None else holder.role.code,
            "owner_node": None if holder is None else holder.node or "",
            "held_until": _iso(now.held_until),
        }

    def _add_event(self, job: JobToRestore, one: RecordedEvent) -> None:
        event, lifecycle = one.event, LIFECYCLES[one.event.lifecycle]
        self._data.append(event.data)
        self._events.append(
            {
                "n": len(self._data),
                "job_id": event.job_id,
                "at": _iso(event.ts),
                "version": event.version,
                "actor_name": event.actor,
                "node": event.node or "",
                "epoch": event.epoch,
                "type": event_code(event.type),
                "source": lifecycle.code_of(event.source),
                "target": lifecycle.code_of(event.target),
                "generation": event.generation,
                "attempt": event.attempt,
                "role": event.role.code,
                "cause": event.cause,
                "request": one.request,
                "due_at": _iso(one.due_at),
            }
        )
        if one.dead_letter is not None:
            self._letters.append(_letter(job, event, one.dead_letter))


def _submission_json(job: JobToRestore, submission: Submission) -> dict[str, Any]:
    first = job.records[0].event
    return {
        "job_id": first.job_id,
        "created_at": _iso(first.ts),
        "correlation_id": None if first.correlation_id == first.job_id else first.correlation_id,
        "type_name": submission.type,
        "prio": int(restored_priority(job)),
        "asked_attempts": submission.max_attempts,
        "max_deaths": submission.max_deaths,
        "key_name": submission.concurrency_key,
        "key_cap": None if submission.concurrency_key is None else submission.concurrency_limit,
        "trace": submission.trace,
        "parent_id": submission.parent_id,
        "deadline_us": submission.deadline_us,
        "compensates": submission.compensates,
        **({} if submission.unique is None else _unique_json(submission.unique)),
    }


def _unique_json(unique: UniqueKey) -> dict[str, Any]:
    return {
        "unique_scope": unique.scope,
        "unique_key": unique.key,
        "unfinished": unique.unfinished,
        "unique_until": _iso(unique.until),
        "first_at": _iso(unique.first_at),
    }


def _letter(job: JobToRestore, event: Event, letter: DeadLetter) -> dict[str, Any]:
    """A dead letter, with the time its job was requeued or discarded."""
    later = (one.event for one in job.records if one.event.version > event.version)
    requeued = next((one for one in later if one.generation > event.generation or one.type == DISCARDED), None)
    holder = next((one.event for one in job.records if one.event.actor == letter.last_owner), event)
    return {
        "job_id": event.job_id,
        "version": event.version,
        "at": _iso(event.ts),
        "reason_code": letter.reason_code.value,
        "stage": letter.stage.value,
        "last_error": letter.last_error,
        "attempts": letter.attempts,
        "last_owner": letter.last_owner,
        "role": holder.role.code,
        "node": holder.node or "",
        "last_lease_expires_at": _iso(letter.last_lease_expires_at),
        "requeued_at": None if requeued is None else _iso(requeued.ts),
    }


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


# --- reading -----------------------------------------------------------------------------------------------------------


def recorded(
    events: Sequence[Event],
    beside: list[PostgresRow],
    submitted_rows: list[PostgresRow],
    keys: list[PostgresRow],
    letters: list[PostgresRow],
) -> list[RecordedEvent]:
    """Events with the data of four queries beside them. Events of removed jobs are left out."""
    rest = {(row["job_id"], row["version"]): row for row in beside}
    keys_of: dict[str, list[IdempotencyKey]] = {}
    for row in keys:
        key = IdempotencyKey(scope=row["scope"], key=row["key"], fingerprint=row["fingerprint"])
        keys_of.setdefault(row["job_id"], []).append(key)
    submissions = {row["job_id"]: _submission(row, keys_of.get(row["job_id"], [])) for row in submitted_rows}
    letter_at = {(row["job_id"], row["version"]): rows.dead_letter(row) for row in letters}
    return [
        RecordedEvent(
            event=event,
            type=rest[event.job_id, event.version]["type_name"],
            submitted_at=rest[event.job_id, event.version]["created_at"],
            submission=submissions.get(event.job_id) if event.version == 1 else None,
            due_at=rest[event.job_id, event.version]["due_at"],
            request=rest[event.job_id, event.version]["request"],
            dead_letter=letter_at.get((event.job_id, event.version)),
        )
        for event in events
        if (event.job_id, event.version) in rest
    ]


def _submission(row: PostgresRow, keys: list[IdempotencyKey]) -> Submission:
    return Submission(
        type=row["type_name"],
        priority=Priority(row["prio"]),
        max_attempts=row["max_attempts"],
        max_deaths=row["max_deaths"],
        payload=row["payload"],
        deadline_us=row["deadline_us"],
        concurrency_key=row["key_name"],
        concurrency_limit=row["key_cap"] or 1,
        trace=row["trace"],
        parent_id=None if row["parent_id"] is None else JobId(row["parent_id"]),
        compensates=row["compensates_id"],
        keys=tuple(keys),
        unique=None if row["unique_key"] is None else _unique_key(row),
    )


def _unique_key(row: PostgresRow) -> UniqueKey:
    return UniqueKey(
        scope=row["unique_scope"],
        key=row["unique_key"],
        unfinished=row["unfinished"],
        until=row["unique_until"],
        first_at=row["first_at"],
    )

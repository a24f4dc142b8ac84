"""Sorts audit records by job on disk. Records are added in any order and read back job by job, oldest job first.

Memory use is bounded for any number of records. The file has no name and disappears with the process.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trellis.documents import audit
from trellis.documents.errors import RecordInvalid
from trellis.engine.admin_acts import ACTS_MAX, AdminAct
from trellis.engine.jobs import JobId
from trellis.engine.records import Event, RecordedEvent
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.connection import open_scratch_database
from trellis.lifecycles import LIFECYCLES, Phase

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class RecordedLife:
    """One job with this id, as far as it is recorded. After retention removed a job, a later one may reuse its id."""

    job_id: JobId
    submitted_at: str
    has_ended: bool


_SPOOL_QUERIES = NamedQueries("trellis.runs:spool.sql")


_READABLE = " and ".join(map(str, sorted(audit.READABLE)))


class RecordSpool:
    """The spooled records of one rebuild. Used by one task at a time."""

    def __init__(self) -> None:
        self._db = open_scratch_database(_SPOOL_QUERIES.create_tables)

    def close(self) -> None:
        """Close the database, which deletes its file."""
        self._db.close()

    def add(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Add records. Returns how many belong to job events.

        A record that contradicts another one, or has an unknown format, marks its job as damaged. Raises RecordInvalid.
        """
        taken = 0
        self._db.execute("BEGIN")
        try:
            for one in records:
                if audit.is_of_event(one):
                    self._add(one)
                    taken += 1
                elif audit.is_of_act(one):
                    self._db.execute(
                        _SPOOL_QUERIES.add_act, (one["event_id"], json.dumps(one, ensure_ascii=False).encode())
                    )
        finally:
            self._db.execute("COMMIT")
        return taken

    def _add(self, entry: Mapping[str, Any]) -> None:
        if not audit.is_readable(entry):
            self._note_format(entry)
            return
        record = audit.read_record(entry)
        event = record.event
        job, life, version = event.job_id, audit.timestamp(record.submitted_at), event.version
        body = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()
        if self._db.execute(_SPOOL_QUERIES.differing, (job, life, version, body)).fetchall():
            self._db.execute(
                _SPOOL_QUERIES.add_damage, (job, f"two records of version {version} contradict each other")
            )
        self._db.execute(_SPOOL_QUERIES.add_record, (job, life, version, audit.timestamp(event.ts), body))
        self._db.execute(_SPOOL_QUERIES.add_life, (job, life, version, _has_ended(event)))
        for key in record.submission.keys if record.submission is not None else ():
            self._db.execute(_SPOOL_QUERIES.add_key, (key.scope, key.key, job, life))

    def _note_format(self, record: Mapping[str, Any]) -> None:
        job, format_name = record.get("job_id"), record.get("format", "none")
        if not isinstance(job, str):
            raise RecordInvalid(event=str(record.get("event_id")), problem="it names no job")
        reason = (
            f"its record of version {record['version']} has format {format_name}, and this program reads {_READABLE}"
        )
        self._db.execute(_SPOOL_QUERIES.add_damage, (job, reason))

    def add_ids(self, events: Iterable[tuple[str, str]]) -> None:
        """Add only the fact that these events are recorded: the id of each, and its timestamp or day."""
        parts = ((*event_id.rpartition("-"), at) for event_id, at in events)
        rows = [(job, at, int(version), at, None) for job, _, version, at in parts if _is_number(version)]
        self._db.executemany(_SPOOL_QUERIES.add_record, rows)

    def __contains__(self, event: Event) -> bool:
        moments = (audit.timestamp(event.ts), day(event.ts))
        return bool(self._db.execute(_SPOOL_QUERIES.is_there, (event.job_id, event.version, *moments)).fetchall())

    def __len__(self) -> int:
        return self._db.execute(_SPOOL_QUERIES.count_records).fetchall()[0][0]

    def lives(self) -> Iterator[RecordedLife]:
        """Every job without damaged records, in the order of submission."""
        job, life = "", ""
        while page := self._db.execute(_SPOOL_QUERIES.next_lives, (life, job, PAGE)).fetchall():
            yield from (RecordedLife(JobId(job), life, bool(ended)) for job, life, ended in page)
            job, life, _ = page[-1]

    def acts(self) -> Iterator[list[AdminAct]]:
        """Every administrative act, a page at a time; raises RecordInvalid."""
        last = ""
        while page := self._db.execute(_SPOOL_QUERIES.next_acts, (last, ACTS_MAX)).fetchall():
            yield [audit.read_act(json.loads(body)) for _, body in page]
            last = page[-1][0]

    def damaged(self) -> Iterator[tuple[JobId, str]]:
        """Job ids whose records are damaged, with the reason."""
        job = ""
        while page := self._db.execute(_SPOOL_QUERIES.next_damaged, (job, PAGE)).fetchall():
            yield from ((JobId(job), reason) for job, reason in page)
            job = page[-1][0]

    def records(self, job_id: JobId, submitted_at: str) -> list[RecordedEvent]:
        """Every record of one job, oldest first; raises RecordInvalid."""
        stored = self._db.execute(_SPOOL_QUERIES.records_of, (job_id, submitted_at))
        return [audit.read_record(json.loads(body)) for (body,) in stored]

    def last_life(self, job_id: JobId) -> RecordedLife | None:
        """The newest job with this id; None if none is recorded."""
        lives = self._db.execute(_SPOOL_QUERIES.last_life, (job_id,)).fetchall()
        return RecordedLife(JobId(lives[0][0]), lives[0][1], bool(lives[0][2])) if lives else None

    def rivals(self, life: RecordedLife) -> list[RecordedLife]:
        """Other recorded jobs with the same id or one of the same idempotency keys.

        A ledger holds only one of them at a time.
        """
        rivals = self._db.execute(_SPOOL_QUERIES.rivals, {"job": life.job_id, "life": life.submitted_at})
        return [RecordedLife(JobId(job), at, bool(ended)) for job, at, ended in rivals]


def day(at: datetime) -> str:
    """The form of a timestamp where only its day is known."""
    return f"{at.astimezone(UTC):%Y%m%d}"


def _has_ended(event: Event) -> bool:
    lifecycle = LIFECYCLES.get(event.lifecycle)
    state = None if lifecycle is None else lifecycle.by_name.get(event.target)
    return state is not None and state.phase is Phase.ENDED


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()

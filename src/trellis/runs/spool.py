"""Audit records sorted by job, on disk: what is read from the object store in any order is given back job by job, oldest job first.

Memory stays bounded whatever the record holds; the file has no name and goes with the process.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, LiteralString, cast

import apsw

from trellis.engine.jobs import JobId
from trellis.engine.records import Event, Recorded
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.connection import Database
from trellis.runs import audit

PAGE = 1_000
_TEMPORARY_FILE = ""
"""What SQLite takes as "a file of my own that nobody else sees"."""


class _Sql(NamedQueries, file="trellis.runs:spool.sql"):
    create_records: LiteralString
    create_jobs: LiteralString
    create_keys: LiteralString
    create_damage: LiteralString
    add_record: LiteralString
    differing: LiteralString
    add_damage: LiteralString
    damage_of: LiteralString
    is_there: LiteralString
    count_records: LiteralString
    next_jobs: LiteralString
    headless: LiteralString
    records_of: LiteralString
    take_key: LiteralString
    owner_of_key: LiteralString


class Spool:
    """One set of records. Used by one task at a time."""

    def __init__(self) -> None:
        self._connection = apsw.Connection(_TEMPORARY_FILE)
        self._db = cast("Database", self._connection)
        for pragma in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF"):
            self._db.execute(pragma).fetchall()
        for table in (_Sql.create_records, _Sql.create_jobs, _Sql.create_keys, _Sql.create_damage):
            self._db.execute(table)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def add(self, made: Iterable[Mapping[str, Any]]) -> int:
        """Take records in; how many were of a job's event. What contradicts another record is noted as damage of its job.

        Raises RecordInvalid.
        """
        taken = 0
        self._db.execute("BEGIN")
        try:
            for one in made:
                if audit.is_of_event(one):
                    self._add(one)
                    taken += 1
        finally:
            self._db.execute("COMMIT")
        return taken

    def _add(self, made: Mapping[str, Any]) -> None:
        record = audit.read(made)
        event = record.event
        job, version, at = event.job_id, event.version, audit.timestamp(event.ts)
        body = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
        if self._db.execute(_Sql.differing, (job, version, at, body)).fetchall():
            self._db.execute(_Sql.add_damage, (job, f"two records of version {version} contradict each other"))
        self._db.execute(_Sql.add_record, (job, version, at, body))
        for key in record.submission.keys if record.submission is not None else ():
            self._db.execute(_Sql.take_key, (key.scope, key.key, job, at))

    def add_ids(self, event_ids: Iterable[str]) -> None:
        """Take in only that these events are recorded."""
        parts = (event_id.rpartition("-") for event_id in event_ids)
        rows = [(job, int(version), "", None) for job, _, version in parts if version.isascii() and version.isdigit()]
        self._db.executemany(_Sql.add_record, rows)

    def __contains__(self, event: Event) -> bool:
        return bool(self._db.execute(_Sql.is_there, (event.job_id, event.version)).fetchall())

    def __len__(self) -> int:
        return self._db.execute(_Sql.count_records).fetchall()[0][0]

    def jobs(self) -> Iterator[JobId]:
        """Jobs whose first event is recorded, in the order in which they came into being."""
        at, job = "", ""
        while page := self._db.execute(_Sql.next_jobs, (at, job, PAGE)).fetchall():
            yield from (JobId(job) for _, job in page)
            at, job = page[-1]

    def headless(self) -> Iterator[JobId]:
        """Jobs of which there are records, but not of their first event."""
        job = ""
        while page := self._db.execute(_Sql.headless, (job, PAGE)).fetchall():
            yield from (JobId(job) for (job,) in page)
            job = page[-1][0]

    def records(self, job_id: JobId) -> list[Recorded]:
        """Everything recorded of a job, oldest first; raises RecordInvalid."""
        return [audit.read(json.loads(body)) for (body,) in self._db.execute(_Sql.records_of, (job_id,))]

    def damage(self, job_id: JobId) -> str | None:
        """What is wrong with the record of a job as a whole, if anything is."""
        found = self._db.execute(_Sql.damage_of, (job_id,)).fetchall()
        return found[0][0] if found else None

    def has_successor(self, record: Recorded) -> bool:
        """Whether a later job has a key of this one: then this one had been removed before that came."""
        keys = record.submission.keys if record.submission is not None else ()
        owners = [self._db.execute(_Sql.owner_of_key, (key.scope, key.key)).fetchall() for key in keys]
        return any(found and found[0][0] != record.event.job_id for found in owners)

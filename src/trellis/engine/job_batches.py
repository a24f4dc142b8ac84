"""Batches: jobs that are submitted together, and the completion job that starts once when all of them have ended.

The completion job is suspended from its submit on. Its journal names the jobs of its batch (`BATCH_ENTRY`).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId, NewJob, Submitted, check_own_ids
from trellis.lifecycles.leased_job import LEASED_JOB

BATCH_MAX = 10_000
"""The most jobs of one batch. They are submitted in one transaction."""
BATCH_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes that the payloads of one batch have together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBatch:
    """Jobs to submit in one transaction, and the job that completes them."""

    completion: NewJob
    members: tuple[NewJob, ...]
    abandon: bool = False
    """The jobs go on when the completion job is cancelled. Otherwise those that this submit created are cancelled, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSubmitted:
    """The answer to the submit of a batch: about its completion job, and about each of its jobs in order."""

    completion: Submitted
    members: tuple[Submitted, ...]


def checked_batch(completion: NewJob, members: Sequence[NewJob], *, abandon: bool = False) -> NewBatch:
    """A batch of these jobs. The completion job is their parent unless they name one, and they share its correlation id.

    The fingerprint of its idempotency key is that of the whole batch. Raises OptionInvalid.
    """
    check_batch_jobs(completion, members)
    family = {"parent_id": completion.job_id, "correlation_id": completion.correlation_id or completion.job_id}
    own = tuple(replace(job, **{name: getattr(job, name) or family[name] for name in family}) for job in members)
    if completion.fingerprint:
        digest = hashlib.sha256(completion.fingerprint)
        for job in members:
            digest.update(hashlib.sha256(job.type.encode() + b"\0" + job.payload).digest())
        completion = replace(completion, fingerprint=digest.digest())
    return NewBatch(completion=completion, members=own, abandon=abandon)


def check_batch_jobs(completion: NewJob, members: Sequence[NewJob]) -> None:
    """Check the bounds of a batch and the kinds of its jobs. Raises OptionInvalid."""
    if len(members) > BATCH_MAX:
        raise OptionInvalid(option="jobs", value=len(members), expected=f"at most {BATCH_MAX} in one batch")
    size = sum(len(job.payload) for job in (completion, *members))
    if size > BATCH_BYTES_MAX:
        expected = f"payloads of at most {BATCH_BYTES_MAX} bytes in one batch"
        raise OptionInvalid(option="jobs", value=f"{size} bytes", expected=expected)
    if completion.delay_s or completion.run_at is not None:
        expected = "leave it out: a completion job starts when the jobs of its batch have ended"
        raise OptionInvalid(option="delay_s" if completion.delay_s else "run_at", value="set", expected=expected)
    check_own_ids((completion, *members))
    for job in (completion, *members):
        if job.lifecycle != LEASED_JOB.name:
            expected = f"only jobs of the lifecycle {LEASED_JOB.name} can be in a batch"
            raise OptionInvalid(option="lifecycle", value=job.lifecycle, expected=expected)


@dataclass(frozen=True, slots=True)
class BatchMembers:
    """The jobs of a batch in the order of their submit, as the journal of its completion job names them."""

    ids: tuple[JobId, ...]
    types: tuple[str, ...]

    def runs(self) -> list[tuple[str, int]]:
        """Each type with how many jobs of it follow one another."""
        return [(type_, len(list(same))) for type_, same in groupby(self.types)]

    def body(self) -> bytes:
        """The journal entry."""
        return json.dumps({"ids": self.ids, "types": self.runs()}).encode()

    @classmethod
    def read(cls, body: bytes) -> "BatchMembers":
        """The jobs that a journal entry names."""
        entry: dict[str, Any] = json.loads(body)
        types = tuple(type_ for type_, count in entry["types"] for _ in range(count))
        return cls(tuple(JobId(job_id) for job_id in entry["ids"]), types)


def members_of(batch: NewBatch, completion: Submitted, answers: Iterable[Submitted]) -> BatchMembers:
    """The jobs of a batch that was submitted with these answers. Raises OptionInvalid if one is the completion job."""
    ids = tuple(one.job_id for one in answers)
    if completion.job_id in ids:
        expected = "another job: this key of a job names the job that completes the batch, which would wait for itself"
        raise OptionInvalid(option=f"jobs[{ids.index(completion.job_id)}]", value=completion.job_id, expected=expected)
    return BatchMembers(ids, tuple(job.type for job in batch.members))


def earlier_batch(batch: NewBatch, answer: Submitted, stored: bytes) -> BatchSubmitted:
    """The answer to a repeated submit, whose completion job exists with this journal entry.

    Jobs that have the ids of this call were created by an earlier try of the same call.
    """
    own = {job.job_id for job in batch.members}
    members = tuple(
        Submitted(job_id=job_id, created=answer.created and job_id in own) for job_id in BatchMembers.read(stored).ids
    )
    return BatchSubmitted(completion=answer, members=members)

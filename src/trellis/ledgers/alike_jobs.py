"""Recognizes new jobs that differ only in id and payload, which ledgers submit with less work for each."""

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

from trellis.engine.jobs import AlikeJobs, JobId, NewJob

_OWN_FIELDS = frozenset({"job_id", "payload", "fingerprint"})
_common_fields = attrgetter(*(field.name for field in fields(NewJob) if field.name not in _OWN_FIELDS))
_UNUSUAL = {
    "idempotency_key": None,
    "concurrency_key": None,
    "compensates": None,
    "unique": None,
    "run_at": None,
    "deadline_s": None,
    "waiting_max": None,
    "delay_s": 0.0,
    "id_is_given": False,
}
"""The fields that few jobs set, with the value of those that do not."""
_unusual_fields, _NOT_SET = attrgetter(*_UNUSUAL), tuple(_UNUSUAL.values())


def are_alike(jobs: Sequence[NewJob]) -> bool:
    """Whether jobs have no key of any kind and no time of their own, and differ only in id and payload."""
    if not jobs:
        return False
    if isinstance(jobs, AlikeJobs):
        return _unusual_fields(jobs.common) == _NOT_SET
    if _unusual_fields(jobs[0]) != _NOT_SET:
        return False
    if len(jobs) == 1:
        return True
    first = _common_fields(jobs[0])
    return all(_common_fields(job) == first for job in jobs[1:])


def join_alike(calls: Sequence[Sequence[NewJob]]) -> Sequence[NewJob] | None:
    """The jobs of calls as one list, if they have no key and differ only in id and payload."""
    jobs = calls[0]
    if not are_alike(jobs):
        return None
    if len(calls) == 1:
        return jobs
    if not isinstance(jobs, AlikeJobs):
        return None
    common = jobs.common
    ids, payloads = list[JobId](), list[bytes]()
    for call in calls:
        if not isinstance(call, AlikeJobs) or (call.common is not common and call.common != common):
            return None
        ids += call.ids
        payloads += call.payloads
    return AlikeJobs(common, ids, payloads)

"""The retry of a job whose topic does not declare that its jobs may be done twice: a new job, linked to the one before it (BUS-7, D30).

Attempts are counted over the links by a label, and the deadline is what the first job had left. Jobs of idempotent topics keep their id:
the ledger counts their attempts, and when they have ended there is none left.

Whether a job is done again was settled when it ended, by what its events say: how many attempts there were when it was handed out, and
whether its failure was worth another. So all processes agree, and a configuration that changes later opens nothing that was over.
"""

from collections.abc import Sequence
from dataclasses import replace

from trellis.bus.documents import data_of, dispatch_of
from trellis.bus.ends.derived import derived_ids, is_storable_request
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.reporting.reports import RETRYABLE, is_retryable, report_in
from trellis.bus.requests import (
    FIRST_PARENT,
    REQUEUE_CAUSE,
    RETRY_ATTEMPT,
    RETRY_OF,
    Budget,
    JobRequest,
    new_bus_job,
    request_of,
)
from trellis.bus.topics import Topic, Topics
from trellis.engine.jobs import JobId, NewJob
from trellis.engine.records import Event, Job

RETRYABLE_STATES = frozenset({"FAILED", "TIMEOUT"})
ATTEMPTS = "attempts"
"""In the event of a handing-out: how many attempts there are, as its topic was configured then."""


def retries_before(request: JobRequest) -> int:
    """How many retries led to this job, itself included."""
    said = request.labels.get(RETRY_ATTEMPT, "0")
    return int(said) if said.isascii() and said.isdigit() else 0


def attempts_of(topic: Topic) -> int:
    """How many attempts there are over linked jobs; one where a job keeps its id."""
    return 1 if topic.idempotent else topic.max_attempts


def is_retry_due(job: Job, request: JobRequest, events: Sequence[Event], topic: Topic) -> bool:
    """Whether a job with these events is done again as a new one; the caller knows whether anybody still wants it."""
    if not events or job.state not in RETRYABLE_STATES or retries_before(request) + 1 >= _attempts(events, topic):
        return False
    left_s = _remaining_s(job, events[-1])
    if left_s is not None and left_s < 0.001:
        return False
    if job.state != "TIMEOUT" and not _is_retryable_failure(events[-1], topic):
        return False
    return is_storable_request(_retry(job, request, events[-1], retries_before(request) + 1, job.job_id))


def _attempts(events: Sequence[Event], topic: Topic) -> int:
    handed_out = dispatch_of(events)
    said = None if handed_out is None else data_of(handed_out).get(ATTEMPTS)
    return said if isinstance(said, int) else attempts_of(topic)


def _is_retryable_failure(failed: Event, topic: Topic) -> bool:
    said = data_of(failed).get(RETRYABLE)
    return said if isinstance(said, bool) else is_retryable(report_in(failed), topic)


def retry_of(job: Job, request: JobRequest, ended: Event, topics: Topics) -> list[NewJob]:
    """The job that does this one again, under the ids that it may have; none when it cannot be made."""
    number = retries_before(request) + 1
    base = job.job_id.removesuffix(f".r{number - 1}") if number > 1 else job.job_id
    candidates = [_retry(job, request, ended, number, job_id) for job_id in derived_ids(base, f".r{number}")]
    left_s = _remaining_s(job, ended)
    return [
        replace(
            new_bus_job(made, topics, trace_id=job.correlation_id, trace=job.trace, compensates=job.compensates),
            deadline_s=left_s,
            idempotency_key=None,
        )
        for made in candidates
        if is_storable_request(made)
    ]


def next_id(job: Job, events: Sequence[Event], topics: Topics) -> JobId | None:
    """The id under which a job with these events is done again, unless it is cancelled or the id is taken; None when it is not."""
    try:
        request = request_of(job)
    except BusRequestInvalid:
        return None
    if not is_retry_due(job, request, events, topics.of(job.type)):
        return None
    return next((made.job_id for made in retry_of(job, request, events[-1], topics)), None)


def _retry(job: Job, request: JobRequest, ended: Event, number: int, job_id: JobId) -> JobRequest:
    said = {name: value for name, value in request.labels.items() if name != REQUEUE_CAUSE}
    labels = {**said, RETRY_OF: job.job_id, RETRY_ATTEMPT: str(number)}
    if request.step_of:
        labels[FIRST_PARENT] = request.step_of
    changes = {"job_id": job_id, "parent_job_id": job.job_id, "labels": labels, "budget": _budget(job, request, ended)}
    return request.model_copy(update=changes)


def _budget(job: Job, request: JobRequest, ended: Event) -> Budget | None:
    """With as much time as is left, where the request said how much there is."""
    left_s = _remaining_s(job, ended)
    if request.budget is None or not request.budget.deadline_ms or left_s is None:
        return request.budget
    return request.budget.model_copy(update={"deadline_ms": max(1, int(left_s * 1000))})


def _remaining_s(job: Job, ended: Event) -> float | None:
    return None if job.deadline_at is None else (job.deadline_at - ended.ts).total_seconds()

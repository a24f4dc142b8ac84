"""Retries and compensations: jobs linked to another job, with ids derived from it (BUS-7, D36).

Submitting a linked job again creates the same job.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trellis.bus.documents import dispatch_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.outcomes.attempts import RETRYABLE, is_retryable, report_in
from trellis.bus.requests import (
    COMPENSATES,
    FIRST_PARENT,
    REQUEUE_CAUSE,
    RESERVED_LABEL_PREFIX,
    RETRY_ATTEMPT,
    RETRY_OF,
    Budget,
    Compensation,
    JobMeta,
    JobRequest,
    new_bus_job,
    request_of,
)
from trellis.bus.topics import Topic, Topics
from trellis.engine.errors import IdempotencyMismatch, InputError, Refused
from trellis.engine.event_data import data_of
from trellis.engine.jobs import Actor, JobId, NewJob, RequestKey, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job

# Derived ids.

ID_CHARS_MAX = 180
"""Less than the limit for job ids, because the wire id of such a job must fit too."""
DIGEST_CHARS = 16
ALTERNATIVE_IDS_MAX = 3
"""Number of alternative ids for a linked job whose first id is taken."""
RETRY_ID = re.compile(r"\.(r[0-9]+|q-[0-9a-f]+)$")
"""Suffix of the ids of retries. Other ids may end so too. Among many children, only such ids are read."""

_log = log_of("trellis.bus.outcomes.linked_jobs")


def derived_ids(base: str, suffix: str) -> tuple[JobId, ...]:
    """The id of a linked job, and alternatives if it is too long or belongs to another job.

    Such ids are now reserved (`trellis.engine.jobs`), but a ledger may hold jobs from before that.
    """
    room = ID_CHARS_MAX - len(suffix) - DIGEST_CHARS - 1
    others = tuple(JobId(f"{base[:room]}.{_digest(base, number)}{suffix}") for number in range(ALTERNATIVE_IDS_MAX))
    plain = JobId(f"{base}{suffix}")
    return (plain, *others) if len(plain) <= ID_CHARS_MAX else others


def _digest(base: str, number: int) -> str:
    return hashlib.sha256(f"{base} {number}".encode() if number else base.encode()).hexdigest()[:DIGEST_CHARS]


def is_storable_request(request: JobRequest) -> bool:
    """Whether a derived request can be stored and read again: the added labels may be too many."""
    try:
        JobRequest.read(request.body)
    except BusRequestInvalid as error:
        _log.error("cannot_follow", job_id=request.job_id, error=str(error))
        return False
    return True


async def submit_under_free_id(
    ledger: Ledger, actor: Actor, candidates: Iterable[NewJob], *, key: RequestKey | None = None
) -> Submitted | None:
    """Submit the job under the first of its ids that no other job has. A repeated call returns the same job.

    `key` is stored with the job; raises IdempotencyMismatch.
    """
    for job in candidates:
        try:
            answer = (await ledger.submit(actor, [job], key=key))[0]
        except IdempotencyMismatch:
            raise
        except (InputError, Refused) as error:
            _log.error("cannot_follow", job_id=job.job_id, error=str(error))
            return None
        if isinstance(answer, Submitted) and (answer.created or await _is_submitted(ledger, job)):
            return answer
        _log.error("derived_id_is_taken", job_id=job.job_id, parent_id=job.parent_id)
    _log.error("cannot_follow", error="all of its ids are other jobs")
    return None


async def _is_submitted(ledger: Ledger, job: NewJob) -> bool:
    """Whether the job with this id is this one, and not another with the same fingerprint."""
    there = await ledger.job(job.job_id)
    if there is None or there.parent_id != job.parent_id or there.compensates != job.compensates:
        return False
    return (there.lifecycle, there.type, there.payload) == (job.lifecycle, job.type, job.payload)


# Retries of jobs whose topic is not idempotent: a new job, linked to the one before (BUS-7, D30).
#
# A label counts attempts over the links, and the deadline is what the first job had left. Jobs of idempotent topics
# keep their id: the ledger counts their attempts, and none are left when they have ended.
#
# Whether a job is retried is settled when it ends, by its events: the number of attempts allowed at dispatch, and
# whether the failure was retryable. So all processes agree, and a later change of configuration reopens nothing.

RETRYABLE_STATES = frozenset({"FAILED", "TIMEOUT"})
ATTEMPTS = "attempts"
"""Key in the dispatch event: the number of attempts allowed by the topic's configuration at that time."""


def retries_before(request: JobRequest) -> int:
    """How many retries led to this job, itself included."""
    number = request.labels.get(RETRY_ATTEMPT, "0")
    return int(number) if number.isascii() and number.isdigit() else 0


def attempts_of(topic: Topic) -> int:
    """The number of attempts over linked jobs; 1 where a job keeps its id."""
    return 1 if topic.idempotent else topic.max_attempts


def is_retry_due(job: Job, request: JobRequest, events: Sequence[Event], topic: Topic) -> bool:
    """Whether a job with these events is to be retried as a new one. The caller checks for a cancel."""
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
    attempts = None if handed_out is None else data_of(handed_out).get(ATTEMPTS)
    return attempts if isinstance(attempts, int) else attempts_of(topic)


def _is_retryable_failure(failed: Event, topic: Topic) -> bool:
    retryable = data_of(failed).get(RETRYABLE)
    return retryable if isinstance(retryable, bool) else is_retryable(report_in(failed), topic)


def retry_of(job: Job, request: JobRequest, ended: Event, topics: Topics) -> list[NewJob]:
    """The retry of this job, once per possible id; empty when it cannot be built."""
    number = retries_before(request) + 1
    base = job.job_id.removesuffix(f".r{number - 1}") if number > 1 else job.job_id
    candidates = [_retry(job, request, ended, number, job_id) for job_id in derived_ids(base, f".r{number}")]
    return _new_jobs(job, candidates, topics, compensates=job.compensates, deadline_s=_remaining_s(job, ended))


def _new_jobs(
    job: Job, requests: Iterable[JobRequest], topics: Topics, *, compensates: JobId | None, **changes: Any
) -> list[NewJob]:
    """The ledger jobs for requests derived from a job, without an idempotency key; requests not storable are left out."""
    return [
        replace(
            new_bus_job(request, topics, trace_id=job.correlation_id, trace=job.trace, compensates=compensates),
            idempotency_key=None,
            **changes,
        )
        for request in requests
        if is_storable_request(request)
    ]


def next_id(job: Job, events: Sequence[Event], topics: Topics) -> JobId | None:
    """The id of the retry of a job with these events, unless it is cancelled or the id is taken.

    None without a retry.
    """
    try:
        request = request_of(job)
    except BusRequestInvalid:
        return None
    if not is_retry_due(job, request, events, topics.of(job.type)):
        return None
    return next((retry.job_id for retry in retry_of(job, request, events[-1], topics)), None)


def _retry(job: Job, request: JobRequest, ended: Event, number: int, job_id: JobId) -> JobRequest:
    kept = {name: value for name, value in request.labels.items() if name != REQUEUE_CAUSE}
    labels = {**kept, RETRY_OF: job.job_id, RETRY_ATTEMPT: str(number)}
    if request.step_of:
        labels[FIRST_PARENT] = request.step_of
    changes = {"job_id": job_id, "parent_job_id": job.job_id, "labels": labels, "budget": _budget(job, request, ended)}
    return request.model_copy(update=changes)


def _budget(job: Job, request: JobRequest, ended: Event) -> Budget | None:
    """The budget, with the remaining time if the request set a deadline."""
    left_s = _remaining_s(job, ended)
    if request.budget is None or not request.budget.deadline_ms or left_s is None:
        return request.budget
    return request.budget.model_copy(update={"deadline_ms": max(1, int(left_s * 1000))})


def _remaining_s(job: Job, ended: Event) -> float | None:
    return None if job.deadline_at is None else (job.deadline_at - ended.ts).total_seconds()


# Compensation of the steps of a failed workflow: the last step first, one after the other, each once (D36).
#
# A compensation is a separate job, built from the template in the step's request. Empty fields of the template are
# taken from the step. It acts for the same tenant and principal as the step, and the safety kernel checks it like any
# job.

SUFFIX = ".c"
COMPENSATION_ID = re.compile(rf"{re.escape(SUFFIX)}$|{RETRY_ID.pattern}")
"""Suffix of the ids of compensations and their retries. Other ids may end so too."""


def compensation_of(job: Job, request: JobRequest, topics: Topics) -> list[NewJob]:
    """The compensation of this job, once per possible id; empty without a template or when it cannot be built."""
    template = request.compensation
    if template is None:
        return []
    ids = derived_ids(job.job_id, SUFFIX)
    requests = [_compensation_request(job, request, template, job_id) for job_id in ids]
    return _new_jobs(job, requests, topics, compensates=job.job_id)


def _compensation_request(job: Job, request: JobRequest, template: Compensation, job_id: JobId) -> JobRequest:
    labels = {name: value for name, value in (template.labels or request.labels).items() if not _is_ours(name)}
    own_context = bool(template.context_ptr or template.context_ref)
    return JobRequest.model_construct(
        job_id=job_id,
        topic=template.topic or request.topic,
        priority=template.priority or request.priority,
        context_ptr=template.context_ptr if own_context else request.context_ptr,
        context_ref=template.context_ref if own_context else request.context_ref,
        identity=request.identity,
        adapter_id=template.adapter_id or request.adapter_id,
        env=template.env or request.env,
        parent_job_id=job.job_id,
        memory_id=template.memory_id or request.memory_id,
        context_hints=template.context_hints or request.context_hints,
        budget=template.budget or request.budget,
        tenant_id=request.tenant_id,
        principal_id=request.principal_id,
        labels={**labels, COMPENSATES: job.job_id},
        meta=_compensation_meta(request.meta or JobMeta.model_validate({}), template.meta, job_id),
    )


def _compensation_meta(own: JobMeta, template: JobMeta | None, job_id: JobId) -> JobMeta:
    """The template's metadata, with the step's tenant and actor and at least its risk tags."""
    meta = template or own
    changes = {
        "tenant_id": own.tenant_id,
        "actor_id": own.actor_id,
        "actor_type": own.actor_type,
        "risk_tags": tuple(dict.fromkeys((*own.risk_tags, *meta.risk_tags))),
        "idempotency_key": job_id,
    }
    return meta.model_copy(update=changes)


def _is_ours(label: str) -> bool:
    return label.startswith(RESERVED_LABEL_PREFIX) or label == RETRY_OF

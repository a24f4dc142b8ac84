"""Jobs that follow from other jobs: retries and compensations, with ids derived from the job they follow."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trellis.bus.documents import data_of, dispatch_of
from trellis.bus.errors import BusRequestInvalid
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
from trellis.bus.results.reports import RETRYABLE, is_retryable, report_in
from trellis.bus.topics import Topic, Topics
from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import Actor, JobId, NewJob, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, Job

# Jobs that follow from other jobs: their ids say from which, and the same job follows however often it is made (BUS-7, D36).

ID_CHARS_MAX = 180
"""Shorter than an id may be: the wire id of such a job must fit too."""
DIGEST_CHARS = 16
ALTERNATIVE_IDS_MAX = 3
"""How many further ids there are for what follows from a job when its first id is taken."""
RETRY_ID = re.compile(r"\.(r[0-9]+|q-[0-9a-f]+)$")
"""How the ids of jobs end that do another again; others may, too. Of many children only such are read."""

_log = log_of("trellis.bus.outcomes.linked_jobs")


def derived_ids(base: str, suffix: str) -> tuple[JobId, ...]:
    """The id of what follows from a job, and those to take when that one is too long or another job's.

    Such ids are reserved now (`trellis.engine.jobs`), but a ledger may hold jobs that took one before they were.
    """
    room = ID_CHARS_MAX - len(suffix) - DIGEST_CHARS - 1
    others = tuple(JobId(f"{base[:room]}.{_digest(base, number)}{suffix}") for number in range(ALTERNATIVE_IDS_MAX))
    plain = JobId(f"{base}{suffix}")
    return (plain, *others) if len(plain) <= ID_CHARS_MAX else others


def _digest(base: str, number: int) -> str:
    return hashlib.sha256(f"{base} {number}".encode() if number else base.encode()).hexdigest()[:DIGEST_CHARS]


def is_storable_request(request: JobRequest) -> bool:
    """Whether a request that was made here can be stored and read again: labels that were added may be too many."""
    try:
        JobRequest.read(request.body)
    except BusRequestInvalid as error:
        _log.error("cannot_follow", job_id=request.job_id, error=str(error))
        return False
    return True


async def submit_under_free_id(ledger: Ledger, actor: Actor, candidates: Iterable[NewJob]) -> Submitted | None:
    """Submit the job under the first of its ids that no other job has. Again is the same job again."""
    for job in candidates:
        try:
            answer = (await ledger.submit(actor, [job]))[0]
        except (InputError, Refused) as error:
            _log.error("cannot_follow", job_id=job.job_id, error=str(error))
            return None
        if isinstance(answer, Submitted) and (answer.created or await _is_submitted(ledger, job)):
            return answer
        _log.error("derived_id_is_taken", job_id=job.job_id, parent_id=job.parent_id)
    _log.error("cannot_follow", error="all of its ids are other jobs")
    return None


async def _is_submitted(ledger: Ledger, job: NewJob) -> bool:
    """Whether the job with this id is this one, and not another that was submitted with the same fingerprint."""
    there = await ledger.job(job.job_id)
    if there is None or there.parent_id != job.parent_id or there.compensates != job.compensates:
        return False
    return (there.lifecycle, there.type, there.payload) == (job.lifecycle, job.type, job.payload)


# The retry of a job whose topic does not declare that its jobs may be done twice: a new job, linked to the one before it (BUS-7, D30).
#
# Attempts are counted over the links by a label, and the deadline is what the first job had left. Jobs of idempotent topics keep their id:
# the ledger counts their attempts, and when they have ended there is none left.
#
# Whether a job is done again was settled when it ended, by what its events say: how many attempts there were when it was handed out, and
# whether its failure was worth another. So all processes agree, and a configuration that changes later opens nothing that was over.

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


# Undoing the steps of a workflow that came to a bad end: the last one first, one after the other, each once (D36).
#
# A compensation is a job of its own, made from the template in the step's request; what the template leaves empty is as in the step. It acts
# for the same tenant and principal as the step, and is asked about by the safety kernel like any job.

SUFFIX = ".c"
COMPENSATION_ID = re.compile(rf"{re.escape(SUFFIX)}$|{RETRY_ID.pattern}")
"""How the ids of compensations end, and of what does them again; others may, too."""


def compensation_of(job: Job, request: JobRequest, topics: Topics) -> list[NewJob]:
    """The job that undoes this one, under the ids that it may have; none when there is no template or it cannot be made."""
    template = request.compensation
    if template is None:
        return []
    made = [_compensation_request(job, request, template, job_id) for job_id in derived_ids(job.job_id, SUFFIX)]
    return [
        replace(
            new_bus_job(one, topics, trace_id=job.correlation_id, trace=job.trace, compensates=job.job_id),
            idempotency_key=None,
        )
        for one in made
        if is_storable_request(one)
    ]


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
    """As the template says, but for whom it acts and how risky it is at least."""
    said = template or own
    changes = {
        "tenant_id": own.tenant_id,
        "actor_id": own.actor_id,
        "actor_type": own.actor_type,
        "risk_tags": tuple(dict.fromkeys((*own.risk_tags, *said.risk_tags))),
        "idempotency_key": job_id,
    }
    return said.model_copy(update=changes)


def _is_ours(label: str) -> bool:
    return label.startswith(RESERVED_LABEL_PREFIX) or label == RETRY_OF

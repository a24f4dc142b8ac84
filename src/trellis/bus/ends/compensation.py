"""Undoing the steps of a workflow that came to a bad end: the last one first, one after the other, each once (D36).

A compensation is a job of its own, made from the template in the step's request; what the template leaves empty is as in the step. It acts
for the same tenant and principal as the step, and is asked about by the safety kernel like any job.
"""

import re
from dataclasses import replace

from trellis.bus.ends.derived import RETRY_ID, derived_ids, is_storable_request
from trellis.bus.requests import (
    COMPENSATES,
    RESERVED_LABEL_PREFIX,
    RETRY_OF,
    Compensation,
    JobMeta,
    JobRequest,
    new_bus_job,
)
from trellis.bus.topics import Topics
from trellis.engine.jobs import JobId, NewJob
from trellis.engine.records import Job

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

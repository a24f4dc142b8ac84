"""Requeue by an operator: runs an ended bus job again as a new, linked job (D39).

The new job has fresh attempts and a fresh deadline.
"""

import hashlib
from dataclasses import dataclass

from trellis.bus.outcomes.job_tree import RETRYABLE_ENDS, SUCCEEDED, JobTree
from trellis.bus.outcomes.linked_jobs import derived_ids, retry_of, submit_under_free_id
from trellis.bus.requests import FIRST_PARENT, REQUEUE_CAUSE, RETRY_ATTEMPT, RETRY_OF, JobRequest, new_bus_job
from trellis.bus.results.reports import storable_text
from trellis.bus.topics import Topics
from trellis.engine.errors import IdempotencyMismatch, InvalidTransition
from trellis.engine.jobs import Actor, Mismatch, RequestId, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobPlace
from trellis.lifecycles import Role

DIGEST_CHARS = 12
LABELS_NOT_COPIED = frozenset({RETRY_ATTEMPT, REQUEUE_CAUSE})
"""Labels that apply only to the job that ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Successor:
    """What followed a job that failed, timed out or was denied."""

    last: Job | None
    """The last job that retried it; None while the first retry is still to be submitted."""
    due: bool
    """Whether another retry is about to be submitted."""

    @property
    def in_vain(self) -> bool:
        """Whether the retry failed for good too."""
        return (
            not self.due
            and self.last is not None
            and self.last.place is JobPlace.ENDED
            and self.last.state != SUCCEEDED
        )

    @property
    def words(self) -> str:
        """The same for people, as the middle of a sentence."""
        told = "" if self.last is None else f"it was done again as {self.last.job_id}, which is {self.last.state}"
        soon = "it is about to be done again under another id, in a moment" if self.due else ""
        return "; ".join(filter(None, (told, soon)))


async def requeue_as_new_job(
    ledger: Ledger, actor: Actor, job: Job, topics: Topics, request_id: RequestId, *, cause: str | None = None
) -> Submitted:
    """Submit the job again as a new one, with a label for the cause. A repeated request creates one job.

    If a retry is due anyway, it is submitted now, under the id it would have. Raises InvalidTransition,
    BusRequestInvalid.
    """
    by = Actor(role=Role.RECONCILER, name=actor.name)  # the only role that may use derived job ids
    if job.state not in RETRYABLE_ENDS:
        raise _refused(job, actor, f"only {', '.join(sorted(RETRYABLE_ENDS))} is run again")
    request = JobRequest.read(job.payload or b"")
    digest = hashlib.sha256(request_id.encode()).hexdigest()[:DIGEST_CHARS]
    labels = {name: value for name, value in request.labels.items() if name not in LABELS_NOT_COPIED}
    labels[RETRY_OF] = job.job_id
    if cause:
        labels[REQUEUE_CAUSE] = storable_text(cause)
    if request.step_of:
        labels[FIRST_PARENT] = request.step_of
    job_id = derived_ids(job.job_id, f".q-{digest}")[0]
    again = None if await ledger.job(job_id) is not None else await find_successor(ledger, job, topics)
    if again is not None and again.due:
        return await _submit_due_retry(ledger, by, again.last or job, topics)
    if again is not None and not again.in_vain:
        raise _refused(job, actor, again.words)
    changes = {"job_id": job_id, "parent_job_id": job.job_id, "labels": labels}
    made = JobRequest.read(request.model_copy(update=changes | {"meta": _without_idempotency_key(request)}).body)
    new = new_bus_job(made, topics, trace_id=job.correlation_id, trace=job.trace, compensates=job.compensates)
    (answer,) = await ledger.submit(by, [new])
    if isinstance(answer, Mismatch):
        raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
    return answer


async def find_successor(ledger: Ledger, job: Job, topics: Topics) -> Successor | None:
    """What followed a job, even if that failed too; None when nothing did, or the job ended otherwise."""
    standing = await JobTree(ledger=ledger, topics=topics).effective_job(job)
    if standing is None:
        return None
    last = None if standing.job.job_id == job.job_id else standing.job
    return None if last is None and not standing.to_be_retried else Successor(last=last, due=standing.to_be_retried)


async def _submit_due_retry(ledger: Ledger, actor: Actor, job: Job, topics: Topics) -> Submitted:
    """Submit the due retry now. The reconciler then finds it: it is the same job."""
    whole, events = await ledger.job(job.job_id), await ledger.events(job.job_id)
    if whole is None or whole.payload is None or not events:
        raise _refused(job, actor, "it was removed meanwhile")
    request = JobRequest.read(whole.payload)
    made = await submit_under_free_id(ledger, actor, retry_of(whole, request, events[-1], topics))
    if made is None:
        raise _refused(job, actor, "the ids of its retry are other jobs")
    return made


def _refused(job: Job, actor: Actor, reason: str) -> InvalidTransition:
    return InvalidTransition(
        job_id=job.job_id, source=job.state, target="PENDING", actor=actor.role.value, reason=reason
    )


def _without_idempotency_key(request: JobRequest) -> object:
    """The metadata without the idempotency key, which belongs to the job that ended."""
    return None if request.meta is None else request.meta.model_copy(update={"idempotency_key": ""})

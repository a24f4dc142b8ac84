"""Dead letters: list and read them, and requeue their jobs, one or many at once (DJ-12, D9)."""

from typing import Annotated, Any, Literal, Self

import pydantic
from fastapi import APIRouter, Path, Query, Response

from trellis.documents.run_documents import timestamp
from trellis.engine.jobs import JobId, Moved, NotMoved, ReasonCode
from trellis.engine.records import DeadLetter, JobFilter
from trellis.gateway.callers import Caller, InstanceOf, requires
from trellis.gateway.idempotency import IdempotentRequestOf, mark_replayed
from trellis.gateway.pages import LIMIT_DEFAULT, LIMIT_MAX, Cursor, Limit, Page, page_document
from trellis.http.shapes import DeadLetterShape, Requeued
from trellis.http_server.bodies import StrictRoute
from trellis.http_server.problems import PROBLEMS, Problem
from trellis.operations.dead_letters import dead_letters, letter_of, requeue_dead

WithLetters = Literal["leased-job", "queue-job"]
"""The lifecycles whose jobs can become dead letters."""
REQUEUE_MAX = LIMIT_MAX
WHOLE = "of the dead letters"
"""The subject of a bulk requeue, for the message of a refusal."""

router = APIRouter(tags=["dead letters"], route_class=StrictRoute)


class DeadLetterFilter(pydantic.BaseModel):
    """Dead letters by what they are about; what is left out means any."""

    model_config = pydantic.ConfigDict(extra="forbid")

    type: str | None = pydantic.Field(None, max_length=200)
    lifecycle: WithLetters | None = None
    reason_code: ReasonCode | None = None
    correlation_id: str | None = pydantic.Field(None, max_length=200)

    def to_filter(self) -> JobFilter:
        """As the ledger is asked."""
        return JobFilter(
            lifecycle=self.lifecycle,
            type=self.type,
            reason_code=self.reason_code,
            correlation_id=self.correlation_id,
        )


class DeadLetterRequeue(pydantic.BaseModel):
    """Which jobs shall run again: named, or found by a filter, the oldest first. Not both."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"filter": {"reason_code": "dependency_unavailable"}, "limit": 50}]},
    )

    job_ids: list[Annotated[str, pydantic.Field(max_length=200)]] | None = pydantic.Field(
        None, min_length=1, max_length=REQUEUE_MAX
    )
    filter: DeadLetterFilter | None = None
    limit: int = pydantic.Field(REQUEUE_MAX, ge=1, le=REQUEUE_MAX)
    reason: str | None = pydantic.Field(None, max_length=500)

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.job_ids is None) is (self.filter is None):
            raise ValueError("give either job_ids or filter; an empty filter means every dead letter")
        return self


@router.get("/dlq", response_model=Page[DeadLetterShape], responses=PROBLEMS)
async def listing(
    instance: InstanceOf,
    _: Annotated[Caller, requires("dead-letters.read")],
    type: Annotated[str | None, Query(max_length=200)] = None,  # noqa: A002 - the word of the interface
    lifecycle: Annotated[WithLetters | None, Query(description="Only jobs of this lifecycle.")] = None,
    reason_code: ReasonCode | None = None,
    correlation_id: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Dead letters that nobody requeued, newest first, of every lifecycle that has them: dead-lettered leased-jobs and DEAD queue-jobs."""
    where = JobFilter(lifecycle=lifecycle, type=type, reason_code=reason_code, correlation_id=correlation_id)
    found = await dead_letters(instance.ledger, where, limit=limit, cursor=cursor)
    return page_document([_letter(letter) for letter in found.letters], found.cursor)


@router.get("/dlq/{job_id}", response_model=DeadLetterShape, responses=PROBLEMS)
async def one(
    job_id: Annotated[str, Path(max_length=200)],
    instance: InstanceOf,
    _: Annotated[Caller, requires("dead-letters.read")],
) -> dict[str, Any]:
    """The dead letter of one job."""
    job = await instance.ledger.job(JobId(job_id))
    letter = None if job is None else await letter_of(instance.ledger, job)
    if letter is None:
        state = "is not there" if job is None else f"is {job.state}"
        raise Problem("NOT_FOUND", f"There is no dead letter of job {job_id!r}: it {state}.")
    return _letter(letter)


@router.post("/dlq/requeue", response_model=Requeued, responses=PROBLEMS)
async def requeue(
    body: DeadLetterRequeue,
    instance: InstanceOf,
    caller: Annotated[Caller, requires("jobs.requeue")],
    asked: IdempotentRequestOf,
    response: Response,
) -> dict[str, Any]:
    """Run dead-lettered jobs again; an operator's act. Those of one lifecycle are looked at in one transaction, each is answered for."""
    ledger, actor, many, why = instance.ledger, caller.actor, body.limit, body.reason
    key, replayed = asked.change(WHOLE, keeps_refusals=True), await asked.changed_before(ledger)
    if body.filter is not None:
        where = body.filter.to_filter()
        answers = await requeue_dead(ledger, actor, where, asked.request_id, limit=many, cause=why, key=key)
    else:
        chosen = [JobId(job_id) for job_id in body.job_ids or ()]
        answers = await ledger.requeue(actor, chosen, asked.request_id, limit=many, cause=why, key=key)
    replayed = replayed or any(isinstance(answer, Moved) and answer.repeated for answer in answers)
    mark_replayed(response, replayed=replayed)
    return {"items": [_answer(answer) for answer in answers]}


def _answer(answer: Moved | NotMoved) -> dict[str, Any]:
    if isinstance(answer, NotMoved):
        return {"job_id": answer.job_id, "requeued": False, "status": answer.state, "reason": answer.reason}
    return {"job_id": answer.job_id, "requeued": True, "status": answer.target, "version": answer.version}


def _letter(letter: DeadLetter) -> dict[str, Any]:
    until = letter.last_lease_expires_at
    return {
        "job_id": letter.job_id,
        "type": letter.type,
        "lifecycle": letter.lifecycle,
        "status": letter.state,
        "reason_code": letter.reason_code.value,
        "stage": letter.stage.value,
        "last_error": letter.last_error,
        "attempts": letter.attempts,
        "last_owner": letter.last_owner,
        "last_lease_expires_at": None if until is None else timestamp(until),
        "correlation_id": letter.correlation_id,
        "at": timestamp(letter.at),
        "version": letter.version,
    }

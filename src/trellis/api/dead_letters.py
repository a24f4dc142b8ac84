"""Dead letters: list and read them, and requeue their jobs (DJ-12, D9)."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.api.requests import IdempotentRequest
from trellis.engine.errors import JobNotFound
from trellis.engine.event_data import last_traceback
from trellis.engine.jobs import JobId, Moved, ReasonCode
from trellis.engine.records import DeadLetter, JobFilter
from trellis.http.pages import read_pages
from trellis.http.shapes import DeadLetterShape, Page, Requeued
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.dead_letters import DeadLetterNotFound, dead_letters, letter_of, requeue_answer, requeue_dead
from trellis.operations.doctor import without_cancelled
from trellis.storage.objects.canonical_json import timestamp

WHOLE = "of the dead letters"
"""The subject of a bulk requeue, for the message of a refusal."""


class LocalDeadLetters(ApiPart):
    """Dead letters on a ledger, with the calls of `client.dead_letters`."""

    async def list(
        self,
        *,
        type_: str | None = None,
        reason: str | None = None,
        lifecycle: str | None = None,
        correlation_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[DeadLetterShape]:
        """The dead letters that nobody requeued, newest first; as many as `limit` if there are that many."""
        where = _filter(type_, reason, lifecycle, correlation_id)
        return await read_pages(lambda size, after: self.page(where, limit=size, cursor=after), limit, cursor)

    async def page(self, where: JobFilter, *, limit: int, cursor: str | None) -> Page[DeadLetterShape]:
        """One page, which may be short although another one follows, so that reading it takes a bounded time."""
        letters = await dead_letters(self._context.ledger, where, limit=limit, cursor=cursor)
        return Page[DeadLetterShape](items=[_letter(letter) for letter in letters.letters], next_cursor=letters.cursor)

    async def get(self, job_id: str) -> DeadLetterShape:
        """The dead letter of one job; raises JobNotFound, DeadLetterNotFound."""
        job = await self._context.ledger.job(JobId(job_id))
        if job is None:
            raise JobNotFound(job_id=job_id)
        letter = await letter_of(self._context.ledger, job)
        if letter is None:
            raise DeadLetterNotFound(job_id=job_id, state=job.state)
        return _letter(letter)

    async def traceback(self, job_id: str) -> str | None:
        """The traceback of the job's last failure. Over HTTP it is in the data of the job's events."""
        return last_traceback(await self._context.ledger.events(JobId(job_id)))

    def check_requeue(self) -> None:
        """Raise NotAllowed unless the caller may requeue. A caller that sees no letters may not be one that may."""
        self._context.permit("jobs.requeue")

    async def requeue(
        self, job_ids: Sequence[str], *, reason: str | None = None, idempotency_key: str | None = None
    ) -> Requeued:
        request = self._context.request_of(idempotency_key)
        return await self.requeue_once(request, job_ids=job_ids, limit=len(job_ids), reason=reason)

    async def requeue_once(
        self,
        request: IdempotentRequest,
        *,
        job_ids: Sequence[str] = (),
        where: JobFilter | None = None,
        limit: int,
        reason: str | None,
    ) -> Requeued:
        """`requeue` for a route: the named jobs, or with `where` those that a filter finds, the oldest first."""
        actor, ledger = self._context.permit("jobs.requeue"), self._context.changes
        key, replayed = request.change(WHOLE, keeps_refusals=True), await request.changed_before(ledger)
        if where is not None:
            answers = await requeue_dead(ledger, actor, where, request.request_id, limit=limit, cause=reason, key=key)
        else:
            chosen = [JobId(job_id) for job_id in job_ids]
            answers = await ledger.requeue(actor, chosen, request.request_id, limit=limit, cause=reason, key=key)
        request.note(replayed=replayed or any(isinstance(one, Moved) and one.repeated for one in answers))
        return Requeued(items=[requeue_answer(answer) for answer in answers])

    async def count_failed(self, *, type_: str | None, correlation_id: str | None, limit: int) -> int:
        """How many jobs of the job queue failed and wait for an operator without a dead letter; at most `limit`."""
        where = replace(_filter(type_, None, QUEUE_JOB.name, correlation_id), state="FAILED")
        return len(without_cancelled((await self._context.ledger.jobs(where, limit=limit)).jobs))


def _filter(type_: str | None, reason: str | None, lifecycle: str | None, correlation_id: str | None) -> JobFilter:
    code = None if reason is None else ReasonCode(reason)
    return JobFilter(type=type_, reason_code=code, lifecycle=lifecycle, correlation_id=correlation_id)


def _letter(letter: DeadLetter) -> DeadLetterShape:
    until = letter.last_lease_expires_at
    times = {"at": timestamp(letter.at), "last_lease_expires_at": None if until is None else timestamp(until)}
    return DeadLetterShape.model_validate({**asdict(letter), **times, "status": letter.state})

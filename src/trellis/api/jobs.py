"""Jobs of every lifecycle: list and read them (DJ-13, D62).

Answers are rows of the ledger. The gateway makes the documents of its interface of them; commands print more of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trellis.api.approvals import LocalApprovals
from trellis.api.context import LIMIT_DEFAULT, ApiContext
from trellis.auth.matrices import permit
from trellis.auth.ownership import may_see, permit_on_job, sees_all
from trellis.bus.documents import context_pointer, hold_of, result_pointer
from trellis.bus.pointers import PointerPart
from trellis.engine.errors import JobNotFound, Refused
from trellis.engine.jobs import JobId
from trellis.engine.records import DeadLetter, Event, Job, JobFilter, JobPlace, Signal
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.operations.dead_letters import letter_of
from trellis.operations.explain import HOLD_PHRASES, rate_phrase

READ, READ_NLM = "jobs.read", "nlm.read"
SIGNALS_MAX = 20
HOLDS_READ_MAX = 50
ROUNDS_MAX = 10
"""How many ledger pages may be read for one page of a listing that filters some jobs out."""
JSON, BYTES = "application/json", "application/octet-stream"

RowT = TypeVar("RowT")


class JobContentMissing(Refused):
    """{detail}"""

    code = "NOT_FOUND"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPage(Generic[RowT]):
    """Some of the rows; `next_cursor` asks for more, None at the end."""

    items: Sequence[RowT]
    next_cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeJob:
    """A job with everything that the ledger has about it."""

    job: Job
    result: bytes | None
    events: Sequence[Event]
    signals: Sequence[Signal]
    """Its last log lines and signs of progress."""
    letter: DeadLetter | None


class LocalJobs(LocalApprovals):
    """Jobs on a ledger, with the calls of `client.jobs`."""

    def __init__(self, context: ApiContext, *, among: Collection[str] | None = None) -> None:
        super().__init__(context)
        self._among = among

    def only(self, lifecycles: Collection[str]) -> "LocalJobs":
        """The jobs of these lifecycles; no other is found."""
        return LocalJobs(self._context, among=lifecycles)

    async def list(
        self,
        *,
        lifecycle: str | None = None,
        type_: str | None = None,
        status: str | None = None,
        correlation_id: str | None = None,
        parent_id: str | None = None,
        concurrency_key: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> RowPage[Job]:
        """Jobs that the caller may read, newest first. A page may be short and still have a next one."""
        if lifecycle == NLM_JOB.name:
            permit(self._context.reader, READ_NLM)
        where = JobFilter(
            lifecycle=lifecycle,
            type=type_,
            state=status,
            correlation_id=correlation_id,
            parent_id=None if parent_id is None else JobId(parent_id),
            concurrency_key=concurrency_key,
        )
        found: list[Job] = []
        for _ in range(ROUNDS_MAX):
            page = await self._context.ledger.jobs(where, limit=limit - len(found), cursor=cursor)
            found += [job for job in page.jobs if await self._is_shown(job)]
            cursor = page.cursor
            if cursor is None or len(found) == limit:
                break
        return RowPage(items=found, next_cursor=cursor)

    async def _is_shown(self, job: Job) -> bool:
        reader = self._context.reader
        if not self._is_among(job) or (job.lifecycle == NLM_JOB.name and not sees_all(reader, READ_NLM)):
            return False
        return await may_see(reader, READ, self._context.ledger, job)

    def _is_among(self, job: Job) -> bool:
        return self._among is None or job.lifecycle in self._among

    async def find(self, job_id: str, rule: str = READ) -> Job:
        """One job; raises NotAllowed before JobNotFound. NLM jobs are for operators even in a shared ledger (D42)."""
        job = await self._context.ledger.job(JobId(job_id))
        job = job if job is not None and self._is_among(job) else None
        await permit_on_job(self._context.reader, rule, self._context.ledger, job)
        if job is None:
            raise JobNotFound(job_id=job_id)
        if job.lifecycle == NLM_JOB.name and rule == READ:
            permit(self._context.reader, READ_NLM)
        return job

    async def get(self, job_id: str) -> WholeJob:
        """One job with everything that the ledger has about it."""
        job, ledger = await self.find(job_id), self._context.ledger
        return WholeJob(
            job=job,
            result=await ledger.result(job.job_id),
            events=await ledger.events(job.job_id),
            signals=await ledger.signals(job.job_id, limit=SIGNALS_MAX),
            letter=await letter_of(ledger, job),
        )

    async def signals(self, job_id: str) -> Sequence[Signal]:
        """The last log lines and signs of progress of a job, oldest first, as long as they are retained."""
        job = await self.find(job_id)
        return await self._context.ledger.signals(job.job_id, limit=SIGNALS_MAX)

    async def holds(self, jobs: Sequence[Job]) -> dict[JobId, str]:
        """What jobs on topics wait for, and ready jobs whose type has a rate limit. The events of jobs on topics tell it, so only the first ones of a long list are looked up."""
        places = {JobPlace.SCHEDULED, JobPlace.READY}
        waiting = [job for job in jobs if job.lifecycle == BUS_JOB.name and job.place in places][:HOLDS_READ_MAX]
        events = await self._context.ledger.events_of([job.job_id for job in waiting]) if waiting else {}
        holds = {job.job_id: hold_of(job, events.get(job.job_id, [])) for job in waiting}
        found = {job_id: HOLD_PHRASES.get(hold.kind, hold.kind) for job_id, hold in holds.items() if hold is not None}
        return {**found, **await self._rates(jobs)}

    async def _rates(self, jobs: Sequence[Job]) -> dict[JobId, str]:
        """The ready jobs whose type has a rate limit; none for a reader who sees its own jobs only."""
        ready = [job for job in jobs if job.place is JobPlace.READY and job.lifecycle == LEASED_JOB.name]
        if not ready or not sees_all(self._context.reader, READ):
            return {}
        rates = {queue.type: rate_phrase(queue) for queue in await self._context.ledger.queues()}
        return {job.job_id: rate for job in ready if (rate := rates.get(job.type)) is not None}

    async def result(self, job_id: str) -> bytes:
        """The result of a job; raises JobContentMissing."""
        return (await self.typed_result(job_id))[0]

    async def typed_result(self, job_id: str) -> tuple[bytes, str]:
        """The result of a job, and its media type. Of a job on a topic, the bytes at its `result_ptr`."""
        job, ledger = await self.find(job_id), self._context.ledger
        body, media_type = await ledger.result(job.job_id), JSON
        pointer = result_pointer(await ledger.events(job.job_id)) if job.lifecycle == BUS_JOB.name else None
        if pointer is not None:
            pointers = await self._context.pointers()
            body, media_type = await pointers.read(pointer, part=PointerPart.RESULT), BYTES
        if body is None:
            raise JobContentMissing(detail=f"Job {job_id[:200]} is {job.state} and has no result.")
        return body, media_type

    async def context(self, job_id: str) -> bytes:
        """What the worker of a job on a topic is given: the bytes at its pointer. Raises JobContentMissing.

        Who submits a job may write any pointer. What is kept under a name that somebody chose may be another's, and is
        only for those who decide about held jobs.
        """
        job = await self.find(job_id)
        on_topic = job.lifecycle == BUS_JOB.name
        pointer = context_pointer(job, await self._context.ledger.events(job.job_id)) if on_topic else None
        if pointer is None:
            where = "has none" if on_topic else f"is a {job.lifecycle}: its payload is in the job"
            raise JobContentMissing(detail=f"Only a job on a topic has a context; {job_id[:200]} {where}.")
        pointers = await self._context.pointers()
        if not pointers.may_be_kept_here(pointer, part=PointerPart.CONTEXT):
            permit(self._context.reader, "jobs.approve")
        return await pointers.read(pointer, part=PointerPart.CONTEXT)
